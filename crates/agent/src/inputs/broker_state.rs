//! What the broker of this host says over its socket (RFC 3). When the broker ends, the socket closes, and that is an event.

use std::{
    convert::Infallible,
    io::{self, ErrorKind, Write},
    os::fd::OwnedFd,
    path::Path,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt};
use tokio::{
    sync::{Notify, broadcast, watch},
    time::{interval, sleep, sleep_until},
};
use tracing::debug;

use api::{BROKER_SOCKET_DIR, IdSet};
use base::chance::{chance, jittered};
use bridge::Occupancy;
use broker::{
    pending::{Pending, pending},
    queues::{Queue, queues_in_time},
    rfc3::{Client, RpcError},
    status::{Change, InstanceStatus, attribute, instance, online, online_line, state, watch as changes},
};
use host::{boundary::broker_socket, opening::path_of};
use hostapi::{Host, HostView};
use model::hostlist;
use pods::occupied::Occupied;

/// Pause between two attempts to connect to a socket that does not exist yet.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Pause between two questions to the lead's own broker: allocated and drained ranks change without an event on its socket.
pub const ASK_EVERY: Duration = Duration::from_secs(2);
/// The same for a follower's broker. Its changes come as events; asking finds a missed event, and a broker that hangs ([`SILENT`]). Longer, because each
/// question wakes a processor.
const ASK_FOLLOWER_EVERY: Duration = Duration::from_secs(5);
/// Pause between two questions of each node to the lead, whether it counts this broker as online; up to half of it is added at random.
const ASK_LEAD_EVERY: Duration = Duration::from_secs(30);
/// After an overdue heartbeat, each node asks the lead within this time, at random: not all at once.
const ASK_LEAD_WITHIN: Duration = Duration::from_secs(2);
/// When thousands of brokers come up, the lead's agent reports who is online at most this often.
const LONGEST_GATHER: Duration = Duration::from_secs(5);
/// The event that the lead publishes to all every two seconds (flux-heartbeat(5)): its absence shows without a request.
const HEARTBEAT: &str = "heartbeat.pulse";
/// A lead silent for this long is gone, or cut off from this node.
const NO_HEARTBEAT: Duration = Duration::from_secs(10);

/// State of the broker on this host, from its own socket.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BrokerState {
    /// Process that listens at the socket; None if there is none.
    pub pid: Option<i32>,
    /// Its version of Flux; empty if not known.
    pub version: String,
    /// `join`, `quorum`, `run`, …
    pub state: String,
    /// Lead only: ranks that it counts as online.
    pub online: IdSet,
    /// Lead only: allocated and drained ranks; None if not known.
    pub instance: Option<InstanceStatus>,
    /// Lead only: where host jobs and gangs run; None if not known.
    pub occupied: Option<Occupied>,
    /// Lead only: what pending jobs wait for; None if not known.
    pub pending: Option<Pending>,
    /// Lead only: the job that has been first in the queue since then, although what it asks for was free.
    pub fits_since: Option<(u64, Instant)>,
    /// Lead only: the queues that start no jobs ([`Queue::stopped`]).
    pub stopped_queues: Vec<String>,
    /// Lead only: since when no scheduler has been online, while the broker is in state `run`. A live change takes it away for a
    /// moment.
    pub scheduler_offline_since: Option<Instant>,
    /// Since when the lead has not answered this broker, or has not counted it as online. On a half-open connection, the broker
    /// itself sees no error (flux-core #6626).
    pub lead_unreachable_since: Option<Instant>,
    /// Since when the broker has been shutting down.
    pub leaving_since: Option<Instant>,
    /// Since when the broker itself has not answered: the other fields may be out of date.
    pub silent_since: Option<Instant>,
}

/// A broker answers within milliseconds, the lead of a big instance within seconds. One that takes longer than this hangs.
const SILENT: Duration = Duration::from_mins(1);

