//! What shall be: pure functions from what was observed (and the time passed in) to what is to be written. They import
//! nothing but the types of `api`, and nothing in here has an effect. Two of them remember, and are told again and again:
//! [`Protection`](protect::Protection) knows since when a node has been needed no more, [`Agents`](agents::Agents) since when
//! one has had no agent.

pub mod agents;
pub mod broker_toml;
pub mod certificate;
pub mod effect;
pub mod eligibility;
pub mod findings;
pub mod forsaken;
pub mod gone;
pub mod hostlist;
pub mod kubernetes;
pub mod lease;
pub mod names;
pub mod peers;
pub mod prefix;
pub mod project;
pub mod protect;
pub mod resources;
pub mod roster;
pub mod settings;
pub mod status;
pub mod topology;
