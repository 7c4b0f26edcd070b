//! The roster that the planner would make first, for nodes whose hosts were never looked at: what only a host knows is assumed, and
//! said to be.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use k8s_openapi::api::core::v1::Node;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    eligibility::{NodeView, eligible},
    observed::{Observed, no_room},
    roster::{Decision, decide},
};
use api::{
    DEFAULT_PREFIX, Facts, FluxInstanceSpec, FluxInstanceStatus, FluxNodeStatus, MOST_CORES_OR_GPUS, MOST_DECLARED,
    Resources, Roster, RosterError,
};
use base::words::many;

/// Stands for the digest of the package set, which the planner computes when it has resolved the packages.
pub const DIGEST: &str = "DIGEST";
/// Stands for the ID of the Flux instance, which the planner makes up.
pub const INSTANCE_ID: &str = "ID";
/// Stands for the FluxInstance's uid, which the API server makes up.
const INSTANCE_UID: &str = "UID";
/// Stands for the fingerprint of the certificate, which the planner makes.
const CERTIFICATE: &str = "CERTIFICATE";

/// Why there is no roster to show.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreviewError {
    /// The text is neither YAML nor JSON.
    #[error("is not YAML: {0}")]
    NotYaml(#[from] serde_norway::Error),
    /// The text has no Node.
    #[error("holds no Node: write it by `kubectl get nodes -o yaml`")]
    Empty,
    /// An object in the text is of another kind.
    #[error("holds a {0}, and only Nodes are read: write it by `kubectl get nodes -o yaml`")]
    NotANode(String),
    /// A Node can't be read.
    #[error("Node {name:?} can't be read: {source}")]
    Unreadable {
        /// Its name.
        name: String,
        /// Why not.
        source: serde_json::Error,
    },
    /// Two Nodes have one name, or one has none.
    #[error("holds Node {0:?} twice, or without a name")]
    Name(String),
    /// The addresses end before the hosts do.
    #[error("{count} addresses from {first} on are more than there are: begin with a lower one")]
    Addresses {
        /// The first address.
        first: IpAddr,
        /// How many are needed.
        count: usize,
    },
    /// The planner would wait.
    #[error("the planner would make no roster: {0}")]
    Waits(String),
    /// The planner could not write the roster.
    #[error("the planner could not write the roster: {0}; give fewer cores, or set spec.maxSize or spec.spares.shape")]
    Unwritable(#[source] RosterError),
}

/// Nodes from a file, or invented ones.
#[derive(Debug, Clone, PartialEq)]
pub struct GivenNodes {
    nodes: Vec<NodeView>,
    /// What is assumed about them, in sentences.
    assumptions: Vec<String>,
}

impl GivenNodes {
    /// Equal nodes with the names `hosts`, oldest first, whose addresses count up from `first`.
    ///
    /// # Errors
    /// [`PreviewError::Addresses`].
    pub fn invent(hosts: &[String], first: IpAddr) -> Result<Self, PreviewError> {
        let nodes = (0..).zip(hosts).map(|(number, name)| {
            let address = later(first, number).ok_or(PreviewError::Addresses { first, count: hosts.len() })?;
            Ok(NodeView {
                name: name.clone(),
                uid: name.clone(),
                created: i64::from(number),
                ready: true,
                linux: true,
                address: Some(address),
                ..NodeView::default()
            })
        });
        let assumptions = vec![
            format!("the addresses of the nodes count up from {first}, in the order of their names"),
            "kubelet reserves no cores, and no taint or label keeps a node out".to_owned(),
        ];
        Ok(Self { nodes: nodes.collect::<Result<_, PreviewError>>()?, assumptions })
    }

    /// The Nodes in a text, as `kubectl get nodes -o yaml` or `-o json` prints them.
    ///
    /// # Errors
    /// If the text can't be read, or holds something else.
    pub fn read(text: &str) -> Result<Self, PreviewError> {
        // The parser of JSON is many times faster, and the Nodes of a large cluster are a hundred megabytes.
        let documents: Vec<Value> = match serde_json::from_str(text) {
            Ok(document) => vec![document],
            Err(_) => serde_norway::Deserializer::from_str(text).map(Value::deserialize).collect::<Result<_, _>>()?,
        };
        let objects = documents.into_iter().flat_map(|mut document| match document.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => items,
            _ => vec![document],
        });
        let mut names = BTreeSet::new();
        let mut nodes = Vec::new();
        for object in objects.filter(|object| !object.is_null()) {
            let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            match object["kind"].as_str() {
                Some("Node") => {}
                Some("NodeList" | "List") => return Err(PreviewError::Empty),
                other => return Err(PreviewError::NotANode(other.unwrap_or("document without a kind").to_owned())),
            }
            if name.is_empty() || !names.insert(name.clone()) {
                return Err(PreviewError::Name(name));
            }
            let node: Node =
                serde_json::from_value(object).map_err(|source| PreviewError::Unreadable { name, source })?;
            let mut node = NodeView::from(&node);
            if node.uid.is_empty() {
                // A file that was cleaned of what only the API server writes. The name tells the nodes apart as well.
                node.uid.clone_from(&node.name);
            }
            nodes.push(node);
        }
        if nodes.is_empty() {
            return Err(PreviewError::Empty);
        }
        Ok(Self { nodes, assumptions: Vec::new() })
    }
}

