//! What a test needs and a machine may lack, and the one way for a test to end early: [`skips_without`], or [`skip`].
//!
//! Both print a line `skipped: CRATE::TEST: needs NEED: REASON`, which `scripts/summary.py` counts. The environment variable
//! `REQUIRE` lists needs, separated by commas, that this machine is known to have: then the test fails instead.

#![allow(dead_code, reason = "each test program takes what it needs")]
#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
};

/// What a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The test runs as root.
    Root,
    /// Root may make namespaces and mounts.
    Namespaces,
    /// Root may make cgroups in each hierarchy.
    Cgroups,
    /// Root may look into the root directory of process 1.
    Process1,
    /// A file can be made into an ext4 file system and mounted.
    Disk,
    /// Root may mount a file system as FUSE does for a user.
    Fuse,
    /// The kernel can forbid to execute memory (Linux 6.3).
    MemfdNoexec,
    /// Flux is at [`flux_prefix`].
    Flux,
    /// That Flux has the scheduler Fluxion, and loads it.
    Fluxion,
    /// `KUBEBUILDER_ASSETS` names a directory with etcd and kube-apiserver.
    ApiServer,
    /// `KUBECTL` or PATH leads to kubectl.
    Kubectl,
    /// `HELM` or PATH leads to helm.
    Helm,
    /// `PROMETHEUS` and `PROMTOOL`, or PATH, lead to prometheus and promtool.
    Prometheus,
    /// systemd runs, and `FLUX_DISTRIBUTE_TEST_SYSTEMD` permits to change its units.
    Systemd,
    /// `FLUX_TEST_CHANNEL` names a conda channel with flux-core, flux-sched and mpich.
    Channel,
    /// That channel is a directory of this machine.
    ChannelDirectory,
    /// `FLUX_DISTRIBUTE_CHAOS` asks for the fault suite, which takes up to an hour.
    Chaos,
}

impl Need {
    const ALL: [Self; 17] = [
        Self::Root,
        Self::Namespaces,
        Self::Cgroups,
        Self::Process1,
        Self::Disk,
        Self::Fuse,
        Self::MemfdNoexec,
        Self::Flux,
        Self::Fluxion,
        Self::ApiServer,
        Self::Kubectl,
        Self::Helm,
        Self::Prometheus,
        Self::Systemd,
        Self::Channel,
        Self::ChannelDirectory,
        Self::Chaos,
    ];

    /// Its name in `REQUIRE` and in the line of a test that lacks it.
    pub fn name(self) -> String {
        let words = format!("{self:?}").chars().fold(String::new(), |words, letter| {
            let hyphen = if letter.is_uppercase() && !words.is_empty() { "-" } else { "" };
            format!("{words}{hyphen}{}", letter.to_ascii_lowercase())
        });
        if self == Self::ApiServer { words.replace('-', "") } else { words }
    }

    /// Why this machine does not have it; None if it does.
    fn lacking(self) -> Option<String> {
        let unless = |is_there: bool, reason: &str| (!is_there).then(|| reason.to_owned());
        match self {
            Self::Root => {
                unless(fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0), "the test does not run as root")
            }
            Self::Namespaces => Self::Root.lacking().or_else(|| NAMESPACES.get_or_init(namespaces_lacking).clone()),
            Self::Cgroups => Self::Root.lacking().or_else(|| CGROUPS.get_or_init(cgroups_lacking).clone()),
            Self::Process1 => {
                let error = fs::read_dir("/proc/1/root/").err()?;
                Some(format!("the root directory of process 1 can't be read: {error}"))
            }
            // Only an attempt shows it: the test makes it, and calls `skip`.
            Self::Disk => Self::Namespaces.lacking(),
            Self::Fuse => Self::Namespaces
                .lacking()
                .or_else(|| unless(Path::new("/dev/fuse").exists(), "this machine has no /dev/fuse")),
            Self::MemfdNoexec => {
                unless(Path::new("/proc/sys/vm/memfd_noexec").exists(), "this kernel has no vm.memfd_noexec")
            }
            Self::Flux => {
                let prefix = flux_prefix();
                let is_there = prefix.join("bin/flux").is_file();
                unless(
                    is_there,
                    &format!("there is no Flux in {}; name another place by FLUX_PREFIX", prefix.display()),
                )
            }
            Self::Fluxion => Self::Flux.lacking().or_else(|| {
                let prefix = flux_prefix();
                let module = prefix.join("lib/flux/modules/sched-fluxion-qmanager.so");
                unless(
                    module.is_file() && loads_fluxion(&prefix),
                    &format!("the Flux in {} has no Fluxion, or does not load it", prefix.display()),
                )
            }),
            Self::ApiServer => {
                let assets = env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
                let is_there = assets.is_some_and(|assets| {
                    ["etcd", "kube-apiserver"].iter().all(|program| assets.join(program).is_file())
                });
                unless(is_there, "KUBEBUILDER_ASSETS names no directory with etcd and kube-apiserver")
            }
            Self::Kubectl => unless(kubectl().is_some(), "there is no kubectl in PATH; name another place by KUBECTL"),
            Self::Helm => unless(helm().is_some(), "there is no helm in PATH; name another place by HELM"),
            Self::Prometheus => unless(
                prometheus().is_some() && promtool().is_some(),
                "there are no prometheus and promtool in PATH; name other places by PROMETHEUS and PROMTOOL",
            ),
            Self::Systemd => {
                let is_allowed = env::var_os("FLUX_DISTRIBUTE_TEST_SYSTEMD").is_some();
                unless(Path::new("/run/systemd/system").is_dir(), "systemd does not run here").or_else(|| {
                    unless(is_allowed, "FLUX_DISTRIBUTE_TEST_SYSTEMD=1 permits to change the units of this machine")
                })
            }
            Self::Channel => unless(
                env::var_os("FLUX_TEST_CHANNEL").is_some(),
                "FLUX_TEST_CHANNEL names no channel with flux-core, flux-sched and mpich",
            ),
            Self::ChannelDirectory => Self::Channel.lacking().or_else(|| {
                let is_directory = channel().is_some_and(|channel| Path::new(&channel).is_dir());
                unless(is_directory, "FLUX_TEST_CHANNEL is not a directory")
            }),
            Self::Chaos => {
                let is_asked = env::var_os("FLUX_DISTRIBUTE_CHAOS").is_some_and(|value| !value.is_empty());
                unless(is_asked, "`make chaos` runs the fault suite")
            }
        }
    }
}

