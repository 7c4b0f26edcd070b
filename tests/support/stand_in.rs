//! A stand-in for a broker where no Flux is: it speaks the local socket's protocol and answers what it was told to.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use flux_distribute::broker::message::{ENODATA, PREAMBLE, frame, frame_length, parts, push_part};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{broadcast, mpsc},
    task::JoinSet,
};

/// What a service does with a request.
#[derive(Clone)]
pub enum Service {
    /// Answers so.
    Says(Value),
    /// Answers with an error.
    Refuses(u32, &'static str),
    /// Never answers.
    Silent,
    /// Sends these bytes in place of an answer.
    Raw(Vec<u8>),
}

#[derive(Default)]
struct Desk {
    services: HashMap<String, Service>,
    attributes: HashMap<String, String>,
}

/// A stand-in broker; it ends when it is dropped.
pub struct StandIn {
    path: PathBuf,
    desk: Arc<Mutex<Desk>>,
    news: broadcast::Sender<(String, Result<Value, u32>)>,
    tasks: tokio::task::JoinHandle<()>,
}

impl StandIn {
    /// A broker of rank 0 in a healthy instance of `names.len()` ranks, which listens at `directory`/local.
    pub fn start(directory: &Path, names: &[&str]) -> Self {
        let path = directory.join("local");
        let listener = UnixListener::bind(&path).unwrap();
        let desk = Arc::new(Mutex::new(Desk::default()));
        let news = broadcast::channel(64).0;
        let tasks = tokio::spawn(serve(listener, desk.clone(), news.clone()));
        let broker = Self { path, desk, news, tasks };
        let last = names.len().saturating_sub(1);
        let ranks = if last == 0 { "0".to_owned() } else { format!("0-{last}") };
        for (name, value) in
            [("rank", "0"), ("size", &names.len().to_string()), ("hostlist", &names.join(",")), ("hostname", names[0])]
        {
            broker.attribute(name, value);
        }
        let children: Vec<Value> =
            (1..names.len()).map(|rank| json!({"rank": rank, "status": "full", "duration": 1.0})).collect();
        let r = |ranks: &str| {
            let entries =
                if ranks.is_empty() { json!([]) } else { json!([{"rank": ranks, "children": {"core": "0-3"}}]) };
            json!({"version": 1, "execution": {"R_lite": entries, "nodelist": [""], "starttime": 0.0, "expiration": 0.0}})
        };
        broker.on("state-machine.get", Service::Says(json!({"state": "run", "duration": 1.5})));
        broker.on("state-machine.monitor", Service::Says(json!({"state": 6})));
        let health = json!({"rank": 0, "status": "full", "duration": 1.0, "children": children});
        broker.on("overlay.health", Service::Says(health));
        broker.on("groups.get", Service::Says(json!({"members": ranks})));
        let status = json!({"R": r(&ranks), "drain": {}, "online": ranks, "offline": "", "exclude": "", "torpid": ""});
        broker.on("resource.status", Service::Says(status));
        let scheduler = json!({"all": r(&ranks), "down": r(""), "allocated": r("")});
        broker.on("resource.sched-status", Service::Says(scheduler));
        broker
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.path
    }

    /// Sets what a service does from now on.
    pub fn on(&self, topic: &str, service: Service) {
        self.desk.lock().unwrap().services.insert(topic.to_owned(), service);
    }

    /// Sets an attribute.
    pub fn attribute(&self, name: &str, value: &str) {
        self.desk.lock().unwrap().attributes.insert(name.to_owned(), value.to_owned());
    }

    /// A further answer to every stream on `topic` that is open.
    pub fn tell(&self, topic: &str, value: Value) {
        self.news.send((topic.to_owned(), Ok(value))).unwrap();
    }

    /// Ends every stream on `topic` that is open.
    pub fn end(&self, topic: &str) {
        self.news.send((topic.to_owned(), Err(ENODATA))).unwrap();
    }

    /// Dies: all connections close, nobody listens.
    pub fn die(self) {}
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.tasks.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn serve(listener: UnixListener, desk: Arc<Mutex<Desk>>, news: broadcast::Sender<(String, Result<Value, u32>)>) {
    // Its connections die with it.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, desk.clone(), news.subscribe()));
    }
}

async fn connection(
    stream: UnixStream,
    desk: Arc<Mutex<Desk>>,
    mut news: broadcast::Receiver<(String, Result<Value, u32>)>,
) -> Option<()> {
    let (mut reader, mut writer) = stream.into_split();
    let (send, mut requests) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Some(request) = read(&mut reader).await {
            let _ = send.send(request);
        }
    });
    writer.write_all(&[0]).await.ok()?;
    let mut streams: Vec<(String, [u8; 4])> = Vec::new();
    loop {
        let frames: Vec<Vec<u8>> = tokio::select! {
            request = requests.recv() => {
                let Request { topic, payload, streaming, tag } = request?;
                if streaming {
                    streams.push((topic.clone(), tag));
                }
                answer(&desk.lock().unwrap(), &topic, &payload, tag).into_iter().collect()
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
    let parts = parts(&bytes).ok()?;
    let (header, parts) = parts.split_last()?;
    assert_eq!(header[..3], [0x8e, 1, 1], "not a request");
    assert!(parts[0].is_empty(), "no route delimiter");
    let payload = parts.get(2).map(|json| serde_json::from_slice(json.strip_suffix(&[0]).unwrap()).unwrap());
    Some(Request {
        topic: String::from_utf8(parts[1].to_vec()).ok()?,
        payload: payload.unwrap_or_default(),
        streaming: header[3] & 0x40 != 0,
        tag: header[16..].try_into().ok()?,
    })
}

fn answer(desk: &Desk, topic: &str, payload: &Value, tag: [u8; 4]) -> Option<Vec<u8>> {
    if topic == "attr.get" {
        let name = payload["name"].as_str().unwrap();
        return Some(match desk.attributes.get(name) {
            Some(value) => response(topic, 0, json!({"value": value, "flags": 1}).to_string().as_bytes(), tag),
            None => response(topic, 2, b"", tag),
        });
    }
    match desk.services.get(topic) {
        Some(Service::Says(value)) => Some(response(topic, 0, value.to_string().as_bytes(), tag)),
        Some(Service::Refuses(errnum, text)) => Some(response(topic, *errnum, text.as_bytes(), tag)),
        Some(Service::Silent) => None,
        Some(Service::Raw(bytes)) => Some(bytes.clone()),
        None => Some(response(topic, 38, format!("No service matching {topic} is registered").as_bytes(), tag)),
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
