//! Members whose Node is gone while their rank is kept. Their agents can't take back their last word, which was most likely
//! that the broker is online, so the planner says in their FluxNode's spec what is known better.

use super::roster::{Observed, is_online};
use api::{FluxNodeSpec, Rank, Roster};

/// What to say of the member of `rank`; None if its Node is there, or there is no member.
pub fn words(roster: &Roster, rank: Rank) -> Option<String> {
    roster.member(rank)?.gone_since?;
    Some(if rank == 0 && roster.established {
        // Its rank is never given away: the queue is on that host's disk alone.
        "its Node is gone, and the queue with it: bring the machine back under its name; or run `flux-distribute recover --lead \
         NODE --from DUMP` in the pod of the node that shall lead; or give the queue up there with `flux-distribute reset --lead \
         NODE`"
            .to_owned()
    } else {
        "its Node is gone".to_owned()
    })
}

/// The spec of a FluxNode whose member's Node is gone: as it was, with that said.
pub fn spec(seen: &Observed, roster: &Roster, before: &FluxNodeSpec) -> Option<FluxNodeSpec> {
    let is_its = |rank: &&Rank| roster.member(**rank).is_some_and(|member| member.node == before.node_name);
    let rank = *roster.ranks.keys().find(is_its)?;
    let reason = words(roster, rank)?;
    Some(FluxNodeSpec { missed: !is_online(seen, roster, rank), reason: Some(reason), ..before.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{project::project_all, roster::tests::World, status::status};
    use api::FluxNode;

    /// What the FluxNode of `node` says once its Node is gone, and the instance's line.
    fn without(node: &str, change: impl FnOnce(&mut World)) -> (FluxNodeSpec, String) {
        let mut world = World::up(3);
        let before = FluxNode {
            status: world.reports.get(node).cloned(),
            metadata: kube::api::ObjectMeta { name: Some(node.to_owned()), ..Default::default() },
            spec: world.told(node),
        };
        world.nodes.retain(|view| view.name != node);
        change(&mut world);
        world.settle();
        let seen = world.seen();
        let told = project_all(&seen, seen.roster, [&before], |_| false);
        let line = status(&seen, 1, seen.roster, None).message.unwrap();
        (told.into_iter().next().unwrap().1, line)
    }

    #[test]
    fn a_lead_whose_node_is_gone_is_not_said_to_be_online_and_the_remedy_is_named() {
        let (told, line) = without("node1", |world| world.reports.get_mut("node2").unwrap().unheard = true);
        let reason = told.reason.unwrap();
        assert!(told.missed && reason.contains("recover --lead") && reason.contains("reset --lead"), "{reason}");
        assert!(line.contains(&reason), "{line}");
        assert_eq!((told.rank, told.fetch_from), (Some(0), None));
    }

    #[test]
    fn a_member_whose_node_is_gone_is_missed_once_the_lead_has_lost_its_broker() {
        for (offline, missed) in [(vec![], false), (vec![1], true)] {
            let (told, _) = without("node2", |world| world.reports.get_mut("node1").unwrap().offline = offline);
            assert_eq!((told.missed, told.reason.as_deref()), (missed, Some("its Node is gone")));
        }
    }
}
