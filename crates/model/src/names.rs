//! The name of each rank in Flux.
//!
//! A broker's name is fixed for the epoch: a spare that gets a member keeps `flux-spare-<rank>` as its broker's name.
//! As a *resource*, it can have its node's name at once: Flux takes the names of resources from the loaded
//! configuration, and matches them against the brokers' names only if that configuration has a `[bootstrap]` table
//! (flux-core src/modules/resource/inventory.c). So the lead runs with a *live configuration* without that table:
//! [`live_configuration`].

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value;

use super::{
    broker_names::{broker_name, is_broker_name, spare_name},
    broker_toml::{RenderError, tables},
    resource_config::resource_config_in_rank_order,
};
use api::{IdSet, Member, Rank, Roster};

/// The resource name of each rank, in rank order: the name of the member's node, or a made-up one if the rank has no
/// member, its node's name can't be used, or another rank has that name. A rank in `keep` keeps the name given there,
/// whatever the roster says: a running job holds the rank, and Fluxion finds the resources of a running job by name.
pub fn declared_names(roster: &Roster, keep: &BTreeMap<Rank, String>) -> Vec<String> {
    let ranks = 0..roster.settings.max_size;
    if !roster.declares_nodes() {
        return ranks.map(|rank| broker_name(roster, rank)).collect();
    }
    let holders = holders(roster);
    let kept_names: HashSet<&str> = keep.values().map(String::as_str).collect();
    let name = |rank: Rank| {
        if let Some(kept) = keep.get(&rank) {
            return kept.clone();
        }
        let node = roster.member(rank).map(|member| member.node.as_str()).filter(|node| is_broker_name(node));
        match node {
            Some(node) if holders.get(node) == Some(&rank) && !kept_names.contains(node) => node.to_owned(),
            _ => spare_name(rank),
        }
    };
    ranks.map(name).collect()
}

/// The rank that gets each node's name. Two members have the same name while one rank is kept for a Node that is gone
/// and another machine has been registered under its name: then the machine that exists gets the name.
fn holders(roster: &Roster) -> HashMap<&str, Rank> {
    let mut holders: HashMap<&str, (Rank, &Member)> = HashMap::new();
    for (rank, entry) in &roster.ranks {
        let Some(member) = &entry.member else { continue };
        let holder = holders.entry(&member.node).or_insert((*rank, member));
        if holder.1.gone_since.is_some() && member.gone_since.is_none() {
            *holder = (*rank, member);
        }
    }
    holders.into_iter().map(|(node, (rank, _))| (node, rank)).collect()
}

/// The configuration that the lead's broker runs with: that of `broker_toml::render` without `[bootstrap]` (which
/// brokers read only at start, flux-config-bootstrap(5)), and with every rank under its [`declared_names`], in rank
/// order without gaps. In an epoch that declares no nodes it equals broker.toml.
///
/// # Errors
/// As `broker_toml::render`.
pub fn live_configuration(roster: &Roster, keep: &BTreeMap<Rank, String>) -> Result<Value, RenderError> {
    let mut file = tables(roster)?;
    if roster.declares_nodes() {
        file.remove("bootstrap");
        let config = resource_config_in_rank_order(roster, &declared_names(roster, keep));
        if let Some(resource) = file.get_mut("resource").and_then(toml::Value::as_table_mut) {
            resource.insert("config".into(), config.into());
        }
    }
    Ok(serde_json::to_value(file)?)
}

/// True if a rank could have a better name than it has. `known`: the present names of the ranks in Flux. Ranks in
/// `busy` have jobs and keep their names.
pub fn misnamed(roster: &Roster, known: &BTreeMap<Rank, String>, busy: &IdSet) -> bool {
    let keep =
        known.iter().filter(|(rank, _)| busy.contains(**rank)).map(|(rank, name)| (*rank, name.clone())).collect();
    let could_be = declared_names(roster, &keep);
    let differs = (0..).zip(&could_be).any(|(rank, name)| known.get(&rank).is_some_and(|known| known != name));
    roster.declares_nodes() && differs
}

