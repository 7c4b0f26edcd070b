//! A small in-memory Kubernetes API server for the kinds that we use.
