//! `flux-distribute validate`: reports what the API server, the planner or the solver would refuse, before they do.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::json;

use super::{
    BAD_INPUT, Failure,
    input::{is_stdin, shown, text_of},
    print,
};
use api::{Finding, FluxInstanceSpec, by_line};
use model::{
    effect::{Change, changes},
    read::{Documents, nothing_of_ours, read},
};
use packages::OutputFormat;

const ABOUT: &str = "\
FILE may hold

- a FluxInstance, as `kubectl get fxi flux -o yaml` prints it
- only its spec: `spec:` and the fields below it, or the bare fields, such as the one line `size: 4`
- several documents, or a List. Those of kind FluxInstance and ConfigMap flux-default are checked, so
  deploy/daemonset-installer.yaml works too.

The same holds for the file of --against. The command does not look up packages and does not read bundles.

Exit code: 0 if the file is valid, else 2 with one line per finding, FILE:LINE: FIELD: what is wrong.";

/// Most objects that were not checked and are named to people; programs get all of them. An installer has some thirty.
const MOST_NAMED: usize = 4;

/// What to check.
#[derive(Args, Debug, Clone)]
#[command(after_help = ABOUT)]
pub struct ValidateArguments {
    /// The file, YAML or JSON; - reads stdin
    file: PathBuf,
    /// Show what would change, and when, against the FluxInstance in this file, such as the output of `kubectl get fxi
    /// flux -o yaml`; - reads stdin. A field that only this file sets counts as removed
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Checks the file and prints what it found.
pub(super) fn validate(arguments: &ValidateArguments) -> Result<ExitCode, Failure> {
    let ValidateArguments { file, against, output } = arguments;
    if is_stdin(file) && against.as_deref().is_some_and(is_stdin) {
        return Err(Failure::bad_input(
            "both files are -, but stdin can be read only once: name one of them".to_owned(),
        ));
    }
    let (documents, findings) = check(&text_of(file)?);
    let changes = match (against, documents.specs.last()) {
        (Some(against), Some(new)) => new.spec.as_ref().map(|new| spec_of(against).map(|old| changes(&old, new))),
        _ => None,
    };
    let specs = &documents.specs;
    let sets_nothing = specs.iter().all(|document| document.spec == Some(FluxInstanceSpec::default()));
    let report =
        Report { file: shown(file), findings, others: documents.others, changes: changes.transpose()?, sets_nothing };
    match output {
        OutputFormat::Json => print(&report.json()).map(drop)?,
        OutputFormat::Text => report.print()?,
    }
    Ok(if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(BAD_INPUT) })
}

/// Every document in the text, and every error in them.
fn check(text: &str) -> (Documents, Vec<Finding>) {
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

/// The spec of an instance that exists already: it may break today's rules and still be compared. The findings are
/// printed, because a field that this version doesn't know takes no part in the comparison.
fn spec_of(file: &Path) -> Result<FluxInstanceSpec, Failure> {
    let (mut documents, findings) = check(&text_of(file)?);
    let findings = by_line(shown(file), &findings);
    let Some(spec) = documents.specs.pop().and_then(|document| document.spec) else {
        return Err(Failure::bad_input(findings));
    };
    if !findings.is_empty() {
        writeln!(io::stderr(), "{findings}").map_err(|error| Failure::new(&error))?;
    }
    Ok(spec)
}

struct Report<'a> {
    file: &'a Path,
    findings: Vec<Finding>,
    others: Vec<String>,
    /// None if no comparison was asked for.
    changes: Option<Vec<Change>>,
    /// True for a file whose specs are empty.
    sets_nothing: bool,
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
            let change = |Change { field, effect, is_removed }: &Change| json!({"field": format!("spec.{field}"), "effect": effect.to_string(), "removed": is_removed});
            json["changes"] = changes.iter().map(change).collect();
        }
        format!("{json:#}\n")
    }

    fn print(&self) -> Result<(), Failure> {
        if !self.findings.is_empty() {
            let written = writeln!(io::stderr(), "{}", by_line(self.file, &self.findings));
            return written.map_err(|error| Failure::new(&error));
        }
        let mut text = match self.changes.as_deref() {
            None if self.sets_nothing => "valid; it sets no field, so each has its default\n".to_owned(),
            None => "valid\n".to_owned(),
            Some([]) => "nothing would change\n".to_owned(),
            Some(changes) => changes.iter().map(|change| format!("{change}\n")).collect(),
        };
        if !self.others.is_empty() {
            text.push_str(&format!("not checked: {}\n", some(&self.others)));
        }
        print(&text).map(drop)
    }
}

/// The first names, and how many others there are. Pure.
fn some(names: &[String]) -> String {
    let (shown, others) = names.split_at(names.len().min(MOST_NAMED));
    let others = if others.is_empty() { String::new() } else { format!(", and {} more", others.len()) };
    shown.join(", ") + &others
}
