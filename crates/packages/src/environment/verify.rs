//! Checks whether an environment is still as it was installed: hashes every file and compares it, its permissions and
//! its owner with the records.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    ENVIRONMENT_MARKER,
    environment::{
        digests::digests_while,
        opened::Opened,
        read_marker, ready,
        records::{RECORDS, Records, by_packages},
        tree::{Tree, is_open, is_utf8, mode},
    },
    fetch::archive,
};
use host::{
    host_root::HostRoot,
    opening::open_uncovered,
    state::{ENVIRONMENTS, environment},
    trust::{WRITABLE_BY_OTHERS, is_trusted},
};
use hostapi::{Difference, Progress, Refusal, Slice, Verified, VerifyOrder, What};

/// An answer names at most this many differences: other users may have put any number of files into an environment that was
/// open.
const MOST_DIFFERENCES: usize = 10_000;

/// Checks the environment that `order` names, or all that are ready.
///
/// # Errors
/// There is no such environment, or it can't be read.
pub fn verify(order: &VerifyOrder, progress: &mut dyn FnMut(Progress)) -> Result<Vec<Verified>, Refusal> {
    let envs = order.prefix.join(ENVIRONMENTS);
    let digests = match &order.digest {
        Some(digest) if !archive::is_digest(digest) => {
            return Err(Refusal::new(format!("`{digest}` is not the digest of a package set")));
        }
        Some(digest) => vec![digest.clone()],
        None => ready(&order.prefix),
    };
    if digests.is_empty() {
        return Err(Refusal::new(format!("there is no environment in {}", envs.display())));
    }
    digests.iter().map(|digest| verify_one(&order.prefix, digest, order.slice, progress)).collect()
}

