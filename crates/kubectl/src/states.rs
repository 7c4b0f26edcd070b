//! What `status`, `doctor` and `kubectl get` print of each state of an instance and of a node: `states.txt`, which is read in a review like any other text.
//! `UPDATE_STATES=1 cargo test -p kubectl` writes it anew.

use std::{collections::BTreeSet, fs, path::Path};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::{CustomResourceExt, ResourceExt};
use serde_json::{Value, json};

use crate::{
    arguments::StatusFormat,
    columns, doctor,
    fixture::{NOW, around, change, observed},
    observed::Observed,
    overview::overview,
    screen::{Screen, word},
    status,
};
use api::{FluxInstance, FluxNode, InstancePhase, NodePhase};

const YESTERDAY: &str = "2025-12-31T00:10:00Z";

/// Most columns of a line.
const WIDTH: u16 = 100;

const CUT_OFF: &str = "the node has not answered for 2 minutes; if it is lost for good, another node can lead: docs/state.md, `flux-distribute recover`";

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

/// An instance of four nodes with these changes of its status.
fn instance(status: &Value) -> Observed {
    observed(4, status, &Value::Null)
}

/// Each phase of an instance.
fn instances() -> Vec<(InstancePhase, Observed)> {
    let mut pending = instance(&json!({
        "phase": "Pending", "online": 0, "size": 0, "epoch": 0, "lead": null, "reason": "NotStartedYet", "message": "no eligible node: 4 nodes are cordoned",
    }));
    let mut starting = instance(
        &json!({"phase": "Starting", "online": 1, "reason": "NodesNotOnline", "message": "1 of 4 nodes online; n2 (rank 1, not started): fetching packages"}),
    );
    for rank in 0..4 {
        let waits = json!({"phase": "Waiting", "message": "this node gets no rank: the node is cordoned"});
        change(&mut pending, rank, &json!({"rank": null}), &waits);
        if rank > 0 {
            let fetches =
                json!({"phase": "Installing", "message": "fetching packages: 31 of 66, 52 MB of 114 MB, 8 s left"});
            change(&mut starting, rank, &json!({}), &fetches);
        }
    }
    let message = format!("the lead n1 is not online: {CUT_OFF}");
    let degraded = json!({
        "phase": "Degraded", "online": 3, "reason": "LeadNotOnline", "message": message, "conditions": [condition("Degraded", "LeadNotOnline", &message)],
    });
    let mut degraded = observed(4, &degraded, &json!({"allocated": null}));
    change(&mut degraded, 0, &json!({}), &json!({"phase": "Offline", "message": "the broker does not answer"}));
    let restarting = json!({
        "phase": "Restarting", "online": 0, "reason": "LeadNotOnline", "message": "epoch 3 is starting: 0 of 4 nodes online",
    });
    let mut restarting = observed(4, &restarting, &json!({"allocated": null}));
    for rank in 0..4 {
        change(&mut restarting, rank, &json!({}), &json!({"phase": "Starting", "message": "the broker is starting"}));
    }
    let failed = "spec.packages.specs[0]: \"flux-core ===\" is not a spec of conda: expected a version";
    let evicted = "n2 has no agent: its pod was evicted (The node was low on resource: memory.); its broker and jobs keep running, but no agent repairs or reports anything there";
    vec![
        (InstancePhase::Pending, pending),
        (InstancePhase::Starting, starting),
        (
            InstancePhase::Running,
            instance(
                &json!({"reason": "RestartPending", "conditions": [condition("RestartPending", "Waits", "fanout 16 -> 32; waits for the jobs on ranks 1-3 to end")]}),
            ),
        ),
        (
            InstancePhase::Running,
            instance(
                &json!({"reason": "AgentNotRunning", "message": evicted, "conditions": [condition("AgentsMissing", "AgentNotRunning", evicted)]}),
            ),
        ),
        (InstancePhase::Restarting, restarting),
        (InstancePhase::Degraded, degraded),
        (
            InstancePhase::Failed,
            instance(
                &json!({"phase": "Failed", "reason": "InvalidSpec", "message": failed, "conditions": [condition("Degraded", "InvalidSpec", failed)]}),
            ),
        ),
        (
            InstancePhase::Ignored,
            instance(
                &json!({"phase": "Ignored", "online": 0, "size": 0, "reason": "AnotherName", "message": "only the FluxInstance named flux is served"}),
            ),
        ),
        (
            InstancePhase::Other("Hibernating".to_owned()),
            instance(&json!({"phase": "Hibernating", "message": "what a later version says"})),
        ),
    ]
}

