//! The stand-in's broker: accepts the command line and configuration of Flux's broker, and answers on the same socket.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use super::{
    overlay::{self, Event},
    socket::{Asked, Service, Socket},
};
use crate::error::{Context, LocalError};
use api::{IdSet, STAND_IN};
use model::hostlist;

/// The errno for requests that only the lead answers.
const ENOSYS: u32 = 38;
/// The requests that the lead executes; all others are answered from known state.
pub const ORDERS: [&str; 5] = ["config.load", "resource.drain", "resource.undrain", "module.load", "module.remove"];

/// The options of a broker's command line that matter here.
struct CommandLine {
    config: PathBuf,
    name: String,
    socket: PathBuf,
}

impl CommandLine {
    fn parse(words: &[String]) -> Result<Self, LocalError> {
        let value = |option: &str| {
            let found = words.iter().find_map(|word| word.strip_prefix(option)?.strip_prefix('='));
            found.map(str::to_owned).ok_or_else(|| LocalError::Usage(format!("{STAND_IN}: {option} is missing")))
        };
        Ok(Self {
            config: value("--config-path")?.into(),
            name: value("-Shostname")?,
            socket: value("-Slocal-uri")?.trim_start_matches("local://").into(),
        })
    }
}

/// The parts of broker.toml that matter here.
#[derive(Deserialize)]
pub struct Config {
    bootstrap: Bootstrap,
    #[serde(default)]
    resource: Resources,
}

#[derive(Deserialize)]
struct Bootstrap {
    hosts: Vec<Host>,
}

#[derive(Deserialize)]
struct Host {
    host: String,
    connect: Option<String>,
}

#[derive(Deserialize, Default)]
struct Resources {
    #[serde(default)]
    config: Vec<Kind>,
    #[serde(default)]
    exclude: IdSet,
}

#[derive(Deserialize)]
struct Kind {
    hosts: String,
    #[serde(default)]
    cores: IdSet,
}

impl Config {
    /// Reads the `text` of a broker.toml.
    ///
    /// # Errors
    /// It is not one that an agent writes.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    fn read(path: &Path) -> Result<Self, LocalError> {
        let failed = || format!("can't read {}", path.display());
        Self::parse(&std::fs::read_to_string(path).context(failed)?).context(failed)
    }

    /// Broker names by rank.
    fn names(&self) -> Vec<String> {
        let entries = self.bootstrap.hosts.iter().filter(|host| host.connect.is_none());
        entries.flat_map(|host| hostlist::decode(&host.host)).collect()
    }

    /// The address on which the lead listens. All followers connect to the lead, whatever the topology.
    fn lead(&self, names: &[String]) -> Option<SocketAddr> {
        let lead = self.bootstrap.hosts.iter().find(|host| Some(&host.host) == names.first() && host.connect.is_some());
        lead?.connect.as_ref()?.strip_prefix("tcp://")?.parse().ok()
    }
}

