//! The broker's log: on the pod's stdout as it grows, and bounded on the host.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{sync::watch, task::JoinHandle, time::interval};
use tracing::warn;

use broker::log::{LogFollower, rejection};
use host::{
    host_root::make_dirs_in_host_root,
    log::{MAX_LOG_BYTES, trim_log},
    opening::path_of,
};

const TRIM_EVERY: Duration = Duration::from_secs(30);
/// At most this many refused brokers are remembered, so that strangers can't make the agent grow.
const MAX_REJECTED: usize = 16;

/// Why the lead's broker refused others, by their broker names.
pub type Rejected = BTreeMap<String, String>;

/// Copies the log below `prefix` to stdout and cuts it to its size limit, until the task is aborted.
pub fn follow(prefix: PathBuf, rejected: watch::Sender<Rejected>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let directory = match make_dirs_in_host_root(&prefix.join("log")) {
            Ok(directory) => directory,
            Err(error) => return warn!(%error, "can't follow the broker's log"),
        };
        let path = path_of(&directory).join("broker.log");
        let mut follower = LogFollower::from_end(&path);
        let mut trim = interval(TRIM_EVERY);
        loop {
            tokio::select! {
                line = follower.next_line() => {
                    // A closed stdout loses nothing: the log on the host has the line.
                    let _ = writeln!(std::io::stdout(), "{line}");
                    if let Some((name, reason)) = rejection(&line) {
                        rejected.send_modify(|rejected| {
                            if rejected.len() >= MAX_REJECTED {
                                rejected.pop_first();
                            }
                            rejected.insert(name, reason);
                        });
                    }
                }
                _ = trim.tick() => trim_quietly(&path),
            }
        }
    })
}

fn trim_quietly(path: &Path) {
    if let Err(error) = trim_log(path, MAX_LOG_BYTES)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        warn!(%error, "can't cut the broker's log");
    }
}
