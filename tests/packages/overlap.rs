//! Unpacked while it is fetched: as whole, as exact and as safe as one after the other.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::fd::AsFd,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use host::{HostLock, Root};
use hostapi::{Answer, Order, Progress, Reply};

use super::{
    crash::{BINARY, any_moment, assert_same, kills, link_order, names, sorted, tree, two_sets},
    verify::verify,
    *,
};
use stage::launch::HostPlaces;

/// Nothing here takes as long.
const LONG: Duration = Duration::from_mins(1);

fn following_order(prefix: &Path, set: &PackageSet) -> Order {
    match link_order(prefix, set) {
        Order::Link(order) => Order::Link(LinkOrder { follow: true, ..order }),
        other => other,
    }
}

/// The real host stage that follows, with what its agent holds of it.
struct Stage {
    child: Child,
    stdin: ChildStdin,
    replies: mpsc::Receiver<Reply>,
}

impl Stage {
    fn begin(host: &Host, set: &PackageSet) -> Self {
        let mut child = Command::new(BINARY)
            .arg("stage")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut order = serde_json::to_vec(&following_order(host.prefix(), set)).unwrap();
        order.push(b'\n');
        stdin.write_all(&order).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, replies) = mpsc::channel();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).try_for_each(|line| sender.send(serde_json::from_str(&line).unwrap()))
        });
        Self { child, stdin, replies }
    }

    fn until_unpacked(&self, wanted: u64) {
        loop {
            match self.replies.recv_timeout(LONG).unwrap() {
                Reply::Progress(Progress { what, done, .. }) if what == "unpacking packages" && done == wanted => {
                    return;
                }
                Reply::Progress(_) | Reply::Alive => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// No more archives come.
    fn end(self) -> Result<Answer, Refusal> {
        let Self { mut child, stdin, replies } = self;
        drop(stdin);
        let last = replies.iter().last();
        child.wait().unwrap();
        match last {
            Some(Reply::Done(answer)) => Ok(*answer),
            Some(Reply::Failed(refusal)) => Err(refusal),
            other => panic!("the stage said {other:?}"),
        }
    }
}

/// What has come, out of the way; and how it comes again.
struct Store(tempfile::TempDir);

impl Store {
    fn of(host: &Host) -> Self {
        let store = Self(tempfile::tempdir_in(host.prefix().parent().unwrap()).unwrap());
        for name in names(&host.pkgs()) {
            fs::rename(host.pkgs().join(&name), store.0.path().join(&name)).unwrap();
        }
        store
    }

    fn archives(&self) -> Vec<String> {
        names(self.0.path())
    }

    fn bring(&self, name: &str, host: &Host) {
        fs::rename(self.0.path().join(name), host.pkgs().join(name)).unwrap();
    }
}

#[tokio::test]
async fn archives_are_unpacked_while_others_are_still_downloaded() {
    let (_channel, [set, _]) = two_sets().await;
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let linked = host.link(&set).await.unwrap();
    let wanted = tree(&host.environment(&set));
    let count = names(&host.pkgs()).len();
    // Whichever comes first.
    for first in 0..count {
        fs::remove_dir_all(host.environment(&set)).unwrap();
        let store = Store::of(&host);
        let mut archives = store.archives();
        archives.rotate_left(first);
        let stage = Stage::begin(&host, &set);
        for (number, archive) in archives.iter().enumerate() {
            store.bring(archive, &host);
            stage.until_unpacked(number as u64 + 1);
            assert!(number + 1 == count || packages::ready(host.prefix()).is_empty(), "nothing half-done is ready");
        }
        assert_eq!(stage.end().unwrap(), Answer::Linked(linked.clone()));
        assert_same(&tree(&host.environment(&set)), &wanted);
        assert_eq!(host.envs(), [set.digest()]);
    }
}

#[tokio::test]
async fn a_link_whose_agent_is_gone_ends_and_leaves_nothing_running() {
    let (_channel, [set, _]) = two_sets().await;
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let store = Store::of(&host);
    let stage = Stage::begin(&host, &set);
    store.bring(&store.archives()[0], &host);
    stage.until_unpacked(1);
    let held = HostLock::take(&Root::host(), host.prefix(), Duration::ZERO);
    assert!(held.unwrap_err().transient, "a link that still runs holds the lock");
    let Stage { mut child, stdin, replies } = stage;
    // As the kernel does it for a process that is killed.
    drop((stdin, replies));
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait()));
    ended.recv_timeout(LONG).expect("it continues without its agent").unwrap();
    assert_eq!(host.envs(), Vec::<String>::new());
    HostLock::take(&Root::host(), host.prefix(), Duration::ZERO).unwrap();
    store.archives().iter().for_each(|name| store.bring(name, &host));
    host.link(&set).await.unwrap();
}

