//! Carries out an [`Order`](hostapi::Order) on the host: the host stage's side of the boundary.
//!
//! It is the one crate that knows host, broker and packages together. It runs as a short-lived process in the host's namespaces,
//! without network and without an API server.

mod carry_out;
mod claim;
mod configure;
mod dump;
mod flux;
pub mod launch;
mod links;
mod observe;
pub mod preflight;
mod remove;
mod runnable;
mod takeover;
mod trial;
mod trial_user;

#[cfg(test)]
#[path = "../../../tests/support/needs.rs"]
mod needs;

pub use carry_out::{carry_out, main};
pub use claim::claim;
pub use configure::configure;
pub use dump::dump;
pub use flux::flux;
pub use observe::{observe, observe_again};
pub use remove::{Brokers, remove};
pub use takeover::takeover;
