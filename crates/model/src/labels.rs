//! Which labels the Nodes of members get, so that pods can select by what Flux knows of a node.

use std::collections::BTreeMap;

use crate::{eligibility::NodeView, marks::NodeChange, members::Planned, nodes::Nodes, observed::Observed};
use api::{LABEL_LEAD, LABEL_ONLINE, LABEL_RANK};

/// All labels that the planner writes.
pub const OUR_LABELS: [&str; 3] = [LABEL_RANK, LABEL_LEAD, LABEL_ONLINE];

/// The changes while there is an instance. None while it has no roster: what the Nodes say stays.
pub fn changes(seen: &Observed, planned: Option<&Planned>) -> Vec<NodeChange> {
    if !seen.spec.nodes.label {
        return removals(&seen.nodes);
    }
    let Some(planned) = planned else { return Vec::new() };
    let wanted = wanted(planned, &seen.nodes);
    let none = BTreeMap::new();
    seen.nodes.iter().filter_map(|node| change(node, wanted.get(node.uid.as_str()).unwrap_or(&none))).collect()
}

/// Removes our labels from all Nodes: the instance is being deleted, or labels none.
pub fn removals(nodes: &Nodes) -> Vec<NodeChange> {
    nodes.iter().filter_map(|node| change(node, &BTreeMap::new())).collect()
}

type Labels = BTreeMap<&'static str, String>;

/// The labels of each member's Node, by uid.
fn wanted<'a>(planned: &Planned<'a>, nodes: &Nodes<'a>) -> BTreeMap<&'a str, Labels> {
    let members = planned.roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?)));
    let labelled = members.filter_map(|(rank, member)| {
        let node = nodes.with_uid(&member.uid)?;
        let is_online = planned.members.is_shown_online(rank);
        let mut labels = Labels::from([(LABEL_RANK, rank.to_string()), (LABEL_ONLINE, is_online.to_string())]);
        if rank == 0 {
            labels.insert(LABEL_LEAD, true.to_string());
        }
        Some((node.uid.as_str(), labels))
    });
    labelled.collect()
}

fn change(node: &NodeView, wanted: &Labels) -> Option<NodeChange> {
    let differs = |key: &&str| node.labels.get(*key) != wanted.get(key);
    let labels: BTreeMap<_, _> =
        OUR_LABELS.into_iter().filter(differs).map(|key| (key.to_owned(), wanted.get(key).cloned())).collect();
    (!labels.is_empty()).then(|| NodeChange { labels, ..NodeChange::of(node) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roster::tests::World;

    fn settle(world: &mut World) -> Vec<String> {
        let changes = changes(&world.seen(), world.planned().as_ref());
        apply(world, changes)
    }

    fn apply(world: &mut World, changes: Vec<NodeChange>) -> Vec<String> {
        for change in &changes {
            let node = world.nodes.iter_mut().find(|node| node.uid == change.uid).unwrap();
            for (key, value) in &change.labels {
                match value {
                    Some(value) => drop(node.labels.insert(key.clone(), value.clone())),
                    None => drop(node.labels.remove(key)),
                }
            }
        }
        changes.into_iter().map(|change| change.node).collect()
    }

    fn of(world: &World, node: &str) -> [Option<String>; 3] {
        let node = world.nodes.iter().find(|view| view.name == node).unwrap();
        OUR_LABELS.map(|key| node.labels.get(key).cloned())
    }

    fn labels(rank: &str, lead: bool, online: bool) -> [Option<String>; 3] {
        [Some(rank.to_owned()), lead.then(|| "true".to_owned()), Some(online.to_string())]
    }

    #[test]
    fn nodes_are_labelled_only_if_the_spec_says_so_and_written_only_if_something_changes() {
        let mut world = World::up(3);
        world.nodes[0].labels.insert("example.org/pool".to_owned(), "a".to_owned());
        assert_eq!(settle(&mut world), [""; 0], "not by default");
        world.spec.nodes.label = true;
        assert_eq!(settle(&mut world).len(), 3);
        assert_eq!(settle(&mut world), [""; 0]);
        assert_eq!(of(&world, "node1"), labels("0", true, true));
        assert_eq!(of(&world, "node2"), labels("1", false, true));

        world.reports.get_mut("node2").unwrap().adopted = None;
        assert_eq!(settle(&mut world), ["node2"]);
        assert_eq!(of(&world, "node2"), labels("1", false, false));

        // What somebody else writes is put right.
        world.nodes[2].labels.insert(LABEL_LEAD.to_owned(), "true".to_owned());
        assert_eq!(settle(&mut world), ["node3"]);
        assert_eq!(of(&world, "node3"), labels("2", false, true));

        world.spec.nodes.label = false;
        assert_eq!(settle(&mut world).len(), 3);
        assert_eq!(world.nodes[0].labels.keys().collect::<Vec<_>>(), ["example.org/pool"]);
    }

    #[test]
    fn a_node_that_is_no_member_has_no_labels_and_at_the_end_none_has() {
        let mut world = World::up(2);
        world.spec.nodes.label = true;
        settle(&mut world);
        // A Node that was made anew under the name of a member is another one.
        world.nodes[1].uid = "another".to_owned();
        assert_eq!(settle(&mut world), ["node2"]);
        assert_eq!(of(&world, "node2"), [None, None, None]);
        let changes = removals(&world.seen().nodes);
        assert_eq!(apply(&mut world, changes), ["node1"]);
        assert_eq!(of(&world, "node1"), [None, None, None]);
    }

    #[test]
    fn without_a_roster_the_labels_stay() {
        let mut world = World::up(2);
        world.spec.nodes.label = true;
        settle(&mut world);
        assert_eq!(changes(&world.seen(), None), []);
    }
}
