//! Environments and archives that nothing needs are removed; those in use stay.

use std::{collections::BTreeSet, os::unix::process::CommandExt, process::Command, time::Duration};

use host::{
    cgroup::{Place, make_tree, members, places_here, remove},
    lock,
    process::Identity,
};
use hostapi::{CollectOrder, Collected, Refusal};
use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::Signal,
};
use stage::launch::HostPlaces;

use super::*;

/// Lock `number` of a channel whose flux-core has a file of its own for each.
async fn numbered(channel: &mut Channel, number: usize) -> PackageSet {
    const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];
    channel.add(NAMES[number], ".conda", &[], &[Content::plain("share/number", NAMES[number].as_bytes())]);
    resolve(&asked(&channel.file_url(), &["flux-core", NAMES[number]])).await.unwrap()
}

/// A host with so many environments, the oldest first.
async fn host_with(count: usize) -> (Host, Vec<PackageSet>) {
    let (mut channel, host, mut sets) = (Channel::with_flux(), Host::new(), Vec::new());
    for number in 0..count {
        let set = numbered(&mut channel, number).await;
        host.fetch(&set).await.unwrap();
        host.link(&set).await.unwrap();
        // Clocks of file systems are coarse.
        let made = std::time::SystemTime::now() - Duration::from_secs(1000 - number as u64);
        let marker = File::options().write(true).open(host.environment(&set).join(packages::ENVIRONMENT_MARKER));
        marker.unwrap().set_modified(made).unwrap();
        sets.push(set);
    }
    (host, sets)
}

/// No broker runs.
fn collect(host: &Host, keep: u32, wanted: &[&PackageSet]) -> Collected {
    try_to_collect(host, keep, wanted).unwrap()
}

fn try_to_collect(host: &Host, keep: u32, wanted: &[&PackageSet]) -> Result<Collected, Refusal> {
    try_to_collect_beside(&Broker::places(host, "none"), host, keep, wanted)
}

fn collect_beside(broker: &HostPlaces, host: &Host, keep: u32, wanted: &[&PackageSet]) -> Collected {
    try_to_collect_beside(broker, host, keep, wanted).unwrap()
}

fn try_to_collect_beside(
    broker: &HostPlaces,
    host: &Host,
    keep: u32,
    wanted: &[&PackageSet],
) -> Result<Collected, Refusal> {
    let archives = wanted.iter().flat_map(|set| packages::archives(set, PLATFORM).unwrap()).collect();
    let wanted = wanted.iter().map(|set| set.digest()).collect();
    let order = CollectOrder { prefix: host.prefix().to_owned(), keep, wanted, archives, is_queue_up: false };
    packages::collect(&order, broker)
}

/// The cgroup of a host's broker, and what runs in it.
struct Broker {
    places: HostPlaces,
    cgroups: Vec<Place>,
}

impl Broker {
    fn places(host: &Host, name: &str) -> HostPlaces {
        let run_dir = host.prefix().join("run");
        let cgroup = format!("fxd-test-{}-{name}/broker", std::process::id());
        HostPlaces { socket_dir: run_dir.join("broker"), run_dir, cgroup, launcher: "/nowhere".into(), systemd: None }
    }

    fn of(host: &Host, name: &str) -> Option<Self> {
        if skips_without([Need::Cgroups]) {
            return None;
        }
        let places = Self::places(host, name);
        let cgroups = places_here(&places.cgroup).unwrap();
        for place in &cgroups {
            make_tree(&place.point, &places.cgroup, place.unified).unwrap();
        }
        Some(Self { places, cgroups })
    }

    /// Takes a process in, as if the broker had started it.
    fn adopt(&self, process: &std::process::Child) {
        for place in &self.cgroups {
            fs::write(place.directory.join("cgroup.procs"), process.id().to_string()).unwrap();
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        for process in members(&self.cgroups).into_iter().filter_map(Identity::of) {
            let _ = process.signal(Signal::SIGKILL);
            process.wait_gone(Duration::from_secs(10));
        }
        let _ = remove(&self.cgroups);
    }
}

fn digests(sets: &[&PackageSet]) -> BTreeSet<String> {
    sets.iter().map(|set| set.digest()).collect()
}

fn archives(sets: &[&PackageSet]) -> BTreeSet<String> {
    sets.iter().flat_map(|set| packages::archives(set, PLATFORM).unwrap()).collect()
}

/// What is in a directory besides its lock.
fn names(directory: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != ".lock").collect()
}