fn verify_one(
    prefix: &Path,
    digest: &str,
    slice: Option<Slice>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verified, Refusal> {
    let path = environment(prefix, digest);
    let name = path.display();
    let unreadable = |error: io::Error| Refusal::new(format!("can't read {name}: {error}"));
    match Place::of(&path).map_err(unreadable)? {
        Some(Place::Directory(..)) => {}
        // A repair puts another environment in its place.
        Some(Place::Covered) => {
            let differences = vec![Difference { path: PathBuf::new(), what: What::Unreadable }];
            return Ok(Verified { path: path.clone(), digest: digest.to_owned(), files: 0, bytes: 0, differences });
        }
        None => {
            let there = ready(prefix).join(", ");
            let there = if there.is_empty() { "none" } else { &there };
            return Err(Refusal::new(format!("there is no environment {name}; those that exist: {there}")));
        }
    }
    let marker = read_marker(prefix, digest);
    let conda = marker.as_ref().map_or(true, |marker| marker.compiled_prefix.is_none());
    let compared = compare(&path, &path, conda, slice, progress).map_err(unreadable)?;
    let Compared { files, bytes, mut differences, no_records } = compared;
    for (name, error) in [(ENVIRONMENT_MARKER, marker.err()), (RECORDS, no_records)] {
        // What was not read is not examined again either: a user may have mounted something over it.
        let what =
            error.map(|error| if error.kind() == io::ErrorKind::NotFound { What::Missing } else { What::Changed });
        differences.extend(what.map(|what| Difference { path: name.into(), what }));
    }
    let mut differences: Vec<_> = differences.into_iter().map(in_utf8).collect();
    differences.sort();
    differences.dedup();
    let differences = at_most(differences);
    Ok(Verified { path, digest: digest.to_owned(), files, bytes, differences })
}

/// As many of `differences` as an answer may name, sorted. Extra files are left out first: other users may have made enough
/// of them to push damage off the list.
pub(super) fn at_most(mut differences: Vec<Difference>) -> Vec<Difference> {
    differences.sort_by_key(|difference| difference.what == What::Extra);
    differences.truncate(MOST_DIFFERENCES);
    differences.sort();
    differences
}

/// What has the name of an environment.
#[derive(PartialEq)]
pub(crate) enum Place {
    /// A directory with this device and inode, which distinguish it from another one that gets its name later.
    Directory(u64, u64),
    /// A mount of a user covers it. The mounted file system is never called: it may not answer.
    Covered,
}

impl Place {
    /// What is at `path`; None if nothing is, or no directory.
    pub(crate) fn of(path: &Path) -> io::Result<Option<Self>> {
        match open_uncovered(path).and_then(|directory| directory.metadata()) {
            Ok(found) => Ok(Some(Self::Directory(found.dev(), found.ino()))),
            Err(error) => match error.kind() {
                io::ErrorKind::CrossesDevices => Ok(Some(Self::Covered)),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(error),
            },
        }
    }
}

/// JSON can't represent other names, which only other users give.
pub(crate) fn in_utf8(Difference { path, what }: Difference) -> Difference {
    Difference { path: path.to_string_lossy().into_owned().into(), what }
}

/// The result of comparing a tree with the records.
pub(crate) struct Compared {
    files: u64,
    bytes: u64,
    /// Sorted.
    pub differences: Vec<Difference>,
    /// Why there are no records of ours.
    no_records: Option<io::Error>,
}

/// Compares the tree at `root` with the records in the tree at `recorded`, which may be the same. Skips the marker and
/// the records themselves. Closes what others can write to before it looks into it, and reports that, without hashing anything,
/// until a repair has replaced all of it.
pub(crate) fn compare(
    root: &Path,
    recorded: &Path,
    conda: bool,
    slice: Option<Slice>,
    progress: &mut dyn FnMut(Progress),
) -> io::Result<Compared> {
    let opened = Opened::of(root);
    let tree = Tree::walk_and(root, Some(&opened))?;
    let mut differences = Vec::new();
    let mut differs = |path: &Path, what| differences.push(Difference { path: path.to_owned(), what });
    let open = opened.paths()?;
    for path in open.iter().flatten() {
        differs(path, What::Mode);
    }
    for path in &tree.unreadable {
        differs(path, What::Unreadable);
    }
    let (records, no_records) = match Records::read(recorded) {
        Ok(records) => (Some(records), None),
        Err(error) => (None, Some(error)),
    };
    let (packaged, broken) = match conda {
        true if root == recorded => by_packages(root, &tree),
        true => by_packages(recorded, &Tree::walk(recorded)?),
        false => Default::default(),
    };
    let mut expected: BTreeMap<_, _> = packaged.into_iter().map(|(path, file)| (path, file.sha256)).collect();
    for record in &broken {
        differs(record, What::Changed);
    }
    // Without our records, only what the packages' own records contain can be checked.
    let records = records.unwrap_or_else(|| Records { links: tree.links.clone(), ..Records::default() });
    expected.extend(records.files.iter().map(|(path, digest)| (path.clone(), Some(digest.clone()))));

    // The walk does not enter these: their owners can exchange everything in them at any time.
    let is_strangers = |above: &Path| tree.directories.get(above).is_some_and(|found| !is_trusted(found.uid()));
    let mut hashed = Vec::new();
    for path in expected.keys().chain(records.links.keys()) {
        let is_link = records.links.get(path);
        match (tree.files.contains_key(path), tree.links.get(path)) {
            (true, _) if is_link.is_none() => hashed.push(path.clone()),
            (false, Some(target)) if is_link.is_some() => {
                if is_link != Some(target) {
                    differs(path, What::Changed);
                }
            }
            (false, None) if tree.directories.contains_key(path) && expected.get(path) == Some(&None) => {}
            (false, None) if tree.unreadable.contains(path) => {}
            (false, None) if !tree.directories.contains_key(path) && !tree.others.contains_key(path) => {
                let is_hidden = path.ancestors().any(is_strangers);
                differs(path, if is_hidden { What::Unreadable } else { What::Missing });
            }
            _ => differs(path, What::Replaced),
        }
    }
    if no_records.is_none() {
        differences.extend(unrecorded(root, &tree, &records, &expected)?);
    }
    hashed.retain(|path| tree.files.get(path).is_none_or(|found| is_trusted(found.uid()) && !is_open(found)));
    // A user who still has a file of it open decides how long that is, and a repair replaces all of it whatever it contains.
    if open.is_some() {
        hashed.clear();
    }
    if let Some(Slice { number, of }) = slice {
        let (number, of) = (number as usize, (of as usize).max(1));
        hashed = hashed.into_iter().skip(number % of).step_by(of).collect();
    }
    let bytes = hashed.iter().filter_map(|path| tree.files.get(path)).map(std::fs::Metadata::len).sum();
    let files = hashed.len() as u64;
    let report = |done| progress(Progress { done, total: files, ..Progress::begun("hashing files") });
    for (path, found) in digests_while(root, hashed, report)? {
        match (found, expected.get(&path)) {
            (Ok(found), Some(Some(wanted))) if !found.eq_ignore_ascii_case(wanted) => {
                differences.push(Difference { path, what: What::Changed });
            }
            (Ok(_), _) => {}
            (Err(_), _) => differences.push(Difference { path, what: What::Unreadable }),
        }
    }
    differences.sort();
    differences.dedup();
    Ok(Compared { files, bytes, differences, no_records })
}

/// Finds entries without a record, and entries with other permissions or another owner than when they were built.
fn unrecorded(
    root: &Path,
    tree: &Tree,
    records: &Records,
    expected: &BTreeMap<PathBuf, Option<String>>,
) -> io::Result<Vec<Difference>> {
    let mut differences = Vec::new();
    let mut differs = |path: &Path, what| differences.push(Difference { path: path.to_owned(), what });
    let is_ours = |path: &Path| [ENVIRONMENT_MARKER, RECORDS].iter().any(|ours| path == Path::new(ours));
    let known = |path: &Path| expected.contains_key(path) || records.links.contains_key(path) || is_ours(path);
    let by_python = |path: &Path| is_byte_code(path, |source| tree.files.contains_key(source) && known(source));

    let below = HostRoot::without_mounts(root)?;
    let links = tree.links.keys().map(|path| Ok((path, below.open_link(&Path::new("/").join(path))?.metadata()?)));
    let links = links.collect::<io::Result<BTreeMap<_, _>>>()?;
    let links = links.iter().map(|(path, found)| (*path, found));
    let there = || tree.files.iter().chain(links.clone()).chain(&tree.others);
    let is_strangers = |found: &fs::Metadata| found.uid() != records.owner.0;

    for (path, found) in there().filter(|(path, _)| is_utf8(path) && !known(path) && !by_python(path)) {
        let target = tree.links.get(path);
        if !is_strangers(found) && target.is_none_or(|target| is_utf8(target)) {
            differs(path, What::Extra);
        }
    }
    for (path, found) in tree.files.iter().chain(&tree.directories).filter(|(path, _)| is_utf8(path)) {
        // Python's byte code follows the umask of the user that ran Python.
        let may_be_byte_code = if found.is_dir() { path.ends_with(CACHE) } else { !known(path) };
        let is_closed = mode(found) & OPEN_TO_OTHERS == 0;
        let is_right = records.has_its_mode(path, found) || (may_be_byte_code && is_closed);
        let is_extra = !found.is_dir() && !known(path) && !by_python(path);
        if !is_right && !is_extra {
            differs(path, What::Mode);
        }
    }
    for (path, found) in there().chain(&tree.directories) {
        // Of what no record has, the group does not matter.
        if is_strangers(found) || (known(path) || found.is_dir()) && !records.has_its_owner(found) {
            differs(path, What::Owner);
        }
    }
    Ok(differences)
}

/// The directory for Python's byte code, beside a module.
const CACHE: &str = "__pycache__";
/// The bits that must not be set: write permission for others, set-user-ID and set-group-ID.
const OPEN_TO_OTHERS: u32 = 0o6000 | WRITABLE_BY_OTHERS;

/// True for the byte code that Python writes when the owner runs a module: `__pycache__/NAME.TAG.pyc` beside a NAME.py
/// that exists and is `known`.
fn is_byte_code(path: &Path, known: impl Fn(&Path) -> bool) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".pyc"));
    // Optimised code has a suffix after the tag.
    let name = name.map(|name| name.rsplit_once(".opt-").map_or(name, |(name, _)| name));
    let module = name.and_then(|name| name.rsplit_once('.')).map(|(module, _)| module);
    let beside = path.parent().filter(|parent| parent.ends_with(CACHE)).and_then(Path::parent);
    beside.zip(module).is_some_and(|(beside, module)| known(&beside.join(format!("{module}.py"))))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
        sync::mpsc,
        time::Duration,
    };

    use super::*;
    use crate::needs::{Need, skips_without};

    /// Nobody serves the file system of this user, so whoever asks it waits.
    #[test]
    fn a_file_system_that_a_user_mounted_over_our_own_files_is_not_asked() {
        if skips_without([Need::Fuse]) {
            return;
        }
        let prefix = tempfile::tempdir().unwrap();
        let digest = "0123456789abcdef";
        let root = environment(prefix.path(), digest);
        fs::create_dir_all(&root).unwrap();
        let mounted = [ENVIRONMENT_MARKER, RECORDS].map(|name| {
            let point = root.join(name);
            fs::File::create(&point).unwrap().write_all(b"{}").unwrap();
            let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
            // The device is this program's stdin.
            let options = "fd=0,rootmode=100644,user_id=500,group_id=500,allow_other";
            let mut mount = Command::new("mount");
            mount.args(["-i", "-t", "fuse", "-o", options, "theirs"]).arg(&point);
            assert!(mount.stdin(Stdio::from(device.try_clone().unwrap())).status().unwrap().success());
            (point, device)
        });
        let (sender, receiver) = mpsc::channel();
        let order = prefix.path().to_owned();
        let looking = std::thread::spawn(move || sender.send(verify_one(&order, digest, None, &mut |_| {})));
        let verified = receiver.recv_timeout(Duration::from_secs(20));
        for (point, device) in mounted {
            // Ends the wait, if there is one.
            drop(device);
            assert!(Command::new("umount").arg("-l").arg(point).status().unwrap().success());
        }
        looking.join().unwrap().unwrap();
        let mut expected: Vec<_> = [ENVIRONMENT_MARKER, RECORDS]
            .into_iter()
            .flat_map(|name| [What::Changed, What::Unreadable].map(|what| Difference { path: name.into(), what }))
            .collect();
        expected.sort();
        assert_eq!(verified.unwrap().unwrap().differences, expected);
    }
}
