//! Takeover: an administrator orders another lead or an empty queue. Once the instance was online, this is the only way
//! in which rank 0 changes hands.
//!
//! `flux-distribute recover` or `reset` leaves the request on the host of the node that is to lead, and that node's
//! agent reports it. A request names one epoch. The epoch that begins with it makes it obsolete, so nothing has to
//! withdraw it.

use super::epoch::{next_epoch, with_closing};
use crate::{
    eligibility::{NodeView, eligible},
    lead::is_lead_fixed,
    members::{Members, rank_of},
    observed::{Observed, facts, member, participant_count},
    prefix,
    settings::settings,
};
use api::{Adopted, Closing, EpochSettings, IdSet, LONGEST_KEPT, Rank, Roster, RosterEntry, Takeover};

/// How long a request is valid, in seconds: by then the administrator's command has given up waiting, and the lead may
/// be back.
const REQUEST_SECS: u64 = 900;

/// Returns the next roster if there is a request that can be carried out now.
pub(super) fn advance(seen: &Observed, members: &Members, roster: &Roster) -> Option<Roster> {
    let (name, takeover) = latest_request(seen, roster)?;
    if refusal_by(seen, members, roster, name, takeover).is_some() {
        return None;
    }
    let node = seen.nodes.named(name)?;
    let Some(new_instance_id) = &takeover.new_instance_id else {
        // This node already leads: the request has restored its statedir, and the lead needs nothing more.
        if rank_of(roster, &node.uid) == Some(0) {
            return None;
        }
        let settings = EpochSettings { run_as: seen.owner().to_owned(), ..roster.settings.clone() };
        let next = next_epoch(seen, &led_by(roster, node)?, settings)?;
        return Some(Roster { previous: None, jobs_lost_before: next.epoch, ..next });
    };
    if leads_and_is_there(members, roster).is_some() {
        return close(roster, takeover.force);
    }
    let settings = match (seen.digest, seen.certificate) {
        (Some(digest), Some(certificate)) => {
            settings(seen.spec, seen.owner(), participant_count(seen, roster), digest, certificate)
        }
        _ => roster.settings.clone(),
    };
    let next = next_epoch(seen, &led_by(roster, node)?, settings)?;
    let (instance_id, jobs_lost_before) = (new_instance_id.clone(), next.epoch);
    Some(Roster { instance_id, established: false, previous: None, jobs_lost_before, ..next })
}

/// The latest request for this epoch, and the node that it was left on.
fn latest_request<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<(&'a str, &'a Takeover)> {
    let requests = seen.reports.iter().filter_map(|(node, report)| Some((*node, report.takeover.as_ref()?)));
    let is_current = |request: &Takeover| request.instance_id == roster.instance_id && request.epoch == roster.epoch;
    let current = requests.filter(|(_, request)| is_current(request) && seen.now.abs_diff(request.at) < REQUEST_SECS);
    current.max_by_key(|(node, request)| (request.at, *node))
}

/// Why node `name` can't become the lead now as `request` demands, in one sentence. None if it can.
pub fn refusal(seen: &Observed, roster: &Roster, name: &str, request: &Takeover) -> Option<String> {
    refusal_by(seen, &Members::observe(seen, roster), roster, name, request)
}

/// As [`refusal`].
fn refusal_by(seen: &Observed, members: &Members, roster: &Roster, name: &str, request: &Takeover) -> Option<String> {
    if request.new_instance_id.as_ref().is_some_and(|id| id.chars().count() as u64 > LONGEST_KEPT) {
        return Some(format!(
            "the new instance ID has more than {LONGEST_KEPT} characters: run the command again, which makes a uuid"
        ));
    }
    let is_empty = request.new_instance_id.is_some();
    if !is_lead_fixed(roster) {
        return Some("the instance has not been online yet: it has no queue that could be lost".to_owned());
    }
    let Some(node) = seen.nodes.named(name) else {
        return Some(format!("there is no node {name}"));
    };
    if let Err(reason) = eligible(node, &seen.spec.nodes) {
        return Some(format!("node {name} can't be the lead: {reason}"));
    }
    if facts(seen, node).is_none() {
        let report = seen.report(name);
        // An agent keeps the facts of the boot before until preflight passes again.
        let since = if report.is_some_and(|report| report.facts.is_some()) { " since it booted" } else { "" };
        let message = report.and_then(|report| report.message.as_deref());
        return Some(format!(
            "node {name} has not passed preflight{since}: {}",
            message.unwrap_or("its agent has not reported yet")
        ));
    }
    if let Some(differs) = prefix::differs(seen, roster, name) {
        return Some(format!("node {name} can't be the lead: {differs}"));
    }
    if let Some(wanted) = seen.spec.lead.as_ref().filter(|wanted| is_empty && *wanted != name) {
        return Some(format!("spec.lead is {wanted}: change it to {name} or remove it first"));
    }
    if let Some(lead) = leads_and_is_there(members, roster) {
        if !is_empty {
            return Some(format!(
                "node {lead} leads and is online: its queue is the newest, there is nothing to recover"
            ));
        }
        let host_jobs = seen.report(lead).and_then(|report| report.ranks_of_host_jobs());
        return match host_jobs {
            _ if request.force => None,
            Some(ranks) if ranks.0.is_empty() => None,
            Some(ranks) => Some(format!("jobs run on ranks {ranks}: wait until they have ended, or add --force")),
            None => Some(format!("node {lead} leads, and its broker has not reported yet whether jobs run")),
        };
    }
    if let Some(runs) = unreachable_lead(seen, members, roster, name).filter(|_| !request.force) {
        return Some(format!("{runs}: see that node's message; stop that broker first, or add --force"));
    }
    let connected = connected(members, roster);
    if !connected.0.is_empty() && !request.force {
        return Some(format!(
            "the lead's node is not Ready, but the brokers of ranks {connected} are connected to its broker: wait until they \
             lose it (two to three minutes after the node went off), or add --force if you know that the node is off"
        ));
    }
    None
}

