//! Projects the roster into each FluxNode's spec: the part that concerns that node.

use std::collections::BTreeMap;

use super::{
    conditions::SHUT_DOWN_MESSAGE,
    eligibility::{NodeView, eligible},
    gone,
    members::{Members, Planned},
    peers::{self, Fetcher},
    prefix,
    roster::{is_former_idle, is_overdue, may_stop},
};
use crate::{
    lead::LEAD_PATIENCE,
    observed::{Observed, is_shut_down, lead_report},
    tree::parent,
};
use api::{
    FluxNode, FluxNodeSpec, FluxNodeStatus, IdSet, LONGEST_DRAIN_REASON, MOST_DRAIN_REASONS, Rank, Roster, Want,
};

/// Drain reason of a rank that has no member any more while its broker is still in the overlay.
const HAS_LEFT: &str = "its node has left the instance";

/// Computes the specs of all `present` FluxNodes whose Node exists or whose broker may still run. `is_local`: see
/// [`peers::assign_sources`].
pub fn project_all<'a>(
    seen: &Observed,
    planned: Option<&Planned>,
    present: impl IntoIterator<Item = &'a FluxNode>,
    is_local: impl Fn(&str) -> bool,
) -> Vec<(&'a FluxNode, FluxNodeSpec)> {
    let named = |flux_node: &FluxNode| flux_node.metadata.name.as_deref().and_then(|name| seen.nodes.named(name));
    let roster = planned.map(|planned| planned.roster);
    let mut rows: Vec<_> = present
        .into_iter()
        .map(|present| {
            let node = named(present);
            let spec = match node {
                Some(node) => Some(project(seen, planned, node)),
                None => project_gone(seen, planned, present),
            };
            (present, node, spec)
        })
        .collect();
    rows.sort_by_cached_key(|(_, node, spec)| precedence(seen, *node, spec.as_ref()));
    let no_report = FluxNodeStatus::default();
    let fetchers: Vec<_> = rows
        .iter()
        .map(|(present, node, spec)| Fetcher {
            // A machine whose Node is gone doesn't fetch.
            wants: spec
                .as_ref()
                .filter(|_| node.is_some())
                .and_then(|spec| wanted(seen, roster, &spec.want, present.status.as_ref())),
            assigned: present.spec.fetch_from.as_ref(),
            report: present.status.as_ref().unwrap_or(&no_report),
            address: node.filter(|node| node.ready).and_then(|node| node.address),
        })
        .collect();
    let sources = peers::assign_sources(&fetchers, is_local, seen.now);
    let rows = rows.into_iter().zip(sources);
    rows.filter_map(|((present, _, spec), fetch_from)| Some((present, FluxNodeSpec { fetch_from, ..spec? }))).collect()
}

/// Sort key of a FluxNode: the lead, or the node most likely to become it, gets its packages first, because all others
/// wait for it.
fn precedence(seen: &Observed, node: Option<&NodeView>, spec: Option<&FluxNodeSpec>) -> impl Ord + use<> {
    let name = node.map(|node| node.name.clone());
    let is_wanted = name.is_some() && name == seen.spec.lead;
    let rank = spec.and_then(|spec| spec.rank);
    let nothing = spec.is_none_or(|spec| spec.want == Want::Nothing);
    (rank.unwrap_or(Rank::MAX), nothing, !is_wanted, node.map(|node| node.created), name)
}

/// The package set that the agent of a node installs next or already has.
fn wanted<'a>(
    seen: &Observed<'a>,
    roster: Option<&'a Roster>,
    want: &Want,
    report: Option<&FluxNodeStatus>,
) -> Option<&'a str> {
    let runs = report.is_some_and(|report| report.adopted.is_some());
    match want {
        Want::Nothing | Want::Leave | Want::Other(_) => None,
        // The lead will be known soon; don't let another node fetch from the source first.
        _ if roster.is_none() && seen.waited < LEAD_PATIENCE => None,
        Want::Install => seen.digest,
        // A node with a running broker has its epoch's set, so it installs the next epoch's.
        Want::Run if runs => seen.digest,
        Want::Run => roster.map(|roster| roster.settings.digest.as_str()),
    }
}

