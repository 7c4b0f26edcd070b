//! `scripts/deploy.sh`, with a stand-in for kubectl.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

/// Runs `make undeploy`'s script beside a kubectl whose every call is answered by `script`, and logged.
fn undeploy(script: &str) -> (Output, String) {
    let directory = tempfile::tempdir().unwrap();
    let (kubectl, log) = (directory.path().join("kubectl"), directory.path().join("log"));
    fs::write(&kubectl, format!("#!/bin/sh\necho \"$*\" >> {}\ncase \"$*\" in\n{script}\nesac\n", log.display()))
        .unwrap();
    fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/deploy.sh");
    let output = Command::new(deploy).arg("down").env("KUBECTL", &kubectl).env("TIMEOUT", "7s").output().unwrap();
    (output, fs::read_to_string(log).unwrap())
}

#[test]
fn an_undeploy_that_runs_out_of_time_says_in_its_own_words_what_still_waits_and_the_remedy() {
    let (output, calls) = undeploy(
        "*wait*) echo 'error: timed out waiting for the condition on fluxnodes/node2' >&2; exit 1;;\n\
         *'get fluxnodes'*) echo 'node2: Removing, jobs are running: this host is kept until they have ended';;",
    );
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!said.contains("error:") && !said.contains("timed out waiting"), "{said}");
    for words in
        ["Not clean after 7s", "  node2: Removing, jobs are running", "flux cancel --all", "make undeploy again"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert!(!calls.contains("delete -f"), "the agents are needed still: {calls}");
}

#[test]
fn an_undeploy_deletes_the_rest_once_every_host_is_clean() {
    let (output, calls) = undeploy("*) ;;");
    assert!(output.status.success(), "{output:?}");
    assert!(calls.trim().ends_with("delete -f deploy/daemonset-installer.yaml --ignore-not-found"), "{calls}");
}
