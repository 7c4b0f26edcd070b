//! Cgroups of the broker's own. Runtime and kubelet kill everything they find below the pod's cgroup, in whichever
//! hierarchy: one that is left behind is enough to die.

mod view;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

pub use view::*;

use crate::{files::absent_is_fine, mountinfo};

/// A process that has just ended or moved keeps its cgroup busy until the kernel has let go of it.
const BUSY: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(10);

/// Why the broker could not be given cgroups of its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// This process is in a cgroup of a hierarchy whose mount is not to be found.
    #[error("cgroup hierarchy {hierarchy} is not mounted on the host, so the broker can't leave {path} in it")]
    NotMounted {
        /// Its controllers.
        hierarchy: String,
        /// Where this process is in it.
        path: String,
    },
    /// The kernel took the move and yet the process is where it was.
    #[error("the broker would stay in cgroup {path} of hierarchy {hierarchy} and die with the agent's pod")]
    LeftBehind {
        /// Its controllers.
        hierarchy: String,
        /// Where this process still is.
        path: String,
    },
    /// It can't be taken off before somebody has ended what is in it.
    #[error("cgroup {} still holds {process}, which does not end; end it on the host, and this is tried again", path.display())]
    Busy {
        /// Which.
        path: PathBuf,
        /// One of its processes, in words.
        process: String,
    },
    /// A file of a cgroup.
    #[error("can't {what} {}", path.display())]
    File {
        /// Verb.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

/// The places of this process' view of the host. Those that can't be reached are left out.
///
/// # Errors
/// No /proc.
pub fn places_here(name: &str) -> io::Result<Vec<Place>> {
    let found = places(&own_memberships()?, &own_mounts()?, name);
    Ok(found.into_iter().filter_map(|(_, place)| place).collect())
}

/// Moves the calling process into the cgroup `name` of every hierarchy and makes sure that it is there.
///
/// # Errors
/// [`CgroupError`]: then the process must not become a broker.
pub fn enter(name: &str, weight: u32) -> Result<(), CgroupError> {
    let proc = |source| CgroupError::File { what: "read", path: PathBuf::from("/proc/self/cgroup"), source };
    let before = own_memberships().map_err(proc)?;
    let mut moved = Vec::new();
    for (membership, place) in places(&before, &own_mounts().map_err(proc)?, name) {
        let hierarchy = membership.hierarchy();
        let place = place.ok_or(CgroupError::NotMounted { hierarchy, path: membership.path })?;
        make_tree(&place.point, name, place.unified)?;
        set_weight(&place, name, weight)?;
        write(&place.directory.join("cgroup.procs"), "0")?;
        moved.push(place);
    }
    check_moved(&before, &own_memberships().map_err(proc)?, &moved)
}

/// Moves the calling process out of the cgroup `name` of every hierarchy, to the top, and takes that cgroup off.
///
/// # Errors
/// The first place that can't be left or removed.
pub fn leave(name: &str) -> Result<(), CgroupError> {
    let proc = |source| CgroupError::File { what: "read", path: PathBuf::from("/proc/self/cgroup"), source };
    let places = places_here(name).map_err(proc)?;
    for place in places.iter().filter(|place| place.directory.exists()) {
        write(&place.point.join("cgroup.procs"), "0")?;
    }
    remove(&places)
}

/// Makes the cgroup `name` and those above it, where they are missing, in the hierarchy that is mounted at `point`.
///
/// # Errors
/// The first that can't be made.
pub fn make_tree(point: &Path, name: &str, unified: bool) -> Result<(), CgroupError> {
    let mut directory = point.to_owned();
    for component in Path::new(name) {
        directory.push(component);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(CgroupError::File { what: "make cgroup", path: directory, source: error });
            }
            _ => {}
        }
        // cgroup v1: a cpuset without cpus and memory nodes takes nobody in.
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|_| !unified) {
            inherit(&directory.join(file))?;
        }
    }
    Ok(())
}

