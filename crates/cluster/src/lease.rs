//! Acquires, renews and releases the Lease `flux-planner`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout, timeout_at};
use tracing::debug;

use crate::{
    clock,
    lease_rules::{LEASE_DURATION, LeaseStep, LeaseView, RENEW_EVERY, look_every, next_step, next_transitions},
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
    /// The number of candidates, as this one knows it: the more there are, the less often each looks.
    agents: Arc<AtomicU32>,
    sight: Sight,
    /// When this candidate sent its last successful write. The others count the Lease's duration from then or later.
    renewed: Instant,
    /// The time that the Lease told at the last look: by the previous planner's clock until `has_limits`, by ours afterwards.
    lease_time: Option<Timestamp>,
    /// This planner has taken over the time limits of the one before.
    has_limits: Arc<AtomicBool>,
}

impl Candidate {
    /// Creates a candidate with the name `identity`.
    pub fn new(client: Client, identity: String, agents: Arc<AtomicU32>) -> Self {
        Self {
            leases: Api::namespaced(client, NAMESPACE),
            identity,
            agents,
            sight: Sight::default(),
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
        loop {
            match timeout(RENEW_EVERY, self.step()).await {
                Ok(Ok(true)) => return self.lease_time,
                Ok(Ok(false)) => {}
                Ok(Err(error)) => debug!(%error, "can't read or take the Lease"),
                Err(_) => debug!("reading or taking the Lease took too long"),
            }
            // Jitter, so that the candidates don't all read the Lease at the same time.
            sleep(look_every(self.agents.load(Ordering::Relaxed)).mul_f64(0.5 + chance())).await;
        }
    }

    /// Renews the Lease, and returns when it is lost or when other candidates may consider it expired.
    pub async fn keep(&mut self) {
        let mut every = interval_at(Instant::now() + RENEW_EVERY, RENEW_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let until = self.renewed + LEASE_DURATION;
            let renewal = async {
                every.tick().await;
                timeout(RENEW_EVERY, self.step()).await
            };
            let Ok(renewal) = timeout_at(until, renewal).await else { return };
            match renewal {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return,
                Ok(Err(error)) => debug!(%error, "can't renew the Lease"),
                Err(_) => debug!("renewing the Lease took too long"),
            }
        }
    }

    /// Reads the Lease once and does what [`next_step`] decides. Returns true if this candidate holds the Lease
    /// afterwards.
    async fn step(&mut self) -> Result<bool, kube::Error> {
        let found = self.leases.get_opt(LEASE_PLANNER).await?;
        let view = found.as_ref().map(|lease| self.sight.view(lease, lease_duration(lease.spec.as_ref())));
        let step = next_step(view.as_ref(), &self.identity);
        self.lease_time = found.as_ref().zip(view.as_ref()).and_then(|(lease, view)| time_of(lease, view));
        let asked = Instant::now();
        let written = match (step, found) {
            (LeaseStep::Create, _) => {
                let metadata = ObjectMeta { name: Some(LEASE_PLANNER.to_owned()), ..ObjectMeta::default() };
                let lease = Lease { metadata, spec: Some(self.spec(0)) };
                self.leases.create(&PostParams::default(), &lease).await
            }
            (LeaseStep::Renew | LeaseStep::Take, Some(mut lease)) => {
                let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
                lease.spec = Some(self.spec(next_transitions(transitions, step)));
                lease.metadata = metadata_to_write(lease.metadata);
                // The replace names the resourceVersion that was read: if two candidates take the Lease at once, one
                // gets 409.
                self.leases.replace(LEASE_PLANNER, &PostParams::default(), &lease).await
            }
            _ => return Ok(false),
        };
        match written {
            Ok(lease) => {
                self.renewed = asked;
                self.sight.view(&lease, LEASE_DURATION);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
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
    let MicroTime(renewed) = lease.spec.as_ref()?.renew_time.as_ref()?;
    renewed.checked_add(view.unchanged_for).ok()
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
    use std::sync::Mutex;

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

    /// An API server that has one Lease, and nothing else.
    fn with_lease(time: Timestamp) -> Client {
        let spec = LeaseSpec { renew_time: Some(MicroTime(time)), ..LeaseSpec::default() };
        let metadata = ObjectMeta { resource_version: Some("1".into()), ..ObjectMeta::default() };
        let lease = Arc::new(Mutex::new(Lease { metadata, spec: Some(spec) }));
        let serve = tower::service_fn(move |request: Request<Body>| {
            let lease = Arc::clone(&lease);
            async move {
                let is_write = request.method() == "PUT";
                let sent = request.into_body().collect_bytes().await.unwrap();
                let mut lease = lease.lock().unwrap();
                if is_write {
                    let next: u32 = lease.metadata.resource_version.as_ref().unwrap().parse().unwrap();
                    *lease = serde_json::from_slice(&sent).unwrap();
                    lease.metadata.resource_version = Some((next + 1).to_string());
                }
                Response::builder().body(Body::from(serde_json::to_vec(&*lease).unwrap()))
            }
        });
        Client::new(serve, NAMESPACE)
    }

    #[tokio::test(start_paused = true)]
    async fn a_planner_that_ends_before_it_has_taken_the_time_limits_over_leaves_them_to_the_next_one() {
        for hours in [-1, 1] {
            let before = clock::now() + SignedDuration::from_hours(hours);
            let client = with_lease(before);
            let candidate = |name: &str| Candidate::new(client.clone(), name.to_owned(), Arc::default());
            let is_near = |time: Option<Timestamp>, other| time.unwrap().duration_since(other).abs().as_secs() < 300;

            let mut first = candidate("first");
            assert!(is_near(first.acquire().await, before));
            // It ends, after it has renewed the Lease.
            let _ = timeout(RENEW_EVERY * 2, first.keep()).await;
            let mut second = candidate("second");
            let told = second.acquire().await;
            // By a clock that was ahead they end late at worst.
            assert!(is_near(told, if hours < 0 { before } else { clock::now() }), "{hours}: {told:?}");
            // This one has taken them over when it ends.
            second.has_limits().store(true, Ordering::Relaxed);
            let _ = timeout(RENEW_EVERY * 2, second.keep()).await;
            let told = candidate("third").acquire().await;
            assert!(is_near(told, clock::now()), "{hours}: {told:?}");
        }
    }

    /// As an API server that has stopped answering.
    #[tokio::test(start_paused = true)]
    async fn the_holder_gives_up_before_others_take_the_lease() {
        let hangs = tower::service_fn(|_: Request<Body>| {
            std::future::pending::<Result<Response<Body>, std::convert::Infallible>>()
        });
        let mut holder = Candidate::new(Client::new(hangs, NAMESPACE), "me".into(), Arc::default());
        // The answer to the last renewal took a second.
        tokio::time::advance(Duration::from_secs(1)).await;
        let others_may_take_it = holder.renewed + LEASE_DURATION;
        holder.keep().await;
        assert!(Instant::now() <= others_may_take_it);
    }
}
