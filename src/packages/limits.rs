//! Keeps an archive from filling the disk: reads from [`Guarded`] fail before it unpacks to too much.

use std::{
    cell::Cell,
    io::{self, BufReader, Read},
    rc::Rc,
};

use flate2::read::MultiGzDecoder;

/// How much an archive may grow to. All of Flux with an MPI is below 1 GiB and 20,000 files.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes when unpacked.
    pub bytes: u64,
    /// Unpacked bytes per byte of the archive.
    pub ratio: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 30, ratio: 100, entries: 2_000_000 }
    }
}

/// A small archive may have any ratio.
const RATIO_COUNTS_FROM: u64 = 64 << 20;

/// Carries a limit through the readers above [`Guarded`].
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
struct LimitReached(String);

/// What [`Guarded`] stopped at, if that is what is behind this error.
pub(super) fn reached(error: &io::Error) -> Option<String> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = error.get_ref().map(|e| e as _);
    while let Some(cause) = next {
        if let Some(LimitReached(limit)) = cause.downcast_ref() {
            return Some(limit.clone());
        }
        // An io::Error skips its own payload in `source`.
        next = match cause.downcast_ref::<io::Error>() {
            Some(inner) => inner.get_ref().map(|e| e as _),
            None => cause.source(),
        };
    }
    None
}

/// Counts the packed bytes.
struct Counted<R> {
    inner: R,
    bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.bytes.set(self.bytes.get() + n as u64);
        Ok(n)
    }
}

/// Unpacks gzip, counts the bytes, and stops before they become too many.
pub(super) struct Guarded<R: Read> {
    inner: MultiGzDecoder<BufReader<Counted<R>>>,
    packed: Rc<Cell<u64>>,
    bytes: u64,
    limits: Limits,
}

impl<R: Read> Guarded<R> {
    pub(super) fn new(archive: R, limits: Limits) -> Self {
        let packed = Rc::new(Cell::new(0));
        let counted = Counted { inner: archive, bytes: packed.clone() };
        let inner = MultiGzDecoder::new(BufReader::with_capacity(1 << 16, counted));
        Self { inner, packed, bytes: 0, limits }
    }

    /// How much of the archive itself was read: a view that stays true.
    pub(super) fn position(&self) -> Rc<Cell<u64>> {
        self.packed.clone()
    }
}

impl<R: Read> Read for Guarded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.bytes += n as u64;
        let reached = if self.bytes > self.limits.bytes {
            format!("{} bytes", self.limits.bytes)
        } else if self.bytes > RATIO_COUNTS_FROM && self.bytes / self.limits.ratio > self.packed.get() {
            format!("{} times its own size", self.limits.ratio)
        } else {
            return Ok(n);
        };
        Err(io::Error::other(LimitReached(reached)))
    }
}
