//! What one round observes: [`NodeInputs`](node_inputs::NodeInputs), collected by [`Sources`](sources::Sources) and not changed
//! afterwards. [`super::decide`] reads nothing else but the agent's [`Memory`](super::memory::Memory).

pub(super) mod applied;
pub(super) mod assignment;
pub(super) mod broker_log;
pub(super) mod broker_state;
pub(super) mod local_roster;
pub(super) mod node_inputs;
pub(super) mod published;
pub(super) mod refusal;
pub(super) mod shutdown;
pub(super) mod sources;
pub(super) mod stall_detector;
pub(super) mod watched_objects;
