//! A broker on a host without systemd outlives the pod whose agent started it.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use broker::command::{BrokerIdentity, launch};
use host::BrokerProcesses;
use host::{
    cgroup::{Place, members, mounts, places_here},
    process::Identity,
};
use hostapi::{LaunchOrder, LaunchRecord, RunningBroker, StopOrder};
use needs::{Need, skips_without};
use stage::launch::HostPlaces;

/// A host of its own within this one: directories and a cgroup's name.
struct Bed {
    directory: tempfile::TempDir,
    places: HostPlaces,
    pod: String,
}

/// What the test is called with to be the agent's stage of [`Bed`].
const STAGE: &str = "FLUX_DISTRIBUTE_TEST_STAGE";

impl Bed {
    fn new(name: &str) -> Option<Self> {
        if skips_without([Need::Cgroups]) {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        // The broker's user has to get to its files.
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let unique = format!("fxd-test-{}-{name}", std::process::id());
        let places = HostPlaces {
            run_dir: directory.path().join("run"),
            socket_dir: directory.path().join("run/broker"),
            cgroup: format!("{unique}/broker"),
            launcher: PathBuf::from(env!("CARGO_BIN_EXE_flux-distribute")),
            systemd: None,
        };
        Some(Self { directory, places, pod: format!("{unique}-kubepods/pod1") })
    }

    fn order(&self, argv: &[&str], run_as: &str) -> LaunchOrder {
        LaunchOrder {
            prefix: self.directory.path().join("prefix"),
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            env: [("NAME".to_owned(), "va l$ue".to_owned())].into(),
            run_as: run_as.to_owned(),
            cpu_weight: 250,
            record: LaunchRecord {
                rank: 3,
                broker_name: "node3".to_owned(),
                node_uid: "node".to_owned(),
                instance_uid: "instance".to_owned(),
                instance_id: "id".to_owned(),
                epoch: 1,
                digest: "digest".to_owned(),
                launch: "launch".to_owned(),
            },
        }
    }

    /// Starts from within the pod's cgroup of every hierarchy, by a process of its own as the stage is one.
    fn start_from_pod(&self, order: &LaunchOrder) -> Child {
        for place in places_here(&self.pod).unwrap() {
            fs::create_dir_all(&place.directory).unwrap();
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let root = fs::read_to_string(place.point.join(file));
                if let (false, Ok(root)) = (place.unified, root) {
                    fs::write(place.directory.parent().unwrap().join(file), root.trim()).unwrap();
                    fs::write(place.directory.join(file), root.trim()).unwrap();
                }
            }
        }
        let told = serde_json::json!({
            "order": order, "run_dir": self.places.run_dir, "socket_dir": self.places.socket_dir,
            "cgroup": self.places.cgroup, "pod": self.pod,
        });
        // Ignored signals and a low limit, as a stage may have inherited them.
        Command::new("nohup")
            .arg("env")
            .arg("--ignore-signal=USR1")
            .arg(std::env::current_exe().unwrap())
            .args(["stage_of_the_pod", "--exact", "--nocapture"])
            .env(STAGE, told.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn start(&self, order: &LaunchOrder) {
        let output = self.start_from_pod(order).wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    fn stop(&self) {
        self.places.stop(&StopOrder { grace_secs: 5 }).unwrap();
    }

    /// What runtime and kubelet do to a pod.
    fn kill_pod(&self) {
        let pod = places_here(&self.pod).unwrap();
        for process in members(&pod).into_iter().filter_map(Identity::of) {
            process.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
            assert!(process.wait_gone(Duration::from_secs(10)));
        }
    }

    fn cgroups_that_are_there(&self) -> Vec<PathBuf> {
        let top = self.places.cgroup.split('/').next().unwrap();
        places_here(top).unwrap().into_iter().map(|place| place.directory).filter(|path| path.exists()).collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.places.stop(&StopOrder { grace_secs: 0 });
        let _ = self.places.forget();
        self.kill_pod();
        for place in places_here(&self.pod).unwrap() {
            let _ = fs::remove_dir(&place.directory);
            let _ = fs::remove_dir(place.directory.parent().unwrap());
        }
    }
}

/// Not a test by itself: the process that [`Bed::start_from_pod`] runs.
#[test]
fn stage_of_the_pod() {
    let Ok(told) = std::env::var(STAGE) else { return };
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let path = |name: &str| PathBuf::from(told[name].as_str().unwrap());
    for place in places_here(told["pod"].as_str().unwrap()).unwrap() {
        fs::write(place.directory.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
    fs::write("/proc/self/oom_score_adj", "1000").unwrap();
    let places = HostPlaces {
        run_dir: path("run_dir"),
        socket_dir: path("socket_dir"),
        cgroup: told["cgroup"].as_str().unwrap().to_owned(),
        launcher: PathBuf::from(env!("CARGO_BIN_EXE_flux-distribute")),
        systemd: None,
    };
    let order: LaunchOrder = serde_json::from_value(told["order"].clone()).unwrap();
    let running = places.start(&order).unwrap();
    assert_eq!(running.record, order.record);
}

fn proc(pid: i32, file: &str) -> String {
    fs::read_to_string(Path::new("/proc").join(pid.to_string()).join(file)).unwrap()
}

fn field(pid: i32, name: &str) -> String {
    let status = proc(pid, "status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_broker_outlives_its_pod_and_is_found_stopped_and_forgotten() {
    let Some(bed) = Bed::new("outlives") else { return };
    assert_eq!(bed.places.observe(None), Default::default());
    let order = bed.order(&["/bin/sleep", "1000"], "root");
    bed.start(&order);
    bed.kill_pod();

    let running = bed.places.observe(Some(&order.prefix)).running.expect("the broker died with the pod");
    assert_eq!((running.record.clone(), running.systemd), (order.record.clone(), false));
    let pid = running.pid;
    for line in proc(pid, "cgroup").lines() {
        assert!(line.ends_with(&format!("/{}", bed.places.cgroup)) || line.ends_with(":/"), "{line}");
    }
    assert_eq!(members(&places_here(&bed.places.cgroup).unwrap()).into_iter().collect::<Vec<_>>(), [pid]);

    // Jobs find a clean process.
    assert_eq!(proc(pid, "oom_score_adj").trim(), "0");
    assert_eq!(proc(pid, "environ"), "NAME=va l$ue\0");
    // 32 and 33 are the C library's own: its posix_spawn leaves them ignored, and programs set them as they need.
    let ignored = u64::from_str_radix(&field(pid, "SigIgn"), 16).unwrap() & 0x7fff_ffff;
    assert_eq!((ignored, field(pid, "SigBlk")), (0, "0".repeat(16)));
    assert_eq!(field(pid, "Umask"), "0022");
    let open = |descriptor: &str| fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).unwrap();
    let log = order.prefix.join("log/broker.log");
    assert_eq!((open("0"), open("1"), open("2")), ("/dev/null".into(), log.clone(), log.clone()));
    assert_eq!(fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), 3);
    assert!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap().ends_with("log"));
    assert_eq!(fs::metadata(&log).unwrap().mode() & 0o777, 0o640);
    let session = proc(pid, "stat").rsplit_once(')').unwrap().1.split_whitespace().nth(3).unwrap().to_owned();
    assert_eq!(session, pid.to_string());
    let limits = proc(pid, "limits");
    let limit = |name: &str| limits.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    // None of the broker's own, neither as a file nor to a program; jobs may have as much as their users say.
    let core: Vec<String> = limit("Max core file size").split_whitespace().skip(4).map(str::to_owned).collect();
    assert_eq!(core, ["1", "unlimited", "bytes"]);
    const SYS_RESOURCE: u32 = 24;
    let capabilities = field(std::process::id().cast_signed(), "CapEff");
    if u64::from_str_radix(&capabilities, 16).unwrap() >> SYS_RESOURCE & 1 == 1 {
        assert!(limit("Max open files").contains("1048576 "), "{limits}");
        assert!(limit("Max locked memory").contains("unlimited"), "{limits}");
    } else {
        let warned = fs::read_to_string(&log).unwrap();
        assert!(warned.contains("can't raise the limits "), "{warned}");
    }
    let shares = mounts(&proc(pid, "mountinfo"))
        .into_iter()
        .find(|mount| mount.options.as_ref().is_some_and(|options| options.contains(&"cpu".to_owned())))
        .map(|mount| mount.point.join(bed.places.cgroup.split('/').next().unwrap()).join("cpu.shares"));
    if let Some(shares) = shares {
        assert_eq!(fs::read_to_string(shares).unwrap().trim(), "2560");
    }

    // A second start finds the first.
    assert_eq!(bed.places.start(&bed.order(&["/bin/sleep", "2000"], "root")).unwrap(), running);
    let refused = bed.places.forget().unwrap_err();
    assert!(refused.message.contains("stop it first"), "{refused}");

    bed.stop();
    assert!(!Path::new("/proc").join(pid.to_string()).exists() || field(pid, "State").starts_with('Z'));
    assert_eq!(bed.places.observe(None), Default::default());
    bed.places.forget().unwrap();
    assert_eq!(bed.cgroups_that_are_there(), Vec::<PathBuf>::new());
    assert!(!bed.places.run_dir.exists());
    bed.places.forget().unwrap();
}

#[test]
fn two_concurrent_starts_make_one_broker() {
    let Some(bed) = Bed::new("twice") else { return };
    let order = bed.order(&["/bin/sleep", "1000"], "root");
    let starts: Vec<Child> = (0..4).map(|_| bed.start_from_pod(&order)).collect();
    for start in starts {
        let output = start.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    assert_eq!(members(&places_here(&bed.places.cgroup).unwrap()).len(), 1);
}

#[test]
fn a_stage_that_is_killed_at_any_moment_leaves_one_broker_that_is_found_or_none() {
    let Some(bed) = Bed::new("killed") else { return };
    let order = bed.order(&["/bin/sleep", "1000"], "root");
    for delay in 0..12 {
        let mut stage = bed.start_from_pod(&order);
        std::thread::sleep(Duration::from_millis(delay * 3));
        let _ = stage.kill();
        let _ = stage.wait();
        bed.kill_pod();
        bed.start(&order);
        let running = bed.places.observe(None).running.unwrap();
        let cgroup = members(&places_here(&bed.places.cgroup).unwrap());
        assert_eq!(cgroup.into_iter().collect::<Vec<_>>(), [running.pid], "after {delay}");
        bed.stop();
    }
}

#[test]
fn a_broker_runs_as_its_user_in_directories_of_its_own() {
    let Some(bed) = Bed::new("user") else { return };
    bed.start(&bed.order(&["/bin/sleep", "1000"], "54321"));
    let pid = bed.places.observe(None).running.unwrap().pid;
    assert_eq!(field(pid, "Uid"), "54321 54321 54321 54321");
    assert_eq!((field(pid, "Gid"), field(pid, "Groups")), ("54321 54321 54321 54321".to_owned(), String::new()));
    for directory in [&bed.places.socket_dir, &bed.directory.path().join("prefix").join("run")] {
        let made = fs::metadata(directory).unwrap();
        assert_eq!((made.uid(), made.mode() & 0o777), (54321, 0o755), "{}", directory.display());
    }
}

#[test]
fn what_jobs_of_a_killed_broker_left_in_its_rundir_is_gone_at_the_next_start() {
    let Some(bed) = Bed::new("jobtmp") else { return };
    let order = bed.order(&["/bin/sleep", "1000"], "54321");
    bed.start(&order);
    let left = bed.directory.path().join("prefix").join("run/jobtmp-0-f1");
    fs::create_dir_all(&left).unwrap();
    bed.stop();
    bed.start(&order);
    assert!(!left.exists());
}

/// A directory in the place of the socket would end each start of Flux.
#[test]
fn what_another_user_left_at_the_socket_keeps_no_broker_from_starting() {
    let Some(bed) = Bed::new("left") else { return };
    let directory = &bed.places.socket_dir;
    fs::create_dir_all(directory.join("local/x")).unwrap();
    std::os::unix::fs::chown(directory, Some(1234), None).unwrap();
    bed.start(&bed.order(&["/bin/sleep", "1000"], "54321"));
    assert_eq!((fs::metadata(directory).unwrap().uid(), fs::read_dir(directory).unwrap().count()), (54321, 0));
}

#[test]
fn processes_that_fork_faster_than_they_are_listed_keep_no_broker_from_being_stopped() {
    let Some(bed) = Bed::new("chains") else { return };
    // Each has two children and ends, or waits for a moment if there are 100 of them.
    let many = "if (!fork) { while (1) { my $one = fork; next if defined $one && !$one; my $two = fork; next if defined $two && !$two; \
                exit if $one || $two; select(undef, undef, undef, 0.0005) } } sleep 1000";
    let limited = ["/bin/sh", "-c", "ulimit -p 100; exec perl -e \"$0\"", many];
    bed.start(&bed.order(&limited, "54321"));
    std::thread::sleep(Duration::from_millis(200));
    bed.stop();
    bed.places.forget().unwrap();
    assert_eq!(bed.cgroups_that_are_there(), Vec::<PathBuf>::new());
}

#[test]
fn what_the_last_brokers_user_mounted_over_its_socket_keeps_no_broker_from_starting() {
    if skips_without([Need::Fuse]) {
        return;
    }
    let Some(bed) = Bed::new("covered") else { return };
    let directory = &bed.places.socket_dir;
    fs::create_dir_all(directory).unwrap();
    // As fusermount3(1) mounts for user 1234; nobody answers.
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
    let options = format!("fd={fd},rootmode=40000,user_id=1234,group_id=1234,allow_other");
    let flags = nix::mount::MsFlags::MS_NOSUID;
    nix::mount::mount(Some("theirs"), directory, Some("fuse"), flags, Some(options.as_str())).unwrap();
    let unblock = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(20));
        drop(device);
    });
    bed.start(&bed.order(&["/bin/sleep", "1000"], "1234"));
    assert_eq!(fs::metadata(directory).unwrap().uid(), 1234);
    assert!(!unblock.is_finished(), "the start waited for the user's file system");
}

#[test]
fn a_start_that_fails_says_why() {
    let Some(bed) = Bed::new("fails") else { return };
    fs::create_dir_all(bed.directory.path().join("prefix")).unwrap();
    let refusal = |order: &LaunchOrder| bed.places.start(order).unwrap_err();
    let absent = refusal(&bed.order(&["/nowhere/flux", "broker"], "root"));
    assert_eq!(absent.message, "can't run /nowhere/flux: No such file or directory (os error 2)");
    assert_eq!(bed.places.observe(None), Default::default());
    let nobody = refusal(&bed.order(&["/bin/sleep", "1"], "nobody-of-this-name"));
    assert!(nobody.message.contains("no user \"nobody-of-this-name\"") && !nobody.transient, "{nobody}");
}

#[test]
fn a_dead_broker_leaves_its_reason_and_does_not_block_the_next_one() {
    let Some(bed) = Bed::new("died") else { return };
    let order = bed.order(&["/bin/sh", "-c", "sleep 1000 & sleep 1001"], "root");
    bed.start(&order);
    let broker = bed.places.observe(None).running.unwrap();
    let cgroup = places_here(&bed.places.cgroup).unwrap();
    until("its children", || members(&cgroup).len() == 3);
    let mut log = fs::OpenOptions::new().append(true).open(order.prefix.join("log/broker.log")).unwrap();
    writeln!(log, "<2>broker.crit[3]: it is over\n<6>broker.info[3]: bye").unwrap();
    let process = Identity::of(broker.pid).unwrap();
    process.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(process.wait_gone(Duration::from_secs(10)));
    let view = bed.places.observe(None);
    assert_eq!((view.running, view.died.as_deref()), (None, Some("broker.crit[3]: it is over")));
    bed.start(&bed.order(&["/bin/sleep", "1000"], "root"));
    assert_eq!(members(&cgroup).len(), 1);
}

/// A copy of sleep(1) by the name of flux-shell(1).
fn false_shell(bed: &Bed) -> PathBuf {
    let program = bed.directory.path().join("flux-shell");
    fs::copy("/bin/sleep", &program).unwrap();
    program
}

#[test]
fn a_job_is_what_runs_in_the_brokers_cgroup_and_is_found_after_the_brokers_death() {
    let Some(bed) = Bed::new("jobs") else { return };
    let shell = false_shell(&bed);
    let mut stranger = Command::new(&shell).arg("1000").spawn().unwrap();
    assert_eq!(bed.places.observe(None).job_shells, 0, "before there is a broker");

    let script = format!("{} 1000 & sleep 1001", shell.display());
    bed.start(&bed.order(&["/bin/sh", "-c", &script], "root"));
    until("its job", || bed.places.observe(None).job_shells == 1);
    let jobs = bed.places.members().unwrap();
    assert!(!jobs.contains(&stranger.id().cast_signed()) && jobs.len() == 3, "{jobs:?}");

    let broker = Identity::of(bed.places.observe(None).running.unwrap().pid).unwrap();
    broker.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(broker.wait_gone(Duration::from_secs(10)));
    assert_eq!(bed.places.observe(None).job_shells, 1, "the broker is dead and its job is not");
    // With its record, too.
    fs::remove_dir_all(&bed.places.run_dir).unwrap();
    assert_eq!(bed.places.observe(None).job_shells, 1);
    bed.places.forget().unwrap();
    assert_eq!(bed.places.observe(None).job_shells, 0);
    assert_eq!(stranger.try_wait().unwrap(), None, "it was none of ours to end");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

/// A lead as it is started on a host, with a job's process beside it, and the roster that its host was configured by.
fn lead(bed: &Bed) -> LaunchOrder {
    let prefix = bed.directory.path().join("prefix");
    let settings = serde_json::json!({
        "maxSize": 4, "topology": "kary:256", "port": 8050, "digest": "0123456789abcdef", "certificate": "",
        "runAs": "root", "config": "", "cpuWeight": 100, "checkpointPeriod": "1m",
    });
    let member = serde_json::json!({ "node": "node1", "uid": "uid-node1", "address": "10.0.0.1" });
    let roster = serde_json::json!({
        "format": 1, "instanceUID": "instance", "instanceID": "id", "established": true, "epoch": 3, "revision": 9,
        "settings": settings, "ranks": { "0": { "brokerName": "node1", "member": member, "revision": 1 } },
    });
    fs::create_dir_all(prefix.join("etc")).unwrap();
    fs::write(prefix.join("etc/roster.json"), roster.to_string()).unwrap();
    let bin = prefix.join("envs/0123456789abcdef/bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join("flux"), "#!/bin/sh\nsleep 1000 & wait\n").unwrap();
    fs::set_permissions(bin.join("flux"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let identity = BrokerIdentity {
        prefix: &prefix,
        rank: 0,
        broker_name: "node1",
        node_uid: "uid-node1",
        instance_uid: "instance",
        instance_id: "id",
        epoch: 3,
        loads_live_configuration: false,
    };
    let mut order = launch(&serde_json::from_value(settings).unwrap(), &identity);
    for word in order.argv.iter_mut().filter(|word| word.starts_with("-Slocal-uri=")) {
        *word = format!("-Slocal-uri=local://{}/local", bed.places.socket_dir.display());
    }
    order
}

/// A lead's broker that runs a job: how it was started, where both are, and what is seen of it.
fn start_lead(bed: &Bed) -> (LaunchOrder, Vec<Place>, RunningBroker) {
    let order = lead(bed);
    bed.start(&order);
    let cgroup = places_here(&bed.places.cgroup).unwrap();
    // A job that was only just forked has the broker's command line still, and would be taken for the broker.
    let line = |pid: &i32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let lines = || members(&cgroup).iter().map(line).collect::<BTreeSet<_>>();
    until("its job", || members(&cgroup).len() == 2 && lines().len() == 2);
    let before = bed.places.observe(None).running.unwrap();
    (order, cgroup, before)
}

#[test]
fn a_broker_whose_record_was_removed_is_found_again_and_stopped() {
    let Some(bed) = Bed::new("unrecorded") else { return };
    let (order, cgroup, before) = start_lead(&bed);

    fs::remove_dir_all(&bed.places.run_dir).unwrap();
    let found = bed.places.observe(None).running.unwrap();
    assert_eq!((found.pid, found.start_time), (before.pid, before.start_time));
    // Its socket is the test's own, so this version would start it in another way.
    assert_eq!(found.record, LaunchRecord { launch: String::new(), ..order.record.clone() });
    assert!(bed.places.run_dir.join("broker.json").exists());
    assert_eq!(bed.places.start(&order).unwrap(), found);
    assert!(bed.places.forget().unwrap_err().message.contains("still runs"));

    fs::remove_dir_all(&bed.places.run_dir).unwrap();
    bed.stop();
    assert!(members(&cgroup).is_empty());
    assert_eq!(bed.places.observe(None), Default::default());
}

#[test]
fn a_broker_of_an_unknown_instance_is_named_and_left_alone() {
    let Some(bed) = Bed::new("unknown") else { return };
    let (order, cgroup, before) = start_lead(&bed);

    fs::remove_dir_all(&bed.places.run_dir).unwrap();
    fs::remove_dir_all(order.prefix.join("etc")).unwrap();
    let view = bed.places.observe(None);
    assert_eq!((view.running, view.unknown.unwrap().pid), (None, before.pid));
    for refused in [
        bed.places.start(&order).unwrap_err(),
        bed.places.stop(&StopOrder { grace_secs: 0 }).unwrap_err(),
        bed.places.forget().unwrap_err(),
    ] {
        assert!(refused.message.contains(&format!("kill {}`", before.pid)), "{refused}");
        assert!(refused.message.contains("roster.json"), "{refused}");
    }
    assert_eq!(members(&cgroup).len(), 2);

    // The launcher ends as requested, and leaves no broker behind.
    let broker = Identity::of(before.pid).unwrap();
    broker.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(broker.wait_gone(Duration::from_secs(10)));
    assert_eq!((bed.places.observe(None), members(&cgroup).len()), (Default::default(), 1));
    bed.places.forget().unwrap();
    assert!(members(&cgroup).is_empty() && bed.cgroups_that_are_there().is_empty());
}
