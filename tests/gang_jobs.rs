//! Jobs without processes in a real Flux: what holds the resources of pods.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;
mod support;

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use bridge::Occupancy;
use broker::{
    job_id::JobId,
    jobs::{DEFAULT_URGENCY, MAX_URGENCY, SubmitError, cancel, finish, submit},
    journal::JobEvents,
    queues::{self, QueueError, STOPPED_BY_RESTART, StoppedByRestart, keep_note, queues},
    rfc3::Client,
    status::instance,
};
use pods::{
    constraint::Constraint,
    jobs::OUR_NOTE,
    jobspec::JobRequest,
    occupied::Occupied,
    record::{GangId, GangKind, JobRecord, MemberPod},
};
use serde_json::{Value, json};
use support::{
    journal::Journal,
    real_broker::{RealBroker, configure, connect, flux, lead, run, soon, start, until_online},
};
use tokio::time::sleep;

/// `slots` slots of `cores` cores each that Flux starts nothing in.
fn jobspec(slots: u32, cores: u32) -> Value {
    json!({
        "version": 1,
        "resources": [{"type": "slot", "count": slots, "label": "task", "with": [{"type": "core", "count": cores}]}],
        "tasks": [{"command": ["pod"], "slot": "task", "count": {"per_slot": 1}}],
        "attributes": {
            "system": {
                "duration": 86400,
                "job": {"name": "default/pod"},
                "exec": {"test": {"override": 1, "run_duration": "3650d"}},
            },
            "user": {"k8s": {"uid": "u-1"}},
        },
    })
}

fn names(jobs: &[JobEvents]) -> Vec<&str> {
    jobs.iter().flat_map(|job| &job.events).map(|event| event.name.as_str()).collect()
}

fn time_of(jobs: &[JobEvents], name: &str) -> f64 {
    jobs.iter().flat_map(|job| &job.events).find(|event| event.name == name).unwrap().timestamp
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64()
}

/// The number of cores on each rank.
fn cores(job: &JobEvents) -> Vec<(u32, usize)> {
    let by_rank = job.resources().unwrap().expect("no R").by_rank();
    by_rank.iter().map(|(rank, kinds)| (*rank, kinds["core"].len())).collect()
}

async fn submitted(client: &Client, slots: u32, cores: u32) -> JobId {
    submit(client, &jobspec(slots, cores), DEFAULT_URGENCY, true).await.unwrap()
}

