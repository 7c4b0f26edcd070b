//! The commands `recover` and `reset`, by which an administrator makes this node lead. They prepare the host and leave the request
//! there; the agent reports it, and the planner acts on it. A command that was killed can be run again.

use std::{
    collections::BTreeMap,
    io,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client, ResourceExt, api::ListParams, core::DeserializeGuard};
use tokio::time::sleep;

use crate::{
    AgentError, client,
    execute::ask::ranks_of_host_jobs,
    inputs::{broker_state, published::read_roster},
    say,
};
use api::{
    FluxInstance, FluxInstanceSpec, FluxInstanceStatus, FluxNode, FluxNodeStatus, INSTANCE, NAMESPACE, Roster, Takeover,
};
use broker::rfc3::RpcError;
use cluster::{ApiError, call, clock};
use host::{NsHost, dumps::Incoming, host_root::open_in_host_root, opening::path_of, statedir};
use hostapi::{Host, HostError, Order, TakeoverOrder, look};
use model::{
    eligibility::NodeView,
    members::Members,
    observed::{Observed, Unusable},
    roster::takeover::refusal,
};

/// A new lead restores its whole queue before it is online.
const PATIENCE: Duration = Duration::from_mins(5);
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Arguments of the command.
#[derive(clap::Args, Debug, Clone)]
pub struct RecoverArguments {
    /// The node that shall lead: the one in whose pod this is run
    #[arg(long, value_name = "NODE")]
    lead: String,
    /// A dump as `flux-distribute dump` makes it: a file on the host, or - for stdin
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Take a dump that does not say of which instance it is
    #[arg(long)]
    unnamed: bool,
    /// The lead's machine is off, whatever other brokers still believe
    #[arg(long)]
    force: bool,
    /// Name of the Node this runs on; in a pod of the DaemonSet it is known
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
}

/// Arguments of the command.
#[derive(clap::Args, Debug, Clone)]
pub struct ResetArguments {
    /// The node that shall lead: the one in whose pod this is run
    #[arg(long, value_name = "NODE")]
    lead: String,
    /// Go on with the queue of this earlier instance, which was kept on this host, instead of an empty one
    #[arg(long, value_name = "INSTANCE_ID")]
    kept: Option<String>,
    /// Yes, give up all pending and finished jobs
    #[arg(long)]
    yes: bool,
    /// Cancel running jobs
    #[arg(long)]
    force: bool,
    /// Name of the Node this runs on; in a pod of the DaemonSet it is known
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
}

/// Why the command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeoverError {
    /// The command was not run on the node that shall lead, whose host it prepares.
    #[error(
        "this is node {here}: run it in the pod of node {lead}; `kubectl -n {NAMESPACE} get pods -o wide` shows that pod. In local mode, run \
         `flux-distribute local exec {lead} --agent -- …`"
    )]
    Elsewhere {
        /// The node it was run on.
        here: String,
        /// The node that shall lead.
        lead: String,
    },
    /// There is no FluxInstance.
    #[error("there is no FluxInstance {INSTANCE}")]
    NoInstance,
    /// Without a roster the instance's members and queue are unknown.
    #[error("there is no roster, so it isn't known what there was; wait for the planner")]
    NoRoster,
    /// The node has no prefix for the request.
    #[error("nothing is installed on this node yet; its FluxNode says why")]
    NotInstalled,
    /// A newer version wrote a member's FluxNode.
    #[error(
        "this version can't read FluxNode {0}, so whether that node's broker runs is not known: use the version that wrote it, or \
         add --force"
    )]
    Unreadable(String),
    /// The planner would refuse the request, for this reason.
    #[error("{0}")]
    Planner(String),
    /// All jobs would be given up without --yes.
    #[error("this gives up all jobs of instance {0}, pending and finished ones: add --yes if you mean it")]
    Unconfirmed(String),
    /// Running jobs would be cancelled without --force.
    #[error("jobs run: wait until they have ended, or add --force")]
    JobsRun,
    /// The host has no queue of the instance that --kept names.
    #[error(
        "no queue of instance {id} was kept in {} on this host: {}",
        prefix.display(),
        if others.is_empty() { "there is none".to_owned() } else { format!("there are {}", others.join(", ")) }
    )]
    NotKept {
        /// The instance's ID.
        id: String,
        /// The host's prefix.
        prefix: PathBuf,
        /// IDs of the instances whose queues were kept.
        others: Vec<String>,
    },
    /// The host stage failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The API server could not be asked.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// Standard input can't be read, or the dump can't be written to the host.
    #[error("can't keep the dump from stdin on the host")]
    Incoming(#[source] io::Error),
    /// The request is on the host, and the lead is not online in time.
    #[error("node {lead} shall lead, and is not online yet: {why}")]
    Late {
        /// Name of the Node.
        lead: String,
        /// What the planner or the node reports.
        why: String,
    },
}

impl From<ApiError> for TakeoverError {
    fn from(error: ApiError) -> Self {
        Self::Agent(error.into())
    }
}

