//! Dumps of the running instance's KVS (flux-dump(1)), kept on the lead's host. They hold the jobs of all users, so
//! only root can read them, whoever owns the brokers.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ChildStdout,
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};

use super::flux;
use api::Dump;
use host::{
    Root,
    child::{Kept, wait_until},
    dumps::{DUMPS, FORMAT, ID_KEY, SUFFIX, dumps, files, is_of},
    files::{aside, remove_if_there, sync_parent},
    lock,
    opening::open_only_path_below,
    room::Room,
    state,
    statedir::{CONTENT, STATEDIR},
    trust,
};
use hostapi::{DumpOrder, Dumped, FluxOrder, LONGEST_DUMP, Refusal};

/// Number of dumps of one instance that are kept.
const KEEP: usize = 5;
/// Lock file: one dump at a time.
const LOCK: &str = ".lock";
/// For the rest of flux's output, after flux has ended.
const GRACE: Duration = Duration::from_secs(10);
/// Bytes that must stay free beyond the size of the store, because the broker keeps writing during the dump.
const MARGIN: u64 = 64 << 20;
const KEY_TIMEOUT_SECS: u64 = 60;

/// Dumps the broker's KVS to a file below the prefix, under a temporary name that is then renamed, and removes the
/// oldest dumps.
///
/// # Errors
/// If `flux` fails, or the disk is full or the dump could fill it; then nothing of the dump remains.
pub fn dump(root: &Root, order: &DumpOrder) -> Result<Dumped, Refusal> {
    let dir = root.path(&order.prefix).join(DUMPS);
    let _one = {
        // Taken under the host's lock, so that a concurrent removal sees either no directory yet or all of its content.
        let _claimed = state::lock_claimed(root, &order.prefix)?;
        trust::make_closed_directory(root, &order.prefix.join(DUMPS), 0o700)?;
        lock::take(&dir.join(LOCK), Duration::ZERO).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => Refusal::transient("another dump is being made on this host"),
            _ => Refusal::io("lock", &dir, &error),
        })?
    };
    remove_leavings(&dir);
    let room = Room::of(&dir).map_err(|error| Refusal::io("examine", &dir, &error))?;
    // The broker's user owns the statedir, and a mount there may never answer.
    let statedir = trust::open_unless_user_mounted(&root.path(&order.prefix).join(STATEDIR));
    let store = statedir.and_then(|statedir| open_only_path_below(statedir, Path::new(CONTENT))?.metadata());
    // A queue that can't be examined is dumped all the more; the dump stops before the disk is full.
    check_room(&root.unpath(&dir), room, store.map_or(0, |store| store.len()))?;
    // The time before the dump begins: later changes are not in it.
    let time = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    name_instance(root, order)?;
    let path = dir.join(format!("{}-{}{SUFFIX}", order.instance_id, time.strftime(FORMAT)));
    let new = aside(&path);
    let made = write(root, order, &new, room.available.saturating_sub(MARGIN)).and_then(|warnings| {
        let failed = |error: io::Error| Refusal::io("keep", &path, &error);
        fs::rename(&new, &path).and_then(|()| sync_parent(&path)).map_err(failed)?;
        Ok((fs::metadata(&path).map_err(failed)?.len(), warnings))
    });
    let (bytes, warnings) = made.inspect_err(|_| drop(remove_if_there(&new)))?;
    prune(&dir, &order.instance_id);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Dumped { path: root.unpath(&path), dump: Dump { name, time: Time(time), bytes }, warnings })
}

/// Checks that a dump of a store of this size fits. A dump that filled the lead's disk would damage the store,
/// which is on the same disk.
fn check_room(dir: &Path, room: Room, store: u64) -> Result<(), Refusal> {
    let wanted = store.saturating_add(MARGIN);
    if room.available >= wanted {
        return Ok(());
    }
    Err(Refusal::transient(format!(
        "{} has too little room for a dump: {} MiB are free, and {} MiB may be needed ({} for today's queue, and {} \
         that must stay free); make room on this file system",
        dir.display(),
        room.available >> 20,
        wanted.div_ceil(1 << 20),
        store.div_ceil(1 << 20),
        MARGIN >> 20,
    )))
}

