//! Killed, cut off or filled up at any moment: nothing half-done is ready, what is ready is whole, the next run finishes,
//! and nothing is left over.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::fs::MetadataExt,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use flux_distribute::host::{Answer, Order, Reply};
use sha2::{Digest, Sha256};

use super::{verify::verify, *};

const BINARY: &str = env!("CARGO_BIN_EXE_flux-distribute");

/// So many kills; FLUX_DISTRIBUTE_KILLS asks for more.
fn kills() -> u32 {
    std::env::var("FLUX_DISTRIBUTE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20)
}

/// Between nothing and a bit more than `all`.
fn any_moment(all: Duration) -> Duration {
    all.mul_f64(f64::from(getrandom::u32().unwrap()) / f64::from(u32::MAX) * 1.1)
}

/// Packages with all that packages have, in enough files that there is time to be killed in; and the next version of them.
async fn two_sets() -> (Channel, [PackageSet; 2]) {
    let mut channel = Channel::with_flux();
    for (name, extension) in [("many", ".conda"), ("more", ".tar.bz2")] {
        let text = |number: usize| format!("share/{name}/{number}").leak() as &'static str;
        let mut files: Vec<_> = (0..120).map(|n| Content::plain(text(n), &noise(2000 + n))).collect();
        files.extend((0..20).map(|n| Content::script(format!("bin/{name}-{n}").leak(), "#!PREFIX/bin/sh\n")));
        files.push(Content::plain("share/of-both", name.as_bytes()));
        files.push(Content::link(format!("lib/{name}.so").leak(), "libflux.so"));
        channel.add(name, extension, &[], &files);
    }
    let url = channel.file_url();
    let first = resolve(&asked(&url, &["flux-core", "many", "more"])).await.unwrap();
    channel.add("newer", ".conda", &[], &[Content::plain("share/newer", b"newer")]);
    let second = resolve(&asked(&url, &["flux-core", "many", "more", "newer"])).await.unwrap();
    (channel, [first, second])
}

fn link_order(prefix: &Path, set: &PackageSet) -> Order {
    Order::Link(LinkOrder {
        prefix: prefix.to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
    })
}

/// The real host stage, with nothing of our environment but where temporary files go.
fn stage(order: &Order, temporary: &Path) -> Child {
    let mut child = Command::new(BINARY)
        .arg("stage")
        .env_clear()
        .env("TMPDIR", temporary)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&serde_json::to_vec(order).unwrap()).unwrap();
    child
}

/// Lets it end.
fn answer(mut child: Child) -> Result<Answer, Refusal> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let last = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).last();
    child.wait().unwrap();
    match last {
        Some(Reply::Done(answer)) => Ok(*answer),
        Some(Reply::Failed(refusal)) => Err(refusal),
        other => panic!("the stage said {other:?}"),
    }
}

/// Its pipe is drained, so that it is the kill that ends it.
fn kill_after(mut child: Child, moment: Duration) {
    let mut stdout = child.stdout.take().unwrap();
    let drain = std::thread::spawn(move || io::copy(&mut stdout, &mut io::sink()));
    std::thread::sleep(moment);
    let _ = child.kill();
    child.wait().unwrap();
    let _ = drain.join();
}

/// Everything that a tree is: names, kinds, modes, contents.
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    fn add(root: &Path, below: &Path, all: &mut BTreeMap<PathBuf, String>) {
        for entry in fs::read_dir(root.join(below)).unwrap() {
            let entry = entry.unwrap();
            let (path, metadata) = (below.join(entry.file_name()), entry.metadata().unwrap());
            let content = if metadata.is_symlink() {
                fs::read_link(entry.path()).unwrap().into_os_string().into_encoded_bytes()
            } else if metadata.is_dir() {
                add(root, &path, all);
                Vec::new()
            } else {
                assert_eq!(metadata.nlink(), 1, "{} is shared", path.display());
                fs::read(entry.path()).unwrap()
            };
            all.insert(path, format!("{:o} {}", metadata.mode(), hex::encode(Sha256::digest(content))));
        }
    }
    let mut all = BTreeMap::new();
    add(root, Path::new(""), &mut all);
    all
}

fn assert_same(found: &BTreeMap<PathBuf, String>, wanted: &BTreeMap<PathBuf, String>) {
    let differs: Vec<_> = found.iter().filter(|(path, what)| wanted.get(*path) != Some(what)).collect();
    let missing: Vec<_> = wanted.keys().filter(|path| !found.contains_key(*path)).collect();
    assert!(differs.is_empty() && missing.is_empty(), "it differs: {differs:?}, it lacks {missing:?}");
}

