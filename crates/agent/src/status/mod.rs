//! What this node reports. Pure.

pub(super) mod node_status;
mod phase;
pub(super) mod summary;
