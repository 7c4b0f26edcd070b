//! When a change of the spec takes effect, in one place for every field of a FluxInstance's spec.

use std::collections::BTreeMap;

use serde_json::Value;

use api::FluxInstanceSpec;

/// When a changed field takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// At once; brokers and jobs keep running.
    Live,
    /// At once; brokers and jobs keep running, except on members that leave because of it.
    LiveMembers,
    /// At the next epoch, because Flux reads it only at start. Until then the condition `RestartPending` is True.
    NextEpoch,
    /// Only at the first start: an existing instance keeps what it has.
    FirstStart,
}

impl std::fmt::Display for Effect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Live => "takes effect at once, and disturbs nothing that runs",
            Self::LiveMembers => {
                "takes effect at once; a member that leaves keeps its jobs until they end, or until spec.drain.timeout if that is set"
            }
            Self::NextEpoch => "takes effect at the next coordinated restart (spec.upgrade says when)",
            Self::FirstStart => "takes effect only if the instance has not started yet",
        })
    }
}

/// The effect of each field, by its path below `spec`. The entry with the longest matching prefix decides.
const EFFECTS: [(&str, Effect); 23] = [
    ("packages", Effect::NextEpoch),
    ("packages.allowHttpCredentials", Effect::Live),
    ("packages.keep", Effect::Live),
    ("packages.mirror", Effect::Live),
    // Only where the bundle comes from; its sha256 says which package set it is.
    ("packages.bundle.url", Effect::Live),
    ("nodes", Effect::LiveMembers),
    ("size", Effect::LiveMembers),
    ("maxSize", Effect::NextEpoch),
    ("lead", Effect::FirstStart),
    ("topology", Effect::NextEpoch),
    ("broker", Effect::NextEpoch),
    ("broker.runAs", Effect::FirstStart),
    ("spares", Effect::NextEpoch),
    ("resources", Effect::Live),
    ("ranks", Effect::Live),
    ("drain", Effect::LiveMembers),
    ("autoscaling", Effect::Live),
    ("pods", Effect::Live),
    ("pods.enabled", Effect::NextEpoch),
    ("upgrade", Effect::Live),
    ("uninstall", Effect::Live),
    ("state", Effect::Live),
    ("prefix", Effect::FirstStart),
];

/// A field that differs between two specs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its path below `spec`, such as `broker.port`.
    pub field: String,
    /// When it takes effect.
    pub effect: Effect,
    /// True if only the old spec sets it, so that it gets its default.
    pub is_removed: bool,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let removed = if self.is_removed { " (no longer set, so it gets its default)" } else { "" };
        write!(f, "spec.{}{removed}: {}", self.field, self.effect)
    }
}

/// Returns the fields that differ between two specs, sorted by path.
pub fn changes(old: &FluxInstanceSpec, new: &FluxInstanceSpec) -> Vec<Change> {
    let mut fields = BTreeMap::new();
    let value = |spec: &FluxInstanceSpec| serde_json::to_value(spec).unwrap_or_default();
    differing(&value(old), &value(new), String::new(), &mut fields);
    fields.into_iter().map(|(field, is_removed)| Change { effect: effect(&field), field, is_removed }).collect()
}

/// When a change of `field` takes effect. An unknown field counts as [`Effect::NextEpoch`]: announcing a restart that
/// doesn't come is better than denying one that does.
pub fn effect(field: &str) -> Effect {
    let is_below =
        |prefix: &str| field.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let known = EFFECTS.iter().filter(|(prefix, _)| is_below(prefix)).max_by_key(|(prefix, _)| prefix.len());
    known.map_or(Effect::NextEpoch, |(_, effect)| *effect)
}

