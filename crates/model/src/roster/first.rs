//! The first roster of an instance: which node leads, and which nodes are members from the start.

use std::{collections::BTreeMap, time::Duration};

use super::{Decision, drain::drain, epoch::next_epoch, properties, turns};
use crate::{
    broker_names::{is_broker_name, spare_name},
    eligibility::{NodeView, eligible},
    lead::{LEAD_PATIENCE, was_named},
    members::Members,
    observed::{
        Observed, candidates, entry, format, has_failed, has_passed, holds_another, is_of_instance, limit,
        participant_count,
    },
    prefix,
    settings::{pending, settings},
    tree::is_deep,
};
use api::{Adopted, FailedLeads, Roster, is_believable, packed};
use base::words::many;

/// If the roster is lost, how long the planner waits for reports from the agents of all Ready nodes before it concludes
/// that no broker runs.
pub(super) const REPORTS_TIMEOUT: Duration = Duration::from_mins(1);

/// Added to the revision of the lead's copy of a lost roster. The copy is as old as the last change that concerned the
/// lead, an unknown number of revisions came after it, and no revision may be reused with other content.
const LOST_REVISIONS: u64 = 1000;

/// Rebuilds a lost roster from the agents' reports, or makes the first one.
pub(super) fn without_roster(seen: &Observed) -> Decision {
    // The lead's copy has every member, because no broker starts before the lead has applied the roster that names it.
    let copies = seen.reports.iter().filter_map(|(node, status)| Some((*node, status.roster.as_deref()?)));
    let copies = copies.filter_map(|(node, field)| Some((node, Roster::parse(&packed::from_field(field)?).ok()?)));
    let is_believed = |copy: &Roster| is_believable(copy.epoch) && is_believable(copy.revision);
    let own = copies.filter(|(_, copy)| copy.instance_uid == seen.instance_uid && is_believed(copy));
    let (newest, status_epoch) = (newest_broker(seen), believed(seen.status.epoch));
    // A host that led before another node took over has the names and the queue of an epoch that is over.
    let last_epoch = newest.map_or(status_epoch, |(_, broker)| believed(broker.epoch).max(status_epoch));
    let own = own.filter(|(_, copy)| copy.epoch >= last_epoch);
    // Any agent can forge the copy in its own FluxNode, so the copy of the last known lead wins.
    let is_leads = |node: &str| seen.status.lead.as_deref() == Some(node);
    if let Some((_, mut copy)) = own.max_by_key(|(node, copy)| (is_leads(node), copy.epoch, copy.revision, *node)) {
        copy.revision += LOST_REVISIONS;
        // The copy may be older than the moment when the lead came online, and an established roster is never
        // discarded.
        copy.established |= seen.status.instance_id.as_ref() == Some(&copy.instance_id);
        // Its drains may be out of date too: start their time again.
        let entries = copy.ranks.values_mut();
        entries.for_each(|entry| entry.drain = entry.drain.take().map(|drain| drain.anew(seen.now)));
        let members = Members::observe(seen, &copy);
        drain(seen, &members, &mut copy);
        return Decision::Write(Box::new(copy));
    }
    if newest.is_none() && seen.status.instance_id.is_none() {
        return first_roster(seen, seen.fresh_id, 1, None, FailedLeads::default());
    }
    let silent = seen.nodes.iter().filter(|node| node.ready && seen.report(&node.name).is_none()).count();
    if silent > 0 && seen.waited < REPORTS_TIMEOUT {
        return Decision::Wait(format!(
            "the roster is gone: waiting for the agents of {} to report what runs there",
            many(silent as u64, "node")
        ));
    }
    match (newest, &seen.status.instance_id, &seen.status.lead) {
        (Some(_), _, _) if seen.waited < REPORTS_TIMEOUT => {
            Decision::Wait("the roster is gone: waiting for the lead's agent to report its copy".to_owned())
        }
        // Without the lead's table of names, a rank given out now could be refused by the lead or belong to another
        // node.
        (Some((node, broker)), _, _) => Decision::Wait(no_copy(node, broker.epoch, status_epoch)),
        (None, Some(id), Some(lead)) => first_roster(seen, id, status_epoch + 1, Some(lead), FailedLeads::default()),
        (None, _, _) => first_roster(seen, seen.fresh_id, status_epoch + 1, None, FailedLeads::default()),
    }
}

