//! What each node is told: the roster as far as it concerns that node.

use std::collections::{BTreeMap, HashMap};

use super::{
    eligibility::{NodeView, eligible},
    gone,
    peers::{self, Fetcher},
    prefix,
    roster::{
        LEAD_PATIENCE, Observed, does_lead_miss, is_former_idle, is_missed, is_online, is_overdue, is_shut_down,
        lingers, may_carry_jobs, may_stop, no_room, parent, rank_of,
    },
    status::SHUT_DOWN_MESSAGE,
};
use api::{FluxNode, FluxNodeSpec, FluxNodeStatus, IdSet, Rank, Roster, Want};

/// Why a rank gets no new jobs that has no member any more, while its broker is in the overlay.
const HAS_LEFT: &str = "its node has left the instance";

/// The specs of all `present` FluxNodes whose Node is there, or whose broker is. `is_local`: see [`peers::decide`].
pub fn project_all<'a>(
    seen: &Observed,
    roster: Option<&Roster>,
    present: impl IntoIterator<Item = &'a FluxNode>,
    is_local: impl Fn(&str) -> bool,
) -> Vec<(&'a FluxNode, FluxNodeSpec)> {
    let nodes: HashMap<_, _> = seen.nodes.iter().map(|node| (node.name.as_str(), node)).collect();
    let named = |flux_node: &FluxNode| flux_node.metadata.name.as_deref().and_then(|name| nodes.get(name)).copied();
    let mut rows: Vec<_> = present
        .into_iter()
        .map(|present| {
            let node = named(present);
            let spec = match node {
                Some(node) => Some(project(seen, roster, node)),
                None => project_gone(seen, roster, present),
            };
            (present, node, spec)
        })
        .collect();
    rows.sort_by_key(|(_, node, spec)| precedence(seen, *node, spec.as_ref()));
    let silent = FluxNodeStatus::default();
    let fetchers: Vec<_> = rows
        .iter()
        .map(|(present, node, spec)| Fetcher {
            // Nobody is sent to a machine that is gone.
            wants: spec
                .as_ref()
                .filter(|_| node.is_some())
                .and_then(|spec| wanted(seen, roster, &spec.want, present.status.as_ref())),
            told: present.spec.fetch_from.as_ref(),
            report: present.status.as_ref().unwrap_or(&silent),
            address: node.filter(|node| node.ready).and_then(|node| node.address),
        })
        .collect();
    let told = peers::decide(&fetchers, is_local, seen.now);
    let told = rows.into_iter().zip(told);
    told.filter_map(|((present, _, spec), fetch_from)| Some((present, FluxNodeSpec { fetch_from, ..spec? }))).collect()
}

/// The lead, or who will most likely be it, gets its packages first: everybody waits for it.
fn precedence(seen: &Observed, node: Option<&NodeView>, spec: Option<&FluxNodeSpec>) -> impl Ord + use<> {
    let name = node.map(|node| node.name.clone());
    let is_wanted = name.is_some() && name == seen.spec.lead;
    let rank = spec.and_then(|spec| spec.rank);
    let nothing = spec.is_none_or(|spec| spec.want == Want::Nothing);
    (rank.unwrap_or(Rank::MAX), nothing, !is_wanted, node.map(|node| node.created), name)
}

/// The package set that the agent of a node installs next, or has.
fn wanted<'a>(
    seen: &Observed<'a>,
    roster: Option<&'a Roster>,
    want: &Want,
    report: Option<&FluxNodeStatus>,
) -> Option<&'a str> {
    let runs = report.is_some_and(|report| report.adopted.is_some());
    match want {
        Want::Nothing | Want::Leave | Want::Other(_) => None,
        // Soon it will be known who is the lead.
        _ if roster.is_none() && seen.waited < LEAD_PATIENCE => None,
        Want::Install => seen.digest,
        // Beside a broker that runs, the next epoch's set is prepared.
        Want::Run if runs => seen.digest,
        Want::Run => roster.map(|roster| roster.settings.digest.as_str()),
    }
}