/// Returns the lead's node if its agent reports the broker online and its Node is Ready. The report alone is not
/// enough: a machine that is off leaves its last report in the API.
fn leads_and_is_there<'a>(members: &Members, roster: &'a Roster) -> Option<&'a str> {
    let lead = roster.lead()?;
    // Not [`Members::is_online`]: while the lead's own agent reports it online, children that don't hear it prove nothing.
    (members.is_ready(0) && members.is_reported_online(0)).then_some(lead.node.as_str())
}

/// Says that the lead's broker runs, or may run, on a host other than that of node `name` although it is not online. A
/// takeover would then start a second lead. None if no such broker is reported.
fn unreachable_lead(seen: &Observed, members: &Members, roster: &Roster, name: &str) -> Option<String> {
    let lead = roster.lead().filter(|lead| lead.node != name && members.is_ready(0))?;
    let (node, report) = (&lead.node, seen.report(&lead.node)?);
    let is_leads = |adopted: &&Adopted| adopted.rank == 0 && adopted.instance_id == roster.instance_id;
    match report.adopted.as_ref().filter(is_leads) {
        Some(Adopted { pid, .. }) => {
            Some(format!("the lead's broker runs on node {node} as process {pid}, though it is not online"))
        }
        None if report.unknown_broker => {
            Some(format!("a broker runs on node {node}, and its agent can't tell whether it is the lead's"))
        }
        None => None,
    }
}

/// Ranks whose members still report themselves online although the lead's Node is not Ready. Empty if it is Ready,
/// because then the report of the lead's own agent counts.
fn connected(members: &Members, roster: &Roster) -> IdSet {
    if members.is_ready(0) {
        return IdSet::default();
    }
    let others = roster.ranks.keys().copied().filter(|rank| *rank != 0 && members.is_ready(*rank));
    IdSet(others.filter(|rank| members.is_online(*rank)).collect())
}

/// Returns the same roster with `node` as rank 0. The old lead gets the rank that `node` had, or a free one if it had
/// none.
fn led_by(roster: &Roster, node: &NodeView) -> Option<Roster> {
    let mut next = roster.clone();
    let place = match rank_of(roster, &node.uid) {
        Some(0) => return Some(next),
        Some(rank) => rank,
        None => {
            let member = member(node)?;
            // If no rank is free, use one beyond the last: the next epoch reassigns the ranks, and this node has rank 0
            // then.
            let is_free = |rank: &Rank| roster.ranks.get(rank).is_none_or(|entry| entry.member.is_none());
            let rank = (1..roster.settings.max_size).find(is_free).unwrap_or(roster.settings.max_size);
            let (broker_name, revision) = (node.name.clone(), roster.revision);
            let entry = RosterEntry { broker_name, member: Some(member), revision, ..RosterEntry::default() };
            next.ranks.insert(rank, entry);
            rank
        }
    };
    let (new, old) = (next.ranks.remove(&place)?, next.ranks.remove(&0)?);
    next.ranks.insert(0, new);
    next.ranks.insert(place, old);
    Some(next)
}

/// Stops the running instance first, as at the end of every epoch. None if it is already closing this way or at once.
fn close(roster: &Roster, force: bool) -> Option<Roster> {
    let closing = if force { Closing::AtOnce } else { Closing::WhenIdle };
    if roster.closing == Some(Closing::AtOnce) || roster.closing == Some(closing) {
        return None;
    }
    Some(with_closing(roster, Some(closing)))
}
