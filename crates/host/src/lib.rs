//! A host's files, locks, cgroups, namespaces and facts: what looks at a host and changes it, one small thing at a time.
//!
//! All `unsafe` code is in here. The crate knows nothing of packages or of the broker's protocol: a host stage is put together above
//! it. [`NsHost`] starts such stages: children that have entered the host's namespaces.

pub mod boundary;
pub mod cgroup;
pub mod changes;
pub mod child;
pub mod core_dump;
pub mod detach;
pub mod distrust;
pub mod dumps;
mod enter;
pub mod facts;
pub mod files;
mod first_process;
mod hear;
pub mod host_root;
pub mod limits;
pub mod lock;
pub mod log;
pub mod machine;
pub mod mountinfo;
mod occupants;
pub mod opening;
pub mod own_directory;
pub mod port;
pub mod process;
pub mod processes;
pub mod removal;
pub mod room;
mod root;
pub mod state;
pub mod statedir;
pub mod sysctl;
pub mod trust;
pub mod underneath;
pub mod users;

#[cfg(test)]
#[path = "../../../tests/support/needs.rs"]
mod needs;

pub use boundary::{HOST_PATH, NsHost};
pub use enter::enter;
pub use lock::HostLock;
pub use occupants::{BrokerProcesses, Occupant, occupants};
pub use root::Root;
