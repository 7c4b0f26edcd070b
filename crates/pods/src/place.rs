//! Where a gang may run, and with how many cores.

use std::collections::{BTreeMap, BTreeSet};

use api::Rank;

use crate::{
    check::{Shortfall, pods_in, room},
    facts::{Facts, VolumeClaim},
    gangs::Gang,
    node_rules::selects,
    pod::{Plan, PodView},
    requests::{Requests, cores},
    target::Target,
    usage::UsageByNode,
};

/// Where a gang may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Hardware threads of a core on all these ranks.
    pub threads: u32,
    /// Cores of each slot: what the largest member holds.
    pub cores: u32,
    /// How many of the slots each node is to have; None if Flux may choose.
    pub per_node: Option<u32>,
    /// The ranks.
    pub ranks: BTreeSet<Rank>,
}

/// Why a gang fits nowhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.words())]
pub struct NoPlace {
    /// Number of nodes of the instance.
    pub nodes: usize,
    /// How many nodes are out for which reason.
    pub reasons: BTreeMap<Reason, usize>,
    /// If some nodes permit it: slots that those nodes declare, and slots that it needs.
    pub slots: Option<(u64, u32)>,
}

/// Why a node is out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// nodeSelector or node affinity.
    NotSelected,
    /// A lasting taint.
    Taint(String),
    /// kubelet's CPU manager has policy `static`, and the node is not dedicated to Flux: [`Target::refuses_pods`].
    StaticCpus,
    /// The volume of a claim is elsewhere.
    Volume,
    /// Its cores are too few for one pod.
    Cores,
    /// Too little of this is left beside pods that Flux knows nothing of.
    Room(String),
    /// Pods of it did not fit there when it had been given resources there.
    Avoided,
}

impl NoPlace {
    fn words(&self) -> String {
        let reasons: Vec<_> =
            self.reasons.iter().map(|(reason, nodes)| format!("{nodes} {}", reason.words())).collect();
        let permitted = self.nodes - self.reasons.values().sum::<usize>();
        let mut words = format!("may run on {permitted} of {}", base::words::many(self.nodes as u64, "node"));
        if !reasons.is_empty() {
            words = format!("{words}: {}", reasons.join(", "));
        }
        match self.slots {
            Some((found, wanted)) => format!("{words}; they have cores for {found} of its {wanted} pods"),
            None => words,
        }
    }
}

impl Reason {
    fn words(&self) -> String {
        match self {
            Self::NotSelected => "not selected by nodeSelector or node affinity".into(),
            Self::Taint(taint) => format!("with taint {taint}"),
            Self::StaticCpus => {
                "with kubelet's CPU manager policy static (dedicate such nodes to Flux by a taint that \
                                 spec.nodes.tolerations names, or give kubelet policy none)"
                    .into()
            }
            Self::Volume => "without access to its volume".into(),
            Self::Cores => "with too few cores".into(),
            Self::Room(resource) => format!("with too little {resource}"),
            Self::Avoided => "where its pods did not fit".into(),
        }
    }
}

/// What limits a gang beside its pods' own rules.
#[derive(Debug, Clone, Copy)]
pub struct Limits<'a> {
    /// Nodes of the instance.
    pub targets: &'a BTreeMap<Rank, Target>,
    /// What is on them.
    pub usage: &'a UsageByNode<'a>,
    /// What the pods refer to.
    pub facts: &'a Facts,
    /// Ranks that are out.
    pub avoided: &'a BTreeSet<Rank>,
    /// If possible, ranks with this many threads a core: what a job was submitted for.
    pub threads: Option<u32>,
    /// What Flux gave before, by cores alone, has not fitted: see [`Place::per_node`].
    pub deals_out: bool,
}

