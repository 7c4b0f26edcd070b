//! Computes the FluxInstance's status.

use crate::{
    observed::{Observed, candidates, is_shut_down},
    obstacle::Obstacle,
};
use k8s_openapi::jiff::Timestamp;

use super::{
    conditions::{
        ConditionValue, OURS, SHUT_DOWN_MESSAGE, SHUT_DOWN_REASON, Standing, TAKEN_BACK, WAITS, agents_missing,
        bounded, certificate_missing, degraded, flux_nodes_unusable, needs_user, not_applied, ours, progressing, ready,
        restart_pending, scale_denied,
    },
    findings::{Finding, Weight, worst},
    gone,
    members::{Members, Planned},
    roster::epoch::{Restart, restart},
};
use api::{
    CONDITION_RESTART_PENDING, FluxInstanceStatus, InstancePhase, KeptDump, LONGEST_KEPT, Member, NodePhase, Roster,
    STAND_IN,
};
use base::words::many;

/// Picks the obstacle to report: the first that a user has to fix, else the first of all.
pub fn foremost(found: impl IntoIterator<Item = Obstacle>) -> Option<Obstacle> {
    found.into_iter().min_by_key(|obstacle| matches!(obstacle, Obstacle::Waiting(_)))
}

/// Picks the obstacle to report while [`decide`](super::roster::decide) waits for `reason`; `found` is an obstacle that
/// was known before.
pub fn told_while_waiting(seen: &Observed, found: Option<Obstacle>, reason: String) -> Obstacle {
    match found {
        Some(problem @ Obstacle::Problem { .. }) => problem,
        _ if candidates(seen).is_empty() => Obstacle::Problem { reason: "NoEligibleNode", message: reason },
        waiting => waiting.unwrap_or(Obstacle::Waiting(reason)),
    }
}

/// Computes the next status; equal to the present one if nothing has changed.
pub fn status(
    seen: &Observed,
    generation: i64,
    planned: Option<&Planned>,
    obstacle: Option<&Obstacle>,
) -> FluxInstanceStatus {
    let (roster, members) = (planned.map(|planned| planned.roster), planned.map(|planned| &planned.members));
    let mut next = counted(seen, planned);
    next.observed_generation = generation;
    let lead_online = members.is_some_and(|members| members.is_shown_online(0));
    let complete = lead_online && next.online == next.size;
    let shut_down = roster.is_some_and(|roster| roster.closing.is_none() && is_shut_down(seen, roster));
    let coming_up =
        !complete && planned.is_some_and(|Planned { roster, members, .. }| is_coming_up(seen, roster, members));
    let standing = Standing { lead_online, established: next.instance_id.is_some(), coming_up, shut_down };
    next.phase = phase(roster, obstacle, standing);
    let restart = planned.map_or(Restart::None, |Planned { roster, members, .. }| restart(seen, members, roster));
    if !matches!(restart, Restart::Refused { .. }) {
        // `restart` counts `spec.upgrade.deadline` from the transition time of this condition. Both are True: without this,
        // a new attempt would keep the time of the one that was taken back.
        next.conditions
            .retain(|condition| condition.type_ != CONDITION_RESTART_PENDING || condition.reason != TAKEN_BACK);
    }
    let (scale, restart) = (scale_denied(seen, roster), restart_pending(restart));
    let (not_applied, agents_missing) = (not_applied(seen, roster), agents_missing(seen, roster));
    let unusable = flux_nodes_unusable(seen);
    let cores_lost = members.and_then(|members| members.report(0)?.held_back_job.as_deref());
    let mut findings = progress(seen, planned, obstacle, &next, standing);
    let pods_wait = next.pods.as_ref().and_then(|pods| pods.waits_for.as_deref());
    findings.extend(pods_wait.map(|what| {
        let words = format!("Flux schedules no pods: {what}");
        // While nodes come up, pods often wait for the same thing, so the progress stays in the message.
        let words = if complete { words } else { format!("{}; {words}", explain(seen, planned, &next)) };
        Finding::new(Weight::PodsWait, words)
    }));
    findings.extend(cores_lost.map(|message| Finding::new(Weight::CoresLost, message)));
    let if_true = |weight, value: &ConditionValue| {
        value.is_true.then(|| Finding::new(weight, value.message.clone()).because(value.reason))
    };
    findings.extend(if_true(Weight::NotApplied, &not_applied));
    findings.extend(if_true(Weight::ScaleDenied, &scale));
    findings.extend(if_true(Weight::RestartBlocked, &restart).filter(|_| needs_user(restart.reason)));
    findings.extend(if_true(Weight::AgentsAway, &agents_missing));
    findings.extend(if_true(Weight::FluxNodesUnusable, &unusable));
    let waits = (restart.reason == WAITS).then(|| format!("a restart is pending: {}", restart.message));
    let stopped = members.and_then(|members| members.report(0)?.stopped_queues.clone());
    let refused = next.pods.as_ref().and_then(|pods| pods.placeholder_refused.as_deref());
    let refused = refused.map(|why| format!("a placeholder pod is refused: {why}"));
    for (weight, words) in
        [(Weight::RestartWaits, waits), (Weight::QueueStopped, stopped), (Weight::PlaceholderRefused, refused)]
    {
        let words = words.filter(|_| complete).map(|words| format!("{}; {words}", online_of(&next)));
        findings.extend(words.map(|words| Finding::new(weight, words)));
    }
    let is_stand_in = seen.reports.values().any(|report| report.flux_version.as_deref() == Some(STAND_IN));
    // Nobody may take an instance without Flux for a real one.
    let Finding { reason, message, .. } = worst(&findings).cloned().unwrap_or(Finding::new(Weight::Fine, ""));
    let message = if is_stand_in { format!("{STAND_IN}: {message}") } else { message };
    let message = bounded(&message);
    let now = Timestamp::from_second(seen.now).unwrap_or_default();
    next.conditions = ours(&next.conditions);
    let values: [ConditionValue; OURS.len()] = [
        ready(lead_online, &message),
        progressing(complete, &message),
        degraded(obstacle, cores_lost, standing, &message),
        certificate_missing(seen),
        scale,
        restart,
        not_applied,
        agents_missing,
        unusable,
    ];
    for (type_, value) in OURS.into_iter().zip(values) {
        value.set(type_, &mut next.conditions, generation, now);
    }
    (next.reason, next.message) = (Some(reason.to_owned()), Some(message));
    next
}

