//! A user holds locks.

use std::{fs, io::Write};

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::{
    attack::{Attack, nothing_gained, owned_or_writable_by_users},
    harness::{Cluster, bundle},
};

/// Where the nodes find another package set with the same Flux.
pub const NEXT: &str = "/srv/next.tar.gz";

/// The same bundle with an empty member at its end, so that it has another digest. Its sha256.
pub fn put_next_bundle(cluster: &Cluster) -> String {
    let mut bytes = fs::read(bundle().unwrap()).unwrap();
    let end = flate2::write::GzEncoder::new(&mut bytes, flate2::Compression::fast());
    end.finish().unwrap().flush().unwrap();
    for node in cluster.nodes() {
        fs::write(cluster.root(&node.name).join(NEXT.trim_start_matches('/')), &bytes).unwrap();
    }
    hex::encode(Sha256::digest(&bytes))
}

#[test]
fn an_upgrade_completes_while_a_user_holds_every_lock_within_reach() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let before = owned_or_writable_by_users(&cluster);
    let sha256 = put_next_bundle(&cluster);
    let script = include_str!("hold_locks.sh");
    let attack = Attack::begin(&cluster, "node2", script, &["/opt/flux-distribute", "/run/flux-distribute"]);
    assert!(attack.found.iter().any(|path| path == "/opt/flux-distribute/envs"), "it holds {:?}", attack.found);

    let bundle = json!({ "url": format!("file://{NEXT}"), "sha256": sha256 });
    cluster.patch(json!({ "spec": { "packages": { "bundle": bundle } } }));
    cluster.until("the next epoch", || (cluster.instance().status?.epoch == 2).then_some(()));
    nothing_gained(&cluster, &before);
    attack.end();
    nothing_gained(&cluster, &before);
}
