//! kill -9 and SIGSTOP.

use std::{
    collections::BTreeSet,
    thread::sleep,
    time::{Duration, Instant},
};

use cluster::lease_rules::LEASE_DURATION;
use nix::sys::signal::Signal;

use super::{DEEP, Row, SELDOM, row};
use crate::{
    processes::{self, Process},
    scene::{Hit, Scene},
};

pub fn rows() -> Vec<Row> {
    // What is stopped for less than tcp_user_timeout is late, and no more.
    let stopped = |name, inject| Row { runs: SELDOM, heals_in: 60, ..row(name, inject) };
    let broker = |name, inject| Row { runs: SELDOM, job_dies: true, heals_in: 60, shape: &DEEP, ..row(name, inject) };
    vec![
        row("kill -9 of an agent", |scene| {
            let node = scene.pick_node();
            scene.agents()[&node].kill();
            Hit::none()
        }),
        row("SIGSTOP of an agent", |scene| {
            let node = scene.pick_node();
            let pid = scene.agents()[&node].pid;
            pause(scene, &[pid], 20)
        }),
        row("kill -9 of all agents", |scene| {
            for agent in scene.agents().values() {
                agent.kill();
                scene.dice.pause(Duration::from_millis(200));
            }
            Hit::none()
        }),
        row("SIGSTOP of all agents", |scene| {
            let pids: Vec<_> = scene.agents().values().map(|agent| agent.pid).collect();
            pause(scene, &pids, 20)
        }),
        row("kill -9 of the planner", |scene| {
            let planner = scene.cluster.planner();
            scene.agents()[&planner].kill();
            Hit::none()
        }),
        // Long enough that another planner has taken over when it continues.
        row("SIGSTOP of the planner", |scene| {
            let planner = scene.cluster.planner();
            let pid = scene.agents()[&planner].pid;
            let pause = scene.dice.time(LEASE_DURATION + Duration::from_secs(3), LEASE_DURATION * 2);
            scene.stop_for(&[pid], pause);
            assert_ne!(scene.cluster.planner(), planner, "no other planner has taken over");
            Hit::none()
        }),
        row("kill -9 of a host stage", |scene| {
            stage(scene).kill();
            Hit::none()
        }),
        // Nothing ever wakes it.
        Row {
            heals_in: 150,
            ..row("SIGSTOP of a host stage", |scene| {
                stage(scene).signal(Signal::SIGSTOP);
                Hit::none()
            })
        },
        broker("kill -9 of a follower's broker", |scene| {
            let leaf = scene.pick_rank(false);
            kill_broker(scene, leaf)
        }),
        stopped("SIGSTOP of a follower's broker", |scene| {
            let rank = scene.dice.pick(&[1, 2, 3]);
            stop_broker(scene, rank)
        }),
        broker("kill -9 of an interior broker (kary:2)", |scene| {
            let rank = scene.pick_rank(true);
            kill_broker(scene, rank)
        }),
        Row {
            shape: &DEEP,
            ..stopped("SIGSTOP of an interior broker (kary:2)", |scene| {
                let rank = scene.pick_rank(true);
                stop_broker(scene, rank)
            })
        },
        broker("kill -9 of the lead's broker", |scene| kill_broker(scene, 0)),
        stopped("SIGSTOP of the lead's broker", |scene| stop_broker(scene, 0)),
    ]
}

fn pause(scene: &mut Scene, pids: &[i32], longest: u64) -> Hit {
    let pause = scene.dice.time(Duration::from_secs(1), Duration::from_secs(longest));
    scene.stop_for(pids, pause);
    Hit::none()
}

/// With it end those below.
fn kill_broker(scene: &mut Scene, rank: u32) -> Hit {
    scene.dice.pause(Duration::from_secs(2));
    let nodes = scene.below(rank);
    let broker = scene.brokers()[&scene.holder(rank)];
    processes::send(broker.pid, Signal::SIGKILL);
    Hit::brokers_of(nodes)
}

fn stop_broker(scene: &mut Scene, rank: u32) -> Hit {
    let pid = scene.brokers()[&scene.holder(rank)].pid;
    let longest = scene.outage.as_secs().max(6);
    let pause = scene.dice.time(Duration::from_secs(5), Duration::from_secs(longest));
    scene.stop_for(&[pid], pause);
    Hit::none()
}

/// A host stage at work: a new agent has some, one after the other. How many of them are seen is luck, as they last for
/// milliseconds.
fn stage(scene: &mut Scene) -> Process {
    let node = scene.pick_node();
    for at_most in [4, 3, 2, 1, 1] {
        scene.agents()[&node].kill();
        let (skipped, end) = (scene.dice.below(at_most), Instant::now() + Duration::from_secs(12));
        let mut seen = BTreeSet::new();
        while Instant::now() < end {
            for stage in processes::stages(scene.cluster.bridge(), &node) {
                seen.insert(stage.pid);
                if seen.len() as u64 > skipped {
                    return stage;
                }
            }
            sleep(Duration::from_millis(1));
        }
    }
    panic!("no host stage came by on {node}");
}
