//! Why a lock can't be used.

use rattler_lock::ParseCondaLockError;

/// A ConfigMap holds at most 1 MiB, and `flux-packages` holds two sets while an upgrade waits for its epoch.
pub const MAX_LOCK_BYTES: usize = 480 << 10;
/// Why a lock can't be used. Retrying doesn't help; the user must supply another lock.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The text is not a lock.
    #[error(
        "the lock can't be read; it must be the YAML of a rattler or pixi lock file, or an @EXPLICIT list of conda"
    )]
    Parse(#[source] Box<ParseCondaLockError>),
    /// A line of an `@EXPLICIT` list can't be read.
    #[error("line {line} of the @EXPLICIT list is not the URL of a conda package")]
    Line {
        /// The line's number, counted from 1.
        line: usize,
    },
    /// The lock has no environment `default`, and not exactly one environment under another name.
    #[error("the lock needs an environment `default`, or exactly one environment of another name; it has {there}")]
    NoEnvironment {
        /// The environments of the lock.
        there: String,
    },
    /// An `@EXPLICIT` list doesn't name its platform.
    #[error("the @EXPLICIT list names no platform; add a line such as `# platform: linux-64` above its packages")]
    NoPlatform,
    /// The lock has no packages for a platform.
    #[error("the lock has no packages for platform {platform}; it has {there}")]
    Platform {
        /// The platform that was asked for.
        platform: String,
        /// The platforms of the lock.
        there: String,
    },
    /// The lock names a platform that no node can have.
    #[error("the lock names the platform {platform}, which is not one of conda's platforms for Linux such as linux-64")]
    NotAPlatform {
        /// The platform as the lock writes it.
        platform: String,
    },
    /// A package is listed for one platform but built for another.
    #[error("the lock's package {name} is built for {platform}, which is not the platform that the lock lists it for")]
    ForeignPackage {
        /// The package's name.
        name: String,
        /// The platform it is built for, as the lock writes it.
        platform: String,
    },
    /// A package comes from PyPI.
    #[error(
        "the lock's package {name} comes from PyPI, but only conda packages can be installed; \
         lock an environment without pypi-dependencies"
    )]
    PyPi {
        /// The package's name.
        name: String,
    },
    /// A package must be built before it can be installed.
    #[error("the lock's package {name} is not a built conda package (.conda or .tar.bz2)")]
    Unsupported {
        /// The package's name.
        name: String,
    },
    /// A package has no sha256, so its archive can't be verified.
    #[error(
        "the lock's package {name} has no sha256, and md5 is not enough; \
         `conda list --explicit --sha256` and `pixi project export conda-explicit-spec` write it"
    )]
    NoSha256 {
        /// The package's name.
        name: String,
    },
    /// A digest has the wrong length or isn't hexadecimal.
    #[error("the lock's package {name} has the {field} `{found}`, which is too short, too long, or not hex digits")]
    NotADigest {
        /// The package's name.
        name: String,
        /// `sha256` or `md5`.
        field: &'static str,
        /// The digest as the lock writes it.
        found: String,
    },
    /// An environment lists a package that has no entry.
    #[error(
        "the lock lists the package {name} for an environment but has no entry for it; the end of the lock may be missing"
    )]
    Missing {
        /// The package's name.
        name: String,
    },
    /// A package is listed more than once.
    #[error("the lock lists the package {name} twice")]
    Twice {
        /// The package's name.
        name: String,
    },
    /// A package's URL is unusable.
    #[error("the lock's package {name} has no usable URL")]
    Location {
        /// The package's name.
        name: String,
        /// rattler's error.
        #[source]
        source: Box<rattler_lock::ConversionError>,
    },
    /// A package's URL has a scheme that can't be fetched.
    #[error("the lock's package {name} is not at an http, https or file URL")]
    Scheme {
        /// The package's name.
        name: String,
    },
    /// Python's packages would be installed outside of the environment, or among the records of packages.
    #[error(
        "the lock's package {name} has the python_site_packages_path `{found}`, which is not a path inside of the \
         environment such as lib/python3.13/site-packages"
    )]
    SitePackages {
        /// The package's name.
        name: String,
        /// The path as the lock writes it.
        found: String,
    },
    /// A URL has credentials. The lock is published in a ConfigMap, which many users may read.
    #[error("the lock has credentials in the URL {url}; {}", credentials_remedy())]
    Credentials {
        /// The URL without its credentials.
        url: String,
    },
    /// The lock is too big for a ConfigMap.
    #[error(
        "the lock has {bytes} bytes, but only {MAX_LOCK_BYTES} are allowed, because it is published in a ConfigMap; \
         leave out the platforms and environments that no node needs"
    )]
    TooLarge {
        /// The lock's size in bytes.
        bytes: usize,
    },
    /// rattler can't serialize the lock, which should not happen.
    #[error("the lock can't be written as YAML")]
    Write(#[source] std::io::Error),
}

/// What to do about credentials in a URL, for the end of a sentence.
pub fn credentials_remedy() -> String {
    let (secret, key) = (api::SECRET_PACKAGES, api::SECRET_PACKAGES_CREDENTIALS_KEY);
    format!(
        "write it without them (a file that needs one in a query has to be put elsewhere), and put them into Secret {secret}, key {key}: {{\"HOST\": {{\"CondaToken\": \"TOKEN\"}}}}, or \
         {{\"BasicHTTP\": {{\"username\": \"USER\", \"password\": \"PASSWORD\"}}}}"
    )
}
