//! Makes, resizes and removes placeholder pods.

use std::time::Duration;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tracing::warn;

use api::NAMESPACE;
use base::error_chain;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use pods::{
    action::{PlaceholderStep, PodRef},
    placeholder::{self, Size},
};

use crate::under_way::Outcome;

/// The PriorityClass of placeholder pods. No user class is higher, and it preempts nobody. `deploy/pods.yaml` makes it.
const PRIORITY_CLASS: &str = "flux-host-jobs";
/// The agents' DaemonSet, whose image placeholder pods have.
const DAEMONSET: &str = "install-flux";
/// Name of the pod's only container.
const CONTAINER: &str = "host-jobs";
/// Pause if the pod was made or exchanged since it was seen.
const CHANGED_PAUSE: Duration = Duration::from_secs(1);

/// Carries out `step`.
pub(crate) async fn carry_out(client: &Client, step: &PlaceholderStep) -> Outcome {
    let done = match step {
        PlaceholderStep::Make { node, node_uid, size } => make(client, node, node_uid, *size).await,
        PlaceholderStep::Resize { pod, size } => resize(client, pod, *size).await,
        PlaceholderStep::Remove { pod } => remove(client, pod).await,
    };
    match done {
        Ok(()) => Outcome::Done(None),
        // Another pod has the name by now, which the next observation shows.
        Err(error) if error.code() == Some(409) => Outcome::Busy(CHANGED_PAUSE),
        Err(error) => {
            warn!(node = step.node(), error = error_chain(&error), "a placeholder pod is not as it should be");
            match Outcome::from(&error) {
                // No such namespace, or no such subresource.
                Outcome::Failed => Outcome::Refused(error_chain(&error)),
                outcome => outcome,
            }
        }
    }
}

async fn make(client: &Client, node: &str, node_uid: &str, size: Size) -> Result<(), ApiError> {
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let agents = call(format!("read DaemonSet {DAEMONSET}"), sets.get(DAEMONSET)).await?;
    let image = agents.spec.and_then(|spec| spec.template.spec?.containers.into_iter().next()?.image);
    let pod = serde_json::from_value(pod(node, node_uid, image.as_deref(), size))
        .map_err(|error| ApiError::Content { object: format!("placeholder pod {node}"), reason: error.to_string() })?;
    call(format!("create placeholder pod {node}"), pods(client).create(&PostParams::default(), &pod)).await.map(drop)
}

/// The pod only waits, without any right. Admission policy `flux-distribute-host-jobs` permits this form alone. Its node owns it, so that it ends with the Node, and
/// `kubectl drain` and autoscalers need not wait for it.
fn pod(node: &str, node_uid: &str, image: Option<&str>, size: Size) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": node,
            "labels": {"app.kubernetes.io/name": "flux-host-jobs", "app.kubernetes.io/part-of": "flux-distribute"},
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": true}],
        },
        "spec": {
            "nodeName": node,
            "priorityClassName": PRIORITY_CLASS,
            "tolerations": [{"operator": "Exists"}],
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": 65534,
                "runAsGroup": 65534,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "args": ["placeholder"],
                // On nodes with swap, kubelet changes memory in place only like this.
                "resizePolicy": [{"resourceName": "memory", "restartPolicy": "RestartContainer"}],
                "resources": requests(size),
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}

fn requests(size: Size) -> Value {
    json!({"requests": {"cpu": format!("{}m", size.cpu), "memory": size.memory.to_string()}})
}

async fn resize(client: &Client, pod: &PodRef, size: Size) -> Result<(), ApiError> {
    let containers = json!([{"name": CONTAINER, "resources": requests(size)}]);
    let patch = Patch::Strategic(json!({"metadata": {"uid": pod.uid}, "spec": {"containers": containers}}));
    let (pods, parameters) = (pods(client), patch_params());
    let resized = pods.patch_subresource("resize", &pod.name, &parameters, &patch);
    match call(format!("resize placeholder pod {}", pod.name), resized).await {
        // The API server answers another uid so.
        Err(error) if error.code() == Some(422) && error_chain(&error).contains("metadata.uid") => Ok(()),
        resized => resized.map(drop),
    }
}

async fn remove(client: &Client, pod: &PodRef) -> Result<(), ApiError> {
    let preconditions = Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None });
    let parameters = DeleteParams { preconditions, ..DeleteParams::default() };
    let pods = pods(client);
    gone_is_fine(call(format!("delete placeholder pod {}", pod.name), pods.delete(&pod.name, &parameters)).await)
}

/// Deletes all placeholder pods, after the last bridge has ended.
///
/// # Errors
/// [`ApiError`].
pub async fn remove_all(client: &Client) -> Result<(), ApiError> {
    let list = call("list placeholder pods".to_owned(), pods(client).list(&ListParams::default())).await?;
    for pod in list {
        remove(client, &PodRef::from(&pods::pod::PodView::of(&pod, None))).await?;
    }
    Ok(())
}

fn pods(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), placeholder::NAMESPACE)
}
