//! The host: its boundary, and all that a stage does there.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

/// Only root can change owners and users.
macro_rules! need_root {
    () => {
        if crate::needs::skips_without([crate::needs::Need::Root]) {
            return;
        }
    };
}

mod boundary;
mod configure;
mod flux;
mod lifecycle;
#[path = "../support/needs.rs"]
mod needs;
mod pod;
mod support;
mod takeover;
mod trust;
mod users_mounts;
