//! Where a round's inputs come from, and what is remembered of earlier answers. All of it can be lost: a new agent asks again.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, UNIX_EPOCH},
};

use kube::{Api, Client, ResourceExt};
use tokio::sync::{Notify, watch};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use super::{
    applied::Applied,
    broker_log::{self, Rejected},
    broker_state::{self, BrokerState},
    local_roster::{host_roster, names_another_machine},
    node_inputs::{Instance, NodeInputs},
    published::PublishedState,
    refusal::RefusalCache,
    stall_detector::StallDetector,
    watched_objects::{OwnWrites, Presence, WatchedObjects, watch_objects},
};
use crate::{error::StepError, node_ops::NodeOps, reporter::Reporter};
use api::{ANNOTATION_CONSUMED, CONFIGMAP_DEFAULT, FluxInstanceSpec, NAMESPACE};
use base::{chance::jittered, error_chain};
use cluster::lease_rules::Place;
use hostapi::{Host, HostView, Preflight};

/// While there is no FluxInstance: how long an answer counts that none is about to come.
const NONE_AGAIN: Duration = Duration::from_mins(1);

/// Follows the broker's log below one prefix, until it is dropped.
struct LogTask {
    prefix: PathBuf,
    _task: AbortOnDropHandle<()>,
}

/// The FluxInstance as it was last read. It stays known while the API server is away.
#[derive(Debug, Default)]
struct LastInstance {
    uid: String,
    generation: i64,
    spec: FluxInstanceSpec,
}

/// What an agent observes its node through.
pub struct Sources {
    client: Client,
    began: Instant,
    /// This agent's place among the candidates for the planner's Lease.
    pub place: watch::Sender<Place>,
    /// Objects that this agent watches.
    pub watched: watch::Receiver<WatchedObjects>,
    /// Makes its own writes known there.
    pub own_writes: OwnWrites,
    /// What the broker says over its socket.
    pub broker: watch::Receiver<BrokerState>,
    /// Makes the task behind `broker` ask at once.
    pub ask_broker: Arc<Notify>,
    rejected: watch::Sender<Rejected>,
    log: Option<LogTask>,
    instance: LastInstance,
    /// metadata.uid of our Node, read when the planner names another one.
    node_uid: Option<String>,
    /// metadata.uid of the Node of our name that is another machine.
    replaced_as: Option<String>,
    /// What the planner has published, as far as it concerns this node.
    pub published: PublishedState,
    /// Detects that this process was suspended. What the API server said before that must not start a broker.
    pub stall: StallDetector,
    /// The instance's prefix, as our FluxNode names it.
    prefix: Option<String>,
    /// What preflight found, once it has passed.
    pub preflight: Option<Preflight>,
    /// The host in the last round.
    last_host: HostView,
    refusal: RefusalCache,
    /// Until then, no first FluxInstance is expected.
    none_to_come_until: Option<Instant>,
}

impl Sources {
    /// Begins to watch what concerns node `node_name`, and to follow the broker of `host`.
    pub fn begin(client: &Client, node_name: &str, host: Arc<dyn Host>) -> Self {
        let ask_broker = Arc::<Notify>::default();
        let (own_writes, watched) = watch_objects(client, node_name);
        Self {
            client: client.clone(),
            began: Instant::now(),
            place: watch::Sender::default(),
            watched,
            own_writes,
            broker: broker_state::follow(host, ask_broker.clone()),
            ask_broker,
            rejected: watch::channel(Rejected::new()).0,
            log: None,
            instance: LastInstance::default(),
            node_uid: None,
            replaced_as: None,
            published: PublishedState::default(),
            stall: StallDetector::begin(),
            prefix: None,
            preflight: None,
            last_host: HostView::default(),
            refusal: RefusalCache::default(),
            none_to_come_until: None,
        }
    }

