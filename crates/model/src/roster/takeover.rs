//! Another lead, or an empty queue, by an administrator's word: the one way in which rank 0 changes hands once the instance
//! was online.
//!
//! The word is left on the host of the node that shall lead, when all that it needs is there, and its agent reports it. It
//! is about one epoch: the epoch that begins with it makes it a thing of the past, so it needs no taking back.

use super::{
    Observed,
    epoch::{next_epoch, with_closing},
    facts, is_lead_fixed, is_online, is_ready, member, rank_of, says_online, takers,
};
use crate::{
    eligibility::{NodeView, eligible},
    prefix,
    settings::settings,
};
use api::{Adopted, Closing, IdSet, Rank, Roster, RosterEntry, Takeover};

/// So long a word counts, in seconds: whoever said it has given up waiting by then, and the lead that was away may be back.
const WORD_SECS: i64 = 900;

/// The roster that follows from a word that can be acted on now.
pub(super) fn advance(seen: &Observed, roster: &Roster) -> Option<Roster> {
    let (name, takeover) = asked(seen, roster)?;
    if refusal(seen, roster, name, takeover).is_some() {
        return None;
    }
    let node = seen.nodes.iter().find(|node| node.name == name)?;
    let Some(new_instance_id) = &takeover.new_instance_id else {
        // The lead that was: its statedir is there again, and that is all that it waited for.
        if rank_of(roster, &node.uid) == Some(0) {
            return None;
        }
        let next = next_epoch(seen, &led_by(roster, node)?, roster.settings.clone())?;
        return Some(Roster { previous: None, jobs_lost_before: next.epoch, ..next });
    };
    if leads_and_is_there(seen, roster).is_some() {
        return close(roster, takeover.force);
    }
    let settings = match (seen.digest, seen.certificate) {
        (Some(digest), Some(certificate)) => settings(seen.spec, takers(seen, roster), digest, certificate),
        _ => roster.settings.clone(),
    };
    let next = next_epoch(seen, &led_by(roster, node)?, settings)?;
    let (instance_id, jobs_lost_before) = (new_instance_id.clone(), next.epoch);
    Some(Roster { instance_id, established: false, previous: None, jobs_lost_before, ..next })
}

/// The last word on this epoch, and the node that it was left on.
fn asked<'a>(seen: &Observed<'a>, roster: &Roster) -> Option<(&'a str, &'a Takeover)> {
    let words = seen.reports.iter().filter_map(|(node, report)| Some((node.as_str(), report.takeover.as_ref()?)));
    let is_current = |word: &Takeover| word.instance_id == roster.instance_id && word.epoch == roster.epoch;
    let current = words.filter(|(_, word)| is_current(word) && seen.now - word.at < WORD_SECS);
    current.max_by_key(|(node, word)| (word.at, *node))
}

