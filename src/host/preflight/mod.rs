//! Can this host carry a broker, and where? Looking changes nothing that stays; [`decide`] is pure.

mod look;
mod port;

use std::path::{Path, PathBuf};

use super::{Brokers, Preflight, PreflightOrder, Refusal, Root};
use crate::api::Resources;

pub use look::{cgroup_is_writable, look};

/// kubelet's `nodefs.available<10%`: below it, kubelet evicts pods, ours among them.
const KEPT_FREE_PERCENT: u64 = 10;

/// What was seen of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Where this host is claimed already.
    pub claimed: Option<PathBuf>,
    /// The places to try, in order.
    pub places: Vec<Place>,
    /// Who has the TBON's port.
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
    /// Why nothing can be written or executed there.
    pub trouble: Option<String>,
    /// Bytes that are free on its file system.
    pub available: u64,
    /// Bytes its file system has.
    pub total: u64,
}

/// Who has the TBON's port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortUse {
    /// Nobody.
    Free,
    /// Our own broker.
    Ours,
    /// Somebody else: pid and name, where that can be told.
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
        return Err(Refusal::new(
            "no core can be seen under /sys/devices/system/cpu; is /sys mounted on this host?",
        ));
    }
    let mut warnings = Vec::new();
    let prefix = place(&seen, order, &mut warnings)?;
    port(&seen.port, order.port)?;
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
            "spec.prefix {} takes effect when this host has been cleaned; until then {} is used",
            wanted.display(),
            claimed.display()
        ));
    }
    let usable: Vec<&Place> = seen.places.iter().filter(|place| place.trouble.is_none()).collect();
    let Some(first) = usable.first() else {
        let troubles: Vec<String> = seen
            .places
            .iter()
            .map(|place| {
                format!(
                    "{}: {}",
                    place.prefix.display(),
                    place.trouble.as_deref().unwrap_or_default()
                )
            })
            .collect();
        return Err(Refusal::new(format!(
            "there is no place for Flux on this host ({}); set spec.prefix to a directory that can be written and executed",
            troubles.join("; ")
        )));
    };
    // What is installed already needs no more room: a full disk must not take a running node out.
    if order.need_bytes == 0 {
        return Ok(first.prefix.clone());
    }
    if let Some(roomy) = usable
        .iter()
        .find(|place| place.available >= wanted_bytes(place, order))
    {
        return Ok(roomy.prefix.clone());
    }
    Err(Refusal::transient(format!(
        "{} has too little room: {} MiB are free, and {} MiB are needed ({} for the packages, and {KEPT_FREE_PERCENT} % that \
         must stay free or kubelet evicts pods); make room, or set spec.prefix to another file system",
        first.prefix.display(),
        first.available >> 20,
        wanted_bytes(first, order).div_ceil(1 << 20),
        order.need_bytes.div_ceil(1 << 20),
    )))
}

fn wanted_bytes(place: &Place, order: &PreflightOrder) -> u64 {
    (place.total / 100 * KEPT_FREE_PERCENT).saturating_add(order.need_bytes)
}

