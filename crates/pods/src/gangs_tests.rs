use std::collections::{BTreeMap, BTreeSet};

use super::{
    facts::{BEGUN_AT_ONCE, Facts, KubeJob, OfJobSet, VolumeClaim, job_sets},
    fixture::{annotated, bound, kube_job, of_job, plan, pod},
    gangs::{Gang, Known, Problem, gangs},
    pod::{Phase, PodView},
    record::{GangId, GangKind},
    time::Moment,
    unsupported::Unsupported,
};

static NONE: BTreeSet<String> = BTreeSet::new();

type Listed<'a> = BTreeMap<&'a str, &'a GangId>;

fn found<'a>(pods: &'a [PodView], facts: &'a Facts, listed: &'a Listed<'a>) -> Vec<Gang<'a>> {
    found_at(pods, facts, listed, 0)
}

fn found_at<'a>(pods: &'a [PodView], facts: &'a Facts, listed: &'a Listed<'a>, now: Moment) -> Vec<Gang<'a>> {
    let namespaces = Box::leak(Box::new(BTreeSet::from(["default".to_owned()])));
    gangs(pods, Known { facts, namespaces, doubtful: &NONE, max_gang: 10, listed }, now)
}

/// Kind, name, number of pods and size of each gang.
fn shown(pods: &[PodView], facts: &Facts) -> Vec<(GangKind, String, usize, u32)> {
    let gangs = found(pods, facts, const { &BTreeMap::new() });
    gangs.iter().map(|gang| (gang.id.kind, gang.id.to_string(), gang.members.len(), gang.size)).collect()
}

fn problem(pods: &[PodView], facts: &Facts) -> Option<Problem> {
    found(pods, facts, const { &BTreeMap::new() })[0].problem.clone()
}

fn facts() -> Facts {
    let mut facts = Facts::default();
    for job in [kube_job("train", 3), kube_job("queue", 3)] {
        facts.jobs.insert(job.uid.clone(), job);
    }
    facts.jobs.get_mut("uid-queue").unwrap().is_indexed = false;
    for (kind, name, size) in [
        (GangKind::PodGroup, "native", Some(2)),
        (GangKind::PodGroup, "basic", None),
        (GangKind::Coscheduling, "cosched", Some(2)),
    ] {
        facts.pod_groups.insert((kind, "default".into(), name.into()), size);
    }
    facts
}

#[test]
fn the_first_rule_that_applies_makes_the_gang() {
    use GangKind::{Annotated, Coscheduling, Fluence, Job, Pod, PodGroup};
    let mut all = of_job("train", 0);
    all.hints.fluence = Some(("fluence".into(), "4".into()));
    all.hints.coscheduling = Some("cosched".into());
    all.hints.pod_group = Some("native".into());
    all.hints.annotated = Some(("ours".into(), "5".into()));
    let without = |changes: &[fn(&mut PodView)]| {
        let mut pod = all.clone();
        changes.iter().for_each(|change| change(&mut pod));
        pod
    };
    let ours: fn(&mut PodView) = |pod| pod.hints.annotated = None;
    let native: fn(&mut PodView) = |pod| pod.hints.pod_group = None;
    let cosched: fn(&mut PodView) = |pod| pod.hints.coscheduling = None;
    let fluence: fn(&mut PodView) = |pod| pod.hints.fluence = None;
    for (pod, kind, name, size) in [
        (all.clone(), Annotated, "default/ours", 5),
        (without(&[ours]), PodGroup, "default/native", 2),
        (without(&[ours, native]), Coscheduling, "default/cosched", 2),
        (without(&[ours, native, cosched]), Fluence, "default/fluence", 4),
        (without(&[ours, native, cosched, fluence]), Job, "default/train", 3),
        (without(&[ours, native, |p| p.hints.coscheduling = Some("none".into())]), Fluence, "default/fluence", 4),
        (without(&[ours, |p| p.hints.pod_group = Some("basic".into())]), Pod, "default/train-0", 1),
        (of_job("queue", 0), Pod, "default/queue-0", 1),
        (pod("bare", 1), Pod, "default/bare", 1),
    ] {
        assert_eq!(shown(&[pod], &facts()), [(kind, name.to_owned(), 1, size)]);
    }
}

