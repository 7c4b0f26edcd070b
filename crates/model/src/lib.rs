//! The desired state: pure functions from what the planner observed (and the time passed in) to what it writes. They
//! import only the types of `api` and have no effects. Two types keep state from one round to the next:
//! [`Protection`](protect::Protection) remembers when each node was last needed, and [`Agents`](agents::Agents) since
//! when a node has had no agent.

pub mod agents;
pub mod broker_names;
pub mod broker_toml;
pub mod conditions;
pub mod drawing;
pub mod effect;
pub mod eligibility;
pub mod findings;
#[cfg(any(test, feature = "test-support"))]
pub mod fixture;
pub mod forsaken;
pub mod gone;
pub mod hostlist;
pub mod kubernetes;
pub mod labels;
pub mod lead;
pub mod marks;
pub mod matching;
pub mod members;
pub mod names;
pub mod nodes;
pub mod observed;
pub mod obstacle;
pub mod peers;
mod places;
pub mod prefix;
pub mod preview;
pub mod project;
pub mod protect;
pub mod read;
mod resource_config;
pub mod resources;
pub mod roster;
pub mod schema;
pub mod settings;
pub mod status;
pub mod topology;
pub mod tree;
mod validate;

pub use validate::validate;
