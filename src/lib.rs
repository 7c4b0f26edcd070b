//! Turns the nodes of a Kubernetes cluster into one Flux system.
//!
//! See `README.md` for what it is to its users, and each module for what it promises.

pub mod agent;
pub mod api;
pub mod broker;
pub mod host;
pub mod local;
pub mod packages;
pub mod plan;
pub mod planner;
