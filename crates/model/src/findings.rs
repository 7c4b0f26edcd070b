//! What the status says about an instance, and which finding becomes its one-line message.

use std::path::Path;

use super::{
    prefix,
    settings::{is_same_user, owner},
};
use crate::observed::{Observed, facts, resources};
use api::{FluxInstanceSpec, Rank, Roster};

/// The severity of a finding, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// The planner can't continue until a user fixes it.
    Problem,
    /// The lead is not online: no job can be submitted or started.
    LeadAway,
    /// A job waits although enough cores are free.
    CoresLost,
    /// Something keeps Flux from scheduling pods.
    PodsWait,
    /// The running instance doesn't apply a part of the spec.
    NotApplied,
    /// The spec asks for more nodes than the running epoch has ranks.
    ScaleDenied,
    /// A restart is pending and can't proceed until a user fixes something.
    RestartBlocked,
    /// Members are not online.
    NodesAway,
    /// Members have no agent: their brokers keep running, but no agent supervises them.
    AgentsAway,
    /// A restart is pending, and goes on by itself.
    RestartWaits,
    /// A queue starts no jobs.
    QueueStopped,
    /// Other schedulers don't know what host jobs use of some nodes.
    PlaceholderRefused,
    /// The planner can't read or write some FluxNodes: those nodes get no new orders. After all other findings, so that the token of one
    /// agent, which can cause this one, can't hide another.
    FluxNodesUnusable,
    /// Everything is as the spec asks.
    Fine,
}

impl Weight {
    /// The word for `status.reason`, CamelCase.
    fn word(self) -> &'static str {
        match self {
            Self::Problem => "Problem",
            Self::LeadAway => "LeadNotOnline",
            Self::CoresLost => "CoresLost",
            Self::PodsWait => "PodsWait",
            Self::NotApplied => "NotApplied",
            Self::ScaleDenied => "MoreThanMaxSize",
            Self::RestartBlocked => "RestartBlocked",
            Self::NodesAway => "NodesNotOnline",
            Self::AgentsAway => "AgentsMissing",
            Self::RestartWaits => "RestartPending",
            Self::QueueStopped => "QueueStopped",
            Self::PlaceholderRefused => "PlaceholderRefused",
            Self::FluxNodesUnusable => "FluxNodesUnusable",
            Self::Fine => "AsExpected",
        }
    }
}

/// One statement about the instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub weight: Weight,
    /// One CamelCase word for it.
    pub reason: &'static str,
    /// One sentence.
    pub message: String,
}

impl Finding {
    /// Creates a finding, whose reason is its severity's word.
    pub fn new(weight: Weight, message: impl Into<String>) -> Self {
        Self { weight, reason: weight.word(), message: message.into() }
    }

    /// The same with a reason that says more.
    pub fn because(self, reason: &'static str) -> Self {
        Self { reason, ..self }
    }
}

/// What the instance's status says: the worst finding, and the first of several with the same weight.
pub fn worst(findings: &[Finding]) -> Option<&Finding> {
    findings.iter().min_by_key(|finding| finding.weight)
}

/// A part of the spec that the running instance does not apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotApplied {
    /// CamelCase, for the condition and the Event.
    pub reason: &'static str,
    /// One sentence with the remedy.
    pub message: String,
}

/// The parts of the spec that the running instance does not apply. Prefix, lead and the brokers' user are fixed once the instance was
/// online.
pub fn not_applied(seen: &Observed, roster: &Roster) -> Vec<NotApplied> {
    let fixed = [fixed_prefix(seen, roster), fixed_lead(seen, roster), fixed_owner(seen)];
    fixed.into_iter().filter(|_| roster.established).chain([nobody_left(seen, roster)]).flatten().collect()
}

fn fixed_prefix(seen: &Observed, roster: &Roster) -> Option<NotApplied> {
    let (wanted, has) = (seen.spec.prefix.as_deref()?, prefix::of_instance(seen, roster)?);
    (Path::new(wanted) != Path::new(has)).then(|| NotApplied {
        reason: "PrefixIsFixed",
        message: format!(
            "spec.prefix is {wanted}, but the instance is in {has} on every host and stays there, because a prefix takes \
             effect only at the first start: set spec.prefix to {has}, or delete the FluxInstance and create it again"
        ),
    })
}

fn fixed_lead(seen: &Observed, roster: &Roster) -> Option<NotApplied> {
    let (wanted, leads) = (seen.spec.lead.as_deref()?, &roster.lead()?.node);
    (wanted != leads).then(|| NotApplied {
        reason: "LeadIsFixed",
        message: format!(
            "spec.lead is {wanted}, but {leads} leads and stays the lead, because the queue is on its disk: set spec.lead to \
             {leads}, or remove it (if {leads} is lost for good: docs/state.md, `flux-distribute recover`)"
        ),
    })
}