#[test]
fn gangs_of_one_name_in_two_namespaces_are_two() {
    let other = PodView { namespace: "other".into(), ..annotated("b", "g", 2) };
    let names: Vec<_> = shown(&[annotated("a", "g", 2), other], &facts()).into_iter().map(|gang| gang.1).collect();
    assert_eq!(names, ["default/g", "other/g"]);
}

/// After a crash of the lead's broker, jobs are submitted in this order, and Flux starts what fits at once.
#[test]
fn the_oldest_gang_comes_first_whatever_its_name() {
    let aged = |name: &str, created| PodView { created, ..pod(name, 1) };
    let pods = [aged("a", 3000), aged("b", 1000), aged("c", 2000), aged("d", 1000)];
    let names: Vec<_> = shown(&pods, &facts()).into_iter().map(|gang| gang.1).collect();
    assert_eq!(names, ["default/b", "default/d", "default/c", "default/a"]);
}

#[test]
fn pods_beyond_the_size_are_gangs_of_one() {
    let pods: Vec<_> = (0..4).map(|n| annotated(&format!("p{n}"), "g", 3)).collect();
    let gangs = shown(&pods, &facts());
    assert_eq!(gangs[0], (GangKind::Annotated, "default/g".into(), 3, 3));
    assert_eq!(gangs[1], (GangKind::Pod, "default/p3".into(), 1, 1));
}

#[test]
fn what_a_pod_runs_as_does_not_change() {
    let id =
        |kind, name: &str, uid: &str| GangId { kind, namespace: "default".into(), name: name.into(), uid: uid.into() };
    let (own, job) = (id(GangKind::Pod, "p0", "uid-p0"), id(GangKind::Job, "queue", "uid-queue"));
    for (what, pod, listed, kind) in [
        ("a pod by itself, though its gang lacks one", annotated("p0", "g", 3), Some(&own), GangKind::Pod),
        ("a pod by itself that runs", bound(annotated("p0", "g", 3)), Some(&own), GangKind::Pod),
        ("a pod of a gang whose Job runs fewer at a time now", bound(of_job("queue", 0)), Some(&job), GangKind::Job),
        ("the same one before it is bound", of_job("queue", 0), Some(&job), GangKind::Pod),
        ("one that no job lists", bound(of_job("queue", 0)), None, GangKind::Pod),
    ] {
        let (pods, facts) = ([pod], facts());
        let listed = listed.map(|gang| (pods[0].uid.as_str(), gang)).into_iter().collect();
        assert_eq!(found(&pods, &facts, &listed)[0].id.kind, kind, "{what}");
    }
}

#[test]
fn a_pod_that_runs_is_not_beyond_its_gang() {
    let mut facts = facts();
    facts.jobs.get_mut("uid-train").unwrap().succeeded = 2;
    let pods: Vec<_> = (0..3).map(|n| bound(of_job("train", n))).collect();
    assert_eq!(
        shown(&pods, &facts),
        [(GangKind::Job, "default/train".to_owned(), 3, 1)],
        "the Job is ahead of its pods"
    );
}

#[test]
fn a_pod_that_is_about_to_end_does_not_take_its_successors_place() {
    let ending = PodView { to_end_by: Some(0), ..bound(of_job("train", 0)) };
    let successor = PodView { name: "train-0b".into(), uid: "uid-b".into(), ..of_job("train", 0) };
    let others = (1..3).map(|n| bound(of_job("train", n)));
    let pods: Vec<_> = [ending, successor].into_iter().chain(others).collect();
    assert_eq!(shown(&pods, &facts()), [(GangKind::Job, "default/train".to_owned(), 4, 3)]);
}

#[test]
fn an_incomplete_gang_says_how_many_of_its_pods_exist() {
    let mut gated = annotated("p1", "g", 3);
    plan(&mut gated).is_gated = true;
    let deleting = PodView { to_end_by: Some(0), ..annotated("p2", "g", 3) };
    let ended = PodView { phase: Phase::Succeeded, ..annotated("p3", "g", 3) };
    let words = problem(&[annotated("p0", "g", 3), gated, deleting, ended], &facts()).unwrap().to_string();
    assert_eq!(words, "1 of 3 pods of gang default/g exist");
    let started = bound(annotated("p4", "g", 3));
    assert_eq!(problem(&[annotated("p0", "g", 3), started], &facts()), None, "a gang that runs is completed");
}

