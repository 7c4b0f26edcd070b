//! Compares two locks and formats the result. Pure: nothing here reads files or asks a server.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use rattler_conda_types::Version;
use serde::Serialize;

use crate::LockError;

/// Brokers with different MAJOR.MINOR of this package can't form one instance.
const FLUX_CORE: &str = "flux-core";

/// The fields of a package that a comparison looks at.
#[derive(Serialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Package {
    /// The package's name.
    pub name: String,
    /// The version as its channel writes it.
    pub version: String,
    /// conda's build string.
    pub build: String,
    /// The channel's URL, without secrets.
    pub channel: String,
    /// Lower-case hex.
    pub sha256: String,
    /// Size of the archive; `None` if the lock doesn't have it.
    pub bytes: Option<u64>,
}

/// How a package differs between two locks.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum ChangeKind {
    /// Only the new lock has the package.
    Added,
    /// Only the old lock has the package.
    Removed,
    /// The new lock has a later version.
    Upgraded,
    /// The new lock has an earlier version.
    Downgraded,
    /// The same version with another build string.
    Rebuilt,
    /// The same version and build, but another sha256.
    Replaced,
    /// The same archive from another channel.
    Moved,
}

/// One package that differs.
#[derive(Serialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// The package's name.
    pub name: String,
    /// How it differs.
    pub change: ChangeKind,
    /// The package in the old lock; `None` if it is added.
    pub old: Option<Package>,
    /// The package in the new lock; `None` if it is removed.
    pub new: Option<Package>,
}

/// What an instance that has the old lock's archives must download.
#[derive(Serialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Download {
    /// Number of archives.
    pub packages: usize,
    /// Their total size, counting only archives whose size the lock has.
    pub bytes: u64,
    /// Number of archives whose size the lock doesn't have.
    pub unknown: usize,
}

/// What changes for one platform.
#[derive(Serialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PlatformDiff {
    /// Number of packages in the old lock; 0 if it lacks the platform.
    pub old_packages: usize,
    /// Number of packages in the new lock; 0 if it lacks the platform.
    pub new_packages: usize,
    /// The packages that differ, sorted by name.
    pub changes: Vec<Change>,
    /// What must be downloaded.
    pub download: Download,
}

/// MAJOR.MINOR of flux-core changes: brokers of the two versions don't talk to each other.
#[derive(Serialize, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MinorChange {
    /// The conda platform.
    pub platform: String,
    /// MAJOR.MINOR in the old lock.
    pub old: String,
    /// MAJOR.MINOR in the new lock.
    pub new: String,
}

/// The difference between two locks.
#[derive(Serialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct LockDiff {
    /// Every platform that either lock has.
    pub platforms: BTreeMap<String, PlatformDiff>,
    /// The platforms on which flux-core's MAJOR.MINOR changes. One entry is enough to require a new epoch.
    pub flux_core: Vec<MinorChange>,
    /// flux-core's MAJOR.MINOR on each platform of the new lock if they differ: such brokers can't form one instance.
    /// Empty if they agree.
    pub disagreement: BTreeMap<String, String>,
}

/// The packages of a lock by platform.
pub type Contents = BTreeMap<String, Vec<Package>>;

/// Reads from the text of a lock what [`compare`] needs.
///
/// # Errors
/// As for [`packages`](crate::packages).
pub fn contents(text: &str) -> Result<Contents, LockError> {
    let package = |locked: crate::Locked| {
        let mut channel = locked.record.url;
        // A file: URL directly below the root lacks two segments; what remains is still a usable name for the channel.
        if let Ok(mut parts) = channel.path_segments_mut() {
            parts.pop().pop();
        }
        let record = locked.record.package_record;
        Package {
            name: record.name.as_normalized().to_owned(),
            version: record.version.to_string(),
            build: record.build.to_string(),
            channel: base::redact::shown(channel.as_str()),
            sha256: locked.sha256,
            bytes: record.size,
        }
    };
    let read = |platform: String| {
        let packages = crate::packages(text, &platform)?.into_iter().map(package).collect();
        Ok((platform, packages))
    };
    crate::platforms(text)?.into_iter().map(read).collect()
}

