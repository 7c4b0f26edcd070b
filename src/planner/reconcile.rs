//! The planner's loop: wake on any change, gather for a moment, observe everything, decide, write.

use std::{collections::BTreeMap, collections::HashMap, pin::pin, time::Duration};

use futures::StreamExt;
use kube::{Client, Resource, ResourceExt};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info, warn};

use super::{
    Announcer, PlannerError,
    caches::Caches,
    certificate::{self, CERTIFICATE_IS_GONE},
    instance,
    packages::{Published, Resolver},
    protect, publish,
};
use crate::{
    api::{
        ANNOTATION_RESTART, FluxInstance, FluxInstanceStatus, FluxNode, FluxNodeStatus, INSTANCE, PackageSet,
        ROSTER_FORMAT, Roster, validate,
    },
    clock, error_chain,
    packages::lock_urls,
    plan::{
        eligibility::NodeView,
        peers::is_on_every_host,
        project::{lingers, project_all},
        protect::{Change, Protection},
        roster::{
            Decision, Observed, candidates, decide, is_certificate_in_use, is_certificate_of_another, retain_secs,
        },
        status::{Obstacle, status, stopped},
    },
};

/// A burst of joins becomes one revision.
const GATHER: Duration = Duration::from_millis(400);
/// Time alone decides a few things (retain, patience): look at least this often.
const TICK: Duration = Duration::from_secs(2);
/// Nodes whose annotations can't be written are left alone for so long.
const PROTECT_AGAIN: Duration = Duration::from_secs(60);

/// Plans until it is dropped.
pub async fn run(client: Client, identity: &str) {
    let (caches, changes) = Caches::watch(&client);
    let mut changes = pin!(changes);
    let mut planner = Planner {
        announcer: Announcer::new(client.clone(), identity),
        client,
        resolver: Resolver::default(),
        since: Instant::now(),
        had_roster: false,
        gone: HashMap::new(),
        sources: HashMap::new(),
        validated: None,
        forgotten: false,
        protection: Protection::default(),
        protect_again: None,
    };
    let mut complete = false;
    loop {
        // The stores fill while the streams are driven, so waiting and driving are one.
        let _ = timeout(TICK, changes.next()).await;
        // At the end of everything the right to write is gone within half a second.
        let gathered = Instant::now() + if caches.is_over() { Duration::ZERO } else { GATHER };
        while let Ok(Some(())) = timeout_at(gathered, changes.next()).await {}
        complete = complete || caches.are_complete().await;
        if !complete {
            continue;
        }
        match planner.once(&caches).await {
            Ok(()) => {}
            // Another planner, or an agent, was faster: look again.
            Err(error) if error.code() == Some(409) => debug!(%error, "written by somebody else meanwhile"),
            Err(error) => planner.report(&caches, &error).await,
        }
    }
}

struct Planner {
    client: Client,
    announcer: Announcer,
    resolver: Resolver,
    /// When planning began: with the Lease, and again where the roster is gone, be it with its FluxInstance.
    since: Instant,
    /// The FluxInstance had a roster when last looked at.
    had_roster: bool,
    /// FluxNodes without Node and without rank, and since when.
    gone: HashMap<String, Instant>,
    /// Where the published package sets come from, by digest.
    sources: HashMap<String, Source>,
    /// The generation of the spec that was looked at, and what was wrong with it: a lock in it is long.
    validated: Option<(String, i64, Option<String>)>,
    /// What was made for an instance that is over has been taken off.
    forgotten: bool,
    protection: Protection,
    /// Not before then.
    protect_again: Option<Instant>,
}

/// Where a package set comes from.
struct Source {
    /// A mirror stands in for a lock's channels, and for nothing else.
    mirrored: bool,
    urls: Vec<String>,
}

impl From<&PackageSet> for Source {
    fn from(set: &PackageSet) -> Self {
        match set {
            PackageSet::Bundle(source) => Self { mirrored: false, urls: vec![source.url.clone()] },
            PackageSet::Lock { lock, .. } => Self { mirrored: true, urls: lock_urls(lock).unwrap_or_default() },
        }
    }
}