/// All names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

#[tokio::test]
async fn a_stage_that_is_killed_at_any_moment_is_finished_by_the_next_one() {
    let (_channel, [first, second]) = two_sets().await;
    let (host, temporary) = (Host::new(), tempfile::tempdir().unwrap());
    host.fetch(&first).await.unwrap();
    host.fetch(&second).await.unwrap();
    let archives = names(&host.pkgs());
    let run = |set| answer(stage(&link_order(host.prefix(), set), temporary.path()));
    let begin = Instant::now();
    let linked = run(&first).unwrap();
    let all = begin.elapsed();
    let wanted_first = tree(&host.environment(&first));
    run(&second).unwrap();
    let wanted_second = tree(&host.environment(&second));
    let (mut cut, mut late) = (0, 0);
    for kill in 0..kills() {
        // From nothing, beside an older one, and where all is there already.
        let (set, wanted) = if kill % 3 == 1 { (&second, &wanted_second) } else { (&first, &wanted_first) };
        if kill % 3 != 2 {
            fs::remove_dir_all(host.environment(set)).unwrap();
        }
        kill_after(stage(&link_order(host.prefix(), set), temporary.path()), any_moment(all));
        match packages::linked(host.prefix(), &set.digest()) {
            None => cut += 1,
            // It was too late to be cut off.
            Some(_) => late += 1,
        }
        for digest in packages::ready(host.prefix()) {
            assert_eq!(verify(host.prefix(), &digest).differences, [], "{digest} is called ready");
        }
        assert!(matches!(run(set), Ok(Answer::Linked(_))));
        assert_same(&tree(&host.environment(set)), wanted);
        assert_same(&tree(&host.environment(&first)), &wanted_first);
        assert_eq!(sorted(host.envs()), sorted(vec![first.digest(), second.digest()]));
        assert_eq!(names(host.prefix()), ["envs", "lock", "pkgs"]);
        assert_eq!(names(&host.pkgs()), archives);
        assert_eq!(names(temporary.path()), Vec::<String>::new(), "temporary files are left");
    }
    assert_eq!(run(&first).unwrap(), linked);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(host.prefix().to_str().unwrap()), "{mounts}");
    eprintln!("measured: {} kills within {all:?}, {cut} before and {late} after it was ready", cut + late);
    assert!(cut > 0, "no kill was in time");
}

