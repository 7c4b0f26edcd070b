use std::path::{Path, PathBuf};

/// The host's root directory as this process sees it: `/` in a host stage, another directory in a test.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// The root of a process that has entered the host's namespaces.
    pub fn host() -> Self {
        Self(PathBuf::from("/"))
    }

    /// A directory in place of the host's root.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// This process's path for the host's `path`.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The host's path for this process's `path`: the reverse of [`Self::path`].
    pub fn unpath(&self, path: &Path) -> PathBuf {
        Path::new("/").join(path.strip_prefix(&self.0).unwrap_or(path))
    }
}
