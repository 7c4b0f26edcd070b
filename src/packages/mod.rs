//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
//!
//! - [`resolve`] runs in the planner and answers *which* packages: one [`PackageSet`](crate::api::PackageSet) for all
//!   platforms. Nobody else solves.
//! - [`fetch()`] runs in the pod and fills the host's `<prefix>/pkgs` with archives, each named by what is in it and
//!   checked against its sha256. It is the only part that needs a network.
//! - [`link`] runs in the host stage, without network, and makes `<prefix>/envs/<digest>` from those archives: built
//!   aside, checked, synced, switched by one rename.
//!
//! What is under its final name is whole. Everything else has a name that starts with a dot and may be thrown away.

mod access;
mod answer;
mod archive;
mod bundle;
mod download;
mod environment;
mod fetch;
mod http;
mod impatient;
mod limits;
mod lock;
mod manifest;
mod pack;
mod part;
mod question;
mod serve;
mod solve;
mod source;
mod unpack;

pub use access::{Access, Token};
pub use archive::{archive_names, holds};
pub use bundle::{BundleCommand, BundleError, CreateBundle, InspectBundle, OutputFormat};
pub use environment::{link, linked, ready};
pub use fetch::{FetchError, Fetched, fetch};
pub use http::{HttpClient, HttpError};
pub use limits::Limits;
pub use lock::{LockError, estimate_bytes};
pub use manifest::{BUNDLE_MANIFEST, BundleManifest};
pub use question::question;
pub use serve::{Shelf, serve_peers, serve_peers_on};
pub use solve::{SolveError, resolve};
pub use source::Sources;

/// The marker in a finished environment: its last file to be written. A directory without it is not an environment.
pub const ENVIRONMENT_MARKER: &str = ".flux-distribute.json";

/// The conda platform of the machine this runs on, such as `linux-64`.
pub fn native_platform() -> &'static str {
    crate::host::facts::platform(std::env::consts::ARCH).unwrap_or("linux-unknown")
}