#[test]
fn a_resumed_job_needs_only_the_pods_that_have_not_succeeded() {
    let mut facts = facts();
    facts.jobs.get_mut("uid-train").unwrap().succeeded = 1;
    let pods = [of_job("train", 1), of_job("train", 2)];
    assert_eq!(shown(&pods, &facts), [(GangKind::Job, "default/train".to_owned(), 2, 2)]);
    assert_eq!(problem(&pods, &facts), None);
}

#[test]
fn a_gang_that_cant_be_submitted_says_why() {
    let sized = |size: &str| {
        let mut pod = annotated("p", "g", 1);
        pod.hints.annotated = Some(("g".into(), size.into()));
        pod
    };
    let claiming = |claim: &str| {
        let mut pod = pod("p", 1);
        plan(&mut pod).claims = [claim.into()].into();
        pod
    };
    let spreading = |mut pod: PodView| {
        plan(&mut pod).spreads = Ok(true);
        pod
    };
    let mut unsupported = pod("p", 1);
    plan(&mut unsupported).spreads = Err(Unsupported::PodAffinity);
    let of_group = |name: &str| {
        let mut pod = pod("p", 1);
        pod.hints.pod_group = Some(name.into());
        pod
    };
    let mut facts = facts();
    facts.forbidden_groups.insert((GangKind::PodGroup, "default".into(), "secret".into()));
    for (name, claim) in [
        ("bound", VolumeClaim::Bound { affinity: None }),
        ("unbound", VolumeClaim::Unbound),
        ("lazy", VolumeClaim::WaitsForFirstConsumer),
    ] {
        facts.claims.insert(("default".into(), name.into()), claim);
    }
    for (pod, words) in [
        (
            sized("1000000"),
            Some("gang default/g has 1000000 pods, and spec.pods.maxGang of the FluxInstance allows 10"),
        ),
        (sized("many"), Some("the size of gang default/g is \"many\": write a number of pods")),
        (sized("0"), Some("the size of gang default/g is \"0\"")),
        (sized("-3"), Some("the size of gang default/g is \"-3\"")),
        (sized("99999999999999"), Some("the size of gang default/g is")),
        (sized("1"), None),
        (of_group("unknown"), Some("PodGroup unknown was not found")),
        (of_group("secret"), Some("the bridge may not read PodGroup secret: an administrator has to apply")),
        (of_job("late", 0), Some("Job late was not found")),
        (unsupported, Some("spec.affinity.podAffinity")),
        (spreading(pod("p", 1)), Some("spec.affinity.podAntiAffinity")),
        (claiming("bound"), None),
        (claiming("unbound"), Some("the volume claim unbound has no volume yet")),
        (claiming("missing"), Some("the volume claim missing has no volume yet")),
        (claiming("lazy"), Some("the volume claim lazy waits for its first consumer")),
        (PodView { namespace: "other".into(), ..pod("p", 1) }, Some("namespace other has not opted in")),
    ] {
        let found = problem(std::slice::from_ref(&pod), &facts).map(|problem| problem.to_string());
        match words {
            Some(words) => assert!(found.as_ref().is_some_and(|found| found.starts_with(words)), "{words}: {found:?}"),
            None => assert_eq!(found, None),
        }
    }
}

#[test]
fn what_somebody_else_has_bound_is_no_gang_and_gets_no_cores() {
    let theirs = |change: fn(&mut PodView)| {
        let mut pod = bound(annotated("p", "g", 2));
        change(&mut pod);
        shown(&[pod], &facts()).len()
    };
    assert_eq!(theirs(|_| {}), 1);
    assert_eq!(theirs(|pod| pod.record = None), 0);
    assert_eq!(theirs(|pod| pod.namespace = "other".into()), 0);
    let job = GangId { kind: GangKind::Pod, namespace: "other".into(), name: "p".into(), uid: "uid-p".into() };
    let withdrawn = [PodView { namespace: "other".into(), ..bound(pod("p", 1)) }];
    let listed = [("uid-p", &job)].into();
    assert_eq!(found(&withdrawn, &facts(), &listed).len(), 1, "its namespace has opted out since");
}

#[test]
fn a_job_of_another_namespace_or_name_owns_no_pod() {
    let pod = |change: fn(&mut PodView)| {
        let mut pod = of_job("train", 0);
        change(&mut pod);
        let (pods, facts) = ([pod], facts());
        facts.job_of(&pods[0]).is_some()
    };
    assert!(pod(|_| {}));
    assert!(!pod(|pod| pod.namespace = "other".into()));
    assert!(!pod(|pod| pod.owner.as_mut().unwrap().name = "mine".into()));
}

