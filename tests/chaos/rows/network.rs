//! A network that loses packets: some, or all of some nodes.

use std::{thread::sleep, time::Duration};

use super::{DEEP, Row, SELDOM, row};
use crate::{
    packets::Rule,
    scene::{Hit, Scene},
};

/// Longer than tcp_user_timeout, after which Flux gives up a silent node.
const TOO_LONG: Duration = Duration::from_mins(5);

pub fn rows() -> Vec<Row> {
    // A connection that was silent for a minute may count that minute towards tcp_user_timeout when it is silent again soon.
    let cut = |name, inject| Row { takes_outage: true, fresh: true, heals_in: 120, ..row(name, inject) };
    let lost = |name, inject| Row { runs: SELDOM, job_dies: true, heals_in: 180, ..cut(name, inject) };
    vec![
        cut("one node cut off for 60 s", |scene| {
            let node = scene.pick_follower();
            cut_off(scene, &[node], scene.outage)
        }),
        cut("half the nodes cut off for 60 s", |scene| {
            let nodes = half(scene);
            cut_off(scene, &nodes, scene.outage)
        }),
        cut("the lead cut off for 60 s", |scene| cut_off(scene, &[scene.lead()], scene.outage)),
        lost("one node cut off for 5 minutes", |scene| {
            let node = scene.pick_follower();
            cut_off(scene, std::slice::from_ref(&node), TOO_LONG);
            Hit::brokers_of([node])
        }),
        lost("half the nodes cut off for 5 minutes", |scene| {
            let nodes = half(scene);
            cut_off(scene, &nodes, TOO_LONG);
            Hit::brokers_of(nodes)
        }),
        Row {
            shape: &DEEP,
            ..lost("an interior node (kary:2) cut off for 5 minutes", |scene| {
                let rank = scene.pick_rank(true);
                let (node, nodes) = (scene.holder(rank), scene.below(rank));
                cut_off(scene, &[node], TOO_LONG);
                Hit::brokers_of(nodes)
            })
        },
        lost("the lead cut off for 5 minutes", |scene| {
            let nodes = scene.names();
            cut_off(scene, &[scene.lead()], TOO_LONG);
            Hit::brokers_of(nodes)
        }),
        Row {
            runs: SELDOM,
            ..cut("20 % of all packets lost", |scene| {
                let some = [
                    "INPUT",
                    "-i",
                    "eth0",
                    "-m",
                    "statistic",
                    "--mode",
                    "random",
                    "--probability",
                    "0.2",
                    "-j",
                    "DROP",
                ];
                let nodes = scene.names();
                let _rules: Vec<_> = nodes.iter().map(|node| Rule::new(Some(scene.init(node)), &some)).collect();
                sleep(scene.outage);
                Hit::none()
            })
        },
    ]
}

/// Half of all, and not the lead.
fn half(scene: &mut Scene) -> Vec<String> {
    let one = scene.pick_follower();
    loop {
        let other = scene.pick_follower();
        if other != one {
            return vec![one, other];
        }
    }
}

/// Nothing comes to these nodes or from them, not even to each other.
fn cut_off(scene: &Scene, nodes: &[String], outage: Duration) -> Hit {
    let mut rules = Vec::new();
    for node in nodes {
        let init = scene.init(node);
        rules.push(Rule::new(Some(init), &["INPUT", "-i", "eth0", "-j", "DROP"]));
        rules.push(Rule::new(Some(init), &["OUTPUT", "-o", "eth0", "-j", "DROP"]));
    }
    sleep(outage);
    drop(rules);
    Hit::none()
}
