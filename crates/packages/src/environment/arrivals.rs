//! Which archive is unpacked next: the first one in order, or, while archives are still coming, the first one that is there.
//!
//! An archive has come when it has its final name in `pkgs/`, which it gets by one rename. Whoever orders the unpacking
//! holds a pipe open for as long as more may come. Its end is told by the kernel however that process ends, so nothing
//! waits for who is gone.

use std::{
    collections::BTreeMap,
    fs,
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

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        inotify::{AddWatchFlags, InitFlags, Inotify},
    },
};

/// Hands out the numbers of archives, each once.
pub(crate) struct Arrivals<'a> {
    /// In order.
    paths: Vec<PathBuf>,
    /// Held by the one that waits: the others have nothing to do either.
    left: Mutex<Left<'a>>,
    stopped: AtomicBool,
    wake: EventFd,
}

struct Left<'a> {
    /// Indexes still pending. `Some(inode)` marks a file whose sha256 was wrong.
    numbers: BTreeMap<usize, Option<u64>>,
    /// None once no more come.
    coming: Option<Coming<'a>>,
}

struct Coming<'a> {
    /// At its end no more come.
    more: BorrowedFd<'a>,
    /// None on a host where others have used up all there are: then all are waited for before the first is taken.
    names: Option<Inotify>,
}

/// An archive to be unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Next {
    pub number: usize,
    /// More archives may come, and this one again.
    pub coming: bool,
}

impl<'a> Arrivals<'a> {
    /// Of the archives `names` in `pkgs`, of which some may come until `more` has ended.
    pub(crate) fn new(
        pkgs: &Path,
        names: impl Iterator<Item = impl AsRef<Path>>,
        more: Option<BorrowedFd<'a>>,
    ) -> nix::Result<Self> {
        let paths = names.map(|name| pkgs.join(name)).collect::<Vec<_>>();
        let coming = more.map(|more| Coming { more, names: watch(pkgs).ok() });
        Ok(Self {
            left: Mutex::new(Left { numbers: (0..paths.len()).map(|number| (number, None)).collect(), coming }),
            paths,
            stopped: AtomicBool::new(false),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// Waits for the next one. None where there is no other, or after [`Self::stop`].
    pub(crate) fn next(&self) -> Option<Next> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let Left { numbers, coming } = &mut *left;
        loop {
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            let is_there = |(number, damaged): (&usize, &Option<u64>)| {
                let found = inode(&self.paths[*number]);
                (found.is_some() && found != *damaged).then_some(*number)
            };
            let next = match coming {
                None => numbers.keys().next().copied(),
                // What was there before cannot be told from what came since.
                Some(Coming { names: None, .. }) => None,
                Some(_) => numbers.iter().find_map(is_there),
            };
            if let Some(number) = next {
                numbers.remove(&number);
                return Some(Next { number, coming: coming.is_some() });
            }
            if numbers.is_empty() {
                return None;
            }
            if coming.as_ref().is_some_and(|coming| !coming.wait(&self.wake)) {
                *coming = None;
            }
        }
    }

    /// Takes back one that is not what is wanted: the file with this inode. It is handed out again when another one has its
    /// name, or when no more come.
    pub(crate) fn give_back(&self, number: usize, inode: Option<u64>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).numbers.insert(number, inode);
    }

    /// No other is handed out, and nobody waits any more.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        // It can only fail where it is set already.
        let _ = self.wake.write(1);
    }
}

impl Coming<'_> {
    /// Waits until something may have come. False: no more will.
    fn wait(&self, wake: &EventFd) -> bool {
        let mut fds = vec![PollFd::new(self.more, PollFlags::POLLIN), PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.names.as_ref().map(|names| PollFd::new(names.as_fd(), PollFlags::POLLIN)));
        let waited = poll(&mut fds, PollTimeout::NONE);
        let has_ended = fds[0].revents().is_some_and(|events| !events.is_empty());
        // Which names came does not matter: it is looked for all that are left.
        let _ = self.names.as_ref().map(Inotify::read_events);
        match waited {
            Ok(_) => !has_ended,
            Err(error) => error == Errno::EINTR,
        }
    }
}

fn watch(pkgs: &Path) -> nix::Result<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    inotify.add_watch(pkgs, AddWatchFlags::IN_MOVED_TO)?;
    Ok(inotify)
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
    fn what_is_there_is_handed_out_in_order_whether_more_come_or_not() {
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
    fn what_comes_is_handed_out_as_it_comes_and_the_rest_when_no_more_come() {
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
            assert_eq!(waiting.join().unwrap(), [rest[0], rest[1], None], "missing ones too: somebody has to say so");
        });
    }

    #[test]
    fn a_damaged_one_is_handed_out_again_when_another_has_its_name() {
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
            assert_eq!(waiting.join().unwrap(), Some(Next { number: 0, coming: false }), "it was the last word");
        });
    }

    #[test]
    fn nobody_waits_any_more_after_a_stop() {
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
