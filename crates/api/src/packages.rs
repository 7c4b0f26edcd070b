use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::rules::{GLIBC, HAS_CREDENTIALS, LONGEST_URL, MOST_CHANNELS, PLATFORM, SHA256, URL, no_credentials};

/// The default channel.
pub const DEFAULT_CHANNEL: &str = "https://conda.anaconda.org/conda-forge";
/// The default specs. mpich because flux-core's conda package depends on an MPI and would otherwise pick one itself.
pub const DEFAULT_SPECS: [&str; 3] = ["flux-core", "flux-sched", "mpich"];
/// The `__glibc` that the solver assumes. A fixed one, so that the answer does not depend on where the planner runs.
pub const DEFAULT_GLIBC: &str = "2.28";

/// Where the packages come from: conda channels (the default), a lock, or a bundle.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Packages {
    /// Conda channels, as http, https or file URLs. The first channel that has a package wins. Default: conda-forge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MOST_CHANNELS), inner(regex(pattern = URL), length(max = LONGEST_URL)))]
    #[x_kube(validation = Rule::new(format!("self.all(url, {})", no_credentials("url"))).message(HAS_CREDENTIALS))]
    pub channels: Vec<String>,
    /// What to install from the channels, as conda match specs. Default: `flux-core`, `flux-sched`, `mpich`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub specs: Vec<String>,
    /// Conda platforms to resolve the packages for. Default: the platforms of the nodes that are there when the planner
    /// resolves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(regex(pattern = PLATFORM)))]
    pub platforms: Vec<String>,
    /// Oldest glibc of all nodes, which the solver assumes as `__glibc`. Default: 2.28.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = GLIBC))]
    pub glibc: Option<String>,
    /// A ready lock in place of channels and specs: the output of `flux-distribute lock`, a pixi.lock, or a conda
    /// `@EXPLICIT` list with sha256 digests. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<String>,
    /// Any word, such as a date. A changed word makes the planner resolve again; otherwise it does so only if channels,
    /// specs, platforms or glibc change. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refresh: Option<String>,
    /// Where archives are fetched in place of the channels that the lock names: an http, https or file URL below which the
    /// channels' own paths are found, such as `https://mirror.example.org/conda` for `https://…/conda-forge/linux-64/…`.
    /// Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = URL), length(max = LONGEST_URL))]
    #[x_kube(validation = Rule::new(no_credentials("self")).message(HAS_CREDENTIALS))]
    pub mirror: Option<String>,
    /// Send the credentials in Secret `flux-packages-access` to http URLs too, where everybody on the way can read them.
    /// Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_http_credentials: bool,
    /// How many environments a node keeps, including the one in use. One that the broker or a job uses is never removed.
    /// Default: 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = u32::MAX))]
    pub keep: Option<u32>,
    /// A bundle in place of a channel, for sites without internet or with their own build of Flux. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<BundleSource>,
}

/// Where a bundle is, and its sha256.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct BundleSource {
    /// URL of the bundle: `https://`, `http://`, or `file://`, which is a path on each node's host.
    #[schemars(regex(pattern = URL), length(max = LONGEST_URL))]
    #[x_kube(validation = Rule::new(no_credentials("self")).message(HAS_CREDENTIALS))]
    pub url: String,
    /// sha256 of the file, 64 hex digits, as `flux-distribute bundle create` prints it.
    #[schemars(regex(pattern = SHA256))]
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
