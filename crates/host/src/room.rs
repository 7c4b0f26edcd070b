//! Is there room for packages, beside what kubelet wants to keep free?

use std::{io, os::fd::AsFd, path::Path};

use nix::sys::statvfs::{Statvfs, fstatvfs};

use hostapi::Refusal;

/// kubelet's `nodefs.available<10%`: below it, kubelet evicts pods, ours among them.
const KEPT_FREE_PERCENT: u64 = 10;

/// What a file system has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that are free.
    pub available: u64,
    /// Bytes, free or not.
    pub total: u64,
}

impl Room {
    /// Of the file system that `file` is on.
    ///
    /// # Errors
    /// fstatvfs(3)'s.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::from(&fstatvfs(file)?))
    }
}

impl From<&Statvfs> for Room {
    fn from(found: &Statvfs) -> Self {
        let unit = found.fragment_size();
        Self { available: found.blocks_available().saturating_mul(unit), total: found.blocks().saturating_mul(unit) }
    }
}

/// Whether `need` more bytes can be written below `place`.
///
/// # Errors
/// Both figures, and a remedy.
pub fn room(place: &Path, room: Room, need: u64) -> Result<(), Refusal> {
    let wanted = (room.total / 100 * KEPT_FREE_PERCENT).saturating_add(need);
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
