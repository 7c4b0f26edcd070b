//! Agents serve the archives they hold to each other: names that were offered, and nothing else. What is still on its way
//! to the agent itself is no 404: whoever asks for it is told to come again, and may wait for it with a `HEAD`.
//!
//! There is nothing to be kept secret in an archive, and who receives one checks its sha256, so this is plain HTTP. All of
//! it is bounded: connections, uploads at a time, memory, and how long a client may sleep.

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

/// Archives that are sent at a time. Others wait: the wire is not faster for more. A node has four children, and each of
/// them asks for two at a time: they never find it busy.
const UPLOADS: usize = 8;
/// So long, after which they are told to come again. Small archives are sent in less.
const WAIT_FOR_AN_UPLOAD: Duration = Duration::from_secs(1);
/// So long a `HEAD` waits for an archive that is on its way: less than what a peer may be silent.
const WAIT_FOR_AN_ARCHIVE: Duration = Duration::from_secs(3);
/// In an answer that says come again: not because others are being served, but because it is not here yet.
pub(crate) const COMING: header::HeaderName = header::HeaderName::from_static("archive-is-coming");
const BUFFER: usize = 1 << 18;

/// What is served at the moment. Clones are the same shelf; a new one is empty.
#[derive(Clone, Default)]
pub struct Shelf(Arc<watch::Sender<Wares>>);

#[derive(Clone, Default)]
struct Wares {
    offer: Option<Arc<Offer>>,
    are_coming: bool,
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
    /// From now on serves these names of `pkgs` and nothing else. The path is walked anew for each request.
    pub fn offer(&self, pkgs: PathBuf, names: BTreeSet<String>) {
        self.offer_with(move |name| File::open(pkgs.join(name)), names);
    }

    /// As [`Shelf::offer`], for files that `open` finds by their name.
    pub fn offer_with(&self, open: impl Fn(&str) -> io::Result<File> + Send + Sync + 'static, names: BTreeSet<String>) {
        let offer = Arc::new(Offer { names, open: Box::new(open) });
        self.0.send_modify(|wares| wares.offer = Some(offer));
    }

    /// Serves nothing any more, but goes on with what is on its way.
    pub fn clear(&self) {
        self.0.send_modify(|wares| wares.offer = None);
    }

    /// From now on, until told otherwise, what is not here is on its way here.
    pub fn expect(&self, are_coming: bool) {
        self.0.send_if_modified(|wares| std::mem::replace(&mut wares.are_coming, are_coming) != are_coming);
    }

    /// Something has come: whoever waits looks again.
    pub fn arrived(&self) {
        self.0.send_modify(|_| ());
    }
}

impl Wares {
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

/// Serves `shelf` at `listener` until the future is dropped: `GET` and `HEAD` of `/archives/<name>`.
pub async fn serve_peers_on(listener: TcpListener, shelf: Shelf) {
    let uploads = Arc::new(Semaphore::new(UPLOADS));
    // An answer's head and the end of a body should not wait for each other.
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
    let until = Instant::now() + if is_head { WAIT_FOR_AN_ARCHIVE } else { Duration::ZERO };
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
        match timeout(WAIT_FOR_AN_UPLOAD, uploads.acquire_owned()).await {
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
            // As long as the body lives, the upload lasts.
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

/// The archive and its length, where it is here or comes in time; None where it comes later.
async fn find(name: &str, shelf: &Shelf, until: Instant) -> io::Result<Option<(File, u64)>> {
    let mut changes = shelf.0.subscribe();
    loop {
        // Marked as seen before it is looked for: what comes from here on is heard.
        let wares = changes.borrow_and_update().clone();
        match wares.open(name).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound && wares.are_coming => {}
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

/// The bytes `from..to` that are asked for, of `length`; `None` where there are none of them. A wish that is more than one
/// plain range may be ignored (RFC 9110, 14.2), and then all is sent.
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
    fn a_range_is_what_rfc_9110_says() {
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
