//! The API server of local mode, driven through the kube client that production uses: watches, selections and forms.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod apiserver_support;

use std::{collections::BTreeMap, time::Duration};

use api::{FluxNode, FluxNodeSpec, NAMESPACE};
use apiserver::{LOG_LENGTH, Mode, Part, Store, find};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use apiserver_support::*;

#[tokio::test]
async fn selectors_apply_to_lists_watches_and_collection_deletes() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    for (name, zone) in [("a", "x"), ("b", "y"), ("c", "z")] {
        let mut map = config_map(name, "1");
        map.metadata.labels = Some(BTreeMap::from([("zone".into(), zone.into())]));
        maps.create(&PostParams::default(), &map).await.unwrap();
    }
    let names = |params: ListParams| {
        let maps = maps.clone();
        async move {
            let list = maps.list(&params).await.unwrap();
            list.items.into_iter().filter_map(|map| map.metadata.name).collect::<Vec<_>>().join(" ")
        }
    };
    assert_eq!(names(ListParams::default().labels("zone in (x,z)")).await, "a c");
    assert_eq!(names(ListParams::default().labels("zone,zone!=x")).await, "b c");
    assert_eq!(names(ListParams::default().fields("metadata.name=b")).await, "b");
    assert_eq!(code(maps.list(&ListParams::default().fields("data.text=1")).await), refused(400, "BadRequest"));

    let watch = maps.watch(&WatchParams::default().labels("zone=x"), "0").await.unwrap();
    let mut watch = watch.boxed();
    let next =
        async |watch: &mut futures::stream::BoxStream<'_, Result<WatchEvent<ConfigMap>, kube::Error>>| match timeout(
            LONG,
            watch.try_next(),
        )
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        {
            WatchEvent::Added(map) => format!("added {}", map.metadata.name.unwrap()),
            WatchEvent::Modified(map) => format!("modified {}", map.metadata.name.unwrap()),
            WatchEvent::Deleted(map) => format!("deleted {}", map.metadata.name.unwrap()),
            other => format!("{other:?}"),
        };
    assert_eq!(next(&mut watch).await, "added a");
    for (name, zone) in [("b", "x"), ("a", "y")] {
        let patch = Patch::Merge(json!({ "metadata": { "labels": { "zone": zone } } }));
        maps.patch(name, &PatchParams::default(), &patch).await.unwrap();
    }
    assert_eq!(next(&mut watch).await, "added b");
    assert_eq!(next(&mut watch).await, "deleted a");

    maps.delete_collection(&DeleteParams::default(), &ListParams::default().labels("zone!=x")).await.unwrap();
    assert_eq!(names(ListParams::default()).await, "b");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_watches_sees_every_change_in_order() {
    const WATCHES: usize = 100;
    const CHANGES: usize = 50;
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    maps.create(&PostParams::default(), &config_map("a", "0")).await.unwrap();
    let watches = (0..WATCHES).map(|_| {
        let maps = maps.clone();
        async move {
            let stream = watcher(maps, watcher::Config::default()).applied_objects();
            let texts = stream.map_ok(|map| map.data.unwrap()["text"].parse::<usize>().unwrap());
            let last = format!("{CHANGES}");
            let mut texts = texts.boxed();
            let mut seen = Vec::new();
            while seen.last() != Some(&last.parse().unwrap()) {
                seen.push(texts.try_next().await.unwrap().unwrap());
            }
            // A watch may begin late, but from its beginning on nothing is missing.
            assert!(seen.windows(2).all(|pair| pair[1] == pair[0] + 1), "{seen:?}");
        }
    });
    let changes = async {
        for change in 1..=CHANGES {
            let patch = Patch::Merge(json!({ "data": { "text": change.to_string() } }));
            maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
        }
    };
    let all = futures::future::join(futures::future::join_all(watches), changes);
    timeout(Duration::from_mins(1), all).await.unwrap();
}

#[tokio::test]
async fn a_watch_from_an_expired_version_gets_410() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let made = maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let version = made.metadata.resource_version.unwrap();
    let errors = async |version: &str| {
        let mut watch = maps.watch(&WatchParams::default(), version).await.unwrap().boxed();
        match timeout(LONG, watch.try_next()).await.unwrap().unwrap() {
            Some(WatchEvent::Error(error)) => Some((error.code, error.reason.clone())),
            _ => None,
        }
    };
    fill_the_log(&server).await;
    assert_eq!(errors(&version).await, Some(refused(410, "Expired")));
    // The future belongs to another life of the server: waiting for it would hide what happened in between.
    assert_eq!(errors("999999999").await, Some(refused(410, "Expired")));
}

