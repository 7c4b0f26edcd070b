//! What is lost, killed or changed, and what must not notice.

use std::{collections::BTreeMap, fs, time::Instant};

use api::{CONFIGMAP_ROSTER, Declared, FluxNode, Rank, Roster, SECRET_CURVE};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Secret};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::Cluster;

#[test]
fn a_node_that_joins_later_changes_no_rank_and_restarts_no_broker() {
    let Some(cluster) = Cluster::up(4, &[]) else { return };
    let job = cluster.job(&["-N4", "-n4"]);
    let (brokers, ranks) = (cluster.brokers(), cluster.ranks());
    let begin = Instant::now();
    cluster.must(&["add-node"]);
    cluster.all_online(5);
    eprintln!("measured: {:.1} s from the new node's boot to Online", begin.elapsed().as_secs_f64());
    let (mut brokers_now, mut ranks_now) = (cluster.brokers(), cluster.ranks());
    assert!(brokers_now.remove("node5").is_some());
    ranks_now.remove("node5");
    assert_eq!((brokers_now, ranks_now), (brokers, ranks));
    job.finish();
    let said = cluster.exec("node5", &["flux", "run", "-N1", "--requires=rank:4", "hostname"]);
    assert_eq!(said, "node5");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N5", "hostname"]).lines().count(), 5);
}

#[test]
fn killed_agents_end_no_broker_and_no_job() {
    let Some(cluster) = Cluster::up(4, &[]) else { return };
    let job = cluster.job(&["-N4", "-n4"]);
    let brokers = cluster.brokers();
    assert_eq!(brokers.len(), 4);

    cluster.must(&["agent", "node2", "kill"]);
    cluster.until("another agent on node2", || (cluster.node("node2").restarts > 0).then_some(()));
    cluster.all_online(4);
    assert_eq!(cluster.brokers(), brokers);

    kill_agents(&cluster, &["node1", "node2", "node3", "node4"]);
    cluster.all_online(4);
    assert_eq!(cluster.brokers(), brokers);

    // In the middle of a join.
    let mut joining = cluster.command(&["add-node"]).stdout(std::process::Stdio::null()).spawn().unwrap();
    cluster.until("the new node's agent", || {
        cluster.nodes().iter().any(|node| node.name == "node5" && node.agent_pid.is_some()).then_some(())
    });
    kill_agents(&cluster, &["node1", "node2", "node3", "node4", "node5"]);
    assert!(joining.wait().unwrap().success());
    cluster.all_online(5);
    let mut now = cluster.brokers();
    now.remove("node5");
    assert_eq!(now, brokers);
    job.finish();
}

/// All at once; returns when each has been started again.
fn kill_agents(cluster: &Cluster, names: &[&str]) {
    let before: BTreeMap<_, _> = cluster.nodes().into_iter().map(|node| (node.name, node.restarts)).collect();
    let killers: Vec<_> = names.iter().map(|name| cluster.command(&["agent", name, "kill"]).spawn().unwrap()).collect();
    for mut killer in killers {
        assert!(killer.wait().unwrap().success());
    }
    cluster.until("the agents' restarts", || {
        let nodes = cluster.nodes();
        let mut killed = nodes.iter().filter(|node| names.contains(&node.name.as_str()));
        killed.all(|node| node.restarts > before[&node.name] && node.agent_pid.is_some()).then_some(())
    });
}

#[test]
fn a_killed_broker_and_a_killed_planner_are_replaced_within_seconds() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let follower = cluster.holder(1);
    let killed = cluster.brokers()[&follower];
    let begin = Instant::now();
    kill(Pid::from_raw(killed.pid), Signal::SIGKILL).unwrap();
    let overlay = "flux overlay errors; flux resource list -s up -no {nnodes}";
    cluster.until("the killed broker's successor", || {
        let successor = cluster.brokers().get(&follower).is_some_and(|now| now.pid != killed.pid);
        let up = || cluster.exec("node1", &["sh", "-c", overlay]).lines().last() == Some("3");
        (successor && cluster.node(&follower).is_online() && up()).then_some(())
    });
    let back = begin.elapsed().as_secs_f64();
    eprintln!("measured: {back:.2} s from kill -9 of a follower's broker to back online");
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N3", "hostname"]).lines().count(), 3);

    let planner = cluster.planner();
    let brokers = cluster.brokers();
    let begin = Instant::now();
    cluster.must(&["agent", &planner, "kill"]);
    cluster.must(&["add-node"]);
    cluster.until("the new node", || cluster.nodes().iter().any(|n| n.name == "node4" && n.is_online()).then_some(()));
    let online = begin.elapsed().as_secs_f64();
    eprintln!("measured: {online:.2} s from kill -9 of the planner, then a new node, to Online");
    cluster.all_online(4);
    let mut now = cluster.brokers();
    now.remove("node4");
    assert_eq!(now, brokers);
}

