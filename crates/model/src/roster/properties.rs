//! What Flux calls the members by.

use super::{Observed, by_uid};
use crate::{eligibility::NodeView, resources::properties};
use api::Roster;

/// Gives every member its properties. Those of a Node that is gone stay while its rank is kept.
pub(super) fn tell(seen: &Observed, roster: &mut Roster) {
    let by_uid = by_uid(seen);
    let node = |uid: &str| by_uid.get(uid).copied();
    let members = || roster.ranks.values().filter_map(|entry| Some((entry, node(&entry.member.as_ref()?.uid))));
    let told: Vec<&NodeView> =
        members().filter_map(|(_, node)| node).filter(|node| !node.architecture.is_empty()).collect();
    let differ = told.iter().any(|node| node.architecture != told[0].architecture);
    // The one that is of another kind may be the one whose Node is gone.
    let somebody_is_gone = members().any(|(_, node)| node.is_none());
    let differed =
        || members().any(|(entry, _)| told.iter().any(|other| entry.properties.contains(&other.architecture)));
    let among_others = differ || (somebody_is_gone && differed());
    for entry in roster.ranks.values_mut() {
        if let Some(node) = entry.member.as_ref().and_then(|member| node(&member.uid)) {
            entry.properties = properties(&seen.spec.resources, node, among_others);
        }
    }
}