/// An epoch that is reported, or 0 if the report must be forged: then the other reports decide.
fn believed(epoch: u64) -> u64 {
    if is_believable(epoch) { epoch } else { 0 }
}

/// The broker of the latest epoch among those of this instance that agents report as running, and its node.
fn newest_broker<'a>(seen: &Observed<'a>) -> Option<(&'a str, &'a Adopted)> {
    let adopted = seen.reports.iter().filter_map(|(node, status)| Some((*node, status.adopted.as_ref()?)));
    adopted
        .filter(|(_, broker)| is_of_instance(seen, broker))
        .max_by_key(|(node, broker)| (believed(broker.epoch), *node))
}

/// Says that no copy of the roster is as new as the broker of `epoch` on `node` and the epoch in the status. Either may be forged.
fn no_copy(node: &str, epoch: u64, status_epoch: u64) -> String {
    let (reported, remedy) = if status_epoch > epoch {
        (
            format!("the FluxInstance's status says epoch {status_epoch}"),
            "if the instance never was in that epoch, correct it: `kubectl -n flux-distribute edit fxi flux --subresource=status`"
                .to_owned(),
        )
    } else {
        (
            format!("node {node} reports a broker of epoch {epoch}"),
            format!("if {node} is gone for good, or never was in that epoch, delete its FluxNode"),
        )
    };
    format!(
        "the roster is gone, and no agent has reported a copy that is new enough: {reported}. Bring the lead's node back, or stop all \
         brokers ({remedy})"
    )
}

/// Makes a roster of all eligible nodes under their real names. `statedir_of`: the node whose statedir has the queue of
/// an instance that was online before; only that node can lead it. `failed_leads`: nodes that lead only if no other
/// node can.
fn first_roster(
    seen: &Observed,
    instance_id: &str,
    epoch: u64,
    statedir_of: Option<&str>,
    failed_leads: FailedLeads,
) -> Decision {
    let nodes = candidates(seen);
    if nodes.is_empty() {
        return Decision::Wait(no_candidates(seen));
    }
    let (Some(digest), Some(certificate)) = (seen.digest, seen.certificate) else {
        return Decision::Wait("packages and certificate are not published yet".to_owned());
    };
    let lead = match choose_lead(seen, &nodes, statedir_of.or(seen.spec.lead.as_deref()), &failed_leads) {
        Ok(lead) => lead,
        Err(reason) => return Decision::Wait(reason),
    };
    let settings = settings(seen.spec, seen.owner(), nodes.len(), digest, certificate);
    let deep = is_deep(&settings);
    let limit = limit(seen.spec, settings.max_size);
    // In a deep tree, an interior rank whose node never comes up would strand its children.
    let others = nodes.iter().filter(|node| node.uid != lead.uid && (!deep || has_passed(seen, node)));
    let others = others.filter(|node| prefix::differs_from(seen, &lead.name, &node.name).is_none());
    let mut roster = Roster {
        format: format(seen),
        instance_uid: seen.instance_uid.to_owned(),
        instance_id: instance_id.to_owned(),
        established: statedir_of.is_some(),
        epoch,
        revision: 1,
        settings,
        closing: None,
        previous: None,
        refused: None,
        restart: seen.restart_word.map(str::to_owned),
        jobs_lost_before: 0,
        failed_leads,
        ranks: BTreeMap::new(),
    };
    for (rank, node) in (0..).zip(std::iter::once(&lead).chain(others).take(limit)) {
        let real = is_broker_name(&node.name);
        let broker_name = if real { node.name.clone() } else { spare_name(rank) };
        let reserved_for = real.then(|| node.uid.clone());
        let entry = entry(seen, &roster.settings, node, rank, broker_name, reserved_for, 1);
        roster.ranks.insert(rank, entry);
    }
    properties::assign(seen, &mut roster);
    Decision::Write(Box::new(roster))
}

fn no_candidates(seen: &Observed) -> String {
    let ineligible = seen.nodes.iter().filter_map(|node| Some((&node.name, eligible(node, &seen.spec.nodes).err()?)));
    let mut reasons: Vec<_> = ineligible.map(|(name, reason)| format!("{name}: {reason}")).collect();
    reasons.sort();
    reasons.truncate(3);
    match seen.nodes.len() {
        0 => "no eligible node: the cluster has no nodes".to_owned(),
        count if count > reasons.len() => format!("no eligible node among {count}: {}, …", reasons.join("; ")),
        _ => format!("no eligible node: {}", reasons.join("; ")),
    }
}

