//! The API server of local mode under kubectl: `KUBECTL` names one, else the one in PATH is taken.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod apiserver_support;
#[path = "support/needs.rs"]
mod needs;

use std::{path::PathBuf, process::Stdio};

use apiserver::Store;
use tokio::{io::AsyncWriteExt, process::Command};

use apiserver_support::{Server, start_with};
use needs::{Need, kubectl, skips_without};

struct Kubectl {
    program: PathBuf,
    home: tempfile::TempDir,
    /// It ends with this.
    server: Server,
}

impl Kubectl {
    /// Runs kubectl and returns whether it was content, and all that it said.
    async fn run(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let mut child = Command::new(&self.program)
            .args(arguments)
            .env_clear()
            .env("HOME", self.home.path())
            .env("KUBECONFIG", self.home.path().join("kubeconfig"))
            .env("PATH", "/usr/bin:/bin")
            .env("KUBE_EDITOR", "sed -i s/8060/8061/")
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

/// A server, and kubectl with a kubeconfig for it; None if the test can't run.
async fn serve_kubectl() -> Option<Kubectl> {
    if skips_without([Need::Kubectl]) {
        return None;
    }
    let program = kubectl()?;
    let server = start_with(Store::new()).await;
    let kubectl = Kubectl { program, home: tempfile::tempdir().unwrap(), server };
    std::fs::write(kubectl.home.path().join("kubeconfig"), kubectl.server.kubeconfig.to_string()).unwrap();
    Some(kubectl)
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

const INSTANCE: &str = r"
apiVersion: distribute.flux-framework.org/v1alpha1
kind: FluxInstance
metadata: {name: flux, namespace: flux-distribute}
spec: {maxSize: 8, broker: {port: 8060}}
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_works_on_our_kinds_as_on_any_cluster() {
    let Some(kubectl) = serve_kubectl().await else { return };

    kubectl.works(&["apply", "-f", "-"], NAMESPACE).await;
    let changed = kubectl.works(&["apply", "-f", "-"], &NAMESPACE.replace("image:1", "image:2")).await;
    assert!(changed.contains("install-flux configured"), "{changed}");
    let images = ["get", "daemonset", "install-flux", "-o", "jsonpath={.spec.template.spec.containers[*].image}"];
    assert_eq!(kubectl.works(&images, "").await, "image:2 other:1");

    kubectl.works(&["create", "-f", "-"], INSTANCE).await;
    let (good, text) = kubectl.run(&["apply", "-f", "-"], &INSTANCE.replace("maxSize", "maxSise")).await;
    assert!(!good && text.contains("spec.maxSise"), "{text}");
    kubectl.works(&["apply", "-f", "-"], INSTANCE).await;
    kubectl.works(&["apply", "-f", "-"], &INSTANCE.replace("maxSize: 8", "maxSize: 16")).await;
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
    assert_eq!(kubectl.works(&facts, "").await, "3 16 8061");

    let (good, text) = kubectl.run(&["patch", "fxi", "flux", "--type=merge", "-p", r#"{"spec":{"size":0}}"#], "").await;
    assert!(!good && text.contains("spec.size: is 0: to uninstall, delete the FluxInstance"), "{text}");
    let status = r#"{"status":{"phase":"Running","observedGeneration":99,"conditions":[{"type":"Ready","status":"True",
        "reason":"AllOnline","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}"#;
    kubectl.works(&["patch", "fxi", "flux", "--subresource=status", "--type=merge", "-p", status], "").await;
    kubectl.works(&["wait", "--for=condition=Ready", "fxi/flux", "--timeout=20s"], "").await;
    let table = kubectl.works(&["get", "fxi"], "").await;
    assert!(table.starts_with("NAME") && table.contains("PHASE") && table.contains("Running"), "{table}");
    let described = kubectl.works(&["describe", "fxi", "flux"], "").await;
    assert!(described.contains("AllOnline") && described.contains("Events:"), "{described}");

    let node = r#"{"apiVersion":"distribute.flux-framework.org/v1alpha1","kind":"FluxNode","metadata":{"name":"n1"},
        "spec":{"nodeName":"n1","rank":0}}"#;
    kubectl.works(&["create", "-f", "-"], node).await;
    assert!(!kubectl.works(&["get", "fxn"], "").await.contains("PACKAGES"));
    assert!(kubectl.works(&["get", "fxn", "-o", "wide"], "").await.contains("PACKAGES"));
    for kinds in ["nodes,namespaces,configmaps,secrets,events,serviceaccounts,leases,daemonsets", "crd", "all"] {
        kubectl.works(&["get", kinds, "--all-namespaces"], "").await;
    }

    kubectl.works(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=20s"], "").await;
    kubectl.works(&["explain", "fxi.spec.uninstall"], "").await;
    kubectl.works(&["delete", "fxi", "flux", "--timeout=20s"], "").await;
    kubectl.works(&["delete", "fxn", "--all", "--timeout=20s"], "").await;
    kubectl.works(&["wait", "--for=delete", "fxn", "--all", "--timeout=20s"], "").await;
    kubectl.works(&["delete", "namespace", "flux-distribute", "--timeout=20s"], "").await;
    let (good, text) = kubectl.run(&["get", "fxi", "flux"], "").await;
    assert!(!good && text.contains("NotFound"), "{text}");
}

/// Of each kind that a manifest for a real cluster has beside ours, one.
const INSTALLER: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: flux-distribute}
rules: [{apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: flux-distribute}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: flux-distribute}
subjects: [{kind: ServiceAccount, name: flux-distribute, namespace: default}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: flux-distribute, namespace: default}
rules: [{apiGroups: [""], resources: [secrets], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: flux-distribute, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: flux-distribute}
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: flux-distribute}
value: 1000
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: flux-distribute}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], resources: [nodes], operations: [UPDATE]}]
  validations: [{expression: "true"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: flux-distribute}
spec: {policyName: flux-distribute, validationActions: [Deny]}
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_applies_a_manifest_for_a_real_cluster() {
    let Some(kubectl) = serve_kubectl().await else { return };
    let made = kubectl.works(&["apply", "-f", "-"], INSTALLER).await;
    assert_eq!(made.matches(" created").count(), 7, "{made}");
    let again = kubectl.works(&["apply", "-f", "-"], INSTALLER).await;
    assert_eq!(again.matches(" unchanged").count(), 7, "{again}");
    let changed = kubectl.works(&["apply", "-f", "-"], &INSTALLER.replace("1000", "2000")).await;
    assert_eq!(changed.matches(" configured").count(), 1, "{changed}");
    kubectl.works(&["describe", "-f", "-"], INSTALLER).await;
    kubectl.works(&["delete", "-f", "-", "--timeout=20s"], INSTALLER).await;
}

const KINDS_THAT_ARE_NOT_SERVED: &str = r"
apiVersion: apps/v1
kind: Deployment
metadata: {name: service}
spec: {}
---
apiVersion: v1
kind: Service
metadata: {name: service}
spec: {}
";

const POD: &str = r"
apiVersion: v1
kind: Pod
metadata: {name: one}
spec: {nodeName: node1, containers: [{name: main, image: 'image:1'}]}
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_names_what_the_server_lacks() {
    let Some(kubectl) = serve_kubectl().await else { return };
    kubectl.works(&["apply", "-f", "-"], NAMESPACE).await;
    let (good, text) = kubectl.run(&["apply", "-f", "-"], KINDS_THAT_ARE_NOT_SERVED).await;
    for kind in ["Deployment", "Service"] {
        assert!(!good && text.contains(&format!("no matches for kind \"{kind}\"")), "{text}");
    }
    kubectl.works(&["apply", "-f", "-"], POD).await;
    for command in [&["logs", "one"][..], &["exec", "one", "--", "ls"], &["attach", "one"]] {
        let (good, text) = kubectl.run(command, "").await;
        assert!(!good && text.contains("flux-distribute local logs NODE"), "{command:?}: {text}");
    }
}