/// Where `pods` of `gang`, with one slot each, may run: on ranks of one thread count, on each of which the largest of them has
/// room beside pods that Flux knows nothing of, and which declare cores for all of them.
///
/// # Errors
/// [`NoPlace`] if they fit on no nodes of the instance, however idle those are.
pub fn place(gang: &Gang, pods: &[&PodView], limits: Limits) -> Result<Place, NoPlace> {
    let largest = pods.iter().fold(Requests::default(), |largest, pod| largest.max(&pod.requests));
    // Pods of one template have the same rules.
    let mut plans: Vec<&Plan> = Vec::new();
    for plan in pods.iter().filter_map(|pod| pod.plan.as_deref()) {
        if !plans.iter().any(|known| known.rules == plan.rules && known.claims == plan.claims) {
            plans.push(plan);
        }
    }
    let mut reasons = BTreeMap::new();
    let mut by_threads: BTreeMap<u32, Place> = BTreeMap::new();
    for target in limits.targets.values() {
        if let Some(reason) = reason_against(target, gang, &plans, &largest, limits) {
            *reasons.entry(reason).or_default() += 1;
            continue;
        }
        let cores = cores(largest.cpu, target.threads);
        let place = Place { threads: target.threads, cores, per_node: None, ranks: BTreeSet::new() };
        by_threads.entry(target.threads).or_insert(place).ranks.insert(target.rank);
    }
    let wanted = u32::try_from(pods.len()).unwrap_or(u32::MAX);
    let spreads = gang.spreads();
    let slots = |place: &Place| -> u64 {
        let on = |rank: &Rank| limits.targets.get(rank).map_or(0, |target| target.cores / place.cores);
        place.ranks.iter().map(|rank| if spreads { on(rank).min(1) } else { on(rank) }).map(u64::from).sum()
    };
    let fits = |place: &Place| slots(place) >= u64::from(wanted);
    let same = limits.threads.and_then(|threads| by_threads.get(&threads)).filter(|place| fits(place));
    // The last of several maxima wins: the one with the fewest threads.
    let best = same.or_else(|| by_threads.values().rev().filter(|place| fits(place)).max_by_key(|place| slots(place)));
    let most = by_threads.values().map(slots).max();
    let Some(mut best) = best.cloned() else {
        return Err(NoPlace { nodes: limits.targets.len(), reasons, slots: most.map(|most| (most, wanted)) });
    };
    if spreads && wanted > 1 {
        best.per_node = Some(1);
    } else if limits.deals_out {
        let cores = best.cores;
        deal_out(&mut best, wanted, |rank| {
            let target = limits.targets.get(&rank)?;
            let pods = pods_in(&target.allocatable, limits.usage.foreign(&target.node), &largest);
            Some((target.cores / cores, u32::try_from(pods).unwrap_or(u32::MAX)))
        });
    }
    Ok(best)
}

/// Has the job name how many slots each node gets, if it must. Flux fills one node after the other, by cores alone. Where too few nodes
/// have room for as many pods as their cores would take, such as nodes of many cores and few GPUs, what Flux gives would never fit. So each node gets
/// the largest number that divides the pods equally and for which there are enough nodes; without such a number, Flux chooses.
/// `room_on`: how many slots a rank's cores are, and how many of the pods fit there.
fn deal_out(place: &mut Place, wanted: u32, room_on: impl Fn(Rank) -> Option<(u32, u32)>) {
    let rooms: Vec<_> = place.ranks.iter().filter_map(|rank| Some((*rank, room_on(*rank)?))).collect();
    let safe = rooms.iter().filter(|(_, (slots, pods))| *pods >= (*slots).min(wanted));
    if safe.map(|(_, (slots, _))| u64::from(*slots)).sum::<u64>() >= u64::from(wanted) {
        return;
    }
    let takes = |(slots, pods): (u32, u32), each: u32| slots.min(pods) >= each;
    let is_enough = |each: &u32| {
        let nodes = || rooms.iter().filter(|(_, room)| takes(*room, *each)).count();
        wanted.is_multiple_of(*each) && nodes() as u64 >= u64::from(wanted / each)
    };
    if let Some(each) = (1..=wanted).rev().find(is_enough) {
        place.per_node = Some(each);
        place.ranks = rooms.iter().filter(|(_, room)| takes(*room, each)).map(|(rank, _)| *rank).collect();
    }
}

fn reason_against(target: &Target, gang: &Gang, plans: &[&Plan], largest: &Requests, limits: Limits) -> Option<Reason> {
    if !plans.iter().all(|plan| plan.rules.select(&target.node, &target.labels)) {
        return Some(Reason::NotSelected);
    }
    if let Some(taint) = plans.iter().find_map(|plan| plan.rules.untolerated(target.lasting_taints())) {
        return Some(Reason::Taint(format!("{}:{}", taint.key, taint.effect)));
    }
    if target.refuses_pods() {
        return Some(Reason::StaticCpus);
    }
    let reaches = |claim: &String| match limits.facts.claims.get(&(gang.id.namespace.clone(), claim.clone())) {
        Some(VolumeClaim::Bound { affinity: Some(affinity) }) => selects(affinity, &target.node, &target.labels),
        _ => true,
    };
    if !plans.iter().flat_map(|plan| &plan.claims).all(reaches) {
        return Some(Reason::Volume);
    }
    if target.cores < cores(largest.cpu, target.threads) {
        return Some(Reason::Cores);
    }
    if let Some(shortfall) = room(&target.allocatable, limits.usage.foreign(&target.node), largest) {
        return Some(match shortfall {
            Shortfall::Room { resource, .. } => Reason::Room(resource),
            _ => Reason::Room("ports".into()),
        });
    }
    limits.avoided.contains(&target.rank).then_some(Reason::Avoided)
}
