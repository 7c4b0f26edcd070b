//! The journal of a real lead, event by event.

use broker::{
    job_id::JobId,
    journal::{JobEvents, JournalItem, journal},
    rfc3::{Client, RpcError},
};
use futures::{Stream, StreamExt};

use super::real_broker::soon;

const EVENTS: [&str; 8] = ["submit", "priority", "alloc", "start", "finish", "exception", "free", "clean"];

/// The journal of a lead.
pub struct Journal<S>(S);

impl Journal<()> {
    /// The journal from now on, and its backlog.
    pub async fn open(
        client: &Client,
    ) -> (Journal<impl Stream<Item = Result<JournalItem, RpcError>> + Unpin + use<>>, Vec<JobEvents>) {
        let mut journal = Journal(journal(client, &EVENTS).unwrap());
        let mut backlog = Vec::new();
        while let JournalItem::Job(job) = journal.next().await {
            backlog.push(job);
        }
        (journal, backlog)
    }
}

impl<S: Stream<Item = Result<JournalItem, RpcError>> + Unpin> Journal<S> {
    async fn next(&mut self) -> JournalItem {
        soon(self.0.next()).await.expect("the journal ended").unwrap()
    }

    /// The job's events up to the first of that name. Those of other jobs are lost.
    pub async fn until(&mut self, id: JobId, name: &str) -> Vec<JobEvents> {
        let mut seen = Vec::new();
        loop {
            match self.next().await {
                JournalItem::Job(job) if job.id == id => {
                    assert_eq!(job.events.len(), 1, "{job:?}");
                    let is_last = job.has(name);
                    seen.push(job);
                    if is_last {
                        return seen;
                    }
                }
                JournalItem::Job(_) => {}
                JournalItem::BacklogEnd => panic!("a second backlog"),
            }
        }
    }
}
