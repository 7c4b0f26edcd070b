//! Reading a lock: the records of one platform, and what their archives are called in `pkgs/`; what another lock would change;
//! and what is asked of channels. Pure.
//!
//! Taken are locks of rattler and pixi, and conda's `@EXPLICIT` lists. Everything that can be told without a network is
//! told here, by the package's name. It knows nothing of hosts, networks or Kubernetes.

pub mod diff;
mod explicit;
pub mod question;

use std::{borrow::Cow, cmp::Reverse, collections::BTreeSet};

use rattler_conda_types::{RepoDataRecord, Subdir};
use rattler_lock::{Environment, LockFile, LockedPackage, ParseCondaLockError};

use url::Url;

use api::PackageSet;
use base::redact::{stripped, url_with_credentials, with_hidden_credentials};

/// A ConfigMap holds 1 MiB, and `flux-packages` holds two sets while an upgrade waits for its epoch.
pub const MAX_LOCK_BYTES: usize = 480 << 10;

/// Why a lock can't be used. Only another lock helps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Not a lock.
    #[error(
        "the lock can't be read; it must be the YAML of a rattler or pixi lock file, or an @EXPLICIT list of conda"
    )]
    Parse(#[source] Box<ParseCondaLockError>),
    /// A line of an `@EXPLICIT` list that can't be read.
    #[error("line {line} of the @EXPLICIT list is not the URL of a conda package")]
    Line {
        /// Counted from 1.
        line: usize,
    },
    /// No environment `default`, and more than one other, or none.
    #[error("the lock has no environment `default` and not just one other; it has {there}")]
    NoEnvironment {
        /// Those that it has.
        there: String,
    },
    /// An `@EXPLICIT` list that does not say what it is for.
    #[error("the @EXPLICIT list names no platform; add a line such as `# platform: linux-64` above its packages")]
    NoPlatform,
    /// Not solved for this platform.
    #[error("the lock has no packages for platform {platform}; it has {there}")]
    Platform {
        /// The one that is wanted.
        platform: String,
        /// Those that it has.
        there: String,
    },
    /// No platform that a node could have.
    #[error("the lock names the platform {platform}, which is not one of conda's platforms for Linux such as linux-64")]
    NotAPlatform {
        /// As it was given.
        platform: String,
    },
    /// A package in the wrong place.
    #[error("the lock's package {name} is for {platform}, which is not what the others are for")]
    ForeignPackage {
        /// Its name.
        name: String,
        /// As it was given.
        platform: String,
    },
    /// A package that only pip can install.
    #[error(
        "the lock's package {name} comes from PyPI and only conda packages can be installed; \
         lock an environment without pypi-dependencies"
    )]
    PyPi {
        /// Its name.
        name: String,
    },
    /// Something that can't be installed without building it.
    #[error("the lock's package {name} is not a built conda package (.conda or .tar.bz2)")]
    Unsupported {
        /// Its name.
        name: String,
    },
    /// A package that nobody can check.
    #[error(
        "the lock's package {name} has no sha256, and md5 is not enough; \
         `conda list --explicit --sha256` and `pixi project export conda-explicit-spec` write it"
    )]
    NoSha256 {
        /// Its name.
        name: String,
    },
    /// A digest that can't be one.
    #[error("the lock's package {name} has the {field} `{found}`, which is too short, too long, or not hex digits")]
    NotADigest {
        /// Its name.
        name: String,
        /// `sha256` or `md5`.
        field: &'static str,
        /// As it was given.
        found: String,
    },
    /// Promised, but not there.
    #[error(
        "the lock's package {name} is named for an environment but has no entry of its own; the lock's end is cut off"
    )]
    Missing {
        /// Its name.
        name: String,
    },
    /// Two archives that want the same place.
    #[error("the lock's package {name} is there twice")]
    Twice {
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
    /// A package that nobody can fetch.
    #[error("the lock's package {name} is not at an http, https or file URL")]
    Scheme {
        /// Its name.
        name: String,
    },
    /// What is published, everybody who may read ConfigMaps can read.
    #[error("the lock has credentials in the URL {url}; {}", credentials_remedy())]
    Credentials {
        /// Without them.
        url: String,
    },
    /// Too big to be published.
    #[error(
        "the lock has {bytes} bytes and can have {MAX_LOCK_BYTES}, because it is published in a ConfigMap; \
         leave out the platforms and environments that no node needs"
    )]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// Should not happen.
    #[error("the lock can't be written as YAML")]
    Write(#[source] std::io::Error),
}

/// A package of a lock.
pub struct Locked {
    /// As its channel describes it.
    pub record: RepoDataRecord,
    /// Lower-case hex.
    pub sha256: String,
    /// What its archive is called in `pkgs/`: by content, so that two packages never fight over a name, and nothing that
    /// a lock says becomes part of a path.
    pub archive: String,
}

/// Every package of `platform` in the lock, in the lock's order.
pub fn packages(lock: &str, platform: &str) -> Result<Vec<Locked>, LockError> {
    of_platform(&read(lock)?, platform)
}