#[test]
fn a_job_for_which_flux_has_stored_cores_and_told_nobody_runs_after_a_restart() {
    for pods in [&[][..], &["--pods"]] {
        let Some(cluster) = Cluster::up(1, pods) else { return };
        let flux = |words: &[&str]| cluster.exec("node1", &[&["flux"], words].concat());
        let submit = |words: &[&str]| flux(&[&["submit", "-N1", "--exclusive"], words].concat());
        // The others wait for this one, which the broker's end ends.
        submit(&["sleep", "600"]);
        let jobs = [(); 3].map(|()| submit(&["true"]));
        for job in &jobs[..2] {
            let directory = flux(&["job", "id", "--to=kvs", job]);
            let r = flux(&["R", "encode", "-r0", "-c0", "-H", "node1"]);
            flux(&["kvs", "put", "--sync", &format!("{directory}.R={r}")]);
        }
        kill(Pid::from_raw(cluster.brokers()["node1"].pid), Signal::SIGKILL).unwrap();
        let mut expected: Vec<_> = jobs.iter().map(|job| format!("{job} COMPLETED")).collect();
        expected.sort_unstable();
        // A command that meets a broker on its way up may wait without end.
        let list = ["timeout", "10", "flux", "jobs", "-ano", "{id} {status}", "--name=true"];
        cluster.until("the end of the jobs that waited", || {
            let listed = cluster.ask("node1", &list)?;
            let mut listed: Vec<_> = listed.lines().collect();
            listed.sort_unstable();
            (listed == expected).then_some(())
        });
        let queue = flux(&["queue", "status"]);
        assert!(queue.contains("Scheduling is started"), "{queue}");
    }
}

#[test]
fn an_agent_that_was_suspended_starts_no_broker_under_a_rank_it_has_lost() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    cluster.patch(json!({ "spec": { "ranks": { "retain": "5s" } } }));
    let planner = cluster.planner();
    let frozen = [1, 2].map(|rank| cluster.holder(rank)).into_iter().find(|node| *node != planner).unwrap();
    let rank = cluster.node(&frozen).rank.unwrap();
    let agent = Pid::from_raw(cluster.node(&frozen).agent_pid.unwrap());
    let broker = Pid::from_raw(cluster.brokers()[&frozen].pid);

    kill(agent, Signal::SIGSTOP).unwrap();
    kill(broker, Signal::SIGKILL).unwrap();
    let nodes = Api::<Node>::all(cluster.client());
    cluster.wait(nodes.delete(&frozen, &DeleteParams::default())).unwrap();
    cluster.until("the rank to be free", || {
        cluster.roster()?.ranks.get(&rank).is_none_or(|entry| entry.member.is_none()).then_some(())
    });
    cluster.until("the FluxNode's end", || {
        cluster.wait(cluster.api::<FluxNode>().get_opt(&frozen)).unwrap().is_none().then_some(())
    });
    cluster.must(&["add-node"]);
    let newcomer = "node4";
    cluster.until("the new node", || cluster.node(newcomer).is_online().then_some(()));
    let brokers = cluster.brokers();
    assert!(brokers.contains_key(newcomer) && !brokers.contains_key(&frozen), "{brokers:?}");

    let log = cluster.state().join("nodes").join(&frozen).join("agent.log");
    let starts = || fs::read_to_string(&log).unwrap().matches("starting the broker").count();
    let before = starts();
    kill(agent, Signal::SIGCONT).unwrap();
    // By then it has heard where it stands.
    cluster.until("the woken agent's word", || {
        let node = cluster.wait(cluster.api::<FluxNode>().get_opt(&frozen)).unwrap()?;
        (node.status?.message?.contains("planner")).then_some(())
    });
    assert_eq!(starts(), before);
    assert_eq!(cluster.brokers(), brokers);
    assert_eq!(cluster.node(&frozen).agent_pid, Some(agent.as_raw()), "it was to wake, not to begin anew");
}

