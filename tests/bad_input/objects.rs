//! An agent's token in the wrong hands: which objects it makes, and what it can't hang onto them, by a real API server.

use api::{
    CONFIGMAP_BROKER, CONFIGMAP_DEFAULT, CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, FluxInstance, INSTANCE, LEASE_PLANNER,
    NAMESPACE, SECRET_CURVE, SECRET_PACKAGES,
};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Secret},
    events::v1::Event,
};
use kube::{
    Api, Client, Error, Resource,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{Case, until_true},
    rights::{agent, refused},
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
