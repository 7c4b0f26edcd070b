//! Decides when the running epoch ends, and makes the roster of the next one.
//!
//! An epoch ends in two steps, so that no job is lost in between. The roster says that the epoch is *closing*; the
//! lead's agent then stops its broker as soon as that is allowed, and reports that the epoch is *closed*. Only then
//! does the planner write the next epoch's roster.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use super::properties;
use crate::{
    broker_names::{is_broker_name, spare_name},
    members::Members,
    observed::{
        Observed, candidates, facts, format, is_shut_down, lacks_since, limit, may_declare_less, member,
        participant_count, resources,
    },
    prefix,
    resource_config::is_node_a_property,
    settings::{pending, settings, wanted},
};
use api::{
    CONDITION_RESTART_PENDING, Closing, EpochSettings, FluxNodeStatus, Member, OnFailure, ROSTER_FORMAT, Rank, Refused,
    Roster, RosterEntry,
};

/// The state of a coordinated restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restart {
    /// No restart is pending: the running epoch is what the spec asks for.
    None,
    /// A restart is pending and waits.
    Waits {
        /// What the restart would change.
        difference: String,
        /// What it waits for.
        reason: String,
    },
    /// A restart is pending and can't proceed until a user fixes something.
    Blocked {
        /// What the restart would change.
        difference: String,
        /// What the user has to fix.
        reason: String,
    },
    /// The instance did not come up with the change, and the planner went back to the previous settings.
    Refused {
        /// What the restart changed.
        difference: String,
        /// The message of the lead's agent.
        reason: String,
    },
    /// The restart may begin.
    Now {
        /// What the restart will change.
        difference: String,
        /// How the running epoch is to end.
        closing: Closing,
    },
}

/// Returns the next roster if this epoch is to end, has ended, or did not come up.
pub(super) fn advance(seen: &Observed, members: &Members, roster: &Roster) -> Option<Roster> {
    let lead = roster.lead()?;
    let report = seen.report(&lead.node)?;
    if let Some(closing) = roster.closing {
        // A job started before the lead's broker stopped. The epoch goes on, so that no other job is held up until that
        // one ends.
        let is_busy = report.ranks_of_host_jobs().is_some_and(|ranks| !ranks.is_empty());
        if closing == Closing::WhenIdle && report.adopted.is_some() && is_busy {
            return Some(with_closing(roster, None));
        }
        let closed = report.closed_epoch == Some(roster.epoch) && report.adopted.is_none();
        if !closed {
            return None;
        }
        let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else {
            // It is unknown when the packages and the certificate of the next epoch will be available, but the brokers
            // of this epoch can start.
            return Some(with_closing(roster, None));
        };
        return next_epoch(
            seen,
            roster,
            settings(seen.spec, seen.owner(), participant_count(seen, roster), digest, certificate),
        );
    }
    if let Some(next) = come_up_or_go_back(seen, members, roster, report) {
        return Some(next);
    }
    match restart(seen, members, roster) {
        Restart::Now { closing, .. } => Some(with_closing(roster, Some(closing))),
        _ => None,
    }
}

/// Returns the next roster if the spec can't be served: an epoch that was to end goes on, even if its lead has stopped
/// already.
pub(super) fn carry_on(seen: &Observed, members: &Members, roster: &Roster) -> Option<Roster> {
    match roster.closing {
        Some(_) => Some(with_closing(roster, None)),
        None => come_up_or_go_back(seen, members, roster, seen.report(&roster.lead()?.node)?),
    }
}