#[test]
fn a_gangs_name_has_only_the_characters_of_a_label() {
    for (name, is_fine) in
        [("g", true), ("a.B-c_9", true), ("", false), ("a b", false), ("a\u{1b}[2J", false), ("é", false)]
    {
        let pods = [annotated("p", name, 1)];
        assert_eq!(problem(&pods, &facts()).is_none(), is_fine, "{name:?}");
    }
    for (length, is_fine) in [(63, true), (64, false)] {
        let name = "x".repeat(length);
        let found = problem(&[annotated("p", &name, 1)], &facts());
        assert_eq!(found, (!is_fine).then_some(Problem::BadName(name)));
    }
}

#[test]
fn a_gang_is_spread_if_its_pods_say_so_or_take_ports_of_the_node() {
    use super::requests::HostPort;
    let pods = |change: fn(&mut PodView)| {
        let mut pods = [annotated("p0", "g", 2), annotated("p1", "g", 2)];
        pods.iter_mut().for_each(change);
        found(&pods, &facts(), const { &BTreeMap::new() })[0].spreads()
    };
    assert!(!pods(|_| {}));
    assert!(pods(|pod| plan(pod).spreads = Ok(true)));
    assert!(pods(|pod| {
        pod.requests.ports.insert(HostPort { port: 1, protocol: "TCP".into(), ip: String::new() });
    }));
}

#[test]
fn foreign_pods_and_pods_that_have_ended_are_in_no_gang() {
    let foreign = PodView { is_bridged: false, ..pod("a", 1) };
    let ended = PodView { phase: Phase::Failed, node: Some("node0".into()), ..pod("b", 1) };
    assert_eq!(shown(&[foreign, ended], &facts()), []);
}

#[test]
fn a_job_that_is_made_again_under_its_name_is_another_gang() {
    let id =
        |uid: &str| GangId { kind: GangKind::Job, namespace: "default".into(), name: "train".into(), uid: uid.into() };
    assert_ne!(id("1"), id("2"));
    assert_eq!(id("1").to_string(), id("2").to_string());
}

/// The Jobs `driver` of one pod and `workers` of three, of JobSet `set`, which has this many Jobs.
fn job_set(jobs: u32) -> (Facts, Vec<PodView>) {
    let part = |name: &str, size| {
        let of = OfJobSet { name: "set".into(), uid: "uid-set".into(), attempt: "0".into(), jobs };
        KubeJob { job_set: Some(of), joins_job_set: true, ..kube_job(name, size) }
    };
    let all = [part("driver", 1), part("workers", 3)];
    let mut facts = Facts { job_sets: job_sets(&all), ..Facts::default() };
    facts.jobs.extend(all.map(|job| (job.uid.clone(), job)));
    let pods = std::iter::once(of_job("driver", 0)).chain((0..3).map(|index| of_job("workers", index)));
    (facts, pods.collect())
}

