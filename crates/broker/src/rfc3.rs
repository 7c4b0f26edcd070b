//! A client for a broker's local socket (RFC 3, RFC 6).
//!
//! Any number of calls can be pending on one connection: one task writes, another reads and passes each response to the
//! caller with its matchtag. If the socket closes, the broker has ended, and all pending calls fail.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::Stream;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{broadcast, mpsc, watch},
    task::JoinHandle,
    time::{timeout, timeout_at},
};

use super::message::{
    ANY, DecodeError, ENODATA, MAX_FRAME, Message, NO_RESPONSE, PREAMBLE, Request, frame_length, would_take_too_much,
};
use host::trust::own_uid;

/// A broker answers within milliseconds; a request to a lead that is gone is never answered.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a broker did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// No broker listens.
    #[error("no broker answers at {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another user owns the broker, so it refuses ours.
    #[error("the broker at {} refuses this user (error {errnum})", path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
        /// The error number.
        errnum: u8,
    },
    /// The service returned an error.
    #[error("{topic}: {text}")]
    Service {
        /// Service and method.
        topic: String,
        /// The error number.
        errnum: u32,
        /// The service's message, or the description of the error number.
        text: String,
    },
    /// There was no answer within the time limit.
    #[error("{topic}: no answer within {seconds} s")]
    Timeout {
        /// Service and method.
        topic: String,
        /// The time limit.
        seconds: u64,
    },
    /// The broker closed the socket.
    #[error("the broker has closed the connection")]
    Closed,
    /// The bytes do not follow RFC 3.
    #[error("the broker's answer does not follow RFC 3")]
    Malformed(#[from] DecodeError),
    /// The broker has more queues than this program asks about.
    #[error("the broker names {0} queues, too many to ask about: remove some from its configuration")]
    TooManyQueues(usize),
    /// The payload is not the expected JSON.
    #[error("{topic}: the answer is not the expected JSON")]
    Payload {
        /// Service and method.
        topic: String,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
}

impl RpcError {
    /// True if a service answered with this error number.
    pub fn is(&self, errno: u32) -> bool {
        matches!(self, Self::Service { errnum, .. } if *errnum == errno)
    }
}

type Answers = mpsc::UnboundedSender<Message>;

/// Most bytes of answers that one connection holds for its callers. The brokers' user can put another program behind the socket, and its
/// answers must not exhaust the agent's memory. An honest broker sends a few kilobytes for each job at the beginning of a journal.
const MOST_QUEUED: usize = 8 * MAX_FRAME;

#[derive(Default)]
struct Waiting {
    last_tag: u32,
    by_tag: HashMap<u32, Answers>,
    /// Bytes of the messages in all of `by_tag`.
    queued: usize,
    closed: bool,
}

/// A connection to a broker.
#[derive(Debug)]
pub struct Client {
    outgoing: mpsc::UnboundedSender<Vec<u8>>,
    shared: Shared,
    gone: watch::Receiver<bool>,
    peer_pid: Option<i32>,
    uid: u32,
    /// Sends the topics of incoming events.
    events: broadcast::Sender<String>,
    reader: JoinHandle<()>,
}

/// Number of events that a receiver may lag behind; it misses older ones. That is harmless: the next event makes
/// up for them.
const EVENTS: usize = 16;

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Waiting>>);

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} calls under way", self.lock().by_tag.len())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No panic can leave the map inconsistent, so a poisoned lock is fine.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes an answer to the call that waits for it. False if the callers have more than [`MOST_QUEUED`] to take.
    fn pass(&self, message: Message) -> bool {
        let mut waiting = self.lock();
        let Some(answers) = waiting.by_tag.get(&message.matchtag).cloned() else { return true };
        if waiting.queued + message.size() > MOST_QUEUED {
            return false;
        }
        waiting.queued += message.size();
        let _ = answers.send(message);
        true
    }

    fn expect(&self) -> Result<Call, RpcError> {
        let (sender, answers) = mpsc::unbounded_channel();
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(RpcError::Closed);
        }
        let mut tag = waiting.last_tag;
        loop {
            tag = tag.wrapping_add(1).max(NO_RESPONSE + 1);
            if !waiting.by_tag.contains_key(&tag) {
                break;
            }
        }
        waiting.last_tag = tag;
        waiting.by_tag.insert(tag, sender);
        Ok(Call { tag, answers, shared: self.clone() })
    }
}

