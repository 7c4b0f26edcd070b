//! The API server of local mode under kubectl: `KUBECTL` names one, else the one in PATH is taken.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::{path::PathBuf, process::Stdio, sync::Arc};

use flux_distribute::local::apiserver::{Store, serve};
use tokio::{io::AsyncWriteExt, net::TcpListener, process::Command};

struct Kubectl {
    program: PathBuf,
    home: tempfile::TempDir,
    server: String,
}

fn find_kubectl() -> Option<PathBuf> {
    let in_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let candidates = std::env::var_os("KUBECTL").map(PathBuf::from).into_iter();
    candidates
        .chain(in_path.map(|directory| directory.join("kubectl")))
        .find(|program| program.is_file())
}

impl Kubectl {
    /// Runs kubectl and returns whether it was content, and all that it said.
    async fn run(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let mut child = Command::new(&self.program)
            .args(["--server", &self.server, "--namespace", "flux-distribute"])
            .args(arguments)
            .env_clear()
            .env("HOME", self.home.path())
            .env("PATH", "/usr/bin:/bin")
            .env("KUBE_EDITOR", "sed -i s/8051/8052/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        drop(stdin);
        let output = child.wait_with_output().await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    }

    async fn works(&self, arguments: &[&str], input: &str) -> String {
        let (good, text) = self.run(arguments, input).await;
        assert!(good, "kubectl {arguments:?}: {text}");
        text
    }
}

const NAMESPACE: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: flux-distribute}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: install-flux, namespace: flux-distribute}
spec:
  selector: {matchLabels: {app: x}}
  template:
    metadata: {labels: {app: x}}
    spec: {containers: [{name: agent, image: "image:1"}, {name: other, image: "other:1"}]}
"#;

const INSTANCE: &str = r#"
apiVersion: distribute.flux-framework.org/v1alpha1
kind: FluxInstance
metadata: {name: flux, namespace: flux-distribute}
spec: {maxSize: 8, broker: {port: 8051}}
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_works_on_our_kinds_as_on_any_cluster() {
    let Some(program) = find_kubectl() else {
        eprintln!("skipped: no kubectl (set KUBECTL to the path of one)");
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // kubectl sends no bearer token over plain HTTP, only what the URL holds.
    let server = format!("http://local:sesame@{}", listener.local_addr().unwrap());
    tokio::spawn(serve(
        listener,
        Arc::new(Store::new()),
        "sesame".into(),
        std::future::pending(),
    ));
    let kubectl = Kubectl {
        program,
        home: tempfile::tempdir().unwrap(),
        server,
    };

    kubectl.works(&["apply", "-f", "-"], NAMESPACE).await;
    let changed = kubectl
        .works(&["apply", "-f", "-"], &NAMESPACE.replace("image:1", "image:2"))
        .await;
    assert!(changed.contains("install-flux configured"), "{changed}");
    let images = [
        "get",
        "daemonset",
        "install-flux",
        "-o",
        "jsonpath={.spec.template.spec.containers[*].image}",
    ];
    assert_eq!(kubectl.works(&images, "").await, "image:2 other:1");

    kubectl.works(&["create", "-f", "-"], INSTANCE).await;
    let (good, text) = kubectl
        .run(&["apply", "-f", "-"], &INSTANCE.replace("maxSize", "maxSise"))
        .await;
    assert!(!good && text.contains("spec.maxSise"), "{text}");
    kubectl.works(&["apply", "-f", "-"], INSTANCE).await;
    kubectl
        .works(&["apply", "-f", "-"], &INSTANCE.replace("maxSize: 8", "maxSize: 16"))
        .await;
    kubectl.works(&["scale", "fxi", "flux", "--replicas=3"], "").await;
    kubectl.works(&["annotate", "fxi", "flux", "note=hello"], "").await;
    kubectl.works(&["label", "fxi", "flux", "tier=test"], "").await;
    kubectl.works(&["edit", "fxi", "flux"], "").await;
    let facts = [
        "get",
        "fxi",
        "-l",
        "tier in (test)",
        "-o",
        "jsonpath={.items[0].spec.size} {.items[0].spec.maxSize} {.items[0].spec.broker.port}",
    ];
    assert_eq!(kubectl.works(&facts, "").await, "3 16 8052");

    let (good, text) = kubectl
        .run(
            &["patch", "fxi", "flux", "--type=merge", "-p", r#"{"spec":{"size":0}}"#],
            "",
        )
        .await;
    assert!(!good && text.contains("spec.size: 0 should be"), "{text}");
    let status = r#"{"status":{"phase":"Running","observedGeneration":99,"conditions":[{"type":"Ready","status":"True",
        "reason":"AllOnline","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#;
    kubectl
        .works(
            &[
                "patch",
                "fxi",
                "flux",
                "--subresource=status",
                "--type=merge",
                "-p",
                status,
            ],
            "",
        )
        .await;
    kubectl
        .works(&["wait", "--for=condition=Ready", "fxi/flux", "--timeout=20s"], "")
        .await;
    let table = kubectl.works(&["get", "fxi"], "").await;
    assert!(
        table.starts_with("NAME") && table.contains("PHASE") && table.contains("Running"),
        "{table}"
    );
    let described = kubectl.works(&["describe", "fxi", "flux"], "").await;
    assert!(
        described.contains("AllOnline") && described.contains("Events:"),
        "{described}"
    );

    let node = r#"{"apiVersion":"distribute.flux-framework.org/v1alpha1","kind":"FluxNode","metadata":{"name":"n1"},
        "spec":{"nodeName":"n1","rank":0}}"#;
    kubectl.works(&["create", "-f", "-"], node).await;
    assert!(!kubectl.works(&["get", "fxn"], "").await.contains("PACKAGES"));
    assert!(
        kubectl
            .works(&["get", "fxn", "-o", "wide"], "")
            .await
            .contains("PACKAGES")
    );
    for kinds in [
        "nodes,namespaces,configmaps,secrets,events,serviceaccounts,leases,daemonsets",
        "crd",
        "all",
    ] {
        kubectl.works(&["get", kinds, "--all-namespaces"], "").await;
    }

    kubectl
        .works(
            &["wait", "--for=condition=Established", "crd", "--all", "--timeout=20s"],
            "",
        )
        .await;
    kubectl.works(&["explain", "fxi.spec.uninstall"], "").await;
    kubectl.works(&["delete", "fxi", "flux", "--timeout=20s"], "").await;
    kubectl.works(&["delete", "fxn", "--all", "--timeout=20s"], "").await;
    kubectl
        .works(&["wait", "--for=delete", "fxn", "--all", "--timeout=20s"], "")
        .await;
    kubectl
        .works(&["delete", "namespace", "flux-distribute", "--timeout=20s"], "")
        .await;
    let (good, text) = kubectl.run(&["get", "fxi", "flux"], "").await;
    assert!(!good && text.contains("NotFound"), "{text}");
}
