//! Is there room for the packages, above what the kubelet keeps free?

use std::{io, os::fd::AsFd, path::Path};

use nix::sys::statvfs::{Statvfs, fstatvfs};

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
}

impl Room {
    /// Space on the file system that `file` is on.
    ///
    /// # Errors
    /// If fstatvfs(3) fails.
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

/// Checks that `need` more bytes fit below `place`.
///
/// # Errors
/// A transient refusal with both figures and a remedy.
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
