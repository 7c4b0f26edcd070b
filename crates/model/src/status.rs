//! What the FluxInstance's status says.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{
    findings::{Finding, NotApplied, Weight, line, not_applied},
    gone,
    roster::{
        Observed, candidates,
        epoch::{Restart, restart},
        holds, is_lead_silent, is_online, is_ready, is_shut_down, takers,
    },
};
use api::{
    CONDITION_AGENTS_MISSING, CONDITION_CERTIFICATE_MISSING, CONDITION_NOT_APPLIED, CONDITION_RESTART_PENDING,
    CONDITION_SCALE_DENIED, FluxInstanceStatus, InstancePhase, KeptDump, Member, NodePhase, Roster, STAND_IN,
};
use base::words::many;

/// Reason of Degraded if a job waits for cores that are free.
const CORES_LOST: &str = "CoresLost";
/// Reason of RestartPending if an epoch was taken back.
const REFUSED: &str = "TakenBack";
/// Reason of RestartPending if it can't proceed before somebody mends something.
const BLOCKED: &str = "PackagesUnavailable";

/// Reason of Degraded if an administrator has shut the instance down.
const SHUT_DOWN_REASON: &str = "ShutDown";
/// What FluxInstance and FluxNodes say meanwhile, with the remedy.
pub const SHUT_DOWN_MESSAGE: &str = "an administrator has shut the instance down (flux shutdown): to start it again, with its queue, run \
                             `kubectl -n flux-distribute annotate fxi flux --overwrite \
                             distribute.flux-framework.org/restart=\"$(date +%s)\"`";

/// What is said while the certificate's Secret is gone and brokers may use what was in it.
pub const CERTIFICATE_IS_GONE: &str = "Secret flux-curve is gone: the lead's agent brings it back, or after a minute another \
                                       member's that has the same certificate; if no host has it any more, put it back";

/// Why the planner can't go on, for the status and an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// Something that others have to do first, and will.
    Waiting(String),
    /// Something that somebody has to mend.
    Problem {
        /// CamelCase, for the condition and the Event.
        reason: &'static str,
        /// One sentence.
        message: String,
    },
}

/// Which of several obstacles is told: what somebody has to mend goes before what comes by itself.
pub fn foremost(found: impl IntoIterator<Item = Obstacle>) -> Option<Obstacle> {
    found.into_iter().min_by_key(|obstacle| matches!(obstacle, Obstacle::Waiting(_)))
}

/// Which is told where nothing can be planned for `reason`, and `found` was known before.
pub fn told_while_waiting(seen: &Observed, found: Option<Obstacle>, reason: String) -> Obstacle {
    match found {
        Some(problem @ Obstacle::Problem { .. }) => problem,
        _ if candidates(seen).is_empty() => Obstacle::Problem { reason: "NoEligibleNode", message: reason },
        waiting => waiting.unwrap_or(Obstacle::Waiting(reason)),
    }
}

/// How far the instance is.
#[derive(Clone, Copy)]
struct Standing {
    lead_online: bool,
    /// The lead was online once.
    established: bool,
    /// An administrator has shut the instance down.
    shut_down: bool,
}