/// A pending call; dropping it cancels it.
struct Call {
    tag: u32,
    answers: mpsc::UnboundedReceiver<Message>,
    shared: Shared,
}

impl Call {
    /// The next answer; None if the connection has ended.
    async fn next(&mut self) -> Option<Message> {
        let message = self.answers.recv().await?;
        self.shared.lock().queued -= message.size();
        Some(message)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut waiting = self.shared.lock();
        // Nothing more comes after this.
        waiting.by_tag.remove(&self.tag);
        while let Ok(message) = self.answers.try_recv() {
            waiting.queued -= message.size();
        }
    }
}

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`RpcError::Connect`] if no broker listens, [`RpcError::Denied`] if it serves another user.
    pub async fn connect(path: &Path) -> Result<Self, RpcError> {
        let failed = |source| RpcError::Connect { path: path.to_owned(), source };
        let uid = own_uid();
        let open = async {
            let mut stream = UnixStream::connect(path).await?;
            let accepted = stream.read_u8().await?;
            Ok((stream, accepted))
        };
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        let (stream, errnum) = timeout(TIMEOUT, open).await.map_err(|_| failed(late()))?.map_err(failed)?;
        if errnum != 0 {
            return Err(RpcError::Denied { path: path.to_owned(), errnum });
        }
        let peer_pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
        let (reader, writer) = stream.into_split();
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let (tell_gone, gone) = watch::channel(false);
        let shared = Shared::default();
        // Ends when `outgoing` is dropped.
        tokio::spawn(write_all(writer, incoming));
        let events = broadcast::channel(EVENTS).0;
        let reader = tokio::spawn({
            let (shared, events) = (shared.clone(), events.clone());
            async move {
                read_all(reader, &shared, &events).await;
                let mut waiting = shared.lock();
                waiting.closed = true;
                waiting.by_tag.clear();
                drop(waiting);
                let _ = tell_gone.send(true);
            }
        });
        Ok(Self { outgoing, shared, gone, peer_pid, uid, events, reader })
    }

    /// Pid of the process that listens at the path, from the kernel.
    pub fn peer_pid(&self) -> Option<i32> {
        self.peer_pid
    }

    /// The user as which the broker sees this connection (`SO_PEERCRED`): the effective one of this process when it
    /// connected.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// One request, one response, within [`TIMEOUT`]. `nodeid` is a rank, [`super::message::ANY`] or
    /// [`super::message::LEAD`].
    ///
    /// # Errors
    /// [`RpcError`].
    pub async fn rpc(&self, topic: &str, nodeid: u32, payload: Value) -> Result<Value, RpcError> {
        self.rpc_within(TIMEOUT, topic, nodeid, payload).await
    }

    /// Like [`Client::rpc`], with another time limit.
    ///
    /// # Errors
    /// [`RpcError`].
    pub async fn rpc_within(
        &self,
        limit: Duration,
        topic: &str,
        nodeid: u32,
        payload: Value,
    ) -> Result<Value, RpcError> {
        let deadline = tokio::time::Instant::now() + limit;
        let mut call = self.send(topic, nodeid, &payload, false)?;
        match timeout_at(deadline, call.next()).await {
            Err(_) => Err(RpcError::Timeout { topic: topic.to_owned(), seconds: limit.as_secs() }),
            Ok(None) => Err(RpcError::Closed),
            Ok(Some(message)) => value_of(message),
        }
    }

    /// Sends one request, and returns its responses until the service ends them (which is no error), an error, or the
    /// end of the broker ([`RpcError::Closed`]).
    ///
    /// # Errors
    /// [`RpcError::Closed`] if the broker has ended already.
    pub fn stream(
        &self,
        topic: &str,
        nodeid: u32,
        payload: &Value,
    ) -> Result<impl Stream<Item = Result<Value, RpcError>> + Send + Unpin + use<>, RpcError> {
        let call = self.send(topic, nodeid, payload, true)?;
        Ok(Box::pin(futures::stream::unfold(Some(call), |call| async move {
            let mut call = call?;
            match call.next().await {
                None => Some((Err(RpcError::Closed), None)),
                Some(message) if message.errnum == ENODATA => None,
                Some(message) => match value_of(message) {
                    Ok(value) => Some((Ok(value), Some(call))),
                    Err(error) => Some((Err(error), None)),
                },
            }
        })))
    }

    /// Sends a request without response. A service gets it before any later request of this connection.
    ///
    /// # Errors
    /// [`RpcError::Closed`].
    pub fn notify(&self, topic: &str, nodeid: u32, payload: &Value) -> Result<(), RpcError> {
        let request = Request { topic, nodeid, matchtag: NO_RESPONSE, streaming: false, payload };
        self.outgoing.send(request.encode()).map_err(|_| RpcError::Closed)
    }

    /// Subscribes to the events whose topic begins with `topic` (RFC 3). Returns their topics, and those of earlier
    /// subscriptions.
    ///
    /// # Errors
    /// [`RpcError`].
    pub async fn subscribe(&self, topic: &str) -> Result<broadcast::Receiver<String>, RpcError> {
        let events = self.events.subscribe();
        self.rpc("event.subscribe", ANY, json!({ "topic": topic })).await?;
        Ok(events)
    }

    /// Waits until the broker has closed the connection.
    pub async fn closed(&self) {
        let mut gone = self.gone.clone();
        // An error means that the reader has ended, which is the same.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    fn send(&self, topic: &str, nodeid: u32, payload: &Value, streaming: bool) -> Result<Call, RpcError> {
        let call = self.shared.expect()?;
        let request = Request { topic, nodeid, matchtag: call.tag, streaming, payload };
        self.outgoing.send(request.encode()).map_err(|_| RpcError::Closed)?;
        Ok(call)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Writes in a task of its own, so that a cancelled caller never leaves half a frame behind.
async fn write_all(mut writer: OwnedWriteHalf, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        if writer.write_all(&frame).await.is_err() {
            // The reader notices the end too, and fails all pending calls.
            return;
        }
    }
}

