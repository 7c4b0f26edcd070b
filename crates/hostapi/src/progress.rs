//! How far a long order is: what the stage tells while it works.

use serde::{Deserialize, Serialize};

/// How far a long order is.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The phase: what is being done, such as `linking packages`.
    pub what: String,
    /// So much of the phase …
    pub done: u64,
    /// … of so much; 0 where unknown.
    pub total: u64,
    /// Packages, where the phase goes by them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packages: Option<Tally>,
    /// Bytes, where the phase moves them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Tally>,
    /// What has failed and is tried again, in words, until it goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// How much of how much.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// So much …
    pub done: u64,
    /// … of so much; 0 where unknown.
    pub total: u64,
}

impl Tally {
    /// What is still to come; 0 where that is unknown.
    pub fn left(self) -> u64 {
        self.total.saturating_sub(self.done)
    }
}

impl Progress {
    /// A phase of which nobody knows how long it takes.
    pub fn begun(what: &str) -> Self {
        Self { what: what.to_owned(), ..Self::default() }
    }

    /// A phase that goes by packages.
    pub fn packages(what: &str, done: u64, total: u64) -> Self {
        Self { packages: Some(Tally { done, total }), ..Self::counted(what, done, total) }
    }

    /// A phase that goes by bytes.
    pub fn bytes(what: &str, done: u64, total: u64) -> Self {
        Self { bytes: Some(Tally { done, total }), ..Self::counted(what, done, total) }
    }

    fn counted(what: &str, done: u64, total: u64) -> Self {
        Self { what: what.to_owned(), done, total, ..Self::default() }
    }

    /// The bytes beside the packages.
    pub fn with_bytes(self, done: u64, total: u64) -> Self {
        Self { bytes: Some(Tally { done, total }), ..self }
    }

    /// The packages beside the bytes.
    pub fn with_packages(self, done: u64, total: u64) -> Self {
        Self { packages: Some(Tally { done, total }), ..self }
    }
}
