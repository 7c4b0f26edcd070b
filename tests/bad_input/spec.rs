//! A spec that can't be served, and a cluster without a node for it.

use std::time::Duration;

use api::{
    ANNOTATION_CONSUMED, CONFIGMAP_DEFAULT, FluxInstance, FluxInstanceSpec, INSTANCE, InstancePhase, NAMESPACE,
    NodePhase,
};
use k8s_openapi::{
    api::core::v1::ConfigMap,
    apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, ValidationRule},
};
use kube::{
    Api, CustomResourceExt, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    runtime::wait::await_condition,
};
use serde_json::{Value, json};

use super::cluster::{Case, PATIENCE, no_nodes};

fn refused(answer: Result<FluxInstance, kube::Error>) -> String {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 422 => status.message,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_spec_is_refused_with_the_message_of_validate() {
    let Some(case) = Case::on(1).await else { return };
    let wrong = [
        (json!({"size": 5, "maxSize": 4}), "is more than maxSize: raise maxSize too"),
        (json!({"topology": "ring"}), "spec.topology: "),
        (json!({"broker": {"runAs": "a b"}}), "spec.broker.runAs: "),
        (json!({"broker": {"checkpointPeriod": "soon"}}), "spec.broker.checkpointPeriod: "),
        (json!({"prefix": "opt/flux"}), "spec.prefix: "),
        (json!({"prefix": "/data/my flux"}), "spec.prefix: \"/data/my flux\" has characters other than"),
        (json!({"prefix": "/tmp/x"}), "spec.prefix: \"/tmp/x\" is in a directory that does not outlast a boot"),
        (json!({"prefix": "/var/./lock/x"}), "is in a directory that does not outlast a boot"),
        (json!({"packages": {"channels": ["conda-forge"], "bundle": null}}), "spec.packages.channels[0]: "),
        (json!({"packages": {"specs": ["flux-core ==="], "bundle": null}}), "spec.packages.specs[0]: "),
        (json!({"packages": {"glibc": "two"}}), "spec.packages.glibc: "),
        (json!({"broker": {"cpuWeight": 0}}), "spec.broker.cpuWeight: 0 is less than 1"),
        (json!({"topology": "kary:0"}), "spec.topology: \"kary:0\" is Flux's name for a flat tree: write flat"),
        (json!({"lead": "Bad Name"}), "spec.lead: \"Bad Name\" is not a node name"),
        (
            json!({"nodes": {"tolerations": [{"key": "hpc", "operator": "Equals"}]}}),
            "spec.nodes.tolerations[0].operator: ",
        ),
        (json!({"packages": {"bundle": {"url": "file:///a.tar.gz", "sha256": "x"}}}), "spec.packages.bundle.sha256: "),
    ];
    for (spec, words) in &wrong {
        let message = refused(case.try_create(spec.clone()).await);
        assert!(message.contains(words), "{message}");
    }
    case.create(no_nodes()).await;
    let all = refused(case.try_patch(json!({"size": "3", "topology": "ring", "lead": "Bad Name"})).await);
    assert!(["spec.size: ", "spec.topology: ", "spec.lead: "].iter().all(|field| all.contains(field)), "{all}");
    // Of a plain map of labels, pruning leaves a selector of all nodes.
    let plain_map = json!({"nodes": {"selector": {"matchLabels": null, "pool": "hpc"}}});
    let pruned = refused(case.try_patch(plain_map).await);
    assert!(pruned.contains("spec.nodes.selector: has neither matchLabels nor matchExpressions"), "{pruned}");
    for (spec, words) in &wrong {
        let message = refused(case.try_patch(spec.clone()).await);
        assert!(message.contains(words), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn config_tables_that_are_reserved_or_not_toml_are_refused() {
    let Some(case) = Case::on(1).await else { return };
    for (config, words) in [
        ("[bootstrap]\ncurve_cert = \"/x\"", "bootstrap"),
        ("[tbon]\ntopo = \"kary:2\"", "tbon"),
        ("[resource]\nnoverify = true", "resource"),
        ("[kvs]\ncheckpoint-period = \"1s\"", "kvs"),
        ("[job-manager", "TOML"),
        ("a = = b", "TOML"),
    ] {
        let message = refused(case.try_create(json!({"broker": {"config": config}})).await);
        assert!(message.contains("spec.broker.config") && message.contains(words), "{message}");
        super::cluster::assert_sentence(&message);
    }
}

/// Makes ConfigMap flux-default anew, as an apply does in a cluster that never had an instance.
async fn set_default(case: &Case, text: &str) {
    let patch = json!({
        "metadata": {"annotations": {ANNOTATION_CONSUMED: Value::Null}}, "data": {"spec.yaml": text},
    });
    let maps = Api::<ConfigMap>::namespaced(case.client.clone(), NAMESPACE);
    maps.patch(CONFIGMAP_DEFAULT, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_first_spec_is_an_event_until_it_is_corrected() {
    let Some(case) = Case::on(1).await else { return };
    let wrong = [
        ("topology: ring", "spec.yaml can't be served: line 1: spec.topology: "),
        ("# how many\nsize: many", "spec.yaml can't be served: line 2: spec.size: must be of type integer"),
        ("{", "is not YAML: "),
    ];
    set_default(&case, wrong[0].0).await;
    // The apply starts the agents, too. One that runs already, beside nothing, looks for a default once a minute only.
    case.restart_agent("node1").await;
    for (text, words) in wrong {
        set_default(&case, text).await;
        case.warned("ConfigMap/flux-default", words).await;
        assert!(case.api::<FluxInstance>().get_opt(INSTANCE).await.unwrap().is_none());
        case.becomes_ready("node1", false).await;
    }
    set_default(&case, &no_nodes().to_string()).await;
    case.instance_says("no eligible node").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_default_that_is_applied_while_the_instance_is_being_deleted_is_used_afterwards() {
    let Some(case) = Case::on(1).await else { return };
    case.create(no_nodes()).await;
    case.instance_says("no eligible node").await;
    let instances = case.api::<FluxInstance>();
    let hold = async |finalizers: Value| {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        instances.patch(INSTANCE, &PatchParams::default(), &patch).await.unwrap();
    };
    hold(json!(["example.com/held"])).await;
    instances.delete(INSTANCE, &DeleteParams::default()).await.unwrap();
    set_default(&case, &no_nodes().to_string()).await;
    // Two whole rounds of the planner.
    for name in ["another", "one-more"] {
        let other = FluxInstance::new(name, FluxInstanceSpec::default());
        instances.create(&PostParams::default(), &other).await.unwrap();
        let ignored = |other: &FluxInstance| other.status.as_ref().is_some_and(|s| s.phase == InstancePhase::Ignored);
        case.until(name, "ignored", ignored).await;
        instances.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let deleted = instances.get(INSTANCE).await.unwrap().uid();
    hold(json!([])).await;
    case.until(INSTANCE, "made anew", |flux: &FluxInstance| flux.uid() != deleted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_planner_reports_a_spec_that_only_the_schema_lets_pass() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    case.create(json!({"packages": {"specs": ["flux-core ==="]}})).await;
    let instance = case.instance_says("spec.packages.specs[0]: ").await;
    let status = instance.status.unwrap();
    assert_eq!(status.phase, InstancePhase::Failed);
    assert_eq!(status.holding("Degraded").unwrap().reason, "InvalidSpec");
    case.warned("FluxInstance/flux", "spec.packages.specs[0]: ").await;
    case.becomes_ready("node1", false).await;
    case.nothing_half_made_is_live("node1");
    case.patch(json!({"packages": {"specs": null}})).await;
    case.patch(no_nodes()).await;
    case.instance_says("no eligible node").await;
}

/// Sets the rules that the API server has for spec.prefix, and returns those that it had.
async fn set_prefix_rules(case: &Case, rules: Option<Vec<ValidationRule>>) -> Option<Vec<ValidationRule>> {
    let definitions = Api::<CustomResourceDefinition>::all(case.client.clone());
    let mut definition = definitions.get(FluxInstance::crd_name()).await.unwrap();
    let schema = definition.spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema.as_mut().unwrap();
    let spec = schema.properties.as_mut().unwrap().get_mut("spec").unwrap();
    let prefix = spec.properties.as_mut().unwrap().get_mut("prefix").unwrap();
    let before = std::mem::replace(&mut prefix.x_kubernetes_validations, rules);
    definitions.replace(FluxInstance::crd_name(), &PostParams::default(), &definition).await.unwrap();
    before
}

/// An API server applies a changed CRD a moment later, without announcing it.
async fn until_refused(wanted: bool, attempt: impl AsyncFn() -> Result<FluxInstance, kube::Error>) {
    let follows = async {
        while attempt().await.is_err() != wanted {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, follows).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_existing_instance_may_keep_a_prefix_that_is_refused_now() {
    let Some(case) = Case::with_api(1, "real").await else { return };
    let words = "has characters other than";
    let mut odd = no_nodes();
    odd["prefix"] = json!("/data/my flux");
    let message = refused(case.try_create(odd.clone()).await);
    assert!(message.contains(words), "{message}");

    let rules = set_prefix_rules(&case, None).await;
    until_refused(false, async || case.try_create(odd.clone()).await).await;
    set_prefix_rules(&case, rules).await;
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    let another = Patch::Merge(json!({"spec": {"prefix": "/data/another one"}}));
    until_refused(true, async || case.api::<FluxInstance>().patch(INSTANCE, &dry, &another).await).await;
    let message = refused(case.try_patch(json!({"prefix": "/data/another one"})).await);
    assert!(message.contains(words), "{message}");

    // It keeps working: its spec can be changed, its status is written, and it can be deleted.
    case.instance_says("no eligible node").await;
    let generation = case.try_patch(json!({"size": 3})).await.unwrap().metadata.generation;
    let follows = |instance: &FluxInstance| {
        instance.status.as_ref().is_some_and(|status| Some(status.observed_generation) == generation)
    };
    case.until(INSTANCE, "the changed spec is followed", follows).await;
    case.instance_says("no eligible node").await;
    case.delete_instance().await;
    let gone = await_condition(case.api::<FluxInstance>(), INSTANCE, |found: Option<&FluxInstance>| found.is_none());
    tokio::time::timeout(PATIENCE, gone).await.unwrap().unwrap();
    assert!(refused(case.try_create(odd).await).contains(words));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubernetes_without_admission_policies_is_refused_with_the_remedy() {
    let Some(case) = Case::on(1).await else { return };
    case.cluster.must(&["api", "versionless"]);
    // A planner asks for the version until one is new enough.
    case.restart_agent("node1").await;
    case.create(no_nodes()).await;
    case.instance_says("let ServiceAccount install-flux get /version").await;
    case.cluster.must(&["api", "old"]);
    let instance = case.instance_says("Kubernetes 1.29 has no ValidatingAdmissionPolicy v1").await;
    case.cluster.must(&["api", "none"]);
    let status = instance.status.unwrap();
    assert_eq!(status.phase, InstancePhase::Failed);
    let degraded = status.holding("Degraded").unwrap();
    assert_eq!(degraded.reason, "KubernetesTooOld");
    assert!(degraded.message.ends_with("upgrade the cluster to Kubernetes 1.30 or newer"), "{}", degraded.message);
    case.warned("FluxInstance/flux", "Kubernetes 1.29").await;
    // Upgraded, it is served.
    case.instance_says("no eligible node").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_eligible_node_the_status_shows_the_reason_of_each_node() {
    let Some(case) = Case::on(1).await else { return };
    let taint = json!({"key": "hpc", "value": "no", "effect": "NoSchedule"});
    for (node, words) in [
        (json!({"spec": {"unschedulable": true}}), "the node is cordoned"),
        (
            json!({"spec": {"unschedulable": null, "taints": [taint]}}),
            "taint hpc:NoSchedule is not in spec.nodes.tolerations",
        ),
    ] {
        case.patch_node("node1", node).await;
        // Before packages are looked for: no channel is asked.
        let packages = json!({"channels": ["http://127.0.0.1:1"]});
        case.create(json!({"packages": packages})).await;
        let message = case.node_says("node1", NodePhase::Waiting, words).await;
        assert!(message.starts_with("this node gets no rank: "), "{message}");
        case.nothing_half_made_is_live("node1");
        case.delete_instance().await;
        case.create(no_nodes()).await;
        let instance = case.instance_says("no eligible node: node1: ").await;
        assert_eq!(instance.status.unwrap().phase, InstancePhase::Failed);
        case.warned("FluxInstance/flux", "no eligible node: node1: ").await;
        // Nothing is wanted of it.
        case.becomes_ready("node1", true).await;
        case.delete_instance().await;
    }
    case.patch_node("node1", json!({"spec": {"taints": null}})).await;
}
