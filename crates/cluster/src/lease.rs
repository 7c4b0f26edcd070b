//! Acquires, renews and releases the Lease `flux-planner`.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tracing::debug;

use crate::{
    clock,
    lease_rules::{
        GIVE_UP_AFTER, LEASE_DURATION, LeaseStep, LeaseView, Place, RENEW_EVERY, TRY_AGAIN, after_failure, look_after,
        next_step, next_transitions, seems_silent, take_after,
    },
};
use api::{LEASE_PLANNER, NAMESPACE};
use base::chance::chance;

/// The longest lease duration that a candidate accepts from a holder.
const LONGEST_LEASE: Duration = Duration::from_mins(1);

/// A Lease as this process has seen it: the last resourceVersion, and when this process saw that first, by its own clock.
#[derive(Debug, Default)]
pub struct Sight(Option<(String, Instant)>);

impl Sight {
    /// Looks at what was read or written. `duration`: how long the holder may be silent.
    pub fn view(&mut self, lease: &Lease, duration: Duration) -> LeaseView {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let since = match &self.0 {
            Some((last, since)) if *last == version => *since,
            _ => Instant::now(),
        };
        self.0 = Some((version, since));
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
        LeaseView { holder, unchanged_for: since.elapsed(), duration }
    }
}

/// A candidate for the Lease, or its holder.
pub struct Candidate {
    leases: Api<Lease>,
    identity: String,
    /// Whether this candidate is one of the few that watch the Lease.
    place: watch::Receiver<Place>,
    sight: Sight,
    /// The Lease as this candidate has seen or written it last.
    lease: Option<Lease>,
    /// When this candidate sent its last successful write. The others count the Lease's duration from then or later.
    renewed: Instant,
    /// The time that the Lease told when it was seen last: by the previous planner's clock until `has_limits`, by ours afterwards.
    lease_time: Option<Timestamp>,
    /// This planner has taken over the time limits of the one before.
    has_limits: Arc<AtomicBool>,
}

/// The result of an attempt to take or renew the Lease.
enum Attempt {
    /// The candidate holds it.
    Held,
    /// Another candidate holds it: it is free after this time if it does not change.
    Yielded(Duration),
    /// Another writer was faster.
    Overtaken,
}

impl Candidate {
    /// Creates a candidate with the name `identity`.
    pub fn new(client: Client, identity: String, place: watch::Receiver<Place>) -> Self {
        Self {
            leases: Api::namespaced(client, NAMESPACE),
            identity,
            place,
            sight: Sight::default(),
            lease: None,
            renewed: Instant::now(),
            lease_time: None,
            has_limits: Arc::default(),
        }
    }