/// The differences from `old` to `new`, both by platform.
pub fn compare(old: &BTreeMap<String, Vec<Package>>, new: &BTreeMap<String, Vec<Package>>) -> LockDiff {
    let none = Vec::new();
    let mut diff = LockDiff::default();
    for platform in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
        let (old, new) = (old.get(platform).unwrap_or(&none), new.get(platform).unwrap_or(&none));
        diff.platforms.insert(platform.clone(), compare_platform(old, new));
        if let (Some(old), Some(new)) = (minor(old), minor(new))
            && old != new
        {
            diff.flux_core.push(MinorChange { platform: platform.clone(), old, new });
        }
    }
    let minors = new.iter().filter_map(|(platform, packages)| Some((platform.clone(), minor(packages)?)));
    let minors = minors.collect::<BTreeMap<_, _>>();
    if minors.values().collect::<BTreeSet<_>>().len() > 1 {
        diff.disagreement = minors;
    }
    diff
}

fn compare_platform(old: &[Package], new: &[Package]) -> PlatformDiff {
    let by_name = |packages| -> BTreeMap<_, _> { Iterator::map(packages, |p: &Package| (p.name.clone(), p)).collect() };
    let (before, after) = (by_name(old.iter()), by_name(new.iter()));
    let names = before.keys().chain(after.keys()).collect::<BTreeSet<_>>();
    let changes = names.into_iter().filter_map(|name| {
        let (old, new) = (before.get(name).copied(), after.get(name).copied());
        let change = kind(old, new)?;
        Some(Change { name: name.clone(), change, old: old.cloned(), new: new.cloned() })
    });
    let there = old.iter().map(|package| &package.sha256).collect::<BTreeSet<_>>();
    let wanted = new.iter().filter(|package| !there.contains(&package.sha256)).collect::<Vec<_>>();
    PlatformDiff {
        old_packages: old.len(),
        new_packages: new.len(),
        changes: changes.collect(),
        download: Download {
            packages: wanted.len(),
            bytes: wanted.iter().filter_map(|package| package.bytes).fold(0, u64::saturating_add),
            unknown: wanted.iter().filter(|package| package.bytes.is_none()).count(),
        },
    }
}

fn kind(old: Option<&Package>, new: Option<&Package>) -> Option<ChangeKind> {
    let (old, new) = match (old, new) {
        (None, _) => return Some(ChangeKind::Added),
        (_, None) => return Some(ChangeKind::Removed),
        (Some(old), Some(new)) => (old, new),
    };
    let version = |package: &Package| package.version.parse::<Version>().ok();
    if old.version != new.version {
        return Some(if version(new) >= version(old) { ChangeKind::Upgraded } else { ChangeKind::Downgraded });
    }
    match () {
        () if old.build != new.build => Some(ChangeKind::Rebuilt),
        () if old.sha256 != new.sha256 => Some(ChangeKind::Replaced),
        () if old.channel != new.channel => Some(ChangeKind::Moved),
        () => None,
    }
}

/// MAJOR.MINOR of flux-core, if the package is there.
fn minor(packages: &[Package]) -> Option<String> {
    let version = &packages.iter().find(|package| package.name == FLUX_CORE)?.version;
    Some(version.split('.').take(2).collect::<Vec<_>>().join("."))
}

impl LockDiff {
    /// True if no package differs on any platform.
    pub fn is_empty(&self) -> bool {
        self.platforms.values().all(|platform| platform.changes.is_empty())
    }

