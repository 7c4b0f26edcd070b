//! What the instance says of itself: its one line, its conditions, its Events.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
    time::Instant,
};

use api::{ANNOTATION_RESTART, CONDITION_POD_READY, FluxInstance, FluxNode, INSTANCE};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::harness::Cluster;

/// Waits until the instance's line holds `words`.
fn until_told(cluster: &Cluster, words: &str) -> String {
    cluster.until(&format!("a line with {words:?}"), || {
        cluster.instance().status?.message.filter(|message| message.contains(words))
    })
}

/// Waits until an Event of that reason holds `words`.
fn until_warned(cluster: &Cluster, reason: &str, words: &str) {
    cluster.until(&format!("an Event {reason} with {words:?}"), || {
        warnings(cluster).into_iter().find(|(found, message)| found == reason && message.contains(words))
    });
}

/// Reason and message of each Warning.
fn warnings(cluster: &Cluster) -> Vec<(String, String)> {
    let events = cluster.wait(cluster.api::<Event>().list(&ListParams::default())).unwrap();
    let warnings = events.into_iter().filter(|event| event.type_.as_deref() == Some("Warning"));
    warnings.map(|event| (event.reason.unwrap_or_default(), event.message.unwrap_or_default())).collect()
}

fn holds(cluster: &Cluster, condition: &str, words: &str) -> bool {
    let status = cluster.instance().status.unwrap();
    status.holding(condition).is_some_and(|condition| condition.message.contains(words))
}

/// The agent's pod, as a kubelet would show it.
fn show_pod(cluster: &Cluster, node: &str, status: &Value) -> String {
    let pid = cluster.until("an agent", || cluster.node(node).agent_pid);
    let environ = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let name = environ.split('\0').find_map(|variable| variable.strip_prefix("POD_NAME=")).unwrap().to_owned();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "install-flux"}},
        "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "flux-distribute"}]},
    });
    let pods = cluster.api::<Pod>();
    cluster.wait(pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap())).unwrap();
    change_pod(cluster, &name, status);
    name
}

fn change_pod(cluster: &Cluster, name: &str, status: &Value) {
    let patch = Patch::Merge(json!({ "status": status }));
    cluster.wait(cluster.api::<Pod>().patch_status(name, &PatchParams::default(), &patch)).unwrap();
}

fn running() -> Value {
    let container = json!({"name": "agent", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {}}});
    json!({"phase": "Running", "containerStatuses": [container], "conditions": [{"type": "Initialized", "status": "True"}]})
}

#[test]
fn a_lead_without_power_is_reported_before_kubernetes_marks_its_node() {
    let Some(cluster) = Cluster::up(3, &[]) else { return };
    until_told(&cluster, "3 of 3 nodes online");
    let lead = cluster.holder(0);
    let begin = Instant::now();
    cluster.must(&["node", &lead, "power-off"]);
    // A cluster says NotReady only when the kubelet has been silent for 40 s or more.
    let ready = Patch::Merge(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}));
    let nodes = Api::<Node>::all(cluster.client());
    cluster.wait(nodes.patch_status(&lead, &PatchParams::default(), &ready)).unwrap();
    until_told(
        &cluster,
        &format!("2 of 3 nodes online; {lead} (rank 0, started): its broker does not answer the others"),
    );
    eprintln!("measured: {:.1} s from the lead's power cut to the line", begin.elapsed().as_secs_f64());
    assert!(holds(&cluster, "Degraded", "does not answer the others"));
    let script = ["timeout", "10", "/flux-connect.sh", "flux", "resource", "list"];
    let waits = cluster.run(&[&["exec", &cluster.holder(1), "--"], &script[..]].concat());
    let said = String::from_utf8(waits.stderr).unwrap();
    assert!(waits.status.code() == Some(124) && said.contains("the broker of rank 0 does not answer"), "{said}");
    cluster.until("the word on its FluxNode", || {
        let told = cluster.wait(cluster.api::<FluxNode>().get(&lead)).unwrap().spec;
        (told.lost_by_lead && told.reason?.contains("do not hear from its broker")).then_some(())
    });

    cluster.must(&["node", &lead, "power-on"]);
    cluster.all_online(3);
    until_told(&cluster, "3 of 3 nodes online");
}

