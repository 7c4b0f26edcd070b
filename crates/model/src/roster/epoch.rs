//! From one coordinated start to the next: when the running epoch ends, and what the next one begins with.
//!
//! Two words, so that no job is lost between them: the roster says that the epoch is *closing*, the lead's agent stops its
//! broker where that disturbs nobody and says that the epoch is *closed*, and only then the next epoch's roster is written.

use std::{collections::BTreeMap, time::Duration};

use super::{
    Observed, candidates, facts, format, holds, is_online, is_ready, is_shut_down, lacks_since, lead_report, limit,
    may_declare_less, member, properties, resources, takers,
};
use crate::{
    broker_toml::{is_broker_name, is_node_a_property, spare_name},
    prefix,
    settings::{pending, settings, wanted},
};
use api::{
    CONDITION_RESTART_PENDING, Closing, EpochSettings, FluxNodeStatus, Member, OnFailure, Rank, Refused, Roster,
    RosterEntry,
};

/// What there is to say about a coordinated restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Restart {
    /// What runs is what is wanted.
    None,
    /// It would bring this difference, and waits.
    Waits {
        /// What would change.
        difference: String,
        /// For what.
        reason: String,
    },
    /// It would bring this difference, and can't before somebody mends what is in the way.
    Blocked {
        /// What would change.
        difference: String,
        /// What is in the way.
        reason: String,
    },
    /// It did not come up, and was taken back.
    Refused {
        /// What was changed.
        difference: String,
        /// The lead's words.
        reason: String,
    },
    /// It may begin.
    Now {
        /// What will change.
        difference: String,
        /// In which way.
        closing: Closing,
    },
}

/// The next roster, where this epoch is to end, has ended, or did not come up.
pub(super) fn advance(seen: &Observed, roster: &Roster) -> Option<Roster> {
    let lead = roster.lead()?;
    let report = seen.reports.get(&lead.node)?;
    if let Some(closing) = roster.closing {
        // A job has slipped in between. It wins, and nothing else is held up until it ends.
        let is_busy = report.allocated.as_ref().is_some_and(|ranks| !ranks.is_empty());
        if closing == Closing::WhenIdle && report.adopted.is_some() && is_busy {
            return Some(with_closing(roster, None));
        }
        let closed = report.closed == Some(roster.epoch) && report.adopted.is_none();
        if !closed {
            return None;
        }
        let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else {
            // Nobody knows when what the next epoch needs can be had. The brokers of this one can start.
            return Some(with_closing(roster, None));
        };
        return next_epoch(seen, roster, settings(seen.spec, takers(seen, roster), digest, certificate));
    }
    if let Some(next) = come_up_or_go_back(seen, roster, report) {
        return Some(next);
    }
    match restart(seen, roster) {
        Restart::Now { closing, .. } => Some(with_closing(roster, Some(closing))),
        _ => None,
    }
}

/// The next roster, where the spec can't be served: the epoch that was to end goes on, its lead stopped or not.
pub(super) fn carry_on(seen: &Observed, roster: &Roster) -> Option<Roster> {
    match roster.closing {
        Some(_) => Some(with_closing(roster, None)),
        None => come_up_or_go_back(seen, roster, seen.reports.get(&roster.lead()?.node)?),
    }
}

/// Of an epoch whose lead was not online yet: it is, or it won't be.
fn come_up_or_go_back(seen: &Observed, roster: &Roster, report: &FluxNodeStatus) -> Option<Roster> {
    let previous = roster.previous.as_ref()?;
    if is_online(seen, roster, 0) {
        return Some(Roster { previous: None, revision: roster.revision + 1, ..roster.clone() });
    }
    if !keeps_dying(roster, report) || seen.spec.upgrade.on_failure != OnFailure::GoBack {
        return None;
    }
    let reason = report.message.clone().unwrap_or_default();
    let refused = Some(Refused { settings: roster.settings.clone(), reason });
    // The old certificate is nowhere any more, and there is nothing in one that a broker could stumble over.
    let certificate = roster.settings.certificate.clone();
    let back = next_epoch(seen, roster, EpochSettings { certificate, ..previous.clone() })?;
    Some(Roster { previous: None, refused, ..back })
}

/// `roster`, whose epoch is to end in this way, or goes on.
pub(super) fn with_closing(roster: &Roster, closing: Option<Closing>) -> Roster {
    let mut next = Roster { closing, revision: roster.revision + 1, ..roster.clone() };
    // The lead is told by its own entry's revision.
    next.ranks.entry(0).and_modify(|entry| entry.revision = next.revision);
    next
}