/// True if `next` differs from `before` only by counts and by words, which change with every node that comes or goes. All agents are sent each
/// state that is written.
pub fn differ_by_counts(before: &FluxInstanceStatus, next: &FluxInstanceStatus) -> bool {
    let rest = |status: &FluxInstanceStatus| {
        let mut rest = status.clone();
        // Agents look whether anybody is online.
        (rest.online, rest.size, rest.revision) = (rest.online.min(1), 0, 0);
        (rest.reason, rest.message, rest.pending_nodes, rest.pods) = (None, None, None, None);
        rest.conditions.iter_mut().for_each(|condition| condition.message.clear());
        rest
    };
    before != next && rest(before) == rest(next)
}

/// The findings about how many nodes are online and what keeps the others away.
fn progress(
    seen: &Observed,
    planned: Option<&Planned>,
    obstacle: Option<&Obstacle>,
    next: &FluxInstanceStatus,
    standing: Standing,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let away = |message: String| {
        let found = Finding::new(Weight::LeadAway, message);
        if standing.established { found } else { found.because("NotStartedYet") }
    };
    if standing.shut_down {
        found.push(Finding::new(Weight::LeadAway, SHUT_DOWN_MESSAGE).because(SHUT_DOWN_REASON));
    }
    let complete = standing.lead_online && next.online == next.size;
    match obstacle {
        Some(Obstacle::Problem { reason, message }) => {
            found.push(Finding::new(Weight::Problem, message.clone()).because(reason));
        }
        Some(Obstacle::Waiting(message)) if !standing.lead_online => {
            found.push(away(message.clone()));
        }
        Some(Obstacle::Waiting(message)) if complete => {
            found.push(Finding::new(Weight::Fine, format!("{}; {message}", online_of(next))));
        }
        _ => {}
    }
    let explained = || explain(seen, planned, next);
    found.push(match () {
        () if !standing.lead_online => away(explained()),
        () if !complete => Finding::new(Weight::NodesAway, explained()),
        () => Finding::new(Weight::Fine, online_of(next)),
    });
    found
}

fn online_of(status: &FluxInstanceStatus) -> String {
    format!("{} of {} online", status.online, many(status.size, "node"))
}