#[test]
fn the_status_names_members_whose_pod_was_evicted() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let pods = ["node1", "node2"].map(|node| show_pod(&cluster, node, &running()));
    change_pod(&cluster, &pods[1], &json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}));
    let words = "node2 has no agent: its pod was evicted (low on memory)";
    until_told(&cluster, words);
    assert!(holds(&cluster, "AgentsMissing", words));
    until_warned(&cluster, "AgentsMissing", words);
    change_pod(&cluster, &pods[1], &running());
    until_told(&cluster, "2 of 2 nodes online");
}

#[test]
fn an_agent_sets_the_readiness_of_its_own_pod() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    let pod = show_pod(&cluster, "node1", &running());
    // The next agent of that pod.
    cluster.must(&["agent", "node1", "kill"]);
    let value = |type_: &str| {
        let pod = cluster.wait(cluster.api::<Pod>().get(&pod)).unwrap();
        let found = pod.status?.conditions?.into_iter().find(|condition| condition.type_ == type_);
        found.map(|condition| condition.status)
    };
    cluster.until("the word that it is ready", || value(CONDITION_POD_READY).filter(|value| value == "True"));
    assert_eq!(value("Initialized").as_deref(), Some("True"), "what others say stays");
    // A broker that dies now can't be started before everything is installed again.
    let broker = cluster.brokers()["node1"].pid;
    // The agent, which has just begun, may make a lock file there meanwhile.
    let remove = || cluster.ask("node1", &["rm", "-rf", "/opt/flux-distribute/envs"]);
    cluster.until("no environment", remove);
    kill(Pid::from_raw(broker), Signal::SIGKILL).unwrap();
    cluster.until("the word that it is not", || {
        // On a busy machine, everything may be installed again before anybody has asked.
        let _ = remove();
        value(CONDITION_POD_READY).filter(|value| value == "False")
    });
}

#[test]
fn a_planned_restart_raises_no_warning() {
    let Some(cluster) = Cluster::up(4, &[]) else { return };
    let before = warnings(&cluster);
    assert_eq!(before, [], "nor does a first start");
    cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: "now"}}}));
    cluster.until("epoch 2", || {
        let status = cluster.instance().status?;
        (status.epoch == 2 && status.online == 4).then_some(())
    });
    assert_eq!(warnings(&cluster), []);
}

/// The broker of an epoch that ends would join a lead that is on its way out.
#[test]
fn a_node_whose_broker_has_ended_waits_for_the_next_epoch() {
    let Some(cluster) = Cluster::up(4, &[]) else { return };
    let (lead, others) = (cluster.holder(0), ["node1", "node2", "node3", "node4"]);
    let agent = |node: &str| Some(Pid::from_raw(cluster.node(node).agent_pid?));
    // The lead's agent is needed: it stops the lead's broker.
    let planner = cluster.until("a planner beside the lead's agent", || {
        let planner = cluster.planner();
        if planner == lead {
            kill(agent(&lead)?, Signal::SIGTERM).ok()?;
        }
        (planner != lead).then_some(planner)
    });
    cluster.patch(json!({"metadata": {"annotations": {ANNOTATION_RESTART: "now"}}}));
    cluster.until("the end of the epoch", || cluster.roster()?.closing);
    // The next one begins only once another agent is the planner.
    let stopped = agent(&planner).unwrap();
    kill(stopped, Signal::SIGSTOP).unwrap();
    for node in others.into_iter().filter(|node| *node != planner && *node != lead) {
        cluster.until("the word that its node waits", || {
            let told = cluster.wait(cluster.api::<FluxNode>().get(node)).unwrap().status?.message?;
            told.contains("this epoch ends: waiting for the next one").then_some(())
        });
    }
    kill(stopped, Signal::SIGCONT).unwrap();
    cluster.until("epoch 2", || {
        let status = cluster.instance().status?;
        (status.epoch == 2 && status.online == 4).then_some(())
    });
    assert_eq!(warnings(&cluster), []);
}

