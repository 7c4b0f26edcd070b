//! What nobody needs goes; what anybody uses stays.

use std::{collections::BTreeSet, process::Command, time::Duration};

use flux_distribute::host::{CollectOrder, Collected};

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

fn collect(host: &Host, keep: u32, wanted: &[&PackageSet]) -> Collected {
    let archives = wanted.iter().flat_map(|set| packages::archives(set, PLATFORM).unwrap()).collect();
    let wanted = wanted.iter().map(|set| set.digest()).collect();
    packages::collect(&CollectOrder { prefix: host.prefix().to_owned(), keep, wanted, archives, is_queue_up: false })
        .unwrap()
}

fn digests(sets: &[&PackageSet]) -> BTreeSet<String> {
    sets.iter().map(|set| set.digest()).collect()
}

fn archives(sets: &[&PackageSet]) -> BTreeSet<String> {
    sets.iter().flat_map(|set| packages::archives(set, PLATFORM).unwrap()).collect()
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
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
    assert!(!host.pkgs().join(&part).exists(), "nobody goes on with that download");

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
async fn where_current_leads_stays() {
    let (host, sets) = host_with(2).await;
    std::os::unix::fs::symlink(format!("envs/{}", sets[0].digest()), host.prefix().join("current")).unwrap();
    assert_eq!(collect(&host, 1, &[&sets[1]]), Collected::default());
}

#[tokio::test]
async fn a_process_of_an_old_environment_keeps_it_and_goes_on() {
    let (host, sets) = host_with(3).await;
    let old = host.environment(&sets[0]);
    let program = old.join("bin/sleep-of-its-own");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut process = Command::new(&program).arg("1000").spawn().unwrap();
    // Its own words are enough: between two commands a script has nothing open.
    let mut script = Command::new("/bin/sleep")
        .arg("1000")
        .env("PATH", format!("{}/bin:/bin", host.environment(&sets[1]).display()))
        .spawn()
        .unwrap();

    let collected = collect(&host, 1, &[&sets[2]]);
    assert_eq!(collected.environments, Vec::<String>::new());
    let used = collected.used.join(", ");
    assert!(used.contains(&format!("process {} (sleep-of-its-ow", process.id())), "{used}");
    assert!(used.contains(&format!("process {} (sleep)", script.id())), "{used}");
    assert_eq!(process.try_wait().unwrap(), None);
    assert!(program.exists() && packages::linked(host.prefix(), &sets[0].digest()).is_some());
    assert!(archives(&sets.iter().collect::<Vec<_>>()).is_subset(&names(&host.pkgs())));

    for child in [&mut process, &mut script] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(collect(&host, 1, &[&sets[2]]).environments.len(), 2);
}

#[tokio::test]
async fn a_killed_collection_leaves_nothing_that_looks_ready_and_the_next_one_finishes_it() {
    let (host, sets) = host_with(2).await;
    let (envs, digest) = (host.prefix().join("envs"), sets[0].digest());
    fs::rename(envs.join(&digest), envs.join(format!(".{digest}.old"))).unwrap();
    fs::remove_dir_all(envs.join(format!(".{digest}.old/bin"))).unwrap();
    assert_eq!(packages::ready(host.prefix()), [sets[1].digest()]);
    assert_eq!(collect(&host, 1, &[&sets[1]]).archives, 1);
    assert_eq!(host.envs(), [sets[1].digest()]);
}

#[tokio::test]
async fn an_environment_that_was_made_again_goes_while_the_old_one_is_still_in_use() {
    let (host, sets) = host_with(2).await;
    let (old, digest) = (host.environment(&sets[0]), sets[0].digest());
    let aside = host.prefix().join("envs").join(format!(".{digest}.old"));
    fs::copy("/bin/sleep", old.join("bin/sleep-of-its-own")).unwrap();
    fs::rename(&old, &aside).unwrap();
    let mut process = Command::new(aside.join("bin/sleep-of-its-own")).arg("1000").spawn().unwrap();
    // As one that was made again meanwhile.
    let copied = Command::new("/bin/cp").arg("-a").args([&aside, &old]).status().unwrap();
    assert!(copied.success());
    let collected = collect(&host, 1, &[&sets[1]]);
    assert_eq!((collected.environments, collected.archives), (vec![digest], 1));
    assert!(aside.exists() && process.try_wait().unwrap().is_none());
    process.kill().unwrap();
    process.wait().unwrap();
    collect(&host, 1, &[&sets[1]]);
    assert_eq!(host.envs(), [sets[1].digest()]);
}

#[tokio::test]
async fn archives_are_left_alone_while_somebody_fetches() {
    let (host, sets) = host_with(1).await;
    let lock = nix::fcntl::Flock::lock(File::open(host.pkgs()).unwrap(), nix::fcntl::FlockArg::LockExclusive).unwrap();
    fs::remove_dir_all(host.environment(&sets[0])).unwrap();
    assert_eq!(collect(&host, 1, &[]).archives, 0);
    drop(lock);
    assert_eq!(collect(&host, 1, &[]).archives, 3);
}
