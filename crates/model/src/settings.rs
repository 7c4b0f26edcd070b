//! The settings that Flux reads only at start. The planner makes them from the spec when an epoch begins, and compares
//! them with the spec while the epoch runs.

use std::fmt::Display;

use super::{topology::Topology, tree::is_flat};
use api::{DEFAULT_BROKER_PORT, EpochSettings, FluxInstanceSpec, MOST_RANKS};

/// Default CPUWeight of the brokers and their jobs. kubepods has a weight in the thousands on a large node, a single
/// service has 100: with less, jobs would starve beside busy pods.
const DEFAULT_CPU_WEIGHT: u32 = 1000;
/// Default checkpoint period. If the lead is killed, everything since the last checkpoint is lost.
const DEFAULT_CHECKPOINT_PERIOD: &str = "1m";
/// Minimum of the default maxSize. A thousand spares cost nothing, so small clusters get room to grow without a
/// restart.
const LEAST_MAX_SIZE: u32 = 64;

/// The settings of an epoch that would start now. `owner`: the brokers' user (see [`Observed::owner`](crate::observed::Observed::owner)).
/// `eligible`: the number of nodes that would take part.
pub fn settings(
    spec: &FluxInstanceSpec,
    owner: &str,
    eligible: usize,
    digest: &str,
    certificate: &str,
) -> EpochSettings {
    let max_size = max_size(spec, eligible);
    EpochSettings {
        max_size,
        topology: topology(spec, max_size),
        port: spec.broker.port.unwrap_or(DEFAULT_BROKER_PORT),
        digest: digest.to_owned(),
        certificate: certificate.to_owned(),
        run_as: owner.to_owned(),
        config: spec.broker.config.clone().unwrap_or_default(),
        cpu_weight: spec.broker.cpu_weight.unwrap_or(DEFAULT_CPU_WEIGHT),
        checkpoint_period: spec
            .broker
            .checkpoint_period
            .clone()
            .unwrap_or_else(|| DEFAULT_CHECKPOINT_PERIOD.to_owned()),
        spare_shape: spec.spares.shape,
        // Only root's brokers take jobs for pods from an agent.
        pods: spec.pods.enabled && is_root(owner),
        only_whole_cores: spec.pods.enabled && is_root(owner),
    }
}

/// The user that `spec.broker.runAs` asks for.
pub(crate) fn owner(spec: &FluxInstanceSpec) -> &str {
    spec.broker.run_as.as_deref().unwrap_or("root")
}

/// True for root, by name or number.
pub(crate) fn is_root(user: &str) -> bool {
    ["root", "0"].contains(&user)
}

/// True if both are certainly one user. Only a host knows which number a name has there.
pub(crate) fn is_same_user(one: &str, other: &str) -> bool {
    one == other || (is_root(one) && is_root(other))
}

fn max_size(spec: &FluxInstanceSpec, eligible: usize) -> u32 {
    spec.max_size.unwrap_or_else(|| {
        let nodes = u32::try_from(eligible).unwrap_or(u32::MAX).max(spec.size.unwrap_or(0));
        // A roster of more ranks could not be read again.
        nodes.saturating_mul(2).clamp(LEAST_MAX_SIZE, MOST_RANKS)
    })
}

fn topology(spec: &FluxInstanceSpec, max_size: u32) -> String {
    spec.topology.clone().unwrap_or_else(|| Topology::default_for(max_size).to_owned())
}

/// The settings that the spec asks for, to be compared with those of the `running` epoch. Keeps the running value if it
/// differs only because a default maxSize has grown with the cluster, because a flat tree has another name, or because an
/// older version began the epoch.
pub fn wanted(
    running: &EpochSettings,
    spec: &FluxInstanceSpec,
    owner: &str,
    digest: &str,
    certificate: &str,
) -> EpochSettings {
    let mut wanted = settings(spec, owner, 0, digest, certificate);
    if spec.max_size.is_none() {
        wanted.max_size = running.max_size;
        wanted.topology = topology(spec, running.max_size);
    }
    // Pods have never run through brokers of another user, so switching them off there needs no restart.
    if !is_root(owner) {
        wanted.pods = running.pods;
    }
    if wanted.pods == running.pods {
        wanted.only_whole_cores = running.only_whole_cores;
    }
    if is_flat(running) && is_flat(&wanted) {
        wanted.topology.clone_from(&running.topology);
    }
    wanted
}

