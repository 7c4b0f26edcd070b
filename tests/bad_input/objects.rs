//! An agent's token in the wrong hands: which objects it makes, and what it can't hang onto them, by a real API server.

use api::{
    CONDITION_FLUX_NODES_UNUSABLE, CONFIGMAP_BROKER, CONFIGMAP_DEFAULT, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER,
    FluxInstance, FluxNode, INSTANCE, LEASE_PLANNER, NAMESPACE, SECRET_CURVE, SECRET_PACKAGES,
};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Node, Secret},
    events::v1::Event,
};
use kube::{
    Api, Client, Error, Resource,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{Case, no_nodes, until_true},
    rights::{agent, agent_on, refused},
};

/// Objects of one kind, whatever they hold.
struct Kind {
    kind: ApiResource,
    api: Api<DynamicObject>,
}

impl Kind {
    fn of<K: Resource<DynamicType = ()>>(client: &Client) -> Self {
        let kind = ApiResource::erase::<K>(&());
        Self { api: Api::namespaced_with(client.clone(), NAMESPACE, &kind), kind }
    }

    /// Asks whether `object` could be made with this name, and makes nothing.
    async fn try_create(&self, name: &str, mut object: Value) -> Result<DynamicObject, Error> {
        object["metadata"]["name"] = name.into();
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        self.api.create(&dry, &self.whole(object)).await
    }

    fn whole(&self, mut object: Value) -> DynamicObject {
        (object["apiVersion"], object["kind"]) = (self.kind.api_version.clone().into(), self.kind.kind.clone().into());
        serde_json::from_value(object).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_can_create_only_the_objects_that_the_program_creates() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let client = agent(&case).await;
    let (maps, secrets) = (Kind::of::<ConfigMap>(&client), Kind::of::<Secret>(&client));
    let (leases, instances) = (Kind::of::<Lease>(&client), Kind::of::<FluxInstance>(&client));
    until_true("the policy to hold", async || maps.try_create("mine", json!({})).await.is_err()).await;
    // It would never end.
    let token = json!({
        "type": "kubernetes.io/service-account-token",
        "metadata": {"annotations": {"kubernetes.io/service-account.name": "install-flux"}},
    });
    for (kind, name, object) in [
        (&maps, "mine", json!({})),
        (&maps, CONFIGMAP_DEFAULT, json!({})),
        (&secrets, "mine", json!({})),
        (&secrets, SECRET_PACKAGES, json!({})),
        (&secrets, SECRET_CURVE, token),
        (&secrets, SECRET_CURVE, json!({"type": "example.org/mine"})),
        (&leases, "mine", json!({"spec": {}})),
        (&instances, "mine", json!({"spec": {}})),
    ] {
        let what = format!("{} {name} {object}", kind.kind.kind);
        let (code, words) = refused(kind.try_create(name, object).await, &what);
        assert!(code == 403 && words.contains("makes no other objects than its own"), "{what}: {words}");
    }
    let generated = leases.whole(json!({"metadata": {"generateName": LEASE_PLANNER}, "spec": {}}));
    assert_eq!(refused(leases.api.create(&PostParams::default(), &generated).await, "generateName").0, 403);

    for (kind, name, object) in [
        (&maps, CONFIGMAP_BROKER, json!({})),
        (&maps, CONFIGMAP_PACKAGES, json!({})),
        (&maps, CONFIGMAP_ROSTER, json!({})),
        (&secrets, SECRET_CURVE, json!({})),
        (&secrets, SECRET_CURVE, json!({"type": "Opaque"})),
        (&leases, LEASE_PLANNER, json!({"spec": {}})),
        (&instances, INSTANCE, json!({"spec": {}})),
    ] {
        match kind.try_create(name, object).await {
            // Admitted, but there already.
            Err(Error::Api(status)) if status.code == 409 => {}
            made => drop(made.unwrap_or_else(|error| panic!("{} {name}: {error}", kind.kind.kind))),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_can_set_no_finalizer_and_no_owner() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let client = agent(&case).await;
    let (maps, leases, events) =
        (Kind::of::<ConfigMap>(&client), Kind::of::<Lease>(&client), Kind::of::<Event>(&client));
    let (secrets, instances) = (Kind::of::<Secret>(&client), Kind::of::<FluxInstance>(&client));
    let event = json!({
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "example.org/mine",
        "reportingInstance": "mine", "action": "Try", "reason": "Try", "type": "Normal",
        "regarding": {"apiVersion": "v1", "kind": "Namespace", "name": NAMESPACE, "namespace": NAMESPACE},
    });
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "nowhere", "uid": "1"}]);
    let held = [json!({"finalizers": ["example.org/mine"]}), json!({"ownerReferences": owner})];
    let with = |object: &Value, metadata: &Value| {
        let mut object = object.clone();
        object["metadata"] = metadata.clone();
        object
    };
    until_true("the policy to hold", async || {
        maps.try_create(CONFIGMAP_ROSTER, with(&json!({}), &held[0])).await.is_err()
    })
    .await;
    let is_refused = |what: &str, (code, words): (u16, String)| {
        // Of an object that has more owners than us, another policy refuses it too.
        let policy =
            if what.starts_with(CONFIGMAP_DEFAULT) { "'flux-distribute-" } else { "'flux-distribute-no-finalizers'" };
        assert!(code == 403 && words.contains(policy), "{what}: {words}");
    };
    for metadata in &held {
        for (kind, name, object) in [
            (&maps, CONFIGMAP_ROSTER, json!({})),
            (&secrets, SECRET_CURVE, json!({})),
            (&leases, LEASE_PLANNER, json!({"spec": {}})),
            (&instances, INSTANCE, json!({"spec": {}})),
            (&events, "mine", event.clone()),
        ] {
            let what = format!("{} {metadata}", kind.kind.kind);
            is_refused(&what, refused(kind.try_create(name, with(&object, metadata)).await, &what));
        }
    }

