//! Parses /proc's view of cgroups, and computes where the broker's would be. Pure.

use std::path::{Path, PathBuf};

use super::CgroupError;
use crate::mountinfo;

/// One line of `/proc/<pid>/cgroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Controllers, sorted; `name=systemd` for a named hierarchy; empty for cgroup v2.
    pub controllers: Vec<String>,
    /// Path relative to the root of the cgroup namespace.
    pub path: String,
}

/// One cgroup line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The cgroup that is mounted.
    pub root: String,
    /// Mount point.
    pub point: PathBuf,
    /// Mount options, which include the controllers; None for cgroup v2.
    pub options: Option<Vec<String>>,
}

/// A cgroup of the broker in one hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the hierarchy, as [`Membership::hierarchy`] returns it.
    pub hierarchy: String,
    /// True for cgroup v2.
    pub unified: bool,
    /// Mount point of the hierarchy.
    pub point: PathBuf,
    /// Directory of the cgroup.
    pub directory: PathBuf,
    /// The path that `/proc/<pid>/cgroup` shows for a process in it.
    pub path: String,
}

/// Parses `/proc/<pid>/cgroup`.
pub fn memberships(text: &str) -> Vec<Membership> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let mut controllers: Vec<String> =
                controllers.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            controllers.sort();
            Some(Membership { controllers, path: path.to_owned() })
        })
        .collect()
}

/// Parses the cgroup mounts in /proc/self/mountinfo.
pub fn mounts(mountinfo: &str) -> Vec<Mount> {
    cgroup_mounts(mountinfo::parse(mountinfo))
}

/// Selects the cgroup mounts.
pub(super) fn cgroup_mounts(mounts: Vec<mountinfo::Mount>) -> Vec<Mount> {
    let cgroups = mounts.into_iter().filter_map(|mount| {
        let options = match mount.kind.as_str() {
            "cgroup2" => None,
            "cgroup" => Some(mount.super_options.split(',').map(str::to_owned).collect()),
            _ => return None,
        };
        Some(Mount { root: mount.root.display().to_string(), point: mount.point, options })
    });
    cgroups.collect()
}

impl Membership {
    /// Name of the hierarchy: its controllers, or `v2`.
    pub fn hierarchy(&self) -> String {
        if self.controllers.is_empty() { "v2".to_owned() } else { self.controllers.join(",") }
    }

    /// The host's own mount of the hierarchy. There may be others, for containers: the host's is below /sys/fs/cgroup
    /// and shows the largest part. Of several at the same point, the last one hides the others.
    fn mount<'a>(&self, mounts: &'a [Mount]) -> Option<&'a Mount> {
        mounts.iter().rev().filter(|mount| self.is_mounted_by(mount)).min_by_key(|mount| {
            (!mount.point.starts_with("/sys/fs/cgroup"), mount.root.len(), mount.point.as_os_str().len())
        })
    }

    fn is_mounted_by(&self, mount: &Mount) -> bool {
        match &mount.options {
            None => self.controllers.is_empty(),
            Some(options) => {
                !self.controllers.is_empty() && self.controllers.iter().all(|controller| options.contains(controller))
            }
        }
    }
}

/// The place of the cgroup `name` in each hierarchy: directly below the mount point, because on a simulated node only
/// part of the hierarchy is mounted. The place is None for a hierarchy that is not mounted; such a hierarchy is left
/// out if the process is in its root, since the end of a pod kills nothing there.
pub fn places(memberships: &[Membership], mounts: &[Mount], name: &str) -> Vec<(Membership, Option<Place>)> {
    memberships
        .iter()
        .filter_map(|membership| match membership.mount(mounts) {
            None if membership.path == "/" => None,
            None => Some((membership.clone(), None)),
            Some(mount) => {
                let place = Place {
                    hierarchy: membership.hierarchy(),
                    unified: membership.controllers.is_empty(),
                    directory: mount.point.join(name),
                    point: mount.point.clone(),
                    path: format!("{}/{name}", mount.root.trim_end_matches('/')),
                };
                Some((membership.clone(), Some(place)))
            }
        })
        .collect()
}

/// The directories of those `memberships` whose cgroup is named `name`, in any slice.
pub fn directories(memberships: &[Membership], mounts: &[Mount], name: &str) -> Vec<PathBuf> {
    let directory = |membership: &Membership| {
        let path = Path::new(&membership.path);
        let mount = membership.mount(mounts).filter(|_| path.ends_with(name))?;
        Some(mount.point.join(path.strip_prefix(&mount.root).ok()?))
    };
    memberships.iter().filter_map(directory).collect()
}

