//! What the agent does on its host and reads for it: each operation can be killed at any point and run again.

use std::{
    collections::BTreeMap,
    io::Read as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::info;

use super::{
    error::{StepError, unexpected},
    inputs::{applied::Applied, assignment::Assignment},
};
use api::{
    CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, FluxInstanceSpec, PackageSet, Rank, Roster, Uninstall,
    certificate::Certificate,
};
use broker::{
    command::{BrokerIdentity, LEAD_STOP_SECS, launch},
    files::{APPLIED, CERTIFICATE, FileTexts, files},
};
use cluster::{certificate, published::read_roster, store};
use host::{
    Root,
    host_root::open_in_host_root,
    opening::open_plain_below,
    port::{is_port_taken, port_taken},
    state,
    users::resolve_in_pod,
};
use hostapi::{
    Answer, ClaimOrder, ConfigureOrder, Host, HostError, HostFile, HostView, LaunchOrder, Order, Preflight,
    PreflightOrder, RemoveOrder, StateDir, StopOrder, look, look_again,
};
use locks::estimate_bytes;
use model::{broker_toml, conditions::CERTIFICATE_IS_GONE, tree::topology};

/// Seconds from SIGTERM to SIGKILL of a lead whose queue is not needed any more, or is kept while the pod ends. The pod's grace is
/// 120 s; a lead that needs longer has its queue on disk as of its last checkpoint.
const STOP_GRACE_SECS: u64 = 60;
/// The same at a removal: no job runs any more and the queue is removed too, so nothing is lost if a lead that waits for followers
/// is killed.
const REMOVE_GRACE_SECS: u64 = 15;
/// The same for a follower that gets another rank: it has nothing to write, and one that is cut off from its parent never ends by
/// itself.
const FOLLOWER_GRACE_SECS: u64 = 10;

/// Everything that a broker reads at its start.
pub struct Content {
    broker_toml: String,
    certificate: Certificate,
    /// The roster from which `broker_toml` was made, or a newer one.
    pub roster: Roster,
    /// The roster's revision from which `broker_toml` was made.
    pub revision: u64,
}

/// Operations on one host.
#[derive(Clone)]
pub struct NodeOps {
    /// The host boundary.
    pub host: Arc<dyn Host>,
    /// For the certificate and what the planner publishes.
    pub client: kube::Client,
    /// The Node's InternalIP, where its broker listens; None if not known.
    pub address: Option<IpAddr>,
}

impl NodeOps {
    /// Observes the host.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn observe(&self) -> Result<HostView, StepError> {
        Ok(look(&*self.host).await?)
    }

    /// Observes the host once more. `before`: what was observed last.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn observe_again(&self, before: &HostView) -> Result<HostView, StepError> {
        Ok(look_again(&*self.host, before).await?)
    }

    /// Checks whether this host can carry a broker, and has room for `set`.
    ///
    /// # Errors
    /// [`StepError::Host`]: why not, with the remedy.
    pub async fn preflight(&self, spec: &FluxInstanceSpec, set: Option<&PackageSet>) -> Result<Preflight, StepError> {
        // Only an installation needs room: a full disk must not keep a broker from being started again.
        let need_bytes = set.map_or(0, |set| estimate_bytes(set, packages::native_platform()));
        let order = PreflightOrder {
            prefix: spec.prefix.clone().map(PathBuf::from),
            endpoint: SocketAddr::new(
                self.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into()),
                spec.broker.port.unwrap_or(api::DEFAULT_BROKER_PORT),
            ),
            need_bytes,
        };
        match self.order(Order::Preflight(order)).await {
            Ok(Answer::Preflight(preflight)) => Ok(preflight),
            Ok(other) => Err(unexpected(&other)),
            Err(StepError::Host(HostError::Refused(refusal))) if is_port_taken(&refusal) => {
                Err(StepError::PortTaken(refusal))
            }
            Err(error) => Err(error),
        }
    }

    /// Claims the host for FluxInstance `instance_uid`, and makes it remember how the instance is to end.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn claim(
        &self,
        preflight: &Preflight,
        instance_uid: &str,
        uninstall: &Uninstall,
    ) -> Result<(), StepError> {
        let order = ClaimOrder {
            prefix: preflight.prefix.clone(),
            instance_uid: instance_uid.to_owned(),
            uninstall: uninstall.clone(),
        };
        self.order(Order::Claim(order)).await.map(drop)
    }

    /// Writes everything that the broker of `assignment` reads at its start, from what the planner has published, and returns it.
    /// `live`: the broker runs.
    ///
    /// # Errors
    /// As [`Self::content`] and [`Self::write`].
    pub async fn configure(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        assignment: &Assignment,
        live: bool,
    ) -> Result<Content, StepError> {
        let content = self.content(preflight, roster, assignment).await?;
        self.write(preflight, assignment, &content, live).await?;
        Ok(content)
    }

    /// Reads what the planner has published for the broker of `assignment`. Changes nothing on the host.
    ///
    /// # Errors
    /// [`StepError::NotYet`] if something is not published yet, [`StepError::Api`], [`StepError::Certificate`],
    /// [`StepError::Render`].
    pub async fn content(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        assignment: &Assignment,
    ) -> Result<Content, StepError> {
        let published = store::read(&self.client, CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY).await?;
        let published =
            published.ok_or_else(|| StepError::NotYet("waiting for ConfigMap flux-broker".to_owned()))?.text;
        let made_from = broker_toml::made_from(&published, &roster.instance_id);
        let Some((_, revision)) = made_from.filter(|made_from| *made_from >= (roster.epoch, assignment.revision))
        else {
            return Err(StepError::NotYet("waiting for ConfigMap flux-broker to follow the roster".to_owned()));
        };
        let certificate = self.certificate(preflight, roster).await?;
        let own_certificate = preflight.prefix.join(CERTIFICATE).display().to_string();
        let broker_toml = broker_toml::for_host(&published, &own_certificate)?;
        // A lost roster is made again from the host's copy, so the copy must hold everything that broker.toml names.
        let newer =
            if revision > roster.revision { read_roster(&self.client).await?.map(|(newer, _)| newer) } else { None };
        let newer = newer.filter(|newer| (&newer.instance_id, newer.epoch) == (&roster.instance_id, roster.epoch));
        let roster = newer.unwrap_or_else(|| roster.clone());
        Ok(Content { broker_toml, certificate, roster, revision })
    }

    /// Writes `content` to the host.
    ///
    /// # Errors
    /// [`StepError::Host`], [`StepError::Render`], [`StepError::Serialize`].
    pub async fn write(
        &self,
        preflight: &Preflight,
        assignment: &Assignment,
        content: &Content,
        live: bool,
    ) -> Result<(), StepError> {
        let Content { broker_toml, certificate, roster, .. } = content;
        let copy =
            serde_json::to_string(roster).map_err(|source| StepError::Serialize { what: "the roster", source })?;
        let owner = resolve_in_pod(&roster.settings.run_as, self.host.passwd()).map_err(HostError::Refused)?;
        let texts = FileTexts { broker_toml, certificate: certificate.text(), roster: &copy };
        let files = files(&preflight.prefix, roster, assignment.rank, &texts, &owner)?;
        let order = ConfigureOrder {
            prefix: preflight.prefix.clone(),
            digest: roster.settings.digest.clone(),
            files,
            run_as: roster.settings.run_as.clone(),
            statedir: (assignment.rank == 0)
                .then(|| StateDir { instance_id: roster.instance_id.clone(), established: roster.established }),
            sysctls: state::RAISED.map(|(name, value)| (name.to_owned(), value)).into(),
            live,
        };
        self.order(Order::Configure(order)).await.map(drop)
    }

    /// The certificate that the running epoch was started with: this host's copy, or the Secret's unless that is for the next epoch.
    async fn certificate(&self, preflight: &Preflight, roster: &Roster) -> Result<Certificate, StepError> {
        let fits = |certificate: &Certificate| certificate.fingerprint() == roster.settings.certificate;
        if let Some(own) = own_certificate(&preflight.prefix).filter(fits) {
            return Ok(own);
        }
        match certificate::read(&self.client).await? {
            Some(published) if fits(&published) => Ok(published),
            Some(_) => Err(StepError::Certificate),
            None => Err(StepError::NotYet(CERTIFICATE_IS_GONE.to_owned())),
        }
    }

    /// Checks that the broker of `assignment` can listen. Any user can take a free port, a broker that can't listen exits, and the
    /// planner gives up an epoch whose lead keeps exiting; so callers check before they start it.
    ///
    /// # Errors
    /// [`StepError::NotYet`] names the process that listens there.
    pub fn can_listen(roster: &Roster, assignment: &Assignment) -> Result<(), StepError> {
        let Some(member) = &assignment.entry.member else { return Ok(()) };
        if topology(roster).is_some_and(|tree| !tree.is_interior(assignment.rank, roster.settings.max_size)) {
            return Ok(());
        }
        let endpoint = SocketAddr::new(member.address, roster.settings.port);
        port_taken(&Root::host(), endpoint).map_or(Ok(()), |refusal| Err(StepError::NotYet(refusal.message)))
    }

    /// Starts the broker of `assignment`.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn start(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        assignment: &Assignment,
    ) -> Result<HostView, StepError> {
        let order = launch_order(preflight, roster, assignment);
        info!(rank = assignment.rank, broker = assignment.entry.broker_name, "starting the broker");
        Ok(self.order(Order::Start(order)).await?.observed()?)
    }

    /// Lead: stops the broker in order at the end of the epoch, so that the next one begins with its queue.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn close(&self) -> Result<HostView, StepError> {
        self.stop_within(LEAD_STOP_SECS).await
    }

    /// Stops the broker of `rank`.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn stop(&self, rank: Rank) -> Result<HostView, StepError> {
        self.stop_within(if rank == 0 { STOP_GRACE_SECS } else { FOLLOWER_GRACE_SECS }).await
    }

    async fn stop_within(&self, grace_secs: u64) -> Result<HostView, StepError> {
        Ok(self.order(Order::Stop(StopOrder { grace_secs })).await?.observed()?)
    }

    /// Stops the broker within `grace_secs` (see [`removal_grace`]), then removes everything from the host.
    ///
    /// # Errors
    /// [`StepError::Host`]; what was removed stays removed, and the next call goes on from there.
    pub async fn remove(&self, keep_state: bool, grace_secs: u64) -> Result<(), StepError> {
        self.stop_within(grace_secs).await?;
        self.order(Order::Remove(RemoveOrder { keep_state })).await?;
        info!("the host is clean");
        Ok(())
    }

    /// Records on the host which `revision` the broker of `view`, the lead's, has loaded.
    ///
    /// # Errors
    /// [`StepError::Host`], [`StepError::Serialize`].
    pub async fn remember(
        &self,
        preflight: &Preflight,
        roster: &Roster,
        view: &HostView,
        revision: u64,
        settled: bool,
    ) -> Result<(), StepError> {
        let Some(broker) = &view.broker else { return Ok(()) };
        let applied = Applied { pid: broker.pid, start_time: broker.start_time, revision, settled };
        let content = serde_json::to_string(&applied)
            .map_err(|source| StepError::Serialize { what: "the loaded revision", source })?;
        let order = ConfigureOrder {
            prefix: preflight.prefix.clone(),
            digest: roster.settings.digest.clone(),
            files: vec![HostFile { path: APPLIED.into(), content, mode: 0o644, broker_owned: false }],
            run_as: roster.settings.run_as.clone(),
            statedir: None,
            sysctls: BTreeMap::new(),
            live: true,
        };
        self.order(Order::Configure(order)).await.map(drop)
    }

    /// Makes the host stage carry out `order`.
    ///
    /// # Errors
    /// [`StepError::Host`].
    pub async fn order(&self, order: Order) -> Result<Answer, StepError> {
        Ok(self.host.run(order, &mut |_| {}).await?)
    }
}

