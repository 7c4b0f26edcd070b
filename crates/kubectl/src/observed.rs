//! What the cluster's objects say: read, and not judged.

use k8s_openapi::{
    api::{apps::v1::DaemonSet, coordination::v1::Lease, core::v1::Pod},
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Client, Config,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
    core::DeserializeGuard,
};

use crate::{arguments::Connection, error::KubectlError};
use api::{DAEMONSET, FluxInstance, FluxNode, INSTANCE, LEASE_PLANNER, NAMESPACE, Roster};
use cluster::{ApiError, call, published};
use model::agents::AgentPod;

/// A cluster to speak to.
pub(crate) struct Cluster {
    pub client: Client,
    /// For kubectl, which is to speak to the same one.
    pub connection: Connection,
}

/// An instance and its nodes.
#[derive(Debug)]
pub(crate) struct Observed {
    pub instance: FluxInstance,
    pub nodes: Vec<FluxNode>,
    /// FluxNodes that this version can't read, by name.
    pub unreadable: Vec<String>,
}

/// What may be wrong: each part as the API server gave it.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub version: Result<Info, ApiError>,
    pub daemonset: Result<Option<DaemonSet>, ApiError>,
    pub agents: Result<Vec<AgentPod>, ApiError>,
    pub planner: Result<Option<Lease>, ApiError>,
    pub observed: Result<Observed, KubectlError>,
}

impl Cluster {
    /// A client for the cluster that kubectl would speak to. It sends nothing yet.
    pub async fn connect(connection: &Connection) -> Result<Self, KubectlError> {
        let options = KubeConfigOptions { context: connection.context.clone(), ..KubeConfigOptions::default() };
        let config = match &connection.kubeconfig {
            Some(file) => {
                let kubeconfig = Kubeconfig::read_from(file).map_err(KubectlError::Kubeconfig)?;
                Config::from_custom_kubeconfig(kubeconfig, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let client = cluster::client(config.map_err(KubectlError::Kubeconfig)?).map_err(KubectlError::Client)?;
        Ok(Self { client, connection: connection.clone() })
    }

    /// The instance and its nodes.
    pub async fn observe(&self) -> Result<Observed, KubectlError> {
        let (instance, nodes) = futures::try_join!(self.instance(), self.nodes())?;
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for node in nodes {
            match node.0 {
                Ok(node) => readable.push(node),
                Err(invalid) => unreadable.push(invalid.metadata.name.unwrap_or_default()),
            }
        }
        Ok(Observed { instance, nodes: readable, unreadable })
    }

    async fn instance(&self) -> Result<FluxInstance, KubectlError> {
        let instances: Api<FluxInstance> = Api::namespaced(self.client.clone(), NAMESPACE);
        let found = call(format!("get FluxInstance {INSTANCE}"), instances.get_opt(INSTANCE)).await?;
        found.ok_or(KubectlError::NoInstance)
    }

    async fn nodes(&self) -> Result<Vec<DeserializeGuard<FluxNode>>, KubectlError> {
        let nodes: Api<DeserializeGuard<FluxNode>> = Api::namespaced(self.client.clone(), NAMESPACE);
        Ok(call("list FluxNodes", nodes.list(&ListParams::default())).await?.items)
    }

    /// The roster; None if there is none yet.
    pub async fn roster(&self) -> Result<Option<Roster>, KubectlError> {
        Ok(published::read_roster(&self.client).await?.map(|(roster, _)| roster))
    }

    /// The agents' pods that are on a node.
    pub async fn agents(&self) -> Result<Vec<AgentPod>, ApiError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        let ours = ListParams::default().labels(&format!("app={DAEMONSET}"));
        Ok(call("list the agents' pods", pods.list(&ours)).await?.items.iter().filter_map(AgentPod::of).collect())
    }

    /// All that a doctor looks at.
    pub async fn surroundings(&self) -> Surroundings {
        let sets: Api<DaemonSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let (version, daemonset, agents, planner, observed) = futures::join!(
            call("get the version of Kubernetes", self.client.apiserver_version()),
            call(format!("get DaemonSet {DAEMONSET}"), sets.get_opt(DAEMONSET)),
            self.agents(),
            call(format!("get Lease {LEASE_PLANNER}"), leases.get_opt(LEASE_PLANNER)),
            self.observe(),
        );
        Surroundings { version, daemonset, agents, planner, observed }
    }
}
