//! Nodes without Flux: everything but jobs, and every message says that it is not Flux.

use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE, NodePhase, STAND_IN};
use kube::{
    Api, Client, Config, ResourceExt,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::{Place, until};

/// A way to the cluster's API.
struct ApiServer {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl ApiServer {
    fn of(place: &Place) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let kubeconfig = Kubeconfig::from_yaml(&place.must(&["kubeconfig"])).unwrap();
        let client = runtime.block_on(async {
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
            let mut config = config.unwrap();
            config.proxy_url = None;
            Client::try_from(config).unwrap()
        });
        Self { runtime, client }
    }

    fn line(&self) -> String {
        let instances = Api::<FluxInstance>::namespaced(self.client.clone(), NAMESPACE);
        let instance = self.runtime.block_on(instances.get(INSTANCE)).unwrap();
        instance.status.and_then(|status| status.message).unwrap_or_default()
    }

    fn nodes(&self) -> Vec<FluxNode> {
        let nodes = Api::<FluxNode>::namespaced(self.client.clone(), NAMESPACE);
        self.runtime.block_on(nodes.list(&Default::default())).unwrap().items
    }

    fn online(&self) -> usize {
        let is_online = |node: &FluxNode| node.status.as_ref().is_some_and(|status| status.phase == NodePhase::Online);
        self.nodes().iter().filter(|node| is_online(node)).count()
    }
}

#[test]
fn without_flux_the_nodes_form_an_instance_of_stand_ins_that_says_so() {
    let Some(place) = Place::new() else { return };
    let said = place.must(&["up", "--flux", "none", "--nodes", "2", "--api", "embedded"]);
    assert!(said.starts_with(STAND_IN) && said.contains("the nodes run no jobs"), "{said}");
    let server = ApiServer::of(&place);
    assert_eq!(server.line(), format!("{STAND_IN}: 2 of 2 nodes online"));
    for node in server.nodes() {
        let status = node.status.unwrap();
        assert_eq!((status.flux_version.as_deref(), status.message.as_deref()), (Some(STAND_IN), Some(STAND_IN)));
    }
    let shown = place.must(&["status"]);
    assert!(shown.starts_with("INSTANCE  Running: "), "{shown}");
    assert!(shown.lines().skip(2).all(|line| line.ends_with(STAND_IN)), "{shown}");
    assert_eq!(place.must(&["exec", "node1", "--", "flux", "--version"]), STAND_IN);
    let job = place.run(&["exec", "node1", "--", "flux", "run", "hostname"]);
    assert!(job.code == Some(1) && job.err.contains(STAND_IN) && job.out.is_empty(), "{job:?}");

    // A join, and an agent that is killed: the brokers stay.
    place.must(&["add-node"]);
    until("the third node", || (server.online() == 3).then_some(()));
    let broker = |node: &str| {
        let nodes: Vec<serde_json::Value> = serde_json::from_str(&place.must(&["status", "--output", "json"])).unwrap();
        nodes.into_iter().find(|found| found["name"] == node).unwrap()
    };
    let before = broker("node2");
    let said = place.must(&["agent", "node2", "kill"]);
    assert_eq!(said.trim_end(), "the agent of node2 was killed; the kubelet starts it again in the same pod");
    until("another agent", || (broker("node2")["restarts"] != before["restarts"]).then_some(()));
    until("its word", || (server.online() == 3 && !broker("node2")["agentPid"].is_null()).then_some(()));
    assert_eq!(broker("node2")["brokerPid"], before["brokerPid"]);

    // The commands of the pod, also as they are written for kubectl.
    let status = ["exec", "node1", "--agent", "--"];
    for words in [&["status"][..], &["/flux-distribute", "status"]] {
        let said = place.must(&[&status[..], words].concat());
        assert!(said.contains("rank 0") && said.contains("ranks 0-2"), "{said}");
    }
    assert!(place.must(&["logs", "node1"]).contains("online: node[1-2]"));
    assert!(place.must(&["logs", "node1", "--broker"]).contains(STAND_IN));
    assert_eq!(place.run(&["logs", "node9"]).code, Some(2));
}

#[test]
fn the_status_does_not_show_a_removed_lead_and_names_the_remedy() {
    let Some(place) = Place::new() else { return };
    place.must(&["up", "--flux", "none", "--nodes", "3", "--api", "embedded"]);
    let server = ApiServer::of(&place);
    let lead = place.must(&["remove-node", "node1"]);
    assert!(lead.contains("node1 is removed; it was the lead") && lead.contains("reset --lead NODE"), "{lead}");
    let line = until("the remedy", || Some(server.line()).filter(|line| line.contains("reset --lead NODE")));
    assert!(line.contains("node1 (rank 0") && line.contains("recover --lead NODE --from DUMP"), "{line}");
    let shown = place.must(&["status"]);
    let first = shown.lines().next().unwrap_or_default();
    assert!(first.starts_with("INSTANCE  Degraded: ") && first.contains("reset --lead NODE"), "{shown}");
    let other = place.must(&["remove-node", "node3"]);
    assert!(other.contains("node3 is removed; its rank is kept for 10m (spec.ranks.retain)"), "{other}");
    until("the lead to be missed", || {
        let node = server.nodes().into_iter().find(|node| node.name_any() == "node1")?;
        (node.spec.lost_by_lead && node.spec.reason?.contains("reset --lead NODE")).then_some(())
    });
}
