//! Garbage collection in the host stage: removes environments beyond `packages.keep`, and archives that no environment
//! and no published package set refers to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
    time::{Duration, SystemTime},
};

use crate::{
    ENVIRONMENT_MARKER,
    environment::{failed, marker, ready, transaction::Environments},
    fetch::archive,
};
use host::{
    BrokerProcesses, Occupant, lock,
    opening::{look_in, open_uncovered},
    state::environment,
};
use hostapi::{CollectOrder, Collected, Refusal};

/// An environment that is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReadyEnvironment {
    /// Its package set's digest.
    pub digest: String,
    /// When it became ready: the marker's modification time.
    pub made: SystemTime,
}

/// The environments to remove. Those in `wanted` or `used` stay, and so do the newest of the others until `keep` are
/// left.
fn removable<'a>(
    found: &'a [ReadyEnvironment],
    used: &BTreeSet<String>,
    wanted: &BTreeSet<String>,
    keep: usize,
) -> Vec<&'a str> {
    let stays = |one: &&ReadyEnvironment| wanted.contains(&one.digest) || used.contains(&one.digest);
    let (stay, mut others): (Vec<_>, Vec<_>) = found.iter().partition(stays);
    // The digest breaks ties, so that the result doesn't depend on the order in the directory.
    others.sort_by(|a, b| (b.made, &b.digest).cmp(&(a.made, &a.digest)));
    others.iter().skip(keep.saturating_sub(stay.len())).map(|one| one.digest.as_str()).collect()
}

/// Carries out `order`. Never touches a name that is not one of ours, nor an environment that a process of the broker
/// uses, as far as `broker` knows them; no other process blocks a removal.
///
/// # Errors
/// A sentence for people; what was removed is removed, the next run goes on.
pub fn collect(order: &CollectOrder, broker: &dyn BrokerProcesses) -> Result<Collected, Refusal> {
    let environments = Environments::hold(&order.prefix, broker)?;
    let mut wanted = order.wanted.clone();
    // The symlink `current` must not dangle.
    let current = fs::read_link(order.prefix.join("current")).ok();
    wanted.extend(current.and_then(|target| Some(target.file_name()?.to_str()?.to_owned())));

    let found = find(&order.prefix);
    let keep = usize::try_from(order.keep).unwrap_or(usize::MAX);
    // Scan the processes only if something would be removed.
    let without_use = removable(&found, &BTreeSet::new(), &wanted, keep);
    let names = without_use.into_iter().map(str::to_owned).collect::<Vec<_>>();
    let mut used = match names.as_slice() {
        [] => BTreeMap::new(),
        names => environments.used(names).map_err(|e| environments.failure("find the processes that use", &e))?,
    };
    let mut collected = Collected::default();
    let mut first_failure = environments.warnings.first().map(|words| failed(words.clone()));
    for digest in removable(&found, &used.keys().cloned().collect(), &wanted, keep) {
        let bytes = marker(&order.prefix, digest).map_or(0, |marker| marker.bytes);
        match environments.discard(digest) {
            // Go on with the other environments.
            Err(e) => drop(first_failure.get_or_insert(environments.failure("remove an old environment in", &e))),
            Ok(Some(occupant)) => drop(used.insert(digest.to_owned(), occupant)),
            Ok(None) => {
                collected.environments.push(digest.to_owned());
                collected.bytes += bytes;
            }
        }
    }
    collected.used = used.iter().map(|(digest, occupant)| usage(digest, occupant)).collect();
    let pkgs = order.prefix.join("pkgs");
    let swept = sweep(&order.prefix, &pkgs, &order.archives);
    let (archives, bytes) = swept.map_err(|e| failed(format!("can't clean {}: {e}", pkgs.display())))?;
    collected.archives = archives;
    collected.bytes += bytes;
    first_failure.map_or(Ok(collected), Err)
}

fn usage(digest: &str, occupant: &Occupant) -> String {
    format!("{digest} by {occupant}")
}

fn find(prefix: &Path) -> Vec<ReadyEnvironment> {
    let made = |digest: &str| {
        // A user may have mounted something over the marker since it was read.
        let directory = open_uncovered(&environment(prefix, digest));
        let marker = directory.and_then(|directory| look_in(&directory, ENVIRONMENT_MARKER.as_ref()));
        marker.and_then(|marker| marker.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    ready(prefix).into_iter().map(|digest| ReadyEnvironment { made: made(&digest), digest }).collect()
}

/// Removes archives and partial downloads that nothing refers to. Returns the number of archives and the bytes.
fn sweep(prefix: &Path, pkgs: &Path, named: &BTreeSet<String>) -> io::Result<(u64, u64)> {
    let _lock = match lock::take(&pkgs.join(lock::HIDDEN), Duration::ZERO) {
        // The directory doesn't exist, or an agent that may know newer package sets is filling it: try again next time.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::WouldBlock) => return Ok((0, 0)),
        other => other?,
    };
    let mut kept = BTreeSet::new();
    for digest in ready(prefix) {
        match marker(prefix, &digest) {
            Some(marker) => kept.extend(marker.archives),
            // It was ready a moment ago, so something is changing it: leave everything alone.
            None => return Ok((0, 0)),
        }
    }
    let (mut count, mut bytes) = (0, 0);
    for entry in fs::read_dir(pkgs)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let part = archive::of_part(&name);
        let of = part.unwrap_or(&name);
        if archive::is_archive(of) && !named.contains(of) && !kept.contains(of) {
            bytes += entry.metadata()?.len();
            count += u64::from(part.is_none());
            fs::remove_file(entry.path())?;
        }
    }
    Ok((count, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_and_used_environments_stay_and_the_newest_others_up_to_keep() {
        // Oldest first.
        let all = ["a", "b", "c", "d"];
        for (used, wanted, keep, expected) in [
            ("", "d", 2, "a b"),
            ("", "d", 1, "a b c"),
            ("", "d", 4, ""),
            ("", "d", 9, ""),
            ("", "a", 2, "b c"),
            ("a", "d", 2, "b c"),
            ("a", "d", 1, "b c"),
            ("a b", "c d", 1, ""),
            ("", "c d", 2, "a b"),
            ("", "c d", 3, "a"),
            ("", "not-here", 1, "a b c"),
            ("", "", 0, "a b c d"),
        ] {
            let found: Vec<_> = (0..)
                .zip(all)
                .map(|(age, digest)| ReadyEnvironment {
                    digest: digest.to_owned(),
                    made: SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(age),
                })
                .collect();
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>();
            for found in [found.clone(), found.into_iter().rev().collect()] {
                let goes = removable(&found, &words(used), &words(wanted), keep);
                let goes = goes.into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
                assert_eq!(goes, words(expected), "used {used:?}, wanted {wanted:?}, keep {keep}");
            }
        }
    }
}
