//! Commands for people, in a node's pod or on its host.

pub(super) mod dump;
pub(super) mod enter;
pub(super) mod ladder;
pub(super) mod takeover;
pub(super) mod uninstall;
pub(super) mod verify;