/// More changes than the server remembers. Everybody else gets a turn in between.
async fn fill_the_log(server: &Server) {
    let maps = find("", "configmaps").unwrap();
    let text = "x".repeat(2000);
    for change in 0..=LOG_LENGTH {
        let text = format!("{change} {text}");
        let change = |old: &Value| {
            let mut new = old.clone();
            new["data"]["text"] = text.into();
            Ok(new)
        };
        server.store.update(maps, (NAMESPACE, "a"), Part::Whole, Mode::default(), change).unwrap();
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_watch_that_does_not_read_is_closed_and_does_not_slow_others() {
    let server = start().await;
    let maps: Api<ConfigMap> = server.api();
    maps.create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let open = async || {
        let mut stream = server.connect().await;
        let request =
            format!("GET /api/v1/configmaps?watch=true HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        // It has begun.
        stream.read_u8().await.unwrap();
        stream
    };
    let (slow, mut eager) = (open().await, open().await);
    let eager = async move {
        let last = format!("\"{LOG_LENGTH} x");
        for _ in 0..3 {
            assert_eq!(read_until(&mut eager, &[&last, "\"Expired\""]).await, 0, "a watch that reads was cut");
        }
    };
    // Three times what is remembered, and more than the socket of the one that does not read can hold.
    let fill = async {
        for _ in 0..3 {
            fill_the_log(&server).await;
        }
    };
    timeout(LONG, async { tokio::join!(eager, fill) }).await.unwrap();
    let mut slow = slow;
    assert_eq!(timeout(LONG, read_until(&mut slow, &["\"Expired\""])).await.unwrap(), 0);
}

/// Reads on to the first of `words` that comes; the answer is which.
async fn read_until(stream: &mut (impl AsyncRead + Unpin), words: &[&str]) -> usize {
    let (mut text, mut chunk) = (String::new(), vec![0; 65536]);
    loop {
        if let Some(found) = words.iter().position(|word| text.contains(word)) {
            return found;
        }
        let read = stream.read(&mut chunk).await.unwrap();
        assert_ne!(read, 0, "the stream has ended");
        // A word may be cut in two by a read.
        text.drain(..text.len().saturating_sub(32));
        text.push_str(std::str::from_utf8(&chunk[..read]).unwrap());
    }
}

#[tokio::test]
async fn a_restored_cluster_has_its_objects_and_reuses_no_version() {
    let server = start().await;
    let made = server.api::<ConfigMap>().create(&PostParams::default(), &config_map("a", "1")).await.unwrap();
    let snapshot = server.store.snapshot().unwrap();
    let later = server.api::<ConfigMap>().create(&PostParams::default(), &config_map("b", "1")).await.unwrap();

    let restored = start_with(Store::restore(&snapshot).unwrap()).await;
    let maps = restored.api::<ConfigMap>();
    assert_eq!(maps.get("a").await.unwrap(), made);
    assert_eq!(code(maps.get("b").await), refused(404, "NotFound"));
    let version = |map: &ConfigMap| map.metadata.resource_version.as_ref().unwrap().parse::<u64>().unwrap();
    let new = maps.create(&PostParams::default(), &config_map("c", "1")).await.unwrap();
    assert!(version(&new) > version(&later));
    let mut watch = maps.watch(&WatchParams::default(), &version(&later).to_string()).await.unwrap().boxed();
    let event = timeout(LONG, watch.try_next()).await.unwrap().unwrap();
    assert!(matches!(event, Some(WatchEvent::Error(error)) if error.code == 410));
    assert!(Store::restore(b"{\"format\": 2}").is_err_and(|error| error.to_string().contains("format 2")));
}

#[tokio::test]
async fn tables_have_the_columns_of_the_definition_in_lists_and_watches() {
    let server = start().await;
    let nodes: Api<FluxNode> = server.api();
    let spec = FluxNodeSpec { node_name: "n1".into(), rank: Some(2), ..FluxNodeSpec::default() };
    nodes.create(&PostParams::default(), &FluxNode::new("n1", spec)).await.unwrap();
    let path = format!("/apis/distribute.flux-framework.org/v1alpha1/namespaces/{NAMESPACE}/fluxnodes");
    let table = [("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")];
    let list = server.raw("GET", &path, &table, Value::Null).await.unwrap();
    assert_eq!(list["kind"], "Table");
    assert_eq!(list["columnDefinitions"][1]["name"], "Phase");
    assert_eq!(list["rows"][0]["cells"][3], 2);
    assert_eq!(list["rows"][0]["object"]["metadata"]["name"], "n1");
    let event = server.raw("GET", &format!("{path}?watch=true&timeoutSeconds=0"), &table, Value::Null).await.unwrap();
    assert_eq!((&event["type"], &event["object"]["rows"][0]["cells"][0]), (&json!("ADDED"), &json!("n1")));
}

#[tokio::test]
async fn at_shutdown_open_watches_end() {
    let mut server = start().await;
    let maps: Api<ConfigMap> = server.api();
    let mut watch = maps.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    server.stop.take().unwrap().send(()).unwrap();
    assert!(timeout(LONG, async { while watch.try_next().await.is_ok_and(|event| event.is_some()) {} }).await.is_ok());
    drop(server.client);
    timeout(LONG, server.task).await.unwrap().unwrap().unwrap();
}