/// A broker's state, and its view of the instance.
pub struct Broker {
    rank: u32,
    names: Vec<String>,
    /// Lead only: the names under which the ranks are declared.
    declared: Vec<String>,
    state: &'static str,
    since: Instant,
    /// `None` if the lead doesn't answer.
    online: Option<IdSet>,
    /// Lead only: the cores of each rank. `excluded` and `drained` (with the reason) get no jobs.
    cores: BTreeMap<u32, IdSet>,
    excluded: IdSet,
    drained: BTreeMap<u32, String>,
    /// The state and the online ranks last sent to subscribers.
    announced: Option<(&'static str, Option<IdSet>)>,
}

/// Runs until SIGTERM or until the lead ends the instance.
///
/// # Errors
/// The command line or the configuration is not one that an agent writes; the socket or the port is unavailable.
pub(super) async fn run(words: &[String]) -> Result<ExitCode, LocalError> {
    let failed = || "can't handle signals".to_owned();
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate()).context(failed)?, signal(SignalKind::interrupt()).context(failed)?);
    let line = CommandLine::parse(words)?;
    let config = Config::read(&line.config)?;
    let names = config.names();
    let wrong = |what: &str| LocalError::Usage(format!("{STAND_IN}: {}: {what}", line.config.display()));
    let rank = names.iter().position(|name| *name == line.name).and_then(|rank| u32::try_from(rank).ok());
    let rank = rank.ok_or_else(|| wrong(&format!("it has no broker {}", line.name)))?;
    // A name that differs from that of Flux's brokers.
    let _ = std::fs::write("/proc/self/comm", format!("no-flux-{rank}"));
    let path = line.socket;
    // A killed broker may have left its socket.
    let _ = std::fs::remove_file(&path);
    let socket = Socket::listen(&path).context(|| format!("can't listen at {}", path.display()))?;

    let (events, mut heard) = mpsc::unbounded_channel();
    let (online, mut members) = watch::channel(Some(IdSet::from_iter([0])));
    let lead = config.lead(&names);
    let links = match (rank, lead) {
        // An instance with one rank has no overlay.
        (0, None) if names.len() == 1 => None,
        (_, None) => return Err(wrong("it does not contain the lead's address")),
        (0, Some(address)) => {
            let listener = TcpListener::bind(address).await.context(|| format!("can't listen at {address}"))?;
            let start =
                u64::from(std::process::id()) ^ std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs() << 32);
            Some(tokio::spawn(overlay::lead(listener, names.clone(), start, online.clone())))
        }
        (_, Some(address)) => Some(tokio::spawn(overlay::follow(address, rank, line.name.clone(), events))),
    };
    let (orders, mut asked) = mpsc::unbounded_channel();
    let mut broker = Broker::new(rank, config);
    if rank == 0 {
        ORDERS.iter().for_each(|topic| socket.on(topic, Service::Hands(orders.clone())));
    }
    tracing::info!(rank, "{STAND_IN}");
    loop {
        broker.publish(&socket, &line.name);
        tokio::select! {
            Ok(()) = members.changed() => broker.online.clone_from(&members.borrow_and_update()),
            Some(Asked { topic, payload, reply }) = asked.recv() => {
                broker.execute(&topic, &payload);
                // Publish before replying, so that the client's next request sees the change.
                broker.publish(&socket, &line.name);
                let _ = reply.send(json!({}));
            }
            Some(event) = heard.recv() => match event {
                Event::Joined => broker.enter("run"),
                Event::Online(online) => broker.set_online(online),
                Event::Lost => broker.online = None,
                Event::End(code, reason) => {
                    tracing::warn!("{reason}");
                    return Ok(ExitCode::from(code));
                }
            },
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    broker.enter("cleanup");
    broker.publish(&socket, &line.name);
    let _ = online.send(None);
    match links {
        // Let the followers receive the end of the instance.
        Some(links) if rank == 0 => drop(links.await),
        Some(links) => links.abort(),
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

impl Broker {
    /// The broker of `rank`, as it starts. The lead needs no other to run.
    pub fn new(rank: u32, config: Config) -> Self {
        let names = config.names();
        let mut broker = Self {
            rank,
            state: if rank == 0 { "run" } else { "join" },
            since: Instant::now(),
            online: (rank == 0).then(|| IdSet::from_iter([0])),
            cores: BTreeMap::new(),
            excluded: IdSet::default(),
            drained: BTreeMap::new(),
            announced: None,
            declared: names.clone(),
            names,
        };
        broker.set_resources(config.resource);
        broker
    }

    /// The lead answers, and these ranks are online.
    pub fn set_online(&mut self, online: IdSet) {
        self.online = Some(online);
    }

    fn enter(&mut self, state: &'static str) {
        if self.state != state {
            (self.state, self.since) = (state, Instant::now());
        }
    }

    /// Loads a new configuration. As in Flux, ranks follow the brokers' names if there is a `[bootstrap]` table, else
    /// their order.
    fn load(&mut self, resource: Resources, has_bootstrap: bool) {
        self.declared = match has_bootstrap {
            true => self.names.clone(),
            false => resource.config.iter().flat_map(|kind| hostlist::decode(&kind.hosts)).collect(),
        };
        self.set_resources(resource);
    }

    fn set_resources(&mut self, resource: Resources) {
        let ranks: BTreeMap<&str, u32> =
            self.declared.iter().zip(0..).map(|(name, rank)| (name.as_str(), rank)).collect();
        let of = |kind: &Kind| {
            let ranks = hostlist::decode(&kind.hosts).into_iter().filter_map(|host| ranks.get(host.as_str()).copied());
            ranks.map(|rank| (rank, kind.cores.clone())).collect::<Vec<_>>()
        };
        self.cores = resource.config.iter().flat_map(of).collect();
        self.excluded = resource.exclude;
    }

    /// Executes one of [`ORDERS`]. Ignores what it doesn't understand.
    pub fn execute(&mut self, topic: &str, payload: &Value) {
        let targets = || payload["targets"].as_str()?.parse::<IdSet>().ok();
        match topic {
            "resource.drain" => {
                let reason = payload["reason"].as_str().unwrap_or_default();
                let is_kept = payload["mode"] == "update";
                for rank in targets().unwrap_or_default().0 {
                    let before = self.drained.remove(&rank).filter(|_| is_kept);
                    self.drained.insert(rank, before.unwrap_or_else(|| reason.to_owned()));
                }
            }
            "resource.undrain" => {
                let ranks = targets().unwrap_or_default();
                self.drained.retain(|rank, _| !ranks.contains(*rank));
            }
            "config.load" => match Resources::deserialize(&payload["resource"]) {
                Ok(resource) => self.load(resource, payload.get("bootstrap").is_some()),
                Err(error) => tracing::warn!(%error, "can't read the new configuration; the old one stays"),
            },
            _ => {}
        }
    }

    /// Updates the socket's answers to the current state.
    pub fn publish(&mut self, socket: &Socket, name: &str) {
        let size = self.names.len();
        for (attribute, value) in [
            ("version", STAND_IN),
            ("rank", &self.rank.to_string()),
            ("size", &size.to_string()),
            ("hostlist", &hostlist::encode(&self.names)),
            ("hostname", name),
        ] {
            socket.attribute(attribute, value);
        }
        let secs = self.since.elapsed().as_secs_f64();
        let is_news =
            self.announced.replace((self.state, self.online.clone())) != Some((self.state, self.online.clone()));
        socket.on("state-machine.get", Service::Says(json!({"state": self.state, "duration": secs})));
        // Subscribers only take the event as a hint to request the state's name.
        socket.on("state-machine.monitor", Service::Says(json!({"state": 0})));
        if is_news {
            socket.tell("state-machine.monitor", json!({"state": 0}));
        }
        socket.on("overlay.health", Service::Says(self.health(secs)));
        let Some(online) = &self.online else {
            // Without the lead, these requests get no answer.
            socket.on("groups.get", Service::Silent);
            return;
        };
        let members = json!({"members": online.to_string()});
        socket.on("groups.get", Service::Says(members.clone()));
        if is_news {
            socket.tell("groups.get", members);
        }
        let lead_only = |value: Value| match self.rank {
            0 => Service::Says(value),
            _ => Service::Refuses(ENOSYS, "only the lead answers this"),
        };
        let offline: IdSet =
            (0..u32::try_from(size).unwrap_or(u32::MAX)).filter(|rank| !online.contains(*rank)).collect();
        let drain: BTreeMap<String, Value> = (self.drained.iter())
            .map(|(rank, reason)| (rank.to_string(), json!({"timestamp": 0.0, "reason": reason})))
            .collect();
        socket.on(
            "resource.status",
            lead_only(json!({
                "R": self.r(|_| true), "drain": drain, "online": online.to_string(), "offline": offline.to_string(),
                "exclude": self.excluded.to_string(), "torpid": "",
            })),
        );
        let is_down = |rank: u32| offline.contains(rank) || self.drained.contains_key(&rank);
        socket.on(
            "resource.sched-status",
            lead_only(json!({"all": self.r(|_| true), "down": self.r(is_down), "allocated": self.r(|_| false)})),
        );
        let modules = ["resource", "sched-simple"].map(|name| json!({"name": name}));
        socket.on("module.list", lead_only(json!({"mods": modules})));
        socket.on("sched-simple.ping", lead_only(json!({})));
        socket.on("job-list.list", lead_only(json!({"jobs": []})));
        socket.on("job-manager.resource-status", lead_only(json!({"allocated": self.r(|_| false)})));
        socket.on("job-manager.queue-list", lead_only(json!({"queues": []})));
        socket.on("job-manager.queue-status", lead_only(json!({"enable": true, "start": true})));
        // An empty backlog: this marks its end.
        socket.on("job-manager.events-journal", lead_only(json!({"id": -1, "events": []})));
    }

    fn health(&self, secs: f64) -> Value {
        let is_online = |rank: u32| self.online.as_ref().is_some_and(|online| online.contains(rank));
        let below = if self.rank == 0 { 1..u32::try_from(self.names.len()).unwrap_or(u32::MAX) } else { 0..0 };
        let status = |is_full| if is_full { "full" } else { "partial" };
        let all = below.clone().all(is_online);
        let child = |rank| {
            let status = if is_online(rank) { "full" } else { "offline" };
            json!({"rank": rank, "status": status, "duration": secs})
        };
        let children: Vec<Value> = below.map(child).collect();
        json!({"rank": self.rank, "status": status(all), "duration": secs, "children": children})
    }

    /// R (RFC 20) of the ranks for which `wanted` is true.
    fn r(&self, wanted: impl Fn(u32) -> bool) -> Value {
        let entries = self.cores.iter().filter(|(rank, _)| wanted(**rank) && !self.excluded.contains(**rank));
        let entries =
            entries.map(|(rank, cores)| json!({"rank": rank.to_string(), "children": {"core": cores.to_string()}}));
        let entries: Vec<Value> = entries.collect();
        let names = (0..).zip(&self.declared).filter(|(rank, _)| self.cores.contains_key(rank) && wanted(*rank));
        let names = hostlist::encode(names.map(|(_, name)| name));
        json!({
            "version": 1,
            "execution": {"R_lite": entries, "nodelist": [names], "starttime": 0.0, "expiration": 0.0},
        })
    }
}
