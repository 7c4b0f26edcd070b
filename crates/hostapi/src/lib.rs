//! Orders to the host stage, and its answers: types only, and the trait [`Host`] that stands between the agent and its host.
//!
//! The agent's process stays in its pod. A short-lived child, the *host stage*, enters the host's namespaces
//! (crate `host` starts it), reads one [`Order`], carries it out and answers. [`FakeHost`] records orders for tests.

mod answer;
mod environment;
mod fake;
mod machine;
mod order;
mod progress;
mod roster_copy;

use std::{io, os::fd::OwnedFd, time::Duration};

use futures::future::BoxFuture;

pub use answer::*;
pub use environment::*;
pub use fake::FakeHost;
pub use machine::{Machine, first_label};
pub use order::*;
pub use progress::{Progress, Tally};
pub use roster_copy::{FileVersion, RosterCopy};

/// How often a stage says that it is alive: many times within an agent's patience with a silent one, which counts its own by
/// these words.
pub const BEAT: Duration = Duration::from_secs(1);

/// Carries out the agent's orders on its host, and leads to what the agent reads there without an order.
pub trait Host: Send + Sync {
    /// Has a stage carry out `order`, and calls `progress` whenever the stage reports some.
    ///
    /// # Errors
    /// [`HostError::Refused`] with the stage's refusal; the other variants if the stage could not run.
    fn run<'a>(
        &'a self,
        order: Order,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>>;

    /// Like [`Self::run`], and signals the end of `coming` to the stage by closing its stdin (as the end of this
    /// process does). Only an order with [`LinkOrder::follow`] reads that signal.
    ///
    /// # Errors
    /// As for [`Self::run`].
    fn run_while<'a>(
        &'a self,
        order: Order,
        coming: BoxFuture<'a, ()>,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>>;

    /// The socket of the broker that runs here, opened for its path only.
    ///
    /// # Errors
    /// There is none, or it can't be opened safely.
    fn broker_socket(&self) -> io::Result<OwnedFd>;

    /// The text of the host's /etc/passwd; empty if it has none.
    ///
    /// # Errors
    /// It can't be read.
    fn passwd(&self) -> io::Result<String>;
}

/// Why an order was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The stage ran and refused the order.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A namespace of the host could not be opened or entered.
    #[error("can't enter the host's {namespace} namespace; run this as root, and in a pod with hostPID and privileged")]
    Namespace {
        /// Namespace: `ipc`, `uts`, `net`, `cgroup`, `mnt` or `pid`.
        namespace: &'static str,
        /// What the system call reported.
        #[source]
        source: std::io::Error,
    },
    /// The stage could not be started, or ended without an answer.
    #[error("host stage {what}")]
    Stage {
        /// What happened, as a continuation of "host stage ".
        what: String,
        /// The error behind it, if there is one.
        #[source]
        source: Option<std::io::Error>,
    },
}

impl Answer {
    /// The view in the answer to an order that reports [`Answer::Observed`].
    ///
    /// # Errors
    /// [`HostError::unexpected`] if it is another answer.
    pub fn observed(self) -> Result<HostView, HostError> {
        match self {
            Self::Observed(view) => Ok(*view),
            other => Err(HostError::unexpected(&other)),
        }
    }
}

impl HostError {
    /// The stage's answer does not fit the order: the stage is of another version, or broken.
    pub fn unexpected(answer: &Answer) -> Self {
        Self::Stage { what: format!("gave an answer that does not fit its order: {answer:?}"), source: None }
    }

    /// Exit code for a command whose order was refused before anything changed: 2 if a retry can't help, because the
    /// command's arguments or the host have to change first; otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused(refusal) if !refusal.transient => 2,
            _ => 1,
        }
    }
}

/// Observes the host. What `before` has of the roster's copy is not sent again.
///
/// # Errors
/// If the stage refuses, or could not run.
pub async fn look_again(host: &dyn Host, before: &HostView) -> Result<HostView, HostError> {
    let Some(known) = before.roster_version.filter(|_| before.roster.is_some()) else { return look(host).await };
    let mut view = host.run(Order::ObserveAgain { known }, &mut |_| {}).await?.observed()?;
    if view.roster.is_none() && view.roster_version == Some(known) {
        view.roster.clone_from(&before.roster);
    }
    Ok(view)
}

/// Observes the host.
///
/// # Errors
/// If the stage refuses, or could not run.
pub async fn look(host: &dyn Host) -> Result<HostView, HostError> {
    host.run(Order::Observe, &mut |_| {}).await?.observed()
}
