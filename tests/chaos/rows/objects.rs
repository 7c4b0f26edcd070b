//! Objects deleted by hand.

use std::time::Duration;

use api::{CONFIGMAP_BROKER, CONFIGMAP_ROSTER, FluxNode, LEASE_PLANNER, SECRET_CURVE};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        coordination::v1::Lease,
        core::v1::{ConfigMap, Secret},
    },
};
use kube::{
    Resource, ResourceExt,
    api::{DeleteParams, ListParams},
};

use super::{Row, row};
use crate::scene::{Hit, Scene};

pub fn rows() -> Vec<Row> {
    // A planner without a roster waits at most a minute for nodes that do not report.
    let deleted = |name, inject| Row { heals_in: 60, ..row(name, inject) };
    vec![
        deleted("roster deleted", |scene| {
            let before = scene.cluster.roster().expect("a roster");
            let hit = delete::<ConfigMap>(scene, CONFIGMAP_ROSTER);
            let after = scene
                .until("the roster", Duration::from_mins(1), |scene| scene.cluster.roster().ok_or_else(String::new));
            assert_eq!((after.instance_id, after.epoch), (before.instance_id, before.epoch));
            assert_eq!(after.ranks.len(), before.ranks.len());
            for (rank, entry) in before.ranks {
                assert_eq!(after.ranks[&rank].member, entry.member, "rank {rank}");
                assert_eq!(after.ranks[&rank].resources, entry.resources, "rank {rank}");
            }
            hit
        }),
        deleted("flux-broker deleted", |scene| {
            let hit = delete::<ConfigMap>(scene, CONFIGMAP_BROKER);
            returns::<ConfigMap>(scene, CONFIGMAP_BROKER);
            hit
        }),
        deleted("Secret deleted", |scene| {
            let before = scene.cluster.wait(scene.cluster.api::<Secret>().get(SECRET_CURVE)).unwrap();
            let hit = delete::<Secret>(scene, SECRET_CURVE);
            let after = returns::<Secret>(scene, SECRET_CURVE);
            assert!(after.data == before.data, "another certificate");
            hit
        }),
        deleted("Lease deleted", |scene| {
            let hit = delete::<Lease>(scene, LEASE_PLANNER);
            returns::<Lease>(scene, LEASE_PLANNER);
            hit
        }),
        deleted("FluxNodes deleted", |scene| {
            scene.dice.pause(Duration::from_secs(2));
            let nodes = scene.cluster.api::<FluxNode>();
            let hit = Hit::none();
            scene.cluster.wait(nodes.delete_collection(&DeleteParams::default(), &ListParams::default())).unwrap();
            hit
        }),
        deleted("roster and FluxNodes deleted, planner killed", |scene| {
            let nodes = scene.cluster.api::<FluxNode>();
            let planner = scene.cluster.planner();
            scene.cluster.wait(nodes.delete_collection(&DeleteParams::default(), &ListParams::default())).unwrap();
            let hit = delete::<ConfigMap>(scene, CONFIGMAP_ROSTER);
            scene.agents()[&planner].kill();
            hit
        }),
    ]
}

trait Object:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned
{
}
impl Object for ConfigMap {}
impl Object for Secret {}
impl Object for Lease {}

fn delete<K: Object>(scene: &mut Scene, name: &str) -> Hit {
    scene.dice.pause(Duration::from_secs(2));
    // All nodes may be online again before the object that the fault before has deleted is back.
    let uid = returns::<K>(scene, name).uid();
    let api = scene.cluster.api::<K>();
    let hit = Hit::none();
    scene.cluster.wait(api.delete(name, &DeleteParams::default())).unwrap();
    let now = scene.cluster.wait(api.get_opt(name)).unwrap();
    assert!(now.is_none_or(|now| now.uid() != uid));
    hit
}

fn returns<K: Object>(scene: &Scene, name: &str) -> K {
    let api = scene.cluster.api::<K>();
    scene.until(name, Duration::from_mins(1), |scene| {
        scene.cluster.wait(api.get_opt(name)).map_err(|error| error.to_string())?.ok_or_else(|| "not there".to_owned())
    })
}