/// Computes the spec of a node's FluxNode, except `fetch_from`, which depends on the other nodes.
///
/// A broker may start only after the lead has applied its resources (so that it never joins with a wrong R), and only
/// under a parent that is online (otherwise it would wait in state JOIN for ever, without a message).
pub(crate) fn project(seen: &Observed, planned: Option<&Planned>, node: &NodeView) -> FluxNodeSpec {
    let roster = planned.map(|planned| planned.roster);
    let mut spec = FluxNodeSpec {
        node_name: node.name.clone(),
        instance_uid: Some(seen.instance_uid.to_owned()),
        node_uid: Some(node.uid.clone()),
        prefix: roster.and_then(|roster| prefix::of_instance(seen, roster)).map(str::to_owned),
        ..FluxNodeSpec::default()
    };
    let differs = roster.and_then(|roster| prefix::differs(seen, roster, &node.name));
    let held = planned.and_then(|planned| Some((planned.roster, &planned.members, planned.rank_of(&node.uid)?)));
    if let Some((roster, members, rank)) = held {
        spec.rank = Some(rank);
        spec.epoch = roster.epoch;
        spec.revision = revision_for(roster, rank);
        spec.want = match () {
            () if may_stop(seen, members, roster, rank) => Want::Leave,
            // Don't start followers that would only wait for a lead that is shut down.
            () if rank != 0 && is_shut_down(seen, roster) => Want::Install,
            // The lead may always start.
            () if rank == 0 || members.runs(rank) => Want::Run,
            () if differs.is_some() => Want::Nothing,
            () if may_start(seen, members, roster, rank) => Want::Run,
            () => Want::Install,
        };
        spec.lost_by_lead = members.is_lost(rank);
        spec.reason = match &spec.want {
            Want::Nothing => differs,
            Want::Install if is_shut_down(seen, roster) => Some(SHUT_DOWN_MESSAGE.to_owned()),
            Want::Install => first_lead_failure(roster),
            Want::Run if spec.lost_by_lead => Some("the other brokers do not hear from its broker".to_owned()),
            Want::Run => drained_in_flux(seen, roster, rank),
            _ => None,
        };
        let entry = roster.ranks.get(&rank);
        spec.drain_reason = entry.and_then(|entry| entry.drain.as_ref()).map(|drain| drain.reason.clone());
        spec.stop_despite_jobs = is_overdue(seen, roster, rank);
        if rank == 0 {
            spec.drain = drains(members, roster);
            // Until the lead was online once, its host still chooses the prefix.
            spec.prefix = spec.prefix.filter(|_| roster.established);
        }
        return spec;
    }
    // Keep the former rank in the spec while jobs may run below it: without a rank, the agent would stop the broker.
    let former = |Planned { roster, members, .. }: &Planned| {
        let rank = members.orphan_broker_rank(seen.report(&node.name)?)?;
        members.may_carry_jobs(rank).then(|| (revision_for(roster, rank), roster.epoch, rank))
    };
    if let Some((revision, epoch, rank)) = planned.and_then(former) {
        (spec.rank, spec.epoch, spec.revision) = (Some(rank), epoch, revision);
        spec.drain_reason = Some(HAS_LEFT.to_owned());
        spec.reason = Some(format!("jobs may still run on ranks below rank {rank}, which this node had before"));
        return spec;
    }
    match eligible(node, &seen.spec.nodes) {
        Ok(()) if differs.is_some() => spec.reason = differs,
        Ok(()) => (spec.want, spec.reason) = (Want::Install, planned.and_then(|planned| planned.no_room.clone())),
        Err(reason) => spec.reason = Some(reason.to_string()),
    }
    spec
}

