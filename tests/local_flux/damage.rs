//! Damaged files: one of an installed package, and state.json.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::harness::Cluster;
use api::{FluxNode, NodePhase};

#[test]
fn a_flipped_byte_is_reported_and_repaired_while_the_broker_runs() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    let (before, job) = (cluster.brokers(), cluster.job(&["-n1"]));
    let find = "find /opt/flux-distribute/envs/ -type f -name 'libflux-core.so.*'";
    let library = cluster.exec("node1", &["sh", "-c", find]).trim().to_owned();
    let sum = || cluster.exec("node1", &["sha256sum", &library]);
    let whole = sum();
    // Of the padding in ELF's header, so that Flux can be run all the same.
    let flip = format!("printf '\\001' | dd of={library} bs=1 seek=9 conv=notrunc status=none");
    cluster.exec("node1", &["sh", "-c", &flip]);
    assert_ne!(sum(), whole);

    // A new agent reads everything.
    kill(Pid::from_raw(cluster.node("node1").agent_pid.unwrap()), Signal::SIGKILL).unwrap();
    let damage = || cluster.wait(cluster.api::<FluxNode>().get("node1")).unwrap().status?.damage;
    cluster.until("the damage in the status", damage);
    let told = cluster
        .until("the mending in the status", || damage().filter(|words| words.contains("was damaged and mended at")));
    assert!(told.contains("changed ") && told.contains("libflux-core.so"), "{told}");
    assert_eq!(sum(), whole);
    assert_eq!(cluster.brokers(), before);
    job.finish();
}

#[test]
fn a_damaged_state_json_leaves_broker_and_job_alone() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    let (before, job) = (cluster.brokers(), cluster.job(&["-n1"]));
    let state = cluster.root("node1").join("opt/flux-distribute/state.json");
    let whole = std::fs::read(&state).unwrap();
    std::fs::write(&state, "{").unwrap();
    let read_status = || cluster.wait(cluster.api::<FluxNode>().get("node1")).unwrap().status;
    let is_failed = || read_status().filter(|status| status.phase == NodePhase::Failed);
    let status = cluster.until("the damage in the status", is_failed);
    assert!(status.message.is_some_and(|message| message.contains("state.json")));
    std::fs::write(&state, &whole).unwrap();
    cluster.all_online(1);
    assert_eq!(cluster.brokers(), before);
    job.finish();
}
