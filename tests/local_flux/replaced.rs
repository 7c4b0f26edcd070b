//! Another machine under the name of one that is cut off, and still runs.

use std::{collections::BTreeSet, fs};

use api::{FluxNode, NodePhase, Rank};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::DeleteParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::{Cluster, Unplugged};

/// uid of the Node that holds `rank` in the roster.
fn holder(cluster: &Cluster, rank: Rank) -> Option<String> {
    cluster.roster().unwrap().ranks.get(&rank)?.member.as_ref().map(|member| member.uid.clone())
}

/// The ranks that the lead's broker misses.
fn missed(cluster: &Cluster) -> Vec<Rank> {
    let lead = cluster.wait(cluster.api::<FluxNode>().get(&cluster.holder(0))).unwrap();
    lead.status.unwrap().offline
}

/// Which machine answers under a rank.
fn answers(cluster: &Cluster, rank: Rank) -> String {
    cluster.exec("node1", &["flux", "exec", "-r", &rank.to_string(), "hostname"])
}

/// Waits until the machine runs a broker whose agent says that it is online under the Node `node`; its rank.
fn joined(cluster: &Cluster, machine: &str, node: &str) -> Rank {
    cluster.until(&format!("{machine} as {node}"), || {
        let broker = *cluster.brokers().get(machine)?;
        let told = cluster.wait(cluster.api::<FluxNode>().get_opt(node)).unwrap()?;
        let status = told.status.filter(|status| status.phase == NodePhase::Online)?;
        (status.adopted?.rank == broker.rank && told.spec.rank == Some(broker.rank)).then_some(broker.rank)
    })
}

#[test]
fn a_replacement_for_a_cut_off_machine_gets_a_rank_of_its_own() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    cluster.patch(json!({"spec": {"ranks": {"retain": "5s"}}}));
    // One that has joined later: its rank has a spare's name, so that it may be anybody's once it is free.
    cluster.must(&["add-node"]);
    cluster.all_online(3);
    let (before, job) = (cluster.brokers(), cluster.job(&["-n1", "--requires=rank:2"]));
    let rank = before["node3"].rank;

    let cut = Unplugged::new(&cluster, "node3");
    let nodes = Api::<Node>::all(cluster.client());
    let old = cluster.wait(nodes.get("node3")).unwrap().metadata.uid.unwrap();
    cluster.wait(nodes.delete("node3", &DeleteParams::default())).unwrap();
    cluster.must(&["add-node", "--registers-as", "node3"]);
    let uid = cluster.wait(nodes.get("node3")).unwrap().metadata.uid.unwrap();
    assert_ne!(uid, old);
    let new_rank = joined(&cluster, "node4", "node3");
    assert_eq!(holder(&cluster, new_rank), Some(uid));
    // Nor does the rank become another's when it is kept for its member no longer: its broker is not out of the overlay yet.
    cluster.until("the end of the old member", || {
        let now = holder(&cluster, rank);
        assert!(now.is_none() || now.as_ref() == Some(&old), "{now:?}");
        now.is_none().then_some(())
    });
    cluster.must(&["add-node"]);
    let next_rank = joined(&cluster, "node5", "node5");
    assert!(!missed(&cluster).contains(&rank), "Flux has given the old broker up, so that its rank was anybody's");
    assert_eq!([rank, new_rank, next_rank].into_iter().collect::<BTreeSet<_>>().len(), 3);
    assert_eq!(cluster.brokers()["node3"], before["node3"]);

    // Its kubelet runs whatever pod is bound to its name, so there are two agents of that name now.
    drop(cut);
    told_of_another(&cluster, 1);
    for (rank, machine) in [(rank, "node3"), (new_rank, "node4"), (next_rank, "node5")] {
        assert_eq!(answers(&cluster, rank), machine);
    }
    let mut others = cluster.brokers();
    assert_eq!(others.remove("node3"), Some(before["node3"]));
    assert!(others.values().all(|broker| broker.rank != rank), "{others:?}");
    job.finish();
    cluster.until("the end of the old broker", || (!cluster.brokers().contains_key("node3")).then_some(()));

    // As its pod is made anew it begins nothing either.
    cluster.must(&["agent", "node3", "restart"]);
    told_of_another(&cluster, 2);
    cluster.must(&["add-node"]);
    joined(&cluster, "node6", "node6");
    assert_eq!(joined(&cluster, "node4", "node3"), new_rank);
    let mut now = cluster.brokers();
    assert!(now.remove("node6").is_some());
    assert_eq!(now, others);
}

/// Waits until the old machine's agents have said so often that the name is another's.
fn told_of_another(cluster: &Cluster, times: usize) {
    let log = cluster.state().join("nodes/node3/agent.log");
    cluster.until("a word of the old machine", || {
        let said = fs::read_to_string(&log).unwrap();
        (said.matches("another machine has this node's name").count() >= times).then_some(())
    });
}

#[test]
fn a_node_that_is_cut_off_starts_no_broker_whose_rank_may_be_another_nodes() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = cluster.brokers();
    let cut = Unplugged::new(&cluster, "node2");
    kill(Pid::from_raw(before["node2"].pid), Signal::SIGKILL).unwrap();
    let log = cluster.state().join("nodes/node2/agent.log");
    let is_said = |words: &str| fs::read_to_string(&log).unwrap().contains(words).then_some(());
    cluster.until("a word on the cut", || is_said("may be cut off"));
    // After as long as it waits for its parent in one go.
    cluster.until("its patience's end", || is_said("waiting for the parent's broker, or for the API server"));
    assert!(!cluster.brokers().contains_key("node2"));
    drop(cut);
    cluster.until("its return", || Some(cluster.brokers().get("node2")?.pid != before["node2"].pid).filter(|is| *is));
    cluster.all_online(2);
    assert_eq!(cluster.brokers()["node1"], before["node1"]);
}
