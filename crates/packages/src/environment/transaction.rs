//! Locks and renames around every change of `envs/`: one change at a time, nothing incomplete under a final name, and
//! nothing removed that a broker or a job uses.
//!
//! A directory that doesn't have its final name yet, or no longer, has a name that begins with a dot and ends with one
//! of [`ASIDE`] or with [`MENDING`]. Killed runs leave only such names; the next run removes them before it starts.
//!
//! A repair ([`super::mend`]) prepares its files in a directory of its own, under a lock of its own, so that it blocks
//! nothing else meanwhile; see [`Workshop`].

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    environment::{failed, opened::Opened, refused},
    fetch::archive,
};
use host::{
    BrokerProcesses, Occupant, Root,
    files::sync_file_system,
    lock::{self, FileLock},
    occupants,
    opening::is_there,
    removal::{refuse_mounts, remove_all_if_there},
    room::{Room, says_full},
    state::ENVIRONMENTS,
    trust::is_by_user,
    underneath::{exchange_in, rename_in},
};
use hostapi::Refusal;

/// Suffix of an environment that is being built.
const PARTIAL: &str = ".partial";
/// Suffix of its packages, unpacked.
pub(crate) const UNPACKED: &str = ".unpacked";
/// Suffix of an environment that is being removed. If a process uses it, it gets its name back.
const DISCARDED: &str = ".discarded";
/// Suffix that older versions gave both to what they removed and to what they replaced because users could write to it. So it
/// never gets its name back; if nothing has that name, the environment is installed again.
const OLD: &str = ".old";
/// Suffix of an environment that a repair has replaced as a whole. It never gets its name back: other users could write to it.
const REPLACED: &str = ".replaced";
/// Limit for the old environments of one digest.
const MOST_OLD: usize = 100;
/// Suffixes of all temporary names, except a [`Workshop`]'s.
const ASIDE: [&str; 5] = [PARTIAL, UNPACKED, DISCARDED, OLD, REPLACED];
/// Suffix of a [`Workshop`].
const MENDING: &str = ".mending";
/// File name of the [`Workshop`]'s lock in `envs/`.
const MENDING_LOCK: &str = ".mending.lock";

/// With less free space, a failure counts as caused by a full disk.
const LEAST_BYTES: u64 = 1 << 20;
/// With fewer free files, a failure counts as caused by a full disk.
const LEAST_FILES: u64 = 16;

/// Creates `path` as an empty, world-readable directory.
pub(crate) fn make_public_directory(path: &Path) -> Result<(), Refusal> {
    let readable = || fs::set_permissions(path, fs::Permissions::from_mode(0o755));
    fs::create_dir(path).and_then(|()| readable()).map_err(|e| failed(format!("can't make {}: {e}", path.display())))
}

/// A directory in `envs/` in which one repair at a time prepares its files. Its lock keeps other repairs out, and keeps
/// [`Environments::drop_leftovers`] from removing the directory. It doesn't block installing, collecting, or a broker's
/// start.
pub(crate) struct Workshop {
    path: PathBuf,
    _lock: FileLock,
}

impl Workshop {
    /// Waits up to [`lock::WAIT`] for another repair, and removes what a killed one left.
    pub(crate) fn hold(envs: &Path, digest: &str) -> Result<Self, Refusal> {
        let file = envs.join(MENDING_LOCK);
        let lock = lock::take(&file, lock::WAIT).map_err(|error| lock::refusal(&file, lock::WAIT, &error))?;
        let path = envs.join(format!(".{digest}{MENDING}"));
        remove_all_if_there(&path).map_err(|e| failed(format!("can't remove {}: {e}", path.display())))?;
        make_public_directory(&path)?;
        Ok(Self { path, _lock: lock })
    }

    /// The path for the correct copy that the damaged environment is compared with.
    pub(crate) fn tree(&self) -> PathBuf {
        self.path.join("tree")
    }
}

impl Drop for Workshop {
    fn drop(&mut self) {
        if let Err(error) = remove_all_if_there(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "can't remove a repair's temporary files; the next repair does");
        }
    }
}

/// `<prefix>/envs`, under an exclusive lock that is released on drop or when the process exits.
pub(crate) struct Environments<'a> {
    path: PathBuf,
    /// Of the broker whose processes must not lose theirs.
    broker: &'a dyn BrokerProcesses,
    directory: File,
    _lock: FileLock,
    /// What of earlier runs could not be removed.
    pub(crate) warnings: Vec<String>,
}

