//! What a host goes through, from claim to removal, in a directory that stands for the host's root.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    sync::mpsc::channel,
    time::Duration,
};

use flux_distribute::host::{
    Brokers, ClaimOrder, ConfigureOrder, FluxOrder, HostFile, HostLock, HostState, LaunchRecord, Refusal, RemoveOrder,
    Root, RunningBroker, StateDir, StopOrder, Undo, claim, configure, flux, launch::BrokerView, observe, remove, state,
};

const PREFIX: &str = "/opt/flux-distribute";
const DIGEST: &str = "0123456789abcdef";
const COMPILED: &str = "/usr/site/flux";

/// Without root neither owners nor users can be changed.
macro_rules! need_root {
    () => {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
    };
}

#[derive(Default)]
struct FakeBrokers {
    running: RefCell<Option<RunningBroker>>,
    calls: RefCell<Vec<&'static str>>,
}

impl Brokers for FakeBrokers {
    fn observe(&self, _prefix: Option<&Path>) -> BrokerView {
        BrokerView {
            running: self.running.borrow().clone(),
            died: None,
        }
    }

    fn stop(&self, _order: &StopOrder) -> Result<(), Refusal> {
        self.running.take();
        self.calls.borrow_mut().push("stop");
        Ok(())
    }

    fn forget(&self) -> Result<(), Refusal> {
        self.calls.borrow_mut().push("forget");
        Ok(())
    }
}

struct TestHost {
    dir: tempfile::TempDir,
    root: Root,
    brokers: FakeBrokers,
}

impl TestHost {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Self {
            root: Root::at(dir.path()),
            dir,
            brokers: FakeBrokers::default(),
        };
        for (path, content) in [
            (
                "/etc/passwd",
                "root:x:0:0:root:/root:/bin/sh\nflux:x:500:501::/var/lib/flux:/bin/sh\n",
            ),
            ("/etc/group", "video:x:44:flux\n"),
            ("/proc/sys/fs/inotify/max_user_instances", "128\n"),
            ("/proc/sys/kernel/random/boot_id", "boot-1\n"),
            ("/opt/others/file", "theirs"),
            ("/run/other", ""),
            ("/usr/bin/other", ""),
        ] {
            host.write(path, content);
        }
        host
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.path(path)
    }

    fn below(&self, path: &str) -> PathBuf {
        self.root.path(PREFIX).join(path)
    }

    fn write(&self, path: &str, content: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), content).unwrap();
    }

    fn environment(&self, digest: &str, marker: &str) {
        self.write(&format!("{PREFIX}/envs/{digest}/.flux-distribute.json"), marker);
    }

    fn claim(&self) -> Result<(), Refusal> {
        claim(&self.root, &claim_order(PREFIX, "uid-1"))
    }

    fn configure(&self, order: &ConfigureOrder) -> Result<(), Refusal> {
        configure(&self.root, order)
    }

    fn remove(&self, keep_state: bool) -> Result<(), Refusal> {
        remove(&self.root, &self.brokers, &RemoveOrder { keep_state })
    }

    fn state(&self) -> Option<HostState> {
        observe(&self.root, &self.brokers).unwrap().state
    }

    /// Everything below the root, with contents and link targets.
    fn everything(&self) -> BTreeMap<PathBuf, String> {
        fn walk(dir: &Path, found: &mut BTreeMap<PathBuf, String>) {
            for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
                let content = match fs::symlink_metadata(&path).unwrap().file_type() {
                    kind if kind.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
                    kind if kind.is_dir() => {
                        walk(&path, found);
                        "directory".into()
                    }
                    _ => fs::read_to_string(&path).unwrap().trim().to_owned(),
                };
                found.insert(path, content);
            }
        }
        let mut found = BTreeMap::new();
        walk(self.dir.path(), &mut found);
        found
    }
}

fn claim_order(prefix: &str, uid: &str) -> ClaimOrder {
    ClaimOrder {
        prefix: prefix.into(),
        instance_uid: uid.into(),
    }
}

fn configure_order() -> ConfigureOrder {
    let file = |path: &str, content: &str, mode, broker_owned| HostFile {
        path: path.into(),
        content: content.into(),
        mode,
        broker_owned,
    };
    ConfigureOrder {
        prefix: PREFIX.into(),
        digest: DIGEST.into(),
        files: vec![
            file("etc/broker.toml", "[bootstrap]\n", 0o644, false),
            file("etc/curve.cert", "secret", 0o600, true),
            file("etc/roster.json", "{}", 0o644, false),
            file("bin/flux-connect.sh", "#!/bin/sh\n", 0o755, false),
        ],
        run_as: "flux".into(),
        statedir: Some(StateDir {
            instance_id: "id-1".into(),
            established: false,
        }),
        sysctls: BTreeMap::from([
            ("fs.inotify.max_user_instances".into(), 8192),
            ("net.core.not_on_this_kernel".into(), 5),
        ]),
        live: false,
    }
}