    /// The planner sets this once it has moved the previous planner's time limits to its own clock. Until then this candidate writes
    /// the previous planner's time into the Lease, so that a planner that takes over meanwhile moves the limits by the right
    /// difference.
    pub fn has_limits(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_limits)
    }

    /// Waits until this candidate holds the Lease. Returns the present time by the previous planner's clock; None if
    /// there was no planner before or its Lease has no renewTime.
    pub async fn acquire(&mut self) -> Option<Timestamp> {
        self.has_limits.store(false, Ordering::Relaxed);
        let mut failed = 0;
        loop {
            match timeout(RENEW_EVERY, self.take_or_renew()).await {
                Ok(Ok(Attempt::Held)) => return self.lease_time,
                Ok(Ok(Attempt::Yielded(left))) => {
                    failed = 0;
                    self.wait(left).await;
                    continue;
                }
                Ok(Ok(Attempt::Overtaken)) => debug!("another writer of the Lease was faster"),
                Ok(Err(error)) => debug!(%error, "can't read or take the Lease"),
                Err(_) => debug!("reading or taking the Lease took too long"),
            }
            let watches = self.place.borrow().watches();
            sleep(after_failure(failed, watches, chance())).await;
            failed = failed.saturating_add(1);
        }
    }

    /// Waits until it is time to look at the Lease again, which another candidate holds. `left`: see [`look_after`].
    async fn wait(&mut self, left: Duration) {
        let mut place = self.place.clone();
        let watches = place.borrow_and_update().watches();
        let changed = async {
            if place.wait_for(|place| place.watches() != watches).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let seems_silent = seems_silent(self.lease.as_ref().and_then(renewed_at), clock::now());
        tokio::select! {
            () = changed => {}
            () = watch_until_free(&self.leases, &mut self.sight, &self.identity, left), if watches => {}
            () = sleep(look_after(left, seems_silent, chance())), if !watches => {}
        }
    }

    /// Renews the Lease, and returns when it is lost or has not been renewed for [`GIVE_UP_AFTER`].
    pub async fn keep(&mut self) {
        let mut next = self.renewed + RENEW_EVERY;
        loop {
            let (at, until) = (Instant::now().max(next), self.renewed + GIVE_UP_AFTER);
            let attempt = async {
                sleep_until(at).await;
                timeout(TRY_AGAIN, self.renew()).await
            };
            next = at + TRY_AGAIN;
            match timeout_at(until, attempt).await {
                Ok(Ok(Ok(Attempt::Held))) => next = self.renewed + RENEW_EVERY,
                Ok(Ok(Ok(Attempt::Yielded(_)))) | Err(_) => return,
                Ok(Ok(Ok(Attempt::Overtaken))) => {}
                Ok(Ok(Err(error))) => debug!(%error, "can't renew the Lease"),
                Ok(Err(_)) => debug!("renewing the Lease took too long"),
            }
        }
    }

    /// Renews the Lease, without reading it first if this candidate wrote it last.
    async fn renew(&mut self) -> Result<Attempt, kube::Error> {
        if let Some(lease) = self.lease.take() {
            let view = self.sight.view(&lease, LEASE_DURATION);
            self.lease_time = time_of(&lease, &view);
            if let Attempt::Held = self.write(LeaseStep::Renew, Some(lease)).await? {
                return Ok(Attempt::Held);
            }
        }
        self.take_or_renew().await
    }

    /// Reads the Lease once and does what [`next_step`] decides.
    async fn take_or_renew(&mut self) -> Result<Attempt, kube::Error> {
        self.lease = self.leases.get_opt(LEASE_PLANNER).await?;
        let view = self.lease.as_ref().map(|lease| self.sight.view(lease, lease_duration(lease.spec.as_ref())));
        self.lease_time = self.lease.as_ref().zip(view.as_ref()).and_then(|(lease, view)| time_of(lease, view));
        match next_step(view.as_ref(), &self.identity) {
            LeaseStep::Yield(left) => Ok(Attempt::Yielded(left)),
            step => {
                let found = self.lease.take();
                self.write(step, found).await
            }
        }
    }

    /// Creates the Lease, or replaces exactly the one that was `found`: if two candidates take it at once, one gets 409.
    async fn write(&mut self, step: LeaseStep, found: Option<Lease>) -> Result<Attempt, kube::Error> {
        let (asked, parameters) = (Instant::now(), PostParams::default());
        let written = match found {
            None => {
                let metadata = ObjectMeta { name: Some(LEASE_PLANNER.to_owned()), ..ObjectMeta::default() };
                self.leases.create(&parameters, &Lease { metadata, spec: Some(self.spec(0)) }).await
            }
            Some(Lease { metadata, spec }) => {
                let transitions = next_transitions(spec.and_then(|spec| spec.lease_transitions), step);
                let lease = Lease { metadata: metadata_to_write(metadata), spec: Some(self.spec(transitions)) };
                self.leases.replace(LEASE_PLANNER, &parameters, &lease).await
            }
        };
        match written {
            Ok(lease) => {
                self.renewed = asked;
                self.sight.view(&lease, LEASE_DURATION);
                self.lease = Some(lease);
                Ok(Attempt::Held)
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Attempt::Overtaken),
            Err(error) => Err(error),
        }
    }

    /// The time to write into the Lease. If the previous planner's clock is ahead, this is our time: its time limits then end late. With
    /// the previous planner's time, a planner that moved the limits and died before it said so would cause a second move, and the limits
    /// would end early.
    fn time(&self) -> Timestamp {
        let now = clock::now();
        match self.lease_time {
            Some(time) if !self.has_limits.load(Ordering::Relaxed) => time.min(now),
            _ => now,
        }
    }

    fn spec(&self, transitions: i32) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            lease_transitions: Some(transitions),
            renew_time: Some(MicroTime(self.time())),
            ..LeaseSpec::default()
        }
    }
}

/// How long the holder may be silent: the Lease's duration, but at most [`LONGEST_LEASE`]. No version uses more, and a
/// forged Lease must not keep the instance without a planner for years.
fn lease_duration(spec: Option<&LeaseSpec>) -> Duration {
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    seconds.map_or(LEASE_DURATION, Duration::from_secs).min(LONGEST_LEASE)
}