    /// What is wrong with the new lock, whatever the old one was; empty if nothing is.
    pub fn warning(&self) -> String {
        let each = self.disagreement.iter().map(|(platform, minor)| format!("{minor} on {platform}"));
        match each.collect::<Vec<_>>() {
            each if each.is_empty() => String::new(),
            each => format!("flux-core would be {}: such brokers can't form one instance.\n", each.join(", ")),
        }
    }
}

/// For people: the changes on each platform, then whether flux-core requires a new epoch.
impl fmt::Display for LockDiff {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (platform, diff) in &self.platforms {
            writeln!(out, "{platform}: {diff}")?;
            for change in &diff.changes {
                writeln!(out, "  {change}")?;
            }
        }
        for MinorChange { platform, old, new } in &self.flux_core {
            writeln!(
                out,
                "flux-core changes from {old} to {new} on {platform}: all brokers must be restarted together, as a new epoch."
            )?;
        }
        out.write_str(&self.warning())
    }
}

impl fmt::Display for PlatformDiff {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.old_packages, self.new_packages) {
            (0, new) => write!(out, "only the new lock has it, {}", Count(new))?,
            (old, 0) => return write!(out, "only the old lock has it, {}", Count(old)),
            (_, new) if self.changes.is_empty() => return write!(out, "nothing changes, {}", Count(new)),
            (_, new) => write!(out, "{} changed, {} in all", Count(self.changes.len()), new)?,
        }
        let Download { packages, bytes, unknown } = self.download;
        match (packages, unknown) {
            (0, _) => write!(out, "; nothing to download"),
            (_, 0) => write!(out, "; {packages} to download, {}", Bytes(bytes)),
            (_, unknown) if unknown == packages => write!(out, "; {packages} to download, of unknown size"),
            _ => write!(out, "; {packages} to download, {} and {unknown} of unknown size", Bytes(bytes)),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, change, old, new } = self;
        let (Some(old), Some(new)) = (old, new) else {
            let word = if new.is_some() { "added" } else { "removed" };
            let version = old.as_ref().or(new.as_ref()).map_or("", |package| &package.version);
            return write!(out, "{word:<11} {name} {version}");
        };
        let short = |sha256: &str| sha256.chars().take(12).collect::<String>();
        let version = &new.version;
        match change {
            ChangeKind::Upgraded => write!(out, "upgraded    {name} {} → {version}", old.version)?,
            ChangeKind::Downgraded => write!(out, "downgraded  {name} {} → {version}", old.version)?,
            ChangeKind::Rebuilt => write!(out, "rebuilt     {name} {version} (build {} → {})", old.build, new.build)?,
            ChangeKind::Replaced => {
                let (old, new) = (short(&old.sha256), short(&new.sha256));
                write!(out, "replaced    {name} {version} (same build, other content: sha256 {old}… → {new}…)")?;
            }
            ChangeKind::Moved => write!(out, "moved       {name} {version} (same content)")?,
            ChangeKind::Added | ChangeKind::Removed => {}
        }
        if old.channel != new.channel {
            write!(out, ", from {} instead of {}", new.channel, old.channel)?;
        }
        Ok(())
    }
}

/// Displays a number of packages, such as `1 package` or `2 packages`.
pub struct Count(pub usize);

impl fmt::Display for Count {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} package{}", self.0, if self.0 == 1 { "" } else { "s" })
    }
}

/// Displays a number of bytes in decimal units, such as `1.5 kB`.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["kB", "MB", "GB", "TB"];
        if self.0 < 1000 {
            return write!(out, "{} bytes", self.0);
        }
        let mut size = self.0 as f64 / 1000.0;
        let mut unit = units[0];
        for next in &units[1..] {
            // A value that rounds to 1000.0 belongs to the next unit.
            if size < 999.95 {
                break;
            }
            size /= 1000.0;
            unit = next;
        }
        write!(out, "{size:.1} {unit}")
    }
}

#[cfg(test)]
#[path = "diff_tests.rs"]
mod tests;
