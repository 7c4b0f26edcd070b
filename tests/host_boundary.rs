//! From the agent's process into the host's namespaces, with the real binary as the stage.

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    os::unix::{
        fs::symlink,
        net::{UnixListener, UnixStream},
    },
    path::Path,
};

use flux_distribute::host::{
    Answer, ClaimOrder, FakeHost, Host, HostError, HostView, NsHost, Order, PreflightOrder, Refusal, boundary::enter_command,
    files::{HostRoot, host_path},
};

const BINARY: &str = env!("CARGO_BIN_EXE_flux-distribute");

macro_rules! need_root {
    () => {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
    };
}

async fn run(host: &dyn Host, order: Order) -> Result<Answer, HostError> {
    host.run(order, &mut |_| {}).await
}

#[tokio::test]
async fn a_stage_answers_where_the_pod_shares_all_namespaces() {
    need_root!();
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let Answer::Observed(view) = run(&host, Order::Observe).await.unwrap() else { panic!() };
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(view.boot_id, boot_id.trim());
}

#[tokio::test]
async fn a_stage_outlives_its_file() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("binary");
    fs::copy(BINARY, &copy).unwrap();
    let host = NsHost::with_executable(&copy).unwrap();
    fs::remove_file(&copy).unwrap();
    assert!(matches!(run(&host, Order::Observe).await, Ok(Answer::Observed(_))));
}

#[tokio::test]
async fn a_stages_refusal_comes_through_in_its_own_words() {
    need_root!();
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let order = ClaimOrder { prefix: "/opt/../etc".into(), instance_uid: "u".into() };
    match run(&host, Order::Claim(order)).await {
        Err(HostError::Refused(Refusal { message, transient: false })) => assert!(message.contains("spec.prefix"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_stage_that_says_nothing_or_nonsense_is_an_error() {
    need_root!();
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
async fn preflight_leaves_nothing_behind() {
    need_root!();
    let host = NsHost::with_executable(Path::new(BINARY)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("not/there/yet");
    let order = PreflightOrder { prefix: Some(prefix.clone()), port: 8050, need_bytes: 0 };
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

#[test]
fn an_order_that_cant_be_read_is_answered_without_its_content() {
    use std::io::Write;
    let mut child = std::process::Command::new(BINARY)
        .arg("stage")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(br#"{"Configure":{"files":"hunter2"}}"#).unwrap();
    let output = child.wait_with_output().unwrap();
    let answer = String::from_utf8(output.stdout).unwrap();
    assert!(answer.contains("Failed") && !answer.contains("hunter2"), "{answer}");
}

#[test]
fn a_program_of_the_host_runs_with_the_environment_it_is_given() {
    need_root!();
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
    fs::write(host_path(&made).join("a.conda"), "a").unwrap();
    assert!(at("var/real/flux-distribute/pkgs/a.conda").is_file());
    let mut text = String::new();
    root.open_file(Path::new("/up/passwd")).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "the host's");
    assert!(root.open_path(Path::new("/not/there")).is_err());

    let _listener = UnixListener::bind(at("var/real/local")).unwrap();
    let socket = root.open_path(Path::new("/opt/local")).unwrap();
    UnixStream::connect(host_path(&socket)).unwrap();
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
