//! Probe and metrics. The agent is alive if it answers, and ready if the node is as the roster wants it; [`super::gate`] reports the
//! latter to kubelet. kubelet runs the command `probe`, which asks at a socket that only root in this pod can reach: at a TCP port,
//! any user of the host could block the agent's answer, and kubelet would kill the agent again and again. Every user of the host may
//! read the metrics.

use std::{
    fs,
    io::{self, Read, Write},
    net::SocketAddr,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use axum::{Router, http::StatusCode, routing::get};
use hyper::{Request, body::Incoming};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tower::ServiceExt;
use tracing::warn;

use super::port::Port;
use host::files::remove_if_there;
use packages::bounded;

/// What the agent answers.
#[derive(Debug, Clone)]
pub struct Health(Arc<Answers>);

#[derive(Debug)]
struct Answers {
    /// None while it is not known.
    ready: watch::Sender<Option<bool>>,
    /// Negative if this agent does not know it.
    pending_nodes: AtomicI64,
}

impl Default for Health {
    fn default() -> Self {
        Self(Arc::new(Answers { ready: watch::channel(None).0, pending_nodes: AtomicI64::new(-1) }))
    }
}

impl Health {
    /// Records whether the node is as the planner wants it.
    pub fn set_ready(&self, ready: bool) {
        self.0.ready.send_if_modified(|known| known.replace(ready) != Some(ready));
    }

    /// Follows the same.
    pub fn ready(&self) -> watch::Receiver<Option<bool>> {
        self.0.ready.subscribe()
    }

    /// Records how many more nodes jobs wait for; None if this is not the lead's agent.
    pub fn set_pending_nodes(&self, nodes: Option<u32>) {
        self.0.pending_nodes.store(nodes.map_or(-1, i64::from), Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        *self.0.ready.borrow() == Some(true)
    }

    /// In Prometheus' text format. Only the lead's agent has the series, so that there is one of it.
    fn metrics(&self) -> String {
        match self.0.pending_nodes.load(Ordering::Relaxed) {
            ..0 => String::new(),
            nodes => format!(
                "# HELP flux_distribute_pending_nodes How many more nodes the largest pending job waits for.\n\
                 # TYPE flux_distribute_pending_nodes gauge\nflux_distribute_pending_nodes {nodes}\n"
            ),
        }
    }
}

/// Serves `/healthz`, `/readyz` and `/metrics`: at `address`, which any user may have taken, and at `socket`.
pub async fn serve(address: SocketAddr, socket: &Path, health: Health) -> Port {
    let router = router(health);
    match listen(socket) {
        Ok(listener) => drop(tokio::spawn(bounded::serve(listener, answer_by(router.clone())))),
        Err(error) => warn!(socket = %socket.display(), %error, "can't answer kubelet's probes"),
    }
    Port::hold("metrics", address, move |listener: TcpListener| bounded::serve(listener, answer_by(router.clone())))
        .await
}

fn router(health: Health) -> Router {
    let told = health.clone();
    let ready = move || async move {
        if health.is_ready() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
    };
    let router = Router::new().route("/healthz", get(|| async { "alive\n" })).route("/readyz", get(ready));
    router.route("/metrics", get(move || async move { told.metrics() }))
}

fn answer_by(router: Router) -> impl Fn(Request<Incoming>) -> Answer + Clone {
    move |request| {
        let router = router.clone();
        Box::pin(async move { router.oneshot(request).await.unwrap_or_else(|never| match never {}) })
    }
}

type Answer = std::pin::Pin<Box<dyn Future<Output = axum::response::Response> + Send>>;

/// Replaces the socket of an agent that has ended: its directory is the pod's own.
fn listen(socket: &Path) -> io::Result<UnixListener> {
    remove_if_there(socket)?;
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Where the agent answers probes.
#[derive(clap::Args, Debug, Clone)]
pub struct ProbeArguments {
    /// The socket at which the agent of this pod answers probes
    #[arg(long = "probe-socket", env = "PROBE_SOCKET", default_value = "/tmp/agent.sock")]
    pub socket: PathBuf,
}

/// Why the agent does not count as alive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// No answer.
    #[error("the agent does not answer at {}", socket.display())]
    Silent {
        /// Where it was asked.
        socket: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// Another answer than that it is alive.
    #[error("the agent does not say that it is alive")]
    Wrong,
}

/// Time limit of a probe; kubelet's own is longer.
const PROBE: Duration = Duration::from_secs(4);

/// Asks the agent of this pod whether it is alive, for kubelet.
///
/// # Errors
/// The agent does not answer in time, or answers something else.
pub fn probe(arguments: &ProbeArguments) -> Result<(), ProbeError> {
    match ask(&arguments.socket) {
        Ok(answer) if answer.starts_with(b"HTTP/1.1 200 ") => Ok(()),
        Ok(_) => Err(ProbeError::Wrong),
        Err(source) => Err(ProbeError::Silent { socket: arguments.socket.clone(), source }),
    }
}

fn ask(socket: &Path) -> io::Result<[u8; 13]> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PROBE))?;
    stream.set_write_timeout(Some(PROBE))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut begin = [0; 13];
    stream.read_exact(&mut begin)?;
    Ok(begin)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn kubelet_is_answered_at_roots_socket_while_a_stranger_has_the_port() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let asked = ProbeArguments { socket: socket.clone() };
        let ask = || tokio::task::block_in_place(|| probe(&asked));
        assert!(matches!(ask(), Err(ProbeError::Silent { .. })));
        // The socket of an agent that was killed.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = serve(stranger.local_addr().unwrap(), &socket, Health::default()).await;
        assert!(port.trouble().is_some_and(|said| said.contains("metrics")), "{:?}", port.trouble());
        ask().unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    }

    /// Time is the test's own, and stands still while anything happens.
    #[tokio::test(start_paused = true)]
    async fn a_stranger_who_sends_without_end_or_nothing_is_cut_off() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(bounded::serve(listener, answer_by(router(Health::default()))));
        let mut answer = String::new();

        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET /healthz HTTP/1.1\r\nX: ").await.unwrap();
        let ended = tokio::time::timeout(Duration::from_mins(1), slow.read_to_string(&mut answer)).await;
        assert!(ended.is_ok(), "a head that never ends keeps its connection");

        let mut big = TcpStream::connect(address).await.unwrap();
        big.write_all(&[b"GET /healthz HTTP/1.1\r\nX: ", &*vec![b'x'; 100_000]].concat()).await.unwrap();
        let mut status = [0; 12];
        big.read_exact(&mut status).await.unwrap();
        assert_eq!(&status, b"HTTP/1.1 431");
    }

    #[test]
    fn the_nodes_that_jobs_wait_for_are_reported_if_known() {
        let health = Health::default();
        assert_eq!(health.metrics(), "");
        for (nodes, expected) in
            [(Some(0), "flux_distribute_pending_nodes 0"), (Some(7), "flux_distribute_pending_nodes 7")]
        {
            health.set_pending_nodes(nodes);
            assert_eq!(health.metrics().lines().last(), Some(expected));
        }
        health.set_pending_nodes(None);
        assert_eq!(health.metrics(), "");
    }
}