#[test]
fn a_job_set_whose_jobs_run_all_their_pods_at_once_is_one_gang() {
    let (mut facts, pods) = job_set(2);
    assert_eq!(shown(&pods, &facts), [(GangKind::JobSet, "default/set".to_owned(), 4, 4)]);
    assert!(found(&pods, &facts, const { &BTreeMap::new() })[0].job.is_none(), "the JobSet suspends its Jobs itself");
    assert_eq!(problem(&pods[..3], &facts).unwrap().to_string(), "3 of 4 pods of gang default/set exist");

    let (missing, _) = job_set(3);
    assert_eq!(problem(&pods, &missing).unwrap().to_string(), "2 of 3 Jobs of JobSet set have begun");

    let mut later = facts.clone();
    later.jobs.get_mut("uid-workers").unwrap().began = Some(11_000);
    later.job_sets = job_sets(later.jobs.values());
    let kinds: Vec<_> = shown(&pods, &later).into_iter().map(|(kind, ..)| kind).collect();
    assert_eq!(kinds, [GangKind::Job, GangKind::Pod], "one that starts its Jobs in order");

    // Kueue has it created suspended, so that all Jobs are there from the beginning.
    later.jobs.get_mut("uid-workers").unwrap().began = None;
    later.job_sets = job_sets(later.jobs.values());
    assert_eq!(problem(&pods[..1], &later).unwrap().to_string(), "1 of 2 Jobs of JobSet set have begun");
    let driver = &found_at(&pods[..1], &later, const { &BTreeMap::new() }, BEGUN_AT_ONCE + 1)[0];
    assert_eq!(driver.id.kind, GangKind::Pod, "the next one is resumed when this one runs");

    let mut others = facts.clone();
    others.jobs.get_mut("uid-driver").unwrap().joins_job_set = false;
    others.job_sets = job_sets(others.jobs.values());
    let of_workers = shown(&pods[1..], &others);
    assert_eq!(of_workers, [(GangKind::JobSet, "default/set".to_owned(), 3, 3)], "another scheduler has the driver");

    let queue = facts.jobs.get_mut("uid-workers").unwrap();
    queue.is_indexed = false;
    facts.job_sets = job_sets(facts.jobs.values());
    let kinds: Vec<_> = shown(&pods, &facts).into_iter().map(|(kind, ..)| kind).collect();
    assert_eq!(kinds, [GangKind::Pod; 4], "one of its Jobs is a queue of work");

    let (mut again, pods) = job_set(2);
    for job in again.jobs.values_mut() {
        job.job_set.as_mut().unwrap().attempt = "1".into();
    }
    again.job_sets = job_sets(again.jobs.values());
    let (before, _) = job_set(2);
    let id = |facts| found(&pods, facts, const { &BTreeMap::new() })[0].id.clone();
    assert_ne!(id(&again), id(&before), "one that restarts");
}

#[test]
fn a_pod_that_replaces_one_of_a_job_set_does_not_wait_for_its_siblings_to_be_another_gang() {
    let (mut facts, pods) = job_set(2);
    let set = found(&pods, &facts, const { &BTreeMap::new() })[0].id.clone();
    let (replaced, running) = pods.split_last().unwrap();
    let now: Vec<_> = running.iter().cloned().map(bound).chain([replaced.clone()]).collect();
    let uids: Vec<_> = running.iter().map(|pod| pod.uid.clone()).collect();
    // The job still lists the pod that is gone.
    let listed: Listed = uids.iter().map(String::as_str).chain(["gone"]).map(|uid| (uid, &set)).collect();
    // One of its Jobs was made again much later, so that the next pods of the set are gangs by themselves.
    facts.jobs.get_mut("uid-driver").unwrap().began = Some(60_000);
    facts.job_sets = job_sets(facts.jobs.values());
    let gangs = found(&now, &facts, &listed);
    let found: Vec<_> = gangs.iter().map(|gang| (&gang.id, gang.size, gang.members.len(), &gang.problem)).collect();
    assert_eq!(found, [(&set, 4, 4, &None)]);
}

#[test]
fn no_pod_of_another_namespace_takes_a_jobs_pods_into_its_gang() {
    let (facts, pods) = job_set(2);
    let victims: Vec<_> = pods.iter().filter(|pod| pod.owner.as_ref().unwrap().uid == "uid-driver").cloned().collect();
    let mut forged = bound(victims[0].clone());
    (forged.namespace, forged.uid) = ("evil".to_owned(), "forged".to_owned());
    let evil = GangId { kind: GangKind::Job, namespace: "evil".into(), name: "j".into(), uid: "uid-j".into() };
    let gangs_with = |forged: &[PodView]| {
        let all: Vec<_> = pods.iter().chain(forged).cloned().collect();
        let listed = [("forged", &evil)].into();
        let gangs = found(&all, &facts, &listed);
        let others = gangs.iter().filter(|gang| gang.id.namespace != "evil");
        others.map(|gang| (gang.id.clone(), gang.members.len())).collect::<Vec<_>>()
    };
    assert_eq!(gangs_with(&[forged]), gangs_with(&[]));
}

#[test]
fn each_group_of_a_leader_worker_set_is_a_gang() {
    let group = |name: &str, index: &str| {
        let mut pod = pod(name, 1);
        pod.hints.leader_worker_set = Some((format!("lws-{index}"), "2".into()));
        pod
    };
    let pods = [group("lws-0", "0"), group("lws-0-1", "0"), group("lws-1", "1")];
    let expected = [
        (GangKind::LeaderWorkerSet, "default/lws-0".to_owned(), 2, 2),
        (GangKind::LeaderWorkerSet, "default/lws-1".to_owned(), 1, 2),
    ];
    assert_eq!(shown(&pods, &facts()), expected);
}
