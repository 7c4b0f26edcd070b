//! Reading a lock: the records of one platform, and what their archives are called in `pkgs/`.

use rattler_conda_types::RepoDataRecord;
use rattler_lock::LockFile;

use super::room;
use crate::api::PackageSet;

/// Why a lock can't be used. Only another lock helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Not a lock.
    #[error("the lock can't be read; it must be the YAML of a rattler or pixi lock file")]
    Parse(#[source] Box<rattler_lock::ParseCondaLockError>),
    /// No environment `default`.
    #[error("the lock has no environment `default`")]
    NoEnvironment,
    /// Not solved for this platform.
    #[error("the lock has no packages for platform {platform}; it has {there}")]
    Platform {
        /// The one that is wanted.
        platform: String,
        /// Those that it has.
        there: String,
    },
    /// Something that can't be installed without building it, or isn't a conda package.
    #[error("the lock's package {name} is not a built conda package (.conda or .tar.bz2)")]
    Unsupported {
        /// Its name.
        name: String,
    },
    /// A package that nobody can check.
    #[error("the lock's package {name} has no sha256")]
    NoSha256 {
        /// Its name.
        name: String,
    },
    /// A package whose place makes no sense.
    #[error("the lock's package {name} has no usable URL")]
    Location {
        /// Its name.
        name: String,
        /// Cause.
        #[source]
        source: Box<rattler_lock::ConversionError>,
    },
}

/// A package of a lock.
pub(super) struct Locked {
    pub record: RepoDataRecord,
    /// Lower-case hex.
    pub sha256: String,
    /// What its archive is called in `pkgs/`: by content, so that two packages never fight over a name, and nothing that
    /// a lock says becomes part of a path.
    pub archive: String,
}

/// Every package of `platform` in the lock, in the lock's order.
pub(super) fn packages(lock: &str, platform: &str) -> Result<Vec<Locked>, LockError> {
    let lock = LockFile::from_str_with_base_directory(lock, None).map_err(|e| LockError::Parse(Box::new(e)))?;
    let environment = lock.default_environment().ok_or(LockError::NoEnvironment)?;
    let platform_packages = lock.platform(platform).and_then(|p| environment.packages(p)).map(Vec::from_iter);
    let found = platform_packages.filter(|packages| !packages.is_empty()).ok_or_else(|| LockError::Platform {
        platform: platform.to_owned(),
        there: match environment.platforms().map(|p| p.name().to_string()).collect::<Vec<_>>() {
            there if there.is_empty() => "none".to_owned(),
            there => there.join(", "),
        },
    })?;
    found.into_iter().map(locked).collect()
}

/// The platforms that the lock has packages for.
pub(super) fn platforms(lock: &str) -> Result<Vec<String>, LockError> {
    let lock = LockFile::from_str_with_base_directory(lock, None).map_err(|e| LockError::Parse(Box::new(e)))?;
    let environment = lock.default_environment().ok_or(LockError::NoEnvironment)?;
    Ok(environment.platforms().map(|p| p.name().to_string()).collect())
}

fn locked(package: &rattler_lock::LockedPackage) -> Result<Locked, LockError> {
    let name = package.name().to_owned();
    let Some(binary) = package.as_binary_conda() else {
        return Err(LockError::Unsupported { name });
    };
    let record = match RepoDataRecord::try_from(binary) {
        Ok(record) => record,
        Err(source) => {
            return Err(LockError::Location { name, source: Box::new(source) });
        }
    };
    let Some(sha256) = record.package_record.sha256.map(hex::encode) else {
        return Err(LockError::NoSha256 { name });
    };
    use rattler_conda_types::package::{CondaArchiveType, DistArchiveType};
    let extension = match record.identifier.archive_type {
        DistArchiveType::Conda(CondaArchiveType::Conda) => "conda",
        DistArchiveType::Conda(CondaArchiveType::TarBz2) => "tar.bz2",
        DistArchiveType::Wheel(_) => return Err(LockError::Unsupported { name }),
    };
    Ok(Locked { archive: format!("{sha256}.{extension}"), record, sha256 })
}

/// How many bytes a package set needs on a host's disk, as far as it can be told before it is there: 0 for a bundle,
/// which is looked at when it is.
pub fn estimate_bytes(set: &PackageSet, platform: &str) -> u64 {
    match set {
        PackageSet::Bundle(_) => 0,
        PackageSet::Lock { lock, .. } => {
            let archives = packages(lock, platform)
                .map(|all| all.iter().filter_map(|p| p.record.package_record.size).fold(0, u64::saturating_add));
            // The archives stay beside what is in them.
            archives.map_or(0, |archives| archives.saturating_add(room::unpacked(archives)))
        }
    }
}
