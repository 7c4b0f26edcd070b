//! The rungs: what each [`Step`](super::decide::Step) does. Every one can be killed and done again.

use std::{
    collections::BTreeMap,
    io::read_to_string,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::info;

use super::{decide::Assignment, published::read_roster};
use crate::{
    api::{CONFIGMAP_BROKER, CONFIGMAP_BROKER_KEY, FluxInstanceSpec, PackageSet, Rank, Roster, Uninstall},
    broker::{
        command::{BrokerIdentity, LEAD_STOP_SECS, LIVE_CONFIGURATION, RC1_TASK, connect_script, launch, rc1_task},
        reload::ReloadError,
        rfc3::RpcError,
    },
    host::{
        Answer, ClaimOrder, ConfigureOrder, Host, HostError, HostFile, HostView, LaunchOrder, Order, Preflight,
        PreflightOrder, Refusal, RemoveOrder, Root, StateDir, StopOrder, look, open_host_file,
        preflight::{is_port_taken, port_taken},
        state, sysctl,
    },
    packages::{FetchError, estimate_bytes},
    plan::{
        broker_toml, certificate::Certificate, names::live_configuration, roster::topology, status::CERTIFICATE_IS_GONE,
    },
    planner::{PlannerError, certificate, store},
};

/// SIGTERM to SIGKILL of a lead whose queue is nobody's any more, or is kept while the pod ends: the pod's
/// own grace is 120 s, and a lead that is not done by then has written its queue as of its last checkpoint.
const STOP_GRACE_SECS: u64 = 60;
/// At a removal: no job runs any more, and the queue goes with the host or is another one's, so a lead that waits for followers
/// which are being removed beside it is not waited for.
const REMOVE_GRACE_SECS: u64 = 15;
/// As long as a follower gets that is to take another rank: it has nothing to write, and one that is cut off from its parent
/// never ends by itself.
const FOLLOWER_GRACE_SECS: u64 = 10;

/// Why a step was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The host said no.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The packages could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The API server.
    #[error(transparent)]
    Api(#[from] PlannerError),
    /// A directory of the host could not be opened.
    #[error("can't open {path} on the host")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// Preflight's word that another process has the brokers' port.
    #[error(transparent)]
    PortTaken(Refusal),
    /// Something is not there yet: others will see to it.
    #[error("{0}")]
    NotYet(String),
    /// Something is not as it must be.
    #[error("{0}")]
    Wrong(String),
    /// The broker did not do what it was told over its socket.
    #[error("the broker did not take the order")]
    Broker(#[from] RpcError),
    /// The live change was not made in whole.
    #[error("the lead did not take in what the roster declares")]
    Reload(#[from] ReloadError),
    /// `flux` failed.
    #[error("flux {command}: {output}")]
    Flux {
        /// Its arguments.
        command: String,
        /// The last it said.
        output: String,
    },
}

impl StepError {
    /// Time alone can heal it.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Host(HostError::Refused(refusal)) => refusal.transient,
            Self::Fetch(error) => error.is_transient(),
            Self::Wrong(_) => false,
            _ => true,
        }
    }

    /// Nothing is wrong with this node: others have to do something first, or the API server has no answer for now.
    pub fn is_waiting(&self) -> bool {
        match self {
            Self::NotYet(_) => true,
            Self::Api(error) => !error.is_lasting(),
            _ => false,
        }
    }
}

/// The broker's certificate, below the prefix.
const CERTIFICATE: &str = "etc/curve.cert";

/// What a broker reads at its start.
pub struct Content {
    broker_toml: String,
    certificate: Certificate,
    /// The roster of which `broker_toml` was made, or a newer one.
    pub(super) roster: Roster,
    /// What `broker_toml` was made from.
    pub(super) revision: u64,
}

/// Acts on one host.
#[derive(Clone)]
pub struct Actor {
    /// The host boundary.
    pub host: Arc<dyn Host>,
    /// For the certificate and what the planner has published.
    pub client: kube::Client,
    /// uid of the FluxInstance.
    pub instance_uid: String,
    /// Its spec.uninstall.
    pub uninstall: Uninstall,
    /// The Node's InternalIP, where its broker listens; None: not known.
    pub address: Option<IpAddr>,
}

impl Actor {
    /// Looks at the host.
    ///
    /// # Errors
    /// The stage's.
    pub async fn observe(&self) -> Result<HostView, StepError> {
        Ok(look(&*self.host).await?)
    }

    /// The rung preflight.
    ///
    /// # Errors
    /// Why this host can't carry a broker, in one sentence with a remedy.
    pub async fn preflight(&self, spec: &FluxInstanceSpec, set: Option<&PackageSet>) -> Result<Preflight, StepError> {
        // Room is needed for what is to be installed only: a full disk must not keep a broker from being started again.
        let need_bytes = set.map_or(0, |set| estimate_bytes(set, crate::packages::native_platform()));
        let order = PreflightOrder {
            prefix: spec.prefix.clone().map(PathBuf::from),
            endpoint: SocketAddr::new(
                self.address.unwrap_or(Ipv4Addr::UNSPECIFIED.into()),
                spec.broker.port.unwrap_or(crate::api::DEFAULT_BROKER_PORT),
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

    /// The rung claim.
    ///
    /// # Errors
    /// The stage's.
    pub async fn claim(&self, preflight: &Preflight) -> Result<(), StepError> {
        let order = ClaimOrder {
            prefix: preflight.prefix.clone(),
            instance_uid: self.instance_uid.clone(),
            uninstall: self.uninstall.clone(),
        };
        self.order(Order::Claim(order)).await.map(drop)
    }

    /// The rung configure: everything that the broker of `assignment` reads at start, from what the planner has published.
    /// Returns what it was made from.
    ///
    /// # Errors
    /// Something is not published yet; the stage's.
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

    /// What the planner has published for the broker of `assignment`. Nothing is changed on the host.
    ///
    /// # Errors
    /// Something is not published yet; the API server's.
    pub(super) async fn content(
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
        let broker_toml = broker_toml::for_host(&published, &own_certificate).map_err(StepError::Wrong)?;
        // From this copy a lost roster is made again: it has to know everybody whom broker.toml names.
        let newer = if revision > roster.revision { read_roster(&self.client).await? } else { None };
        let newer = newer.filter(|newer| (&newer.instance_id, newer.epoch) == (&roster.instance_id, roster.epoch));
        let roster = newer.unwrap_or_else(|| roster.clone());
        Ok(Content { broker_toml, certificate, roster, revision })
    }

    /// Puts that on the host.
    ///
    /// # Errors
    /// The stage's.
    pub(super) async fn write(
        &self,
        preflight: &Preflight,
        assignment: &Assignment,
        content: &Content,
        live: bool,
    ) -> Result<(), StepError> {
        let Content { broker_toml, certificate, roster, .. } = content;
        let file = |path: &str, content: String, mode, broker_owned| HostFile {
            path: path.into(),
            content,
            mode,
            broker_owned,
        };
        let environment = state::environment(&preflight.prefix, &roster.settings.digest);
        let copy = serde_json::to_string(roster).map_err(|error| StepError::Wrong(error.to_string()))?;
        let mut files = vec![
            file("etc/broker.toml", broker_toml.clone(), 0o644, false),
            file(CERTIFICATE, certificate.text().to_owned(), 0o600, true),
            file("etc/roster.json", copy, 0o644, false),
            file("bin/flux-connect.sh", connect_script(&environment, &roster.settings.run_as), 0o755, false),
        ];
        if assignment.rank == 0 && roster.declares_nodes() {
            let configuration = live_configuration(roster, &BTreeMap::new()).map_err(StepError::Wrong)?;
            files.push(file(LIVE_CONFIGURATION, configuration.to_string(), 0o644, false));
            files.push(file(RC1_TASK, rc1_task(&preflight.prefix), 0o644, false));
        }
        let order = ConfigureOrder {
            prefix: preflight.prefix.clone(),
            digest: roster.settings.digest.clone(),
            files,
            run_as: roster.settings.run_as.clone(),
            statedir: (assignment.rank == 0)
                .then(|| StateDir { instance_id: roster.instance_id.clone(), established: roster.established }),
            sysctls: sysctl::RAISED.map(|(name, value)| (name.to_owned(), value)).into(),
            live,
        };
        self.order(Order::Configure(order)).await.map(drop)
    }

    /// The certificate that the running epoch was started with: this host's own, or the Secret's where that is not another
    /// one by now, for the next epoch.
    async fn certificate(&self, preflight: &Preflight, roster: &Roster) -> Result<Certificate, StepError> {
        let fits = |certificate: &Certificate| certificate.fingerprint() == roster.settings.certificate;
        if let Some(own) = own_certificate(&preflight.prefix).filter(fits) {
            return Ok(own);
        }
        match certificate::read(&self.client).await? {
            Some(published) if fits(&published) => Ok(published),
            Some(_) => {
                let words = "Secret flux-curve holds another certificate than this epoch was started with; put the old one \
                             back, or delete the Secret: a node that has it brings it back";
                Err(StepError::Wrong(words.to_owned()))
            }
            None => Err(StepError::NotYet(CERTIFICATE_IS_GONE.to_owned())),
        }
    }

    /// Whether the broker of `assignment` can listen. To be asked before it is started: any user can take a free port, a broker that
    /// can't listen exits, and the planner gives up an epoch whose lead keeps exiting.
    ///
    /// # Errors
    /// Which process listens there.
    pub fn can_listen(roster: &Roster, assignment: &Assignment) -> Result<(), StepError> {
        let Some(member) = &assignment.entry.member else { return Ok(()) };
        if topology(roster).is_some_and(|tree| !tree.is_interior(assignment.rank, roster.settings.max_size)) {
            return Ok(());
        }
        let endpoint = SocketAddr::new(member.address, roster.settings.port);
        port_taken(&Root::host(), endpoint).map_or(Ok(()), |refusal| Err(StepError::NotYet(refusal.message)))
    }

    /// The rung start.
    ///
    /// # Errors
    /// The stage's.
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

    /// Lead: ends the epoch. The next one begins with its queue.
    ///
    /// # Errors
    /// The stage's.
    pub async fn close(&self) -> Result<HostView, StepError> {
        self.stop_within(LEAD_STOP_SECS).await
    }

    /// Stops the broker of `rank`, which is none of this epoch.
    ///
    /// # Errors
    /// The stage's.
    pub async fn stop(&self, rank: Rank) -> Result<HostView, StepError> {
        self.stop_within(if rank == 0 { STOP_GRACE_SECS } else { FOLLOWER_GRACE_SECS }).await
    }

    async fn stop_within(&self, grace_secs: u64) -> Result<HostView, StepError> {
        Ok(self.order(Order::Stop(StopOrder { grace_secs })).await?.observed()?)
    }

    /// Takes everything off the host, after the broker has got `grace_secs` (see `removal_grace`).
    ///
    /// # Errors
    /// The stage's; what was done is done, the next run goes on from there.
    pub async fn remove(&self, keep_state: bool, grace_secs: u64) -> Result<(), StepError> {
        self.stop_within(grace_secs).await?;
        self.order(Order::Remove(RemoveOrder { keep_state })).await?;
        info!("the host is clean");
        Ok(())
    }

    pub(super) async fn order(&self, order: Order) -> Result<Answer, StepError> {
        Ok(self.host.run(order, &mut |_| {}).await?)
    }
}

/// Seconds from SIGTERM to SIGKILL at a removal of the host of `rank`. `pod_ends`: the time is the pod's.
pub(super) fn removal_grace(rank: Option<Rank>, keep_state: bool, pod_ends: bool) -> u64 {
    match rank {
        Some(0) if keep_state && pod_ends => STOP_GRACE_SECS,
        Some(0) if keep_state => LEAD_STOP_SECS,
        _ => REMOVE_GRACE_SECS,
    }
}

/// The certificate that a broker of this host was started with last, where it is whole.
pub(super) fn own_certificate(prefix: &Path) -> Option<Certificate> {
    let text = open_host_file(&prefix.join(CERTIFICATE)).and_then(read_to_string).ok()?;
    Certificate::parse(&text).ok()
}

/// How the broker of `assignment` is started.
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

pub(super) fn unexpected(answer: &Answer) -> StepError {
    HostError::unexpected(answer).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{agent::fixture::actor, host::FakeHost};

    #[tokio::test]
    async fn a_port_that_another_process_has_is_told_apart_from_what_is_wrong_with_the_host() {
        let seen = [
            ("port 8050 of this host is taken by perl (pid 7); free it, or set spec.broker.port to another", true),
            ("port 8050 of this host can't be listened on: denied", false),
            ("this host has no glibc", false),
        ];
        for (words, is_taken) in seen {
            let host = FakeHost::answering([Err(Refusal::transient(words))]);
            let error = actor(Arc::new(host)).preflight(&FluxInstanceSpec::default(), None).await.unwrap_err();
            assert_eq!(matches!(error, StepError::PortTaken(_)), is_taken, "{words}");
            assert!(error.to_string() == words && !error.is_waiting() && error.is_transient(), "{error}");
        }
    }

    #[test]
    fn a_lead_whose_queue_is_kept_outwaits_its_children_unless_the_pod_ends_before() {
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

    #[test]
    fn what_others_will_see_to_is_waited_for() {
        let what = || "get Secret flux-curve".to_owned();
        let refused = |code| {
            let status = kube::core::Status::failure("refused", "Refused").with_code(code);
            StepError::Api(PlannerError::Api { what: what(), source: Box::new(kube::Error::Api(Box::new(status))) })
        };
        let content = PlannerError::Content { object: "Secret flux-curve".to_owned(), reason: "malformed".to_owned() };
        for (error, waiting) in [
            (StepError::NotYet("waiting for Secret flux-curve".to_owned()), true),
            (StepError::Api(PlannerError::Timeout(what())), true),
            (refused(403), true),
            (refused(422), false),
            (StepError::Api(content), false),
            (StepError::Wrong("another certificate".to_owned()), false),
            (StepError::Host(HostError::Refused(Refusal::transient("port 8050 is taken"))), false),
        ] {
            assert_eq!(error.is_waiting(), waiting, "{error}");
        }
    }
}
