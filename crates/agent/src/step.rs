//! What an agent can do next on its node. Plain data: [`super::decide`] chooses a step, [`super::execute`] carries it out.

use super::{drains::DrainChange, inputs::assignment::Assignment};
use api::Closing;

/// The next step of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The host is as the planner wants it.
    Hold,
    /// Something else must happen first; the text says what, for people.
    Wait(String),
    /// Lead: its broker ended, with this last log line, before the instance was ever online. The planner decides which node
    /// tries next, and when.
    GiveWay(String),
    /// Check whether the host can carry a broker.
    Preflight,
    /// Claim the host, then fetch and link this package set.
    Install {
        /// Digest of the package set.
        digest: String,
    },
    /// Fetch and link this package set beside the running broker, for the next epoch.
    Prepare {
        /// Digest of the package set.
        digest: String,
    },
    /// Write the files that the broker reads, and start it.
    Start(Assignment),
    /// Lead: load what the roster declares into the running broker.
    Reload(Assignment),
    /// Lead: make the broker drain and undrain ranks.
    Drain(DrainChange),
    /// Lead: end the epoch by stopping the instance.
    Close(Closing),
    /// Stop the broker: this node has another rank by now, or the broker belongs to another instance.
    Stop {
        /// Why, for people.
        reason: String,
        /// True: jobs that run here end first. False if they are lost already, or their time is over.
        waits_for_jobs: bool,
    },
    /// Remove everything from the host.
    Remove,
}

impl Step {
    /// The step's name in log lines.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Wait(_) => "wait",
            Self::GiveWay(_) => "give way",
            Self::Preflight => "preflight",
            Self::Install { .. } => "install",
            Self::Prepare { .. } => "prepare",
            Self::Start(_) => "start",
            Self::Reload(_) => "reload",
            Self::Drain(_) => "drain",
            Self::Close(_) => "close",
            Self::Stop { .. } => "stop",
            Self::Remove => "remove",
        }
    }

    /// Nothing is to be carried out, so there is time for upkeep.
    pub fn is_rest(&self) -> bool {
        matches!(self, Self::Hold | Self::Wait(_) | Self::GiveWay(_))
    }

    /// What overtakes this step while it is carried out. What the step did by then stays, and the next round goes on from there.
    pub fn overtaken_by(&self) -> Overtaking {
        match self {
            // Cut off between two of its parts, a live change would leave the instance without a scheduler; a removal is the
            // end of the instance itself.
            Self::Reload(_) | Self::Remove => Overtaking::Nothing,
            // A source that does not answer can take a minute to be given up.
            Self::Install { .. } => Overtaking::AnotherWish,
            _ => Overtaking::EndOfInstance,
        }
    }
}

/// What cuts a step short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overtaking {
    /// The step always runs to its end.
    Nothing,
    /// The end of the instance.
    EndOfInstance,
    /// The end of the instance, or another package set, source or spec than the one that the step began with.
    AnotherWish,
}
