//! What host jobs use of each node is requested by its placeholder pod.
//!
//! The pod is there only while host jobs run on the node, and a little longer. It never asks for more than other pods leave: kubelet would
//! refuse it. So where both sides meet by a race, nothing is killed and nobody waits.

use std::collections::{BTreeMap, BTreeSet};

use super::{memory::PlaceholderMemory, round::Round};
use crate::{
    action::{Action, PlaceholderStep, PodRef},
    placeholder::{Placeholder, Size},
    pod::PodView,
    target::Target,
    time::{Millis, Moment, SECOND},
    usage::Usage,
};

/// A placeholder pod stays this long after the last host job, for the next one.
const STAYS: Millis = 30 * SECOND;
/// Pause before a pod is made again that is gone, and twice as long each time: a pod that had a higher priority
/// takes the room meanwhile, and whatever else removed the pod may remove the next one, too.
const FIRST_PAUSE: Millis = 15 * SECOND;
const LONGEST_PAUSE: Millis = 120 * SECOND;
/// One that has lasted this long was not removed by what removed those before.
const LASTED: Millis = 120 * SECOND;
/// A shrink that makes room for nobody waits this long after the last change, so that short host jobs don't cost a request each.
const SETTLES: Millis = SECOND / 2;
/// Room that other pods have left is taken for host jobs that run already no earlier than this: a pod that takes their place, such as a
/// DaemonSet's next one, must find it.
const LEAVES_ROOM_FOR: Millis = 60 * SECOND;
/// If a pod still has more than it may after this time, because kubelet or the API server does not resize it, it is removed.
const STUCK: Millis = 10 * SECOND;

/// What a node's placeholder pod is decided by.
struct NodeInputs<'a> {
    target: &'a Target,
    /// What it is to ask for; the least if no host job runs there.
    size: Size,
    /// Cores of host jobs.
    hosts: u32,
    /// The instance or the epoch ends, and soon there may be no bridge.
    is_closing: bool,
    found: Option<(&'a PodView, &'a Placeholder)>,
    /// The node is not cordoned, and kubelet would admit a new pod of this size.
    can_be_made: bool,
    /// Other pods leave room for the least.
    can_stay: bool,
    /// What the pod has leaves the other pods their room.
    fits: bool,
    now: Moment,
}

/// What is to be done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    Nothing,
    /// Decide again at this moment.
    At(Moment),
    Do(PlaceholderStep),
}

/// What brings all placeholder pods to what host jobs use. Comes last: pods that are bound in this round take room, too.
pub(super) fn keep(round: &mut Round, memory: &mut BTreeMap<String, PlaceholderMemory>) {
    let busy: BTreeSet<&str> = round.world.under_way.iter().filter_map(node_of).collect();
    let (mut steps, mut wakes) = (Vec::new(), Vec::new());
    for target in round.world.targets.values().filter(|target| target.may_have_placeholder()) {
        let found = round.placeholders.get(target.node.as_str()).copied();
        let hosts = round.held_cores(target.rank).hosts;
        if hosts == 0 && found.is_none() {
            memory.remove(&target.node);
            continue;
        }
        if busy.contains(target.node.as_str()) {
            continue;
        }
        let usage = round.usage.all(&target.node);
        let size = wanted(target, usage, hosts);
        let inputs = NodeInputs {
            target,
            size,
            hosts,
            is_closing: round.world.is_closing,
            found,
            can_be_made: !target.is_cordoned() && fits(target, usage, size),
            can_stay: fits(target, usage, Size::LEAST),
            fits: found.is_none_or(|(pod, _)| fits(target, usage, counted(pod))),
            now: round.now,
        };
        match next(&inputs, memory.entry(target.node.clone()).or_default()) {
            Next::Nothing => {}
            Next::At(moment) => wakes.push(moment),
            Next::Do(step) => steps.push(step),
        }
    }
    // Removes those of nodes that have left or become dedicated. A member whose Node can't be read keeps its pod.
    let is_left = |node: &str| match round.ranks.get(node) {
        Some(rank) => round.world.targets.get(rank).is_some_and(|target| !target.may_have_placeholder()),
        None => true,
    };
    let left = round
        .placeholders
        .iter()
        .filter(|(node, (pod, _))| !pod.is_deleting() && !busy.contains(*node) && is_left(node));
    steps.extend(left.map(|(_, (pod, _))| PlaceholderStep::Remove { pod: PodRef::from(*pod) }));
    memory.retain(|node, _| round.ranks.contains_key(node.as_str()));
    round.actions.extend(steps.into_iter().map(Action::Placeholder));
    wakes.into_iter().for_each(|until| round.wake_at(until));
}

fn node_of(action: &Action) -> Option<&str> {
    if let Action::Placeholder(step) = action { Some(step.node()) } else { None }
}

