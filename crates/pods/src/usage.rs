//! What the pods of each node ask for together.

use std::collections::HashMap;

use crate::{
    pod::PodView,
    requests::{Requests, Size},
    time::Moment,
};

/// What pods ask of one node together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// The sum of their requests.
    pub requests: Requests,
    /// What of this kubelet has not granted yet: resizes that it has deferred.
    pub deferred: Size,
    /// Number of pods.
    pub pods: u64,
}

impl Usage {
    /// Adds a pod.
    pub fn add(&mut self, requests: &Requests) {
        self.requests.add(requests);
        self.pods += 1;
    }

    /// What kubelet has granted of the CPU and memory.
    pub fn granted(&self) -> Size {
        self.requests.size().saturating_sub(self.deferred)
    }
}

/// By node: what all its pods ask for that have not ended, and what the foreign ones among them do. The names are borrowed, because each
/// decision counts all pods of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageByNode<'a> {
    all: HashMap<&'a str, Usage>,
    foreign: HashMap<&'a str, Usage>,
    idle: Usage,
}

impl<'a> UsageByNode<'a> {
    /// Counts `pods`. `is_foreign`: another scheduler, or somebody, has bound it.
    pub fn of(pods: impl IntoIterator<Item = &'a PodView>, is_foreign: impl Fn(&PodView) -> bool, now: Moment) -> Self {
        let mut usage = Self::default();
        for pod in pods.into_iter().filter(|pod| pod.holds(now)) {
            let Some(node) = &pod.node else { continue };
            let is_foreign = is_foreign(pod);
            if is_foreign && !pod.may_be_there() {
                continue;
            }
            let all = usage.all.entry(node).or_default();
            all.add(&pod.requests);
            all.deferred = all.deferred.saturating_add(pod.deferred);
            if is_foreign {
                usage.foreign.entry(node).or_default().add(&pod.requests);
            }
        }
        usage
    }

    /// Adds a bridged pod to a node.
    pub fn add(&mut self, node: &'a str, requests: &Requests) {
        self.all.entry(node).or_default().add(requests);
    }

    /// What all pods on `node` ask for.
    pub fn all(&self, node: &str) -> &Usage {
        self.all.get(node).unwrap_or(&self.idle)
    }

    /// What the pods on `node` ask for that others have bound.
    pub fn foreign(&self, node: &str) -> &Usage {
        self.foreign.get(node).unwrap_or(&self.idle)
    }
}