/// Handles an epoch whose lead has not been online yet: confirms it if the lead is online now, or goes back to the
/// previous settings if the lead fails to start and `spec.upgrade.onFailure` is GoBack.
fn come_up_or_go_back(seen: &Observed, members: &Members, roster: &Roster, report: &FluxNodeStatus) -> Option<Roster> {
    let previous = roster.previous.as_ref()?;
    if members.is_online(0) {
        return Some(Roster { previous: None, revision: roster.revision + 1, ..roster.clone() });
    }
    if !keeps_failing(roster, report) || seen.spec.upgrade.on_failure != OnFailure::GoBack {
        return None;
    }
    let reason = report.message.clone().unwrap_or_default();
    let refused = Some(Refused { settings: roster.settings.clone(), reason });
    // Keep the new certificate: the old one no longer exists, and a certificate can't be why the broker fails.
    let certificate = roster.settings.certificate.clone();
    let back = next_epoch(seen, roster, EpochSettings { certificate, ..previous.clone() })?;
    Some(Roster { previous: None, refused, ..back })
}

/// Returns `roster` with its epoch closing this way, or going on if `closing` is None.
pub(super) fn with_closing(roster: &Roster, closing: Option<Closing>) -> Roster {
    let mut next = Roster { closing, revision: roster.revision + 1, ..roster.clone() };
    // The lead's agent notices the change by the revision of its own entry.
    next.ranks.entry(0).and_modify(|entry| entry.revision = next.revision);
    next
}

/// Decides whether a coordinated restart is due, and what it waits for otherwise.
pub fn restart(seen: &Observed, members: &Members, roster: &Roster) -> Restart {
    let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else { return Restart::None };
    let is_requested = seen.restart_word.is_some() && seen.restart_word != roster.restart.as_deref();
    let by_spec = pending(&roster.settings, seen.spec, seen.owner(), digest, certificate);
    // Only a change of the spec has a deadline: an upgrade of the agents must not end running jobs.
    let has_deadline = by_spec.is_some();
    let Some(difference) = by_spec
        .or_else(|| pending_by_agents(members, roster))
        .or_else(|| pending_by_format(seen, roster))
        .or_else(|| is_requested.then(|| "an administrator asked for a restart".to_owned()))
    else {
        return Restart::None;
    };
    let waits = |reason: String| Restart::Waits { difference: difference.clone(), reason };
    if let Some(refused) = &roster.refused
        && !is_requested
        // `wanted` ignores a default maxSize, which follows the number of nodes and changes as they come and go.
        && refused.settings == wanted(&refused.settings, seen.spec, seen.owner(), digest, certificate)
    {
        return Restart::Refused { difference, reason: refused.reason.clone() };
    }
    if is_shut_down(seen, roster) {
        return match is_requested {
            true => Restart::Now { difference, closing: Closing::AtOnce },
            false => waits("an administrator to start the instance again".to_owned()),
        };
    }
    let is_due = is_requested || (has_deadline && deadline_has_come(seen));
    // WhenIdle protects the jobs of a broker that runs although the lead seems to be down: it is not stopped before
    // they end.
    let closing = if is_due { Closing::AtOnce } else { Closing::WhenIdle };
    let Some(lead) = members.lead_report() else {
        return match has_lead_failed(seen, members, roster) {
            true => Restart::Now { difference, closing },
            false => waits("the lead to be online".to_owned()),
        };
    };
    let has = |report: &FluxNodeStatus| digest == roster.settings.digest || report.digest.as_deref() == Some(digest);
    let lacks = |whose: String| match unavailable_packages(seen) {
        Some(reason) => Restart::Blocked { difference: difference.clone(), reason },
        None => waits(format!("the packages to be installed on {whose}")),
    };
    if !has(lead) {
        return lacks("the lead".to_owned());
    }
    if is_due {
        return Restart::Now { difference, closing };
    }
    let without = roster.ranks.keys().filter(|rank| members.is_online(**rank));
    let mut without = without.filter_map(|rank| members.report(*rank).map(|report| (rank, report)));
    if let Some((rank, _)) = without.find(|(_, report)| !has(report)) {
        let member = roster.member(*rank);
        let node = member.map_or("", |member| member.node.as_str());
        return lacks(format!("node {node}"));
    }
    match lead.ranks_of_host_jobs() {
        Some(ranks) if ranks.is_empty() => Restart::Now { difference, closing },
        Some(ranks) => waits(format!("the jobs on ranks {ranks} to end")),
        None => waits("the lead to report whether jobs run".to_owned()),
    }
}

