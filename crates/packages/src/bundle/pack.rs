//! Packs a tree into a bundle. The same tree gives the same bytes: entries are sorted, without owners or the current
//! time.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

use crate::{
    BUNDLE_MANIFEST, BundleManifest, ENVIRONMENT_MARKER,
    environment::{
        guard::{KEPT_MODE, bad_symlink},
        records::RECORDS,
    },
};
use hostapi::{Progress, Tally};

/// Why a tree could not be packed.
#[derive(Debug)]
pub(crate) enum PackError {
    /// An entry that hosts would refuse to unpack.
    Entry { path: PathBuf, reason: String },
    /// Reading the tree failed.
    Read { path: PathBuf, source: io::Error },
    /// Writing the bundle failed.
    Write(io::Error),
}

impl PackError {
    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Read { path, source }
    }
}

/// Writes the tree at `root` as a bundle and returns the writer. `progress` gets how many bytes are packed, before each file.
pub(crate) fn pack<W: Write>(
    root: &Path,
    manifest: &BundleManifest,
    out: W,
    progress: &mut dyn FnMut(Progress),
) -> Result<W, PackError> {
    // Leave the header's time at 0: it would be the time of packing.
    let gzip = GzBuilder::new().write(out, Compression::default());
    let mut packing = Packing {
        root,
        prefix: &manifest.prefix,
        tar: Builder::new(gzip),
        hard_links: HashMap::new(),
        bytes: Tally { done: 0, total: bytes_below(root) },
        progress,
    };
    append_manifest(&mut packing.tar, manifest)?;
    packing.directory(Path::new(""))?;
    packing.tar.into_inner().and_then(flate2::write::GzEncoder::finish).map_err(PackError::Write)
}

/// Appends the manifest, which must be the first entry.
pub(crate) fn append_manifest<W: Write>(tar: &mut Builder<W>, manifest: &BundleManifest) -> Result<(), PackError> {
    let json = serde_json::to_vec_pretty(manifest).map_err(|e| PackError::Write(e.into()))?;
    append_bytes(tar, BUNDLE_MANIFEST, &json)
}

/// Appends a small generated file.
pub(crate) fn append_bytes<W: Write>(tar: &mut Builder<W>, path: &str, bytes: &[u8]) -> Result<(), PackError> {
    let mut header = header(EntryType::Regular, 0o644, 0);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).map_err(PackError::Write)
}

/// Appends the file at `full`, of `size` bytes, read through `from`. Returns `from`.
pub(crate) fn append_file<W: Write, R: Read>(
    tar: &mut Builder<W>,
    mut header: Header,
    path: &Path,
    (full, size): (&Path, u64),
    from: R,
) -> Result<R, PackError> {
    header.set_size(size);
    // Write exactly as many bytes as the header says, even if the file changes meanwhile.
    let mut content = Exact { from, left: size, failed: None };
    let appended = tar.append_data(&mut header, path, &mut content);
    match content.failed {
        Some(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            let reason = "it changed while it was being packed".to_owned();
            Err(PackError::Entry { path: full.to_owned(), reason })
        }
        Some(source) => Err(PackError::Read { path: full.to_owned(), source }),
        None => appended.map(|()| content.from).map_err(PackError::Write),
    }
}

struct Packing<'a, W: Write> {
    root: &'a Path,
    /// The prefix that the tree was built for.
    prefix: &'a Path,
    tar: Builder<W>,
    /// (device, inode) → the path under which the file was packed first.
    hard_links: HashMap<(u64, u64), PathBuf>,
    bytes: Tally,
    progress: &'a mut dyn FnMut(Progress),
}