impl BrokerState {
    /// The broker that runs on `host` says that it is in state `run`. One that is cut off says so for minutes.
    pub fn is_online(&self, host: &HostView) -> bool {
        host.broker.as_ref().is_some_and(|broker| self.pid == Some(broker.pid) && self.state == "run")
    }

    /// The broker has not answered for longer than any that works takes.
    pub fn hangs(&self, now: Instant) -> bool {
        since(self.silent_since, now) >= SILENT
    }

    /// How long the lead has not answered this broker, or has not counted it as online.
    pub fn lead_unreachable_for(&self, now: Instant) -> Duration {
        since(self.lead_unreachable_since, now)
    }

    /// How long the broker has not answered this agent.
    pub fn silent_for(&self, now: Instant) -> Duration {
        since(self.silent_since, now)
    }

    /// True if this broker answers, the lead answers it and counts it as online, and it is not shutting down: none of the times that lead to a
    /// restart of it is running.
    pub fn is_well(&self) -> bool {
        [self.silent_since, self.lead_unreachable_since, self.leaving_since].iter().all(Option::is_none)
    }

    /// How long no scheduler has been online.
    pub fn scheduler_offline_for(&self, now: Instant) -> Duration {
        since(self.scheduler_offline_since, now)
    }

    /// How long the broker has been shutting down.
    pub fn leaving_for(&self, now: Instant) -> Duration {
        since(self.leaving_since, now)
    }

    fn enter(&mut self, state: String) {
        // flux-broker(7)'s states after run.
        let is_leaving = matches!(state.as_str(), "cleanup" | "shutdown" | "finalize" | "goodbye" | "exit");
        self.leaving_since = is_leaving.then(|| self.leaving_since.unwrap_or_else(Instant::now));
        self.state = state;
    }

    /// Notes since when the scheduler is offline. `is_offline` is None if the job manager has not answered.
    fn note_scheduler(&mut self, is_offline: Option<bool>) {
        let since = self.scheduler_offline_since.filter(|_| is_offline != Some(false));
        let since = since.or_else(|| (is_offline == Some(true)).then(Instant::now));
        // At its end the broker unloads the scheduler.
        self.scheduler_offline_since = since.filter(|_| self.state == "run");
    }
}

fn since(begin: Option<Instant>, now: Instant) -> Duration {
    begin.map_or(Duration::ZERO, |begin| now.saturating_duration_since(begin))
}

/// Since when that job has been known to fit.
fn fits_since(before: Option<(u64, Instant)>, fits: Option<u64>) -> Option<(u64, Instant)> {
    let job = fits?;
    before.filter(|(known, _)| *known == job).or_else(|| Some((job, Instant::now())))
}

/// Connects to the broker of this host, for a command that has no [`Host`].
///
/// # Errors
/// No broker listens, or it refuses this process.
pub async fn connect() -> Result<Client, RpcError> {
    connect_at(broker_socket()).await
}

/// Connects to the broker of `host`.
///
/// # Errors
/// As [`connect`].
pub async fn connect_on(host: &dyn Host) -> Result<Client, RpcError> {
    connect_at(host.broker_socket()).await
}

async fn connect_at(socket: io::Result<OwnedFd>) -> Result<Client, RpcError> {
    let unopened = |source| RpcError::Connect { path: Path::new(BROKER_SOCKET_DIR).join("local"), source };
    Client::connect(&path_of(&socket.map_err(unopened)?)).await
}