/// Whether a coordinated restart is due, and else what it waits for.
pub fn restart(seen: &Observed, roster: &Roster) -> Restart {
    let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else { return Restart::None };
    let told = seen.restart_word.is_some() && seen.restart_word != roster.restart.as_deref();
    let by_spec = pending(&roster.settings, seen.spec, digest, certificate);
    // The deadline is for changes of the spec: that agents were upgraded must not end running jobs.
    let has_deadline = by_spec.is_some();
    let Some(difference) = by_spec
        .or_else(|| pending_by_agents(seen, roster))
        .or_else(|| pending_by_format(seen, roster))
        .or_else(|| told.then(|| "asked for".to_owned()))
    else {
        return Restart::None;
    };
    let waits = |reason: String| Restart::Waits { difference: difference.clone(), reason };
    if let Some(refused) = &roster.refused
        && !told
        // A maxSize that nobody has asked for counts nodes, and they come and go.
        && refused.settings == wanted(&refused.settings, seen.spec, digest, certificate)
    {
        return Restart::Refused { difference, reason: refused.reason.clone() };
    }
    if is_shut_down(seen, roster) {
        return match told {
            true => Restart::Now { difference, closing: Closing::AtOnce },
            false => waits("an administrator to start the instance again".to_owned()),
        };
    }
    let is_due = told || (has_deadline && deadline_has_come(seen));
    // Should a broker run there all the same, it keeps its jobs: it is not stopped before they have ended.
    let closing = if is_due { Closing::AtOnce } else { Closing::WhenIdle };
    let Some(lead) = lead_report(seen, roster) else {
        return match has_lead_failed(seen, roster) {
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
    let without = roster.ranks.keys().filter(|rank| is_online(seen, roster, **rank));
    let mut without = without.filter_map(|rank| holds(seen, roster, *rank).map(|(report, _)| (rank, report)));
    if let Some((rank, _)) = without.find(|(_, report)| !has(report)) {
        let member = roster.member(*rank);
        let node = member.map_or("", |member| member.node.as_str());
        return lacks(format!("node {node}"));
    }
    match &lead.allocated {
        Some(ranks) if ranks.is_empty() => Restart::Now { difference, closing },
        Some(ranks) => waits(format!("the jobs on ranks {ranks} to end")),
        None => waits("the lead to tell whether jobs run".to_owned()),
    }
}

/// As [`pending`], of an epoch that an older version began.
fn pending_by_format(seen: &Observed, roster: &Roster) -> Option<String> {
    let words = "nodes that join have their own names, and no core is lost when they do, from the next epoch on";
    (roster.format < format(seen)).then(|| words.to_owned())
}

/// Why the packages can't be fetched, as the first node that tried reports: one node asks the source for all.
fn unavailable_packages(seen: &Observed) -> Option<String> {
    let mut lacking = seen.reports.iter().filter_map(|(node, report)| Some((node, report.lacks_packages.as_ref()?)));
    lacking.next().map(|(node, why)| format!("{node} can't install the packages: {why}"))
}

/// As [`pending`], by the word of those who run a broker of this epoch: others may have said so of an older one.
fn pending_by_agents(seen: &Observed, roster: &Roster) -> Option<String> {
    roster.ranks.iter().find_map(|(rank, entry)| {
        let node = &entry.member.as_ref()?.node;
        let (report, _) = holds(seen, roster, *rank)?;
        report.restart_pending.as_ref().map(|difference| format!("{node}: {difference}"))
    })
}

/// The lead's broker can't be started, by its agent's word: what ran is lost already, and what the difference brings may be
/// what mends it. One that is on its way up, that has failed once, or whose machine is off, is waited for.
fn has_lead_failed(seen: &Observed, roster: &Roster) -> bool {
    let Some(lead) = roster.lead() else { return false };
    is_ready(seen, lead) && seen.reports.get(&lead.node).is_some_and(|report| keeps_dying(roster, report))
}

/// The broker of this epoch does not come up, however often it is tried.
fn keeps_dying(roster: &Roster, report: &FluxNodeStatus) -> bool {
    report.keeps_dying == Some(roster.epoch) && report.adopted.is_none()
}

fn deadline_has_come(seen: &Observed) -> bool {
    let deadline = seen.spec.upgrade.deadline.as_deref().and_then(api::parse_duration);
    let since =
        seen.status.holding(CONDITION_RESTART_PENDING).map(|pending| pending.last_transition_time.0.as_second());
    let waited = since.and_then(|since| u64::try_from(seen.now - since).ok()).map(Duration::from_secs);
    matches!((deadline, waited), (Some(deadline), Some(waited)) if waited >= deadline)
}

/// The roster of the epoch after `roster`'s: every member keeps its rank where there is room, under its node's own name and
/// with what it has now; the statedir, and so the lead, stays.
pub(super) fn next_epoch(seen: &Observed, roster: &Roster, settings: EpochSettings) -> Option<Roster> {
    let limit = limit(seen.spec, settings.max_size);
    let revision = roster.revision + 1;
    let members = roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?, entry)));
    let mut ranks = BTreeMap::<Rank, RosterEntry>::new();
    let mut homeless = Vec::new();
    // A Node that was made again under its name is another one: the old one never comes back, and a name is given out once.
    let namesake = |member: &Member| seen.nodes.iter().find(|node| node.name == member.node && node.uid != member.uid);
    // Not so the lead: its queue is on the host of that name, and a host that hasn't got it is refused there.
    let members = members.filter(|(rank, member, _)| *rank == 0 || namesake(member).is_none());
    for (rank, known, entry) in members.take(limit) {
        let mut member = known.clone();
        if let Some(node) = namesake(known) {
            (member.uid, member.gone_since) = (node.uid.clone(), None);
        }
        match rank < settings.max_size {
            true => drop(ranks.insert(rank, named(seen, roster, rank, member, Some(entry)))),
            false => homeless.push((member, Some(entry))),
        }
    }
    for node in candidates(seen) {
        let known = roster.ranks.values().chain(ranks.get(&0)).filter_map(|entry| entry.member.as_ref());
        let is_new = known.into_iter().all(|member| member.uid != node.uid)
            && facts(seen, node).is_some()
            && prefix::differs(seen, roster, &node.name).is_none();
        if let (true, Some(member)) = (is_new, member(node)) {
            homeless.push((member, None));
        }
    }
    // Rank 0 is never given to whoever comes along.
    let free: Vec<Rank> = (1..settings.max_size).filter(|rank| !ranks.contains_key(rank)).collect();
    let room = limit.saturating_sub(ranks.len());
    for (rank, (member, before)) in free.into_iter().zip(homeless).take(room) {
        ranks.insert(rank, named(seen, roster, rank, member, before));
    }
    let mut next = Roster {
        format: format(seen).max(roster.format),
        epoch: roster.epoch + 1,
        revision,
        // An epoch that did not come up is nothing to go back to.
        previous: roster.previous.clone().or_else(|| Some(roster.settings.clone())),
        settings,
        closing: None,
        refused: None,
        restart: seen.restart_word.map(str::to_owned),
        ranks,
        ..roster.clone()
    };
    properties::tell(seen, &mut next);
    next.ranks.contains_key(&0).then_some(next)
}