async fn read_all(mut reader: OwnedReadHalf, shared: &Shared, events: &broadcast::Sender<String>) {
    loop {
        let message = match read_message(&mut reader).await {
            Ok(message) => message,
            Err(RpcError::Malformed(error)) => {
                tracing::warn!(%error, "closing the connection to the broker");
                return;
            }
            Err(_) => return,
        };
        if !message.is_response {
            // Fails if there is no receiver, which is fine.
            let _ = events.send(message.topic);
        } else if !shared.pass(message) {
            tracing::warn!("closing the connection to the broker, which answers more than was asked");
            return;
        }
    }
}

async fn read_message(reader: &mut OwnedReadHalf) -> Result<Message, RpcError> {
    let closed = |_| RpcError::Closed;
    let mut preamble = [0; PREAMBLE];
    reader.read_exact(&mut preamble).await.map_err(closed)?;
    let length = frame_length(preamble)?;
    // The buffer grows with the data received, not with the length that the preamble claims.
    let mut bytes = Vec::new();
    reader.take(length as u64).read_to_end(&mut bytes).await.map_err(closed)?;
    if bytes.len() < length {
        return Err(RpcError::Closed);
    }
    Ok(Message::decode(&bytes)?)
}

fn value_of(message: Message) -> Result<Value, RpcError> {
    let Message { topic, errnum, payload, .. } = message;
    match (errnum, payload) {
        (0, None) => Ok(Value::Null),
        (0, Some(json)) if would_take_too_much(&json) => Err(DecodeError::TooMuchMemory.into()),
        (0, Some(json)) => serde_json::from_slice(&json).map_err(|source| RpcError::Payload { topic, source }),
        (errnum, payload) => {
            let words = payload.map(|text| String::from_utf8_lossy(&text).into_owned()).filter(|text| !text.is_empty());
            let errno = || io::Error::from_raw_os_error(errnum.cast_signed()).to_string();
            Err(RpcError::Service { topic, errnum, text: words.unwrap_or_else(errno) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_that_nobody_takes_are_not_kept_without_end() {
        let shared = Shared::default();
        let mut call = shared.expect().unwrap();
        let answer = |size: usize| Message {
            is_response: true,
            matchtag: call.tag,
            errnum: 0,
            topic: String::new(),
            payload: Some(vec![0; size]),
        };
        let (half, empty) = (answer(MOST_QUEUED / 2 - size_of::<Message>()), answer(0));
        assert!(shared.pass(half.clone()) && shared.pass(half.clone()) && !shared.pass(empty.clone()));
        // What has been taken makes room.
        call.next().await.unwrap();
        assert!(shared.pass(empty));
        drop(call);
        assert_eq!(shared.lock().queued, 0);
        assert!(shared.pass(half), "for a call that is over, nothing is kept");
        assert_eq!(shared.lock().queued, 0);
    }
}