/// The spec of a node's FluxNode, all but where it fetches from, which depends on the others.
///
/// A broker is started only after the lead has its resources (so that nobody is ever seen with a wrong R) and under a parent
/// that is online (else it would wait in JOIN for ever, silently).
pub fn project(seen: &Observed, roster: Option<&Roster>, node: &NodeView) -> FluxNodeSpec {
    let mut spec = FluxNodeSpec {
        node_name: node.name.clone(),
        instance_uid: Some(seen.instance_uid.to_owned()),
        node_uid: Some(node.uid.clone()),
        prefix: roster.and_then(|roster| prefix::of_instance(seen, roster)).map(str::to_owned),
        ..FluxNodeSpec::default()
    };
    let differs = roster.and_then(|roster| prefix::differs(seen, roster, &node.name));
    if let Some((roster, rank)) = roster.and_then(|roster| Some((roster, rank_of(roster, &node.uid)?))) {
        spec.rank = Some(rank);
        spec.epoch = roster.epoch;
        spec.revision = revision_for(roster, rank);
        spec.want = match () {
            () if may_stop(seen, roster, rank) => Want::Leave,
            // A follower that waits for a lead that won't come is no use.
            () if rank != 0 && is_shut_down(seen, roster) => Want::Install,
            () if is_held(seen, roster, rank) => Want::Run,
            () if differs.is_some() => Want::Nothing,
            () if may_start(seen, roster, rank) => Want::Run,
            () => Want::Install,
        };
        spec.missed = is_missed(seen, roster, rank);
        spec.reason = match &spec.want {
            Want::Nothing => differs,
            Want::Install if is_shut_down(seen, roster) => Some(SHUT_DOWN_MESSAGE.to_owned()),
            Want::Install => no_lead(roster),
            Want::Run if spec.missed => Some("the other brokers do not hear from its broker".to_owned()),
            _ => None,
        };
        let entry = roster.ranks.get(&rank);
        spec.draining = entry.and_then(|entry| entry.drain.as_ref()).map(|drain| drain.reason.clone());
        spec.overdue = is_overdue(seen, roster, rank);
        if rank == 0 {
            spec.drain = drains(seen, roster);
            // Until it was online once, its host is where the prefix is decided.
            spec.prefix = spec.prefix.filter(|_| roster.established);
        }
        return spec;
    }
    // Without a rank its agent would end the broker that it had one for.
    let former = |roster| Some((roster, lingers(seen, roster, seen.reports.get(&node.name)?)?));
    if let Some((roster, rank)) = roster.and_then(former).filter(|(roster, rank)| may_carry_jobs(seen, roster, *rank)) {
        (spec.rank, spec.epoch, spec.revision) = (Some(rank), roster.epoch, revision_for(roster, rank));
        spec.draining = Some(HAS_LEFT.to_owned());
        spec.reason =
            Some(format!("jobs may run on ranks that hang on its broker of rank {rank}, which it had before"));
        return spec;
    }
    match eligible(node, &seen.spec.nodes) {
        Ok(()) if differs.is_some() => spec.reason = differs,
        Ok(()) => (spec.want, spec.reason) = (Want::Install, roster.and_then(|roster| no_room(seen, roster))),
        Err(reason) => spec.reason = Some(reason.to_string()),
    }
    spec
}

/// Why nobody is taken in.
fn no_lead(roster: &Roster) -> Option<String> {
    let first = roster.failed_leads.first.as_ref()?;
    Some(format!("no lead has come up: {}: {}", first.node, first.reason))
}

/// The spec of a FluxNode whose Node is gone: while its rank is kept, that it is gone; if its broker outlives that, the broker
/// is stopped once the lead has drained it and no job runs there.
fn project_gone(seen: &Observed, roster: Option<&Roster>, present: &FluxNode) -> Option<FluxNodeSpec> {
    let (roster, report) = (roster?, present.status.as_ref()?);
    if let Some(spec) = gone::spec(seen, roster, &present.spec) {
        return Some(spec);
    }
    let rank = lingers(seen, roster, report)?;
    Some(FluxNodeSpec {
        node_name: present.metadata.name.clone()?,
        instance_uid: Some(seen.instance_uid.to_owned()),
        node_uid: report.adopted.as_ref().map(|adopted| adopted.node_uid.clone()),
        rank: Some(rank),
        epoch: roster.epoch,
        revision: revision_for(roster, rank),
        want: if is_former_idle(seen, roster, rank) { Want::Leave } else { Want::Nothing },
        draining: Some(HAS_LEFT.to_owned()),
        reason: Some("its Node is gone".to_owned()),
        ..FluxNodeSpec::default()
    })
}

/// Who gets no new jobs: Flux keeps one reason for each rank, and none for those that it excludes.
fn drains(seen: &Observed, roster: &Roster) -> BTreeMap<String, IdSet> {
    let mut drains = BTreeMap::<String, IdSet>::new();
    for (rank, entry) in &roster.ranks {
        let reason = match (&entry.member, &entry.drain) {
            (Some(_), Some(drain)) => drain.reason.as_str(),
            // That its member is gone has not ended its broker.
            (None, _) if !does_lead_miss(seen, roster, *rank) => HAS_LEFT,
            _ => continue,
        };
        if !entry.is_excluded() {
            drains.entry(reason.to_owned()).or_default().0.insert(*rank);
        }
    }
    drains
}

/// The lead follows every change of what is declared, each follower only changes of its own rank.
fn revision_for(roster: &Roster, rank: Rank) -> u64 {
    let own = |rank: &Rank| roster.ranks.get(rank).map(|entry| entry.revision);
    if rank == 0 { roster.ranks.keys().filter_map(own).max().unwrap_or(0) } else { own(&rank).unwrap_or(0) }
}

fn is_held(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    rank == 0 || super::roster::holds(seen, roster, rank).is_some()
}

fn may_start(seen: &Observed, roster: &Roster, rank: Rank) -> bool {
    let lead = roster.lead();
    let applied = lead.and_then(|lead| seen.reports.get(&lead.node)).and_then(|report| report.applied_revision);
    let declared = roster.ranks.get(&rank).filter(|entry| entry.resources.is_some()).map(|entry| entry.revision);
    let taken_in = declared.is_some_and(|declared| applied >= Some(declared));
    taken_in && is_online(seen, roster, 0) && parent(roster, rank).is_none_or(|parent| is_online(seen, roster, parent))
}
