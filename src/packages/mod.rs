//! Packages: resolved once by the planner, fetched in the pod, linked on the host.
//!
//! - [`resolve`] runs in the planner and answers *which* packages: one [`PackageSet`](crate::api::PackageSet) for all
//!   platforms. Nobody else solves.
//! - [`fetch()`] runs in the pod and fills the host's `<prefix>/pkgs` with archives, each named by what is in it and
//!   checked against its sha256. It is the only part that needs a network.
//! - [`link`] runs in the host stage, without network, and makes `<prefix>/envs/<digest>` from those archives: built
//!   aside, checked, synced, switched by one rename. [`link_while`] begins before the last archive is there.
//! - [`collect`] runs there too and takes away what nobody needs any more; [`verify`] tells whether an environment still
//!   is what was installed, and [`mend`] puts back what is not.
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
pub use environment::mend::{Mended, mend};
pub use environment::verify::{Difference, Verified, What, verify};
pub use environment::{link, link_while, linked, ready};
pub use fetch::access::{Access, Token};
pub use fetch::archive::{archive_names, archives, holds};
pub(crate) use fetch::download::tried_again;
pub use fetch::http::{HttpClient, HttpError};
pub use fetch::source::Sources;
pub use fetch::{FetchError, Fetched, fetch};
pub use files::FileError;
pub use lock::command::{LockAction, LockCommand, LockCommandError, LockDiffArguments, SolveArguments};
pub use lock::diff::{Change, ChangeKind, Download, LockDiff, MinorChange, Package, PlatformDiff, compare};
pub use lock::question::{check_glibc, check_spec, question};
pub use lock::solve::{SolveError, resolve};
pub use lock::{LockError, check_lock, estimate_bytes, lock_urls, normalise_lock};
pub use progress::show::{LINE_EVERY, Style, shown};
pub use progress::{Meter, Reading, quarters};
pub(crate) use serve::bounded;
pub use serve::{Shelf, serve_peers_on};

/// The marker in a finished environment: its last file to be written. A directory without it is not an environment.
pub const ENVIRONMENT_MARKER: &str = ".flux-distribute.json";

/// What to do about credentials in a URL, for the end of a sentence.
pub(crate) fn credentials_remedy() -> String {
    let (secret, key) = (crate::api::SECRET_PACKAGES, crate::api::SECRET_PACKAGES_CREDENTIALS_KEY);
    format!(
        "write it without them (a file that needs one in a query has to be put elsewhere), and put them into Secret {secret}, key {key}: {{\"HOST\": {{\"CondaToken\": \"TOKEN\"}}}}, or \
         {{\"BasicHTTP\": {{\"username\": \"USER\", \"password\": \"PASSWORD\"}}}}"
    )
}

/// `url` as it may be shown, if what asks for it would find a credential in it: a parser of URLs takes more for one than whoever
/// reads the text, such as `https:///USER:PASSWORD@HOST/`.
pub(crate) fn with_hidden_credentials(url: &str) -> Option<String> {
    let url = url::Url::parse(url).ok()?;
    (fetch::credentials::stripped(&url) != url).then(|| fetch::http::shown(url.as_str()))
}

/// The conda platform of the machine this runs on, such as `linux-64`.
pub fn native_platform() -> &'static str {
    crate::host::facts::platform(std::env::consts::ARCH).unwrap_or("linux-unknown")
}
