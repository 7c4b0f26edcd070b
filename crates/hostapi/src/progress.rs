//! Progress of a long order, as the stage reports it.

use serde::{Deserialize, Serialize};

/// How far a long order has come.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The phase, such as `linking packages`.
    pub what: String,
    /// Units of the phase that are done.
    pub done: u64,
    /// Units in all; 0 if unknown.
    pub total: u64,
    /// Packages, if the phase counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packages: Option<Tally>,
    /// Bytes, if the phase moves them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Tally>,
    /// What failed and is being retried, in words; cleared once work continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A count and its total.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How much is done.
    pub done: u64,
    /// How much there is in all; 0 if unknown.
    pub total: u64,
}

impl Tally {
    /// What is still to come; 0 where that is unknown.
    pub fn left(self) -> u64 {
        self.total.saturating_sub(self.done)
    }
}

impl Progress {
    /// A phase of unknown length.
    pub fn begun(what: &str) -> Self {
        Self { what: what.to_owned(), ..Self::default() }
    }

    /// A phase that counts packages.
    pub fn packages(what: &str, done: u64, total: u64) -> Self {
        Self { packages: Some(Tally { done, total }), ..Self::counted(what, done, total) }
    }

    /// A phase that counts bytes.
    pub fn bytes(what: &str, done: u64, total: u64) -> Self {
        Self { bytes: Some(Tally { done, total }), ..Self::counted(what, done, total) }
    }

    fn counted(what: &str, done: u64, total: u64) -> Self {
        Self { what: what.to_owned(), done, total, ..Self::default() }
    }

    /// Adds the bytes to a phase that counts packages.
    pub fn with_bytes(self, done: u64, total: u64) -> Self {
        Self { bytes: Some(Tally { done, total }), ..self }
    }

    /// Adds the packages to a phase that counts bytes.
    pub fn with_packages(self, done: u64, total: u64) -> Self {
        Self { packages: Some(Tally { done, total }), ..self }
    }
}
