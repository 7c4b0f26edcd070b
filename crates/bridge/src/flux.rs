//! The side of Flux: the lead's broker, its queues and its jobs.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use tokio::time::timeout;
use tracing::{info, warn};

use base::error_chain;
use broker::{
    journal::{JournalItem, journal},
    queues::{self, QueueError, StoppedByRestart, keep_note},
    rfc3::{Client, RpcError},
    status::{attribute, state},
};
use pods::{
    jobs::Jobs,
    time::Moment,
    world::{self, Queues},
};

/// The events that say what becomes of a job.
const EVENTS: [&str; 8] = ["submit", "depend", "urgency", "alloc", "finish", "exception", "free", "clean"];

/// Limit for a note about the queues: the bridge has to renew its Lease.
const NOTE_WITHIN: Duration = Duration::from_secs(3);

/// A connection to the lead's broker.
pub(crate) struct Flux {
    pub(crate) client: Arc<Client>,
    journal: Pin<Box<dyn Stream<Item = Result<JournalItem, RpcError>> + Send>>,
    /// Of no use before the end of the backlog.
    pub(crate) jobs: Jobs,
    /// The backlog has been read.
    pub(crate) is_whole: bool,
    /// Names this life of the broker, as no other broker is named.
    pub(crate) name: String,
    in_run_since: Option<Moment>,
    /// Which queues a restart has stopped, as it is noted in the KVS.
    noted: Option<StoppedByRestart>,
}

impl Flux {
    /// Begins to follow the broker behind `client`.
    ///
    /// # Errors
    /// [`RpcError`].
    pub(crate) async fn follow(client: Client, instance_id: &str) -> Result<Self, RpcError> {
        let started = attribute(&client, "broker.starttime").await?;
        let journal = Box::pin(journal(&client, &EVENTS)?);
        let name = format!("{instance_id} {started}");
        let jobs = Jobs::of(client.uid());
        Ok(Self { client: Arc::new(client), journal, jobs, is_whole: false, name, in_run_since: None, noted: None })
    }

    /// Takes in the next item of the journal.
    ///
    /// # Errors
    /// The journal has ended, so the connection is of no use any more.
    pub(crate) async fn hear(&mut self) -> Result<(), RpcError> {
        match self.journal.next().await {
            Some(Ok(JournalItem::Job(events))) => self.jobs.apply(&events),
            Some(Ok(JournalItem::BacklogEnd)) => self.is_whole = true,
            Some(Err(RpcError::Closed)) | None => return Err(RpcError::Closed),
            Some(Err(error)) => return Err(error),
        }
        Ok(())
    }

    /// The state of the broker. `recovered`: the broker in which pods have been given their cores.
    ///
    /// # Errors
    /// [`RpcError`].
    pub(crate) async fn broker(&mut self, recovered: Option<&str>, now: Moment) -> Result<world::Broker, RpcError> {
        let is_in_run = state(&self.client).await?.state == "run";
        self.in_run_since = is_in_run.then(|| self.in_run_since.unwrap_or(now));
        let mut all = if is_in_run { queues::queues(&self.client).await? } else { Vec::new() };
        if is_in_run {
            let kept = timeout(NOTE_WITHIN, keep_note(&self.client, &mut all, &mut self.noted));
            match kept.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(error = error_chain(&error), "can't note which queues a restart has stopped"),
                Err(_) => warn!("can't note in time which queues a restart has stopped"),
            }
        }
        let queues = if is_in_run { Queues::of(&all) } else { Queues::Offline };
        let accepts_jobs = all.iter().any(|queue| queue.enable);
        let is_recovered = recovered == Some(self.name.as_str());
        let (name, in_run_since) = (self.name.clone(), self.in_run_since);
        Ok(world::Broker { life: name, in_run_since, queues, accepts_jobs, is_recovered })
    }
}

/// Starts those queues that the bridge or a restart has stopped.
///
/// # Errors
/// [`QueueError`].
pub(crate) async fn start_queues(client: &Client) -> Result<(), QueueError> {
    let all = queues::queues(client).await?;
    let reasons = all.iter().filter_map(|queue| queue.stop_reason.as_deref());
    let reasons: Vec<_> = reasons.filter(|reason| Queues::is_ours(reason)).collect();
    let started = queues::start(client, &reasons).await?;
    if !started.is_empty() {
        info!(queues = started.len(), "started the queues");
    }
    Ok(())
}
