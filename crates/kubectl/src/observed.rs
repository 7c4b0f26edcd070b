//! What the cluster's objects say: read, and not judged.

use std::{fmt::Debug, path::PathBuf};

use futures::TryFutureExt;
use k8s_openapi::{
    api::{apps::v1::DaemonSet, coordination::v1::Lease, core::v1::Pod},
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Client, Config,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
    core::DeserializeGuard,
};

use serde::de::DeserializeOwned;

use serde_json::Value;

use crate::{arguments::Connection, error::KubectlError};
use api::{
    AGENT_SELECTOR, DAEMONSET, DAEMONSET_CONTROL_PLANES, FluxInstance, FluxNode, INSTANCE, LEASE_PLANNER, NAMESPACE,
    Roster,
};
use cluster::{ApiError, call, published};
use model::agents::AgentPod;

/// Objects of a page: a list of any length comes in pages that each come in time.
const PAGE: u32 = 500;

/// A cluster to speak to.
pub(crate) struct Cluster {
    pub client: Client,
    /// For kubectl, which is to speak to the same one. It always names a context: the kubeconfig's current one may be another
    /// one by the time that kubectl reads it.
    pub connection: Connection,
    /// What that context meant when this process began.
    target: Target,
}

/// An instance and its nodes.
#[derive(Debug)]
pub(crate) struct Observed {
    pub instance: FluxInstance,
    pub nodes: Vec<FluxNode>,
    /// FluxNodes that this version can't read, by name.
    pub unreadable: Vec<String>,
}

/// What a doctor looks at: each part as the API server gave it.
#[derive(Debug)]
pub(crate) struct DoctorInputs {
    pub version: Result<Info, ApiError>,
    pub daemonset: Result<Option<DaemonSet>, ApiError>,
    /// The one for control planes.
    pub control_planes: Result<Option<DaemonSet>, ApiError>,
    pub agents: Result<Vec<AgentPod>, ApiError>,
    pub planner: Result<Option<Lease>, ApiError>,
    pub observed: Result<Observed, KubectlError>,
}

/// What a context of a kubeconfig means.
#[derive(Debug, PartialEq)]
struct Target {
    context: String,
    /// URL of its API server.
    server: String,
    /// The whole entry: many clusters have the same URL, behind tunnels, and differ in their certificate authority.
    entry: Value,
}

