use std::sync::LazyLock;

use kube::CustomResourceExt;
use serde_json::{Value, json};

use crate::{schema, validate::*};
use api::{
    FluxInstance,
    rules::{EMPTY_SELECTOR, PREFIX_CHARACTERS, PREFIX_PLACE},
};

const GOOD: &[&str] = &[
    "{}",
    "{size: 2, maxSize: 4}",
    "{topology: 'kary:2'}",
    "{topology: binomial}",
    "{packages: {bundle: {url: 'https://example.org/flux.tar.gz', sha256: '0000000000000000000000000000000000000000000000000000000000000000'}}}",
    "{packages: {channels: ['file:///srv/channel'], specs: ['flux-core 0.88.*']}}",
    "{broker: {runAs: '54321', config: '[exec]'}, ranks: {retain: 1.5h}}",
    "{prefix: /data_1/flux-2.0/A/, state: {dumpEvery: 1h}, broker: {runAs: '4294967294'}}",
    "{resources: {properties: [topology.kubernetes.io/zone, pool, a_b], gpus: None}}",
    "{resources: {gpus: All, exclude: {cores: '0-1,8', lead: true, nodes: [node1.example.org]}}}",
    "{packages: {refresh: 2026-11-20, mirror: 'file:///srv/mirror', keep: 1}}",
    "{topology: flat, lead: node1.example.org, packages: {glibc: '2.34', platforms: [linux-aarch64]}}",
    "{topology: mincrit, upgrade: {deadline: '90'}}",
    "{nodes: {selector: {matchLabels: {pool: hpc, example.org/a: ''}}, label: true}}",
    "{nodes: {selector: {matchExpressions: [{key: a, operator: In, values: [b]}, {key: c, operator: DoesNotExist}]}}}",
    "{nodes: {tolerations: [{operator: Exists}, {key: a, value: b, effect: NoSchedule}, {key: a, operator: Exists}]}}",
];

