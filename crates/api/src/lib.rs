//! The Kubernetes objects of this project, and what planners and agents exchange through them: types, their names, and how
//! their texts are read. It has no effects and makes no decisions: that is what the crate `model` is for.
//!
//! One writer for each: people write [`FluxInstance`] specs; the planner writes their status, the roster, the packages,
//! `broker.toml`, and the spec of each [`FluxNode`]; an agent writes the status of its own `FluxNode`.
//!
//! Agents of several versions run side by side during an upgrade, so what a newer one writes is read by older ones: fields are
//! only ever added, and a value that a version doesn't know becomes its enum's `Other`, which is written back unchanged.

pub mod certificate;
mod finding;
mod idset;
#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type_ of its own")]
mod instance;
mod instance_status;
#[allow(clippy::duplicated_attributes, reason = "each printcolumn has a type_ of its own")]
mod node;
mod numbers;
mod packages;
pub mod packed;
pub mod quantity;
mod resources;
mod roster;
pub mod rules;
mod times;
mod values;

pub use finding::*;
pub use idset::*;
pub use instance::*;
pub use instance_status::*;
pub use node::*;
pub use numbers::is_believable;
pub use packages::*;
pub use resources::*;
pub use roster::*;
pub use values::*;

/// The API group of both kinds.
pub const GROUP: &str = "distribute.flux-framework.org";
/// The version that is served.
pub const VERSION: &str = "v1alpha1";
/// The namespace everything lives in. Never `flux-system`, which is Flux CD's.
pub const NAMESPACE: &str = "flux-distribute";
/// The only FluxInstance that the planner serves; any other one gets the condition `Ignored`.
pub const INSTANCE: &str = "flux";
/// spec.schedulerName of the pods that are bridged.
pub const SCHEDULER: &str = "flux";
/// The DaemonSet that runs the agents, except those on control planes; and label `app` of all of them.
pub const DAEMONSET: &str = "install-flux";
/// The DaemonSet that runs the agents on control planes.
pub const DAEMONSET_CONTROL_PLANES: &str = "install-flux-control-planes";
/// Label selector of the agents' pods, those on control planes too.
pub const AGENT_SELECTOR: &str = "app=install-flux";
/// The container in an agent's pod.
pub const AGENT_CONTAINER: &str = "agent";
/// ConfigMap from which the planner creates the first [`FluxInstance`], once.
pub const CONFIGMAP_DEFAULT: &str = "flux-default";
/// Key in [`CONFIGMAP_DEFAULT`] that holds the FluxInstance's spec as YAML.
pub const CONFIGMAP_DEFAULT_KEY: &str = "spec.yaml";
/// Annotation on [`CONFIGMAP_DEFAULT`]: the uid of the FluxInstance that was made from it.
pub const ANNOTATION_CONSUMED: &str = "distribute.flux-framework.org/consumed-by";
/// Annotation on the FluxInstance: a new value begins the next epoch at once, even if jobs run.
pub const ANNOTATION_RESTART: &str = "distribute.flux-framework.org/restart";
/// Annotation on Nodes: which of the annotations that keep autoscalers away are ours, by name, with commas between.
pub const ANNOTATION_PROTECTS: &str = "distribute.flux-framework.org/protects";
/// Label on the Nodes of members: the rank. Written if `spec.nodes.label` is set, like the next two.
pub const LABEL_RANK: &str = "distribute.flux-framework.org/rank";
/// Label on the Node of rank 0, with value `true`.
pub const LABEL_LEAD: &str = "distribute.flux-framework.org/lead";
/// Label on the Nodes of members: `true` while the broker is online, otherwise `false`.
pub const LABEL_ONLINE: &str = "distribute.flux-framework.org/online";
/// ConfigMap with the [`Roster`].
pub const CONFIGMAP_ROSTER: &str = "flux-roster";
/// Key in [`CONFIGMAP_ROSTER`] that holds the roster as JSON.
pub const CONFIGMAP_ROSTER_KEY: &str = "roster.json";
/// ConfigMap with the rendered `broker.toml` of the running epoch.
pub const CONFIGMAP_BROKER: &str = "flux-broker";
/// Key in [`CONFIGMAP_BROKER`].
pub const CONFIGMAP_BROKER_KEY: &str = "broker.toml";
/// ConfigMap with the published [`PackageSet`].
pub const CONFIGMAP_PACKAGES: &str = "flux-packages";
/// Key in [`CONFIGMAP_PACKAGES`] that holds the package set as JSON.
pub const CONFIGMAP_PACKAGES_KEY: &str = "packages.json";
/// Key in [`CONFIGMAP_PACKAGES`] that holds the running epoch's package set, if the spec asks for another one by now:
/// a node that joins installs what the others run.
pub const CONFIGMAP_PACKAGES_EPOCH_KEY: &str = "epoch.json";
/// Secret that an administrator may create for private channels, mirrors and bundles: [`SECRET_PACKAGES_CA_KEY`],
/// [`SECRET_PACKAGES_TOKEN_KEY`] and [`SECRET_PACKAGES_CREDENTIALS_KEY`], each optional.
pub const SECRET_PACKAGES: &str = "flux-packages-access";
/// Key in [`SECRET_PACKAGES`]: PEM certificates of private authorities.
pub const SECRET_PACKAGES_CA_KEY: &str = "ca.crt";
/// Key in [`SECRET_PACKAGES`]: a bearer token (RFC 6750) for the hosts that the spec's URLs name, and for no others.
pub const SECRET_PACKAGES_TOKEN_KEY: &str = "token";
/// Key in [`SECRET_PACKAGES`]: credentials by host, in the format of the file of this name that pixi and rattler-build
/// use.
pub const SECRET_PACKAGES_CREDENTIALS_KEY: &str = "credentials.json";
/// Secret with the CURVE certificate of the instance.
pub const SECRET_CURVE: &str = "flux-curve";
/// Annotation on [`SECRET_CURVE`]: uid of the FluxInstance that the certificate was made for. The next one gets its own.
pub const ANNOTATION_INSTANCE: &str = "distribute.flux-framework.org/instance-uid";
/// Key in [`SECRET_CURVE`].
pub const SECRET_CURVE_KEY: &str = "curve.cert";
/// Lease that elects the planner among the agents.
pub const LEASE_PLANNER: &str = "flux-planner";
/// The directory for everything that we install on a host, unless preflight must choose another one.
pub const DEFAULT_PREFIX: &str = "/opt/flux-distribute";
/// The prefixes that preflight tries, in order, if the spec names none.
pub const PREFIX_CANDIDATES: [&str; 3] =
    [DEFAULT_PREFIX, "/var/lib/flux-distribute", "/home/kubernetes/flux-distribute"];
