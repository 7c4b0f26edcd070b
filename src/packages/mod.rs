//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
//!
//! - [`resolve`] runs in the planner and answers *which* packages: one [`PackageSet`](crate::api::PackageSet) for all
//!   platforms. Nobody else solves.
//! - [`fetch()`] runs in the pod and fills the host's `<prefix>/pkgs` with archives, each named by what is in it and
//!   checked against its sha256. It is the only part that needs a network.
//! - [`link`] runs in the host stage, without network, and makes `<prefix>/envs/<digest>` from those archives: built
//!   aside, checked, synced, switched by one rename.
//! - [`collect`] runs there too and takes away what nobody needs any more; [`verify`] tells whether an environment still
//!   is what was installed.
//!
//! What is under its final name is whole. Everything else has a name that starts with a dot and may be thrown away.

mod access;
mod answer;
mod archive;
mod bundle;
mod bundle_create;
mod collect;
mod command_lock;
mod conda;
mod diff;
mod download;
mod environment;
mod explicit;
mod extract;
mod fetch;
mod from_bundle;
mod guard;
mod http;
mod impatient;
mod limits;
mod lock;
mod manifest;
mod pack;
mod packages_bundle;
mod part;
mod patience;
mod progress;
mod question;
mod records;
mod room;
mod serve;
mod show;
mod solve;
mod source;
mod transaction;
mod unpack;
mod verify;

pub use access::{Access, Token};
pub use archive::{archive_names, holds};
pub use bundle::{BundleCommand, BundleError, InspectBundle, OutputFormat};
pub use bundle_create::CreateBundle;
pub use collect::{Found, archives, collect, decide};
pub use command_lock::{LockAction, LockCommand, LockCommandError, LockDiffArguments, SolveArguments};
pub use diff::{Change, ChangeKind, Download, LockDiff, MinorChange, Package, PlatformDiff, compare};
pub use environment::{link, linked, ready};
pub use fetch::{FetchError, Fetched, fetch};
pub use http::{HttpClient, HttpError};
pub use limits::Limits;
pub use lock::{LockError, check_lock, estimate_bytes, normalise_lock};
pub use manifest::{BUNDLE_LOCK, BUNDLE_MANIFEST, BundleManifest};
pub use progress::{Meter, Reading, quarters};
pub use question::question;
pub use serve::{Shelf, serve_peers, serve_peers_on};
pub use show::{LINE_EVERY, Style, shown};
pub use solve::{SolveError, resolve};
pub use source::Sources;
pub use verify::{Difference, Verified, What, verify};

/// The marker in a finished environment: its last file to be written. A directory without it is not an environment.
pub const ENVIRONMENT_MARKER: &str = ".flux-distribute.json";

/// The conda platform of the machine this runs on, such as `linux-64`.
pub fn native_platform() -> &'static str {
    crate::host::facts::platform(std::env::consts::ARCH).unwrap_or("linux-unknown")
}
