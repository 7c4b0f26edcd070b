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
/// After it was made, a placeholder pod is made again no earlier than this, twice as long each time: somebody, or kubelet, may remove it
/// each time.
const AGAIN_AFTER: Millis = SECOND;
const AGAIN_AFTER_AT_MOST: Millis = 60 * SECOND;
/// One that has lasted this long was not removed by what removed those before.
const LASTED: Millis = 120 * SECOND;
/// A shrink that nobody waits for comes no earlier than this after the last change: short host jobs need no request each.
const SETTLES: Millis = SECOND / 2;

/// What is known of a node's placeholder pod.
struct Seen<'a> {
    /// What it is to ask for; None if no host job runs there.
    wanted: Option<Size>,
    found: Option<(&'a PodView, &'a Placeholder)>,
    /// A new one would find room.
    can_be_made: bool,
    /// What it has leaves the other pods their room.
    fits: bool,
    now: Moment,
}

/// What is to be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Decide again at this moment.
    Wait(Moment),
    Make(Size),
    Resize(Size),
    Remove,
}

/// What brings all placeholder pods to what host jobs use. Comes last: pods that are bound in this round take room, too.
pub(super) fn keep(round: &mut Round, memory: &mut BTreeMap<String, PlaceholderMemory>) {
    let busy: BTreeSet<&str> = round.world.under_way.iter().filter_map(node_of).collect();
    let (mut steps, mut wakes) = (Vec::new(), Vec::new());
    for target in round.world.targets.values().filter(|target| target.has_placeholder()) {
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
        let seen = Seen {
            wanted: (hosts > 0).then(|| wanted(target, usage, hosts)),
            found,
            fits: found.is_none_or(|(pod, _)| fits(target, usage, counted(pod))),
            can_be_made: !target.is_cordoned() && usage.pods < target.allocatable.pods,
            now: round.now,
        };
        let step = step(&seen, memory.entry(target.node.clone()).or_default());
        let node = target.node.clone();
        match (step, found.map(|(pod, _)| PodRef::from(pod))) {
            (Step::Make(size), _) => steps.push(PlaceholderStep::Make { node, node_uid: target.uid.clone(), size }),
            (Step::Resize(size), Some(pod)) => steps.push(PlaceholderStep::Resize { pod, size }),
            (Step::Remove, Some(pod)) => steps.push(PlaceholderStep::Remove { pod }),
            (Step::Wait(until), _) => wakes.push(until),
            (Step::Nothing | Step::Resize(_) | Step::Remove, _) => {}
        }
    }
    // Nobody else ends those of nodes that are members no more, or are Flux's alone by now. A Node may be unreadable for a while.
    let is_left = |node: &str| match round.ranks.get(node) {
        Some(rank) => round.world.targets.get(rank).is_some_and(|target| !target.has_placeholder()),
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

fn step(seen: &Seen, memory: &mut PlaceholderMemory) -> Step {
    let now = seen.now;
    memory.idle_since = seen.wanted.is_none().then(|| memory.idle_since.unwrap_or(now));
    let Some((pod, placeholder)) = seen.found else {
        let Some(size) = seen.wanted.filter(|_| seen.can_be_made) else { return Step::Nothing };
        let may_be_made_at = memory.may_be_made_at();
        return if now < may_be_made_at { Step::Wait(may_be_made_at) } else { Step::Make(size) };
    };
    memory.note(pod, placeholder.asks, now);
    if pod.is_deleting() {
        return Step::Nothing;
    }
    if pod.is_terminal() || placeholder.cant_be_resized {
        return Step::Remove;
    }
    let size = seen.wanted.unwrap_or(Size::LEAST);
    let settled = memory.asks_since.saturating_add(SETTLES);
    match memory.idle_since.map(|since| since.saturating_add(STAYS)) {
        Some(until) if now >= until => Step::Remove,
        Some(until) if size == placeholder.asks => Step::Wait(until),
        _ if size == placeholder.asks => Step::Nothing,
        _ if size.cpu <= placeholder.asks.cpu && seen.fits && now < settled => Step::Wait(settled),
        _ => Step::Resize(size),
    }
}

impl PlaceholderMemory {
    /// Notes the pod that is there.
    fn note(&mut self, pod: &PodView, asks: Size, now: Moment) {
        if self.uid != pod.uid {
            let lasted = pod.created.saturating_sub(self.created) >= LASTED;
            self.tries = if lasted { 0 } else { self.tries.saturating_add(1) };
            (self.uid, self.created) = (pod.uid.clone(), pod.created);
        }
        if self.asks != Some(asks) {
            (self.asks, self.asks_since) = (Some(asks), now);
        }
    }

    /// When another one may be made.
    fn may_be_made_at(&self) -> Moment {
        let pause = AGAIN_AFTER.checked_shl(self.tries).unwrap_or(Millis::MAX).clamp(AGAIN_AFTER, AGAIN_AFTER_AT_MOST);
        self.created.saturating_add(if self.tries == 0 { 0 } else { pause })
    }
}

/// What `hosts` cores of host jobs are in Kubernetes' terms: their CPUs, and their part of the memory, as far as other pods leave it.
fn wanted(target: &Target, others: &Usage, hosts: u32) -> Size {
    let cpu = u64::from(hosts).saturating_mul(target.core());
    let part = u128::from(target.allocatable.memory) * u128::from(hosts) / u128::from(target.cores.max(1));
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
    others.requests.cpu.saturating_add(size.cpu) <= target.allocatable.cpu
        && others.requests.memory.saturating_add(size.memory) <= target.allocatable.memory
}

/// True if a pod of a gang has to wait until the placeholder pod of `target` has shrunk, although the cores of its slot are free in Flux:
/// kubelet would refuse it. `usage`: that of all other pods, and of this one.
pub(super) fn must_shrink(round: &Round, target: &Target, usage: &Usage) -> bool {
    let Some((pod, _)) = round.placeholders.get(target.node.as_str()) else { return false };
    let wanted = match round.held_cores(target.rank).hosts {
        0 => Size::LEAST,
        hosts => wanted(target, usage, hosts),
    };
    !fits(target, usage, counted(pod)) && fits(target, usage, wanted)
}
