//! The one file, the kustomize base and the Helm chart put the same objects on a cluster, and a real API server takes them all.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

#[path = "support/api_server.rs"]
mod api_server;
#[path = "support/columns.rs"]
mod columns;
#[path = "support/needs.rs"]
mod needs;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use api::{CONFIGMAP_DEFAULT, CONFIGMAP_DEFAULT_KEY, FluxInstance, FluxInstanceSpec, FluxNode, Resources};
use api_server::ApiServer;
use k8s_openapi::{
    api::core::v1::Node,
    jiff::{SignedDuration, Timestamp},
};
use model::{
    eligibility::NodeView,
    read::{read, read_default},
    resources::declared,
};
use needs::{Need, helm, kubectl, skips_without};
use serde::Deserialize;
use serde_json::{Value, json};

/// Objects by kind, namespace and name.
type Objects = BTreeMap<(String, String, String), Value>;

const INSTALLER: &str = "deploy/daemonset-installer.yaml";
const CHART: &str = "deploy/chart";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap()
}

fn objects(text: &str) -> Objects {
    let documents = serde_norway::Deserializer::from_str(text).map(|document| Value::deserialize(document).unwrap());
    let mut objects = Objects::new();
    for object in documents.filter(|document| !document.is_null()) {
        let key = key(&object);
        assert_eq!(objects.insert(key.clone(), normal(object)), None, "{key:?} is there twice");
    }
    objects
}

fn key(object: &Value) -> (String, String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&object["kind"]), text(&object["metadata"]["namespace"]), text(&object["metadata"]["name"]))
}

/// Each program writes whole numbers in its own way: 1 or 1.0.
fn normal(value: Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64().unwrap()),
        Value::Array(values) => values.into_iter().map(normal).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, normal(value))).collect(),
        other => other,
    }
}

fn assert_same(found: &Objects, expected: &Objects) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (key, object) in expected {
        let difference = json_patch::diff(object, &found[key]);
        assert!(difference.is_empty(), "{key:?}: {difference}");
    }
}

/// What a program that ran in the repository printed.
fn output(program: &Path, words: &[&str], input: &str, kubeconfig: Option<&Path>) -> Result<String, String> {
    let kubeconfig = kubeconfig.unwrap_or(Path::new("/dev/null"));
    let mut command = Command::new(program);
    // Another API server may have had the same port: what kubectl remembers of it must not count.
    command.args(words).current_dir(root()).env("KUBECONFIG", kubeconfig).env("HOME", kubeconfig.parent().unwrap());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let [said, complained] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    if output.status.success() { Ok(said) } else { Err(format!("{said}{complained}")) }
}

fn run(program: &Path, words: &[&str]) -> String {
    output(program, words, "", None).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

/// A program that speaks to an API server.
struct Speaker<'a>(PathBuf, &'a ApiServer);

impl Speaker<'_> {
    fn works(&self, words: &[&str]) -> String {
        self.with(words, "")
    }

    fn with(&self, words: &[&str], input: &str) -> String {
        output(&self.0, words, input, Some(&self.1.kubeconfig())).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    fn get(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.works(&[&["-n", "flux-distribute", "get", "-o", "json"], words].concat())).unwrap()
    }
}