/// Seconds from SIGTERM to SIGKILL of the broker of `rank` when its host is cleaned. `pod_ends`: within the grace of the pod.
pub fn removal_grace(rank: Option<Rank>, keep_state: bool, pod_ends: bool) -> u64 {
    match rank {
        Some(0) if keep_state && pod_ends => STOP_GRACE_SECS,
        Some(0) if keep_state => LEAD_STOP_SECS,
        _ => REMOVE_GRACE_SECS,
    }
}

/// More bytes than a certificate has.
const LONGEST_CERTIFICATE: u64 = 64 << 10;

/// The certificate that a broker of this host was started with last; None if the file is not there or damaged.
pub fn own_certificate(prefix: &Path) -> Option<Certificate> {
    let mut text = String::new();
    // The brokers' user owns the file, and may have made it as large as the disk, or mounted something over it.
    let file = open_plain_below(open_in_host_root(prefix).ok()?, Path::new(CERTIFICATE)).ok()?;
    file.take(LONGEST_CERTIFICATE).read_to_string(&mut text).ok()?;
    Certificate::parse(&text).ok()
}

/// The order that starts the broker of `assignment`.
pub fn launch_order(preflight: &Preflight, roster: &Roster, assignment: &Assignment) -> LaunchOrder {
    let identity = BrokerIdentity {
        prefix: &preflight.prefix,
        rank: assignment.rank,
        broker_name: &assignment.entry.broker_name,
        node_uid: &assignment.node_uid,
        instance_uid: &roster.instance_uid,
        instance_id: &roster.instance_id,
        epoch: roster.epoch,
        loads_live_configuration: roster.declares_nodes(),
    };
    launch(&roster.settings, &identity)
}

