//! A host and a pod on it, made of namespaces.

use crate::needs::{Need, skips_without};

/// Set in a test process that already is in its pod.
pub const IN_POD: &str = "FLUX_DISTRIBUTE_TEST_IN_POD";

/// A host: a PID namespace whose PID 1 has namespaces as it finds them. A pod on it: `unshare` with these.
pub const SHARING_ALL: &[&str] = &[];
pub const OF_ITS_OWN: &[&str] = &["--mount", "--ipc", "--uts", "--net", "--cgroup"];

/// Runs the named test once more, as a process of a pod on a host. False in the process that has only started that one.
pub fn in_pod(test: &str, namespaces: &[&str]) -> bool {
    if std::env::var_os(IN_POD).is_some() {
        return true;
    }
    if skips_without([Need::Namespaces]) {
        return false;
    }
    // What is ours on a host is there, and programs of a test: this machine's own are covered.
    let init = r#"for dir in /opt /run /var/lib /usr/local/sbin; do mount -t tmpfs -o mode=755 host $dir || exit 1; done; "$@"; exit $?"#;
    let status = std::process::Command::new("unshare")
        .args(["--fork", "--pid", "--mount-proc", "--kill-child", "sh", "-c", init, "sh", "unshare"])
        .args(namespaces)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("boundary::{test}"), "--nocapture"])
        .env(IN_POD, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{test} in a pod: {status}");
    false
}