fn not_established(id: &str) -> Option<StateDir> {
    Some(StateDir {
        instance_id: id.into(),
        established: false,
    })
}

fn established(id: &str) -> Option<StateDir> {
    Some(StateDir {
        instance_id: id.into(),
        established: true,
    })
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn owner(path: &Path) -> (u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap();
    (metadata.uid(), metadata.gid())
}

#[test]
fn everything_we_touched_is_taken_off_and_nothing_else() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    host.claim().unwrap();
    host.environment(DIGEST, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
    host.configure(&configure_order()).unwrap();
    assert!(host.at("/flux-connect.sh").exists());
    assert_eq!(
        fs::read_link(host.at(COMPILED)).unwrap(),
        Path::new(PREFIX).join("envs").join(DIGEST)
    );
    assert_ne!(host.everything(), before);
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
    // Once more: it is clean already.
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

#[test]
fn configured_files_have_their_owner_mode_and_content() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&configure_order()).unwrap();
    assert_eq!(
        (
            mode(&host.below("etc/broker.toml")),
            owner(&host.below("etc/broker.toml"))
        ),
        (0o644, (0, 0))
    );
    assert_eq!(
        (
            mode(&host.below("etc/curve.cert")),
            owner(&host.below("etc/curve.cert"))
        ),
        (0o600, (500, 501))
    );
    assert_eq!(
        (mode(&host.below("state")), owner(&host.below("state"))),
        (0o700, (500, 501))
    );
    assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-1\n");
    assert_eq!(
        fs::read_link(host.below("current")).unwrap(),
        Path::new("envs").join(DIGEST)
    );
    assert_eq!(
        fs::read_to_string(host.at("/proc/sys/fs/inotify/max_user_instances")).unwrap(),
        "8192"
    );
    let view = observe(&host.root, &host.brokers).unwrap();
    assert_eq!(
        (view.environments, view.roster, view.boot_id),
        (vec![DIGEST.into()], Some("{}".into()), "boot-1".into())
    );

    // The user changes while the broker is down: what he owns changes with him.
    host.write(&format!("{PREFIX}/state/content.sqlite"), "queue");
    host.configure(&ConfigureOrder {
        run_as: "4242".into(),
        ..configure_order()
    })
    .unwrap();
    for path in ["etc/curve.cert", "state", "state/instance-id", "state/content.sqlite"] {
        assert_eq!(owner(&host.below(path)), (4242, 4242), "{path}");
    }
}

#[test]
fn claiming_and_configuring_again_changes_nothing() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
    host.configure(&configure_order()).unwrap();
    let (before, inode) = (
        host.everything(),
        fs::metadata(host.below("etc/broker.toml")).unwrap().ino(),
    );
    host.claim().unwrap();
    host.configure(&configure_order()).unwrap();
    assert_eq!(host.everything(), before);
    assert_eq!(fs::metadata(host.below("etc/broker.toml")).unwrap().ino(), inode);
}

#[test]
fn a_prefix_of_others_is_refused() {
    let host = TestHost::new();
    host.write(&format!("{PREFIX}/theirs"), "");
    let refusal = host.claim().unwrap_err();
    assert!(
        refusal.message.contains("theirs") && refusal.message.contains("spec.prefix"),
        "{refusal}"
    );
    assert!(host.state().is_none());
    assert!(claim(&host.root, &claim_order("/opt/../etc", "uid-1")).is_err());
    assert!(claim(&host.root, &claim_order("/", "uid-1")).is_err());
}

#[test]
fn another_instance_and_another_prefix_wait_until_the_host_is_clean() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    assert!(
        claim(&host.root, &claim_order(PREFIX, "uid-2"))
            .unwrap_err()
            .message
            .contains("uid-1")
    );
    assert!(
        claim(&host.root, &claim_order("/data/flux", "uid-1"))
            .unwrap_err()
            .message
            .contains(PREFIX)
    );
    assert!(!host.at("/data").exists());
    host.remove(false).unwrap();
    claim(&host.root, &claim_order("/data/flux", "uid-2")).unwrap();
}

