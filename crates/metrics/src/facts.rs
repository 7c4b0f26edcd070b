//! What an agent knows, in numbers.

/// The phases of a member that have a series, as `status.phase` of its FluxNode has them. Whatever else stands there, such as a word that a
/// captured node has made up, counts as `Other`: each label value is a series for ever.
pub const PHASES: [&str; 10] =
    ["Waiting", "Preflight", "Installing", "Starting", "Online", "Draining", "Offline", "Removing", "Failed", "Other"];

/// Of this agent's node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The node's broker is online. None: none is to run here.
    pub broker_up: Option<bool>,
}

/// How much there is, and how much of it jobs have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// All of it, on nodes that are up or not.
    pub all: u64,
    /// What jobs have.
    pub allocated: u64,
}

/// Of the instance, as the lead's broker reports it. Ranks are those of members.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeadFacts {
    /// Ranks that are online and get jobs.
    pub ranks_up: u64,
    /// Ranks that are not online.
    pub ranks_down: u64,
    /// Ranks that are online and get no jobs, because somebody has drained them.
    pub ranks_drained: u64,
    /// Cores of the members.
    pub cores: Split,
    /// GPUs of the members.
    pub gpus: Split,
    /// Jobs that run, and jobs that wait. None: not known.
    pub jobs: Option<(u64, u64)>,
    /// When the job was submitted that waits longest, in seconds since 1970. None: not known, or no job waits.
    pub oldest_pending_since: Option<u64>,
    /// How many more nodes the largest pending job waits for. None: not known.
    pub pending_nodes: Option<u64>,
}

/// Of the instance, as the planner observes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstanceFacts {
    /// How many members are in each phase of [`PHASES`].
    pub members: [u64; PHASES.len()],
    /// Members whose brokers are online, as the lead sees them.
    pub online: u64,
    /// Whether the lead is online. None: no lead has ever been.
    pub lead_online: Option<bool>,
    /// The epoch.
    pub epoch: u64,
    /// When the newest dump of the queue was made, in seconds since 1970. None: there is none.
    pub dumped_at: Option<i64>,
    /// How often the lead is to make one, in seconds. None: never.
    pub dump_every: Option<u64>,
}

impl InstanceFacts {
    /// Counts a member in that phase.
    pub fn add_member(&mut self, phase: &str) {
        let place = PHASES.iter().position(|known| *known == phase).unwrap_or(PHASES.len() - 1);
        self.members[place] = self.members[place].saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_nobody_knows_makes_no_series() {
        let mut facts = InstanceFacts::default();
        ["Online", "made up", "Online", ""].into_iter().for_each(|phase| facts.add_member(phase));
        assert_eq!(facts.members, [0, 0, 0, 0, 2, 0, 0, 0, 0, 2]);
    }
}