/// A condition's value, reason and message.
type Holds = (bool, &'static str, String);

/// The status as it shall be; equal to the present one where nothing has changed.
pub fn status(
    seen: &Observed,
    generation: i64,
    roster: Option<&Roster>,
    obstacle: Option<&Obstacle>,
) -> FluxInstanceStatus {
    let mut next = counted(seen, roster);
    next.observed_generation = generation;
    let lead_online = roster.is_some_and(|roster| is_online(seen, roster, 0));
    let complete = lead_online && next.online == next.size;
    let shut_down = roster.is_some_and(|roster| roster.closing.is_none() && is_shut_down(seen, roster));
    let standing = Standing { lead_online, established: next.instance_id.is_some(), shut_down };
    next.phase = phase(roster, obstacle, standing);
    let restart = roster.map_or(Restart::None, |roster| restart(seen, roster));
    if !matches!(restart, Restart::Refused { .. }) {
        // The deadline counts from what is asked for now.
        next.conditions.retain(|condition| condition.type_ != CONDITION_RESTART_PENDING || condition.reason != REFUSED);
    }
    let (scale, restart) = (scale_denied(seen, roster), restart_pending(restart));
    let (unapplied, agentless) = (unapplied(seen, roster), agents_missing(seen, roster));
    let cores_lost = roster.and_then(|roster| holds(seen, roster, 0)?.0.held_back.as_deref());
    let mut findings = progress(seen, roster, obstacle, &next, standing);
    findings.extend(cores_lost.map(|words| Finding::new(Weight::CoresLost, words)));
    let holding = |weight, (holds, _, words): &Holds| holds.then(|| Finding::new(weight, words.clone()));
    findings.extend(holding(Weight::NotApplied, &unapplied));
    findings.extend(holding(Weight::ScaleDenied, &scale));
    findings.extend(holding(Weight::RestartBlocked, &restart).filter(|_| [BLOCKED, REFUSED].contains(&restart.1)));
    findings.extend(holding(Weight::AgentsAway, &agentless));
    let is_stand_in = seen.reports.values().any(|report| report.flux.as_deref() == Some(STAND_IN));
    let message = if is_stand_in { format!("{STAND_IN}: {}", line(&findings)) } else { line(&findings) };
    let now = Timestamp::from_second(seen.now).unwrap_or_default();
    for (type_, (holds, reason, words)) in [
        ("Ready", (lead_online, if lead_online { "LeadOnline" } else { "LeadNotOnline" }, message.clone())),
        ("Progressing", (!complete, if complete { "Complete" } else { "NodesToCome" }, message.clone())),
        ("Degraded", degraded(obstacle, cores_lost, standing, &message)),
        (CONDITION_CERTIFICATE_MISSING, certificate_missing(seen)),
        (CONDITION_SCALE_DENIED, scale),
        (CONDITION_RESTART_PENDING, restart),
        (CONDITION_NOT_APPLIED, unapplied),
        (CONDITION_AGENTS_MISSING, agentless),
    ] {
        set_condition(&mut next.conditions, type_, holds, reason, &words, generation, now);
    }
    next.message = Some(message);
    next
}

/// How far the instance is on its way to all nodes online, and what is in the way.
fn progress(
    seen: &Observed,
    roster: Option<&Roster>,
    obstacle: Option<&Obstacle>,
    next: &FluxInstanceStatus,
    standing: Standing,
) -> Vec<Finding> {
    let mut found = Vec::new();
    if standing.shut_down {
        found.push(Finding::new(Weight::LeadAway, SHUT_DOWN_MESSAGE));
    }
    let complete = standing.lead_online && next.online == next.size;
    match obstacle {
        Some(Obstacle::Problem { message, .. }) => found.push(Finding::new(Weight::Problem, message.clone())),
        Some(Obstacle::Waiting(message)) if !standing.lead_online => {
            found.push(Finding::new(Weight::LeadAway, message.clone()));
        }
        Some(Obstacle::Waiting(message)) if complete => {
            found.push(Finding::new(Weight::Fine, format!("{}; {message}", online_of(next))));
        }
        _ => {}
    }
    let weight = match () {
        () if !standing.lead_online => Weight::LeadAway,
        () if !complete => Weight::NodesAway,
        () => Weight::Fine,
    };
    found.push(Finding::new(weight, if complete { online_of(next) } else { explain(seen, roster, next) }));
    found
}

fn online_of(status: &FluxInstanceStatus) -> String {
    format!("{} of {} online", status.online, many(status.size, "node"))
}

fn unapplied(seen: &Observed, roster: Option<&Roster>) -> Holds {
    let found = roster.map(|roster| not_applied(seen, roster)).unwrap_or_default();
    let Some(NotApplied { reason, .. }) = found.first() else { return (false, "AsExpected", String::new()) };
    let words: Vec<_> = found.iter().map(|part| part.words.as_str()).collect();
    (true, reason, words.join("; "))
}

/// Members whose pod is gone: what they said last stands, and nobody would notice if it changed.
fn agents_missing(seen: &Observed, roster: Option<&Roster>) -> Holds {
    let members = roster.into_iter().flat_map(Roster::members);
    let mut missing = members.filter_map(|member| Some((&member.node, seen.agentless.get(&member.node)?)));
    let Some((node, why)) = missing.next() else { return (false, "AsExpected", String::new()) };
    let others = match count(missing) {
        0 => String::new(),
        more => format!(" (and {})", many(more, "other node")),
    };
    let words =
        format!("{node} has no agent{others}: {why}; its broker and jobs go on, but nothing is mended or told there");
    (true, "AgentNotRunning", words)
}

/// The status before with what the roster and the nodes' reports say by now.
fn counted(seen: &Observed, roster: Option<&Roster>) -> FluxInstanceStatus {
    let mut next = seen.status.clone();
    let Some(roster) = roster else {
        (next.online, next.pending_nodes) = (0, None);
        return next;
    };
    next.epoch = roster.epoch;
    next.revision = roster.revision;
    next.max_size = roster.settings.max_size;
    next.digest = Some(roster.settings.digest.clone());
    next.lead = roster.lead().map(|member| member.node.clone());
    next.size = count(roster.members());
    next.online = count(roster.ranks.keys().filter(|rank| is_online(seen, roster, **rank)));
    if roster.established {
        next.instance_id = Some(roster.instance_id.clone());
    }
    next.dump = newest_dump(seen);
    next.pending_nodes = holds(seen, roster, 0).and_then(|(lead, _)| lead.pending_nodes);
    next
}

fn phase(roster: Option<&Roster>, obstacle: Option<&Obstacle>, standing: Standing) -> InstancePhase {
    match obstacle {
        Some(Obstacle::Problem { .. }) if !standing.lead_online => InstancePhase::Failed,
        _ if roster.is_some_and(|roster| roster.closing.is_some()) => InstancePhase::Restarting,
        _ if standing.lead_online => InstancePhase::Running,
        _ if roster.is_some_and(|roster| roster.previous.is_some()) => InstancePhase::Restarting,
        _ if standing.established => InstancePhase::Degraded,
        _ if roster.is_some() => InstancePhase::Starting,
        _ => InstancePhase::Pending,
    }
}

fn degraded(obstacle: Option<&Obstacle>, cores_lost: Option<&str>, standing: Standing, message: &str) -> Holds {
    match obstacle {
        Some(Obstacle::Problem { reason, message }) => (true, reason, message.clone()),
        _ if standing.shut_down => (true, SHUT_DOWN_REASON, SHUT_DOWN_MESSAGE.to_owned()),
        _ if standing.established && !standing.lead_online => (true, "LeadNotOnline", message.to_owned()),
        _ if cores_lost.is_some() => (true, CORES_LOST, cores_lost.unwrap_or_default().to_owned()),
        _ => (false, "AsExpected", String::new()),
    }
}

fn certificate_missing(seen: &Observed) -> Holds {
    if seen.is_certificate_gone {
        (true, "SecretGone", CERTIFICATE_IS_GONE.to_owned())
    } else {
        (false, "AsExpected", String::new())
    }
}

fn scale_denied(seen: &Observed, roster: Option<&Roster>) -> Holds {
    let fits = (false, "Fits", String::new());
    let Some(roster) = roster else { return fits };
    let max_size = roster.settings.max_size;
    let (asked, are) = match (seen.spec.size, seen.spec.max_size) {
        (Some(size), _) => (size, format!("size {size} is")),
        // By default every eligible node takes part. Who sets maxSize alone wants no more than that.
        (None, Some(_)) => return fits,
        (None, None) => {
            let takers = u32::try_from(takers(seen, roster)).unwrap_or(u32::MAX);
            (takers, format!("{takers} members and eligible nodes are"))
        }
    };
    if asked <= max_size {
        return fits;
    }
    let more = match seen.spec.max_size {
        Some(next) => format!("maxSize {next} comes with the next coordinated restart"),
        None => "maxSize is the default, set spec.maxSize to have more".to_owned(),
    };
    let words = format!("{are} more than maxSize {max_size} of the running epoch: {max_size} it is; {more}");
    (true, "MoreThanMaxSize", words)
}

fn restart_pending(restart: Restart) -> Holds {
    match restart {
        Restart::None => (false, "Same", String::new()),
        Restart::Waits { difference, reason } => (true, "Waits", format!("{difference}; waits for {reason}")),
        Restart::Blocked { difference, reason } => (true, BLOCKED, format!("{difference}; {reason}")),
        Restart::Refused { difference, reason } => {
            let words = format!("{difference}; it did not come up and was taken back ({reason}): change the spec");
            (true, REFUSED, words)
        }
        Restart::Now { difference, .. } => (true, "Begins", difference),
    }
}

/// The conditions of `next` that somebody should hear of by an Event: those that need somebody, and did not say so `before`.
pub fn warnings(before: Option<&FluxInstanceStatus>, next: &FluxInstanceStatus) -> Vec<Condition> {
    let needs_somebody = |condition: &&Condition| match condition.type_.as_str() {
        CONDITION_SCALE_DENIED | CONDITION_NOT_APPLIED | CONDITION_AGENTS_MISSING => true,
        CONDITION_RESTART_PENDING => [BLOCKED, REFUSED].contains(&condition.reason.as_str()),
        "Degraded" => [CORES_LOST, SHUT_DOWN_REASON].contains(&condition.reason.as_str()),
        _ => false,
    };
    let is_news = |condition: &&Condition| {
        before
            .and_then(|before| before.holding(&condition.type_))
            .is_none_or(|old| (&old.reason, &old.message) != (&condition.reason, &condition.message))
    };
    let holding = next.conditions.iter().filter(|condition| condition.status == "True");
    holding.filter(needs_somebody).filter(is_news).cloned().collect()
}

/// The status while nothing can be planned at all: what was last seen of the nodes stands, with why it may be old.
pub fn stopped(before: &FluxInstanceStatus, reason: &str, words: &str, now: Timestamp) -> FluxInstanceStatus {
    let mut next = before.clone();
    next.message = Some(words.to_owned());
    // Of the spec there is now, nothing has been looked at.
    set_condition(&mut next.conditions, "Degraded", true, reason, words, before.observed_generation, now);
    next
}

/// Each node tells the newest that it has of this instance.
fn newest_dump(seen: &Observed) -> Option<KeptDump> {
    let dumps = seen.reports.iter().filter_map(|(node, report)| Some((node, report.dump.as_ref()?)));
    let (node, dump) = dumps.max_by_key(|(_, dump)| dump.time.0)?;
    Some(KeptDump { node: node.clone(), dump: dump.clone() })
}

/// One sentence on what is still missing, with the words of the node that matters most: a lead that answers nobody, one that
/// has failed, or else the first.
fn explain(seen: &Observed, roster: Option<&Roster>, next: &FluxInstanceStatus) -> String {
    let Some(roster) = roster else { return "no roster yet".to_owned() };
    let offline = roster.ranks.iter().filter(|(rank, _)| !is_online(seen, roster, **rank));
    let offline = offline.filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?)));
    let has_failed = |(_, member): &(_, &Member)| {
        seen.reports.get(&member.node).is_some_and(|report| report.phase == NodePhase::Failed)
    };
    let is_silent = |rank| rank == 0 && is_lead_silent(seen, roster);
    let first = offline.min_by_key(|found| (!is_silent(found.0), !has_failed(found)));
    let detail = first.map(|(rank, member)| {
        let report = seen.reports.get(&member.node);
        let silent = is_silent(rank).then(|| match is_ready(seen, member) {
            true => "its broker does not answer the others".to_owned(),
            false => "its Node is not Ready, and its broker does not answer the others".to_owned(),
        });
        let unready = (!is_ready(seen, member)).then(|| "its Node is not Ready".to_owned());
        let agentless = seen.agentless.get(&member.node).map(|why| format!("it has no agent: {why}"));
        let gone = gone::words(roster, rank).or(silent).or(unready).or(agentless);
        let unsaid = if report.is_some() { "its agent has said no more" } else { "no word from its agent yet" };
        let words = gone.or_else(|| report?.message.clone()).unwrap_or_else(|| unsaid.to_owned());
        let started = if holds(seen, roster, rank).is_some() { "started" } else { "not started" };
        format!("; {} (rank {rank}, {started}): {words}", member.node)
    });
    format!("{}{}", online_of(next), detail.unwrap_or_default())
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

