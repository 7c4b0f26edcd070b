//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
//!
//! - [`resolve`] runs in the planner and decides *which* packages: one [`PackageSet`](api::PackageSet) for all
//!   platforms. Only the planner runs the solver.
//! - [`fetch()`] runs in the pod and fills the host's `<prefix>/pkgs` with archives, each named by its content and
//!   checked against its sha256. It is the only part that needs a network.
//! - [`link`] runs in the host stage, without network, and makes `<prefix>/envs/<digest>` from those archives: the
//!   environment is built under a temporary name, checked, synced, and put in place by one rename. [`link_while`] starts
//!   before the last archive has arrived.
//! - [`collect`] also runs in the host stage and removes what is no longer needed; [`verify`] compares an environment
//!   with what was installed, and [`mend`] repairs the differences.
//!
//! A file or directory under its final name is complete. Everything else has a name that starts with a dot and may be
//! deleted.

mod bundle;
mod environment;
mod fetch;
mod files;
mod interrupt;
mod lock;
#[cfg(test)]
#[path = "../../../tests/support/needs.rs"]
mod needs;
mod progress;
mod serve;
mod unpack_error;

pub use bundle::create::CreateBundle;
pub use bundle::manifest::{BUNDLE_LOCK, BUNDLE_MANIFEST, BundleManifest, ManifestError};
pub use bundle::{BundleCommand, BundleError, InspectBundle, OutputFormat};
pub use environment::collect::collect;
pub use environment::limits::Limits;
pub use environment::mend::mend;
pub use environment::verify::verify;
pub use environment::{link, link_while, linked, ready};
pub use fetch::access::{Access, Token};
pub use fetch::archive::{archive_names, archives, holds};
pub use fetch::download::tried_again;
pub use fetch::source::Sources;
pub use fetch::{FetchError, Fetched, fetch};
pub use fetch::{
    credentials::CredentialsError,
    http::{HttpClient, HttpError},
};
pub use interrupt::end_if_interrupted;
pub use lock::command::{LockAction, LockCommand, LockCommandError, LockDiffArguments, SolveArguments};
pub use lock::solve::{SolveError, resolve};
pub use progress::show::{LINE_EVERY, Style, shown};
pub use progress::{Meter, Reading, quarters};
pub use serve::bounded;
pub use serve::{Shelf, serve_peers_on};

/// The marker file in a finished environment, written last. A directory without it is not an environment.
pub const ENVIRONMENT_MARKER: &str = ".flux-distribute.json";

/// The conda platform of the machine this runs on, such as `linux-64`.
pub fn native_platform() -> &'static str {
    host::facts::platform(std::env::consts::ARCH).unwrap_or("linux-unknown")
}
