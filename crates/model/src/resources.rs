//! Which of its node's resources a rank declares, and the properties of its member.

use std::collections::BTreeSet;

use super::eligibility::{Cpu, NodeView, is_dedicated};
use api::{Declared, FluxInstanceSpec, Gpus, IdSet, InstanceResources, Resources};
use base::words::many;

/// What the pod of our own agent requests, in thousandths of a CPU (the DaemonSet's manifest). It is on each node.
pub const AGENT_CPU: u64 = 25;

/// Computes what a rank on `node` is to declare. `found` are the resources of the node's host. `only_whole_cores`: as in the epoch's
/// settings.
pub fn declared(
    spec: &FluxInstanceSpec,
    node: &NodeView,
    found: Resources,
    is_lead: bool,
    only_whole_cores: bool,
) -> Declared {
    let Resources { cores, gpus } = found;
    let exclude = &spec.resources.exclude;
    let named: IdSet = exclude.cores.as_deref().and_then(|text| text.parse().ok()).unwrap_or_default();
    let has_no_other = (0..cores).all(|id| named.contains(id));
    let reserved = node.cpu.map_or(0, |cpu| reserved_cores(cpu, cores, only_whole_cores));
    let mut left_out: IdSet = (0..cores).filter(|id| *id < reserved || named.contains(*id)).collect();
    if left_out.len() == cores as usize {
        // Flux accepts no node without a core. Keep the last core that the spec doesn't exclude, even if kubelet
        // reserves it.
        left_out = if has_no_other { IdSet::default() } else { left_out_but_one(left_out, &named) };
    }
    let gpus = match &spec.resources.gpus {
        Gpus::None => 0,
        Gpus::Auto | Gpus::Other(_) if node.advertises_gpus && !is_dedicated(node, &spec.nodes) => 0,
        Gpus::Auto | Gpus::All | Gpus::Other(_) => gpus,
    };
    let excluded = has_no_other || (is_lead && exclude.lead) || exclude.nodes.contains(&node.name);
    Declared { cores, gpus, left_out, excluded }
}

/// Removes from `left_out` the last core that is not in `named`.
fn left_out_but_one(left_out: IdSet, named: &IdSet) -> IdSet {
    let kept = left_out.0.iter().rev().find(|id| !named.contains(**id)).copied();
    left_out.0.into_iter().filter(|id| Some(*id) != kept).collect()
}

/// Number of physical cores to leave to kubelet and the system. Rounded down: many clouds reserve about 60m, which must not cost a
/// core. Rounded up if `only_whole_cores`, our agent's request included: no pod can have the rest of such a core. Requests of other
/// DaemonSets are not known here. kubelet counts hardware threads, Flux counts cores.
fn reserved_cores(cpu: Cpu, cores: u32, only_whole_cores: bool) -> u32 {
    let threads_per_core = (cpu.capacity / 1000 / u64::from(cores.max(1))).max(1);
    let reserved = cpu.capacity.saturating_sub(cpu.allocatable);
    let reserved = match only_whole_cores {
        true => (reserved + AGENT_CPU).div_ceil(1000 * threads_per_core),
        false => reserved / 1000 / threads_per_core,
    };
    u32::try_from(reserved).unwrap_or(u32::MAX).min(cores.saturating_sub(1))
}

/// Describes what `now` lacks of what is declared; None if it lacks nothing. The text is the reason of a drain.
pub fn lack(declared: &Declared, now: &Declared) -> Option<String> {
    if now.covers(declared) {
        return None;
    }
    let (before, after) = (declared.core_ids(), now.core_ids());
    Some(match () {
        () if now.excluded && !declared.excluded => "spec.resources.exclude keeps it out of scheduling".to_owned(),
        () if now.gpus < declared.gpus => {
            format!("it has {} for Flux, {} are declared", many(now.gpus, "GPU"), declared.gpus)
        }
        () if now.cores < declared.cores => {
            format!("it has {}, {} are declared", many(now.cores, "core"), declared.cores)
        }
        () => format!("it has cores {after} for Flux, {before} are declared"),
    })
}

