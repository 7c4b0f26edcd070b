//! conda's `@EXPLICIT` lists: a URL and a digest on each line. They are converted to a lock before they are published,
//! so that agents read only one format.

use std::collections::{BTreeMap, BTreeSet};

use rattler_conda_types::{Subdir, package::CondaArchiveIdentifier};
use serde_json::json;
use url::Url;

use crate::LockError;

/// The line that marks a text as an explicit list. It can't be a line of YAML.
const TAG: &str = "@EXPLICIT";

/// True if the text is an `@EXPLICIT` list, not YAML.
pub(crate) fn is_explicit(text: &str) -> bool {
    text.lines().any(|line| line.trim() == TAG)
}

/// Converts the list to a lock with the same packages, as YAML text.
///
/// A list is for one platform; one text may contain the lists of several platforms, one after the other.
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
        let entry = Entry::read(line).map_err(|error| error.at(number + 1))?;
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
    // rattler derives the subdir and the channel from the URL; they matter only if that fails.
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
    /// The URL without the digest.
    url: Url,
    name: String,
    subdir: String,
    channel: Url,
    sha256: String,
}

/// Why a line can't be used.
enum LineError {
    NoPackage,
    Lock(LockError),
}

impl LineError {
    /// Names the line by its number only: the text of an unreadable line may hold a token.
    fn at(self, line: usize) -> LockError {
        match self {
            Self::NoPackage => LockError::Line { line },
            Self::Lock(error) => error,
        }
    }
}

impl Entry {
    fn read(line: &str) -> Result<Self, LineError> {
        let mut url = Url::parse(line).map_err(|_| LineError::NoPackage)?;
        let digest = url.fragment().unwrap_or_default().to_owned();
        url.set_fragment(None);
        let archive = CondaArchiveIdentifier::try_from_url(&url).ok_or(LineError::NoPackage)?;
        let subdir =
            url.path_segments().and_then(|mut parts| parts.nth_back(1)).ok_or(LineError::NoPackage)?.to_owned();
        let mut channel = url.clone();
        channel.path_segments_mut().map_err(|()| LineError::NoPackage)?.pop().pop();
        channel.set_query(None);
        let name = archive.identifier.name;
        if !["http", "https", "file"].contains(&url.scheme()) {
            return Err(LineError::Lock(LockError::Scheme { name }));
        }
        let sha256 = sha256(&name, &digest).map_err(LineError::Lock)?;
        Ok(Self { url, name, subdir, channel, sha256 })
    }
}

/// The sha256 from the fragment of a URL. conda writes a bare digest, md5 by default; pixi and newer versions of conda
/// put the algorithm before it.
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
