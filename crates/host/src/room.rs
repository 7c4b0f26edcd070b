//! Is there room for the packages, above what the kubelet keeps free?

use std::{fs::File, io, path::Path};

use nix::{
    errno::Errno,
    sys::statvfs::{FsFlags, fstatvfs},
};

use hostapi::Refusal;

/// The kubelet's default `nodefs.available<10%`: below it, the kubelet evicts pods, including ours.
const KEPT_FREE_PERCENT: u64 = 10;

/// Space on a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that are free.
    pub available: u64,
    /// Bytes in all.
    pub total: u64,
    /// Files that can still be made; None if the file system has no limit on files.
    pub files: Option<u64>,
}

impl Room {
    /// Space on the file system of `path`.
    ///
    /// # Errors
    /// As for [`FileSystem::of`].
    pub fn of(path: &Path) -> io::Result<Self> {
        FileSystem::of(path).map(|found| found.room)
    }

    /// Bytes that are free above what the kubelet keeps free.
    pub fn above_kept_free(self) -> u64 {
        self.available.saturating_sub(self.kept_free())
    }

    fn kept_free(self) -> u64 {
        self.total / 100 * KEPT_FREE_PERCENT
    }
}

/// The file system of a path, as it is mounted there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    /// Its space.
    pub room: Room,
    /// Nothing can be written.
    pub is_read_only: bool,
    /// No program can be run.
    pub is_noexec: bool,
}

impl FileSystem {
    /// That of `path`, which must be readable.
    ///
    /// # Errors
    /// If `path` can't be opened, or statvfs(3) fails.
    pub fn of(path: &Path) -> io::Result<Self> {
        let found = fstatvfs(File::open(path)?)?;
        let (unit, flags) = (found.fragment_size(), found.flags());
        let room = Room {
            available: found.blocks_available().saturating_mul(unit),
            total: found.blocks().saturating_mul(unit),
            // A file system without a limit reports 0 free of 0.
            files: Some(found.files_available()).filter(|_| found.files() > 0),
        };
        let (is_read_only, is_noexec) = (flags.contains(FsFlags::ST_RDONLY), flags.contains(FsFlags::ST_NOEXEC));
        Ok(Self { room, is_read_only, is_noexec })
    }
}

/// True if an error's `message` contains the system's words for a full disk or an exhausted quota.
pub fn says_full(message: &str) -> bool {
    [Errno::ENOSPC, Errno::EDQUOT].iter().any(|errno| message.contains(&io::Error::from(*errno).to_string()))
}

/// Checks that `need` more bytes fit below `place`.
///
/// # Errors
/// A transient refusal with both figures and a remedy.
pub fn room(place: &Path, room: Room, need: u64) -> Result<(), Refusal> {
    let wanted = room.kept_free().saturating_add(need);
    if room.available >= wanted {
        return Ok(());
    }
    Err(Refusal::transient(format!(
        "{} has too little room: {} MiB are free, and {} MiB are needed ({} for the packages, and {KEPT_FREE_PERCENT} % that \
         must stay free or kubelet evicts pods); make room, or set spec.prefix to another file system",
        place.display(),
        room.available >> 20,
        wanted.div_ceil(1 << 20),
        need.div_ceil(1 << 20),
    )))
}
