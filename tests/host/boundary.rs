//! From the agent's process into the host's namespaces, with the real binary as the stage.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    pin::pin,
    process::{ExitCode, Stdio},
    time::Duration,
};

use api::{DEFAULT_PREFIX, PackageSet, RUN_DIR};
use host::{HostLock, NsHost, Root, boundary::enter_command, enter, host_root::HostRoot, opening::path_of, users};
use hostapi::{
    Answer, ClaimOrder, ConfigureOrder, FakeHost, Host, HostError, HostFile, HostView, LaunchRecord, LinkOrder, Order,
    PreflightOrder, Refusal, RemoveOrder, Reply, StateDir, StopOrder,
};

use futures::future::{Either, FutureExt, select};

use crate::{
    needs::{Need, skips_without},
    pod::{IN_POD, OF_ITS_OWN, SHARING_ALL, in_pod},
};

const BINARY: &str = env!("CARGO_BIN_EXE_flux-distribute");

async fn run(host: &dyn Host, order: Order) -> Result<Answer, HostError> {
    host.run(order, &mut |_| {}).await
}

#[tokio::test]
async fn a_stage_answers_where_the_pod_shares_all_namespaces() {
    if !in_pod("a_stage_answers_where_the_pod_shares_all_namespaces", SHARING_ALL) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let Answer::Observed(view) = run(&host, Order::Observe).await.unwrap() else { panic!() };
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(view.boot_id, boot_id.trim());
}

#[tokio::test]
async fn a_stage_outlives_its_file() {
    if !in_pod("a_stage_outlives_its_file", OF_ITS_OWN) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("binary");
    fs::copy(BINARY, &copy).unwrap();
    let host = NsHost::with_executable(&copy).unwrap();
    fs::remove_file(&copy).unwrap();
    assert!(matches!(run(&host, Order::Observe).await, Ok(Answer::Observed(_))));
}

