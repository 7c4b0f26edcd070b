//! Protects disk and memory against decompression bombs: a sha256 proves only that an archive is the one that the lock
//! names, not that it is harmless. Reads from [`Guarded`] fail at a limit, and [`Memory`] bounds
//! the memory of all decoders together.

use std::{
    cell::Cell,
    convert::Infallible,
    io::{self, BufReader, Read, Seek, SeekFrom},
    rc::Rc,
    sync::{Condvar, Mutex, PoisonError},
};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use tar::Entry;

/// Limits for one archive, far above any real one: all of Flux with an MPI has less than 1 GiB and 20,000 files, and
/// gzip makes text ten times smaller, not a hundred times.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Unpacked bytes.
    pub bytes: u64,
    /// Unpacked bytes per packed byte.
    pub ratio: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 30, ratio: 100, entries: 2_000_000 }
    }
}

/// The ratio is checked only beyond this many unpacked bytes: a small, repetitive archive exceeds it and does no harm.
const RATIO_COUNTS_FROM: u64 = 64 << 20;

/// Most bytes of one entry's headers: the tar crate holds long names and extended headers in memory.
const METADATA: u64 = 1 << 20;

/// Most bytes of all names in one archive: whoever unpacks it holds them in memory. Those of all of Flux with an MPI have less than
/// 2 MiB.
const NAMES: u64 = 64 << 20;

/// Size of the read buffer for packed bytes.
const BUFFER: usize = 1 << 16;

/// Marks an error of [`Guarded`], so that [`reached`] finds it under what tar and the decoders wrap around it. Holds the
/// message.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
struct LimitReached(String);

/// The message of the limit that [`Guarded`] enforced, if that caused this error.
pub(crate) fn reached(error: &io::Error) -> Option<String> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = error.get_ref().map(|e| e as _);
    while let Some(cause) = next {
        if let Some(LimitReached(limit)) = cause.downcast_ref() {
            return Some(limit.clone());
        }
        // `source` of an io::Error skips its own payload.
        next = match cause.downcast_ref::<io::Error>() {
            Some(inner) => inner.get_ref().map(|e| e as _),
            None => cause.source(),
        };
    }
    None
}

impl Limits {
    /// The limit that `bytes` out of `packed` bytes exceed.
    pub(crate) fn check(self, bytes: u64, packed: u64) -> Option<String> {
        if bytes > self.bytes {
            return Some(format!("{} bytes", self.bytes));
        }
        let is_bomb = bytes > RATIO_COUNTS_FROM && bytes / self.ratio > packed;
        is_bomb.then(|| format!("{} times its own size", self.ratio))
    }
}

/// Fails once more bytes were read than it was made for, counting those that were read twice.
pub(crate) struct CutOff<R> {
    inner: R,
    left: u64,
}

impl<R> CutOff<R> {
    pub(crate) fn new(inner: R, bytes: u64) -> Self {
        Self { inner, left: bytes }
    }
}

impl<R: Read> Read for CutOff<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // One byte more than is left proves that there is too much; a whole buffer may be as large as the archive.
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX).saturating_add(1));
        let n = self.inner.read(&mut buffer[..most])?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other("it is too long"))?;
        Ok(n)
    }
}

impl<R: Seek> Seek for CutOff<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Counts the packed bytes that are read.
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

/// Decompresses, and fails once a limit is exceeded.
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

    /// No frame, first or later, may have a window larger than `window`, a power of 2.
    ///
    /// # Errors
    /// zstd can't allocate a context.
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

    /// The bytes that may be read until [`Entries`] finds the next entry; shared with it.
    pub(crate) fn allowed(&self) -> Rc<Cell<u64>> {
        self.allowed.clone()
    }

    /// The packed bytes read so far; the counter is shared and keeps counting.
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
        let reached = match allowed {
            None => Some(format!("{} MiB of names and headers for one entry", METADATA >> 20)),
            Some(_) => self.limits.check(self.bytes, self.packed.get()),
        };
        reached.map_or(Ok(n), |limit| Err(io::Error::other(LimitReached(limit))))
    }
}

/// The entries of a tar. Fails if the headers of one exceed [`METADATA`].
pub(crate) struct Entries<'a, R: Read> {
    inner: tar::Entries<'a, R>,
    allowed: Rc<Cell<u64>>,
    /// Bytes of all names so far.
    names: u64,
}

