//! What `deploy/monitoring` and `docs/monitoring.md` say of the metrics is what the agents serve.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

#[path = "support/needs.rs"]
mod needs;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use api::METRICS_PORT;
use metrics::{Format, InstanceFacts, LeadFacts, Metrics, NodeFacts, Source, Start};
use needs::{Need, kubectl, promtool, skips_without};
use serde::Deserialize;
use serde_json::{Value, json};

const DIRECTORY: &str = "deploy/monitoring";
const PAGE: &str = "docs/monitoring.md";

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn file(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap()
}

fn yaml(name: &str) -> Value {
    serde_norway::from_str(&file(&format!("{DIRECTORY}/{name}"))).unwrap()
}

/// Compares `content` with the committed file. With UPDATE_MANIFESTS set the file is written, as `make manifests` does.
fn assert_is_current(name: &str, content: &str) {
    if std::env::var_os("UPDATE_MANIFESTS").is_some() {
        fs::write(path(name), content).unwrap();
    }
    assert!(file(name) == content, "{name} is stale: run `make manifests`");
}

/// One metric.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Family {
    name: String,
    kind: String,
    help: String,
    /// The values of each label that were served.
    labels: BTreeMap<String, BTreeSet<String>>,
}

impl Family {
    /// The names that a query may use.
    fn series(&self) -> Vec<String> {
        match self.kind.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", self.name)).into(),
            _ => vec![self.name.clone()],
        }
    }
}

/// The families in an answer to a scrape, in Prometheus' own format.
fn families(text: &str) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    let mut helps = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            helps.insert(name, help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let [name, kind, help] = [name, kind, helps[name]].map(str::to_owned);
            families.push(Family { name, kind, help, labels: BTreeMap::new() });
        } else {
            let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            for (label, value) in pairs(labels, "=").into_iter().filter(|(label, _)| label != "le") {
                families.last_mut().unwrap().labels.entry(label).or_default().insert(value);
            }
        }
    }
    families
}

/// The pairs of a label and a value in what stands between braces, if `operator` is between the two.
fn pairs(labels: &str, operator: &str) -> Vec<(String, String)> {
    let matchers = labels.split("\",").map(|matcher| matcher.trim_end_matches('"'));
    let pairs = matchers.filter_map(|matcher| matcher.split_once(&format!("{operator}\"")));
    pairs.map(|(label, value)| (label.trim().to_owned(), value.to_owned())).collect()
}

fn everything_happened() -> Metrics {
    let metrics = Metrics::default();
    metrics.api_request("get", Some(200));
    metrics.broker_start(Start::First);
    metrics.broker_start(Start::Died);
    metrics.live_change(true);
    metrics.planner_round(Duration::from_secs(1));
    metrics.installation(Duration::from_secs(1), &[(Source::Peer, 1)]);
    metrics.set_node(NodeFacts { broker_up: Some(true) }, None);
    metrics
}

fn text(metrics: &Metrics) -> String {
    metrics.text(Format::Text)
}

fn lead() -> Metrics {
    let metrics = everything_happened();
    let jobs =
        LeadFacts { jobs: Some((1, 1)), oldest_pending_since: Some(1), pending_nodes: Some(1), ..LeadFacts::default() };
    metrics.set_node(NodeFacts { broker_up: Some(true) }, Some(jobs));
    metrics
}

/// What the agent of the lead serves while it is the planner, which is everything.
fn all() -> Metrics {
    let metrics = lead();
    std::mem::forget(metrics.planning());
    metrics.set_instance(Some(InstanceFacts {
        lead_online: Some(true),
        dumped_at: Some(1),
        dump_every: Some(1),
        ..InstanceFacts::default()
    }));
    metrics
}

/// The queries of rules and dashboard, each with where it stands.
fn queries() -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for rule in rules() {
        queries.push((format!("alert {}", rule["alert"]), rule["expr"].as_str().unwrap().to_owned()));
    }
    for panel in panels() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push((format!("panel {}", panel["title"]), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    assert!(queries.len() > 30, "{queries:?}");
    queries
}

fn rules() -> Vec<Value> {
    yaml("rules.yml")["groups"][0]["rules"].as_array().unwrap().clone()
}

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&file(&format!("{DIRECTORY}/dashboard.json"))).unwrap();
    dashboard["panels"].as_array().unwrap().clone()
}

/// The words of `text` that are names of ours, each with what follows it.
fn names(text: &str) -> Vec<(&str, &str)> {
    let begins = text.match_indices("flux_distribute_").map(|(at, _)| &text[at..]);
    let is_in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    begins.map(|rest| rest.split_at(rest.find(|c| !is_in_name(c)).unwrap_or(rest.len()))).collect()
}