/// The properties of a member on `node`. `among_others`: the instance has more than one architecture. If all are alike,
/// no job needs the property, and each property adds a line to `flux resource list`.
pub fn properties(spec: &InstanceResources, node: &NodeView, among_others: bool) -> BTreeSet<String> {
    let labels = spec.properties.iter().filter_map(|key| {
        let value = node.labels.get(key)?;
        Some(if value.is_empty() { key.clone() } else { format!("{key}={value}") })
    });
    let architecture = (among_others && !node.architecture.is_empty()).then(|| node.architecture.clone());
    labels.chain(architecture).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::{Value, json};

    use super::*;

    fn spec(value: &Value) -> FluxInstanceSpec {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn node(value: &Value) -> NodeView {
        NodeView::from(&serde_json::from_value::<Node>(value.clone()).unwrap())
    }

    fn reserving(capacity: &str, allocatable: &str) -> NodeView {
        node(&json!({"status": {"capacity": {"cpu": capacity}, "allocatable": {"cpu": allocatable}}}))
    }

    #[test]
    fn cores_that_kubelet_reserves_and_the_spec_excludes_are_left_out() {
        for (what, capacity, allocatable, cores, exclude, expected) in [
            ("nothing is reserved", "8", "8", 8, "", "0-7"),
            ("a part of a core costs none", "8", "7910m", 8, "", "0-7"),
            ("the first cores are left out", "8", "6", 8, "", "2-7"),
            ("rounded down", "8", "6010m", 8, "", "1-7"),
            ("two threads are one core", "16", "12", 8, "", "2-7"),
            ("one thread of two is no core", "16", "15", 8, "", "0-7"),
            ("never all of them", "2", "0", 2, "", "1"),
            ("never the only one", "1", "0", 1, "", "0"),
            ("decimals", "4.0", "3.0", 4, "", "1-3"),
            ("named ones", "8", "8", 8, "0,7", "1-6"),
            ("both", "8", "7", 8, "7", "1-6"),
            ("both leave no core", "2", "1", 2, "1", "0"),
            ("ids that do not exist", "2", "2", 2, "4-7", "0-1"),
            ("unknown", "", "", 4, "", "0-3"),
        ] {
            let spec = spec(&json!({"resources": {"exclude": {"cores": exclude}}}));
            let found = Resources { cores, gpus: 0 };
            let declared = declared(&spec, &reserving(capacity, allocatable), found, true, false);
            assert_eq!((declared.core_ids().to_string().as_str(), declared.excluded), (expected, false), "{what}");
        }
    }

    #[test]
    fn with_pods_no_core_is_declared_that_kubelet_or_our_agent_has_a_part_of() {
        for (capacity, allocatable, cores, expected) in [
            ("8", "8", 8, "1-7"),
            ("8", "7940m", 8, "1-7"),
            ("8", "7020m", 8, "2-7"),
            ("16", "15940m", 8, "1-7"),
            ("1", "1", 1, "0"),
        ] {
            let found = Resources { cores, gpus: 0 };
            let declared = declared(&spec(&json!({})), &reserving(capacity, allocatable), found, false, true);
            assert_eq!(declared.core_ids().to_string(), expected, "{capacity} {allocatable}");
        }
    }

    #[test]
    fn whole_nodes_are_excluded_by_name_as_lead_or_with_all_their_cores() {
        for (exclude, is_lead, expected) in [
            (json!({}), true, false),
            (json!({"lead": true}), true, true),
            (json!({"lead": true}), false, false),
            (json!({"nodes": ["node1", "node2"]}), false, true),
            (json!({"nodes": ["node2"]}), false, false),
            (json!({"cores": "0-1"}), false, true),
            (json!({"cores": "0"}), false, false),
        ] {
            let node = node(&json!({"metadata": {"name": "node1"}}));
            let spec = spec(&json!({"resources": {"exclude": exclude}}));
            let declared = declared(&spec, &node, Resources { cores: 2, gpus: 0 }, is_lead, false);
            assert_eq!(declared.excluded, expected, "{exclude}");
        }
    }

    #[test]
    fn a_device_plugin_gets_the_gpus_unless_the_node_is_dedicated_to_flux() {
        let taint = |key: &str| json!([{"key": key, "value": "flux", "effect": "NoSchedule"}]);
        let any = json!([{"operator": "Exists"}]);
        for (what, gpus, resource, taints, tolerations, expected) in [
            ("no plugin", "Auto", "memory", json!([]), json!([]), 2),
            ("NVIDIA's", "Auto", "nvidia.com/gpu", json!([]), json!([]), 0),
            ("AMD's", "Auto", "amd.com/gpu", json!([]), json!([]), 0),
            ("a part of one", "Auto", "nvidia.com/mig-1g.5gb", json!([]), json!([]), 0),
            ("another device", "Auto", "example.com/fpga", json!([]), json!([]), 2),
            ("dedicated", "Auto", "nvidia.com/gpu", taint("hpc"), json!([{"key": "hpc", "value": "flux"}]), 2),
            ("a taint that isn't tolerated", "Auto", "nvidia.com/gpu", taint("hpc"), json!([]), 0),
            ("a condition", "Auto", "nvidia.com/gpu", taint("node.kubernetes.io/unschedulable"), any.clone(), 0),
            ("a taint that pods with GPUs tolerate", "Auto", "nvidia.com/gpu", taint("nvidia.com/gpu"), any.clone(), 0),
            ("taken anyway", "All", "nvidia.com/gpu", json!([]), json!([]), 2),
            ("not wanted", "None", "memory", json!([]), json!([]), 0),
        ] {
            let status = json!({"capacity": {(resource): "0"}, "allocatable": {(resource): "0"}});
            let node = node(&json!({"spec": {"taints": taints}, "status": status}));
            let spec = spec(&json!({"resources": {"gpus": gpus}, "nodes": {"tolerations": tolerations}}));
            assert_eq!(declared(&spec, &node, Resources { cores: 2, gpus: 2 }, false, false).gpus, expected, "{what}");
        }
    }

    #[test]
    fn lack_describes_what_is_missing() {
        let of = |cores, gpus, left_out: &str, excluded| Declared {
            cores,
            gpus,
            left_out: left_out.parse().unwrap(),
            excluded,
        };
        for (declared, now, expected) in [
            (of(8, 0, "", false), of(8, 0, "", false), None),
            (of(8, 0, "", false), of(16, 2, "", false), None),
            (of(8, 0, "0-1", false), of(8, 0, "0", false), None),
            (of(8, 0, "", true), of(8, 0, "", false), None),
            (of(8, 0, "", false), of(6, 0, "", false), Some("it has 6 cores, 8 are declared")),
            (of(8, 0, "0-1", false), of(6, 0, "", false), Some("it has 6 cores, 8 are declared")),
            (of(8, 0, "", false), of(8, 0, "0-1", false), Some("it has cores 2-7 for Flux, 0-7 are declared")),
            (of(8, 0, "0", false), of(8, 0, "1", false), Some("it has cores 0,2-7 for Flux, 1-7 are declared")),
            (of(8, 2, "", false), of(16, 1, "", false), Some("it has 1 GPU for Flux, 2 are declared")),
            (of(8, 2, "", false), of(8, 2, "", true), Some("spec.resources.exclude keeps it out of scheduling")),
        ] {
            assert_eq!(lack(&declared, &now).as_deref(), expected, "{declared:?} {now:?}");
        }
    }

    #[test]
    fn chosen_labels_and_mixed_architectures_become_properties() {
        let spec: InstanceResources = serde_json::from_value(json!({"properties": ["zone", "pool", "gpu"]})).unwrap();
        let of = |node, among_others| properties(&spec, node, among_others).into_iter().collect::<Vec<_>>().join(" ");
        let labels = json!({"zone": "eu-1a", "gpu": "", "other": "x", "kubernetes.io/arch": "arm64"});
        let labelled = node(&json!({"metadata": {"labels": labels}}));
        assert_eq!(of(&labelled, false), "gpu zone=eu-1a");
        assert_eq!(of(&labelled, true), "arm64 gpu zone=eu-1a");
        let amd64 = node(
            &json!({"status": {"nodeInfo": {"architecture": "amd64", "bootID": "", "containerRuntimeVersion": "",
            "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "linux",
            "osImage": "", "systemUUID": ""}}}),
        );
        assert_eq!(of(&amd64, true), "amd64");
        assert_eq!(of(&NodeView::default(), true), "");
    }

    #[test]
    fn resources_that_an_older_version_declared_can_be_read() {
        let declared: Declared = serde_json::from_str(r#"{"cores":4,"gpus":1}"#).unwrap();
        assert_eq!(declared, Resources { cores: 4, gpus: 1 }.into());
        assert_eq!(serde_json::to_string(&declared).unwrap(), r#"{"cores":4,"gpus":1}"#);
    }
}
