//! `[[resource.config]]`: what each rank declares, grouped by kind (flux-config-resource(5)).

use std::collections::{BTreeMap, BTreeSet};

use super::hostlist;
use api::{IdSet, Member, Roster, RosterEntry};

/// True if the rank gets its Node's name as a property, so that jobs can require the node by name. An epoch that
/// declares real node names doesn't need that, and each property adds a line to `flux resource list`; but a property
/// from an older epoch stays, for jobs that have been pending since then.
pub(super) fn is_node_a_property(roster: &Roster, entry: &RosterEntry) -> bool {
    let differs = |member: &Member| !roster.declares_nodes() && member.node != entry.broker_name;
    entry.member.as_ref().is_some_and(|member| entry.has_node_property || differs(member))
}

/// The resources and properties that all ranks of one kind declare.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    cores: IdSet,
    gpus: u32,
    properties: BTreeSet<String>,
}

impl Kind {
    /// The `[[resource.config]]` entry for hosts of this kind (flux-config-resource(5)).
    fn entry(self, hosts: &[&String]) -> toml::Value {
        let mut entry = toml::Table::new();
        entry.insert("hosts".into(), hostlist::encode(hosts).into());
        entry.insert("cores".into(), self.cores.to_string().into());
        if self.gpus > 0 {
            entry.insert("gpus".into(), (0..self.gpus).collect::<IdSet>().to_string().into());
        }
        if !self.properties.is_empty() {
            entry.insert("properties".into(), self.properties.into_iter().collect::<Vec<_>>().into());
        }
        entry.into()
    }
}

/// The kind of each rank, in rank order.
fn kinds(roster: &Roster) -> impl Iterator<Item = Kind> {
    let shape = roster.spare_shape();
    (0..roster.settings.max_size).map(move |rank| {
        let entry = roster.ranks.get(&rank);
        let declared = entry.and_then(|entry| entry.resources.as_ref()).unwrap_or(&shape);
        let mut properties = BTreeSet::new();
        if let Some((entry, member)) = entry.and_then(|entry| Some((entry, entry.member.as_ref()?))) {
            properties.extend(entry.properties.iter().cloned());
            properties.extend(is_node_a_property(roster, entry).then(|| member.node.clone()));
        }
        Kind { cores: declared.core_ids(), gpus: declared.gpus, properties }
    })
}

/// One `[[resource.config]]` entry for each kind. `names` are those of the brokers, by which Flux finds the ranks.
pub(super) fn resource_config(roster: &Roster, names: &[String]) -> Vec<toml::Value> {
    let mut hosts: BTreeMap<Kind, Vec<&String>> = BTreeMap::new();
    let mut in_order = Vec::new();
    for (kind, name) in kinds(roster).zip(names) {
        let known = hosts.entry(kind.clone()).or_default();
        if known.is_empty() {
            in_order.push(kind);
        }
        known.push(name);
    }
    in_order.into_iter().filter_map(|kind| hosts.remove(&kind).map(|hosts| kind.entry(&hosts))).collect()
}

/// As [`resource_config`], for a configuration without `[bootstrap]`: there the order of the names defines the ranks,
/// so only neighbouring ranks of one kind share an entry.
pub(super) fn resource_config_in_rank_order(roster: &Roster, names: &[String]) -> Vec<toml::Value> {
    let mut runs: Vec<(Kind, Vec<&String>)> = Vec::new();
    for (kind, name) in kinds(roster).zip(names) {
        match runs.last_mut() {
            Some((last, hosts)) if *last == kind => hosts.push(name),
            _ => runs.push((kind, vec![name])),
        }
    }
    runs.into_iter().map(|(kind, hosts)| kind.entry(&hosts)).collect()
}

#[cfg(test)]
mod tests {
    use crate::fixture::roster;
    use api::Resources;

    #[test]
    fn a_spare_has_the_commonest_shape_unless_the_spec_names_one() {
        let mut roster = roster(8, &[("a", 2), ("b", 4), ("c", 4), ("d", 2), ("e", 8)]);
        assert_eq!(roster.spare_shape().cores, 4);
        roster.settings.spare_shape = Some(Resources { cores: 16, gpus: 1 });
        assert_eq!(roster.spare_shape().cores, 16);
    }
}