fn overlays() -> Vec<String> {
    let entries = fs::read_dir(root().join("example/kustomize")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut overlays: Vec<_> = names.map(|name| format!("example/kustomize/{name}")).collect();
    overlays.sort();
    assert_eq!(overlays.len(), 5, "{overlays:?}");
    overlays
}

/// The objects of the chart: those of the one file, with the first FluxInstance itself in place of the ConfigMap that it is made from.
fn of_chart(mut objects: Objects, spec: &Value) -> Objects {
    let default = ("ConfigMap".to_owned(), "flux-distribute".to_owned(), CONFIGMAP_DEFAULT.to_owned());
    let text = objects.remove(&default).unwrap()["data"][CONFIGMAP_DEFAULT_KEY].as_str().unwrap().to_owned();
    assert_eq!(read_default(&text).unwrap(), FluxInstanceSpec::default());
    let instance = json!({
        "apiVersion": "distribute.flux-framework.org/v1alpha1",
        "kind": "FluxInstance",
        "metadata": {"name": "flux", "namespace": "flux-distribute"},
        "spec": spec,
    });
    objects.insert(key(&instance), normal(instance));
    objects
}

fn template(helm: &Path, words: &[&str]) -> Result<String, String> {
    output(helm, &[&["template", "test", CHART, "--include-crds"], words].concat(), "", None)
}

#[test]
fn the_chart_is_of_this_version() {
    let [chart, values] = ["Chart.yaml", "values.yaml"].map(|name| file(&format!("{CHART}/{name}")));
    let [chart, values]: [Value; 2] = [chart, values].map(|text| serde_norway::from_str(&text).unwrap());
    assert_eq!([&chart["version"], &chart["appVersion"]], [env!("CARGO_PKG_VERSION"); 2]);
    let is_set = |object: &&Value| object["kind"] == "DaemonSet";
    let installer = objects(&file(INSTALLER));
    for set in installer.values().filter(is_set) {
        assert_eq!(set["spec"]["template"]["spec"]["containers"][0]["image"], values["image"]);
    }
}

#[test]
fn the_kustomize_base_renders_the_one_file() {
    if skips_without([Need::Kubectl]) {
        return;
    }
    let rendered = run(&kubectl().unwrap(), &["kustomize", "deploy"]);
    assert_same(&objects(&rendered), &objects(&file(INSTALLER)));
}

#[test]
fn an_overlay_changes_the_image_and_a_first_spec_that_is_valid() {
    if skips_without([Need::Kubectl]) {
        return;
    }
    for overlay in overlays() {
        let rendered = run(&kubectl().unwrap(), &["kustomize", &overlay]);
        let documents = read(&rendered).unwrap();
        let [spec] = &documents.specs[..] else { panic!("{overlay}: {} specs", documents.specs.len()) };
        assert_eq!(spec.findings, [], "{overlay}");
        assert_ne!(spec.spec, Some(FluxInstanceSpec::default()), "{overlay} changes nothing");
        let mut found = objects(&rendered);
        let expected = objects(&file(INSTALLER));
        for (key, object) in &mut found {
            match key.0.as_str() {
                "ConfigMap" => object["data"] = expected[key]["data"].clone(),
                "DaemonSet" => {
                    let container = |set: &Value| set["spec"]["template"]["spec"]["containers"][0].clone();
                    let installed = container(&expected[key]);
                    let changed = &mut object["spec"]["template"]["spec"]["containers"][0];
                    for field in ["image", "imagePullPolicy"] {
                        changed[field] = installed[field].clone();
                    }
                }
                _ => {}
            }
        }
        assert_same(&found, &expected);
    }
}

/// NVIDIA's GPU feature discovery, which makes the labels that the overlay selects by, comes with the device plugin.
#[test]
fn the_gpu_overlay_gives_flux_the_gpus_beside_a_device_plugin() {
    if skips_without([Need::Kubectl]) {
        return;
    }
    let rendered = run(&kubectl().unwrap(), &["kustomize", "example/kustomize/gpu"]);
    let spec = read(&rendered).unwrap().specs.remove(0).spec.unwrap();
    let taint = |key: &str, value: &str| json!({"key": key, "value": value, "effect": "NoSchedule"});
    let dedicated = taint("distribute.flux-framework.org/dedicated", "flux");
    for (taints, expected) in [
        (json!([dedicated]), 2),
        (json!([dedicated, taint("nvidia.com/gpu", "present")]), 2),
        (json!([taint("nvidia.com/gpu", "present")]), 0),
    ] {
        let gpus = json!({"nvidia.com/gpu": "2"});
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "node1", "labels": {"nvidia.com/gpu.present": "true"}},
            "spec": {"taints": taints}, "status": {"capacity": gpus, "allocatable": gpus},
        }))
        .unwrap();
        let found = Resources { cores: 8, gpus: 2 };
        let declared = declared(&spec, &NodeView::from(&node), found, false, false);
        assert_eq!(declared.gpus, expected, "{taints}");
    }
}