impl<W: Write> Packing<'_, W> {
    fn directory(&mut self, below: &Path) -> Result<(), PackError> {
        let full = self.root.join(below);
        let entries = fs::read_dir(&full).and_then(|entries| entries.map(|e| e.map(|e| e.file_name())).collect());
        let mut names: Vec<_> = entries.map_err(PackError::read(&full))?;
        names.sort();
        for name in names {
            // Our own files describe the place that the tree comes from and don't belong into the bundle.
            let ours = [ENVIRONMENT_MARKER, RECORDS, BUNDLE_MANIFEST].iter().any(|ours| name == *ours);
            let ours = ours && below.as_os_str().is_empty();
            if !ours {
                self.entry(&below.join(name))?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path) -> Result<(), PackError> {
        let full = self.root.join(path);
        let metadata = fs::symlink_metadata(&full).map_err(PackError::read(&full))?;
        let kind = metadata.file_type();
        if kind.is_dir() {
            let mut header = header(EntryType::Directory, metadata.mode(), metadata.mtime());
            self.tar.append_data(&mut header, path.join(""), io::empty()).map_err(PackError::Write)?;
            self.directory(path)
        } else if kind.is_symlink() {
            let target = fs::read_link(&full).map_err(PackError::read(&full))?;
            if let Some(reason) = bad_symlink(self.prefix, path, &target) {
                return Err(PackError::Entry { path: full, reason: format!("it {reason}") });
            }
            let mut header = header(EntryType::Symlink, 0o777, metadata.mtime());
            self.tar.append_link(&mut header, path, target).map_err(PackError::Write)
        } else if kind.is_file() {
            self.file(path, &full, &metadata)
        } else {
            let what = if kind.is_socket() { "a socket" } else { "a device or a fifo" };
            Err(PackError::Entry { path: full, reason: format!("it is {what}; remove it") })
        }
    }

    fn file(&mut self, path: &Path, full: &Path, metadata: &fs::Metadata) -> Result<(), PackError> {
        (self.progress)(Progress::bytes("packing", self.bytes.done, self.bytes.total));
        self.bytes.done = self.bytes.done.saturating_add(metadata.len());
        if metadata.nlink() > 1 {
            let inode = (metadata.dev(), metadata.ino());
            if let Some(first) = self.hard_links.get(&inode) {
                let mut header = header(EntryType::Link, metadata.mode(), metadata.mtime());
                return self.tar.append_link(&mut header, path, first).map_err(PackError::Write);
            }
            self.hard_links.insert(inode, path.to_owned());
        }
        if metadata.mode() & 0o6000 != 0 {
            tracing::warn!(path = %full.display(), "packed without its set-user-ID or set-group-ID bit, which hosts don't install");
        }
        let header = header(EntryType::Regular, metadata.mode(), metadata.mtime());
        let file = File::open(full).map_err(PackError::read(full))?;
        append_file(&mut self.tar, header, path, (full, metadata.len()), file).map(drop)
    }
}

/// The bytes of all files below `directory`, hard links as often as they stand there. What can't be read counts nothing: packing says why.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) if metadata.is_file() => metadata.len(),
        _ => 0,
    });
    bytes.fold(0, u64::saturating_add)
}

/// A header with the mode bits that hosts keep. A symlink's mode stays 0777, so that an unchanged tree keeps its
/// sha256.
pub(crate) fn header(kind: EntryType, mode: u32, mtime: i64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(if kind == EntryType::Symlink { mode } else { mode & KEPT_MODE });
    header.set_mtime(mtime.try_into().unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

/// Reads exactly `left` bytes and remembers why it failed: the tar crate doesn't distinguish a read error from a full
/// disk.
struct Exact<R> {
    from: R,
    left: u64,
    failed: Option<io::Error>,
}

impl<R: Read> Read for Exact<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = match (&mut self.from).take(self.left).read(buffer) {
            Ok(0) if self.left > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            read => read,
        };
        match read {
            Ok(n) => {
                self.left -= n as u64;
                Ok(n)
            }
            Err(error) => {
                let kind = error.kind();
                self.failed = Some(error);
                Err(kind.into())
            }
        }
    }
}