/// The previous status without the texts that have no limit in the schema: a captured agent's token may have filled them. All other
/// texts are limited there, or written anew each time.
fn without_unlimited_texts(before: &FluxInstanceStatus) -> FluxInstanceStatus {
    let is_long = |text: &str| text.chars().count() as u64 > LONGEST_KEPT;
    let mut next = before.clone();
    next.pods = None;
    next.dump = next.dump.filter(|dump| !is_long(&dump.dump.name));
    if matches!(&next.phase, InstancePhase::Other(word) if is_long(word)) {
        next.phase = InstancePhase::Pending;
    }
    next
}

/// The previous status with the numbers and names updated from the roster and the agents' reports.
fn counted(seen: &Observed, planned: Option<&Planned>) -> FluxInstanceStatus {
    let mut next = without_unlimited_texts(seen.status);
    let Some(Planned { roster, members, .. }) = planned else {
        (next.online, next.pending_nodes) = (0, None);
        return next;
    };
    next.epoch = roster.epoch;
    next.revision = roster.revision;
    next.max_size = roster.settings.max_size;
    next.digest = Some(roster.settings.digest.clone());
    next.lead = roster.lead().map(|member| member.node.clone());
    next.size = count(roster.members());
    next.online = count(roster.ranks.keys().filter(|rank| members.is_shown_online(**rank)));
    if roster.established {
        next.instance_id = Some(roster.instance_id.clone());
    }
    let owner = seen.fixed_owner_in(Some(roster)).map(str::to_owned);
    next.run_as = owner.or(next.run_as);
    next.dump = newest_dump(seen);
    let lead = members.report(0);
    next.pending_nodes = lead.and_then(|lead| lead.pending_nodes);
    next.pods = lead.and_then(|lead| lead.pods.clone());
    next
}

fn phase(roster: Option<&Roster>, obstacle: Option<&Obstacle>, standing: Standing) -> InstancePhase {
    match obstacle {
        Some(Obstacle::Problem { .. }) if !standing.lead_online => InstancePhase::Failed,
        _ if roster.is_some_and(|roster| roster.closing.is_some()) => InstancePhase::Restarting,
        _ if standing.lead_online && standing.coming_up => InstancePhase::Starting,
        _ if standing.lead_online => InstancePhase::Running,
        _ if roster.is_some_and(|roster| roster.previous.is_some()) => InstancePhase::Restarting,
        _ if standing.established => InstancePhase::Degraded,
        _ if roster.is_some() => InstancePhase::Starting,
        _ => InstancePhase::Pending,
    }
}

/// True during the first start, until one of the missing nodes is stuck: that one must not keep the phase at `Starting`.
/// The phase itself is the memory that the first start is not over.
fn is_coming_up(seen: &Observed, roster: &Roster, members: &Members) -> bool {
    let is_on_its_way = |(rank, member): (u32, &Member)| {
        let report = seen.report(&member.node);
        let is_stuck = report.is_some_and(|report| {
            report.needs_attention || matches!(report.phase, NodePhase::Failed | NodePhase::Offline)
        });
        let is_unmanaged = seen.agentless.contains_key(&member.node) || seen.unusable.contains_key(&member.node);
        members.is_ready(rank) && !is_stuck && !is_unmanaged
    };
    matches!(seen.status.phase, InstancePhase::Pending | InstancePhase::Starting)
        && offline(roster, members).all(is_on_its_way)
}

/// The members that are not online, and their ranks.
fn offline<'a>(roster: &'a Roster, members: &'a Members) -> impl Iterator<Item = (u32, &'a Member)> {
    let ranks = roster.ranks.iter().filter(|(rank, _)| !members.is_shown_online(**rank));
    ranks.filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?)))
}

/// The status while the planner can't plan at all: the previous status with the reason as message and condition
/// Degraded.
pub fn stopped(before: &FluxInstanceStatus, reason: &'static str, message: &str, now: Timestamp) -> FluxInstanceStatus {
    let message = bounded(message);
    let mut next = without_unlimited_texts(before);
    (next.reason, next.message) = (Some(reason.to_owned()), Some(message.clone()));
    next.conditions = ours(&before.conditions);
    // Keep the old generation: the planner has not evaluated the current spec.
    ConditionValue::yes(reason, message).set("Degraded", &mut next.conditions, before.observed_generation, now);
    next
}