fn differing(old: &Value, new: &Value, path: String, found: &mut BTreeMap<String, bool>) {
    match (old, new) {
        _ if old == new => {}
        (Value::Object(before), Value::Object(after)) => {
            for key in before.keys().chain(after.keys()) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differing(
                    &before.get(key).cloned().unwrap_or_default(),
                    &after.get(key).cloned().unwrap_or_default(),
                    path,
                    found,
                );
            }
        }
        _ => drop(found.insert(path, new.is_null())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::settings::{pending, settings};
    use api::PackageSet;

    fn spec(value: &Value) -> FluxInstanceSpec {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn each_field_has_the_effect_that_is_announced_for_it() {
        let old = FluxInstanceSpec::default();
        let running = settings(&old, "root", 3, "digest", "certificate");
        for (value, field, effect) in [
            (json!({"size": 2}), "size", Effect::LiveMembers),
            (json!({"maxSize": 100}), "maxSize", Effect::NextEpoch),
            (json!({"lead": "node1"}), "lead", Effect::FirstStart),
            (json!({"topology": "kary:2"}), "topology", Effect::NextEpoch),
            (json!({"broker": {"port": 9000}}), "broker.port", Effect::NextEpoch),
            (json!({"broker": {"runAs": "flux"}}), "broker.runAs", Effect::FirstStart),
            (json!({"broker": {"config": "[archive]"}}), "broker.config", Effect::NextEpoch),
            (json!({"broker": {"cpuWeight": 5}}), "broker.cpuWeight", Effect::NextEpoch),
            (json!({"broker": {"checkpointPeriod": "5m"}}), "broker.checkpointPeriod", Effect::NextEpoch),
            (json!({"spares": {"shape": {"cores": 3}}}), "spares.shape", Effect::NextEpoch),
            (json!({"resources": {"properties": ["pool"]}}), "resources.properties", Effect::Live),
            (json!({"resources": {"gpus": "All"}}), "resources.gpus", Effect::Live),
            (json!({"resources": {"exclude": {"cores": "0"}}}), "resources.exclude.cores", Effect::Live),
            (json!({"resources": {"exclude": {"lead": true}}}), "resources.exclude.lead", Effect::Live),
            (json!({"resources": {"retain": "1h"}}), "resources.retain", Effect::Live),
            (json!({"ranks": {"retain": "1h"}}), "ranks.retain", Effect::Live),
            (json!({"drain": {"timeout": "1h"}}), "drain.timeout", Effect::LiveMembers),
            (json!({"autoscaling": {"protect": false}}), "autoscaling.protect", Effect::Live),
            (json!({"upgrade": {"deadline": "1h"}}), "upgrade.deadline", Effect::Live),
            (json!({"uninstall": {"keepState": true}}), "uninstall.keepState", Effect::Live),
            (json!({"nodes": {"selector": {"matchLabels": {"a": "b"}}}}), "nodes.selector", Effect::LiveMembers),
            (json!({"packages": {"keep": 3}}), "packages.keep", Effect::Live),
            (json!({"prefix": "/srv/flux"}), "prefix", Effect::FirstStart),
            (json!({"state": {"dumpEvery": "1h"}}), "state.dumpEvery", Effect::Live),
        ] {
            let new = spec(&value);
            let changed = changes(&old, &new);
            assert_eq!(changed.len(), 1, "{value}: {changed:?}");
            assert_eq!((changed[0].field.as_str(), changed[0].effect), (field, effect));
            let restarts = pending(&running, &new, "root", "digest", "certificate").is_some();
            let is_next = effect == Effect::NextEpoch;
            assert_eq!(is_next, restarts, "{value}");
        }
    }

    #[test]
    fn a_field_that_only_the_old_spec_sets_is_removed() {
        let (old, new) = (spec(&json!({"size": 2, "maxSize": 9})), spec(&json!({"size": 3})));
        let [max_size, size] = &changes(&old, &new)[..] else { panic!("two changes") };
        assert!(max_size.is_removed && max_size.to_string().starts_with("spec.maxSize (no longer set"), "{max_size}");
        assert!(!size.is_removed && size.to_string().starts_with("spec.size: takes effect at once"), "{size}");
    }

    #[test]
    fn every_field_is_classified() {
        let schema = schemars::schema_for!(FluxInstanceSpec);
        let fields = schema.as_value()["properties"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert!(fields.len() > 10);
        for field in fields {
            assert!(EFFECTS.iter().any(|(known, _)| *known == field), "{field}");
        }
    }

    #[test]
    fn other_packages_need_a_new_epoch_but_another_source_does_not() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let bundle = |url: &str, sha256: &str| json!({"packages": {"bundle": {"url": url, "sha256": sha256}}});
        let digest = |spec: &FluxInstanceSpec| {
            let bundle = spec.packages.bundle.clone();
            bundle.map_or_else(|| json!(spec.packages.specs).to_string(), |bundle| PackageSet::Bundle(bundle).digest())
        };
        let (url, sha256) = (("packages.bundle.url", Effect::Live), ("packages.bundle.sha256", Effect::NextEpoch));
        for (old, new, expected) in [
            (
                json!({"packages": {"specs": ["flux-core"]}}),
                json!({"packages": {"specs": ["flux-core >=0.88"], "mirror": "https://mirror.example.org"}}),
                vec![("packages.mirror", Effect::Live), ("packages.specs", Effect::NextEpoch)],
            ),
            (bundle("https://old/b.tgz", &a), bundle("file:///srv/b.tgz", &a), vec![url]),
            (bundle("https://old/b.tgz", &a), bundle("https://old/b.tgz", &b), vec![sha256]),
            (bundle("https://old/b.tgz", &a), bundle("https://new/b.tgz", &b), vec![sha256, url]),
            (json!({}), bundle("https://new/b.tgz", &a), vec![("packages.bundle", Effect::NextEpoch)]),
        ] {
            let (old, new) = (spec(&old), spec(&new));
            let changed: Vec<_> = changes(&old, &new).into_iter().map(|change| (change.field, change.effect)).collect();
            let restarts =
                pending(&settings(&old, "root", 3, &digest(&old), "c"), &new, "root", &digest(&new), "c").is_some();
            assert_eq!(restarts, expected.iter().any(|(_, effect)| *effect == Effect::NextEpoch), "{changed:?}");
            assert_eq!(
                changed,
                expected.iter().map(|(field, effect)| ((*field).to_owned(), *effect)).collect::<Vec<_>>()
            );
        }
    }
}
