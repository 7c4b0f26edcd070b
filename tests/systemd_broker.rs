//! A broker on a host with systemd is a unit of the host.
//!
//! Writes `flux-broker.service` on the machine it runs on, so it asks first: FLUX_DISTRIBUTE_TEST_SYSTEMD=1.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use host::BrokerProcesses;
use host::process::Identity;
use hostapi::{LaunchOrder, LaunchRecord, StopOrder};
use needs::{Need, skips_without};
use nix::sys::signal::Signal;
use stage::launch::{HostPlaces, systemd::Systemd};

const ODD: [&str; 6] = ["a b", "$HOME", "100%h", ";", "say \"x\\y\"", "two\nlines"];

fn places(directory: &Path) -> Option<HostPlaces> {
    if skips_without([Need::Systemd]) {
        return None;
    }
    Some(HostPlaces {
        run_dir: directory.join("run"),
        socket_dir: directory.join("run/broker"),
        cgroup: "unused".to_owned(),
        launcher: PathBuf::from("/nowhere"),
        systemd: Some(Systemd::of(Path::new("/")).expect("systemd does not run here")),
    })
}

fn order(prefix: &Path, script: &str) -> LaunchOrder {
    let mut argv: Vec<String> = ["/bin/sh", "-c", script, "broker"].map(str::to_owned).into();
    argv.extend(ODD.map(str::to_owned));
    LaunchOrder {
        prefix: prefix.to_owned(),
        argv,
        env: [("ODD".to_owned(), "a \"b\" 5% $HOME \\n".to_owned())].into(),
        run_as: "54321".to_owned(),
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

fn until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(Instant::now() < deadline, "never: {what}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_hosts_systemd_keeps_the_broker() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let Some(places) = places(directory.path()) else { return };
    let prefix = directory.path().join("prefix");
    let order_of = |script| order(&prefix, script);
    let systemd = || places.systemd.clone().unwrap();
    let first = order_of("printf '%s|' \"$@\" \"$ODD\"; echo; exec sleep 1000");

    let running = places.start(&first).unwrap();
    assert_eq!((running.systemd, &running.record), (true, &first.record));
    let log = prefix.join("log/broker.log");
    let said = until("its words", || Some(fs::read_to_string(&log).unwrap()).filter(|text| text.ends_with("|\n")));
    let (mark, said) = said.split_once('\n').unwrap();
    assert_eq!(
        mark,
        format!(
            "flux-distribute: starting the broker of epoch {} of instance {}",
            first.record.epoch, first.record.instance_id
        )
    );
    assert_eq!(said, format!("{}|a \"b\" 5% $HOME \\n|\n", ODD.join("|")));
    let proc = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", running.pid)).unwrap();
    assert!(proc("cgroup").contains("/flux.slice/flux-broker.service"), "{}", proc("cgroup"));
    assert_eq!(proc("oom_score_adj").trim(), "0");
    assert!(proc("status").contains("\nUid:\t54321\t54321\t54321\t54321\n"), "{}", proc("status"));
    assert!(proc("status").contains("\nGid:\t54321\t54321\t54321\t54321\n"), "{}", proc("status"));
    assert!(proc("status").contains("\nSigIgn:\t0000000000000000\n"), "{}", proc("status"));

    assert!(proc("limits").lines().any(|line| line.starts_with("Max core file size         1 ")), "{}", proc("limits"));
    assert_eq!(places.members().unwrap().into_iter().collect::<Vec<_>>(), [running.pid]);

    // A second start, of something else even, finds the first.
    assert_eq!(places.start(&order_of("exit 1")).unwrap(), running);
    assert!(places.forget().unwrap_err().message.contains("stop it first"));

    // It is not systemd's to start again.
    Identity::of(running.pid).unwrap().signal(Signal::SIGKILL).unwrap();
    until("its death", || places.observe(None).died);
    assert_eq!(systemd().state().unwrap().active, "failed");
    let again = places.start(&first).unwrap();
    assert_eq!(again.record, first.record);

    // A systemd that does not answer has stopped nothing, and nothing of the unit is taken off.
    let mute =
        || HostPlaces { systemd: Some(Systemd { systemctl: "/bin/false".into(), ..systemd() }), ..places.clone() };
    let stop = StopOrder { grace_secs: 10 };
    assert!(mute().stop(&stop).is_err());
    assert!(mute().forget().is_err());
    fs::remove_file(places.run_dir.join("broker.json")).unwrap();
    assert!(mute().stop(&stop).is_err());
    assert!(mute().forget().is_err());
    assert_eq!(systemd().state().unwrap().main_pid, again.pid);
    assert!(Path::new("/run/systemd/system/flux-broker.service").exists());

    // Without its record it is what the unit's main process says, which here is no broker of ours.
    assert!(places.stop(&stop).unwrap_err().message.contains("its record is gone"));
    Identity::of(again.pid).unwrap().signal(Signal::SIGKILL).unwrap();
    until("its end", || (places.observe(None) == Default::default()).then_some(()));

    // A missing program is reported at once.
    let mut absent = order_of("");
    absent.argv[0] = "/nowhere/flux".to_owned();
    // At once, or a moment after setpriv has been started in its place.
    let said = match places.start(&absent) {
        Err(refused) => refused.message,
        Ok(_) => until("its death", || places.observe(None).died),
    };
    assert!(said.contains("/nowhere/flux"), "{said}");

    // One that ends by itself has died, and is tried again with another order.
    let refused = places.start(&order_of("echo '<2>broker.crit[3]: no'; exit 42"));
    assert!(refused.is_err() || places.observe(None).running.is_none_or(|broker| broker.pid != again.pid));
    let died = until("its death", || places.observe(None).died);
    assert_eq!(died, "broker.crit[3]: no");
    let second = places.start(&order_of("exec sleep 1001")).unwrap();

    // SIGTERM that is not heard does not hold a stop up.
    places.stop(&StopOrder { grace_secs: 5 }).unwrap();
    assert!(Identity::of(second.pid).is_none());
    let deaf = places.start(&order_of("trap '' TERM; echo deaf; while :; do sleep 1000; done")).unwrap();
    until("deafness", || fs::read_to_string(&log).unwrap().contains("deaf\n").then_some(()));
    places.stop(&StopOrder { grace_secs: 1 }).unwrap();
    assert!(Identity::of(deaf.pid).is_none());

    places.forget().unwrap();
    assert!(!Path::new("/run/systemd/system/flux-broker.service").exists());
    assert!(!Path::new("/run/systemd/system/flux.slice.d").exists());
    assert!(!places.run_dir.exists());
    places.forget().unwrap();
}
