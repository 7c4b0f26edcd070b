//! What is read from a broker's socket.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;
mod support;

use std::path::Path;

use broker::{
    message::{ANY, LEAD},
    rfc3::{Client, RpcError},
    status::{Change, DrainMode, drain, instance, status, watch},
};
use futures::{Stream, StreamExt};
use serde_json::{Value, json};
use support::{
    real_broker::{RealBroker, configure, connect, flux, soon, start},
    stand_in::{Service, StandIn},
};

async fn next(stream: &mut (impl Stream<Item = Change> + Unpin)) -> Option<Change> {
    soon(stream.next()).await
}

fn online(ranks: &str) -> Change {
    Change::Online(ranks.parse().unwrap())
}

#[tokio::test]
async fn the_status_of_a_broker_is_read_in_one_piece() {
    let directory = tempfile::tempdir().unwrap();
    let broker = StandIn::start(directory.path(), &["node0", "node1", "node2"]);
    let children = json!([
        {"rank": 1, "status": "full", "duration": 2.0},
        {"rank": 2, "status": "lost", "duration": 3.5, "error": "connection timed out"},
    ]);
    broker.on(
        "overlay.health",
        Service::Says(json!({"rank": 0, "status": "degraded", "duration": 3.5, "children": children})),
    );
    let client = Client::connect(broker.socket()).await.unwrap();
    assert_eq!(client.peer_pid(), i32::try_from(std::process::id()).ok());
    let status = status(&client).await.unwrap();
    assert_eq!((status.rank, status.size, status.state.as_str()), (0, 3, "run"));
    let instance = status.instance.as_ref().unwrap();
    assert_eq!((instance.online.to_string().as_str(), instance.all.cores, instance.allocated.cores), ("0-2", 12, 0));
    let two = instance.declared_by(&"1-2,7".parse().unwrap());
    assert_eq!((two.ranks.to_string().as_str(), two.cores), ("1-2", 8));
    let shown = serde_json::to_value(&status).unwrap();
    let not_full = json!([{"rank": 2, "status": "lost", "secs": 3.5, "error": "connection timed out"}]);
    assert_eq!(shown["overlay"], json!({"status": "degraded", "secs": 3.5, "notFull": not_full, "connected": "1"}));
    assert_eq!(shown["instance"]["all"], json!({"ranks": "0-2", "cores": 12, "gpus": 0}));
}

#[tokio::test(start_paused = true)]
async fn a_broker_whose_lead_is_gone_still_reports_its_own_status() {
    let directory = tempfile::tempdir().unwrap();
    let broker = StandIn::start(directory.path(), &["node0", "node1"]);
    broker.on("groups.get", Service::Silent);
    let client = Client::connect(broker.socket()).await.unwrap();
    let status = status(&client).await.unwrap();
    assert_eq!((status.overlay.status.as_str(), status.instance), ("full", None));
}

#[tokio::test]
async fn each_of_many_concurrent_requests_gets_its_own_answer() {
    let directory = tempfile::tempdir().unwrap();
    let broker = StandIn::start(directory.path(), &["node0"]);
    for number in 0..200 {
        broker.on(&format!("test.{number}"), Service::Says(json!({"number": number, "long": "x".repeat(number * 10)})));
    }
    broker.on("test.silent", Service::Silent);
    let client = Client::connect(broker.socket()).await.unwrap();
    let silent = client.rpc("test.silent", ANY, Value::Null);
    let topics: Vec<String> = (0..200).map(|number| format!("test.{number}")).collect();
    let answers = futures::future::join_all(topics.iter().map(|topic| client.rpc(topic, ANY, Value::Null)));
    let answers = tokio::select! {
        answers = soon(answers) => answers,
        answer = silent => panic!("{answer:?}"),
    };
    for (number, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap()["number"], number);
    }
}

#[tokio::test(start_paused = true)]
async fn different_failures_give_different_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("local");
    assert!(matches!(Client::connect(&path).await, Err(RpcError::Connect { .. })));

    let broker = StandIn::start(directory.path(), &["node0"]);
    broker.on("test.refuses", Service::Refuses(71, "this RPC only works on rank 0"));
    broker.on("test.wordless", Service::Refuses(2, ""));
    broker.on("test.silent", Service::Silent);
    broker.on("test.garbage", Service::Raw(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()));
    let client = Client::connect(&path).await.unwrap();
    let ask = |topic| client.rpc(topic, LEAD, Value::Null);
    let error = ask("test.refuses").await.unwrap_err();
    assert_eq!(error.to_string(), "test.refuses: this RPC only works on rank 0");
    assert!(matches!(error, RpcError::Service { errnum: 71, .. }));
    assert_eq!(
        ask("test.wordless").await.unwrap_err().to_string(),
        "test.wordless: No such file or directory (os error 2)"
    );
    assert!(matches!(ask("test.unknown").await, Err(RpcError::Service { errnum: 38, .. })));
    assert!(matches!(ask("test.silent").await, Err(RpcError::Timeout { .. })));
    assert!(matches!(ask("test.garbage").await, Err(RpcError::Closed)));
    client.closed().await;
    assert!(matches!(ask("test.refuses").await, Err(RpcError::Closed)));
}