    /// Observes host, broker and API server. What the planner has published is read by name, and only if our FluxNode says
    /// that there is something new.
    ///
    /// # Errors
    /// The host can't be observed.
    pub async fn observe(&mut self, ops: &NodeOps, reporter: &Reporter) -> Result<NodeInputs, StepError> {
        // What changes from here on begins the next round.
        let watched = self.watched.borrow_and_update().clone();
        drop(self.broker.borrow_and_update());
        let rank = watched.own_spec().and_then(|spec| spec.rank);
        self.place.send_if_modified(|known| std::mem::replace(&mut known.rank, rank) != rank);
        self.follow_instance(&watched);
        self.check_stall(&watched, reporter).await;
        let host = ops.observe_again(&self.last_host).await?;
        self.follow_host(&host);
        self.look_for_another_machine(&watched, &host);
        self.follow_log(&host);
        let is_here = watched.instance.here().is_some() && !watched.is_over();
        let is_read = !is_here || self.read_published(&watched, reporter, &host).await;
        let local_roster = host_roster(&host);
        Ok(NodeInputs {
            at: Instant::now(),
            unix_time: UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64()),
            agent_age: self.began.elapsed(),
            node: reporter.name().to_owned(),
            node_uid: self.node_uid.clone(),
            is_replaced: self.is_replaced(&watched),
            instance: match watched.instance_uid() {
                _ if watched.is_over() => Instance::Over,
                Some(uid) => Instance::Here { uid },
                None => Instance::Unknown,
            },
            nothing_wanted: matches!(watched.instance, Presence::Gone) && !self.first_instance_is_about_to_come().await,
            spec: self.instance.spec.clone(),
            generation: self.instance.generation,
            uninstall: host.state.as_ref().map_or_else(Default::default, |state| {
                watched.uninstall_of(&state.instance_uid).unwrap_or_else(|| state.uninstall.clone())
            }),
            flux_node: watched.flux_node.here().cloned(),
            wish: watched.wish(),
            roster: self.published.roster.clone(),
            newer_roster: self.published.newer_roster().map(str::to_owned),
            roster_is_gone: self.published.roster_is_gone,
            is_behind: !is_read || watched.lacks_certificate() || self.stall.woke_up().is_some(),
            packages_expected: is_here && self.published.expects_sets(Instant::now()),
            published: self.published.sets().iter().map(|(digest, _)| digest.clone()).collect(),
            held_archives: Vec::new(),
            applied: Applied::of(&host),
            local_roster,
            preflight: self.preflight.clone(),
            host,
            broker: self.broker.borrow().clone(),
            rejected: self.rejected.borrow().clone(),
            refusal: None,
            peer: None,
            port_problems: Vec::new(),
            damage: None,
            pods: None,
            overlapping_on: None,
        })
    }

    /// uid of the FluxInstance as it was last read; empty before that.
    pub fn instance_uid(&self) -> &str {
        &self.instance.uid
    }

    /// The FluxNode of our name describes another machine.
    pub fn is_replaced(&self, watched: &WatchedObjects) -> bool {
        self.replaced_as.is_some() && watched.own_spec().map(|spec| &spec.node_uid) == Some(&self.replaced_as)
    }

    /// The spec that preflight checks against: with the port that the running epoch has (another one is for the next epoch), and
    /// the prefix of the instance. While the API server has not answered, both come from the files of the last start.
    pub fn running_spec(&self) -> FluxInstanceSpec {
        let mut spec = self.instance.spec.clone();
        if self.prefix.is_some() {
            spec.prefix.clone_from(&self.prefix);
        }
        let watched = self.watched.borrow();
        let has_rank = watched.own_spec().is_some_and(|own| own.rank.is_some());
        if let Some(roster) = self.published.roster.as_ref().filter(|_| has_rank) {
            spec.broker.port = Some(roster.settings.port);
        }
        let is_silent = matches!(watched.instance, Presence::Unknown) && self.published.roster.is_none();
        if let Some(roster) = is_silent.then(|| host_roster(&self.last_host)).flatten() {
            spec.broker.port = Some(roster.settings.port);
            spec.prefix = self.last_host.state.as_ref().map(|state| state.prefix.display().to_string());
        }
        spec
    }

    /// Forgets what belongs to an instance: this host is clean.
    pub fn forget_instance(&mut self) {
        (self.published, self.preflight, self.log) = (PublishedState::default(), None, None);
        self.last_host = HostView::default();
    }

    /// Stops following the broker's log, whose directory is about to be removed.
    pub fn stop_log(&mut self) {
        self.log = None;
    }

    fn follow_instance(&mut self, watched: &WatchedObjects) {
        let Some(instance) = watched.instance.here() else { return };
        let place = |spec: &FluxInstanceSpec| (spec.prefix.clone(), spec.broker.port);
        if place(&self.instance.spec) != place(&instance.spec) {
            self.preflight = None;
        }
        let uid = instance.uid().unwrap_or_default();
        if self.instance.uid != uid {
            (self.published, self.preflight) = (PublishedState::default(), None);
        }
        self.instance = LastInstance {
            generation: instance.metadata.generation.unwrap_or_default(),
            spec: instance.spec.clone(),
            uid,
        };
        let own = watched.own_spec().filter(|own| own.instance_uid.as_ref() == Some(&self.instance.uid));
        self.prefix = own.and_then(|own| own.prefix.clone());
    }

    /// After a suspension, what is remembered counts again once the API server repeats it.
    async fn check_stall(&self, watched: &WatchedObjects, reporter: &Reporter) {
        if let Some(woke_up) = self.stall.woke_up()
            && let Ok(node) = reporter.of(reporter.name()).await
            && node.as_ref().map(|node| &node.spec) == watched.own_spec()
        {
            self.stall.confirmed(woke_up);
        }
    }

    fn follow_host(&mut self, host: &HostView) {
        // A claimed host keeps its prefix; one that is not claimed, or no longer, goes where the instance is.
        let is_elsewhere =
            |passed: &Preflight| self.prefix.as_ref().is_some_and(|prefix| passed.prefix != Path::new(prefix));
        if host.state.is_none() && self.preflight.as_ref().is_some_and(is_elsewhere) {
            self.preflight = None;
        }
        // Resources that can't be read have not gone, and one observation alone may have caught a change half-way.
        let is_sure = host.resources.cores > 0 && host.resources == self.last_host.resources;
        if let Some(preflight) = &mut self.preflight {
            preflight.static_cpus = host.static_cpus;
            if is_sure {
                preflight.resources = host.resources;
            }
        }
        self.last_host = host.clone();
    }

    /// Remembered, because another machine's FluxNode says nothing about it for a moment when that machine is between two
    /// brokers.
    fn look_for_another_machine(&mut self, watched: &WatchedObjects, host: &HostView) {
        let (Some(spec), false) = (watched.own_spec(), self.is_replaced(watched)) else { return };
        let status = watched.flux_node.here().and_then(|node| node.status.as_ref());
        self.replaced_as = names_another_machine(host, spec, status).then(|| spec.node_uid.clone()).flatten();
        if self.replaced_as.is_some() {
            warn!(
                "another machine has this node's name: this agent starts and reports nothing until its node is renamed"
            );
        }
    }

    /// Returns false if something could not be read.
    async fn read_published(&mut self, watched: &WatchedObjects, reporter: &Reporter, host: &HostView) -> bool {
        let mut is_read = true;
        let spec = watched.own_spec().cloned().unwrap_or_default();
        if spec.node_uid.is_some() && spec.node_uid != self.node_uid {
            match reporter.node_uid().await {
                Ok(uid) => self.node_uid = uid,
                Err(error) => {
                    is_read = false;
                    debug!(error = error_chain(&error), "can't read our own Node");
                }
            }
        }
        if let Err(error) = self.published.refresh(&self.client, &spec, watched, host).await {
            // The broker keeps running with what was read before.
            is_read = false;
            debug!(error = error_chain(&error), "can't read what the planner has published");
        }
        self.published.share(host_roster(host));
        is_read
    }

    fn follow_log(&mut self, host: &HostView) {
        let prefix = host.state.as_ref().map(|state| state.prefix.clone());
        if self.log.as_ref().map(|log| &log.prefix) != prefix.as_ref() {
            self.log = prefix.map(|prefix| {
                let task = broker_log::follow(prefix.clone(), self.rejected.clone());
                LogTask { prefix, _task: AbortOnDropHandle::new(task) }
            });
        }
    }

    /// Why the broker does not come up, if the lead's FluxNode says so. Reads that object, so this must not delay the start of a broker.
    /// `broker_started`: when this agent started the broker.
    pub async fn find_refusal(
        &mut self,
        reporter: &Reporter,
        inputs: &NodeInputs,
        broker_started: Option<Instant>,
    ) -> Option<String> {
        let roster = inputs.roster.as_deref()?;
        let rank = inputs.own_spec().and_then(|own| own.rank);
        let age = broker_started.map(|started| started.elapsed());
        self.refusal.find(reporter, &inputs.host, &inputs.broker, roster, rank, age).await
    }

    /// ConfigMap flux-default is about to become the first FluxInstance, so something will be wanted soon.
    async fn first_instance_is_about_to_come(&mut self) -> bool {
        if self.none_to_come_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let maps = Api::<k8s_openapi::api::core::v1::ConfigMap>::namespaced(self.client.clone(), NAMESPACE);
        let map = cluster::call("get ConfigMap flux-default", maps.get_opt(CONFIGMAP_DEFAULT)).await;
        let is_to_come = match map {
            Ok(map) => map.is_some_and(|map| !map.annotations().contains_key(ANNOTATION_CONSUMED)),
            Err(_) => true,
        };
        self.none_to_come_until = (!is_to_come).then(|| Instant::now() + jittered(NONE_AGAIN));
        is_to_come
    }
}
