//! What shall be: pure functions from what was observed (and the time passed in) to what is to be written, and what makes a spec
//! valid: one validation for every door ([`mod@read`] for files, [`schema::check`] and [`read::rules`] for an API server,
//! [`validate()`] for the planner).
//!
//! Nothing in here has an effect, asks a clock, or speaks to an API server. Two of them remember, and are told again and again:
//! [`Protection`](protect::Protection) knows since when a node has been needed no more, [`Agents`](agents::Agents) since when
//! one has had no agent.

pub mod agents;
pub mod broker_toml;
pub mod effect;
pub mod eligibility;
pub mod findings;
#[cfg(any(test, feature = "test-support"))]
pub mod fixture;
pub mod forsaken;
pub mod gone;
pub mod hostlist;
pub mod kubernetes;
pub mod names;
pub mod peers;
mod places;
pub mod prefix;
pub mod project;
pub mod protect;
pub mod read;
pub mod resources;
pub mod roster;
pub mod schema;
pub mod settings;
pub mod status;
pub mod topology;
mod validate;

pub use validate::validate;
