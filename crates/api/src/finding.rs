//! One thing that is wrong with what somebody has written, in a form that every door can show.

use std::{fmt, path::Path};

use serde::Serialize;

/// One thing that is wrong with an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Path from the object's root, such as `spec.packages.specs[1]`; empty if it is the object as a whole.
    pub field: String,
    /// Line in the file, counted from 1. None if the object came from no file, or the field is not in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// What is wrong with the field; begins so that it can follow the field's path and a colon.
    pub problem: String,
    /// What to write instead, if the problem does not say it already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// What it means is clear all the same: an instance that an older version took it from is served on.
    #[serde(skip)]
    pub is_servable: bool,
}

impl Finding {
    /// A finding without a line and without a remedy.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), line: None, problem: problem.into(), remedy: None, is_servable: false }
    }

    /// The same; see [`Finding::is_servable`].
    #[must_use]
    pub fn servable(self) -> Self {
        Self { is_servable: true, ..self }
    }

    /// The same, with what to write instead.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// True if `other` is about the same field or about one inside of it.
    pub fn covers(&self, other: &Self) -> bool {
        let rest = other.field.strip_prefix(&self.field);
        rest.is_some_and(|rest| self.field.is_empty() || rest.is_empty() || rest.starts_with(['.', '[']))
    }
}

/// Without the line: whoever has a file writes `FILE:LINE: ` before it.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.problem)?;
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, ": {remedy}"))
    }
}

/// All findings as one line, for a condition, an Event, or an API server's answer.
pub fn in_one_line(findings: &[Finding]) -> String {
    let told = |finding: &Finding| match finding.line {
        Some(line) => format!("line {line}: {finding}"),
        None => finding.to_string(),
    };
    findings.iter().map(told).collect::<Vec<_>>().join("; ")
}

/// One line for each finding in a file, as compilers write them: `FILE:LINE: finding`.
pub fn by_line(file: &Path, findings: &[Finding]) -> String {
    let file = file.display();
    let told = |finding: &Finding| match finding.line {
        Some(line) => format!("{file}:{line}: {finding}"),
        None => format!("{file}: {finding}"),
    };
    findings.iter().map(told).collect::<Vec<_>>().join("\n")
}
