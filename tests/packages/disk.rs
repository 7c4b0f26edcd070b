//! Power cuts and full disks: what is ready is whole, and what is not can be made once there is power and room.

use std::{
    io::Write,
    process::Command,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use axum::body::Bytes;

use super::{
    crash::{answer, any_moment, assert_same, kill_after, kills, link_order, names, sorted, stage, tree, two_sets},
    peers::{Log, from, peer, small_bundle},
    verify::verify,
    *,
};

/// Runs the named test once more, as a process whose mounts are its own and end with it. False in the process that has only
/// started that one.
fn with_own_mounts(test: &str) -> bool {
    with_own_mounts_after("", test)
}

/// As [`with_own_mounts`], after this command of a shell.
fn with_own_mounts_after(command: &str, test: &str) -> bool {
    const OWN: &str = "FLUX_DISTRIBUTE_TEST_OWN_MOUNTS";
    if std::env::var_os(OWN).is_some() {
        // What is mounted in a temporary directory keeps it from being removed; this one ends with the process.
        mount_tmpfs(&std::env::temp_dir(), "size=800m");
        return true;
    }
    if skips_without([Need::Namespaces]) {
        return false;
    }
    let status = Command::new("unshare")
        .args(["--mount", "--kill-child", "--fork", "sh", "-c", &format!("{command}\nexec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("disk::{test}"), "--nocapture"])
        .env(OWN, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{test}: {status}");
    false
}

fn mount_tmpfs(at: &Path, options: &str) {
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("test"), at, Some("tmpfs"), flags, Some(options)).unwrap();
}

fn run_tool(program: &str, words: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(words).output().map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{program} {words:?}: {said}")) }
}

/// A disk that is a file: what was written to the disk is in the file, and what the kernel still keeps to itself is not.
struct Disk {
    image: PathBuf,
    at: PathBuf,
}

impl Disk {
    fn mount(image: &Path, at: &Path, options: &str) -> Result<Self, String> {
        let paths = [image.to_str().unwrap(), at.to_str().unwrap()];
        run_tool("mount", &["-t", "ext4", "-o", &format!("loop,{options}"), paths[0], paths[1]])?;
        Ok(Self { image: image.to_owned(), at: at.to_owned() })
    }

    /// How much was written to it ever, and what is on its way.
    fn writes(&self) -> (u64, u64) {
        let device = nix::sys::stat::stat(&self.at).unwrap().st_dev;
        let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
        let field = |number: usize| text.split_whitespace().nth(number).unwrap().parse::<u64>().unwrap();
        (field(4) + field(6), field(8))
    }

    /// Cuts the power: what is on the disk at one moment.
    fn cut(self, into: &Path) {
        loop {
            let before = self.writes();
            run_tool("cp", &["--sparse=always", self.image.to_str().unwrap(), into.to_str().unwrap()]).unwrap();
            if before == self.writes() && before.1 == 0 {
                break;
            }
        }
        self.unmount();
    }

    fn unmount(self) {
        nix::mount::umount2(&self.at, nix::mount::MntFlags::empty()).unwrap();
    }
}

#[tokio::test]
async fn after_a_power_cut_no_incomplete_environment_counts_as_ready() {
    if !with_own_mounts("after_a_power_cut_no_incomplete_environment_counts_as_ready") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (base, image, cut, at, temporary) = (path("base"), path("image"), path("cut"), path("mnt"), path("tmp"));
    for made in [&at, &temporary] {
        fs::create_dir(made).unwrap();
    }
    File::create(&base).unwrap().set_len(128 << 20).unwrap();
    let made = run_tool("mkfs.ext4", &["-q", "-F", base.to_str().unwrap()]);
    let disk = match made.and_then(|()| Disk::mount(&base, &at, "rw")) {
        Ok(disk) => disk,
        Err(reason) => return skip(Need::Disk, &reason),
    };
    let (_channel, [first, second]) = two_sets().await;
    let (fetched, prefix) = (Host::new(), at.join("prefix"));
    host_fetch(&fetched, &[&first, &second]).await;
    fs::create_dir(&prefix).unwrap();
    run_tool("cp", &["-r", fetched.pkgs().to_str().unwrap(), prefix.to_str().unwrap()]).unwrap();
    let begin = Instant::now();
    let run = |set| answer(stage(&link_order(&prefix, set), &temporary));
    run(&first).unwrap();
    let all = begin.elapsed();
    disk.unmount();
    let (mut ready, mut lost) = (0, 0);
    for kill in 0..kills() {
        run_tool("cp", &["--sparse=always", base.to_str().unwrap(), image.to_str().unwrap()]).unwrap();
        let options = ["commit=1", "commit=1,data=writeback"][(kill % 2) as usize];
        let disk = Disk::mount(&image, &at, options).unwrap();
        let child = stage(&link_order(&prefix, &second), &temporary);
        // Others on the host write too, and have the file system write down what it knows.
        // At any moment, and every other time right after it has its name.
        let (named, mut end) = (prefix.join("envs").join(second.digest()), Instant::now() + any_moment(all));
        let mut waits = kill % 4 > 1;
        let mut other = File::create(at.join("other")).unwrap();
        while waits || Instant::now() < end {
            if waits && named.exists() {
                (waits, end) = (false, Instant::now() + any_moment(Duration::from_millis(300)));
            }
            other.write_all(b"x").unwrap();
            other.sync_all().unwrap();
            std::thread::sleep(Duration::from_millis(3));
        }
        drop(other);
        kill_after(child, Duration::ZERO);
        disk.cut(&cut);

        let disk = Disk::mount(&cut, &at, "rw").unwrap();
        let there = packages::ready(&prefix);
        assert!(there.contains(&first.digest()), "what was ready before is gone");
        for digest in &there {
            assert_eq!(verify(&prefix, digest).differences, [], "{digest} is called ready, {options}");
        }
        if there.len() == 2 {
            ready += 1;
        } else {
            lost += 1;
        }
        run(&second).unwrap();
        for set in [&first, &second] {
            assert_eq!(verify(&prefix, &set.digest()).differences, []);
        }
        assert_eq!(sorted(names(&prefix.join("envs"))), sorted(vec![first.digest(), second.digest()]));
        disk.unmount();
    }
    eprintln!(
        "measured: {} power cuts within {all:?}: {ready} times it was ready and whole, {lost} times not there",
        kills()
    );
    assert!(lost > 0, "no cut was in time");
}

async fn host_fetch(host: &Host, sets: &[&PackageSet]) {
    for set in sets {
        host.fetch(set).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_disk_is_reported_with_figures_and_changes_nothing() {
    if !with_own_mounts("a_full_disk_is_reported_with_figures_and_changes_nothing") {
        return;
    }
    let (_channel, [first, second]) = two_sets().await;
    for (options, inodes) in [("size=16m", false), ("size=64m,nr_inodes=2000", true)] {
        let host = Host::new();
        mount_tmpfs(host.prefix(), options);
        fs::create_dir(host.pkgs()).unwrap();
        host_fetch(&host, &[&first, &second]).await;
        host.link(&first).await.unwrap();
        let live = tree(&host.environment(&first));
        let filler = host.prefix().join("filler");
        fs::create_dir(&filler).unwrap();
        let mut refused = 0;
        for left in 0..12 {
            let free = nix::sys::statvfs::statvfs(host.prefix()).unwrap();
            if inodes {
                // A linked set needs some 700 of them, unpacked packages included.
                let fill = free.files_available().saturating_sub(left * 60);
                (0..fill).for_each(|number| drop(File::create(filler.join(number.to_string())).unwrap()));
            } else {
                let free = free.blocks_available() * free.fragment_size();
                let fill = free.saturating_sub(left * (300 << 10));
                fs::write(filler.join("file"), vec![0; usize::try_from(fill).unwrap()]).unwrap();
            }
            match host.link(&second).await {
                Ok(_) => fs::remove_dir_all(host.environment(&second)).unwrap(),
                Err(refusal) => {
                    refused += 1;
                    let envs = host.prefix().join("envs").display().to_string();
                    // If it is known before anything is written, the error comes then.
                    let early = ["has too little room", "MiB are free", "the packages need"];
                    let late = [&envs, "is full", "MiB and room for", "files are left", "needs about"];
                    let told = |words: &[&str]| words.iter().all(|word| refusal.message.contains(*word));
                    assert!(told(&early) || told(&late), "{refusal}");
                    assert!(refusal.transient, "{refusal}");
                }
            }
            assert_eq!(host.envs(), [first.digest()]);
            assert_same(&tree(&host.environment(&first)), &live);
            fs::remove_dir_all(&filler).unwrap();
            fs::create_dir(&filler).unwrap();
        }
        assert!(refused > 2, "{options}: refused {refused} times only");
        host.link(&second).await.unwrap();
        assert_eq!(verify(host.prefix(), &second.digest()).differences, []);
        eprintln!("measured: {options}: refused {refused} of 12 times, then linked");
    }
}

#[tokio::test]
async fn remains_that_can_not_be_removed_are_reported_and_block_nothing() {
    if !with_own_mounts("remains_that_can_not_be_removed_are_reported_and_block_nothing") {
        return;
    }
    let (_channel, [first, second]) = two_sets().await;
    let host = Host::new();
    host_fetch(&host, &[&first, &second]).await;
    let left = |name: String| {
        let path = host.prefix().join("envs").join(name).join("mounted");
        fs::create_dir_all(&path).unwrap();
        mount_tmpfs(&path, "size=1m");
        path.parent().unwrap().display().to_string()
    };
    let stuck = left(".0123.partial".to_owned());
    let removable = host.prefix().join("envs/.4567.partial");
    fs::create_dir(&removable).unwrap();
    let linked = host.link(&first).await.unwrap();
    let expected = format!("can't remove {stuck}, which an earlier run left behind: ");
    assert!(matches!(&linked.warnings[..], [only] if only.starts_with(&expected)), "{:?}", linked.warnings);
    assert!(!removable.exists());
    assert_eq!(verify(host.prefix(), &first.digest()).differences, []);

    // In the place of what is to be made it is in the way.
    let in_the_way = left(format!(".{}.partial", second.digest()));
    let refusal = host.link(&second).await.unwrap_err();
    assert!(refusal.message.contains(&in_the_way) && refusal.transient, "{refusal}");
    nix::mount::umount2(Path::new(&in_the_way).join("mounted").as_path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    host.link(&second).await.unwrap();
}

fn free(directory: &Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(directory).unwrap();
    found.blocks_available() * found.fragment_size()
}

/// The response of a peer that sends without end, and looks how much room that leaves.
fn endless(prefix: &Path, least: &Arc<AtomicU64>) -> Response {
    let (prefix, least) = (prefix.to_owned(), least.clone());
    let pieces = futures::stream::repeat_with(move || {
        least.fetch_min(free(&prefix), Ordering::SeqCst);
        Ok::<_, io::Error>(Bytes::from(vec![0; 1 << 16]))
    });
    Response::new(Body::from_stream(pieces))
}

/// The limit for a bundle is far above what the disk has.
#[tokio::test]
async fn a_peer_that_lies_leaves_the_room_that_kubelet_keeps() {
    if !with_own_mounts("a_peer_that_lies_leaves_the_room_that_kubelet_keeps") {
        return;
    }
    let (_directory, _server, set) = small_bundle().await;
    let (host, least, log) = (Host::new(), Arc::new(AtomicU64::new(u64::MAX)), Log::default());
    mount_tmpfs(host.prefix(), "size=64m");
    fs::create_dir(host.pkgs()).unwrap();
    let (prefix, seen) = (host.prefix().to_owned(), least.clone());
    let liar = peer(move |_| endless(&prefix, &seen)).await;
    let _guard = log.listen();
    let fetched = host.fetch_from(&set, &http(), &from(&[&liar])).await.unwrap();
    assert_eq!((fetched.bytes, fetched.from_peers), (8, 0));
    let (least, all) = (least.load(Ordering::SeqCst), 64 << 20);
    assert!((all / 10..all / 2).contains(&least), "it left {least} bytes");
    assert!(free(host.prefix()) > all / 10 * 9, "what it sent is still there");
    let warnings = log.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("no more than what kubelet keeps free"), "{warnings:?}");
}

/// A limit that the file system's figures don't show, such as a quota.
#[tokio::test]
async fn a_peer_whose_bytes_can_not_be_written_is_given_up_and_the_source_is_asked() {
    let name = "a_peer_whose_bytes_can_not_be_written_is_given_up_and_the_source_is_asked";
    if !with_own_mounts_after("trap '' XFSZ; ulimit -f 8192", name) {
        return;
    }
    let (_directory, _server, set) = small_bundle().await;
    let (host, least, log) = (Host::new(), Arc::new(AtomicU64::new(u64::MAX)), Log::default());
    let prefix = host.prefix().to_owned();
    let liar = peer(move |_| endless(&prefix, &least)).await;
    let _guard = log.listen();
    let fetched = host.fetch_from(&set, &http(), &from(&[&liar])).await.unwrap();
    assert_eq!((fetched.bytes, fetched.from_peers), (8, 0));
    assert_eq!(host.archives().len(), 1);
    let warnings = log.warnings();
    let words = ["can't write what it sends", "File too large"];
    assert!(warnings.len() == 1 && words.iter().all(|word| warnings[0].contains(word)), "{warnings:?}");
}

#[tokio::test]
async fn a_fetch_continues_once_there_is_room() {
    if !with_own_mounts("a_fetch_continues_once_there_is_room") {
        return;
    }
    let (_channel, [first, _]) = two_sets().await;
    let host = Host::new();
    mount_tmpfs(host.prefix(), "size=2m");
    fs::create_dir(host.pkgs()).unwrap();
    fs::write(host.prefix().join("filler"), vec![0; 1_900_000]).unwrap();
    let error = host.fetch(&first).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let words = base::error_chain(&error);
    assert!(words.contains("No space left on device"), "{words}");
    fs::remove_file(host.prefix().join("filler")).unwrap();
    host.fetch(&first).await.unwrap();
    assert!(names(&host.pkgs()).iter().all(|name| !name.ends_with(".part")));
}