/// Describes how the running epoch differs from what the spec asks for now; None if it doesn't.
pub fn pending(
    running: &EpochSettings,
    spec: &FluxInstanceSpec,
    owner: &str,
    digest: &str,
    certificate: &str,
) -> Option<String> {
    let wanted = wanted(running, spec, owner, digest, certificate);
    // Destructured, so that the compiler complains if a new field is not compared.
    let EpochSettings {
        max_size,
        topology,
        port,
        digest,
        certificate,
        run_as,
        config,
        cpu_weight,
        checkpoint_period,
        spare_shape,
        pods,
        // Changes only with `pods`.
        only_whole_cores: _,
    } = running;
    let differences = [
        difference("maxSize", max_size, &wanted.max_size),
        difference("topology", topology, &wanted.topology),
        difference("broker.port", port, &wanted.port),
        difference("packages", digest, &wanted.digest),
        difference("broker.runAs", run_as, &wanted.run_as).filter(|_| !is_same_user(run_as, &wanted.run_as)),
        difference("broker.cpuWeight", cpu_weight, &wanted.cpu_weight),
        difference("pods.enabled", pods, &wanted.pods),
        difference("broker.checkpointPeriod", checkpoint_period, &wanted.checkpoint_period),
        // The values of these are too long or too opaque for a message.
        (*spare_shape != wanted.spare_shape).then(|| "spares.shape changed".to_owned()),
        (*certificate != wanted.certificate).then(|| "certificate changed".to_owned()),
        (*config != wanted.config).then(|| "broker.config changed".to_owned()),
    ];
    let differences: Vec<_> = differences.into_iter().flatten().collect();
    (!differences.is_empty()).then(|| differences.join(", "))
}

fn difference<T: PartialEq + Display>(name: &str, from: &T, to: &T) -> Option<String> {
    (from != to).then(|| format!("{name} {from} -> {to}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_max_size_leaves_room_for_growth() {
        for (spec, nodes, expected) in [
            (FluxInstanceSpec::default(), 4, 64),
            (FluxInstanceSpec::default(), 100, 200),
            (FluxInstanceSpec { size: Some(80), ..Default::default() }, 4, 160),
            (FluxInstanceSpec { max_size: Some(4), ..Default::default() }, 100, 4),
            (FluxInstanceSpec::default(), 10_000, MOST_RANKS),
            (FluxInstanceSpec { size: Some(9000), ..Default::default() }, 4, MOST_RANKS),
        ] {
            assert_eq!(settings(&spec, "root", nodes, "d", "c").max_size, expected);
        }
    }

    #[test]
    fn a_changed_spec_is_a_difference_but_a_grown_cluster_is_not() {
        let spec = FluxInstanceSpec::default();
        let running = settings(&spec, "root", 100, "d", "c");
        assert_eq!(pending(&running, &spec, "root", "d", "c"), None);
        assert_eq!(pending(&running, &spec, "root", "e", "c").unwrap(), "packages d -> e");
        assert_eq!(pending(&running, &spec, "root", "d", "x").unwrap(), "certificate changed");
        let larger = FluxInstanceSpec { max_size: Some(300), topology: Some("kary:2".into()), ..spec };
        assert_eq!(
            pending(&running, &larger, "root", "d", "c").unwrap(),
            "maxSize 200 -> 300, topology flat -> kary:2"
        );
    }

    #[test]
    fn an_upgrade_while_pods_are_on_is_no_difference() {
        let on: FluxInstanceSpec = serde_json::from_value(serde_json::json!({"pods": {"enabled": true}})).unwrap();
        let running = EpochSettings { only_whole_cores: false, ..settings(&on, "root", 4, "d", "c") };
        assert_eq!(
            (pending(&running, &on, "root", "d", "c"), wanted(&running, &on, "root", "d", "c")),
            (None, running.clone())
        );
        let off = FluxInstanceSpec::default();
        assert_eq!(pending(&running, &off, "root", "d", "c").unwrap(), "pods.enabled true -> false");
        assert!(wanted(&settings(&off, "root", 4, "d", "c"), &on, "root", "d", "c").only_whole_cores);
    }

    #[test]
    fn another_name_for_a_flat_tree_is_no_difference() {
        let spec = FluxInstanceSpec::default();
        let named =
            |topology: &str| EpochSettings { topology: topology.to_owned(), ..settings(&spec, "root", 4, "d", "c") };
        for running in ["flat", "kary:256", "kary:0", "mincrit"] {
            assert_eq!(pending(&named(running), &spec, "root", "d", "c"), None, "{running}");
        }
        assert_eq!(pending(&named("kary:2"), &spec, "root", "d", "c").unwrap(), "topology kary:2 -> flat");
    }
}
