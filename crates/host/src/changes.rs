//! Waits for changes in a directory (inotify(7)), and for several files at once (poll(2)).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    path::Path,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};

/// Changes in a directory. The descriptor is readable while there are some that were not taken.
#[derive(Debug)]
pub struct Changes(Inotify);

impl Changes {
    /// Watches for what is made, written or renamed in `directory`, and for the end of `directory`.
    ///
    /// # Errors
    /// If `directory` can't be watched, or this user has no inotify instances left.
    pub fn of(directory: &Path) -> io::Result<Self> {
        let ends = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        let content = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
        Self::watch(directory, content | ends)
    }

    /// Watches only for names that something gets in `directory` by a rename.
    ///
    /// # Errors
    /// As for [`Self::of`].
    pub fn of_names(directory: &Path) -> io::Result<Self> {
        Self::watch(directory, AddWatchFlags::IN_MOVED_TO)
    }

    fn watch(directory: &Path, what: AddWatchFlags) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        inotify.add_watch(directory, what)?;
        Ok(Self(inotify))
    }

    /// Takes some changes. Which they were does not matter to those who look at the directory itself then.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; or if they can't be read.
    pub fn take(&self) -> io::Result<()> {
        Ok(self.0.read_events().map(drop)?)
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Changes {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Waits until one of `files` can be read or has ended. Returns for each whether it is so.
///
/// # Errors
/// If poll(2) fails.
pub fn wait_readable(files: &[BorrowedFd<'_>]) -> io::Result<Vec<bool>> {
    let mut polled: Vec<_> = files.iter().map(|file| PollFd::new(*file, PollFlags::POLLIN)).collect();
    loop {
        match poll(&mut polled, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(polled.iter().map(|one| one.any() == Some(true)).collect()),
        }
    }
}
