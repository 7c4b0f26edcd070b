//! A stand-in for a broker without Flux: it speaks the local socket's protocol and gives the answers that a test sets.

use std::{ops::Deref, path::Path};

pub use local::stand_in::Service;
use local::stand_in::Socket;
use serde_json::{Value, json};

/// A stand-in broker; it ends when it is dropped.
pub struct StandIn(Socket);

impl Deref for StandIn {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.0
    }
}

impl StandIn {
    /// A broker of rank 0 in a healthy instance of `names.len()` ranks, which listens at `directory`/local.
    pub fn start(directory: &Path, names: &[&str]) -> Self {
        let broker = Self(Socket::listen(&directory.join("local")).unwrap());
        let last = names.len().saturating_sub(1);
        let ranks = if last == 0 { "0".to_owned() } else { format!("0-{last}") };
        for (name, value) in
            [("rank", "0"), ("size", &names.len().to_string()), ("hostlist", &names.join(",")), ("hostname", names[0])]
        {
            broker.attribute(name, value);
        }
        let children: Vec<Value> =
            (1..names.len()).map(|rank| json!({"rank": rank, "status": "full", "duration": 1.0})).collect();
        let r = |ranks: &str| {
            let entries =
                if ranks.is_empty() { json!([]) } else { json!([{"rank": ranks, "children": {"core": "0-3"}}]) };
            json!({"version": 1, "execution": {"R_lite": entries, "nodelist": [""], "starttime": 0.0, "expiration": 0.0}})
        };
        broker.on("state-machine.get", Service::Says(json!({"state": "run", "duration": 1.5})));
        broker.on("state-machine.monitor", Service::Says(json!({"state": 6})));
        let health = json!({"rank": 0, "status": "full", "duration": 1.0, "children": children});
        broker.on("overlay.health", Service::Says(health));
        broker.on("groups.get", Service::Says(json!({"members": ranks})));
        let status = json!({"R": r(&ranks), "drain": {}, "online": ranks, "offline": "", "exclude": "", "torpid": ""});
        broker.on("resource.status", Service::Says(status));
        let scheduler = json!({"all": r(&ranks), "down": r(""), "allocated": r("")});
        broker.on("resource.sched-status", Service::Says(scheduler));
        broker
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        self.path()
    }

    /// Simulates the broker's death: closes all connections and stops listening.
    pub fn die(self) {}
}