/// What makes a rank what it is: name, Node UID, resources.
fn given(roster: &Roster) -> BTreeMap<Rank, (String, Option<String>, Option<Declared>)> {
    let of = |entry: &api::RosterEntry| {
        (entry.broker_name.clone(), entry.member.as_ref().map(|member| member.uid.clone()), entry.resources.clone())
    };
    roster.ranks.iter().map(|(rank, entry)| (*rank, of(entry))).collect()
}

#[test]
fn a_new_planner_rebuilds_a_deleted_roster_while_jobs_run() {
    let Some(cluster) = Cluster::up(4, &[]) else { return };
    let jobs = cluster.job(&["--cc=1-4", "-N1", "--exclusive"]);
    let (brokers, before) = (cluster.brokers(), cluster.roster().unwrap());
    let planner = cluster.planner();

    let begin = Instant::now();
    let (now, all) = (DeleteParams::default(), ListParams::default());
    let deleted = cluster.wait(async {
        cluster.api::<FluxNode>().delete_collection(&now, &all).await?;
        cluster.api::<ConfigMap>().delete(CONFIGMAP_ROSTER, &now).await
    });
    deleted.unwrap();
    cluster.must(&["agent", &planner, "kill"]);

    let after = cluster.until("the roster", || cluster.roster());
    eprintln!("measured: {:.1} s from the loss of all memory to the roster", begin.elapsed().as_secs_f64());
    cluster.all_online(4);
    eprintln!("measured: {:.1} s from the loss of all memory to all Online", begin.elapsed().as_secs_f64());
    assert_eq!(given(&after), given(&before));
    let identity = |roster: &Roster| (roster.instance_id.clone(), roster.epoch, roster.settings.clone());
    assert_eq!(identity(&after), identity(&before));
    assert_eq!(cluster.brokers(), brokers);
    jobs.finish();
    assert_eq!(cluster.exec("node1", &["flux", "run", "-N4", "hostname"]).lines().count(), 4);
    assert_eq!(given(&cluster.roster().unwrap()), given(&before));
}

#[test]
fn a_deleted_certificate_is_restored_unchanged() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let secrets = cluster.api::<Secret>();
    let read = || cluster.wait(secrets.get_opt(SECRET_CURVE)).unwrap();
    let (before, brokers) = (read().unwrap(), cluster.brokers());
    let begin = Instant::now();
    cluster.wait(secrets.delete(SECRET_CURVE, &DeleteParams::default())).unwrap();
    let after = cluster.until("the certificate", read);
    eprintln!("measured: {:.1} s from the certificate's deletion to its return", begin.elapsed().as_secs_f64());
    assert!(after.data == before.data, "it is another one");
    assert_ne!(after.metadata.uid, before.metadata.uid);

    // It is good for a newcomer.
    cluster.must(&["add-node"]);
    cluster.all_online(3);
    let mut now = cluster.brokers();
    now.remove("node3");
    assert_eq!(now, brokers);
}

#[test]
fn another_member_restores_a_certificate_that_the_lead_has_lost_too() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (lead, follower) = (cluster.holder(0), cluster.holder(1));
    // What else there is to say must not hide it.
    cluster.must(&["node", &cluster.holder(2), "power-off"]);
    let secrets = cluster.api::<Secret>();
    let read = || cluster.wait(secrets.get_opt(SECRET_CURVE)).unwrap();
    let (before, brokers) = (read().unwrap(), cluster.brokers());
    fs::write(cluster.root(&lead).join("opt/flux-distribute/etc/curve.cert"), "").unwrap();
    cluster.wait(secrets.delete(SECRET_CURVE, &DeleteParams::default())).unwrap();
    cluster.until("the planner's message", || {
        let status = cluster.instance().status?;
        let missing = status.holding("CertificateMissing")?;
        missing.message.contains("if no host has it any more, put it back").then_some(())
    });

    // Its host has all that its broker needs.
    kill(Pid::from_raw(brokers[&follower].pid), Signal::SIGKILL).unwrap();
    cluster.until("the follower's next broker", || {
        let next = cluster.brokers().get(&follower).is_some_and(|now| now.pid != brokers[&follower].pid);
        (next && cluster.node(&follower).is_online()).then_some(())
    });
    let after = cluster.until("the certificate", read);
    assert!(after.data == before.data, "it is another one");
    assert_eq!(cluster.brokers()[&lead], brokers[&lead]);
}

