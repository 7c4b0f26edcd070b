//! Hosts and Flux, as far as agents see them.

use std::{
    fs::OpenOptions,
    future::pending,
    io,
    os::{fd::OwnedFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use api::{FluxInstanceSpec, IdSet, Resources, Uninstall};
use futures::future::BoxFuture;
use hostapi::{
    Answer, Collected, Host, HostError, HostState, HostView, LaunchRecord, Linked, Order, Preflight, Progress, Ran,
    Refusal, RosterCopy, RunningBroker, Verified,
};
use local::stand_in::{Asked, Broker, Config, ORDERS, Service, Socket};
use nix::libc;
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};

use super::objects::{self, CORES};

/// Nothing can be made there, so agents leave the machine that they are played on as it is.
const PREFIX: &str = "/proc/flux-distribute";

/// A round that begins this long after the one before may have begun only because the agent has rested: for 10 s or 30 s (`RESYNC` and `CALM` in
/// crate `agent`); a timer may be 10 ms early.
const LONG_REST: Duration = Duration::from_millis(9990);

/// What all hosts share: the brokers' overlay.
pub struct PlayedFlux {
    /// Where the sockets are.
    directory: PathBuf,
    instance_uid: String,
    digest: String,
    online: watch::Sender<IdSet>,
    /// The roster in the files of a host. Those of hosts that were configured by the same one are one in memory.
    copies: Mutex<Vec<RosterCopy>>,
}

impl PlayedFlux {
    /// Sockets are made in `directory`. All hosts are claimed for the FluxInstance of this uid.
    pub fn new(directory: &Path, instance_uid: &str) -> Self {
        let spec: FluxInstanceSpec = serde_json::from_value(objects::spec(1)).unwrap();
        let digest = api::PackageSet::Bundle(spec.packages.bundle.unwrap()).digest();
        let online = watch::Sender::default();
        let (directory, copies) = (directory.to_owned(), Mutex::default());
        Self { directory, instance_uid: instance_uid.to_owned(), digest, online, copies }
    }

    fn copy(&self, text: String) -> RosterCopy {
        let (copy, mut copies) = (RosterCopy::from(text), self.copies.lock().unwrap());
        if let Some(known) = copies.iter().find(|known| **known == copy) {
            return known.clone();
        }
        copies.push(copy.clone());
        copy
    }
}

/// The host of one node.
pub struct PlayedHost {
    number: u32,
    flux: Arc<PlayedFlux>,
    observations: AtomicU64,
    /// When it was observed last, and how often ten seconds or more had passed since the observation before.
    seen: Mutex<(Option<Instant>, u64)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The broker, and what answers at its socket until it is dropped.
    broker: Option<(RunningBroker, JoinSet<()>)>,
    /// Lead only: the file.
    broker_toml: String,
    roster: Option<RosterCopy>,
    applied: Option<String>,
}

impl PlayedHost {
    /// The host of node `number`.
    pub fn new(number: u32, flux: Arc<PlayedFlux>) -> Self {
        Self { number, flux, observations: AtomicU64::new(0), seen: Mutex::default(), state: Mutex::default() }
    }

    /// How often it was observed.
    pub fn observations(&self) -> u64 {
        self.observations.load(Ordering::Relaxed)
    }

    /// How often it was observed ten seconds and more after the time before.
    pub fn resyncs(&self) -> u64 {
        self.seen.lock().unwrap().1
    }

    fn see(&self) {
        self.observations.fetch_add(1, Ordering::Relaxed);
        let (last, resyncs) = &mut *self.seen.lock().unwrap();
        let before = last.replace(Instant::now());
        *resyncs += u64::from(before.is_some_and(|before| before.elapsed() >= LONG_REST));
    }

    /// The rank of the broker that runs here.
    pub fn rank(&self) -> Option<u32> {
        self.state.lock().unwrap().broker.as_ref().map(|(broker, _)| broker.record.rank)
    }

    fn carry_out(&self, order: Order) -> Result<Answer, Refusal> {
        match order {
            Order::Observe | Order::ObserveAgain { .. } => {
                self.see();
                Ok(self.observed())
            }
            Order::Preflight(_) => Ok(Answer::Preflight(self.preflight())),
            Order::Claim(_) => Ok(Answer::Done),
            Order::Link(_) => Ok(Answer::Linked(Linked { compiled_prefix: None, bytes: 0, warnings: Vec::new() })),
            Order::Collect(_) => Ok(Answer::Collected(Collected::default())),
            Order::Verify(order) => {
                let digest = order.digest.unwrap_or_default();
                let path = Path::new(PREFIX).join("envs").join(&digest);
                Ok(Answer::Verified(vec![Verified { path, digest, files: 1, bytes: 1, differences: Vec::new() }]))
            }
            Order::Configure(order) => {
                let (mut state, is_lead) = (self.state.lock().unwrap(), order.statedir.is_some());
                // The rest would be in this process's memory once for each node.
                for file in order.files {
                    match file.path.to_str().unwrap() {
                        "etc/broker.toml" if is_lead => state.broker_toml = file.content,
                        "etc/roster.json" => state.roster = Some(self.flux.copy(file.content)),
                        broker::files::APPLIED => state.applied = Some(file.content),
                        _ => {}
                    }
                }
                Ok(Answer::Done)
            }
            Order::Start(order) => {
                self.start(order.record);
                Ok(self.observed())
            }
            Order::Stop(_) => {
                let ended = self.state.lock().unwrap().broker.take();
                if let Some((broker, _)) = ended {
                    self.flux.online.send_modify(|online| _ = online.0.remove(&broker.record.rank));
                }
                Ok(self.observed())
            }
            Order::Flux(_) => Ok(Answer::Ran(Ran { code: 0, stdout: String::new(), stderr: String::new() })),
            other => Err(Refusal::new(format!("a played host has no answer to {other:?}"))),
        }
    }

    fn observed(&self) -> Answer {
        let state = self.state.lock().unwrap();
        let claim = HostState {
            instance_uid: self.flux.instance_uid.clone(),
            prefix: PREFIX.into(),
            uninstall: Uninstall::default(),
            ..HostState::default()
        };
        Answer::Observed(Box::new(HostView {
            state: Some(claim),
            environments: vec![self.flux.digest.clone()],
            broker: state.broker.as_ref().map(|(broker, _)| broker.clone()),
            roster: state.roster.clone(),
            applied: state.applied.clone(),
            boot_id: objects::boot_id(self.number),
            resources: resources(),
            ..HostView::default()
        }))
    }

    fn preflight(&self) -> Preflight {
        Preflight {
            prefix: PREFIX.into(),
            resources: resources(),
            static_cpus: false,
            memory_mib: 64 << 10,
            platform: "linux-64".to_owned(),
            glibc: "2.36".to_owned(),
            boot_id: objects::boot_id(self.number),
            systemd: true,
            warnings: Vec::new(),
        }
    }

    fn start(&self, record: LaunchRecord) {
        let socket = Socket::listen(&self.socket_path()).unwrap();
        let (rank, mut answering) = (record.rank, JoinSet::new());
        let mut state = self.state.lock().unwrap();
        if rank == 0 {
            let broker = Broker::new(0, Config::parse(&state.broker_toml).unwrap());
            answering.spawn(answer_as_lead(broker, socket, record.broker_name.clone(), self.flux.online.subscribe()));
        } else {
            answer_as_follower(&socket, &record);
            answering.spawn(async move { drop((pending::<()>().await, socket)) });
        }
        // The stand-in listens in this process.
        let pid = i32::try_from(std::process::id()).unwrap();
        state.broker = Some((RunningBroker { pid, start_time: 1, systemd: true, record }, answering));
        drop(state);
        self.flux.online.send_modify(|online| _ = online.0.insert(rank));
    }

    fn socket_path(&self) -> PathBuf {
        self.flux.directory.join(self.number.to_string())
    }
}

fn resources() -> Resources {
    Resources { cores: CORES, gpus: 0 }
}

/// Answers as the lead's broker does, until the task is aborted.
async fn answer_as_lead(mut broker: Broker, socket: Socket, name: String, mut online: watch::Receiver<IdSet>) {
    let (orders, mut asked) = mpsc::unbounded_channel();
    ORDERS.iter().for_each(|topic| socket.on(topic, Service::Hands(orders.clone())));
    loop {
        broker.publish(&socket, &name);
        tokio::select! {
            Ok(()) = online.changed() => broker.set_online(online.borrow_and_update().clone()),
            Some(Asked { topic, payload, reply }) = asked.recv() => {
                broker.execute(&topic, &payload);
                broker.publish(&socket, &name);
                let _ = reply.send(json!({}));
            }
        }
    }
}

/// Answers as the broker of a follower that is online, and counted as such by the lead.
fn answer_as_follower(socket: &Socket, record: &LaunchRecord) {
    for (name, value) in
        [("version", api::STAND_IN), ("rank", &record.rank.to_string()), ("hostname", &record.broker_name)]
    {
        socket.attribute(name, value);
    }
    socket.on("state-machine.get", Service::Says(json!({"state": "run", "duration": 1.0})));
    socket.on("state-machine.monitor", Service::Says(json!({"state": 0})));
    socket.on("groups.get", Service::Says(json!({"members": format!("0-{}", api::MOST_RANKS - 1)})));
}

impl Host for PlayedHost {
    fn run<'a>(
        &'a self,
        order: Order,
        _progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        Box::pin(async move { self.carry_out(order).map_err(HostError::Refused) })
    }

    fn run_while<'a>(
        &'a self,
        order: Order,
        coming: BoxFuture<'a, ()>,
        progress: &'a mut (dyn FnMut(Progress) + Send),
    ) -> BoxFuture<'a, Result<Answer, HostError>> {
        Box::pin(async move {
            coming.await;
            self.run(order, progress).await
        })
    }

    fn broker_socket(&self) -> io::Result<OwnedFd> {
        let socket = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(self.socket_path())?;
        Ok(socket.into())
    }

    fn passwd(&self) -> io::Result<String> {
        Ok(String::new())
    }
}
