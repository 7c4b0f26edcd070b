//! What shall be: pure functions from what was observed (and the time passed in) to what is to be written. They import
//! nothing but the types of `api`, and nothing in here has an effect. One of them remembers:
//! [`Protection`](protect::Protection) is told again and again, and knows since when a node has been needed no more.

pub mod broker_toml;
pub mod certificate;
pub mod effect;
pub mod eligibility;
pub mod forsaken;
pub mod gone;
pub mod hostlist;
pub mod lease;
pub mod peers;
pub mod prefix;
pub mod project;
pub mod protect;
pub mod resources;
pub mod roster;
pub mod settings;
pub mod status;
pub mod topology;
