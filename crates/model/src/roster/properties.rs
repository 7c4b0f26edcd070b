//! What the roster says of a member beside its resources: its Flux properties, and how its kubelet gives out CPUs.

use std::collections::BTreeSet;

use crate::{
    observed::{Observed, facts},
    resources::properties,
};
use api::{Roster, RosterEntry};

/// Gives every member its properties, and takes over what is known of its kubelet. A member whose Node is gone keeps its own while its
/// rank is kept.
pub(super) fn assign(seen: &Observed, roster: &mut Roster) {
    let node_of = |entry: &RosterEntry| seen.nodes.with_uid(&entry.member.as_ref()?.uid);
    // Each member's Node, looked up only once, because that takes time.
    let nodes: Vec<_> = roster.ranks.values().map(node_of).collect();
    let architectures = nodes.iter().flatten().map(|node| &node.architecture);
    let architectures: BTreeSet<_> = architectures.filter(|architecture| !architecture.is_empty()).collect();
    let differ = architectures.len() > 1;
    // The only member of another architecture may be the one whose Node is gone.
    let is_any_gone = roster.ranks.values().zip(&nodes).any(|(entry, node)| entry.member.is_some() && node.is_none());
    let names_an_architecture =
        |entry: &RosterEntry| architectures.iter().any(|other| entry.properties.contains(*other));
    let differed = || roster.ranks.values().filter(|entry| entry.member.is_some()).any(names_an_architecture);
    let among_others = differ || (is_any_gone && differed());
    for (entry, node) in roster.ranks.values_mut().zip(nodes) {
        if let Some(node) = node {
            entry.properties = properties(&seen.spec.resources, node, among_others);
            entry.static_cpus = facts(seen, node).map_or(entry.static_cpus, |facts| facts.static_cpus);
        }
    }
}