/// What a test with simulated nodes needs.
pub const NODES: [Need; 2] = [Need::Namespaces, Need::Cgroups];

/// What a test with simulated nodes and a real Flux needs.
pub const FLUX_NODES: [Need; 3] = [Need::Namespaces, Need::Cgroups, Need::Flux];

static NAMESPACES: OnceLock<Option<String>> = OnceLock::new();
static CGROUPS: OnceLock<Option<String>> = OnceLock::new();

/// Whether the machine lacks one of `needs`: then the skip is printed, and the test has to return.
///
/// # Panics
/// If `REQUIRE` lists the missing need.
pub fn skips_without(needs: impl IntoIterator<Item = Need>) -> bool {
    let found = needs.into_iter().find_map(|need| Some((need, need.lacking()?)));
    if let Some((need, reason)) = &found {
        skip(*need, reason);
    }
    found.is_some()
}

/// Prints that the test of this thread ends early, for a need that only an attempt could tell. The test has to return.
///
/// # Panics
/// If `REQUIRE` lists `need`.
pub fn skip(need: Need, reason: &str) {
    let required = env::var("REQUIRE").unwrap_or_default();
    assert!(!is_required(need, &required), "REQUIRE lists {}, but {reason}", need.name());
    let test = thread::current().name().unwrap_or("?").to_owned();
    let line = format!("skipped: {}::{test}: needs {}: {}\n", env!("CARGO_CRATE_NAME"), need.name(), reason.trim());
    // In one write: other tests print beside this one.
    eprint!("{line}");
}

/// Whether `required`, names that are separated by commas, has this one.
///
/// # Panics
/// If it has a name that is unknown.
pub fn is_required(need: Need, required: &str) -> bool {
    let known: Vec<String> = Need::ALL.map(Need::name).into();
    let mut names = required.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.clone().for_each(|name| {
        assert!(known.iter().any(|known| known == name), "REQUIRE lists {name}; known are {}", known.join(","));
    });
    names.any(|name| name == need.name())
}

/// Where the Flux of this machine is: `FLUX_PREFIX`, or /opt/flux.
pub fn flux_prefix() -> PathBuf {
    env::var_os("FLUX_PREFIX").unwrap_or_else(|| "/opt/flux".into()).into()
}

/// Flux starts Fluxion by a script in its own configuration directory, without which it loads sched-simple.
fn loads_fluxion(prefix: &Path) -> bool {
    let asked = Command::new(prefix.join("bin/flux")).args(["config", "builtin", "confdir"]).output();
    let directory = asked.map(|asked| String::from_utf8_lossy(&asked.stdout).trim().to_owned());
    directory.is_ok_and(|directory| Path::new(&directory).join("rc1.d/01-sched-fluxion").exists())
}

/// The channel that `FLUX_TEST_CHANNEL` names.
pub fn channel() -> Option<String> {
    env::var("FLUX_TEST_CHANNEL").ok()
}

/// The program that `KUBECTL` names, or else the one in PATH.
pub fn kubectl() -> Option<PathBuf> {
    program("KUBECTL", "kubectl")
}

/// The program that `HELM` names, or else the one in PATH.
pub fn helm() -> Option<PathBuf> {
    program("HELM", "helm")
}

/// The program that `PROMETHEUS` names, or else the one in PATH.
pub fn prometheus() -> Option<PathBuf> {
    program("PROMETHEUS", "prometheus")
}

/// The program that `PROMTOOL` names, or else the one in PATH.
pub fn promtool() -> Option<PathBuf> {
    program("PROMTOOL", "promtool")
}

fn program(variable: &str, name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).map(|directory| directory.join(name));
    let candidates = env::var_os(variable).map(PathBuf::from).into_iter();
    candidates.chain(in_path.collect::<Vec<_>>()).find(|program| program.is_file())
}

fn namespaces_lacking() -> Option<String> {
    let mut command = Command::new("unshare");
    command.args([
        "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--fork", "mount", "-t", "tmpfs", "probe", "/tmp",
    ]);
    match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Some(format!("root can't make namespaces and mounts: {said}"))
        }
        Err(error) => Some(format!("unshare: {error}")),
    }
}

fn cgroups_lacking() -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mut hierarchies = mounts.lines().filter_map(|line| {
        let fields: Vec<_> = line.split(' ').collect();
        matches!(fields[2], "cgroup" | "cgroup2").then(|| PathBuf::from(fields[1]))
    });
    let Some(first) = hierarchies.next() else { return Some("no cgroup hierarchy is mounted".to_owned()) };
    std::iter::once(first).chain(hierarchies).find_map(|hierarchy| {
        let probe = hierarchy.join(format!("flux-distribute-probe-{}", std::process::id()));
        let error = fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).err()?;
        Some(format!("root can't make cgroups in {}: {error}", hierarchy.display()))
    })
}
