//! Checks a spec for what its schema can't express.

mod nodes;
mod packages;
#[cfg(test)]
mod tests;

use std::{path::Path, time::Duration};

use crate::{broker_toml, labels, settings::is_root, topology::Topology};
use api::{
    Broker, Finding, FluxInstanceSpec, Gpus, IdSet, InstanceResources, METRICS_PORT, OnFailure, PEER_PORT, PrefixError,
    RunningJobs, check_prefix, check_prefix_characters, check_prefix_place, duration, is_subdomain, parse_duration,
    quantity::milli,
    rules::{LESS_THAN_ONE, MORE_THAN_MAX_SIZE},
};

/// Returns everything that is wrong with a spec beyond its schema; empty if the spec can be served.
pub fn validate(spec: &FluxInstanceSpec) -> Vec<Finding> {
    let mut wrong = Vec::new();
    packages::validate(&spec.packages, &mut wrong);
    nodes::validate(&spec.nodes, &mut wrong);
    sizes(spec, &mut wrong);
    if let Some(lead) = spec.lead.as_ref().filter(|lead| !is_subdomain(lead)) {
        wrong.push(Finding::new("spec.lead", format!("{lead:?} is not a node name")));
    }
    wrong.extend(spec.topology.as_deref().and_then(|text| topology(text, spec.max_size.unwrap_or(1))));
    broker(&spec.broker, &mut wrong);
    if spec.spares.shape.is_some_and(|shape| shape.cores == 0) {
        wrong.push(Finding::new("spec.spares.shape.cores", "is 0: Flux needs at least one core on every rank"));
    }
    resources(&spec.resources, &mut wrong);
    durations(spec, &mut wrong);
    pods(spec, &mut wrong);
    unknown_values(spec, &mut wrong);
    wrong.extend(spec.prefix.as_deref().and_then(|text| prefix(Path::new(text))));
    wrong
}

fn sizes(spec: &FluxInstanceSpec, wrong: &mut Vec<Finding>) {
    if spec.size == Some(0) {
        wrong.push(Finding::new("spec.size", LESS_THAN_ONE));
    }
    if spec.max_size == Some(0) {
        wrong.push(Finding::new("spec.maxSize", "is 0: an instance has at least one rank"));
    } else if let (Some(size), Some(max_size)) = (spec.size, spec.max_size)
        && size > max_size
    {
        let problem = format!("{MORE_THAN_MAX_SIZE} (size {size}, maxSize {max_size})");
        wrong.push(Finding::new("spec.size", problem));
    }
}

/// Older versions accepted all characters and places, so these are servable. A host still refuses to claim a prefix with such
/// characters anew, even if the API server let it in.
fn prefix(path: &Path) -> Option<Finding> {
    let finding = |error: PrefixError| Finding::new("spec.prefix", error.to_string());
    let shape = check_prefix(path).map_err(finding);
    let rules_for_new = || check_prefix_characters(path).and_then(|()| check_prefix_place(path));
    shape.and_then(|()| rules_for_new().map_err(|error| finding(error).servable())).err()
}

/// `kary:0` is Flux's name for a flat tree. Older versions accepted it; users now write `flat`.
fn topology(text: &str, size: u32) -> Option<Finding> {
    let field = "spec.topology";
    match Topology::parse(text, size) {
        Err(error) => Some(Finding::new(field, error.to_string())),
        Ok(Topology::Kary(0)) if text != Topology::FLAT => {
            let problem = format!("{text:?} is Flux's name for a flat tree: write {}", Topology::FLAT);
            Some(Finding::new(field, problem).servable())
        }
        Ok(_) => None,
    }
}

/// Refuses enum values that this program doesn't know. The installed CRD may be newer than this program and accept them.
fn unknown_values(spec: &FluxInstanceSpec, wrong: &mut Vec<Finding>) {
    let unknown = [
        (
            "spec.resources.gpus",
            match &spec.resources.gpus {
                Gpus::Other(value) => Some(value),
                Gpus::Auto | Gpus::All | Gpus::None => None,
            },
        ),
        (
            "spec.upgrade.onFailure",
            match &spec.upgrade.on_failure {
                OnFailure::Other(value) => Some(value),
                OnFailure::GoBack | OnFailure::Stay => None,
            },
        ),
        (
            "spec.uninstall.runningJobs",
            match &spec.uninstall.running_jobs {
                RunningJobs::Other(value) => Some(value),
                RunningJobs::Wait | RunningJobs::Cancel => None,
            },
        ),
    ];
    for (field, value) in unknown {
        wrong.extend(value.map(|value| {
            Finding::new(field, format!("this version of flux-distribute doesn't know {value:?}")).with_remedy(
                "write one of the values that docs/reference.md lists, or finish the upgrade to a version that knows it",
            )
        }));
    }
}