/// The present time by the holder's clock: its renewTime plus the time since this process saw the Lease change.
fn time_of(lease: &Lease, view: &LeaseView) -> Option<Timestamp> {
    renewed_at(lease)?.checked_add(view.unchanged_for).ok()
}

/// spec.renewTime.
fn renewed_at(lease: &Lease) -> Option<Timestamp> {
    Some(lease.spec.as_ref()?.renew_time.as_ref()?.0)
}

/// Watches the Lease until this candidate may take it, as far as the watch says: who takes it reads it again. `left`: after this time
/// the Lease is free if it does not change.
async fn watch_until_free(leases: &Api<Lease>, sight: &mut Sight, identity: &str, left: Duration) {
    let config = watcher::Config::default().fields(&format!("metadata.name={LEASE_PLANNER}"));
    let mut events = pin!(watcher(leases.clone(), config).default_backoff());
    let mut free_at = Instant::now() + take_after(left, chance());
    while let Ok(Some(event)) = timeout_at(free_at, events.next()).await {
        match event {
            Ok(watcher::Event::Apply(lease) | watcher::Event::InitApply(lease)) => {
                let view = sight.view(&lease, lease_duration(lease.spec.as_ref()));
                match next_step(Some(&view), identity) {
                    LeaseStep::Yield(left) => free_at = Instant::now() + take_after(left, chance()),
                    LeaseStep::Create | LeaseStep::Renew | LeaseStep::Take => return,
                }
            }
            Ok(watcher::Event::Delete(_)) => return,
            Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
            Err(error) => debug!(%error, "the watch on the Lease was interrupted"),
        }
    }
}

/// Releases the Lease if `identity` holds it, so that the next planner need not wait for it to expire.
///
/// # Errors
/// If a call to the API server fails.
pub async fn release(client: Client, identity: &str) -> Result<(), kube::Error> {
    let leases: Api<Lease> = Api::namespaced(client, NAMESPACE);
    let Some(mut lease) = leases.get_opt(LEASE_PLANNER).await? else { return Ok(()) };
    match &mut lease.spec {
        Some(spec) if spec.holder_identity.as_deref() == Some(identity) => spec.holder_identity = Some(String::new()),
        _ => return Ok(()),
    }
    lease.metadata = metadata_to_write(lease.metadata);
    leases.replace(LEASE_PLANNER, &PostParams::default(), &lease).await.map(drop)
}

