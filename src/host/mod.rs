//! The host boundary: the only place that touches the host.
//!
//! The agent's process stays in its pod. Work on the host is done by a short-lived child, the *host stage*, which has
//! entered the host's namespaces ([`boundary`]); it reads one [`Order`] and answers. The trait [`Host`] stands between
//! the two; [`fake::FakeHost`] records orders for tests.

mod answer;
pub mod boundary;
mod child;
mod claim;
mod configure;
pub mod core_dump;
pub mod dump;
mod enter;
pub mod facts;
pub mod fake;
pub mod files;
mod first_process;
mod flux;
mod hear;
pub mod launch;
mod links;
pub mod lock;
pub mod machine;
pub mod mountinfo;
mod observe;
mod occupants;
mod order;
pub mod preflight;
pub mod processes;
mod progress;
mod remove;
mod root;
mod runnable;
pub mod stage;
pub mod state;
pub mod statedir;
pub mod sysctl;
mod takeover;
pub mod trust;
pub mod users;

use futures::future::BoxFuture;

pub use answer::*;
pub use boundary::{HOST_PATH, NsHost};
pub use claim::claim;
pub use configure::configure;
pub use enter::{enter, exit_code};
pub use fake::FakeHost;
pub use files::open_host_file;
pub use flux::flux;
pub use lock::HostLock;
pub use observe::observe;
pub use occupants::{Occupant, occupants};
pub use order::*;
pub use progress::{Progress, Tally};
pub use remove::{Brokers, remove};
pub use root::Root;
pub use takeover::takeover;

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