/// Each phase of a node, and what Flux does with it: the name of the state, and the instance whose second node is in it.
fn nodes() -> Vec<(String, NodePhase, Observed)> {
    let phases = [
        (NodePhase::Waiting, "waiting for n1 to serve packages"),
        (NodePhase::Preflight, "looking at the host"),
        (NodePhase::Installing, "linking packages: 12 of 66, 3 s left"),
        (NodePhase::Starting, "the broker is starting"),
        (NodePhase::Online, ""),
        (NodePhase::Draining, "spec.size is 1: 2 jobs run here, until 12:00:00Z"),
        (NodePhase::Offline, "the broker does not answer"),
        (NodePhase::Removing, "waiting for 1 job to end"),
        (
            NodePhase::Failed,
            "/opt and /var/lib are on file systems mounted noexec: set spec.prefix to a directory on another one",
        ),
        (NodePhase::Other("Sleeping".to_owned()), "what a later version says"),
    ];
    let of_phases = phases.into_iter().map(|(phase, message)| {
        let mut seen = instance(&json!({}));
        let message = if message.is_empty() { Value::Null } else { json!(message) };
        change(&mut seen, 1, &json!({}), &json!({"phase": phase, "message": message}));
        (format!("{phase:?}"), phase, seen)
    });
    let of_flux = [
        ("allocated", json!({"allocated": "1"})),
        ("draining", json!({"allocated": "1", "drained": "1"})),
        ("drained by somebody", json!({"drainedByOthers": "1"})),
        ("down", json!({"offline": [1]})),
        ("slow to answer", json!({"torpid": "1"})),
        ("not known, because the lead does not answer", json!({"allocated": null})),
    ];
    let of_flux = of_flux
        .into_iter()
        .map(|(what, lead)| (format!("Online, {what}"), NodePhase::Online, observed(4, &json!({}), &lead)));
    let mut drained = observed(4, &json!({}), &json!({"drainedByOthers": "1"}));
    change(&mut drained, 1, &json!({"reason": "drained in Flux: bad disk"}), &json!({}));
    let drained = ("Online, drained for a reason".to_owned(), NodePhase::Online, drained);
    of_phases.chain(of_flux).chain([drained]).collect()
}

/// Nodes with names as long as clouds give them, since the day before.
fn with_long_names(seen: &Observed) -> (FluxInstance, Vec<FluxNode>) {
    let long = |name: &str| name.replacen('n', "hpc-worker-gpu-node-", 1);
    let created = |name: &str| ObjectMeta {
        name: Some(name.to_owned()),
        creation_timestamp: Some(Time(YESTERDAY.parse().unwrap())),
        ..ObjectMeta::default()
    };
    let (mut instance, mut nodes) = (seen.instance.clone(), seen.nodes.clone());
    instance.metadata = created(&instance.name_any());
    if let Some(status) = &mut instance.status {
        status.lead = status.lead.as_deref().map(long);
    }
    nodes.iter_mut().for_each(|node| node.metadata = created(&long(&node.name_any())));
    (instance, nodes)
}

fn got(seen: &Observed) -> String {
    let ((instance, nodes), now) = (with_long_names(seen), NOW.parse().unwrap());
    format!("{}\n{}", columns::get(&[instance], false, now), columns::get(&nodes, false, now))
}

fn printed(name: &str, seen: Observed) -> String {
    let got = got(&seen);
    let screen = Screen { width: Some(WIDTH), has_colours: false };
    let status = status::render(&overview(&seen), StatusFormat::Text, screen).unwrap();
    let checks = doctor::checks(&around(seen), NOW.parse().unwrap());
    format!("=== {name}\n\n{status}\n{}\n{got}\n", doctor::text(&checks, screen))
}

#[test]
fn each_state_is_shown_as_it_was_reviewed_and_no_line_is_wider_than_100_columns() {
    let (instances, nodes) = (instances(), nodes());
    let mut text = String::new();
    for (phase, seen) in instances {
        assert_eq!(seen.instance.status.as_ref().unwrap().phase, phase);
        let reason = seen.instance.status.as_ref().unwrap().reason.clone();
        text += &printed(&format!("FluxInstance: {phase:?}, {}", reason.unwrap_or_default()), seen);
    }
    for (name, phase, seen) in nodes {
        assert_eq!(seen.nodes[1].status.as_ref().unwrap().phase, phase);
        text += &printed(&format!("FluxNode n2: {name}"), seen);
    }
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH.into()), "{text}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/states.txt");
    if std::env::var_os("UPDATE_STATES").is_some() {
        fs::write(&file, &text).unwrap();
    }
    let reviewed = fs::read_to_string(&file).unwrap();
    assert!(
        reviewed == text,
        "src/states.txt is not what is printed now; UPDATE_STATES=1 writes it, for a review:\n{text}"
    );
}

/// The message of `-o wide` may be wider than any terminal.
#[test]
fn the_longest_words_and_numbers_fit_into_the_columns_that_kubectl_shows_by_default() {
    let most = api::MOST_RANKS;
    let longest = json!({
        "phase": "Restarting", "online": most, "size": most, "maxSize": most, "reason": "MalformedCertificate", "epoch": 100_000,
    });
    let mut seen = instance(&longest);
    change(&mut seen, 0, &json!({"rank": most, "lostByLead": true}), &json!({"phase": "Installing"}));
    let text = got(&seen);
    assert!(text.contains("MalformedCertificate") && text.contains("true"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH.into()), "{text}");
}

#[test]
fn no_phase_that_the_reference_names_is_left_out() {
    let shown: BTreeSet<_> = nodes().into_iter().map(|(_, phase, _)| word(&phase)).collect();
    assert_eq!(named::<FluxNode>().difference(&shown).count(), 0, "{shown:?}");
    let shown: BTreeSet<_> = instances().into_iter().map(|(phase, _)| word(&phase)).collect();
    assert_eq!(named::<FluxInstance>().difference(&shown).count(), 0, "{shown:?}");
}

/// The phases in the words of the CRD about status.phase.
fn named<K: CustomResourceExt>() -> BTreeSet<String> {
    let crd = serde_json::to_value(K::crd()).unwrap();
    let about = crd.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/phase/description");
    let quoted = about.and_then(Value::as_str).unwrap().split('`').skip(1).step_by(2);
    let phases: BTreeSet<_> = quoted.filter(|word| word.starts_with(char::is_uppercase)).map(str::to_owned).collect();
    assert!(phases.len() >= 7, "{phases:?}");
    phases
}