/// As [`pending`], for an epoch that an older version began.
fn pending_by_format(seen: &Observed, roster: &Roster) -> Option<String> {
    let difference =
        "from the next epoch on, nodes that join have their own names, and no cores are lost when they join";
    // Asked first, because the other asks all reports.
    (roster.format < ROSTER_FORMAT && roster.format < format(seen)).then(|| difference.to_owned())
}

/// Why the packages can't be fetched: of the nodes that failed, the first by name says it. One node fetches from the source for all.
fn unavailable_packages(seen: &Observed) -> Option<String> {
    let lacking = seen.reports.iter().filter_map(|(node, report)| Some((node, report.lacks_packages.as_ref()?)));
    lacking.min_by_key(|(node, _)| *node).map(|(node, why)| format!("{node} can't install the packages: {why}"))
}

/// As [`pending`], from the reports of agents that run a broker of this epoch; other reports may be about an older
/// epoch.
fn pending_by_agents(members: &Members, roster: &Roster) -> Option<String> {
    roster.ranks.iter().find_map(|(rank, entry)| {
        let node = &entry.member.as_ref()?.node;
        members.report(*rank)?.restart_pending.as_ref().map(|difference| format!("{node}: {difference}"))
    })
}

/// True if the lead's agent reports that its broker can't be started. The running jobs are lost already then, and the
/// pending change may be the cure, so the restart need not wait. It does wait for a lead that is starting, has failed
/// only once, or whose machine is off.
fn has_lead_failed(seen: &Observed, members: &Members, roster: &Roster) -> bool {
    let Some(lead) = roster.lead() else { return false };
    members.is_ready(0) && seen.report(&lead.node).is_some_and(|report| keeps_failing(roster, report))
}

/// True if the agent's repeated attempts to start the broker of this epoch have failed.
fn keeps_failing(roster: &Roster, report: &FluxNodeStatus) -> bool {
    report.start_failing_epoch == Some(roster.epoch) && report.adopted.is_none()
}

fn deadline_has_come(seen: &Observed) -> bool {
    let deadline = seen.spec.upgrade.deadline.as_deref().and_then(api::parse_duration);
    let since =
        seen.status.holding(CONDITION_RESTART_PENDING).map(|pending| pending.last_transition_time.0.as_second());
    let waited = since.and_then(|since| u64::try_from(seen.now - since).ok()).map(Duration::from_secs);
    matches!((deadline, waited), (Some(deadline), Some(waited)) if waited >= deadline)
}

/// What the entries of the next epoch are made from.
struct News<'a> {
    seen: &'a Observed<'a>,
    /// Those of the next epoch.
    settings: &'a EpochSettings,
    /// The ranks that someone other than flux-distribute has drained, from all reports: after a takeover only the
    /// former lead's has them.
    drained: BTreeSet<Rank>,
}

impl<'a> News<'a> {
    fn of(seen: &'a Observed<'a>, settings: &'a EpochSettings) -> Self {
        let drained = seen.reports.values().flat_map(|report| report.drained_by_others.0.iter().copied()).collect();
        Self { seen, settings, drained }
    }
}

