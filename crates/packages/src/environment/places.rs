//! Checks where a package's entries would be, before rattler puts them there.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
};

use rattler::install::PythonInfo;
use rattler_conda_types::package::{IndexJson, PathsJson};

use crate::{environment::extract::leads_out, unpack_error::UnpackError};

/// The entries of a package, and the place of each in the environment.
pub(super) struct EntryPlaces<'a> {
    of_entries: Vec<(&'a PathBuf, Cow<'a, Path>)>,
    for_any_python: bool,
}

impl<'a> EntryPlaces<'a> {
    /// `python` is the environment's own: only there is it known where a package for any Python has its modules.
    pub(super) fn new(paths: &'a PathsJson, index: &IndexJson, python: Option<&PythonInfo>) -> Self {
        let python = python.filter(|_| index.noarch.is_python());
        let place = |path: &'a PathBuf| {
            python.map_or(Path::new(path).into(), |python| python.get_python_noarch_target_path(path))
        };
        let entries = paths.paths.iter().map(|entry| &entry.relative_path);
        Self { of_entries: entries.map(|path| (path, place(path))).collect(), for_any_python: python.is_some() }
    }

    /// Fails if an entry would be in the place of another one, or below one; if it would be written through a symlink
    /// of another package that leads out of `root`; or if it is a symlink that would lead out. `unpacked` has the
    /// package's files.
    pub(super) fn check(&self, unpacked: &Path, root: &Path) -> Result<(), UnpackError> {
        let root = root.canonicalize().map_err(|source| UnpackError::write(root, source))?;
        self.check_that_none_is_above_another(unpacked)?;
        self.check_directories(&root)?;
        self.check_links(unpacked)
    }

    /// rattler overwrites one entry with another one of the same package in the same place, and moves files aside through a symlink
    /// of the same package above them.
    fn check_that_none_is_above_another(&self, unpacked: &Path) -> Result<(), UnpackError> {
        let mut taken: HashMap<&Path, &PathBuf> = HashMap::new();
        for (path, place) in &self.of_entries {
            if taken.insert(place, path).is_some() {
                return refused(path, "would be in the place of another one of its entries".to_owned());
            }
        }
        let is_directory = |entry: &&PathBuf| unpacked.join(entry).symlink_metadata().is_ok_and(|it| it.is_dir());
        for (path, directory) in self.directories() {
            if let Some(above) = taken.get(directory).filter(|entry| !is_directory(entry)) {
                return refused(path, format!("would be below another one of its entries, {}", above.display()));
            }
        }
        Ok(())
    }

    /// rattler makes directories through other packages' symlinks, even for files that it then puts aside.
    fn check_directories(&self, root: &Path) -> Result<(), UnpackError> {
        for (path, directory) in self.directories() {
            let target = root.join(directory);
            // A symlink may lead nowhere until rattler makes this package's own directories.
            let is_absent = target.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
            if !is_absent && !target.canonicalize().is_ok_and(|found| found.starts_with(root)) {
                let directory = directory.display();
                return refused(
                    path,
                    format!(
                        "would be written through {directory}, another package's symlink, which leads out of the environment or to nothing"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Only a package for any Python: the entries of all others are placed at their paths, where [`super::extract`] has checked their
    /// symlinks.
    fn check_links(&self, unpacked: &Path) -> Result<(), UnpackError> {
        if !self.for_any_python {
            return Ok(());
        }
        for (path, place) in &self.of_entries {
            if let Ok(target) = fs::read_link(unpacked.join(path))
                && target.is_relative()
                && let Some(reason) = leads_out(place, &target)
            {
                return refused(path, reason);
            }
        }
        Ok(())
    }

    /// Each directory that would have an entry, once, with the first entry below it.
    fn directories(&self) -> impl Iterator<Item = (&PathBuf, &Path)> {
        let mut seen = HashSet::new();
        self.of_entries.iter().flat_map(move |(path, place)| {
            let new: Vec<_> = place.ancestors().skip(1).take_while(|directory| seen.insert(*directory)).collect();
            new.into_iter().map(move |directory| (*path, directory))
        })
    }
}

fn refused(path: &Path, reason: String) -> Result<(), UnpackError> {
    Err(UnpackError::Entry { path: path.display().to_string(), reason })
}
