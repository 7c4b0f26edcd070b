//! Unpacks a conda archive and checks the package's own list of its files. Both are untrusted, see
//! [`crate::environment::guard`].

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use rattler_conda_types::package::{PathType, PathsJson};
use tar::{Archive, EntryType};
use zip::{CompressionMethod, ZipArchive};

use crate::{
    Limits,
    environment::guard::{Checked, EntryKind, UnpackedTree, inside, leads_to_users, stays_inside},
    environment::limits::{CutOff, Entries, Guarded, Memory, zstd_window},
    unpack_error::{UnpackError, broken},
};

/// zstd's own limit for decoding foreign files; the decoder must hold a whole window in memory.
const MAX_WINDOW: u64 = 128 << 20;

/// The window of most packages, and the minimum to reserve: a later frame may have another window than the first.
const USUAL_WINDOW: u64 = 8 << 20;

/// Memory of a decoder besides its window: blocks, buffers, tables.
const DECODER: u64 = 2 << 20;

/// The files in `info/` that the linker reads into memory as a whole, each with a limit in bytes.
const METADATA: [(&str, u64); 7] = [
    ("index.json", MAX_METADATA),
    ("paths.json", MAX_METADATA),
    // rattler writes a program for each entry point, which repeats what is said of it.
    ("link.json", 1 << 20),
    ("files", MAX_METADATA),
    ("has_prefix", MAX_METADATA),
    ("no_link", MAX_METADATA),
    ("no_softlink", MAX_METADATA),
];
/// A package of 100,000 files has about 20 MiB in `paths.json`.
pub(crate) const MAX_METADATA: u64 = 64 << 20;
/// Lines that a list of files may have beyond one for each entry of the archive.
const SPARE_LINES: u64 = 1000;
/// A file in `paths.json` has eight fields.
const COMMAS_PER_ENTRY: u64 = 8;
/// Limit for an archive with very many entries.
const MAX_COMMAS: u64 = 4 << 20;
/// Allowed whatever the archive holds.
const SPARE_COMMAS: u64 = 100_000;

/// Where rattler moves the other versions of a file that several packages contain.
pub(crate) const CLOBBERS: &str = "__clobbers__";

/// Where a package for any Python has its modules.
const SITE_PACKAGES: &str = "site-packages";

/// Shortest placeholder for a prefix: conda-build's have 32 characters in old packages, and 255 in new ones.
const SHORTEST_PLACEHOLDER: usize = 8;
/// Most placeholders in one file: rattler holds the position of each in memory. Even a program of 2 GiB has no room for more.
const MAX_PLACEHOLDERS: u64 = 8 << 20;

/// The entries of a package by path.
pub(crate) type Contents = HashMap<PathBuf, Kind>;

/// The type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Symlink,
    Directory,
}

/// Unpacks `archive` into `into`, an empty directory that no other process writes to. The first bytes of the archive
/// decide its format. Also returns what [`UnpackedTree::finish`] returns.
pub(crate) fn extract(
    archive: &mut File,
    into: &Path,
    limits: Limits,
    memory: &Memory,
) -> Result<(Contents, Option<PathBuf>), UnpackError> {
    let mut unpacking = Unpacking { tree: UnpackedTree::new(into), contents: Contents::new(), entries: 0, limits };
    let mut magic = [0; 2];
    let read = archive.read(&mut magic).and_then(|_| archive.rewind());
    read.map_err(broken)?;
    match &magic {
        b"PK" => {
            for (offset, size) in members(archive)? {
                let mut start = [0; 18];
                archive.seek(SeekFrom::Start(offset)).map_err(broken)?;
                let read = archive.by_ref().take(size).read(&mut start).map_err(broken)?;
                let Some(window) = zstd_window(&start[..read]) else {
                    return Err(UnpackError::Archive("it is damaged: a part of it is not zstd".to_owned()));
                };
                if window > MAX_WINDOW {
                    let limit = format!("{} MiB of window for its decoder", MAX_WINDOW >> 20);
                    return Err(UnpackError::Limit { limit });
                }
                let window = window.max(USUAL_WINDOW).next_power_of_two();
                let _held = memory.take(window + DECODER);
                archive.seek(SeekFrom::Start(offset)).map_err(broken)?;
                let tar = Guarded::zstd(archive.by_ref().take(size), window, limits).map_err(broken)?;
                unpacking.tar(tar)?;
            }
        }
        b"BZ" => {
            // A block has 900 kB, and the decoder holds at most five.
            let _held = memory.take(3 * DECODER);
            unpacking.tar(Guarded::bzip2(archive, limits))?;
        }
        _ => return Err(UnpackError::Archive("it is neither a .conda nor a .tar.bz2 archive".to_owned())),
    }
    Ok((unpacking.contents, unpacking.tree.finish()?))
}

