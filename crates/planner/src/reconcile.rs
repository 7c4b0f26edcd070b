//! The planner's loop: wake up on any change, gather further changes for a moment, observe everything, decide, write.

mod needs;
mod tell;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream::select};
use k8s_openapi::jiff::Timestamp;
use kube::{Client, Resource, ResourceExt};
use metrics::Metrics;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};

use self::needs::Sources;
use super::{
    caches::{Caches, ReadNode, readable, unreadable},
    instance,
    kept::{Kept, Versions},
    marks,
    measured::measured,
    package_set::Resolver,
    publish,
};
use api::{
    ANNOTATION_RESTART, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, CONFIGMAP_DEFAULT, CONFIGMAP_ROSTER, FluxInstance,
    FluxInstanceStatus, FluxNodeStatus, INSTANCE, Roster, in_one_line, parse_duration,
};
use base::error_chain;
use cluster::{
    Announcer, ApiError, call, certificate, clock, published,
    store::{self, Document},
};
use model::{
    agents::Agents,
    eligibility::NodeView,
    forsaken::forsaken,
    kubernetes::unsupported,
    labels,
    marks::NodeChange,
    members::Planned,
    observed::{Observed, Reports, Unusable, retain_secs},
    obstacle::Obstacle,
    project::project_all,
    protect::Protection,
    roster::{Decision, MovedDeadline, decide, decide_unserved, move_limits, no_lead},
    status::{differ_by_counts, foremost, status, told_while_waiting},
    validate,
};

/// The planner gathers changes for this long after the first one, which may have come during a round: a burst of joins becomes one revision.
/// Later joins are gathered by the lead: after a live change it applies the newest roster, however many revisions that is ahead.
const GATHER: Duration = Duration::from_millis(100);
/// It gathers at least this long after a round: by then its stores usually have what that round wrote, so the next one does not write that again.
const LEAST_GATHER: Duration = Duration::from_millis(20);
/// Plan at least this often even without changes, because some decisions depend only on time (retain, patience).
const TICK: Duration = Duration::from_secs(2);
/// Pause for each member between two writes of the FluxInstance's status that change only counts: the API server sends each write to every agent, so
/// this makes 200 such messages a second.
const COUNT_PAUSE: Duration = Duration::from_millis(5);
/// The longest such pause, of 1,000 members and more: people look at the counts.
const LONGEST_COUNT_PAUSE: Duration = Duration::from_secs(5);
/// In each round, each of these ends after this time, and the next round goes on with the rest: writing annotations, writing FluxNodes (but for the lead's),
/// deleting FluxNodes, writing labels. Thousands of writes take longer, and nodes that join meanwhile would wait for the next roster.
const LONGEST_WRITES: Duration = Duration::from_secs(2);
/// A FluxNode that can't be written is reported after this long: most failures are over sooner.
const REPORT_AFTER: Duration = Duration::from_secs(10);
/// After a failed write of annotations or labels of Nodes, how long until the next attempt.
const MARK_AGAIN: Duration = Duration::from_mins(1);

