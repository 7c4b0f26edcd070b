//! Trees deeper than one level.

use std::time::Instant;

use crate::harness::Cluster;

/// Eight nodes in the tree `topology`, in which `parent` returns the parent of a rank; then one with others below it is gone for
/// good.
fn check_that_a_lost_interior_node_strands_no_other(topology: &str, parent: fn(u32) -> u32) {
    let Some(cluster) = Cluster::up(8, &["--topology", topology]) else { return };
    let held: Vec<u32> = cluster.ranks().into_values().flatten().collect();
    assert_eq!(held.len(), 8);
    let followers: Vec<u32> = held.into_iter().filter(|rank| *rank != 0).collect();
    for rank in &followers {
        let told = cluster.exec("node1", &["flux", "overlay", "parentof", &rank.to_string()]);
        assert_eq!(told, parent(*rank).to_string(), "the parent of {rank}");
    }
    let children = |rank: &u32| followers.iter().filter(|other| parent(**other) == *rank).count();
    let lost = *followers.iter().max_by_key(|rank| children(rank)).unwrap();
    assert!(children(&lost) > 0, "{followers:?} is no deep tree");
    let hosts = |node: &str, count: &str| cluster.exec(node, &["flux", "run", "-N", count, "hostname"]).lines().count();
    assert_eq!(hosts("node1", "8"), 8);

    // Where commands are run from then on.
    let name = cluster.holder(lost);
    let asked = if name == "node1" { "node2" } else { "node1" };
    let begin = Instant::now();
    cluster.must(&["remove-node", &name]);
    let up = || -> Option<()> {
        let count = "flux resource list -s up -no {nnodes}";
        let output = cluster.run(&["exec", asked, "--", "sh", "-c", count]);
        (String::from_utf8_lossy(&output.stdout).trim() == "7").then_some(())
    };
    cluster.until("seven nodes that are up", up_and_online(&cluster, up));
    eprintln!(
        "measured: {topology}: {:.1} s from the loss of interior rank {lost} of {followers:?} to all other nodes online",
        begin.elapsed().as_secs_f64()
    );
    assert_eq!(hosts(asked, "7"), 7);
}

/// Both the lead and the nodes' own agents say so.
fn up_and_online(cluster: &Cluster, up: impl Fn() -> Option<()>) -> impl FnMut() -> Option<()> {
    move || {
        up()?;
        let nodes = cluster.nodes();
        (nodes.len() == 7 && nodes.iter().all(crate::harness::NodeStatus::is_online)).then_some(())
    }
}

#[test]
fn kary_2_makes_that_tree_and_a_lost_interior_node_strands_no_other() {
    check_that_a_lost_interior_node_strands_no_other("kary:2", |rank| (rank - 1) / 2);
}

#[test]
fn binomial_makes_that_tree_and_a_lost_interior_node_strands_no_other() {
    // Under itself without its lowest bit.
    check_that_a_lost_interior_node_strands_no_other("binomial", |rank| rank & (rank - 1));
}
