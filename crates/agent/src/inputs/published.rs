//! What the planner has published, as far as it concerns this node. The agent reads it by name, and only if its own FluxNode says
//! that there is something new, so that the cost of a node does not grow with the number of nodes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use super::{
    assignment::{agreed, may_leave},
    local_roster::leads,
    watched_objects::WatchedObjects,
};
use crate::{error::StepError, node_ops::own_certificate};
use api::{CONFIGMAP_PACKAGES, CONFIGMAP_ROSTER, FluxNodeSpec, NAMESPACE, PackageSet, Rank, Roster, Want};
use base::{chance::jittered, error_chain};
use cluster::{
    self, ApiError, certificate,
    published::read_packages,
    store,
    version::{self, Version, WatchedVersion},
};
use hostapi::HostView;

/// Pause before a roster of a newer version is read again: all agents of an unfinished upgrade do so.
const NEWER_AGAIN: Duration = Duration::from_secs(20);
/// Pause between reads of the package sets while one that this node needs is not published. Once the planner wants this node to fetch it,
/// our FluxNode names it, and that ends the pause.
const UNPUBLISHED_AGAIN: Duration = Duration::from_mins(1);
/// How long an agent tries each second to read the package sets for the first time. After that, somebody has to mend something: until then, thousands of
/// agents must not ask each second.
const EAGER: Duration = Duration::from_mins(1);
/// A follower's agent that could not restore the certificate tries again after this long, or up to half as long again.
const RESTORE_AGAIN: Duration = Duration::from_mins(1);

