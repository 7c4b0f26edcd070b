//! Checks whether this host can run a broker, and where. The check leaves no trace; [`assess`] is pure.

mod look;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use super::Brokers;
use api::Resources;
use host::{
    Root, facts,
    port::{self, PortUse},
    room::{Room, room},
};
use hostapi::{Preflight, PreflightOrder, Refusal};

pub use look::{cgroup_is_writable, examine};

/// What was observed on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// The prefix at which this host is claimed already.
    pub claimed: Option<PathBuf>,
    /// Candidates for the prefix, in order.
    pub places: Vec<Place>,
    /// The process that has the brokers' port.
    pub port: PortUse,
    /// Machine name from uname(2), such as `x86_64`.
    pub machine: String,
    /// Version of the host's glibc; None if it has none.
    pub glibc: Option<String>,
    /// True if the host has musl.
    pub musl: bool,
    /// True if systemd can supervise the broker.
    pub systemd: bool,
    /// True if a writable cgroup file system is mounted.
    pub cgroup_writable: bool,
    /// True if locked memory can be made unlimited, which RDMA needs.
    pub memlock: bool,
    /// Cores and GPUs.
    pub resources: Resources,
    /// kubelet's CPU manager has policy `static`.
    pub static_cpus: bool,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Content of /proc/sys/kernel/random/boot_id.
    pub boot_id: String,
}

/// A directory that could be the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The directory, which need not exist.
    pub prefix: PathBuf,
    /// Why it can't be the prefix; None if it can.
    pub trouble: Option<String>,
    /// A shortcoming that is accepted because this host is claimed there already.
    pub warning: Option<String>,
    /// Space on its file system.
    pub room: Room,
}

impl Place {
    /// A place that has not been examined yet.
    fn of(prefix: PathBuf) -> Self {
        Self { prefix, trouble: None, warning: None, room: Room::default() }
    }
}

/// Looks at the host, and decides.
///
/// # Errors
/// What prevents a broker on this host, with the remedy.
pub fn preflight(root: &Root, brokers: &dyn Brokers, order: &PreflightOrder) -> Result<Preflight, Refusal> {
    assess(examine(root, brokers, order)?, order)
}

/// Decides from what was observed. Checks first what can't be changed about a host.
///
/// # Errors
/// What stands against a broker on this host, with the remedy.
pub fn assess(seen: Observed, order: &PreflightOrder) -> Result<Preflight, Refusal> {
    let platform = facts::platform(&seen.machine).ok_or_else(|| {
        Refusal::new(format!(
            "conda's Flux is built for x86_64 and aarch64, and this host is {}; exclude it with spec.nodes.selector",
            seen.machine
        ))
    })?;
    let glibc = glibc(&seen)?;
    if !seen.systemd && !seen.cgroup_writable {
        return Err(Refusal::new(
            "can't make a cgroup for a broker: systemd does not run here, and no writable cgroup file system is \
             mounted under /sys/fs/cgroup; mount one, or run the pod privileged",
        ));
    }
    if seen.resources.cores == 0 {
        return Err(Refusal::new("can't find any core under /sys/devices/system/cpu; is /sys mounted on this host?"));
    }
    let mut warnings = Vec::new();
    let prefix = place(&seen, order, &mut warnings)?;
    port::check(&seen.port, order.endpoint.port())?;
    if !seen.memlock {
        warnings.push("locked memory can't be made unlimited, so jobs that use RDMA can fail".to_owned());
    }
    if seen.boot_id.is_empty() {
        warnings.push("this host has no boot id, so its reboots may go unnoticed".to_owned());
    }
    Ok(Preflight {
        prefix,
        resources: seen.resources,
        static_cpus: seen.static_cpus,
        memory_mib: seen.memory_mib,
        platform: platform.to_owned(),
        glibc,
        boot_id: seen.boot_id,
        systemd: seen.systemd,
        warnings,
    })
}

fn glibc(seen: &Observed) -> Result<String, Refusal> {
    seen.glibc.clone().ok_or_else(|| {
        let instead = if seen.musl { " (it has musl instead)" } else { "" };
        Refusal::new(format!(
            "this host has no glibc{instead}, and Flux needs the host's own; use nodes with a distribution that has it \
             (not Alpine, not Talos), or exclude this one with spec.nodes.selector"
        ))
    })
}

fn place(seen: &Observed, order: &PreflightOrder, warnings: &mut Vec<String>) -> Result<PathBuf, Refusal> {
    if let (Some(claimed), Some(wanted)) = (&seen.claimed, &order.prefix)
        && claimed != wanted
    {
        warnings.push(format!(
            "prefix {} takes effect once this host has been cleaned; until then it uses {}",
            wanted.display(),
            claimed.display()
        ));
    }
    let usable: Vec<&Place> = seen.places.iter().filter(|place| place.trouble.is_none()).collect();
    let Some(first) = usable.first() else {
        let troubles: Vec<String> = seen
            .places
            .iter()
            .map(|place| format!("{}: {}", place.prefix.display(), place.trouble.as_deref().unwrap_or_default()))
            .collect();
        return Err(Refusal::new(format!(
            "this host has no place for Flux ({}); set spec.prefix to a directory on a local disk that can be written \
             and executed",
            troubles.join("; ")
        )));
    };
    warnings.extend(first.warning.clone());
    // Installed packages need no more room: a full disk must not exclude a running node.
    if order.need_bytes == 0 {
        return Ok(first.prefix.clone());
    }
    if let Some(roomy) = usable.iter().find(|place| room(&place.prefix, place.room, order.need_bytes).is_ok()) {
        return Ok(roomy.prefix.clone());
    }
    room(&first.prefix, first.room, order.need_bytes)?;
    Ok(first.prefix.clone())
}

/// The places to look at: where the host is claimed; else the one asked for; else the candidates.
fn candidates(claimed: Option<&Path>, order: &PreflightOrder) -> Vec<PathBuf> {
    match claimed.or(order.prefix.as_deref()) {
        Some(prefix) => vec![prefix.to_owned()],
        None => api::PREFIX_CANDIDATES.into_iter().map(PathBuf::from).collect(),
    }
}
