//! Why root does not trust a path.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use nix::errno::Errno;

use hostapi::Refusal;

/// In a directory with this bit, only a file's owner and the directory's owner can rename or remove the file.
pub(super) const STICKY: u32 = 0o1000;

/// Why a path is not trusted. Its text also tells the remedy.
#[derive(Debug)]
pub enum Distrust {
    /// It belongs to another user.
    Owner {
        /// The path, on the host.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Users other than root can change its content.
    WritableByOthers {
        /// The path, on the host.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is another kind of file than expected.
    Kind {
        /// The path, on the host.
        path: PathBuf,
        /// The expected kind, such as `a directory`.
        wanted: &'static str,
    },
    /// It is on a FUSE file system, whose content another user's program decides.
    Mounted {
        /// The path, on the host.
        path: PathBuf,
        /// The user who mounted it.
        uid: u32,
    },
    /// It can't be opened or examined.
    Io {
        /// The path, on the host.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Distrust {
    pub(super) fn io(path: &Path, errno: Errno) -> Self {
        Self::Io { path: path.to_owned(), source: errno.into() }
    }

    /// What is wrong with the path, without the remedy.
    pub fn problem(&self) -> String {
        match self {
            Self::Owner { path, uid } => format!("{} belongs to the user with uid {uid}", path.display()),
            Self::WritableByOthers { path, mode } => {
                format!("users other than root can write to {} (its mode is {mode:04o})", path.display())
            }
            Self::Kind { path, wanted } => format!("{} is not {wanted}", path.display()),
            Self::Mounted { path, uid } => {
                format!("{} is on a file system that the user with uid {uid} has mounted", path.display())
            }
            Self::Io { path, .. } => format!("can't open {}", path.display()),
        }
    }
}

/// The remedy for a path that others can write to. A sticky directory is open on purpose, as /tmp is.
fn close(path: &Path, mode: u32) -> String {
    let chmod = format!("run `chmod go-w {}`", path.display());
    match mode & STICKY {
        0 => chmod,
        _ => format!("choose another directory, or, if nobody else is to write there, {chmod}"),
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem())?;
        match self {
            Self::Owner { path, .. } => {
                write!(f, ", so root does not trust it; if it is yours, run `chown root {}`", path.display())
            }
            Self::WritableByOthers { path, mode } => {
                write!(f, ", so root does not trust what is in it; {}", close(path, *mode))
            }
            Self::Kind { .. } => f.write_str("; move it away"),
            Self::Mounted { .. } => f.write_str(", so root does not trust what is in it; unmount it"),
            Self::Io { .. } => Ok(()),
        }
    }
}

impl std::error::Error for Distrust {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<Distrust> for io::Error {
    fn from(distrust: Distrust) -> Self {
        match distrust {
            Distrust::Io { source, .. } => source,
            other => Self::other(other),
        }
    }
}

impl From<Distrust> for Refusal {
    fn from(distrust: Distrust) -> Self {
        match distrust {
            Distrust::Io { path, source } => Self::io("open", &path, &source),
            other => Self::new(other.to_string()),
        }
    }
}
