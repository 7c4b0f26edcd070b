//! Instances for tests, as the API server would give them.

use serde_json::{Value, json};

use crate::observed::Observed;

/// An instance of `count` nodes, all of them online and free, and the first one leads. `instance` and `lead` are added to the status of the
/// FluxInstance and to that of the lead.
pub(crate) fn observed(count: u32, instance: &Value, lead: &Value) -> Observed {
    let message = format!("all {count} nodes are online");
    let mut status = json!({
        "phase": "Running", "message": message, "lead": "n1", "epoch": 2, "size": count, "online": count, "maxSize": 64,
    });
    add(&mut status, instance);
    let mut nodes: Vec<Value> = (0..count).map(node).collect();
    add(&mut nodes[0]["status"], &json!({"allocated": "", "jobs": {"running": 0, "pending": 0}}));
    add(&mut nodes[0]["status"], lead);
    Observed {
        instance: serde_json::from_value(json!({"metadata": {"name": "flux"}, "spec": {}, "status": status})).unwrap(),
        nodes: nodes.into_iter().map(|node| serde_json::from_value(node).unwrap()).collect(),
        unreadable: Vec::new(),
    }
}

/// Changes the FluxNode of a rank.
pub(crate) fn change(observed: &mut Observed, rank: usize, spec: &Value, status: &Value) {
    let mut node = serde_json::to_value(&observed.nodes[rank]).unwrap();
    add(&mut node["spec"], spec);
    add(&mut node["status"], status);
    observed.nodes[rank] = serde_json::from_value(node).unwrap();
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