#[test]
fn rules_dashboard_and_page_name_only_what_agents_serve() {
    let served = families(&text(&all()));
    let family = |name: &str| served.iter().find(|family| family.series().iter().any(|series| series == name));
    for (place, query) in queries() {
        let names = names(&query);
        assert!(!names.is_empty(), "{place}: {query}");
        for (name, rest) in names {
            let family = family(name).unwrap_or_else(|| panic!("{place}: no agent serves {name}"));
            let labels = rest.strip_prefix('{').map_or("", |rest| rest.split_once('}').unwrap().0);
            for (label, value) in pairs(labels, "=") {
                let is_served = family.labels.get(&label).is_some_and(|values| values.contains(&value));
                assert!(is_served, "{place}: no agent serves {name} with {label}=\"{value}\"");
            }
            for grouping in query.split("by (").skip(1).filter(|_| query.matches("flux_distribute_").count() == 1) {
                for label in grouping.split_once(')').unwrap().0.split(", ").filter(|label| *label != "le") {
                    assert!(family.labels.contains_key(label), "{place}: {name} has no label {label}");
                }
            }
        }
    }
    for (name, _) in names(&file(PAGE)) {
        assert!(
            served.iter().any(|family| family.name == name || family.series().contains(&name.to_owned())),
            "{PAGE}: {name}"
        );
    }
}

#[test]
fn the_page_has_a_table_of_all_metrics() {
    let (each, lead, all) =
        (families(&text(&everything_happened())), families(&text(&lead())), families(&text(&all())));
    let is_among = |families: &[Family], name: &str| families.iter().any(|family| family.name == name);
    let mut table = String::from("| metric | kind | labels | served by | what it says |\n|---|---|---|---|---|\n");
    for Family { name, kind, help, labels } in &all {
        let by = match name.as_str() {
            name if is_among(&each, name) => "each agent",
            name if is_among(&lead, name) => "the lead's agent",
            _ => "the planner",
        };
        let labels = labels.iter().map(|(label, values)| {
            let values: Vec<_> = values.iter().map(String::as_str).collect();
            // Of the others, only some were made here.
            let listed = if values.len() > 1 { format!(": {}", values.join(", ")) } else { String::new() };
            format!("`{label}`{listed}")
        });
        let (labels, help) = (labels.collect::<Vec<_>>().join("; "), help.trim_end_matches('.'));
        table.push_str(&format!("| `{name}` | {kind} | {labels} | {by} | {help} |\n"));
    }
    let page = file(PAGE);
    let [begin, end] = ["<!-- Made by `make manifests` from crate metrics. -->\n", "<!-- End of what is made. -->\n"];
    let (before, rest) = page.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    assert_is_current(PAGE, &[before, begin, &table, end, after].concat());
}

#[test]
fn the_operator_gets_the_same_rules() {
    let mut object = "\
# Made by `make manifests` from rules.yml; don't edit this file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: flux-distribute
  namespace: flux-distribute
spec:
"
    .to_owned();
    for line in file(&format!("{DIRECTORY}/rules.yml")).lines().skip_while(|line| line.starts_with('#')) {
        object.push_str(if line.is_empty() { "" } else { "  " });
        object.push_str(&format!("{line}\n"));
    }
    assert_is_current(&format!("{DIRECTORY}/prometheusrule.yaml"), &object);
    assert_eq!(yaml("prometheusrule.yaml")["spec"], yaml("rules.yml"));
}

