//! Events, and the status while the planner can't plan at all.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{Resource, ResourceExt};
use tracing::{debug, warn};

use super::{ApiError, Caches, Planner, instance};
use api::{FluxInstance, FluxInstanceStatus, INSTANCE, InstancePhase};
use base::error_chain;
use cluster::clock;
use model::{conditions::warnings, obstacle::Obstacle, status::stopped};

impl Planner {
    /// Logs why planning failed. If a user has to fix it, also publishes an Event and writes it to the FluxInstance's
    /// status.
    pub(super) async fn report(&mut self, caches: &Caches, error: &ApiError) {
        if matches!(error.code(), Some(404 | 409)) {
            // Another planner, or an agent, was faster, or somebody has deleted the object: the next round looks again.
            debug!(%error, "the object has changed since it was read");
            return;
        }
        let message = error_chain(error);
        warn!(error = message, "planning failed");
        if error.is_lasting() {
            let instances = caches.instances.state();
            let flux = instances.iter().find(|instance| instance.name_any() == INSTANCE);
            let about = flux.map_or_else(instance::default_reference, |flux| flux.object_ref(&()));
            let reason = error.reason();
            if let Some(flux) = flux {
                let before = flux.status.clone().unwrap_or_default();
                let next = stopped(&before, reason, &message, clock::now());
                if let Err(error) = instance::write_status(&self.client, flux, &next).await {
                    warn!(error = error_chain(&error), "can't write the FluxInstance's status");
                }
            }
            self.announcer.say(&about, true, reason, &message).await;
        }
    }

    /// Publishes Events: a warning for each problem that a user has to fix and for a lead that is away, a normal one for each other
    /// change of phase.
    pub(super) async fn announce(
        &mut self,
        flux: &FluxInstance,
        next: &FluxInstanceStatus,
        obstacle: Option<&Obstacle>,
    ) {
        let about = flux.object_ref(&());
        let message = next.message.as_deref().unwrap_or_default();
        if let Some(Obstacle::Problem { reason, message }) = obstacle {
            self.announcer.say(&about, true, reason, message).await;
        } else if flux.status.as_ref().is_none_or(|before| before.phase != next.phase) {
            // Degraded: the lead is away although nobody asked for a restart.
            let is_warning = next.phase == InstancePhase::Degraded;
            self.announcer.say(&about, is_warning, &format!("{:?}", next.phase), message).await;
        }
        for Condition { type_, message, .. } in warnings(flux.status.as_ref(), next) {
            self.announcer.say(&about, true, &type_, &message).await;
        }
    }
}
