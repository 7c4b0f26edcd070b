//! How texts in a spec's fields are read.

use std::{
    path::{Component, Path, PathBuf},
    time::Duration,
};

use crate::rules::{PREFIX_CHARACTERS, PREFIX_PLACE};

/// Why a directory can't be the prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// It may be more than ours, or not one place.
    #[error("{0:?} is not an absolute path of at least two parts without `..`")]
    Shape(PathBuf),
    /// A character of it is special in a unit, script or configuration file.
    #[error("{0:?} {PREFIX_CHARACTERS}")]
    Characters(PathBuf),
    /// A boot empties it, or other users may write there.
    #[error("{0:?} {PREFIX_PLACE}")]
    Place(PathBuf),
}

/// Directories that a boot empties, that the kernel makes, or in which everybody may write.
const NOT_LASTING: [&str; 8] = ["/dev", "/proc", "/run", "/sys", "/tmp", "/var/lock", "/var/run", "/var/tmp"];

/// A text that is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a duration such as 30s, 10m or 24h")]
pub struct NotADuration(String);

/// Checks that a removal can delete `path` with all its content: it must be deep enough to be only ours, and absolute
/// without `..`, so that it names one place.
///
/// # Errors
/// [`PrefixError::Shape`].
pub fn check_prefix(path: &Path) -> Result<(), PrefixError> {
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    if !(path.is_absolute() && path.components().count() > 2 && path.components().all(is_plain)) {
        return Err(PrefixError::Shape(path.to_owned()));
    }
    Ok(())
}

/// A prefix is written into units, scripts and configuration files, so a new one may hold no character that is special in
/// one of them. Existing instances and hosts with such a prefix keep working, and can be removed.
///
/// # Errors
/// [`PrefixError::Characters`].
pub fn check_prefix_characters(path: &Path) -> Result<(), PrefixError> {
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._/-".contains(byte);
    match path.as_os_str().as_encoded_bytes().iter().all(is_allowed) {
        true => Ok(()),
        false => Err(PrefixError::Characters(path.to_owned())),
    }
}

/// Refuses a prefix whose content a boot or other users may remove: the queue of jobs is below it. Instances that have such a prefix
/// already keep working, and can be removed.
///
/// # Errors
/// [`PrefixError::Place`].
pub fn check_prefix_place(path: &Path) -> Result<(), PrefixError> {
    match NOT_LASTING.iter().any(|place| path.starts_with(place)) {
        false => Ok(()),
        true => Err(PrefixError::Place(path.to_owned())),
    }
}

/// A name of RFC 1123 with dots, as Kubernetes names nodes and most other objects.
pub fn is_subdomain(name: &str) -> bool {
    let label = |label: &str| {
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty() && label.chars().all(is_plain) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Reads a Flux Standard Duration (RFC 23) such as `30s`, `10m`, `1.5h`, `1d`; a bare number counts seconds.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return None,
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    let number: f64 = digits.parse().ok().filter(|_| is_number(whole) && is_number(fraction))?;
    Duration::try_from_secs_f64(number * factor).ok()
}

/// [`parse_duration`] for an option of the command line or a field.
///
/// # Errors
/// If it is not such a duration.
pub fn duration(text: &str) -> Result<Duration, NotADuration> {
    parse_duration(text).ok_or_else(|| NotADuration(text.to_owned()))
}
