//! A real Prometheus reads the agents' metrics, by the scrape of `deploy/monitoring` and with tokens of a real API server.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

use api::METRICS_AUDIENCE;
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use kube::{Api, api::PostParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    harness::Cluster,
    needs::{FLUX_NODES, Need, prometheus, skips_without},
};

const NODES: [&str; 3] = ["node1", "node2", "node3"];

fn file(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(name)).unwrap()
}

/// The object of that kind and name in a file of `deploy/`.
fn object<K: DeserializeOwned>(file_name: &str, kind: &str, name: &str) -> K {
    let text = file(file_name);
    let documents = serde_norway::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap());
    let found = documents.into_iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    serde_json::from_value(found.unwrap_or_else(|| panic!("{file_name} has no {kind} {name}"))).unwrap()
}

impl Cluster {
    fn create<K>(&self, objects: &Api<K>, object: &K)
    where
        K: kube::Resource + Clone + std::fmt::Debug + serde::Serialize + DeserializeOwned,
    {
        self.wait(objects.create(&PostParams::default(), object)).unwrap();
    }

    fn account(&self, name: &str) {
        let account: ServiceAccount = serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
        self.create(&self.api(), &account);
    }

    /// A token of that account; without `audience`, for the API server.
    fn token(&self, account: &str, audience: Option<&str>) -> String {
        let audiences = audience.map(|audience| vec![audience.to_owned()]);
        let spec = TokenRequestSpec { audiences, ..TokenRequestSpec::default() };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let accounts: Api<ServiceAccount> = self.api();
        let made = self.wait(accounts.create_token_request(account, &PostParams::default(), &request)).unwrap();
        made.status.unwrap().token.unwrap()
    }
}

/// A Prometheus on this machine. It ends with the test.
struct Prometheus {
    process: Child,
    url: String,
    directory: tempfile::TempDir,
}

impl Prometheus {
    /// Scrapes the nodes each second, by `deploy/monitoring/prometheus.yml`, and watches the alerts of `rules.yml` there. Debian's can't
    /// list pods, so what it would find stands in its configuration.
    fn start(cluster: &Cluster, token: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("token"), token).unwrap();
        fs::write(at("rules.yml"), file("monitoring/rules.yml")).unwrap();
        let mut config: Value = serde_norway::from_str(&file("monitoring/prometheus.yml")).unwrap();
        config["global"] = json!({ "scrape_interval": "1s", "evaluation_interval": "1s" });
        let job = &mut config["scrape_configs"][0];
        job["authorization"]["credentials_file"] = json!(at("token"));
        job.as_object_mut().unwrap().remove("kubernetes_sd_configs").unwrap();
        let targets = NODES.map(|node| {
            let address = cluster.address(node);
            let labels = json!({
                "__meta_kubernetes_pod_ip": address,
                "__meta_kubernetes_pod_phase": "Running",
                "__meta_kubernetes_pod_node_name": node,
            });
            json!({ "targets": [address], "labels": labels })
        });
        job["static_configs"] = json!(targets);
        fs::write(at("prometheus.yml"), config.to_string()).unwrap();
        let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let log = fs::File::create(at("log")).unwrap();
        let mut command = Command::new(prometheus().unwrap());
        command.arg(format!("--config.file={}", at("prometheus.yml").display()));
        command.arg(format!("--storage.tsdb.path={}", at("data").display()));
        command.arg(format!("--web.listen-address={listen}")).current_dir(directory.path());
        let process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Self { process, url: format!("http://{listen}/api/v1"), directory }
    }

    /// What its API answers; None while it does not.
    fn ask(&self, cluster: &Cluster, path: &str, query: &[(&str, &str)]) -> Option<Value> {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = url::Url::parse_with_params(&format!("{}/{path}", self.url), query).unwrap();
        let text = cluster.wait(async { client.get(url).send().await.ok()?.text().await.ok() })?;
        serde_json::from_str(&text).ok()
    }

    /// The only value of a query.
    fn value(&self, cluster: &Cluster, query: &str) -> Option<String> {
        let answer = self.ask(cluster, "query", &[("query", query)])?;
        match answer["data"]["result"].as_array()?.as_slice() {
            [one] => Some(one["value"][1].as_str()?.to_owned()),
            _ => None,
        }
    }

    /// The alerts that fire: name and node.
    fn firing(&self, cluster: &Cluster) -> Option<Vec<(String, String)>> {
        let answer = self.ask(cluster, "alerts", &[])?;
        let firing = answer["data"]["alerts"].as_array()?.iter().filter(|alert| alert["state"] == "firing");
        let label = |alert: &Value, name: &str| alert["labels"][name].as_str().unwrap_or_default().to_owned();
        Some(firing.map(|alert| (label(alert, "alertname"), label(alert, "node"))).collect())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("Prometheus: {}", fs::read_to_string(self.directory.path().join("log")).unwrap_or_default());
        }
    }
}

