//! conda's `@EXPLICIT` lists: a URL and a digest in each line. What is published is a lock, so that agents read one format.

use std::collections::{BTreeMap, BTreeSet};

use rattler_conda_types::{Subdir, package::CondaArchiveIdentifier};
use serde_json::json;
use url::Url;

use crate::LockError;

/// The line that makes a list an explicit one. It can't be a line of YAML.
const TAG: &str = "@EXPLICIT";

/// Whether this is an `@EXPLICIT` list, and not YAML.
pub(crate) fn is_explicit(text: &str) -> bool {
    text.lines().any(|line| line.trim() == TAG)
}

/// A lock with the same packages, as a document of YAML.
///
/// A list knows of one platform; lists of several platforms may stand one after the other in the same text.
pub(crate) fn to_lock(text: &str) -> Result<String, LockError> {
    let mut packages: BTreeMap<Url, Entry> = BTreeMap::new();
    let mut platforms: BTreeMap<Subdir, BTreeSet<Url>> = BTreeMap::new();
    let mut anywhere = BTreeSet::new();
    let mut channels = Vec::new();
    let mut here = None;
    for (number, line) in text.lines().map(str::trim).enumerate() {
        if let Some(comment) = line.strip_prefix('#') {
            if let Some(platform) = comment.trim_start().strip_prefix("platform:") {
                here = Some(linux(platform.trim())?);
            }
            continue;
        }
        if line.is_empty() || line == TAG {
            continue;
        }
        let entry = Entry::read(line).map_err(|trouble| trouble.at(number + 1))?;
        let unsupported = || LockError::ForeignPackage { name: entry.name.clone(), platform: entry.subdir.clone() };
        match entry.subdir.parse().map_err(|_| unsupported())? {
            Subdir::NoArch => match here {
                Some(here) => platforms.entry(here).or_default().insert(entry.url.clone()),
                None => anywhere.insert(entry.url.clone()),
            },
            platform if platform.is_linux() => platforms.entry(platform).or_default().insert(entry.url.clone()),
            _ => return Err(unsupported()),
        };
        if !channels.contains(&entry.channel) {
            channels.push(entry.channel.clone());
        }
        if packages.get(&entry.url).is_some_and(|before| before.sha256 != entry.sha256) {
            return Err(LockError::Twice { name: entry.name });
        }
        packages.insert(entry.url.clone(), entry);
    }
    if platforms.is_empty() {
        return Err(LockError::NoPlatform);
    }
    for urls in platforms.values_mut() {
        urls.extend(anywhere.iter().cloned());
    }
    // The last two only count where they don't follow from the URL.
    let package = |(url, entry): (&Url, &Entry)| json!({ "conda": url, "sha256": entry.sha256, "subdir": entry.subdir, "channel": entry.channel });
    let selectors = |urls: &BTreeSet<Url>| urls.iter().map(|url| json!({ "conda": url })).collect::<Vec<_>>();
    let lock = json!({
        "version": 7,
        "platforms": platforms.keys().map(|platform| json!({ "name": platform.as_str() })).collect::<Vec<_>>(),
        "environments": { "default": {
            "channels": channels.iter().map(|url| json!({ "url": url })).collect::<Vec<_>>(),
            "packages": platforms.iter().map(|(p, urls)| (p.to_string(), selectors(urls))).collect::<BTreeMap<_, _>>(),
        }},
        "packages": packages.iter().map(package).collect::<Vec<_>>(),
    });
    Ok(lock.to_string())
}

fn linux(platform: &str) -> Result<Subdir, LockError> {
    let parsed = platform.parse::<Subdir>().ok().filter(|platform| platform.is_linux());
    parsed.ok_or_else(|| LockError::NotAPlatform { platform: platform.to_owned() })
}

struct Entry {
    /// Without the digest.
    url: Url,
    name: String,
    subdir: String,
    channel: Url,
    sha256: String,
}

/// What is wrong with a line.
enum Trouble {
    NoPackage,
    Lock(LockError),
}

impl Trouble {
    /// A line that can't be read has no name but its number: it may hold a token.
    fn at(self, line: usize) -> LockError {
        match self {
            Self::NoPackage => LockError::Line { line },
            Self::Lock(error) => error,
        }
    }
}

impl Entry {
    fn read(line: &str) -> Result<Self, Trouble> {
        let mut url = Url::parse(line).map_err(|_| Trouble::NoPackage)?;
        let digest = url.fragment().unwrap_or_default().to_owned();
        url.set_fragment(None);
        let archive = CondaArchiveIdentifier::try_from_url(&url).ok_or(Trouble::NoPackage)?;
        let subdir = url.path_segments().and_then(|mut parts| parts.nth_back(1)).ok_or(Trouble::NoPackage)?.to_owned();
        let mut channel = url.clone();
        channel.path_segments_mut().map_err(|()| Trouble::NoPackage)?.pop().pop();
        channel.set_query(None);
        let name = archive.identifier.name;
        if !["http", "https", "file"].contains(&url.scheme()) {
            return Err(Trouble::Lock(LockError::Scheme { name }));
        }
        let sha256 = sha256(&name, &digest).map_err(Trouble::Lock)?;
        Ok(Self { url, name, subdir, channel, sha256 })
    }
}

/// conda writes the bare digest, md5 unless asked; pixi and newer ones write which one it is.
fn sha256(name: &str, digest: &str) -> Result<String, LockError> {
    let is_hex = |text: &str, digits| text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit());
    if digest.is_empty() || digest.starts_with("md5:") || is_hex(digest, 32) {
        return Err(LockError::NoSha256 { name: name.to_owned() });
    }
    let sha256 = digest.strip_prefix("sha256:").unwrap_or(digest);
    if !is_hex(sha256, 64) {
        return Err(LockError::NotADigest { name: name.to_owned(), field: "sha256", found: sha256.to_owned() });
    }
    Ok(sha256.to_ascii_lowercase())
}