/// Makes the roster of the next epoch: every member keeps its rank if there is room, gets its node's own name, and
/// declares what it has now. The lead stays, because the statedir is on its host.
pub(super) fn next_epoch(seen: &Observed, roster: &Roster, settings: EpochSettings) -> Option<Roster> {
    let limit = limit(seen.spec, settings.max_size);
    let revision = roster.revision + 1;
    let members = roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?, entry)));
    let mut ranks = BTreeMap::<Rank, RosterEntry>::new();
    let mut homeless = Vec::new();
    // If a Node was created again under the same name, the old one never comes back. Its member loses the rank, because
    // each name may occur only once.
    let news = News::of(seen, &settings);
    let namesake = |member: &Member| seen.nodes.named(&member.node).filter(|node| node.uid != member.uid);
    // Except for the lead: the host of that name has the queue, and the agent of a host without it refuses to start.
    let members = members.filter(|(rank, member, _)| *rank == 0 || namesake(member).is_none());
    for (rank, known, entry) in members.take(limit) {
        let mut member = known.clone();
        if let Some(node) = namesake(known) {
            (member.uid, member.gone_since) = (node.uid.clone(), None);
        }
        match rank < settings.max_size {
            true => drop(ranks.insert(rank, named(&news, roster, rank, member, Some(entry)))),
            false => homeless.push((member, Some(entry))),
        }
    }
    let known = roster.ranks.values().chain(ranks.get(&0)).filter_map(|entry| entry.member.as_ref());
    let known: HashSet<String> = known.map(|member| member.uid.clone()).collect();
    for node in candidates(seen) {
        let is_new = !known.contains(&node.uid)
            && facts(seen, node).is_some()
            && prefix::differs(seen, roster, &node.name).is_none();
        if let (true, Some(member)) = (is_new, member(node)) {
            homeless.push((member, None));
        }
    }
    // Rank 0 is never given to a new node.
    let free: Vec<Rank> = (1..settings.max_size).filter(|rank| !ranks.contains_key(rank)).collect();
    let room = limit.saturating_sub(ranks.len());
    for (rank, (member, before)) in free.into_iter().zip(homeless).take(room) {
        ranks.insert(rank, named(&news, roster, rank, member, before));
    }
    let mut next = Roster {
        format: format(seen).max(roster.format),
        epoch: roster.epoch.saturating_add(1),
        revision,
        // If this epoch did not come up, its settings are nothing to go back to: keep those of the last that did.
        previous: roster.previous.clone().or_else(|| Some(roster.settings.clone())),
        settings,
        closing: None,
        refused: None,
        restart: seen.restart_word.map(str::to_owned),
        ranks,
        ..roster.clone()
    };
    properties::assign(seen, &mut next);
    next.ranks.contains_key(&0).then_some(next)
}

/// Makes the entry of a member in the epoch after `roster`'s; `before` is its entry in that one. The broker gets its
/// node's name, unless the rank is drained under a spare's name: Flux records drains by broker name, and under a new
/// name the rank would get jobs until it is drained again.
fn named(news: &News, roster: &Roster, rank: Rank, member: Member, before: Option<&RosterEntry>) -> RosterEntry {
    let News { seen, settings, drained } = news;
    let is_spare = before.is_some_and(|entry| entry.broker_name == spare_name(rank));
    let is_drained = before.is_some_and(|entry| entry.drain.is_some()) || drained.contains(&rank);
    let real = is_broker_name(&member.node) && !(is_spare && is_drained);
    let known = before.and_then(|entry| entry.resources.as_ref());
    let node = seen.nodes.with_uid(&member.uid);
    // No broker runs between epochs, so resources may shrink here. But pending jobs may need hardware that will be back
    // soon.
    let host = node.and_then(|node| facts(seen, node));
    let lacks_since = node.and(before).and_then(|entry| lacks_since(seen, host, entry));
    let found = node
        .filter(|_| may_declare_less(seen, lacks_since))
        .and_then(|node| resources(seen.spec, settings, node, host, rank, known));
    let (resources, lacks_since) = if found.is_some() { (found, None) } else { (known.cloned(), lacks_since) };
    RosterEntry {
        broker_name: if real { member.node.clone() } else { spare_name(rank) },
        reserved_for: real.then(|| member.uid.clone()),
        member: Some(member),
        resources,
        lacks_since,
        static_cpus: before.is_some_and(|entry| entry.static_cpus),
        properties: before.map(|entry| entry.properties.clone()).unwrap_or_default(),
        has_node_property: before.is_some_and(|entry| is_node_a_property(roster, entry)),
        // Keep the drain until the planner has decided about it again: without it, Flux would give the node jobs.
        drain: before.and_then(|entry| entry.drain.clone()).map(|drain| drain.anew(seen.now)),
        revision: roster.revision + 1,
    }
}