#[tokio::test]
async fn archives_that_are_missing_at_the_end_are_named() {
    let (_channel, [set, _]) = two_sets().await;
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let store = Store::of(&host);
    let stage = Stage::begin(&host, &set);
    let archives = store.archives();
    archives.iter().skip(1).for_each(|name| store.bring(name, &host));
    stage.until_unpacked(archives.len() as u64 - 1);
    let refusal = stage.end().unwrap_err();
    assert!(refusal.message.contains("is not on this host; it must be fetched") && refusal.transient, "{refusal}");
    assert_eq!(host.envs(), Vec::<String>::new());
    assert_eq!(names(&host.pkgs()), sorted(archives[1..].to_vec()), "what is good stays");
}

/// In this process: fetched and linked beside each other.
async fn install(host: &Host, set: &PackageSet) -> (Result<Fetched, FetchError>, Result<Linked, Refusal>) {
    let (more, until) = io::pipe().unwrap();
    let Order::Link(order) = following_order(host.prefix(), set) else { unreachable!() };
    let linking = tokio::task::spawn_blocking(move || {
        packages::link_while(&order, &HostPlaces::of_host(), Some(more.as_fd()), &mut |_| ())
    });
    let fetched = host.fetch(set).await;
    drop(until);
    (fetched, linking.await.unwrap())
}

#[tokio::test]
async fn an_archive_damaged_by_a_power_cut_is_fetched_again_during_the_installation() {
    let (_channel, [set, _]) = two_sets().await;
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let archives = names(&host.pkgs());
    for damaged in &archives {
        fs::write(host.pkgs().join(damaged), "half").unwrap();
        let (fetched, linked) = install(&host, &set).await;
        assert!(fetched.unwrap().fetched_bytes > 0);
        linked.unwrap();
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
        fs::remove_dir_all(host.environment(&set)).unwrap();
    }
    // If no fetch replaces it, the error names it, and it is moved away so that a later fetch can.
    fs::write(host.pkgs().join(&archives[0]), "half").unwrap();
    let refusal = Stage::begin(&host, &set).end().unwrap_err();
    assert!(refusal.message.contains("was damaged; it must be fetched again") && refusal.transient, "{refusal}");
    assert_eq!(names(&host.pkgs()), archives[1..]);
    assert_eq!(host.envs(), Vec::<String>::new());
}

#[tokio::test]
async fn a_fetch_that_fails_ends_the_link_too() {
    let (channel, [set, _]) = two_sets().await;
    let host = Host::new();
    drop(channel);
    let (fetched, linked) = install(&host, &set).await;
    assert!(matches!(fetched, Err(FetchError::HostFile { .. })), "{fetched:?}");
    assert!(linked.unwrap_err().transient);
    assert_eq!(host.envs(), Vec::<String>::new());
}

