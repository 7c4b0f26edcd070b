//! One problem in an object that a user wrote. The command line, the admission check and the planner all report
//! problems in this form.

use std::{fmt, path::Path};

use serde::Serialize;

/// One thing that is wrong with an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Path from the object's root, such as `spec.packages.specs[1]`; empty if the finding is about the whole object.
    pub field: String,
    /// Line in the file, counted from 1. None if the object didn't come from a file, or the file doesn't contain the
    /// field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// What is wrong with the field, phrased to follow the field's path and a colon.
    pub problem: String,
    /// What to write instead, if the problem does not say it already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The value is wrong, but its meaning is clear, and older versions accepted it: the planner keeps serving an
    /// instance that has it.
    #[serde(skip)]
    pub is_servable: bool,
}

impl Finding {
    /// A finding without a line and without a remedy.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), line: None, problem: problem.into(), remedy: None, is_servable: false }
    }

    /// Marks the finding as servable; see [`Finding::is_servable`].
    #[must_use]
    pub fn servable(self) -> Self {
        Self { is_servable: true, ..self }
    }

    /// Adds what to write instead.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// True if `other` is about the same field or a field inside it.
    pub fn covers(&self, other: &Self) -> bool {
        let rest = other.field.strip_prefix(&self.field);
        rest.is_some_and(|rest| self.field.is_empty() || rest.is_empty() || rest.starts_with(['.', '[']))
    }
}

/// Leaves out the line; see [`by_line`] for findings in a file.
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
    let text = |finding: &Finding| match finding.line {
        Some(line) => format!("line {line}: {finding}"),
        None => finding.to_string(),
    };
    findings.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// One line for each finding in a file, as compilers write them: `FILE:LINE: finding`.
pub fn by_line(file: &Path, findings: &[Finding]) -> String {
    let file = file.display();
    let text = |finding: &Finding| match finding.line {
        Some(line) => format!("{file}:{line}: {finding}"),
        None => format!("{file}: {finding}"),
    };
    findings.iter().map(text).collect::<Vec<_>>().join("\n")
}
