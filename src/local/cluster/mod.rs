//! Simulated nodes: namespaces, cgroups and a root of their own for each, and the daemon that keeps them.
