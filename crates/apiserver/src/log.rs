//! What changed, in order, as far back as is kept.

use std::{collections::VecDeque, sync::Arc};

use serde_json::Value;

use super::{error::ApiError, objects::Key};

/// How many changes are kept. At a few KiB each this bounds what a slow watch can cost.
pub const LOG_LENGTH: usize = 4096;

/// What happened to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It is new.
    Added,
    /// It is another.
    Modified,
    /// It is gone.
    Deleted,
}

/// One change.
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// resourceVersion of the change.
    pub revision: u64,
    /// What happened.
    pub change: Change,
    /// To whom.
    pub key: Key,
    /// The object after the change; the last state of one that is gone.
    pub object: Arc<Value>,
    /// The object before: a watch with a selector must know who leaves its selection.
    pub before: Option<Arc<Value>>,
}

/// The changes `oldest + 1 ..= revision`, each revision once and without gaps.
#[derive(Debug, Default)]
pub struct Log {
    oldest: u64,
    events: VecDeque<Arc<Event>>,
}

impl Log {
    /// An empty log at `revision`: nothing before it is known.
    pub fn starting_at(revision: u64) -> Self {
        Self { oldest: revision, events: VecDeque::new() }
    }

    /// Revision of the last change.
    pub fn revision(&self) -> u64 {
        self.oldest + self.events.len() as u64
    }

    /// Adds a change as the next revision.
    pub fn push(&mut self, change: Change, key: Key, object: Arc<Value>, before: Option<Arc<Value>>) {
        let revision = self.revision() + 1;
        self.events.push_back(Arc::new(Event { revision, change, key, object, before }));
        if self.events.len() > LOG_LENGTH {
            self.events.pop_front();
            self.oldest += 1;
        }
    }

    /// The changes after `revision`, at most `limit`.
    ///
    /// # Errors
    /// [`ApiError::Expired`] for a past that is no longer kept. A future that was never handed out is refused as well: it
    /// belongs to another life of this server.
    pub fn after(&self, revision: u64, limit: usize) -> Result<Vec<Arc<Event>>, ApiError> {
        let expired = ApiError::Expired { asked: revision, oldest: self.oldest };
        let skip =
            revision.checked_sub(self.oldest).and_then(|skip| usize::try_from(skip).ok()).ok_or(expired.clone())?;
        if skip > self.events.len() {
            return Err(expired);
        }
        Ok(self.events.range(skip..).take(limit).cloned().collect())
    }
}
