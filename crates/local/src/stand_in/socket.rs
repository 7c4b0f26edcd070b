//! The broker's end of its local socket (RFC 3): answers what it was told to answer.

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

/// errno of an attribute that is not there.
const ENOENT: u32 = 2;
/// errno of a service that is not there.
const ENOSYS: u32 = 38;

/// What a service does with a request.
#[derive(Clone)]
pub enum Service {
    /// Answers so.
    Says(Value),
    /// Answers with an error: errno and its words.
    Refuses(u32, &'static str),
    /// Never answers.
    Silent,
    /// Sends these bytes in place of an answer.
    Raw(Vec<u8>),
    /// Hands the request over, and answers what comes back. Dropped requests are never answered.
    Hands(mpsc::UnboundedSender<Asked>),
}

/// A request that was handed over.
#[derive(Debug)]
pub struct Asked {
    /// Service and method.
    pub topic: String,
    /// `Null` for none.
    pub payload: Value,
    /// Takes the answer.
    pub reply: oneshot::Sender<Value>,
}

#[derive(Default)]
struct Desk {
    services: HashMap<String, Service>,
    attributes: HashMap<String, String>,
}

type Shared = Arc<Mutex<Desk>>;
/// A topic, and the next answer to its streams or the errno that ends them.
type News = (String, Result<Value, u32>);

/// A socket that answers; closed with all its connections when it is dropped.
pub struct Socket {
    path: PathBuf,
    desk: Shared,
    news: broadcast::Sender<News>,
    tasks: tokio::task::JoinHandle<()>,
}

impl Socket {
    /// Listens at `path`, for this user and root. It knows no service yet.
    ///
    /// # Errors
    /// The socket can't be made there.
    pub fn listen(path: &Path) -> std::io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let desk = Shared::default();
        let news = broadcast::channel(64).0;
        let tasks = tokio::spawn(serve(listener, desk.clone(), news.clone()));
        Ok(Self { path: path.to_owned(), desk, news, tasks })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets what a service does from now on.
    pub fn on(&self, topic: &str, service: Service) {
        lock(&self.desk).services.insert(topic.to_owned(), service);
    }

    /// Sets an attribute (flux-broker-attributes(7)).
    pub fn attribute(&self, name: &str, value: &str) {
        lock(&self.desk).attributes.insert(name.to_owned(), value.to_owned());
    }

    /// A further answer to every stream on `topic` that is open.
    pub fn tell(&self, topic: &str, value: Value) {
        // Nobody may be connected.
        let _ = self.news.send((topic.to_owned(), Ok(value)));
    }

    /// Ends every stream on `topic` that is open.
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

fn lock(desk: &Shared) -> MutexGuard<'_, Desk> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: UnixListener, desk: Shared, news: broadcast::Sender<News>) {
    // Its connections die with it.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(connection(stream, desk.clone(), news.subscribe()));
    }
}

/// Until the client closes it, or sends what is no request.
async fn connection(stream: UnixStream, desk: Shared, mut news: broadcast::Receiver<News>) -> Option<()> {
    let (mut reader, mut writer) = stream.into_split();
    let (send, mut requests) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Some(request) = read(&mut reader).await {
            let _ = send.send(request);
        }
    });
    // This user is welcome.
    writer.write_all(&[0]).await.ok()?;
    let mut streams: Vec<(String, [u8; 4])> = Vec::new();
    loop {
        let frames: Vec<Vec<u8>> = tokio::select! {
            request = requests.recv() => {
                let request = request?;
                if request.streaming {
                    streams.push((request.topic.clone(), request.tag));
                }
                answer(&desk, request).await.into_iter().collect()
            }
            told = news.recv() => {
                let (topic, value) = told.ok()?;
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

/// None: no request of RFC 3's version 1.
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

async fn answer(desk: &Shared, Request { topic, payload, tag, .. }: Request) -> Option<Vec<u8>> {
    if topic == "attr.get" {
        let value = payload["name"].as_str().and_then(|name| lock(desk).attributes.get(name).cloned());
        return Some(match value {
            Some(value) => response(&topic, 0, json!({"value": value, "flags": 1}).to_string().as_bytes(), tag),
            None => response(&topic, ENOENT, b"", tag),
        });
    }
    let service = lock(desk).services.get(&topic).cloned();
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