#[test]
fn changes_that_a_running_instance_ignores_are_in_message_condition_and_event() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, other) = (cluster.holder(0), cluster.holder(1));
    for (spec, mended, words) in [
        (json!({"prefix": "/srv/flux"}), json!({"prefix": null}), "set spec.prefix to /opt/flux-distribute".to_owned()),
        (json!({"lead": other}), json!({"lead": null}), format!("set spec.lead to {lead}")),
        (
            json!({"resources": {"exclude": {"nodes": [lead, other]}}}),
            json!({"resources": null}),
            "spec.resources.exclude names every member".to_owned(),
        ),
    ] {
        cluster.patch(json!({ "spec": spec }));
        until_told(&cluster, &words);
        assert!(holds(&cluster, "NotApplied", &words), "{words}");
        until_warned(&cluster, "NotApplied", &words);
        cluster.patch(json!({ "spec": mended }));
        until_told(&cluster, "2 of 2 nodes online");
    }
}

#[test]
fn a_pending_restart_whose_packages_can_not_be_fetched_says_why() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let has = cluster.instance().spec.packages.bundle.unwrap();
    let wanted = "0".repeat(64);
    cluster.patch(json!({"spec": {"packages": {"bundle": {"sha256": wanted}}}}));
    let told = until_told(&cluster, &wanted);
    assert!(told.contains(&has.sha256), "both sha256: {told}");
    until_warned(&cluster, "RestartPending", &has.sha256);

    let missing = "http://127.0.0.1:9/flux.tar.gz";
    cluster.patch(json!({"spec": {"packages": {"bundle": {"url": missing}}}}));
    until_told(&cluster, missing);
    assert_eq!(cluster.brokers().len(), 2);
    cluster.patch(json!({"spec": {"packages": {"bundle": {"url": has.url, "sha256": has.sha256}}}}));
    until_told(&cluster, "2 of 2 nodes online");
}

#[test]
fn the_status_distinguishes_spares_from_nodes_that_are_down() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    // As in the pod: it needs no more than the host's namespaces.
    let program = env!("CARGO_BIN_EXE_flux-distribute");
    fs::copy(program, cluster.root("node1").join("root/flux-distribute")).unwrap();
    let status = || cluster.exec("node1", &["/root/flux-distribute", "status"]);
    let line = |text: &str, what: &str| text.lines().find(|line| line.starts_with(what)).unwrap().to_owned();
    let text = cluster.until("the overlay", || Some(status()).filter(|text| text.contains("all online")));
    assert!(line(&text, "overlay").ends_with(" full"), "{text}");
    assert!(line(&text, "members").contains("2 members, all online (ranks 0-1)"), "{text}");
    assert!(line(&text, "spares").contains("62 ranks (2-63)"), "{text}");
    assert!(line(&text, "cores").contains(" 0 down"), "{text}");
}

#[test]
fn a_pod_that_ends_before_its_hosts_jobs_says_so_in_its_message_and_an_event() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let job = cluster.job(&["-N2", "--exclusive"]);
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default())).unwrap();
    cluster.until("an Event", || {
        let events = cluster.wait(cluster.api::<Event>().list(&ListParams::default())).unwrap();
        let told = |event: &Event| event.message.as_ref().is_some_and(|told| told.contains("until they have ended"));
        events.iter().any(|event| event.reason.as_deref() == Some("Removing") && told(event)).then_some(())
    });
    let agent = cluster.node("node2").agent_pid.unwrap();
    let mut restart = cluster.command(&["agent", "node2", "restart"]).stdout(Stdio::null()).spawn().unwrap();
    let last_words = format!("/proc/{agent}/root/termination-log");
    cluster.until("its last message", || {
        let told = fs::read_to_string(&last_words).ok()?;
        (told.contains("jobs are running") && told.contains("apply the manifest again")).then_some(())
    });
    job.let_end();
    assert!(restart.wait().unwrap().success());
    cluster.until("clean hosts", || {
        let nodes = cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).unwrap();
        nodes.items.is_empty().then_some(())
    });
}

/// Without its lead, Flux lets most commands wait and says nothing.
#[test]
fn a_command_of_flux_that_waits_for_rank_0_is_explained() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let (lead, other) = (cluster.holder(0), cluster.holder(1));
    cluster.must(&["node", &lead, "power-off"]);
    let mut waiting = cluster.command(&["exec", &other, "--", "flux", "jobs"]);
    let mut waiting = waiting.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(waiting.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    assert!(said.contains("the broker of rank 0 does not answer"), "{said}");
}
