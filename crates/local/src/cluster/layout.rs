//! The state directory, and the two records that suffice to find and take down everything the cluster made.

use std::{
    fs::File,
    io::Write,
    net::Ipv4Addr,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::process::Command;

use super::kind::Kind;
use crate::error::{Context, LocalError};
use api::{PrefixError, check_prefix, check_prefix_characters};
use base::redact::LOG_VARIABLE;

/// Overrides [`DEFAULT_DIRECTORY`], so that several local clusters can be up on one machine.
pub(crate) const DIRECTORY_VARIABLE: &str = "FLUX_DISTRIBUTE_LOCAL_DIR";
/// For tests: a program that each node runs as its agent instead of ours.
pub(crate) const AGENT_VARIABLE: &str = "FLUX_DISTRIBUTE_LOCAL_AGENT";
const DEFAULT_DIRECTORY: &str = "/var/lib/flux-distribute-local";
/// How the name of a record begins until it is whole.
const UNFINISHED: &str = ".flux-distribute-";
/// How many random characters follow.
const RANDOM: usize = 6;
/// The parent cgroup of all local clusters.
const CGROUP: &str = "flux-distribute-local";

/// How long a `down` waits for another one: longer than that one waits for processes that exit slowly.
const LOCK_LIMIT: Duration = Duration::from_mins(1);

/// Paths in the state directory.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    directory: PathBuf,
}

impl Layout {
    pub(crate) fn from_env() -> Result<Self, LocalError> {
        let directory = match std::env::var_os(DIRECTORY_VARIABLE) {
            Some(given) if !given.is_empty() => PathBuf::from(given),
            _ => PathBuf::from(DEFAULT_DIRECTORY),
        };
        // `down` removes this directory and everything in it.
        let refused = |reason: PrefixError| LocalError::Usage(format!("{DIRECTORY_VARIABLE}: {reason}"));
        check_prefix(&directory).and_then(|()| check_prefix_characters(&directory)).map_err(refused)?;
        Ok(Self { directory })
    }

    /// True unless [`DIRECTORY_VARIABLE`] names another directory than the default one.
    pub(crate) fn is_default(&self) -> bool {
        self.directory == Path::new(DEFAULT_DIRECTORY)
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }
    pub(crate) fn cluster(&self) -> PathBuf {
        self.directory.join("cluster.json")
    }
    pub(crate) fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }
    pub(crate) fn daemon_log(&self) -> PathBuf {
        self.directory.join("daemon.log")
    }
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }
    /// The stand-in for the agent's container image: the files that each simulated pod sees.
    pub(crate) fn image(&self) -> PathBuf {
        self.directory.join("image")
    }
    /// A copy of our own executable, made by `flux-distribute local up`: a rebuilt one must not change a running cluster.
    pub(crate) fn executable(&self) -> PathBuf {
        self.image().join("flux-distribute")
    }
    /// The command of a helper process, which tells on stdout that it is ready. It gets no environment but ours and no
    /// directory that a user may want to remove.
    pub(crate) fn helper(&self, words: &[&str], log: File) -> Command {
        let mut command = Command::new(self.executable());
        command.arg("local").args(words).env_clear().env(DIRECTORY_VARIABLE, &self.directory);
        command.envs(std::env::var_os(LOG_VARIABLE).map(|level| (LOG_VARIABLE, level)));
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        command
    }
    /// The API server's files.
    pub(crate) fn api(&self) -> PathBuf {
        self.directory.join("api")
    }
    pub(crate) fn nodes(&self) -> PathBuf {
        self.directory.join("nodes")
    }
    pub(crate) fn node(&self, name: &str) -> PathBuf {
        self.nodes().join(name)
    }
    pub(crate) fn node_root(&self, name: &str) -> PathBuf {
        self.node(name).join("root")
    }
    pub(crate) fn node_kind(&self, name: &str) -> PathBuf {
        self.node(name).join("kind.json")
    }
    pub(crate) fn node_log(&self, name: &str) -> PathBuf {
        self.node(name).join("node.log")
    }
    pub(crate) fn agent_log(&self, name: &str) -> PathBuf {
        self.node(name).join("agent.log")
    }
    /// The output of a pod on that node.
    pub(crate) fn pod_log(&self, name: &str, namespace: &str, pod: &str) -> PathBuf {
        self.node(name).join("pods").join(format!("{namespace}_{pod}.log"))
    }

    /// What a simulated node pretends to be where that differs from the computer that it runs on; the default if nothing
    /// was recorded in [`Layout::node_kind`].
    ///
    /// # Errors
    /// That file is damaged.
    pub(crate) fn kind(&self, name: &str) -> Result<Kind, LocalError> {
        Ok(read_json(&self.node_kind(name))?.unwrap_or_default())
    }

    /// True if nothing of anybody else can be in the directory: it does not exist, or holds nothing but records that a killed `up` left
    /// unfinished.
    ///
    /// # Errors
    /// It can't be read, or is not a directory.
    pub(crate) fn is_unused(&self) -> Result<bool, LocalError> {
        let failed = || format!("can't read {}", self.directory.display());
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
            entries => entries.context(failed)?,
        };
        for entry in entries {
            let entry = entry.context(failed)?;
            let name = entry.file_name();
            let random = name.to_str().and_then(|name| name.strip_prefix(UNFINISHED));
            let is_record =
                random.is_some_and(|random| random.len() == RANDOM) && entry.file_type().context(failed)?.is_file();
            if !is_record {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads the record of the cluster, [`Layout::cluster`].
    ///
    /// # Errors
    /// [`LocalError::NotUp`] if there is none, another error if it is damaged.
    pub(crate) fn load(&self) -> Result<Cluster, LocalError> {
        read_json(&self.cluster())?.ok_or(LocalError::NotUp)
    }

    /// True if the cluster with this token exists and no `down` is removing it: waits for one that is running.
    pub(crate) fn is_current(&self, token: &str) -> bool {
        let _lock = self.lock();
        self.load().is_ok_and(|found| found.token == token)
    }

    /// Locks the directory. A `down` holds this lock, and so does a daemon until it has entered its cgroup: otherwise a
    /// `down` could find no process during that time, and a daemon whose `up` was killed would survive or create the
    /// cgroup again. The lock is on the directory itself, since a lock file could be created again while the directory
    /// is being removed.
    ///
    /// # Errors
    /// [`LocalError::NotUp`] if the directory doesn't exist; another process still holds the lock after [`LOCK_LIMIT`].
    pub(crate) fn lock(&self) -> Result<Flock<File>, LocalError> {
        let failed = || format!("can't lock {}", self.directory.display());
        let end = Instant::now() + LOCK_LIMIT;
        loop {
            let directory = match File::open(&self.directory) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(LocalError::NotUp),
                opened => opened.context(failed)?,
            };
            match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                Err((_, Errno::EWOULDBLOCK)) => {
                    return Err(LocalError::Busy(self.directory.clone()));
                }
                Err((_, errno)) => return Err(errno).context(failed),
            }
        }
    }
}