fn fixed_owner(seen: &Observed) -> Option<NotApplied> {
    let (wanted, has) = (owner(seen.spec), seen.owner());
    (!is_same_user(wanted, has)).then(|| NotApplied {
        reason: "OwnerIsFixed",
        message: format!(
            "spec.broker.runAs is {wanted}, but the brokers belong to {has} and stay {has}'s, because {has}'s jobs must not run as \
             {wanted}: set spec.broker.runAs to {has}, or delete the FluxInstance and create it again"
        ),
    })
}

/// `spec.resources.exclude` names every member: Flux has no rank left that could run a job.
fn nobody_left(seen: &Observed, roster: &Roster) -> Option<NotApplied> {
    let mut members = roster.ranks.keys().filter(|rank| roster.member(**rank).is_some()).peekable();
    members.peek()?;
    members.all(|rank| is_to_be_excluded(seen, roster, *rank)).then(|| NotApplied {
        reason: "AllExcluded",
        message:
            "spec.resources.exclude names every member, so no job can run: leave out at least one node, or add one"
                .to_owned(),
    })
}

fn is_to_be_excluded(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let Some(member) = roster.member(rank) else { return false };
    let node = seen.nodes.with_uid(&member.uid);
    let declares = node.and_then(|node| resources(seen.spec, &roster.settings, node, facts(seen, node), rank, None));
    declares.map_or_else(|| is_named(seen.spec, rank, &member.node), |declares| declares.excluded)
}

fn is_named(spec: &FluxInstanceSpec, rank: Rank, node: &str) -> bool {
    let exclude = &spec.resources.exclude;
    (rank == 0 && exclude.lead) || exclude.nodes.iter().any(|name| name == node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roster::tests::World;

    #[test]
    fn the_worst_finding_is_said() {
        use Weight::*;
        let order = [
            Problem,
            LeadAway,
            CoresLost,
            PodsWait,
            NotApplied,
            ScaleDenied,
            RestartBlocked,
            NodesAway,
            AgentsAway,
            RestartWaits,
            QueueStopped,
            PlaceholderRefused,
            FluxNodesUnusable,
            Fine,
        ];
        let all: Vec<_> = order.iter().rev().map(|weight| Finding::new(*weight, format!("{weight:?}"))).collect();
        for (resolved, worst) in order.iter().enumerate() {
            let left = &all[..all.len() - resolved];
            assert_eq!(super::worst(left).unwrap().message, format!("{worst:?}"), "{left:?}");
        }
        let twice = [Finding::new(ScaleDenied, "first"), Finding::new(ScaleDenied, "second")];
        assert_eq!((super::worst(&twice), super::worst(&[])), (Some(&twice[0]), None));
    }

    #[test]
    fn a_running_instance_names_each_field_that_it_does_not_apply_with_a_remedy() {
        type Edit = fn(&mut World);
        for (what, change, expected) in [
            ("nothing", (|_| {}) as Edit, None),
            ("the same lead", |world| world.spec.lead = Some("node1".into()), None),
            (
                "another lead",
                |world| world.spec.lead = Some("node2".into()),
                Some(("LeadIsFixed", "set spec.lead to node1")),
            ),
            ("the same prefix", |world| world.spec.prefix = Some("/opt/flux-distribute/".into()), None),
            (
                "another prefix",
                |world| world.spec.prefix = Some("/srv/flux".into()),
                Some(("PrefixIsFixed", "set spec.prefix to /opt/flux-distribute")),
            ),
            ("the same user", |world| world.spec.broker.run_as = Some("0".into()), None),
            (
                "another user",
                |world| world.spec.broker.run_as = Some("flux".into()),
                Some(("OwnerIsFixed", "set spec.broker.runAs to root")),
            ),
            ("one excluded", |world| world.spec.resources.exclude.nodes = vec!["node1".into()], None),
            (
                "all excluded by name",
                |world| world.spec.resources.exclude.nodes = vec!["node1".into(), "node2".into()],
                Some(("AllExcluded", "leave out at least one node")),
            ),
            (
                "all excluded as lead, and by name",
                |world| {
                    world.spec.resources.exclude.lead = true;
                    world.spec.resources.exclude.nodes = vec!["node2".into()];
                },
                Some(("AllExcluded", "no job can run")),
            ),
            (
                "all excluded by their cores",
                |world| world.spec.resources.exclude.cores = Some("0-7".into()),
                Some(("AllExcluded", "no job can run")),
            ),
        ] {
            let mut world = World::up(2);
            change(&mut world);
            let found = not_applied(&world.seen(), world.roster.as_ref().unwrap());
            match (expected, found.as_slice()) {
                (None, []) => {}
                (Some((reason, part)), [found]) if found.reason == reason && found.message.contains(part) => {}
                _ => panic!("{what}: {found:?}"),
            }
        }
    }

    #[test]
    fn before_the_first_start_lead_and_prefix_can_still_be_chosen() {
        let mut world = World::up(2);
        world.roster.as_mut().unwrap().established = false;
        world.spec.lead = Some("node2".into());
        world.spec.prefix = Some("/srv/flux".into());
        assert_eq!(not_applied(&world.seen(), world.roster.as_ref().unwrap()), []);
    }
}
