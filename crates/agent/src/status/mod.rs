//! What this node reports. Pure.

pub(super) mod measured;
pub(super) mod node_status;
mod phase;
pub(super) mod summary;