impl<'a> Environments<'a> {
    /// Waits for its turn, for as long as an order waits for another one, and cleans up after runs that were killed.
    pub(crate) fn hold(prefix: &Path, broker: &'a dyn BrokerProcesses) -> Result<Self, Refusal> {
        // It is baked into what is installed.
        if !prefix.is_absolute() {
            return Err(refused(format!("the prefix {} is not an absolute path", prefix.display())));
        }
        let path = prefix.join(ENVIRONMENTS);
        let error = |what: &str, error: io::Error| failed(format!("can't {what} {}: {error}", path.display()));
        fs::create_dir_all(&path).map_err(|e| error("make", e))?;
        let directory = File::open(&path).map_err(|e| error("open", e))?;
        let file = path.join(lock::HIDDEN);
        let lock = lock::take(&file, lock::WAIT).map_err(|error| lock::refusal(&file, lock::WAIT, &error))?;
        let mut held = Self { path, broker, directory, _lock: lock, warnings: Vec::new() };
        held.warnings = held.drop_leftovers();
        Ok(held)
    }

    /// For each of `names` in `envs/` that the broker or a job uses, one process that uses it.
    ///
    /// # Errors
    /// They could not be determined.
    pub(crate) fn used(&self, names: &[String]) -> io::Result<BTreeMap<String, Occupant>> {
        occupants(&Root::host(), &self.path, &self.broker.members()?, names)
    }

    pub(crate) fn place(&self, digest: &str) -> PathBuf {
        self.path.join(digest)
    }

    /// The temporary path of an environment that is being built.
    pub(crate) fn partial(&self, digest: &str) -> PathBuf {
        self.path.join(format!(".{digest}{PARTIAL}"))
    }

    /// Renames a finished environment to its final name.
    ///
    /// `syncfs`, because there are thousands of files: everything in `partial` including its marker must be on the disk
    /// before it has the name under which it counts as ready. A power failure may lose the rename until the directory
    /// is synced; then there is simply no environment.
    pub(crate) fn commit(&self, partial: &Path, digest: &str) -> io::Result<()> {
        sync_file_system(partial)?;
        fs::rename(partial, self.place(digest))?;
        self.directory.sync_all()
    }

    /// Removes a directory that has the name of an environment without being a complete one, which [`Self::commit`]
    /// never leaves. Fails if the broker or a job uses it.
    pub(crate) fn clear(&self, digest: &str) -> Result<(), Refusal> {
        let place = self.place(digest);
        if !is_there(&place).map_err(|e| self.failure("look into", &e))? {
            return Ok(());
        }
        let name = [digest.to_owned()];
        let found = self.used(&name).map_err(|e| self.failure("find the processes that use", &e))?;
        let occupant = match found.into_values().next() {
            Some(occupant) => Some(occupant),
            None => self.discard(digest).map_err(|e| self.failure("clean", &e))?,
        };
        occupant.map_or(Ok(()), |occupant| {
            Err(failed(format!(
                "{} is not as it was installed and must be built again, but {occupant} uses it; it is built again when that process has ended",
                place.display()
            )))
        })
    }

    /// Removes an environment, unless the broker or a job uses it; then it stays unchanged, and the process is
    /// returned.
    ///
    /// # Errors
    /// The file system's; `ResourceBusy` if something other than a user's FUSE file system is mounted in it. The
    /// environment is unchanged then.
    pub(crate) fn discard(&self, digest: &str) -> io::Result<Option<Occupant>> {
        refuse_mounts(&self.place(digest), is_by_user)?;
        let aside = self.free_name(digest, DISCARDED)?;
        rename_in(&self.path, digest, &aside)?;
        // From here on no new process can find it under its name, so the check below sees every user.
        self.directory.sync_all()?;
        self.discard_aside(&aside, digest)
    }

