//! What the planner has published, as far as it concerns this node: read by name, and only when our own FluxNode says that
//! there is something new, so that the cost of a node does not grow with their number.

use std::time::{Duration, Instant};

use kube::Client;
use tracing::info;

use super::{
    act::{StepError, own_certificate},
    copied::leads,
    decide::{agreed, may_leave},
    watch::World,
};
use api::{CONDITION_RESTART_PENDING, FluxNodeSpec, PackageSet, Rank, Roster, Want};
use base::error_chain;
use cluster::{ApiError, certificate, published::read_packages};
use hostapi::HostView;

/// A roster of a newer version is looked at again after so long: all agents of an unfinished upgrade do.
const NEWER_AGAIN: Duration = Duration::from_secs(20);

/// What was read last.
#[derive(Default)]
pub struct Published {
    /// The roster, at least as new as our FluxNode's spec.
    pub roster: Option<Roster>,
    /// Why the published roster can't be understood by this version, and when it was looked at.
    newer: Option<(Instant, String)>,
    /// Lead only: there is none in the API any more.
    pub roster_is_gone: bool,
    /// The package sets and their digests: what the spec asks for, and what the running epoch has where that differs.
    packages: Vec<(String, PackageSet)>,
    /// The planner's word on the next epoch when they were read.
    pending: String,
    /// Which spec the planner had followed when they were read: the same set may be somewhere else by now.
    followed: i64,
    /// Since when the planner has missed the certificate.
    lacking: Option<Instant>,
}

impl Published {
    /// Reads what `spec` says is new, and the packages where the planner's word on the next epoch is another one. `view` is
    /// the host: members also look after what only they can bring back.
    ///
    /// # Errors
    /// The API server's; what was read before stays.
    pub async fn refresh(
        &mut self,
        client: &Client,
        spec: &FluxNodeSpec,
        world: &World,
        view: &HostView,
    ) -> Result<(), StepError> {
        let is_current = |roster: &Roster| roster.epoch == spec.epoch && roster.revision >= spec.revision;
        let is_stale = spec.rank.is_some() && !self.roster.as_ref().is_some_and(is_current);
        // A drain is no new revision of the entry.
        let is_unsaid =
            spec.want == Want::Leave && !self.roster.as_ref().is_some_and(|roster| may_leave(view, spec, roster));
        // The Node was registered again after its rank was nobody's any more: what was read before knows it as a member.
        let has_lost_rank = spec.rank.is_none() && spec.instance_uid.is_some() && view.broker.is_some();
        let is_lead = leads(view, Some(spec));
        if self.newer.as_ref().is_some_and(|(read, _)| read.elapsed() < NEWER_AGAIN) {
            return Ok(());
        }
        if is_stale || is_unsaid || has_lost_rank || is_lead || self.newer.is_some() {
            let found = match read_roster(client).await {
                Err(error @ ApiError::NewerRoster(_)) => {
                    self.newer = Some((Instant::now(), error_chain(&error)));
                    return Ok(());
                }
                read => read?,
            };
            self.newer = None;
            self.roster_is_gone = found.is_none();
            self.roster = found.or_else(|| self.roster.take());
        }
        // What was read for another roster, or another instance, is none.
        let wanted = self.roster.as_ref().map(|roster| roster.settings.digest.as_str());
        let known = |digest: &str| self.packages.iter().any(|(known, _)| known == digest);
        let pending = world.instance_status().and_then(|status| status.holding(CONDITION_RESTART_PENDING));
        let pending = pending.map_or("", |pending| pending.message.as_str());
        let missing = wanted.is_some_and(|wanted| !known(wanted) && !view.has_environment(wanted));
        let followed = world.followed_generation();
        let is_old = self.pending != pending || self.followed != followed;
        if self.packages.is_empty() || missing || spec.want != Want::Run || is_old {
            self.packages = read_packages(client).await?.into_iter().map(|set| (set.digest(), set)).collect();
            pending.clone_into(&mut self.pending);
            self.followed = followed;
        }
        // No broker need run for it: it may be waiting for just this.
        let rank = self.roster.as_ref().and_then(|roster| agreed(spec, roster)).map(|own| own.rank);
        self.lacking = world.lacks_certificate().then(|| self.lacking.unwrap_or_else(Instant::now));
        let lacking = self.lacking.map(|since| since.elapsed());
        if rank.is_some_and(|rank| brings_back(rank, lacking)) {
            self.bring_back_certificate(client, view).await
        } else {
            Ok(())
        }
    }

    /// Why the published roster can't be understood by this version.
    pub fn newer_roster(&self) -> Option<&str> {
        self.newer.as_ref().map(|(_, reason)| reason.as_str())
    }

    /// All published package sets, by digest.
    pub fn sets(&self) -> &[(String, PackageSet)] {
        &self.packages
    }

    /// Digest of the package set that the spec asks for.
    pub fn digest(&self) -> Option<&str> {
        self.packages.first().map(|(digest, _)| digest.as_str())
    }

    /// The package set `digest`.
    ///
    /// # Errors
    /// Another one is published, or none.
    pub fn packages(&self, digest: &str) -> Result<PackageSet, StepError> {
        let set = self.packages.iter().find(|(published, _)| published == digest).map(|(_, set)| set.clone());
        set.ok_or_else(|| StepError::NotYet(format!("waiting for package set {digest} to be published")))
    }

    /// The roster.
    ///
    /// # Errors
    /// There is none yet.
    pub fn roster(&self) -> Result<Roster, StepError> {
        self.roster.clone().ok_or_else(|| StepError::NotYet("waiting for the roster".to_owned()))
    }

    /// The certificate comes back from a host, never a new one while brokers run.
    async fn bring_back_certificate(&self, client: &Client, view: &HostView) -> Result<(), StepError> {
        let (Some(roster), Some(state)) = (&self.roster, &view.state) else { return Ok(()) };
        if state.instance_uid != roster.instance_uid {
            return Ok(());
        }
        if !matches!(certificate::read(client).await, Ok(None)) {
            return Ok(());
        }
        // A host on which no broker was ever configured has none.
        let own = own_certificate(&state.prefix);
        let Some(own) = own.filter(|own| own.fingerprint() == roster.settings.certificate) else { return Ok(()) };
        info!("bringing the certificate back from this host");
        Ok(certificate::create(client, &own, &roster.instance_uid).await?)
    }
}

/// The lead looks after the Secret all the time. Its own certificate may be lost as well: another member looks once the
/// planner has missed the Secret for a minute, each rank a second later, so that not all of them ask at once.
fn brings_back(rank: Rank, lacking: Option<Duration>) -> bool {
    let patience = Duration::from_secs(60 + u64::from(rank.min(60)));
    rank == 0 || lacking.is_some_and(|lacking| lacking >= patience)
}

/// The roster as it is published.
///
/// # Errors
/// The API server's.
pub async fn read_roster(client: &Client) -> Result<Option<Roster>, ApiError> {
    Ok(cluster::published::read_roster(client).await?.map(|(roster, _)| roster))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_brings_the_certificate_back_at_once_and_the_others_one_after_another_when_it_has_not() {
        for (rank, lacking, brings) in [
            (0, None, true),
            (1, None, false),
            (1, Some(60), false),
            (1, Some(61), true),
            (9, Some(61), false),
            (4000, Some(120), true),
        ] {
            assert_eq!(brings_back(rank, lacking.map(Duration::from_secs)), brings, "{rank} {lacking:?}");
        }
    }
}
