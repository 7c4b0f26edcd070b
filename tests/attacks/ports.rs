//! A user takes an agent's ports, and floods them.

use std::{fs, process::Command};

use api::{ANNOTATION_RESTART, FluxNode};
use serde_json::json;

use crate::{
    attack::{Attack, nothing_gained, owned_or_writable_by_users},
    harness::Cluster,
};

const PORTS: [&str; 2] = ["node2:8051", "node2:8052"];

fn agent(cluster: &Cluster) -> i32 {
    cluster.node("node2").agent_pid.unwrap()
}

/// What kubelet runs in the agent's container.
fn is_alive(agent: i32) -> bool {
    let pid = agent.to_string();
    let probe = ["--target", &pid, "--mount", "--root", "/flux-distribute", "probe"];
    Command::new("nsenter").args(probe).status().unwrap().success()
}

#[test]
fn an_agent_whose_ports_a_user_has_taken_says_so_and_goes_on() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let attack = Attack::begin(&cluster, "node2", include_str!("take_ports.sh"), &PORTS);
    assert!(attack.found.is_empty(), "user nobody has {:?}", attack.found);
    cluster.must(&["agent", "node2", "kill"]);

    let message = || cluster.wait(cluster.api::<FluxNode>().get("node2")).unwrap().status?.message;
    let says_both = || message().filter(|said| said.contains(":8051: ") && said.contains(":8052: "));
    cluster.until("the agent's message about both ports", says_both);
    let first = agent(&cluster);
    assert!(is_alive(first));
    nothing_gained(&cluster, &before);
    assert_eq!(agent(&cluster), first, "the agent has ended");

    let took = attack.end();
    assert_eq!(took.len(), 2, "{took:?}");
    cluster.until("the agent to have its ports", || message().is_none().then_some(()));
    assert!(is_alive(first) && agent(&cluster) == first);
    nothing_gained(&cluster, &before);
}

/// The lead's port is free for a moment while an epoch ends.
#[test]
fn an_epoch_waits_while_a_user_has_the_brokers_port() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let lead = cluster.holder(0);
    let attack = Attack::begin(&cluster, &lead, include_str!("take_ports.sh"), &[&format!("{lead}:8050")]);
    cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: "now"}}}));
    let message = || cluster.wait(cluster.api::<FluxNode>().get(&lead)).unwrap().status?.message;
    cluster.until("the agent's message about the port", || {
        message().filter(|said| said.contains("port 8050 of this host is taken by perl"))
    });
    assert_eq!(attack.end().len(), 1);
    cluster.until("the next epoch", || {
        let status = cluster.instance().status?;
        (status.epoch == 2 && status.online == 2).then_some(())
    });
    nothing_gained(&cluster, &before);
}

#[test]
fn an_agents_memory_does_not_grow_whatever_a_user_sends() {
    const MOST_KIB: u64 = 48 << 10;
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let agent = agent(&cluster);
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{agent}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap().trim();
        line.strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
    };
    let first = resident();
    let words = [&["600"], &PORTS[..]].concat();
    let attack = Attack::begin(&cluster, "node2", include_str!("flood.sh"), &words);
    let opened = |line: &String| line.strip_suffix(" connections")?.parse::<u32>().ok();
    assert!(attack.found.iter().find_map(opened).unwrap() > 600, "one port was not reached: {:?}", attack.found);
    let grown = resident().saturating_sub(first);
    eprintln!("measured: an agent of {} MiB grew by {} MiB by {:?}", first >> 10, grown >> 10, attack.found);
    assert!(grown < MOST_KIB, "the agent has grown by {grown} KiB");
    assert!(is_alive(agent));
    nothing_gained(&cluster, &before);
    attack.end();
    nothing_gained(&cluster, &before);
}