/// Follows whichever broker runs on `host`, until the receiver is dropped. On the lead, each change of the online ranks is one
/// line in the pod's log, in the broker's own form: the broker itself logs them only until it has its quorum. On a big instance a
/// burst of changes is one, and only the lead is asked for them at all: each would begin a round on every node. A notification of
/// `ask` makes it ask the broker at once.
pub fn follow(host: Arc<dyn Host>, ask: Arc<Notify>) -> watch::Receiver<BrokerState> {
    let (sender, receiver) = watch::channel(BrokerState::default());
    tokio::spawn(async move {
        while !sender.is_closed() {
            let ended = match connect_on(&*host).await {
                Ok(client) => tokio::select! {
                    () = sender.closed() => return,
                    ended = follow_broker(&client, &sender, &ask) => ended,
                    ended = watch_reachability(&client, &sender) => ended,
                },
                Err(error) => Err(error),
            };
            if let Err(error) = &ended {
                debug!(error = base::error_chain(error), "lost the broker's socket");
            }
            sender.send_if_modified(|current| {
                let since = || current.silent_since.unwrap_or_else(Instant::now);
                let next = BrokerState { silent_since: is_silence(&ended).then(since), ..BrokerState::default() };
                std::mem::replace(current, next.clone()) != next
            });
            sleep(LOOK_EVERY).await;
        }
    });
    receiver
}

/// A process listens at the socket and does not answer.
fn is_silence(ended: &Result<(), RpcError>) -> bool {
    match ended {
        Err(RpcError::Timeout { .. }) => true,
        Err(RpcError::Connect { source, .. }) => source.kind() == ErrorKind::TimedOut,
        _ => false,
    }
}

/// On each broker: keeps [`BrokerState::lead_unreachable_since`] up to date, until the connection ends.
async fn watch_reachability(client: &Client, sender: &watch::Sender<BrokerState>) -> Result<(), RpcError> {
    let rank = attribute(client, "rank").await?.parse::<u32>().ok();
    let mut heartbeats = client.subscribe(HEARTBEAT).await.ok();
    let mut heartbeat = Heartbeat::default();
    // Until the lead was asked.
    let mut counts_us = true;
    let mut ask_at = tokio::time::Instant::now() + jittered(ASK_LEAD_EVERY);
    loop {
        let overdue = heartbeat.overdue_at();
        tokio::select! {
            () = next_heartbeat(&mut heartbeats) => {
                if heartbeat.is_overdue(Instant::now()) {
                    // The lead is back: ask it now instead of at the next interval, but not in the same moment as all others.
                    ask_at = tokio::time::Instant::now() + ASK_LEAD_WITHIN.mul_f64(chance());
                }
                heartbeat.beat(Instant::now());
            }
            // A heartbeat gets overdue: the code below reports that, and the condition keeps this from waking again.
            () = sleep_until(overdue.unwrap_or_else(Instant::now).into()), if overdue > Some(Instant::now()) => {}
            () = sleep_until(ask_at) => {
                // No answer counts as no.
                counts_us = online(client).await.is_ok_and(|online| rank.is_some_and(|rank| online.contains(rank)));
                ask_at = tokio::time::Instant::now() + jittered(ASK_LEAD_EVERY);
            }
        }
        let is_reachable = counts_us && !heartbeat.is_overdue(Instant::now());
        // The receivers hear when it begins and when it ends.
        sender.send_if_modified(|current| {
            let since = (!is_reachable).then(|| current.lead_unreachable_since.unwrap_or_else(Instant::now));
            std::mem::replace(&mut current.lead_unreachable_since, since).is_some() != since.is_some()
        });
    }
}

/// Waits for the next heartbeat; pends for ever if this instance has none, or the connection has ended, which
/// [`follow_broker`] finds.
async fn next_heartbeat(heartbeats: &mut Option<broadcast::Receiver<String>>) {
    let Some(events) = heartbeats else { return std::future::pending().await };
    // A lagged receiver means that a heartbeat came.
    if let Err(broadcast::error::RecvError::Closed) = events.recv().await {
        std::future::pending::<()>().await;
    }
}

/// The lead's heartbeat as it arrives here.
#[derive(Debug, Default, Clone, Copy)]
struct Heartbeat {
    last: Option<Instant>,
    /// Time between the last two.
    interval: Duration,
}

impl Heartbeat {
    fn beat(&mut self, now: Instant) {
        self.interval = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last = Some(now);
    }

    /// When the next heartbeat is overdue. None before the first one, as on an instance that has no heartbeat. A site may have set
    /// another period.
    fn overdue_at(&self) -> Option<Instant> {
        Some(self.last? + NO_HEARTBEAT.max(self.interval.min(ASK_LEAD_EVERY) * 3))
    }

