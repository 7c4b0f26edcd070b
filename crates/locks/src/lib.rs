//! Reads a lock: the records of one platform, and the names of their archives in `pkgs/`.
//!
//! Locks of rattler and pixi and conda's `@EXPLICIT` lists are accepted. Everything that can be checked without a
//! network is checked here, and errors name the package.

pub mod diff;
mod error;
mod explicit;
pub mod question;

use std::{
    borrow::Cow,
    cmp::Reverse,
    collections::BTreeSet,
    path::{Component, Path},
};

use rattler_conda_types::{RepoDataRecord, Subdir};
use rattler_lock::{Environment, LockFile, LockedPackage, ParseCondaLockError};
use url::Url;

pub use error::{LockError, MAX_LOCK_BYTES, credentials_remedy};

use api::PackageSet;
use base::redact::{of_directory, stripped, url_with_credentials, with_hidden_credentials};

/// A package of a lock.
pub struct Locked {
    /// As its channel describes it.
    pub record: RepoDataRecord,
    /// Lower-case hex.
    pub sha256: String,
    /// The archive's file name in `pkgs/`: derived from its sha256, so that two packages never share a name and no text
    /// from a lock becomes part of a path.
    pub archive: String,
}

/// Every package of `platform` in the lock, in the lock's order.
///
/// # Errors
/// The text is not a lock, it has no packages for `platform`, or one of them can't be used.
pub fn packages(lock: &str, platform: &str) -> Result<Vec<Locked>, LockError> {
    of_platform(&read(lock)?, platform)
}

/// Converts a lock to the form in which it is published: always the YAML of a rattler lock. Equal texts give equal
/// results.
///
/// # Errors
/// The text is not a lock. [`check_lock`] checks its contents.
pub fn normalise_lock(text: &str) -> Result<Cow<'_, str>, LockError> {
    let text = without_mark(text);
    let lock = read(text)?;
    match explicit::is_explicit(text) {
        true => lock.render_to_string().map(Cow::Owned).map_err(LockError::Write),
        false => Ok(Cow::Borrowed(text)),
    }
}

/// Checks without a network whether a lock can be published and installed on each of `platforms`; if that is empty, on
/// each Linux platform that the lock has.
///
/// # Errors
/// The first problem found.
pub fn check_lock(text: &str, platforms: &[String]) -> Result<(), LockError> {
    if text.len() > MAX_LOCK_BYTES {
        return Err(LockError::TooLarge { bytes: text.len() });
    }
    // Before parsing, because the parser's error may quote the credentials.
    if let Some(url) = url_with_credentials(text) {
        return Err(LockError::Credentials { url });
    }
    let lock = read(text)?;
    if let Some(url) = hidden_credentials(&lock) {
        return Err(LockError::Credentials { url });
    }
    let there = match platforms {
        [] => linux_platforms(&lock)?,
        wanted => wanted.to_vec(),
    };
    there.iter().try_for_each(|platform| of_platform(&lock, platform).map(drop))
}

/// The first URL with a credential that a search of the lock's text does not find, such as `https:/USER:PASSWORD@HOST/`.
fn hidden_credentials(lock: &LockFile) -> Option<String> {
    lock.environments().find_map(|(_, environment)| {
        let mut packages = environment.packages_by_platform().flat_map(|(_, packages)| packages);
        let in_packages = packages.find_map(|package| with_hidden_credentials(package.location().as_url()?.as_str()));
        let mut channels = environment.channels().iter();
        in_packages.or_else(|| channels.find_map(|channel| with_hidden_credentials(&of_directory(&channel.url))))
    })
}

/// The platforms of Linux that a lock has packages for, at least one.
///
/// # Errors
/// The text is not a lock, or has no packages for Linux.
pub fn platforms(text: &str) -> Result<Vec<String>, LockError> {
    linux_platforms(&read(text)?)
}

/// The URLs of a lock's packages on all Linux platforms.
///
/// # Errors
/// The text is not a lock, or one of its packages can't be used.
pub fn lock_urls(text: &str) -> Result<Vec<String>, LockError> {
    let packages = by_platform(text)?.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten();
    Ok(packages.map(|package| package.record.url.to_string()).collect())
}

/// The packages of each Linux platform that a lock has, or why that platform's packages can't be used.
///
/// # Errors
/// As for [`platforms`].
pub fn by_platform(text: &str) -> Result<Vec<Result<Vec<Locked>, LockError>>, LockError> {
    let lock = read(text)?;
    Ok(linux_platforms(&lock)?.into_iter().map(|platform| of_platform(&lock, &platform)).collect())
}

