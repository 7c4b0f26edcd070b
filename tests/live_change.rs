//! What a live change does to the jobs and the cores of a real Flux.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;
mod support;

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Duration};

use broker::{
    command::rc1_tasks,
    message::ANY,
    reload::{ReloadError, reload},
    rfc3::Client,
    status::{held_names, instance},
};
use futures::future::join_all;
use model::broker_toml::RenderError;
use serde_json::{Value, json};
use support::real_broker::{RealBroker, flux, lead, run, start, until_online};
use tokio::time::sleep;

/// A configuration without `[bootstrap]`: these names and cores, in rank order.
fn configuration(ranks: &[(&str, &str)]) -> Value {
    let config: Vec<_> = ranks.iter().map(|(hosts, cores)| json!({ "hosts": hosts, "cores": cores })).collect();
    json!({ "resource": { "noverify": true, "config": config }, "sched-fluxion-resource": { "match-format": "rv1" } })
}

/// Jobs of one core each that run until they are cancelled: their ids in Flux's notation and as numbers.
fn submit(flux: &Path, lead: &RealBroker, count: usize, words: &[&str]) -> (Vec<String>, Vec<i64>) {
    let copies = format!("--cc={}", (0..count).map(|copy| copy.to_string()).collect::<Vec<_>>().join(","));
    let submit = ["submit", &copies, "-n1", "--setattr=exec.test.run_duration=1h"];
    let ids = run(flux, lead, &[&submit, words, &["true"]].concat());
    let ids: Vec<_> = ids.lines().map(str::to_owned).collect();
    let to_numbers =
        [&["job", "id", "--to=dec"], ids.iter().map(String::as_str).collect::<Vec<_>>().as_slice()].concat();
    let numbers = run(flux, lead, &to_numbers).lines().map(|id| id.parse().unwrap()).collect();
    (ids, numbers)
}

async fn cancel(client: &Client, id: i64) {
    client.rpc("job-manager.raise", ANY, json!({ "id": id, "type": "cancel", "severity": 0 })).await.unwrap();
}

/// All of them hold their core.
fn all_run(flux: &Path, lead: &RealBroker, ids: &[String]) {
    for id in ids {
        run(flux, lead, &["job", "wait-event", "-t", "20", id, "start"]);
    }
}

/// Has flux-core's own scheduler in place of Fluxion.
async fn exchange_scheduler(client: &Client) {
    for module in schedulers(client).await.iter().filter(|module| *module != "resource") {
        client.rpc("module.remove", ANY, json!({ "name": module })).await.unwrap();
    }
    client.rpc("module.load", ANY, json!({ "path": "sched-simple", "args": [] })).await.unwrap();
}

/// The modules of the scheduler, and the resources that it has, in the order in which they are removed.
async fn schedulers(client: &Client) -> Vec<String> {
    let loaded = client.rpc("module.list", ANY, Value::Null).await.unwrap();
    let names = loaded["mods"].as_array().unwrap().iter().map(|module| module["name"].as_str().unwrap().to_owned());
    let mut modules: Vec<_> = names.filter(|name| name.starts_with("sched-") || name == "resource").collect();
    modules.sort_by_key(|name| (!name.ends_with("qmanager"), !name.starts_with("sched-"), name.clone()));
    modules
}

#[tokio::test]
async fn a_live_change_works_whatever_an_earlier_one_left_behind() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, client) = lead(&flux, base.path(), 4, "0-1").await;
    let remove = async |module: &String| client.rpc("module.remove", ANY, json!({ "name": module })).await.unwrap();
    let modules = schedulers(&client).await;
    for (killed_after, last_core) in (0..=modules.len()).zip(2..) {
        for module in &modules[..killed_after] {
            remove(module).await;
        }
        reload(&client, |_| Ok(configuration(&[("node[0-3]", &format!("0-{last_core}"))]))).await.unwrap();
        let queue = client.rpc("job-manager.queue-status", ANY, json!({})).await.unwrap();
        assert_eq!(queue["start"], true, "{queue}");
        assert_eq!(schedulers(&client).await, modules);
        assert_eq!(instance(&client).await.unwrap().all.cores, 4 * (last_core + 1), "{killed_after}");
    }
    exchange_scheduler(&client).await;
    reload(&client, |_| Ok(configuration(&[("node[0-3]", "0-1")]))).await.unwrap();
    assert_eq!(schedulers(&client).await, ["sched-simple", "resource"], "the scheduler that is there stays");
}

#[tokio::test]
async fn a_live_change_that_fails_leaves_a_working_scheduler() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead(&flux, base.path(), 1, "0-1").await;
    let error = reload(&client, |_| Err(RenderError::NotATable("no".to_owned()))).await.unwrap_err();
    assert!(matches!(error, ReloadError::Configuration(RenderError::NotATable(_))), "{error}");
    all_run(&flux, &lead, &submit(&flux, &lead, 1, &[]).0);
    run(&flux, &lead, &["cancel", "--all"]);
    reload(&client, |_| Ok(configuration(&[("node0", "0-1")]))).await.unwrap();
    all_run(&flux, &lead, &submit(&flux, &lead, 2, &[]).0);
}

