//! Whole nodes: off, empty, or gone.

use std::{fs, thread::sleep, time::Duration};

use api::Member;

use super::{DEEP, Row, SELDOM, row};
use crate::scene::{Hit, Scene};

pub fn rows() -> Vec<Row> {
    let node = |name, inject| Row { runs: SELDOM, job_dies: true, heals_in: 120, shape: &DEEP, ..row(name, inject) };
    let other = |name, inject| Row { fresh: true, ..node(name, inject) };
    vec![
        node("power cut and reboot of a follower", |scene| {
            let rank = scene.pick_rank(false);
            reboot(scene, rank)
        }),
        node("power cut and reboot of an interior node (kary:2)", |scene| {
            let rank = scene.pick_rank(true);
            reboot(scene, rank)
        }),
        node("power cut and reboot of the lead", |scene| reboot(scene, 0)),
        other("a node reinstalled under the same name", |scene| {
            let rank = scene.pick_rank(false);
            let name = scene.holder(rank);
            let before = scene.cluster.roster().unwrap().ranks[&rank].member.clone().unwrap();
            scene.cluster.must(&["remove-node", &name]);
            scene.dice.pause(Duration::from_secs(5));
            scene.cluster.must(&["add-node"]);
            let hit = Hit::brokers_of([name.clone()]);
            scene.until("another rank", Duration::from_mins(1), |scene| {
                let ranks = scene.cluster.roster().ok_or("no roster")?.ranks;
                // The old machine's is kept for it.
                assert_eq!(ranks[&rank].member.as_ref().map(|member| &member.uid), Some(&before.uid));
                let is_new = |member: &Member| member.node == name && member.uid != before.uid;
                let found = ranks.values().filter_map(|entry| entry.member.as_ref()).filter(|member| is_new(member));
                if found.count() == 1 { Ok(()) } else { Err(format!("{ranks:?}")) }
            });
            hit
        }),
        other("a node removed for ever", |scene| {
            let rank = scene.pick_rank(false);
            let name = scene.holder(rank);
            scene.cluster.must(&["remove-node", &name]);
            scene.nodes -= 1;
            Hit::brokers_of([name])
        }),
        other("the lead's statedir wiped, and put back", |scene| {
            let (lead, all) = (scene.lead(), scene.names());
            let prefix = scene.cluster.root(&lead).join("opt/flux-distribute");
            let (state, aside) = (prefix.join("state"), prefix.join("was-state"));
            scene.cluster.must(&["node", &lead, "power-off"]);
            fs::rename(&state, &aside).unwrap();
            scene.cluster.must(&["node", &lead, "power-on"]);
            let said = scene.until("a word about it", Duration::from_mins(1), |scene| {
                let status = scene.cluster.instance().status.unwrap_or_default();
                let found = status.holding("Degraded").map(|found| found.message.clone()).unwrap_or_default();
                if found.contains("statedir") { Ok(found) } else { Err(format!("Degraded says {found:?}")) }
            });
            assert!(said.contains("put it back"), "{said}");
            // It may try for as long as it likes: no empty queue is ever begun.
            let pause = scene.dice.time(Duration::from_secs(2), Duration::from_secs(15));
            sleep(pause);
            assert!(!scene.brokers().contains_key(&lead) && !state.exists());
            fs::rename(&aside, &state).unwrap();
            Hit::brokers_of(all)
        }),
    ]
}

fn reboot(scene: &mut Scene, rank: u32) -> Hit {
    let nodes = scene.below(rank);
    let name = scene.holder(rank);
    scene.cluster.must(&["node", &name, "power-off"]);
    scene.dice.pause(Duration::from_secs(10));
    scene.cluster.must(&["node", &name, "power-on"]);
    Hit::brokers_of(nodes)
}