/// The entry of a member in the epoch after `roster`'s, in which it had `before`. Its broker has its node's name, unless it is
/// drained as a spare, by somebody or by us: Flux records drains by the brokers' names, and would give it jobs until it is drained
/// anew.
fn named(seen: &Observed, roster: &Roster, rank: Rank, member: Member, before: Option<&RosterEntry>) -> RosterEntry {
    let is_spare = before.is_some_and(|entry| entry.broker_name == spare_name(rank));
    // Anybody's word counts: a lead that was taken over from has the only one.
    let is_drained = before.is_some_and(|entry| entry.drain.is_some())
        || seen.reports.values().any(|report| report.drained_by_others.contains(rank));
    let real = is_broker_name(&member.node) && !(is_spare && is_drained);
    let known = before.and_then(|entry| entry.resources.as_ref());
    let node = seen.nodes.iter().find(|node| node.uid == member.uid);
    // Nothing runs now, so this is when resources may shrink; but jobs may wait for what will be back in a moment.
    let lacks_since = node.zip(before).and_then(|(node, entry)| lacks_since(seen, node, entry));
    let found =
        node.filter(|_| may_declare_less(seen, lacks_since)).and_then(|node| resources(seen, node, rank, known));
    let (resources, lacks_since) = if found.is_some() { (found, None) } else { (known.cloned(), lacks_since) };
    RosterEntry {
        broker_name: if real { member.node.clone() } else { spare_name(rank) },
        reserved_for: real.then(|| member.uid.clone()),
        member: Some(member),
        resources,
        lacks_since,
        properties: before.map(|entry| entry.properties.clone()).unwrap_or_default(),
        has_node_property: before.is_some_and(|entry| is_node_a_property(roster, entry)),
        // Until it is looked at anew, nobody may take it off: Flux would give the node jobs.
        drain: before.and_then(|entry| entry.drain.clone()).map(|drain| drain.anew(seen.now)),
        revision: roster.revision + 1,
    }
}
