//! What the tests of the agent's steps have in common.
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{path::Path, sync::Arc};

use http::{Request, Response, StatusCode};
use kube::{Client, client::Body};
use serde_json::json;

use super::act::Actor;
use crate::{
    api::{NAMESPACE, SECRET_PACKAGES},
    host::{FakeHost, Preflight},
    packages::native_platform,
};

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
