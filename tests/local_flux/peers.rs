//! The source of the packages is asked once, whatever becomes of it or of the node that asks.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use api::{FluxNode, FluxNodeSpec};
use axum::{
    body::{Body, Bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    response::Response,
};
use futures::StreamExt;
use kube::api::ListParams;
use sha2::{Digest, Sha256};
use tokio::{net::TcpListener, task::JoinHandle, time::sleep};

use crate::{
    harness::{Cluster, bundle, channel},
    instance::is_one_instance,
    needs::{Need, skips_without},
};

/// In so many pieces a file is sent.
const PIECE: usize = 1 << 16;

/// A server on this machine's loopback that counts what it sends.
struct Source {
    runtime: tokio::runtime::Runtime,
    server: JoinHandle<()>,
    url: String,
    served: Arc<Served>,
}

struct Served {
    root: PathBuf,
    /// Rest after each piece.
    rest: Duration,
    bytes: Mutex<BTreeMap<String, u64>>,
}

impl Source {
    fn of(root: &Path, rest: Duration) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = Arc::new(Served { root: root.to_owned(), rest, bytes: Mutex::default() });
        let router = axum::Router::new().fallback(serve).with_state(served.clone());
        let server = runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { runtime, server, url, served }
    }

    /// Bytes that were sent, by file.
    fn sent(&self) -> BTreeMap<String, u64> {
        self.served.bytes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops listening, and closes the connections that are open.
    fn vanishes(self) -> BTreeMap<String, u64> {
        self.server.abort();
        let sent = self.sent();
        self.runtime.shutdown_timeout(Duration::from_secs(1));
        sent
    }
}

async fn serve(State(served): State<Arc<Served>>, request: Request) -> Response {
    let name = request.uri().path().trim_start_matches('/').to_owned();
    let Ok(all) = fs::read(served.root.join(&name)).map(Bytes::from) else {
        return Response::builder().status(StatusCode::NOT_FOUND).body(Body::empty()).unwrap();
    };
    let wish = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok());
    let from = wish.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let total = all.len();
    let mut answer = Response::builder().header(header::ETAG, "\"1\"");
    if let Some(from) = from {
        let range = format!("bytes {from}-{}/{total}", total - 1);
        answer = answer.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
    }
    let rest = all.slice(from.unwrap_or(0)..);
    answer = answer.header(header::CONTENT_LENGTH, rest.len());
    let pieces: Vec<_> = (0..rest.len().div_ceil(PIECE))
        .map(|piece| rest.slice(piece * PIECE..rest.len().min((piece + 1) * PIECE)))
        .collect();
    let body = futures::stream::iter(pieces).then(move |piece| {
        let (served, name) = (served.clone(), name.clone());
        async move {
            if !served.rest.is_zero() {
                sleep(served.rest).await;
            }
            let mut bytes = served.bytes.lock().unwrap_or_else(PoisonError::into_inner);
            *bytes.entry(name).or_default() += piece.len() as u64;
            Ok::<_, std::io::Error>(piece)
        }
    });
    answer.body(Body::from_stream(body)).unwrap()
}

/// The bundle behind a server, and the options that install from there. None if there is no Flux.
fn bundle_at(rest: Duration) -> Option<(Source, Vec<String>, u64)> {
    let file = bundle()?;
    let source = Source::of(file.parent().unwrap(), rest);
    let content = fs::read(file).unwrap();
    let sha256 = hex::encode(Sha256::digest(&content));
    let url = format!("{}/{}", source.url, file.file_name().unwrap().to_str().unwrap());
    // With the sha256 given, `local up` itself asks for nothing.
    let options = ["--bundle", &url, "--sha256", &sha256].map(str::to_owned).to_vec();
    Some((source, options, content.len() as u64))
}

fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

fn flux_nodes(cluster: &Cluster) -> Vec<FluxNode> {
    cluster.wait(cluster.api::<FluxNode>().list(&ListParams::default())).unwrap().items
}

fn asks_the_source(spec: &FluxNodeSpec) -> bool {
    spec.fetch_from.as_ref().is_some_and(|from| from.peers.is_empty())
}