/// The metadata to write back to a Lease. Leaves out labels and annotations: somebody may have added so many that etcd takes no further
/// write, and the Lease could never be renewed. Keeps finalizers and owners, because the admission policy lets agents change neither.
pub fn metadata_to_write(read: ObjectMeta) -> ObjectMeta {
    let ObjectMeta { name, uid, resource_version, finalizers, owner_references, .. } = read;
    ObjectMeta { name, uid, resource_version, finalizers, owner_references, ..ObjectMeta::default() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]
mod tests {
    use std::sync::atomic::AtomicU32;

    use http::{Request, Response};
    use k8s_openapi::jiff::SignedDuration;
    use kube::client::Body;

    use super::*;

    #[test]
    fn a_lease_expires_after_at_most_a_minute_whatever_its_duration() {
        let minute = Duration::from_mins(1);
        for (seconds, accepted) in [
            (None, LEASE_DURATION),
            (Some(-1), LEASE_DURATION),
            (Some(5), Duration::from_secs(5)),
            (Some(60), minute),
            (Some(61), minute),
            (Some(i32::MAX), minute),
        ] {
            let spec = LeaseSpec { lease_duration_seconds: seconds, ..LeaseSpec::default() };
            let duration = lease_duration(Some(&spec));
            assert_eq!(duration, accepted, "{seconds:?}");
            let seen = LeaseView { holder: Some("other".into()), unchanged_for: accepted, duration };
            assert_eq!(next_step(Some(&seen), "me"), LeaseStep::Take, "{seconds:?}");
        }
        assert_eq!(lease_duration(None), LEASE_DURATION);
    }

    /// An API server that has one Lease, and nothing else. Counts what it is asked; each watch ends with its first event.
    fn with_lease(time: Timestamp, asked: &Arc<AtomicU32>) -> Client {
        let spec = LeaseSpec { renew_time: Some(MicroTime(time)), ..LeaseSpec::default() };
        let metadata = ObjectMeta { resource_version: Some("1".into()), ..ObjectMeta::default() };
        let lease = watch::Sender::new(Lease { metadata, spec: Some(spec) });
        let asked = asked.clone();
        let serve = tower::service_fn(move |request: Request<Body>| {
            let lease = lease.clone();
            asked.fetch_add(1, Ordering::Relaxed);
            async move {
                let (is_write, is_list) = (request.method() == "PUT", request.uri().path().ends_with("/leases"));
                let is_watch = request.uri().query().unwrap_or_default().contains("watch=");
                let sent = request.into_body().collect_bytes().await.unwrap();
                if is_write {
                    lease.send_modify(|lease| {
                        let next: u32 = lease.metadata.resource_version.as_ref().unwrap().parse().unwrap();
                        *lease = serde_json::from_slice(&sent).unwrap();
                        lease.metadata.resource_version = Some((next + 1).to_string());
                    });
                }
                if is_watch {
                    lease.subscribe().changed().await.unwrap();
                }
                let lease = serde_json::json!(*lease.borrow());
                let body = match () {
                    () if is_watch => serde_json::json!({"type": "MODIFIED", "object": lease}),
                    () if is_list => serde_json::json!({"metadata": {"resourceVersion": "1"}, "items": [lease]}),
                    () => lease,
                };
                Response::builder().body(Body::from(body.to_string().into_bytes()))
            }
        });
        Client::new(serve, NAMESPACE)
    }

    /// A candidate that watches the Lease, as one of few.
    fn candidate(client: &Client, name: &str) -> Candidate {
        let few = watch::Sender::new(Place { rank: None, agents: 4 });
        Candidate::new(client.clone(), name.to_owned(), few.subscribe())
    }

    #[tokio::test(start_paused = true)]
    async fn a_candidate_that_watches_takes_the_lease_as_soon_as_it_is_free() {
        for is_released in [true, false] {
            let asked = Arc::<AtomicU32>::default();
            let client = with_lease(clock::now(), &asked);
            let mut holder = candidate(&client, "holder");
            holder.acquire().await;
            let mut next = candidate(&client, "next");
            let mut others = std::pin::pin!(next.acquire());
            let lives = timeout(Duration::from_mins(10), holder.keep());
            tokio::select! {
                _ = &mut others => panic!("the holder lives"),
                ended = lives => assert!(ended.is_err(), "the holder has given up"),
            }
            // A renewal and its event every five seconds, and a list: this server's watches end with their first event.
            let per_minute = f64::from(asked.load(Ordering::Relaxed)) / 10.0;
            assert!((24.0..30.0).contains(&per_minute), "{per_minute}");
            let died = Instant::now();
            if is_released {
                release(client.clone(), "holder").await.unwrap();
            }
            others.await;
            let longest = if is_released { Duration::from_secs(1) } else { take_after(LEASE_DURATION, 1.0) };
            assert!(died.elapsed() <= longest, "released: {is_released}, taken after {:?}", died.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_planner_that_ends_before_it_has_taken_the_time_limits_over_leaves_them_to_the_next_one() {
        for hours in [-1, 1] {
            let before = clock::now() + SignedDuration::from_hours(hours);
            let client = with_lease(before, &Arc::default());
            let is_near = |time: Option<Timestamp>, other| time.unwrap().duration_since(other).abs().as_secs() < 300;

            let mut first = candidate(&client, "first");
            assert!(is_near(first.acquire().await, before));
            // It ends, after it has renewed the Lease.
            let _ = timeout(RENEW_EVERY * 2, first.keep()).await;
            let mut second = candidate(&client, "second");
            let told = second.acquire().await;
            // By a clock that was ahead they end late at worst.
            assert!(is_near(told, if hours < 0 { before } else { clock::now() }), "{hours}: {told:?}");
            // This one has taken them over when it ends.
            second.has_limits().store(true, Ordering::Relaxed);
            let _ = timeout(RENEW_EVERY * 2, second.keep()).await;
            let told = candidate(&client, "third").acquire().await;
            assert!(is_near(told, clock::now()), "{hours}: {told:?}");
        }
    }

    /// As an API server that has stopped answering.
    #[tokio::test(start_paused = true)]
    async fn the_holder_gives_up_before_others_take_the_lease() {
        let hangs = tower::service_fn(|_: Request<Body>| {
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>()
        });
        let mut holder =
            Candidate::new(Client::new(hangs, NAMESPACE), "me".into(), watch::Sender::default().subscribe());
        // The answer to the last renewal took a second.
        tokio::time::advance(Duration::from_secs(1)).await;
        let others_may_take_it = holder.renewed + LEASE_DURATION;
        holder.keep().await;
        assert!(Instant::now() <= others_may_take_it);
    }
}
