//! A live change that is killed between two of its steps.

use std::{
    collections::BTreeSet,
    process::Stdio,
    thread::sleep,
    time::{Duration, Instant},
};

use super::{Row, row};
use crate::{
    oracle::schedules,
    processes::{self, Kind},
    scene::{Hit, Scene},
};

/// What the lead's agent runs for a join, one after the other.
const STEPS: [&str; 9] = [
    "config reload",
    "module remove sched-fluxion-qmanager",
    "module remove sched-fluxion-feasibility",
    "module remove sched-fluxion-resource",
    "module reload resource",
    "module load sched-fluxion-resource",
    "module load sched-fluxion-feasibility",
    "module load sched-fluxion-qmanager",
    "queue status",
];

/// Promised are ten seconds; this machine does several things at once.
const SCHEDULES_AGAIN: Duration = Duration::from_secs(3 * 10);

pub fn rows() -> Vec<Row> {
    vec![Row {
        runs: u32::try_from(STEPS.len()).unwrap(),
        fresh: true,
        heals_in: 90,
        ..row("live change killed at each of its steps", |scene| {
            let step = STEPS[scene.run as usize % STEPS.len()];
            let lead = scene.lead();
            let known = processes::pids().collect();
            let mut join = scene.cluster.command(&["add-node"]).stdout(Stdio::null()).spawn().unwrap();
            wait_for(scene, &lead, step, &known);
            scene.agents()[&lead].kill();
            let hit = Hit::nobody();
            scene.until("scheduling", SCHEDULES_AGAIN, schedules);
            eprintln!("chaos: killed at {step:?}: scheduling is on after {:.1} s", hit.since.elapsed().as_secs_f64());
            assert!(join.wait().unwrap().success());
            scene.nodes += 1;
            hit
        })
    }]
}

fn wait_for(scene: &Scene, node: &str, step: &str, known: &BTreeSet<i32>) {
    let (program, rest) = step.split_once(' ').unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        let is_it =
            |kind: &Kind| matches!(kind, Kind::Other(command) if command.contains(program) && command.ends_with(rest));
        let found = processes::but(scene.cluster.bridge(), known);
        if found.iter().any(|process| process.node == node && is_it(&process.kind)) {
            return;
        }
        sleep(Duration::from_millis(1));
    }
    panic!("nobody saw `flux {step}` on {node}");
}
