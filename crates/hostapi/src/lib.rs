//! Orders to the host stage, and its answers: types only, and the trait [`Host`] that stands between the agent and the two.
//!
//! The agent's process stays in its pod. Work on the host is done by a short-lived child, the *host stage*, which has
//! entered the host's namespaces; it reads one [`Order`] and answers. [`FakeHost`] records orders for tests. Nothing in here
//! touches a host.

mod answer;
mod environment;
mod fake;
mod machine;
mod order;
mod progress;

use std::time::Duration;

use futures::future::BoxFuture;

pub use answer::*;
pub use environment::*;
pub use fake::FakeHost;
pub use machine::{Machine, first_label};
pub use order::*;
pub use progress::{Progress, Tally};

/// How often a stage says that it is alive: many times within an agent's patience with a silent one, which counts its own by
/// these words.
pub const BEAT: Duration = Duration::from_secs(1);

/// What the agent asks of its host.
pub trait Host: Send + Sync {
    /// Has `order` carried out; `progress` is called while it goes on.
    ///
    /// # Errors
    /// [`HostError::Refused`] with the stage's own words; the other variants where the stage could not be run.
    fn run<'a>(
        &'a self,
        order: Order,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>>;

    /// As [`Self::run`], and the stage is told when `coming` has ended: by the end of its stdin, which comes also when this
    /// process ends. An order that does not follow anything ([`LinkOrder::follow`]) takes no notice.
    ///
    /// # Errors
    /// As for [`Self::run`].
    fn run_while<'a>(
        &'a self,
        order: Order,
        coming: BoxFuture<'a, ()>,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>>;
}

/// Why an order was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The stage ran and said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A namespace of the host could not be opened or entered.
    #[error("can't enter the host's {namespace} namespace; the pod needs hostPID and privileged")]
    Namespace {
        /// Which.
        namespace: &'static str,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The stage could not be started, or ended without an answer.
    #[error("host stage {what}")]
    Stage {
        /// What happened.
        what: String,
        /// Cause.
        #[source]
        source: Option<std::io::Error>,
    },
}

impl Answer {
    /// What was seen, of an order that is answered so.
    ///
    /// # Errors
    /// [`HostError::unexpected`].
    pub fn observed(self) -> Result<HostView, HostError> {
        match self {
            Self::Observed(view) => Ok(*view),
            other => Err(HostError::unexpected(&other)),
        }
    }
}

impl HostError {
    /// The stage has answered something else than it was asked: it is of another version, or broken.
    pub fn unexpected(answer: &Answer) -> Self {
        Self::Stage { what: format!("gave another answer than was asked for: {answer:?}"), source: None }
    }

    /// What a command ends with whose order was refused before anything was changed: 2 where trying again can't help, so
    /// that the command, or what it found on the host, has to be another one; 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(refusal) if !refusal.transient => 2,
            _ => 1,
        }
    }
}

/// Looks at the host.
///
/// # Errors
/// The stage's.
pub async fn look(host: &dyn Host) -> Result<HostView, HostError> {
    host.run(Order::Observe, &mut |_| {}).await?.observed()
}
