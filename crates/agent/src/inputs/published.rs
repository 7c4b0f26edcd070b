//! What the planner has published, as far as it concerns this node. The agent reads it by name, and only if its own FluxNode says
//! that there is something new, so that the cost of a node does not grow with the number of nodes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kube::Client;
use tracing::info;

use super::{
    assignment::{agreed, may_leave},
    local_roster::leads,
    watched_objects::WatchedObjects,
};
use crate::{error::StepError, node_ops::own_certificate};
use api::{CONDITION_RESTART_PENDING, FluxNodeSpec, PackageSet, Rank, Roster, Want};
use base::error_chain;
use cluster::{self, ApiError, certificate, published::read_packages};
use hostapi::HostView;

/// Pause before a roster of a newer version is read again: all agents of an unfinished upgrade do so.
const NEWER_AGAIN: Duration = Duration::from_secs(20);

/// What this agent has read of it.
#[derive(Default)]
pub struct PublishedState {
    /// The roster, at least as new as our FluxNode's spec.
    pub roster: Option<Arc<Roster>>,
    /// Why this version can't read the published roster, and when it was read.
    newer: Option<(Instant, String)>,
    /// Lead only: the API server has no roster any more.
    pub roster_is_gone: bool,
    /// The package sets by digest: the one that the spec asks for, then that of the running epoch if it is another one.
    packages: Vec<(String, PackageSet)>,
    /// Message of condition RestartPending when the package sets were read.
    pending: String,
    /// metadata.generation that the planner had followed when they were read: the same set may have another source by now.
    followed: i64,
    /// Since when the planner has reported that the certificate is gone.
    missing_since: Option<Instant>,
}

impl PublishedState {
    /// Reads what `spec` says is new, and the package sets if the planner reports something else about the next epoch. Also brings
    /// back the certificate from this host `view` if it is gone and another host can't be expected to have it.
    ///
    /// # Errors
    /// [`StepError::Api`]; what was read before stays.
    pub async fn refresh(
        &mut self,
        client: &Client,
        spec: &FluxNodeSpec,
        watched: &WatchedObjects,
        view: &HostView,
    ) -> Result<(), StepError> {
        let is_lead = leads(view, Some(spec));
        if self.newer.as_ref().is_some_and(|(read, _)| read.elapsed() < NEWER_AGAIN) {
            return Ok(());
        }
        if is_lead || self.newer.is_some() || may_be_outdated(self.roster.as_deref(), spec, view) {
            let found = match read_roster(client).await {
                Err(error @ ApiError::NewerRoster(_)) => {
                    self.newer = Some((Instant::now(), error_chain(&error)));
                    return Ok(());
                }
                read => read?,
            };
            self.newer = None;
            self.roster_is_gone = found.is_none();
            self.roster = found.map(Arc::new).or_else(|| self.roster.take());
        }
        // Package sets that were read for another roster, or another instance, do not count.
        let wanted = self.roster.as_ref().map(|roster| roster.settings.digest.as_str());
        let known = |digest: &str| self.packages.iter().any(|(known, _)| known == digest);
        let pending = watched.instance_status().and_then(|status| status.holding(CONDITION_RESTART_PENDING));
        let pending = pending.map_or("", |pending| pending.message.as_str());
        let missing = wanted.is_some_and(|wanted| !known(wanted) && !view.has_environment(wanted));
        let followed = watched.followed_generation();
        let is_old = self.pending != pending || self.followed != followed;
        if self.packages.is_empty() || missing || spec.want != Want::Run || is_old {
            self.packages = read_packages(client).await?.into_iter().map(|set| (set.digest(), set)).collect();
            pending.clone_into(&mut self.pending);
            self.followed = followed;
        }
        // Also if no broker runs: it may be waiting for the certificate.
        let rank = self.roster.as_ref().and_then(|roster| agreed(spec, roster)).map(|own| own.rank);
        self.missing_since = watched.lacks_certificate().then(|| self.missing_since.unwrap_or_else(Instant::now));
        let missing_for = self.missing_since.map(|since| since.elapsed());
        if rank.is_some_and(|rank| restores(rank, missing_for)) {
            self.restore_certificate(client, view).await
        } else {
            Ok(())
        }
    }

    /// Why this version can't read the published roster.
    pub fn newer_roster(&self) -> Option<&str> {
        self.newer.as_ref().map(|(_, reason)| reason.as_str())
    }

    /// All published package sets, by digest.
    pub fn sets(&self) -> &[(String, PackageSet)] {
        &self.packages
    }

    /// The package set `digest`.
    ///
    /// # Errors
    /// [`StepError::NotYet`] if it is not published.
    pub fn packages(&self, digest: &str) -> Result<PackageSet, StepError> {
        let set = self.packages.iter().find(|(published, _)| published == digest).map(|(_, set)| set.clone());
        set.ok_or_else(|| StepError::NotYet(format!("waiting for package set {digest} to be published")))
    }