#[test]
fn a_member_that_is_cordoned_tainted_or_not_ready_keeps_its_rank_and_its_job() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (brokers, ranks) = (cluster.brokers(), cluster.ranks());
    let before = cluster.roster().unwrap();
    let nodes = Api::<Node>::all(cluster.client());
    let taint = |key: &str, effect: &str| json!({ "key": key, "effect": effect });
    for (what, status, patch) in [
        (
            "tainted",
            false,
            json!({ "spec": { "taints": [
            taint("node.kubernetes.io/unreachable", "NoExecute"),
            taint("example.org/ours", "NoExecute"),
        ] } }),
        ),
        ("not ready", true, json!({ "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } })),
        ("cordoned", false, json!({ "spec": { "unschedulable": true } })),
    ] {
        let job = cluster.job(&["-N2", "-n2"]);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = cluster.wait(async {
            match status {
                true => nodes.patch_status("node2", &params, &patch).await,
                false => nodes.patch("node2", &params, &patch).await,
            }
        });
        patched.unwrap();
        let seen = cluster.instance().metadata.generation;
        nudge(&cluster, seen.unwrap_or_default());
        assert_eq!(cluster.brokers(), brokers, "{what}");
        assert_eq!(cluster.ranks(), ranks, "{what}");
        assert_eq!(given(&cluster.roster().unwrap()), given(&before), "{what}");
        job.finish();
        cluster.patch_node("node2", json!({ "spec": { "unschedulable": false } }));
        cluster.all_online(2);
    }
    let said = cluster.exec("node1", &["flux", "run", "-N2", "hostname"]);
    assert_eq!(said.lines().count(), 2, "{said}");
}

/// A change of the spec that means nothing; waits until the planner has taken it in, and so everything before it.
fn nudge(cluster: &Cluster, generation: i64) {
    let patched = cluster.patch(json!({ "spec": { "drain": { "timeout": format!("{}m", generation + 1) } } }));
    let wanted = patched.metadata.generation;
    assert!(wanted > Some(generation));
    cluster.until("the planner", || {
        (cluster.instance().status.map(|status| status.observed_generation) >= wanted).then_some(())
    });
}

#[test]
fn a_changed_spec_restarts_nothing_and_shows_as_restart_pending() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let job = cluster.job(&["-N2", "-n2"]);
    let brokers = cluster.brokers();
    cluster.patch(json!({ "spec": { "broker": { "cpuWeight": 321 } } }));
    let message =
        cluster.until("RestartPending", || Some(cluster.instance().status?.holding("RestartPending")?.message.clone()));
    eprintln!("measured: RestartPending says: {message}");
    assert!(message.contains("cpuWeight"), "{message}");
    cluster.all_online(2);
    assert_eq!(cluster.brokers(), brokers);
    // Not even when the agents begin anew.
    kill_agents(&cluster, &["node1", "node2"]);
    cluster.all_online(2);
    assert_eq!(cluster.brokers(), brokers);
    job.finish();
}

#[test]
fn a_planner_that_starts_with_a_wrong_clock_ends_no_drain_early() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    let (last, brokers) = (cluster.holder(2), cluster.brokers());
    let job = cluster.job(&["-N1", "--requires=rank:2"]);
    cluster.patch(json!({"spec": {"size": 2, "drain": {"timeout": "10m"}}}));
    let told = || cluster.wait(cluster.api::<FluxNode>().get(&last)).unwrap();
    cluster.until("the drain", || told().spec.drain_reason);
    // An hour ahead, by which ten minutes are over. Every planner from here on has started with that clock.
    cluster.must(&["api", "clock-ahead"]);
    kill_agents(&cluster, &["node1", "node2", "node3"]);
    let generation = cluster.patch(json!({"spec": {"ranks": {"retain": "11m"}}})).metadata.generation.unwrap();
    cluster.until("the next planner", || (cluster.instance().status?.observed_generation >= generation).then_some(()));
    assert!(!told().spec.stop_despite_jobs, "{:?}", told().spec);
    assert_eq!(cluster.brokers(), brokers);
    cluster.must(&["api", "none"]);
    job.finish();
}
