//! The question to solve: read from the spec, checked, and written as one stable line.

use std::{fs::File, io, os::fd::AsRawFd, path::PathBuf};

use rattler_conda_types::{
    Channel, GenericVirtualPackage, MatchSpec, PackageName, ParseStrictness, RepoDataRecord, Subdir, Version,
};
use url::Url;

use crate::packages::{
    SolveError,
    fetch::{credentials::stripped, http::shown},
};
use crate::{
    api::{DEFAULT_CHANNEL, DEFAULT_GLIBC, DEFAULT_SPECS, Packages},
    error_chain,
    redact::{redacted, url_with_credentials},
};

/// The question as one stable line. The planner solves again only if this line changes.
///
/// `platforms` is used only if the spec names none. Mirrors and the number of environments to keep are not part of the
/// question, and with a lock or a bundle neither is `refresh`, because nothing is solved then.
pub fn question(packages: &Packages, platforms: &[String]) -> String {
    if let Some(bundle) = &packages.bundle {
        return serde_json::json!({ "bundle": bundle }).to_string();
    }
    let platforms = wanted_platforms(packages, platforms);
    if let Some(lock) = &packages.lock {
        use sha2::{Digest, Sha256};
        return serde_json::json!({ "lock": hex::encode(Sha256::digest(lock)), "platforms": platforms }).to_string();
    }
    // Without credentials: the question is published together with the lock.
    let plain = |text: &str| match Url::parse(text) {
        Ok(url) if stripped(&url) != url => stripped(&url).into(),
        _ => text.to_owned(),
    };
    let mut question = serde_json::json!({
        "channels": channels(packages).into_iter().map(plain).collect::<Vec<_>>(),
        "glibc": glibc(packages),
        "platforms": platforms,
        "specs": specs(packages),
    });
    // Added only if set, so that questions published before `refresh` existed still match.
    if let Some(refresh) = &packages.refresh {
        question["refresh"] = serde_json::json!(refresh);
    }
    question.to_string()
}

pub(in crate::packages) fn channels(packages: &Packages) -> Vec<&str> {
    match packages.channels.is_empty() {
        true => vec![DEFAULT_CHANNEL],
        false => packages.channels.iter().map(String::as_str).collect(),
    }
}

pub(in crate::packages) fn specs(packages: &Packages) -> Vec<&str> {
    match packages.specs.is_empty() {
        true => DEFAULT_SPECS.to_vec(),
        false => packages.specs.iter().map(String::as_str).collect(),
    }
}

pub(in crate::packages) fn glibc(packages: &Packages) -> &str {
    packages.glibc.as_deref().unwrap_or(DEFAULT_GLIBC)
}

pub(in crate::packages) fn wanted_platforms<'a>(packages: &'a Packages, nodes: &'a [String]) -> Vec<&'a str> {
    let wanted = if packages.platforms.is_empty() { nodes } else { &packages.platforms };
    let mut wanted = wanted.iter().map(String::as_str).collect::<Vec<_>>();
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}

/// A channel: the URL that the user gave and the one that is read, which differ for `file:` channels.
pub(in crate::packages) struct Source {
    pub given: Url,
    pub read: Channel,
    /// Keeps `/proc/self/fd/N` in `read` alive.
    _directory: Option<File>,
}

impl Source {
    pub(in crate::packages) fn new(
        given: &str,
        host_dir: &impl Fn(&str) -> io::Result<File>,
    ) -> Result<Self, SolveError> {
        let not_a_channel = || SolveError::NotAChannel { channel: shown(given) };
        let url = Url::parse(given.trim_end_matches('/')).map_err(|_| not_a_channel())?;
        // Without credentials: the URL is written into the lock.
        let url = stripped(&url);
        match url.scheme() {
            "http" | "https" if url.has_host() => {
                Ok(Self { read: Channel::from_url(url.clone()), given: url, _directory: None })
            }
            "file" => {
                let unreadable = |e: io::Error| SolveError::Channel { channel: shown(given), reason: e.to_string() };
                let path = url.to_file_path().map_err(|()| not_a_channel())?;
                let directory = host_dir(&path.to_string_lossy()).map_err(unreadable)?;
                let open = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
                let read = Channel::try_from_directory(&open).map_err(|_| not_a_channel())?;
                Ok(Self { given: url, read, _directory: Some(directory) })
            }
            _ => Err(not_a_channel()),
        }
    }

    /// Replaces the URL that was read by the one that the user gave.
    pub(in crate::packages) fn restore(&self, record: &mut RepoDataRecord) {
        let Some(below) = record.url.as_str().strip_prefix(self.read.base_url.as_str()) else {
            return;
        };
        let given = self.given.as_str().trim_end_matches('/');
        if let Ok(url) = Url::parse(&format!("{given}/{}", below.trim_start_matches('/'))) {
            record.url = url;
            record.channel = Some(format!("{given}/"));
        }
    }
}

pub(in crate::packages) fn parse_spec(given: &str) -> Result<MatchSpec, SolveError> {
    let unusable = |reason: String| SolveError::Spec { spec: redacted(given), reason };
    if url_with_credentials(given).is_some() {
        return Err(unusable("a spec is a name and a version, not a URL with credentials".into()));
    }
    let spec = MatchSpec::from_str(given, ParseStrictness::Lenient).map_err(|e| unusable(error_chain(&e)))?;
    if spec.url.is_some() {
        return Err(unusable("a spec is a name and a version, not a URL; use packages.lock or packages.bundle".into()));
    }
    if spec.name.as_exact().is_none() {
        return Err(unusable("it must name one package".into()));
    }
    Ok(spec)
}

/// Checks whether the solver accepts `given` as a spec.
///
/// # Errors
/// Why it doesn't, including the spec.
pub fn check_spec(given: &str) -> Result<(), String> {
    match given.trim().is_empty() {
        true => Err("is an empty spec".to_owned()),
        false => parse_spec(given).map(drop).map_err(|error| error_chain(&error)),
    }
}

/// True if `glibc` is a version that the solver accepts for `__glibc`: at least two numbers separated by dots.
pub fn check_glibc(glibc: &str) -> bool {
    glibc.split('.').count() > 1
        && glibc.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

pub(in crate::packages) fn parse_platform(
    given: &str,
    glibc: &str,
) -> Result<(Subdir, Vec<GenericVirtualPackage>), SolveError> {
    let not_a_platform = || SolveError::NotAPlatform { platform: given.to_owned() };
    let platform = given.parse::<Subdir>().map_err(|_| not_a_platform())?;
    if !platform.is_linux() {
        return Err(not_a_platform());
    }
    let architecture = match platform.as_str() {
        "linux-64" => "x86_64",
        other => other.strip_prefix("linux-").unwrap_or(other),
    };
    let version = |text: &str| text.parse::<Version>();
    let parsed = version(glibc).ok().filter(|_| check_glibc(glibc));
    let glibc = parsed.ok_or_else(|| SolveError::Glibc { glibc: glibc.to_owned() })?;
    let constant = |text: &str| version(text).map_err(|_| not_a_platform());
    let package = |name: &str, version: Version, build: &str| GenericVirtualPackage {
        name: PackageName::new_unchecked(name),
        version,
        build_string: rattler_conda_types::package::BuildString::new_unchecked(build),
    };
    // 4.18 is the oldest kernel in any distribution with glibc 2.28.
    let virtual_packages = vec![
        package("__unix", constant("0")?, "0"),
        package("__linux", constant("4.18")?, "0"),
        package("__glibc", glibc, "0"),
        package("__archspec", constant("1")?, architecture),
    ];
    Ok((platform, virtual_packages))
}
