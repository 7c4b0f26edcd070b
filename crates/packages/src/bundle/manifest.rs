//! A bundle's manifest, its first entry.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the first entry of every bundle.
pub const BUNDLE_MANIFEST: &str = "flux-distribute-bundle.json";
/// Name of the second entry of a bundle of kind `packages`: the lock that names the archives after it.
pub const BUNDLE_LOCK: &str = "flux-distribute-lock.yml";
/// The format version that this program reads and writes.
const FORMAT: u32 = 1;
/// Kind: an installation with compiled-in paths.
const TREE: &str = "tree";
/// Kind: a lock and the archives that it names.
const PACKAGES: &str = "packages";
/// Limit for a manifest, which normally has a few hundred bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 64 << 10;

/// Directories that every host has. No symlink may replace them; one below them is fine, unless [`READ_BY_HOST`] forbids it.
const HOST_DIRECTORIES: [&str; 8] = ["/home", "/mnt", "/opt", "/srv", "/tmp", "/usr", "/usr/local", "/var"];
/// Directories from which the host's own programs read files. No symlink may be there or below: systemd, for example, would read a bundle
/// linked at `/etc/systemd/system/NAME.service.d` as its own configuration.
const READ_BY_HOST: [&str; 35] = [
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/sys",
    "/usr/bin",
    "/usr/etc",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/libx32",
    "/usr/local/bin",
    "/usr/local/etc",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/libexec",
    "/usr/local/sbin",
    "/usr/local/share",
    "/usr/sbin",
    "/usr/share",
    "/var/lib/cloud",
    "/var/lib/confexts",
    "/var/lib/extensions",
    "/var/roothome",
    "/var/run",
    "/var/spool",
];

/// What is wrong with a manifest. The bundle is the subject of the messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// It is not JSON with the fields of a manifest.
    #[error("its {BUNDLE_MANIFEST} can't be read")]
    Json(#[from] serde_json::Error),
    /// Another version of this program wrote it.
    #[error(
        "it has format {format} and kind `{kind}`, but this version reads format {FORMAT} with kinds `{TREE}` and `{PACKAGES}`"
    )]
    Version {
        /// Its format.
        format: u32,
        /// Its kind.
        kind: String,
    },
    /// No symlink can be at this prefix.
    #[error("its prefix {} is not a plain absolute path", .0.display())]
    NotPlain(PathBuf),
    /// A symlink at this prefix would replace a directory of the host.
    #[error("its prefix {} is a directory that every host has; build Flux for /opt/flux", .0.display())]
    OfHosts(PathBuf),
    /// The host's own programs would read what is below a symlink at this prefix.
    #[error("its prefix {} is in a directory from which the host's own programs read files; build Flux for /opt/flux", .0.display())]
    ReadByHost(PathBuf),
    /// It has packages for no platform.
    #[error("its {BUNDLE_MANIFEST} names no platform")]
    NoPlatform,
}

/// A bundle's description of itself.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BundleManifest {
    /// Version of the bundle format.
    pub format: u32,
    /// `tree`: an installation with compiled-in paths. `packages`: a lock and the archives that it names.
    pub kind: String,
    /// For a tree, the path that is compiled into it, such as `/opt/flux`. Empty for packages, but always present,
    /// because versions that only know trees read it before they check the kind.
    pub prefix: PathBuf,
    /// For a tree, the conda platform that it runs on, such as `linux-64`. Empty for packages.
    pub platform: String,
    /// For packages, the conda platforms for which the bundle has all archives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<String>,
    /// The program and version that wrote the bundle.
    pub created_by: String,
}

impl BundleManifest {
    /// The manifest of a tree that was built for `prefix`.
    pub fn tree(prefix: PathBuf, platform: String) -> Self {
        Self { prefix, platform, ..Self::of(TREE) }
    }

    /// The manifest of a bundle with all packages of a lock for these platforms.
    pub fn packages(platforms: Vec<String>) -> Self {
        Self { platforms, ..Self::of(PACKAGES) }
    }

    fn of(kind: &str) -> Self {
        Self {
            format: FORMAT,
            kind: kind.to_owned(),
            prefix: PathBuf::new(),
            platform: String::new(),
            platforms: Vec::new(),
            created_by: concat!("flux-distribute ", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }

    /// True if a lock and archives follow, false for a tree.
    pub fn is_packages(&self) -> bool {
        self.kind == PACKAGES
    }

    /// The conda platforms on which the bundle can be installed.
    pub fn platforms(&self) -> &[String] {
        if self.is_packages() { &self.platforms } else { std::slice::from_ref(&self.platform) }
    }

    /// Parses and checks a manifest.
    ///
    /// # Errors
    /// If it is not such JSON, of another version, or names a prefix or platforms that no host can have.
    pub fn parse(json: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = serde_json::from_slice(json)?;
        if manifest.format != FORMAT || ![TREE, PACKAGES].contains(&manifest.kind.as_str()) {
            return Err(ManifestError::Version { format: manifest.format, kind: manifest.kind });
        }
        if !manifest.is_packages() {
            check_prefix(&manifest.prefix)?;
        } else if manifest.platforms.is_empty() {
            return Err(ManifestError::NoPlatform);
        }
        Ok(manifest)
    }
}

/// Checks whether a symlink at this path is acceptable on a host.
pub(crate) fn check_prefix(prefix: &Path) -> Result<(), ManifestError> {
    let plain = prefix.is_absolute()
        && prefix.components().skip(1).all(|c| matches!(c, Component::Normal(_)))
        && prefix.components().count() > 1;
    if !plain {
        return Err(ManifestError::NotPlain(prefix.to_owned()));
    }
    if HOST_DIRECTORIES.iter().any(|d| prefix == Path::new(d)) {
        return Err(ManifestError::OfHosts(prefix.to_owned()));
    }
    if READ_BY_HOST.iter().any(|directory| prefix.starts_with(directory)) {
        return Err(ManifestError::ReadByHost(prefix.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bundle_is_linked_where_the_hosts_own_programs_read_files() {
        for (prefix, is_fine) in [
            ("/opt/flux", true),
            ("/usr/local/flux", true),
            ("/usr/flux", true),
            ("/sw/flux/0.88", true),
            ("/etcetera/flux", true),
            ("/etc/systemd/system/flux-broker.service.d", false),
            ("/run/systemd/system/flux-broker.service.d", false),
            ("/usr/lib/systemd/system/x.service.d", false),
            ("/lib/modules/x", false),
            ("/usr/local/lib/systemd/system/x.service.d", false),
            ("/usr/libexec/kubernetes/x", false),
            ("/root/.ssh", false),
            ("/usr/local", false),
            ("/opt", false),
            ("/opt/../etc/x", false),
            ("opt/flux", false),
        ] {
            assert_eq!(check_prefix(Path::new(prefix)).is_ok(), is_fine, "{prefix}");
        }
    }
}