#[tokio::test]
async fn the_wanted_and_the_newest_environments_stay_with_their_archives() {
    let (host, sets) = host_with(4).await;
    let all: Vec<_> = sets.iter().collect();
    // What is not ours is not ours to remove.
    fs::write(host.pkgs().join("README"), "").unwrap();
    fs::create_dir(host.prefix().join("envs/mine")).unwrap();
    let part = format!(".{}.conda.part", "0".repeat(64));
    fs::write(host.pkgs().join(&part), "").unwrap();
    assert_eq!(names(&host.pkgs()).len(), 2 + 4 + 2, "flux-core, libflux, one for each");

    let collected = collect(&host, 4, &[all[0]]);
    assert_eq!(collected.environments, Vec::<String>::new());
    assert!(!host.pkgs().join(&part).exists(), "no fetch resumes that download");

    let collected = collect(&host, 2, &[all[0]]);
    assert_eq!(collected.environments.iter().cloned().collect::<BTreeSet<_>>(), digests(&all[1..3]));
    assert_eq!(collected.archives, 2);
    assert!(collected.bytes > 600_000 && collected.used.is_empty(), "{collected:?}");
    let mut left = digests(&[all[0], all[3]]);
    assert_eq!(packages::ready(host.prefix()).into_iter().collect::<BTreeSet<_>>(), left);
    left.insert("mine".to_owned());
    assert_eq!(names(&host.prefix().join("envs")), left);
    let mut left = archives(&[all[0], all[3]]);
    left.insert("README".to_owned());
    assert_eq!(names(&host.pkgs()), left);
    // A published set is not here yet: its archives may be on their way.
    let collected = collect(&host, 1, &[all[0], all[1]]);
    assert_eq!(collected.environments, [all[3].digest()]);
    assert_eq!(collected.archives, 1);
}

#[tokio::test]
async fn the_environment_that_current_links_to_stays() {
    let (host, sets) = host_with(2).await;
    std::os::unix::fs::symlink(format!("envs/{}", sets[0].digest()), host.prefix().join("current")).unwrap();
    assert_eq!(collect(&host, 1, &[&sets[1]]), Collected::default());
}