/// Not a promise of its own: the agent that the next test kills.
#[tokio::test]
#[ignore = "runs in a child of another test"]
async fn installing_child() {
    let Ok(order) = std::env::var("TEST_LINK_ORDER") else { return };
    let Order::Link(LinkOrder { prefix, set, .. }) = serde_json::from_str(&order).unwrap() else { return };
    // It inherits our stderr, so that a reader that reaches its end knows that both have ended.
    let mut stage = Command::new(BINARY).arg("stage").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = stage.stdin.take().unwrap();
    stdin.write_all(format!("{order}\n").as_bytes()).unwrap();
    packages::fetch(
        &set,
        &set.digest(),
        PLATFORM,
        &prefix.join("pkgs"),
        host_file,
        &http(),
        &Sources::default(),
        |_| (),
    )
    .await
    .unwrap();
    drop(stdin);
    let said = BufReader::new(stage.stdout.take().unwrap()).lines().map_while(Result::ok).last().unwrap();
    stage.wait().unwrap();
    assert!(matches!(serde_json::from_str(&said).unwrap(), Reply::Done(_)), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_killed_during_an_installation_leaves_nothing_that_runs() {
    let (channel, _) = two_sets().await;
    let server = Server::start(channel.path()).await;
    let first = resolve(&asked(server.url(), &["flux-core", "many", "more"])).await.unwrap();
    let second = resolve(&asked(server.url(), &["flux-core", "many", "more", "newer"])).await.unwrap();
    // A slow source: most kills fall between the first archive and the last one.
    server.hook(|_| {
        std::thread::sleep(Duration::from_millis(60));
        None
    });
    let (host, temporary) = (Host::new(), tempfile::tempdir().unwrap());
    let run = |set: &PackageSet| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "overlap::installing_child", "--ignored", "--nocapture"])
            .env_clear()
            .env("TMPDIR", temporary.path())
            .env("TEST_LINK_ORDER", serde_json::to_string(&following_order(host.prefix(), set)).unwrap())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    // Ends when the agent and its stage have.
    let until_all_have_ended = |child: &mut Child| {
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (child.wait().unwrap().success(), said)
    };
    let mut all = LONG;
    for set in [&first, &second] {
        let begin = Instant::now();
        let (worked, said) = until_all_have_ended(&mut run(set));
        all = all.min(begin.elapsed());
        assert!(worked, "{said}");
    }
    let [wanted_first, wanted_second] = [&first, &second].map(|set| tree(&host.environment(set)));
    let archives = names(&host.pkgs());
    let (mut cut, mut late) = (0, 0);
    for kill in 0..kills() {
        // From nothing, with a part of the archives, and with all of them.
        let (set, wanted) = if kill % 2 == 1 { (&second, &wanted_second) } else { (&first, &wanted_first) };
        fs::remove_dir_all(host.environment(set)).unwrap();
        let there = [0, 2, archives.len()][(kill % 3) as usize];
        archives.iter().skip(there).for_each(|name| drop(fs::remove_file(host.pkgs().join(name))));
        let mut child = run(set);
        // After that point it continues without its agent.
        std::thread::sleep(any_moment(all).mul_f64(0.6));
        let _ = child.kill();
        until_all_have_ended(&mut child);
        match packages::linked(host.prefix(), &set.digest()) {
            None => cut += 1,
            // It was too late, or all archives were there already.
            Some(_) => late += 1,
        }
        for digest in packages::ready(host.prefix()) {
            assert_eq!(verify(host.prefix(), &digest).differences, [], "{digest} is called ready");
        }
        assert!(host.envs().iter().all(|name| !name.starts_with('.')), "{:?}", host.envs());
        let (worked, said) = until_all_have_ended(&mut run(set));
        assert!(worked, "{said}");
        host.fetch(&second).await.unwrap();
        assert_same(&tree(&host.environment(set)), wanted);
        assert_same(&tree(&host.environment(&first)), &wanted_first);
        assert_eq!(sorted(host.envs()), sorted(vec![first.digest(), second.digest()]));
        assert_eq!(names(host.prefix()), ["envs", "lock", "pkgs"]);
        assert_eq!(names(&host.pkgs()), archives);
        assert_eq!(names(temporary.path()), Vec::<String>::new(), "temporary files are left");
    }
    eprintln!("measured: {} kills within {all:?}, {cut} before and {late} after it was ready", cut + late);
    assert!(cut > 0, "no kill was in time");
}

#[tokio::test]
async fn a_stage_that_is_killed_while_it_follows_is_finished_by_the_next_one() {
    let (_channel, [set, _]) = two_sets().await;
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    let wanted = tree(&host.environment(&set));
    let archives = names(&host.pkgs());
    let mut left = 0;
    for kill in 0..kills() {
        fs::remove_dir_all(host.environment(&set)).unwrap();
        let store = Store::of(&host);
        let stage = Stage::begin(&host, &set);
        let came = kill as usize % (archives.len() + 1);
        for (number, name) in archives.iter().enumerate().take(came) {
            store.bring(name, &host);
            if number > 0 {
                // The one before.
                stage.until_unpacked(number as u64);
            }
        }
        std::thread::sleep(any_moment(Duration::from_millis(5)));
        let Stage { mut child, stdin, replies } = stage;
        // As an agent does it that lets its order go.
        child.kill().unwrap();
        child.wait().unwrap();
        drop((stdin, replies));
        for digest in packages::ready(host.prefix()) {
            assert_eq!(verify(host.prefix(), &digest).differences, [], "{digest} is called ready");
        }
        left += host.envs().iter().filter(|name| name.starts_with('.')).count();
        store.archives().iter().for_each(|name| store.bring(name, &host));
        assert!(matches!(Stage::begin(&host, &set).end(), Ok(Answer::Linked(_))));
        assert_same(&tree(&host.environment(&set)), &wanted);
        assert_eq!(host.envs(), [set.digest()]);
        assert_eq!(names(&host.pkgs()), archives);
    }
    eprintln!("measured: {} kills left {left} unfinished directories for the next run to clear", kills());
}
