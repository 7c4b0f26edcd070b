//! An agent's token in the wrong hands: what the manifest's rules refuse, by a real API server.

use api::{
    ANNOTATION_CONSUMED, ANNOTATION_PROTECTS, CONDITION_POD_READY, CONFIGMAP_DEFAULT, CONFIGMAP_ROSTER, FluxInstance,
    FluxNode, FluxNodeSpec, INSTANCE, LABEL_LEAD, LABEL_ONLINE, LABEL_RANK, NAMESPACE, NodePhase, SECRET_CURVE,
};
use cluster::patch_params;
use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{ConfigMap, Node, Pod, ResourceQuota, Secret, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use kube::{
    Api, Client, Config, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use model::eligibility::PROTECTING;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::cluster::{Case, no_nodes, until_true};

/// Makes all objects of a kind that the manifest has.
pub async fn make<K>(api: Api<K>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    make_of(include_str!("../../deploy/daemonset-installer.yaml"), api).await;
}

/// Makes all objects of a kind that `text` has.
pub async fn make_of<K>(text: &str, api: Api<K>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    let documents =
        serde_norway::Deserializer::from_str(text).map(|one| serde_norway::Value::deserialize(one).unwrap());
    let kind = K::kind(&()).into_owned();
    let mut made = 0;
    // Those of another namespace are not meant.
    let is_here = |document: &serde_norway::Value| {
        let namespace = document["metadata"]["namespace"].as_str();
        namespace.is_none_or(|namespace| api.resource_url().contains(&format!("/namespaces/{namespace}/")))
    };
    for document in documents.filter(|document| document["kind"].as_str() == Some(&kind) && is_here(document)) {
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
pub async fn agent(case: &Case) -> Client {
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
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let asked = accounts.create_token_request("install-flux", &PostParams::default(), &request).await.unwrap();
    let kubeconfig = Kubeconfig::from_yaml(&case.cluster.must(&["kubeconfig"])).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.proxy_url = None;
    config.auth_info = Default::default();
    config.auth_info.token = asked.status.unwrap().token.map(Into::into);
    Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_can_change_only_our_annotations_and_labels_of_a_node() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let all = Api::<Node>::all(case.client.clone());
    let own = Api::<Node>::all(agent(&case).await);
    let theirs = json!({"metadata": {"annotations": {"example.org/theirs": "1"}, "labels": {"example.org/pool": "a"}}});
    all.patch("node1", &PatchParams::default(), &Patch::Merge(theirs)).await.unwrap();
    let patch = async |value: Value| own.patch("node1", &patch_params(), &Patch::Merge(value)).await;

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
        // All annotations of an object share 256 KiB.
        json!({"metadata": {"annotations": {ANNOTATION_PROTECTS: "x".repeat(257)}}}),
    ];
    until_true("the policy to hold", async || {
        // Policy flux-distribute-managers refuses all of them but the last.
        let is_refused = patch(wrong.last().unwrap().clone()).await.is_err();
        let clean = json!({"metadata": {"annotations": {ANNOTATION_PROTECTS: null}}});
        all.patch("node1", &PatchParams::default(), &Patch::Merge(clean)).await.unwrap();
        is_refused
    })
    .await;
    let before = all.get("node1").await.unwrap();
    for value in wrong {
        match patch(value.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                assert!(status.message.contains("denied request: an agent "), "{value}: {}", status.message);
            }
            other => panic!("{value}: {other:?}"),
        }
    }
    // A manager that is said to own taints and labels removes them with the next apply that lacks them.
    let forged = json!({
        "manager": "capi", "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": {"f:taints": {}}, "f:metadata": {"f:labels": {"f:example.org/pool": {}}}},
    });
    for managed in [json!([forged]), json!([{}])] {
        let refused = patch(json!({"metadata": {"managedFields": managed}})).await;
        assert!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 403), "{managed}: {refused:?}");
    }
    let status = json!({"status": {"phase": "Terminated"}});
    assert!(own.patch_status("node1", &patch_params(), &Patch::Merge(status)).await.is_err());
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
    let ours = [LABEL_RANK, LABEL_LEAD, LABEL_ONLINE];
    let labels = |value: Value| {
        let labels: serde_json::Map<_, _> = ours.map(|key| (key.to_owned(), value.clone())).into_iter().collect();
        json!({"metadata": {"labels": labels}})
    };
    for value in ["true", "false"] {
        assert_eq!(patch(labels(json!(value))).await.unwrap().labels().len(), before.labels().len() + 3);
    }
    let mixed = json!({"metadata": {"labels": {LABEL_LEAD: "true", "example.org/pool": null}}});
    assert!(matches!(&patch(mixed).await, Err(kube::Error::Api(status)) if status.code == 403));
    assert_eq!(patch(labels(Value::Null)).await.unwrap().labels(), before.labels());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_size_that_does_not_fit_is_refused_by_the_crds_own_rules() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    case.patch(json!({"size": 3, "maxSize": 4})).await;
    let instances = Api::<FluxInstance>::namespaced(case.client.clone(), NAMESPACE);
    for (size, words) in [
        (5, "spec.size: Invalid value"),
        (5, "is more than maxSize: raise maxSize too"),
        (0, "is 0: to uninstall, delete the FluxInstance"),
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
    let stored = loop {
        let mut null = serde_json::to_value(instances.get(INSTANCE).await.unwrap()).unwrap();
        null["spec"]["maxSize"] = Value::Null;
        let request = http::Request::put(format!(
            "/apis/distribute.flux-framework.org/v1alpha1/namespaces/{NAMESPACE}/fluxinstances/{INSTANCE}"
        ));
        let request = request.header("content-type", "application/json").body(null.to_string().into_bytes()).unwrap();
        match case.client.request::<Value>(request).await {
            // The planner has written the status meanwhile.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            stored => break stored.unwrap(),
        }
    };
    assert_eq!((&stored["spec"]["size"], &stored["spec"]["maxSize"]), (&json!(9), &Value::Null));
    case.patch(no_nodes()).await;
}