fn broker(broker: &Broker, wrong: &mut Vec<Finding>) {
    let port = match broker.port {
        Some(0) => Some("is 0: brokers need a fixed port".to_owned()),
        Some(METRICS_PORT) => Some(format!("{METRICS_PORT} is where the agents serve metrics")),
        Some(PEER_PORT) => Some(format!("{PEER_PORT} is where the agents serve packages to each other")),
        _ => None,
    };
    wrong.extend(port.map(|problem| Finding::new("spec.broker.port", problem)));
    wrong.extend(broker.run_as.as_deref().and_then(user).map(|problem| Finding::new("spec.broker.runAs", problem)));
    if let Some(weight) = broker.cpu_weight.filter(|weight| !(1..=10_000).contains(weight)) {
        wrong.push(Finding::new("spec.broker.cpuWeight", format!("{weight} is not between 1 and 10000")));
    }
    if let Some(Err(error)) = broker.config.as_deref().map(broker_toml::extra_tables) {
        wrong.push(Finding::new("spec.broker.config", error.to_string()));
    }
}

/// What is wrong with a user name or user ID.
fn user(user: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if user.is_empty() || user.starts_with('-') || !user.chars().all(is_plain) {
        return Some(format!("{user:?} is neither a user name nor a user ID"));
    }
    // chown(2) and setresuid(2) read -1 as "leave unchanged", so the broker would stay root.
    let is_number = user.chars().all(|c| c.is_ascii_digit());
    let is_wrong = is_number && user.parse().map_or(true, |uid: u32| uid == u32::MAX);
    is_wrong.then(|| format!("{user} is not a user ID: the largest is {}", u32::MAX - 1))
}

fn resources(resources: &InstanceResources, wrong: &mut Vec<Finding>) {
    for (index, key) in resources.properties.iter().enumerate() {
        let field = format!("spec.resources.properties[{index}]");
        if !is_label_key(key) {
            wrong.push(Finding::new(field, format!("{key:?} is not a label key such as topology.kubernetes.io/zone")));
        } else if labels::OUR_LABELS.contains(&key.as_str()) {
            wrong.push(Finding::new(field, nodes::WRITTEN_BY_US));
        }
    }
    if let Some(Err(error)) = resources.exclude.cores.as_deref().map(str::parse::<IdSet>) {
        wrong.push(Finding::new("spec.resources.exclude.cores", error.to_string()));
    }
    for (index, name) in resources.exclude.nodes.iter().enumerate().filter(|(_, name)| !is_subdomain(name)) {
        let field = format!("spec.resources.exclude.nodes[{index}]");
        wrong.push(Finding::new(field, format!("{name:?} is not a node name")));
    }
}

fn durations(spec: &FluxInstanceSpec, wrong: &mut Vec<Finding>) {
    for (field, text) in [
        ("spec.broker.checkpointPeriod", &spec.broker.checkpoint_period),
        ("spec.resources.retain", &spec.resources.retain),
        ("spec.ranks.retain", &spec.ranks.retain),
        ("spec.drain.timeout", &spec.drain.timeout),
        ("spec.pods.defaultDuration", &spec.pods.default_duration),
        ("spec.pods.completeAfter", &spec.pods.complete_after),
        ("spec.pods.preemptAfter", &spec.pods.preempt_after),
        ("spec.upgrade.deadline", &spec.upgrade.deadline),
        ("spec.state.dumpEvery", &spec.state.dump_every),
    ] {
        if let Some(Err(error)) = text.as_deref().map(duration) {
            wrong.push(Finding::new(field, error.to_string()));
        }
    }
    if let Some(every) = spec.state.dump_every.as_deref().and_then(parse_duration)
        && every < Duration::from_mins(1)
    {
        wrong.push(Finding::new("spec.state.dumpEvery", "is shorter than a minute: a dump reads the whole queue"));
    }
}

fn pods(spec: &FluxInstanceSpec, wrong: &mut Vec<Finding>) {
    let pods = &spec.pods;
    let owner = spec.broker.run_as.as_deref().filter(|owner| !is_root(owner));
    if let Some(owner) = owner.filter(|_| pods.enabled) {
        let problem =
            format!("is true, but the brokers belong to {owner}: only root's take jobs for pods from an agent");
        wrong.push(Finding::new("spec.pods.enabled", problem));
    }
    if pods.max_gang == Some(0) {
        wrong.push(Finding::new("spec.pods.maxGang", "is 0: a single pod is a gang of one"));
    }
    if let Some(Err(error)) = pods.tolerance.as_deref().map(milli) {
        wrong.push(Finding::new("spec.pods.tolerance", error.to_string()));
    }
    let duration = pods.default_duration.as_deref().and_then(parse_duration);
    if duration.is_some_and(|duration| duration < Duration::from_secs(1)) {
        let problem = "is 0: without an end, Flux can reserve no node for a gang that waits";
        wrong.push(Finding::new("spec.pods.defaultDuration", problem));
    }
}

/// True if Kubernetes accepts `key` as a label key. Such a key has no character that Flux's `--requires` would read as
/// an operator (RFC 20, RFC 31).
fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    !name.is_empty() && is_label_value(name) && prefix.is_none_or(is_subdomain)
}

/// True if Kubernetes accepts `value` as a label value, which may be empty.
fn is_label_value(value: &str) -> bool {
    let is_edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && is_edge(value.chars().next())
        && is_edge(value.chars().last())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}