/// Invalid specs, each with the field that is wrong.
const BAD: &[(&str, &str)] = &[
    ("{size: 0}", "size"),
    ("{maxSize: 0}", "maxSize"),
    ("{size: 5, maxSize: 4}", "size"),
    ("{topology: ring}", "topology"),
    ("{broker: {port: 0}}", "broker.port"),
    ("{broker: {port: 8051}}", "broker.port"),
    ("{broker: {port: 8052}}", "broker.port"),
    ("{broker: {runAs: 'a b'}}", "broker.runAs"),
    ("{broker: {runAs: ''}}", "broker.runAs"),
    ("{broker: {runAs: '4294967295'}}", "broker.runAs"),
    ("{broker: {runAs: '004294967295'}}", "broker.runAs"),
    ("{broker: {runAs: '4294967296'}}", "broker.runAs"),
    ("{broker: {config: '[bootstrap]'}}", "broker.config"),
    ("{broker: {config: 'x ='}}", "broker.config"),
    ("{broker: {config: 'sched-fluxion-qmanager = 5'}}", "broker.config"),
    ("{broker: {config: '[[sched-fluxion-qmanager]]'}}", "broker.config"),
    ("{broker: {checkpointPeriod: soon}}", "broker.checkpointPeriod"),
    ("{ranks: {retain: -5m}}", "ranks.retain"),
    ("{resources: {retain: soon}}", "resources.retain"),
    ("{drain: {timeout: 5 m}}", "drain.timeout"),
    ("{upgrade: {deadline: nan}}", "upgrade.deadline"),
    ("{state: {dumpEvery: daily}}", "state.dumpEvery"),
    ("{state: {dumpEvery: 30s}}", "state.dumpEvery"),
    ("{pods: {enabled: true}, broker: {runAs: flux}}", "pods.enabled"),
    ("{pods: {maxGang: 0}}", "pods.maxGang"),
    ("{pods: {defaultDuration: 0s}}", "pods.defaultDuration"),
    ("{pods: {completeAfter: soon}}", "pods.completeAfter"),
    ("{pods: {tolerance: half}}", "pods.tolerance"),
    ("{pods: {tolerance: -500m}}", "pods.tolerance"),
    ("{prefix: opt/flux}", "prefix"),
    ("{prefix: /}", "prefix"),
    ("{prefix: /opt}", "prefix"),
    ("{prefix: /opt/../etc}", "prefix"),
    ("{prefix: /data/my flux}", "prefix"),
    ("{prefix: '/data/flux%n'}", "prefix"),
    ("{prefix: '/data/flux\"'}", "prefix"),
    ("{prefix: /data/flüx}", "prefix"),
    ("{resources: {gpus: Some}}", "resources.gpus"),
    ("{upgrade: {onFailure: Ask}}", "upgrade.onFailure"),
    ("{uninstall: {runningJobs: Move}}", "uninstall.runningJobs"),
    ("{spares: {shape: {cores: 0}}}", "spares.shape.cores"),
    ("{resources: {properties: ['pool=hpc']}}", "resources.properties[0]"),
    ("{resources: {properties: ['a|b']}}", "resources.properties[0]"),
    ("{resources: {properties: ['']}}", "resources.properties[0]"),
    ("{resources: {properties: ['/zone']}}", "resources.properties[0]"),
    ("{resources: {exclude: {cores: first}}}", "resources.exclude.cores"),
    ("{resources: {exclude: {nodes: [Node1]}}}", "resources.exclude.nodes[0]"),
    ("{packages: {channels: [conda-forge]}}", "packages.channels[0]"),
    ("{packages: {specs: ['']}}", "packages.specs[0]"),
    ("{packages: {platforms: [osx-64]}}", "packages.platforms[0]"),
    ("{packages: {bundle: {url: /a.tar.gz, sha256: x}}}", "packages.bundle.url"),
    ("{packages: {bundle: {url: 'file:///a.tar.gz', sha256: x}}}", "packages.bundle.sha256"),
    ("{packages: {mirror: 'file://srv/mirror'}}", "packages.mirror"),
    ("{packages: {specs: [a], bundle: {url: 'file:///a.tar.gz', sha256: x}}}", "packages"),
    ("{packages: {specs: [a], lock: x}}", "packages"),
    ("{packages: {lock: x}}", "packages.lock"),
    ("{packages: {refresh: ' '}}", "packages.refresh"),
    ("{packages: {mirror: mirror.example.org}}", "packages.mirror"),
    ("{packages: {mirror: 'ftp://mirror.example.org'}}", "packages.mirror"),
    ("{packages: {mirror: 'https://mirror.example.org/?token=a'}}", "packages.mirror"),
    ("{packages: {mirror: 'https://mirror.example.org/?Job_Token=a'}}", "packages.mirror"),
    ("{packages: {channels: ['https://h/t/tk.s3cret']}}", "packages.channels[0]"),
    ("{packages: {channels: ['https://h/c?a=b']}}", "packages.channels[0]"),
    ("{packages: {channels: ['https://h/c#token=a']}}", "packages.channels[0]"),
    ("{packages: {keep: 0}}", "packages.keep"),
    ("{packages: {specs: ['flux-core ===']}}", "packages.specs[0]"),
    ("{packages: {specs: [flux-core, 'https://example.org/a.conda']}}", "packages.specs[1]"),
    ("{packages: {glibc: two}}", "packages.glibc"),
    ("{packages: {glibc: '2'}}", "packages.glibc"),
    ("{broker: {cpuWeight: 0}}", "broker.cpuWeight"),
    ("{broker: {cpuWeight: 10001}}", "broker.cpuWeight"),
    ("{lead: Bad Name}", "lead"),
    ("{lead: ''}", "lead"),
    ("{topology: 'kary:0'}", "topology"),
    ("{topology: 'kary:00'}", "topology"),
    ("{drain: {timeout: '1e3'}}", "drain.timeout"),
    ("{drain: {timeout: '.5h'}}", "drain.timeout"),
    ("{nodes: {selector: {}}}", "nodes.selector"),
    ("{nodes: {selector: {matchLabels: {a b: c}}}}", "nodes.selector.matchLabels.a b"),
    ("{nodes: {selector: {matchLabels: {a: b c}}}}", "nodes.selector.matchLabels.a"),
    (
        "{nodes: {selector: {matchLabels: {distribute.flux-framework.org/online: 'true'}}}}",
        "nodes.selector.matchLabels.distribute.flux-framework.org/online",
    ),
    (
        "{nodes: {selector: {matchExpressions: [{key: distribute.flux-framework.org/lead, operator: Exists}]}}}",
        "nodes.selector.matchExpressions[0].key",
    ),
    ("{resources: {properties: [distribute.flux-framework.org/rank]}}", "resources.properties[0]"),
    (
        "{nodes: {selector: {matchExpressions: [{key: a, operator: Gt, values: ['1']}]}}}",
        "nodes.selector.matchExpressions[0].operator",
    ),
    ("{nodes: {selector: {matchExpressions: [{key: a, operator: In}]}}}", "nodes.selector.matchExpressions[0].values"),
    ("{nodes: {tolerations: [{key: a, operator: Equals}]}}", "nodes.tolerations[0].operator"),
    ("{nodes: {tolerations: [{key: a, effect: NoSchedul}]}}", "nodes.tolerations[0].effect"),
    ("{nodes: {tolerations: [{key: a, operator: Exists, value: b}]}}", "nodes.tolerations[0].value"),
    ("{nodes: {tolerations: [{value: b}]}}", "nodes.tolerations[0].key"),
];

