//! What host jobs use of each node is requested by its placeholder pod.
//!
//! The pod is there only while host jobs run on the node, and a little longer. It never asks for more than other pods leave: kubelet would
//! refuse it. If both sides take the same room at once, nothing is killed.

use std::collections::{BTreeMap, BTreeSet};

use super::{memory::PlaceholderMemory, round::Round};
use crate::{
    action::{Action, PlaceholderStep, PodRef},
    placeholder::{LEAST, Placeholder},
    pod::PodView,
    requests::Size,
    target::Target,
    time::{Millis, Moment, SECOND},
    usage::Usage,
};

/// A placeholder pod is kept this long after the last host job, for the next one.
const KEPT_FOR: Millis = 30 * SECOND;
/// Pause before a pod is made again that is gone, and twice as long each time: a pod that had a higher priority
/// takes the room meanwhile, and whatever else removed the pod may remove the next one, too.
const FIRST_PAUSE: Millis = 15 * SECOND;
const LONGEST_PAUSE: Millis = 120 * SECOND;
/// One that has lasted this long was not removed by what removed those before.
const STABLE_AFTER: Millis = 120 * SECOND;
/// A shrink that makes room for nobody waits this long after the last change, so that short host jobs don't cost a request each.
const SHRINKS_AFTER: Millis = SECOND / 2;
/// Room that other pods have left is taken for host jobs that run already no earlier than this: a pod that takes their place, such as a
/// DaemonSet's next one, must find it.
const LEAVES_ROOM_FOR: Millis = 60 * SECOND;
/// If a pod still has more than it may after this time, it is removed: kubelet or the API server does not resize it, or somebody has deleted
/// it with a long grace period.
const STUCK_AFTER: Millis = 10 * SECOND;