/// A client with the token of the agent that runs in pod `name`, on a node of the same name.
pub async fn agent_on(case: &Case, name: &str) -> Client {
    let container = json!({"name": "agent", "image": "localhost/none:1"});
    let spec = json!({"serviceAccountName": "install-flux", "nodeName": name, "containers": [container]});
    let pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
    let pods = Api::<Pod>::namespaced(case.client.clone(), NAMESPACE);
    let bound = BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(name.to_owned()),
        uid: pods.create(&PostParams::default(), &pod).await.unwrap().uid(),
    };
    token(case, TokenRequestSpec { bound_object_ref: Some(bound), ..TokenRequestSpec::default() }).await
}

/// What the API server refuses, and why.
pub fn refused<T: std::fmt::Debug>(answer: Result<T, kube::Error>, what: &str) -> (u16, String) {
    match answer {
        Err(kube::Error::Api(status)) => (status.code, status.message),
        other => panic!("{what}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_can_create_nothing_that_outlives_it() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let client = agent(&case).await;
    let (maps, secrets) =
        (Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE), Api::<Secret>::namespaced(client, NAMESPACE));
    let patch = async |value: Value| maps.patch(CONFIGMAP_DEFAULT, &patch_params(), &Patch::Merge(value)).await;
    let of_its_own = json!({"data": {"spec.yaml": "packages: {channels: ['https://example.org/mine']}"}});
    let mut tries = 256;
    until_true("the policy to hold", async || {
        tries += 1;
        patch(json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: "x".repeat(tries)}}})).await.is_err()
    })
    .await;
    for wrong in [of_its_own, json!({"data": null}), json!({"binaryData": {"more": "eA=="}})] {
        let (code, words) = refused(patch(wrong.clone()).await, &wrong.to_string());
        assert!(code == 403 && words.contains("denied request: an agent "), "{words}");
    }
    // kubectl could apply the ConfigMap no more.
    let last_applied = json!({"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x"}});
    for metadata in
        [last_applied, json!({"labels": {"a": "b"}}), json!({"annotations": {ANNOTATION_CONSUMED: "x".repeat(257)}})]
    {
        assert_eq!(refused(patch(json!({ "metadata": metadata })).await, &metadata.to_string()).0, 403, "{metadata}");
    }
    patch(json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: "uid"}}})).await.unwrap();
    // A FluxInstance that was deleted would come back.
    let unmarked = json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: null}}});
    assert_eq!(refused(patch(unmarked).await, "without its mark").0, 403);

    let object = |name: &str| json!({"metadata": {"name": name}, "immutable": true});
    let map: ConfigMap = serde_json::from_value(object(CONFIGMAP_ROSTER)).unwrap();
    let secret: Secret = serde_json::from_value(object(SECRET_CURVE)).unwrap();
    let post = PostParams::default();
    let open = ConfigMap { immutable: None, ..map.clone() };
    for (code, words) in [
        refused(maps.create(&post, &map).await, "an immutable roster"),
        refused(secrets.create(&post, &secret).await, "an immutable certificate"),
        {
            maps.create(&post, &open).await.unwrap();
            refused(maps.replace(CONFIGMAP_ROSTER, &post, &map).await, "a roster made immutable")
        },
    ] {
        assert!(code == 403 && words.contains("makes nothing immutable"), "{words}");
    }
    maps.delete(CONFIGMAP_ROSTER, &DeleteParams::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_writes_no_other_nodes_status_but_the_account() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    rights(&case).await;
    let left = Api::<FluxNode>::namespaced(agent_on(&case, "left").await, NAMESPACE);
    let right = Api::<FluxNode>::namespaced(agent_on(&case, "right").await, NAMESPACE);
    let of = |name: &str, node: &str| {
        FluxNode::new(name, FluxNodeSpec { node_name: node.to_owned(), ..FluxNodeSpec::default() })
    };
    let (merge, post) = (PatchParams::default(), PostParams::default());
    let apply = PatchParams::apply("left").force();
    left.create(&post, &of("left", "left")).await.unwrap();
    right.create(&post, &of("right", "right")).await.unwrap();
    let online = json!({"status": {"phase": "Online", "message": "by the other one's token"}});
    until_true("the policy to hold", async || {
        left.patch_status("right", &merge, &Patch::Merge(&online)).await.is_err()
    })
    .await;

    // It can't take the other one's name, nor give away its own.
    for (name, node) in [("right", "left"), ("left", "right")] {
        let renamed = Patch::Merge(json!({"spec": {"nodeName": node}}));
        let (code, words) = refused(left.patch(name, &merge, &renamed).await, name);
        assert!(code == 422 && words.contains("spec.nodeName") && words.contains("is not the name"), "{words}");
    }
    // It writes the other one's status in no way there is.
    let mut whole = json!(of("right", "right"));
    whole["status"] = online["status"].clone();
    let json_patch = json!([{"op": "add", "path": "/status", "value": online["status"]}]);
    let json_patch = Patch::Json::<()>(serde_json::from_value(json_patch).unwrap());
    for (what, answer) in [
        ("merge", left.patch_status("right", &merge, &Patch::Merge(&online)).await),
        ("JSON patch", left.patch_status("right", &merge, &json_patch).await),
        ("apply", left.patch_status("right", &apply, &Patch::Apply(&whole)).await),
    ] {
        let (code, words) = refused(answer, what);
        let is_expected = words.contains("FluxNode right belongs to another node") || words.contains("adds no manager");
        assert!(code == 403 && is_expected, "{what}: {words}");
    }
    let mut there = right.get("right").await.unwrap();
    there.status.get_or_insert_default().message = Some("mine".to_owned());
    assert_eq!(refused(left.replace_status("right", &post, &there).await, "replace").0, 403);
    // Only the account: nothing is decided by it.
    right.patch_status("right", &merge, &Patch::Merge(&online)).await.unwrap();
    let account = |more: Value| {
        let mut status = json!({"account": {"hostJobs": 2, "requestedMilliCpu": 2000}});
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Patch::Merge(json!({ "status": status }))
    };
    let with_more = left.patch_status("right", &merge, &account(json!({"message": "mine"}))).await;
    assert_eq!(refused(with_more, "account and more").0, 403);
    let shown = left.patch_status("right", &merge, &account(json!({}))).await.unwrap().status.unwrap();
    assert_eq!(shown.account.unwrap().host_jobs, 2);
    let removed = left.patch_status("right", &merge, &Patch::Merge(json!({"status": null}))).await;
    assert_eq!(refused(removed, "no status").0, 403);
    let nobody = Api::<FluxNode>::namespaced(token(&case, TokenRequestSpec::default()).await, NAMESPACE);
    assert_eq!(refused(nobody.patch_status("left", &merge, &Patch::Merge(&online)).await, "no pod").0, 403);
    // It makes no other one's FluxNode, not even after it has deleted it, which is the planner's right.
    let mut generated = of("", "left");
    (generated.metadata.name, generated.metadata.generate_name) = (None, Some("left".to_owned()));
    left.delete("right", &Default::default()).await.unwrap();
    for (what, answer) in [
        ("create", left.create(&post, &of("right", "right")).await),
        ("create with another nodeName", left.create(&post, &of("right", "left")).await),
        ("create with generateName", left.create(&post, &generated).await),
        ("apply", left.patch("right", &apply, &Patch::Apply(of("right", "right"))).await),
    ] {
        assert!(matches!(refused(answer, what).0, 403 | 422), "{what}");
    }
    right.create(&post, &of("right", "right")).await.unwrap();
    // It keeps none from being deleted, and has none deleted by the garbage collector.
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "nowhere", "uid": "1"}]);
    for metadata in [json!({"finalizers": ["example.org/mine"]}), json!({"ownerReferences": owner})] {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        let (code, words) = refused(left.patch("right", &merge, &patch).await, "metadata");
        assert!(code == 403 && words.contains("no finalizers and no owners"), "{words}");
    }

    // Its own status it writes, and by that nothing else.
    let more = json!({
        "metadata": {"labels": {"example.org/mine": "1"}, "finalizers": ["example.org/mine"]},
        "spec": {"nodeName": "right", "want": "Run"}, "status": {"phase": "Waiting"},
    });
    let told = left.patch_status("left", &merge, &Patch::Merge(more)).await.unwrap();
    assert_eq!(told.status.unwrap().phase, NodePhase::Waiting);
    assert_eq!((told.spec, told.metadata.labels, told.metadata.finalizers), (of("left", "left").spec, None, None));
    assert_eq!(right.get("right").await.unwrap().status, None);
    // What the planner does, every agent may.
    let told = Patch::Merge(json!({"spec": {"reason": "no room"}}));
    left.patch("right", &merge, &told).await.unwrap();
    for name in ["left", "right"] {
        right.delete(name, &Default::default()).await.unwrap();
        let pods = Api::<Pod>::namespaced(case.client.clone(), NAMESPACE);
        pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_admitted_if_a_provider_allows_critical_ones_only_with_a_quota() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let quotas = Api::<ResourceQuota>::namespaced(case.client.clone(), NAMESPACE);
    let pods = Api::<Pod>::namespaced(case.client.clone(), NAMESPACE);
    let text = include_str!("../../deploy/daemonset-installer.yaml");
    let of_kind = |kind: &str| {
        let documents = serde_norway::Deserializer::from_str(text).map(|one| Value::deserialize(one).unwrap());
        documents.filter(|one| one["kind"] == kind).collect::<Vec<_>>()
    };
    for mut daemon_set in of_kind("DaemonSet") {
        let mut pod = daemon_set["spec"]["template"].take();
        pod["metadata"]["name"] = "critical".into();
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let (_, words) = refused(pods.create(&PostParams::default(), &pod).await, "no quota");
        assert!(words.contains("insufficient quota to match these scopes"), "{words}");
        for quota in of_kind("ResourceQuota") {
            let made = quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
            // What kube-controller-manager does.
            let status = json!({"status": {"hard": made.spec.unwrap().hard, "used": {"pods": "0"}}});
            quotas
                .patch_status(&made.metadata.name.unwrap(), &PatchParams::default(), &Patch::Merge(status))
                .await
                .unwrap();
        }
        until_true("the quota to be seen", async || pods.create(&PostParams::default(), &pod).await.is_ok()).await;
        pods.delete("critical", &DeleteParams::default().grace_period(0)).await.unwrap();
        for quota in quotas.list(&Default::default()).await.unwrap() {
            quotas.delete(&quota.name_any(), &DeleteParams::default()).await.unwrap();
        }
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        until_true("the quota to be gone", async || pods.create(&dry, &pod).await.is_err()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_can_set_the_readiness_of_its_own_pod_only() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    rights(&case).await;
    let pods = Api::<Pod>::namespaced(agent_on(&case, "own").await, NAMESPACE);
    agent_on(&case, "another").await;
    let condition = json!([{"type": CONDITION_POD_READY, "status": "True"}]);
    let ready = Patch::Strategic(json!({"status": {"conditions": condition}}));
    until_true("the policy to hold", async || pods.patch_status("another", &patch_params(), &ready).await.is_err())
        .await;
    match pods.patch_status("another", &patch_params(), &ready).await {
        Err(kube::Error::Api(status)) if status.code == 403 => {
            assert!(status.message.contains("no other pod than its own"), "{}", status.message);
        }
        other => panic!("{other:?}"),
    }
    let told = pods.patch_status("own", &patch_params(), &ready).await.unwrap();
    let conditions = told.status.unwrap().conditions.unwrap();
    assert!(conditions.iter().any(|condition| condition.type_ == CONDITION_POD_READY && condition.status == "True"));
    for metadata in [
        json!({"labels": {"example.org/mine": "1"}}),
        json!({"annotations": {"example.org/mine": "1"}}),
        json!({"finalizers": ["example.org/mine"]}),
    ] {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        assert_eq!(refused(pods.patch("own", &patch_params(), &patch).await, "its pod").0, 403);
        assert_eq!(refused(pods.patch_status("own", &patch_params(), &patch).await, "with its status").0, 403);
    }
}
