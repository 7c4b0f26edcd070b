//! The broker's own cgroups. At a pod's end, container runtime and kubelet kill every process below the pod's cgroup,
//! in every hierarchy: a broker that stays behind in a single one dies.

mod view;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

pub use view::*;

use crate::{
    files::{FileError, absent_is_fine},
    mountinfo,
};

/// How long a cgroup may stay busy after its last process ended or moved, until the kernel has released it.
const BUSY: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(10);
/// How long processes may take to freeze.
const FREEZE_TIMEOUT: Duration = Duration::from_millis(200);
/// The file of the freezer's hierarchy (cgroup v1).
const FREEZER_STATE: &str = "freezer.state";

/// Why the broker can't get cgroups of its own, or they can't be removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// This process is in a hierarchy that is not mounted.
    #[error("cgroup hierarchy {hierarchy} is not mounted on the host, so the broker can't leave {path} in it")]
    NotMounted {
        /// The hierarchy's controllers.
        hierarchy: String,
        /// The process's cgroup in it.
        path: String,
    },
    /// The kernel accepted the move, but the process did not leave its cgroup.
    #[error("the broker would stay in cgroup {path} of hierarchy {hierarchy} and die with the agent's pod")]
    LeftBehind {
        /// The hierarchy's controllers.
        hierarchy: String,
        /// The cgroup that the process is still in.
        path: String,
    },
    /// A cgroup can't be removed before its processes end.
    #[error("cgroup {} still holds {process}, which does not end; end it on the host, then the removal is retried", path.display())]
    Busy {
        /// The cgroup.
        path: PathBuf,
        /// One of its processes, in words.
        process: String,
    },
    /// An operation on a cgroup's file or directory failed.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The places of cgroup `name` in the hierarchies that this process can reach.
///
/// # Errors
/// If /proc can't be read.
pub fn places_here(name: &str) -> io::Result<Vec<Place>> {
    let found = places(&own_memberships()?, &own_mounts()?, name);
    Ok(found.into_iter().filter_map(|(_, place)| place).collect())
}

/// Moves the calling process into the cgroup `name` of every hierarchy, and verifies that it is there.
///
/// # Errors
/// [`CgroupError`]: then the process must not become a broker.
pub fn enter(name: &str, weight: u32) -> Result<(), CgroupError> {
    let proc = FileError::on("read", Path::new("/proc/self/cgroup"));
    let before = own_memberships().map_err(&proc)?;
    let mut moved = Vec::new();
    for (membership, place) in places(&before, &own_mounts().map_err(&proc)?, name) {
        let hierarchy = membership.hierarchy();
        let place = place.ok_or(CgroupError::NotMounted { hierarchy, path: membership.path })?;
        make_tree(&place.point, name, place.unified)?;
        set_weight(&place, name, weight)?;
        write(&place.directory.join("cgroup.procs"), "0")?;
        moved.push(place);
    }
    check_moved(&before, &own_memberships().map_err(&proc)?, &moved)
}

/// Moves the calling process from the cgroup `name` to the root of every hierarchy, and removes that cgroup.
///
/// # Errors
/// The first place that can't be left or removed.
pub fn leave(name: &str) -> Result<(), CgroupError> {
    let proc = FileError::on("read", Path::new("/proc/self/cgroup"));
    let places = places_here(name).map_err(&proc)?;
    for place in places.iter().filter(|place| place.directory.exists()) {
        write(&place.point.join("cgroup.procs"), "0")?;
    }
    remove(&places)
}

/// Makes the cgroup `name` and its missing parents in the hierarchy that is mounted at `point`.
///
/// # Errors
/// The first directory that can't be made, or file that can't be set.
pub fn make_tree(point: &Path, name: &str, unified: bool) -> Result<(), CgroupError> {
    let mut directory = point.to_owned();
    for component in Path::new(name) {
        directory.push(component);
        match fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(FileError::on("make cgroup", &directory)(error).into());
            }
            _ => {}
        }
        // cgroup v1: a cpuset without CPUs and memory nodes accepts no process.
        for file in ["cpuset.cpus", "cpuset.mems"].iter().filter(|_| !unified) {
            inherit(&directory.join(file))?;
        }
    }
    Ok(())
}

