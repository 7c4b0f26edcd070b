use std::{
    path::{Component, Path},
    time::Duration,
};

use super::{Broker, FluxInstanceSpec, HEALTH_PORT, IdSet, InstanceResources, PEER_PORT, Packages};
use crate::{
    error_chain,
    packages::check_lock,
    plan::{broker_toml, topology::Topology},
};

/// The API server's words where `size` is 0, by a rule of the CRD.
pub(super) const LESS_THAN_ONE: &str = "is 0: delete the FluxInstance to take everything off";
/// The API server's words where `size` is more than a `maxSize` that the spec names, by a rule of the CRD.
pub(super) const MORE_THAN_MAX_SIZE: &str =
    "is more than maxSize: raise maxSize too, which takes effect at the next coordinated restart";

/// Why a spec cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("spec.{field}: {reason}")]
pub struct SpecError {
    /// Path below `spec`.
    pub field: &'static str,
    /// What is wrong with it, and what to write instead.
    pub reason: String,
}

/// Checks everything about a spec that its schema can't say.
///
/// # Errors
/// The first thing that is wrong.
pub fn validate(spec: &FluxInstanceSpec) -> Result<(), SpecError> {
    let wrong = |field, reason: String| Err(SpecError { field, reason });
    validate_packages(&spec.packages)?;
    if spec.size == Some(0) {
        return wrong("size", LESS_THAN_ONE.into());
    }
    if spec.max_size == Some(0) {
        return wrong("maxSize", "is 0: an instance has at least one rank".into());
    }
    if let (Some(size), Some(max_size)) = (spec.size, spec.max_size)
        && size > max_size
    {
        return wrong("size", format!("{MORE_THAN_MAX_SIZE} (size {size}, maxSize {max_size})"));
    }
    if let Some(topology) = &spec.topology {
        Topology::parse(topology, spec.max_size.unwrap_or(1))
            .map_err(|reason| SpecError { field: "topology", reason })?;
    }
    validate_broker(&spec.broker)?;
    if spec.spares.shape.is_some_and(|shape| shape.cores == 0) {
        return wrong("spares.shape.cores", "is 0: Flux wants at least one core of every rank".into());
    }
    validate_resources(&spec.resources)?;
    for (field, text) in [
        ("broker.checkpointPeriod", &spec.broker.checkpoint_period),
        ("ranks.retain", &spec.ranks.retain),
        ("drain.timeout", &spec.drain.timeout),
        ("upgrade.deadline", &spec.upgrade.deadline),
        ("state.dumpEvery", &spec.state.dump_every),
    ] {
        if let Some(text) = text
            && parse_duration(text).is_none()
        {
            return wrong(field, format!("{text:?} is not a duration such as 30s, 10m or 24h"));
        }
    }
    if let Some(every) = spec.state.dump_every.as_deref().and_then(parse_duration)
        && every < Duration::from_secs(60)
    {
        return wrong("state.dumpEvery", "is shorter than a minute: a dump reads the whole queue".into());
    }
    if let Some(prefix) = &spec.prefix {
        check_prefix(Path::new(prefix)).map_err(|reason| SpecError { field: "prefix", reason })?;
    }
    Ok(())
}

/// A prefix is a directory that can be ours alone, and is removed with all that is in it: deep enough to be nobody else's,
/// and by its name the place that it is.
///
/// # Errors
/// In words, with the path.
pub fn check_prefix(path: &Path) -> Result<(), String> {
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    match path.is_absolute() && path.components().count() > 2 && path.components().all(is_plain) {
        true => Ok(()),
        false => Err(format!("{path:?} is not an absolute path of at least two parts without `..`")),
    }
}

fn validate_broker(broker: &Broker) -> Result<(), SpecError> {
    let wrong = |field, reason: String| Err(SpecError { field, reason });
    match broker.port {
        Some(0) => return wrong("broker.port", "is 0: brokers need a fixed port".into()),
        Some(HEALTH_PORT) => {
            return wrong("broker.port", format!("{HEALTH_PORT} is where the agents answer kubelet's probes"));
        }
        Some(PEER_PORT) => {
            return wrong("broker.port", format!("{PEER_PORT} is where the agents serve packages to each other"));
        }
        _ => {}
    }
    if let Some(user) = &broker.run_as {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if user.is_empty() || user.starts_with('-') || !user.chars().all(is_plain) {
            return wrong("broker.runAs", format!("{user:?} is neither a user's name nor a number"));
        }
        // chown(2) and setresuid(2) take -1 for "as it is", which is root.
        let is_number = user.chars().all(|c| c.is_ascii_digit());
        if is_number && user.parse().map_or(true, |uid: u32| uid == u32::MAX) {
            return wrong("broker.runAs", format!("{user} is no user's number: those end at {}", u32::MAX - 1));
        }
    }
    if let Some(config) = &broker.config {
        broker_toml::extra_tables(config)
            .map_err(|error| SpecError { field: "broker.config", reason: error.to_string() })?;
    }
    Ok(())
}