/// The weight counts against the siblings, of which kubepods is one: it belongs to the topmost.
fn set_weight(place: &Place, name: &str, weight: u32) -> Result<(), CgroupError> {
    let (file, value) = match place.unified {
        true => ("cpu.weight", u64::from(weight)),
        false => ("cpu.shares", u64::from(weight) * 1024 / 100),
    };
    let topmost = Path::new(name).iter().next().unwrap_or_default();
    let file = place.point.join(topmost).join(file);
    if file.exists() { write(&file, &value.to_string()) } else { Ok(()) }
}

/// Gives a cpuset file its parent's value where it is empty.
fn inherit(file: &Path) -> Result<(), CgroupError> {
    let (Ok(own), Some(directory), Some(name)) = (fs::read_to_string(file), file.parent(), file.file_name()) else {
        return Ok(());
    };
    match directory.parent().map(|parent| fs::read_to_string(parent.join(name))) {
        Some(Ok(parent)) if own.trim().is_empty() => write(file, parent.trim()),
        _ => Ok(()),
    }
}

fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(path, value).map_err(|source| CgroupError::File { what: "write", path: path.to_owned(), source })
}

/// The processes in the cgroup of any of `places`, and below it.
pub fn members(places: &[Place]) -> BTreeSet<i32> {
    members_below(places.iter().map(|place| place.directory.clone()))
}

/// The processes in any of these cgroups, and below them.
pub fn members_below(directories: impl IntoIterator<Item = PathBuf>) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut directories: Vec<PathBuf> = directories.into_iter().collect();
    while let Some(directory) = directories.pop() {
        // Gone in between is as good as empty. 0: a process of a PID namespace that can't be seen from here.
        let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        found.extend(procs.lines().filter_map(|line| line.trim().parse::<i32>().ok()).filter(|pid| *pid > 0));
        directories.extend(children(&directory));
    }
    found
}

/// Takes the cgroups off, and those above them that were made for them: all that can be.
///
/// # Errors
/// The first that still has processes.
pub fn remove(places: &[Place]) -> Result<(), CgroupError> {
    places.iter().map(remove_place).fold(Ok(()), Result::and)
}

fn remove_place(place: &Place) -> Result<(), CgroupError> {
    let mut directory = place.directory.as_path();
    remove_tree(directory)?;
    while let Some(parent) = directory.parent().filter(|parent| *parent != place.point) {
        remove_one(parent)?;
        directory = parent;
    }
    Ok(())
}

/// Removes the cgroup `directory` and all below it.
///
/// # Errors
/// The first that still has processes.
pub fn remove_tree(directory: &Path) -> Result<(), CgroupError> {
    for child in children(directory) {
        remove_tree(&child)?;
    }
    remove_one(directory)
}

fn remove_one(directory: &Path) -> Result<(), CgroupError> {
    // A hierarchy that is mounted read-only says so even of what was never there.
    if !directory.exists() {
        return Ok(());
    }
    let end = Instant::now() + BUSY;
    loop {
        match absent_is_fine(fs::remove_dir(directory)) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => sleep(POLL),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                return Err(CgroupError::Busy { path: directory.to_owned(), process: first_in(directory) });
            }
            done => {
                let what = "remove cgroup";
                return done.map_err(|source| CgroupError::File { what, path: directory.to_owned(), source });
            }
        }
    }
}

fn first_in(directory: &Path) -> String {
    match members_below([directory.to_owned()]).first() {
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        }
        // One of a container has no number here.
        None => "a process that can't be seen from here".to_owned(),
    }
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let entries = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    entries.map(|entry| entry.path()).collect()
}

fn own_memberships() -> io::Result<Vec<Membership>> {
    Ok(memberships(&fs::read_to_string("/proc/self/cgroup")?))
}

/// The cgroup mounts that this thread sees.
///
/// # Errors
/// No /proc.
pub fn own_mounts() -> io::Result<Vec<Mount>> {
    Ok(cgroup_mounts(mountinfo::own()?))
}
