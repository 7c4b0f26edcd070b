//! At which priority level the requests of agents and planner wait, by a real API server.

use std::{collections::BTreeMap, fmt::Debug};

use api::NAMESPACE;
use http::Request;
use k8s_openapi::{
    ClusterResourceScope,
    api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration},
};
use kube::{Api, Client, Resource, ResourceExt, client::Body};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    cluster::{Case, until_true},
    rights::{agent, make},
};

/// Makes the manifest's objects of a kind. Returns the names of all objects of that kind, Kubernetes' own among them, by uid.
async fn made<K>(case: &Case) -> BTreeMap<String, String>
where
    K: Resource<DynamicType = (), Scope = ClusterResourceScope> + Clone + DeserializeOwned + Serialize + Debug,
{
    let api = Api::<K>::all(case.client.clone());
    make(api.clone()).await;
    let all = api.list(&Default::default()).await.unwrap();
    all.iter().map(|object| (object.uid().unwrap(), object.name_any())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_planner_have_a_priority_level_of_their_own() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let schemas = made::<FlowSchema>(&case).await;
    let levels = made::<PriorityLevelConfiguration>(&case).await;
    // FlowSchema and priority level by which the API server has served a request.
    let served = async |client: &Client, request: http::request::Builder| {
        let request = request.header("Content-Type", "application/json").body(Body::empty()).unwrap();
        let answer = client.send(request).await.unwrap();
        let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
        let (schema, level) = (header("X-Kubernetes-PF-FlowSchema-UID"), header("X-Kubernetes-PF-PriorityLevel-UID"));
        (schemas[&schema].clone(), levels[&level].clone())
    };
    let agent = agent(&case).await;
    let ours = format!("namespaces/{NAMESPACE}");
    let (core, kinds) = (format!("/api/v1/{ours}"), format!("/apis/distribute.flux-framework.org/v1alpha1/{ours}"));
    let leases = format!("/apis/coordination.k8s.io/v1/{ours}/leases");
    until_true("the API server to know the priority level", async || {
        served(&agent, Request::get("/version")).await.1 == "flux-distribute"
    })
    .await;
    let cases = [
        ("flux-distribute", "GET", core.clone()),
        ("flux-distribute", "GET", format!("{core}/configmaps/flux-roster")),
        ("flux-distribute", "GET", format!("{kinds}/fluxnodes?fieldSelector=metadata.name%3Dnode1")),
        ("flux-distribute", "PATCH", format!("{kinds}/fluxnodes/node1/status")),
        ("flux-distribute", "PATCH", format!("{core}/pods/a/status")),
        ("flux-distribute-leases", "GET", format!("{leases}/flux-planner")),
        ("flux-distribute-leases", "PUT", format!("{leases}/flux-planner")),
        ("flux-distribute-planner", "GET", "/api/v1/nodes".to_owned()),
        ("flux-distribute-planner", "PATCH", "/api/v1/nodes/node1".to_owned()),
        ("flux-distribute-planner", "GET", format!("{core}/pods")),
        ("flux-distribute-planner", "POST", "/api/v1/namespaces/default/pods/a/binding".to_owned()),
        ("flux-distribute-planner", "POST", "/api/v1/namespaces/default/pods/a/eviction".to_owned()),
        ("flux-distribute-planner", "GET", "/api/v1/pods?watch=true&timeoutSeconds=1".to_owned()),
        ("flux-distribute-planner", "GET", "/apis/batch/v1/jobs?watch=true&timeoutSeconds=1".to_owned()),
        ("flux-distribute-planner", "PUT", format!("{core}/configmaps/flux-roster")),
        ("flux-distribute-planner", "PATCH", format!("{kinds}/fluxnodes/node1")),
        ("flux-distribute-planner", "PUT", format!("{kinds}/fluxinstances/flux/status")),
    ];
    for (schema, method, path) in cases {
        let request = Request::builder().method(method).uri(&path);
        assert_eq!(served(&agent, request).await, (schema.to_owned(), "flux-distribute".to_owned()), "{method} {path}");
    }
    // Another account of the same namespace.
    let other = Request::get(&core)
        .header("Impersonate-User", format!("system:serviceaccount:{NAMESPACE}:default"))
        .header("Impersonate-Group", "system:serviceaccounts");
    let others = ("service-accounts".to_owned(), "workload-low".to_owned());
    assert_eq!(served(&case.client, other).await, others);
}
