//! An API server that is away, slow, or wrong: nothing that runs on the hosts may depend on it.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

use super::{Row, SELDOM, row};
use crate::{
    packets::Rule,
    processes::send,
    scene::{Hit, Scene},
};

pub fn rows() -> Vec<Row> {
    let outage = |name, inject| Row { takes_outage: true, heals_in: 60, ..row(name, inject) };
    let killed = |name, inject| Row { runs: SELDOM, job_dies: true, ..outage(name, inject) };
    vec![
        outage("API server gone", |scene| {
            let _gone = gone(scene);
            sleep(scene.outage);
            Hit::none()
        }),
        outage("API server slow (5 s a call)", |scene| during(scene, "slow")),
        outage("API server answers 429 and 500", |scene| during(scene, "errors")),
        outage("watches closed", |scene| during(scene, "watches-end")),
        outage("stale lists", |scene| during(scene, "stale-lists")),
        outage("conflicting writes", |scene| during(scene, "conflicts")),
        killed("API server gone, a follower's broker killed", |scene| {
            let _gone = gone(scene);
            scene.dice.pause(Duration::from_secs(5));
            kill_both(scene, true, false)
        }),
        Row {
            job_dies: false,
            ..killed("API server gone, an agent killed", |scene| {
                let _gone = gone(scene);
                scene.dice.pause(Duration::from_secs(5));
                kill_both(scene, false, true)
            })
        },
        killed("API server gone, a node's agent and its broker killed", |scene| {
            let _gone = gone(scene);
            scene.dice.pause(Duration::from_secs(5));
            kill_both(scene, true, true)
        }),
        killed("API server gone, the lead's agent and its broker killed", |scene| {
            let _gone = gone(scene);
            scene.dice.pause(Duration::from_secs(5));
            let lead = scene.lead();
            kill_of(scene, &lead, true, true)
        }),
    ]
}

/// For the nodes; the machine itself still gets there.
fn gone(scene: &mut Scene) -> Rule {
    let record = std::fs::read(scene.cluster.state().join("cluster.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let port = record["api_port"].to_string();
    let from = ["INPUT", "-i", scene.cluster.bridge(), "-p", "tcp", "--dport", &port, "-j"];
    // A machine that is off says nothing, one without the server refuses.
    let what: &[&str] = if scene.dice.coin() { &["DROP"] } else { &["REJECT", "--reject-with", "tcp-reset"] };
    Rule::new(None, &[&from, what].concat())
}

fn during(scene: &mut Scene, fault: &str) -> Hit {
    struct Off<'a>(&'a Scene);
    impl Drop for Off<'_> {
        fn drop(&mut self) {
            self.0.cluster.run(&["api", "none"]);
        }
    }
    scene.cluster.must(&["api", fault]);
    let off = Off(scene);
    sleep(off.0.outage);
    drop(off);
    Hit::none()
}

fn kill_both(scene: &mut Scene, broker: bool, agent: bool) -> Hit {
    let node = scene.pick_follower();
    kill_of(scene, &node, broker, agent)
}

/// They must be back before the API is.
fn kill_of(scene: &mut Scene, node: &str, broker: bool, agent: bool) -> Hit {
    let (old_broker, old_agent) = (scene.brokers()[node], scene.agents()[node].clone());
    let all = scene.names();
    let begin = Instant::now();
    // The agent first, so that no process that remembers anything notices that the broker is gone.
    if agent {
        old_agent.kill();
    }
    if broker {
        send(old_broker.pid, Signal::SIGKILL);
    }
    scene.until("their return without the API", Duration::from_secs(45), |scene| {
        let agent_is_back = !agent || scene.agents().get(node).is_some_and(|now| now.pid != old_agent.pid);
        let broker_is_back = !broker || scene.brokers().get(node).is_some_and(|now| now.pid != old_broker.pid);
        if !agent_is_back || !broker_is_back {
            return Err(format!("agent: {agent_is_back}, broker: {broker_is_back}"));
        }
        let up = scene.ask(&["flux", "resource", "list", "-s", "up", "-no", "{nnodes}"])?;
        if up == scene.nodes.to_string() { Ok(()) } else { Err(format!("the lead says that {up} nodes are up")) }
    });
    eprintln!("chaos: {:.1} s until {node} was back without the API", begin.elapsed().as_secs_f64());
    let left = scene.outage.saturating_sub(begin.elapsed());
    sleep(left);
    let restarted = match (broker, old_broker.rank) {
        (false, _) => Vec::new(),
        (true, 0) => all,
        (true, _) => vec![node.to_owned()],
    };
    Hit::brokers_of(restarted)
}