/// Sets the CPU weight of the topmost cgroup, because it counts against the siblings, one of which is kubepods.
fn set_weight(place: &Place, name: &str, weight: u32) -> Result<(), CgroupError> {
    let (file, value) = match place.unified {
        true => ("cpu.weight", u64::from(weight)),
        false => ("cpu.shares", u64::from(weight) * 1024 / 100),
    };
    let topmost = Path::new(name).iter().next().unwrap_or_default();
    let file = place.point.join(topmost).join(file);
    if file.exists() { write(&file, &value.to_string()) } else { Ok(()) }
}

/// Copies the parent's value to a cpuset file that is empty.
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
    Ok(fs::write(path, value).map_err(FileError::on("write", path))?)
}

/// The processes in and below the cgroups of `places`.
pub fn members(places: &[Place]) -> BTreeSet<i32> {
    members_below(places.iter().map(|place| place.directory.clone()))
}

/// The processes in and below these cgroups.
pub fn members_below(directories: impl IntoIterator<Item = PathBuf>) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut directories: Vec<PathBuf> = directories.into_iter().collect();
    while let Some(directory) = directories.pop() {
        // A cgroup that is gone by now is as good as empty. Pid 0 is a process of a PID namespace that is not visible
        // from here.
        let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        found.extend(procs.lines().filter_map(|line| line.trim().parse::<i32>().ok()).filter(|pid| *pid > 0));
        directories.extend(children(&directory));
    }
    found
}

/// Freezes the processes in and below the cgroups of `places`, so that none forks between a listing and a signal. A kernel without a
/// freezer changes nothing. Waits for at most [`FREEZE_TIMEOUT`]: a process in an uninterruptible call freezes only when the call ends.
///
/// # Errors
/// If a cgroup can't be frozen. Call [`thaw`] in any case.
pub fn freeze(places: &[Place]) -> Result<(), CgroupError> {
    set_frozen(places, true)?;
    let end = Instant::now() + FREEZE_TIMEOUT;
    while !places.iter().all(is_frozen) && Instant::now() < end {
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Lets the processes in and below the cgroups of `places` go on.
///
/// # Errors
/// If a cgroup can't be thawed: no broker may start there.
pub fn thaw(places: &[Place]) -> Result<(), CgroupError> {
    set_frozen(places, false)
}

fn set_frozen(places: &[Place], frozen: bool) -> Result<(), CgroupError> {
    let set = |place: &Place| {
        let (file, words) =
            if place.unified { ("cgroup.freeze", ["0", "1"]) } else { (FREEZER_STATE, ["THAWED", "FROZEN"]) };
        let path = place.directory.join(file);
        // Other hierarchies have no such file, and old kernels none in the unified one.
        if path.exists() { write(&path, words[usize::from(frozen)]) } else { Ok(()) }
    };
    places.iter().map(set).fold(Ok(()), Result::and)
}

fn is_frozen(place: &Place) -> bool {
    let read = |file| fs::read_to_string(place.directory.join(file));
    match place.unified {
        true => read("cgroup.events").map_or(true, |text| !text.lines().any(|line| line == "frozen 0")),
        false => read(FREEZER_STATE).map_or(true, |text| text.trim() == "FROZEN"),
    }
}

/// Removes the cgroups, and the parents that were made for them, as far as possible.
///
/// # Errors
/// The first that still has processes, or can't be removed.
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
/// The first that still has processes, or can't be removed.
pub fn remove_tree(directory: &Path) -> Result<(), CgroupError> {
    for child in children(directory) {
        remove_tree(&child)?;
    }
    remove_one(directory)
}

fn remove_one(directory: &Path) -> Result<(), CgroupError> {
    // Checked first: a hierarchy that is mounted read-only reports an error even for a cgroup that never existed.
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
            done => return Ok(done.map_err(FileError::on("remove cgroup", directory))?),
        }
    }
}

fn first_in(directory: &Path) -> String {
    match members_below([directory.to_owned()]).first() {
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim())
        }
        // A process in a container's PID namespace has no pid here.
        None => "a process that has no pid on this host".to_owned(),
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
/// If /proc can't be read.
pub fn own_mounts() -> io::Result<Vec<Mount>> {
    Ok(cgroup_mounts(mountinfo::own()?))
}
