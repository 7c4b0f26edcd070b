//! What nodes ask of an API server, against what the manifest's roles grant.

use api::{ANNOTATION_PROTECTS, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES, DAEMONSET, FluxInstance, FluxNode, INSTANCE};
use apiserver::Call;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

use crate::{
    harness::Cluster,
    manifest_rights::{Right, granted},
};

impl Right {
    /// It permits the call. A right with a name permits no call without one, such as a list.
    fn permits(&self, call: &Call) -> bool {
        (&self.group, &self.resource, &self.verb) == (&call.group, &call.resource, &call.verb)
            && (self.name.is_empty() || self.name == call.name)
    }
}

/// Everything that makes a node ask: a first start, a job, a changed spec, a planner that restarts, a node that goes for
/// good, and the end of the instance.
#[test]
fn the_roles_grant_what_the_nodes_ask_for_and_no_more() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let job = cluster.job(&["-N1"]);
    cluster.until("the annotation of the node with the job", || {
        let nodes = cluster.wait(Api::<Node>::all(cluster.client()).list(&ListParams::default())).unwrap();
        nodes.iter().any(|node| node.annotations().contains_key(ANNOTATION_PROTECTS)).then_some(())
    });
    job.finish();
    cluster.patch(json!({"spec": {"ranks": {"retain": "1s"}, "size": 2}}));
    cluster.until("two members", || (cluster.instance().status?.size == 2).then_some(()));
    let denied = || Some(cluster.instance().status?.holding("ScaleDenied")?.message.clone());
    // An Event that comes again, with another one in between, is patched. A planner that is new by then knows of none before.
    cluster.until("an Event that comes again", || {
        for size in [1000, 2000] {
            cluster.patch(json!({"spec": {"size": size}}));
            let is_told = |message: String| message.contains(&size.to_string()).then_some(());
            cluster.until("the size denied", || denied().and_then(is_told));
        }
        cluster.calls().iter().any(|call| call.resource == "events" && call.verb == "patch").then_some(())
    });
    cluster.patch(json!({"spec": {"size": 2}}));
    cluster.until("the size granted", || denied().is_none().then_some(()));
    // The same bundle from elsewhere, so nothing restarts.
    cluster.patch(json!({"spec": {"packages": {"bundle": {"url": "file:///srv/another.tar.gz"}}}}));
    cluster.until("another source", || {
        let published = cluster.wait(cluster.api::<ConfigMap>().get(CONFIGMAP_PACKAGES)).unwrap();
        published.data?.values().any(|text| text.contains("another.tar.gz")).then_some(())
    });
    cluster.must(&["agent", &cluster.planner(), "restart"]);
    let other = cluster.until("a node without a rank", || cluster.nodes().into_iter().find(|node| node.rank.is_none()));
    cluster.must(&["remove-node", &other.name]);
    cluster.until("the end of its FluxNode", || {
        let found = cluster.wait(cluster.api::<FluxNode>().get_opt(&other.name)).unwrap();
        found.is_none().then_some(())
    });
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until_deleted();
    cluster.until("the end of what was published", || {
        cluster.wait(cluster.api::<ConfigMap>().get_opt(CONFIGMAP_BROKER)).unwrap().is_none().then_some(())
    });

    let (mut granted, calls) = (granted(), cluster.calls());
    // An agent asks for the DaemonSet that its pod is of; here all are of the one for workers.
    granted.retain(|right| right.resource != "daemonsets" || right.name == DAEMONSET);
    let refused: Vec<_> = calls.iter().filter(|call| !granted.iter().any(|right| right.permits(call))).collect();
    assert!(refused.is_empty(), "the roles do not grant {refused:#?}");
    let unused: Vec<_> = granted.iter().filter(|right| !calls.iter().any(|call| right.permits(call))).collect();
    assert!(unused.is_empty(), "no node has asked for {unused:#?}");
}
