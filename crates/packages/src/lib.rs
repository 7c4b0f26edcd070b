//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
//!
//! - [`resolve`] runs in the planner and answers *which* packages: one [`PackageSet`](api::PackageSet) for all
//!   platforms. Nobody else solves.
//! - [`fetch()`] runs in the pod and fills the host's `<prefix>/pkgs` with archives, each named by what is in it and
//!   checked against its sha256. It is the only part that needs a network.
//! - [`link`] runs in the host stage, without network, and makes `<prefix>/envs/<digest>` from those archives: built
//!   aside, checked, synced, switched by one rename. [`link_while`] begins before the last archive is there.
//! - [`collect`] runs there too and takes away what nobody needs any more; [`verify`] tells whether an environment still
//!   is what was installed, and [`mend`] puts back what is not.
//!
//! It knows nothing of Kubernetes or of the broker. [`resolve`], [`fetch()`] and serving archives to peers may ask the network; all
//! else works on the files of one host.
//!
//! What is under its final name is whole. Everything else has a name that starts with a dot and may be thrown away.

mod bundle;
mod environment;
mod fetch;
mod files;
mod lock;
mod progress;
mod serve;

pub use bundle::create::CreateBundle;
pub use bundle::manifest::{BUNDLE_LOCK, BUNDLE_MANIFEST, BundleManifest};
pub use bundle::{BundleCommand, BundleError, InspectBundle, OutputFormat};
pub use environment::collect::{Found, collect, decide};
pub use environment::limits::Limits;
pub use environment::mend::mend;
pub use environment::verify::verify;
pub use environment::{link, link_while, linked, ready};
pub use fetch::access::{Access, Token};
pub use fetch::archive::{archive_names, archives, holds};
pub use fetch::download::tried_again;
pub use fetch::http::{HttpClient, HttpError};
pub use fetch::source::Sources;
pub use fetch::{FetchError, Fetched, fetch};
pub use files::FileError;
pub use lock::command::{LockAction, LockCommand, LockCommandError, LockDiffArguments, SolveArguments};
pub use lock::solve::{SolveError, resolve};
pub use progress::show::{LINE_EVERY, Style, shown};
pub use progress::{Meter, Reading, quarters};
pub use serve::bounded;
pub use serve::{Shelf, serve_peers_on};

/// The marker in a finished environment: its last file to be written. A directory without it is not an environment.
pub const ENVIRONMENT_MARKER: &str = ".flux-distribute.json";

/// The conda platform of the machine this runs on, such as `linux-64`.
pub fn native_platform() -> &'static str {
    host::facts::platform(std::env::consts::ARCH).unwrap_or("linux-unknown")
}
