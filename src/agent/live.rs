//! What the broker itself says, as it says it: over its socket, not by parsing a CLI. The end of the socket is the end of
//! the broker, and an event.

use std::{
    io::{ErrorKind, Write},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use tokio::{
    sync::{Notify, watch},
    time::{interval, sleep},
};
use tracing::debug;

use crate::{
    api::{BROKER_RUN_DIR, IdSet},
    broker::{
        pending::pending_nodes,
        rfc3::{Client, RpcError},
        status::{Change, InstanceStatus, attribute, instance, online, online_line, state, watch as changes},
    },
    host::files::{host_path, open_in_host_root},
    plan::hostlist,
};

/// How often a socket that isn't there yet is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// What jobs run on and what is drained changes without an event on this socket; a state that was missed is found again.
pub(super) const ASK_EVERY: Duration = Duration::from_secs(2);
/// The lead is asked by each broker, so seldom.
const ASK_LEAD_EVERY: Duration = Duration::from_secs(30);

/// The broker's own words.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Live {
    /// Process that holds the socket; None: nobody does.
    pub pid: Option<i32>,
    /// Its version of Flux; empty: not known.
    pub version: String,
    /// `join`, `quorum`, `run`, …
    pub state: String,
    /// Ranks that are online, by the lead's word.
    pub online: IdSet,
    /// On the lead: what jobs run on and what is drained; None: not known.
    pub instance: Option<InstanceStatus>,
    /// On the lead: how many more nodes pending jobs wait for; None: not known.
    pub pending_nodes: Option<u32>,
    /// Since when the lead has not answered this broker, or has not counted it in. A half-open connection looks well from
    /// here (flux-core #6626).
    pub unheard_since: Option<Instant>,
    /// Since when the broker has been on its way out.
    pub leaving_since: Option<Instant>,
    /// Since when the broker itself has not answered: what it said before may be true no longer.
    pub silent_since: Option<Instant>,
}

impl Live {
    fn enter(&mut self, state: String) {
        // flux-broker(7)'s states after run.
        let is_leaving = matches!(state.as_str(), "cleanup" | "shutdown" | "finalize" | "goodbye" | "exit");
        self.leaving_since = is_leaving.then(|| self.leaving_since.unwrap_or_else(Instant::now));
        self.state = state;
    }
}

/// Connects to the broker of this host.
///
/// # Errors
/// There is no broker, or it does not take us.
pub async fn connect() -> Result<Client, RpcError> {
    let socket = Path::new(BROKER_RUN_DIR).join("local");
    let file = open_in_host_root(&socket).map_err(|source| RpcError::Connect { path: socket.clone(), source })?;
    Client::connect(&host_path(&file)).await
}

/// Follows the broker of this host, whichever it is, until the receiver is dropped. On the lead each change of who is online
/// is one line in the pod's log, in the broker's own form: the broker itself says it only until it has its quorum. Who has
/// changed something has it asked again at once, by `ask`.
pub fn follow(ask: Arc<Notify>) -> watch::Receiver<Live> {
    let (sender, receiver) = watch::channel(Live::default());
    tokio::spawn(async move {
        while !sender.is_closed() {
            let ended = match connect().await {
                Ok(client) => tokio::select! {
                    ended = follow_one(&client, &sender, &ask) => ended,
                    ended = hear_lead(&client, &sender) => ended,
                },
                Err(error) => Err(error),
            };
            if let Err(error) = &ended {
                debug!(error = crate::error_chain(error), "lost the broker's socket");
            }
            sender.send_if_modified(|live| {
                let since = || live.silent_since.unwrap_or_else(Instant::now);
                let next = Live { silent_since: is_silence(&ended).then(since), ..Live::default() };
                std::mem::replace(live, next.clone()) != next
            });
            sleep(LOOK_EVERY).await;
        }
    });
    receiver
}

/// Somebody holds the socket, and does not answer.
fn is_silence(ended: &Result<(), RpcError>) -> bool {
    match ended {
        Err(RpcError::Timeout { .. }) => true,
        Err(RpcError::Connect { source, .. }) => source.kind() == ErrorKind::TimedOut,
        _ => false,
    }
}

async fn hear_lead(client: &Client, sender: &watch::Sender<Live>) -> Result<(), RpcError> {
    let rank = attribute(client, "rank").await?.parse::<u32>().ok();
    loop {
        sleep(ASK_LEAD_EVERY).await;
        let is_heard = online(client).await.is_ok_and(|online| rank.is_some_and(|rank| online.contains(rank)));
        sender.send_if_modified(|live| {
            let since = (!is_heard).then(|| live.unheard_since.unwrap_or_else(Instant::now));
            std::mem::replace(&mut live.unheard_since, since).is_some() != since.is_some()
        });
    }
}

async fn follow_one(client: &Client, sender: &watch::Sender<Live>, ask: &Notify) -> Result<(), RpcError> {
    let now = state(client).await?.state;
    let (rank, names) = futures::try_join!(attribute(client, "rank"), attribute(client, "hostlist"))?;
    let names = hostlist::decode(&names);
    let version = attribute(client, "version").await.unwrap_or_default();
    let pid = client.peer_pid();
    sender.send_modify(|live| {
        *live = Live { pid, version, ..Live::default() };
        live.enter(now);
    });
    let mut changes = changes(client)?;
    let mut every = interval(ASK_EVERY);
    loop {
        tokio::select! {
            change = changes.next() => match change {
                Some(Change::State(state)) => sender.send_modify(|live| live.enter(state)),
                Some(Change::Online(online)) => {
                    if rank == "0" {
                        let named = online.0.iter().filter_map(|rank| names.get(usize::try_from(*rank).ok()?));
                        let _ = writeln!(std::io::stdout(), "{}", online_line(&hostlist::encode(named), &online));
                    }
                    sender.send_modify(|live| live.online = online);
                }
                None => return Ok(()),
            },
            () = async { tokio::select! { _ = every.tick() => {}, () = ask.notified() => {} } } => {
                let instance = if rank == "0" { instance(client).await.ok() } else { None };
                let pending_nodes = match &instance {
                    Some(instance) => pending_nodes(client, instance).await.ok(),
                    None => None,
                };
                let state = state(client).await;
                sender.send_if_modified(|live| {
                    let next = match state {
                        Ok(state) => {
                            let mut next = Live { instance, pending_nodes, silent_since: None, ..live.clone() };
                            next.enter(state.state);
                            next
                        }
                        Err(_) => {
                            let since = live.silent_since.unwrap_or_else(Instant::now);
                            Live { silent_since: Some(since), ..live.clone() }
                        }
                    };
                    std::mem::replace(live, next.clone()) != next
                });
            }
        }
    }
}