fn choose_lead<'a>(
    seen: &Observed,
    nodes: &[&'a NodeView],
    wanted: Option<&str>,
    failed_leads: &FailedLeads,
) -> Result<&'a NodeView, String> {
    let passed = |node: &&&NodeView| has_passed(seen, node);
    if let Some(name) = wanted.filter(|name| holds_another(seen, name)) {
        let message = own_message(seen, name);
        return Err(format!(
            "waiting for node {name}, which is to be the lead and still holds the previous instance{message}"
        ));
    }
    if let Some(name) = wanted {
        let node = nodes.iter().find(|node| node.name == name);
        return node.filter(passed).copied().ok_or_else(|| format!("waiting for node {name}, which is to be the lead"));
    }
    let failures = |node: &NodeView| (has_failed(seen, &node.name), failed_leads.times(&node.uid));
    let undecided = |node: &&NodeView| failures(node) == (false, 0);
    // Among the nodes with the fewest failures, the first.
    let first = nodes.iter().filter(passed).min_by_key(|node| failures(node)).copied();
    match first {
        Some(lead) if seen.waited >= LEAD_PATIENCE => Ok(lead),
        Some(lead) if !nodes.iter().take_while(|node| node.uid != lead.uid).any(undecided) => Ok(lead),
        _ => {
            let failed = nodes.iter().find_map(|node| {
                let report = seen.report(&node.name).filter(|_| has_failed(seen, &node.name))?;
                Some(format!("; {}: {}", node.name, report.message.as_deref()?))
            });
            let before = || {
                let node = nodes.iter().find(|node| holds_another(seen, &node.name))?;
                Some(format!("; {} still holds the previous instance{}", node.name, own_message(seen, &node.name)))
            };
            let detail = failed.or_else(before).unwrap_or_default();
            Err(format!("waiting for preflight on {}{detail}", many(nodes.len() as u64, "node")))
        }
    }
}

/// Makes a new roster if the lead is lost, has failed or the spec has changed: until the lead was online once, nothing
/// depends on the old one. If an administrator named the host that has the queue, that host stays the lead, whatever
/// state its Node is in.
pub(super) fn begin_again(seen: &Observed, roster: &Roster) -> Option<Decision> {
    let (digest, certificate) = (seen.digest?, seen.certificate?);
    let lead = roster.lead()?;
    let is_pending = pending(&roster.settings, seen.spec, seen.owner(), digest, certificate).is_some();
    if was_named(roster) {
        let settings = || settings(seen.spec, seen.owner(), participant_count(seen, roster), digest, certificate);
        let next = is_pending.then(|| next_epoch(seen, roster, settings())).flatten()?;
        return Some(Decision::Write(Box::new(Roster { previous: None, jobs_lost_before: next.epoch, ..next })));
    }
    let lead_is_there = candidates(seen).iter().any(|node| node.uid == lead.uid)
        && seen.spec.lead.as_ref().is_none_or(|wanted| *wanted == lead.node);
    let failed = turns::failed_leads(seen, roster);
    let is_the_same = lead_is_there && !is_pending;
    if is_the_same && !turns::is_next_due(seen, roster, &failed) {
        return None;
    }
    // Another attempt with the same settings needs no new epoch number: its fresh instance ID tells the attempts apart.
    let epoch = if is_the_same { roster.epoch } else { roster.epoch.saturating_add(1) };
    let failed = if is_pending { FailedLeads::default() } else { failed };
    match first_roster(seen, seen.fresh_id, epoch, None, failed) {
        Decision::Write(mut next) => {
            next.revision = roster.revision + 1;
            next.ranks.values_mut().for_each(|entry| entry.revision = next.revision);
            Some(Decision::Write(next))
        }
        _ if is_the_same => None,
        other => Some(other),
    }
}

/// The message of the node's agent, as the end of a sentence about the node: for example, that jobs still run there.
fn own_message(seen: &Observed, node: &str) -> String {
    let message = seen.report(node).and_then(|report| report.message.as_ref());
    message.map(|message| format!(": {message}")).unwrap_or_default()
}
