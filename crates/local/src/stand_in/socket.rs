//! The broker's end of its local socket (RFC 3). It gives configured answers.

use std::{
    collections::HashMap,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{broadcast, mpsc, oneshot},
    task::JoinSet,
};

use broker::message::{ENODATA, PREAMBLE, frame, frame_length, parts, push_part};

/// The errno for an unknown attribute.
const ENOENT: u32 = 2;
/// The errno for an unknown service.
const ENOSYS: u32 = 38;

/// How a service answers a request.
#[derive(Clone)]
pub enum Service {
    /// With this payload.
    Says(Value),
    /// With an error: errno and text.
    Refuses(u32, &'static str),
    /// Not at all.
    Silent,
    /// With these raw bytes.
    Raw(Vec<u8>),
    /// With what the receiver of the request replies. A request that the receiver drops is never answered.
    Hands(mpsc::UnboundedSender<Asked>),
}

/// A request that was handed to a receiver.
#[derive(Debug)]
pub struct Asked {
    /// The topic: service and method.
    pub topic: String,
    /// `Null` if there is none.
    pub payload: Value,
    /// Sends the answer.
    pub reply: oneshot::Sender<Value>,
}

#[derive(Default)]
struct Answers {
    services: HashMap<String, Service>,
    attributes: HashMap<String, String>,
}

type Shared = Arc<Mutex<Answers>>;
/// A topic, and the next answer to its open streams, or the errno that ends them.
type News = (String, Result<Value, u32>);

/// A listening socket. Dropping it closes it and all its connections.
pub struct Socket {
    path: PathBuf,
    answers: Shared,
    news: broadcast::Sender<News>,
    tasks: tokio::task::JoinHandle<()>,
}

impl Socket {
    /// Listens at `path`, accessible for this user and root. Services are added with [`Self::on`].
    ///
    /// # Errors
    /// The socket can't be created there.
    pub fn listen(path: &Path) -> std::io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let answers = Shared::default();
        let news = broadcast::channel(64).0;
        let tasks = tokio::spawn(serve(listener, answers.clone(), news.clone()));
        Ok(Self { path: path.to_owned(), answers, news, tasks })
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets how a service answers from now on.
    pub fn on(&self, topic: &str, service: Service) {
        lock(&self.answers).services.insert(topic.to_owned(), service);
    }

    /// Sets an attribute (flux-broker-attributes(7)).
    pub fn attribute(&self, name: &str, value: &str) {
        lock(&self.answers).attributes.insert(name.to_owned(), value.to_owned());
    }

    /// Sends another answer to every open stream on `topic`.
    pub fn tell(&self, topic: &str, value: Value) {
        // Fails if no client is connected.
        let _ = self.news.send((topic.to_owned(), Ok(value)));
    }

    /// Ends every open stream on `topic`.
    pub fn end(&self, topic: &str) {
        let _ = self.news.send((topic.to_owned(), Err(ENODATA)));
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.tasks.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn lock(answers: &Shared) -> MutexGuard<'_, Answers> {
    answers.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: UnixListener, answers: Shared, news: broadcast::Sender<News>) {
    // Dropping the set aborts its connections.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(connection(stream, answers.clone(), news.subscribe()));
    }
}

/// Serves one client until it disconnects or sends something that is not a request.
async fn connection(stream: UnixStream, answers: Shared, mut news: broadcast::Receiver<News>) -> Option<()> {
    let (mut reader, mut writer) = stream.into_split();
    let (send, mut requests) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Some(request) = read(&mut reader).await {
            let _ = send.send(request);
        }
    });
    // Tells the client that its user is accepted.
    writer.write_all(&[0]).await.ok()?;
    let mut streams: Vec<(String, [u8; 4])> = Vec::new();
    loop {
        let frames: Vec<Vec<u8>> = tokio::select! {
            request = requests.recv() => {
                let request = request?;
                if request.streaming {
                    streams.push((request.topic.clone(), request.tag));
                }
                answer(&answers, request).await.into_iter().collect()
            }
            broadcast = news.recv() => {
                let (topic, value) = broadcast.ok()?;
                let open = streams.iter().filter(|(open, _)| *open == topic);
                open.map(|(_, tag)| match &value {
                    Ok(value) => response(&topic, 0, value.to_string().as_bytes(), *tag),
                    Err(errnum) => response(&topic, *errnum, b"", *tag),
                }).collect()
            }
        };
        for frame in frames {
            writer.write_all(&frame).await.ok()?;
        }
    }
}

struct Request {
    topic: String,
    payload: Value,
    streaming: bool,
    tag: [u8; 4],
}

async fn read(reader: &mut (impl AsyncReadExt + Unpin)) -> Option<Request> {
    let mut preamble = [0; PREAMBLE];
    reader.read_exact(&mut preamble).await.ok()?;
    let mut bytes = vec![0; frame_length(preamble).ok()?];
    reader.read_exact(&mut bytes).await.ok()?;
    request(&bytes)
}

/// Parses a request of RFC 3, version 1; `None` if it isn't one.
fn request(bytes: &[u8]) -> Option<Request> {
    let parts = parts(bytes).ok()?;
    let (header, parts) = parts.split_last()?;
    let [0x8e, 1, 1, flags, .., a, b, c, d] = header else { return None };
    let [route_end, topic, rest @ ..] = parts else { return None };
    if !route_end.is_empty() {
        return None;
    }
    let payload = match rest.first() {
        Some(json) => serde_json::from_slice(json.strip_suffix(&[0])?).ok()?,
        None => Value::Null,
    };
    let topic = String::from_utf8(topic.to_vec()).ok()?;
    Some(Request { topic, payload, streaming: flags & 0x40 != 0, tag: [*a, *b, *c, *d] })
}

async fn answer(answers: &Shared, Request { topic, payload, tag, .. }: Request) -> Option<Vec<u8>> {
    if topic == "attr.get" {
        let value = payload["name"].as_str().and_then(|name| lock(answers).attributes.get(name).cloned());
        return Some(match value {
            Some(value) => response(&topic, 0, json!({"value": value, "flags": 1}).to_string().as_bytes(), tag),
            None => response(&topic, ENOENT, b"", tag),
        });
    }
    let service = lock(answers).services.get(&topic).cloned();
    match service {
        Some(Service::Says(value)) => Some(response(&topic, 0, value.to_string().as_bytes(), tag)),
        Some(Service::Refuses(errnum, text)) => Some(response(&topic, errnum, text.as_bytes(), tag)),
        Some(Service::Silent) => None,
        Some(Service::Raw(bytes)) => Some(bytes),
        Some(Service::Hands(to)) => {
            let (reply, answered) = oneshot::channel();
            to.send(Asked { topic: topic.clone(), payload, reply }).ok()?;
            let value = answered.await.ok()?;
            Some(response(&topic, 0, value.to_string().as_bytes(), tag))
        }
        None => Some(response(&topic, ENOSYS, format!("No service matching {topic} is registered").as_bytes(), tag)),
    }
}

fn response(topic: &str, errnum: u32, payload: &[u8], tag: [u8; 4]) -> Vec<u8> {
    let mut out = Vec::new();
    push_part(&mut out, b"");
    push_part(&mut out, topic.as_bytes());
    let mut flags = 0x09;
    if !payload.is_empty() {
        flags |= 0x02;
        push_part(&mut out, &[payload, &[0]].concat());
    }
    let mut header = vec![0x8e, 1, 2, flags, 0, 0, 0, 0, 0, 0, 0, 5];
    header.extend(errnum.to_be_bytes());
    header.extend(tag);
    push_part(&mut out, &header);
    frame(&out)
}
