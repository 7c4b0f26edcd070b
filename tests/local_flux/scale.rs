//! A smaller and a larger instance, and what Nodes say of it: annotations for autoscalers, and labels.

use std::collections::BTreeMap;

use api::{ANNOTATION_PROTECTS, FluxInstance, INSTANCE, LABEL_LEAD, LABEL_ONLINE, LABEL_RANK};
use apiserver::SCRAPER;
use k8s_openapi::api::core::v1::{Event, Node};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use model::eligibility::PROTECTING;
use serde_json::json;

use crate::{harness::Cluster, scheduler::Scheduler};

/// As `kubectl scale fxi/flux --replicas=N` does.
fn scale(cluster: &Cluster, size: u32) -> Result<(), kube::Error> {
    let patch = Patch::Merge(json!({"spec": {"replicas": size}}));
    cluster.wait(cluster.api::<FluxInstance>().patch_scale(INSTANCE, &PatchParams::default(), &patch)).map(drop)
}

/// Waits until so many ranks are up and given jobs, and the others down or drained.
fn up(cluster: &Cluster, free: usize, all: usize) {
    let wanted = BTreeMap::from([("free", free), ("down", all - free)]);
    cluster.until(&format!("{wanted:?}"), || {
        let list = cluster.ask("node1", &["flux", "resource", "list", "-s", "free,down", "-no", "{state} {nnodes}"])?;
        let mut found = BTreeMap::from([("free", 0), ("down", 0)]);
        for line in list.lines() {
            let (state, count) = line.split_once(' ')?;
            *found.get_mut(state)? += count.trim().parse::<usize>().ok()?;
        }
        let status = cluster.instance().status?;
        (found == wanted && status.size as usize == free && status.online as usize == free).then_some(())
    });
    assert_eq!(cluster.exec("node1", &["flux", "run", &format!("-N{free}"), "hostname"]).lines().count(), free);
}

#[test]
fn two_of_four_grow_and_shrink_and_never_exceed_the_maximum() {
    two_of_four(Scheduler::Fluxion);
}

#[test]
fn two_of_four_grow_and_shrink_under_sched_simple() {
    two_of_four(Scheduler::Simple);
}