/// Removes what killed dumps left. The caller holds the lock, so no other dump is running.
fn remove_leavings(dir: &Path) {
    let is_aside = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "new");
    files(dir).filter(is_aside).for_each(|path| drop(remove_if_there(&path)));
}

fn prune(dir: &Path, instance_id: &str) {
    let own: Vec<_> = dumps(dir.parent().unwrap_or(dir)).into_iter().filter(|dump| is_of(dump, instance_id)).collect();
    for dump in own.iter().rev().skip(KEEP) {
        let _ = remove_if_there(&dir.join(&dump.name));
    }
}

/// Stores the instance's ID in the KVS, and so in every later dump, including those that Flux itself makes when it
/// stops.
fn name_instance(root: &Root, order: &DumpOrder) -> Result<(), Refusal> {
    let pair = format!("{ID_KEY}={}", order.instance_id);
    let ran = flux::flux(
        root,
        &FluxOrder {
            prefix: order.prefix.clone(),
            digest: order.digest.clone(),
            args: ["kvs", "put", "--raw", &pair].map(str::to_owned).into(),
            run_as: order.run_as.clone(),
            timeout_secs: KEY_TIMEOUT_SECS,
        },
    )?;
    if ran.code == 0 { Ok(()) } else { Err(failed("kvs put", &ran.stderr)) }
}

/// Writes flux-dump's output through this process, `most` bytes of it at most: flux runs as the brokers' user, who must not
/// own the file, and may write to flux's output without end.
fn write(root: &Root, order: &DumpOrder, path: &Path, most: u64) -> Result<String, Refusal> {
    let cant_write = |error: io::Error| Refusal::io("write", path, &error);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(cant_write)?;
    // Like flux-core's own etc/kvs-backup.cron: an entry that a full disk damaged must not keep the rest from being
    // saved.
    let args = ["dump", "--quiet", "--ignore-failed-read", "-"].map(str::to_owned);
    let mut child = flux::spawn(root, &order.prefix, &order.digest, &args, &order.run_as)?;
    let (stdout, stderr) = (child.stdout.take(), Kept::of(child.stderr.take()));
    let (tell, copied) = channel();
    // On a thread of its own, because the brokers' user can take flux's output from it (pidfd_getfd(2)), and hold it open
    // for ever. If this ends early, flux gets SIGPIPE.
    thread::spawn(move || tell.send(compress(stdout, Limited { file, left: most })));
    let status = wait_until(&mut child, Instant::now() + LONGEST_DUMP).map_err(cant_write)?;
    let held = || io::Error::new(io::ErrorKind::TimedOut, "flux has ended, but another process holds its output open");
    let whole = copied.recv_timeout(GRACE).unwrap_or_else(|_| Err(held())).map_err(cant_write)?;
    whole.file.sync_all().map_err(cant_write)?;
    let said = stderr.text();
    if status.is_some_and(|status| status.success()) { Ok(said.trim().to_owned()) } else { Err(failed("dump", &said)) }
}

/// A file that can't take the room that the broker needs.
struct Limited {
    file: File,
    left: u64,
}

