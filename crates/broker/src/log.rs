//! Follows the broker's log as it grows, for the pod's stdout.

use std::{
    fs::{File, Metadata},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::io::unix::AsyncFd;

use host::{
    changes::Changes,
    log::{MOST_READ, without_level},
};

/// How often the file is checked if inotify is not available.
const POLL: Duration = Duration::from_millis(250);
/// Most bytes in a line; a longer one is split.
const MAX_LINE: usize = 16 << 10;

/// Follows the log at a path: while a writer appends, after a trim truncates it, and before it exists. If it is more than
/// [`MOST_READ`] bytes behind, it skips what is older.
#[derive(Debug)]
pub struct LogFollower {
    path: PathBuf,
    file: Option<File>,
    offset: u64,
    partial: Vec<u8>,
    ready: std::collections::VecDeque<String>,
    changes: Option<AsyncFd<Changes>>,
}

impl LogFollower {
    /// Follows `path` from its present end: an earlier agent has printed what is before.
    pub fn from_end(path: &Path) -> Self {
        let mut follower = Self::from_start(path);
        follower.reopen();
        follower.offset = follower.metadata().map_or(0, |metadata| metadata.len());
        follower
    }

    /// Follows `path` from its first line.
    pub fn from_start(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            offset: 0,
            partial: Vec::new(),
            ready: std::collections::VecDeque::new(),
            changes: None,
        }
    }

    /// The next line, without the level that a broker puts before it for systemd. Waits until there is one.
    /// Cancellation loses nothing.
    pub async fn next_line(&mut self) -> String {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return line;
            }
            // Watch before reading, so that a change between the two is seen by one of them.
            if self.changes.is_none() {
                self.changes = watch_directory(&self.path).ok();
            }
            let more = self.read_more();
            if more.is_err() {
                self.file = None;
            }
            if self.ready.is_empty() && !matches!(more, Ok(true)) {
                self.wait().await;
            }
        }
    }

    async fn wait(&mut self) {
        let Some(changes) = &self.changes else {
            return tokio::time::sleep(POLL).await;
        };
        let Ok(mut ready) = changes.readable().await else {
            self.changes = None;
            return tokio::time::sleep(POLL).await;
        };
        let taken = ready.try_io(|changes| changes.get_ref().take());
        // A directory that was removed sends no more changes.
        if !matches!(taken, Ok(Ok(())) | Err(_)) || !self.path.parent().is_some_and(Path::is_dir) {
            self.changes = None;
        }
    }

    fn metadata(&self) -> Option<Metadata> {
        self.file.as_ref().and_then(|file| file.metadata().ok())
    }

    fn reopen(&mut self) {
        self.file = File::open(&self.path).ok();
        self.offset = 0;
    }

    /// Reads new content; true if there was any.
    fn read_more(&mut self) -> io::Result<bool> {
        let there = std::fs::metadata(&self.path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
        let held = self.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        if held.is_none() || (there.is_some() && there != held) {
            self.reopen();
        }
        let Some(file) = &mut self.file else { return Ok(false) };
        let length = file.metadata()?.len();
        if length < self.offset {
            self.offset = 0;
            self.partial.clear();
        }
        if length - self.offset > MOST_READ {
            self.offset = length - MOST_READ;
            self.partial.clear();
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut chunk = vec![0; 64 << 10];
        let count = file.read(&mut chunk)?;
        self.offset += count as u64;
        for byte in &chunk[..count] {
            if *byte == b'\n' || self.partial.len() >= MAX_LINE {
                let line = String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned();
                self.ready.push_back(without_level(&line).to_owned());
            }
            if *byte != b'\n' {
                self.partial.push(*byte);
            }
        }
        Ok(count > 0)
    }
}

/// Watches the directory, which also reports a file that does not exist yet.
#[allow(
    deprecated,
    reason = "its successor is an unsafe fn, whose condition Changes fulfils: it has one descriptor, which stays open"
)]
fn watch_directory(path: &Path) -> io::Result<AsyncFd<Changes>> {
    AsyncFd::new(Changes::of(path.parent().unwrap_or(Path::new(".")))?)
}