/// Sets one condition; its time changes only with its value, as Kubernetes' API conventions have it.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    type_: &str,
    holds: bool,
    reason: &str,
    message: &str,
    generation: i64,
    now: Timestamp,
) {
    let value = if holds { "True" } else { "False" };
    let mut next = Condition {
        type_: type_.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: Time(now),
    };
    match conditions.iter_mut().find(|condition| condition.type_ == type_) {
        Some(old) => {
            if old.status == value {
                next.last_transition_time = old.last_transition_time.clone();
            }
            *old = next;
        }
        None => conditions.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roster::tests::World;

    fn waiting(words: &str) -> Obstacle {
        Obstacle::Waiting(words.to_owned())
    }

    fn problem(reason: &'static str) -> Obstacle {
        Obstacle::Problem { reason, message: "no".to_owned() }
    }

    #[test]
    fn what_somebody_has_to_mend_goes_before_what_comes_by_itself() {
        let (packages, certificate) = (|| waiting("packages"), || waiting("certificate"));
        let (unresolved, malformed) = (|| problem("PackagesUnresolved"), || problem("MalformedCertificate"));
        for (found, told) in [
            (vec![], None),
            (vec![packages(), certificate()], Some(packages())),
            (vec![packages(), malformed()], Some(malformed())),
            (vec![unresolved(), certificate()], Some(unresolved())),
            (vec![unresolved(), malformed()], Some(unresolved())),
        ] {
            assert_eq!(foremost(found.clone()), told, "{found:?}");
        }
    }

    #[test]
    fn what_the_plan_waits_for_is_told_where_nothing_else_is_known() {
        type Change = fn(&mut World);
        let nobody: Change = |world| world.nodes.iter_mut().for_each(|node| node.cordoned = true);
        let eligible_none = || Obstacle::Problem { reason: "NoEligibleNode", message: "the reason".to_owned() };
        for (change, found, told) in [
            ((|_| {}) as Change, None, waiting("the reason")),
            (|_| {}, Some(waiting("packages")), waiting("packages")),
            (|_| {}, Some(problem("PackagesUnresolved")), problem("PackagesUnresolved")),
            (nobody, None, eligible_none()),
            (nobody, Some(waiting("packages")), eligible_none()),
            (nobody, Some(problem("PackagesUnresolved")), problem("PackagesUnresolved")),
        ] {
            let mut world = World::up(1);
            change(&mut world);
            assert_eq!(told_while_waiting(&world.seen(), found.clone(), "the reason".to_owned()), told, "{found:?}");
        }
    }

    fn told(world: &World) -> FluxInstanceStatus {
        status(&world.seen(), 1, world.roster.as_ref(), None)
    }

    #[test]
    fn the_line_and_a_condition_tell_what_is_wrong_beside_nodes_that_are_all_online() {
        type Change = fn(&mut World);
        let packages: Change = |world| {
            world.digest = "next";
            let why = "can't fetch http://example.org/flux.conda: 404 Not Found";
            world.reports.get_mut("node2").unwrap().lacks_packages = Some(why.to_owned());
        };
        let evicted: Change =
            |world| drop(world.agentless.insert("node2".to_owned(), "its pod was evicted".to_owned()));
        for (change, condition, reason, words) in [
            ((|_| {}) as Change, None, "", "2 of 2 nodes online"),
            (|world| world.spec.size = Some(99), Some(CONDITION_SCALE_DENIED), "MoreThanMaxSize", "size 99 is more"),
            (packages, Some(CONDITION_RESTART_PENDING), BLOCKED, "node2 can't install the packages: can't fetch http"),
            (|world| world.spec.lead = Some("node2".into()), Some(CONDITION_NOT_APPLIED), "LeadIsFixed", "node1 leads"),
            (
                evicted,
                Some(CONDITION_AGENTS_MISSING),
                "AgentNotRunning",
                "node2 has no agent: its pod was evicted; its broker",
            ),
            // It waits for others, who will come.
            (|world| world.digest = "next", Some(CONDITION_RESTART_PENDING), "Waits", "2 of 2 nodes online"),
        ] {
            let mut world = World::up(2);
            change(&mut world);
            let told = told(&world);
            assert!(told.message.as_ref().is_some_and(|message| message.contains(words)), "{words}: {told:?}");
            let Some(condition) = condition else { continue };
            let holding = told.holding(condition).unwrap_or_else(|| panic!("{condition}: {told:?}"));
            assert_eq!(holding.reason, reason, "{told:?}");
            let warned = warnings(None, &told);
            assert_eq!(warned.iter().any(|warning| warning.type_ == condition), reason != "Waits", "{warned:?}");
            assert_eq!(warnings(Some(&told), &told), [], "an Event comes once");
        }
    }

    #[test]
    fn of_the_nodes_that_are_not_online_the_one_that_has_failed_is_quoted() {
        let mut world = World::up(3);
        let report = |world: &mut World, name: &str, phase, words: &str| {
            let report = world.reports.get_mut(name).unwrap();
            (report.phase, report.message, report.adopted) = (phase, Some(words.to_owned()), None);
        };
        report(&mut world, "node2", NodePhase::Waiting, "waiting for another node to hold the packages");
        report(&mut world, "node3", NodePhase::Failed, "404 Not Found");
        let words = "1 of 3 nodes online; node3 (rank 2, not started): 404 Not Found";
        assert_eq!(told(&world).message.as_deref(), Some(words));
    }

    #[test]
    fn a_job_that_waits_for_free_cores_is_the_line_and_a_condition_and_an_event() {
        let mut world = World::up(2);
        let fine = status(&world.seen(), 1, world.roster.as_ref(), None);
        world.reports.get_mut("node1").unwrap().held_back = Some("job 7 waits".to_owned());
        world.status = status(&world.seen(), 1, world.roster.as_ref(), None);
        assert_eq!(world.status.message.as_deref(), Some("job 7 waits"));
        let degraded = world.status.holding("Degraded").unwrap();
        assert_eq!((degraded.reason.as_str(), degraded.message.as_str()), ("CoresLost", "job 7 waits"));
        let told: Vec<_> = warnings(Some(&fine), &world.status).into_iter().map(|condition| condition.reason).collect();
        assert_eq!(told, ["CoresLost"]);
    }

    #[test]
    fn while_nothing_can_be_planned_the_page_says_why_and_heals_when_it_can_again() {
        let mut world = World::up(3);
        world.status = status(&world.seen(), 1, world.roster.as_ref(), None);
        let words = "ConfigMap flux-roster: can't be read; delete it to have it made again from the nodes";
        let at = |second| Timestamp::from_second(second).unwrap();
        let told = stopped(&world.status, "MalformedRoster", words, at(2000));
        assert_eq!((&told.phase, told.online, told.message.as_deref()), (&InstancePhase::Running, 3, Some(words)));
        let degraded = told.holding("Degraded").unwrap();
        assert_eq!((degraded.reason.as_str(), degraded.message.as_str()), ("MalformedRoster", words));
        assert_eq!(stopped(&told, "MalformedRoster", words, at(3000)), told, "it is written once");

        world.status = told;
        let healed = status(&world.seen(), 1, world.roster.as_ref(), None);
        assert_eq!((healed.holding("Degraded"), healed.message.as_deref()), (None, Some("3 of 3 nodes online")));
    }
}