impl Cluster {
    /// A client for the cluster that kubectl would speak to. It sends nothing yet.
    ///
    /// # Errors
    /// The kubeconfig can't be read, or has no such context.
    pub async fn connect(connection: &Connection) -> Result<Self, KubectlError> {
        let kubeconfig = kubeconfig(connection).map_err(KubectlError::Kubeconfig)?;
        let target = target(&kubeconfig, connection.context.as_deref()).map_err(KubectlError::Kubeconfig)?;
        let options = KubeConfigOptions { context: Some(target.context.clone()), ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(KubectlError::Kubeconfig)?;
        let client = cluster::client(config).map_err(KubectlError::Client)?;
        let connection = Connection { context: Some(target.context.clone()), ..connection.clone() };
        Ok(Self { client, connection, target })
    }

    /// The cluster in words, for a person to check: its context and its server.
    pub fn name(&self) -> String {
        let Target { context, server, .. } = &self.target;
        format!("context {context}, server {server}")
    }

    /// Checks that the kubeconfig still means this cluster: kubectl reads it anew.
    ///
    /// # Errors
    /// It doesn't, or can't be read any more.
    pub fn is_unchanged(&self) -> Result<(), KubectlError> {
        let kubeconfig = kubeconfig(&self.connection).map_err(KubectlError::Kubeconfig)?;
        let now = target(&kubeconfig, self.connection.context.as_deref()).map_err(KubectlError::Kubeconfig)?;
        if now == self.target {
            return Ok(());
        }
        Err(KubectlError::State(format!(
            "the kubeconfig has changed: context {} means another cluster now (server {}, before {}); nothing more was deleted",
            now.context, now.server, self.target.server
        )))
    }

    /// The instance and its nodes.
    ///
    /// # Errors
    /// There is no instance, or the API server fails.
    pub async fn observe(&self) -> Result<Observed, KubectlError> {
        let (instance, nodes) = futures::try_join!(self.instance(), self.nodes().map_err(KubectlError::from))?;
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for node in nodes {
            match node.0 {
                Ok(node) => readable.push(node),
                Err(invalid) => unreadable.push(invalid.metadata.name.unwrap_or_default()),
            }
        }
        Ok(Observed { instance, nodes: readable, unreadable })
    }

    /// The instance alone.
    ///
    /// # Errors
    /// There is no instance, or the API server fails.
    pub async fn instance(&self) -> Result<FluxInstance, KubectlError> {
        let found = call(format!("get FluxInstance {INSTANCE}"), self.instances().get_opt(INSTANCE)).await?;
        found.ok_or(KubectlError::NoInstance)
    }

    /// Requests for FluxInstances.
    pub fn instances(&self) -> Api<FluxInstance> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// All FluxNodes, also those that this version can't read.
    ///
    /// # Errors
    /// The API server fails.
    pub async fn nodes(&self) -> Result<Vec<DeserializeGuard<FluxNode>>, ApiError> {
        list(&Api::namespaced(self.client.clone(), NAMESPACE), "list FluxNodes", ListParams::default()).await
    }

    /// The roster; None if there is none yet.
    ///
    /// # Errors
    /// The API server fails, or the roster can't be read.
    pub async fn roster(&self) -> Result<Option<Roster>, KubectlError> {
        Ok(published::read_roster(&self.client).await?.map(|(roster, _)| roster))
    }

    /// The agents' pods that are on a node: on `node`, or on any.
    ///
    /// # Errors
    /// The API server fails.
    pub async fn agents(&self, node: Option<&str>) -> Result<Vec<AgentPod>, ApiError> {
        let mut ours = ListParams::default().labels(AGENT_SELECTOR);
        if let Some(node) = node {
            ours = ours.fields(&format!("spec.nodeName={node}"));
        }
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        Ok(list(&pods, "list the agents' pods", ours).await?.iter().filter_map(AgentPod::of).collect())
    }

    /// All that a doctor looks at.
    pub async fn doctor_inputs(&self) -> DoctorInputs {
        let sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let (version, daemonset, control_planes, agents, planner, observed) = futures::join!(
            call("get the version of Kubernetes", self.client.apiserver_version()),
            call(format!("get DaemonSet {DAEMONSET}"), sets.get_opt(DAEMONSET)),
            call(format!("get DaemonSet {DAEMONSET_CONTROL_PLANES}"), sets.get_opt(DAEMONSET_CONTROL_PLANES)),
            self.agents(None),
            call(format!("get Lease {LEASE_PLANNER}"), leases.get_opt(LEASE_PLANNER)),
            self.observe(),
        );
        DoctorInputs { version, daemonset, control_planes, agents, planner, observed }
    }
}

/// All objects that `parameters` select, a page at a time.
///
/// # Errors
/// The API server fails, or a page doesn't come in time.
pub(crate) async fn list<K>(api: &Api<K>, what: &str, parameters: ListParams) -> Result<Vec<K>, ApiError>
where
    K: Clone + DeserializeOwned + Debug,
{
    let mut parameters = parameters.limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = call(what, api.list(&parameters)).await?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// The kubeconfig that kubectl would read. As kubectl does, it skips files in KUBECONFIG that are not there.
pub(crate) fn kubeconfig(connection: &Connection) -> Result<Kubeconfig, KubeconfigError> {
    if let Some(file) = &connection.kubeconfig {
        return Kubeconfig::read_from(file);
    }
    let listed = std::env::var_os("KUBECONFIG").unwrap_or_default();
    let there: Vec<PathBuf> = std::env::split_paths(&listed).filter(|path| path.is_file()).collect();
    if there.is_empty() {
        return Kubeconfig::read();
    }
    there.iter().try_fold(Kubeconfig::default(), |merged, path| merged.merge(Kubeconfig::read_from(path)?))
}

/// What a context means, by default the current one. Pure.
fn target(kubeconfig: &Kubeconfig, context: Option<&str>) -> Result<Target, KubeconfigError> {
    let name = context.or(kubeconfig.current_context.as_deref()).ok_or(KubeconfigError::CurrentContextNotSet)?;
    let found = kubeconfig.contexts.iter().find(|known| known.name == name).and_then(|known| known.context.as_ref());
    let cluster = &found.ok_or_else(|| KubeconfigError::LoadContext(name.to_owned()))?.cluster;
    let found =
        kubeconfig.clusters.iter().find(|known| known.name == *cluster).and_then(|known| known.cluster.as_ref());
    let found = found.ok_or_else(|| KubeconfigError::LoadClusterOfContext(cluster.clone()))?;
    let server = found.server.clone().ok_or(KubeconfigError::MissingClusterUrl)?;
    let entry = serde_json::to_value(found).unwrap_or_default();
    Ok(Target { context: name.to_owned(), server, entry })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_means_one_server() {
        let text = "clusters: [{name: c1, cluster: {server: https://one}}, {name: c2, cluster: {server: https://two}}]\n\
                    contexts: [{name: a, context: {cluster: c1, user: u}}, {name: b, context: {cluster: c2, user: u}}, {name: x, context: {cluster: c9, user: u}}]\n\
                    users: []\ncurrent-context: b\n";
        let kubeconfig = Kubeconfig::from_yaml(text).unwrap();
        let named = |context| target(&kubeconfig, context).ok().map(|target| (target.context, target.server));
        let found = |context: &str, server: &str| Some((context.to_owned(), server.to_owned()));
        assert_eq!(named(None), found("b", "https://two"));
        assert_eq!(named(Some("a")), found("a", "https://one"));
        assert_eq!((named(Some("x")), named(Some("none"))), (None, None));
        let other = text.replace("server: https://two", "server: https://two, certificate-authority-data: b3RoZXI=");
        let other: Kubeconfig = serde_norway::from_str(&other).unwrap();
        assert_ne!(target(&other, None).unwrap(), target(&kubeconfig, None).unwrap());
    }
}