impl Write for Limited {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let full =
            || io::Error::new(io::ErrorKind::StorageFull, "the broker needs the rest of the room; make more room");
        self.left = self.left.checked_sub(buffer.len() as u64).ok_or_else(full)?;
        self.file.write_all(buffer)?;
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn compress(stdout: Option<ChildStdout>, file: Limited) -> io::Result<Limited> {
    let mut encoder = GzEncoder::new(file, Compression::fast());
    if let Some(mut stdout) = stdout {
        io::copy(&mut stdout, &mut encoder)?;
    }
    encoder.finish()
}

fn failed(command: &str, said: &str) -> Refusal {
    let last = said.trim().lines().last().unwrap_or("no message");
    Refusal::transient(format!("flux {command} failed: {last}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use host::child::kill_group;

    #[test]
    fn the_newest_dumps_are_kept_and_those_of_other_instances_too() {
        let prefix = tempfile::tempdir().unwrap();
        let dir = prefix.path().join(DUMPS);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("other-20200101T000000Z.tgz"), "").unwrap();
        (0..KEEP + 2).for_each(|n| fs::write(dir.join(format!("id-20261120T22200{n}Z.tgz")), "").unwrap());
        prune(&dir, "id");
        let left: Vec<_> = dumps(prefix.path()).into_iter().map(|dump| dump.name).collect();
        assert_eq!(left.len(), KEEP + 1);
        assert_eq!((left[0].as_str(), left[1].as_str()), ("other-20200101T000000Z.tgz", "id-20261120T222002Z.tgz"));
    }

    /// Has this script dump as flux, and write `most` bytes to `dump.new` at most.
    fn write_of(host: &Path, script: &str, most: u64) -> Result<String, Refusal> {
        let (uid, gid) = fs::metadata(host).map(|found| (found.uid(), found.gid())).unwrap();
        let bin = host.join("p/envs/0123/bin");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir(host.join("etc")).unwrap();
        fs::write(host.join("etc/passwd"), format!("owner:x:{uid}:{gid}::/:/bin/sh\n")).unwrap();
        fs::write(bin.join("flux"), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(bin.join("flux"), fs::Permissions::from_mode(0o755)).unwrap();
        let order = DumpOrder {
            prefix: "/p".into(),
            digest: "0123".to_owned(),
            run_as: "owner".to_owned(),
            instance_id: "id".to_owned(),
        };
        write(&Root::at(host), &order, &host.join("dump.new"), most)
    }

    #[test]
    fn a_process_that_holds_flux_s_output_open_holds_up_no_dump() {
        let host = tempfile::tempdir().unwrap();
        let holder = host.path().join("holder");
        let script = format!("echo dumped\nsleep 1000 2>/dev/null &\necho $$ >{}", holder.display());
        let refusal = write_of(host.path(), &script, MARGIN).unwrap_err();
        kill_group(fs::read_to_string(&holder).unwrap().trim().parse().unwrap());
        assert!(refusal.transient && refusal.message.contains("another process holds its output open"), "{refusal}");
    }

    /// The brokers' user can write to flux's output whatever the store holds.
    #[test]
    fn a_dump_that_grows_without_end_takes_no_more_than_the_room_it_may_have() {
        let host = tempfile::tempdir().unwrap();
        let refusal = write_of(host.path(), "exec cat /dev/urandom", 1 << 20).unwrap_err();
        assert!(refusal.transient && refusal.message.contains("make more room"), "{refusal}");
        assert!(fs::metadata(host.path().join("dump.new")).unwrap().len() <= 1 << 20);
        let host = tempfile::tempdir().unwrap();
        write_of(host.path(), "head -c 500000 /dev/urandom", 1 << 20).unwrap();
    }

    #[test]
    fn a_dump_that_could_fill_the_disk_is_refused_with_both_figures() {
        const MIB: u64 = 1 << 20;
        for (free, store, fits) in [
            (64 * MIB, 0, true),
            (64 * MIB - 1, 0, false),
            (1064 * MIB, 1000 * MIB, true),
            (1063 * MIB, 1000 * MIB, false),
            (u64::MAX, u64::MAX, true),
        ] {
            let checked =
                check_room(Path::new("/p/dump"), Room { available: free, total: u64::MAX, files: None }, store);
            assert_eq!(checked.is_ok(), fits, "{free} {store}");
        }
        let refusal =
            check_room(Path::new("/p/dump"), Room { available: 500 * MIB, ..Room::default() }, 1000 * MIB).unwrap_err();
        let words = ["/p/dump", "500 MiB are free", "1064 MiB may be needed"];
        assert!(refusal.transient && words.iter().all(|word| refusal.message.contains(word)), "{refusal}");
    }
}