fn port(found: &PortUse, port: u16) -> Result<(), Refusal> {
    let remedy = "free it, or set spec.broker.port to another";
    let who = match found {
        PortUse::Free | PortUse::Ours => return Ok(()),
        PortUse::Taken(Some((pid, name))) => format!("is taken by {name} (pid {pid})"),
        PortUse::Taken(None) => "is taken".to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn order() -> PreflightOrder {
        PreflightOrder {
            prefix: None,
            port: 8050,
            need_bytes: GIB,
        }
    }

    fn good_place(prefix: &str) -> Place {
        Place {
            prefix: prefix.into(),
            trouble: None,
            available: 50 * GIB,
            total: 100 * GIB,
        }
    }

    fn good() -> Observed {
        Observed {
            claimed: None,
            places: vec![
                good_place("/opt/flux-distribute"),
                good_place("/var/lib/flux-distribute"),
            ],
            port: PortUse::Free,
            machine: "x86_64".into(),
            glibc: Some("2.36".into()),
            musl: false,
            systemd: true,
            cgroup_writable: true,
            memlock: true,
            resources: Resources { cores: 4, gpus: 0 },
            memory_mib: 1024,
            boot_id: "b".into(),
        }
    }

    fn broken(place: &str) -> Place {
        Place {
            trouble: Some("mounted read-only".into()),
            ..good_place(place)
        }
    }

    #[test]
    fn a_good_host_gets_the_first_place_that_will_do() {
        let full = Place {
            available: 10 * GIB + GIB / 2,
            ..good_place("/opt/flux-distribute")
        };
        for (what, places, expected) in [
            ("the first", good().places, "/opt/flux-distribute"),
            (
                "read-only /opt",
                vec![broken("/opt/x"), good_place("/var/lib/y")],
                "/var/lib/y",
            ),
            ("full /opt", vec![full, good_place("/var/lib/y")], "/var/lib/y"),
        ] {
            let found = decide(Observed { places, ..good() }, &order()).unwrap();
            assert_eq!(found.prefix, PathBuf::from(expected), "{what}");
            assert!(found.warnings.is_empty(), "{what}");
        }
    }

    #[test]
    fn each_refusal_names_the_object_and_a_remedy() {
        let full = Place {
            available: 10 * GIB,
            ..good_place("/opt/flux-distribute")
        };
        let cgroupless = Observed {
            systemd: false,
            cgroup_writable: false,
            ..good()
        };
        for (seen, words, transient) in [
            (
                Observed {
                    machine: "riscv64".into(),
                    ..good()
                },
                ["riscv64", "spec.nodes.selector"],
                false,
            ),
            (
                Observed {
                    glibc: None,
                    musl: true,
                    ..good()
                },
                ["musl", "spec.nodes.selector"],
                false,
            ),
            (cgroupless, ["/sys/fs/cgroup", "privileged"], false),
            (
                Observed {
                    resources: Resources::default(),
                    ..good()
                },
                ["core", "/sys"],
                false,
            ),
            (
                Observed {
                    places: vec![broken("/opt/x")],
                    ..good()
                },
                ["/opt/x: mounted read-only", "spec.prefix"],
                false,
            ),
            (
                Observed {
                    places: vec![full],
                    ..good()
                },
                ["10240 MiB are free", "11264 MiB are needed"],
                true,
            ),
            (
                Observed {
                    port: PortUse::Taken(Some((7, "sshd".into()))),
                    ..good()
                },
                ["sshd (pid 7)", "spec.broker.port"],
                true,
            ),
            (
                Observed {
                    port: PortUse::Taken(None),
                    ..good()
                },
                ["port 8050", "spec.broker.port"],
                true,
            ),
        ] {
            let refusal = decide(seen, &order()).unwrap_err();
            assert!(
                words.iter().all(|word| refusal.message.contains(word)),
                "{words:?}: {refusal}"
            );
            assert_eq!(refusal.transient, transient, "{refusal}");
        }
    }

    #[test]
    fn our_own_broker_may_have_the_port() {
        assert!(
            decide(
                Observed {
                    port: PortUse::Ours,
                    ..good()
                },
                &order()
            )
            .is_ok()
        );
    }

    #[test]
    fn an_installed_host_needs_no_more_room() {
        let places = vec![Place {
            available: 0,
            ..good_place("/opt/flux-distribute")
        }];
        assert!(
            decide(
                Observed { places, ..good() },
                &PreflightOrder {
                    need_bytes: 0,
                    ..order()
                }
            )
            .is_ok()
        );
    }

    #[test]
    fn a_claimed_host_keeps_its_place_and_says_so() {
        let wanted = PreflightOrder {
            prefix: Some("/data/flux".into()),
            ..order()
        };
        let claimed = PathBuf::from("/opt/flux-distribute");
        assert_eq!(candidates(Some(&claimed), &wanted), [claimed.clone()]);
        assert_eq!(candidates(None, &wanted), [PathBuf::from("/data/flux")]);
        let seen = Observed {
            places: vec![good_place("/opt/flux-distribute")],
            claimed: Some(claimed.clone()),
            ..good()
        };
        let found = decide(seen, &wanted).unwrap();
        assert_eq!(found.prefix, claimed);
        assert!(found.warnings[0].contains("/data/flux"), "{:?}", found.warnings);
    }

    #[test]
    fn a_host_without_systemd_will_do() {
        let found = decide(
            Observed {
                systemd: false,
                memlock: false,
                ..good()
            },
            &order(),
        )
        .unwrap();
        assert!(!found.systemd && found.warnings.len() == 1);
    }
}
