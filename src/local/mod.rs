//! Local mode: N simulated nodes and a small API server on one Linux machine.

pub mod apiserver;
pub mod cluster;