#[tokio::test]
async fn membership_changes_arrive_until_the_broker_dies() {
    let directory = tempfile::tempdir().unwrap();
    let broker = StandIn::start(directory.path(), &["node0", "node1"]);
    let client = Client::connect(broker.socket()).await.unwrap();
    let mut changes = watch(&client, true).unwrap();
    let first = [next(&mut changes).await.unwrap(), next(&mut changes).await.unwrap()];
    assert!(first.contains(&Change::State("run".to_owned())) && first.contains(&online("0-1")));
    broker.tell("groups.get", json!({"members": "0"}));
    assert_eq!(next(&mut changes).await, Some(online("0")));
    broker.end("groups.get");
    broker.on("state-machine.get", Service::Says(json!({"state": "shutdown"})));
    broker.tell("state-machine.monitor", json!({"state": 8}));
    assert_eq!(next(&mut changes).await, Some(Change::State("shutdown".to_owned())));
    broker.die();
    assert_eq!(next(&mut changes).await, None);
    soon(client.closed()).await;
}

#[tokio::test]
async fn a_follower_receives_the_leads_heartbeat() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, _client) = running_lead(&flux, base.path()).await;
    let follower = start(&flux, base.path(), 1);
    let at_follower = connect(&follower).await;
    let mut pulses = at_follower.subscribe("heartbeat.pulse").await.unwrap();
    for _ in 0..2 {
        assert_eq!(soon(pulses.recv()).await.unwrap(), "heartbeat.pulse");
    }
}

/// A real lead of four declared ranks, in state run.
async fn running_lead(flux: &Path, base: &Path) -> (RealBroker, Client) {
    configure(flux, base, 4, "0-1");
    let lead = start(flux, base, 0);
    let client = connect(&lead).await;
    until_it_runs(&mut watch(&client, true).unwrap()).await;
    (lead, client)
}

async fn until_it_runs(changes: &mut (impl Stream<Item = Change> + Unpin)) {
    let mut seen = Vec::new();
    while !(seen.contains(&Change::State("run".to_owned())) && seen.contains(&online("0"))) {
        seen.push(next(changes).await.expect("the lead ended"));
    }
}

#[tokio::test]
async fn a_real_flux_of_four_declared_ranks_starts_with_one_and_is_followed() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    configure(&flux, base.path(), 4, "0-1");
    let lead = start(&flux, base.path(), 0);
    let client = connect(&lead).await;
    assert_eq!(client.peer_pid(), i32::try_from(lead.child.id()).ok());
    let mut changes = watch(&client, true).unwrap();
    until_it_runs(&mut changes).await;
    let follower = start(&flux, base.path(), 1);
    while next(&mut changes).await.expect("the lead ended") != online("0-1") {}

    let lead_status = status(&client).await.unwrap();
    assert_eq!((lead_status.rank, lead_status.size, lead_status.hostlist.as_str()), (0, 4, "node[0-3]"));
    let instance = lead_status.instance.unwrap();
    assert_eq!((instance.all.cores, instance.all.ranks.to_string().as_str()), (8, "0-3"));
    assert_eq!(lead_status.overlay.status, "partial");
    assert_eq!(lead_status.overlay.not_full.len(), 2);
    let at_follower = connect(&follower).await;
    let follower_status = status(&at_follower).await.unwrap();
    assert_eq!((follower_status.rank, follower_status.broker_name.as_str()), (1, "node1"));
    assert_eq!(follower_status.instance.unwrap().online.to_string(), "0-1");
    let error = at_follower.rpc("test.nobody", ANY, Value::Null).await.unwrap_err();
    assert_eq!(error.to_string(), "test.nobody: No service matching test.nobody is registered");
    let log = std::fs::read_to_string(base.path().join("log0")).unwrap();
    assert!(log.contains("broker.info[0]: online: node0 (ranks 0)"), "{log}");

    drop(follower);
    soon(at_follower.closed()).await;
    drop(lead);
    while next(&mut changes).await.is_some() {}
}

/// Between a look at the drained ranks and a drain of ours, people may have drained a rank.
#[tokio::test]
async fn a_drain_takes_a_reason_away_only_if_it_is_meant_to() {
    let Some(flux) = flux() else { return };
    let base = tempfile::tempdir().unwrap();
    let (_lead, client) = running_lead(&flux, base.path()).await;
    let one = "1".parse().unwrap();
    let drained = async || {
        let drained = instance(&client).await.unwrap().drained.remove(0);
        (drained.ranks.to_string(), drained.reason, drained.since)
    };
    drain(&client, &one, "bad disk", DrainMode::Keep).await.unwrap();
    let theirs = drained().await;
    assert_eq!((theirs.0.as_str(), theirs.1.as_str()), ("1", "bad disk"));
    drain(&client, &one, "cordoned", DrainMode::Keep).await.unwrap();
    assert_eq!(drained().await, theirs);
    drain(&client, &one, "cordoned", DrainMode::Replace).await.unwrap();
    let ours = drained().await;
    assert_eq!((ours.1.as_str(), ours.2), ("cordoned", theirs.2));
    // Flux tells the time in whole seconds.
    soon(async {
        while drained().await.2 <= theirs.2 {
            drain(&client, &one, "cordoned", DrainMode::Renew).await.unwrap();
        }
    })
    .await;
}
