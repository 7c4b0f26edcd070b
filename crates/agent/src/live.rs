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
    sync::{Notify, broadcast, watch},
    time::{interval, sleep, sleep_until},
};
use tracing::debug;

use api::{BROKER_RUN_DIR, IdSet};
use broker::{
    pending::{Pending, pending},
    rfc3::{Client, RpcError},
    status::{Change, InstanceStatus, attribute, instance, online, online_line, state, watch as changes},
};
use host::files::{host_path, open_in_host_root};
use model::hostlist;

/// How often a socket that isn't there yet is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// What jobs run on and what is drained changes without an event on this socket; a state that was missed is found again.
pub(super) const ASK_EVERY: Duration = Duration::from_secs(2);
/// The lead is asked by each broker whether it counts it in, so seldom.
const ASK_LEAD_EVERY: Duration = Duration::from_secs(30);
/// What the lead publishes every two seconds, to all (flux-heartbeat(5)): that it is missing costs nobody a question.
const HEARTBEAT: &str = "heartbeat.pulse";
/// A lead silent for this long is gone, or cut off from this node.
const NO_HEARTBEAT: Duration = Duration::from_secs(10);

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
    /// On the lead: what pending jobs wait for; None: not known.
    pub pending: Option<Pending>,
    /// On the lead: the job that has been at the head of the queue since then, while what it asks for was free.
    pub fits_since: Option<(u64, Instant)>,
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

/// Since when that job has been known to fit.
fn fits_since(before: Option<(u64, Instant)>, fits: Option<u64>) -> Option<(u64, Instant)> {
    let job = fits?;
    before.filter(|(known, _)| *known == job).or_else(|| Some((job, Instant::now())))
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
                debug!(error = base::error_chain(error), "lost the broker's socket");
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
    let mut pulses = client.subscribe(HEARTBEAT).await.ok();
    let mut pulse = Pulse::default();
    let mut is_counted_in = true;
    let mut ask_at = tokio::time::Instant::now() + ASK_LEAD_EVERY;
    loop {
        let missed = pulse.missed_at();
        tokio::select! {
            () = next_pulse(&mut pulses) => {
                if pulse.is_missed(Instant::now()) {
                    // It is back: it need not wait for the next question to be heard again.
                    ask_at = tokio::time::Instant::now();
                }
                pulse.beat(Instant::now());
            }
            // Once: what is missed already is waited for above.
            () = sleep_until(missed.unwrap_or_else(Instant::now).into()), if missed > Some(Instant::now()) => {}
            () = sleep_until(ask_at) => {
                is_counted_in = online(client).await.is_ok_and(|online| rank.is_some_and(|rank| online.contains(rank)));
                ask_at = tokio::time::Instant::now() + ASK_LEAD_EVERY;
            }
        }
        let is_heard = is_counted_in && !pulse.is_missed(Instant::now());
        sender.send_if_modified(|live| {
            let since = (!is_heard).then(|| live.unheard_since.unwrap_or_else(Instant::now));
            std::mem::replace(&mut live.unheard_since, since).is_some() != since.is_some()
        });
    }
}

/// Waits for the next heartbeat; pends for ever if this instance has none.
async fn next_pulse(pulses: &mut Option<broadcast::Receiver<String>>) {
    let Some(events) = pulses else { return std::future::pending().await };
    // A lagged receiver means that a heartbeat came.
    if let Err(broadcast::error::RecvError::Closed) = events.recv().await {
        std::future::pending().await
    }
}

/// The lead's heartbeat as it is heard here.
#[derive(Debug, Default, Clone, Copy)]
struct Pulse {
    last: Option<Instant>,
    /// Between the last two.
    interval: Duration,
}

impl Pulse {
    fn beat(&mut self, now: Instant) {
        self.interval = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last = Some(now);
    }

    /// When it is missed, if none comes before. None: none was heard yet, as on an instance that has no heartbeat. A site may
    /// have set another period.
    fn missed_at(&self) -> Option<Instant> {
        Some(self.last? + NO_HEARTBEAT.max(self.interval.min(ASK_LEAD_EVERY) * 3))
    }

    fn is_missed(&self, now: Instant) -> bool {
        self.missed_at().is_some_and(|missed| missed <= now)
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
                let pending = match &instance {
                    Some(instance) => pending(client, instance).await.ok(),
                    None => None,
                };
                let state = state(client).await;
                sender.send_if_modified(|live| {
                    let next = match state {
                        Ok(state) => {
                            let fits_since = fits_since(live.fits_since, pending.and_then(|pending| pending.fits));
                            let mut next = Live { instance, pending, fits_since, silent_since: None, ..live.clone() };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lead_is_missed_after_ten_seconds_or_three_of_its_own_periods_without_a_heartbeat() {
        let begin = Instant::now();
        let at = |secs| begin + Duration::from_secs(secs);
        for (beats, missed) in [(vec![], None), (vec![0], Some(10)), (vec![0, 2, 4], Some(14)), (vec![0, 20], Some(80))]
        {
            let mut pulse = Pulse::default();
            beats.iter().for_each(|secs| pulse.beat(at(*secs)));
            assert_eq!(pulse.missed_at(), missed.map(at), "{beats:?}");
            let Some(missed) = missed else { continue };
            assert_eq!((pulse.is_missed(at(missed - 1)), pulse.is_missed(at(missed))), (false, true));
        }
    }
}
