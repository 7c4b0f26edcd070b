//! Making a lock, and looking at what another one would change.

mod channel;
pub(crate) mod command;
mod patience;
pub(crate) mod solve;
