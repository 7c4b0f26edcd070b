//! Whether an environment still is what was installed: every file is hashed again and held against its records.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    ENVIRONMENT_MARKER, archive,
    environment::{marker, ready},
    records::{RECORDS, Records, Tree, by_packages, can_be_told, digests},
};
use crate::host::{Refusal, VerifyOrder};

/// One environment, looked at.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Verified {
    /// Its directory.
    pub path: PathBuf,
    /// Its digest.
    pub digest: String,
    /// Files that were hashed.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What is not as it was installed, by path; empty: nothing.
    pub differences: Vec<Difference>,
}

/// One thing that is not as it was installed.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// Below the environment.
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
    /// It has another content, or, a symlink, another target.
    Changed,
    /// It is a file where a symlink was, or the like.
    Replaced,
    /// It can't be read.
    Unreadable,
    /// It is in no record.
    Extra,
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Missing => "missing",
            Self::Changed => "changed",
            Self::Replaced => "replaced",
            Self::Unreadable => "unreadable",
            Self::Extra => "extra",
        })
    }
}

/// Looks at the environment that `order` names, or at all that are ready.
///
/// # Errors
/// There is nothing that could be looked at.
pub fn verify(order: &VerifyOrder) -> Result<Vec<Verified>, Refusal> {
    let envs = order.prefix.join("envs");
    let digests = match &order.digest {
        Some(digest) if !archive::is_digest(digest) => {
            return Err(Refusal::new(format!("`{digest}` is not the digest of a package set")));
        }
        Some(digest) => vec![digest.clone()],
        None => ready(&order.prefix),
    };
    if digests.is_empty() {
        return Err(Refusal::new(format!("there is no environment in {}", envs.display())));
    }
    digests.iter().map(|digest| verify_one(&order.prefix, digest)).collect()
}

fn verify_one(prefix: &Path, digest: &str) -> Result<Verified, Refusal> {
    let path = prefix.join("envs").join(digest);
    let name = path.display();
    if !path.is_dir() {
        let there = ready(prefix).join(", ");
        let there = if there.is_empty() { "none" } else { &there };
        return Err(Refusal::new(format!("there is no environment {name}; there is {there}")));
    }
    let unreadable = |error: std::io::Error| Refusal::new(format!("can't read {name}: {error}"));
    let tree = Tree::walk(&path).map_err(unreadable)?;
    let mut differences = Vec::new();
    let mut differs = |path: &Path, what| differences.push(Difference { path: path.to_owned(), what });
    let marker = marker(prefix, digest);
    if marker.is_none() {
        let there = fs::symlink_metadata(path.join(ENVIRONMENT_MARKER)).is_ok();
        differs(Path::new(ENVIRONMENT_MARKER), if there { What::Changed } else { What::Missing });
    }
    let records = match Records::read(&path) {
        Ok(records) => Some(records),
        Err(_) if !tree.files.contains_key(Path::new(RECORDS)) => None,
        Err(_) => {
            differs(Path::new(RECORDS), What::Changed);
            None
        }
    };
    let conda = marker.is_none_or(|marker| marker.compiled_prefix.is_none());
    let (told, broken) = if conda { by_packages(&path, &tree) } else { Default::default() };
    let mut expected: BTreeMap<_, _> = told.into_iter().map(|(path, told)| (path, told.sha256)).collect();
    if expected.is_empty() && records.is_none() && broken.is_empty() {
        return Err(Refusal::new(format!(
            "{name} has no records that it could be held against; it was made by an older version"
        )));
    }
    for record in &broken {
        differs(record, What::Changed);
    }
    let records = match records {
        Some(records) => records,
        // Of an older version: the packages' own records are all there is, and nothing tells whether they are whole.
        None => Records {
            files: tree
                .files
                .keys()
                .filter(|path| path.starts_with("conda-meta"))
                .map(|path| (path.clone(), String::new()))
                .collect(),
            links: tree.links.clone(),
        },
    };
    expected.extend(records.files.into_iter().map(|(path, digest)| (path, Some(digest).filter(|d| !d.is_empty()))));

    let mut hashed = Vec::new();
    for path in expected.keys().chain(records.links.keys()) {
        let is_link = records.links.get(path);
        match (tree.files.contains_key(path), tree.links.get(path)) {
            (true, _) if is_link.is_none() => hashed.push(path.clone()),
            (false, Some(target)) if is_link.is_some() => {
                if is_link != Some(target) {
                    differs(path, What::Changed);
                }
            }
            (false, None) if tree.directories.contains(path) && expected.get(path) == Some(&None) => {}
            (false, None) if !tree.directories.contains(path) && !tree.others.contains(path) => {
                differs(path, What::Missing);
            }
            _ => differs(path, What::Replaced),
        }
    }
    let known = |path: &Path| expected.contains_key(path) || records.links.contains_key(path) || is_ours(path);
    let links = tree.links.iter().filter(|(_, target)| can_be_told(target)).map(|(path, _)| path);
    let there = tree.files.keys().chain(links).chain(&tree.others);
    for path in there.filter(|path| can_be_told(path) && !known(path)) {
        differs(path, What::Extra);
    }
    let bytes = hashed.iter().filter_map(|path| tree.files.get(path)).map(|file| file.len()).sum();
    let files = hashed.len() as u64;
    for (path, found) in digests(&path, hashed).map_err(unreadable)? {
        match (found, expected.get(&path)) {
            (Ok(found), Some(Some(wanted))) if !found.eq_ignore_ascii_case(wanted) => {
                differs(&path, What::Changed);
            }
            (Ok(_), _) => {}
            (Err(_), _) => differs(&path, What::Unreadable),
        }
    }
    differences.sort();
    differences.dedup_by(|a, b| a.path == b.path);
    Ok(Verified { path, digest: digest.to_owned(), files, bytes, differences })
}

/// Our own files, and what Python leaves beside its modules when somebody runs them.
fn is_ours(path: &Path) -> bool {
    path == Path::new(ENVIRONMENT_MARKER)
        || path == Path::new(RECORDS)
        || path == Path::new("conda-meta/history")
        || (path.extension().is_some_and(|end| end == "pyc")
            && path.components().any(|part| part.as_os_str() == "__pycache__"))
}