fn linux_platforms(lock: &LockFile) -> Result<Vec<String>, LockError> {
    let environment = environment(lock)?;
    let used = environment.packages_by_platform().filter(|(_, packages)| packages.len() > 0);
    let linux = used.map(|(platform, _)| platform.subdir()).filter(|subdir| subdir.is_linux());
    let linux = linux.map(|subdir| subdir.to_string()).collect::<BTreeSet<_>>();
    if linux.is_empty() {
        return Err(no_platform(environment, "linux-64"));
    }
    Ok(linux.into_iter().collect())
}

/// Some editors put a byte order mark before the text.
fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

fn read(text: &str) -> Result<LockFile, LockError> {
    let text = without_mark(text);
    let yaml = match explicit::is_explicit(text) {
        true => Cow::Owned(explicit::to_lock(text)?),
        false => Cow::Borrowed(text),
    };
    LockFile::from_str_with_base_directory(&yaml, None).map_err(|error| blame(&yaml, error))
}

/// The environment to install. pixi has one environment per feature set; in a lock without `default`, the only one
/// there is must be meant.
fn environment(lock: &LockFile) -> Result<Environment<'_>, LockError> {
    if let Some(environment) = lock.default_environment() {
        return Ok(environment);
    }
    let mut all = lock.environments().collect::<Vec<_>>();
    all.sort_unstable_by_key(|(name, _)| *name);
    match all.as_slice() {
        [(_, only)] => Ok(*only),
        several => Err(LockError::NoEnvironment { there: listed(several.iter().map(|(name, _)| (*name).to_owned())) }),
    }
}

fn of_platform(lock: &LockFile, wanted: &str) -> Result<Vec<Locked>, LockError> {
    let environment = environment(lock)?;
    // A lock may give a platform any name, as long as its subdir is one of conda's platforms.
    let named = environment.platforms().find(|platform| platform.name().as_str() == wanted);
    let platform = named.or_else(|| environment.platforms().find(|platform| platform.subdir().as_str() == wanted));
    let found = platform.and_then(|platform| environment.packages(platform)).map(Vec::from_iter);
    let found = found.filter(|packages| !packages.is_empty()).ok_or_else(|| no_platform(environment, wanted))?;
    let packages = found.into_iter().map(locked).collect::<Result<Vec<_>, _>>()?;
    let mut names = BTreeSet::new();
    for package in &packages {
        let record = &package.record.package_record;
        let name = record.name.as_normalized();
        if !names.insert(name) {
            return Err(LockError::Twice { name: name.to_owned() });
        }
        if record.subdir != wanted && record.subdir != Subdir::NoArch.as_str() {
            return Err(LockError::ForeignPackage { name: name.to_owned(), platform: record.subdir.clone() });
        }
    }
    Ok(packages)
}

fn no_platform(environment: Environment<'_>, wanted: &str) -> LockError {
    let there = listed(environment.platforms().map(|platform| platform.name().to_string()));
    LockError::Platform { platform: wanted.to_owned(), there }
}

fn listed(names: impl Iterator<Item = String>) -> String {
    match names.collect::<Vec<_>>() {
        names if names.is_empty() => "none".to_owned(),
        names => names.join(", "),
    }
}

/// Sorts packages into the order in which they are fetched and unpacked: the biggest first, so that little is left to
/// unpack when the last one has arrived. The order is the same on all nodes, so that a node fetches next what other
/// nodes want from it, and if several packages contain the same path, the same one provides it everywhere.
pub fn biggest_first(packages: &mut [Locked]) {
    packages.sort_by_cached_key(|package| (Reverse(package.record.package_record.size), package.archive.clone()));
}

