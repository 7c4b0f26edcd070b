//! What was found open to other users in an environment. A user who opened a file there can still write to it after it was
//! closed, and what that user planted may belong to root by a rename. Closing would destroy that evidence, so it is kept
//! beside the environment until a repair has replaced it.

use std::{
    cell::OnceCell,
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use host::files::{remove_if_there, sync_parent};

/// The list of what was open in one environment: a file that only root can write.
pub(crate) struct Opened {
    path: PathBuf,
    /// As the list was when [`Self::note_once`] first asked for it.
    known: OnceCell<BTreeSet<PathBuf>>,
}

impl Opened {
    /// That of the environment at `root`.
    pub(crate) fn of(root: &Path) -> Self {
        let name = root.file_name().unwrap_or_default().to_string_lossy();
        Self { path: root.with_file_name(format!(".{name}.opened")), known: OnceCell::new() }
    }

    /// Adds `path`, before it is closed. The first one is on disk then: one is enough to have all replaced.
    pub(crate) fn note(&self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        let is_first = file.metadata()?.len() == 0;
        // In one write, so that two looks at once, or a full disk, tear no other line. The line begins anew after a torn one.
        file.write_all(format!("\n{}\n", serde_json::Value::from(path.to_string_lossy())).as_bytes())?;
        if is_first {
            file.sync_all()?;
            sync_parent(&self.path)?;
        }
        Ok(())
    }

    /// As [`Self::note`], if `path` is not in the list: for what stays open at each look. Reads the list once, because a
    /// user may have put any number of such names there. One look asks for none of them twice.
    pub(crate) fn note_once(&self, path: &Path) -> io::Result<()> {
        let known = match self.known.get() {
            Some(known) => known,
            None => {
                let list = self.paths()?.unwrap_or_default();
                self.known.get_or_init(|| list)
            }
        };
        // As it is in the list, where each name is UTF-8.
        if known.contains(Path::new(&*path.to_string_lossy())) { Ok(()) } else { self.note(path) }
    }

    /// What was open; the environment itself if the list can't be understood. None if nothing ever was.
    pub(crate) fn paths(&self) -> io::Result<Option<BTreeSet<PathBuf>>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => {
                let paths = text.lines().filter_map(|line| serde_json::from_str::<String>(line).ok());
                let mut paths: BTreeSet<_> = paths.map(PathBuf::from).collect();
                if paths.is_empty() {
                    paths.insert(PathBuf::new());
                }
                Ok(Some(paths))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends the list: the environment was replaced, or is gone.
    pub(crate) fn forget(&self) -> io::Result<()> {
        remove_if_there(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use super::*;

    #[test]
    fn one_look_reads_the_list_once_and_notes_a_name_once_whatever_its_bytes() {
        let envs = tempfile::tempdir().unwrap();
        let root = envs.path().join("0123456789abcdef");
        let names = ["one", "two"].map(Path::new).into_iter().chain([Path::new(OsStr::from_bytes(b"theirs\xff"))]);
        let names: Vec<_> = names.collect();
        let length = || fs::read_to_string(&Opened::of(&root).path).map_or(0, |list| list.lines().count());
        for _ in 0..2 {
            let look = Opened::of(&root);
            names.iter().for_each(|name| look.note_once(name).unwrap());
            assert_eq!(length(), 2 * names.len());
        }
        let look = Opened::of(&root);
        look.note_once(names[0]).unwrap();
        look.forget().unwrap();
        look.note_once(names[1]).unwrap();
        assert_eq!(length(), 0);
    }
}