/// Verifies after the move that the process has left its pod in every hierarchy: it is in a place of ours there, or in the root, which
/// outlives pods. Anywhere else, the end of the pod would kill the broker.
///
/// # Errors
/// [`CgroupError::LeftBehind`] with the first hierarchy in which it has not.
pub fn check_moved(before: &[Membership], after: &[Membership], places: &[Place]) -> Result<(), CgroupError> {
    for now in after {
        let is_ours = places.iter().any(|place| place.hierarchy == now.hierarchy() && place.path == now.path);
        let is_unmoved = now.path != "/" && before.iter().any(|then| then == now);
        if now.path.contains("kubepods") || (is_unmoved && !is_ours) {
            return Err(CgroupError::LeftBehind { hierarchy: now.hierarchy(), path: now.path.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpuacct,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
90 31 0:32 /kubepods/pod1 /run/containers/a\\040b/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
";

    fn placed(memberships_text: &str, mountinfo: &str) -> Vec<(String, Option<(String, String)>)> {
        places(&memberships(memberships_text), &mounts(mountinfo), "flux-distribute/broker")
            .into_iter()
            .map(|(membership, place)| {
                (membership.hierarchy(), place.map(|place| (place.directory.display().to_string(), place.path)))
            })
            .collect()
    }

    fn at(directory: &str, path: &str) -> Option<(String, String)> {
        Some((directory.to_owned(), path.to_owned()))
    }

    #[test]
    fn every_hierarchy_gets_a_cgroup_below_its_own_mount() {
        let memberships =
            "9:name=systemd:/kubepods/pod1\n4:memory:/kubepods/pod1\n2:cpu,cpuacct:/kubepods/pod1\n0::/\n";
        let path = "/flux-distribute/broker";
        assert_eq!(
            placed(memberships, V1),
            [
                ("name=systemd".to_owned(), at("/sys/fs/cgroup/systemd/flux-distribute/broker", path)),
                ("memory".to_owned(), at("/sys/fs/cgroup/memory/flux-distribute/broker", path)),
                ("cpu,cpuacct".to_owned(), at("/sys/fs/cgroup/cpu,cpuacct/flux-distribute/broker", path)),
            ]
        );
    }

    #[test]
    fn a_unit_is_found_in_any_slice_and_only_by_its_exact_name() {
        let unit = |text: &str| super::directories(&memberships(text), &mounts(V1), "flux-broker.service");
        let found = unit("9:name=systemd:/hpc.slice/flux-broker.service\n4:memory:/hpc.slice\n3:cpu,cpuacct:/\n0::/\n");
        assert_eq!(found, [Path::new("/sys/fs/cgroup/systemd/hpc.slice/flux-broker.service")]);
        for other in ["/", "/user.slice", "/hpc.slice/not-flux-broker.service", "/flux-broker.service/job"] {
            assert_eq!(unit(&format!("9:name=systemd:{other}\n")), [] as [PathBuf; 0], "{other}");
        }
    }

    #[test]
    fn a_mount_of_part_of_a_hierarchy_counts_as_its_root() {
        let mountinfo = "40 31 0:37 /nodes/node1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            placed("0::/nodes/node1/kubepods/pod1\n", mountinfo),
            [("v2".to_owned(), at("/sys/fs/cgroup/flux-distribute/broker", "/nodes/node1/flux-distribute/broker"))]
        );
    }

    #[test]
    fn a_hierarchy_that_is_not_mounted_matters_unless_the_process_is_in_its_root() {
        assert_eq!(placed("5:pids:/\n0::/\n", V1), []);
        assert_eq!(placed("5:pids:/kubepods/pod1\n", V1), [("pids".to_owned(), None)]);
    }

    #[test]
    fn a_process_left_behind_in_a_single_hierarchy_is_found() {
        let pod = "4:memory:/kubepods/pod1\n5:pids:/docker/x\n0::/\n";
        let ours = "4:memory:/flux-distribute/broker\n5:pids:/flux-distribute/broker\n0::/\n";
        let pids_left = "4:memory:/flux-distribute/broker\n5:pids:/docker/x\n0::/\n";
        let memory_left = "4:memory:/kubepods/pod1\n5:pids:/flux-distribute/broker\n0::/\n";
        let elsewhere = "4:memory:/kubepods/pod2\n5:pids:/flux-distribute/broker\n0::/\n";
        let mountinfo = format!("{V1}41 31 0:38 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n");
        let places: Vec<Place> = places(&memberships(pod), &mounts(&mountinfo), "flux-distribute/broker")
            .into_iter()
            .filter_map(|(_, place)| place)
            .collect();
        for (before, after, left) in [
            (pod, ours, None),
            (ours, ours, None),
            (pod, pids_left, Some("pids")),
            (pod, memory_left, Some("memory")),
            (pod, elsewhere, Some("memory")),
        ] {
            let found = check_moved(&memberships(before), &memberships(after), &places);
            let found = found.err().map(|error| match error {
                CgroupError::LeftBehind { hierarchy, .. } => hierarchy,
                other => panic!("{other}"),
            });
            assert_eq!(found.as_deref(), left, "{after}");
        }
    }
}