    fn is_overdue(&self, now: Instant) -> bool {
        self.overdue_at().is_some_and(|overdue| overdue <= now)
    }
}

async fn follow_broker(client: &Client, sender: &watch::Sender<BrokerState>, ask: &Notify) -> Result<(), RpcError> {
    let now = state(client).await?.state;
    let is_lead = attribute(client, "rank").await? == "0";
    // For the log's lines about who is online, which the lead's agent alone writes.
    let names = if is_lead { hostlist::decode(&attribute(client, "hostlist").await?) } else { Vec::new() };
    let version = attribute(client, "version").await.unwrap_or_default();
    let pid = client.peer_pid();
    sender.send_modify(|current| {
        *current = BrokerState { pid, version, ..BrokerState::default() };
        current.enter(now);
    });
    let follow_events = gathered(changes(client, is_lead)?, |change| match change {
        Change::State(state) => sender.send_modify(|current| current.enter(state)),
        Change::Online(online) => {
            let named = online.0.iter().filter_map(|rank| names.get(usize::try_from(*rank).ok()?));
            let _ = writeln!(std::io::stdout(), "{}", online_line(&hostlist::encode(named), &online));
            sender.send_modify(|current| current.online = online);
        }
    });
    // Side by side: a slow answer must not hold up the events that the broker sends.
    tokio::select! {
        () = follow_events => Ok(()),
        never = poll(client, is_lead, sender, ask) => match never {},
    }
}

/// Passes `changes` on until they end. A change of the online ranks is passed on at once if none was for a while, else
/// the last one of a burst.
async fn gathered(changes: impl Stream<Item = Change>, mut pass_on: impl FnMut(Change)) {
    let mut changes = pin!(changes);
    let (mut newest, mut due) = (None, tokio::time::Instant::now());
    loop {
        tokio::select! {
            change = changes.next() => match change {
                None => return,
                Some(Change::Online(online)) => newest = Some(online),
                Some(state) => pass_on(state),
            },
            () = sleep_until(due), if newest.is_some() => {
                if let Some(online) = newest.take() {
                    due = tokio::time::Instant::now() + gather(online.len());
                    pass_on(Change::Online(online));
                }
            }
        }
    }
}

/// How long to gather further changes while `ranks` ranks are online: each change makes the lead's agent write a report, which names ranks.
fn gather(ranks: usize) -> Duration {
    Duration::from_millis(ranks as u64).min(LONGEST_GATHER)
}