#[test]
fn a_claim_that_was_killed_is_finished_by_the_next_or_removed() {
    need_root!();
    for finish in [true, false] {
        let host = TestHost::new();
        let before = host.everything();
        fs::create_dir_all(host.below("")).unwrap();
        fs::write(host.below("lock"), "").unwrap();
        fs::write(host.below(".state.json.new"), "{\"form").unwrap();
        if finish {
            host.claim().unwrap();
            assert_eq!(host.state().unwrap().instance_uid, "uid-1");
        }
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before);
    }
}

#[test]
fn a_prefix_of_ones_own_is_found_without_being_told_and_removed_whole() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    claim(&host.root, &claim_order("/data/site/flux", "uid-1")).unwrap();
    assert_eq!(host.state().unwrap().prefix, Path::new("/data/site/flux"));
    // A removal that was killed after state.json had gone.
    fs::remove_dir_all(host.at("/data/site/flux")).unwrap();
    assert_eq!(host.state().unwrap().instance_uid, "uid-1");
    host.remove(false).unwrap();
    assert_eq!(host.everything(), before);
}

#[test]
fn a_lost_statedir_of_an_established_instance_is_refused_before_anything_is_written() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    let before = host.everything();
    let refusal = host
        .configure(&ConfigureOrder {
            statedir: established("id-1"),
            ..configure_order()
        })
        .unwrap_err();
    assert!(!refusal.transient);
    for word in ["id-1", "recover", "reset"] {
        assert!(refusal.message.contains(word), "{refusal}");
    }
    assert_eq!(host.everything(), before);
    host.configure(&configure_order()).unwrap();
    host.configure(&ConfigureOrder {
        statedir: established("id-1"),
        ..configure_order()
    })
    .unwrap();
    let other = host
        .configure(&ConfigureOrder {
            statedir: established("id-2"),
            ..configure_order()
        })
        .unwrap_err();
    assert!(
        other.message.contains("id-2") && other.message.contains("id-1"),
        "{other}"
    );
}

#[test]
fn the_queue_of_an_older_instance_is_kept_aside() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&configure_order()).unwrap();
    fs::write(host.below("state/content.sqlite"), "queue").unwrap();
    host.configure(&ConfigureOrder {
        statedir: not_established("id-2"),
        ..configure_order()
    })
    .unwrap();
    assert_eq!(
        fs::read_to_string(host.below("state.id-1/content.sqlite")).unwrap(),
        "queue"
    );
    assert_eq!(fs::read_to_string(host.below("state/instance-id")).unwrap(), "id-2\n");
    // A second one of the same name doesn't overwrite the first.
    fs::write(host.below("state/instance-id"), "id-1").unwrap();
    host.configure(&ConfigureOrder {
        statedir: not_established("id-3"),
        ..configure_order()
    })
    .unwrap();
    assert!(host.below("state.id-1/content.sqlite").exists() && host.below("state.id-1.1").is_dir());
}

#[test]
fn a_kept_statedir_outlives_the_removal_and_serves_the_next_claim() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&configure_order()).unwrap();
    fs::write(host.below("state/content.sqlite"), "queue").unwrap();
    host.remove(true).unwrap();
    assert!(host.state().is_none());
    let left: Vec<_> = fs::read_dir(host.below(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["state"]);
    claim(&host.root, &claim_order(PREFIX, "uid-2")).unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&ConfigureOrder {
        statedir: established("id-1"),
        ..configure_order()
    })
    .unwrap();
    assert_eq!(fs::read_to_string(host.below("state/content.sqlite")).unwrap(), "queue");
}

#[test]
fn a_sysctl_is_raised_never_lowered_and_put_back_only_if_it_is_ours() {
    need_root!();
    let sysctl = "/proc/sys/fs/inotify/max_user_instances";
    let raise = |host: &TestHost, to| {
        let sysctls = BTreeMap::from([("fs.inotify.max_user_instances".to_owned(), to)]);
        host.configure(&ConfigureOrder {
            sysctls,
            ..configure_order()
        })
        .unwrap();
    };
    for (what, steps, by_hand, expected) in [
        ("put back", &[8192][..], None, "128"),
        ("raised twice", &[8192, 16384], None, "128"),
        ("asked for less later", &[8192, 4096], None, "128"),
        ("never raised", &[64], None, "128"),
        ("changed by the admin since", &[8192], Some("9999"), "9999"),
        (
            "the second raise was recorded and killed",
            &[8192, 16384],
            Some("8192"),
            "128",
        ),
        ("a reboot has put it back", &[8192], Some("128"), "128"),
    ] {
        let host = TestHost::new();
        host.claim().unwrap();
        host.environment(DIGEST, "{}");
        steps.iter().for_each(|&to| raise(&host, to));
        if let Some(value) = by_hand {
            host.write(sysctl, value);
        }
        host.remove(false).unwrap();
        assert_eq!(fs::read_to_string(host.at(sysctl)).unwrap().trim(), expected, "{what}");
    }
}