fn locked(package: &LockedPackage) -> Result<Locked, LockError> {
    let name = package.name().to_owned();
    if matches!(package, LockedPackage::Pypi(_)) {
        return Err(LockError::PyPi { name });
    }
    let Some(binary) = package.as_binary_conda() else {
        return Err(LockError::Unsupported { name });
    };
    let mut record = match RepoDataRecord::try_from(binary) {
        Ok(record) => record,
        Err(source) => {
            return Err(LockError::Location { name, source: Box::new(source) });
        }
    };
    if !["http", "https", "file"].contains(&record.url.scheme()) {
        return Err(LockError::Scheme { name });
    }
    if let Some(found) = &record.package_record.python_site_packages_path
        && !is_inside(Path::new(found))
    {
        return Err(LockError::SitePackages { name, found: found.clone() });
    }
    // The record is written into the environment, where every user of the host can read it.
    record.url = stripped(&record.url);
    record.channel = record.channel.map(|channel| Url::parse(&channel).map_or(channel, |url| stripped(&url).into()));
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

/// True for a path of plain names below an environment, without the directory that lists its packages and the one in which
/// rattler puts files of several packages aside.
fn is_inside(path: &Path) -> bool {
    let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    is_plain
        && path
            .components()
            .next()
            .is_some_and(|first| first.as_os_str() != "conda-meta" && first.as_os_str() != "__clobbers__")
}

/// Finds the error to report for a lock that doesn't parse. The parser gives a position in the text, which doesn't help
/// users of generated locks, so this looks for the mistakes that occur in practice.
fn blame(yaml: &str, error: ParseCondaLockError) -> LockError {
    if let ParseCondaLockError::MissingPackage { location, .. } = &error {
        return LockError::Missing { name: package_name(location) };
    }
    let document = serde_norway::from_str::<serde_norway::Value>(yaml).unwrap_or_default();
    let list = |key: &str| document.get(key).and_then(|value| value.as_sequence()).into_iter().flatten();
    for platform in list("platforms") {
        let field = |key: &str| platform.get(key).and_then(|value| value.as_str());
        if let Some(platform) = field("subdir").or_else(|| field("name"))
            && platform.parse::<Subdir>().is_err()
        {
            return LockError::NotAPlatform { platform: platform.to_owned() };
        }
    }
    for package in list("packages") {
        let Some(location) = package.get("conda").and_then(|value| value.as_str()) else { continue };
        // In a lock, file: URLs become absolute paths.
        let is_absolute = ["http://", "https://", "file://", "/"].iter().any(|start| location.starts_with(start));
        if !is_absolute {
            return LockError::Scheme { name: package_name(location) };
        }
        for (field, digits) in [("sha256", 64), ("md5", 32)] {
            let Some(value) = package.get(field) else { continue };
            let found = value.as_str().map_or_else(|| "(not a string)".to_owned(), str::to_owned);
            if found.len() != digits || !found.chars().all(|c| c.is_ascii_hexdigit()) {
                return LockError::NotADigest { name: package_name(location), field, found };
            }
        }
    }
    LockError::Parse(Box::new(error))
}

/// The name for an error message. It is taken from the file name, because the whole URL may hold a token.
fn package_name(location: &str) -> String {
    use rattler_conda_types::package::CondaArchiveIdentifier;
    let file = location.rsplit('/').next().unwrap_or_default();
    CondaArchiveIdentifier::try_from_filename(file).map_or_else(|| file.to_owned(), |archive| archive.identifier.name)
}

/// Conda packages unpack to about three times their size, and so does a tree of programs; files that contain a prefix exist
/// twice for a moment.
const UNPACKED_PER_BYTE: u64 = 4;

/// The estimated unpacked size of archives of this total size, in bytes.
pub fn unpacked(archives: u64) -> u64 {
    archives.saturating_mul(UNPACKED_PER_BYTE)
}

/// Estimates how many bytes a package set needs on a host's disk, before it is fetched: 0 for a bundle,
/// which is checked once it has arrived.
pub fn estimate_bytes(set: &PackageSet, platform: &str) -> u64 {
    match set {
        PackageSet::Bundle(_) => 0,
        PackageSet::Lock { lock, .. } => {
            let archives = packages(lock, platform)
                .map(|all| all.iter().filter_map(|p| p.record.package_record.size).fold(0, u64::saturating_add));
            // The archives stay on disk beside the unpacked files.
            archives.map_or(0, |archives| archives.saturating_add(unpacked(archives)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn python_packages_stay_inside_of_the_environment() {
        let lock = |path: &str| {
            format!(
                "version: 6\nenvironments:\n  default:\n    channels:\n    - url: https://channel/\n    packages:\n      \
                 linux-64:\n      - conda: https://channel/linux-64/python-3.13.0-0.conda\npackages:\n- conda: \
                 https://channel/linux-64/python-3.13.0-0.conda\n  sha256: {}\n  python_site_packages_path: {path:?}\n",
                "a".repeat(64)
            )
        };
        let good = "lib/python3.13t/site-packages";
        let read = packages(&lock(good), "linux-64").unwrap();
        assert_eq!(read[0].record.package_record.python_site_packages_path.as_deref(), Some(good));
        check_lock(&lock(good), &[]).unwrap();
        for path in ["/etc/cron.d", "../..", "lib/../../..", "./lib", "", "conda-meta", "conda-meta/x", "__clobbers__"]
        {
            let error = packages(&lock(path), "linux-64").err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(&format!("package python has the python_site_packages_path `{path}`")), "{error}");
            assert!(check_lock(&lock(path), &[]).is_err(), "{path}");
        }
    }
}