/// Limit for the table of contents of a `.conda`, which has three members. The zip crate holds it in memory.
const CONTENTS: u64 = 1 << 20;

/// The positions of the two tars in a `.conda`: (offset, bytes).
fn members(archive: &mut File) -> Result<Vec<(u64, u64)>, UnpackError> {
    let wrong = |error: zip::result::ZipError| {
        UnpackError::Archive(format!("it is damaged or truncated: its table of contents can't be read: {error}"))
    };
    let mut zip = ZipArchive::new(CutOff::new(archive, CONTENTS)).map_err(wrong)?;
    let mut members = Vec::new();
    for part in ["info-", "pkg-"] {
        let is_part = |name: &str| name.starts_with(part) && name.ends_with(".tar.zst");
        let name = zip.file_names().filter_map(Result::ok).find(|name| is_part(name)).map(std::borrow::Cow::into_owned);
        let Some(name) = name else {
            return Err(UnpackError::Archive(format!("it has no {part}*.tar.zst, so it is not a conda package")));
        };
        let member = zip.by_name(&name).map_err(wrong)?;
        match member.data_start() {
            Some(start) if member.compression() == CompressionMethod::Stored => members.push((start, member.size())),
            _ => return Err(UnpackError::Archive(format!("its {name} is compressed twice"))),
        }
    }
    let ends_before = |one: usize, other: usize| {
        let (start, bytes): (u64, u64) = members[one];
        start.saturating_add(bytes) <= members[other].0
    };
    // Else both could unpack the same bytes.
    match ends_before(0, 1) || ends_before(1, 0) {
        true => Ok(members),
        false => Err(UnpackError::Archive("its info and its packaged files overlap".to_owned())),
    }
}

struct Unpacking<'a> {
    tree: UnpackedTree<'a>,
    contents: Contents,
    /// Entries so far: each costs memory, also one that repeats another.
    entries: u64,
    limits: Limits,
}

impl Unpacking<'_> {
    fn tar(&mut self, mut guarded: Guarded<'_>) -> Result<(), UnpackError> {
        let allowed = guarded.allowed();
        let mut tar = Archive::new(&mut guarded);
        for entry in Entries::new(tar.entries().map_err(broken)?, allowed) {
            let mut entry = entry.map_err(broken)?;
            if entry.header().entry_type() == EntryType::XGlobalHeader {
                continue;
            }
            let checked = Checked::new(&entry, symlink)?;
            self.tree.add(&checked, &mut entry)?;
            let kind = match checked.what {
                EntryKind::File | EntryKind::HardLink(_) => Kind::File,
                EntryKind::Symlink(_) => Kind::Symlink,
                EntryKind::Directory => Kind::Directory,
            };
            self.contents.insert(checked.path, kind);
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(UnpackError::Limit { limit: format!("{} entries", self.limits.entries) });
            }
        }
        // The sha256 also covers what follows the last entry.
        io::copy(&mut guarded, &mut io::sink()).map_err(broken)?;
        Ok(())
    }
}

/// Checks a symlink. Nothing is ever written through one.
fn symlink(path: &Path, target: &Path) -> Option<String> {
    if target.is_absolute() {
        return leads_to_users(target);
    }
    match path.strip_prefix(SITE_PACKAGES) {
        // The directory that Python loads is lib/pythonX.Y/site-packages, as a rule. Where it really is, is known when the
        // package is linked, and looked at then.
        Ok(below) => leads_out(&Path::new("lib/python").join(SITE_PACKAGES).join(below), target),
        Err(_) => leads_out(path, target),
    }
}

/// What is wrong with a symlink at `path` in the environment to the relative path `target`, if anything.
pub(crate) fn leads_out(path: &Path, target: &Path) -> Option<String> {
    let out = !stays_inside(path.parent().unwrap_or(Path::new("")), target);
    out.then(|| format!("is a symlink out of the environment, to {}", target.display()))
}

/// Checks the symlinks in [`SITE_PACKAGES`] of a package that is not one for any Python, so that they stay where they are.
/// Whether it is one is known only after it is unpacked.
pub(crate) fn check_site_packages(directory: &Path, contents: &Contents) -> Result<(), UnpackError> {
    let is_there = |path: &PathBuf| path.starts_with(SITE_PACKAGES) && contents.get(path) == Some(&Kind::Symlink);
    for path in contents.keys().filter(|path| is_there(path)) {
        let target = fs::read_link(directory.join(path)).map_err(|source| UnpackError::write(path, source))?;
        if let Some(reason) = leads_out(path, &target).filter(|_| target.is_relative()) {
            return Err(UnpackError::Entry { path: path.display().to_string(), reason });
        }
    }
    Ok(())
}

