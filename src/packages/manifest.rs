//! What a bundle says about itself: its first entry.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the first entry of every bundle.
pub const BUNDLE_MANIFEST: &str = "flux-distribute-bundle.json";
/// The format this version writes and reads.
const FORMAT: u32 = 1;
/// A manifest is some hundred bytes; more is something else.
pub(super) const MAX_MANIFEST_BYTES: u64 = 64 << 10;

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
    /// `tree`: a ready prefix with compiled-in paths.
    pub kind: String,
    /// The path that is compiled into the tree, such as `/opt/flux`.
    pub prefix: PathBuf,
    /// Conda's name for the platform it runs on, such as `linux-64`.
    pub platform: String,
    /// Program and version that wrote it.
    pub created_by: String,
}

impl BundleManifest {
    /// A tree that was built for `prefix`.
    pub fn tree(prefix: PathBuf, platform: String) -> Self {
        let created_by = concat!("flux-distribute ", env!("CARGO_PKG_VERSION")).to_owned();
        Self { format: FORMAT, kind: "tree".to_owned(), prefix, platform, created_by }
    }

    /// Reads and checks.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(json).map_err(|e| format!("its {BUNDLE_MANIFEST} can't be read: {e}"))?;
        if manifest.format != FORMAT || manifest.kind != "tree" {
            return Err(format!(
                "it has format {} of kind `{}`, this version reads format {FORMAT} of kind `tree`",
                manifest.format, manifest.kind
            ));
        }
        check_prefix(&manifest.prefix)?;
        Ok(manifest)
    }
}

/// Whether a host can get a symlink at this path.
pub(super) fn check_prefix(prefix: &Path) -> Result<(), String> {
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
