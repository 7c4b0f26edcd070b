//! What an agent's token in the wrong hands can write about who manages which fields of an object, by a real API server.

use api::{
    ANNOTATION_CONSUMED, ANNOTATION_PROTECTS, CONFIGMAP_DEFAULT, FluxInstance, FluxNode, INSTANCE, LEASE_PLANNER,
    NAMESPACE,
};
use cluster::patch_params;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
};
use model::eligibility::PROTECTING;
use serde_json::{Value, json};

use super::{
    cluster::{Case, no_nodes, until_true},
    rights::{agent, refused},
};

/// Says of `manager` that it has applied `fields`.
fn applied(manager: &str, version: &str, fields: &Value) -> Value {
    json!({
        "manager": manager, "operation": "Apply", "apiVersion": version, "fieldsType": "FieldsV1", "fieldsV1": fields,
        "time": "2026-01-01T00:00:00Z",
    })
}

/// Says of the agents that they have updated `fields`.
fn updated_by_us(version: &str, fields: &Value) -> Value {
    let mut entry = applied(&patch_params().field_manager.unwrap(), version, fields);
    entry["operation"] = json!("Update");
    entry
}

fn forbidden<T: std::fmt::Debug>(answer: Result<T, kube::Error>, what: &str) {
    let (code, words) = refused(answer, what);
    assert!(code == 403 && words.contains("'flux-distribute-managers'"), "{what}: {words}");
}

/// The managedFields of `object`, to change and write back.
fn managers(object: &impl ResourceExt) -> Vec<Value> {
    object.managed_fields().iter().map(|entry| serde_json::to_value(entry).unwrap()).collect()
}