fn spec(yaml: &str) -> Value {
    serde_norway::from_str(yaml).unwrap()
}

fn found(yaml: &str) -> Vec<Finding> {
    validate(&serde_json::from_value(spec(yaml)).unwrap())
}

#[test]
fn valid_specs_are_accepted() {
    for yaml in GOOD {
        assert_eq!(found(yaml), [], "{yaml}");
    }
}

#[test]
fn each_invalid_spec_is_refused_with_its_field() {
    for (yaml, field) in BAD {
        let found = found(yaml);
        assert!(found.iter().any(|finding| finding.field == format!("spec.{field}")), "{yaml}: {found:?}");
    }
}

/// The CRD's openAPIV3Schema, which a real API server enforces.
fn crd() -> Value {
    static SCHEMA: LazyLock<Value> =
        LazyLock::new(|| json!(FluxInstance::crd())["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take());
    SCHEMA.clone()
}

/// Adds the path of every value that violates its schema's pattern or maxLength.
fn unmatched(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            let fits =
                schema["pattern"].as_str().is_none_or(|pattern| regex::Regex::new(pattern).unwrap().is_match(text));
            let length = u64::try_from(text.chars().count()).unwrap();
            if !fits || schema["maxLength"].as_u64().is_some_and(|most| length > most) {
                found.push(path.to_owned());
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                unmatched(&schema["items"], item, &format!("{path}[{index}]"), found);
            }
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                unmatched(&schema["properties"][name], value, &format!("{path}.{name}"), found);
            }
        }
        _ => {}
    }
}

/// The fields that the CRD alone refuses, as a real API server would.
fn refused_by_crd(spec: &Value) -> Vec<String> {
    let schema = crd();
    let mut object = json!({ "spec": spec });
    let found = schema::apply(&schema, &mut object);
    let mut found: Vec<_> = found.errors.into_iter().chain(found.unknown).map(|finding| finding.field).collect();
    unmatched(&schema["properties"]["spec"], &object["spec"], "spec", &mut found);
    found
}

#[test]
fn the_crd_refuses_no_valid_spec_and_no_field_that_validate_accepts() {
    for yaml in GOOD {
        assert_eq!(refused_by_crd(&spec(yaml)), [""; 0], "{yaml}");
    }
    for (yaml, _) in BAD {
        let ours: Vec<_> = found(yaml).into_iter().map(|finding| finding.field).collect();
        let theirs = refused_by_crd(&spec(yaml));
        assert!(theirs.iter().all(|field| ours.contains(field)), "{yaml}: the CRD says {theirs:?}, we say {ours:?}");
    }
}

/// One case for each rule that the CRD can carry.
#[test]
fn the_crd_refuses_all_that_a_schema_can_express() {
    for yaml in [
        "{lead: Bad Name}",
        "{topology: ring}",
        "{topology: 'kary:0'}",
        "{size: 5000000000}",
        "{packages: {glibc: two}}",
        "{packages: {platforms: [osx-64]}}",
        "{packages: {channels: [conda-forge]}}",
        "{packages: {mirror: mirror.example.org}}",
        "{packages: {bundle: {url: 'file:///a.tar.gz', sha256: x}}}",
        "{broker: {cpuWeight: 0}}",
        "{broker: {runAs: 'a b'}}",
        "{broker: {checkpointPeriod: soon}}",
        "{ranks: {retain: -5m}}",
        "{drain: {timeout: 5 m}}",
        "{prefix: opt/flux}",
        "{uninstall: {runningJobs: Move}}",
        "{upgrade: {deadline: nan}}",
        "{state: {dumpEvery: daily}}",
        "{resources: {exclude: {nodes: [Node1]}}}",
        "{nodes: {tolerations: [{key: a, operator: Equals}]}}",
        "{nodes: {tolerations: [{key: a, effect: NoSchedul}]}}",
        "{nodes: {selector: {matchExpressions: [{key: a, operator: Gt}]}}}",
    ] {
        assert_eq!(refused_by_crd(&spec(yaml)).len(), 1, "{yaml}");
    }
}

