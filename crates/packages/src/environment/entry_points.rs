//! Entry points: programs in `bin` that a Python package asks for by name, and that rattler writes.
//!
//! rattler writes them over whatever is there, also through a symlink, and does not look which package it is from. So no
//! entry point may have the path of a package's file or link. Another entry point there is a plain file, and harmless.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use rattler::install::PythonInfo;
use rattler_conda_types::package::{IndexJson, LinkJson, NoArchLinks, PackageFile, PathType, PathsJson};

/// Most entry points of a package: rattler writes a file for each, of which the archive has no more than a few bytes.
const MOST_ENTRY_POINTS: usize = 10_000;

/// What the packages have in the directory of programs so far.
#[derive(Default)]
pub(crate) struct Programs {
    /// The package of each path, and true for an entry point.
    taken: HashMap<PathBuf, (String, bool)>,
}

impl Programs {
    /// Adds a package's files and entry points, before it is linked. Returns what is wrong, if anything.
    pub(crate) fn add(
        &mut self,
        package: &str,
        directory: &Path,
        index: &IndexJson,
        paths: &PathsJson,
        python: Option<&PythonInfo>,
    ) -> Option<String> {
        let python = python.filter(|_| index.noarch.is_python());
        let bin = Path::new("bin");
        let mut added = Vec::new();
        for entry in paths.paths.iter().filter(|entry| entry.path_type != PathType::Directory) {
            let path = python.map_or(entry.relative_path.as_path().into(), |python| {
                python.get_python_noarch_target_path(&entry.relative_path)
            });
            if path.starts_with(bin) {
                added.push((path.into_owned(), false));
            }
        }
        if let Some(python) = python
            && let Ok(LinkJson { noarch: NoArchLinks::Python(links), .. }) = LinkJson::from_package_directory(directory)
        {
            if links.entry_points.len() > MOST_ENTRY_POINTS {
                let count = links.entry_points.len();
                return Some(format!("package {package} has {count} entry points, more than {MOST_ENTRY_POINTS}"));
            }
            added.extend(links.entry_points.iter().map(|entry| (python.bin_dir.join(&entry.command), true)));
        }
        for (path, is_entry_point) in added {
            // The directory of programs itself may be a package's symlink.
            for there in if path == bin { vec![] } else { vec![path.as_path(), bin] } {
                if let Some((other, is_other_one)) = self.taken.get(there)
                    && is_entry_point != *is_other_one
                {
                    let (path, there) = (path.display(), there.display());
                    return Some(format!(
                        "{path} of package {package} or {there} of package {other} is an entry point: both can't be there"
                    ));
                }
            }
            self.taken.entry(path).or_insert_with(|| (package.to_owned(), is_entry_point));
        }
        None
    }
}
