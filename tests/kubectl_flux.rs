//! The program under the name `kubectl-flux`, against the API server of local mode. A script stands in for kubectl.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that can't go on fails, and one says how long it took"
)]

mod apiserver_support;

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::Instant,
};

use api::{FluxInstance, FluxNode};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use apiserver_support::{Server, start};

/// An instance on a cluster, and somebody who has a kubeconfig for it.
struct Bed {
    server: Server,
    home: tempfile::TempDir,
}

impl Bed {
    async fn new(nodes: u32) -> Self {
        let bed = Self { server: start().await, home: tempfile::tempdir().unwrap() };
        fs::write(bed.home.path().join("kubeconfig"), bed.server.kubeconfig.to_string()).unwrap();
        let kubectl = bed.home.path().join("kubectl");
        fs::write(&kubectl, "#!/bin/sh\nfor word; do echo \"$word\"; done\nexit 7\n").unwrap();
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
        if nodes > 0 {
            bed.instance(nodes).await;
        }
        for rank in 0..nodes {
            bed.node(rank).await;
        }
        bed
    }

    async fn instance(&self, nodes: u32) {
        let status = json!({
            "phase": "Running", "message": format!("all {nodes} nodes are online"), "lead": "n1", "epoch": 1, "size": nodes,
            "online": nodes, "maxSize": 2000, "observedGeneration": 1,
        });
        let object = json!({"metadata": {"name": "flux"}, "spec": {}});
        let instances = self.server.api::<FluxInstance>();
        instances.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        self.set_status(&status).await;
    }

    async fn set_status(&self, status: &Value) {
        let patch = Patch::Merge(json!({"status": status}));
        self.server.api::<FluxInstance>().patch_status("flux", &PatchParams::default(), &patch).await.unwrap();
    }