/// True if no job keeps a rank from getting its right name. `held`: the names of the ranks that jobs hold.
pub fn are_settled(roster: &Roster, held: &BTreeMap<Rank, String>) -> bool {
    declared_names(roster, held) == declared_names(roster, &BTreeMap::new())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::{member, roster};
    use api::RosterEntry;

    /// Makes node `name` the member of `rank`; `gone_since` is set if its Node is gone.
    fn join(roster: &mut Roster, rank: Rank, name: &str, gone_since: Option<i64>) {
        let member = Member { gone_since, ..member(name, u16::try_from(rank).unwrap()) };
        let entry = RosterEntry { broker_name: spare_name(rank), member: Some(member), ..RosterEntry::default() };
        roster.ranks.insert(rank, entry);
    }

    fn names(roster: &Roster) -> Vec<String> {
        declared_names(roster, &BTreeMap::new())
    }

    #[test]
    fn a_joined_node_has_its_own_name_and_a_rank_without_member_a_made_up_one() {
        let mut roster = roster(4, &[("node1", 2), ("node2", 2)]);
        join(&mut roster, 2, "a.example", None);
        assert_eq!(names(&roster), ["node1", "node2", "a.example", "flux-spare-3"]);
        roster.ranks.get_mut(&1).unwrap().vacate();
        assert_eq!(names(&roster)[1], "flux-spare-1", "its broker's name is reserved for a node that has left");
        join(&mut roster, 2, "flux-spare-9", None);
        assert_eq!(names(&roster)[2], "flux-spare-2", "a node can't have the name of a spare");
    }

    #[test]
    fn of_two_machines_with_the_same_name_the_one_that_exists_gets_it() {
        let mut roster = roster(4, &[("node1", 2), ("node2", 2)]);
        roster.ranks.get_mut(&1).unwrap().member.as_mut().unwrap().gone_since = Some(9);
        join(&mut roster, 3, "node2", None);
        assert_eq!(names(&roster), ["node1", "flux-spare-1", "flux-spare-2", "node2"]);
        join(&mut roster, 3, "node2", Some(10));
        assert_eq!(names(&roster)[1..], ["node2", "flux-spare-2", "flux-spare-3"], "both are gone: nothing changes");
    }

    #[test]
    fn a_rank_that_a_job_holds_keeps_its_name_and_no_other_rank_gets_it() {
        let mut roster = roster(4, &[("node1", 2), ("node2", 2)]);
        join(&mut roster, 2, "node3", None);
        join(&mut roster, 3, "node4", None);
        let keep = BTreeMap::from([(2, "flux-spare-2".to_owned()), (1, "node4".to_owned())]);
        assert_eq!(declared_names(&roster, &keep), ["node1", "node4", "flux-spare-2", "flux-spare-3"]);
    }

    #[test]
    fn an_epoch_in_an_old_format_keeps_the_brokers_names() {
        let mut roster = Roster { format: 1, ..roster(3, &[("node1", 2)]) };
        join(&mut roster, 2, "node3", None);
        assert_eq!(names(&roster), ["node1", "flux-spare-1", "flux-spare-2"]);
        let live = live_configuration(&roster, &BTreeMap::new()).unwrap();
        assert!(live["bootstrap"]["hosts"].is_array() && live["sched-fluxion-resource"].is_null(), "{live}");
        let known = ["node1", "flux-spare-1", "node3"].map(str::to_owned);
        assert!(!misnamed(&roster, &(0..).zip(known).collect(), &IdSet::default()));
    }

    #[test]
    fn the_live_configuration_lists_all_ranks_in_order_and_has_no_bootstrap_table() {
        let mut roster = roster(4, &[("node1", 2), ("node2", 4), ("node3", 2)]);
        join(&mut roster, 3, "node4", None);
        let live = live_configuration(&roster, &BTreeMap::new()).unwrap();
        assert_eq!(live["bootstrap"], Value::Null);
        let expected = json!([
            {"hosts": "node1", "cores": "0-1"}, {"hosts": "node2", "cores": "0-3"}, {"hosts": "node[3-4]", "cores": "0-1"}
        ]);
        assert_eq!(live["resource"]["config"], expected);
        assert_eq!(live["sched-fluxion-resource"]["match-format"], "rv1");
        assert_eq!(live["tbon"]["tcp_user_timeout"], "2m");
    }

    #[test]
    fn a_rank_is_misnamed_only_if_no_job_holds_it() {
        let mut roster = roster(4, &[("node1", 2)]);
        join(&mut roster, 2, "node3", None);
        let known = |third: &str| -> BTreeMap<Rank, String> {
            (0..).zip(["node1", "flux-spare-1", third, "flux-spare-3"].map(str::to_owned)).collect()
        };
        let busy = |ranks: &str| ranks.parse().unwrap();
        assert!(!misnamed(&roster, &known("node3"), &busy("")));
        assert!(misnamed(&roster, &known("flux-spare-2"), &busy("")));
        assert!(!misnamed(&roster, &known("flux-spare-2"), &busy("2")));
        assert!(!misnamed(&roster, &BTreeMap::new(), &busy("")), "nothing is known");
        assert!(!are_settled(&roster, &BTreeMap::from([(2, "flux-spare-2".to_owned())])));
        assert!(are_settled(&roster, &BTreeMap::from([(2, "node3".to_owned())])));

        // While a job runs on rank 2 the name node3 stays there, so there is nothing to change yet.
        roster.ranks.get_mut(&2).unwrap().member.as_mut().unwrap().gone_since = Some(9);
        join(&mut roster, 3, "node3", None);
        assert!(!misnamed(&roster, &known("node3"), &busy("2")));
        assert!(misnamed(&roster, &known("node3"), &busy("")));
    }
}