#[test]
fn the_chart_renders_the_one_file() {
    if skips_without([Need::Helm]) {
        return;
    }
    let helm = helm().unwrap();
    let installer = objects(&file(INSTALLER));
    assert_same(&objects(&template(&helm, &[]).unwrap()), &of_chart(installer.clone(), &json!({})));

    let with_pods = template(&helm, &["--set", "instance.pods.enabled=true,podNamespaces={first,second}"]).unwrap();
    let mut with_pods = objects(&with_pods);
    for namespace in ["first", "second"] {
        let binding = with_pods.remove(&("RoleBinding".to_owned(), namespace.to_owned(), "flux-bridge".to_owned()));
        let binding = binding.unwrap();
        assert_eq!(binding["roleRef"]["name"], "flux-bridge");
        assert_eq!(binding["subjects"][0]["name"], "install-flux");
    }
    let mut expected = of_chart(installer, &json!({"pods": {"enabled": true}}));
    expected.extend(objects(&file("deploy/pods.yaml")));
    assert_same(&with_pods, &expected);
}

#[test]
fn helm_lint_finds_nothing() {
    if skips_without([Need::Helm]) {
        return;
    }
    run(&helm().unwrap(), &["lint", "--strict", CHART]);
}

#[test]
fn the_charts_values_arrive_in_the_objects() {
    if skips_without([Need::Helm]) {
        return;
    }
    let set = "image=registry/x:1,imagePullSecrets[0].name=registry,env[0].name=HTTPS_PROXY,env[0].value=http://proxy,\
               controlPlaneTolerations[0].key=control,createNamespace=false,instance.maxSize=12";
    let rendered = objects(&template(&helm().unwrap(), &["--set", set]).unwrap());
    let of = |kind: &str, name: &str| &rendered[&(kind.to_owned(), "flux-distribute".to_owned(), name.to_owned())];
    for name in ["install-flux", "install-flux-control-planes"] {
        let pod = &of("DaemonSet", name)["spec"]["template"]["spec"];
        let container = &pod["containers"][0];
        assert_eq!(container["image"], "registry/x:1");
        assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
        assert_eq!(container["env"][0], json!({"name": "HTTPS_PROXY", "value": "http://proxy"}));
        assert_eq!(container["env"][1]["name"], "NODE_NAME");
        let tolerates = pod["tolerations"].as_array().unwrap().contains(&json!({"key": "control"}));
        assert_eq!(tolerates, name != "install-flux");
    }
    assert_eq!(of("FluxInstance", "flux")["spec"], normal(json!({"maxSize": 12})));
    assert!(!rendered.keys().any(|(kind, ..)| kind == "Namespace"));
}

#[test]
fn the_chart_takes_the_spec_of_each_example() {
    if skips_without([Need::Helm]) {
        return;
    }
    for entry in fs::read_dir(root().join("example")).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().starts_with("fluxinstance-") {
            continue;
        }
        let example: Value = serde_norway::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let values = json!({"instance": example["spec"]}).to_string();
        let rendered = output(&helm().unwrap(), &["template", "test", CHART, "--values", "-"], &values, None);
        let rendered = objects(&rendered.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        assert_eq!(rendered[&key(&example)], normal(example), "{}", path.display());
    }
}

