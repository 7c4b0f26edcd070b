//! The result of checking an installed environment, and of mending it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use base::words::visible;

/// The result of checking one environment.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Verified {
    /// Its directory.
    pub path: PathBuf,
    /// Digest of the package set that it was installed from.
    pub digest: String,
    /// Files that were hashed.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What differs from what was installed, in the order of the paths; empty if the environment is intact.
    pub differences: Vec<Difference>,
}

/// One thing that is not as it was installed.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// Relative to the environment's directory.
    pub path: PathBuf,
    /// In which way.
    pub what: What,
}

/// In which way something differs.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub enum What {
    /// It is gone.
    Missing,
    /// Its content differs or, for a symlink, its target.
    Changed,
    /// It is a file where a symlink was, or the like.
    Replaced,
    /// It can't be read, or nothing there is believed because the directory belongs to another user.
    Unreadable,
    /// No installed package lists it.
    Extra,
    /// It has other permissions.
    Mode,
    /// Another user owns it.
    Owner,
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => "missing",
            Self::Changed => "changed",
            Self::Replaced => "replaced",
            Self::Unreadable => "unreadable",
            Self::Extra => "extra",
            Self::Mode => "mode",
            Self::Owner => "owner",
        })
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A name may hold anything, and must stay one line.
        write!(f, "{} {}", self.what, visible(&self.path.to_string_lossy()))
    }
}

/// What became of the damage.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Mended {
    /// What is as it was installed again.
    pub mended: Vec<Difference>,
    /// What is not: files that no package brought, and what could not be replaced.
    pub left: Vec<Difference>,
}
