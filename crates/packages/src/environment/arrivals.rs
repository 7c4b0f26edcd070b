//! Chooses the archive to unpack next: the first one in order, or, while archives are still being fetched, the first
//! one that is there.
//!
//! An archive has arrived once it has its final name in `pkgs/`, which it gets by one rename. The process that ordered
//! the unpacking keeps a pipe open while more may arrive. The kernel closes the pipe however that process ends, so the
//! unpacking never waits for a dead process.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, PipeReader, PipeWriter, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use host::changes::{Changes, wait_readable};

/// Hands out the index of each archive, to one thread at a time.
pub(crate) struct Arrivals<'a> {
    /// In the preferred order of unpacking.
    paths: Vec<PathBuf>,
    /// The thread that waits for an arrival holds this lock; one that gives an archive back waits for that arrival, too.
    left: Mutex<Pending<'a>>,
    stopped: AtomicBool,
    /// Readable after [`Self::stop`].
    wake: (PipeReader, PipeWriter),
}

struct Pending<'a> {
    /// Indexes still pending. `Some(inode)`: the file with this inode has the wrong sha256. None: nothing wrong is known.
    numbers: BTreeMap<usize, Option<u64>>,
    /// `None` once no more archives can arrive.
    coming: Option<Incoming<'a>>,
}

struct Incoming<'a> {
    /// A pipe; at its end, no more archives arrive.
    more: BorrowedFd<'a>,
    /// `None` if the host has no inotify instances left: then unpacking starts only after the pipe has ended.
    names: Option<Changes>,
}

/// An archive to unpack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Next {
    pub number: usize,
    /// More archives may arrive, including a better file for this one.
    pub coming: bool,
}

impl<'a> Arrivals<'a> {
    /// Watches for the archives `names` in `pkgs`. Some may still arrive until the pipe `more` ends.
    pub(crate) fn new(
        pkgs: &Path,
        names: impl Iterator<Item = impl AsRef<Path>>,
        more: Option<BorrowedFd<'a>>,
    ) -> io::Result<Self> {
        let paths = names.map(|name| pkgs.join(name)).collect::<Vec<_>>();
        let coming = more.map(|more| Incoming { more, names: Changes::of_names(pkgs).ok() });
        Ok(Self {
            left: Mutex::new(Pending { numbers: (0..paths.len()).map(|number| (number, None)).collect(), coming }),
            paths,
            stopped: AtomicBool::new(false),
            wake: io::pipe()?,
        })
    }

    /// Waits for the next archive. `None` if none is left for this thread, or after [`Self::stop`]; another thread may still
    /// give one back. If no more can arrive, archives that are missing are handed out as well, for the caller to report.
    pub(crate) fn next(&self) -> Option<Next> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let Pending { numbers, coming } = &mut *left;
        loop {
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            let is_there = |(number, wrong): (&usize, &Option<u64>)| {
                let found = inode(&self.paths[*number]);
                (found.is_some() && found != *wrong).then_some(*number)
            };
            let next = match coming {
                None => numbers.keys().next().copied(),
                // Without inotify, an arrival can't be noticed: wait until all have arrived.
                Some(Incoming { names: None, .. }) => None,
                Some(_) => numbers.iter().find_map(is_there),
            };
            if let Some(number) = next {
                numbers.remove(&number);
                return Some(Next { number, coming: coming.is_some() });
            }
            if numbers.is_empty() {
                return None;
            }
            if coming.as_ref().is_some_and(|coming| !coming.wait(&self.wake.0)) {
                *coming = None;
            }
        }
    }

    /// Returns an archive whose file, with this inode, is wrong. It is handed out again when another file has its name,
    /// or when no more can arrive.
    pub(crate) fn give_back(&self, number: usize, inode: Option<u64>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).numbers.insert(number, inode);
    }

    /// Stops handing out archives and wakes all waiting threads.
    pub(crate) fn stop(&self) {
        // Written once, because a write into a full pipe blocks. One byte fits, and both ends are open.
        if !self.stopped.swap(true, Ordering::Relaxed) {
            let _ = (&self.wake.1).write(&[0]);
        }
    }
}