#[cfg(test)]
mod tests {
    use hostapi::{FakeHost, Refusal};

    use super::*;
    use crate::fixture::ops;

    #[tokio::test]
    async fn a_taken_port_is_told_apart_from_what_is_wrong_with_the_host() {
        let refusals = [
            ("port 8050 of this host is taken by perl (pid 7); free it, or set spec.broker.port to another", true),
            ("port 8050 of this host can't be used to listen: denied", false),
            ("this host has no glibc", false),
        ];
        for (words, is_taken) in refusals {
            let host = FakeHost::answering([Err(Refusal::transient(words))]);
            let error = ops(Arc::new(host)).preflight(&FluxInstanceSpec::default(), None).await.unwrap_err();
            assert_eq!(matches!(error, StepError::PortTaken(_)), is_taken, "{words}");
            assert!(error.to_string() == words && !error.is_waiting() && error.is_transient(), "{error}");
        }
    }

    #[test]
    fn a_lead_whose_queue_is_kept_gets_time_for_its_children_unless_the_pod_ends() {
        let (rank_0, pod) = (Some(0), 120);
        for (rank, keep_state, pod_ends, expected) in [
            (rank_0, true, false, LEAD_STOP_SECS),
            (rank_0, true, true, STOP_GRACE_SECS),
            (rank_0, false, false, REMOVE_GRACE_SECS),
            (Some(1), true, false, REMOVE_GRACE_SECS),
            (Some(1), false, true, REMOVE_GRACE_SECS),
        ] {
            let grace = removal_grace(rank, keep_state, pod_ends);
            assert_eq!(grace, expected, "{rank:?} {keep_state} {pod_ends}");
            assert!(!pod_ends || grace < pod);
        }
    }
}
