//! A live change that is killed between two of its steps.

use std::{process::Stdio, time::Duration};

use super::{Row, row};
use crate::{
    oracle::schedules,
    scene::{Hit, Scene},
};

/// The bundle's own path.
const FLUX: &str = "/opt/flux/bin/flux";
const HELD: &str = "/held";

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
            hold_at(scene, &lead, step);
            let mut join = scene.cluster.command(&["add-node"]).stdout(Stdio::null()).spawn().unwrap();
            scene.until(step, Duration::from_secs(60), |scene| scene.ask_on(&lead, &["test", "-e", HELD]));
            scene.ask_on(&lead, &["mv", &format!("{FLUX}-itself"), FLUX]).unwrap();
            scene.agents()[&lead].kill();
            let hit = Hit::nobody();
            scene.ask_on(&lead, &["rm", HELD]).unwrap();
            scene.until("scheduling", SCHEDULES_AGAIN, schedules);
            eprintln!("chaos: killed at {step:?}: scheduling is on after {:.1} s", hit.since.elapsed().as_secs_f64());
            assert!(join.wait().unwrap().success());
            scene.nodes += 1;
            hit
        })
    }]
}

/// The step is only as long as a blink: on this node the program waits with it for as long as a file is there.
fn hold_at(scene: &Scene, node: &str, step: &str) {
    let (program, rest) = step.split_once(' ').unwrap();
    let held = format!(
        "#!/bin/sh\ncase \"$*\" in *'{program}'*'{rest}')\n  touch {HELD}\n  while test -e {HELD}; do sleep 0.05; done\nesac\n\
         exec {FLUX}-itself \"$@\"\n"
    );
    let script = format!("mv {FLUX} {FLUX}-itself && printf %s \"$0\" > {FLUX} && chmod 755 {FLUX}");
    scene.ask_on(node, &["sh", "-c", &script, &held]).unwrap();
}
