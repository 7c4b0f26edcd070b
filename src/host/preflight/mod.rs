//! Can this host carry a broker, and where? Looking changes nothing that stays; [`decide`] is pure.

mod look;
mod port;
mod room;
#[cfg(test)]
mod tests;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use super::{Brokers, Preflight, PreflightOrder, Refusal, Root};
use crate::api::Resources;

pub use look::{cgroup_is_writable, look};
pub use room::Room;
use room::room;

/// What was seen of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Where this host is claimed already.
    pub claimed: Option<PathBuf>,
    /// The places to try, in order.
    pub places: Vec<Place>,
    /// Which process has the brokers' port.
    pub port: PortUse,
    /// uname(2)'s machine.
    pub machine: String,
    /// glibc's version.
    pub glibc: Option<String>,
    /// The other libc that is there.
    pub musl: bool,
    /// systemd can supervise.
    pub systemd: bool,
    /// A cgroup file system that can be written is mounted.
    pub cgroup_writable: bool,
    /// Locked memory can be made unlimited, as RDMA wants it.
    pub memlock: bool,
    /// Cores and GPUs.
    pub resources: Resources,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// This boot.
    pub boot_id: String,
}

/// A directory that could be the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The directory, there or not.
    pub prefix: PathBuf,
    /// Why it can't be the prefix.
    pub trouble: Option<String>,
    /// What is wrong with it although this host is claimed there already.
    pub warning: Option<String>,
    /// What its file system has.
    pub room: Room,
}

impl Place {
    /// One of which nothing is known yet.
    fn of(prefix: PathBuf) -> Self {
        Self { prefix, trouble: None, warning: None, room: Room::default() }
    }
}

/// Which process has the brokers' port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortUse {
    /// No process.
    Free,
    /// Our own broker.
    Ours,
    /// Another process: pid and name, if it listens there and they are known.
    Taken(Option<(i32, String)>),
    /// It can't be listened on for another reason.
    Unusable(String),
}

/// Looks at the host, and decides.
///
/// # Errors
/// What stands against a broker on this host, with the remedy.
pub fn preflight(root: &Root, brokers: &dyn Brokers, order: &PreflightOrder) -> Result<Preflight, Refusal> {
    decide(look(root, brokers, order)?, order)
}

/// What can't be changed about a host is told first.
///
/// # Errors
/// What stands against a broker on this host, with the remedy.
pub fn decide(seen: Observed, order: &PreflightOrder) -> Result<Preflight, Refusal> {
    let platform = super::facts::platform(&seen.machine).ok_or_else(|| {
        Refusal::new(format!(
            "conda's Flux is built for x86_64 and aarch64, and this host is {}; keep it out by spec.nodes.selector",
            seen.machine
        ))
    })?;
    let glibc = glibc(&seen)?;
    if !seen.systemd && !seen.cgroup_writable {
        return Err(Refusal::new(
            "no cgroup of its own can be made for a broker: systemd does not run here, and no cgroup file system that can \
             be written is mounted under /sys/fs/cgroup; mount one, or run the pod privileged",
        ));
    }
    if seen.resources.cores == 0 {
        return Err(Refusal::new("no core can be seen under /sys/devices/system/cpu; is /sys mounted on this host?"));
    }
    let mut warnings = Vec::new();
    let prefix = place(&seen, order, &mut warnings)?;
    port(&seen.port, order.endpoint.port())?;
    if !seen.memlock {
        warnings.push("locked memory can't be made unlimited, so jobs that use RDMA can fail".to_owned());
    }
    if seen.boot_id.is_empty() {
        warnings.push("this host does not tell its boot id, so a restart of it can be taken for none".to_owned());
    }
    Ok(Preflight {
        prefix,
        resources: seen.resources,
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
             (not Alpine, not Talos), or keep this one out by spec.nodes.selector"
        ))
    })
}

fn place(seen: &Observed, order: &PreflightOrder, warnings: &mut Vec<String>) -> Result<PathBuf, Refusal> {
    if let (Some(claimed), Some(wanted)) = (&seen.claimed, &order.prefix)
        && claimed != wanted
    {
        warnings.push(format!(
            "prefix {} takes effect when this host has been cleaned; until then {} is used",
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
            "there is no place for Flux on this host ({}); set spec.prefix to a directory of a local disk that can be written \
             and executed",
            troubles.join("; ")
        )));
    };
    warnings.extend(first.warning.clone());
    // What is installed already needs no more room: a full disk must not take a running node out.
    if order.need_bytes == 0 {
        return Ok(first.prefix.clone());
    }
    if let Some(roomy) = usable.iter().find(|place| room(&place.prefix, place.room, order.need_bytes).is_ok()) {
        return Ok(roomy.prefix.clone());
    }
    room(&first.prefix, first.room, order.need_bytes)?;
    Ok(first.prefix.clone())
}

/// The refusal if another process listens at `endpoint`, where a broker is to listen. For other problems with the address, the
/// broker's own message is better.
pub fn port_taken(root: &Root, endpoint: SocketAddr) -> Option<Refusal> {
    match port::look(root, endpoint) {
        found @ PortUse::Taken(_) => port(&found, endpoint.port()).err(),
        _ => None,
    }
}

/// Whether `refusal` is [`preflight`]'s for a port that another process has: any user can take a free one.
pub fn is_port_taken(refusal: &Refusal) -> bool {
    refusal.message.starts_with("port ") && refusal.message.contains(TAKEN)
}

const TAKEN: &str = " of this host is taken by ";

fn port(found: &PortUse, port: u16) -> Result<(), Refusal> {
    let remedy = "free it, or set spec.broker.port to another";
    let taken = |who: &str| Err(Refusal::transient(format!("port {port}{TAKEN}{who}; {remedy}")));
    let who = match found {
        PortUse::Free | PortUse::Ours => return Ok(()),
        PortUse::Taken(Some((pid, name))) => return taken(&format!("{name} (pid {pid})")),
        PortUse::Taken(None) => {
            return taken("a process that can't be named (`ss --tcp --bound-inactive --processes` may list it)");
        }
        PortUse::Unusable(why) => format!("can't be listened on: {why}"),
    };
    Err(Refusal::transient(format!("port {port} of this host {who}; {remedy}")))
}

/// The places to look at: where the host is claimed; else the one asked for; else the candidates.
fn candidates(claimed: Option<&Path>, order: &PreflightOrder) -> Vec<PathBuf> {
    match claimed.or(order.prefix.as_deref()) {
        Some(prefix) => vec![prefix.to_owned()],
        None => crate::api::PREFIX_CANDIDATES.into_iter().map(PathBuf::from).collect(),
    }
}
