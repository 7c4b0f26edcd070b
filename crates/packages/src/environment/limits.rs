//! Keeps an archive from filling the disk or the memory: reads from [`Guarded`] fail before it unpacks to too much, and
//! [`Memory`] bounds what unpackers hold together.

use std::{
    cell::Cell,
    convert::Infallible,
    io::{self, BufReader, Read},
    rc::Rc,
    sync::{Condvar, Mutex, PoisonError},
};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use tar::Entry;

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

/// What a tar may say of one entry besides its content: the tar crate holds long names and extended headers whole.
const METADATA: u64 = 1 << 20;

/// Packed bytes that are read at a time.
const BUFFER: usize = 1 << 16;

/// Carries a limit through the readers above [`Guarded`].
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
struct LimitReached(String);

/// What [`Guarded`] stopped at, if that is what is behind this error.
pub(crate) fn reached(error: &io::Error) -> Option<String> {
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

/// Unpacks, counts the bytes, and stops before they become too many.
pub(crate) struct Guarded<'a> {
    inner: Box<dyn Read + 'a>,
    packed: Rc<Cell<u64>>,
    bytes: u64,
    limits: Limits,
    allowed: Rc<Cell<u64>>,
}

impl<'a> Guarded<'a> {
    pub(crate) fn gzip(archive: impl Read + 'a, limits: Limits) -> Self {
        let unpacking = Self::new(archive, limits, |packed| Ok::<_, Infallible>(MultiGzDecoder::new(packed)));
        unpacking.unwrap_or_else(|never| match never {})
    }

    pub(crate) fn bzip2(archive: impl Read + 'a, limits: Limits) -> Self {
        let unpacking = Self::new(archive, limits, |packed| Ok::<_, Infallible>(MultiBzDecoder::new(packed)));
        unpacking.unwrap_or_else(|never| match never {})
    }

    /// No frame, be it the first or a later one, may have a window larger than `window`, a power of 2.
    ///
    /// # Errors
    /// Where no context for it can be made.
    pub(crate) fn zstd(archive: impl Read + 'a, window: u64, limits: Limits) -> io::Result<Self> {
        Self::new(archive, limits, |packed| {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
            decoder.window_log_max(window.ilog2())?;
            Ok(decoder)
        })
    }

    fn new<R: Read + 'a, D: Read + 'a, E>(
        archive: R,
        limits: Limits,
        decoder: impl FnOnce(BufReader<Counted<R>>) -> Result<D, E>,
    ) -> Result<Self, E> {
        let packed = Rc::new(Cell::new(0));
        let counted = Counted { inner: archive, bytes: packed.clone() };
        let inner = Box::new(decoder(BufReader::with_capacity(BUFFER, counted))?);
        Ok(Self { inner, packed, bytes: 0, limits, allowed: Rc::new(Cell::new(METADATA)) })
    }

    /// How many bytes may be read until [`Entries`] has found the next entry.
    pub(crate) fn allowed(&self) -> Rc<Cell<u64>> {
        self.allowed.clone()
    }

    /// How much of the archive itself was read: a view that stays true.
    pub(crate) fn position(&self) -> Rc<Cell<u64>> {
        self.packed.clone()
    }
}

impl Read for Guarded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.bytes += n as u64;
        let allowed = self.allowed.get().checked_sub(n as u64);
        self.allowed.set(allowed.unwrap_or_default());
        let reached = if allowed.is_none() {
            format!("{} MiB of names and headers for one entry", METADATA >> 20)
        } else if self.bytes > self.limits.bytes {
            format!("{} bytes", self.limits.bytes)
        } else if self.bytes > RATIO_COUNTS_FROM && self.bytes / self.limits.ratio > self.packed.get() {
            format!("{} times its own size", self.limits.ratio)
        } else {
            return Ok(n);
        };
        Err(io::Error::other(LimitReached(reached)))
    }
}

/// The entries of a tar, none of which may come with more than [`METADATA`].
pub(crate) struct Entries<'a, R: Read> {
    inner: tar::Entries<'a, R>,
    allowed: Rc<Cell<u64>>,
}

impl<'a, R: Read> Entries<'a, R> {
    /// `allowed` is that of the [`Guarded`] below `inner`.
    pub(crate) fn new(inner: tar::Entries<'a, R>, allowed: Rc<Cell<u64>>) -> Self {
        Self { inner, allowed }
    }
}

impl<'a, R: Read> Iterator for Entries<'a, R> {
    type Item = io::Result<Entry<'a, R>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.inner.next();
        self.allowed.set(match &next {
            // The content is read by whoever takes the entry, or skipped before the next one: either way it is used up.
            Some(Ok(entry)) => entry.size().saturating_add(METADATA),
            Some(Err(_)) => 0,
            None => u64::MAX,
        });
        next
    }
}

/// How far back a zstd frame may refer, which is what its decoder must hold: by its first bytes (RFC 8878, 3.1.1.1).
/// None where it is no such frame.
pub(crate) fn zstd_window(start: &[u8]) -> Option<u64> {
    let [0x28, 0xb5, 0x2f, 0xfd, descriptor, rest @ ..] = start else { return None };
    let single_segment = descriptor & 0x20 != 0;
    if !single_segment {
        let window = *rest.first()?;
        let base = 1_u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // No window of its own: the content is it.
    let dictionary_id = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = rest.get(dictionary_id..dictionary_id + [1, 2, 4, 8][usize::from(descriptor >> 6)])?;
    let mut bytes = [0; 8];
    bytes[..size.len()].copy_from_slice(size);
    Some(u64::from_le_bytes(bytes) + if size.len() == 2 { 256 } else { 0 })
}

/// A store of bytes that those who unpack at the same time share.
pub(crate) struct Memory {
    all: u64,
    free: Mutex<u64>,
    freed: Condvar,
}

impl Memory {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { all: bytes, free: Mutex::new(bytes), freed: Condvar::new() }
    }

    /// Waits until `bytes` are free. Who wants more than there is waits until all is, and then is alone.
    pub(crate) fn take(&self, bytes: u64) -> Taken<'_> {
        let bytes = bytes.min(self.all);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < bytes {
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= bytes;
        Taken { memory: self, bytes }
    }
}

/// Given back when it is dropped.
pub(crate) struct Taken<'a> {
    memory: &'a Memory,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.memory.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_of_a_frame_is_what_zstd_says() {
        // `zstd -v -l` of frames that were made with these.
        for (start, window) in [
            // Streamed: --long=27 and -19.
            (&[0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x88][..], Some(128 << 20)),
            (&[0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x68], Some(8 << 20)),
            // From a file of 600 bytes: a single segment.
            (&[0x28, 0xb5, 0x2f, 0xfd, 0x64, 0x58, 0x01], Some(600)),
            (&[0x28, 0xb5, 0x2f, 0xfd, 0x64, 0x58], None),
            (&[0x28, 0xb5, 0x2f, 0xfd], None),
            (b"PK\x03\x04", None),
        ] {
            assert_eq!(zstd_window(start), window, "{start:x?}");
        }
    }

    #[test]
    fn memory_is_given_out_once_and_comes_back() {
        let memory = Memory::new(10);
        let one = memory.take(6);
        assert_eq!(*memory.free.lock().unwrap(), 4);
        drop(one);
        // More than there is means all of it.
        let all = memory.take(100);
        assert_eq!(*memory.free.lock().unwrap(), 0);
        drop(all);
        assert_eq!(*memory.free.lock().unwrap(), 10);
    }
}
