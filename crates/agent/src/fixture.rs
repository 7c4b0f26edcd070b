//! Fixtures for the tests of the agent.
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{Request, Response, StatusCode};
use kube::{Client, client::Body};
use serde_json::json;

use super::{
    inputs::{
        broker_state::BrokerState,
        node_inputs::{Instance, NodeInputs},
    },
    node_ops::NodeOps,
};
use api::{FetchFrom, FluxNode, FluxNodeSpec, FluxNodeStatus, NAMESPACE, Rank, Resources, SECRET_PACKAGES, Want};
use hostapi::{FakeHost, HostState, HostView, LaunchRecord, Preflight, RunningBroker};
use model::fixture::roster;
use packages::native_platform;

/// A host of a binary tree of eight, with the broker of `rank`.
pub fn tree(rank: Option<u32>, job_shells: usize) -> HostView {
    let record = |rank| LaunchRecord { rank, epoch: 1, ..LaunchRecord::default() };
    let broker = rank.map(|rank| RunningBroker { pid: 7, start_time: 1, systemd: false, record: record(rank) });
    let mut roster = roster(8, &[]);
    roster.settings.topology = "kary:2".to_owned();
    let state = HostState { instance_uid: roster.instance_uid.clone(), ..HostState::default() };
    let roster = Some(serde_json::to_string(&roster).unwrap().into());
    HostView { broker, job_shells, roster, state: Some(state), ..HostView::default() }
}

/// Operations on `host`, in a cluster that has no Secret with access to package servers. The API server gets no other request.
pub fn ops(host: Arc<FakeHost>) -> NodeOps {
    let has_no_secret = tower::service_fn(|request: Request<Body>| async move {
        let secret = format!("/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET_PACKAGES}");
        assert_eq!((request.method().as_str(), request.uri().path()), ("GET", secret.as_str()));
        let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "not found",
                             "reason": "NotFound", "code": 404 });
        let body = Body::from(status.to_string().into_bytes());
        Response::builder().status(StatusCode::NOT_FOUND).body(body)
    });
    NodeOps { host, client: Client::new(has_no_secret, NAMESPACE), address: None }
}

/// What preflight found on a host with `prefix`.
pub fn preflight(prefix: &Path) -> Preflight {
    Preflight {
        prefix: prefix.to_owned(),
        resources: Default::default(),
        static_cpus: false,
        memory_mib: 0,
        platform: native_platform().to_owned(),
        glibc: String::new(),
        boot_id: String::new(),
        systemd: false,
        warnings: Vec::new(),
    }
}

/// The broker of `rank` in `epoch`, as the host sees it.
pub fn broker(rank: Rank, epoch: u64) -> RunningBroker {
    RunningBroker {
        pid: 7,
        start_time: 1,
        systemd: false,
        record: LaunchRecord {
            rank,
            broker_name: format!("node{}", rank + 1),
            node_uid: "uid-node2".into(),
            instance_uid: "instance".into(),
            instance_id: "id".into(),
            epoch,
            digest: "digest".into(),
            launch: "hash".into(),
        },
    }
}

/// Node `node2` with rank 1 of an instance of two members and four ranks, where the packages are installed, no broker runs, and the
/// planner wants one.
pub fn inputs() -> NodeInputs {
    let spec = FluxNodeSpec {
        node_name: "node2".into(),
        want: Want::Run,
        instance_uid: Some("instance".into()),
        node_uid: Some("uid-node2".into()),
        rank: Some(1),
        epoch: 1,
        revision: 1,
        fetch_from: Some(FetchFrom { digest: "digest".into(), ..FetchFrom::default() }),
        ..FluxNodeSpec::default()
    };
    NodeInputs {
        at: Instant::now(),
        unix_time: 0.0,
        agent_age: Duration::from_mins(1),
        node: "node2".into(),
        node_uid: Some("uid-node2".into()),
        is_replaced: false,
        instance: Instance::Here { uid: "instance".into() },
        nothing_wanted: false,
        spec: Default::default(),
        generation: 0,
        uninstall: Default::default(),
        flux_node: Some(FluxNode::new("node2", spec)),
        wish: Default::default(),
        roster: Some(Arc::new(roster(4, &[("node1", 2), ("node2", 2)]))),
        newer_roster: None,
        roster_is_gone: false,
        published: vec!["digest".into()],
        is_behind: false,
        packages_expected: false,
        held_archives: Vec::new(),
        host: HostView {
            state: Some(HostState { instance_uid: "instance".into(), ..Default::default() }),
            environments: vec!["digest".into()],
            ..Default::default()
        },
        local_roster: None,
        preflight: Some(Preflight {
            resources: Resources { cores: 2, gpus: 0 },
            ..preflight(Path::new("/opt/flux-distribute"))
        }),
        applied: None,
        broker: BrokerState { pid: Some(7), state: "run".into(), ..BrokerState::default() },
        rejected: Default::default(),
        refusal: None,
        peer: None,
        port_problems: Vec::new(),
        damage: None,
        pods: None,
        overlapping_on: None,
    }
}

/// Node `node1` with rank 0, whose broker runs and has not answered yet, and whose agent wrote `status` last.
pub fn lead_with_broker(status: FluxNodeStatus) -> NodeInputs {
    let mut inputs = inputs();
    inputs.node = "node1".into();
    inputs.node_uid = Some("uid-node1".into());
    let node = inputs.flux_node.as_mut().unwrap();
    node.metadata.name = Some("node1".into());
    node.spec = FluxNodeSpec {
        node_name: "node1".into(),
        rank: Some(0),
        node_uid: Some("uid-node1".into()),
        ..node.spec.clone()
    };
    node.status = Some(status);
    inputs.host.broker = Some(broker(0, 1));
    inputs.broker = BrokerState::default();
    inputs
}
