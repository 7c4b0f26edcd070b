//! What nodes ask of an API server, against what the manifests' roles grant.

use std::fs;

use api::{ANNOTATION_PROTECTS, CONFIGMAP_BROKER, CONFIGMAP_PACKAGES, DAEMONSET, FluxInstance, FluxNode, INSTANCE};
use apiserver::{Call, SCRAPER};
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{ConfigMap, Node, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;

use crate::{
    harness::Cluster,
    manifest_rights::{Right, granted},
};

const INSTALLER: &str = "deploy/daemonset-installer.yaml";

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
    assert_eq!(cluster.scrape("node1", Some(&format!("user:{SCRAPER}"))).0, 200);
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

    let (mut granted, calls) = (granted(INSTALLER), cluster.calls());
    // An agent asks for the DaemonSet that its pod is of; here all are of the one for workers.
    granted.retain(|right| right.resource != "daemonsets" || right.name == DAEMONSET);
    // Prometheus asks an agent for these, and no agent the API server.
    granted.retain(|right| right.resource != "/metrics");
    let refused: Vec<_> = calls.iter().filter(|call| !granted.iter().any(|right| right.permits(call))).collect();
    assert!(refused.is_empty(), "the roles do not grant {refused:#?}");
    let unused: Vec<_> = granted.iter().filter(|right| !calls.iter().any(|call| right.permits(call))).collect();
    assert!(unused.is_empty(), "no node has asked for {unused:#?}");
}

/// Rights of the bridge that nothing here makes it use: the API server of local mode has no PodGroups; a pod is read after a binding
/// that nobody has answered; the kubelets of local mode can't resize pods, so no node has a placeholder pod (`tests/bridge.rs`); and
/// without `spec.pods.preemptAfter`, no budget is asked.
const UNUSED_HERE: [(&str, &str); 6] = [
    ("podgroups", "get"),
    ("pods", "get"),
    ("pods", "create"),
    ("pods", "delete"),
    ("pods/resize", "patch"),
    ("poddisruptionbudgets", "list"),
];

fn object(version: &str, kind: &str, name: &str, fields: serde_json::Value) -> serde_json::Value {
    let mut object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "default"}});
    let fields = fields.as_object().unwrap().clone();
    object.as_object_mut().unwrap().extend(fields);
    object
}

/// A pod that sleeps, with `claim` as a volume if that is not empty, and owned by the Job with uid `owner` if that is not.
fn pod(name: &str, claim: &str, owner: &str) -> serde_json::Value {
    let container = json!({"name": "c", "image": "none", "command": ["sleep", "infinity"]});
    let volume = json!({"name": "v", "persistentVolumeClaim": {"claimName": claim}});
    let volumes = if claim.is_empty() { json!([]) } else { json!([volume]) };
    let spec =
        json!({"schedulerName": "flux", "restartPolicy": "Never", "containers": [container], "volumes": volumes});
    let mut pod = object("v1", "Pod", name, json!({"spec": spec}));
    if !owner.is_empty() {
        let of = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": owner, "controller": true});
        pod["metadata"]["ownerReferences"] = json!([of]);
    }
    pod
}

fn apply(cluster: &Cluster, objects: &[serde_json::Value]) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text: Vec<_> = objects.iter().map(serde_json::Value::to_string).collect();
    fs::write(file.path(), text.join("\n---\n")).unwrap();
    cluster.must(&["apply", file.path().to_str().unwrap()]);
}

/// Everything that makes the bridge ask: pods that wait, that run and that are cancelled, with and without a Job, and volumes.
#[test]
fn the_bridges_roles_grant_what_the_bridge_asks_for_and_no_more() {
    let Some(cluster) = Cluster::up(4, &["--pods", "--cores", "1"]) else { return };
    let claim = |name, spec| object("v1", "PersistentVolumeClaim", name, json!({"spec": spec}));
    let template = json!({"template": pod("of-job", "", "")["spec"], "completions": 1, "parallelism": 1});
    apply(
        &cluster,
        &[
            json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "late"}, "provisioner": "none",
                "volumeBindingMode": "WaitForFirstConsumer"}),
            json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "disk"},
                "spec": {"hostPath": {"path": "/srv"}}}),
            claim("bound", json!({"volumeName": "disk"})),
            claim("unbound", json!({"storageClassName": "late"})),
            object("batch/v1", "Job", "job", json!({"spec": template})),
        ],
    );
    let jobs = Api::<Job>::namespaced(cluster.client(), "default");
    let job = || cluster.wait(jobs.get("job")).unwrap();
    apply(
        &cluster,
        &[
            pod("alone", "", ""),
            pod("with-disk", "bound", ""),
            pod("without-disk", "unbound", ""),
            pod("of-job", "", &job().uid().unwrap()),
        ],
    );
    let pods = Api::<Pod>::namespaced(cluster.client(), "default");
    let phase = |name| cluster.wait(pods.get_opt(name)).unwrap()?.status?.phase;
    for name in ["alone", "of-job"] {
        cluster.until(&format!("{name} to run"), || (phase(name)? == "Running").then_some(()));
    }
    cluster.exec("node1", &["flux", "cancel", "--all"]);
    cluster.until("the end of the pod", || phase("alone").is_none_or(|phase| phase != "Running").then_some(()));
    cluster.until("a suspended Job", || job().spec?.suspend.filter(|is_suspended| *is_suspended).map(drop));

    let (bridges, calls) = (granted("deploy/pods.yaml"), cluster.calls());
    let granted: Vec<_> = bridges.iter().cloned().chain(granted(INSTALLER)).collect();
    // Everybody may ask what their own token may do, without a role.
    let calls: Vec<_> = calls.into_iter().filter(|call| call.group != "authorization.k8s.io").collect();
    let refused: Vec<_> = calls.iter().filter(|call| !granted.iter().any(|right| right.permits(call))).collect();
    assert!(refused.is_empty(), "the roles do not grant {refused:#?}");
    let is_used = |right: &Right| {
        UNUSED_HERE.contains(&(&right.resource, &right.verb)) || calls.iter().any(|call| right.permits(call))
    };
    let unused: Vec<_> = bridges.iter().filter(|right| !is_used(right)).collect();
    assert!(unused.is_empty(), "the bridge has not asked for {unused:#?}");
}
