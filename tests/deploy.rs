//! `scripts/deploy.sh`, with a stand-in for kubectl.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

fn undeploy(script: &str) -> (Output, String) {
    deploy(&["down"], script)
}

/// Runs the script of `make deploy` and `make undeploy` beside a kubectl whose every call is answered by `script`, and logged.
fn deploy(words: &[&str], script: &str) -> (Output, String) {
    let directory = tempfile::tempdir().unwrap();
    let (kubectl, log) = (directory.path().join("kubectl"), directory.path().join("log"));
    fs::write(&kubectl, format!("#!/bin/sh\necho \"$*\" >> {}\ncase \"$*\" in\n{script}\nesac\n", log.display()))
        .unwrap();
    fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
    let script_file = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/deploy.sh");
    let output = Command::new(script_file).args(words).env("KUBECTL", &kubectl).env("TIMEOUT", "7s").output().unwrap();
    (output, fs::read_to_string(log).unwrap())
}

#[test]
fn an_undeploy_that_times_out_says_which_hosts_remain_and_what_to_do() {
    let (output, calls) = undeploy(
        "*wait*) echo 'error: timed out waiting for the condition on fluxnodes/node2' >&2; exit 1;;\n\
         *'get fluxnodes'*) echo 'node2: Removing, jobs are running: this host is kept until they have ended';;",
    );
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!said.contains("error:") && !said.contains("timed out waiting"), "{said}");
    for words in [
        "Not clean after 7s",
        "  node2: Removing, jobs are running",
        "flux cancel --all",
        "make undeploy again",
        "delete --ignore-not-found -f deploy/pods.yaml -f deploy/daemonset-installer.yaml",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!calls.contains("delete -f"), "the agents are needed still: {calls}");
}

#[test]
fn an_undeploy_deletes_the_rest_once_every_host_is_clean() {
    let (output, calls) = undeploy("*) ;;");
    assert!(output.status.success(), "{output:?}");
    let deleted: Vec<_> = calls.lines().filter(|call| call.contains("delete -f")).collect();
    let rest = ["deploy/pods.yaml", "deploy/daemonset-installer.yaml"];
    assert_eq!(deleted, rest.map(|file| format!("delete -f {file} --ignore-not-found")), "the bridge's rights first");
}

/// What that version answers, and an apply that takes in the whole manifest.
fn version(minor: &str) -> String {
    let answer = format!(r#"{{\n  "major": "1",\n  "minor": "{minor}",\n  "emulationMinor": "99"\n}}"#);
    format!("*'get --raw /version'*) printf '{answer}';;\n*'apply -f -'*) cat > /dev/null;;")
}

#[test]
fn a_kubernetes_without_admission_policies_is_refused_before_anything_is_applied() {
    for minor in ["29", "29+", "9"] {
        let (output, calls) = deploy(&["up", "localhost/x:1"], &version(minor));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        let minor = minor.trim_end_matches('+');
        assert!(said.contains(&format!("Kubernetes 1.{minor}, which")) && said.contains("1.30 or newer"), "{said}");
        assert!(!calls.contains("apply"), "{calls}");
    }
}

#[test]
fn an_api_server_that_does_not_answer_gets_nothing_applied() {
    let (output, calls) = deploy(&["up", "localhost/x:1"], "*'get --raw /version'*) echo refused >&2; exit 1;;");
    assert!(!output.status.success() && !calls.contains("apply"), "{calls}");
}

#[test]
fn an_undeploy_that_reaches_no_api_server_deletes_nothing_and_says_so_once() {
    let refused = "*'get --raw /version'*) echo 'connection refused' >&2; exit 1;;\n*'get crd'*) exit 1;;";
    let (output, calls) = undeploy(refused);
    assert!(!output.status.success() && !calls.contains("delete"), "{calls}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "connection refused\n");
}

#[test]
fn a_deploy_waits_for_the_agents_of_workers_and_of_control_planes() {
    for minor in ["30", "30+", "36", ""] {
        let (output, calls) = deploy(&["up", "localhost/x:1"], &version(minor));
        assert!(output.status.success(), "{output:?}");
        let of = |call: &str| {
            calls.lines().position(|line| line.contains(call)).unwrap_or_else(|| panic!("{call}: {calls}"))
        };
        assert!(of("apply -f -") < of("rollout status daemonset/install-flux --timeout"), "{calls}");
        assert!(of("apply -f -") < of("rollout status daemonset/install-flux-control-planes --timeout"), "{calls}");
    }
}