/// Not a promise of its own: the process that the next test kills.
#[tokio::test]
#[ignore = "runs in a child of another test"]
async fn fetching_child() {
    let Ok(set) = std::env::var("TEST_FETCH_SET") else { return };
    let pkgs = PathBuf::from(std::env::var("TEST_FETCH_PKGS").unwrap());
    let set: PackageSet = serde_json::from_str(&set).unwrap();
    packages::fetch(&set, &set.digest(), PLATFORM, &pkgs, host_file, &http(), &Sources::default(), |_| ()).await.unwrap();
    println!("fetched");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_that_is_killed_at_any_moment_is_finished_by_the_next_one() {
    let mut channel = Channel::with_flux();
    for (name, extension) in [("large", ".conda"), ("larger", ".tar.bz2")] {
        let path = format!("share/{name}").leak();
        channel.add(name, extension, &[], &[Content::plain(path, &noise(8_000_000))]);
    }
    let server = Server::start(channel.path()).await;
    let set = resolve(&asked(server.url(), &["flux-core", "large", "larger"])).await.unwrap();
    let (host, temporary) = (Host::new(), tempfile::tempdir().unwrap());
    let child = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::fetching_child", "--ignored", "--nocapture"])
            .env_clear()
            .env("TMPDIR", temporary.path())
            .env("TEST_FETCH_SET", serde_json::to_string(&set).unwrap())
            .env("TEST_FETCH_PKGS", host.pkgs())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let begin = Instant::now();
    let output = child().wait_with_output().unwrap();
    let all = begin.elapsed();
    assert!(String::from_utf8_lossy(&output.stdout).contains("fetched"));
    let archives = names(&host.pkgs());
    let mut parts = 0;
    for kill in 0..kills() {
        // From nothing, and with a part of it.
        for name in archives.iter().skip((kill % 2) as usize) {
            fs::remove_file(host.pkgs().join(name)).unwrap();
        }
        kill_after(child(), any_moment(all));
        parts += names(&host.pkgs()).iter().filter(|name| name.ends_with(".part")).count();
        host.fetch(&set).await.unwrap();
        assert_eq!(names(&host.pkgs()), archives);
        assert_eq!(names(temporary.path()), Vec::<String>::new(), "temporary files are left");
    }
    host.link(&set).await.unwrap();
    eprintln!("measured: {} kills of a fetch within {all:?} left {parts} parts to go on with", kills());
}

/// Runs the named test once more, as a process whose mounts are its own and end with it. False in the process that has only
/// started that one.
fn with_own_mounts(test: &str) -> bool {
    const OWN: &str = "FLUX_DISTRIBUTE_TEST_OWN_MOUNTS";
    if std::env::var_os(OWN).is_some() {
        return true;
    }
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return false;
    }
    let status = Command::new("unshare")
        .args(["--mount", "--kill-child", "--fork"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("crash::{test}"), "--nocapture"])
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
async fn after_a_power_cut_nothing_is_called_ready_that_is_not_whole() {
    if !with_own_mounts("after_a_power_cut_nothing_is_called_ready_that_is_not_whole") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    mount_tmpfs(directory.path(), "size=600m");
    let path = |name: &str| directory.path().join(name);
    let (base, image, cut, at, temporary) = (path("base"), path("image"), path("cut"), path("mnt"), path("tmp"));
    for made in [&at, &temporary] {
        fs::create_dir(made).unwrap();
    }
    File::create(&base).unwrap().set_len(128 << 20).unwrap();
    let made = run_tool("mkfs.ext4", &["-q", "-F", base.to_str().unwrap()]);
    let disk = match made.and_then(|()| Disk::mount(&base, &at, "rw")) {
        Ok(disk) => disk,
        Err(reason) => return eprintln!("skipped: no file system in a file here: {reason}"),
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
            ready += 1
        } else {
            lost += 1
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
async fn a_full_disk_is_told_with_figures_touches_nothing_and_is_waited_for() {
    if !with_own_mounts("a_full_disk_is_told_with_figures_touches_nothing_and_is_waited_for") {
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
                    let words = [&envs, "is full", "MiB and room for", "files are left", "needs about"];
                    assert!(words.iter().all(|word| refusal.message.contains(*word)), "{refusal}");
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
async fn a_fetch_goes_on_once_there_is_room() {
    if !with_own_mounts("a_fetch_goes_on_once_there_is_room") {
        return;
    }
    let (_channel, [first, _]) = two_sets().await;
    let host = Host::new();
    mount_tmpfs(host.prefix(), "size=2m");
    fs::create_dir(host.pkgs()).unwrap();
    fs::write(host.prefix().join("filler"), vec![0; 1_900_000]).unwrap();
    let error = host.fetch(&first).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let words = flux_distribute::error_chain(&error);
    assert!(words.contains("No space left on device"), "{words}");
    fs::remove_file(host.prefix().join("filler")).unwrap();
    host.fetch(&first).await.unwrap();
    assert!(names(&host.pkgs()).iter().all(|name| !name.ends_with(".part")));
}

#[tokio::test]
async fn a_directory_that_is_not_whole_is_made_again_unless_somebody_runs_from_it() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    let environment = host.environment(&set);
    let marker = environment.join(packages::ENVIRONMENT_MARKER);
    for half in ["", "{\"digest\":", "{\"digest\":\"0123\",\"bytes\":1}"] {
        fs::write(&marker, half).unwrap();
        fs::write(environment.join("share/flux"), "half").unwrap();
        assert!(packages::ready(host.prefix()).is_empty());
        host.link(&set).await.unwrap();
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    }

    let program = environment.join("bin/sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    fs::remove_file(&marker).unwrap();
    let mut process = Command::new(&program).arg("1000").spawn().unwrap();
    let refusal = host.link(&set).await.unwrap_err();
    let words = [environment.to_str().unwrap(), &format!("process {} (sleep) uses it", process.id())];
    assert!(words.iter().all(|word| refusal.message.contains(word)) && refusal.transient, "{refusal}");
    assert!(program.exists());
    process.kill().unwrap();
    process.wait().unwrap();
    host.link(&set).await.unwrap();
    assert!(!program.exists());
    assert_eq!(host.envs(), [set.digest()]);
}
