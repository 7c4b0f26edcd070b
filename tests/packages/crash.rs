//! Killed at any moment: nothing half-done is ready, what is ready is whole, the next run finishes, and nothing is left
//! over.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::fs::MetadataExt,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use hostapi::{Answer, Order, Reply};
use sha2::{Digest, Sha256};

use super::{verify::verify, *};

pub const BINARY: &str = env!("CARGO_BIN_EXE_flux-distribute");

/// So many kills; FLUX_DISTRIBUTE_KILLS asks for more.
pub fn kills() -> u32 {
    std::env::var("FLUX_DISTRIBUTE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20)
}

/// Between nothing and a bit more than `all`.
pub fn any_moment(all: Duration) -> Duration {
    all.mul_f64(f64::from(getrandom::u32().unwrap()) / f64::from(u32::MAX) * 1.1)
}

/// Packages with all that packages have, in enough files that there is time to be killed in; and the next version of them.
pub async fn two_sets() -> (Channel, [PackageSet; 2]) {
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

pub fn link_order(prefix: &Path, set: &PackageSet) -> Order {
    Order::Link(LinkOrder {
        prefix: prefix.to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
        follow: false,
    })
}

/// The real host stage, with nothing of our environment but where temporary files go.
pub fn stage(order: &Order, temporary: &Path) -> Child {
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
pub fn answer(mut child: Child) -> Result<Answer, Refusal> {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let last =
        lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).filter(|said| *said != Reply::Alive).last();
    child.wait().unwrap();
    match last {
        Some(Reply::Done(answer)) => Ok(*answer),
        Some(Reply::Failed(refusal)) => Err(refusal),
        other => panic!("the stage said {other:?}"),
    }
}

/// Its pipe is drained, so that it is the kill that ends it.
pub fn kill_after(mut child: Child, moment: Duration) {
    let mut stdout = child.stdout.take().unwrap();
    let drain = std::thread::spawn(move || io::copy(&mut stdout, &mut io::sink()));
    std::thread::sleep(moment);
    let _ = child.kill();
    child.wait().unwrap();
    let _ = drain.join();
}

/// Everything that a tree is: names, kinds, modes, contents.
pub fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
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

pub fn assert_same(found: &BTreeMap<PathBuf, String>, wanted: &BTreeMap<PathBuf, String>) {
    let differs: Vec<_> = found.iter().filter(|(path, what)| wanted.get(*path) != Some(what)).collect();
    let missing: Vec<_> = wanted.keys().filter(|path| !found.contains_key(*path)).collect();
    assert!(differs.is_empty() && missing.is_empty(), "it differs: {differs:?}, it lacks {missing:?}");
}

/// All names in a directory.
/// What is in a directory besides its lock.
pub fn names(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != ".lock").collect();
    names.sort();
    names
}

pub fn sorted(mut names: Vec<String>) -> Vec<String> {
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
    packages::fetch(&set, &set.digest(), PLATFORM, &pkgs, host_file, &http(), &packages::Sources::default(), |_| ())
        .await
        .unwrap();
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
    assert!(output.status.success());
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

#[tokio::test]
async fn an_incomplete_environment_is_rebuilt_unless_a_process_uses_it() {
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
