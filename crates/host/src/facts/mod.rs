//! Facts about a host, read from its own files by a process in its namespaces.

mod cores;
mod glibc;
mod gpus;
mod kubelet;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::{sysinfo::sysinfo, utsname::uname};

pub use cores::{Cpu, count_cores, parse_cpu_list};
pub use glibc::{glibc, glibc_version};
pub use gpus::{PciDevice, count_gpus};
pub use kubelet::has_static_cpus;

use super::Root;
use api::Resources;

/// Cores as hwloc counts them, and GPUs.
pub fn resources(root: &Root) -> Resources {
    Resources { cores: cores::cores(root), gpus: gpus::gpus(root) }
}

/// ID of the current boot; empty if the kernel does not show one.
pub fn boot_id(root: &Root) -> String {
    read(root, "/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// Memory in MiB; 0 if unknown.
pub fn memory_mib(root: &Root) -> u64 {
    let text = read(root, "/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default() / 1024
}

/// uname(2)'s name of the machine, such as `x86_64`; empty if unknown.
pub fn machine() -> String {
    uname().map(|name| name.machine().display().to_string()).unwrap_or_default()
}

/// Time since boot, also that in which the machine was suspended, which [`std::time::Instant`] leaves out (sysinfo(2)).
pub fn uptime() -> Duration {
    sysinfo().map(|system| system.uptime()).unwrap_or_default()
}

/// The conda platform for uname(2)'s machine name; None if conda has no Flux for it.
pub fn platform(machine: &str) -> Option<&'static str> {
    match machine {
        "x86_64" => Some("linux-64"),
        "aarch64" => Some("linux-aarch64"),
        _ => None,
    }
}

/// True if systemd runs this host, answers, and has a `systemctl` to control it. `/run/systemd/system` alone may also
/// exist on a host where systemd is only installed.
pub fn systemd(root: &Root) -> bool {
    systemctl(&root.path("/")).is_some()
}

/// The `systemctl` of the host whose root is `root`; None if systemd does not run: it must have booted the host, and answer on
/// its own socket or on D-Bus.
pub fn systemctl(root: &Path) -> Option<PathBuf> {
    let booted = root.join("run/systemd/system").is_dir();
    let answers = ["run/systemd/private", "run/dbus/system_bus_socket"].iter().any(|path| root.join(path).exists());
    program(root, "systemctl").filter(|_| booted && answers)
}

/// A program of the host whose root is `root`, by its name.
pub fn program(root: &Path, name: &str) -> Option<PathBuf> {
    /// Where hosts keep their programs.
    const BIN: [&str; 3] = ["usr/bin", "bin", "run/current-system/sw/bin"];
    BIN.iter().map(|directory| root.join(directory).join(name)).find(|path| path.exists())
}

fn read(root: &Root, path: &str) -> Option<String> {
    Some(fs::read_to_string(root.path(path)).ok()?.trim().to_owned())
}