/// The newest queue dump among the nodes. Each agent reports the newest that its host has of this instance.
fn newest_dump(seen: &Observed) -> Option<KeptDump> {
    let dumps = seen.reports.iter().filter_map(|(node, report)| Some((node, report.dump.as_ref()?)));
    let (node, dump) = dumps.max_by_key(|(node, dump)| (dump.time.0, *node))?;
    Some(KeptDump { node: (*node).to_owned(), dump: dump.clone() })
}

/// One sentence on how many nodes are online, with the message of the offline member that matters most: a lead that the
/// others don't reach, else the first that has failed, else the first; one whose Node is gone comes after all others.
fn explain(seen: &Observed, planned: Option<&Planned>, next: &FluxInstanceStatus) -> String {
    let Some(Planned { roster, members, .. }) = planned else { return "no roster yet".to_owned() };
    let has_failed =
        |(_, member): &(_, &Member)| seen.report(&member.node).is_some_and(|report| report.phase == NodePhase::Failed);
    let is_unreachable = |rank| rank == 0 && members.is_lead_silent();
    // The remedy for a lead whose Node is gone must show.
    let is_gone = |(rank, member): &(u32, &Member)| *rank != 0 && member.gone_since.is_some();
    let first =
        offline(roster, members).min_by_key(|found| (!is_unreachable(found.0), is_gone(found), !has_failed(found)));
    let detail = first.map(|(rank, member)| {
        let report = seen.report(&member.node);
        let unreachable = match (is_unreachable(rank), members.is_ready(rank)) {
            (true, true) => Some("its broker does not answer the others".to_owned()),
            (true, false) => Some(
                "its Node is not Ready, and its broker does not answer the others (if it is lost for good, another node can lead: \
                 docs/state.md, `flux-distribute recover`)"
                    .to_owned(),
            ),
            (false, false) => Some("its Node is not Ready".to_owned()),
            (false, true) => None,
        };
        let agentless = seen.agentless.get(&member.node).map(|why| format!("it has no agent: {why}"));
        let cause = gone::message(seen, roster, rank).or(unreachable).or(agentless);
        // Between two steps, an agent reports no message; then its phase is all that is known.
        let phase = || match &report?.phase {
            NodePhase::Online => Some("its agent reports it online, and the lead does not yet".to_owned()),
            phase => Some(format!("its phase is {phase:?}")),
        };
        let message = cause.or_else(|| report?.message.clone()).or_else(phase);
        let unusable = seen.unusable.get(&member.node).map(|why| why.message(&member.node));
        let known: Vec<_> = message.into_iter().chain(unusable).collect();
        let message = if known.is_empty() { "its agent has not reported yet".to_owned() } else { known.join("; ") };
        let started = if members.runs(rank) { "started" } else { "not started" };
        format!("; {} (rank {rank}, {started}): {message}", member.node)
    });
    format!("{}{}", online_of(next), detail.unwrap_or_default())
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conditions::{PACKAGES_UNAVAILABLE, warnings},
        observed::Unusable,
        roster::tests::World,
    };
    use api::{
        CONDITION_AGENTS_MISSING, CONDITION_FLUX_NODES_UNUSABLE, CONDITION_NOT_APPLIED, CONDITION_SCALE_DENIED, Dump,
        PodCounts,
    };
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

    fn waiting(reason: &str) -> Obstacle {
        Obstacle::Waiting(reason.to_owned())
    }

    fn problem(reason: &'static str) -> Obstacle {
        Obstacle::Problem { reason, message: "no".to_owned() }
    }

    #[test]
    fn an_obstacle_that_a_user_must_fix_goes_before_one_that_passes() {
        let (packages, certificate) = (|| waiting("packages"), || waiting("certificate"));
        let (unresolved, malformed) = (|| problem("PackagesUnresolved"), || problem("MalformedCertificate"));
        for (found, reported) in [
            (vec![], None),
            (vec![packages(), certificate()], Some(packages())),
            (vec![packages(), malformed()], Some(malformed())),
            (vec![unresolved(), certificate()], Some(unresolved())),
            (vec![unresolved(), malformed()], Some(unresolved())),
        ] {
            assert_eq!(foremost(found.clone()), reported, "{found:?}");
        }
    }

    #[test]
    fn the_reason_to_wait_is_reported_if_no_other_obstacle_is_known() {
        type Edit = fn(&mut World);
        let no_node: Edit = |world| world.nodes.iter_mut().for_each(|node| node.cordoned = true);
        let eligible_none = || Obstacle::Problem { reason: "NoEligibleNode", message: "the reason".to_owned() };
        for (change, found, reported) in [
            ((|_| {}) as Edit, None, waiting("the reason")),
            (|_| {}, Some(waiting("packages")), waiting("packages")),
            (|_| {}, Some(problem("PackagesUnresolved")), problem("PackagesUnresolved")),
            (no_node, None, eligible_none()),
            (no_node, Some(waiting("packages")), eligible_none()),
            (no_node, Some(problem("PackagesUnresolved")), problem("PackagesUnresolved")),
        ] {
            let mut world = World::up(1);
            change(&mut world);
            let obstacle = told_while_waiting(&world.seen(), found.clone(), "the reason".to_owned());
            assert_eq!(obstacle, reported, "{found:?}");
        }
    }

    #[test]
    fn counts_and_words_wait_and_all_else_in_the_status_does_not() {
        type Edit = fn(&mut FluxInstanceStatus);
        let condition = |message: &str| Condition {
            type_: "Progressing".to_owned(),
            status: "True".to_owned(),
            reason: "NodesComeUp".to_owned(),
            message: message.to_owned(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        };
        let conditions = vec![condition("7 of 9")];
        let before = FluxInstanceStatus { online: 7, size: 9, conditions, ..FluxInstanceStatus::default() };
        for (what, edit, waits) in [
            ("nothing", (|_| {}) as Edit, false),
            ("one more is online", |status| status.online = 8, true),
            ("one more member", |status| (status.size, status.revision) = (10, 4), true),
            ("other words", |status| status.conditions[0].message = "8 of 9".to_owned(), true),
            ("another reason", |status| status.reason = Some("NodesNotOnline".to_owned()), true),
            ("nobody is online", |status| status.online = 0, false),
            ("another phase", |status| status.phase = InstancePhase::Running, false),
            ("another epoch", |status| status.epoch = 2, false),
            ("a followed generation", |status| (status.online, status.observed_generation) = (8, 2), false),
            ("a condition ends", |status| status.conditions[0].status = "False".to_owned(), false),
        ] {
            let mut next = before.clone();
            edit(&mut next);
            assert_eq!(differ_by_counts(&before, &next), waits, "{what}");
        }
    }

    fn status_of(world: &World) -> FluxInstanceStatus {
        status(&world.seen(), 1, world.planned().as_ref(), None)
    }

    #[test]
    fn message_and_condition_name_the_problem_even_if_all_nodes_are_online() {
        type Edit = fn(&mut World);
        let packages: Edit = |world| {
            world.digest = "next";
            let why = "can't fetch http://example.org/flux.conda: 404 Not Found";
            world.reports.get_mut("node2").unwrap().lacks_packages = Some(why.to_owned());
        };
        let evicted: Edit = |world| drop(world.agentless.insert("node2".to_owned(), "its pod was evicted".to_owned()));
        for (change, condition, reason, part) in [
            ((|_| {}) as Edit, None, "", "2 of 2 nodes online"),
            (|world| world.spec.size = Some(99), Some(CONDITION_SCALE_DENIED), "MoreThanMaxSize", "size 99 is more"),
            (
                packages,
                Some(CONDITION_RESTART_PENDING),
                PACKAGES_UNAVAILABLE,
                "node2 can't install the packages: can't fetch http",
            ),
            (|world| world.spec.lead = Some("node2".into()), Some(CONDITION_NOT_APPLIED), "LeadIsFixed", "node1 leads"),
            (
                evicted,
                Some(CONDITION_AGENTS_MISSING),
                "AgentNotRunning",
                "node2 has no agent: its pod was evicted; its broker",
            ),
            (
                |world| drop(world.unusable.insert("node2".to_owned(), Unusable::NotRead)),
                Some(CONDITION_FLUX_NODES_UNUSABLE),
                "FluxNodeNotRead",
                "the planner can't read FluxNode node2, and",
            ),
            // This restart only waits, so it needs no warning.
            (|world| world.digest = "next", Some(CONDITION_RESTART_PENDING), "Waits", "2 of 2 nodes online"),
        ] {
            let mut world = World::up(2);
            change(&mut world);
            let status = status_of(&world);
            assert!(status.message.as_ref().is_some_and(|message| message.contains(part)), "{part}: {status:?}");
            let word = match reason {
                "" => "AsExpected",
                "Waits" => "RestartPending",
                of_the_condition => of_the_condition,
            };
            assert_eq!(status.reason.as_deref(), Some(word), "{status:?}");
            let Some(condition) = condition else { continue };
            let holding = status.holding(condition).unwrap_or_else(|| panic!("{condition}: {status:?}"));
            assert_eq!(holding.reason, reason, "{status:?}");
            let warned = warnings(None, &status);
            assert_eq!(warned.iter().any(|warning| warning.type_ == condition), reason != "Waits", "{warned:?}");
            assert_eq!(warnings(Some(&status), &status), [], "the same Event must not be sent again");
        }
    }

    #[test]
    fn the_phase_is_starting_until_all_nodes_were_online_or_one_is_stuck() {
        type Edit = fn(&mut World);
        let phase = |world: &mut World| {
            world.status = status_of(world);
            world.status.phase.clone()
        };
        let first_start = || {
            let mut world = World::up(3);
            for name in ["node2", "node3"] {
                let report = world.reports.get_mut(name).unwrap();
                (report.phase, report.adopted) = (NodePhase::Installing, None);
            }
            assert_eq!(phase(&mut world), InstancePhase::Starting);
            world
        };
        for stuck in [
            (|world| world.reports.get_mut("node3").unwrap().phase = NodePhase::Failed) as Edit,
            |world| world.nodes[2].ready = false,
            |world| drop(world.agentless.insert("node3".to_owned(), "its pod was evicted".to_owned())),
            |world| drop(world.unusable.insert("node3".to_owned(), Unusable::NotRead)),
        ] {
            let mut world = first_start();
            stuck(&mut world);
            assert_eq!(phase(&mut world), InstancePhase::Running);
        }
        let mut world = first_start();
        ["node2", "node3"].iter().for_each(|name| world.online(name));
        assert_eq!(phase(&mut world), InstancePhase::Running);
        // A node that is away later does not start the instance again.
        let report = world.reports.get_mut("node3").unwrap();
        (report.phase, report.adopted) = (NodePhase::Starting, None);
        assert_eq!(phase(&mut world), InstancePhase::Running);
    }

    /// Whoever has one agent's token can have its FluxNode like that.
    #[test]
    fn a_flux_node_that_can_not_be_used_makes_the_instance_neither_failed_nor_degraded() {
        for node in ["node1", "node3"] {
            let mut world = World::up(3);
            let report = world.reports.get_mut("node1").unwrap();
            (report.phase, report.adopted, report.message) = (NodePhase::Starting, None, Some("starting".to_owned()));
            world.unusable.insert(node.to_owned(), Unusable::NotWritten("etcdserver: request is too large".to_owned()));
            let status = status(&world.seen(), 1, world.planned().as_ref(), None);
            assert_eq!(status.phase, InstancePhase::Degraded, "the lead is away");
            assert_eq!(status.holding("Degraded").unwrap().reason, "LeadNotOnline");
            assert_eq!(status.holding(CONDITION_FLUX_NODES_UNUSABLE).unwrap().reason, "FluxNodeNotWritten");
            let about = status.message.unwrap();
            assert!(about.contains("node1 (rank 0, not started): starting"), "{about}");
            assert_eq!(about.contains("can't change FluxNode node1 (etcdserver"), node == "node1", "{about}");
        }
    }

    #[test]
    fn the_message_quotes_a_failed_node_before_one_that_waits() {
        let mut world = World::up(3);
        let report = |world: &mut World, name: &str, phase, message: &str| {
            let report = world.reports.get_mut(name).unwrap();
            (report.phase, report.message, report.adopted) = (phase, Some(message.to_owned()), None);
        };
        report(&mut world, "node2", NodePhase::Waiting, "waiting for another node to hold the packages");
        report(&mut world, "node3", NodePhase::Failed, "404 Not Found");
        let message = "1 of 3 nodes online; node3 (rank 2, not started): 404 Not Found";
        assert_eq!(status_of(&world).message.as_deref(), Some(message));
    }

    #[test]
    fn a_node_that_is_gone_hides_no_other() {
        let mut world = World::up(4);
        world.nodes.retain(|view| view.name != "node2");
        let report = world.reports.get_mut("node3").unwrap();
        (report.phase, report.message, report.adopted) = (NodePhase::Starting, Some("syncing".to_owned()), None);
        world.reports.get_mut("node1").unwrap().offline = vec![1];
        world.settle();
        let message = "2 of 4 nodes online; node3 (rank 2, not started): syncing";
        assert_eq!(status_of(&world).message.as_deref(), Some(message));
    }

    #[test]
    fn a_restart_that_waits_is_in_the_message() {
        let mut world = World::up(2);
        world.reports.get_mut("node1").unwrap().allocated = Some("1".parse().unwrap());
        world.spec.max_size = Some(8);
        let told = status_of(&world).message.unwrap();
        assert_eq!(
            told,
            "2 of 2 nodes online; a restart is pending: maxSize 64 -> 8; waits for the jobs on ranks 1 to end"
        );
    }

    #[test]
    fn a_stopped_queue_is_in_the_message() {
        let mut world = World::up(2);
        let stopped = "queue batch is stopped; `flux queue start batch` starts it";
        world.reports.get_mut("node1").unwrap().stopped_queues = Some(stopped.to_owned());
        assert_eq!(status_of(&world).message.unwrap(), format!("2 of 2 nodes online; {stopped}"));
    }

    #[test]
    fn a_job_that_waits_although_cores_are_free_is_message_condition_and_event() {
        let mut world = World::up(2);
        let fine = status(&world.seen(), 1, world.planned().as_ref(), None);
        world.reports.get_mut("node1").unwrap().held_back_job = Some("job 7 waits".to_owned());
        world.status = status(&world.seen(), 1, world.planned().as_ref(), None);
        assert_eq!(world.status.message.as_deref(), Some("job 7 waits"));
        let degraded = world.status.holding("Degraded").unwrap();
        assert_eq!((degraded.reason.as_str(), degraded.message.as_str()), ("CoresLost", "job 7 waits"));
        let warned = warnings(Some(&fine), &world.status).into_iter().map(|condition| condition.reason);
        assert_eq!(warned.collect::<Vec<_>>(), ["CoresLost"]);
    }

    #[test]
    fn gangs_are_counted_and_the_message_says_what_keeps_flux_from_scheduling_pods() {
        let mut world = World::up(2);
        let counts = PodCounts { running: 3, queued: 2, ..PodCounts::default() };
        let told = |world: &mut World, counts: PodCounts| {
            world.reports.get_mut("node1").unwrap().pods = Some(counts);
            status(&world.seen(), 1, world.planned().as_ref(), None)
        };
        let fine = told(&mut world, counts.clone());
        assert_eq!((fine.pods.as_ref(), fine.message.as_deref()), (Some(&counts), Some("2 of 2 nodes online")));
        let waits = told(&mut world, PodCounts { waits_for: Some("can't watch pods: 403".to_owned()), ..counts });
        assert_eq!(waits.message.as_deref(), Some("Flux schedules no pods: can't watch pods: 403"));

        let report = world.reports.get_mut("node2").unwrap();
        (report.phase, report.message, report.adopted) = (NodePhase::Starting, Some("syncing".to_owned()), None);
        let starts = status_of(&world).message.unwrap();
        let expected =
            "1 of 2 nodes online; node2 (rank 1, not started): syncing; Flux schedules no pods: can't watch pods: 403";
        assert_eq!(starts, expected, "the progress of a start stays visible");
    }

    #[test]
    fn a_refused_placeholder_pod_is_in_the_message() {
        let mut world = World::up(2);
        let refused = Some("create placeholder pod n1: 403".to_owned());
        world.reports.get_mut("node1").unwrap().pods =
            Some(PodCounts { placeholder_refused: refused, ..PodCounts::default() });
        let expected = "2 of 2 nodes online; a placeholder pod is refused: create placeholder pod n1: 403";
        assert_eq!(status_of(&world).message.as_deref(), Some(expected));
    }

    #[test]
    fn the_status_says_why_the_planner_can_not_plan_until_it_can_again() {
        let mut world = World::up(3);
        world.status = status(&world.seen(), 1, world.planned().as_ref(), None);
        let why = "ConfigMap flux-roster: can't be read; delete it, and the planner makes it again from the nodes";
        let at = |second| Timestamp::from_second(second).unwrap();
        let next = stopped(&world.status, "MalformedRoster", why, at(2000));
        assert_eq!((&next.phase, next.online, next.message.as_deref()), (&InstancePhase::Running, 3, Some(why)));
        let degraded = next.holding("Degraded").unwrap();
        assert_eq!(next.reason.as_deref(), Some("MalformedRoster"));
        assert_eq!((degraded.reason.as_str(), degraded.message.as_str()), ("MalformedRoster", why));
        assert_eq!(stopped(&next, "MalformedRoster", why, at(3000)), next, "a second round changes nothing");

        world.status = next;
        let recovered = status(&world.seen(), 1, world.planned().as_ref(), None);
        assert_eq!((recovered.holding("Degraded"), recovered.message.as_deref()), (None, Some("3 of 3 nodes online")));
    }

    #[test]
    fn a_status_that_an_agents_token_has_filled_becomes_small_again() {
        let mut world = World::up(3);
        let forged = |number: u32| {
            let mut forged = Vec::new();
            let type_ = format!("Forged{number}");
            ConditionValue::yes("Forged", "").set(&type_, &mut forged, 1, Timestamp::default());
            forged
        };
        world.status.conditions = (0..20).flat_map(forged).collect();
        let why = "é".repeat(1 << 20);
        for (reason, status) in [("x", why.as_str()), (why.as_str(), "True")] {
            let filled = Condition {
                type_: "Ready".to_owned(),
                reason: reason.to_owned(),
                status: status.to_owned(),
                message: String::new(),
                observed_generation: None,
                last_transition_time: Time(Timestamp::default()),
            };
            world.status.conditions.push(filled);
        }
        let dump = Dump { name: why.clone(), time: Time(Timestamp::default()), bytes: 1 };
        world.status.dump = Some(KeptDump { node: "n0".to_owned(), dump });
        world.status.pods = Some(PodCounts { waits_for: Some(why.clone()), ..PodCounts::default() });
        world.status.phase = InstancePhase::Other(why.clone());
        let written = stopped(&world.status, "MalformedRoster", "why", Timestamp::default());
        assert!(serde_json::to_string(&written).unwrap().len() < 10_000);
        assert_eq!((written.dump, written.pods, written.phase), (None, None, InstancePhase::Pending));
        assert!(written.conditions.iter().all(|condition| condition.type_ == "Degraded"), "{:?}", written.conditions);
    }

    #[test]
    fn what_the_planner_can_not_read_is_told_once_however_long_it_is() {
        let before = World::up(3).status;
        let why = "é".repeat(1 << 20);
        let at = |second| Timestamp::from_second(second).unwrap();
        let once = stopped(&before, "MalformedRoster", &why, at(2000));
        assert_eq!(stopped(&once, "MalformedRoster", &why, at(3000)), once);
        assert!(serde_json::to_string(&once).unwrap().len() < 100_000);
    }

    #[test]
    fn conditions_that_are_not_ours_are_dropped_from_the_status() {
        let mut world = World::up(3);
        let own = status(&world.seen(), 1, world.planned().as_ref(), None);
        world.status = own.clone();
        for type_ in ["Forged", "Ready"] {
            let now = Timestamp::from_second(3000).unwrap();
            let mut forged = Vec::new();
            ConditionValue::yes("Forged", "x".repeat(1 << 20)).set(type_, &mut forged, 1, now);
            world.status.conditions.extend(forged);
        }
        assert_eq!(status(&world.seen(), 1, world.planned().as_ref(), None), own);
    }

    #[test]
    fn a_time_in_the_future_does_not_keep_a_deadline_from_coming() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let pending = |conditions: &mut Vec<Condition>, now| {
            ConditionValue::yes("Changed", "").set(CONDITION_RESTART_PENDING, conditions, 1, at(now));
            conditions[0].last_transition_time.0
        };
        let mut conditions = Vec::new();
        assert_eq!(pending(&mut conditions, 1000), at(1000));
        assert_eq!(pending(&mut conditions, 2000), at(1000));
        conditions[0].last_transition_time = Time(at(4_000_000_000));
        assert_eq!(pending(&mut conditions, 3000), at(3000));
    }
}
