//! What this agent tells Prometheus of its node, and of the instance if its broker is the lead. Pure.

use api::{IdSet, Want};
use metrics::{LeadFacts, NodeFacts, Split};

use super::node_status::job_counts;
use crate::inputs::node_inputs::NodeInputs;

/// Of this node.
pub fn of_node(inputs: &NodeInputs) -> NodeFacts {
    let is_wanted = inputs.own_spec().is_some_and(|spec| spec.rank.is_some() && spec.want == Want::Run);
    NodeFacts { broker_up: is_wanted.then(|| inputs.is_online() && !inputs.broker.hangs(inputs.at)) }
}

/// Of the instance, as the broker of this node reports it; None if it is not the lead's, has not reported yet, or hangs.
pub fn of_lead(inputs: &NodeInputs) -> Option<LeadFacts> {
    let instance = inputs.broker.instance.as_ref().filter(|_| inputs.runs_lead() && !inputs.broker.hangs(inputs.at))?;
    let ranks = &inputs.roster.as_ref()?.ranks;
    let members: IdSet = ranks.iter().filter(|(_, entry)| entry.member.is_some()).map(|(rank, _)| *rank).collect();
    let is_drained = |rank: u32| instance.drained.iter().any(|drained| drained.ranks.contains(rank));
    let (online, down): (Vec<u32>, Vec<u32>) = members.0.iter().partition(|rank| instance.online.contains(**rank));
    let drained = online.iter().filter(|rank| is_drained(**rank)).count();
    let all = instance.declared_by(&members);
    Some(LeadFacts {
        ranks_up: number(online.len() - drained),
        ranks_down: number(down.len()),
        ranks_drained: number(drained),
        cores: Split { all: number(all.cores), allocated: number(instance.allocated.cores) },
        gpus: Split { all: number(all.gpus), allocated: number(instance.allocated.gpus) },
        jobs: job_counts(inputs).map(|jobs| (jobs.running.into(), jobs.pending.into())),
        oldest_pending_since: inputs.broker.pending.and_then(|pending| pending.oldest_submit),
        pending_nodes: inputs.broker.pending.map(|pending| pending.missing_nodes.into()),
    })
}

fn number(count: usize) -> u64 {
    count as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use api::{FluxNodeSpec, Roster};
    use broker::{
        pending::Pending,
        status::{Drained, InstanceStatus},
    };
    use model::fixture::roster;

    use super::*;
    use crate::{fixture, inputs::broker_state::BrokerState};

    fn lead(roster: Roster, instance: InstanceStatus) -> NodeInputs {
        let mut inputs = fixture::inputs();
        inputs.host.broker = Some(fixture::broker(0, 1));
        inputs.roster = Some(Arc::new(roster));
        let pending = Some(Pending { jobs: 2, missing_nodes: 4, oldest_submit: Some(99), fits: None });
        inputs.broker = BrokerState { instance: Some(instance), pending, ..BrokerState::default() };
        inputs
    }

    #[test]
    fn each_member_is_up_down_or_drained_and_spares_are_none_of_it() {
        let drained = |ranks: &str| Drained { ranks: ranks.parse().unwrap(), reason: String::new(), since: 0.0 };
        let members = [("a", 4), ("b", 4), ("c", 4), ("d", 4)];
        for (online, drains, expected) in [
            ("0-3", vec![], (4, 0, 0)),
            ("0-1,3", vec![], (3, 1, 0)),
            // One that is offline and drained is down; spares are neither.
            ("0-1,3", vec![drained("1-2"), drained("7")], (2, 1, 1)),
            ("0-3", vec![drained("1"), drained("1-3")], (1, 0, 3)),
        ] {
            let instance =
                InstanceStatus { online: online.parse().unwrap(), drained: drains, ..InstanceStatus::default() };
            let facts = of_lead(&lead(roster(8, &members), instance)).unwrap();
            assert_eq!((facts.ranks_up, facts.ranks_down, facts.ranks_drained), expected, "{online}");
            assert_eq!((facts.oldest_pending_since, facts.pending_nodes, facts.jobs), (Some(99), Some(4), None));
        }
    }

    #[test]
    fn a_follower_or_a_lead_that_has_not_answered_tells_nothing_of_the_instance() {
        let leads = lead(roster(8, &[("a", 4)]), InstanceStatus::default());
        assert!(of_lead(&leads).is_some());
        let mut follows = leads.clone();
        follows.host.broker = Some(fixture::broker(1, 1));
        let silent = NodeInputs { broker: BrokerState::default(), ..leads.clone() };
        let unassigned = NodeInputs { roster: None, ..leads };
        assert!([follows, silent, unassigned].iter().all(|inputs| of_lead(inputs).is_none()));
    }

    #[test]
    fn only_a_node_that_is_to_run_a_broker_has_one_that_is_up_or_not() {
        for (rank, want, expected) in [
            (Some(1), Want::Run, Some(false)),
            (Some(1), Want::Install, None),
            (Some(1), Want::Leave, None),
            (None, Want::Run, None),
        ] {
            let mut inputs = fixture::inputs();
            let node = inputs.flux_node.as_mut().unwrap();
            node.spec = FluxNodeSpec { rank, want: want.clone(), ..node.spec.clone() };
            assert_eq!(of_node(&inputs).broker_up, expected, "{rank:?} {want:?}");
        }
    }
}
