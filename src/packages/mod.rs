//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
