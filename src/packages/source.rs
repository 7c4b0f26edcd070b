//! Where the archives of a package set come from.

/// Where archives come from, besides the host's own `pkgs/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sources {
    /// `address:port` of peers, tried in this order before the set's own source.
    pub peers: Vec<String>,
    /// `spec.packages.mirror`: takes the place of a lock's channels.
    ///
    /// `https://mirror/conda` gives `https://mirror/conda/conda-forge/linux-64/x.conda` for
    /// `https://any.host/conda-forge/linux-64/x.conda`: all of the path below the host is kept, user, password, query and
    /// `/t/<token>` are not, since they are meant for the other host. A lock's `file://` URLs and bundles stay as they are.
    pub mirror: Option<String>,
}