/// Plans until the future is dropped. `predecessor_time`: the present time by the previous planner's clock, if known.
pub async fn run(
    client: Client,
    identity: &str,
    predecessor_time: Option<Timestamp>,
    has_limits: &AtomicBool,
    metrics: &Metrics,
) {
    let (caches, changes) = Caches::watch(&client);
    let (versions, of_versions) = Versions::watch(&client);
    let mut changes = pin!(select(changes, of_versions));
    let mut planner = Planner {
        announcer: Announcer::new(client.clone(), identity),
        client,
        versions,
        roster: Kept::default(),
        broker_toml: Kept::default(),
        certificate: Kept::default(),
        no_default: Kept::default(),
        resolver: Resolver::default(),
        clock_ahead_secs: predecessor_time.map(|before| clock::now().as_second() - before.as_second()),
        moved: None,
        moved_deadline: None,
        waiting_since: Instant::now(),
        had_roster: false,
        stale_flux_nodes: HashMap::new(),
        sources: Sources::default(),
        validated: None,
        is_new_enough: false,
        is_cleaned_up: false,
        agents: Agents::default(),
        protection: Protection::default(),
        mark_again: BTreeMap::new(),
        refused: BTreeMap::new(),
        metrics: metrics.clone(),
        status_written: None,
    };
    let (mut complete, mut first_change) = (false, None);
    loop {
        // Polling the stream is also what fills the stores.
        if first_change.is_none() {
            let _ = timeout(TICK, changes.next()).await;
        }
        let now = Instant::now();
        // When everything is being deleted, the right to write is gone within half a second, so don't gather.
        let gathered = if caches.is_over() { now } else { gather_until(first_change, now) };
        while let Ok(Some(())) = timeout_at(gathered, changes.next()).await {}
        complete = complete || caches.are_complete().await;
        if !complete {
            continue;
        }
        let begun = Instant::now();
        let done;
        (done, first_change) = with_changes(&mut changes, planner.once(&caches)).await;
        metrics.planner_round(begun.elapsed());
        match done {
            // A deadline that was moved is in the status, which is written last.
            Ok(()) => has_limits.store(planner.clock_ahead_secs.is_none(), Ordering::Relaxed),
            // Another planner, or an agent, was faster, or somebody has deleted the object: look again.
            Err(error) if matches!(error.code(), Some(404 | 409)) => {
                planner.forget();
                debug!(%error, "the object has changed since it was read");
            }
            Err(error) => {
                planner.forget();
                planner.report(&caches, &error).await;
            }
        }
    }
}

/// Until when to gather changes. `first_change`: when the first one came during the last round, if any did.
fn gather_until(first_change: Option<Instant>, now: Instant) -> Instant {
    first_change.map_or(now + GATHER, |first| (first + GATHER).max(now + LEAST_GATHER))
}

/// Runs a round and takes up changes during it. Returns the round's result, and when the first change came, if any did. A round may write thousands
/// of FluxNodes: if the stores did not see them until its end, the next round would write them again.
async fn with_changes<T>(
    changes: &mut (impl Stream<Item = ()> + Unpin),
    round: impl Future<Output = T>,
) -> (T, Option<Instant>) {
    let (mut round, mut first_change) = (pin!(round), None);
    loop {
        tokio::select! {
            biased;
            done = &mut round => return (done, first_change),
            Some(()) = changes.next() => first_change = first_change.or_else(|| Some(Instant::now())),
        }
    }
}

/// Pause between two writes of the FluxInstance's status that change only counts, in an instance of `size` members.
fn count_pause(size: u32) -> Duration {
    (COUNT_PAUSE * size).min(LONGEST_COUNT_PAUSE)
}

/// What the planner writes onto Nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mark {
    /// Annotations that keep autoscalers away.
    Protection,
    /// What pods can select by.
    Label,
}

/// Why a FluxNode could not be written.
struct Refused {
    /// The first failed attempt.
    since: Instant,
    /// The last one: a round may end before its turn comes again.
    last: Instant,
    why: String,
}