fn two_of_four(scheduler: Scheduler) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let instance = json!({
        "apiVersion": "distribute.flux-framework.org/v1alpha1", "kind": "FluxInstance",
        "metadata": {"name": INSTANCE}, "spec": {"size": 2, "maxSize": 4},
    });
    std::fs::write(file.path(), instance.to_string()).unwrap();
    let Some(bundle) = scheduler.bundle() else { return };
    let options = ["--instance", file.path().to_str().unwrap(), "--bundle", bundle.to_str().unwrap()];
    let cluster = Cluster::begin(4, &options);
    cluster.until("the instance", || cluster.wait(cluster.api::<FluxInstance>().get_opt(INSTANCE)).unwrap());
    cluster.until("two members", || (cluster.instance().status?.online == 2).then_some(()));
    scheduler.runs_on(&cluster);
    up(&cluster, 2, 4);
    let first = cluster.brokers();

    scale(&cluster, 4).unwrap();
    up(&cluster, 4, 4);
    let before = cluster.brokers();
    assert!(first.iter().all(|(node, broker)| before[node] == *broker), "{before:?}");
    let ranks = cluster.ranks();

    for (size, words) in [(5, "is more than maxSize: raise maxSize too"), (0, "delete the FluxInstance")] {
        match scale(&cluster, size) {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                assert!(status.message.contains(words), "{status:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    for (size, stays) in [(3, 3), (4, 3), (1, 1), (4, 1)] {
        scale(&cluster, size).unwrap();
        up(&cluster, size as usize, 4);
        let now = cluster.brokers();
        assert_eq!(now.len(), size as usize);
        for broker in before.values().filter(|broker| broker.rank < stays) {
            assert!(now.values().any(|still| still == broker), "{broker:?} is not in {now:?}");
        }
    }
    assert_eq!(cluster.ranks(), ranks);
}

#[test]
fn a_size_above_the_default_maximum_is_denied_with_a_message() {
    let Some(cluster) = Cluster::up(1, &[]) else { return };
    let before = cluster.brokers();
    cluster.patch(json!({"spec": {"size": 65}}));
    let words =
        cluster.until("the condition", || Some(cluster.instance().status?.holding("ScaleDenied")?.message.clone()));
    assert!(words.contains("size 65 is more than maxSize 64"), "{words}");
    cluster.until("the Event", || {
        let events = cluster.wait(cluster.api::<Event>().list(&ListParams::default())).unwrap();
        events
            .iter()
            .any(|event| event.reason.as_deref() == Some("ScaleDenied") && event.message.as_ref() == Some(&words))
            .then_some(())
    });
    let instance = cluster.instance();
    assert_eq!((instance.spec.size, instance.spec.max_size, instance.status.unwrap().max_size), (Some(65), None, 64));
    assert_eq!(cluster.brokers(), before);
}

fn annotations(cluster: &Cluster, node: &str) -> BTreeMap<String, String> {
    let ours = |key: &String| PROTECTING.contains(&key.as_str()) || key == ANNOTATION_PROTECTS;
    let node = cluster.wait(Api::<Node>::all(cluster.client()).get(node)).unwrap();
    node.annotations().iter().filter(|(key, _)| ours(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// What the labels say of a Node: rank, lead, online.
fn labels(cluster: &Cluster, node: &str) -> [Option<String>; 3] {
    let node = cluster.wait(Api::<Node>::all(cluster.client()).get(node)).unwrap();
    [LABEL_RANK, LABEL_LEAD, LABEL_ONLINE].map(|key| node.labels().get(key).cloned())
}

#[test]
fn the_nodes_of_members_carry_labels_while_the_spec_says_so() {
    let Some(cluster) = Cluster::up(2, &[]) else { return };
    let of = |rank: &str, lead: bool| [Some(rank.to_owned()), lead.then(|| "true".to_owned()), Some("true".to_owned())];
    let none = [None, None, None];
    let [lead, other] = [0, 1].map(|rank| cluster.holder(rank));
    let say = |what: &str, node: &str, wanted: &[Option<String>; 3]| {
        cluster.until(what, || (labels(&cluster, node) == *wanted).then_some(()));
    };
    assert_eq!(labels(&cluster, &lead), none, "not by default");
    cluster.patch(json!({"spec": {"nodes": {"label": true}}}));
    say("the lead's labels", &lead, &of("0", true));
    say("the other's labels", &other, &of("1", false));
    cluster.patch(json!({"spec": {"size": 1}}));
    say("no labels of a node that has left", &other, &none);
    cluster.patch(json!({"spec": {"size": 2}}));
    say("labels of a node that is back", &other, &of("1", false));
    cluster.patch(json!({"spec": {"nodes": {"label": false}}}));
    say("no labels", &lead, &none);
    say("no labels", &other, &none);
    cluster.patch(json!({"spec": {"nodes": {"label": true}}}));
    say("labels again", &other, &of("1", false));
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &kube::api::DeleteParams::default())).unwrap();
    say("no labels at the end", &lead, &none);
    say("no labels at the end", &other, &none);
}

#[test]
fn nodes_with_jobs_are_annotated_and_jobs_that_wait_for_nodes_are_counted() {
    jobs_tell(Scheduler::Fluxion);
}

#[test]
fn nodes_with_jobs_are_annotated_under_sched_simple() {
    jobs_tell(Scheduler::Simple);
}

fn jobs_tell(scheduler: Scheduler) {
    let Some(cluster) = scheduler.up(3, &[]) else { return };
    let before = cluster.brokers();
    let [lead, busy, idle] = [0, 1, 2].map(|rank| cluster.holder(rank));
    // An administrator set Karpenter's annotation.
    cluster.patch_node(&busy, json!({"metadata": {"annotations": {PROTECTING[1]: "true"}}}));
    let is_protected = |node: &str| PROTECTING.iter().all(|key| annotations(&cluster, node).contains_key(*key));
    let requires = format!("--requires=host:{lead},{busy}");
    let job = cluster.job(&["-N2", "-n2", &requires]);
    cluster.until("the annotations", || (is_protected(&lead) && is_protected(&busy)).then_some(()));
    assert_eq!(annotations(&cluster, &idle), BTreeMap::new());

    let pending = |wanted: u32| {
        cluster.until(&format!("{wanted} pending nodes"), || {
            (cluster.instance().status?.pending_nodes? == wanted).then_some(())
        });
    };
    pending(0);
    let waiting = cluster.exec("node1", &["flux", "submit", "-N5", "-n5", "true"]);
    pending(2);
    let (status, metrics) = cluster.scrape(&lead, Some(&format!("user:{SCRAPER}")));
    assert_eq!(status, 200, "{metrics}");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    for (stranger, expected) in [(None, 401), (Some("of-nobody"), 401), (Some("user:other"), 403)] {
        assert_eq!(cluster.scrape(&lead, stranger).0, expected, "{stranger:?}");
    }
    assert!(metrics.lines().any(|line| line == "flux_distribute_pending_nodes 2"), "{metrics}");
    cluster.must(&["add-node", "--count", "2"]);
    job.finish();
    cluster.exec("node1", &["flux", "job", "wait-event", "-t", "120", &waiting, "clean"]);
    pending(0);
    let left: BTreeMap<_, _> = [(PROTECTING[1].to_owned(), "true".to_owned())].into();
    cluster.until("their end", || (annotations(&cluster, &busy) == left).then_some(()));
    assert!(is_protected(&lead), "the queue is on its disk");
    let after = cluster.brokers();
    assert!(before.iter().all(|(node, broker)| after[node] == *broker), "{after:?}");

    // At the end nothing of ours stays.
    let job = cluster.job(&["-N2", "-n2", &requires]);
    cluster.until("the annotations", || is_protected(&lead).then_some(()));
    job.finish();
    cluster.wait(cluster.api::<FluxInstance>().delete(INSTANCE, &kube::api::DeleteParams::default())).unwrap();
    cluster.until("their end", || (annotations(&cluster, &lead).is_empty()).then_some(()));
    assert_eq!(annotations(&cluster, &busy), left);
}