/// The settings chosen at `up`, written before the first side effect. Contains the API's token, so its mode is 0600.
#[derive(Serialize, Deserialize, Clone)]
pub(crate) struct Cluster {
    /// Name of the bridge, from which the names of the cgroup and the links are derived.
    pub(crate) bridge: String,
    /// Network address of the nodes' /16.
    pub(crate) network: Ipv4Addr,
    pub(crate) api_port: u16,
    pub(crate) proxy_port: u16,
    /// Bearer token of the API.
    pub(crate) token: String,
    /// Directory with etcd and kube-apiserver; None: the embedded API server.
    pub(crate) assets: Option<PathBuf>,
    /// Mounted read-only into each node at the same path: the machine's bundles and channels.
    pub(crate) shown: Vec<PathBuf>,
    /// `spec.prefix`, if it is set.
    pub(crate) prefix: Option<String>,
    /// Each pod runs `image/agent` instead of our own executable.
    pub(crate) foreign_agent: bool,
    /// By how many seconds the nodes' clocks are wrong, some behind and some ahead.
    pub(crate) clocks_off: i64,
    /// The machine's boot id, and its sysctls before any agent raised them for the whole machine.
    pub(crate) boot_id: String,
    pub(crate) sysctls: std::collections::BTreeMap<String, String>,
}

impl Cluster {
    /// Prefix length of the nodes' network.
    pub(crate) const PREFIX: u8 = 16;

    /// The machine's own address on the bridge.
    pub(crate) fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network) + 1)
    }
    pub(crate) fn address(&self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network) + 10 + number)
    }
    pub(crate) fn holds(&self, address: Ipv4Addr) -> bool {
        address.octets()[..2] == self.network.octets()[..2]
    }
    pub(crate) fn cgroup(&self) -> String {
        format!("{CGROUP}/{}", self.bridge)
    }
    pub(crate) fn daemon_cgroup(&self) -> String {
        format!("{}/daemon", self.cgroup())
    }
    pub(crate) fn node_cgroup(&self, name: &str) -> String {
        format!("{}/{name}", self.cgroup())
    }
    pub(crate) fn pod_cgroup(&self, name: &str, pod: &str) -> String {
        format!("{}/kubepods/pod{pod}", self.node_cgroup(name))
    }
    /// The machine's end of a node's veth pair.
    pub(crate) fn link(&self, number: u32) -> String {
        format!("{}n{number}", self.bridge)
    }
    pub(crate) fn server(&self) -> String {
        format!("https://{}:{}", self.gateway(), self.api_port)
    }
    pub(crate) fn proxy(&self) -> String {
        format!("http://{}:{}", self.gateway(), self.proxy_port)
    }
}

/// The number in a node's name.
pub(crate) fn node_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("node")?;
    let number: u32 = digits.parse().ok()?;
    (number > 0 && number.to_string() == digits).then_some(number)
}

pub(crate) fn node_name(number: u32) -> String {
    format!("node{number}")
}

pub(crate) fn make_private_directory(path: &Path) -> Result<(), LocalError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .context(|| format!("can't make {}", path.display()))
}

/// Writes a file that only root can read, atomically. Without `replace`, an existing file is an error.
pub(crate) fn write_private(path: &Path, content: &[u8], replace: bool) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    // tempfile creates files with mode 0600.
    let mut file = tempfile::Builder::new().prefix(UNFINISHED).rand_bytes(RANDOM).tempfile_in(directory)?;
    file.write_all(content)?;
    if replace {
        file.persist(path)?;
    } else {
        file.persist_noclobber(path)?;
    }
    Ok(())
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LocalError> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context(|| format!("can't read {}", path.display())),
    };
    serde_json::from_slice(&text).map(Some).context(|| format!("{} is damaged", path.display()))
}

/// Copies an executable. A hard link would change if the original is rebuilt in place.
pub(crate) fn copy_executable(from: &Path, to: &Path) -> Result<(), LocalError> {
    std::fs::copy(from, to)
        .and_then(|_| std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755)))
        .context(|| format!("can't copy {} to {}", from.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_local_mode_assigns_are_node_names() {
        for (name, number) in [
            ("node1", Some(1)),
            ("node42", Some(42)),
            ("node0", None),
            ("node01", None),
            ("node", None),
            ("../node1", None),
            ("node1/..", None),
        ] {
            assert_eq!(node_number(name), number, "{name}");
        }
    }
}