/// The address `number` after `first`.
fn later(first: IpAddr, number: u32) -> Option<IpAddr> {
    Some(match first {
        IpAddr::V4(first) => IpAddr::V4(u32::from(first).checked_add(number)?.into()),
        IpAddr::V6(first) => IpAddr::V6(u128::from(first).checked_add(number.into())?.into()),
    })
}

/// What the hosts are assumed to have.
#[derive(Debug, Clone, Copy, Default)]
pub struct AssumedResources {
    /// Physical cores of each host. None: as many as its Node's capacity.cpu, else one.
    pub cores: Option<u32>,
    /// GPUs of each host.
    pub gpus: u32,
}

/// The first roster, and what it does not say.
#[derive(Debug, Clone, PartialEq)]
pub struct Preview {
    /// The roster. [`DIGEST`], [`INSTANCE_ID`] and the like stand for what no one but planner and API server makes.
    pub roster: Roster,
    /// The prefix on each host.
    pub prefix: String,
    /// The nodes that get no rank, and why.
    pub without_rank: BTreeMap<String, WithoutRank>,
    /// What is assumed, in sentences.
    pub assumptions: Vec<String>,
}

/// A node that gets no rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithoutRank {
    /// Why, as the FluxNode says it.
    pub reason: String,
    /// The node installs the packages, because it gets a rank as soon as there is one.
    pub installs: bool,
}

/// Makes the roster that the planner would make first if the host of each node passed preflight.
///
/// # Errors
/// If the planner would wait for something, or could not write the roster.
pub fn preview(
    spec: &FluxInstanceSpec,
    given: &GivenNodes,
    assumed: AssumedResources,
) -> Result<Preview, PreviewError> {
    let GivenNodes { nodes, assumptions } = given;
    let prefix = spec.prefix.clone().unwrap_or_else(|| DEFAULT_PREFIX.to_owned());
    let report = |node: &NodeView| {
        let facts = Facts {
            resources: Resources { cores: cores(node, assumed), gpus: assumed.gpus },
            memory_mib: 0,
            platform: String::new(),
            glibc: String::new(),
            boot_id: node.boot_id.clone(),
            systemd: true,
            static_cpus: false,
            prefix: prefix.clone(),
        };
        FluxNodeStatus { facts: Some(facts), ..FluxNodeStatus::default() }
    };
    let reports: Vec<_> = nodes.iter().map(report).collect();
    let seen = Observed {
        instance_uid: INSTANCE_UID,
        spec,
        generation: 1,
        status: &FluxInstanceStatus::default(),
        nodes: nodes.iter().collect(),
        reports: nodes.iter().map(|node| node.name.as_str()).zip(&reports).collect(),
        roster: None,
        digest: Some(DIGEST),
        certificate: Some(CERTIFICATE),
        is_certificate_gone: false,
        now: 0,
        waited: Duration::ZERO,
        restart_word: None,
        fresh_id: INSTANCE_ID,
        agentless: &BTreeMap::new(),
        unusable: &BTreeMap::new(),
    };
    let roster = match decide(&seen) {
        Decision::Write(roster) => *roster,
        Decision::Wait(reason) => return Err(PreviewError::Waits(reason)),
        Decision::Keep => return Err(PreviewError::Waits("it keeps what there is".to_owned())),
    };
    if roster.declared_ids() > MOST_DECLARED {
        return Err(PreviewError::Unwritable(RosterError::TooLarge));
    }
    let holders: BTreeSet<&str> = roster.members().map(|member| member.node.as_str()).collect();
    let full = no_room(&seen, &roster).unwrap_or_else(|| "the instance is full".to_owned());
    let reason = |node: &NodeView| match eligible(node, &spec.nodes) {
        Err(reason) => WithoutRank { reason: reason.to_string(), installs: false },
        Ok(()) => WithoutRank { reason: full.clone(), installs: true },
    };
    let without_rank = nodes.iter().filter(|node| !holders.contains(node.name.as_str()));
    let without_rank = without_rank.map(|node| (node.name.clone(), reason(node))).collect();
    let mut said = vec![of_prefix(spec, &prefix), of_resources(nodes, assumed)];
    said.extend(assumptions.iter().cloned());
    said.push(format!(
        "{DIGEST} and {INSTANCE_ID} stand for the package set and the instance, which the planner names when it begins"
    ));
    Ok(Preview { roster, prefix, without_rank, assumptions: said })
}

fn cores(node: &NodeView, assumed: AssumedResources) -> u32 {
    let threads = node.cpu.map_or(1, |cpu| u32::try_from(cpu.capacity / 1000).unwrap_or(u32::MAX));
    assumed.cores.unwrap_or(threads).clamp(1, MOST_CORES_OR_GPUS)
}

