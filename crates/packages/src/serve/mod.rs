//! Agents serve their archives to each other: only the offered names. While the agent is itself fetching an archive,
//! the response is not 404 but 503 with a retry hint, and a client may wait for the archive with a `HEAD`.
//!
//! Archives contain no secrets, and the receiver checks the sha256, so plain HTTP suffices. Everything is limited:
//! connections, concurrent uploads, memory, and how long a client may stall.

pub mod bounded;
pub(crate) mod impatient;

use std::{collections::BTreeSet, fs::File, io, path::PathBuf, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{Method, Request, Response, StatusCode, header},
    serve::ListenerExt,
};
use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncSeekExt},
    net::TcpListener,
    sync::{Semaphore, watch},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::io::ReaderStream;

/// Concurrent uploads. More would not be faster on the same wire. A node has four children, and each of them asks for
/// two archives at a time, so the children never find it busy.
const UPLOADS: usize = 8;
/// The longest wait for a free upload; then the client gets a 503 with `Retry-After`. Small archives are sent in less.
const UPLOAD_WAIT: Duration = Duration::from_secs(1);
/// The longest that a `HEAD` waits for an archive that is being fetched: less than a peer may be silent.
const ARCHIVE_WAIT: Duration = Duration::from_secs(3);
/// Header of a 503: the server is not busy but is still fetching the archive itself.
pub(crate) const COMING: header::HeaderName = header::HeaderName::from_static("archive-is-coming");
const BUFFER: usize = 1 << 18;

/// The archives that an agent offers to peers. Clones share one offer; a new shelf is empty.
#[derive(Clone, Default)]
pub struct Shelf(Arc<watch::Sender<Offered>>);

#[derive(Clone, Default)]
struct Offered {
    offer: Option<Arc<Offer>>,
    expects_more: bool,
}

struct Offer {
    names: BTreeSet<String>,
    open: Open,
}

type Open = Box<dyn Fn(&str) -> io::Result<File> + Send + Sync>;

impl std::fmt::Debug for Shelf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shelf").finish_non_exhaustive()
    }
}

impl Shelf {
    /// From now on serves these names of `pkgs` and no others. The path is resolved anew for each request.
    pub fn offer(&self, pkgs: PathBuf, names: BTreeSet<String>) {
        self.offer_with(move |name| File::open(pkgs.join(name)), names);
    }

    /// As [`Shelf::offer`], for files that `open` opens by name.
    pub fn offer_with(&self, open: impl Fn(&str) -> io::Result<File> + Send + Sync + 'static, names: BTreeSet<String>) {
        let offer = Arc::new(Offer { names, open: Box::new(open) });
        self.0.send_modify(|offered| offered.offer = Some(offer));
    }

    /// Serves nothing from now on. Uploads in progress continue.
    pub fn clear(&self) {
        self.0.send_modify(|offered| offered.offer = None);
    }

    /// Sets whether missing archives are being fetched: clients then get 503 for them and come again, instead of 404.
    pub fn expect(&self, expects_more: bool) {
        self.0.send_if_modified(|offered| std::mem::replace(&mut offered.expects_more, expects_more) != expects_more);
    }

    /// An archive has arrived: wakes the requests that wait for one.
    pub fn arrived(&self) {
        self.0.send_modify(|_| ());
    }
}

impl Offered {
    async fn open(&self, name: &str) -> io::Result<(File, u64)> {
        let not_found = || io::Error::from(io::ErrorKind::NotFound);
        let offer = self.offer.clone().filter(|offer| offer.names.contains(name)).ok_or_else(not_found)?;
        let name = name.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let file = (offer.open)(&name)?;
            let found = file.metadata()?;
            found.is_file().then_some((file, found.len())).ok_or_else(not_found)
        });
        opened.await.map_err(io::Error::other).flatten()
    }
}

/// Serves `shelf` on `listener` until the future is dropped: `GET` and `HEAD` of `/archives/<name>`.
pub async fn serve_peers_on(listener: TcpListener, shelf: Shelf) {
    let uploads = Arc::new(Semaphore::new(UPLOADS));
    // Without nodelay, the response's head and the last bytes of a body would be held back.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let respond = move |request| {
        let (shelf, uploads) = (shelf.clone(), uploads.clone());
        async move { respond(&request, &shelf, uploads).await }
    };
    bounded::serve(listener, respond).await;
}

