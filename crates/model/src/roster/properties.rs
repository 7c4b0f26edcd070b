//! What the roster says of a member beside its resources: its Flux properties, and how its kubelet gives out CPUs.

use std::collections::BTreeSet;

use crate::{
    members::NodeIndex,
    observed::{Observed, facts},
    resources::properties,
};
use api::Roster;

/// Gives every member its properties, and takes over what is known of its kubelet. A member whose Node is gone keeps its own while its
/// rank is kept.
pub(super) fn assign(seen: &Observed, nodes: &NodeIndex, roster: &mut Roster) {
    let node = |uid: &str| nodes.with_uid(uid);
    let members = || roster.ranks.values().filter_map(|entry| Some((entry, node(&entry.member.as_ref()?.uid))));
    let architectures = members().filter_map(|(_, node)| Some(&node?.architecture));
    let architectures: BTreeSet<_> = architectures.filter(|architecture| !architecture.is_empty()).collect();
    let differ = architectures.len() > 1;
    // The only member of another architecture may be the one whose Node is gone.
    let is_any_gone = members().any(|(_, node)| node.is_none());
    let differed = || members().any(|(entry, _)| architectures.iter().any(|other| entry.properties.contains(*other)));
    let among_others = differ || (is_any_gone && differed());
    for entry in roster.ranks.values_mut() {
        if let Some(node) = entry.member.as_ref().and_then(|member| node(&member.uid)) {
            entry.properties = properties(&seen.spec.resources, node, among_others);
            entry.static_cpus = facts(seen, node).map_or(entry.static_cpus, |facts| facts.static_cpus);
        }
    }
}
