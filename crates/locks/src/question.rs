//! The question to solve: read from the spec, checked, and written as one stable line.

use rattler_conda_types::{GenericVirtualPackage, MatchSpec, PackageName, ParseStrictness, Subdir, Version};
use url::Url;

use api::{DEFAULT_CHANNEL, DEFAULT_GLIBC, DEFAULT_SPECS, Packages};
use base::{
    error_chain,
    redact::{redacted, stripped, url_with_credentials, with_hidden_credentials},
};

/// Why a question is invalid. Retrying doesn't help.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuestionError {
    /// A spec that can't be parsed or is of a kind we don't serve.
    #[error("spec `{spec}` can't be used: {reason}")]
    Spec {
        /// As it was given.
        spec: String,
        /// Why.
        reason: String,
    },
    /// The spec is empty.
    #[error("is an empty spec")]
    Empty,
    /// Not a conda platform.
    #[error("{platform} is not a conda platform of Linux such as linux-64")]
    NotAPlatform {
        /// As it was given.
        platform: String,
    },
    /// Not a version.
    #[error("glibc {glibc} is not a version such as 2.28")]
    Glibc {
        /// As it was given.
        glibc: String,
    },
}

/// The question in one stable line: the planner solves again only if it changes.
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

/// The channels to query, by priority.
pub fn channels(packages: &Packages) -> Vec<&str> {
    match packages.channels.is_empty() {
        true => vec![DEFAULT_CHANNEL],
        false => packages.channels.iter().map(String::as_str).collect(),
    }
}

/// The requested specs.
pub fn specs(packages: &Packages) -> Vec<&str> {
    match packages.specs.is_empty() {
        true => DEFAULT_SPECS.to_vec(),
        false => packages.specs.iter().map(String::as_str).collect(),
    }
}

/// The glibc that the packages must run with.
pub fn glibc(packages: &Packages) -> &str {
    packages.glibc.as_deref().unwrap_or(DEFAULT_GLIBC)
}

/// The requested platforms: the spec's, or else those of the `nodes`.
pub fn wanted_platforms<'a>(packages: &'a Packages, nodes: &'a [String]) -> Vec<&'a str> {
    let wanted = if packages.platforms.is_empty() { nodes } else { &packages.platforms };
    let mut wanted = wanted.iter().map(String::as_str).collect::<Vec<_>>();
    wanted.sort_unstable();
    wanted.dedup();
    wanted
}

/// Reads a spec: the name of one package, and a version.
///
/// # Errors
/// [`QuestionError::Spec`].
pub fn parse_spec(given: &str) -> Result<MatchSpec, QuestionError> {
    let unusable = |reason: String| QuestionError::Spec { spec: redacted(given), reason };
    let with_credentials = "a spec is a name and a version, not a URL with credentials";
    if url_with_credentials(given).is_some() {
        return Err(unusable(with_credentials.into()));
    }
    // Before it is parsed: an error of the parser may quote it.
    if let Some(safe) = given.split("::").next().and_then(with_hidden_credentials) {
        return Err(QuestionError::Spec { spec: safe, reason: with_credentials.to_owned() });
    }
    let spec = MatchSpec::from_str(given, ParseStrictness::Lenient).map_err(|e| unusable(error_chain(&e)))?;
    let channel = spec.channel.as_ref().map(|channel| channel.base_url.as_str());
    if let Some(safe) = channel.and_then(with_hidden_credentials) {
        return Err(QuestionError::Spec { spec: safe, reason: with_credentials.to_owned() });
    }
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
/// [`QuestionError::Empty`] or [`QuestionError::Spec`].
pub fn check_spec(given: &str) -> Result<(), QuestionError> {
    match given.trim().is_empty() {
        true => Err(QuestionError::Empty),
        false => parse_spec(given).map(drop),
    }
}

/// True if `glibc` is a version that the solver accepts for `__glibc`: at least two numbers separated by dots.
pub fn check_glibc(glibc: &str) -> bool {
    glibc.split('.').count() > 1
        && glibc.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Reads a platform of Linux, and the virtual packages that the solver assumes on its machines.
///
/// # Errors
/// [`QuestionError::NotAPlatform`] or [`QuestionError::Glibc`].
pub fn parse_platform(given: &str, glibc: &str) -> Result<(Subdir, Vec<GenericVirtualPackage>), QuestionError> {
    let not_a_platform = || QuestionError::NotAPlatform { platform: given.to_owned() };
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
    let glibc = parsed.ok_or_else(|| QuestionError::Glibc { glibc: glibc.to_owned() })?;
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