async fn respond<B>(request: &Request<B>, shelf: &Shelf, uploads: Arc<Semaphore>) -> Response<Body> {
    let is_head = request.method() == Method::HEAD;
    if !is_head && request.method() != Method::GET {
        return empty(StatusCode::METHOD_NOT_ALLOWED, &[(header::ALLOW, "GET, HEAD")]);
    }
    let Some(name) = request.uri().path().strip_prefix("/archives/") else {
        return empty(StatusCode::NOT_FOUND, &[]);
    };
    let until = Instant::now() + if is_head { ARCHIVE_WAIT } else { Duration::ZERO };
    let (file, length) = match find(name, shelf, until).await {
        Ok(Some(opened)) => opened,
        Ok(None) => return empty(StatusCode::SERVICE_UNAVAILABLE, &[(header::RETRY_AFTER, "1"), (COMING, "1")]),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return empty(StatusCode::NOT_FOUND, &[]),
        Err(error) => {
            tracing::warn!(%error, name, "can't serve an archive");
            return empty(StatusCode::INTERNAL_SERVER_ERROR, &[]);
        }
    };
    let upload = if is_head {
        None
    } else {
        match timeout(UPLOAD_WAIT, uploads.acquire_owned()).await {
            Ok(Ok(upload)) => Some(upload),
            _ => return empty(StatusCode::SERVICE_UNAVAILABLE, &[(header::RETRY_AFTER, "1")]),
        }
    };
    let range = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok());
    let (status, from, to) = match part(range, length) {
        Some((from, to)) if range.is_some() && to - from < length => (StatusCode::PARTIAL_CONTENT, from, to),
        Some((from, to)) => (StatusCode::OK, from, to),
        None => {
            let whole = format!("bytes */{length}");
            return empty(StatusCode::RANGE_NOT_SATISFIABLE, &[(header::CONTENT_RANGE, &whole)]);
        }
    };
    let mut file = tokio::fs::File::from_std(file);
    if let Err(error) = file.seek(io::SeekFrom::Start(from)).await {
        tracing::warn!(%error, name, "can't serve an archive");
        return empty(StatusCode::INTERNAL_SERVER_ERROR, &[]);
    }
    let body = if is_head {
        Body::empty()
    } else {
        Body::from_stream(ReaderStream::with_capacity(file.take(to - from), BUFFER).map(move |piece| {
            // Moves the permit into the body, so that it is held until the body ends.
            let _ = &upload;
            piece
        }))
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let mut set = |name, value: &str| {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    };
    set(header::CONTENT_TYPE, "application/octet-stream");
    set(header::ACCEPT_RANGES, "bytes");
    set(header::CONTENT_LENGTH, &(to - from).to_string());
    if status == StatusCode::PARTIAL_CONTENT {
        set(header::CONTENT_RANGE, &format!("bytes {from}-{}/{length}", to - 1));
    }
    response
}

/// The archive and its length, if it is here or arrives before `until`; `None` if it is still being fetched.
async fn find(name: &str, shelf: &Shelf, until: Instant) -> io::Result<Option<(File, u64)>> {
    let mut changes = shelf.0.subscribe();
    loop {
        // Mark as seen before looking, so that an arrival from here on wakes the wait below.
        let offered = changes.borrow_and_update().clone();
        match offered.open(name).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound && offered.expects_more => {}
            found => return found.map(Some),
        }
        if !matches!(timeout_at(until, changes.changed()).await, Ok(Ok(()))) {
            return Ok(None);
        }
    }
}

fn empty(status: StatusCode, headers: &[(header::HeaderName, &str)]) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    for (name, value) in headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// The bytes `from..to` of a file of `length` bytes that `range` asks for; `None` if the file has none of them.
/// Anything but one plain range may be ignored (RFC 9110, 14.2), and then the whole file is sent.
fn part(range: Option<&str>, length: u64) -> Option<(u64, u64)> {
    let all = Some((0, length));
    let Some((from, to)) = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) else { return all };
    match (from.parse::<u64>(), to.parse::<u64>()) {
        (Ok(from), Ok(to)) if to < from => all,
        (Ok(from), _) if from >= length => None,
        (Ok(from), Ok(to)) => Some((from, length.min(to.saturating_add(1)))),
        (Ok(from), Err(_)) if to.is_empty() => Some((from, length)),
        (Err(_), Ok(last)) if from.is_empty() => {
            (last > 0 && length > 0).then(|| (length.saturating_sub(last), length))
        }
        _ => all,
    }
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn ranges_are_read_as_rfc_9110_says() {
        for (range, expected) in [
            (None, Some((0, 10))),
            (Some("bytes=0-"), Some((0, 10))),
            (Some("bytes=3-"), Some((3, 10))),
            (Some("bytes=3-3"), Some((3, 4))),
            (Some("bytes=3-99"), Some((3, 10))),
            (Some("bytes=-4"), Some((6, 10))),
            (Some("bytes=-99"), Some((0, 10))),
            (Some("bytes=10-"), None),
            (Some("bytes=-0"), None),
            (Some("bytes=5-3"), Some((0, 10))),
            (Some("bytes=0-1,4-5"), Some((0, 10))),
            (Some("bytes=-"), Some((0, 10))),
            (Some("lines=1-2"), Some((0, 10))),
        ] {
            assert_eq!(part(range, 10), expected, "{range:?}");
        }
    }
}
