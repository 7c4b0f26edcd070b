//! An incomplete archive: `.<name>.part`, hashed while it grows.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use tokio::{
    fs::{File, OpenOptions},
    io::{AsyncReadExt, AsyncWriteExt, BufWriter},
    sync::mpsc::UnboundedSender,
};

use crate::fetch::archive;
use host::files::NO_SYMLINK;

/// Size of the write buffer; the network delivers smaller pieces.
const BUFFER: usize = 1 << 18;
/// Limit for an archive of unknown size; no bundle is as large.
pub(crate) const MOST_BYTES: u64 = 16 << 30;

/// The origin of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    /// An earlier fetch, which may have asked any server.
    Before,
    /// The peer with this index.
    Peer(usize),
    /// The package set's own source.
    Source,
}

/// A partial file and the hash of its content. A resumed download appends to both.
pub(crate) struct Part {
    path: PathBuf,
    /// Created with the first byte.
    file: Option<BufWriter<File>>,
    hash: Sha256,
    have: u64,
    size: Option<u64>,
    /// The latest sender; the only one unless `mixed`.
    sender: Option<Sender>,
    mixed: bool,
    /// Bytes from each peer.
    sent: BTreeMap<usize, u64>,
    advance: UnboundedSender<i64>,
}

impl Part {
    /// Opens the partial file that an earlier fetch left, or starts a new one. `advance` receives the number of bytes
    /// added; negative if they were discarded.
    pub(crate) async fn open(
        pkgs: &Path,
        name: &str,
        size: Option<u64>,
        advance: UnboundedSender<i64>,
    ) -> io::Result<Self> {
        let path = pkgs.join(archive::part_name(name));
        let mut part = Self {
            path,
            file: None,
            hash: Sha256::new(),
            have: 0,
            size,
            sender: None,
            mixed: false,
            sent: BTreeMap::new(),
            advance,
        };
        match writable().read(true).open(&part.path).await {
            Ok(file) => part.resume(file).await?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        Ok(part)
    }

    async fn resume(&mut self, mut file: File) -> io::Result<()> {
        if file.metadata().await?.len() > self.room() {
            return self.discard();
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            match file.read(&mut buffer).await? {
                0 => break,
                n => self.count(Sender::Before, &buffer[..n]),
            }
        }
        self.file = Some(BufWriter::with_capacity(BUFFER, file));
        Ok(())
    }

    /// Appends bytes from `sender`.
    pub(crate) async fn append(&mut self, sender: Sender, bytes: &[u8]) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let file = writable().create(true).truncate(true).open(&self.path).await?;
                none.insert(BufWriter::with_capacity(BUFFER, file))
            }
        };
        file.write_all(bytes).await?;
        self.count(sender, bytes);
        Ok(())
    }

    fn count(&mut self, sender: Sender, bytes: &[u8]) {
        self.hash.update(bytes);
        self.have += bytes.len() as u64;
        self.mixed |= self.sender.is_some_and(|before| before != sender);
        self.sender = Some(sender);
        if let Sender::Peer(at) = sender {
            *self.sent.entry(at).or_default() += bytes.len() as u64;
        }
        self.report((bytes.len() as u64).cast_signed());
    }

    /// Flushes the buffer: an earlier write may have failed without an error so far.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        match &mut self.file {
            Some(file) => file.flush().await,
            None => Ok(()),
        }
    }

    /// Deletes the content, so that the download starts again at the first byte.
    pub(crate) fn discard(&mut self) -> io::Result<()> {
        self.file = None;
        self.report(-self.have.cast_signed());
        (self.hash, self.have, self.sender, self.mixed) = (Sha256::new(), 0, None, false);
        self.sent.clear();
        match std::fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Renames the complete file to `as_path`.
    pub(crate) async fn keep(mut self, as_path: &Path) -> io::Result<()> {
        if self.file.is_none() {
            // An empty archive has a sha256 too, so its file must exist.
            self.append(Sender::Before, &[]).await?;
        }
        self.flush().await?;
        std::fs::rename(&self.path, as_path)
    }

    /// Bytes so far.
    pub(crate) fn have(&self) -> u64 {
        self.have
    }

    /// Bytes of these that came from peers.
    pub(crate) fn peers_sent(&self) -> u64 {
        self.sent.values().sum()
    }

    /// Bytes of these that came from the peer with this index.
    pub(crate) fn peer_sent(&self, at: usize) -> u64 {
        self.sent.get(&at).copied().unwrap_or_default()
    }

    /// Bytes that may still be appended.
    pub(crate) fn room(&self) -> u64 {
        self.size.unwrap_or(MOST_BYTES).saturating_sub(self.have)
    }

    /// The sha256 of the content so far, in lower-case hex.
    pub(crate) fn sha256(&self) -> String {
        hex::encode(self.hash.clone().finalize())
    }

    /// True if all bytes came from `sender`, which is then to blame if they are wrong.
    pub(crate) fn is_all_from(&self, sender: Sender) -> bool {
        !self.mixed && self.sender.is_none_or(|only| only == sender)
    }

    fn report(&self, bytes: i64) {
        // The receiver is gone only if the whole fetch is being dropped.
        let _ = self.advance.send(bytes);
    }
}

/// For writing, and never through a symlink.
fn writable() -> OpenOptions {
    let mut options = File::options();
    options.write(true).custom_flags(NO_SYMLINK);
    options
}
