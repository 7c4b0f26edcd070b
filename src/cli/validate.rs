//! `flux-distribute validate`: what an API server, the planner or the solver would refuse, before they do.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::json;

use super::{BAD_INPUT, Failure, print};
use api::{Finding, FluxInstanceSpec, by_line};
use model::{
    effect::{Change, changes},
    read::{Documents, nothing_of_ours, read},
};
use packages::OutputFormat;

const ABOUT: &str = "\
FILE holds a FluxInstance, its spec alone, or several documents, of which those of kind FluxInstance and
ConfigMap flux-default are checked: deploy/daemonset-installer.yaml is fine. Packages are not looked for,
and bundles not read.

Exit code: 0 valid, 2 not: every finding is a line, FILE:LINE: FIELD: what is wrong.";

/// What to check.
#[derive(Args, Debug, Clone)]
#[command(after_help = ABOUT)]
pub struct ValidateArguments {
    /// The file, YAML or JSON
    file: PathBuf,
    /// Say what would change, and when: a FluxInstance in a file, such as `kubectl get fxi flux -o yaml` shows it
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Form
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Checks the file and prints what it found.
pub(super) fn validate(arguments: &ValidateArguments) -> Result<ExitCode, Failure> {
    let ValidateArguments { file, against, output } = arguments;
    let (documents, findings) = look(&text_of(file)?);
    let changes = match (against, documents.specs.last()) {
        (Some(against), Some(new)) => new.spec.as_ref().map(|new| spec_of(against).map(|old| changes(&old, new))),
        _ => None,
    };
    let report = Report { file, findings, others: documents.others, changes: changes.transpose()? };
    match output {
        OutputFormat::Json => print(&report.json()).map(drop)?,
        OutputFormat::Text => report.tell()?,
    };
    Ok(if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(BAD_INPUT) })
}

/// Everything in the text, and everything that is wrong with it.
fn look(text: &str) -> (Documents, Vec<Finding>) {
    match read(text) {
        Err(not_yaml) => (Documents::default(), vec![not_yaml]),
        Ok(documents) if documents.specs.is_empty() => {
            let finding = nothing_of_ours(&documents.others);
            (documents, vec![finding])
        }
        Ok(documents) => {
            let findings = documents.specs.iter().flat_map(|document| document.findings.clone()).collect();
            (documents, findings)
        }
    }
}

/// Of an instance that is there already: today's rules need not have been those that it was made under.
fn spec_of(file: &Path) -> Result<FluxInstanceSpec, Failure> {
    let (mut documents, findings) = look(&text_of(file)?);
    let spec = documents.specs.pop().and_then(|document| document.spec);
    spec.ok_or_else(|| Failure::bad_input(by_line(file, &findings)))
}

fn text_of(file: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(file).map_err(|error| Failure::bad_input(format!("{}: {error}", file.display())))
}

struct Report<'a> {
    file: &'a Path,
    findings: Vec<Finding>,
    others: Vec<String>,
    /// None unless a comparison was asked for.
    changes: Option<Vec<Change>>,
}

impl Report<'_> {
    fn json(&self) -> String {
        let mut json = json!({
            "file": self.file,
            "valid": self.findings.is_empty(),
            "findings": self.findings,
            "notLookedAt": self.others,
        });
        if let Some(changes) = &self.changes {
            let change = |change: &Change| json!({"field": format!("spec.{}", change.field), "effect": change.effect.to_string()});
            json["changes"] = changes.iter().map(change).collect();
        }
        format!("{json:#}\n")
    }

    fn tell(&self) -> Result<(), Failure> {
        if !self.findings.is_empty() {
            let written = writeln!(std::io::stderr(), "{}", by_line(self.file, &self.findings));
            return written.map_err(|error| Failure::new(&error));
        }
        let mut text = match self.changes.as_deref() {
            None => "valid\n".to_owned(),
            Some([]) => "nothing would change\n".to_owned(),
            Some(changes) => {
                changes.iter().map(|change| format!("spec.{}: {}\n", change.field, change.effect)).collect()
            }
        };
        if !self.others.is_empty() {
            text.push_str(&format!("not looked at: {}\n", self.others.join(", ")));
        }
        print(&text).map(drop)
    }
}