#[test]
fn the_charts_wrong_values_are_refused_by_name() {
    if skips_without([Need::Helm]) {
        return;
    }
    for (words, said) in [
        (&["--set", "images=x"][..], "images"),
        (&["--set", "instance.maxsize=12"], "maxsize"),
        (&["--set", "instance.maxSize=0"], "maxSize"),
        (&["--set", "instance.packages.bundle.url=https://x/y"], "sha256"),
        (&["--set", "instance.uninstall.runningJobs=Maybe"], "runningJobs"),
        (&["--set", "instance.drain.timeout=soon"], "timeout"),
        (&["--set", "podNamespaces={default}"], "podNamespaces needs instance.pods.enabled"),
        (&["--namespace", "flux-distribute"], "so its release must be in another one"),
    ] {
        let error = template(&helm().unwrap(), words).unwrap_err();
        assert!(error.contains(said), "{words:?}: {error}");
    }
}

#[test]
fn a_real_api_server_takes_the_base_and_each_overlay() {
    if skips_without([Need::ApiServer, Need::Kubectl]) {
        return;
    }
    let server = ApiServer::up();
    server.wait(&kubectl().unwrap());
    let kubectl = Speaker(kubectl().unwrap(), &server);
    kubectl.works(&["apply", "-k", "deploy"]);
    for overlay in overlays() {
        kubectl.works(&["apply", "--dry-run=server", "-k", &overlay]);
        kubectl.works(&["apply", "-k", &overlay]);
        let rendered = objects(&kubectl.works(&["kustomize", &overlay]));
        for (key, object) in &rendered {
            let there = match key.0.as_str() {
                "ConfigMap" => (kubectl.get(&["configmap", &key.2])["data"].clone(), object["data"].clone()),
                "DaemonSet" => {
                    let image = "/spec/template/spec/containers/0/image";
                    let there = kubectl.get(&["daemonset", &key.2]);
                    (there.pointer(image).unwrap().clone(), object.pointer(image).unwrap().clone())
                }
                _ => continue,
            };
            assert_eq!(there.0, there.1, "{overlay}: {key:?}");
        }
    }
    // The one file changes only what the last overlay has changed.
    kubectl.works(&["apply", "-f", INSTALLER]);
    let diff = kubectl.works(&["diff", "-k", "deploy"]);
    assert_eq!(diff, "");
}

/// The reviewed tables in `crates/kubectl/src/states.txt` are made in the same way.
#[test]
fn kubectl_prints_the_tables_that_were_reviewed() {
    if skips_without([Need::ApiServer, Need::Kubectl]) {
        return;
    }
    let server = ApiServer::up();
    server.wait(&kubectl().unwrap());
    let kubectl = Speaker(kubectl().unwrap(), &server);
    kubectl.works(&["apply", "-f", "deploy/chart/crds"]);
    kubectl.works(&["wait", "--for=condition=Established", "crd", "--all"]);
    kubectl.works(&["create", "namespace", "flux-distribute"]);
    let version = "apiVersion: distribute.flux-framework.org/v1alpha1";
    let nodes = ["n1", "hpc-worker-gpu-node-2"].map(|name| {
        format!("---\n{version}\nkind: FluxNode\nmetadata: {{name: {name}}}\nspec: {{nodeName: {name}, rank: 12345, reason: cordoned}}\n")
    });
    let instance = format!("{version}\nkind: FluxInstance\nmetadata: {{name: flux}}\nspec: {{}}\n");
    kubectl.with(
        &["-n", "flux-distribute", "create", "-f", "-"],
        &[&instance, &nodes[0], &nodes[1]].map(String::as_str).concat(),
    );
    for (object, status) in [
        (
            "fluxinstance/flux",
            json!({"phase": "Running", "size": 20000, "lead": "n1", "reason": "AsExpected", "message": "a b"}),
        ),
        (
            "fluxnode/n1",
            json!({"phase": "Installing", "message": "31 of 66", "account": {"hostJobs": 7, "gangs": 0, "otherPods": 1, "overlapping": 0}}),
        ),
    ] {
        let patch = json!({ "status": status }).to_string();
        kubectl.works(&[
            "-n",
            "flux-distribute",
            "patch",
            object,
            "--subresource=status",
            "--type=merge",
            "--patch",
            &patch,
        ]);
    }
    let read = |kind: &str| kubectl.get(&[kind])["items"].clone();
    let (instances, nodes) = (
        serde_json::from_value::<Vec<FluxInstance>>(read("fxi")),
        serde_json::from_value::<Vec<FluxNode>>(read("fxn")),
    );
    let (instances, nodes) = (instances.unwrap(), nodes.unwrap());
    for is_wide in [false, true] {
        let words = |kind: &'static str| {
            [vec!["-n", "flux-distribute", "get", kind], if is_wide { vec!["-o", "wide"] } else { vec![] }].concat()
        };
        let begin = Timestamp::now();
        let printed = [kubectl.works(&words("fxi")), kubectl.works(&words("fxn"))]
            .map(|table| table.lines().map(|line| format!("{}\n", line.trim_end())).collect::<String>());
        // The ages are those of some second meanwhile.
        let seconds = Timestamp::now().duration_since(begin).as_secs() + 1;
        let mut at = (0..=seconds).map(|second| begin + SignedDuration::from_secs(second));
        let expected = |now| [columns::get(&instances, is_wide, now), columns::get(&nodes, is_wide, now)];
        for (index, table) in printed.iter().enumerate() {
            assert!(
                at.clone().any(|now| expected(now)[index] == *table),
                "{table}\n{}",
                expected(at.next().unwrap())[index]
            );
        }
    }
}