#[tokio::test]
async fn a_stages_refusal_reaches_the_agent_unchanged() {
    if !in_pod("a_stages_refusal_reaches_the_agent_unchanged", OF_ITS_OWN) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let order = ClaimOrder { prefix: "/opt/../etc".into(), instance_uid: "u".into(), uninstall: Default::default() };
    match run(&host, Order::Claim(order)).await {
        Err(HostError::Refused(Refusal { message, transient: false })) => {
            assert!(message.contains("spec.prefix"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_stage_that_says_nothing_or_nonsense_is_an_error() {
    if !in_pod("a_stage_that_says_nothing_or_nonsense_is_an_error", OF_ITS_OWN) {
        return;
    }
    for (program, expected) in [("/bin/true", "without an answer"), ("/bin/echo", "no reply")] {
        let host = NsHost::with_executable(Path::new(program)).unwrap();
        let error = run(&host, Order::Observe).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let nonsense = dir.path().join("nonsense");
    fs::write(&nonsense, [0; 64]).unwrap();
    let host = NsHost::with_executable(&nonsense).unwrap();
    assert!(run(&host, Order::Observe).await.is_err());
}

#[tokio::test]
async fn the_agent_does_not_wait_for_a_suspended_stage() {
    if !in_pod("the_agent_does_not_wait_for_a_suspended_stage", OF_ITS_OWN) {
        return;
    }
    // env(1) takes the stage's name for that of a program.
    let host = NsHost::with_executable(Path::new("/usr/bin/env")).unwrap();
    let done = serde_json::to_string(&Reply::Done(Box::new(Answer::Done))).unwrap();
    let program = Path::new("/usr/local/sbin/stage");
    let tell = |words: &str| {
        fs::write(program, format!("#!/bin/sh\n{words}; exec >&-; kill -STOP $$\n")).unwrap();
        fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
    };
    tell(&format!("echo '{done}'"));
    assert_eq!(run(&host, Order::Observe).await.unwrap(), Answer::Done);
    tell(":");
    let error = run(&host, Order::Observe).await.unwrap_err();
    assert!(error.to_string().contains("killed"), "{error}");
}

/// Follows an archive that does not come, below a prefix of its own.
fn following_order() -> (tempfile::TempDir, Order) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("pkgs")).unwrap();
    let (url, sha256) = ("http://channel.invalid/linux-64", "0".repeat(64));
    let lock = format!(
        "version: 6\nenvironments:\n  default:\n    channels:\n    - url: {url}/\n    packages:\n      linux-64:\n      \
         - conda: {url}/flux-core-1.0-0.conda\npackages:\n- conda: {url}/flux-core-1.0-0.conda\n  sha256: {sha256}\n"
    );
    let set = PackageSet::Lock { lock, question: String::new() };
    let order = LinkOrder {
        prefix: dir.path().to_owned(),
        digest: set.digest(),
        set,
        platform: "linux-64".to_owned(),
        follow: true,
    };
    (dir, Order::Link(order))
}

#[tokio::test]
async fn a_stage_notices_that_no_more_archives_come() {
    if !in_pod("a_stage_notices_that_no_more_archives_come", OF_ITS_OWN) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let (dir, order) = following_order();
    let (coming, ended) = tokio::sync::oneshot::channel::<()>();
    let mut ignored = |_| {};
    let running = host.run_while(order, ended.map(drop).boxed(), &mut ignored);
    let telling = async {
        until_the_lock_is_held(dir.path()).await;
        drop(coming);
    };
    match futures::join!(running, telling).0 {
        Err(HostError::Refused(refusal)) => {
            assert!(refusal.message.contains("flux-core-1.0-0 is not on this host"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
    let left = fs::read_dir(dir.path().join("envs")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), [".lock"]);
}

#[tokio::test]
async fn a_dropped_order_leaves_no_stage_and_a_free_lock() {
    if !in_pod("a_dropped_order_leaves_no_stage_and_a_free_lock", OF_ITS_OWN) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let (dir, order) = following_order();
    let mut ignored = |_| {};
    let running = host.run_while(order, futures::future::pending().boxed(), &mut ignored);
    match select(running, pin!(until_the_lock_is_held(dir.path()))).await {
        Either::Left((ended, _)) => panic!("{ended:?}"),
        Either::Right(((), running)) => drop(running),
    }
    let prefix = dir.path().to_owned();
    let taken = tokio::task::spawn_blocking(move || HostLock::take(&Root::host(), &prefix, Duration::from_secs(20)));
    taken.await.unwrap().unwrap();
}

/// Nothing else is to be seen of a stage that waits.
async fn until_the_lock_is_held(prefix: &Path) {
    // The file is the first thing that the stage makes there.
    while !prefix.join("lock").exists() || HostLock::take(&Root::host(), prefix, Duration::ZERO).is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn preflight_leaves_nothing_behind() {
    if !in_pod("preflight_leaves_nothing_behind", OF_ITS_OWN) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("not/there/yet");
    let order = PreflightOrder { prefix: Some(prefix.clone()), endpoint: ([0; 4], 8050).into(), need_bytes: 0 };
    match run(&host, Order::Preflight(order)).await {
        Ok(Answer::Preflight(found)) => {
            assert_eq!(found.prefix, prefix);
            assert!(found.resources.cores > 0 && found.memory_mib > 0 && found.glibc.starts_with("2."), "{found:?}");
        }
        // This machine's own business, such as a used port.
        Err(HostError::Refused(refusal)) => eprintln!("refused: {refusal}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_stage_works_on_the_host_and_not_in_the_pod() {
    if !in_pod("a_stage_works_on_the_host_and_not_in_the_pod", OF_ITS_OWN) {
        return;
    }
    // From here on the host's /opt can't be seen by this process.
    nix::mount::mount(Some("pod"), "/opt", Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>).unwrap();
    let prefix = Path::new(DEFAULT_PREFIX);
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let on_host = HostRoot::open().unwrap();
    let order = ClaimOrder { prefix: prefix.into(), instance_uid: "u".into(), uninstall: Default::default() };
    assert_eq!(run(&host, Order::Claim(order)).await.unwrap(), Answer::Done);
    assert!(!prefix.exists());
    assert!(on_host.open_path(&prefix.join("state.json")).is_ok());
    let Answer::Observed(view) = run(&host, Order::Observe).await.unwrap() else { panic!() };
    assert_eq!(view.state.unwrap().prefix, prefix);
    assert_eq!(run(&host, Order::Remove(RemoveOrder { keep_state: false })).await.unwrap(), Answer::Done);
    assert!(on_host.open_path(prefix).is_err());
}

#[tokio::test]
async fn a_stage_runs_where_the_kernel_forbids_to_run_memory() {
    if !in_pod("a_stage_runs_where_the_kernel_forbids_to_run_memory", OF_ITS_OWN) {
        return;
    }
    if skips_without([Need::MemfdNoexec]) {
        return;
    }
    // This setting belongs to the PID namespace, and can only be raised.
    for level in ["1", "2"] {
        fs::write("/proc/sys/vm/memfd_noexec", level).unwrap();
        let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
        assert!(matches!(run(&host, Order::Observe).await, Ok(Answer::Observed(_))), "{level}");
    }
}

/// Sends one order to a stage, and kills the stage after the given time.
fn killed_stage(order: &Order, after: Duration) {
    let mut child = std::process::Command::new(BINARY)
        .arg("stage")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(&serde_json::to_vec(order).unwrap());
    std::thread::sleep(after);
    let _ = child.kill();
    child.wait().unwrap();
}

/// What is recorded of a broker is one by that.
fn record_as_broker(pid: u32, prefix: &Path) {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start_time: u64 = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot_id = boot_id.trim();
    let record = serde_json::json!({
        "process": {"boot_id": boot_id, "pid": pid, "start_time": start_time}, "boot_id": boot_id, "systemd": false,
        "prefix": prefix, "log_start": 0, "record": LaunchRecord::default(),
    });
    fs::create_dir_all(RUN_DIR).unwrap();
    fs::write(Path::new(RUN_DIR).join("broker.json"), record.to_string()).unwrap();
}

#[tokio::test]
async fn a_stop_order_whose_sender_has_died_stops_no_broker() {
    if !in_pod("a_stop_order_whose_sender_has_died_stops_no_broker", SHARING_ALL) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let prefix = Path::new(DEFAULT_PREFIX);
    let claim = ClaimOrder { prefix: prefix.into(), instance_uid: "u".into(), uninstall: Default::default() };
    run(&host, Order::Claim(claim)).await.unwrap();
    let mut broker = std::process::Command::new("sleep").arg("infinity").spawn().unwrap();
    record_as_broker(broker.id(), prefix);
    let order = Order::Stop(StopOrder { grace_secs: 5 });

    let lock = HostLock::take(&Root::host(), prefix, Duration::ZERO).unwrap();
    let mut stage = std::process::Command::new(BINARY);
    let mut stage = stage.arg("stage").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    stage.stdin.take().unwrap().write_all(&serde_json::to_vec(&order).unwrap()).unwrap();
    // It waits for the lock, and the process that sent the order has ended.
    let open = |fd: fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|path| path == prefix.join("lock"));
    while !fs::read_dir(format!("/proc/{}/fd", stage.id())).unwrap().flatten().any(open) {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(stage.stdout.take());
    drop(lock);
    stage.wait().unwrap();
    assert_eq!(broker.try_wait().unwrap(), None, "the broker was ended");

    run(&host, order).await.unwrap();
    assert!(broker.wait().unwrap().code().is_none(), "a signal ends it");
}

#[tokio::test]
async fn every_order_can_be_killed_at_any_time_and_nothing_stays_behind() {
    if !in_pod("every_order_can_be_killed_at_any_time_and_nothing_stays_behind", SHARING_ALL) {
        return;
    }
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let prefix = Path::new(DEFAULT_PREFIX);
    let claim =
        Order::Claim(ClaimOrder { prefix: prefix.into(), instance_uid: "u".into(), uninstall: Default::default() });
    let text = "[bootstrap]\n".repeat(10_000);
    let configure = Order::Configure(ConfigureOrder {
        prefix: prefix.into(),
        digest: "d".into(),
        files: vec![HostFile {
            path: "etc/broker.toml".into(),
            content: text.clone(),
            mode: 0o644,
            broker_owned: true,
        }],
        run_as: "1234".into(),
        statedir: Some(StateDir { instance_id: "i".into(), established: false }),
        sysctls: BTreeMap::new(),
        live: false,
    });
    let remove = Order::Remove(RemoveOrder { keep_state: false });
    for step in 0..40 {
        let after = Duration::from_micros(500 * step);
        killed_stage(&claim, after);
        run(&host, claim.clone()).await.unwrap();
        fs::create_dir_all(prefix.join("envs/d")).unwrap();
        fs::write(
            prefix.join("envs/d/.flux-distribute.json"),
            r#"{"digest":"d","compiledPrefix":"/opt/site/flux","bytes":1,"archives":[]}"#,
        )
        .unwrap();

        killed_stage(&configure, after);
        if let Ok(found) = fs::read_to_string(prefix.join("etc/broker.toml")) {
            assert!(found == text, "a half-written file");
        }
        if prefix.join("state").exists() {
            assert_eq!(fs::read_to_string(prefix.join("state/instance-id")).unwrap(), "i\n");
        }
        if step % 2 == 0 {
            run(&host, configure.clone()).await.unwrap();
        }

        killed_stage(&remove, after);
        run(&host, remove.clone()).await.unwrap();
        assert_eq!(fs::read_dir("/opt").unwrap().count(), 0, "{step}");
    }
}

#[test]
fn a_program_entered_from_the_pod_sees_the_host_and_returns_its_exit_code() {
    if !in_pod("a_program_entered_from_the_pod_sees_the_host_and_returns_its_exit_code", OF_ITS_OWN) {
        return;
    }
    fs::write("/opt/on-the-host", "").unwrap();
    nix::mount::mount(Some("pod"), "/opt", Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>).unwrap();
    let user = users::resolve("1234", "", "").unwrap();
    for (script, user, expected) in [
        ("test -e /opt/on-the-host", None, 0),
        ("exit 7", None, 7),
        ("kill -9 $$", None, 137),
        ("test $(id -u),$(id -g),$(id -G),$HOME = 1234,1234,1234,/", Some(&user), 0),
    ] {
        let code = enter(Path::new("/bin/sh"), &["-c".into(), script.into()], &[], user).unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(expected)), "{script}");
    }
    assert!(enter(Path::new("/not/there"), &[], &[], None).is_err());
}

#[tokio::test]
async fn a_process_that_cant_see_the_host_is_refused() {
    let name = "a_process_that_cant_see_the_host_is_refused";
    if std::env::var_os(IN_POD).is_some() {
        // `exec`ed by the pod's first process: this one is PID 1.
        let error = NsHost::open().unwrap_err();
        assert!(error.to_string().contains("hostPID"), "{error}");
        return;
    }
    if skips_without([Need::Namespaces]) {
        return;
    }
    let status = std::process::Command::new("unshare")
        .args(["--fork", "--pid", "--mount-proc", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("boundary::{name}")])
        .env(IN_POD, "1")
        .status()
        .unwrap();
    assert!(status.success());
}

#[test]
fn the_answer_to_an_unreadable_order_does_not_quote_it() {
    let mut child =
        std::process::Command::new(BINARY).arg("stage").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(br#"{"Configure":{"files":"hunter2"}}"#).unwrap();
    let output = child.wait_with_output().unwrap();
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.contains("Failed") && !answer.contains("hunter2"), "{answer}");
}

#[test]
fn a_program_of_the_host_runs_with_the_environment_it_is_given() {
    if !in_pod("a_program_of_the_host_runs_with_the_environment_it_is_given", OF_ITS_OWN) {
        return;
    }
    let env = BTreeMap::from([("TERM".into(), "dumb".into())]);
    let output = enter_command(Path::new("/usr/bin/env"), &[], &env, None).unwrap().output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "TERM=dumb\n");
}

#[test]
fn the_hosts_symlinks_lead_into_the_hosts_root_and_not_into_ours() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir_all(at("var/real")).unwrap();
    symlink("/var/real", at("opt")).unwrap();
    symlink("/../../../etc", at("up")).unwrap();
    fs::create_dir(at("etc")).unwrap();
    fs::write(at("etc/passwd"), "the host's").unwrap();

    let root = HostRoot::at(dir.path()).unwrap();
    let made = root.make_dirs(Path::new("/opt/flux-distribute/pkgs")).unwrap();
    assert!(at("var/real/flux-distribute/pkgs").is_dir());
    fs::write(path_of(&made).join("a.conda"), "a").unwrap();
    assert!(at("var/real/flux-distribute/pkgs/a.conda").is_file());
    let mut text = String::new();
    root.open_file(Path::new("/up/passwd")).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "the host's");
    assert!(root.open_path(Path::new("/not/there")).is_err());

    let _listener = UnixListener::bind(at("var/real/local")).unwrap();
    let socket = root.open_path(Path::new("/opt/local")).unwrap();
    UnixStream::connect(path_of(&socket)).unwrap();
}

#[tokio::test]
async fn a_fake_host_remembers_orders_and_answers_by_script() {
    let blank = FakeHost::blank();
    assert_eq!(run(&blank, Order::Observe).await.unwrap(), Answer::Observed(Box::<HostView>::default()));
    assert_eq!(blank.take_orders(), [Order::Observe]);
    assert!(blank.orders().is_empty());
    let scripted = FakeHost::answering([Ok(Answer::Done), Err(Refusal::transient("later"))]);
    assert_eq!(run(&scripted, Order::Observe).await.unwrap(), Answer::Done);
    assert!(matches!(run(&scripted, Order::Observe).await, Err(HostError::Refused(Refusal { transient: true, .. }))));
    assert!(run(&scripted, Order::Observe).await.is_err());
}
