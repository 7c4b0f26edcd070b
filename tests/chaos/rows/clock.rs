//! Clocks that are wrong while something with a time limit is under way.

use std::{thread::sleep, time::Duration};

use api::{FluxNode, NodePhase};
use serde_json::json;

use super::{Row, Shape, row};
use crate::scene::Hit;

/// One node's clock is right, some are an hour ahead, some behind.
static OFF: Shape = Shape { nodes: 4, options: &["--clocks-off", "3600"] };

pub fn rows() -> Vec<Row> {
    vec![Row {
        shape: &OFF,
        heals_in: 60,
        ..row("clocks an hour off, the API server's set during a drain", |scene| {
            let last = scene.holder(3);
            // Ten minutes, of which an hour must not be over before seconds are.
            scene.cluster.patch(json!({ "spec": { "size": 3, "drain": { "timeout": "10m" } } }));
            scene.until("the drain", Duration::from_secs(30), |scene| {
                let node = scene.cluster.wait(scene.cluster.api::<FluxNode>().get(&last));
                let phase = node.map_err(|error| error.to_string())?.status.unwrap_or_default().phase;
                if phase == NodePhase::Draining { Ok(()) } else { Err(format!("{phase:?}")) }
            });
            for fault in ["clock-ahead", "none", "clock-ahead", "none"] {
                scene.cluster.must(&["api", fault]);
                scene.dice.pause(Duration::from_secs(3));
                if fault == "none" {
                    // It gives the Lease away: the next planner has another clock.
                    let planner = scene.cluster.planner();
                    scene.cluster.must(&["agent", &planner, "restart"]);
                    // An agent that has begun but not asked yet would take the next fault for the time.
                    let pause = scene.dice.time(Duration::from_secs(2), Duration::from_secs(6));
                    sleep(pause);
                }
            }
            scene.cluster.patch(json!({ "spec": { "size": null, "drain": null } }));
            Hit::none()
        })
    }]
}
