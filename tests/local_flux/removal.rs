//! The end of an instance.

use std::{fs, time::Instant};

use api::{FluxInstance, FluxNode, INSTANCE};
use kube::api::{DeleteParams, ListParams, PostParams};

use crate::{harness::Cluster, instance::is_one_instance};

#[test]
fn a_deleted_instance_leaves_clean_hosts_and_can_be_created_again() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let instances = cluster.api::<FluxInstance>();
    let spec = cluster.instance().spec;
    let first = cluster.instance().status.unwrap().instance_id;
    for node in cluster.nodes() {
        assert!(cluster.root(&node.name).join("opt/flux").is_symlink());
    }

    let begin = Instant::now();
    cluster.wait(instances.delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until_deleted();
    eprintln!("measured: {:.1} s from the FluxInstance's deletion to clean hosts", begin.elapsed().as_secs_f64());
    assert!(cluster.brokers().is_empty());
    for node in cluster.nodes() {
        let root = cluster.root(&node.name);
        for path in ["opt/flux-distribute", "opt/flux", "flux-connect.sh"] {
            assert!(fs::symlink_metadata(root.join(path)).is_err(), "{path} is left on {}", node.name);
        }
        let left =
            cluster.exec(&node.name, &["find", "/opt", "/run", "-mindepth", "1", "-not", "-path", "/run/boot-id"]);
        assert_eq!(left, "", "{}", node.name);
        // The test's own question and the node's PID 1 run in cgroups of the node; nothing else of ours does.
        let groups = cluster.exec(&node.name, &["find", "/sys/fs/cgroup", "-name", "flux*"]);
        assert!(!groups.contains("flux"), "{}: {groups}", node.name);
    }

    cluster.wait(instances.create(&PostParams::default(), &FluxInstance::new(INSTANCE, spec))).unwrap();
    cluster.all_online(2);
    is_one_instance(&cluster, 2);
    assert_ne!(cluster.instance().status.unwrap().instance_id, first);
}

#[test]
fn a_deleted_instance_lets_running_jobs_finish_and_starts_no_pending_one() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let spec = cluster.instance().spec;
    ends_in_peace(&cluster);
    // The same agents, another instance.
    let again = FluxInstance::new(INSTANCE, spec);
    cluster.wait(cluster.api::<FluxInstance>().create(&PostParams::default(), &again)).unwrap();
    cluster.all_online(2);
    ends_in_peace(&cluster);
}

/// Else whoever deletes the object makes a host look clean that is not, and its agent may be taken off then.
#[test]
fn a_host_that_is_not_clean_yet_makes_its_deleted_flux_node_again() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let job = cluster.job(&["-N2"]);
    let flux_nodes = cluster.api::<FluxNode>();
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default())).unwrap();
    for node in ["node1", "node2"] {
        let uid = || cluster.wait(flux_nodes.get_opt(node)).unwrap()?.metadata.uid;
        let before = uid();
        cluster.wait(flux_nodes.delete(node, &DeleteParams::default())).unwrap();
        cluster.until("the FluxNode again", || uid().filter(|uid| Some(uid) != before.as_ref()));
    }
    assert_eq!(cluster.brokers().len(), 2);
    job.let_end();
    cluster.until_deleted();
    assert!(cluster.brokers().is_empty());
    for node in cluster.nodes() {
        assert!(!cluster.root(&node.name).join("opt/flux-distribute").exists(), "{}", node.name);
    }
}

#[test]
fn if_the_lead_is_off_a_tree_is_removed_from_its_leaves() {
    // Without the lead nothing shows whether jobs run, so a node waits for the brokers below its own.
    let Some(cluster) = Cluster::up(4, &["--topology", "kary:2"]) else { return };
    let lead = cluster.holder(0);
    cluster.must(&["node", &lead, "power-off"]);
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until("clean hosts but for the one that is off", || {
        let nodes = cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).unwrap();
        nodes.iter().all(|node| node.spec.node_name == lead).then_some(())
    });
    assert!(cluster.brokers().is_empty());
    cluster.must(&["node", &lead, "power-on"]);
    cluster.until_deleted();
    assert!(!cluster.root(&lead).join("opt/flux-distribute").exists());
}

fn ends_in_peace(cluster: &Cluster) {
    let job = cluster.job(&["-N2", "--exclusive"]);
    let pending = cluster.exec("node1", &["flux", "submit", "-N1", "touch", "/root/pending-began"]);
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until("the word that no job is started any more, by both nodes", || {
        let nodes = cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).unwrap();
        let told = |node: &FluxNode| node.status.as_ref()?.message.clone();
        let words = "pending jobs are not started any more, and end with the instance";
        nodes.iter().all(|node| told(node).is_some_and(|told| told.contains(words))).then_some(())
    });
    let later = cluster.exec("node2", &["flux", "submit", "-N1", "touch", "/root/pending-began"]);
    assert_eq!(cluster.brokers().len(), 2);
    job.let_end();
    cluster.until_deleted();
    assert!(cluster.brokers().is_empty());
    for node in ["node1", "node2"] {
        assert!(!cluster.root(node).join("root/pending-began").exists(), "{pending} or {later} ran on {node}");
    }
}