/// That people have drained `rank`, with their reason if the lead's agent reports one; None if they have not.
fn drained_in_flux(seen: &Observed, roster: &Roster, rank: Rank) -> Option<String> {
    let report = lead_report(seen, roster).filter(|report| report.drained_by_others.contains(rank))?;
    // Not only what our agents report: whoever has the token of one can write more reasons, and longer ones.
    let reason = report.drain_reasons.iter().take(MOST_DRAIN_REASONS).find(|(_, ranks)| ranks.contains(rank));
    Some(match reason {
        Some((reason, _)) => {
            format!("drained in Flux: {}", reason.chars().take(LONGEST_DRAIN_REASON).collect::<String>())
        }
        None => "somebody has drained it in Flux: `flux resource drain` shows why".to_owned(),
    })
}

/// Why the instance has no lead, as far as the roster says.
fn first_lead_failure(roster: &Roster) -> Option<String> {
    let first = roster.failed_leads.first.as_ref()?;
    Some(format!("no lead has come up: {}: {}", first.node, first.reason))
}

/// Computes the spec of a FluxNode whose Node is gone. While its rank is kept, the spec says that the Node is gone. If
/// its broker still runs after that, the spec stops it once the lead has drained the rank and no job runs there. None
/// if the spec doesn't change.
fn project_gone(seen: &Observed, planned: Option<&Planned>, present: &FluxNode) -> Option<FluxNodeSpec> {
    let (planned, report) = (planned?, present.status.as_ref()?);
    if let Some(spec) = gone::spec(seen, planned, &present.spec) {
        return Some(spec);
    }
    let Planned { roster, members, .. } = planned;
    let rank = members.orphan_broker_rank(report)?;
    Some(FluxNodeSpec {
        node_name: present.metadata.name.clone()?,
        instance_uid: Some(seen.instance_uid.to_owned()),
        node_uid: report.adopted.as_ref().map(|adopted| adopted.node_uid.clone()),
        rank: Some(rank),
        epoch: roster.epoch,
        revision: revision_for(roster, rank),
        want: if is_former_idle(members, rank) { Want::Leave } else { Want::Nothing },
        drain_reason: Some(HAS_LEFT.to_owned()),
        reason: Some(gone::NODE_IS_GONE.to_owned()),
        ..FluxNodeSpec::default()
    })
}

/// The ranks that the lead is to drain, by reason. Flux keeps one reason for each rank, and can't drain excluded ranks.
fn drains(members: &Members, roster: &Roster) -> BTreeMap<String, IdSet> {
    let mut drains = BTreeMap::<String, IdSet>::new();
    for (rank, entry) in &roster.ranks {
        let reason = match (&entry.member, &entry.drain) {
            (Some(_), Some(drain)) => drain.reason.as_str(),
            // The rank has no member any more, but its broker is still in the overlay.
            (None, _) if !members.has_lead_lost(*rank) => HAS_LEFT,
            _ => continue,
        };
        if !entry.is_excluded() {
            drains.entry(reason.to_owned()).or_default().0.insert(*rank);
        }
    }
    drains
}

/// The revision in the spec of the member of `rank`: for the lead that of the last change of any entry, for a follower
/// that of its own entry.
fn revision_for(roster: &Roster, rank: Rank) -> u64 {
    let own = |rank: &Rank| roster.ranks.get(rank).map(|entry| entry.revision);
    if rank == 0 { roster.ranks.keys().filter_map(own).max().unwrap_or(0) } else { own(&rank).unwrap_or(0) }
}

/// True if a follower's broker may start: the lead has applied its resources, and the lead and the parent are online.
fn may_start(seen: &Observed, members: &Members, roster: &Roster, rank: Rank) -> bool {
    let lead = roster.lead();
    let applied = lead.and_then(|lead| seen.report(&lead.node)).and_then(|report| report.applied_revision);
    let declared = roster.ranks.get(&rank).filter(|entry| entry.resources.is_some()).map(|entry| entry.revision);
    let is_applied = declared.is_some_and(|declared| applied >= Some(declared));
    is_applied && members.is_online(0) && parent(roster, rank).is_none_or(|parent| members.is_online(parent))
}
