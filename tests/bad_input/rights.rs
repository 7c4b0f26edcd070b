//! An agent's token in the wrong hands: what the manifest's rules refuse, by a real API server.

use std::time::Duration;

use flux_distribute::{
    api::{ANNOTATION_PROTECTS, CONDITION_POD_READY, FluxInstance, INSTANCE, NAMESPACE},
    plan::protect::PROTECTING,
};
use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Node, Pod, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use kube::{
    Api, Client, Config, Resource, ResourceExt,
    api::{Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::cluster::{Case, nobody};

/// Makes all objects of a kind that the manifest has.
async fn make<K>(api: Api<K>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    let text = include_str!("../../deploy/daemonset-installer.yaml");
    let documents =
        serde_norway::Deserializer::from_str(text).map(|one| serde_norway::Value::deserialize(one).unwrap());
    let kind = K::kind(&()).into_owned();
    let mut made = 0;
    for document in documents.filter(|document| document["kind"].as_str() == Some(&kind)) {
        let object: K = serde_norway::from_value(document).unwrap();
        match api.create(&PostParams::default(), &object).await {
            // Another test has made it: the API server is one for all.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            made => drop(made.unwrap()),
        }
        made += 1;
    }
    assert!(made > 0, "the manifest has no {kind}");
}

/// A client with the token of the agents' account.
async fn agent(case: &Case) -> Client {
    rights(case).await;
    token(case, TokenRequestSpec::default()).await
}

/// The agents' account, and what it may do.
async fn rights(case: &Case) {
    let client = || case.client.clone();
    make(Api::<ServiceAccount>::namespaced(client(), NAMESPACE)).await;
    make(Api::<Role>::namespaced(client(), NAMESPACE)).await;
    make(Api::<RoleBinding>::namespaced(client(), NAMESPACE)).await;
    make(Api::<ClusterRole>::all(client())).await;
    make(Api::<ClusterRoleBinding>::all(client())).await;
    make(Api::<ValidatingAdmissionPolicy>::all(client())).await;
    make(Api::<ValidatingAdmissionPolicyBinding>::all(client())).await;
}

/// A client with such a token of that account.
async fn token(case: &Case, spec: TokenRequestSpec) -> Client {
    let accounts = Api::<ServiceAccount>::namespaced(case.client.clone(), NAMESPACE);
    let request = TokenRequest { spec, ..TokenRequest::default() };
    let asked = accounts.create_token_request("install-flux", &PostParams::default(), &request).await.unwrap();
    let kubeconfig = Kubeconfig::from_yaml(&case.cluster.must(&["kubeconfig"])).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.proxy_url = None;
    config.auth_info = Default::default();
    config.auth_info.token = Some(asked.status.unwrap().token.into());
    Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_changes_no_more_of_a_node_than_the_annotations_for_autoscalers() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let all = Api::<Node>::all(case.client.clone());
    let own = Api::<Node>::all(agent(&case).await);
    let theirs = json!({"metadata": {"annotations": {"example.org/theirs": "1"}, "labels": {"example.org/pool": "a"}}});
    all.patch("node1", &PatchParams::default(), &Patch::Merge(theirs)).await.unwrap();
    let patch = async |value: Value| own.patch("node1", &PatchParams::default(), &Patch::Merge(value)).await;

    let taint = json!([{"key": "example.org/mine", "effect": "NoSchedule"}]);
    let wrong = [
        json!({"spec": {"taints": taint}}),
        json!({"spec": {"unschedulable": true}}),
        json!({"metadata": {"labels": {"example.org/pool": "b"}}}),
        json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}),
        json!({"metadata": {"labels": null}}),
        json!({"metadata": {"finalizers": ["example.org/mine"]}}),
        json!({"metadata": {"annotations": {"example.org/mine": "1"}}}),
        json!({"metadata": {"annotations": {"example.org/theirs": "2"}}}),
        json!({"metadata": {"annotations": {"example.org/theirs": null}}}),
        json!({"metadata": {"annotations": {ANNOTATION_PROTECTS: "x"}, "labels": {"example.org/pool": "b"}}}),
    ];
    // A policy is heard of a moment after it is made.
    tokio::time::timeout(Duration::from_secs(30), async {
        while patch(wrong[6].clone()).await.is_ok() {
            let clean = json!({"metadata": {"annotations": {"example.org/mine": null}}});
            all.patch("node1", &PatchParams::default(), &Patch::Merge(clean)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await
    .unwrap();
    let before = all.get("node1").await.unwrap();
    for value in wrong {
        match patch(value.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                assert!(
                    status.message.contains("no more of a Node than the annotations"),
                    "{value}: {}",
                    status.message
                );
            }
            other => panic!("{value}: {other:?}"),
        }
    }
    let status = json!({"status": {"phase": "Terminated"}});
    assert!(own.patch_status("node1", &PatchParams::default(), &Patch::Merge(status)).await.is_err());
    assert!(own.delete("node1", &Default::default()).await.is_err());
    let after = all.get("node1").await.unwrap();
    assert_eq!(
        (&after.spec, after.labels(), after.annotations()),
        (&before.spec, before.labels(), before.annotations())
    );

    let [first, second] = PROTECTING;
    let marks = json!({"metadata": {"annotations": {first: "true", second: "true", ANNOTATION_PROTECTS: "both"}}});
    assert_eq!(patch(marks).await.unwrap().annotations().len(), before.annotations().len() + 3);
    let marks = json!({"metadata": {"annotations": {first: null, second: null, ANNOTATION_PROTECTS: null}}});
    assert_eq!(patch(marks).await.unwrap().annotations(), before.annotations());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_size_that_does_not_fit_is_refused_by_the_kinds_own_rules() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(nobody()).await;
    case.patch(json!({"size": 3, "maxSize": 4})).await;
    let instances = Api::<FluxInstance>::namespaced(case.client.clone(), NAMESPACE);
    for (size, words) in [
        (5, "spec.size: Invalid value"),
        (5, "is more than maxSize: raise maxSize too"),
        (0, "is 0: delete the FluxInstance to take everything off"),
    ] {
        let scale = Patch::Merge(json!({"spec": {"replicas": size}}));
        let by_scale = instances.patch_scale(INSTANCE, &PatchParams::default(), &scale).await.map(drop);
        let by_patch = case.try_patch(json!({"size": size})).await.map(drop);
        for answer in [by_scale, by_patch] {
            match answer {
                Err(kube::Error::Api(status)) if status.code == 422 => {
                    assert!(status.message.contains(words), "{}", status.message);
                }
                other => panic!("{size}: {other:?}"),
            }
        }
    }
    let four = Patch::Merge(json!({"spec": {"replicas": 4}}));
    instances.patch_scale(INSTANCE, &PatchParams::default(), &four).await.unwrap();
    // A field that is null is not one that is too large.
    case.patch(json!({"maxSize": null, "size": 9})).await;
    let mut null = serde_json::to_value(instances.get(INSTANCE).await.unwrap()).unwrap();
    null["spec"]["maxSize"] = Value::Null;
    let request = http::Request::put(format!(
        "/apis/distribute.flux-framework.org/v1alpha1/namespaces/{NAMESPACE}/fluxinstances/{INSTANCE}"
    ));
    let request = request.header("content-type", "application/json").body(null.to_string().into_bytes()).unwrap();
    let stored = case.client.request::<Value>(request).await.unwrap();
    assert_eq!((&stored["spec"]["size"], &stored["spec"]["maxSize"]), (&json!(9), &Value::Null));
    case.patch(nobody()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_tells_the_readiness_of_its_own_pod_only() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    rights(&case).await;
    let all = Api::<Pod>::namespaced(case.client.clone(), NAMESPACE);
    let pod = |name: &str| -> Pod {
        let container = json!({"name": "agent", "image": "localhost/none:1"});
        let spec = json!({"serviceAccountName": "install-flux", "containers": [container]});
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    };
    let own_pod = all.create(&PostParams::default(), &pod("own")).await.unwrap();
    all.create(&PostParams::default(), &pod("another")).await.unwrap();
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some("own".to_owned()),
        uid: own_pod.uid(),
    };
    let bound = TokenRequestSpec { bound_object_ref: Some(bound), ..TokenRequestSpec::default() };
    let pods = Api::<Pod>::namespaced(token(&case, bound).await, NAMESPACE);
    let condition = json!([{"type": CONDITION_POD_READY, "status": "True"}]);
    let ready = Patch::Strategic(json!({"status": {"conditions": condition}}));
    // A policy is heard of a moment after it is made.
    tokio::time::timeout(Duration::from_secs(30), async {
        while pods.patch_status("another", &PatchParams::default(), &ready).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await
    .unwrap();
    match pods.patch_status("another", &PatchParams::default(), &ready).await {
        Err(kube::Error::Api(status)) if status.code == 403 => {
            assert!(status.message.contains("no other pod than its own"), "{}", status.message);
        }
        other => panic!("{other:?}"),
    }
    let told = pods.patch_status("own", &PatchParams::default(), &ready).await.unwrap();
    let conditions = told.status.unwrap().conditions.unwrap();
    assert!(conditions.iter().any(|condition| condition.type_ == CONDITION_POD_READY && condition.status == "True"));
    let label = Patch::Merge(json!({"metadata": {"labels": {"example.org/mine": "1"}}}));
    assert!(pods.patch("own", &PatchParams::default(), &label).await.is_err());
}
