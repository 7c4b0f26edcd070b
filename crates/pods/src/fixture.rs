//! Pods, nodes and jobs for tests.

use std::collections::BTreeMap;

use api::Rank;
use broker::{job_id::JobId, journal::JobEvents};
use serde_json::{Value, json};

use crate::{
    constraint::Constraint,
    facts::KubeJob,
    jobspec::JobRequest,
    pod::{Owner, Phase, Plan, PodView},
    record::{GangId, GangKind, JobRecord, MemberPod, PodRecord},
    requests::Requests,
    target::{Allocatable, Target},
};

/// A pod of namespace `default` that waits and asks for `cores` cores of one thread.
pub(crate) fn pod(name: &str, cores: u64) -> PodView {
    PodView {
        namespace: "default".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        is_bridged: true,
        requests: Requests { cpu: cores * 1000, ..Requests::default() },
        plan: Some(Box::default()),
        ..PodView::default()
    }
}

/// A pod of another scheduler that runs on `node0` and requests so many thousandths of a core.
pub(crate) fn foreign(name: &str, milli: u64) -> PodView {
    let requests = Requests { cpu: milli, ..Requests::default() };
    let node = Some("node0".to_owned());
    let (is_bridged, bound, phase, is_taken_up, plan) = (false, Some(0), Phase::Running, true, None);
    PodView { is_bridged, node, bound, phase, is_taken_up, requests, plan, ..pod(name, 1) }
}

/// The pod as the bridge has bound it to `node0`.
pub(crate) fn bound(pod: PodView) -> PodView {
    let record = PodRecord { id: JobId(1), rank: 0, cores: [0].into_iter().collect() };
    PodView { node: Some("node0".into()), record: Some(record), ..pod }
}

/// Changes what matters until the pod is bound.
pub(crate) fn plan(pod: &mut PodView) -> &mut Plan {
    pod.plan.get_or_insert_default()
}

/// A pod of a gang that annotations make.
pub(crate) fn annotated(name: &str, gang: &str, size: u32) -> PodView {
    let mut pod = pod(name, 1);
    pod.hints.annotated = Some((gang.into(), size.to_string()));
    pod
}

/// The pod with this index of the Job `job`.
pub(crate) fn of_job(job: &str, index: u32) -> PodView {
    let owner = Owner { is_job: true, name: job.into(), uid: format!("uid-{job}") };
    PodView { owner: Some(owner), index: Some(index), ..pod(&format!("{job}-{index}"), 1) }
}

/// An Indexed Job that runs `size` pods at once.
pub(crate) fn kube_job(name: &str, size: u32) -> KubeJob {
    KubeJob {
        namespace: "default".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        is_indexed: true,
        completions: Some(size),
        parallelism: size,
        began: Some(0),
        ..KubeJob::default()
    }
}

/// Nodes `node0`, `node1` and so on, with one thread a core and as many CPUs as cores.
pub(crate) fn targets(cores: &[u32]) -> BTreeMap<Rank, Target> {
    let target = |(rank, cores): (Rank, &u32)| {
        let target = Target {
            rank,
            node: format!("node{rank}"),
            uid: format!("uid-node{rank}"),
            is_ready: true,
            allocatable: Allocatable {
                cpu: u64::from(*cores) * 1000,
                memory: 1 << 40,
                ephemeral: 1 << 40,
                pods: 110,
                extended: BTreeMap::new(),
            },
            cores: *cores,
            threads: 1,
            declared_cpu: u64::from(*cores) * 1000,
            ..Target::default()
        };
        (rank, target)
    };
    (0..).zip(cores).map(target).collect()
}

/// A request for pods `p0`, `p1` and so on of gang `default/g`.
pub(crate) fn request(slots: u32, cores: u32) -> JobRequest {
    let gang = GangId { kind: GangKind::Annotated, namespace: "default".into(), name: "g".into(), uid: String::new() };
    let member_pod = |index: u32| MemberPod { name: format!("p{index}"), uid: format!("uid-p{index}"), index: None };
    JobRequest {
        record: JobRecord { gang, members: (0..slots).map(member_pod).collect(), threads: 1, queued: 0, pinned: None },
        slots,
        cores,
        per_node: None,
        duration: 60,
        constraint: Constraint::Anywhere,
        urgency: 16,
    }
}

/// An item of the journal. Everything in `events` but name and timestamp is their context. With a jobspec there is always an event
/// `submit`: of the owner, if `events` has none.
pub(crate) fn job_events(id: u64, events: Value, jobspec: Option<Value>) -> JobEvents {
    let event = |event: &Value| json!({"name": event["name"], "timestamp": event["timestamp"].as_f64().unwrap_or(0.0), "context": event});
    let mut events: Vec<Value> = events.as_array().unwrap().iter().map(event).collect();
    if jobspec.is_some() && !events.iter().any(|event| event["name"] == "submit") {
        events.insert(0, event(&json!({"name": "submit", "userid": 0})));
    }
    let item = json!({"id": JobId(id), "events": events, "jobspec": jobspec});
    serde_json::from_value(item).unwrap()
}