/// Why node `name` can't become the lead now, as `word` wants it, in one sentence.
pub fn refusal(seen: &Observed, roster: &Roster, name: &str, word: &Takeover) -> Option<String> {
    let is_empty = word.new_instance_id.is_some();
    if !is_lead_fixed(roster) {
        return Some("the instance has not been online yet: it has no queue that could be lost".to_owned());
    }
    let Some(node) = seen.nodes.iter().find(|node| node.name == name) else {
        return Some(format!("there is no node {name}"));
    };
    if let Err(reason) = eligible(node, &seen.spec.nodes) {
        return Some(format!("node {name} can't be the lead: {reason}"));
    }
    if facts(seen, node).is_none() {
        let words = seen.reports.get(name).and_then(|report| report.message.as_deref());
        return Some(format!(
            "node {name} has not passed preflight: {}",
            words.unwrap_or("no word from its agent yet")
        ));
    }
    if let Some(differs) = prefix::differs(seen, roster, name) {
        return Some(format!("node {name} can't be the lead: {differs}"));
    }
    if let Some(wanted) = seen.spec.lead.as_ref().filter(|wanted| is_empty && *wanted != name) {
        return Some(format!("spec.lead is {wanted}: change it to {name} or leave it out first"));
    }
    if let Some(lead) = leads_and_is_there(seen, roster) {
        if !is_empty {
            return Some(format!(
                "node {lead} leads and is online: its queue is the newest, there is nothing to recover"
            ));
        }
        let allocated = seen.reports.get(lead).and_then(|report| report.allocated.as_ref());
        return match allocated {
            _ if word.force => None,
            Some(ranks) if ranks.0.is_empty() => None,
            Some(ranks) => Some(format!("jobs run on ranks {ranks}: wait until they have ended, or add --force")),
            None => Some(format!("node {lead} leads, and its broker has not told yet whether jobs run")),
        };
    }
    if let Some(runs) = runs_unasked(seen, roster, name).filter(|_| !word.force) {
        return Some(format!("{runs}: see that node's message; end it first, or add --force"));
    }
    let connected = connected(seen, roster);
    if !connected.0.is_empty() && !word.force {
        return Some(format!(
            "the lead's node is not Ready, but the brokers of ranks {connected} are connected to its broker: wait until they \
             miss it (two to three minutes after it has gone), or add --force if you know that it is off"
        ));
    }
    None
}

/// The node that leads, where its broker is online and its Node is there to say so: a machine that is off has left its last
/// words in the API.
fn leads_and_is_there<'a>(seen: &Observed<'a>, roster: &'a Roster) -> Option<&'a str> {
    let lead = roster.lead()?;
    // Not `is_online`: that most of its children don't hear it proves nothing while its own agent says that it is online.
    (is_ready(seen, lead) && says_online(seen, roster, 0)).then_some(lead.node.as_str())
}

/// The lead's broker runs, or may, on another host than `name`'s, by its agent's word, though nobody can ask it: two would
/// lead.
fn runs_unasked(seen: &Observed, roster: &Roster, name: &str) -> Option<String> {
    let lead = roster.lead().filter(|lead| lead.node != name && is_ready(seen, lead))?;
    let (node, report) = (&lead.node, seen.reports.get(&lead.node)?);
    let is_leads = |adopted: &&Adopted| adopted.rank == 0 && adopted.instance_id == roster.instance_id;
    match report.adopted.as_ref().filter(is_leads) {
        Some(Adopted { pid, .. }) => {
            Some(format!("the lead's broker runs on node {node} as process {pid}, though it is not online"))
        }
        None if report.unknown_broker => {
            Some(format!("a broker runs on node {node}, and nothing there tells whether it is the lead's"))
        }
        None => None,
    }
}

/// Members that say they are online although the lead's host says nothing any more. Where it does, its word counts.
fn connected(seen: &Observed, roster: &Roster) -> IdSet {
    let ready = |rank: Rank| roster.member(rank).map(|member| is_ready(seen, member));
    if ready(0) == Some(true) {
        return IdSet::default();
    }
    let others = roster.ranks.keys().copied().filter(|rank| *rank != 0 && ready(*rank) == Some(true));
    IdSet(others.filter(|rank| is_online(seen, roster, *rank)).collect())
}

/// The same members with `node` as rank 0. The lead that was takes its place; where it had none, a free one.
fn led_by(roster: &Roster, node: &NodeView) -> Option<Roster> {
    let mut next = roster.clone();
    let place = match rank_of(roster, &node.uid) {
        Some(0) => return Some(next),
        Some(rank) => rank,
        None => {
            let member = member(node)?;
            // Where none is free it is no rank at all: the next epoch gives out the ranks anew, and this node has 0 by then.
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

/// The instance that runs is stopped first, as at the end of every epoch.
fn close(roster: &Roster, force: bool) -> Option<Roster> {
    let closing = if force { Closing::AtOnce } else { Closing::WhenIdle };
    if roster.closing == Some(Closing::AtOnce) || roster.closing == Some(closing) {
        return None;
    }
    Some(with_closing(roster, Some(closing)))
}
