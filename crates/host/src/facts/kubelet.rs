use std::{io::Read, path::Path};

use serde::Deserialize;

use super::Root;
use crate::trust;

/// Where kubelet records which CPUs it has given to which container, and by which policy. kubelet does not start with another policy
/// than the one in this file, so it is that of the running kubelet. One with another `--root-dir` has it elsewhere.
const CHECKPOINT: &str = "/var/lib/kubelet/cpu_manager_state";

/// Bytes to read: many times the entries of all containers that a node can have.
const LIMIT: u64 = 4 << 20;

/// True if kubelet's CPU manager has policy `static`: it gives whole CPUs to single containers alone. False also if that can't be
/// read, as on a host without kubelet.
pub fn has_static_cpus(root: &Root) -> bool {
    let read = || {
        let mut content = Vec::new();
        trust::open_file(root, Path::new(CHECKPOINT)).ok()?.take(LIMIT).read_to_end(&mut content).ok()?;
        Some(is_static(&content))
    };
    read().unwrap_or(false)
}

fn is_static(checkpoint: &[u8]) -> bool {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Checkpoint {
        policy_name: String,
    }
    serde_json::from_slice::<Checkpoint>(checkpoint).is_ok_and(|found| found.policy_name == "static")
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn the_policy_is_read_from_what_kubelet_has_written() {
        let long = format!(r#"{{"policyName":"static","defaultCpuSet":"{}"}}"#, "0,".repeat(3 << 20));
        for (what, checkpoint, expected) in [
            (
                "static",
                r#"{"policyName":"static","defaultCpuSet":"0,3","entries":{"uid":{"c":"1-2"}},"checksum":1}"#,
                true,
            ),
            ("none", r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#, false),
            ("a policy that is unknown", r#"{"policyName":"Static"}"#, false),
            ("no policy", "{}", false),
            ("a policy of another type", r#"{"policyName":["static"]}"#, false),
            ("nothing", "", false),
            ("no JSON", "policyName: static", false),
            ("more than is read", &long, false),
        ] {
            let host = tempfile::tempdir().unwrap();
            let root = Root::at(host.path());
            assert!(!has_static_cpus(&root), "no file");
            let file = root.path(CHECKPOINT);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, checkpoint).unwrap();
            assert_eq!(has_static_cpus(&root), expected, "{what}");
        }
    }

    #[test]
    fn a_link_or_a_directory_in_place_of_the_file_says_nothing() {
        let host = tempfile::tempdir().unwrap();
        let root = Root::at(host.path());
        let file = root.path(CHECKPOINT);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let elsewhere = file.with_file_name("elsewhere");
        fs::write(&elsewhere, r#"{"policyName":"static"}"#).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert!(!has_static_cpus(&root));
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(!has_static_cpus(&root));
    }
}