fn validate_resources(resources: &InstanceResources) -> Result<(), SpecError> {
    let wrong = |field, reason: String| Err(SpecError { field, reason });
    if let Some(key) = resources.properties.iter().find(|key| !is_label_key(key)) {
        let reason = format!("{key:?} is no label's key such as topology.kubernetes.io/zone");
        return wrong("resources.properties", reason);
    }
    if let Some(Err(error)) = resources.exclude.cores.as_deref().map(str::parse::<IdSet>) {
        return wrong("resources.exclude.cores", error.to_string());
    }
    if let Some(name) = resources.exclude.nodes.iter().find(|name| !is_dns_name(name)) {
        return wrong("resources.exclude.nodes", format!("{name:?} is no node's name"));
    }
    Ok(())
}

/// As Kubernetes takes them: nothing in it could be an operator of Flux's `--requires` (RFC 20, RFC 31).
fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_name = name.len() <= 63
        && is_edge(name.chars().next())
        && is_edge(name.chars().last())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    is_name && prefix.is_none_or(is_dns_name)
}

fn is_dns_name(name: &str) -> bool {
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.len() <= 253
        && is_edge(name.chars().next())
        && is_edge(name.chars().last())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c))
}

fn validate_packages(packages: &Packages) -> Result<(), SpecError> {
    let wrong = |field, reason: String| Err(SpecError { field, reason });
    let schemes = ["http://", "https://", "file://"];
    let is_url = |url: &str| schemes.iter().any(|scheme| url.starts_with(scheme)) && url::Url::parse(url).is_ok();
    if let Some(bundle) = &packages.bundle {
        if !packages.channels.is_empty() || !packages.specs.is_empty() || packages.lock.is_some() {
            return wrong("packages", "has a bundle and something else: a bundle holds a whole package set".into());
        }
        if !is_url(&bundle.url) {
            return wrong("packages.bundle.url", format!("{:?} is not an http, https or file URL", bundle.url));
        }
        if bundle.sha256.len() != 64 || !bundle.sha256.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c)) {
            let reason =
                "is not 64 hex digits in lower case: take what `flux-distribute bundle create` or sha256sum prints";
            return wrong("packages.bundle.sha256", reason.into());
        }
    }
    if packages.lock.is_some() && !(packages.channels.is_empty() && packages.specs.is_empty()) {
        return wrong("packages", "has a lock and channels or specs: a lock names every package already".into());
    }
    if let Some(lock) = &packages.lock {
        check_lock(lock, &packages.platforms)
            .map_err(|error| SpecError { field: "packages.lock", reason: error_chain(&error) })?;
    }
    if packages.refresh.as_ref().is_some_and(|word| word.trim().is_empty()) {
        return wrong("packages.refresh", "is empty: write any word, such as a date, or leave it out".into());
    }
    if let Some(mirror) = &packages.mirror {
        if !is_url(mirror) {
            return wrong("packages.mirror", "is not an http, https or file URL".into());
        }
        if mirror.contains(['?', '#']) {
            return wrong("packages.mirror", "has a query or a fragment: the channels' paths are put behind it".into());
        }
    }
    if packages.keep == Some(0) {
        return wrong("packages.keep", "is 0: the environment in use is kept always, so write at least 1".into());
    }
    if let Some(url) = packages.channels.iter().find(|url| !is_url(url)) {
        return wrong("packages.channels", format!("{url:?} is not an http, https or file URL"));
    }
    if packages.specs.iter().any(|spec| spec.trim().is_empty()) {
        return wrong("packages.specs", "has an empty spec".into());
    }
    if let Some(platform) =
        packages.platforms.iter().find(|platform| !["linux-64", "linux-aarch64"].contains(&platform.as_str()))
    {
        return wrong("packages.platforms", format!("{platform:?} is neither linux-64 nor linux-aarch64"));
    }
    Ok(())
}

