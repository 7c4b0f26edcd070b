//! Members whose Node is gone while their rank is kept. Their agents can't correct their last report, which most likely
//! says that the broker is online, so the planner writes what it knows into the spec of their FluxNode.

use super::{members::Planned, observed::Observed};
use api::{FluxNodeSpec, Rank, Roster};

/// How each message about a member or a former one begins whose Node is gone.
pub const NODE_IS_GONE: &str = "its Node is gone";

/// The message about the member of `rank`; None if its Node exists or the rank has no member.
pub fn message(seen: &Observed, roster: &Roster, rank: Rank) -> Option<String> {
    let member = roster.member(rank)?;
    member.gone_since?;
    Some(if rank == 0 && roster.established {
        // The planner never reassigns rank 0 by itself, because only that host's disk has the queue.
        "its Node is gone, and the queue with it: bring the machine back under its name; or run `flux-distribute recover --lead \
         NODE --from DUMP` in the pod of the node that is to lead; or give up the queue there with `flux-distribute reset --lead \
         NODE`"
            .to_owned()
    } else if seen.nodes.named(&member.node).is_some() {
        format!("{NODE_IS_GONE}; a new Node has its name now")
    } else {
        format!("{NODE_IS_GONE}; its rank is kept for it as long as spec.ranks.retain says")
    })
}

/// The spec of a FluxNode whose member's Node is gone: the spec `before`, with `reason` and `lost_by_lead` updated. None if
/// the FluxNode belongs to no such member.
pub fn spec(seen: &Observed, planned: &Planned, before: &FluxNodeSpec) -> Option<FluxNodeSpec> {
    let rank = planned.rank_on(&before.node_name)?;
    let reason = message(seen, planned.roster, rank)?;
    Some(FluxNodeSpec { lost_by_lead: !planned.members.is_shown_online(rank), reason: Some(reason), ..before.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{project::project_all, roster::tests::World, status::status};
    use api::{FluxNode, NodePhase};

    /// The spec of the FluxNode of `node` once its Node is gone, and the instance's message.
    fn without(node: &str, change: impl FnOnce(&mut World)) -> (FluxNodeSpec, String) {
        let mut world = World::up(3);
        let before = FluxNode {
            status: world.reports.get(node).cloned(),
            metadata: kube::api::ObjectMeta { name: Some(node.to_owned()), ..Default::default() },
            spec: world.projected(node),
        };
        world.nodes.retain(|view| view.name != node);
        change(&mut world);
        world.settle();
        let seen = world.seen();
        let projected = project_all(&seen, world.planned().as_ref(), [&before], |_| false);
        let line = status(&seen, 1, world.planned().as_ref(), None).message.unwrap();
        (projected.into_iter().next().unwrap().1, line)
    }

    /// The last broker that missed the lead has ended and comes up again, so nobody reports that it misses it.
    #[test]
    fn a_lead_whose_node_is_gone_stays_offline_while_no_broker_that_is_online_hears_it() {
        type Change = fn(&mut World);
        let gone: Change = |world| world.nodes.retain(|view| view.name != "node3");
        let off: Change = |world| world.nodes.iter_mut().for_each(|view| view.ready &= view.name != "node3");
        for (phase, change, is_offline) in
            [(NodePhase::Online, gone, false), (NodePhase::Starting, gone, true), (NodePhase::Starting, off, true)]
        {
            let (spec, line) = without("node1", |world| {
                change(world);
                world.reports.get_mut("node2").unwrap().phase = phase.clone();
            });
            assert_eq!((spec.lost_by_lead, line.contains("and the queue with it")), (is_offline, is_offline), "{line}");
        }
    }

    #[test]
    fn a_lead_whose_node_is_gone_counts_as_offline_and_the_message_names_the_remedy() {
        let (spec, line) = without("node1", |world| world.reports.get_mut("node2").unwrap().lead_unreachable = true);
        let reason = spec.reason.unwrap();
        assert!(spec.lost_by_lead && reason.contains("recover --lead") && reason.contains("reset --lead"), "{reason}");
        assert!(line.contains(&reason), "{line}");
        assert_eq!((spec.rank, spec.fetch_from), (Some(0), None));
    }

    #[test]
    fn a_new_node_with_the_name_of_one_that_is_gone_is_told_apart() {
        let mut world = World::up(3);
        world.nodes.iter_mut().find(|view| view.name == "node2").unwrap().uid = "of-a-new-node".to_owned();
        world.reports.get_mut("node1").unwrap().offline = vec![1];
        world.settle();
        let line = status(&world.seen(), 1, world.planned().as_ref(), None).message.unwrap();
        assert!(line.contains("its Node is gone; a new Node has its name now"), "{line}");
    }

    #[test]
    fn a_member_whose_node_is_gone_is_missed_once_the_lead_has_lost_its_broker() {
        for (offline, missed) in [(vec![], false), (vec![1], true)] {
            let (spec, _) = without("node2", |world| world.reports.get_mut("node1").unwrap().offline = offline);
            assert_eq!(
                (spec.lost_by_lead, spec.reason.as_deref()),
                (missed, Some("its Node is gone; its rank is kept for it as long as spec.ranks.retain says"))
            );
        }
    }
}