/// One node asked the source, every other one has a parent, and no node has more than four children.
fn is_a_tree(cluster: &Cluster) {
    let nodes = flux_nodes(cluster);
    assert_eq!(nodes.iter().filter(|node| asks_the_source(&node.spec)).count(), 1);
    let mut children = BTreeMap::<String, u32>::new();
    for from in nodes.iter().filter_map(|node| node.spec.fetch_from.as_ref()) {
        if let Some(parent) = from.peers.first() {
            *children.entry(parent.clone()).or_default() += 1;
        }
    }
    assert_eq!(children.values().sum::<u32>() as usize, nodes.len() - 1);
    assert!(children.values().all(|children| *children <= 4), "{children:?}");
    let peers: Vec<_> = nodes.iter().filter_map(|node| node.status.as_ref()?.peer.clone()).collect();
    assert_eq!(peers.len(), nodes.len());
    assert!(children.keys().all(|parent| peers.contains(parent)));
}

#[test]
fn the_bundle_server_sends_a_bundle_once_for_all_nodes() {
    let Some((source, options, size)) = bundle_at(Duration::ZERO) else { return };
    let begin = Instant::now();
    let cluster = Cluster::start(4, &words(&options));
    eprintln!("measured: {:.1} s from nothing to four nodes with one download", begin.elapsed().as_secs_f64());
    assert_eq!(source.sent().into_values().collect::<Vec<_>>(), [size]);
    is_a_tree(&cluster);
    is_one_instance(&cluster, 4);

    // From here on no node can reach it.
    source.vanishes();
    for node in ["node1", "node2", "node3", "node4"] {
        cluster.must(&["agent", node, "kill"]);
    }
    cluster.until("the agents' restarts", || {
        cluster.nodes().iter().all(|node| node.restarts > 0 && node.agent_pid.is_some()).then_some(())
    });
    let begin = Instant::now();
    cluster.must(&["add-node", "--count", "2"]);
    cluster.all_online(6);
    eprintln!(
        "measured: {:.1} s from the boot of two new nodes to Online, packages from peers whose agents had been killed",
        begin.elapsed().as_secs_f64()
    );
    is_a_tree(&cluster);
}

#[test]
fn the_channel_sends_each_archive_once_for_all_nodes() {
    if skips_without([Need::ChannelDirectory]) {
        return;
    }
    let Some(channel) = channel() else { return };
    let source = Source::of(Path::new(&channel), Duration::ZERO);
    let cluster = Cluster::start(4, &["--channel", &source.url]);
    is_a_tree(&cluster);
    let sent = source.vanishes();
    let archives: Vec<_> = sent.iter().filter(|(name, _)| name.ends_with(".conda") || name.ends_with(".bz2")).collect();
    assert!(archives.len() >= 3, "{sent:?}");
    for (name, bytes) in archives {
        assert_eq!(*bytes, fs::metadata(Path::new(&channel).join(name)).unwrap().len(), "{name}");
    }
    cluster.must(&["add-node"]);
    cluster.all_online(5);
    is_one_instance_with(&cluster, 5);
}

fn is_one_instance_with(cluster: &Cluster, nodes: u32) {
    let said = cluster.exec("node1", &["flux", "run", &format!("-N{nodes}"), "hostname"]);
    assert_eq!(said.lines().count(), nodes as usize, "{said}");
}

#[test]
fn nodes_install_from_peers_if_the_source_vanishes_after_the_first_node() {
    let Some((source, options, size)) = bundle_at(Duration::ZERO) else { return };
    let cluster = Cluster::begin(4, &words(&options));
    let holds = |node: &FluxNode| node.status.as_ref().is_some_and(|status| !status.cached_package_sets.is_empty());
    cluster.until("the first holder", || flux_nodes(&cluster).iter().any(holds).then_some(()));
    assert_eq!(source.vanishes().into_values().sum::<u64>(), size);
    cluster.all_online(4);
    is_one_instance(&cluster, 4);
}

#[test]
fn another_agent_fetches_if_the_one_that_asks_the_source_is_killed() {
    // Some four seconds for thirty megabytes.
    let Some((source, options, size)) = bundle_at(Duration::from_millis(8)) else { return };
    let cluster = Cluster::begin(4, &words(&options));
    let asker = cluster.until("a third of the bundle at the node that asks", || {
        let half = source.sent().into_values().sum::<u64>() > size / 3;
        flux_nodes(&cluster).into_iter().find(|node| half && asks_the_source(&node.spec))
    });
    cluster.must(&["agent", &asker.spec.node_name, "kill"]);
    cluster.all_online(4);
    let sent = source.sent().into_values().sum::<u64>();
    eprintln!("measured: {:.2} times the bundle was sent with its asker killed", sent as f64 / size as f64);
    assert!(sent < 2 * size, "{sent} bytes of {size}");
    is_one_instance(&cluster, 4);
}