struct Planner {
    client: Client,
    announcer: Announcer,
    versions: Versions,
    /// ConfigMap `flux-roster`.
    roster: Kept<Option<Arc<(Roster, Document)>>>,
    /// ConfigMap `flux-broker`; instanceID, epoch and revision of the roster that it is known to be made from, or from a newer one.
    broker_toml: Kept<((String, u64, u64), Document)>,
    /// Secret `flux-curve`.
    certificate: Kept<Option<Arc<certificate::Published>>>,
    /// There is nothing to be done about ConfigMap `flux-default`.
    no_default: Kept<()>,
    resolver: Resolver,
    /// How many seconds this planner's clock is ahead of the previous planner's; None once the time limits are moved. Fixed at the
    /// takeover, because a write that seemed to fail may have moved them.
    clock_ahead_secs: Option<i64>,
    /// The roster with the moved time limits, until it is known to be written.
    moved: Option<Roster>,
    /// The upgrade deadline that was running when this planner took over.
    moved_deadline: Option<MovedDeadline>,
    /// When this planner got the Lease or, if the roster (or the FluxInstance with it) vanished later, when it noticed
    /// that.
    waiting_since: Instant,
    /// The FluxInstance had a roster in the previous round.
    had_roster: bool,
    /// FluxNodes that nothing needs any more, and since when.
    stale_flux_nodes: HashMap<String, Instant>,
    sources: Sources,
    /// uid and generation of the spec that was validated last, and what was wrong with it. Kept because validating a
    /// long lock takes time.
    validated: Option<(String, i64, Option<String>)>,
    /// The API server has a supported version.
    is_new_enough: bool,
    /// The objects that the planner made for a deleted instance have been deleted.
    is_cleaned_up: bool,
    agents: Agents,
    protection: Protection,
    /// After a failed write of annotations or labels of Nodes, when to try again.
    mark_again: BTreeMap<Mark, Instant>,
    /// The FluxNodes that could not be written, by name.
    refused: BTreeMap<String, Refused>,
    metrics: Metrics,
    /// When this planner has written the FluxInstance's status last.
    status_written: Option<Instant>,
}

