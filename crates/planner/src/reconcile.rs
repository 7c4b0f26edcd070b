//! The planner's loop: wake up on any change, gather further changes for a moment, observe everything, decide, write.

mod changes;
mod needs;
mod tell;

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::stream::select;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, Resource, ResourceExt};
use metrics::Metrics;
use tokio::time::Instant;
use tracing::debug;

use self::{changes::Changes, needs::Sources};
use super::{
    caches::{Caches, ReadNode, readable},
    flux_nodes::FluxNodeWriter,
    instance,
    kept::{Kept, Versions},
    marks::MarkWriter,
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
    kubernetes::unsupported,
    labels,
    members::Planned,
    nodes::Nodes,
    observed::{Observed, Reports},
    obstacle::Obstacle,
    project::project_all,
    protect::Protection,
    roster::{Decision, MovedDeadline, decide, decide_unserved, move_limits, no_lead},
    status::{differ_by_counts, foremost, status, told_while_waiting},
    validate,
};

/// Pause for each Node between two writes of the FluxInstance's status that change only counts and words: the API server sends each write to every
/// agent, member or not, so this makes 50 such messages a second up to 1,000 Nodes.
const COUNT_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause, from 1,000 Nodes on: people look at the counts.
const LONGEST_COUNT_PAUSE: Duration = Duration::from_secs(20);

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
    let changes = pin!(select(changes, of_versions));
    let mut changes = Changes::of(changes);
    let mut planner = Planner {
        announcer: Announcer::new(client.clone(), identity),
        flux_node_writer: FluxNodeWriter::new(client.clone()),
        annotation_writer: MarkWriter::new(client.clone(), "annotations"),
        label_writer: MarkWriter::new(client.clone(), "labels"),
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
        sources: Sources::default(),
        validated: None,
        is_new_enough: false,
        is_cleaned_up: false,
        agents: Agents::default(),
        protection: Protection::default(),
        metrics: metrics.clone(),
        status_written: None,
    };
    let mut complete = false;
    loop {
        // When everything is being deleted, the right to write is gone within half a second, so the round begins at once.
        changes.gather(|| caches.is_over()).await;
        complete = complete || caches.are_complete().await;
        if !complete {
            continue;
        }
        let was_over = caches.is_over();
        let round = async {
            let begun = Instant::now();
            let done = planner.once(&caches).await;
            metrics.planner_round(begun.elapsed());
            if let Err(error) = &done {
                planner.report(&caches, error).await;
            }
            done.is_ok()
        };
        // A round under way may hang in a write. Once the FluxInstance or the Namespace is being deleted, it is dropped, and the next round takes our
        // marks off the Nodes.
        if changes.during(round, || !was_over && caches.is_over()).await == Some(true) {
            // A deadline that was moved is in the status, which is written last.
            has_limits.store(planner.clock_ahead_secs.is_none(), Ordering::Relaxed);
        } else {
            planner.forget();
        }
    }
}

/// Pause between two writes of the FluxInstance's status that change only counts and words, in a cluster of `nodes` Nodes.
fn count_pause(nodes: usize) -> Duration {
    u32::try_from(nodes).map_or(LONGEST_COUNT_PAUSE, |nodes| COUNT_PAUSE.saturating_mul(nodes).min(LONGEST_COUNT_PAUSE))
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
    flux_node_writer: FluxNodeWriter,
    /// Writes the annotations that keep autoscalers away.
    annotation_writer: MarkWriter,
    /// Writes the labels that pods can select by.
    label_writer: MarkWriter,
    metrics: Metrics,
    /// When this planner has written the FluxInstance's status last.
    status_written: Option<Instant>,
}

impl Planner {
    /// One round. If there is no instance any more, or it or the Namespace is being deleted, takes our marks off the Nodes. Says on FluxInstances of
    /// other names that they are ignored, makes the default one, and then plans, or deletes the planner's objects once no host has anything of a
    /// deleted instance.
    async fn once(&mut self, caches: &Caches) -> Result<(), ApiError> {
        let flux_nodes = caches.flux_nodes.all();
        let (nodes, no_report) = (caches.nodes.all(), FluxNodeStatus::default());
        let nodes = nodes.iter().map(AsRef::as_ref).collect::<Nodes>();
        let reports: Reports = readable(&flux_nodes)
            .filter_map(|node| Some((node.metadata.name.as_deref()?, node.status.as_ref().unwrap_or(&no_report))))
            .collect();
        if caches.is_over() {
            let changes = self.protection.at_the_end(&nodes, &reports);
            self.annotation_writer.write_at_the_end(&caches.nodes, &nodes, changes).await;
            self.label_writer.write_at_the_end(&caches.nodes, &nodes, labels::removals(&nodes)).await;
        }
        let instances = caches.instances.state();
        for other in instances.iter().filter(|instance| instance.name_any() != INSTANCE) {
            // A FluxInstance that is ignored anyway must not stop the one that is served.
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

    /// Decides from all that is observed, and writes what follows; the status last.
    async fn plan(
        &mut self,
        caches: &Caches,
        flux: &FluxInstance,
        nodes: Nodes<'_>,
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
            self.annotation_writer.write(&caches.nodes, &seen.nodes, changes).await;
        }
        let flux_nodes = caches.flux_nodes.all();
        self.publish(&seen, planned.as_ref(), &flux_nodes).await?;
        self.flux_node_writer.delete_stale(&caches.flux_nodes, &seen, planned.as_ref()).await;
        // After that: the labels of many Nodes change just when their agents wait for what they are to do.
        if !caches.is_over() {
            let changes = labels::changes(&seen, planned.as_ref());
            self.label_writer.write(&caches.nodes, &seen.nodes, changes).await;
        }
        let unusable = self.flux_node_writer.unusable(&flux_nodes);
        let seen = Observed { unusable: &unusable, ..seen };
        let no_lead = planned.as_ref().and_then(|planned| no_lead(&seen, planned));
        let obstacle = foremost([obstacle, no_lead].into_iter().flatten());
        let next = status(&seen, seen.generation, planned.as_ref(), obstacle.as_ref());
        let lead_online = planned.as_ref().is_some_and(|planned| planned.members.is_shown_online(0));
        let dump_every = flux.spec.state.dump_every.as_deref().and_then(parse_duration);
        self.metrics.set_instance(Some(measured(&next, lead_online, dump_every, roster, &seen.reports)));
        let counts_only = flux.status.as_ref().is_some_and(|before| differ_by_counts(before, &next));
        let was_just_written =
            self.status_written.is_some_and(|written| written.elapsed() < count_pause(seen.nodes.len()));
        if counts_only && was_just_written {
            return Ok(());
        }
        if flux.status.as_ref() != Some(&next) {
            self.status_written = Some(Instant::now());
        }
        let client = self.client.clone();
        // At once: an Event that hangs must not hold the status back, and once the status is written nobody would send the Event.
        let writing = instance::write_status(&client, flux, &next);
        tokio::join!(writing, self.announce(flux, &next, obstacle.as_ref())).0
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

    /// Writes what follows from the roster: `broker.toml` and each FluxNode's spec. A FluxNode that can't be written stops nothing: the status names it.
    async fn publish(
        &mut self,
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
        self.flux_node_writer.write(projected).await;
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
}
