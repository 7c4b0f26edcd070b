//! An archive that is not whole yet: `.<name>.part`, hashed while it grows.

use std::{
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncWriteExt, BufWriter},
    sync::mpsc::UnboundedSender,
};

use crate::fetch::archive;

/// Between the network's small pieces and the disk.
const BUFFER: usize = 1 << 18;
/// No bundle is as large: what an archive of unknown size may grow to.
pub(crate) const MOST_BYTES: u64 = 16 << 30;

/// Who sent bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    /// Somebody that an earlier fetch asked.
    Before,
    /// By its place among the peers.
    Peer(usize),
    /// Where the package set says that it is.
    Source,
}

/// The part. Whoever resumes it goes on behind its last byte; the hash is never made twice.
pub(crate) struct Part {
    path: PathBuf,
    /// Made with the first byte.
    file: Option<BufWriter<File>>,
    hash: Sha256,
    have: u64,
    size: Option<u64>,
    /// The only one who sent bytes, if there is only one.
    sender: Option<Sender>,
    mixed: bool,
    peers_sent: u64,
    advance: UnboundedSender<i64>,
}

impl Part {
    /// Takes up what an earlier fetch left. `advance` is told how many bytes came; negative where they have to come again.
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
            peers_sent: 0,
            advance,
        };
        match File::options().read(true).write(true).open(&part.path).await {
            Ok(file) => part.take_up(file).await?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        Ok(part)
    }

    async fn take_up(&mut self, mut file: File) -> io::Result<()> {
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

    /// Appends what `sender` sent.
    pub(crate) async fn append(&mut self, sender: Sender, bytes: &[u8]) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let file = File::options().create(true).write(true).truncate(true).open(&self.path).await?;
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
        if matches!(sender, Sender::Peer(_)) {
            self.peers_sent += bytes.len() as u64;
        }
        self.report(bytes.len() as i64);
    }

    /// Until here, a failed write may not have been told.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        match &mut self.file {
            Some(file) => file.flush().await,
            None => Ok(()),
        }
    }

    /// Throws it away: the next byte is the first one.
    pub(crate) fn discard(&mut self) -> io::Result<()> {
        self.file = None;
        self.report(-(self.have as i64));
        (self.hash, self.have, self.sender, self.mixed, self.peers_sent) = (Sha256::new(), 0, None, false, 0);
        match std::fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Gives it its name.
    pub(crate) async fn keep(mut self, as_path: &Path) -> io::Result<()> {
        if self.file.is_none() {
            // Even nothing has a sha256.
            self.append(Sender::Before, &[]).await?;
        }
        self.flush().await?;
        std::fs::rename(&self.path, as_path)
    }

    /// So many bytes.
    pub(crate) fn have(&self) -> u64 {
        self.have
    }

    /// So many of them came from peers.
    pub(crate) fn peers_sent(&self) -> u64 {
        self.peers_sent
    }

    /// So many more may come.
    pub(crate) fn room(&self) -> u64 {
        self.size.unwrap_or(MOST_BYTES).saturating_sub(self.have)
    }

    /// Lower-case hex.
    pub(crate) fn sha256(&self) -> String {
        hex::encode(self.hash.clone().finalize())
    }

    /// Nobody else can be blamed for what is in it.
    pub(crate) fn is_all_from(&self, sender: Sender) -> bool {
        !self.mixed && self.sender.is_none_or(|only| only == sender)
    }

    fn report(&self, bytes: i64) {
        // Nobody listens any more only when the whole fetch is being dropped.
        let _ = self.advance.send(bytes);
    }
}