impl Planner {
    async fn once(&mut self, caches: &Caches) -> Result<(), ApiError> {
        let flux_nodes = caches.flux_nodes.all();
        let (nodes, no_report) = (caches.nodes.all(), FluxNodeStatus::default());
        let nodes: Vec<_> = nodes.iter().map(AsRef::as_ref).collect();
        let reports: Reports = readable(&flux_nodes)
            .filter_map(|node| Some((node.metadata.name.as_deref()?, node.status.as_ref().unwrap_or(&no_report))))
            .collect();
        if caches.is_over() {
            let changes = self.protection.at_the_end(&nodes, &reports);
            self.mark(caches, &nodes, Mark::Protection, changes).await;
            self.mark(caches, &nodes, Mark::Label, labels::removals(&nodes)).await;
        }
        let instances = caches.instances.state();
        for other in instances.iter().filter(|instance| instance.name_any() != INSTANCE) {
            // What nobody serves keeps nothing from being served.
            if let Err(error) = instance::ignore(&self.client, other).await {
                debug!(
                    error = error_chain(&error),
                    name = other.name_any(),
                    "can't tell that a FluxInstance is ignored"
                );
            }
        }
        let flux = instances.iter().find(|instance| instance.name_any() == INSTANCE);
        let version = self.versions.of(CONFIGMAP_DEFAULT);
        if self.no_default.at(&version).is_none() && instance::ensure(&self.client).await? {
            // If it has just been marked, it has another version by now.
            self.no_default.keep(version, ());
        }
        if flux.is_none_or(|flux| flux.meta().deletion_timestamp.is_some()) {
            self.metrics.set_instance(None);
        }
        match flux {
            Some(flux) if flux.meta().deletion_timestamp.is_none() => {
                self.is_cleaned_up = false;
                self.plan(caches, flux, nodes, reports).await
            }
            // Once: the agents clean their hosts and delete their FluxNodes, so no host has anything of the instance now, and
            // nothing needs the roster any more.
            None if flux_nodes.is_empty() && !self.is_cleaned_up => {
                self.forget();
                publish::forget_instance(&self.client).await?;
                self.is_cleaned_up = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn plan(
        &mut self,
        caches: &Caches,
        flux: &FluxInstance,
        nodes: Vec<&NodeView>,
        reports: Reports<'_>,
    ) -> Result<(), ApiError> {
        let uid = flux.uid().unwrap_or_default();
        let mut status_before = flux.status.clone().unwrap_or_default();
        let fresh_id = uuid::Uuid::new_v4().to_string();
        let mut stored = self.read_roster().await?;
        if self.move_limits_to_our_clock(stored.as_deref(), &status_before).await? {
            stored = self.read_roster().await?;
        }
        let stored = stored.as_deref();
        if let Some(deadline) = &self.moved_deadline {
            deadline.apply(&mut status_before);
        }
        let has_roster = stored.is_some_and(|(roster, _)| roster.instance_uid == uid);
        if std::mem::replace(&mut self.had_roster, has_roster) && !has_roster {
            self.waiting_since = Instant::now();
        }
        let now = clock::now().as_second();
        let (pods, names) = (caches.pods.all(), nodes.iter().map(|node| node.name.as_str()));
        let agentless = self.agents.agentless(pods.iter().map(AsRef::as_ref), names, now);
        let mut seen = Observed {
            instance_uid: &uid,
            spec: &flux.spec,
            generation: flux.metadata.generation.unwrap_or_default(),
            status: &status_before,
            nodes,
            reports,
            roster: stored.map(|(roster, _)| roster),
            digest: None,
            certificate: None,
            is_certificate_gone: false,
            now,
            waited: self.waiting_since.elapsed(),
            restart_word: flux.annotations().get(ANNOTATION_RESTART).map(String::as_str),
            fresh_id: &fresh_id,
            agentless: &agentless,
            // Known after this round has written the FluxNodes. No decision depends on it.
            unusable: &BTreeMap::new(),
        };

        let unservable = self.unsupported().await?.or(self.invalid_spec(flux, &uid));
        // If the spec or the Kubernetes version can't be served, everything stays as it is.
        let is_unservable = unservable.is_some();
        let (digest, lacks_packages) = if is_unservable { (None, None) } else { self.packages(&seen).await? };
        let (fingerprint, lacks_certificate) = self.certificate(&mut seen).await?;
        let found = foremost([unservable, lacks_packages, lacks_certificate].into_iter().flatten());
        seen.digest = digest.as_deref();
        seen.certificate = fingerprint.as_deref();

        let decision = if is_unservable { decide_unserved(&seen) } else { decide(&seen) };
        let obstacle = match &decision {
            Decision::Wait(reason) => Some(told_while_waiting(&seen, found, reason.clone())),
            Decision::Keep | Decision::Write(_) => found,
        };
        let before = stored.map(|(_, document)| document);
        let (written, obstacle) = match self.write_decision(decision, before).await {
            // All but changes of the roster goes on.
            Err(error @ ApiError::UnreadableRoster { .. }) => {
                let problem = Obstacle::Problem { reason: error.reason(), message: error_chain(&error) };
                (None, foremost(obstacle.into_iter().chain([problem])))
            }
            written => (written?, obstacle),
        };
        let own = |roster: &&Roster| roster.instance_uid == uid;
        let roster = written.as_deref().map(|(roster, _)| roster).or(seen.roster.filter(own));
        seen.roster = roster;
        let planned = roster.map(|roster| Planned::observe(&seen, roster));
        if !caches.is_over() {
            let changes = self.protection.changes(&seen, planned.as_ref());
            self.mark(caches, &seen.nodes, Mark::Protection, changes).await;
        }
        let flux_nodes = caches.flux_nodes.all();
        self.publish(caches, &seen, planned.as_ref(), &flux_nodes).await?;
        // After that: the labels of many Nodes change just when their agents wait for what they are to do.
        if !caches.is_over() {
            self.mark(caches, &seen.nodes, Mark::Label, labels::changes(&seen, planned.as_ref())).await;
        }
        let unusable = self.unusable(&flux_nodes);
        let seen = Observed { unusable: &unusable, ..seen };
        let no_lead = planned.as_ref().and_then(|planned| no_lead(&seen, planned));
        let obstacle = foremost([obstacle, no_lead].into_iter().flatten());
        let next = status(&seen, seen.generation, planned.as_ref(), obstacle.as_ref());
        let lead_online = planned.as_ref().is_some_and(|planned| planned.members.is_shown_online(0));
        let dump_every = flux.spec.state.dump_every.as_deref().and_then(parse_duration);
        self.metrics.set_instance(Some(measured(&next, lead_online, dump_every, roster, &seen.reports)));
        let counts_only = flux.status.as_ref().is_some_and(|before| differ_by_counts(before, &next));
        let was_just_written = self.status_written.is_some_and(|written| written.elapsed() < count_pause(next.size));
        if counts_only && was_just_written {
            return Ok(());
        }
        self.announce(flux, &next, obstacle.as_ref()).await;
        if flux.status.as_ref() != Some(&next) {
            self.status_written = Some(Instant::now());
        }
        instance::write_status(&self.client, flux, &next).await
    }

    /// Takes over the previous planner's time limits, once; see [`move_limits`]. Returns true if the roster was
    /// written.
    async fn move_limits_to_our_clock(
        &mut self,
        stored: Option<&(Roster, Document)>,
        status: &FluxInstanceStatus,
    ) -> Result<bool, ApiError> {
        let Some(secs) = self.clock_ahead_secs else { return Ok(false) };
        self.moved_deadline = MovedDeadline::new(status, secs);
        // A write that timed out may have reached the API server.
        let is_written = self.moved.is_some() && stored.map(|(roster, _)| roster) == self.moved.as_ref();
        let to_move = stored.filter(|_| !is_written);
        self.moved = to_move.and_then(|(roster, _)| move_limits(roster, secs));
        if let (Some(roster), Some((_, document))) = (&self.moved, to_move) {
            self.roster.forget();
            match publish::write_roster(&self.client, roster, Some(document)).await {
                // The limits stay as the other clock has set them; the round goes on and says what is wrong.
                Err(ApiError::UnreadableRoster { .. }) => self.moved = None,
                written => drop(written?),
            }
        }
        self.clock_ahead_secs = None;
        Ok(is_written || self.moved.take().is_some())
    }

    /// Writes the decided roster in place of `before`. Returns it as it is stored; None if the decision writes none.
    async fn write_decision(
        &mut self,
        decision: Decision,
        before: Option<&Document>,
    ) -> Result<Option<Arc<(Roster, Document)>>, ApiError> {
        let Decision::Write(next) = decision else { return Ok(None) };
        let version = self.versions.of(CONFIGMAP_ROSTER);
        let written = publish::write_roster(&self.client, &next, before).await;
        // Then nothing was sent.
        if !matches!(written, Err(ApiError::UnreadableRoster { .. })) {
            self.roster.forget();
        }
        let written = Arc::new(written?);
        self.roster.keep_written(version, written.1.version.clone(), Some(written.clone()));
        Ok(Some(written))
    }

    /// The roster, as it is stored.
    async fn read_roster(&mut self) -> Result<Option<Arc<(Roster, Document)>>, ApiError> {
        let read = async { Ok(published::read_roster(&self.client).await?.map(Arc::new)) };
        self.roster.or_read(self.versions.of(CONFIGMAP_ROSTER), read).await
    }

    /// Reads everything again in the next round: after a write that may have failed or was not the only one.
    fn forget(&mut self) {
        self.roster.forget();
        self.broker_toml.forget();
        self.certificate.forget();
        self.no_default.forget();
        self.resolver.forget();
    }

    /// Why this Kubernetes is not supported; None if it is. Asks the API server in each round until its version is known
    /// and new enough, so that a mend is noticed.
    async fn unsupported(&mut self) -> Result<Option<Obstacle>, ApiError> {
        if self.is_new_enough {
            return Ok(None);
        }
        let found = match call("get the API server's version", self.client.apiserver_version()).await {
            Ok(version) => unsupported(Some((&version.major, &version.minor))),
            // The API server hides its version from us.
            Err(error) if matches!(error.code(), Some(403 | 404)) => unsupported(None),
            Err(error) => return Err(error),
        };
        self.is_new_enough = found.is_none();
        Ok(found)
    }

    /// What is wrong with the spec. Validates each generation only once.
    fn invalid_spec(&mut self, flux: &FluxInstance, uid: &str) -> Option<Obstacle> {
        let generation = flux.metadata.generation.unwrap_or_default();
        if self.validated.as_ref().is_none_or(|(of, seen, _)| (of.as_str(), *seen) != (uid, generation)) {
            let mut wrong = validate(&flux.spec);
            wrong.retain(|finding| !finding.is_servable);
            let wrong = (!wrong.is_empty()).then(|| in_one_line(&wrong));
            self.validated = Some((uid.to_owned(), generation, wrong));
        }
        let wrong = self.validated.as_ref().and_then(|(_, _, wrong)| wrong.clone());
        wrong.map(|message| Obstacle::Problem { reason: "InvalidSpec", message })
    }

    /// The FluxNodes that can't be read, or have not been written for [`REPORT_AFTER`].
    fn unusable(&self, flux_nodes: &[Arc<ReadNode>]) -> BTreeMap<String, Unusable> {
        let refused = self.refused.iter().filter(|(_, refused)| refused.last - refused.since >= REPORT_AFTER);
        let refused = refused.map(|(name, refused)| (name.clone(), Unusable::NotWritten(refused.why.clone())));
        unreadable(flux_nodes).map(|name| (name, Unusable::NotRead)).chain(refused).collect()
    }

    /// Writes what follows from the roster: `broker.toml` and each FluxNode's spec. Deletes stale FluxNodes. A FluxNode that
    /// can't be written, perhaps because its own agent has filled it, stops neither the others nor the status, which names it.
    async fn publish(
        &mut self,
        caches: &Caches,
        seen: &Observed<'_>,
        planned: Option<&Planned<'_>>,
        flux_nodes: &[Arc<ReadNode>],
    ) -> Result<(), ApiError> {
        let roster = planned.map(|planned| planned.roster);
        if let Some(roster) = roster {
            self.write_broker_toml(roster).await?;
        }
        self.remember_running_set(roster).await?;
        let is_local = |digest: &str| self.sources.is_local(digest, seen.spec.packages.mirror.as_ref());
        let projected = project_all(seen, planned, readable(flux_nodes), is_local);
        let names: BTreeSet<_> = projected.iter().map(|(flux_node, _)| flux_node.name_any()).collect();
        // The planner does not write the others any more.
        self.refused.retain(|name, _| names.contains(name));
        let client = self.client.clone();
        let mut written = pin!(publish::write_nodes(&client, projected, Instant::now() + LONGEST_WRITES));
        while let Some((name, result)) = written.next().await {
            match result {
                Ok(()) => drop(self.refused.remove(&name)),
                Err(error) => self.refuse(name, error_chain(&error)),
            }
        }
        self.collect(caches, seen, planned).await;
        Ok(())
    }

    /// Writes `broker.toml` if it is not known to be made from this roster.
    async fn write_broker_toml(&mut self, roster: &Roster) -> Result<(), ApiError> {
        let version = self.versions.of(CONFIGMAP_BROKER);
        let made_from = (roster.instance_id.clone(), roster.epoch, roster.revision);
        let before = match self.broker_toml.at(&version) {
            Some((of, _)) if *of == made_from => return Ok(()),
            Some((_, document)) => Some(document.clone()),
            None => store::read(&self.client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY).await?,
        };
        self.broker_toml.forget();
        let stored = publish::write_broker_toml(&self.client, roster, before).await?;
        self.broker_toml.keep_written(version, stored.version.clone(), (made_from, stored));
        Ok(())
    }

    /// Remembers that FluxNode `name` could not be written, and why.
    fn refuse(&mut self, name: String, why: String) {
        let now = Instant::now();
        match self.refused.entry(name) {
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                (known.last, known.why) = (now, why);
            }
            Entry::Vacant(new) => {
                warn!(error = why, "can't write a FluxNode");
                new.insert(Refused { since: now, last: now, why });
            }
        }
    }

    /// Writes annotations or labels of Nodes. A failure doesn't stop planning. Each by itself: if somebody guards the labels of Nodes, the
    /// annotations are written nevertheless.
    async fn mark(&mut self, caches: &Caches, observed: &[&NodeView], mark: Mark, changes: Vec<NodeChange>) {
        let is_too_early = self.mark_again.get(&mark).is_some_and(|again| Instant::now() < *again);
        // At the end, the right to write may be gone within seconds: the planner neither waits nor stops.
        let until = (!caches.is_over()).then(|| Instant::now() + LONGEST_WRITES);
        if changes.is_empty() || (is_too_early && until.is_some()) {
            return;
        }
        self.mark_again.remove(&mark);
        match marks::write(&self.client, &caches.nodes, observed, changes, until).await {
            Ok(()) => {}
            // A Node has changed meanwhile: the next round tries again.
            Err(error) if error.code() == Some(409) => {}
            Err(error) => {
                warn!(error = error_chain(&error), ?mark, "can't write onto Nodes");
                // One Node that refuses keeps no other one waiting that had no turn.
                if until.is_none_or(|until| Instant::now() < until) {
                    self.mark_again.insert(mark, Instant::now() + MARK_AGAIN);
                }
            }
        }
    }

    /// Deletes FluxNodes that have been stale for as long as a rank would be kept (`spec.ranks.retain`). One that can't be deleted keeps nothing else
    /// from being written, and is tried again after the same time.
    async fn collect(&mut self, caches: &Caches, seen: &Observed<'_>, planned: Option<&Planned<'_>>) {
        let retain = Duration::from_secs(retain_secs(seen.spec).unsigned_abs());
        let stale = forsaken(seen, planned);
        let until = Instant::now() + LONGEST_WRITES;
        self.stale_flux_nodes.retain(|name, _| stale.contains(name));
        for name in stale {
            let since = *self.stale_flux_nodes.entry(name.clone()).or_insert_with(Instant::now);
            if since.elapsed() >= retain
                && Instant::now() < until
                && let Some(newest) = caches.flux_nodes.named(&name)
                && let Ok(node) = &*newest.view
                // With another report than the observed one, its agent may be back.
                && seen.report(&name) == Some(&node.status.clone().unwrap_or_default())
                && let Err(error) = publish::delete_node(&self.client, node, newest.version).await
            {
                warn!(node = name, error = error_chain(&error), "can't delete the FluxNode of a Node that is gone");
                self.stale_flux_nodes.insert(name, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use futures::stream;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_takes_up_changes_and_tells_when_the_first_one_came() {
        let second = Duration::from_secs(1);
        for count in [0, 1, 3] {
            let (begin, taken) = (Instant::now(), AtomicU32::new(0));
            let changes = stream::iter(0..count).then(async |_| {
                sleep(second).await;
                taken.fetch_add(1, Ordering::Relaxed);
            });
            let mut changes = pin!(changes.chain(stream::pending()));
            // A round that ends only if all of them have been taken up.
            let round = async {
                while taken.load(Ordering::Relaxed) < count {
                    sleep(second).await;
                }
                "done"
            };
            let first = (count > 0).then_some(begin + second);
            assert_eq!(with_changes(&mut changes, round).await, ("done", first), "{count}");
        }
    }

    #[test]
    fn a_change_during_a_round_waits_no_longer_than_another_one() {
        let begin = Instant::now();
        let now = begin + Duration::from_secs(10);
        assert_eq!(gather_until(None, now), now + GATHER);
        for (waited, rest) in [(0, GATHER), (50, GATHER / 2), (90, LEAST_GATHER), (5000, LEAST_GATHER)] {
            let first = now - Duration::from_millis(waited);
            assert_eq!(gather_until(Some(first), now), now + rest, "{waited}");
        }
    }

    #[tokio::test]
    async fn a_round_ends_without_changes_and_after_the_last_one() {
        assert_eq!(with_changes(&mut stream::pending(), async { 7 }).await, (7, None));
        assert_eq!(with_changes(&mut stream::empty(), tokio::task::yield_now()).await, ((), None));
    }
}