    /// The roster.
    ///
    /// # Errors
    /// [`StepError::NotYet`] if this agent has read none yet.
    pub fn roster(&self) -> Result<Arc<Roster>, StepError> {
        self.roster.clone().ok_or_else(|| StepError::NotYet("waiting for the roster".to_owned()))
    }

    /// Publishes this host's copy of the certificate again. A new certificate would keep running brokers apart from new ones.
    async fn restore_certificate(&self, client: &Client, view: &HostView) -> Result<(), StepError> {
        let (Some(roster), Some(state)) = (&self.roster, &view.state) else { return Ok(()) };
        if state.instance_uid != roster.instance_uid {
            return Ok(());
        }
        if !matches!(certificate::read(client).await, Ok(None)) {
            return Ok(());
        }
        // A host on which no broker was ever configured has no copy.
        let own = own_certificate(&state.prefix);
        let Some(own) = own.filter(|own| own.fingerprint() == roster.settings.certificate) else { return Ok(()) };
        info!("publishing the certificate again from this host's copy");
        Ok(certificate::create(client, &own, &roster.instance_uid).await?)
    }
}

/// True if the roster that this agent has read may lack something that concerns this node.
fn may_be_outdated(roster: Option<&Roster>, spec: &FluxNodeSpec, view: &HostView) -> bool {
    let is_current = |roster: &Roster| roster.epoch == spec.epoch && roster.revision >= spec.revision;
    let is_stale = spec.rank.is_some() && !roster.is_some_and(is_current);
    // A drain is no new revision of the entry.
    let leave_is_unconfirmed = spec.want == Want::Leave && !roster.is_some_and(|roster| may_leave(view, spec, roster));
    // The Node was registered again after it had lost its rank: the roster that was read before still has it as a member.
    let has_lost_rank = spec.rank.is_none() && spec.instance_uid.is_some() && view.broker.is_some();
    // The planner may withdraw the end of an epoch, which changes only the lead's entry.
    let waits_for_epoch = view.broker.is_none() && roster.is_some_and(|roster| roster.closing.is_some());
    is_stale || leave_is_unconfirmed || has_lost_rank || waits_for_epoch
}

/// True if the agent of `rank` should look whether the certificate is gone. The lead always does. Its own copy may be lost as well,
/// so the others do once the planner has reported it for a minute, each rank a second later, so that they don't ask all at once.
fn restores(rank: Rank, missing_for: Option<Duration>) -> bool {
    let patience = Duration::from_secs(60 + u64::from(rank.min(60)));
    rank == 0 || missing_for.is_some_and(|time| time >= patience)
}

/// Reads the published roster.
///
/// # Errors
/// The API call failed, or this version can't read the roster.
pub async fn read_roster(client: &Client) -> Result<Option<Roster>, ApiError> {
    Ok(cluster::published::read_roster(client).await?.map(|(roster, _)| roster))
}

#[cfg(test)]
mod tests {
    use api::Closing;
    use model::fixture::roster;

    use super::*;
    use crate::fixture::broker;

    #[test]
    fn a_node_that_waits_for_the_end_of_an_epoch_reads_the_roster_again() {
        let running = HostView { broker: Some(broker(1, 1)), ..HostView::default() };
        let stopped = HostView::default();
        let spec = |revision| FluxNodeSpec { rank: Some(1), epoch: 1, revision, ..FluxNodeSpec::default() };
        for (what, closing, view, revision, outdated) in [
            ("nothing changed", None, &running, 1, false),
            ("its broker has died", None, &stopped, 1, false),
            ("its own entry changed", None, &running, 2, true),
            ("the epoch ends beside its broker", Some(Closing::WhenIdle), &running, 1, false),
            ("it waits for the next epoch", Some(Closing::WhenIdle), &stopped, 1, true),
        ] {
            let roster = Roster { epoch: 1, revision: 1, closing, ..roster(2, &[("node1", 2), ("node2", 2)]) };
            assert_eq!(may_be_outdated(Some(&roster), &spec(revision), view), outdated, "{what}");
        }
        assert!(may_be_outdated(None, &spec(1), &running), "it has read no roster yet");
    }

    #[test]
    fn the_lead_restores_the_certificate_and_others_only_after_a_minute() {
        for (rank, lacking, brings) in [
            (0, None, true),
            (1, None, false),
            (1, Some(60), false),
            (1, Some(61), true),
            (9, Some(61), false),
            (4000, Some(120), true),
        ] {
            assert_eq!(restores(rank, lacking.map(Duration::from_secs)), brings, "{rank} {lacking:?}");
        }
    }
}