/// Checks that what is copied while the package is linked stays within `limits`: the archive's own size says nothing
/// about it. A hard link may be copied under each of its names, and a prefix may be longer than its placeholder.
pub(crate) fn check_copies(
    directory: &Path,
    paths: &PathsJson,
    prefix: &Path,
    packed: u64,
    limits: Limits,
) -> Result<(), UnpackError> {
    let mut bytes: u64 = 0;
    for entry in paths.paths.iter().filter(|entry| entry.path_type == PathType::HardLink) {
        let placeholder = entry.prefix_placeholder.as_ref().map(|found| found.placeholder.len().max(1));
        let growth = match placeholder {
            Some(length) => prefix.as_os_str().len().div_ceil(length).max(1) as u64,
            None if entry.no_link => 1,
            None => continue,
        };
        let found = fs::symlink_metadata(directory.join(&entry.relative_path));
        let size = found.map_err(|source| UnpackError::write(&entry.relative_path, source))?.len();
        if placeholder.is_some_and(|length| size / length as u64 > MAX_PLACEHOLDERS) {
            let path = entry.relative_path.display();
            return Err(UnpackError::Limit { limit: format!("{MAX_PLACEHOLDERS} placeholders in {path}") });
        }
        bytes = bytes.saturating_add(size.saturating_mul(growth));
    }
    limits
        .check(bytes, packed)
        .map_or(Ok(()), |limit| Err(UnpackError::Limit { limit: format!("{limit} once linked") }))
}

/// Checks that the metadata files fit into memory and are not symlinks to other files of the host.
pub(crate) fn check_metadata(directory: &Path, contents: &Contents) -> Result<(), UnpackError> {
    let info = Path::new("info");
    if contents.get(info) == Some(&Kind::Symlink) {
        return Err(UnpackError::Archive("its info is a symlink".to_owned()));
    }
    for (name, most_bytes) in METADATA {
        let path = info.join(name);
        match contents.get(&path) {
            None => {}
            Some(Kind::File) => {
                let unreadable = |source| UnpackError::write(&path, source);
                if fs::symlink_metadata(directory.join(&path)).map_err(unreadable)?.len() > most_bytes {
                    return Err(UnpackError::Limit {
                        limit: format!("{} MiB in {}", most_bytes >> 20, path.display()),
                    });
                }
                // Each value and each line takes many times its bytes once it is parsed.
                let entries = contents.len() as u64;
                let (separator, what, most) = match path.extension() {
                    Some(_) => (b',', "values", (COMMAS_PER_ENTRY * entries).min(MAX_COMMAS) + SPARE_COMMAS),
                    None => (b'\n', "lines", entries + SPARE_LINES),
                };
                let text = fs::read(directory.join(&path)).map_err(unreadable)?;
                if text.split(|byte| *byte == separator).count() as u64 > most + 1 {
                    return Err(UnpackError::Limit { limit: format!("{most} {what} in {}", path.display()) });
                }
            }
            Some(_) => return Err(UnpackError::Archive(format!("its {} is not a file", path.display()))),
        }
    }
    Ok(())
}