/// What this agent has read of it.
#[derive(Default)]
pub struct PublishedState {
    /// The roster, at least as new as our FluxNode's spec.
    pub roster: Option<Arc<Roster>>,
    /// metadata.resourceVersion of the ConfigMap that `roster` was read from.
    roster_version: Option<String>,
    /// Why this version can't read the published roster, and when it was read.
    newer: Option<(Instant, String)>,
    /// Lead only: tells which version the roster has.
    roster_watch: Option<RosterWatch>,
    /// Lead only: the API server has no roster any more.
    pub roster_is_gone: bool,
    /// The package sets by digest: the one that the spec asks for, then that of the running epoch if it is another one.
    packages: Vec<(String, PackageSet)>,
    /// metadata.resourceVersion of the ConfigMap that they were read from, or of an earlier one.
    packages_version: Option<String>,
    /// What they were read for, and when to read them again if they lack something.
    packages_read: Option<(PackagesWanted, Instant)>,
    /// When this agent began to read what is published.
    first_tried: Option<Instant>,
    /// When this agent next tries to restore the certificate; the lead's agent does not wait for it. None while the certificate is there, or while this
    /// node has no rank.
    restore_at: Option<Instant>,
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
        self.first_tried.get_or_insert_with(Instant::now);
        if self.newer.as_ref().is_some_and(|(read, _)| read.elapsed() < NEWER_AGAIN) {
            return Ok(());
        }
        // The lead uses more of the roster than what makes an entry's revision, and restores it if it is gone.
        if leads(view, Some(spec)) {
            self.roster_watch.get_or_insert_with(|| RosterWatch::begin(client));
        } else {
            self.roster_watch = None;
        }
        let told = self.roster_watch.as_ref().map(|watch| watch.version.now());
        let has_changed = told.is_some_and(|told| !self.knows_roster(&told));
        if has_changed || self.newer.is_some() || may_be_outdated(self.roster.as_deref(), spec, view) {
            match self.read_roster(client).await {
                Err(error @ ApiError::NewerRoster(_)) => {
                    self.newer = Some((Instant::now(), error_chain(&error)));
                    return Ok(());
                }
                read => self.roster_is_gone = read?.is_none(),
            }
            self.newer = None;
        }
        // Package sets that were read for another roster, or another instance, do not count.
        let digest = self.roster.as_ref().map(|roster| roster.settings.digest.clone());
        let is_there = |digest: &String| self.has_set(digest) || view.has_environment(digest);
        let lacks = self.packages.is_empty() || digest.as_ref().is_some_and(|digest| !is_there(digest));
        let wanted = PackagesWanted {
            by_planner: watched.packages_followed(),
            want: spec.want.clone(),
            source: spec.fetch_from.as_ref().map(|source| source.digest.clone()),
            digest,
        };
        if must_read_packages(self.packages_read.as_ref(), &wanted, lacks, Instant::now()) {
            self.read_packages(client).await?;
            self.packages_read = Some((wanted, Instant::now() + jittered(UNPUBLISHED_AGAIN)));
        }
        // Also if no broker runs: it may be waiting for the certificate.
        let rank = self.roster.as_ref().and_then(|roster| agreed(spec, roster)).map(|own| own.rank);
        let Some(rank) = rank.filter(|_| watched.lacks_certificate()) else {
            self.restore_at = None;
            return Ok(());
        };
        let now = Instant::now();
        let at = restore_time(rank, self.restore_at, now);
        self.restore_at = Some(at);
        if at > now {
            return Ok(());
        }
        // Also if this try fails: all followers' requests may fail at the same time.
        self.restore_at = Some(now + jittered(RESTORE_AGAIN));
        self.restore_certificate(client, view).await
    }

    /// The roster as it is published now; None if there is none, and then the one that was read before stays. The API server is asked for
    /// the whole of it only if it has changed.
    ///
    /// # Errors
    /// The API call failed, or this version can't read the roster.
    pub async fn read_roster(&mut self, client: &Client) -> Result<Option<Arc<Roster>>, ApiError> {
        if let (Some(roster), Some(known)) = (&self.roster, &self.roster_version)
            && store::version(client, CONFIGMAP_ROSTER).await?.as_ref() == Some(known)
        {
            return Ok(Some(Arc::clone(roster)));
        }
        let Some((roster, document)) = cluster::published::read_roster(client).await? else {
            self.roster_version = None;
            return Ok(None);
        };
        let roster = Arc::new(roster);
        (self.roster, self.roster_version) = (Some(Arc::clone(&roster)), document.version);
        Ok(Some(roster))
    }

    /// Keeps `copy`, this host's own, in place of the roster that was read, if they are the same: one of 5,000 ranks takes 3.5 MB.
    pub fn share(&mut self, copy: Option<Arc<Roster>>) {
        if let (Some(roster), Some(copy)) = (&mut self.roster, copy)
            && !Arc::ptr_eq(roster, &copy)
            && **roster == *copy
        {
            *roster = copy;
        }
    }

    /// Reads the package sets, if they have changed. The same set may have another source by now.
    ///
    /// # Errors
    /// The API call failed, or this version can't read them; what was read before stays.
    pub async fn read_packages(&mut self, client: &Client) -> Result<(), ApiError> {
        // Asked for before: what is written meanwhile is read once more.
        let version = store::version(client, CONFIGMAP_PACKAGES).await?;
        if version.is_some() && version == self.packages_version {
            return Ok(());
        }
        let sets = if version.is_some() { read_packages(client).await? } else { Vec::new() };
        self.packages = sets.into_iter().map(|set| (set.digest(), set)).collect();
        self.packages_version = version;
        Ok(())
    }

    /// The roster was read when it had the version that the watch tells, or was found to be gone. While the watch tells none, it may have
    /// changed.
    fn knows_roster(&self, told: &Version) -> bool {
        let was_read = self.roster_version.is_some() || self.roster_is_gone;
        was_read && told.as_ref() == Some(&self.roster_version)
    }

    fn has_set(&self, digest: &str) -> bool {
        self.packages.iter().any(|(known, _)| known == digest)
    }

    /// Why this version can't read the published roster.
    pub fn newer_roster(&self) -> Option<&str> {
        self.newer.as_ref().map(|(_, reason)| reason.as_str())
    }

    /// All published package sets, by digest.
    pub fn sets(&self) -> &[(String, PackageSet)] {
        &self.packages
    }

    /// They could not be read yet, but probably can be soon.
    pub fn expects_sets(&self, now: Instant) -> bool {
        self.packages_read.is_none() && self.first_tried.is_none_or(|first| now < first + EAGER)
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
        // A host on which no broker was ever configured has no copy.
        let own = own_certificate(&state.prefix);
        let Some(own) = own.filter(|own| own.fingerprint() == roster.settings.certificate) else { return Ok(()) };
        match certificate::read(client).await {
            Ok(None) => {}
            // It is there, and may be malformed.
            Ok(Some(_)) | Err(ApiError::Content { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        info!("publishing the certificate again from this host's copy");
        Ok(certificate::create(client, &own, &roster.instance_uid).await?)
    }
}

/// A watch on the roster's metadata, for as long as this agent leads.
struct RosterWatch {
    version: WatchedVersion,
    _watching: AbortOnDropHandle<()>,
}

impl RosterWatch {
    fn begin(client: &Client) -> Self {
        let maps = Api::<kube::core::PartialObjectMeta<ConfigMap>>::namespaced(client.clone(), NAMESPACE);
        let (version, changes) = version::watch(maps, CONFIGMAP_ROSTER);
        let watching = tokio::spawn(changes.for_each(async |()| ()));
        Self { version, _watching: AbortOnDropHandle::new(watching) }
    }
}

/// What FluxNode, FluxInstance and roster say about the package sets. They are read again if it changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PackagesWanted {
    /// As [`WatchedObjects::packages_followed`].
    by_planner: (i64, Option<String>),
    want: Want,
    /// Digest of the set that our FluxNode names a source for.
    source: Option<String>,
    /// Digest of the roster's set.
    digest: Option<String>,
}

/// Decides whether to read the package sets. `read`: what they were read for last, and when to read them again if they lack something;
/// `lacks`: they lack something that this node may need.
fn must_read_packages(
    read: Option<&(PackagesWanted, Instant)>,
    wanted: &PackagesWanted,
    lacks: bool,
    now: Instant,
) -> bool {
    read.is_none_or(|(wanted_then, again)| wanted_then != wanted || (lacks && *again <= now))
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

/// How long a follower's agent waits, once the planner has reported that the certificate is gone, until it tries to restore it: the lead tries first,
/// but its own copy may be lost as well. One to two minutes, spread by rank so that not all followers ask at once.
fn restore_patience(rank: Rank) -> Duration {
    Duration::from_secs(60 + u64::from(rank % 60))
}

/// When the agent of `rank` tries to restore the certificate, which is gone. `planned`: as this agent decided before. The lead tries in each round.
fn restore_time(rank: Rank, planned: Option<Instant>, now: Instant) -> Instant {
    if rank == 0 { now } else { planned.unwrap_or_else(|| now + restore_patience(rank)) }
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
    use std::sync::Mutex;

    use api::{BundleSource, CONFIGMAP_PACKAGES_KEY, CONFIGMAP_ROSTER_KEY, Closing};
    use http::{Request, Response};
    use kube::client::Body;
    use model::fixture::roster;
    use serde_json::json;

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
    fn package_sets_are_read_again_for_what_is_named_and_seldom_while_one_is_lacking() {
        let now = Instant::now();
        let wanted = PackagesWanted { source: Some("a".to_owned()), want: Want::Install, ..PackagesWanted::default() };
        let (soon, past) = (now + Duration::from_secs(1), now);
        for (what, read, lacks, expected) in [
            ("never read", None, false, true),
            ("read", Some((wanted.clone(), past)), false, false),
            ("one is lacking", Some((wanted.clone(), soon)), true, false),
            ("one is lacking for long", Some((wanted.clone(), past)), true, true),
            (
                "our FluxNode named another one",
                Some((PackagesWanted { source: None, ..wanted.clone() }, soon)),
                false,
                true,
            ),
            (
                "the planner followed another spec",
                Some((PackagesWanted { by_planner: (1, None), ..wanted.clone() }, soon)),
                false,
                true,
            ),
            (
                "another set is the epoch's",
                Some((PackagesWanted { digest: Some("b".to_owned()), ..wanted.clone() }, soon)),
                false,
                true,
            ),
        ] {
            assert_eq!(must_read_packages(read.as_ref(), &wanted, lacks, now), expected, "{what}");
        }
    }

    /// An API server that serves these objects, in this order of versions, and keeps for which path it was asked: with `metadata `
    /// before it, for the metadata alone.
    fn serving(objects: Vec<(&'static str, u32, String)>, asked: Arc<Mutex<Vec<String>>>) -> Client {
        let service = tower::service_fn(move |request: Request<Body>| {
            let accepted = request.headers().get(http::header::ACCEPT).and_then(|accepted| accepted.to_str().ok());
            let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
            let is_partial = accepted.is_some_and(|accepted| accepted.contains("PartialObjectMetadata"));
            let mut asked = asked.lock().unwrap();
            asked.push(format!("{}{name}", if is_partial { "metadata " } else { "" }));
            let (_, version, text) = objects.iter().find(|(map, ..)| *map == name).unwrap();
            let metadata = json!({"name": name, "resourceVersion": version.to_string()});
            let key = if name == CONFIGMAP_ROSTER { CONFIGMAP_ROSTER_KEY } else { CONFIGMAP_PACKAGES_KEY };
            let mut map = json!({"metadata": metadata, "data": {key: text}});
            if is_partial {
                map.as_object_mut().unwrap().remove("data");
            }
            async move { Response::builder().body(Body::from(map.to_string().into_bytes())) }
        });
        Client::new(service, NAMESPACE)
    }

    #[test]
    fn an_agent_expects_for_a_minute_to_read_the_package_sets_soon() {
        let now = Instant::now();
        let tried = PublishedState { first_tried: Some(now), ..PublishedState::default() };
        assert!(PublishedState::default().expects_sets(now), "it has not tried");
        assert!(tried.expects_sets(now) && !tried.expects_sets(now + EAGER));
    }

    #[tokio::test]
    async fn what_has_not_changed_is_read_once() {
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let bundle = |url: &str| {
            let set = PackageSet::Bundle(BundleSource { url: url.to_owned(), sha256: "0".repeat(64) });
            serde_json::to_string(&set).unwrap()
        };
        let text = |revision| serde_json::to_string(&Roster { revision, ..roster(2, &[("node1", 2)]) }).unwrap();
        let objects = |version: u32| {
            let url = format!("file:///srv/{version}");
            vec![(CONFIGMAP_ROSTER, version, text(version.into())), (CONFIGMAP_PACKAGES, version, bundle(&url))]
        };
        let mut published = PublishedState::default();
        let mut read = async |version, expected: &[&str]| {
            let client = serving(objects(version), asked.clone());
            let roster = published.read_roster(&client).await.unwrap().unwrap();
            assert_eq!(roster.revision, u64::from(version));
            published.read_packages(&client).await.unwrap();
            let [(_, PackageSet::Bundle(bundle))] = published.sets() else { panic!("not one bundle") };
            assert_eq!(bundle.url, format!("file:///srv/{version}"));
            assert_eq!(std::mem::take(&mut *asked.lock().unwrap()), expected);
        };
        read(1, &["flux-roster", "metadata flux-packages", "flux-packages"]).await;
        read(1, &["metadata flux-roster", "metadata flux-packages"]).await;
        read(2, &["metadata flux-roster", "flux-roster", "metadata flux-packages", "flux-packages"]).await;
    }

    #[test]
    fn the_lead_reads_the_roster_again_unless_the_watch_tells_that_it_is_the_same() {
        let version = |version: &str| Some(version.to_owned());
        for (what, read, is_gone, told, knows) in [
            ("the watch has told nothing yet", version("1"), false, None, false),
            ("it is the same", version("1"), false, Some(version("1")), true),
            ("it has changed", version("1"), false, Some(version("2")), false),
            ("it was deleted", version("1"), false, Some(None), false),
            ("that it is gone has to be asked", None, false, Some(None), false),
            ("it is still gone", None, true, Some(None), true),
            ("it was made again", None, true, Some(version("3")), false),
        ] {
            let state = PublishedState { roster_version: read, roster_is_gone: is_gone, ..PublishedState::default() };
            assert_eq!(state.knows_roster(&told), knows, "{what}");
        }
    }

    #[test]
    fn the_hosts_own_copy_is_kept_in_place_of_the_same_roster_only() {
        let read = |revision| Arc::new(Roster { revision, ..roster(2, &[("node1", 2)]) });
        for (copy, shares) in [(Some(read(1)), true), (Some(read(2)), false), (None, false)] {
            let mut published = PublishedState { roster: Some(read(1)), ..PublishedState::default() };
            published.share(copy.clone());
            let kept = published.roster.unwrap();
            assert_eq!(kept, read(1));
            assert_eq!(copy.is_some_and(|copy| Arc::ptr_eq(&kept, &copy)), shares);
        }
    }

    #[test]
    fn followers_wait_one_to_two_minutes_before_they_restore_the_certificate() {
        let patience = [1, 9, 59, 60, 4999].map(|rank| restore_patience(rank).as_secs());
        assert_eq!(patience, [61, 69, 119, 60, 79], "spread over a minute among any number of nodes");
        let now = Instant::now();
        let later = now + Duration::from_secs(7);
        assert_eq!(restore_time(9, None, now), now + restore_patience(9));
        assert_eq!(restore_time(9, Some(later), now), later);
        assert_eq!(restore_time(0, Some(later), now), now, "the lead");
    }
}