impl TakeoverError {
    /// 2 if only another command can help, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Host(error) => error.exit_code(),
            Self::Agent(_) | Self::Incoming(_) | Self::Late { .. } => 1,
            _ => 2,
        }
    }
}

/// Starts the instance with this node as lead and the queue of a dump.
///
/// # Errors
/// See [`TakeoverError`].
pub async fn recover(arguments: RecoverArguments) -> Result<ExitCode, TakeoverError> {
    let RecoverArguments { lead, from, unnamed, force, node_name } = arguments;
    is_here(&lead, &node_name)?;
    let client = client().await?;
    let seen = Seen::read(&client).await?;
    let is_stdin = from == Path::new("-");
    let named = if is_stdin { "stdin".to_owned() } else { from.display().to_string() };
    let takeover = Takeover { dump: Some(named), force, ..seen.takeover() };
    seen.check(&lead, &takeover)?;
    let host = NsHost::open()?;
    let prefix = prefix(&host).await?;
    let incoming = is_stdin.then(|| Incoming::receive(&prefix, &mut io::stdin().lock())).transpose();
    let incoming = incoming.map_err(TakeoverError::Incoming)?;
    let dump = Some(incoming.as_ref().map_or(from, |incoming| incoming.path().to_owned()));
    let run_as = seen.observed().owner().to_owned();
    let order = TakeoverOrder { prefix: prefix.clone(), run_as, dump, unnamed, takeover: takeover.clone() };
    host.run(Order::Takeover(order), &mut |_| {}).await?;
    drop(incoming);
    say(&format!("{lead} has the queue of instance {}; waiting for it to lead", seen.roster.instance_id));
    wait(&client, &seen.roster, &lead, &takeover).await
}

/// Starts the instance with this node as lead and an empty queue, or one that was kept on this host.
///
/// # Errors
/// See [`TakeoverError`].
pub async fn reset(arguments: ResetArguments) -> Result<ExitCode, TakeoverError> {
    let ResetArguments { lead, kept, yes, force, node_name } = arguments;
    is_here(&lead, &node_name)?;
    let client = client().await?;
    let seen = Seen::read(&client).await?;
    let host = NsHost::open()?;
    let prefix = prefix(&host).await?;
    if let Some(id) = &kept {
        check_kept(id, &prefix, &seen.roster)?;
    }
    let new_instance_id = Some(kept.unwrap_or_else(|| uuid::Uuid::new_v4().to_string()));
    let takeover = Takeover { new_instance_id, force, ..seen.takeover() };
    seen.check(&lead, &takeover)?;
    if !yes {
        return Err(TakeoverError::Unconfirmed(seen.roster.instance_id));
    }
    if !force && jobs_run().await {
        return Err(TakeoverError::JobsRun);
    }
    let run_as = seen.observed().owner().to_owned();
    let order = TakeoverOrder { prefix, run_as, dump: None, unnamed: false, takeover: takeover.clone() };
    host.run(Order::Takeover(order), &mut |_| {}).await?;
    say(&format!("instance {} is given up; waiting for {lead} to lead another one", seen.roster.instance_id));
    wait(&client, &seen.roster, &lead, &takeover).await
}

/// Checks that the queue of instance `id` was kept on this host, and is not the one that is given up.
fn check_kept(id: &str, prefix: &Path, roster: &Roster) -> Result<(), TakeoverError> {
    let found = open_in_host_root(prefix).map(|fd| statedir::kept(&path_of(&fd))).unwrap_or_default();
    let others: Vec<String> = found.into_iter().filter(|found| *found != roster.instance_id).collect();
    match others.iter().any(|other| other == id) {
        true => Ok(()),
        false => Err(TakeoverError::NotKept { id: id.to_owned(), prefix: prefix.to_owned(), others }),
    }
}

/// Asks the lead's broker through this host's, since what its agent reports is seconds old. If a broker runs and does not answer, jobs
/// may be running.
async fn jobs_run() -> bool {
    match broker_state::connect().await {
        Ok(broker) => ranks_of_host_jobs(&broker).await.map_or(true, |ranks| !ranks.is_empty()),
        Err(RpcError::Connect { source, .. }) => {
            !matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
        }
        Err(_) => true,
    }
}

/// Checks that the command runs on the node that shall lead: it prepares the host that it runs on.
fn is_here(lead: &str, node_name: &str) -> Result<(), TakeoverError> {
    match lead == node_name {
        true => Ok(()),
        false => Err(TakeoverError::Elsewhere { here: node_name.to_owned(), lead: lead.to_owned() }),
    }
}

/// Whether a node's agent runs does not matter for who may lead: what it reported last was read like all other reports.
static NO_AGENTLESS: BTreeMap<String, String> = BTreeMap::new();
/// Only the status names them.
static NO_UNUSABLE: BTreeMap<String, Unusable> = BTreeMap::new();

/// What the planner would decide from.
struct Seen {
    uid: String,
    spec: FluxInstanceSpec,
    status: FluxInstanceStatus,
    nodes: Vec<NodeView>,
    reports: BTreeMap<String, FluxNodeStatus>,
    /// Names of FluxNodes that this version can't read.
    unreadable: Vec<String>,
    roster: Roster,
}