/// Checks the package's list of files, which the linker trusts. Corrects a symlink that it calls a hard link, and leaves out what it
/// names again: each time would be one more entry in the package's record.
pub(crate) fn check_and_correct_paths(paths: &mut PathsJson, contents: &Contents) -> Result<(), UnpackError> {
    for entry in &mut paths.paths {
        let path = &entry.relative_path;
        let refuse = |reason: &str| {
            Err(UnpackError::Entry { path: path.display().to_string(), reason: format!("in info/paths.json {reason}") })
        };
        // Compare bytes, not components: the linker uses the path as it is written.
        if !inside(path).is_some_and(|clean| !clean.as_os_str().is_empty() && clean.as_os_str() == path.as_os_str()) {
            return refuse("would be outside of the tree");
        }
        if path.starts_with(CLOBBERS) {
            // rattler writes there what other packages bring, and would do so through a symlink.
            return refuse("would be where files of several packages are put aside");
        }
        if path.parent() == Some(Path::new("conda-meta")) && path.extension().is_some_and(|e| e == "json") {
            return refuse("would be the record of a package");
        }
        // Patched or copied files are read, and through a symlink that could be any file of the host.
        let is_read = entry.prefix_placeholder.is_some() || entry.no_link;
        match (entry.path_type, contents.get(path)) {
            (PathType::HardLink, Some(Kind::File)) | (PathType::SoftLink, Some(Kind::Symlink)) => {}
            // As a hard link, rattler would open what the symlink leads to, to find its sha256: a device, or any file of the host.
            (PathType::HardLink, Some(Kind::Symlink)) if !is_read => entry.path_type = PathType::SoftLink,
            // Of the archive itself: below a symlink in it, rattler would copy a file of the host.
            (PathType::Directory, Some(Kind::Directory)) => {}
            (_, None) => return refuse("is not in the archive"),
            (_, Some(_)) => return refuse("is something else in the archive"),
        }
        if entry.path_type == PathType::SoftLink && is_read {
            return refuse("is a symlink that should be patched");
        }
        // Otherwise each byte of the file may become a whole prefix, and a position that rattler holds in memory.
        if entry.prefix_placeholder.as_ref().is_some_and(|found| found.placeholder.len() < SHORTEST_PLACEHOLDER) {
            return refuse("has a placeholder that is too short to be a prefix");
        }
    }
    let mut named = HashSet::new();
    paths.paths.retain(|entry| named.insert(entry.relative_path.clone()));
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_has_no_more_placeholders_than_fit_into_memory() {
        let directory = tempfile::tempdir().unwrap();
        let entry =
            json!({"_path": "file", "path_type": "hardlink", "file_mode": "binary", "prefix_placeholder": "/12345678"});
        let paths = serde_json::from_value(json!({"paths_version": 1, "paths": [entry]})).unwrap();
        let check = |bytes| {
            File::create(directory.path().join("file")).unwrap().set_len(bytes).unwrap();
            let checked = check_copies(directory.path(), &paths, Path::new("/p"), bytes, Limits::default());
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(check(9 * MAX_PLACEHOLDERS), Ok(()));
        assert_eq!(
            check(9 * (MAX_PLACEHOLDERS + 1)),
            Err("it holds more than 8388608 placeholders in file".to_owned())
        );
    }

    #[test]
    fn package_metadata_is_read_only_if_it_fits_into_memory() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("info")).unwrap();
        let check = |path: &str, kind, bytes| {
            File::create(directory.path().join(path)).unwrap().set_len(bytes).unwrap();
            check_metadata(directory.path(), &Contents::from([(path.into(), kind)])).map_err(|e| e.to_string())
        };
        for (file, most, words) in [
            ("info/paths.json", MAX_METADATA, "it holds more than 64 MiB in info/paths.json"),
            ("info/link.json", 1 << 20, "it holds more than 1 MiB in info/link.json"),
        ] {
            assert_eq!(check(file, Kind::File, most), Ok(()));
            assert_eq!(check(file, Kind::File, most + 1), Err(words.to_owned()));
        }
        let list = "info/paths.json";
        assert_eq!(check(list, Kind::Symlink, 0), Err("its info/paths.json is not a file".to_owned()));
        let of_symlink = check_metadata(directory.path(), &Contents::from([("info".into(), Kind::Symlink)]));
        assert_eq!(of_symlink.unwrap_err().to_string(), "its info is a symlink");
    }

    #[test]
    fn small_package_metadata_that_would_take_much_memory_once_parsed_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("info")).unwrap();
        for (name, part, entries, most, words) in [
            ("files", "a\n", 1, 1001, "it holds more than 1001 lines in info/files"),
            ("files", "a\n", 500, 1500, "it holds more than 1500 lines in info/files"),
            ("has_prefix", "\n", 1, 1001, "it holds more than 1001 lines in info/has_prefix"),
            ("paths.json", "0,", 1, 100_008, "it holds more than 100008 values in info/paths.json"),
            ("paths.json", "0,", 1000, 108_000, "it holds more than 108000 values in info/paths.json"),
            ("paths.json", ",", 600_000, 4_294_304, "it holds more than 4294304 values in info/paths.json"),
            ("index.json", "0,", 1, 100_008, "it holds more than 100008 values in info/index.json"),
        ] {
            let path = Path::new("info").join(name);
            let others = (1..entries).map(|number| (PathBuf::from(number.to_string()), Kind::File));
            let contents: Contents = others.chain([(path.clone(), Kind::File)]).collect();
            let check = |text: String| {
                fs::write(directory.path().join(&path), text).unwrap();
                check_metadata(directory.path(), &contents).map_err(|error| error.to_string())
            };
            assert_eq!(check(part.repeat(most)), Ok(()), "{words}");
            assert_eq!(check(part.repeat(most + 1)), Err(words.to_owned()));
        }
    }

    #[test]
    fn what_a_list_of_files_names_again_is_left_out() {
        let entry = |path: &str| json!({"_path": path, "path_type": "hardlink"});
        let paths = json!({"paths_version": 1, "paths": [entry("a"), entry("b"), entry("a")]});
        let mut paths = serde_json::from_value(paths).unwrap();
        let contents = ["a", "b"].map(|path| (path.into(), Kind::File)).into();
        assert!(check_and_correct_paths(&mut paths, &contents).is_ok());
        let left: Vec<_> = paths.paths.iter().map(|entry| entry.relative_path.to_str().unwrap()).collect();
        assert_eq!(left, ["a", "b"]);
    }
}
