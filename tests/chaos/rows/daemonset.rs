//! Agents that come and go in order, and agents that are too old.

use std::{thread::sleep, time::Duration};

use api::{CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxNode};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use super::{Row, row};
use crate::scene::{Hit, Scene};

pub fn rows() -> Vec<Row> {
    vec![
        row("rolling restart of all agents", |scene| {
            for node in scene.names() {
                scene.cluster.must(&["agent", &node, "restart"]);
                scene.dice.pause(Duration::from_secs(3));
            }
            Hit::none()
        }),
        Row {
            heals_in: 60,
            ..row("agents older than the roster's format", |scene| {
                let ours = roster(scene);
                let newer = of_another_format(&ours);
                set_roster(scene, &newer);
                scene.dice.pause(Duration::from_secs(3));
                // One that comes to it, and those that are there.
                let node = scene.pick_node();
                scene.agents()[&node].kill();
                scene.until("a word about it", Duration::from_mins(1), |scene| {
                    let nodes = scene.cluster.api::<FluxNode>();
                    let nodes =
                        scene.cluster.wait(nodes.list(&ListParams::default())).map_err(|error| error.to_string())?;
                    let said = |node: &FluxNode| node.status.as_ref().and_then(|status| status.message.clone());
                    let said: Vec<_> = nodes.iter().map(|node| said(node).unwrap_or_default()).collect();
                    let status = scene.cluster.instance().status.unwrap_or_default();
                    let degraded = status.holding("Degraded");
                    let is_newer = degraded
                        .is_some_and(|found| found.reason == "NewerRoster" && found.message.contains("format 99"));
                    // Those that were there have no reason to read the roster again.
                    let is_said = is_newer && said.iter().any(|said| said.contains("format 99"));
                    if is_said { Ok(()) } else { Err(format!("{said:?}, {degraded:?}")) }
                });
                sleep(Duration::from_secs(2));
                assert_eq!(roster(scene), newer, "an older planner overwrote a roster that it can't read");
                set_roster(scene, &ours);
                Hit::none()
            })
        },
    ]
}

/// As a newer version would write it: another format, and another shape.
fn of_another_format(text: &str) -> String {
    let mut roster: Value = serde_json::from_str(text).unwrap();
    let ranks = roster["ranks"].take();
    roster["format"] = json!(99);
    roster["table"] = ranks;
    roster.to_string()
}

fn roster(scene: &Scene) -> String {
    let map = scene.cluster.wait(scene.cluster.api::<ConfigMap>().get(CONFIGMAP_ROSTER)).unwrap();
    map.data.unwrap().remove(CONFIGMAP_ROSTER_KEY).unwrap()
}

fn set_roster(scene: &Scene, text: &str) {
    let patch = Patch::Merge(json!({ "data": { CONFIGMAP_ROSTER_KEY: text } }));
    let maps = scene.cluster.api::<ConfigMap>();
    scene.cluster.wait(maps.patch(CONFIGMAP_ROSTER, &PatchParams::default(), &patch)).unwrap();
}