impl<'a, R: Read> Entries<'a, R> {
    /// `allowed` comes from the [`Guarded`] below `inner`.
    pub(crate) fn new(inner: tar::Entries<'a, R>, allowed: Rc<Cell<u64>>) -> Self {
        Self { inner, allowed, names: 0 }
    }
}

impl<'a, R: Read> Iterator for Entries<'a, R> {
    type Item = io::Result<Entry<'a, R>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.inner.next();
        if let Some(Ok(entry)) = &next {
            let target = entry.link_name_bytes().map_or(0, |target| target.len());
            self.names += (entry.path_bytes().len() + target) as u64;
            if self.names > NAMES {
                self.allowed.set(0);
                return Some(Err(io::Error::other(LimitReached(format!("{} MiB of names", NAMES >> 20)))));
            }
        }
        self.allowed.set(match &next {
            // The content is either read by the caller or skipped before the next entry, so it always counts.
            Some(Ok(entry)) => entry.size().saturating_add(METADATA),
            // A damaged archive is not read on.
            Some(Err(_)) => 0,
            // The rest of the file is read without this limit, so that its sha256 is that of the whole archive.
            None => u64::MAX,
        });
        next
    }
}

/// The window of a zstd frame, which its decoder must hold in memory, from the frame's first bytes (RFC 8878, 3.1.1.1).
/// `None` if they don't begin a zstd frame.
pub(crate) fn zstd_window(start: &[u8]) -> Option<u64> {
    let [0x28, 0xb5, 0x2f, 0xfd, descriptor, rest @ ..] = start else { return None };
    let single_segment = descriptor & 0x20 != 0;
    if !single_segment {
        let window = *rest.first()?;
        let base = 1_u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    // A single segment has no window field: the window is the content.
    let dictionary_id = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = rest.get(dictionary_id..dictionary_id + [1, 2, 4, 8][usize::from(descriptor >> 6)])?;
    let mut bytes = [0; 8];
    bytes[..size.len()].copy_from_slice(size);
    Some(u64::from_le_bytes(bytes) + if size.len() == 2 { 256 } else { 0 })
}

/// A memory budget in bytes, shared by concurrent decoders.
pub(crate) struct Memory {
    all: u64,
    free: Mutex<u64>,
    freed: Condvar,
}

impl Memory {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { all: bytes, free: Mutex::new(bytes), freed: Condvar::new() }
    }

    /// Waits until `bytes` are free. A request beyond the whole budget gets all of it, and so runs alone.
    pub(crate) fn take(&self, bytes: u64) -> Reservation<'_> {
        let bytes = bytes.min(self.all);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < bytes {
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= bytes;
        Reservation { memory: self, bytes }
    }
}

/// A reservation, returned to the budget on drop.
pub(crate) struct Reservation<'a> {
    memory: &'a Memory,
    bytes: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        *self.memory.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_of_a_frame_agrees_with_zstd() {
        // Expected values from `zstd -v -l` on frames made in these ways.
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
    fn names_that_would_fill_the_memory_together_are_refused() {
        let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        for number in 0..70 {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            tar.append_data(&mut header, format!("{number}{}", "/a".repeat(500_000)), io::empty()).unwrap();
        }
        let packed = tar.into_inner().unwrap().finish().unwrap();
        let guarded = Guarded::gzip(&packed[..], Limits { ratio: u64::MAX, ..Limits::default() });
        let allowed = guarded.allowed();
        let mut archive = tar::Archive::new(guarded);
        let mut entries = Entries::new(archive.entries().unwrap(), allowed);
        let refused = entries.find_map(Result::err).unwrap();
        assert_eq!(reached(&refused).unwrap(), "64 MiB of names");
    }

    #[test]
    fn no_more_is_read_than_shows_that_the_limit_is_exceeded() {
        let mut limited = CutOff::new(io::Cursor::new(vec![0; 1000]), 10);
        assert_eq!(limited.read(&mut [0; 10]).unwrap(), 10);
        assert_eq!(limited.read(&mut [0; 500]).unwrap_err().to_string(), "it is too long");
        assert_eq!(limited.inner.position(), 11);
    }

    #[test]
    fn memory_is_reserved_once_and_returned() {
        let memory = Memory::new(10);
        let one = memory.take(6);
        assert_eq!(*memory.free.lock().unwrap(), 4);
        drop(one);
        // A request beyond the budget gets all of it.
        let all = memory.take(100);
        assert_eq!(*memory.free.lock().unwrap(), 0);
        drop(all);
        assert_eq!(*memory.free.lock().unwrap(), 10);
    }
}
