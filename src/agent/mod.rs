//! The agent: the DaemonSet pod's process on each node. Observe, decide ([`decide`]), act ([`act`]), report.

pub mod decide;
