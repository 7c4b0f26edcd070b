//! Whatever a real API server takes into our objects, this program can read: one that can't be read would be lost to the planner.

use std::fmt::Debug;

use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE};
use kube::{
    Api, CustomResourceExt, Resource,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::cluster::{Case, no_nodes};

/// Sets of ids, of which the API server sees only the text. Whoever writes something else has reported nothing about its own node.
const SETS: [&str; 6] = ["/allocated", "/drained", "/drainedByOthers", "/gangs", "/hostJobs", "/torpid"];

/// A value that the schema takes, with all of its fields.
fn sample(schema: &Value) -> Value {
    let fields = |object: &Value| {
        let fields = object.as_object().into_iter().flatten();
        Value::Object(fields.map(|(name, schema)| (name.clone(), sample(schema))).collect())
    };
    match schema["type"].as_str() {
        Some("object") if schema["additionalProperties"].is_object() => {
            json!({"key": sample(&schema["additionalProperties"])})
        }
        Some("object") => fields(&schema["properties"]),
        Some("array") => json!([sample(&schema["items"])]),
        Some("integer") => json!(1),
        Some("boolean") => json!(true),
        _ if schema["format"] == "date-time" => json!("2026-01-01T00:00:00Z"),
        _ => schema["enum"][0].as_str().map_or(json!("0"), Value::from),
    }
}

/// Each place below `path` in such a sample, as a JSON pointer, with values that are at the end of its type or beyond.
fn extremes(schema: &Value, path: &str) -> Vec<(String, Value)> {
    let own = match schema["type"].as_str() {
        Some("object") => vec![json!({})],
        Some("array") => vec![json!([])],
        Some("integer") => vec![
            json!(0),
            json!(-1),
            json!(1.0),
            json!(1e19),
            json!(1e300),
            json!(u64::from(u8::MAX)),
            json!(u64::from(u16::MAX)),
            json!(u64::from(u32::MAX)),
            json!(u64::from(u32::MAX) + 1),
            json!(i64::MIN),
            json!(i64::MAX),
            json!(u64::MAX),
        ],
        Some("boolean") => vec![json!(false)],
        _ if SETS.contains(&path) => vec![json!("")],
        // Our client reads the last hours of 9999 as 9998 (`times` in `cluster`).
        _ => vec![json!(""), json!("\u{0}"), json!("2026-01-01T00:00:60Z"), json!("0000-01-01T00:00:00Z")],
    };
    let own = own.into_iter().chain([Value::Null]).map(|value| (path.to_owned(), value));
    let fields = schema["properties"].as_object().into_iter().flatten();
    let below = fields.flat_map(|(name, schema)| extremes(schema, &format!("{path}/{name}")));
    let key = schema["additionalProperties"].is_object().then_some(("key", &schema["additionalProperties"]));
    let element = schema["items"].is_object().then_some(("0", &schema["items"]));
    let inner = [key, element].into_iter().flatten();
    own.chain(below).chain(inner.flat_map(|(name, schema)| extremes(schema, &format!("{path}/{name}")))).collect()
}

/// Writes all extremes of `part`; returns how many of them the API server took.
async fn all_are_readable<K>(case: &Case, name: &str, part: &str) -> usize
where
    K: CustomResourceExt + Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    K: DeserializeOwned + Clone + Debug,
{
    let schema = json!(K::crd())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part].clone();
    let kind = ApiResource::erase::<K>(&());
    let objects = Api::<DynamicObject>::namespaced_with(case.client.clone(), NAMESPACE, &kind);
    let write = async |value: &Value| {
        let (params, patch) = (PatchParams::default(), Patch::Merge(json!({part: value})));
        match part {
            "status" => objects.patch_status(name, &params, &patch).await,
            _ => objects.patch(name, &params, &patch).await,
        }
    };
    let mut taken = 0;
    for (path, value) in extremes(&schema, "") {
        let mut object = sample(&schema);
        *object.pointer_mut(&path).unwrap() = value.clone();
        // A merge would keep fields of the last write. The planner writes too, so only the answer to our own write counts.
        if part == "status" {
            write(&Value::Null).await.unwrap();
        }
        let Ok(written) = write(&object).await else { continue };
        taken += 1;
        let read = serde_json::from_value::<K>(json!(written));
        assert!(read.is_ok(), "{part}{path} may be {value}, and then: {read:?}");
    }
    taken
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_api_server_takes_into_our_objects_can_be_read() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(no_nodes()).await;
    let node = json!({
        "apiVersion": FluxNode::api_version(&()), "kind": "FluxNode", "metadata": {"name": "0"}, "spec": {"nodeName": "0"},
    });
    let kind = ApiResource::erase::<FluxNode>(&());
    let nodes = Api::<DynamicObject>::namespaced_with(case.client.clone(), NAMESPACE, &kind);
    nodes.create(&Default::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    assert!(all_are_readable::<FluxNode>(&case, "0", "status").await > 100);
    assert!(all_are_readable::<FluxNode>(&case, "0", "spec").await > 20);
    assert!(all_are_readable::<FluxInstance>(&case, INSTANCE, "status").await > 50);
    nodes.delete("0", &Default::default()).await.unwrap();
}