/// Waits for the policy, and undoes what the API server admitted before it.
async fn until_the_policy_holds(case: &Case) {
    let (all, own) = (Api::<Node>::all(case.client.clone()), Api::<Node>::all(agent(case).await));
    until_true("the policy to hold", async || {
        let taints = applied("a", "v1", &json!({"f:spec": {"f:taints": {}}}));
        let forged = [managers(&all.get("node1").await.unwrap()), vec![taints]].concat();
        let forged = Patch::Merge(json!({"metadata": {"managedFields": forged}}));
        let is_refused = own.patch("node1", &patch_params(), &forged).await.is_err();
        let nothing = Patch::Apply(json!({"apiVersion": "v1", "kind": "Node"}));
        all.patch("node1", &PatchParams::apply("a").force(), &nothing).await.unwrap();
        is_refused
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_makes_no_object_too_slow_to_be_written() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let client = agent(&case).await;
    let many = |version: &str, fields: Value| {
        (0..600).map(|number| applied(&format!("m{number}"), version, &fields)).collect::<Vec<_>>()
    };

    let nodes = Api::<Node>::all(client.clone());
    let mark = json!({"metadata": {"annotations": {ANNOTATION_PROTECTS: "x"}}});
    nodes.patch("node1", &patch_params(), &Patch::Merge(&mark)).await.unwrap();
    let ours = json!({"f:metadata": {"f:annotations": {format!("f:{ANNOTATION_PROTECTS}"): {}}}});
    let forged = json!({"metadata": {"managedFields": many("v1", ours)}});
    until_the_policy_holds(&case).await;
    forbidden(nodes.patch("node1", &patch_params(), &Patch::Merge(&forged)).await, "a Node");

    let maps = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
    let forged = json!({"metadata": {"managedFields": many("v1", json!({"f:data": {"f:spec.yaml": {}}}))}});
    forbidden(maps.patch(CONFIGMAP_DEFAULT, &patch_params(), &Patch::Merge(&forged)).await, "flux-default");

    let kind = ApiResource::erase::<FluxInstance>(&());
    let instances = Api::<DynamicObject>::namespaced_with(client.clone(), NAMESPACE, &kind);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let mut made = DynamicObject::new(INSTANCE, &kind).data(json!({"spec": {}}));
    let fields = json!({"f:spec": {"f:maxSize": {}}});
    let forged = json!(many("distribute.flux-framework.org/v1alpha1", fields));
    made.metadata.managed_fields = serde_json::from_value(forged).unwrap();
    forbidden(instances.create(&dry, &made).await, "a FluxInstance");

    case.create(no_nodes()).await;
    let fields = json!({"f:status": {"f:message": {}}});
    let forged = json!(many("distribute.flux-framework.org/v1alpha1", fields));
    let answer = not_overtaken(async || {
        let mut instance = instances.get(INSTANCE).await?;
        instance.metadata.managed_fields = serde_json::from_value(forged.clone()).unwrap();
        instance.data["status"]["message"] = json!("x");
        instances.replace_status(INSTANCE, &PostParams::default(), &instance).await
    });
    let written = answer.await.unwrap();
    assert!(
        managers(&written).iter().all(|entry| entry["operation"] == "Update"),
        "with a status, managers count: {written:?}"
    );

    let forged = many("coordination.k8s.io/v1", json!({"f:spec": {"f:holderIdentity": {}}}));
    forbidden(forge_the_lease(&client, &forged).await, "the Lease");
}

/// What the API server answers if the Lease is given these managers.
async fn forge_the_lease(client: &Client, forged: &[Value]) -> Result<Lease, kube::Error> {
    let leases = Api::<Lease>::namespaced(client.clone(), NAMESPACE);
    not_overtaken(async || {
        let mut lease = leases.get(LEASE_PLANNER).await?;
        lease.metadata.managed_fields = serde_json::from_value(json!(forged)).unwrap();
        leases.replace(LEASE_PLANNER, &PostParams::default(), &lease).await
    })
    .await
}

/// What the API server answers to a change of an object that will be there and that the planner writes, too.
async fn not_overtaken<T>(change: impl AsyncFn() -> Result<T, kube::Error>) -> Result<T, kube::Error> {
    let mut last = None;
    until_true("a change that is not overtaken", async || {
        let answer = change().await;
        let is_overtaken = matches!(&answer, Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409));
        last = Some(answer);
        !is_overtaken
    })
    .await;
    last.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_invents_no_fields_below_those_that_it_writes() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let client = agent(&case).await;
    let ours = |annotation: &str, below: Value| {
        updated_by_us("v1", &json!({"f:metadata": {"f:annotations": {format!("f:{annotation}"): below}}}))
    };
    until_the_policy_holds(&case).await;

    let nodes = Api::<Node>::all(client.clone());
    let write = async |below: Value| {
        let node = Api::<Node>::all(case.client.clone()).get("node1").await.unwrap();
        let forged = [managers(&node), vec![ours(ANNOTATION_PROTECTS, below)]].concat();
        let forged = json!({"metadata": {"annotations": {ANNOTATION_PROTECTS: "x"}, "managedFields": forged}});
        nodes.patch("node1", &patch_params(), &Patch::Merge(forged)).await
    };
    forbidden(write(json!({"f:a": {}})).await, "a Node");
    write(json!({})).await.unwrap();

    let maps = Api::<ConfigMap>::namespaced(client, NAMESPACE);
    let forged = json!({"metadata": {"managedFields": [ours(ANNOTATION_CONSUMED, json!({"f:a": {}}))]}});
    forbidden(maps.patch(CONFIGMAP_DEFAULT, &patch_params(), &Patch::Merge(forged)).await, "flux-default");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_takes_no_field_from_its_manager_and_gives_none() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let all = Api::<Node>::all(case.client.clone());
    let own = Api::<Node>::all(agent(&case).await);
    let [first, second] = PROTECTING;
    let by_gitops = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"labels": {"example.org/pool": "a"}, "annotations": {first: "false", "example.org/theirs": "1"}},
        "spec": {"taints": [{"key": "example.org/pool", "effect": "PreferNoSchedule"}]},
    });
    all.patch("node1", &PatchParams::apply("gitops").force(), &Patch::Apply(&by_gitops)).await.unwrap();
    let is_gitops = |entry: &&mut Value| entry["manager"] == "gitops";
    let patch = async |value: Value| own.patch("node1", &patch_params(), &Patch::Merge(value)).await;
    until_the_policy_holds(&case).await;
    type Change = fn(&mut Value);
    let fields: [(&str, Change); 7] = [
        ("a field less", |entry| entry["fieldsV1"]["f:spec"].as_object_mut().unwrap().clear()),
        ("a part less", |entry| drop(entry["fieldsV1"].as_object_mut().unwrap().remove("f:spec"))),
        ("an annotation less", |entry| {
            let annotations = entry["fieldsV1"]["f:metadata"]["f:annotations"].as_object_mut().unwrap();
            annotations.remove("f:example.org/theirs").unwrap();
        }),
        ("a field more", |entry| entry["fieldsV1"]["f:spec"]["f:unschedulable"] = json!({})),
        ("another manager", |entry| entry["manager"] = json!("kustomize")),
        ("another operation", |entry| entry["operation"] = json!("Update")),
        ("another subresource", |entry| entry["subresource"] = json!("status")),
    ];
    for (what, change) in fields {
        let mut forged = managers(&all.get("node1").await.unwrap());
        change(forged.iter_mut().find(is_gitops).unwrap());
        forbidden(patch(json!({"metadata": {"managedFields": forged}})).await, what);
    }
    let mut without = managers(&all.get("node1").await.unwrap());
    without.retain(|entry| entry["manager"] != "gitops");
    forbidden(patch(json!({"metadata": {"managedFields": without}})).await, "an entry less");

    let of_ours = json!({"f:metadata": {"f:annotations": {format!("f:{first}"): {}}}});
    for (manager, subresource) in [("m1", Value::Null), ("flux-distribute", json!("scale"))] {
        let mut more = managers(&all.get("node1").await.unwrap());
        let mut entry = applied(manager, "v1", &of_ours);
        (entry["operation"], entry["subresource"]) = (json!("Update"), subresource);
        more.push(entry);
        forbidden(patch(json!({"metadata": {"managedFields": more}})).await, "one of many updates");
    }

    // Ten managers that have updated it don't end the comparison.
    for number in 0..12 {
        let manager = PatchParams { field_manager: Some(format!("label{number}")), ..PatchParams::default() };
        let label = json!({"metadata": {"labels": {format!("example.org/label{number}"): "x"}}});
        all.patch("node1", &manager, &Patch::Merge(label)).await.unwrap();
    }
    for (manager, what) in [("m1", "another manager beside many"), ("ancient-changes", "more than many have")] {
        let mut more = managers(&all.get("node1").await.unwrap());
        let mut entry = applied(manager, "v1", &json!({"f:spec": {"f:unschedulable": {}}}));
        entry["operation"] = json!("Update");
        more.retain(|entry| entry["manager"] != manager);
        more.push(entry);
        forbidden(patch(json!({"metadata": {"managedFields": more}})).await, what);
    }

    // What we do write takes our annotation from whoever has it, also beside more managers than the API server keeps apart.
    let marks = json!({"metadata": {"annotations": {first: "true", second: "true", ANNOTATION_PROTECTS: "both"}}});
    let marked = patch(marks).await.unwrap();
    assert_eq!(marked.annotations()[first], "true");
    let unmarked = json!({"metadata": {"annotations": {first: null, second: null, ANNOTATION_PROTECTS: null}}});
    patch(unmarked).await.unwrap();
    for number in 0..12 {
        let manager = PatchParams { field_manager: Some(format!("tool{number}")), ..PatchParams::default() };
        let label = json!({"metadata": {"labels": {format!("example.org/{number}"): "x"}}});
        all.patch("node1", &manager, &Patch::Merge(label)).await.unwrap();
        patch(json!({"metadata": {"annotations": {first: number.to_string()}}})).await.unwrap();
    }
    patch(json!({"metadata": {"annotations": {first: null}}})).await.unwrap();

    // Also where somebody has applied the file with the first spec.
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"spec.yaml": ""}, "metadata": {"annotations": {ANNOTATION_CONSUMED: "a"}}});
    let theirs = Api::<ConfigMap>::namespaced(case.client.clone(), NAMESPACE);
    theirs.patch(CONFIGMAP_DEFAULT, &PatchParams::apply("gitops").force(), &Patch::Apply(&map)).await.unwrap();
    let maps = Api::<ConfigMap>::namespaced(agent(&case).await, NAMESPACE);
    let mut forged = managers(&theirs.get(CONFIGMAP_DEFAULT).await.unwrap());
    forged.iter_mut().find(is_gitops).unwrap()["fieldsV1"].as_object_mut().unwrap().remove("f:data");
    let forged = json!({"metadata": {"managedFields": forged}});
    forbidden(maps.patch(CONFIGMAP_DEFAULT, &patch_params(), &Patch::Merge(forged)).await, "flux-default");
    let mark = json!({"metadata": {"annotations": {ANNOTATION_CONSUMED: "b"}}});
    maps.patch(CONFIGMAP_DEFAULT, &patch_params(), &Patch::Merge(mark)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn managers_that_are_nested_too_deeply_to_be_read_stop_no_planner() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    let client = agent(&case).await;
    let deep = || (0..200).fold(json!({}), |below, _| json!({"f:a": below}));
    // The API server has written it, and its answer is no object for a client that reads all of it.
    fn unread<T: std::fmt::Debug>(answer: Result<T, kube::Error>) {
        assert!(matches!(answer, Err(kube::Error::SerdeError(_))), "{answer:?}");
    }
    until_the_policy_holds(&case).await;
    // In a Node, by whoever may change it.
    let nodes = Api::<Node>::all(case.client.clone());
    let below = json!({"f:metadata": {"f:labels": {"f:example.org/x": deep()}}});
    let before = managers(&nodes.get("node1").await.unwrap());
    let forged = [before.clone(), vec![updated_by_us("v1", &below)]].concat();
    let forged = json!({"metadata": {"labels": {"example.org/x": "y"}, "managedFields": forged}});
    unread(nodes.patch("node1", &PatchParams::default(), &Patch::Merge(forged)).await);

    // In a FluxNode and the Lease, by an agent's token.
    let own = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    until_true("a FluxNode", async || own.get("node1").await.is_ok()).await;
    let forged = updated_by_us(&FluxNode::api_version(&()), &json!({"f:spec": deep()}));
    unread(own.patch("node1", &patch_params(), &Patch::Merge(json!({"metadata": {"managedFields": [forged]}}))).await);

    let forged = updated_by_us("coordination.k8s.io/v1", &json!({"f:spec": deep()}));
    unread(forge_the_lease(&client, &[forged]).await);

    case.restart_agent("node1").await;
    case.patch(json!({"maxSize": 99})).await;
    case.until::<FluxInstance>(INSTANCE, "seen by a planner", |flux| {
        flux.status.as_ref().is_some_and(|status| Some(status.observed_generation) == flux.metadata.generation)
    })
    .await;
    // Other tests read them, too.
    let restored = Patch::Merge(json!({"metadata": {"managedFields": before}}));
    nodes.patch("node1", &PatchParams::default(), &restored).await.unwrap();
    let none = Patch::Merge(json!({"metadata": {"managedFields": [{}]}}));
    case.api::<FluxNode>().patch("node1", &PatchParams::default(), &none).await.unwrap();
    case.api::<Lease>().patch(LEASE_PLANNER, &PatchParams::default(), &none).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_can_not_be_represented_stops_no_planner() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    let client = agent(&case).await;
    // In a Node, by whoever may change it.
    let nodes = Api::<Node>::all(case.client.clone());
    let mut managed = managers(&nodes.get("node1").await.unwrap());
    managed.iter_mut().for_each(|entry| entry["time"] = json!("9999-12-31T23:59:59Z"));
    let patch = Patch::Merge(json!({"metadata": {"managedFields": managed, "labels": {"example.org/x": "y"}}}));
    let unread: Result<Node, _> = nodes.patch("node1", &PatchParams::default(), &patch).await;
    assert!(unread.is_err(), "then `times` in `cluster` is not needed any more");
    // In the Lease, by an agent's token.
    let kind = ApiResource::erase::<Lease>(&());
    let leases = Api::<DynamicObject>::namespaced_with(client, NAMESPACE, &kind);
    for time in ["9999-12-31T23:59:59.000000Z", "9999-12-31T23:59:59.000000-14:00", "0000-01-01T00:00:00.000000+14:00"]
    {
        let mut served = Value::Null;
        until_true("a Lease with such a time", async || {
            let Ok(mut lease) = leases.get(LEASE_PLANNER).await else { return false };
            lease.data["spec"]["renewTime"] = json!(time);
            let Ok(written) = leases.replace(LEASE_PLANNER, &PostParams::default(), &lease).await else { return false };
            served = written.data["spec"]["renewTime"].clone();
            true
        })
        .await;
        // A planner that begins has to read it, and the Node.
        case.cluster.must(&["agent", "node1", "kill"]);
        until_true("a planner that renews it", async || {
            leases.get(LEASE_PLANNER).await.unwrap().data["spec"]["renewTime"] != served
        })
        .await;
    }
    case.patch(json!({"maxSize": 7})).await;
    until_true("a planner that plans", async || {
        let instance = Api::<FluxInstance>::namespaced(case.client.clone(), NAMESPACE).get(INSTANCE).await.unwrap();
        instance.status.is_some_and(|status| Some(status.observed_generation) == instance.metadata.generation)
    })
    .await;
    // In the status of our own objects, the API server refuses those that no client reads.
    let kind = ApiResource::erase::<FluxInstance>(&());
    let instances = Api::<DynamicObject>::namespaced_with(agent(&case).await, NAMESPACE, &kind);
    for time in ["9999-12-31t23:59:59z", "2026-02-30T00:00:00Z", "2100-02-29T00:00:00Z", "2026-01-01T00:00:00+99:00"] {
        let condition =
            json!({"type": "A", "status": "True", "reason": "B", "message": "", "lastTransitionTime": time});
        // The planner writes it meanwhile.
        let (code, words) = loop {
            let mut instance = instances.get(INSTANCE).await.unwrap();
            instance.data["status"]["conditions"] = json!([condition]);
            match refused(instances.replace_status(INSTANCE, &PostParams::default(), &instance).await, time) {
                (409, _) => {}
                answer => break answer,
            }
        };
        assert!(code == 422 && words.contains("lastTransitionTime"), "{time}: {words}");
    }
    let restored = json!({"metadata": {"managedFields": [{}]}});
    let _: Result<Node, _> = nodes.patch("node1", &PatchParams::default(), &Patch::Merge(restored)).await;
}