const CORES: usize = 16;

/// Jobs end all along while the lead takes in `CHANGES` changes: afterwards every core runs a job again.
async fn no_core_is_lost(is_fluxion: bool) {
    const CHANGES: usize = 6;
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    // No rank without a broker: its cores would hide that others are lost.
    let (lead, client) = lead(&flux, base.path(), 1, "0-15").await;
    if !is_fluxion {
        exchange_scheduler(&client).await;
    }
    for _ in 0..CHANGES {
        let (ids, numbers) = submit(&flux, &lead, CORES, &[]);
        all_run(&flux, &lead, &ids);
        let change = reload(&client, |_| Ok(configuration(&[("node0", "0-15")])));
        // Spread over the change, which takes some 100 ms.
        let ends = numbers.iter().zip(0..).map(async |(id, place)| {
            sleep(Duration::from_millis(10 * place)).await;
            cancel(&client, *id).await;
        });
        let (changed, _) = tokio::join!(change, join_all(ends));
        changed.unwrap();
        for id in &ids {
            run(&flux, &lead, &["job", "wait-event", "-t", "20", id, "clean"]);
        }
    }
    let (ids, _) = submit(&flux, &lead, CORES, &[]);
    all_run(&flux, &lead, &ids);
}

#[tokio::test]
async fn no_core_is_lost_if_jobs_end_while_fluxion_is_unloaded() {
    no_core_is_lost(true).await;
}

#[tokio::test]
async fn no_core_is_lost_if_jobs_end_while_sched_simple_is_unloaded() {
    no_core_is_lost(false).await;
}

#[tokio::test]
async fn the_configuration_is_made_from_the_ranks_that_jobs_hold_and_jobs_go_on() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (lead, client) = lead(&flux, base.path(), 2, "0-1").await;
    let _follower = start(&flux, base.path(), 1);
    until_online(&client, "0-1").await;
    let (ids, numbers) = submit(&flux, &lead, 1, &["--requires=rank:1"]);
    all_run(&flux, &lead, &ids);
    let rename = async |name: &str| {
        let mut held = None;
        let change = reload(&client, |names| {
            held = Some(names.clone());
            let kept = names.get(&1).map_or(name, String::as_str);
            Ok(configuration(&[("node0", "0-1"), (kept, "0-2")]))
        });
        change.await.unwrap();
        held.unwrap()
    };
    assert_eq!(rename("renamed").await, [(1, "node1".to_owned())].into());
    let now = instance(&client).await.unwrap();
    assert_eq!((now.names[&0].as_str(), now.names[&1].as_str()), ("node0", "node1"));
    assert_eq!((now.all.cores, now.allocated.cores), (5, 1));
    assert_eq!(run(&flux, &lead, &["jobs", "-no", "{state}", &ids[0]]), "RUN");

    // The names are those of the ranks though one of them is excluded, which the scheduler knows nothing of.
    let exclude = |held: &BTreeMap<u32, String>| {
        let mut configuration = configuration(&[("node0", "0-1"), (held.get(&1).map_or("?", String::as_str), "0-2")]);
        configuration["resource"]["exclude"] = json!("0");
        Ok(configuration)
    };
    reload(&client, exclude).await.unwrap();
    assert_eq!(held_names(&client).await.unwrap(), [(1, "node1".to_owned())].into());
    assert_eq!(instance(&client).await.unwrap().names[&1], "node1");
    cancel(&client, numbers[0]).await;
    run(&flux, &lead, &["job", "wait-event", "-t", "20", &ids[0], "clean"]);
    assert!(rename("renamed").await.is_empty());
    assert_eq!(instance(&client).await.unwrap().names[&1], "renamed");
    assert!(held_names(&client).await.unwrap().is_empty());
}

#[test]
fn an_order_of_a_sites_rc1_task_that_contradicts_ours_is_named() {
    let Some(flux) = flux() else { return };
    let place = tempfile::tempdir().unwrap();
    let tasks = place.path().join("rc1.d");
    fs::create_dir(&tasks).unwrap();
    fs::write(tasks.join("ours.py"), rc1_tasks(place.path())).unwrap();
    let site = "from flux.modprobe import task\n@task('site', ranks='0', after=['job-exec'], before=[BEFORE])\ndef site(context): pass\n";
    for (before, is_cycle) in [("'push-cleanup'", false), ("'sched'", true)] {
        fs::write(tasks.join("site.py"), site.replace("BEFORE", before)).unwrap();
        let mut command = Command::new(&flux);
        command.args(["start", "--test-size=1", "--setattr=broker.rc1_path=", "--setattr=broker.rc3_path="]).arg(&flux);
        command.args(["modprobe", "rc1", "--dry-run"]).env("FLUX_MODPROBE_PATH_APPEND", place.path());
        let said = command.output().unwrap();
        let error = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.status.success(), !is_cycle, "{before}: {error}");
        let names_both = error.contains("nodes are in a cycle") && error.contains("flux-distribute-scheduler");
        assert_eq!(names_both, is_cycle, "{before}: {error}");
    }
}
