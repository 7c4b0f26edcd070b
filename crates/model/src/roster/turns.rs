//! Which node leads an instance that was never online if brokers don't come up: each eligible node gets its turn, after
//! growing pauses. A node that has failed as the lead counts as failed until something changes: the spec, the packages
//! or certificate, the restart annotation, or the node itself.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::{
    eligibility::NodeView,
    lead::{LEAD_PATIENCE, is_lead_fixed},
    members::Planned,
    observed::{Observed, candidates, has_failed},
    obstacle::Obstacle,
};
use api::{FailedLead, FailedLeads, FirstFailure, Member, NodePhase, Roster};
use base::words::many;

/// The pause after the first failure.
const SHORTEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// How many failed nodes the roster keeps; the oldest failures are dropped first. By then every pause is
/// [`LONGEST_PAUSE`].
pub(super) const MOST_NODES: usize = 64;

/// The failure of the present lead.
struct Failure<'a> {
    lead: &'a Member,
    /// The last output of its broker, or why the broker could not be started. None if unknown.
    last_words: Option<&'a str>,
}

/// The nodes that have failed so far, including the present lead.
pub(super) fn failed_leads(seen: &Observed, roster: &Roster) -> FailedLeads {
    let mut failed = match roster.failed_leads.generation == seen.generation {
        true => roster.failed_leads.clone(),
        false => FailedLeads { generation: seen.generation, ..FailedLeads::default() },
    };
    failed.nodes.retain(|uid, node| fingerprint(seen, uid).as_ref() == Some(&node.facts));
    if let Some(Failure { lead, last_words }) = failure(seen, roster)
        && let Some(facts) = fingerprint(seen, &lead.uid)
    {
        if let Some(reason) = last_words.filter(|_| failed.first.is_none()) {
            failed.first = Some(FirstFailure { node: lead.node.clone(), reason: reason.to_owned() });
        }
        let times = failed.times(&lead.uid);
        let is_known = failed.nodes.get(&lead.uid).is_some_and(|node| node.instance_id == roster.instance_id);
        if !is_known {
            let instance_id = roster.instance_id.clone();
            let node = FailedLead { times: times.saturating_add(1), at: seen.now, instance_id, facts };
            failed.nodes.insert(lead.uid.clone(), node);
        }
    }
    while failed.nodes.len() > MOST_NODES
        && let Some(oldest) = failed.nodes.iter().min_by_key(|(_, node)| node.at).map(|(uid, _)| uid.clone())
    {
        failed.nodes.remove(&oldest);
    }
    if failed.nodes.is_empty() { FailedLeads::default() } else { failed }
}

/// True if the lead has failed and its pause is over, or something changed that may be the cure. `failed` comes from
/// [`failed_leads`].
pub(super) fn is_next_due(seen: &Observed, roster: &Roster, failed: &FailedLeads) -> bool {
    let lead = failure(seen, roster).and_then(|failure| failed.nodes.get(&failure.lead.uid));
    let Some(lead) = lead else { return false };
    let pause = pause(failed.all_times());
    // If the clock was set back, the difference is negative: don't wait for hours.
    let has_rested = u64::try_from(seen.now - lead.at).map_or(true, |rested| rested >= pause.as_secs());
    has_rested || has_something_changed(seen, roster)
}

/// Why the instance has no lead, for its status. None if no lead has failed or the lead is fixed or online.
pub fn no_lead(seen: &Observed, Planned { roster, members, .. }: &Planned) -> Option<Obstacle> {
    let failed = &roster.failed_leads;
    if failed.is_empty() || is_lead_fixed(roster) || members.is_online(0) {
        return None;
    }
    let live = || {
        let lead = roster.lead()?;
        let report = seen.report(&lead.node).filter(|report| report.phase == NodePhase::Failed)?;
        Some((lead.node.as_str(), report.message.as_deref()?))
    };
    let first = failed.first.as_ref().map(|first| (first.node.as_str(), first.reason.as_str()));
    let (node, reason) = first.or_else(live)?;
    let eligible = candidates(seen);
    let is_meant = |node: &&NodeView| seen.spec.lead.as_ref().is_none_or(|lead| *lead == node.name);
    let may_lead: Vec<_> = eligible.into_iter().filter(is_meant).collect();
    let tried = may_lead.iter().filter(|node| failed.times(&node.uid) > 0).count();
    let message = format!(
        "no lead has come up: {node}: {reason} ({}, on {tried} of {} that may lead; the next attempt follows after a pause, or at \
         once if the spec, the packages or a node changes)",
        many(failed.all_times(), "failed attempt"),
        many(may_lead.len() as u64, "node"),
    );
    Some(match failed.all_times() > 1 || tried == may_lead.len() {
        true => Obstacle::Problem { reason: "NoLead", message },
        false => Obstacle::Waiting(message),
    })
}

fn failure<'a>(seen: &Observed<'a>, roster: &'a Roster) -> Option<Failure<'a>> {
    let lead = roster.lead()?;
    let report = seen.report(&lead.node)?;
    match &report.lead_failed {
        Some(failed) if failed.instance_id == roster.instance_id => {
            Some(Failure { lead, last_words: failed.last_words.as_deref() })
        }
        // The report is about an earlier attempt.
        Some(_) => None,
        // An older agent, or one that can't inspect its host, reports no `lead_failed`. Its phase Failed may still be
        // about the previous instance, so wait before it counts.
        None => {
            (has_failed(seen, &lead.node) && seen.waited >= LEAD_PATIENCE).then_some(Failure { lead, last_words: None })
        }
    }
}

/// True if something changed that may be the cure: the spec, the restart annotation, or one of the nodes that have
/// failed.
fn has_something_changed(seen: &Observed, roster: &Roster) -> bool {
    let failed = &roster.failed_leads;
    let is_requested = seen.restart_word.is_some() && seen.restart_word != roster.restart.as_deref();
    let has_changed = |(uid, node): (&String, &FailedLead)| fingerprint(seen, uid).is_some_and(|now| now != node.facts);
    !failed.is_empty() && (is_requested || failed.generation != seen.generation || failed.nodes.iter().any(has_changed))
}

/// A digest of everything about the node that a broker's start may depend on. None if its Node is gone.
fn fingerprint(seen: &Observed, uid: &str) -> Option<String> {
    let node = seen.nodes.with_uid(uid)?;
    let facts = seen.report(&node.name).map(|report| (&report.facts, &report.agent_version));
    // The default is never used: serializing numbers and strings can't fail.
    Some(hex::encode(Sha256::digest(serde_json::to_vec(&facts).unwrap_or_default())))
}

/// The pause after this many failures: 2 s, 4 s, 8 s, … up to [`LONGEST_PAUSE`].
fn pause(failures: u32) -> Duration {
    let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
    SHORTEST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}
