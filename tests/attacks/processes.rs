//! A user runs processes that pass for ours, and brokers crash.

use std::{fs, path::PathBuf};

use api::{FluxInstance, FluxNode, INSTANCE};
use kube::api::{DeleteParams, PostParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use packages::ENVIRONMENT_MARKER;
use serde_json::json;

use crate::{
    attack::{Attack, nothing_gained, owned_or_writable_by_users},
    harness::Cluster,
    locks::{NEXT, put_next_bundle},
};

const ENVIRONMENTS: &str = "opt/flux-distribute/envs";

#[test]
fn an_instance_ends_while_a_user_runs_a_program_called_flux_shell() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let nodes = cluster.nodes();
    let script = include_str!("pretend_job.sh");
    let attacks: Vec<_> = nodes.iter().map(|node| Attack::begin(&cluster, &node.name, script, &[])).collect();

    let (instances, spec) = (cluster.api::<FluxInstance>(), cluster.instance().spec);
    cluster.wait(instances.delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until_deleted();
    assert!(cluster.brokers().is_empty());
    cluster.wait(instances.create(&PostParams::default(), &FluxInstance::new(INSTANCE, spec))).unwrap();
    cluster.all_online(2);
    nothing_gained(&cluster, &before);
    attacks.into_iter().for_each(|attack| drop(attack.end()));
    nothing_gained(&cluster, &before);
}

/// Jobs of Flux delay both; a program that only has a job shell's name does not.
#[test]
fn a_node_joins_and_a_drain_holds_while_a_user_runs_a_program_called_flux_shell() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let script = include_str!("pretend_job.sh");
    let nodes = cluster.nodes();
    let attacks: Vec<_> = nodes.iter().map(|node| Attack::begin(&cluster, &node.name, script, &[])).collect();

    cluster.exec("node1", &["flux", "resource", "drain", "node2"]);
    cluster.must(&["add-node"]);
    cluster.all_online(3);
    let status = ["flux", "resource", "status", "-s", "drain", "--skip-empty", "-no", "{nodelist}"];
    assert_eq!(cluster.exec("node1", &status), "node2");
    cluster.exec("node1", &["flux", "resource", "undrain", "node2"]);
    let free = ["flux", "resource", "list", "-s", "free", "-no", "{nodelist}"];
    cluster.until("all three free", || (cluster.ask("node1", &free)? == "node[1-3]").then_some(()));
    nothing_gained(&cluster, &before);
    attacks.into_iter().for_each(|attack| drop(attack.end()));
    nothing_gained(&cluster, &before);
}

#[test]
fn a_user_can_keep_neither_an_old_nor_a_broken_environment_in_use() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let sha256 = put_next_bundle(&cluster);
    let next = sha256[..16].to_owned();
    let envs = cluster.root("node2").join(ENVIRONMENTS);
    let current = cluster.wait(cluster.api::<FluxNode>().get("node2")).unwrap().status.unwrap().digest.unwrap();
    // One that was in use long ago, and is published no more; and one that is not whole, such as after a disk has lost something.
    const OLD: &str = "0123456789abcdef";
    let marker = fs::read_to_string(envs.join(&current).join(ENVIRONMENT_MARKER)).unwrap();
    fs::create_dir(envs.join(OLD)).unwrap();
    fs::write(envs.join(OLD).join(ENVIRONMENT_MARKER), marker.replace(&current, OLD)).unwrap();
    fs::create_dir_all(envs.join(&next).join("bin")).unwrap();
    let words = ["/opt/flux-distribute/envs", OLD, &next];
    let attack = Attack::begin(&cluster, "node2", include_str!("name_environments.sh"), &words);

    let bundle = json!({ "url": format!("file://{NEXT}"), "sha256": sha256 });
    cluster.patch(json!({ "spec": { "packages": { "bundle": bundle, "keep": 1 } } }));
    cluster.until("the next epoch", || (cluster.instance().status?.epoch == 2).then_some(()));
    cluster.until("the end of the old environment", || (!envs.join(OLD).exists()).then_some(()));
    nothing_gained(&cluster, &before);
    attack.end();
    nothing_gained(&cluster, &before);
}

/// What a new environment brings is tried on the host, by a process without rights: it must be of no user that others can be.
#[test]
fn an_upgrade_completes_while_a_user_kills_every_process_it_may_kill() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let sha256 = put_next_bundle(&cluster);
    let attack = Attack::begin(&cluster, "node2", include_str!("kill_all.sh"), &[]);
    let bundle = json!({ "url": format!("file://{NEXT}"), "sha256": sha256 });
    cluster.patch(json!({ "spec": { "packages": { "bundle": bundle } } }));
    cluster.until("the next epoch", || (cluster.instance().status?.epoch == 2).then_some(()));
    nothing_gained(&cluster, &before);
    let log = fs::read_to_string(cluster.state().join("nodes/node2/agent.log")).unwrap();
    assert!(
        log.contains("trying Flux on this host") && !log.contains("can't tell whether Flux runs on this host"),
        "{log}"
    );
    attack.end();
    nothing_gained(&cluster, &before);
}

/// An unprivileged user can't end a broker, but its crash must give nothing away either.
#[test]
fn a_crashed_broker_leaves_no_core_and_jobs_dump_core_as_their_users_set_it() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let broker = cluster.brokers()["node1"].pid;
    let limits = fs::read_to_string(format!("/proc/{broker}/limits")).unwrap();
    let core: Vec<_> = limits.lines().filter(|line| line.starts_with("Max core file size")).collect();
    assert_eq!(core[0].split_whitespace().skip(4).collect::<Vec<_>>(), ["1", "unlimited", "bytes"]);
    for limit in ["unlimited", "0"] {
        let script = format!("ulimit -c {limit}; flux run sh -c 'ulimit -S -c'");
        assert_eq!(cluster.exec("node1", &["sh", "-c", &script]), limit);
    }

    let log = cluster.root("node1").join("opt/flux-distribute/log");
    assert_eq!(fs::read_link(format!("/proc/{broker}/cwd")).unwrap().file_name(), log.file_name());
    kill(Pid::from_raw(broker), Signal::SIGSEGV).unwrap();
    cluster.until("another broker", || cluster.brokers().get("node1").filter(|new| new.pid != broker).copied());
    let files = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path());
    let cores: Vec<PathBuf> =
        files.filter(|path| path.file_name().unwrap().as_encoded_bytes().starts_with(b"core")).collect();
    assert_eq!(cores, [] as [PathBuf; 0]);
    nothing_gained(&cluster, &before);
}