/// The lock as it is published: always the YAML of a rattler lock. The same text always gives the same one.
///
/// # Errors
/// Where it is no lock at all; [`check_lock`] looks at what is in it.
pub fn normalise_lock(text: &str) -> Result<Cow<'_, str>, LockError> {
    let text = without_mark(text);
    let lock = read(text)?;
    match explicit::is_explicit(text) {
        true => lock.render_to_string().map(Cow::Owned).map_err(LockError::Write),
        false => Ok(Cow::Borrowed(text)),
    }
}

/// Whether a lock can be published and installed: on each of `platforms`, or, where that is empty, on each platform of
/// Linux that the lock has. Without a network.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn check_lock(text: &str, platforms: &[String]) -> Result<(), LockError> {
    if text.len() > MAX_LOCK_BYTES {
        return Err(LockError::TooLarge { bytes: text.len() });
    }
    // Before it is parsed: an error of the parser may quote it.
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

/// The first URL with a credential that nobody sees in the lock's text, such as in `https:/USER:PASSWORD@HOST/`.
fn hidden_credentials(lock: &LockFile) -> Option<String> {
    lock.environments().find_map(|(_, environment)| {
        let mut packages = environment.packages_by_platform().flat_map(|(_, packages)| packages);
        let in_packages = packages.find_map(|package| with_hidden_credentials(package.location().as_url()?.as_str()));
        let mut channels = environment.channels().iter();
        in_packages.or_else(|| channels.find_map(|channel| with_hidden_credentials(&channel.url)))
    })
}

/// The platforms of Linux that a lock has packages for, at least one.
pub fn platforms(text: &str) -> Result<Vec<String>, LockError> {
    linux_platforms(&read(text)?)
}

/// Where the packages of a lock come from, on all of Linux' platforms.
///
/// # Errors
/// Text that is no lock, or that is of no use.
pub fn lock_urls(text: &str) -> Result<Vec<String>, LockError> {
    let packages = by_platform(text)?.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten();
    Ok(packages.map(|package| package.record.url.to_string()).collect())
}

/// The packages of each of Linux' platforms that a lock has, as far as they are of use.
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

/// Some editors begin a text with a byte order mark, which is no part of it.
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

/// pixi has one environment for each feature set; whoever has no `default` but just one means that one.
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
    // A lock may call a platform as it likes, as long as it says which one of conda's it is.
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

/// The order in which they are fetched and unpacked: the biggest first, so that little is left to do when the last one has
/// come. Always the same, so that a node has next what those want that fetch from it, and that the same files come from the
/// same packages.
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
    // It is written beside what is installed, for everybody on the host to read.
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

/// The parser says where in the text it gave up, which doesn't help somebody who never wrote that text by hand: so it is
/// looked through for what goes wrong in practice.
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
        // Absolute paths are what file URLs become in a lock.
        let is_absolute = ["http://", "https://", "file://", "/"].iter().any(|start| location.starts_with(start));
        if !is_absolute {
            return LockError::Scheme { name: package_name(location) };
        }
        for (field, digits) in [("sha256", 64), ("md5", 32)] {
            let Some(value) = package.get(field) else { continue };
            let found = value.as_str().map(str::to_owned).unwrap_or_else(|| "(not a text)".to_owned());
            if found.len() != digits || !found.chars().all(|c| c.is_ascii_hexdigit()) {
                return LockError::NotADigest { name: package_name(location), field, found };
            }
        }
    }
    LockError::Parse(Box::new(error))
}

/// From where it is: a URL may hold a token, a package's name doesn't.
fn package_name(location: &str) -> String {
    use rattler_conda_types::package::CondaArchiveIdentifier;
    let file = location.rsplit('/').next().unwrap_or_default();
    CondaArchiveIdentifier::try_from_filename(file).map_or_else(|| file.to_owned(), |archive| archive.identifier.name)
}

/// Conda packages unpack to some three times their size, and so does a tree of programs; files with a prefix in them are
/// there twice for a moment.
const UNPACKED_PER_BYTE: u64 = 4;

/// What archives of so many bytes unpack to, as a rule.
pub fn unpacked(archives: u64) -> u64 {
    archives.saturating_mul(UNPACKED_PER_BYTE)
}

/// What to do about credentials in a URL, for the end of a sentence.
pub fn credentials_remedy() -> String {
    let (secret, key) = (api::SECRET_PACKAGES, api::SECRET_PACKAGES_CREDENTIALS_KEY);
    format!(
        "write it without them (a file that needs one in a query has to be put elsewhere), and put them into Secret {secret}, key {key}: {{\"HOST\": {{\"CondaToken\": \"TOKEN\"}}}}, or \
         {{\"BasicHTTP\": {{\"username\": \"USER\", \"password\": \"PASSWORD\"}}}}"
    )
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
            archives.map_or(0, |archives| archives.saturating_add(unpacked(archives)))
        }
    }
}