/// What a node's placeholder pod is decided by.
struct Inputs<'a> {
    target: &'a Target,
    /// What it is to ask for; the least if no host job runs there.
    size: Size,
    /// Cores of host jobs.
    host_cores: u32,
    /// The instance or the epoch ends, and soon there may be no bridge.
    is_closing: bool,
    found: Option<(&'a PodView, &'a Placeholder)>,
    /// The node is not cordoned, and kubelet would admit a new pod of this size.
    can_be_made: bool,
    /// Other pods leave room for the least.
    can_stay: bool,
    /// What the pod has leaves the other pods their room: more than it asks for, while kubelet has not shrunk it yet.
    leaves_room: bool,
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
    for target in round.world.targets.values().filter(|target| target.may_have_placeholder()) {
        let found = round.placeholders.get(target.node.as_str()).copied();
        let host_cores = round.held_cores(target.rank).hosts;
        if host_cores == 0 && found.is_none() {
            memory.remove(&target.node);
            continue;
        }
        if busy.contains(target.node.as_str()) {
            continue;
        }
        let usage = round.usage.all(&target.node);
        let size = wanted(target, usage, host_cores);
        let inputs = Inputs {
            target,
            size,
            host_cores,
            is_closing: round.world.is_closing,
            found,
            can_be_made: !target.is_cordoned() && fits(target, usage, size),
            can_stay: fits(target, usage, LEAST),
            leaves_room: found.is_none_or(|(pod, _)| fits(target, usage, pod.requests.size())),
            now: round.now,
        };
        match next(&inputs, memory.entry(target.node.clone()).or_default()) {
            Next::Nothing => {}
            Next::At(moment) => round.wake_at(moment),
            Next::Do(step) => round.actions.push(Action::Placeholder(step)),
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
    let remove = |(_, (pod, _)): (&&str, &(&PodView, &Placeholder))| {
        Action::Placeholder(PlaceholderStep::Remove { pod: PodRef::from(*pod) })
    };
    round.actions.extend(left.map(remove));
    memory.retain(|node, _| round.ranks.contains_key(node.as_str()));
}

fn node_of(action: &Action) -> Option<&str> {
    if let Action::Placeholder(step) = action { Some(step.node()) } else { None }
}

fn next(inputs: &Inputs, memory: &mut PlaceholderMemory) -> Next {
    let Inputs { target, size, host_cores, now, .. } = *inputs;
    let is_idle = host_cores == 0;
    memory.idle_since = is_idle.then(|| memory.idle_since.unwrap_or(now));
    memory.host_cores = memory.host_cores.min(host_cores);
    let Some((pod, placeholder)) = inputs.found else {
        let at = memory.note_gone(now);
        return match inputs.can_be_made && !is_idle {
            false => Next::Nothing,
            true if now < at => Next::At(at),
            true => {
                memory.changed = now;
                Next::Do(PlaceholderStep::Make { node: target.node.clone(), node_uid: target.uid.clone(), size })
            }
        };
    };
    memory.note(pod, now);
    memory.too_large_since = (!inputs.leaves_room).then(|| memory.too_large_since.unwrap_or(now));
    let is_over = memory.idle_since.is_some_and(|since| inputs.is_closing || now >= since.saturating_add(KEPT_FOR));
    let is_stuck = memory.too_large_since.is_some_and(|since| now >= since.saturating_add(STUCK_AFTER));
    let is_to_go = is_over || pod.is_terminal() || placeholder.cant_be_resized || !inputs.can_stay;
    if is_stuck || (is_to_go && !pod.is_deleting()) {
        // A pod that goes on being deleted is deleted again after the same time.
        memory.too_large_since = memory.too_large_since.map(|_| now);
        return Next::Do(PlaceholderStep::Remove { pod: PodRef::from(pod) });
    }
    let asks = placeholder.asks;
    if size == asks && inputs.leaves_room {
        // Only what shows is noted: a resize that was decided may have been refused, or dropped.
        memory.host_cores = host_cores;
    }
    // Room that others need is left at once, of each resource; nothing is taken meanwhile.
    let less = Size { cpu: size.cpu.min(asks.cpu), memory: size.memory.min(asks.memory) };
    let size = if inputs.leaves_room { size } else { less };
    if size == asks || pod.is_deleting() {
        memory.room_since = None;
        let looks = [
            memory.idle_since.map(|since| since.saturating_add(KEPT_FOR)),
            memory.too_large_since.map(|since| since.saturating_add(STUCK_AFTER)),
        ];
        return looks.into_iter().flatten().min().map_or(Next::Nothing, Next::At);
    }
    let is_growth = size.cpu > asks.cpu || size.memory > asks.memory;
    let grows_into_left_room = is_growth && host_cores <= memory.host_cores;
    memory.room_since = grows_into_left_room.then(|| memory.room_since.unwrap_or(now));
    let earliest = [
        memory.room_since.map(|since| since.saturating_add(LEAVES_ROOM_FOR)),
        (!is_growth && inputs.leaves_room).then(|| memory.changed.saturating_add(SHRINKS_AFTER)),
    ];
    match earliest.into_iter().flatten().max() {
        Some(at) if now < at => Next::At(at),
        _ => {
            memory.changed = now;
            Next::Do(PlaceholderStep::Resize { pod: PodRef::from(pod), size })
        }
    }
}

impl PlaceholderMemory {
    /// Notes the pod that is there.
    fn note(&mut self, pod: &PodView, now: Moment) {
        if self.uid != pod.uid {
            let lasted = self.gone_since.unwrap_or(now).saturating_sub(self.created);
            self.replaced = if lasted >= STABLE_AFTER { 0 } else { self.replaced.saturating_add(1) };
            (self.uid, self.created) = (pod.uid.clone(), pod.created);
        }
        self.gone_since = None;
    }

    /// Notes that there is no pod. Returns when another one may be made.
    fn note_gone(&mut self, now: Moment) -> Moment {
        if self.uid.is_empty() {
            return now;
        }
        let gone = *self.gone_since.get_or_insert(now);
        gone.saturating_add((FIRST_PAUSE << self.replaced.min(4)).min(LONGEST_PAUSE))
    }
}

/// What so many cores of host jobs are in Kubernetes' terms: their CPUs, and their part of the memory, as far as other pods leave it.
fn wanted(target: &Target, others: &Usage, host_cores: u32) -> Size {
    let granted = others.granted();
    let cpu = u64::from(host_cores).saturating_mul(target.core());
    let all = u128::from(target.allocatable.cpu.max(1));
    let part = u128::from(target.allocatable.memory) * u128::from(cpu).min(all) / all;
    let memory = u64::try_from(part).unwrap_or(u64::MAX);
    Size {
        cpu: cpu.min(target.allocatable.cpu.saturating_sub(granted.cpu)).max(LEAST.cpu),
        memory: memory.min(target.allocatable.memory.saturating_sub(granted.memory)).max(LEAST.memory),
    }
}

/// A placeholder pod of this size has room beside all other pods.
fn fits(target: &Target, others: &Usage, size: Size) -> bool {
    let granted = others.granted();
    others.pods < target.allocatable.pods
        && granted.cpu.saturating_add(size.cpu) <= target.allocatable.cpu
        && granted.memory.saturating_add(size.memory) <= target.allocatable.memory
}

/// True if kubelet would refuse a pod on `target` because the placeholder pod has not shrunk yet. `round.usage` counts that pod
/// already, so this round shrinks or removes the placeholder pod.
pub(super) fn must_shrink(round: &Round, target: &Target) -> bool {
    let Some((pod, _)) = round.placeholders.get(target.node.as_str()) else { return false };
    let usage = round.usage.all(&target.node);
    !pod.is_terminal() && target.may_have_placeholder() && !fits(target, usage, pod.requests.size())
}