/// A scrape as the Operator's objects say it, in Prometheus' words.
fn in_words_of_prometheus(relabelings: &Value) -> Value {
    let text = serde_json::to_string(relabelings).unwrap();
    let text = text.replace("sourceLabels", "source_labels").replace("targetLabel", "target_label");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_prometheus_with_the_operator_scrapes_as_one_without() {
    let monitor = yaml("podmonitor.yaml")["spec"].clone();
    let endpoint = &monitor["podMetricsEndpoints"][0];
    let job = yaml("prometheus.yml")["scrape_configs"][0].clone();
    // The Operator drops pods that have ended by itself.
    let relabelings = job["relabel_configs"].as_array().unwrap()[1..].to_vec();
    assert_eq!(in_words_of_prometheus(&endpoint["relabelings"]), Value::Array(relabelings.clone()));
    let port = format!(":{METRICS_PORT}");
    assert_eq!(relabelings.iter().filter(|rule| rule["replacement"].to_string().contains(&port)).count(), 2);
    assert_eq!((&endpoint["scheme"], &endpoint["path"]), (&job["scheme"], &job["metrics_path"]));
    assert_eq!(endpoint["tlsConfig"]["insecureSkipVerify"], job["tls_config"]["insecure_skip_verify"]);
    let selectors = json!([{ "role": "pod", "label": "app=install-flux" }]);
    assert_eq!(job["kubernetes_sd_configs"][0]["selectors"], selectors);
    assert_eq!(monitor["selector"], json!({ "matchLabels": { "app": api::DAEMONSET } }));
    for daemonset in ["6-daemonset.yaml", "7-control-planes.yaml"] {
        let labels: Value = serde_norway::from_str(&file(&format!("deploy/parts/{daemonset}"))).unwrap();
        let app = &labels["spec"]["template"]["metadata"]["labels"]["app"];
        assert!(app.is_null() || app == api::DAEMONSET, "{daemonset}");
    }
}

#[test]
fn the_account_for_the_operator_may_read_metrics_and_list_pods_and_nothing_else() {
    let text = file(&format!("{DIRECTORY}/account.yaml"));
    let documents = serde_norway::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap());
    let objects: BTreeMap<String, Value> =
        documents.map(|object| (object["kind"].as_str().unwrap().to_owned(), object)).collect();
    let kinds: Vec<_> = objects.keys().map(String::as_str).collect();
    assert_eq!(kinds, ["ClusterRoleBinding", "Role", "RoleBinding", "Secret", "ServiceAccount"]);
    let account = json!([{ "kind": "ServiceAccount", "name": "flux-metrics", "namespace": api::NAMESPACE }]);
    for (binding, kind, role) in
        [("ClusterRoleBinding", "ClusterRole", "flux-distribute-metrics"), ("RoleBinding", "Role", "flux-metrics")]
    {
        let of = &objects[binding]["roleRef"];
        assert_eq!((&of["kind"], &of["name"], &objects[binding]["subjects"]), (&json!(kind), &json!(role), &account));
    }
    let pods = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"] }]);
    assert_eq!(objects["Role"]["rules"], pods);
    let secret = &objects["Secret"];
    assert_eq!(secret["metadata"]["annotations"]["kubernetes.io/service-account.name"], "flux-metrics");
    let credentials = &yaml("podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"];
    assert_eq!(credentials, &json!({ "name": secret["metadata"]["name"], "key": "token" }));
}

#[test]
fn kustomize_makes_all_of_it() {
    if skips_without([Need::Kubectl]) {
        return;
    }
    let mut command = Command::new(kubectl().unwrap());
    let output = command.arg("kustomize").arg(path(DIRECTORY)).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made = String::from_utf8(output.stdout).unwrap();
    let kinds: Vec<_> = made.lines().filter_map(|line| line.strip_prefix("kind: ")).collect();
    assert_eq!(kinds.len(), 8, "{kinds:?}");
    assert!(["PodMonitor", "PrometheusRule", "ConfigMap"].iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
}

#[test]
fn each_alert_has_a_remedy_and_a_test() {
    let (page, tests) = (file(PAGE), yaml("rules-test.yml"));
    let rules = rules();
    assert_eq!(rules.len(), 5);
    for rule in &rules {
        let name = rule["alert"].as_str().unwrap();
        assert!(page.contains(&format!("### {name}\n")), "{PAGE} has no section {name}");
        let cases =
            tests["tests"].as_array().unwrap().iter().flat_map(|test| test["alert_rule_test"].as_array().unwrap());
        let (fires, is_silent): (Vec<_>, Vec<_>) =
            cases.filter(|case| case["alertname"] == name).partition(|case| case["exp_alerts"].is_array());
        assert!(!fires.is_empty() && !is_silent.is_empty(), "rules-test.yml does not try {name}");
    }
}

#[test]
fn the_panels_lie_beside_each_other_and_ask_the_chosen_prometheus() {
    let panels = panels();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "two panels have one id");
    let mut taken = BTreeSet::new();
    for panel in &panels {
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
        assert!(x + w <= 24, "{} is wider than the grid", panel["title"]);
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "{} lies on another panel", panel["title"]);
        }
        let sources = panel["targets"].as_array().into_iter().flatten().map(|target| &target["datasource"]["uid"]);
        sources.for_each(|source| assert_eq!(source, "${datasource}", "{}", panel["title"]));
    }
}

/// `$__rate_interval` is the panel's interval and one more scrape: the data source's setting, by default 15 seconds, however often Prometheus
/// scrapes. By default that is each minute, and a rate needs two scrapes.
#[test]
fn rates_need_no_more_than_a_scrape_each_minute() {
    let panels = panels();
    let rates = panels.iter().filter(|panel| panel["targets"].to_string().contains("$__rate_interval"));
    let intervals: BTreeSet<_> = rates.map(|panel| panel["interval"].as_str().unwrap_or_default()).collect();
    assert_eq!(intervals, BTreeSet::from(["2m", "5m"]));
}

fn asks_promtool(words: &[&str], input: &str) {
    let mut command = Command::new(promtool().unwrap());
    command
        .args(words)
        .current_dir(path(DIRECTORY))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let [said, complained] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "promtool {words:?}: {said}{complained}");
}

#[test]
fn promtool_finds_nothing_wrong_with_metrics_and_rules() {
    if skips_without([Need::Prometheus]) {
        return;
    }
    asks_promtool(&["check", "metrics"], &text(&all()));
    asks_promtool(&["check", "rules", "rules.yml"], "");
    asks_promtool(&["test", "rules", "rules-test.yml"], "");
}