impl Incoming<'_> {
    /// Waits until something may have arrived. Returns false if no more archives can arrive.
    fn wait(&self, wake: &PipeReader) -> bool {
        let mut files = vec![self.more, wake.as_fd()];
        files.extend(self.names.as_ref().map(AsFd::as_fd));
        let readable = wait_readable(&files);
        // The names don't matter, since the caller looks for all pending archives anyway.
        let _ = self.names.as_ref().map(Changes::take);
        readable.is_ok_and(|readable| !readable[0])
    }
}

fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|file| file.ino())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::thread;

    use super::*;

    const NAMES: [&str; 3] = ["a", "b", "c"];

    fn put(pkgs: &Path, name: &str) -> Option<u64> {
        fs::write(pkgs.join(".part"), name).unwrap();
        fs::rename(pkgs.join(".part"), pkgs.join(name)).unwrap();
        inode(&pkgs.join(name))
    }

    #[test]
    fn archives_that_are_there_are_handed_out_in_order() {
        let pkgs = tempfile::tempdir().unwrap();
        let (more, _until) = std::io::pipe().unwrap();
        for name in NAMES {
            put(pkgs.path(), name);
        }
        for more in [None, Some(more.as_fd())] {
            let arrivals = Arrivals::new(pkgs.path(), NAMES.iter(), more).unwrap();
            let taken = std::iter::from_fn(|| arrivals.next()).map(|next| next.number).collect::<Vec<_>>();
            assert_eq!(taken, [0, 1, 2]);
        }
    }

    #[test]
    fn arrivals_are_handed_out_at_once_and_the_rest_when_the_pipe_ends() {
        let pkgs = tempfile::tempdir().unwrap();
        let (more, until) = std::io::pipe().unwrap();
        let arrivals = Arrivals::new(pkgs.path(), NAMES.iter(), Some(more.as_fd())).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| arrivals.next());
            put(pkgs.path(), "other");
            put(pkgs.path(), "c");
            assert_eq!(waiting.join().unwrap(), Some(Next { number: 2, coming: true }));
            let waiting = scope.spawn(|| [arrivals.next(), arrivals.next(), arrivals.next()]);
            drop(until);
            let rest = [0, 1].map(|number| Some(Next { number, coming: false }));
            assert_eq!(
                waiting.join().unwrap(),
                [rest[0], rest[1], None],
                "missing archives are handed out too, so that they are reported"
            );
        });
    }

    #[test]
    fn a_damaged_archive_is_handed_out_again_when_its_file_is_replaced() {
        let pkgs = tempfile::tempdir().unwrap();
        let (more, until) = std::io::pipe().unwrap();
        let arrivals = Arrivals::new(pkgs.path(), NAMES.iter().take(1), Some(more.as_fd())).unwrap();
        let damaged = put(pkgs.path(), "a");
        let first = Some(Next { number: 0, coming: true });
        assert_eq!(arrivals.next(), first);
        arrivals.give_back(0, damaged);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| arrivals.next());
            put(pkgs.path(), "b");
            let better = put(pkgs.path(), "a");
            assert_eq!(waiting.join().unwrap(), first);
            arrivals.give_back(0, better);
            let waiting = scope.spawn(|| arrivals.next());
            drop(until);
            assert_eq!(
                waiting.join().unwrap(),
                Some(Next { number: 0, coming: false }),
                "after the pipe ended it is handed out although it is damaged"
            );
        });
    }

    #[test]
    fn stop_wakes_all_waiting_threads() {
        let pkgs = tempfile::tempdir().unwrap();
        let (more, _until) = std::io::pipe().unwrap();
        let arrivals = Arrivals::new(pkgs.path(), NAMES.iter(), Some(more.as_fd())).unwrap();
        thread::scope(|scope| {
            let waiting = [scope.spawn(|| arrivals.next()), scope.spawn(|| arrivals.next())];
            arrivals.stop();
            assert_eq!(waiting.map(|one| one.join().unwrap()), [None, None]);
        });
    }
}