/// A process that runs a program of the environment, and one that only names it in its arguments: between two commands a script has
/// nothing open. Both run as `uid`.
fn users_of(host: &Host, program_of: &PackageSet, words_of: &PackageSet, uid: u32) -> [std::process::Child; 2] {
    fs::set_permissions(host.prefix(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = host.environment(program_of).join("bin/sleep-of-its-own");
    fs::copy("/bin/sleep", &program).unwrap();
    let path = format!("{}/bin:/bin", host.environment(words_of).display());
    [Command::new(&program).uid(uid).arg("1000"), Command::new("/bin/sleep").uid(uid).arg("1000").env("PATH", path)]
        .map(|command| command.spawn().unwrap())
}

#[tokio::test]
async fn an_environment_that_a_brokers_process_uses_is_kept() {
    let (host, sets) = host_with(3).await;
    let Some(broker) = Broker::of(&host, "keeps") else { return };
    let mut processes = users_of(&host, &sets[0], &sets[1], 0);
    processes.iter().for_each(|process| broker.adopt(process));

    let collected = collect_beside(&broker.places, &host, 1, &[&sets[2]]);
    assert_eq!(collected.environments, Vec::<String>::new());
    let used = collected.used.join(", ");
    assert!(used.contains(&format!("process {} (sleep-of-its-ow", processes[0].id())), "{used}");
    assert!(used.contains(&format!("process {} (sleep)", processes[1].id())), "{used}");
    assert_eq!(processes[0].try_wait().unwrap(), None);
    assert!(packages::linked(host.prefix(), &sets[0].digest()).is_some());
    assert!(archives(&sets.iter().collect::<Vec<_>>()).is_subset(&names(&host.pkgs())));

    for child in &mut processes {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(collect_beside(&broker.places, &host, 1, &[&sets[2]]).environments.len(), 2);
}

#[tokio::test]
async fn a_process_of_root_keeps_the_environment_that_it_runs_and_a_users_does_not() {
    let (host, sets) = host_with(3).await;
    let Some(broker) = Broker::of(&host, "stranger") else { return };
    let mut root = users_of(&host, &sets[0], &sets[1], 0);
    let collected = collect_beside(&broker.places, &host, 1, &[&sets[2]]);
    assert_eq!((collected.environments, collected.used.len()), (vec![sets[1].digest()], 1));
    for process in &mut root {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    let mut nobody = users_of(&host, &sets[0], &sets[0], 65534);
    let collected = collect_beside(&broker.places, &host, 1, &[&sets[2]]);
    assert_eq!((collected.environments, collected.used), (vec![sets[0].digest()], Vec::new()));
    for process in &mut nobody {
        assert_eq!(process.try_wait().unwrap(), None, "it still runs");
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

#[tokio::test]
async fn a_killed_collection_leaves_nothing_that_looks_ready_and_the_next_one_finishes_it() {
    let (host, sets) = host_with(2).await;
    let (envs, digest) = (host.prefix().join("envs"), sets[0].digest());
    let aside = envs.join(format!(".{digest}.discarded"));
    fs::rename(envs.join(&digest), &aside).unwrap();
    fs::remove_dir_all(aside.join("bin")).unwrap();
    assert_eq!(packages::ready(host.prefix()), [sets[1].digest()]);
    assert_eq!(collect(&host, 1, &[&sets[1]]).archives, 1);
    assert_eq!(host.envs(), [sets[1].digest()]);
}

#[tokio::test]
async fn a_rebuilt_environment_can_be_removed_while_the_old_one_is_in_use() {
    let (host, sets) = host_with(2).await;
    let Some(broker) = Broker::of(&host, "again") else { return };
    let (old, digest) = (host.environment(&sets[0]), sets[0].digest());
    let aside = host.prefix().join("envs").join(format!(".{digest}.discarded"));
    fs::copy("/bin/sleep", old.join("bin/sleep-of-its-own")).unwrap();
    fs::rename(&old, &aside).unwrap();
    let mut process = Command::new(aside.join("bin/sleep-of-its-own")).arg("1000").spawn().unwrap();
    broker.adopt(&process);
    // As one that was made again meanwhile.
    let copied = Command::new("/bin/cp").arg("-a").args([&aside, &old]).status().unwrap();
    assert!(copied.success());
    let collected = collect_beside(&broker.places, &host, 1, &[&sets[1]]);
    assert_eq!((collected.environments, collected.archives), (vec![digest], 1));
    assert!(aside.exists() && process.try_wait().unwrap().is_none());
    process.kill().unwrap();
    process.wait().unwrap();
    collect(&host, 1, &[&sets[1]]);
    assert_eq!(host.envs(), [sets[1].digest()]);
}

/// Older versions gave one name to what they removed and to what they replaced because other users could write to it.
#[tokio::test]
async fn what_an_older_version_set_aside_is_never_believed_again() {
    let (host, sets) = host_with(1).await;
    let Some(broker) = Broker::of(&host, "older") else { return };
    let (place, digest) = (host.environment(&sets[0]), sets[0].digest());
    let aside = host.prefix().join("envs").join(format!(".{digest}.old"));
    fs::copy("/bin/sleep", place.join("bin/planted")).unwrap();
    // It was killed before the new environment had the name.
    fs::rename(&place, &aside).unwrap();
    let mut process = Command::new(aside.join("bin/planted")).arg("1000").spawn().unwrap();
    broker.adopt(&process);
    collect_beside(&broker.places, &host, 1, &[&sets[0]]);
    assert_eq!((packages::ready(host.prefix()), host.envs()), (vec![], vec![format!(".{digest}.old")]));
    host.link(&sets[0]).await.unwrap();
    assert!(!place.join("bin/planted").exists(), "it was not installed again");
    assert!(aside.exists() && process.try_wait().unwrap().is_none());
    process.kill().unwrap();
    process.wait().unwrap();
    collect(&host, 1, &[&sets[0]]);
    assert_eq!(host.envs(), [digest]);
}

#[tokio::test]
async fn archives_are_kept_while_a_fetch_is_under_way() {
    let (host, sets) = host_with(1).await;
    let lock = lock::take(&host.pkgs().join(lock::HIDDEN), Duration::ZERO).unwrap();
    fs::remove_dir_all(host.environment(&sets[0])).unwrap();
    assert_eq!(collect(&host, 1, &[]).archives, 0);
    drop(lock);
    assert_eq!(collect(&host, 1, &[]).archives, 3);
}

/// A foreign file system in a directory, mounted until this is dropped.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn at(path: std::path::PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        mount(Some("theirs"), &path, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(path.join("precious"), "theirs").unwrap();
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
    }
}

#[tokio::test]
async fn an_old_environment_with_a_mount_in_it_is_kept_until_it_is_unmounted() {
    if skips_without([Need::Root, Need::Namespaces]) {
        return;
    }
    let (host, sets) = host_with(3).await;
    let old = host.environment(&sets[0]);
    let mounted = Mounted::at(old.join("share/data"));
    for _ in 0..2 {
        // A process that sees the mount counts as a user of the environment; without such a process, the error names the mount itself.
        let said = match try_to_collect(&host, 1, &[&sets[2]]) {
            Ok(collected) => collected.used.join(", "),
            Err(refusal) => refusal.message,
        };
        assert!(said.contains(&sets[0].digest()), "{said}");
        assert_eq!(fs::read_to_string(mounted.0.join("precious")).unwrap(), "theirs");
        assert!(packages::linked(host.prefix(), &sets[0].digest()).is_some(), "it is as it was");
        assert!(packages::linked(host.prefix(), &sets[1].digest()).is_none(), "the other one is gone");
    }
    drop(mounted);
    assert_eq!(collect(&host, 1, &[&sets[2]]).environments, [sets[0].digest()]);
}

#[tokio::test]
async fn remains_of_an_earlier_run_with_a_mount_in_them_are_kept_and_reported() {
    if skips_without([Need::Root, Need::Namespaces]) {
        return;
    }
    let (host, sets) = host_with(1).await;
    let left = host.prefix().join(format!("envs/.{}.partial", "0".repeat(64)));
    let mounted = Mounted::at(left.join("data"));
    let refusal = try_to_collect(&host, 1, &[&sets[0]]).unwrap_err();
    assert!(refusal.message.contains("unmount it"), "{refusal}");
    assert_eq!(fs::read_to_string(mounted.0.join("precious")).unwrap(), "theirs");
    drop(mounted);
    collect(&host, 1, &[&sets[0]]);
    assert!(!left.exists());
}

#[tokio::test]
async fn a_lock_that_any_user_can_hold_delays_nothing() {
    let (mut channel, host) = (Channel::with_flux(), Host::new());
    let sets = [numbered(&mut channel, 0).await, numbered(&mut channel, 1).await];
    host.fetch(&sets[0]).await.unwrap();
    host.link(&sets[0]).await.unwrap();
    // As any user of the node can: these are open to everybody's reading.
    let directories = ["envs", "pkgs"].map(|name| File::open(host.prefix().join(name)).unwrap());
    let held = directories.map(|directory| Flock::lock(directory, FlockArg::LockExclusive).unwrap());
    host.fetch(&sets[1]).await.unwrap();
    host.link(&sets[1]).await.unwrap();
    let collected = collect(&host, 1, &[&sets[1]]);
    assert_eq!((collected.environments, collected.archives), (vec![sets[0].digest()], 1));
    drop(held);
    for lock in ["envs/.lock", "pkgs/.lock"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(host.prefix().join(lock)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{lock}");
    }
}
