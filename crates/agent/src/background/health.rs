//! Probes. The agent is alive if it answers, and ready if the node is as the roster wants it; [`super::gate`] reports the latter to
//! kubelet. kubelet runs the command `probe`, which asks at a socket that only root in this pod can reach: at a TCP port, any user
//! of the host could block the agent's answer, and kubelet would kill the agent again and again. Root gets the metrics there, too.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, http::StatusCode, routing::get};
use hyper::{Request, body::Incoming};
use tokio::{net::UnixListener, sync::watch};
use tower::ServiceExt;
use tracing::warn;

use host::files::remove_if_there;
use metrics::{Format, Metrics};
use packages::bounded;

/// Whether the node is as the planner wants it; None while it is not known.
#[derive(Debug, Clone)]
pub struct Health(Arc<watch::Sender<Option<bool>>>);

impl Default for Health {
    fn default() -> Self {
        Self(Arc::new(watch::channel(None).0))
    }
}

impl Health {
    /// Records whether the node is as the planner wants it.
    pub fn set_ready(&self, ready: bool) {
        self.0.send_if_modified(|known| known.replace(ready) != Some(ready));
    }

    /// Follows the same.
    pub fn ready(&self) -> watch::Receiver<Option<bool>> {
        self.0.subscribe()
    }

    fn is_ready(&self) -> bool {
        *self.0.borrow() == Some(true)
    }
}

/// Serves `/healthz`, `/readyz` and `/metrics` at `socket`.
pub fn serve(socket: &Path, health: Health, metrics: Metrics) {
    match listen(socket) {
        Ok(listener) => drop(tokio::spawn(bounded::serve(listener, answer_by(router(health, metrics))))),
        Err(error) => warn!(socket = %socket.display(), %error, "can't answer kubelet's probes"),
    }
}

fn router(health: Health, metrics: Metrics) -> Router {
    let ready = move || async move {
        if health.is_ready() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
    };
    let router = Router::new().route("/healthz", get(|| async { "alive\n" })).route("/readyz", get(ready));
    router.route("/metrics", get(move || async move { metrics.text(Format::Text) }))
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

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn kubelet_is_answered_at_a_socket_that_root_alone_can_use() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let asked = ProbeArguments { socket: socket.clone() };
        let ask = || tokio::task::block_in_place(|| probe(&asked));
        assert!(matches!(ask(), Err(ProbeError::Silent { .. })));
        // The socket of an agent that was killed.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        serve(&socket, Health::default(), Metrics::default());
        ask().unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    }
}