/// Ends a job that has its resources. There is no event for the moment from which it can be ended.
async fn finish_soon(client: &Client, id: JobId, status: i32) {
    soon(async {
        while !finish(client, id, status).await.unwrap() {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// There is no event for a scheduler that comes online.
async fn until_scheduled(client: &Client) {
    soon(async {
        while queues::is_scheduler_offline(client).await.unwrap() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// The name of the module that schedules.
fn scheduler(flux: &Path, lead: &RealBroker) -> &'static str {
    let modules = run(flux, lead, &["module", "list"]);
    if modules.contains("qmanager") { "sched-fluxion-qmanager" } else { "sched-simple" }
}

#[tokio::test]
async fn a_job_of_a_gang_holds_its_cores_from_alloc_to_finish_and_is_never_started_before() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, client) = lead(&flux, base.path(), 1, "0-3").await;
    let (mut journal, backlog) = Journal::open(&client).await;
    assert_eq!(backlog, []);
    // Validated, unlike the others.
    let id = submit(&client, &jobspec(2, 1), MAX_URGENCY, false).await.unwrap();
    let begin = journal.until(id, "alloc").await;
    assert_eq!(names(&begin), ["submit", "priority", "alloc"]);
    let jobspec = begin[0].jobspec.as_ref().unwrap();
    assert_eq!(jobspec["attributes"]["user"]["k8s"]["uid"], "u-1");
    assert_eq!(begin[0].events[0].context["urgency"], MAX_URGENCY);
    assert_eq!(cores(&begin[2]), [(0, 2)]);
    let next = submitted(&client, 3, 1).await;
    assert_eq!(names(&journal.until(next, "priority").await), ["submit", "priority"]);

    let ended = now();
    finish_soon(&client, id, 256).await;
    let end = journal.until(id, "clean").await;
    assert_eq!(names(&end), ["start", "finish", "free", "clean"]);
    assert_eq!(end[1].events[0].context["status"], 256);
    assert!(time_of(&end, "start") >= ended, "it was started before its end");
    assert!(!finish(&client, id, 0).await.unwrap(), "it has ended");
    assert!(!cancel(&client, id, "").await.unwrap(), "it has ended");

    // The other one, which waited for those cores: its alloc may precede the end of the first in the journal.
    let (_, backlog) = Journal::open(&client).await;
    let waiting = backlog.iter().find(|job| job.id == next).expect("a job is lost");
    if !waiting.has("alloc") {
        journal.until(next, "alloc").await;
    }
    finish_soon(&client, next, 0).await;
    journal.until(next, "clean").await;
    assert_eq!(Journal::open(&client).await.1, []);
}

#[tokio::test]
async fn a_cancelled_job_gives_its_cores_back_without_a_start() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, client) = lead(&flux, base.path(), 1, "0-3").await;
    let (mut journal, _) = Journal::open(&client).await;
    let id = submitted(&client, 4, 1).await;
    journal.until(id, "alloc").await;
    assert!(cancel(&client, id, "its pod is gone").await.unwrap());
    let end = journal.until(id, "clean").await;
    // `finish` is missing if the executor did not know the job yet.
    let events: Vec<_> = names(&end).into_iter().filter(|name| *name != "finish").collect();
    assert_eq!(events, ["exception", "free", "clean"]);
    let exception = end[0].exceptions().next().unwrap();
    assert_eq!((exception.kind.as_str(), exception.severity), ("cancel", 0));
    assert_eq!((exception.note.as_str(), exception.userid), ("its pod is gone", Some(client.uid())));
    assert!(!cancel(&client, id, "").await.unwrap());
    assert!(!cancel(&client, JobId(7), "").await.unwrap(), "it never was");
    assert!(!finish(&client, JobId(7), 0).await.unwrap(), "it never was");
    let again = submitted(&client, 4, 1).await;
    assert_eq!(cores(journal.until(again, "alloc").await.last().unwrap()), [(0, 4)]);
}

#[tokio::test]
async fn a_job_that_never_fits_gets_an_exception_and_a_wrong_one_is_refused() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead(&flux, base.path(), 1, "0-3").await;
    let (mut journal, _) = Journal::open(&client).await;
    for (slots, cores) in [(5, 1), (1, 5)] {
        let id = submitted(&client, slots, cores).await;
        let end = journal.until(id, "clean").await;
        assert_eq!(names(&end), ["submit", "priority", "exception", "clean"]);
        let exception = end[2].exceptions().next().unwrap();
        assert_eq!((exception.kind.as_str(), exception.severity), ("alloc", 0));
        assert!(exception.note.contains("unsatisfiable"), "{exception:?}");
    }
    let mut wrong = jobspec(1, 1);
    wrong["resources"][0]["count"] = json!("many");
    match submit(&client, &wrong, DEFAULT_URGENCY, false).await {
        Err(SubmitError::Refused { reason }) => assert!(!reason.is_empty()),
        other => panic!("{other:?}"),
    }
    assert!(matches!(submit(&client, &jobspec(1, 1), MAX_URGENCY + 1, true).await, Err(SubmitError::Refused { .. })));
    run(&flux, &lead, &["queue", "disable", "-m", "moved"]);
    match submit(&client, &jobspec(1, 1), DEFAULT_URGENCY, true).await {
        Err(SubmitError::Refused { reason }) => assert!(reason.contains("disabled: moved"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let queue = queues::queue(&client, None).await.unwrap();
    assert_eq!((queue.enable, queue.disable_reason.as_deref()), (false, Some("moved")));
}

#[tokio::test]
async fn a_job_waits_until_its_queue_is_started_for_the_reason_that_stopped_it() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead(&flux, base.path(), 1, "0-3").await;
    until_scheduled(&client).await;
    let (mut journal, _) = Journal::open(&client).await;
    let stopped = queues::stop(&client, "pods are being counted").await.unwrap();
    assert_eq!((stopped.len(), stopped[0].name.as_deref(), stopped[0].start), (1, None, true));
    assert!(queues::stop(&client, "another").await.unwrap().is_empty(), "the first reason stays");
    let shown = run(&flux, &lead, &["queue", "status"]);
    assert!(shown.contains("Scheduling is stopped: pods are being counted"), "{shown}");
    let id = submit(&client, &jobspec(1, 1), MAX_URGENCY, true).await.unwrap();
    assert_eq!(names(&journal.until(id, "priority").await), ["submit", "priority"]);
    assert!(queues::start(&client, &["another", STOPPED_BY_RESTART]).await.unwrap().is_empty());
    let opened = now();
    assert_eq!(queues::start(&client, &["another", "pods are being counted"]).await.unwrap().len(), 1);
    let alloc = journal.until(id, "alloc").await;
    assert_eq!(names(&alloc), ["alloc"]);
    assert!(time_of(&alloc, "alloc") >= opened, "it did not wait");

    run(&flux, &lead, &["module", "remove", scheduler(&flux, &lead)]);
    assert!(queues::is_scheduler_offline(&client).await.unwrap());
    assert!(matches!(queues::stop(&client, "").await, Err(QueueError::SchedulerIsOffline)));
}

#[tokio::test]
async fn named_queues_are_stopped_and_started_one_by_one() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead_with(&flux, base.path(), "[queues.batch]\n[queues.debug]\n").await;
    run(&flux, &lead, &["queue", "start", "batch"]);
    let of = |queues: Vec<queues::Queue>| queues.into_iter().map(|queue| queue.name.unwrap()).collect::<Vec<_>>();
    assert_eq!(of(queues::stop(&client, "a while").await.unwrap()), ["batch"], "debug begins stopped");
    assert_eq!(of(queues::start(&client, &["a while"]).await.unwrap()), ["batch"]);
    assert!(queues::ensure_recorded(&client).await.unwrap());
    let record: Value = serde_json::from_str(&run(&flux, &lead, &["kvs", "get", "checkpoint.job-manager"])).unwrap();
    let started = |name: &str| {
        let recorded = record["queue"].as_array().unwrap();
        recorded.iter().find(|queue| queue["name"] == name).unwrap()["start"].as_bool().unwrap()
    };
    assert_eq!((started("batch"), started("debug")), (true, false), "{record}");
}

/// The lead of one rank with more `configuration`, once its scheduler is online.
async fn lead_with(flux: &Path, base: &Path, configuration: &str) -> (RealBroker, Client) {
    configure(flux, base, 1, "0-3");
    let path = base.join("etc/broker.toml");
    let whole = std::fs::read_to_string(&path).unwrap() + configuration;
    std::fs::write(path, whole).unwrap();
    started(flux, base).await
}

async fn started(flux: &Path, base: &Path) -> (RealBroker, Client) {
    let lead = start(flux, base, 0);
    let client = connect(&lead).await;
    until_online(&client, "0").await;
    until_scheduled(&client).await;
    (lead, client)
}

/// The lead is killed in its first life, and starts again.
async fn killed_and_started(flux: &Path, base: &Path, lead: RealBroker, client: Client) -> (RealBroker, Client) {
    drop(lead);
    soon(client.closed()).await;
    started(flux, base).await
}

/// The lead ends in order, and starts again.
async fn shut_down_and_started(flux: &Path, base: &Path, lead: RealBroker, client: Client) -> (RealBroker, Client) {
    run(flux, &lead, &["shutdown", "--background"]);
    soon(client.closed()).await;
    let mut lead = lead;
    soon(async {
        while lead.child.try_wait().unwrap().is_none() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    started(flux, base).await
}

#[tokio::test]
async fn after_a_crash_the_backlog_has_both_jobs_and_the_queue_waits() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead_with(&flux, base.path(), "[job-manager]\nstop-queues-on-restart = true\n").await;
    let (mut journal, _) = Journal::open(&client).await;
    let running = submitted(&client, 2, 1).await;
    let r = journal.until(running, "alloc").await.pop().unwrap().resources().unwrap();
    let pending = submitted(&client, 3, 1).await;
    journal.until(pending, "priority").await;
    // The journal is ahead of the KVS; these wait for the KVS.
    run(&flux, &lead, &["job", "wait-event", "-t", "20", &running.to_string(), "alloc"]);
    run(&flux, &lead, &["job", "wait-event", "-t", "20", &pending.to_string(), "priority"]);
    // Also writes the jobs to disk.
    assert!(queues::ensure_recorded(&client).await.unwrap());
    assert!(!queues::ensure_recorded(&client).await.unwrap(), "there is one");

    let (_lead, client) = killed_and_started(&flux, base.path(), lead, client).await;
    let (mut journal, backlog) = Journal::open(&client).await;
    let of = |id| backlog.iter().find(|job| job.id == id).unwrap();
    assert_eq!(backlog.len(), 2, "{backlog:?}");
    assert_eq!((of(running).resources().unwrap(), of(running).has("start")), (r, false));
    assert_eq!((of(pending).r.as_ref(), of(pending).has("alloc")), (None, false));
    assert_eq!(of(pending).jobspec.as_ref().unwrap()["resources"][0]["count"], 3);
    let queue = queues::queue(&client, None).await.unwrap();
    assert_eq!((queue.start, queue.stop_reason.as_deref()), (false, Some(STOPPED_BY_RESTART)));
    finish_soon(&client, running, 0).await;
    assert_eq!(names(&journal.until(running, "clean").await), ["start", "finish", "free", "clean"]);
    let opened = now();
    assert_eq!(queues::start(&client, &[STOPPED_BY_RESTART]).await.unwrap().len(), 1);
    let alloc = journal.until(pending, "alloc").await;
    assert!(time_of(&alloc, "alloc") >= opened, "it did not wait");
    assert!(queues::queue(&client, None).await.unwrap().start);
}

#[tokio::test]
async fn a_queue_that_a_restart_stopped_is_known_again_after_the_next_restart() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead_with(&flux, base.path(), "[job-manager]\nstop-queues-on-restart = true\n").await;
    assert!(queues::ensure_recorded(&client).await.unwrap());
    // What the bridge does at each look.
    let look = async |client: &Client, noted: &mut Option<StoppedByRestart>| {
        let mut all = queues(client).await.unwrap();
        keep_note(client, &mut all, noted).await.unwrap();
        let [queue] = &all[..] else { panic!("{all:?}") };
        assert_eq!(queue, &queues::queue(client, None).await.unwrap(), "Flux has it so");
        (queue.start, queue.stop_reason.clone())
    };
    let by_restart = (false, Some(STOPPED_BY_RESTART.to_owned()));
    let (lead, client) = killed_and_started(&flux, base.path(), lead, client).await;
    assert_eq!(look(&client, &mut None).await, by_restart);
    // The epoch ends before the bridge has started the queue.
    let (lead, client) = shut_down_and_started(&flux, base.path(), lead, client).await;
    let forgotten = queues::queue(&client, None).await.unwrap();
    assert_eq!((forgotten.start, forgotten.stop_reason), (false, None), "then `keep_note` is not needed any more");
    let mut noted = None;
    assert_eq!(look(&client, &mut noted).await, by_restart);
    assert_eq!(queues::start(&client, &[STOPPED_BY_RESTART]).await.unwrap().len(), 1);
    assert_eq!(look(&client, &mut noted).await, (true, None));
    // The record says so as well.
    let (lead, client) = killed_and_started(&flux, base.path(), lead, client).await;
    assert_eq!(look(&client, &mut None).await, by_restart);
    assert_eq!(queues::start(&client, &[STOPPED_BY_RESTART]).await.unwrap().len(), 1);
    assert_eq!(look(&client, &mut None).await, (true, None));
    // What an administrator has stopped stays stopped.
    run(&flux, &lead, &["queue", "stop"]);
    let (_lead, client) = shut_down_and_started(&flux, base.path(), lead, client).await;
    assert_eq!(look(&client, &mut None).await, (false, None));
}

#[tokio::test]
async fn without_a_record_a_crash_leaves_the_queue_open() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead_with(&flux, base.path(), "[job-manager]\nstop-queues-on-restart = true\n").await;
    let (_lead, client) = killed_and_started(&flux, base.path(), lead, client).await;
    assert!(queues::queue(&client, None).await.unwrap().start, "then `ensure_recorded` is not needed any more");
}

/// Submits a job of the bridge for one pod of a gang of this kind.
async fn submit_gang_job(client: &Client, kind: GangKind, cores: u32) -> JobId {
    let gang = GangId { kind, namespace: "default".into(), name: "p".into(), uid: "uid-p".into() };
    let member = MemberPod { name: "p".into(), uid: "uid-p".into(), index: None };
    let request = JobRequest {
        record: JobRecord { gang, members: vec![member], threads: 1, queued: 0, pinned: None },
        slots: 1,
        cores,
        per_node: None,
        duration: 60,
        constraint: Constraint::Anywhere,
        urgency: DEFAULT_URGENCY,
    };
    submit(client, &request.jobspec(), request.urgency, true).await.unwrap()
}

#[tokio::test]
async fn what_a_bridge_has_left_ends_while_the_scheduler_is_online_and_its_queues_start() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead_with(&flux, base.path(), "[job-manager]\nstop-queues-on-restart = true\n").await;
    let (mut journal, _) = Journal::open(&client).await;
    let running = submit_gang_job(&client, GangKind::Pod, 3).await;
    journal.until(running, "alloc").await;
    submit_gang_job(&client, GangKind::Pod, 3).await;
    let host = submitted(&client, 1, 3).await;
    journal.until(host, "priority").await;
    run(&flux, &lead, &["job", "wait-event", "-t", "20", &running.to_string(), "alloc"]);
    run(&flux, &lead, &["job", "wait-event", "-t", "20", &host.to_string(), "priority"]);
    assert!(queues::ensure_recorded(&client).await.unwrap());

    let (lead, client) = killed_and_started(&flux, base.path(), lead, client).await;
    let (mut journal, backlog) = Journal::open(&client).await;
    assert_eq!(backlog.len(), 3, "{backlog:?}");
    let scheduler = scheduler(&flux, &lead);
    run(&flux, &lead, &["module", "remove", scheduler]);
    assert!(matches!(bridge::clean_up(&client, true).await, Err(QueueError::SchedulerIsOffline)));
    let active = || run(&flux, &lead, &["jobs", "-no", "{id.f58plain}"]);
    assert_eq!(active().lines().count(), 3, "a job that ends now keeps its cores");
    run(&flux, &lead, &["module", "load", scheduler]);
    until_scheduled(&client).await;
    let reason = async || queues::queue(&client, None).await.unwrap().stop_reason;
    assert_eq!(reason().await.as_deref(), Some(STOPPED_BY_RESTART));
    bridge::clean_up(&client, false).await.unwrap();
    assert!(names(&journal.until(running, "clean").await).contains(&"free"), "its cores are free");
    assert_eq!(reason().await.as_deref(), Some(STOPPED_BY_RESTART), "an administrator starts it");
    bridge::clean_up(&client, true).await.unwrap();
    assert_eq!(names(&journal.until(host, "alloc").await), ["alloc"]);
    // The list lags behind.
    soon(async {
        while active().trim() != host.to_string() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;

    for (reason_of_stop, is_started) in [("maintenance", false), (&format!("{OUR_NOTE}gives pods their cores"), true)] {
        queues::stop(&client, reason_of_stop).await.unwrap();
        bridge::clean_up(&client, true).await.unwrap();
        assert_eq!(queues::queue(&client, None).await.unwrap().start, is_started, "{reason_of_stop}");
        queues::start(&client, &[reason_of_stop]).await.unwrap();
    }

    // As an agent does that knows of the end of the instance before the bridge does.
    queues::stop(&client, &format!("{OUR_NOTE}gives pods their cores")).await.unwrap();
    run(&flux, &lead, &["queue", "stop", "--all", "--nocheckpoint", "--message", "the instance ends"]);
    bridge::clean_up(&client, true).await.unwrap();
    assert_eq!(reason().await.as_deref(), Some("the instance ends"));
}

#[test]
fn the_text_of_job_ids_is_that_of_flux() {
    let Some(flux) = flux() else { return };
    let ids: Vec<u64> = (0..64).flat_map(|bit| [1 << bit, (1 << bit) - 1, u64::MAX >> bit]).collect();
    let translate = |form: &str, ids: &[String]| {
        let output = std::process::Command::new(&flux).args(["job", "id", form]).args(ids).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let ours: Vec<String> = ids.iter().map(|id| JobId(*id).to_string()).collect();
    let decimal: Vec<String> = ids.iter().map(u64::to_string).collect();
    assert_eq!(translate("--to=f58plain", &decimal), ours);
    assert_eq!(translate("--to=dec", &ours), decimal);
    let parsed: Vec<u64> = ours.iter().map(|text| text.parse::<JobId>().unwrap().0).collect();
    assert_eq!(parsed, ids);
}

#[tokio::test]
async fn a_gang_that_ends_while_the_lead_is_asked_is_no_host_job() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, client) = lead_with(&flux, base.path(), "").await;
    let (mut journal, _) = Journal::open(&client).await;
    let id = submit_gang_job(&client, GangKind::Annotated, 1).await;
    journal.until(id, "alloc").await;
    let mut occupancy = Occupancy::of(&client);
    let held = instance(&client).await.unwrap();
    let occupied = soon(async {
        // The list of jobs lags behind the journal.
        loop {
            let occupied = occupancy.ask(&held).await.unwrap();
            if !occupied.by_gangs.is_empty() {
                return occupied;
            }
        }
    })
    .await;
    assert_eq!((occupied.by_host_jobs.to_string(), occupied.by_gangs.to_string()), (String::new(), "0".to_owned()));
    finish_soon(&client, id, 0).await;
    journal.until(id, "clean").await;
    assert_eq!(occupancy.ask(&held).await.unwrap(), Occupied::default());
}
