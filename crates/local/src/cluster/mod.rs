//! Simulated nodes: each has namespaces, cgroups and a root directory of its own; a daemon runs them.
//!
//! What is made, and by which process:
//! - `local up` writes `cluster.json`, which names everything that will ever be made, and starts the `daemon`;
//! - the daemon makes the bridge, serves the API and the `proxy`, and runs one `kubelet` per node;
//! - a kubelet boots its node (`node`, whose PID 1 is `init`), keeps the agent's `pod` running in it, and runs the first
//!   `container` of each pod that is `bound` to it;
//! - `local down` (`down`) needs none of them: it removes what it finds on disk, in the cgroups and on the bridge.

pub(crate) mod api;
pub(crate) mod bound;
pub(crate) mod cgroup;
pub(crate) mod check;
pub(crate) mod container;
pub(crate) mod container_status;
pub(crate) mod control;
pub(crate) mod daemon;
pub(crate) mod down;
pub(crate) mod exec;
pub(crate) mod init;
pub(crate) mod io;
pub(crate) mod kind;
pub(crate) mod kubelet;
pub(crate) mod layout;
pub(crate) mod logs;
pub(crate) mod manifest;
pub(crate) mod mounts;
pub(crate) mod network;
pub(crate) mod node;
pub(crate) mod objects;
pub(crate) mod options;
pub(crate) mod pod;
pub(crate) mod pods;
pub(crate) mod proxy;
pub(crate) mod remove;
pub(crate) mod restart;
pub(crate) mod root;
pub(crate) mod shim;
pub(crate) mod spec;
pub(crate) mod status;
pub(crate) mod up;
pub(crate) mod wait;