#[test]
fn prometheus_scrapes_the_nodes_and_fires_if_a_broker_is_killed_and_strangers_are_refused() {
    if skips_without(FLUX_NODES.into_iter().chain([Need::ApiServer, Need::Prometheus])) {
        return;
    }
    let Some(cluster) = Cluster::up(3, &["--api", "real"]) else { return };
    cluster.account("stranger");
    let account: ServiceAccount = object("monitoring/account.yaml", "ServiceAccount", "flux-metrics");
    cluster.create(&cluster.api(), &account);
    let role: ClusterRole = object("parts/3-rbac.yaml", "ClusterRole", "flux-distribute-metrics");
    cluster.create(&Api::all(cluster.client()), &role);
    let binding: ClusterRoleBinding =
        object("monitoring/account.yaml", "ClusterRoleBinding", "flux-distribute-metrics");
    cluster.create(&Api::all(cluster.client()), &binding);

    let ours = cluster.token("flux-metrics", Some(METRICS_AUDIENCE));
    for (who, token, expected) in [
        ("nobody", None, 401),
        ("an invented token", Some("of.no.body".to_owned()), 401),
        ("a token for another audience", Some(cluster.token("flux-metrics", Some("another"))), 401),
        ("an account without the right", Some(cluster.token("stranger", None)), 403),
        ("the same, for the metrics", Some(cluster.token("stranger", Some(METRICS_AUDIENCE))), 403),
        ("the account's general token", Some(cluster.token("flux-metrics", None)), 200),
        ("a token for the metrics", Some(ours.clone()), 200),
    ] {
        let (status, body) = cluster.scrape("node2", token.as_deref());
        assert_eq!((status, body.contains("flux_distribute_")), (expected, expected == 200), "{who}: {body}");
    }

    let prometheus = Prometheus::start(&cluster, &ours);
    let until = |query: &str, expected: &str| {
        cluster.until(query, || prometheus.value(&cluster, query).filter(|value| value == expected));
    };
    until("count(up{job=\"flux-distribute\"} == 1)", "3");
    until("count(flux_distribute_broker_up == 1)", "3");
    until("sum(flux_distribute_planner_is_me)", "1");
    until("max(flux_distribute_lead_online)", "1");
    until("sum(flux_distribute_members{phase=\"Online\"})", "3");
    until("sum(flux_distribute_ranks{state=\"up\"})", "3");
    until("sum(flux_distribute_broker_starts_total{reason=\"first\"})", "3");
    until("count(count by (node) (flux_distribute_build_info))", "3");
    assert_eq!(prometheus.firing(&cluster).unwrap(), []);

    let broker = cluster.brokers()["node3"];
    kill(Pid::from_raw(broker.pid), Signal::SIGKILL).unwrap();
    let alert = ("FluxBrokerDied".to_owned(), String::new());
    let fired = || prometheus.firing(&cluster).filter(|firing| !firing.is_empty());
    assert_eq!(cluster.until("an alert", fired), [alert]);
    until("count(flux_distribute_broker_died_timestamp_seconds{node=\"node3\"})", "1");
    cluster.all_online(3);
}
