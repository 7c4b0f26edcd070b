//! Helpers of the integration tests.

#![allow(dead_code, reason = "each test takes what it needs")]

pub mod journal;
pub mod real_broker;
pub mod stand_in;
