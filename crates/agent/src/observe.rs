//! What the agent sees in one round, and what it remembers of it.

use std::{path::Path, sync::atomic::Ordering, time::Instant};

use kube::ResourceExt;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use super::{
    act::StepError,
    copied::names_another_machine,
    log,
    published::Published,
    run::Agent,
    watch::{Presence, World},
};
use api::FluxInstanceSpec;
use base::error_chain;
use hostapi::Preflight;

/// What follows the broker's log, and below which prefix.
pub(super) struct LogTask(std::path::PathBuf, JoinHandle<()>);

impl Drop for LogTask {
    fn drop(&mut self) {
        self.1.abort();
    }
}

impl Agent {
    /// The host, and what the planner has published as far as it concerns this node: read by name, and only when our own
    /// FluxNode says that there is something new.
    pub(super) async fn observe(&mut self, world: &World) -> Result<(), StepError> {
        if let Some(instance) = world.instance.here() {
            let place = |spec: &FluxInstanceSpec| (spec.prefix.clone(), spec.broker.port);
            if place(&self.spec) != place(&instance.spec) {
                self.preflight = None;
            }
            self.spec = instance.spec.clone();
            self.generation = instance.metadata.generation.unwrap_or_default();
            self.members.store(instance.status.as_ref().map_or(0, |status| status.size), Ordering::Relaxed);
            self.actor.uninstall.clone_from(&self.spec.uninstall);
            let uid = instance.uid().unwrap_or_default();
            let told = world.node_spec().filter(|own| own.instance_uid.as_ref() == Some(&uid));
            self.told_prefix = told.and_then(|own| own.prefix.clone());
            if self.actor.instance_uid != uid {
                self.actor.instance_uid = uid;
                (self.published, self.preflight) = (Published::default(), None);
            }
            // Without a FluxNode nothing starts, but the agent keeps observing so that it can report the state.
            if let Presence::Gone = world.node
                && let Err(error) = self.reporter.create().await
            {
                warn!(error = error_chain(&error), "this node has no FluxNode, and none can be made");
            }
        }
        if self.memory.stood_still()
            && let Ok(node) = self.reporter.of(self.reporter.name()).await
            && node.as_ref().map(|node| &node.spec) == world.node_spec()
        {
            self.memory.refreshed();
        }
        let before = std::mem::replace(&mut self.view, self.actor.observe().await?).resources;
        // What is claimed stays where it is; a host that is not, or no longer, goes where the instance is.
        let is_elsewhere =
            |passed: &Preflight| self.told_prefix.as_ref().is_some_and(|told| passed.prefix != Path::new(told));
        if self.view.state.is_none() && self.preflight.as_ref().is_some_and(is_elsewhere) {
            self.preflight = None;
        }
        // What can't be read has not gone, and what one look alone has seen may have been about to change.
        let is_sure = self.view.resources.cores > 0 && self.view.resources == before;
        if let Some(preflight) = self.preflight.as_mut().filter(|_| is_sure) {
            preflight.resources = self.view.resources;
        }
        self.remember_the_end(world).await;
        self.look_for_another_machine(world);
        let online = self.is_online();
        self.starts.seen(self.view.broker.is_some(), online, self.view.died.as_deref(), Instant::now());
        self.follow_log();
        if world.instance.here().is_some() && !world.is_over() {
            let spec = world.node_spec().cloned().unwrap_or_default();
            if spec.node_uid.is_some() && spec.node_uid != self.node_uid {
                match self.reporter.node_uid().await {
                    Ok(uid) => self.node_uid = uid,
                    Err(error) => debug!(error = error_chain(&error), "can't read our own Node"),
                }
            }
            if let Err(error) = self.published.refresh(&self.client, &spec, world, &self.view).await {
                // What runs goes on with what is known.
                debug!(error = error_chain(&error), "can't read what the planner has published");
            }
        }
        self.look_at_packages();
        Ok(())
    }

    /// Remembered: what it says of itself is gone for a moment when it is between two brokers.
    fn look_for_another_machine(&mut self, world: &World) {
        let (Some(spec), false) = (world.node_spec(), self.is_replaced(world)) else { return };
        let told = world.node.here().and_then(|node| node.status.as_ref());
        self.replaced_as = names_another_machine(&self.view, spec, told).then(|| spec.node_uid.clone()).flatten();
        if self.replaced_as.is_some() {
            warn!(
                "another machine has this node's name: nothing is begun or told here until this one has a name of its own"
            );
        }
    }

    /// The FluxNode of our name is another machine's.
    pub(super) fn is_replaced(&self, world: &World) -> bool {
        self.replaced_as.is_some() && world.node_spec().map(|spec| &spec.node_uid) == Some(&self.replaced_as)
    }

    /// What is to happen at the end is asked for when the FluxInstance is gone: the host has to remember it. Nothing else waits
    /// for that, where the disk is full.
    async fn remember_the_end(&mut self, world: &World) {
        let (Some(state), Some(preflight)) = (&self.view.state, &self.preflight) else { return };
        let Some(end) = world.end_of(&state.instance_uid) else { return };
        if state.instance_uid == self.actor.instance_uid && state.uninstall != end {
            self.actor.uninstall = end;
            if let Err(error) = self.actor.claim(preflight).await {
                warn!(error = error_chain(&error), "this host does not remember yet how the instance is to end");
            }
        }
    }

    /// What this host has for others.
    fn look_at_packages(&mut self) {
        let ours = self.view.state.as_ref().filter(|state| state.instance_uid == self.actor.instance_uid);
        let prefix = ours.map(|state| state.prefix.as_path());
        self.serving.look(prefix, self.published.sets(), &self.view.environments);
    }

    fn follow_log(&mut self) {
        let prefix = self.view.state.as_ref().map(|state| state.prefix.clone());
        if self.log.as_ref().map(|task| &task.0) != prefix.as_ref() {
            self.log = prefix.map(|prefix| LogTask(prefix.clone(), log::follow(prefix, self.rejected.clone())));
        }
    }
}
