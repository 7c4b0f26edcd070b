//! Makes, resizes and removes placeholder pods.

use std::time::Duration;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PostParams, Preconditions},
};
use serde_json::{Value, json};
use tokio::{sync::Mutex, time::Instant};
use tracing::warn;

use api::{DAEMONSET, NAMESPACE};
use base::error_chain;
use cluster::{ApiError, call, gone_is_fine, patch_params};
use pods::{
    action::{PlaceholderStep, PodRef},
    placeholder,
    requests::Size,
};

use crate::under_way::Outcome;

/// The PriorityClass of placeholder pods. No user class is higher, and it preempts nobody. `deploy/pods.yaml` makes it.
const PRIORITY_CLASS: &str = "flux-host-jobs";
/// Name of the pod's only container.
const CONTAINER: &str = "host-jobs";
/// Pause if the pod was made or exchanged since it was seen.
const CHANGED_PAUSE: Duration = Duration::from_secs(1);
/// Pause if the API server does not answer: host jobs on many nodes must not send it a thousand requests a second.
const NO_ANSWER_PAUSE: Duration = Duration::from_secs(5);
/// How long the image of the agents is not asked for again.
const IMAGE_KNOWN_FOR: Duration = Duration::from_secs(10);

/// The agents' image, and when it was read; None inside if the DaemonSet names none. Empty until somebody asks.
pub(crate) type ImageCache = Mutex<Option<(Instant, Option<String>)>>;

/// Carries out `step`.
pub(crate) async fn carry_out(client: &Client, cache: &ImageCache, step: &PlaceholderStep) -> Outcome {
    let done = match step {
        PlaceholderStep::Make { node, node_uid, size } => make(client, cache, node, node_uid, *size).await,
        PlaceholderStep::Resize { pod, size } => resize(client, pod, *size).await,
        PlaceholderStep::Remove { pod } => remove(client, pod).await,
    };
    let Err(error) = done else { return Outcome::Done(None) };
    let is_resize = matches!(step, PlaceholderStep::Resize { .. });
    match (error.busy_for(), error.code()) {
        (Some(pause), _) => Outcome::Busy(pause),
        // The next observation shows that another pod has the name by now, or that the pod is gone.
        (None, Some(409)) => Outcome::Busy(CHANGED_PAUSE),
        (None, Some(404)) if is_resize => Outcome::Busy(CHANGED_PAUSE),
        // A webhook that does not answer is a 500. Whatever was done shows.
        (None, code) => {
            warn!(node = step.node(), error = error_chain(&error), "can't make, resize or delete a placeholder pod");
            match code {
                Some(_) => Outcome::Refused(error_chain(&error)),
                None => Outcome::Busy(NO_ANSWER_PAUSE),
            }
        }
    }
}

async fn make(client: &Client, cache: &ImageCache, node: &str, node_uid: &str, size: Size) -> Result<(), ApiError> {
    let agents_image = agents_image(client, cache).await?;
    let pod = serde_json::from_value(pod(node, node_uid, agents_image.as_deref(), size))
        .map_err(|error| ApiError::Content { object: format!("placeholder pod {node}"), reason: error.to_string() })?;
    // Untyped: the program has no other use for what writes any Pod, and would be a third of a megabyte larger.
    let kind = ApiResource::erase::<Pod>(&());
    let pods: Api<DynamicObject> = Api::namespaced_with(client.clone(), placeholder::NAMESPACE, &kind);
    let parameters = PostParams::default();
    let made = call(format!("create placeholder pod {node}"), pods.create(&parameters, &pod)).await;
    if made.is_err() {
        // The agents may have got another one meanwhile.
        *cache.lock().await = None;
    }
    made.map(drop)
}

/// The image of the agents. For a job over many nodes, many pods are made at once: only one of them asks the API server.
async fn agents_image(client: &Client, cache: &ImageCache) -> Result<Option<String>, ApiError> {
    let mut known = cache.lock().await;
    if let Some((_, image)) = known.as_ref().filter(|(since, _)| since.elapsed() < IMAGE_KNOWN_FOR) {
        return Ok(image.clone());
    }
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let agents = call(format!("read DaemonSet {DAEMONSET}"), sets.get(DAEMONSET)).await?;
    let image = agents.spec.and_then(|spec| spec.template.spec?.containers.into_iter().next()?.image);
    *known = Some((Instant::now(), image.clone()));
    Ok(image)
}

/// The placeholder pod of `node`, which only waits, without any right. Admission policy `flux-distribute-host-jobs` permits this form alone. Its
/// Node owns it, so that it ends with the Node, and `kubectl drain` and autoscalers need not wait for it.
pub fn pod(node: &str, node_uid: &str, image: Option<&str>, size: Size) -> Value {
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
    let (pods, parameters) = (placeholder_pods(client), patch_params());
    let resized = pods.patch_subresource("resize", &pod.name, &parameters, &patch);
    match call(format!("resize placeholder pod {}", pod.name), resized).await {
        // The pod has been replaced: the next observation shows it.
        Err(error) if error.code() == Some(422) && error_chain(&error).contains("metadata.uid") => Ok(()),
        resized => resized.map(drop),
    }
}

async fn remove(client: &Client, pod: &PodRef) -> Result<(), ApiError> {
    let preconditions = Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None });
    // Shorter than what somebody may have deleted it with before.
    let parameters = DeleteParams { preconditions, ..DeleteParams::default() }.grace_period(0);
    let pods = placeholder_pods(client);
    gone_is_fine(call(format!("delete placeholder pod {}", pod.name), pods.delete(&pod.name, &parameters)).await)
}

/// Deletes all placeholder pods, after the last bridge has ended.
///
/// # Errors
/// [`ApiError`], of the last pod that could not be deleted, or of the list.
pub async fn remove_all(client: &Client) -> Result<(), ApiError> {
    let (pods, all) = (placeholder_pods(client), ListParams::default());
    let mut removed = Ok(());
    for pod in call("list placeholder pods".to_owned(), pods.list_metadata(&all)).await? {
        removed = remove_on(client, &pod.name_any()).await.and(removed);
    }
    removed
}

/// Deletes the placeholder pod of `node`, if there is one.
///
/// # Errors
/// [`ApiError`].
pub async fn remove_on(client: &Client, node: &str) -> Result<(), ApiError> {
    let parameters = DeleteParams::default().grace_period(0);
    gone_is_fine(
        call(format!("delete placeholder pod {node}"), placeholder_pods(client).delete(node, &parameters)).await,
    )
}

fn placeholder_pods(client: &Client) -> Api<Pod> {
    Api::namespaced(client.clone(), placeholder::NAMESPACE)
}
