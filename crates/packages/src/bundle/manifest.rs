//! What a bundle says about itself: its first entry.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the first entry of every bundle.
pub const BUNDLE_MANIFEST: &str = "flux-distribute-bundle.json";
/// Name of the second entry of a bundle of kind `packages`: the lock that names the archives after it.
pub const BUNDLE_LOCK: &str = "flux-distribute-lock.yml";
/// The format this version writes and reads.
const FORMAT: u32 = 1;
/// A ready prefix with compiled-in paths.
const TREE: &str = "tree";
/// A lock and the archives that it names.
const PACKAGES: &str = "packages";
/// A manifest is some hundred bytes; more is something else.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 64 << 10;

/// Directories that every host has and that no symlink of ours may ever replace.
const HOST_DIRECTORIES: [&str; 18] = [
    "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
    "/srv", "/sys", "/tmp", "/usr", "/var",
];

/// What a bundle says about itself.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct BundleManifest {
    /// Version of the format.
    pub format: u32,
    /// `tree`: a ready prefix with compiled-in paths. `packages`: a lock and the archives that it names.
    pub kind: String,
    /// Of a tree, the path that is compiled into it, such as `/opt/flux`. Else empty, and there nonetheless: versions that
    /// know trees only read it before they look at the kind.
    pub prefix: PathBuf,
    /// Of a tree, conda's name for the platform it runs on, such as `linux-64`. Else empty.
    pub platform: String,
    /// Of packages, the platforms whose archives are all there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<String>,
    /// Program and version that wrote it.
    pub created_by: String,
}

impl BundleManifest {
    /// A tree that was built for `prefix`.
    pub fn tree(prefix: PathBuf, platform: String) -> Self {
        Self { prefix, platform, ..Self::of(TREE) }
    }

    /// All packages of a lock for these platforms.
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

    /// Whether a lock and archives follow, and no tree.
    pub fn is_packages(&self) -> bool {
        self.kind == PACKAGES
    }

    /// Conda's names for the platforms it can be installed on.
    pub fn platforms(&self) -> &[String] {
        if self.is_packages() { &self.platforms } else { std::slice::from_ref(&self.platform) }
    }

    /// Reads and checks.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(json).map_err(|e| format!("its {BUNDLE_MANIFEST} can't be read: {e}"))?;
        if manifest.format != FORMAT || ![TREE, PACKAGES].contains(&manifest.kind.as_str()) {
            return Err(format!(
                "it has format {} of kind `{}`, this version reads format {FORMAT} of kinds `{TREE}` and `{PACKAGES}`",
                manifest.format, manifest.kind
            ));
        }
        if !manifest.is_packages() {
            check_prefix(&manifest.prefix)?;
        } else if manifest.platforms.is_empty() {
            return Err(format!("its {BUNDLE_MANIFEST} names no platform"));
        }
        Ok(manifest)
    }
}

/// Whether a host can get a symlink at this path.
pub(crate) fn check_prefix(prefix: &Path) -> Result<(), String> {
    let plain = prefix.is_absolute()
        && prefix.components().skip(1).all(|c| matches!(c, Component::Normal(_)))
        && prefix.components().count() > 1;
    if !plain {
        return Err(format!("its prefix {} is not a plain absolute path", prefix.display()));
    }
    if HOST_DIRECTORIES.iter().any(|d| prefix == Path::new(d)) {
        return Err(format!("its prefix {} is a directory of every host; build Flux for /opt/flux", prefix.display()));
    }
    Ok(())
}