/// The broker name and the reason in a line in which the lead's broker reports that it refuses another one (overlay.c):
/// `… rejecting connection from nodeX (rank 2): slot2 is configured as rank 2: mismatched config?`
pub fn rejection(line: &str) -> Option<(String, String)> {
    let (_, rest) = line.split_once("rejecting connection from ")?;
    let (broker, reason) = rest.split_once(": ")?;
    let name = broker.split(' ').next()?;
    Some((name.to_owned(), reason.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write};

    use super::*;
    use host::log::{self, trim_log};

    async fn next(follower: &mut LogFollower) -> String {
        tokio::time::timeout(Duration::from_secs(10), follower.next_line()).await.unwrap()
    }

    #[tokio::test]
    async fn lines_are_followed_across_a_trim() {
        let directory = tempfile::tempdir().unwrap();
        let path = log::path(directory.path());
        let mut follower = LogFollower::from_start(&path);
        let waiting = tokio::spawn(async move {
            let first = next(&mut follower).await;
            (first, follower)
        });
        let mut writer = log::open(directory.path()).unwrap();
        writeln!(writer, "<6>broker.info[0]: online: node1 (ranks 0)\n<6>two").unwrap();
        let (first, mut follower) = waiting.await.unwrap();
        assert_eq!(first, "broker.info[0]: online: node1 (ranks 0)");
        assert_eq!(next(&mut follower).await, "two");
        assert!(trim_log(&path, 1).unwrap());
        writeln!(writer, "three").unwrap();
        assert_eq!(next(&mut follower).await, "three");
        write!(writer, "fo").unwrap();
        writeln!(writer, "ur").unwrap();
        assert_eq!(next(&mut follower).await, "four");
    }

    #[tokio::test]
    async fn only_the_end_of_a_huge_log_is_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = log::path(directory.path());
        let mut writer = log::open(directory.path()).unwrap();
        let mut follower = LogFollower::from_end(&path);
        writer.set_len(1 << 40).unwrap();
        writeln!(writer, "\nthe end").unwrap();
        let mut pieces = 1;
        while next(&mut follower).await != "the end" {
            pieces += 1;
        }
        assert!(pieces <= MOST_READ / MAX_LINE as u64 + 2, "{pieces}");
    }

    #[tokio::test]
    async fn a_new_agent_does_not_repeat_what_an_earlier_one_printed() {
        let directory = tempfile::tempdir().unwrap();
        let mut writer = log::open(directory.path()).unwrap();
        writeln!(writer, "old").unwrap();
        let mut follower = LogFollower::from_end(&log::path(directory.path()));
        writeln!(writer, "new").unwrap();
        assert_eq!(next(&mut follower).await, "new");
    }

    #[tokio::test]
    async fn a_file_that_replaces_the_log_is_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = log::path(directory.path());
        writeln!(log::open(directory.path()).unwrap(), "one").unwrap();
        let mut follower = LogFollower::from_start(&path);
        assert_eq!(next(&mut follower).await, "one");
        fs::write(directory.path().join("log/aside"), "two\n").unwrap();
        fs::rename(directory.path().join("log/aside"), &path).unwrap();
        assert_eq!(next(&mut follower).await, "two");
    }

    #[test]
    fn the_leads_reason_is_found_in_its_log() {
        let line = "overlay.err[0]: rejecting connection from nodeX (rank 2): slot2 is configured as rank 2: mismatched config?";
        let reason = "slot2 is configured as rank 2: mismatched config?";
        assert_eq!(rejection(line), Some(("nodeX".into(), reason.into())));
        assert_eq!(rejection("broker.info[0]: online: node1 (ranks 0)"), None);
    }
}
