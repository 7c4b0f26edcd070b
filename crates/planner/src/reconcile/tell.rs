//! What the planner tells people besides the status it computes: Events, and what keeps it from planning at all.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{Resource, ResourceExt};
use tracing::warn;

use super::{ApiError, Caches, Planner, instance};
use api::{FluxInstance, FluxInstanceStatus, INSTANCE};
use base::error_chain;
use cluster::clock;
use model::status::{Obstacle, stopped, warnings};

impl Planner {
    /// What keeps the planner from planning at all, where people look.
    pub(super) async fn report(&mut self, caches: &Caches, error: &ApiError) {
        let words = error_chain(error);
        warn!(error = words, "planning failed");
        if error.is_lasting() {
            let instances = caches.instances.state();
            let flux = instances.iter().find(|instance| instance.name_any() == INSTANCE);
            let about = flux.map_or_else(instance::default_reference, |flux| flux.object_ref(&()));
            let reason = error.reason();
            self.announcer.say(&about, true, reason, &words).await;
            let Some(flux) = flux else { return };
            let next =
                stopped(flux.status.as_ref().unwrap_or(&FluxInstanceStatus::default()), reason, &words, clock::now());
            if let Err(error) = instance::write_status(&self.client, flux, &next).await {
                warn!(error = error_chain(&error), "the FluxInstance's status could not be written");
            }
        }
    }

    /// Problems and what somebody has to mend as warnings, changes of phase as plain news.
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
            self.announcer.say(&about, false, &format!("{:?}", next.phase), message).await;
        }
        for Condition { type_, message, .. } in warnings(flux.status.as_ref(), next) {
            self.announcer.say(&about, true, &type_, &message).await;
        }
    }
}
