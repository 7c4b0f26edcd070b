//! A user plants a host's state.

use std::os::unix::fs::chown;

use api::{ANNOTATION_RESTART, INSTANCE};
use serde_json::json;

use crate::{
    attack::{Attack, USER, nothing_gained, owned_or_writable_by_users},
    harness::{Cluster, bundle},
};

/// One of the places where a prefix is looked for: on this host it is in the home of a user.
const PLACE: &str = "/home/kubernetes/flux-distribute";

/// Two nodes whose prefix is only found by its pointer: all other places are looked at first.
fn cluster() -> Option<Cluster> {
    let bundle = bundle()?;
    let file = tempfile::NamedTempFile::new().unwrap();
    let instance = json!({
        "apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": {"prefix": "/srv/flux"},
    });
    std::fs::write(file.path(), instance.to_string()).unwrap();
    let options = ["--instance", file.path().to_str().unwrap(), "--bundle", bundle.to_str().unwrap()];
    Some(Cluster::start(2, &options))
}

#[test]
fn a_state_or_a_pipe_that_a_user_plants_changes_nothing() {
    let Some(cluster) = cluster() else { return };
    let root = cluster.root("node2");
    let (home, precious) = (root.join("home/kubernetes"), root.join("srv/victim/precious"));
    std::fs::create_dir(&home).unwrap();
    let nobody = USER.parse().unwrap();
    chown(&home, Some(nobody), Some(nobody)).unwrap();
    std::fs::create_dir(precious.parent().unwrap()).unwrap();
    std::fs::write(&precious, "theirs").unwrap();

    let attacks = [
        (include_str!("plant_state.sh"), &[PLACE, "/srv/victim"][..], 2),
        (include_str!("plant_pipe.sh"), &[PLACE], 3),
    ];
    for (script, words, epoch) in attacks {
        let attack = Attack::begin(&cluster, "node2", script, words);
        let before = owned_or_writable_by_users(&cluster);
        // Each agent looks at its host again for that.
        cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: format!("for {epoch}")}}}));
        cluster.until("the next epoch", || {
            let status = cluster.instance().status?;
            (status.epoch == epoch && status.online == 2).then_some(())
        });
        nothing_gained(&cluster, &before);
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "theirs");
        attack.end();
        nothing_gained(&cluster, &before);
    }
}