#[test]
fn a_real_api_server_takes_the_chart() {
    if skips_without([Need::ApiServer, Need::Kubectl, Need::Helm]) {
        return;
    }
    let set = "instance.pods.enabled=true,instance.maxSize=12,podNamespaces={default}";
    let dry = ApiServer::up();
    dry.wait(&kubectl().unwrap());
    let on_dry = Speaker(kubectl().unwrap(), &dry);
    for words in [
        &["apply", "-f", "deploy/chart/crds"][..],
        &["wait", "--for=condition=Established", "crd", "--all"],
        &["create", "namespace", "flux-distribute"],
        &["create", "namespace", "flux-host-jobs"],
    ] {
        on_dry.works(words);
    }
    on_dry.with(&["apply", "--dry-run=server", "-f", "-"], &template(&helm().unwrap(), &["--set", set]).unwrap());
    drop(dry);

    let server = ApiServer::up();
    server.wait(&kubectl().unwrap());
    let [kubectl, helm] = [kubectl(), helm()].map(|program| Speaker(program.unwrap(), &server));
    let spec = || kubectl.get(&["fluxinstance", "flux"])["spec"].clone();
    helm.works(&["install", "test", CHART]);
    assert_eq!(spec()["maxSize"], Value::Null);
    // What Helm has not set stays as somebody else has it.
    kubectl.works(&["-n", "flux-distribute", "scale", "fluxinstance/flux", "--replicas=3"]);
    helm.works(&["upgrade", "test", CHART, "--set", set]);
    assert_eq!([&spec()["size"], &spec()["maxSize"]], [3, 12]);
    kubectl.works(&["-n", "default", "get", "rolebinding", "flux-bridge"]);
    helm.works(&["upgrade", "test", CHART, "--set", "instance.topology=flat"]);
    assert_eq!([&spec()["size"], &spec()["maxSize"]], [&json!(3), &Value::Null]);

    helm.works(&["uninstall", "test"]);
    assert_eq!(kubectl.get(&["fluxinstances"])["items"], json!([]));
    assert_eq!(kubectl.get(&["daemonsets"])["items"], json!([]));
    kubectl.works(&["get", "crd", "fluxinstances.distribute.flux-framework.org"]);
}
