use std::{fs, path::PathBuf};

use super::{Observed, Place, candidates};
use crate::{Brokers, claim::claimed_by_another};
use host::{
    Root, facts, limits, machine, mountinfo,
    opening::path_of,
    port::{self, PortUse},
    room::FileSystem,
    state, trust,
};
use hostapi::{PreflightOrder, Refusal};

/// Observes everything that [`super::assess`] needs.
///
/// # Errors
/// If `state.json` can't be read or trusted.
pub fn examine(root: &Root, brokers: &dyn Brokers, order: &PreflightOrder) -> Result<Observed, Refusal> {
    let claimed = state::find(root)?.map(|state| state.prefix);
    let ours = brokers.observe(claimed.as_deref()).running.is_some();
    Ok(Observed {
        places: candidates(claimed.as_deref(), order)
            .into_iter()
            .map(|prefix| examine_place(root, prefix, claimed.is_some()))
            .collect::<Result<_, _>>()?,
        claimed,
        port: if ours { PortUse::Ours } else { port::port_use(root, order.endpoint) },
        machine: facts::machine(),
        glibc: facts::glibc(root),
        musl: musl(root),
        systemd: facts::systemd(root),
        cgroup_writable: mountinfo::read(&root.path("/proc/self/mountinfo"))
            .is_ok_and(|text| cgroup_is_writable(&text)),
        memlock: limits::lift_memlock(),
        resources: facts::resources(root),
        static_cpus: facts::has_static_cpus(root),
        memory_mib: facts::memory_mib(root),
        boot_id: facts::boot_id(root),
    })
}

fn examine_place(root: &Root, prefix: PathBuf, is_claimed: bool) -> Result<Place, Refusal> {
    // The nearest directory that exists is on the file system that the prefix will be on.
    let nearest = match trust::nearest(root, &prefix) {
        Ok(nearest) => nearest,
        Err(distrust) => return Ok(Place { trouble: Some(distrust.to_string()), ..Place::of(prefix) }),
    };
    let parent = path_of(&nearest);
    let shared = machine::shared_by_nodes(&parent).map(|kind| {
        format!(
            "{} is on {kind}, which nodes share: the first node to be uninstalled would delete it for all",
            prefix.display()
        )
    });
    let FileSystem { room, is_read_only, is_noexec } = FileSystem::of(&parent).unwrap_or_default();
    let (shared, warning) = if is_claimed { (None, shared) } else { (shared, None) };
    let trouble = if let state::ClaimedBy::AnotherMachine(machine) = state::claimed_by(root, &prefix)? {
        Some(claimed_by_another(&prefix, &machine))
    } else if shared.is_some() {
        shared
    } else if is_read_only {
        Some("mounted read-only".to_owned())
    } else if is_noexec {
        Some("mounted noexec".to_owned())
    } else {
        // A file without a name: nothing of it can stay.
        tempfile::tempfile_in(&parent).err().map(|error| format!("can't be written: {}", error.kind()))
    };
    Ok(Place { trouble, warning, room, ..Place::of(prefix) })
}

fn musl(root: &Root) -> bool {
    fs::read_dir(root.path("/lib"))
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("ld-musl-")))
}

/// True if mountinfo (proc(5)) lists a writable cgroup file system under /sys/fs/cgroup.
pub fn cgroup_is_writable(mountinfo: &str) -> bool {
    mountinfo::parse(mountinfo).iter().any(|mount| {
        matches!(mount.kind.as_str(), "cgroup" | "cgroup2")
            && mount.point.starts_with("/sys/fs/cgroup")
            && mount.is_writable()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_writable_cgroup_mount_counts() {
        let v2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate";
        let v1 = "30 25 0:27 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory";
        for (mountinfo, expected) in [
            (v2, true),
            (v1, true),
            (&v2.replace("rw,nosuid", "ro,nosuid"), false),
            (&v2.replace("rw,nsdelegate", "ro,nsdelegate"), false),
            (&v2.replace("/sys/fs/cgroup", "/mnt"), false),
            ("29 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw", false),
            ("", false),
        ] {
            assert_eq!(cgroup_is_writable(mountinfo), expected, "{mountinfo}");
        }
    }
}
