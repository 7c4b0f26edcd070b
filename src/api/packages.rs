use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The default channel.
pub const DEFAULT_CHANNEL: &str = "https://conda.anaconda.org/conda-forge";
/// The default specs. mpich because flux-core's conda package depends on an MPI and would otherwise pick one itself.
pub const DEFAULT_SPECS: [&str; 3] = ["flux-core", "flux-sched", "mpich"];
/// The `__glibc` that the solver assumes. A fixed one, so that the answer does not depend on where the planner runs.
pub const DEFAULT_GLIBC: &str = "2.28";

/// Where the packages come from: a conda channel (the default), a lock, or a bundle.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Packages {
    /// Conda channels, the first one wins: http(s) or file URLs. Default: conda-forge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<String>,
    /// What to install, as conda match specs. Default: flux-core, flux-sched, mpich.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub specs: Vec<String>,
    /// Conda platforms that the lock covers. Default: those of the nodes that are there when the planner solves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub platforms: Vec<String>,
    /// The oldest glibc of any node, as the solver's `__glibc`. Default: 2.28.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glibc: Option<String>,
    /// A ready lock (rattler_lock YAML) in place of channels and specs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<String>,
    /// A bundle in place of a channel, for sites without internet or with their own build of Flux.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<BundleSource>,
}

/// Where a bundle is, and what must be in it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BundleSource {
    /// `https://`, `http://`, or `file://` (a path on each node's host).
    pub url: String,
    /// sha256 of the file, 64 hex digits, as `flux-distribute bundle create` prints it.
    pub sha256: String,
}

/// Exactly which packages: what the planner publishes in ConfigMap `flux-packages`, and what every agent installs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum PackageSet {
    /// A resolved lock: URL and sha256 of each package, all platforms.
    Lock {
        /// rattler_lock YAML.
        lock: String,
        /// What was asked when it was solved; a changed question is the only reason to solve again.
        question: String,
    },
    /// A bundle.
    Bundle(BundleSource),
}

impl PackageSet {
    /// The digest that names the set: the first 16 hex digits of sha256 over its content. It is a directory's name on the
    /// host (`envs/<digest>`), so it is kept short: prefixes of conda packages may not be longer than 255 characters.
    pub fn digest(&self) -> String {
        use sha2::{Digest, Sha256};
        match self {
            Self::Lock { lock, .. } => hex::encode(&Sha256::digest(lock.as_bytes())[..8]),
            Self::Bundle(source) => source.sha256.chars().take(16).collect(),
        }
    }
}
