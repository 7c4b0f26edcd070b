//! Makes the generated files of the Helm chart from deploy/parts, deploy/pods.yaml and the CRDs: its templates, and the schema of its
//! values.

use api::{FluxInstance, crds};
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

const HEAD: &str = "{{- /* Made by `make manifests`; don't edit this file. */ -}}\n";

/// The generated files of the chart, by their names in it. `part` reads a file of deploy/ and `control_planes` is the second DaemonSet.
pub fn files(part: impl Fn(&str) -> String, control_planes: &str) -> Vec<(&'static str, String)> {
    let template = |text: &str| format!("{HEAD}{text}");
    vec![
        (
            "crds/crds.yaml",
            format!("# Made by `make manifests` from the types; don't edit this file.\n{}", crds().unwrap()),
        ),
        ("templates/1-namespace.yaml", template(&optional_namespace(&part("parts/1-namespace.yaml")))),
        ("templates/3-rbac.yaml", template(&part("parts/3-rbac.yaml"))),
        ("templates/3-flow-control.yaml", template(&part("parts/3-flow-control.yaml"))),
        ("templates/4-admission.yaml", template(&part("parts/4-admission.yaml"))),
        ("templates/6-daemonset.yaml", template(&daemon_set(&part("parts/6-daemonset.yaml")))),
        ("templates/7-control-planes.yaml", template(&tolerant(&daemon_set(control_planes)))),
        ("templates/8-pods.yaml", template(&optional("(.Values.instance.pods).enabled", &part("pods.yaml")))),
        ("values.schema.json", format!("{:#}\n", schema())),
    ]
}

/// A DaemonSet with the image of the chart's values, and with their environment and Secrets.
fn daemon_set(text: &str) -> String {
    let text = replaced(text, "image: ", |spaces, _| format!("{spaces}image: {{{{ .Values.image | quote }}}}"));
    let text = replaced(&text, "containers:", |spaces, line| {
        format!("{}{line}", list("imagePullSecrets", spaces, &format!("{spaces}imagePullSecrets:\n")))
    });
    replaced(&text, "- name: NODE_NAME", |spaces, line| format!("{}{line}", list("env", spaces, "")))
}

/// The DaemonSet for control planes with the tolerations of the chart's values.
fn tolerant(text: &str) -> String {
    let first = "- key: node.kubernetes.io/not-ready";
    replaced(text, first, |spaces, line| format!("{}{line}", list("controlPlaneTolerations", spaces, "")))
}

/// The items of a list in the chart's values, below `head` if there are any.
fn list(value: &str, spaces: &str, head: &str) -> String {
    let indent = spaces.len();
    format!(
        "{spaces}{{{{- with .Values.{value} }}}}\n{head}{spaces}{{{{- toYaml . | nindent {indent} }}}}\n{spaces}{{{{- end }}}}\n"
    )
}

/// `text` with another line in place of the only one that begins with `begin`. `change` gets its indentation and the line.
fn replaced(text: &str, begin: &str, change: impl Fn(&str, &str) -> String) -> String {
    let lines: Vec<_> = text.lines().filter(|line| line.trim_start().starts_with(begin)).collect();
    let [line] = lines[..] else { panic!("{} lines begin with {begin}", lines.len()) };
    let spaces = &line[..line.len() - line.trim_start().len()];
    text.replace(&format!("{line}\n"), &format!("{}\n", change(spaces, line)))
}

fn optional(condition: &str, text: &str) -> String {
    format!("{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n")
}

/// The first document is the Namespace.
fn optional_namespace(text: &str) -> String {
    let (namespace, rest) = text.strip_prefix("---\n").unwrap().split_once("---\n").unwrap();
    assert!(namespace.contains("\nkind: Namespace\n"), "{namespace}");
    format!("{}---\n{rest}", optional(".Values.createNamespace", &format!("---\n{namespace}")))
}

/// The schema of the chart's values, in which `instance` is the spec of a FluxInstance.
fn schema() -> Value {
    let crd = json!(FluxInstance::crd());
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let objects = json!({"type": "array", "items": {"type": "object"}});
    let name = json!({"type": "string", "minLength": 1});
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "additionalProperties": false,
        "required": ["image", "instance"],
        "properties": {
            "image": name,
            "imagePullSecrets": {"type": "array", "items": {
                "type": "object", "additionalProperties": false, "required": ["name"], "properties": {"name": name},
            }},
            "env": {"type": "array", "items": {
                "type": "object", "required": ["name"], "properties": {"name": name, "value": {"type": "string"}},
            }},
            "createNamespace": {"type": "boolean"},
            "controlPlaneTolerations": objects,
            "podNamespaces": {"type": "array", "items": name, "uniqueItems": true},
            "instance": json_schema(spec),
            // Helm adds them.
            "global": {"type": "object"},
        },
    })
}

/// A CRD's schema as a JSON Schema that permits no unknown fields. Rules in CEL, which JSON Schema lacks, are left to the API server.
fn json_schema(crd: &Value) -> Value {
    let Value::Object(fields) = crd else { return crd.clone() };
    let mut schema = Map::new();
    for (key, value) in fields {
        let value = match key.as_str() {
            "properties" => {
                schema.insert("additionalProperties".to_owned(), false.into());
                let properties = value.as_object().unwrap().iter();
                properties.map(|(name, field)| (name.clone(), json_schema(field))).collect::<Map<_, _>>().into()
            }
            "items" | "additionalProperties" => json_schema(value),
            "type" if fields.get("nullable") == Some(&true.into()) => json!([value, "null"]),
            "nullable" | "format" => continue,
            key if key.starts_with("x-kubernetes-") => continue,
            _ => value.clone(),
        };
        schema.insert(key.clone(), value);
    }
    schema.into()
}