/// Reads a Flux Standard Duration (RFC 23) such as `30s`, `10m`, `1.5h`, `1d`; a bare number counts seconds.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return None,
    };
    let number: f64 = digits.parse().ok()?;
    Duration::try_from_secs_f64(number * factor).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(yaml: &str) -> Result<(), String> {
        let spec: FluxInstanceSpec = serde_norway::from_str(yaml).unwrap();
        validate(&spec).map_err(|error| error.to_string())
    }

    #[test]
    fn what_people_write_is_taken() {
        for yaml in [
            "{}",
            "{size: 2, maxSize: 4}",
            "{topology: 'kary:2'}",
            "{topology: binomial}",
            "{packages: {bundle: {url: 'https://example.org/flux.tar.gz', sha256: 0000000000000000000000000000000000000000000000000000000000000000}}}"
                .replace("sha256: 0", "sha256: '0").replace("0}}}", "0'}}}").as_str(),
            "{packages: {channels: ['file:///srv/channel'], specs: ['flux-core 0.88.*']}}",
            "{broker: {runAs: '54321', config: '[exec]'}, ranks: {retain: 1.5h}}",
            "{prefix: /data/flux, state: {dumpEvery: 1h}, broker: {runAs: '4294967294'}}",
            "{resources: {properties: [topology.kubernetes.io/zone, pool, a_b], gpus: None}}",
            "{resources: {gpus: All, exclude: {cores: '0-1,8', lead: true, nodes: [node1.example.org]}}}",
            "{packages: {refresh: 2026-11-20, mirror: 'file:///srv/mirror', keep: 1}}",
        ] {
            assert_eq!(check(yaml), Ok(()), "{yaml}");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused_by_field() {
        for (yaml, field) in [
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
            ("{drain: {timeout: 5 m}}", "drain.timeout"),
            ("{upgrade: {deadline: nan}}", "upgrade.deadline"),
            ("{state: {dumpEvery: daily}}", "state.dumpEvery"),
            ("{state: {dumpEvery: 30s}}", "state.dumpEvery"),
            ("{prefix: opt/flux}", "prefix"),
            ("{prefix: /}", "prefix"),
            ("{prefix: /opt}", "prefix"),
            ("{prefix: /opt/../etc}", "prefix"),
            ("{spares: {shape: {cores: 0}}}", "spares.shape.cores"),
            ("{resources: {properties: ['pool=hpc']}}", "resources.properties"),
            ("{resources: {properties: ['a|b']}}", "resources.properties"),
            ("{resources: {properties: ['']}}", "resources.properties"),
            ("{resources: {properties: ['/zone']}}", "resources.properties"),
            ("{resources: {exclude: {cores: first}}}", "resources.exclude.cores"),
            ("{resources: {exclude: {nodes: [Node1]}}}", "resources.exclude.nodes"),
            ("{packages: {channels: [conda-forge]}}", "packages.channels"),
            ("{packages: {specs: ['']}}", "packages.specs"),
            ("{packages: {platforms: [osx-64]}}", "packages.platforms"),
            ("{packages: {bundle: {url: /a.tar.gz, sha256: x}}}", "packages.bundle.url"),
            ("{packages: {bundle: {url: 'file:///a.tar.gz', sha256: x}}}", "packages.bundle.sha256"),
            ("{packages: {specs: [a], bundle: {url: 'file:///a.tar.gz', sha256: x}}}", "packages"),
            ("{packages: {specs: [a], lock: x}}", "packages"),
            ("{packages: {lock: x}}", "packages.lock"),
            ("{packages: {refresh: ' '}}", "packages.refresh"),
            ("{packages: {mirror: mirror.example.org}}", "packages.mirror"),
            ("{packages: {mirror: 'ftp://mirror.example.org'}}", "packages.mirror"),
            ("{packages: {mirror: 'https://mirror.example.org/?token=a'}}", "packages.mirror"),
            ("{packages: {keep: 0}}", "packages.keep"),
        ] {
            let message = check(yaml).expect_err(yaml);
            assert!(message.starts_with(&format!("spec.{field}: ")), "{yaml}: {message}");
        }
    }
}