    /// Puts the complete environment `fresh`, which must be on the disk, in the place of another one. If the file system
    /// can do that, in one step: every process finds one of them. The other one stays under a temporary name while a process uses it.
    ///
    /// # Errors
    /// As for [`Self::discard`]. The environment may have been replaced then. Where the file system can't exchange names, it may
    /// also be missing, and is then installed again.
    pub(crate) fn replace(&self, fresh: &Path, digest: &str) -> io::Result<()> {
        refuse_mounts(&self.place(digest), is_by_user)?;
        let aside = self.free_name(digest, REPLACED)?;
        // If this process is killed from here on, the next run removes what has that name.
        fs::rename(fresh, self.path.join(&aside))?;
        let old = match exchange_in(&self.path, &aside, digest) {
            Ok(()) => aside,
            // Some file systems have no such operation: for a moment, there is no environment then.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::InvalidInput | ErrorKind::Unsupported | ErrorKind::CrossesDevices
                ) =>
            {
                let old = self.free_name(digest, REPLACED)?;
                rename_in(&self.path, digest, &old)?;
                rename_in(&self.path, &aside, digest)?;
                old
            }
            Err(error) => return Err(error),
        };
        self.directory.sync_all()?;
        match self.discard_for_good(&old) {
            Ok(None) => {}
            Ok(Some(occupant)) => {
                tracing::info!(%occupant, "the environment that was replaced stays until it is not used");
            }
            Err(error) => tracing::warn!(%error, "can't remove the environment that was replaced; the next run does"),
        }
        Ok(())
    }

    /// A free temporary name for environment `digest`, with this suffix.
    fn free_name(&self, digest: &str, suffix: &str) -> io::Result<String> {
        // Directories that were set aside earlier may still be there because a process uses them.
        let names =
            std::iter::once(format!(".{digest}{suffix}")).chain((1..).map(|n| format!(".{digest}.{n}{suffix}")));
        for name in names.take(MOST_OLD) {
            if !is_there(&self.path.join(&name))? {
                return Ok(name);
            }
        }
        Err(io::Error::other(format!("{MOST_OLD} of {digest} are still in use")))
    }

    /// Removes what was set aside under the name `aside`, unless a process uses it: then it gets its name back if that
    /// is free.
    fn discard_aside(&self, aside: &str, digest: &str) -> io::Result<Option<Occupant>> {
        let names = [digest.to_owned(), aside.to_owned()];
        // If a new environment has the name meanwhile, its users don't count.
        let replaced = is_there(&self.place(digest))?;
        let looked_for = if replaced { &names[1..] } else { &names[..] };
        match self.used(looked_for).map(|found| found.into_values().next()) {
            Ok(None) => {
                remove_all_if_there(&self.path.join(aside))?;
                if replaced { Ok(None) } else { Opened::of(&self.place(digest)).forget().map(|()| None) }
            }
            used_or_unknown => {
                if !replaced {
                    rename_in(&self.path, aside, digest)?;
                }
                used_or_unknown
            }
        }
    }

    /// Removes what a repair or an older version set aside under the name `aside`, unless a process uses it.
    fn discard_for_good(&self, aside: &str) -> io::Result<Option<Occupant>> {
        let used = self.used(&[aside.to_owned()])?.into_values().next();
        if used.is_none() {
            remove_all_if_there(&self.path.join(aside))?;
        }
        Ok(used)
    }

    /// Removes everything with a temporary name. What can't be removed is returned as a warning and left for the next
    /// run; it does no harm unless a new environment needs that name.
    pub(crate) fn drop_leftovers(&self) -> Vec<String> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries.flatten(),
            Err(e) => return vec![self.failure("read", &e).message],
        };
        let left = entries.filter_map(|entry| {
            let error = self.drop_leftover(&entry).err()?;
            Some(format!("can't remove {}, which an earlier run left behind: {error}", entry.path().display()))
        });
        left.collect()
    }

    fn drop_leftover(&self, entry: &fs::DirEntry) -> io::Result<()> {
        let file_name = entry.file_name();
        let Some(hidden) = file_name.to_str() else { return Ok(()) };
        let Some(name) = hidden.strip_prefix('.') else { return Ok(()) };
        let digest = name.strip_suffix(DISCARDED).map(|name| name.split_once('.').map_or(name, |(digest, _)| digest));
        match digest.filter(|digest| archive::is_digest(digest)) {
            Some(digest) => self.discard_aside(hidden, digest).map(drop),
            None if name.ends_with(MENDING) => match lock::take(&self.path.join(MENDING_LOCK), Duration::ZERO) {
                Ok(_nobody_mends) => remove_all_if_there(&entry.path()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
                Err(e) => Err(e),
            },
            None if name.ends_with(REPLACED) || name.ends_with(OLD) => self.discard_for_good(hidden).map(drop),
            None if ASIDE.iter().any(|end| name.ends_with(end)) => remove_all_if_there(&entry.path()),
            None => Ok(()),
        }
    }

    /// An error of the operation `what` on `envs/`.
    pub(crate) fn failure(&self, what: &str, error: &io::Error) -> Refusal {
        failed(format!("can't {what} {}: {error}", self.path.display()))
    }

    /// If the disk is full, adds to the error how much space is left, and how much is needed if known. Must be called
    /// before the unfinished files are removed. Also checks the free space itself, since not every such failure says
    /// that the disk is full.
    pub(crate) fn with_room(&self, refusal: Refusal, need_bytes: u64) -> Refusal {
        let Some(Room { available: free, files, .. }) = Room::of(&self.path).ok().filter(|_| refusal.transient) else {
            return refusal;
        };
        if !(says_full(&refusal.message) || free < LEAST_BYTES || files.is_some_and(|files| files < LEAST_FILES)) {
            return refusal;
        }
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
        let files = files.map_or(String::new(), |files| format!(" and room for {files} files"));
        let need = match need_bytes {
            0 => String::new(),
            bytes => format!(", and this package set needs about {} MiB", mebibytes(bytes)),
        };
        failed(format!(
            "the file system of {} is full: {} MiB{files} are left{need}; free some space, the agent tries again ({})",
            self.path.display(),
            mebibytes(free),
            refusal.message
        ))
    }
}
