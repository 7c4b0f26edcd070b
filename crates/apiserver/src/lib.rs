//! A small in-memory Kubernetes API server for the kinds that this project uses: enough for kubectl, and for the same
//! kube client as in production. It has no CEL, no server-side apply, and no admission except the schema and
//! [`validate`](model::validate()).

mod admit;
mod asked;
mod column;
mod discovery;
mod error;
mod fault;
mod http;
mod key;
mod log;
mod objects;
mod openapi;
mod patch;
mod pods;
mod request;
mod resources;
mod reviews;
mod selector;
mod store;
mod table;
mod tls;
mod verbs;
mod watch;

pub use admit::{Mode, Part};
pub use asked::{CALLS, Call};
pub use error::ApiError;
pub use fault::{Fault, Switch};
pub use http::{router, serve};
pub use key::Key;
pub use log::{Change, Event, LOG_LENGTH};
pub use objects::Deleted;
pub use resources::{Resource, ResourceName, find};
pub use reviews::SCRAPER;
pub use store::{Preconditions, RestoreError, Store};
pub use tls::{Identity, IdentityError};