    async fn node(&self, rank: u32) {
        let name = format!("n{}", rank + 1);
        let object = json!({"metadata": {"name": name}, "spec": {"nodeName": name, "rank": rank, "want": "Run"}});
        let nodes = self.server.api::<FluxNode>();
        nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let lead = json!({"phase": "Online", "allocated": "1", "jobs": {"running": 1, "pending": 0}});
        let status = if rank == 0 { lead } else { json!({"phase": "Online"}) };
        nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(json!({"status": status}))).await.unwrap();
    }

    /// The agent's pod on a node.
    async fn agent(&self, node: &str) {
        let name = format!("install-flux-{node}");
        let object = json!({
            "metadata": {"name": name, "labels": {"app": "install-flux"}},
            "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "x"}]},
        });
        let pods = self.server.api::<Pod>();
        pods.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let running = json!({"name": "agent", "image": "x", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}});
        let status = json!({"phase": "Running", "containerStatuses": [running]});
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(json!({"status": status}))).await.unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        command.arg0("kubectl-flux").args(arguments).env_clear().stdin(Stdio::null());
        command.env("HOME", self.home.path()).env("PATH", self.home.path());
        command.env("KUBECONFIG", self.home.path().join("kubeconfig"));
        command
    }

    /// Runs `kubectl flux` with these arguments: its exit code, what it printed, and its complaints.
    async fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = self.command(arguments);
        let Output { status, stdout, stderr } =
            tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    }

    /// What kubectl is called with, after the namespace and the context; and what was said on stderr.
    async fn through_kubectl(&self, arguments: &[&str]) -> (Vec<String>, String) {
        let (code, said, remarks) = self.run(arguments).await;
        assert_eq!(code, 7, "{arguments:?}: kubectl's exit code is the command's: {remarks}");
        let words: Vec<_> = said.lines().map(str::to_owned).collect();
        assert_eq!(words[..4], ["--context", "local", "--namespace", "flux-distribute"]);
        (words[4..].to_vec(), remarks)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_nodes_are_one_page() {
    let bed = Bed::new(1000).await;
    let begin = Instant::now();
    let (code, screen, complaints) = bed.run(&["status"]).await;
    eprintln!("measured: status of 1,000 nodes took {:?}", begin.elapsed());
    assert_eq!((code, complaints.as_str()), (0, ""));
    let lines: Vec<_> = screen.lines().collect();
    assert_eq!(lines[0], "instance  Running: all 1000 nodes are online");
    assert!(lines.len() < 12 && lines.iter().all(|line| line.len() <= 100), "{screen}");
    assert!(!screen.contains('\u{1b}'), "no colours without a terminal");
    let (_, wide, _) = bed.run(&["status", "-o", "wide"]).await;
    assert!(wide.lines().count() > 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_read_the_same_as_json_and_yaml() {
    let bed = Bed::new(2).await;
    let json: Value = serde_json::from_str(&bed.run(&["status", "-o", "json"]).await.1).unwrap();
    let yaml: Value = serde_norway::from_str(&bed.run(&["status", "-o", "yaml"]).await.1).unwrap();
    assert_eq!(json, yaml);
    let states: Vec<_> = json["nodes"].as_array().unwrap().iter().map(|node| &node["state"]).collect();
    assert_eq!(states, ["free", "allocated"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_has_seen_enough_is_no_failure() {
    let bed = Bed::new(1000).await;
    let mut command = bed.command(&["status", "-o", "wide"]);
    let output = tokio::task::spawn_blocking(move || {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        child.wait_with_output().unwrap()
    });
    let output = output.await.unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cant_work_is_one_sentence_with_the_remedy() {
    let bed = Bed::new(0).await;
    for (arguments, code, expected) in [
        (&["status"][..], 1, "there is no FluxInstance flux in namespace flux-distribute: check"),
        (
            &["--kubeconfig", "/nowhere", "status"],
            2,
            "no cluster to speak to: name a kubeconfig by --kubeconfig or KUBECONFIG",
        ),
        (&["--context", "other", "status"], 2, "no cluster to speak to"),
        (&["scale", "many"], 2, "invalid value 'many'"),
        (&["run"], 2, "required"),
        (&["connect", "n9"], 1, "no agent runs on node n9"),
    ] {
        let (found, printed, complaint) = bed.run(arguments).await;
        assert_eq!((found, printed.as_str()), (code, ""), "{arguments:?}: {complaint}");
        assert!(complaint.contains(expected) && !complaint.contains("panicked"), "{arguments:?}: {complaint}");
    }
    bed.server.task.abort();
    let (code, _, complaint) = bed.run(&["status"]).await;
    assert!(code == 1 && complaint.contains("the API server does not answer: check the kubeconfig"), "{complaint}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_flux_runs_in_the_agents_pod_with_the_same_cluster() {
    let bed = Bed::new(3).await;
    bed.agent("n1").await;
    bed.agent("n2").await;
    let on = |pod: &str, command: &[&str]| {
        // Only a person's own command may read what is typed.
        let reads = command.is_empty() || pod == "install-flux-n2";
        let mut words = if reads { vec!["exec", "--stdin"] } else { vec!["exec"] };
        words.extend([pod, "--container=agent", "--", "/flux-distribute", "connect"]);
        words.extend(command);
        words.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let (lead, second) = ("install-flux-n1", "install-flux-n2");
    for (arguments, expected, remark) in [
        (&["connect"][..], on(lead, &[]), "on n1, the lead\n"),
        (&["connect", "n2"], on(second, &[]), ""),
        (
            &["run", "--node", "n2", "--", "flux", "run", "-N2", "hostname"],
            on(second, &["--", "flux", "run", "-N2", "hostname"]),
            "",
        ),
        (&["jobs", "-a"], on(lead, &["--", "flux", "jobs", "-a"]), ""),
        (
            &["drain", "n[2-3]", "bad", "disk"],
            on(lead, &["--", "flux", "resource", "drain", "--", "1-2", "bad disk"]),
            "n2 (rank 1), n3 (rank 2)\n",
        ),
        (&["undrain", "n1"], on(lead, &["--", "flux", "resource", "undrain", "0"]), "n1 (rank 0, the lead)\n"),
        (&["pause"], on(lead, &["--", "flux", "queue", "stop", "--all", "--message=kubectl flux pause"]), ""),
        (&["resume"], on(lead, &["--", "flux", "queue", "start", "--all"]), ""),
    ] {
        assert_eq!(bed.through_kubectl(arguments).await, (expected, remark.to_owned()), "{arguments:?}");
    }
    let (logs, _) = bed.through_kubectl(&["logs", "n2", "-f", "--tail", "5"]).await;
    assert_eq!(logs, ["logs", second, "--container=agent", "--follow", "--tail=5"]);
    let file = bed.home.path().join("kubeconfig");
    let (_, named, _) = bed.run(&["--kubeconfig", file.to_str().unwrap(), "jobs"]).await;
    let named: Vec<_> = named.lines().take(4).collect();
    assert_eq!(named, ["--kubeconfig", file.to_str().unwrap(), "--context", "local"]);
    let (code, _, complaint) = bed.run(&["drain", "n1", "n2"]).await;
    assert!(code == 2 && complaint.contains("n2 is a node, and would be the reason"), "{complaint}");
    let (code, _, complaint) = bed.run(&["drain", "n9", "why"]).await;
    assert!(code == 2 && complaint.contains("there is no FluxNode n9"), "{complaint}");
    fs::remove_file(bed.home.path().join("kubectl")).unwrap();
    let (code, _, complaint) = bed.run(&["jobs"]).await;
    assert!(code == 1 && complaint.contains("can't run kubectl: put it into your PATH"), "{complaint}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scale_says_what_the_planner_made_of_it() {
    let bed = Bed::new(2).await;
    let planner = async {
        loop {
            let instance = bed.server.api::<FluxInstance>().get("flux").await.unwrap();
            if instance.spec.size == Some(5) {
                let denied = json!({
                    "type": "ScaleDenied", "status": "True", "reason": "X", "message": "maxSize is 4",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                });
                let generation = instance.metadata.generation;
                return bed.set_status(&json!({"observedGeneration": generation, "conditions": [denied]})).await;
            }
            tokio::task::yield_now().await;
        }
    };
    let ((code, said, complaint), ()) = tokio::join!(bed.run(&["scale", "5"]), planner);
    assert_eq!((code, complaint.as_str()), (0, ""));
    assert!(said.starts_with("spec.size is now 5. maxSize is 4\n"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_begins_only_if_something_waits_for_it_and_somebody_says_now() {
    let bed = Bed::new(1).await;
    let restart = async || {
        let instance = bed.server.api::<FluxInstance>().get("flux").await.unwrap();
        instance.metadata.annotations.unwrap_or_default().contains_key(api::ANNOTATION_RESTART)
    };
    assert_eq!(bed.run(&["upgrade"]).await.1, "nothing waits for a coordinated restart\n");
    let (code, _, complaint) = bed.run(&["upgrade", "--now"]).await;
    assert!(code == 1 && complaint.contains("nothing waits for a coordinated restart"), "{complaint}");
    let pending = json!({
        "type": "RestartPending", "status": "True", "reason": "Waits", "message": "packages change; 2 jobs run",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    bed.set_status(&json!({"conditions": [pending]})).await;
    assert!(bed.run(&["upgrade"]).await.1.starts_with("packages change; 2 jobs run\n"));
    assert!(!restart().await);
    assert!(bed.run(&["upgrade", "--now"]).await.1.starts_with("restarting: packages change; 2 jobs run\n"));
    assert!(restart().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doctor_names_what_is_wrong_and_fails() {
    let bed = Bed::new(2).await;
    bed.agent("n1").await;
    let (code, said, _) = bed.run(&["doctor"]).await;
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("PROBLEM") && said.contains("there is no DaemonSet install-flux"), "{said}");
    let checks: Value = serde_json::from_str(&bed.run(&["doctor", "-o", "json"]).await.1).unwrap();
    let subjects: Vec<_> = checks.as_array().unwrap().iter().map(|check| check["subject"].as_str().unwrap()).collect();
    assert_eq!(subjects, ["Kubernetes", "agents", "planner", "FluxInstance", "versions", "nodes"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uninstall_goes_to_the_cluster_it_began_with() {
    let bed = Bed::new(0).await;
    let kubeconfig = bed.home.path().join("kubeconfig");
    let (code, _, complaint) = bed.run(&["uninstall"]).await;
    assert!(code == 2 && complaint.contains("There is no FluxInstance"), "{complaint}");
    assert!(complaint.contains("context local, server https://"), "{complaint}");
    // The first kubectl call is a probe; a failing delete ends the command.
    let (code, said, complaint) = bed.run(&["uninstall", "--yes"]).await;
    assert!(code == 7 && said.contains("all hosts are clean\n"), "{said}{complaint}");
    assert!(said.contains("--context\nlocal\ndelete\n--ignore-not-found\n--timeout=600s\n"), "{said}");
    // kubectl refuses a file with objects of another namespace than --namespace names.
    assert!(!said.contains("--namespace"), "{said}");
    // This kubectl changes the kubeconfig, as somebody may who logs in elsewhere meanwhile.
    let change = format!(
        "#!/bin/sh\nexec /bin/sed -i 's|server: *https://|server: https://other.|;s|\"server\": *\"https://|&other.|' {}\n",
        kubeconfig.display()
    );
    fs::write(bed.home.path().join("kubectl"), change).unwrap();
    let (code, said, complaint) = bed.run(&["uninstall", "--yes"]).await;
    assert!(code == 1 && !said.contains("delete"), "{said}{complaint}");
    assert!(complaint.contains("the kubeconfig has changed"), "{complaint}");
}

#[test]
fn the_programs_own_name_stays_the_program() {
    let output = Command::new(env!("CARGO_BIN_EXE_flux-distribute")).arg("--version").output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("flux-distribute "));
    let link = tempfile::tempdir().unwrap();
    let plugin: PathBuf = link.path().join("kubectl-flux");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_flux-distribute"), &plugin).unwrap();
    let output = Command::new(plugin).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(help.contains("kubectl flux doctor") && help.contains("Usage: kubectl flux [OPTIONS] <COMMAND>"), "{help}");
}
