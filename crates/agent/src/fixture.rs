//! What the tests of the agent's steps have in common.
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{path::Path, sync::Arc};

use http::{Request, Response, StatusCode};
use kube::{Client, client::Body};
use serde_json::json;

use super::act::Actor;
use api::{NAMESPACE, SECRET_PACKAGES};
use hostapi::{FakeHost, HostState, HostView, LaunchRecord, Preflight, RunningBroker};
use model::fixture::roster;
use packages::native_platform;

/// A host of a binary tree of eight, with the broker of `rank`.
pub(super) fn tree(rank: Option<u32>, job_shells: usize) -> HostView {
    let record = |rank| LaunchRecord { rank, epoch: 1, ..LaunchRecord::default() };
    let broker = rank.map(|rank| RunningBroker { pid: 7, start_time: 1, systemd: false, record: record(rank) });
    let mut roster = roster(8, &[]);
    roster.settings.topology = "kary:2".to_owned();
    let state = HostState { instance_uid: roster.instance_uid.clone(), ..HostState::default() };
    let roster = Some(serde_json::to_string(&roster).unwrap());
    HostView { broker, job_shells, roster, state: Some(state), ..HostView::default() }
}

/// An actor on `host`, in a cluster that has no Secret with access to package servers. It asks the API server for nothing
/// else.
pub(super) fn actor(host: Arc<FakeHost>) -> Actor {
    let has_no_secret = tower::service_fn(|request: Request<Body>| async move {
        let secret = format!("/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET_PACKAGES}");
        assert_eq!((request.method().as_str(), request.uri().path()), ("GET", secret.as_str()));
        let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "not found",
                             "reason": "NotFound", "code": 404 });
        let body = Body::from(status.to_string().into_bytes());
        Response::builder().status(StatusCode::NOT_FOUND).body(body)
    });
    Actor {
        host,
        client: Client::new(has_no_secret, NAMESPACE),
        instance_uid: "uid".to_owned(),
        uninstall: Default::default(),
        address: None,
    }
}

/// Of a host whose prefix is `prefix`.
pub(super) fn preflight(prefix: &Path) -> Preflight {
    Preflight {
        prefix: prefix.to_owned(),
        resources: Default::default(),
        memory_mib: 0,
        platform: native_platform().to_owned(),
        glibc: String::new(),
        boot_id: String::new(),
        systemd: false,
        warnings: Vec::new(),
    }
}