/// If the CRD let in a number that the Rust type can't hold, every watch would fail on that object.
#[test]
fn every_number_in_the_crd_is_bounded_by_its_type() {
    fn unbounded(schema: &Value, path: &str, found: &mut Vec<String>) {
        let is_ours = schema["format"].as_str().is_some_and(|format| format.starts_with("uint"));
        if is_ours && (schema["maximum"].is_null() || schema["minimum"].is_null()) {
            found.push(path.to_owned());
        }
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            unbounded(schema, &format!("{path}.{name}"), found);
        }
    }
    let mut found = Vec::new();
    unbounded(&crd()["properties"]["spec"], "spec", &mut found);
    assert_eq!(found, [""; 0]);
}

/// Only a real API server runs CEL rules, so check that they are in place with the same messages as [`validate`].
#[test]
fn the_cel_rules_are_in_place_with_the_messages_of_validate() {
    let spec = crd()["properties"]["spec"].take();
    let rules = |schema: &Value| schema["x-kubernetes-validations"].as_array().cloned().unwrap_or_default();
    let selector = rules(&spec["properties"]["nodes"]["properties"]["selector"]);
    assert_eq!(selector[0]["message"], EMPTY_SELECTOR);
    assert_eq!(found("{nodes: {selector: {}}}")[0].problem, EMPTY_SELECTOR);
    assert_eq!(rules(&spec["properties"]["size"])[0]["message"], LESS_THAN_ONE);
    assert_eq!(rules(&spec)[0]["message"], MORE_THAN_MAX_SIZE);
    let prefix = &rules(&spec["properties"]["prefix"])[0];
    assert_eq!((&prefix["message"], &prefix["optionalOldSelf"]), (&json!(PREFIX_CHARACTERS), &json!(true)));
    let place = &rules(&spec["properties"]["prefix"])[1];
    assert_eq!((&place["message"], &place["optionalOldSelf"]), (&json!(PREFIX_PLACE), &json!(true)));
    for prefix in ["/run/flux-distribute", "/tmp/x", "//var//run/x", "/proc/x", "/var/tmp", "/./tmp/x", "/var/./lock/x"]
    {
        assert!(found(&format!("{{prefix: {prefix}}}"))[0].problem.ends_with(PREFIX_PLACE), "{prefix}");
    }
    assert!(found("{prefix: /data/my flux}")[0].problem.ends_with(PREFIX_CHARACTERS));
}

#[test]
fn durations_are_flux_standard_durations() {
    for (text, seconds) in
        [("10", Some(10.0)), ("90s", Some(90.0)), ("1.5h", Some(5400.0)), ("250ms", Some(0.25)), ("1d", Some(86400.0))]
    {
        assert_eq!(parse_duration(text).map(|duration| duration.as_secs_f64()), seconds, "{text}");
    }
    for text in ["", "s", "-1", "1 m", "1h30m", "1e3", ".5", "5.", "1.2.3", "inf", "nan", "+1"] {
        assert!(duration(text).is_err(), "{text}");
    }
}

#[test]
fn values_that_older_versions_accepted_are_wrong_but_still_servable() {
    for (spec, expected) in [
        ("{topology: 'kary:0'}", true),
        ("{nodes: {selector: {}}}", true),
        ("{nodes: {tolerations: [{key: a, operator: Exists, value: b}]}}", true),
        ("{prefix: /data/my flux}", true),
        ("{prefix: /tmp/x}", true),
        ("{prefix: data/flux}", false),
        ("{topology: 'ring'}", false),
        ("{lead: 'Bad Name'}", false),
    ] {
        let found = found(spec);
        assert_eq!((found.len(), found[0].is_servable), (1, expected), "{spec}: {found:?}");
    }
}
