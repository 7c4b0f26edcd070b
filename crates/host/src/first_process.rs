//! Checks that the PID 1 that we see is the host's.

use std::{fs, io};

use hostapi::HostError;

/// Refuses to run if /proc/1 is not the host's first process: its namespaces would be a pod's.
pub fn check() -> Result<(), HostError> {
    let failed = |source| HostError::Namespace { namespace: "pid", source };
    let link = |path: &str| fs::read_link(path).map_err(failed);
    let cgroup = |path: &str| fs::read_to_string(path).map_err(failed);
    let another = |what: &str| Err(failed(io::Error::other(what.to_owned())));
    if std::process::id() == 1 {
        return another("this process is PID 1 itself");
    }
    if link("/proc/1/ns/pid")? != link("/proc/self/ns/pid")? {
        return another("/proc/1 belongs to another PID namespace");
    }
    if is_same_pod(&cgroup("/proc/1/cgroup")?, &cgroup("/proc/self/cgroup")?) {
        return another("PID 1 belongs to this same pod");
    }
    Ok(())
}

/// If a pod's containers share a PID namespace, PID 1 is the pod's own sandbox process.
fn is_same_pod(first: &str, own: &str) -> bool {
    fn pods(text: &str) -> impl Iterator<Item = &str> {
        text.lines()
            .filter_map(|line| line.splitn(3, ':').nth(2))
            .filter(|path| path.contains("kubepods"))
            .filter_map(|path| Some(path.rsplit_once('/')?.0))
    }
    pods(own).any(|pod| pods(first).any(|other| other == pod))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_own_sandbox_is_not_taken_for_the_host() {
        let own = "4:memory:/kubepods/besteffort/pod1f/abc\n0::/kubepods.slice/kubepods-pod1f.slice/cri-abc.scope\n";
        for (first, expected) in [
            ("4:memory:/kubepods/besteffort/pod1f/pause\n", true),
            ("0::/kubepods.slice/kubepods-pod1f.slice/cri-pause.scope\n", true),
            ("0::/init.scope\n", false),
            ("4:memory:/\n", false),
            // The node itself is a container of a pod.
            ("4:memory:/kubepods/besteffort/pod77/node\n", false),
        ] {
            assert_eq!(is_same_pod(first, own), expected, "{first}");
        }
    }
}
