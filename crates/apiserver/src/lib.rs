//! A small in-memory Kubernetes API server for the kinds that we use: enough for kubectl, and for the same kube client that
//! runs in production. No CEL, no server-side apply, no admission but the schema and
//! [`validate`](model::validate()). Tests can have it fail on purpose ([`Fault`]).
//!
//! It is for local mode and tests, and never in the image. It knows no planner and no agent.

mod admit;
mod discovery;
mod error;
mod fault;
mod http;
mod log;
mod objects;
mod openapi;
mod patch;
mod request;
mod resources;
mod selector;
mod store;
mod table;
mod tls;
mod verbs;
mod watch;

pub use admit::{Mode, Part};
pub use error::{ApiError, ResourceName};
pub use fault::{Fault, Switch};
pub use http::{router, serve};
pub use log::{Change, Event, LOG_LENGTH};
pub use objects::{Deleted, Key};
pub use resources::{Resource, find};
pub use store::{Preconditions, RestoreError, Store};
pub use tls::{Identity, IdentityError};