impl Seen {
    async fn read(client: &Client) -> Result<Self, TakeoverError> {
        let all = ListParams::default();
        let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
        let instance = call("get FluxInstance flux", instances.get_opt(INSTANCE)).await?;
        let instance = instance.ok_or(TakeoverError::NoInstance)?;
        let uid = instance.uid().unwrap_or_default();
        let roster = read_roster(client).await?.filter(|roster| roster.instance_uid == uid);
        let roster = roster.ok_or(TakeoverError::NoRoster)?;
        let nodes = Api::<Node>::all(client.clone());
        let flux_nodes = Api::<DeserializeGuard<FluxNode>>::namespaced(client.clone(), NAMESPACE);
        let nodes = call("list Nodes", nodes.list(&all)).await?;
        let flux_nodes = call("list FluxNodes", flux_nodes.list(&all)).await?;
        let (mut reports, mut unreadable) = (BTreeMap::new(), Vec::new());
        for node in flux_nodes.items {
            match node.0 {
                Ok(node) => drop(reports.insert(node.name_any(), node.status.unwrap_or_default())),
                Err(invalid) => unreadable.extend(invalid.metadata.name),
            }
        }
        Ok(Self {
            uid,
            spec: instance.spec,
            status: instance.status.unwrap_or_default(),
            nodes: nodes.items.iter().map(NodeView::from).collect(),
            reports,
            unreadable,
            roster,
        })
    }

    fn observed(&self) -> Observed<'_> {
        Observed {
            instance_uid: &self.uid,
            spec: &self.spec,
            generation: 0,
            status: &self.status,
            nodes: self.nodes.iter().collect(),
            reports: self.reports.iter().map(|(name, report)| (name.as_str(), report)).collect(),
            roster: Some(&self.roster),
            digest: None,
            certificate: None,
            is_certificate_gone: false,
            now: clock::now().as_second(),
            waited: Duration::ZERO,
            restart_word: None,
            fresh_id: "",
            agentless: &NO_AGENTLESS,
            unusable: &NO_UNUSABLE,
        }
    }

    fn check(&self, lead: &str, request: &Takeover) -> Result<(), TakeoverError> {
        let members = || self.roster.ranks.values().filter_map(|entry| entry.member.as_ref());
        let is_member = |name: &&String| members().any(|member| member.node == **name);
        if let Some(name) = self.unreadable.iter().find(is_member).filter(|_| !request.force) {
            return Err(TakeoverError::Unreadable(name.clone()));
        }
        match refusal(&self.observed(), &self.roster, lead, request) {
            Some(reason) => Err(TakeoverError::Planner(reason)),
            None => Ok(()),
        }
    }

    fn takeover(&self) -> Takeover {
        Takeover {
            instance_id: self.roster.instance_id.clone(),
            epoch: self.roster.epoch,
            at: clock::now().as_second(),
            dump: None,
            new_instance_id: None,
            force: false,
        }
    }
}

async fn prefix(host: &NsHost) -> Result<PathBuf, TakeoverError> {
    let state = look(host).await?.state;
    state.map(|state| state.prefix).ok_or(TakeoverError::NotInstalled)
}

/// Waits until `lead` leads a new epoch, or leads again, as `request` says.
async fn wait(client: &Client, before: &Roster, lead: &str, request: &Takeover) -> Result<ExitCode, TakeoverError> {
    let (begin, mut told) = (Instant::now(), String::new());
    loop {
        let why = match Seen::read(client).await {
            Ok(seen) => match still_missing(&seen, before, lead, request) {
                None => {
                    let Roster { instance_id, epoch, .. } = &seen.roster;
                    say(&format!("{lead} leads instance {instance_id} in epoch {epoch}"));
                    return Ok(ExitCode::SUCCESS);
                }
                Some(why) => why,
            },
            Err(error) => base::error_chain(&error),
        };
        if begin.elapsed() >= PATIENCE {
            return Err(TakeoverError::Late { lead: lead.to_owned(), why });
        }
        if why != told {
            say(&why);
            told = why;
        }
        sleep(LOOK_EVERY).await;
    }
}

/// What the request still waits for; None if `lead` leads.
fn still_missing(seen: &Seen, before: &Roster, lead: &str, request: &Takeover) -> Option<String> {
    let roster = &seen.roster;
    let holder = roster.lead().map(|member| member.node.as_str());
    let begun =
        if request.new_instance_id.is_some() { roster.instance_id != before.instance_id } else { holder == Some(lead) };
    if !begun {
        let refused = refusal(&seen.observed(), roster, lead, request);
        return Some(refused.unwrap_or_else(|| "waiting for the planner".to_owned()));
    }
    if holder.is_some_and(|holder| holder == lead) && Members::observe(&seen.observed(), roster).is_online(0) {
        return None;
    }
    let words = seen.reports.get(lead).and_then(|report| report.message.clone());
    Some(words.unwrap_or_else(|| format!("epoch {}: waiting for the broker", roster.epoch)))
}
