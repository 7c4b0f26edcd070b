//! Bridged jobs as the agent sees them, with a bridge or without: which ranks they hold, and the end of those that a bridge has left.

use std::{collections::BTreeSet, time::Duration};

use api::IdSet;
use futures::StreamExt;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use crate::flux::start_queues;
use base::error_chain;
use broker::{
    jobs::{JobStates, ListedJob, cancel, job_events, listed_jobs},
    queues::{QueueError, is_scheduler_offline, keep_note, queues},
    resource_set::ResourceSet,
    rfc3::{Client, RpcError},
    status::{InstanceStatus, instance},
};
use pods::{
    jobs::{Jobs, OUR_NOTE},
    jobspec::could_be_ours,
    occupied::{Look, Occupied, occupied},
};

/// How many times the lead is asked who holds a core before an unknown job counts as a host job.
const LOOKS: usize = 3;
/// Pause before it is asked again: a job takes some milliseconds to begin or to end.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How long the gangs that were known count if the jobs can't be listed.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// Finds out where host jobs and gangs run. Remembers what each job is, because that never changes: only new jobs are asked about.
/// A gang counts as long as it is listed as running: the job manager announces its end before another job can have its cores.
pub struct Occupancy<'a> {
    client: &'a Client,
    /// The running jobs that may be gangs by their names.
    jobs: Jobs,
    /// When the jobs were listed last.
    listed: Option<Instant>,
    /// How many jobs ran then, shadow jobs left out.
    running: u32,
}

impl<'a> Occupancy<'a> {
    /// Asks the lead through `client`.
    pub fn of(client: &'a Client) -> Self {
        Self { client, jobs: Jobs::of(client.uid()), listed: None, running: 0 }
    }

    /// Tells apart what jobs hold. `status`: the lead's report, asked for just now.
    ///
    /// # Errors
    /// [`RpcError`]; a timeout if the lead is gone.
    pub async fn ask(&mut self, status: &InstanceStatus) -> Result<Occupied, RpcError> {
        let mut look = self.look(&status.allocated_resources).await?;
        for _ in 1..LOOKS {
            if !look.is_doubtful() {
                break;
            }
            sleep(LOOK_AGAIN).await;
            let status = instance(self.client).await?;
            look = look.refined_by(self.look(&status.allocated_resources).await?);
        }
        Ok(look.occupied())
    }

    async fn look(&mut self, allocated: &ResourceSet) -> Result<Look, RpcError> {
        if allocated.is_empty() {
            return Ok(Look::default());
        }
        match listed_jobs(self.client, JobStates::Running).await {
            Ok(listed) => {
                let known = self.learn(&listed).await;
                Ok(Look::of(self.occupied(allocated), &known))
            }
            Err(error) if self.listed.is_some_and(|listed| listed.elapsed() < KNOWN_FOR) => {
                debug!(error = error_chain(&error), "can't list the jobs: the gangs that were known count");
                let occupied = self.occupied(allocated);
                // Another look would not help, so nothing counts as unexplained.
                let all = occupied.by_host_jobs.clone();
                Ok(Look::of(occupied, &all))
            }
            Err(error) => Err(error),
        }
    }

    fn occupied(&self, allocated: &ResourceSet) -> Occupied {
        Occupied { running: self.running, ..occupied(allocated, &self.jobs) }
    }

    /// Asks what each new job of `listed` is. Returns the ranks of the host jobs.
    async fn learn(&mut self, listed: &[ListedJob]) -> IdSet {
        self.listed = Some(Instant::now());
        let ids: BTreeSet<_> = listed.iter().map(|job| job.id).collect();
        self.jobs.keep(|id| ids.contains(&id));
        let may_be_gang = |job: &&ListedJob| may_be_ours(self.client, job);
        let new = listed.iter().filter(may_be_gang).map(|job| job.id).filter(|id| self.jobs.get(*id).is_none());
        let new: Vec<_> = new.collect();
        let mut found = job_events(self.client, new);
        while let Some(job) = found.next().await {
            match job {
                Ok(events) => self.jobs.apply(&events),
                Err(error) => warn!(error = error_chain(&error), "can't find out whether a job is for pods"),
            }
        }
        let running = listed.len().saturating_sub(self.jobs.shadows().count());
        self.running = u32::try_from(running).unwrap_or(u32::MAX);
        let is_host_job = |job: &&ListedJob| match self.jobs.get(job.id) {
            Some(known) => known.is_host_job(),
            None => !may_be_gang(job),
        };
        listed.iter().filter(is_host_job).flat_map(|job| &job.ranks.0).copied().collect()
    }
}

/// Ends what a bridge has left in an instance that has no bridge any more: cancels its jobs, which nobody would ever end, and, if
/// `starts_queues`, starts the queues that wait for a bridge. Pods that run stay.
///
/// # Errors
/// [`QueueError`]. To be tried again, above all after [`QueueError::SchedulerIsOffline`].
pub async fn clean_up(client: &Client, starts_queues: bool) -> Result<(), QueueError> {
    let listed = listed_jobs(client, JobStates::Active).await?;
    let named: Vec<_> = listed.iter().filter(|job| may_be_ours(client, job)).map(|job| job.id).collect();
    let mut jobs = Jobs::of(client.uid());
    let mut found = job_events(client, named);
    while let Some(job) = found.next().await {
        jobs.apply(&job?);
    }
    for job in jobs.iter().filter(|job| !job.is_host_job() && job.is_active()) {
        // What ends while the scheduler is offline keeps its cores for ever.
        if is_scheduler_offline(client).await? {
            return Err(QueueError::SchedulerIsOffline);
        }
        if cancel(client, job.id, &format!("{OUR_NOTE}spec.pods.enabled is off; the pods of this job run on")).await? {
            info!(job = %job.id, "cancelled a job of pods: spec.pods.enabled is off");
        }
    }
    // Not before: a job that is pending would get its cores, only to lose them.
    if starts_queues {
        let mut noted = None;
        keep_note(client, &mut queues(client).await?, &mut noted).await?;
        start_queues(client).await?;
        keep_note(client, &mut queues(client).await?, &mut noted).await?;
    }
    Ok(())
}

/// True if the bridge may have submitted `job`, by what the list says. Only the jobspec tells for sure.
fn may_be_ours(client: &Client, job: &ListedJob) -> bool {
    job.userid == client.uid() && could_be_ours(&job.name)
}
