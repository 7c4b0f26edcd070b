use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
};

use super::{launch::shutdown, remove::Brokers, runnable, takeover};
use api::{BROKER_SOCKET_DIR, PREFIX_CANDIDATES};
use host::{Root, dumps, facts, opening::path_of, state, statedir, trust};
use hostapi::{FileVersion, HostView, Refusal, RosterCopy, RunningBroker};

/// Observes the host. It changes only the broker's record, if that was lost, the record of a shutdown, and the mode of a
/// statedir that others can read. It needs no lock, because every file it reads was renamed into place.
///
/// # Errors
/// If `state.json` can't be read or trusted.
pub fn observe(root: &Root, brokers: &dyn Brokers) -> Result<HostView, Refusal> {
    observe_again(root, brokers, None)
}

/// As [`observe`], but leaves the roster's copy out if its file still is `known`.
///
/// # Errors
/// As for [`observe`].
pub fn observe_again(root: &Root, brokers: &dyn Brokers, known: Option<FileVersion>) -> Result<HostView, Refusal> {
    let state = state::find(root)?;
    let prefix = state.as_ref().map(|state| state.prefix.clone());
    let broker = brokers.observe(prefix.as_deref());
    let below = prefix.as_ref().map(|prefix| root.path(prefix));
    if broker.running.is_none()
        && let Some(prefix) = &below
    {
        statedir::keep_private(prefix)?;
    }
    let read = |name: &str| below.as_ref().and_then(|prefix| fs::read_to_string(prefix.join(name)).ok());
    let copy = below.as_ref().and_then(|prefix| copy(&prefix.join("etc/roster.json"), known).ok());
    let (roster_version, roster) = copy.unzip();
    Ok(HostView {
        environments: below.as_deref().map(environments).unwrap_or_default(),
        roster: roster.flatten(),
        roster_version,
        applied: read("etc/applied.json"),
        dumps: below.as_deref().map(dumps::dumps).unwrap_or_default(),
        takeover: below.as_deref().and_then(takeover::read),
        state,
        socket_lost: broker.running.is_some()
            && trust::open_unless_user_mounted(&root.path(BROKER_SOCKET_DIR)).is_err(),
        statedir_lost: broker.running.as_ref().is_some_and(|broker| is_statedir_lost(root, prefix.as_deref(), broker)),
        shut_down: below.as_deref().and_then(|prefix| shutdown::find(prefix, &broker)),
        broker: broker.running,
        died: broker.died,
        died_instance_id: broker.last_record.map(|record| record.instance_id),
        unknown: broker.unknown.map(|broker| broker.to_string()),
        boot_id: facts::boot_id(root),
        resources: facts::resources(root),
        static_cpus: facts::has_static_cpus(root),
        job_shells: broker.job_shells,
    })
}

/// The roster's copy at `path` and which file that is; without its text if it is `known`.
fn copy(path: &Path, known: Option<FileVersion>) -> io::Result<(FileVersion, Option<RosterCopy>)> {
    let mut file = File::open(path)?;
    let found = file.metadata()?;
    let version = FileVersion {
        inode: (found.dev(), found.ino()),
        changed: (found.ctime(), found.ctime_nsec()),
        length: found.len(),
    };
    if known == Some(version) {
        return Ok((version, None));
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok((version, Some(text.into())))
}

/// Digests of the environments that are ready, except those whose Flux has not been tried on this host.
fn environments(prefix: &Path) -> Vec<String> {
    packages::ready(prefix).into_iter().filter(|digest| !runnable::is_untried(prefix, digest)).collect()
}

/// A prefix without `state.json` may still hold the statedir, so all candidates count in which only root could have put
/// one.
fn is_statedir_lost(root: &Root, prefix: Option<&Path>, broker: &RunningBroker) -> bool {
    let record = &broker.record;
    let mut prefixes = PREFIX_CANDIDATES.into_iter().map(Path::new).chain(prefix);
    let is_there = |prefix: &Path| {
        let directory = trust::directory(root, prefix).ok().flatten();
        directory.is_some_and(|directory| statedir::is_there(&path_of(&directory), &record.instance_id))
    };
    record.rank == 0 && !prefixes.any(is_there)
}
