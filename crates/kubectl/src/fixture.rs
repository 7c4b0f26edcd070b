//! Instances for tests, as the API server would give them.

use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::observed::{DoctorInputs, Observed};
use model::agents::AgentPod;

/// When a doctor looks.
pub(crate) const NOW: &str = "2026-01-01T00:10:00Z";

fn read<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// An agent's pod; `down`: why it does not run.
pub(crate) fn agent(node: &str, down: Option<&str>) -> AgentPod {
    AgentPod {
        name: format!("install-flux-{node}"),
        node: node.to_owned(),
        down: down.map(str::to_owned),
        has_ended: false,
    }
}

/// The planner's Lease.
pub(crate) fn lease(holder: &str, renewed: &str) -> Lease {
    read(json!({"spec": {"holderIdentity": holder, "renewTime": renewed}}))
}

/// What a doctor looks at, if nothing is wrong around the instance.
pub(crate) fn around(observed: Observed) -> DoctorInputs {
    let (agents, count) = (observed.nodes.iter().map(|node| agent(&node.name_any(), None)), observed.nodes.len());
    let counts = json!({
        "currentNumberScheduled": count, "desiredNumberScheduled": count, "numberMisscheduled": 0, "numberReady": count,
    });
    DoctorInputs {
        version: Ok(read(json!({
            "major": "1", "minor": "36", "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "", "buildDate": "",
            "goVersion": "", "compiler": "", "platform": "",
        }))),
        daemonset: Ok(Some(read(json!({"metadata": {}, "status": counts})))),
        control_planes: Ok(None),
        agents: Ok(agents.collect()),
        planner: Ok(Some(lease("install-flux-n1", "2026-01-01T00:09:58.000000Z"))),
        observed: Ok(observed),
    }
}

/// An instance of `count` nodes, all of them online and free, and the first one leads. `instance` and `lead` are added to the status of the
/// FluxInstance and to that of the lead.
pub(crate) fn observed(count: u32, instance: &Value, lead: &Value) -> Observed {
    let message = format!("all {count} nodes are online");
    let mut status = json!({
        "phase": "Running", "reason": "AsExpected", "message": message, "lead": "n1", "epoch": 2, "size": count, "online": count, "maxSize": 64,
    });
    add(&mut status, instance);
    let mut nodes: Vec<Value> = (0..count).map(node).collect();
    add(&mut nodes[0]["status"], &json!({"allocated": "", "jobs": {"running": 0, "pending": 0}}));
    add(&mut nodes[0]["status"], lead);
    Observed {
        instance: read(json!({"metadata": {"name": "flux"}, "spec": {}, "status": status})),
        nodes: nodes.into_iter().map(read).collect(),
        unreadable: Vec::new(),
    }
}

/// Changes the FluxNode of a rank.
pub(crate) fn change(observed: &mut Observed, rank: usize, spec: &Value, status: &Value) {
    let mut node = serde_json::to_value(&observed.nodes[rank]).unwrap();
    add(&mut node["spec"], spec);
    add(&mut node["status"], status);
    observed.nodes[rank] = read(node);
}

fn node(rank: u32) -> Value {
    let facts = json!({
        "resources": {"cores": 8}, "memoryMiB": 16384, "platform": "linux-64", "glibc": "2.36", "bootID": "b", "systemd": true,
        "prefix": "/opt/flux-distribute",
    });
    let name = format!("n{}", rank + 1);
    json!({
        "metadata": {"name": name},
        "spec": {"nodeName": name, "rank": rank, "want": "Run"},
        "status": {"phase": "Online", "facts": facts, "fluxVersion": "0.88.0", "agentVersion": "0.1.0"},
    })
}

/// Merges `new` into `old`; null takes a field away.
fn add(old: &mut Value, new: &Value) {
    for (name, value) in new.as_object().into_iter().flatten() {
        if value.is_null() {
            old.as_object_mut().unwrap().remove(name);
        } else {
            old[name] = value.clone();
        }
    }
}