/// Asks the broker at intervals, and whenever `ask` is notified.
async fn poll(client: &Client, is_lead: bool, sender: &watch::Sender<BrokerState>, ask: &Notify) -> Infallible {
    let mut every = interval(if is_lead { ASK_EVERY } else { ASK_FOLLOWER_EVERY });
    let mut occupancy = Occupancy::of(client);
    loop {
        tokio::select! { _ = every.tick() => {}, () = ask.notified() => {} }
        let instance = if is_lead { instance(client).await.ok() } else { None };
        let (occupied, pending) = match &instance {
            Some(instance) => (occupancy.ask(instance).await.ok(), pending(client, instance).await.ok()),
            None => (None, None),
        };
        // Also if it does not say what is allocated, as while two jobs seem to have the same cores.
        let queues = if is_lead { queues_in_time(client).await } else { None };
        let is_scheduler_offline = queues.as_ref().map(|all| all.iter().any(Queue::is_scheduler_offline));
        // What we stop ourselves, we start again within seconds, or the instance ends.
        let stopped = |queue: &Queue| Some(queue).filter(|queue| !queue.is_stopped_by_us()).and_then(Queue::stopped);
        let stopped_queues: Option<Vec<_>> = queues.map(|all| all.iter().filter_map(stopped).collect());
        let before = sender.borrow().state.clone();
        let state = state(client).await;
        sender.send_if_modified(|current| {
            let next = match state {
                Ok(state) => {
                    let stopped_queues = stopped_queues.unwrap_or_else(|| current.stopped_queues.clone());
                    let fits_since = fits_since(current.fits_since, pending.and_then(|pending| pending.fits));
                    let mut next = BrokerState {
                        instance,
                        occupied,
                        pending,
                        fits_since,
                        stopped_queues,
                        silent_since: None,
                        ..current.clone()
                    };
                    // An event that came while the answer was under way may be newer.
                    if current.state == before {
                        next.enter(state.state);
                    }
                    next.note_scheduler(is_scheduler_offline);
                    next
                }
                Err(_) => {
                    let since = current.silent_since.unwrap_or_else(Instant::now);
                    BrokerState { silent_since: Some(since), ..current.clone() }
                }
            };
            std::mem::replace(current, next.clone()) != next
        });
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    /// Five thousand brokers come up within half a minute, and four within a tenth of a second.
    #[tokio::test(start_paused = true)]
    async fn a_burst_of_brokers_is_reported_few_times_and_its_end_always() {
        for (brokers, apart, most) in [(5000_u32, 6, 60), (4, 25, 4)] {
            let online = |count| Change::Online((0..count).collect());
            let burst = stream::iter(1..=brokers).then(|count| async move {
                sleep(Duration::from_millis(apart)).await;
                online(count)
            });
            // The broker lives on.
            let changes = burst.chain(stream::once(sleep(Duration::from_mins(1))).filter_map(async |()| None));
            let mut reported = Vec::new();
            gathered(changes, |change| reported.push(change)).await;
            assert!((2..=most).contains(&reported.len()), "{brokers}: {}", reported.len());
            assert_eq!((&reported[0], reported.last()), (&online(1), Some(&online(brokers))), "{brokers}");
        }
    }

    #[tokio::test]
    async fn a_change_of_the_brokers_own_state_waits_for_nothing() {
        let mut passed = Vec::new();
        let changes = ["quorum", "run"].map(|state| Change::State(state.to_owned()));
        gathered(stream::iter(changes.clone()), |change| passed.push(change)).await;
        assert_eq!(passed, changes);
    }

    #[test]
    fn a_scheduler_is_offline_until_the_job_manager_says_otherwise_or_the_broker_ends() {
        let since = Instant::now();
        for (before, said, state, expected) in [
            (None, Some(false), "run", None),
            (None, None, "run", None),
            (Some(since), Some(true), "run", Some(since)),
            (Some(since), None, "run", Some(since)),
            (Some(since), Some(false), "run", None),
            (Some(since), Some(true), "finalize", None),
            (None, Some(true), "finalize", None),
        ] {
            let mut broker =
                BrokerState { state: state.to_owned(), scheduler_offline_since: before, ..BrokerState::default() };
            broker.note_scheduler(said);
            assert_eq!(broker.scheduler_offline_since, expected, "{before:?} {said:?} {state}");
        }
        let mut broker = BrokerState { state: "run".to_owned(), ..BrokerState::default() };
        broker.note_scheduler(Some(true));
        assert!(broker.scheduler_offline_since.is_some());
    }

    #[test]
    fn a_lead_is_missed_after_ten_seconds_or_three_periods_without_a_heartbeat() {
        let begin = Instant::now();
        let at = |secs| begin + Duration::from_secs(secs);
        for (beats, overdue) in
            [(vec![], None), (vec![0], Some(10)), (vec![0, 2, 4], Some(14)), (vec![0, 20], Some(80))]
        {
            let mut heartbeat = Heartbeat::default();
            beats.iter().for_each(|secs| heartbeat.beat(at(*secs)));
            assert_eq!(heartbeat.overdue_at(), overdue.map(at), "{beats:?}");
            let Some(overdue) = overdue else { continue };
            assert_eq!((heartbeat.is_overdue(at(overdue - 1)), heartbeat.is_overdue(at(overdue))), (false, true));
        }
    }
}
