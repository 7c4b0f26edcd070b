//! A client of a real API server that has our kinds, for programs that count or measure.

#[path = "api_server.rs"]
pub mod api_server;

use std::time::Duration;

use api::{DAEMONSET, FluxInstance, FluxNode, NAMESPACE};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, Config, CustomResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::wait::{await_condition, conditions},
};
use serde::Deserialize;
use tokio::time::sleep;

use api_server::ApiServer;

const INSTALLER: &str = include_str!("../../deploy/daemonset-installer.yaml");
/// The ServiceAccount of the DaemonSet's pods.
const SERVICE_ACCOUNT: &str = DAEMONSET;
/// kube-apiserver takes seconds to start, and has no event for it.
pub const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// No controllers run here that would make service accounts, or take the taint of a new Node away.
pub const WITHOUT_CONTROLLERS: &str = "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition";

/// The way to the API server of this kubeconfig, as soon as the server has written its certificate.
pub async fn config(kubeconfig: &std::path::Path) -> Config {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = loop {
        let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        match Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await {
            Ok(config) => break config,
            Err(_) => sleep(LOOK_AGAIN).await,
        }
    };
    // The machine's own may not lead to itself.
    config.proxy_url = None;
    config
}

/// A client of `server`, once it serves FluxInstances and FluxNodes.
pub async fn client(server: &ApiServer) -> Client {
    let client = cluster::client(config(&server.kubeconfig()).await).unwrap();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in [FluxInstance::crd(), FluxNode::crd()] {
        while definitions.create(&PostParams::default(), &definition).await.is_err() {
            sleep(LOOK_AGAIN).await;
        }
        let name = definition.metadata.name.unwrap();
        await_condition(definitions.clone(), &name, conditions::is_crd_established()).await.unwrap();
    }
    client
}

/// Makes the roles and the priority level of the agents' ServiceAccount, as `kubectl apply` does. Our namespace must be there.
pub async fn make_roles_and_priority_level(client: &Client) {
    for document in serde_norway::Deserializer::from_str(INSTALLER) {
        let object = DynamicObject::deserialize(document).unwrap();
        // Comments before the first object are a document, too.
        let Some(types) = &object.types else { continue };
        let kind = GroupVersionKind::try_from(types).unwrap();
        if !matches!(kind.group.as_str(), "rbac.authorization.k8s.io" | "flowcontrol.apiserver.k8s.io") {
            continue;
        }
        let resource = ApiResource::from_gvk(&kind);
        let api = match &object.metadata.namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        api.create(&PostParams::default(), &object).await.unwrap();
    }
}

/// The same configuration, with an administrator who impersonates the agents' ServiceAccount: the API server limits what ServiceAccounts ask at a time, and
/// not what administrators do (API Priority and Fairness).
pub fn as_agent(mut config: Config) -> Config {
    let groups = ["system:serviceaccounts", &format!("system:serviceaccounts:{NAMESPACE}"), "system:authenticated"];
    config.auth_info.impersonate_groups = Some(groups.map(ToOwned::to_owned).into());
    config.auth_info.impersonate = Some(format!("system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"));
    config
}