    // Nor onto what is there.
    let made = events.whole(with(&event, &json!({"name": "mine"})));
    events.api.create(&PostParams::default(), &made).await.unwrap();
    for metadata in &held {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        for (kind, name) in [(&events, "mine"), (&maps, CONFIGMAP_DEFAULT)] {
            let what = format!("{name} {metadata}");
            is_refused(&what, refused(kind.api.patch(name, &PatchParams::default(), &patch).await, &what));
        }
        // The planner renews it meanwhile.
        let answer = loop {
            let mut lease = serde_json::to_value(leases.api.get(LEASE_PLANNER).await.unwrap()).unwrap();
            json_patch::merge(&mut lease, &json!({ "metadata": metadata }));
            match refused(leases.api.replace(LEASE_PLANNER, &PostParams::default(), &leases.whole(lease)).await, "") {
                (409, _) => {}
                answer => break answer,
            }
        };
        is_refused(&format!("the Lease, {metadata}"), answer);
    }
    Kind::of::<Event>(&case.client).api.delete("mine", &DeleteParams::default()).await.unwrap();
}

/// Makes it as large as etcd takes, so that nobody can write a byte more.
async fn fill(kind: &Kind, name: &str) {
    let made = kind.whole(json!({"metadata": {"name": name}, "spec": {"nodeName": name}}));
    kind.api.create(&PostParams::default(), &made).await.unwrap();
    for spare in (0..1 << 16).step_by(64) {
        let more = Patch::Merge(json!({"metadata": {"generateName": "x".repeat((3 << 19) - spare)}}));
        match kind.api.patch(name, &PatchParams::default(), &more).await {
            Err(Error::Api(status)) if status.message.contains("too large") => {}
            Err(error) => panic!("{:.300}", error.to_string()),
            Ok(_) => return,
        }
    }
    panic!("etcd takes none of these");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flux_node_that_can_not_be_written_is_named_and_stops_no_planner() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    let kind = Kind::of::<FluxNode>(&case.client);
    fill(&kind, "node9").await;
    let node = serde_json::from_value(json!({"metadata": {"name": "node9"}})).unwrap();
    Api::<Node>::all(case.client.clone()).create(&PostParams::default(), &node).await.unwrap();
    let instances = Api::<FluxInstance>::namespaced(case.client.clone(), NAMESPACE);
    until_true("the planner to name it", async || {
        let status = instances.get(INSTANCE).await.unwrap().status.unwrap_or_default();
        let is_named = |message: &str| {
            message.contains("spec of FluxNode node9: ") && message.contains("can't change FluxNode node9 (")
        };
        let unusable = status.holding(CONDITION_FLUX_NODES_UNUSABLE);
        unusable.is_some_and(|found| found.reason == "FluxNodeNotWritten" && is_named(&found.message))
    })
    .await;
    case.patch(json!({"maxSize": 7})).await;
    until_true("a planner that plans", async || {
        let instance = instances.get(INSTANCE).await.unwrap();
        instance.status.is_some_and(|status| Some(status.observed_generation) == instance.metadata.generation)
    })
    .await;
    Api::<Node>::all(case.client.clone()).delete("node9", &DeleteParams::default()).await.unwrap();
    kind.api.delete("node9", &DeleteParams::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_adds_no_labels_to_our_objects_and_a_renewal_drops_a_leases() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    let client = agent(&case).await;
    let (nodes, leases) = (Kind::of::<FluxNode>(&client), Kind::of::<Lease>(&client));
    let patch = async |metadata: &Value| {
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        nodes.api.patch("node1", &PatchParams::default(), &patch).await
    };
    until_true("the policy to hold", async || {
        let found = patch(&json!({"labels": {"example.org/mine": "1"}})).await;
        if found.is_ok() {
            let admins = Kind::of::<FluxNode>(&case.client).api;
            let gone = Patch::Merge(json!({"metadata": {"labels": null}}));
            admins.patch("node1", &PatchParams::default(), &gone).await.unwrap();
        }
        found.is_err_and(|error| error.to_string().contains("writes neither labels"))
    })
    .await;
    for metadata in [
        json!({"labels": {"example.org/mine": "1"}}),
        json!({"annotations": {"example.org/mine": "1"}}),
        json!({"generateName": "x".repeat(1000)}),
    ] {
        let (code, words) = refused(patch(&metadata).await, &metadata.to_string());
        assert!(code == 403 && words.contains("writes neither labels"), "{metadata}: {words}");
    }
    let of_own = agent_on(&case, "of-own").await;
    let all = Kind::of::<FluxNode>(&case.client);
    let made = all.whole(json!({"metadata": {"name": "of-own"}, "spec": {"nodeName": "of-own"}}));
    all.api.create(&PostParams::default(), &made).await.unwrap();
    let applied =
        json!({"apiVersion": nodes.kind.api_version, "kind": nodes.kind.kind, "status": {"agentVersion": "1"}});
    let status = Kind::of::<FluxNode>(&of_own).api;
    let answer = status.patch_status("of-own", &PatchParams::apply("m1").force(), &Patch::Apply(&applied)).await;
    let (code, words) = refused(answer, "one that applies");
    assert!(code == 403 && words.contains("adds no manager"), "{words}");
    all.api.delete("of-own", &DeleteParams::default()).await.unwrap();

    let mine = json!({"metadata": {"labels": {"example.org/mine": "1"}, "annotations": {"example.org/mine": "1"}}});
    until_true("a Lease with a label", async || {
        let Ok(lease) = leases.api.get(LEASE_PLANNER).await else { return false };
        let mut lease = serde_json::to_value(lease).unwrap();
        json_patch::merge(&mut lease, &mine);
        leases.api.replace(LEASE_PLANNER, &PostParams::default(), &leases.whole(lease)).await.is_ok()
    })
    .await;
    until_true("a renewal without it", async || {
        let metadata = leases.api.get(LEASE_PLANNER).await.unwrap().metadata;
        metadata.labels.is_none() && metadata.annotations.is_none()
    })
    .await;

    let instances = Kind::of::<FluxInstance>(&client);
    case.api::<FluxInstance>().delete(INSTANCE, &DeleteParams::default()).await.unwrap();
    let labelled = json!({"metadata": {"name": INSTANCE, "labels": {"example.org/mine": "1"}}, "spec": {}});
    let (code, words) =
        refused(instances.api.create(&PostParams::default(), &instances.whole(labelled)).await, "a label");
    assert!(code == 403 && words.contains("writes neither labels"), "{words}");
}
