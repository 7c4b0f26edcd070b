//! The log of changes, in order and of bounded length.

use std::{collections::VecDeque, sync::Arc};

use serde_json::Value;

use super::{error::ApiError, key::Key};

/// The number of changes kept. With a few KiB each, this limits what a slow watch can cost.
pub const LOG_LENGTH: usize = 4096;

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The object was created.
    Added,
    /// The object was changed.
    Modified,
    /// The object was removed.
    Deleted,
}

/// One change of an object.
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// The resourceVersion of the change.
    pub revision: u64,
    /// The kind of the change.
    pub change: Change,
    /// The object's key.
    pub key: Key,
    /// The object after the change, or its last state if it was removed.
    pub object: Arc<Value>,
    /// The object before the change: a watch with a selector must notice when an object leaves its selection.
    pub before: Option<Arc<Value>>,
}

/// The changes `oldest + 1 ..= revision`, without gaps.
#[derive(Debug, Default)]
pub struct Log {
    oldest: u64,
    events: VecDeque<Arc<Event>>,
}

impl Log {
    /// An empty log whose next revision is `revision` + 1.
    pub fn starting_at(revision: u64) -> Self {
        Self { oldest: revision, events: VecDeque::new() }
    }

    /// The revision of the last change.
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
    /// [`ApiError::Expired`] if some of them are no longer kept, or if `revision` was never issued: then it comes from an
    /// earlier run of this server.
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