fn of_prefix(spec: &FluxInstanceSpec, prefix: &str) -> String {
    let chosen = if spec.prefix.is_some() { "" } else { "; the lead's host may choose another one" };
    format!("each host passes preflight, and has room at {prefix}{chosen}")
}

fn of_resources(nodes: &[NodeView], assumed: AssumedResources) -> String {
    let gpus = many(assumed.gpus, "GPU");
    if assumed.cores.is_none() && nodes.iter().any(|node| node.cpu.is_some()) {
        return format!(
            "each host has {gpus}, and as many cores as its Node's capacity.cpu, else 1; that counts hardware threads, Flux counts \
             physical cores"
        );
    }
    format!("each host has {} and {gpus}", many(assumed.cores.unwrap_or(1), "core"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{broker_toml::render, fixture, hostlist};

    const FIRST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn invented(list: &str) -> GivenNodes {
        GivenNodes::invent(&hostlist::parse(list).unwrap(), FIRST).unwrap()
    }

    fn node(name: &str, change: &Value) -> Value {
        let mut node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name},
            "spec": {}, "status": {
                "conditions": [{"type": "Ready", "status": "True"}], "addresses": [{"type": "InternalIP", "address": "10.1.0.1"}],
                "capacity": {"cpu": "8"}, "allocatable": {"cpu": "7"},
            },
        });
        for (field, value) in change.as_object().into_iter().flatten() {
            node[field] = value.clone();
        }
        node
    }

    #[test]
    fn the_file_is_the_one_that_the_planner_publishes_for_the_same_roster() {
        let assumed = AssumedResources { cores: Some(4), gpus: 0 };
        let preview = preview(&FluxInstanceSpec::default(), &invented("n[1-3]"), assumed).unwrap();
        let nodes = [("n1", 4), ("n2", 4), ("n3", 4)];
        let planned = Roster { instance_id: INSTANCE_ID.to_owned(), ..fixture::roster(64, &nodes) };
        assert_eq!(render(&preview.roster).unwrap(), render(&planned).unwrap());
        assert!(preview.without_rank.is_empty());
    }

    #[test]
    fn each_node_without_a_rank_has_its_reason() {
        let spec: FluxInstanceSpec = serde_json::from_value(json!({"size": 1})).unwrap();
        let list = json!({"kind": "List", "items": [
            node("n1", &json!({})), node("n2", &json!({})), node("n3", &json!({"spec": {"unschedulable": true}})),
        ]});
        for text in [list.to_string(), serde_norway::to_string(&list).unwrap()] {
            let preview = preview(&spec, &GivenNodes::read(&text).unwrap(), AssumedResources::default()).unwrap();
            let expected = [("n2", "size is 1", true), ("n3", "the node is cordoned", false)];
            let expected = expected
                .map(|(name, reason, installs)| (name.to_owned(), WithoutRank { reason: reason.to_owned(), installs }));
            assert_eq!(preview.without_rank, BTreeMap::from(expected));
            let lead = &preview.roster.ranks[&0];
            assert_eq!(lead.resources.as_ref().unwrap().core_ids().to_string(), "1-7", "kubelet reserves a core");
        }
    }

    #[test]
    fn what_is_no_list_of_nodes_is_refused() {
        let twice = json!([node("n1", &json!({})), node("n1", &json!({}))]);
        for (text, expected) in [
            ("", "holds no Node"),
            ("{", "is not YAML"),
            ("kind: List\nitems: []\n", "holds no Node"),
            ("kind: Pod\n", "holds a Pod"),
            ("size: 3\n", "holds a document without a kind"),
            ("kind: Node\n", "without a name"),
            ("kind: Node\nmetadata: {name: n1}\nspec: []\n", "Node \"n1\" can't be read"),
            (&json!({"items": twice}).to_string(), "holds Node \"n1\" twice"),
        ] {
            let error = GivenNodes::read(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn where_the_planner_would_wait_there_is_no_roster_but_its_reason() {
        let waits = |spec: Value, cores| {
            let spec = serde_json::from_value(spec).unwrap();
            let assumed = AssumedResources { cores: Some(cores), gpus: 0 };
            preview(&spec, &invented("n[1-300]"), assumed).unwrap_err().to_string()
        };
        assert_eq!(
            waits(json!({"lead": "n400"}), 1),
            "the planner would make no roster: waiting for node n400, which is to be the lead"
        );
        assert!(waits(json!({"nodes": {"selector": {"matchLabels": {"a": "b"}}}}), 1).contains("no eligible node"));
        assert!(waits(json!({}), 65_536).contains("give fewer cores"));
        let last = IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
        assert!(GivenNodes::invent(&["a".to_owned(), "b".to_owned()], last).is_err());
    }

    #[test]
    fn the_largest_instance_can_be_read_again() {
        let preview = preview(&FluxInstanceSpec::default(), &invented("n[1-10000]"), AssumedResources::default());
        let text = serde_json::to_string(&preview.unwrap().roster).unwrap();
        assert_eq!(Roster::parse(&text).unwrap().ranks.len(), 10_000);
    }
}
