//! An agent's token in the wrong hands, and placeholder pods.

use k8s_openapi::api::{
    admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding},
    apps::v1::DaemonSet,
    core::v1::{Namespace, Node, Pod, ServiceAccount},
    rbac::v1::{Role, RoleBinding},
    scheduling::v1::PriorityClass,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    cluster::{Case, until_true},
    rights::{agent, make_of, refused},
};
use api::NAMESPACE;
use pods::{placeholder, requests::Size};

const PODS_YAML: &str = include_str!("../../deploy/pods.yaml");
const INSTALLER: &str = include_str!("../../deploy/daemonset-installer.yaml");

/// What makes a pod another one, and how.
type Edit = (&'static str, fn(&mut Value));

/// The pod that the bridge makes for node `n1`, with `image`.
fn for_host_jobs(image: &str) -> Value {
    bridge::placeholder_pod("n1", "u", Some(image), Size { cpu: 2000, memory: 1 << 30 })
}

/// Makes ServiceAccount `default`, without which the API server takes no pod.
async fn make_account(admin: &Client, namespace: &str) {
    let account = serde_json::from_value(json!({"metadata": {"name": "default"}})).unwrap();
    let _ = Api::<ServiceAccount>::namespaced(admin.clone(), namespace).create(&PostParams::default(), &account).await;
}

/// Makes what bounds placeholder pods, and returns the image of the agents.
async fn make_policy(admin: &Client) -> String {
    make_of(PODS_YAML, Api::<Namespace>::all(admin.clone())).await;
    make_of(PODS_YAML, Api::<PriorityClass>::all(admin.clone())).await;
    make_of(PODS_YAML, Api::<Role>::namespaced(admin.clone(), placeholder::NAMESPACE)).await;
    make_of(PODS_YAML, Api::<RoleBinding>::namespaced(admin.clone(), placeholder::NAMESPACE)).await;
    make_of(PODS_YAML, Api::<ValidatingAdmissionPolicy>::all(admin.clone())).await;
    make_of(PODS_YAML, Api::<ValidatingAdmissionPolicyBinding>::all(admin.clone())).await;
    make_of(INSTALLER, Api::<DaemonSet>::namespaced(admin.clone(), NAMESPACE)).await;
    make_account(admin, placeholder::NAMESPACE).await;
    let agents = Api::<DaemonSet>::namespaced(admin.clone(), NAMESPACE).get("install-flux").await.unwrap();
    agents.spec.unwrap().template.spec.unwrap().containers[0].image.clone().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_agents_daemonset_others_create_pods_as_ever() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let (admin, token) = (case.client.clone(), agent(&case).await);
    let image = make_policy(&admin).await;
    let placeholders = Api::<Pod>::namespaced(token, placeholder::NAMESPACE);
    let pod: Pod = serde_json::from_value(for_host_jobs(&image)).unwrap();
    Api::<DaemonSet>::namespaced(admin.clone(), NAMESPACE)
        .delete("install-flux", &DeleteParams::default())
        .await
        .unwrap();
    until_true("the policy to deny all that it looks at", async || {
        let made = placeholders.create(&PostParams::default(), &pod).await;
        let words = made.as_ref().err().map(ToString::to_string).unwrap_or_default();
        if made.is_ok() {
            placeholders.delete("n1", &DeleteParams::default().grace_period(0)).await.unwrap();
        }
        words.contains("no params found")
    })
    .await;
    let theirs = json!({"metadata": {"generateName": "web-"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let theirs: Pod = serde_json::from_value(theirs).unwrap();
    make_account(&admin, "default").await;
    Api::<Pod>::namespaced(admin, "default").create(&PostParams::default(), &theirs).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_token_creates_placeholder_pods_and_no_others() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let (admin, token) = (case.client.clone(), agent(&case).await);
    let image = make_policy(&admin).await;
    let pods = Api::<Pod>::namespaced(token.clone(), placeholder::NAMESPACE);
    let create = async |value: &Value| {
        pods.create(&PostParams::default(), &serde_json::from_value(value.clone()).unwrap()).await
    };
    let mut words = String::new();
    until_true("the policy to hold", async || {
        let answer = create(&for_host_jobs("example.org/mine")).await;
        if let Ok(made) = &answer {
            pods.delete(&made.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
            return false;
        }
        words = refused(answer, "another image").1;
        words.contains("the image of DaemonSet install-flux, which is ")
    })
    .await;
    let edits: [Edit; 18] = [
        ("/metadata/name", |pod| pod["metadata"]["name"] = json!("n2")),
        ("/metadata/generateName", |pod| pod["metadata"] = json!({"generateName": "n"})),
        ("/metadata/labels", |pod| pod["metadata"]["labels"] = json!({"app": "theirs"})),
        ("/metadata/finalizers", |pod| pod["metadata"]["finalizers"] = json!(["example.org/mine"])),
        ("/metadata/ownerReferences", |pod| pod["metadata"]["ownerReferences"][0]["name"] = json!("n2")),
        ("/spec/volumes", |pod| pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}])),
        ("/spec/automountServiceAccountToken", |pod| pod["spec"]["automountServiceAccountToken"] = json!(true)),
        ("/spec/hostNetwork", |pod| pod["spec"]["hostNetwork"] = json!(true)),
        ("/spec/priorityClassName", |pod| pod["spec"]["priorityClassName"] = json!("system-node-critical")),
        ("/spec/affinity", |pod| {
            let everywhere = json!({"labelSelector": {}, "namespaceSelector": {}, "topologyKey": "kubernetes.io/os"});
            let terms = json!({"requiredDuringSchedulingIgnoredDuringExecution": [everywhere]});
            pod["spec"]["affinity"] = json!({ "podAntiAffinity": terms });
        }),
        ("/spec/terminationGracePeriodSeconds", |pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(604_800)),
        ("/spec/runtimeClassName", |pod| pod["spec"]["runtimeClassName"] = json!("kata")),
        ("/spec/containers/resources/requests", |pod| {
            let all = json!({"requests": {"example.com/gpu": "8"}, "limits": {"example.com/gpu": "8"}});
            pod["spec"]["containers"][0]["resources"] = all;
        }),
        ("/metadata/annotations", |pod| pod["metadata"]["annotations"] = json!({"openshift.io/scc": "x".repeat(513)})),
        ("/metadata/annotations/key", |pod| pod["metadata"]["annotations"] = json!({"example.org/a": "b"})),
        ("/spec/containers/command", |pod| pod["spec"]["containers"][0]["command"] = json!(["sh"])),
        ("/spec/containers/args", |pod| pod["spec"]["containers"][0]["args"] = json!(["agent"])),
        ("/spec/containers/env", |pod| pod["spec"]["containers"][0]["env"] = json!([{"name": "A", "value": "b"}])),
    ];
    for (what, edit) in edits {
        let mut wrong = for_host_jobs(&image);
        edit(&mut wrong);
        assert_eq!(refused(create(&wrong).await, what).0, 403, "{what}");
    }
    let elsewhere = Api::<Pod>::namespaced(token.clone(), "default");
    let pod = serde_json::from_value(for_host_jobs(&image)).unwrap();
    assert_eq!(refused(elsewhere.create(&PostParams::default(), &pod).await, "elsewhere").0, 403);

    let made = create(&for_host_jobs(&image)).await.unwrap();
    // The API server lets nobody resize a pod beyond its Node.
    let node = json!({"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi"}}});
    let nodes = Api::<Node>::all(admin.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    let requests = |cpu: &str| json!([{"name": "host-jobs", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]);
    let patch = |uid: &str| Patch::Strategic(json!({"metadata": {"uid": uid}, "spec": {"containers": requests("3")}}));
    let parameters = PatchParams::default();
    let other = pods.patch_subresource("resize", "n1", &parameters, &patch("another")).await;
    assert_eq!(refused(other, "another pod of the name").0, 422);
    let mut resized = None;
    until_true("the API server to see the Node", async || {
        resized = pods.patch_subresource("resize", "n1", &parameters, &patch(&made.uid().unwrap())).await.ok();
        resized.is_some()
    })
    .await;
    let asks = serde_json::to_value(&resized).unwrap()["spec"]["containers"][0]["resources"]["requests"]["cpu"].take();
    assert_eq!(asks, json!("3"));
    pods.delete("n1", &DeleteParams::default()).await.unwrap();
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
}