#[test]
fn the_undo_list_is_written_before_the_thing_is_done() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
    // A directory in the way of the link's rename: the record stands although the link was never made.
    fs::create_dir_all(host.at("/usr/site/.flux.new")).unwrap();
    assert!(host.configure(&configure_order()).is_err());
    let undo = host.state().unwrap().undo;
    assert!(
        undo.iter()
            .any(|undo| matches!(undo, Undo::Symlink { path, .. } if path == Path::new(COMPILED))),
        "{undo:?}"
    );
}

#[test]
fn the_compiled_in_prefix_of_others_is_refused_and_survives_our_removal() {
    need_root!();
    let theirs = "/srv/their-flux";
    for make in [
        (|path: &Path| fs::create_dir(path)) as fn(&Path) -> std::io::Result<()>,
        |path| symlink("/srv/their-flux", path),
    ] {
        let host = TestHost::new();
        fs::create_dir_all(host.at("/usr/site")).unwrap();
        make(&host.at(COMPILED)).unwrap();
        let _ = theirs;
        host.claim().unwrap();
        host.environment(DIGEST, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
        let refusal = host.configure(&configure_order()).unwrap_err();
        assert!(refusal.message.contains(COMPILED), "{refusal}");
        host.remove(false).unwrap();
        assert!(fs::symlink_metadata(host.at(COMPILED)).is_ok());
    }
}

#[test]
fn links_are_flipped_between_epochs_and_left_alone_under_a_running_broker() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    for digest in [DIGEST, "next"] {
        host.environment(digest, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
    }
    let target = |path: PathBuf| fs::read_link(path).unwrap().file_name().unwrap().to_owned();
    host.configure(&configure_order()).unwrap();
    host.configure(&ConfigureOrder {
        digest: "next".into(),
        live: true,
        ..configure_order()
    })
    .unwrap();
    assert_eq!(
        (target(host.at(COMPILED)), target(host.below("current"))),
        (DIGEST.into(), DIGEST.into())
    );
    host.configure(&ConfigureOrder {
        digest: "next".into(),
        ..configure_order()
    })
    .unwrap();
    assert_eq!(
        (target(host.at(COMPILED)), target(host.below("current"))),
        ("next".into(), "next".into())
    );
    host.remove(false).unwrap();
    assert!(!host.at("/usr/site").exists() && host.at("/usr").exists());
}

#[test]
fn somebody_elses_script_at_the_root_stays() {
    need_root!();
    let host = TestHost::new();
    host.write("/flux-connect.sh", "theirs");
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&configure_order()).unwrap();
    host.remove(false).unwrap();
    assert_eq!(fs::read_to_string(host.at("/flux-connect.sh")).unwrap(), "theirs");
}

#[test]
fn a_removal_that_was_killed_anywhere_is_finished_by_the_next_run() {
    need_root!();
    let host = TestHost::new();
    let before = host.everything();
    // What a killed removal can have taken off already: any of these, before state.json.
    for gone in [
        "envs",
        "etc",
        "state",
        "lock",
        "current",
        "../../flux-connect.sh",
        "../../usr/site/flux",
    ] {
        host.claim().unwrap();
        host.environment(DIGEST, &format!(r#"{{"compiledPrefix":"{COMPILED}"}}"#));
        host.configure(&configure_order()).unwrap();
        let path = host.below(gone);
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        }
        .unwrap();
        assert!(host.state().is_some(), "{gone}");
        host.remove(false).unwrap();
        assert_eq!(host.everything(), before, "{gone}");
    }
}

#[test]
fn what_cant_be_undone_keeps_the_undo_list() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    host.configure(&configure_order()).unwrap();
    fs::remove_file(host.at("/flux-connect.sh")).unwrap();
    fs::create_dir(host.at("/flux-connect.sh")).unwrap();
    assert!(host.remove(false).unwrap_err().message.contains("flux-connect.sh"));
    assert!(host.state().is_some());
    // The others were undone all the same.
    assert_eq!(
        fs::read_to_string(host.at("/proc/sys/fs/inotify/max_user_instances")).unwrap(),
        "128"
    );
    fs::remove_dir(host.at("/flux-connect.sh")).unwrap();
    host.remove(false).unwrap();
    assert!(host.state().is_none());
}