/// Run-time directory on the host, gone with a reboot.
pub const RUN_DIR: &str = "/run/flux-distribute";
/// Directory of the broker's socket `local` (`local-uri` of flux-broker-attributes(7)), gone with a reboot.
pub const BROKER_SOCKET_DIR: &str = "/run/flux-distribute/broker";
/// URI of the broker's socket on each host.
pub const BROKER_URI: &str = "local:///run/flux-distribute/broker/local";
/// TCP port of the brokers unless the spec says otherwise (flux-config-bootstrap(5) uses it in its examples).
pub const DEFAULT_BROKER_PORT: u16 = 8050;
/// TCP port at which agents serve the archives they hold to each other, on their Node's InternalIP.
pub const PEER_PORT: u16 = 8052;
/// TCP port at which an agent serves its metrics, on its Node's InternalIP, to clients that the API server permits.
pub const METRICS_PORT: u16 = 8051;
/// Audience of a token that is good for nothing but the metrics.
pub const METRICS_AUDIENCE: &str = "flux-distribute-metrics";
/// Type of the condition with which an agent reports on its own pod that its node is as the planner wants it: the pods' readiness
/// gate.
pub const CONDITION_POD_READY: &str = "distribute.flux-framework.org/ready";

/// The version (`version` of flux-broker-attributes(7)) that local mode's stand-in for a broker has, and the prefix of every
/// message about such an instance: no Flux runs there.
pub const STAND_IN: &str = "stand-in, no Flux";

/// Both CustomResourceDefinitions as YAML documents.
///
/// # Errors
/// If serializing fails, which is a bug.
pub fn crds() -> Result<String, serde_norway::Error> {
    use kube::CustomResourceExt;
    let (instance, node) = (FluxInstance::crd(), FluxNode::crd());
    Ok(format!("---\n{}---\n{}", serde_norway::to_string(&instance)?, serde_norway::to_string(&node)?))
}

/// For serde's `skip_serializing_if`.
fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}