impl Planner {
    async fn once(&mut self, caches: &Caches) -> Result<(), PlannerError> {
        let flux_nodes = caches.flux_nodes.state();
        let nodes: Vec<_> = caches.nodes.state().iter().map(|node| NodeView::from(node.as_ref())).collect();
        let reports: BTreeMap<_, _> =
            flux_nodes.iter().map(|node| (node.name_any(), node.status.clone().unwrap_or_default())).collect();
        if caches.is_over() {
            let changes = self.protection.at_the_end(&nodes, &reports);
            self.protect(caches, changes).await;
        }
        let instances = caches.instances.state();
        for other in instances.iter().filter(|instance| instance.name_any() != INSTANCE) {
            instance::ignore(&self.client, other).await?;
        }
        let flux = instances.iter().find(|instance| instance.name_any() == INSTANCE);
        instance::ensure(&self.client, flux.map(AsRef::as_ref)).await?;
        match flux {
            Some(flux) if flux.meta().deletion_timestamp.is_none() => {
                self.forgotten = false;
                self.plan(caches, flux, &nodes, &reports).await
            }
            // The agents clean; when the last FluxNode is gone nothing of the instance is left on any host.
            None if flux_nodes.is_empty() && !self.forgotten => {
                publish::forget_instance(&self.client).await?;
                self.forgotten = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn plan(
        &mut self,
        caches: &Caches,
        flux: &FluxInstance,
        nodes: &[NodeView],
        reports: &BTreeMap<String, FluxNodeStatus>,
    ) -> Result<(), PlannerError> {
        let flux_nodes = caches.flux_nodes.state();
        let uid = flux.uid().unwrap_or_default();
        let empty = FluxInstanceStatus::default();
        let fresh_id = uuid::Uuid::new_v4().to_string();
        let stored = publish::read_roster(&self.client).await?;
        let has_roster = stored.as_ref().is_some_and(|(roster, _)| roster.instance_uid == uid);
        if std::mem::replace(&mut self.had_roster, has_roster) && !has_roster {
            self.since = Instant::now();
        }
        let mut seen = Observed {
            instance_uid: &uid,
            spec: &flux.spec,
            status: flux.status.as_ref().unwrap_or(&empty),
            nodes,
            reports,
            roster: stored.as_ref().map(|(roster, _)| roster),
            digest: None,
            certificate: None,
            now: clock::now().as_second(),
            waited: self.since.elapsed(),
            told: flux.annotations().get(ANNOTATION_RESTART).map(String::as_str),
            fresh_id: &fresh_id,
        };
        let own = |roster: &&Roster| roster.instance_uid == uid;

        let generation = flux.metadata.generation.unwrap_or_default();
        if self.validated.as_ref().is_none_or(|(of, seen, _)| (of, *seen) != (&uid, generation)) {
            self.validated = Some((uid.clone(), generation, validate(&flux.spec).err().map(|error| error.to_string())));
        }
        let wrong = self.validated.as_ref().and_then(|(_, _, wrong)| wrong.clone());
        let mut obstacle = wrong.map(|message| Obstacle::Problem { reason: "InvalidSpec", message });
        let digest = match &obstacle {
            None => self.packages(&seen, &mut obstacle).await?,
            Some(_) => None,
        };
        let fingerprint = self.certificate(&seen, &mut obstacle).await?;
        seen.digest = digest.as_deref();
        seen.certificate = fingerprint.as_deref();

        // With a spec that can't be served, everything stays as it is.
        let invalid = matches!(&obstacle, Some(Obstacle::Problem { reason: "InvalidSpec", .. }));
        let decision = if invalid { Decision::Keep } else { decide(&seen) };
        let is_newer = seen.roster.is_some_and(|roster| roster.format > ROSTER_FORMAT);
        let mut written = None;
        match decision {
            Decision::Keep => {}
            Decision::Wait(reason) => {
                // What somebody has to mend is told before what will come by itself.
                let has_problem = matches!(obstacle, Some(Obstacle::Problem { .. }));
                if is_newer {
                    obstacle = Some(Obstacle::Problem { reason: "NewerRoster", message: reason });
                } else if candidates(&seen).is_empty() && !has_problem {
                    obstacle = Some(Obstacle::Problem { reason: "NoEligibleNode", message: reason });
                } else {
                    obstacle.get_or_insert(Obstacle::Waiting(reason));
                }
            }
            Decision::Write(next) => {
                publish::write_roster(&self.client, &next, stored.as_ref().map(|(_, document)| document)).await?;
                written = Some(*next);
            }
        }
        let roster = written.as_ref().or(seen.roster.filter(own));
        seen.roster = roster;
        if !caches.is_over() {
            let changes = self.protection.changes(&seen, roster);
            self.protect(caches, changes).await;
        }
        // What a newer version has planned is not published in the words of this one.
        if !is_newer {
            if let Some(roster) = roster {
                publish::write_broker_toml(&self.client, roster).await?;
            }
            self.know_running_set(roster).await?;
            let mirror = flux.spec.packages.mirror.as_slice();
            let is_local = |digest: &str| {
                self.sources.get(digest).is_some_and(|source| match mirror {
                    [_] if source.mirrored => is_on_every_host(mirror),
                    _ => is_on_every_host(&source.urls),
                })
            };
            for (flux_node, spec) in project_all(&seen, roster, flux_nodes.iter().map(AsRef::as_ref), is_local) {
                publish::write_node(&self.client, flux_node, &spec).await?;
            }
            self.collect(&seen, roster, &flux_nodes).await?;
        }

        let next = status(&seen, flux.meta().generation.unwrap_or_default(), roster, obstacle.as_ref());
        self.announce(flux, &next, obstacle.as_ref()).await;
        instance::write_status(&self.client, flux, &next).await
    }

    /// Digest of the published package set.
    async fn packages(
        &mut self,
        seen: &Observed<'_>,
        obstacle: &mut Option<Obstacle>,
    ) -> Result<Option<String>, PlannerError> {
        let mut platforms: Vec<_> =
            seen.reports.values().filter_map(|report| Some(report.facts.as_ref()?.platform.clone())).collect();
        platforms.sort();
        platforms.dedup();
        let running = seen.roster.map(|roster| roster.settings.digest.as_str());
        Ok(match self.resolver.published(&self.client, &seen.spec.packages, &platforms, running).await? {
            Published::Is(set) => Some(self.know(&set)),
            Published::Pending => {
                *obstacle = Some(Obstacle::Waiting("the packages are being resolved".to_owned()));
                None
            }
            Published::Still(set, message) => {
                *obstacle = Some(Obstacle::Problem { reason: "PackagesUnresolved", message });
                Some(self.know(&set))
            }
            Published::Failed(message) => {
                *obstacle = Some(Obstacle::Problem { reason: "PackagesUnresolved", message });
                None
            }
        })
    }

    fn know(&mut self, set: &PackageSet) -> String {
        let digest = set.digest();
        self.sources.entry(digest.clone()).or_insert_with(|| Source::from(set));
        digest
    }

    /// The package set of the running epoch, where the spec asks for another one by now.
    async fn know_running_set(&mut self, roster: Option<&Roster>) -> Result<(), PlannerError> {
        if roster.is_some_and(|roster| !self.sources.contains_key(&roster.settings.digest)) {
            self.sources.clear();
            for set in publish::read_packages(&self.client).await? {
                self.know(&set);
            }
        }
        Ok(())
    }

    /// Fingerprint of the certificate. One is made only where none can be in use.
    async fn certificate(
        &self,
        seen: &Observed<'_>,
        obstacle: &mut Option<Obstacle>,
    ) -> Result<Option<String>, PlannerError> {
        match certificate::read_published(&self.client).await {
            Ok(Some(published)) if is_certificate_of_another(seen, published.made_for(seen.instance_uid)) => {
                info!("the certificate is of the instance before: making another one");
                certificate::discard(&self.client, published).await?;
                self.make_certificate(seen.instance_uid).await?;
                Ok(None)
            }
            Ok(Some(published)) => Ok(Some(published.certificate.fingerprint())),
            Ok(None) => {
                if is_certificate_in_use(seen) {
                    obstacle.get_or_insert_with(|| Obstacle::Waiting(CERTIFICATE_IS_GONE.to_owned()));
                } else {
                    self.make_certificate(seen.instance_uid).await?;
                }
                Ok(None)
            }
            Err(PlannerError::Content { object, reason }) => {
                let message = format!("{object}: {reason}");
                obstacle.get_or_insert(Obstacle::Problem { reason: "MalformedCertificate", message });
                Ok(None)
            }
            // Refused by the API server, such as a role that is not bound yet.
            Err(error) if error.code().is_some() => {
                obstacle.get_or_insert_with(|| Obstacle::Waiting(error_chain(&error)));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn make_certificate(&self, instance_uid: &str) -> Result<(), PlannerError> {
        let made = certificate::generate().map_err(|error| PlannerError::Content {
            object: "the kernel's randomness".to_owned(),
            reason: error.to_string(),
        })?;
        certificate::create(&self.client, &made, instance_uid).await
    }

    /// Keeps autoscalers away from Nodes, or lets them again. Whatever becomes of it, planning goes on.
    async fn protect(&mut self, caches: &Caches, changes: Vec<Change>) {
        if changes.is_empty() || self.protect_again.is_some_and(|again| Instant::now() < again) {
            return;
        }
        self.protect_again = match protect::write(&self.client, &caches.nodes, changes).await {
            Ok(()) => None,
            // It is looked at again in a moment.
            Err(error) if error.code() == Some(409) => None,
            Err(error) => {
                warn!(error = error_chain(&error), "Nodes could not be annotated for autoscalers");
                Some(Instant::now() + PROTECT_AGAIN)
            }
        };
    }

    /// FluxNodes whose Node has been gone for as long as a rank would be kept.
    async fn collect(
        &mut self,
        seen: &Observed<'_>,
        roster: Option<&Roster>,
        flux_nodes: &[std::sync::Arc<FluxNode>],
    ) -> Result<(), PlannerError> {
        let retain = Duration::from_secs(retain_secs(seen.spec).unsigned_abs());
        let members: Vec<_> =
            roster.iter().flat_map(|roster| roster.ranks.values()).filter_map(|e| e.member.as_ref()).collect();
        // While its broker runs, its report is what keeps the rank from being given out, and its spec what ends it.
        let runs = |name: &String| {
            let report = seen.reports.get(name);
            roster.zip(report).is_some_and(|(roster, report)| lingers(seen, roster, report).is_some())
        };
        let is_gone = |name: &String| {
            !seen.nodes.iter().any(|node| node.name == *name)
                && !members.iter().any(|member| member.node == *name)
                && !runs(name)
        };
        let gone: Vec<_> = flux_nodes.iter().map(|node| node.name_any()).filter(is_gone).collect();
        self.gone.retain(|name, _| gone.contains(name));
        for name in gone {
            if self.gone.entry(name.clone()).or_insert_with(Instant::now).elapsed() >= retain {
                publish::delete_node(&self.client, &name).await?;
            }
        }
        Ok(())
    }

    /// What keeps the planner from planning at all, where people look.
    async fn report(&mut self, caches: &Caches, error: &PlannerError) {
        let words = error_chain(error);
        warn!(error = words, "planning failed");
        // What somebody has to mend; all else is the API server's, and passes.
        if matches!(error, PlannerError::Content { .. }) || error.code() == Some(422) {
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

    /// Problems as warnings, changes of phase as plain news.
    async fn announce(&mut self, flux: &FluxInstance, next: &FluxInstanceStatus, obstacle: Option<&Obstacle>) {
        let about = flux.object_ref(&());
        let message = next.message.as_deref().unwrap_or_default();
        if let Some(Obstacle::Problem { reason, message }) = obstacle {
            self.announcer.say(&about, true, reason, message).await;
        } else if flux.status.as_ref().is_none_or(|before| before.phase != next.phase) {
            self.announcer.say(&about, false, &format!("{:?}", next.phase), message).await;
        }
        let denied = |status: &FluxInstanceStatus| status.holding("ScaleDenied").map(|denied| denied.message.clone());
        if let Some(words) = denied(next).filter(|words| flux.status.as_ref().and_then(denied).as_ref() != Some(words))
        {
            self.announcer.say(&about, true, "ScaleDenied", &words).await;
        }
    }
}