fn next(inputs: &NodeInputs, memory: &mut PlaceholderMemory) -> Next {
    let NodeInputs { target, size, hosts, now, .. } = *inputs;
    let is_idle = hosts == 0;
    memory.idle_since = is_idle.then(|| memory.idle_since.unwrap_or(now));
    let Some((pod, placeholder)) = inputs.found else {
        let at = memory.may_be_made_at(now);
        return match inputs.can_be_made && !is_idle {
            false => Next::Nothing,
            true if now < at => Next::At(at),
            true => {
                memory.hosts = hosts;
                Next::Do(PlaceholderStep::Make { node: target.node.clone(), node_uid: target.uid.clone(), size })
            }
        };
    };
    let asks = placeholder.asks;
    memory.note(pod, asks, now);
    memory.too_large_since = (!inputs.fits).then(|| memory.too_large_since.unwrap_or(now));
    let is_growth = size.cpu > asks.cpu || size.memory > asks.memory;
    let is_for_others_room = is_growth && hosts <= memory.hosts;
    memory.room_since = is_for_others_room.then(|| memory.room_since.unwrap_or(now));
    if pod.is_deleting() {
        return Next::Nothing;
    }
    let is_stuck = memory.too_large_since.is_some_and(|since| now >= since.saturating_add(STUCK));
    let is_over = memory.idle_since.is_some_and(|since| inputs.is_closing || now >= since.saturating_add(STAYS));
    if pod.is_terminal() || placeholder.cant_be_resized || is_stuck || is_over || !inputs.can_stay {
        return Next::Do(PlaceholderStep::Remove { pod: PodRef::from(pod) });
    }
    let settled = memory.asks_since.saturating_add(SETTLES);
    let later = [
        memory.room_since.map(|since| since.saturating_add(LEAVES_ROOM_FOR)),
        (!is_growth && inputs.fits).then_some(settled),
    ];
    let earliest = later.into_iter().flatten().max().filter(|at| now < *at);
    let looks = [
        memory.idle_since.map(|since| since.saturating_add(STAYS)),
        memory.too_large_since.map(|since| since.saturating_add(STUCK)),
    ];
    match earliest {
        _ if size == asks => looks.into_iter().flatten().min().map_or(Next::Nothing, Next::At),
        Some(at) => Next::At(at),
        None => {
            memory.hosts = hosts;
            Next::Do(PlaceholderStep::Resize { pod: PodRef::from(pod), size })
        }
    }
}

impl PlaceholderMemory {
    /// Notes the pod that is there.
    fn note(&mut self, pod: &PodView, asks: Size, now: Moment) {
        if self.uid != pod.uid {
            let lasted = pod.created.saturating_sub(self.created) >= LASTED;
            self.replaced = if lasted { 0 } else { self.replaced.saturating_add(1) };
            (self.uid, self.created) = (pod.uid.clone(), pod.created);
        }
        self.gone_since = None;
        if self.asks != Some(asks) {
            (self.asks, self.asks_since) = (Some(asks), now);
        }
    }

    /// There is none: when another one may be made.
    fn may_be_made_at(&mut self, now: Moment) -> Moment {
        if self.uid.is_empty() {
            return now;
        }
        let gone = *self.gone_since.get_or_insert(now);
        gone.saturating_add((FIRST_PAUSE << self.replaced.min(4)).min(LONGEST_PAUSE))
    }
}

/// What `hosts` cores of host jobs are in Kubernetes' terms: their CPUs, and their part of the memory, as far as other pods leave it.
fn wanted(target: &Target, others: &Usage, hosts: u32) -> Size {
    let cpu = u64::from(hosts).saturating_mul(target.core());
    let all = u128::from(target.allocatable.cpu.max(1));
    let part = u128::from(target.allocatable.memory) * u128::from(cpu).min(all) / all;
    let memory = u64::try_from(part).unwrap_or(u64::MAX);
    let free = |all: u64, used: u64| all.saturating_sub(used);
    Size {
        cpu: cpu.min(free(target.allocatable.cpu, others.requests.cpu)).max(Size::LEAST.cpu),
        memory: memory.min(free(target.allocatable.memory, others.requests.memory)).max(Size::LEAST.memory),
    }
}

/// What the pod has, as kubelet and kube-scheduler count it: more than it asks for while a shrink is under way.
fn counted(pod: &PodView) -> Size {
    Size { cpu: pod.requests.cpu, memory: pod.requests.memory }
}

/// A placeholder pod of this size has room beside all other pods.
fn fits(target: &Target, others: &Usage, size: Size) -> bool {
    others.pods < target.allocatable.pods
        && others.requests.cpu.saturating_add(size.cpu) <= target.allocatable.cpu
        && others.requests.memory.saturating_add(size.memory) <= target.allocatable.memory
}

/// True if a pod of a gang has to wait until the placeholder pod of `target` has shrunk or is gone, although the cores of its slot are free in
/// Flux: kubelet would refuse it. This round makes that pod shrink or removes it. `usage`: of all pods but the placeholder pod, with the pod to bind.
pub(super) fn must_shrink(round: &Round, target: &Target, usage: &Usage) -> bool {
    let Some((pod, _)) = round.placeholders.get(target.node.as_str()) else { return false };
    let is_ending = pod.is_terminal() || pod.is_deleting();
    !is_ending && target.may_have_placeholder() && !fits(target, usage, counted(pod))
}