#[test]
fn a_broker_that_still_runs_is_stopped_before_its_host_is_cleaned() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let record = LaunchRecord {
        rank: 0,
        broker_name: "n0".into(),
        node_uid: "n".into(),
        instance_uid: "uid-1".into(),
        instance_id: "id-1".into(),
        epoch: 1,
        digest: DIGEST.into(),
        launch: "l".into(),
    };
    *host.brokers.running.borrow_mut() = Some(RunningBroker {
        pid: 1,
        start_time: 1,
        systemd: false,
        record,
    });
    host.remove(false).unwrap();
    assert_eq!(*host.brokers.calls.borrow(), ["stop", "forget"]);
}

#[test]
fn files_do_not_leave_the_prefix_and_secrets_do_not_leave_their_file() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    host.environment(DIGEST, "{}");
    for path in ["../etc/passwd", "/etc/passwd", "etc/../../x"] {
        let file = HostFile {
            path: path.into(),
            content: "hunter2".into(),
            mode: 0o644,
            broker_owned: false,
        };
        let refusal = host
            .configure(&ConfigureOrder {
                files: vec![file],
                ..configure_order()
            })
            .unwrap_err();
        assert!(
            refusal.message.contains("prefix") && !refusal.message.contains("hunter2"),
            "{refusal}"
        );
    }
    assert!(!format!("{:?}", configure_order()).contains("secret"));
}

#[test]
fn one_stage_at_a_time_writes_and_a_removed_lock_is_not_held() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let held = HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).unwrap();
    assert!(
        HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO)
            .unwrap_err()
            .transient
    );
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let taken = HostLock::take(&host.root, Path::new(PREFIX), Duration::from_secs(20));
            send.send(taken).unwrap();
        });
        // The waiter may hold the file that goes: it must end up with the one that is there.
        fs::remove_file(host.below("lock")).unwrap();
        drop(held);
        let _taken = receive.recv().unwrap().unwrap();
        assert!(HostLock::take(&host.root, Path::new(PREFIX), Duration::ZERO).is_err());
    });
}

#[test]
fn a_state_of_a_newer_version_is_not_guessed_at() {
    need_root!();
    let host = TestHost::new();
    host.claim().unwrap();
    let mut newer = host.state().unwrap();
    newer.format = state::FORMAT + 1;
    state::save(&host.root, &newer).unwrap();
    assert!(host.remove(false).unwrap_err().message.contains("newer"));
    host.write(&format!("{PREFIX}/state.json"), "{");
    assert!(observe(&host.root, &host.brokers).is_err());
    assert!(host.below("envs").exists());
}

fn flux_script(host: &TestHost, script: &str) {
    let path = format!("{PREFIX}/envs/{DIGEST}/bin/flux");
    host.write(&path, &format!("#!/bin/sh\n{script}\n"));
    fs::set_permissions(host.at(&path), fs::Permissions::from_mode(0o755)).unwrap();
    // The broker's user must be able to reach it.
    fs::set_permissions(host.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

fn flux_order(args: &[&str], timeout_secs: u64) -> FluxOrder {
    FluxOrder {
        prefix: PREFIX.into(),
        digest: DIGEST.into(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        run_as: "flux".into(),
        timeout_secs,
    }
}

#[test]
fn flux_runs_as_the_brokers_user_with_nothing_of_our_environment() {
    need_root!();
    let host = TestHost::new();
    flux_script(
        &host,
        "id -u; id -g; id -G; echo $HOME $FLUX_URI $CARGO_MANIFEST_DIR \"$@\"; echo oops >&2; exit 3",
    );
    let ran = flux(&host.root, &flux_order(&["resource", "a b"], 60)).unwrap();
    let expected = "500\n501\n501 44\n/var/lib/flux local:///run/flux-distribute/broker/local resource a b\n";
    assert_eq!(
        (ran.code, ran.stdout.as_str(), ran.stderr.as_str()),
        (3, expected, "oops\n")
    );
}

#[test]
fn what_flux_says_is_bounded_and_so_is_its_time() {
    need_root!();
    let host = TestHost::new();
    flux_script(&host, "head -c 1000000 /dev/zero | tr '\\0' x; kill -9 $$");
    let ran = flux(&host.root, &flux_order(&[], 60)).unwrap();
    assert_eq!((ran.code, ran.stdout.len()), (128 + 9, 64 << 10));
    flux_script(&host, "sleep 1000 & wait");
    let refusal = flux(&host.root, &flux_order(&["job", "wait"], 1)).unwrap_err();
    assert!(refusal.transient && refusal.message.contains("flux job"), "{refusal}");
}
