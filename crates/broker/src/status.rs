//! What a running broker says of itself and of the instance, live.

use std::{collections::BTreeMap, time::Duration};

use futures::{Stream, StreamExt, future, stream};
use nix::errno::Errno;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    message::{ANY, LEAD},
    rfc3::{Client, RpcError},
};
use api::IdSet;
use model::hostlist;

/// What asks the lead waits no longer: behind a lead that is gone nothing answers.
pub(super) const LEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a broker rests that does not tell yet who is online.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A broker, and the instance as it sees it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BrokerStatus {
    /// Its rank.
    pub rank: u32,
    /// Declared ranks.
    pub size: u32,
    /// Broker names by rank, in RFC 29's form.
    pub hostlist: String,
    /// Its `hostname` attribute.
    pub broker_name: String,
    /// `join`, `config-sync`, `init`, `quorum`, `run`, `cleanup`, `shutdown`, `finalize`, `goodbye`, `exit`.
    pub state: String,
    /// Seconds in that state.
    pub state_secs: f64,
    /// Process id, as the kernel tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The tree below it.
    pub overlay: Overlay,
    /// What only the lead knows; None where it did not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceStatus>,
}

/// The overlay at and below a broker (flux-overlay(1)).
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Overlay {
    /// `full`, `partial`, `degraded`, `lost`.
    pub status: String,
    /// Seconds in that status.
    pub secs: f64,
    /// Children that are not full.
    pub not_full: Vec<Child>,
    /// Ranks of the children that hang on the broker now.
    pub connected: IdSet,
}

/// A child in the overlay.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Child {
    /// Rank.
    pub rank: u32,
    /// See [`Overlay::status`]; also `offline`.
    pub status: String,
    /// Seconds in that status.
    #[serde(rename = "secs", alias = "duration", default)]
    pub secs: f64,
    /// Why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What the lead says of the instance.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    /// Ranks that are online.
    pub online: IdSet,
    /// Ranks that no job is given to, with the reason.
    pub drained: Vec<Drained>,
    /// Ranks that are excluded by configuration; they can't be drained.
    #[serde(default)]
    pub excluded: IdSet,
    /// Ranks that are slow to answer.
    pub torpid: IdSet,
    /// All there is to schedule.
    pub all: Amount,
    /// Of it, on ranks that are down.
    pub down: Amount,
    /// Of it, in use by jobs.
    pub allocated: Amount,
    /// What each rank declares, behind `all`.
    #[serde(skip)]
    pub declared: ResourceSet,
    /// The names of all ranks, excluded ones too.
    #[serde(skip)]
    pub names: BTreeMap<u32, String>,
    /// Cores that no job holds, by rank, of the ranks that are up and may be given jobs.
    #[serde(skip)]
    pub free: BTreeMap<u32, usize>,
}

impl InstanceStatus {
    /// What these ranks declare, whether they are up or down.
    pub fn declared_by(&self, ranks: &IdSet) -> Amount {
        self.declared.amount_on(|rank| ranks.contains(rank))
    }
}

/// Ranks drained together.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Drained {
    /// Which.
    pub ranks: IdSet,
    /// Why.
    pub reason: String,
    /// Since when, by the lead's clock, in seconds since 1970.
    #[serde(skip)]
    pub since: f64,
}

/// So much of resources, and where.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Ranks.
    pub ranks: IdSet,
    /// Cores.
    pub cores: usize,
    /// GPUs.
    pub gpus: usize,
}

/// What changes in the life of a broker.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Its state (see [`BrokerStatus::state`]).
    State(String),
    /// The ranks that are online, as the lead tells.
    Online(IdSet),
}

/// Asks the broker for all of it. What the lead does not tell is left out.
///
/// # Errors
/// The broker itself does not answer.
pub async fn status(client: &Client) -> Result<BrokerStatus, RpcError> {
    let (rank, size, hostlist, broker_name) = futures::try_join!(
        attribute(client, "rank"),
        attribute(client, "size"),
        attribute(client, "hostlist"),
        attribute(client, "hostname"),
    )?;
    let (state, overlay, instance) =
        futures::join!(state(client), overlay(client), async { instance(client).await.ok() });
    let state = state?;
    let number = |text: &str| {
        serde_json::from_str(text).map_err(|source| RpcError::Payload { topic: "attr.get".to_owned(), source })
    };
    Ok(BrokerStatus {
        rank: number(&rank)?,
        size: number(&size)?,
        hostlist,
        broker_name,
        state: state.state,
        state_secs: state.duration,
        pid: client.peer_pid(),
        overlay: overlay?,
        instance,
    })
}

/// One attribute of the broker (flux-broker-attributes(7)).
///
/// # Errors
/// [`RpcError::Service`] where it has none of that name.
pub async fn attribute(client: &Client, name: &str) -> Result<String, RpcError> {
    #[derive(Deserialize)]
    struct Attribute {
        value: String,
    }
    let answer = client.rpc("attr.get", ANY, json!({ "name": name })).await?;
    Ok(parse::<Attribute>("attr.get", answer)?.value)
}

/// The broker's state and the seconds it is in it.
#[derive(Deserialize, Clone, Debug, PartialEq)]
pub struct State {
    /// See [`BrokerStatus::state`].
    pub state: String,
    /// Seconds.
    #[serde(default)]
    pub duration: f64,
}

/// The broker's state.
///
/// # Errors
/// [`RpcError`].
pub async fn state(client: &Client) -> Result<State, RpcError> {
    parse("state-machine.get", client.rpc("state-machine.get", ANY, Value::Null).await?)
}

/// The overlay at and below the broker.
///
/// # Errors
/// [`RpcError`].
pub async fn overlay(client: &Client) -> Result<Overlay, RpcError> {
    #[derive(Deserialize)]
    struct Health {
        status: String,
        #[serde(default)]
        duration: f64,
        #[serde(default)]
        children: Vec<Child>,
    }
    let health: Health = parse("overlay.health", client.rpc("overlay.health", ANY, Value::Null).await?)?;
    let is_connected = |child: &&Child| !matches!(child.status.as_str(), "offline" | "lost");
    let connected = health.children.iter().filter(is_connected).map(|child| child.rank).collect();
    let not_full = health.children.into_iter().filter(|child| child.status != "full").collect();
    Ok(Overlay { status: health.status, secs: health.duration, not_full, connected })
}

/// The ranks that are online.
///
/// # Errors
/// [`RpcError`]; a time-out where the lead is gone.
pub async fn online(client: &Client) -> Result<IdSet, RpcError> {
    let answer = client.rpc_within(LEAD_TIMEOUT, "groups.get", LEAD, json!({ "name": "broker.online" })).await?;
    Ok(parse::<Members>("groups.get", answer)?.members)
}

/// What only the lead knows.
///
/// # Errors
/// [`RpcError`]; a time-out where the lead is gone.
pub async fn instance(client: &Client) -> Result<InstanceStatus, RpcError> {
    #[derive(Deserialize)]
    struct Resources {
        #[serde(rename = "R", default)]
        all: ResourceSet,
        #[serde(default)]
        drain: BTreeMap<String, Reason>,
        #[serde(default)]
        exclude: IdSet,
        #[serde(default)]
        torpid: IdSet,
    }
    #[derive(Deserialize)]
    struct Reason {
        #[serde(default)]
        reason: Option<String>,
        #[serde(default)]
        timestamp: f64,
    }
    let ask = |topic| client.rpc_within(LEAD_TIMEOUT, topic, LEAD, Value::Null);
    let (online, resources) = futures::try_join!(online(client), ask("resource.status"))?;
    // What runs is asked after what is drained: a job that was started in between is seen.
    let scheduler = scheduled(client).await?;
    let resources: Resources = parse("resource.status", resources)?;
    let drained = resources.drain.into_iter().filter_map(|(ranks, why)| {
        Some(Drained { ranks: ranks.parse().ok()?, reason: why.reason.unwrap_or_default(), since: why.timestamp })
    });
    let free = scheduler.free();
    let amount = |set: Option<ResourceSet>| set.map(|set| set.amount()).unwrap_or_default();
    let declared = scheduler.all.unwrap_or_default();
    Ok(InstanceStatus {
        online,
        drained: drained.collect(),
        excluded: resources.exclude,
        torpid: resources.torpid,
        all: declared.amount(),
        down: amount(scheduler.down),
        allocated: amount(scheduler.allocated),
        declared,
        names: resources.all.names(),
        free,
    })
}

/// Gives no new jobs to `ranks`, for `reason`; running ones stay. A rank that is drained already gets the new reason.
///
/// # Errors
/// [`RpcError`]; a time-out where the lead is gone.
pub async fn drain(client: &Client, ranks: &IdSet, reason: &str) -> Result<(), RpcError> {
    let order = json!({ "targets": ranks.to_string(), "reason": reason, "mode": "overwrite" });
    client.rpc_within(LEAD_TIMEOUT, "resource.drain", LEAD, order).await.map(drop)
}

/// Gives jobs to `ranks` again, as many of them as are drained: Flux undrains those itself that it excludes.
///
/// # Errors
/// [`RpcError`]; a time-out where the lead is gone.
pub async fn undrain(client: &Client, ranks: &IdSet) -> Result<(), RpcError> {
    let order = json!({ "targets": ranks.to_string(), "mode": "update" });
    client.rpc_within(LEAD_TIMEOUT, "resource.undrain", LEAD, order).await.map(drop)
}

/// Every change of state and membership, from the present one on; ends with the broker. A membership that the lead does
/// not tell, or ceases to, is left out.
///
/// # Errors
/// The broker has closed already.
pub fn watch(client: &Client) -> Result<impl Stream<Item = Change> + Send + Unpin + '_, RpcError> {
    // The monitor tells states by numbers that differ between versions of Flux; their names do not.
    let states = answers(client, "state-machine.monitor", ANY, json!({ "final": i32::MAX }))?;
    let states = states.filter_map(async |_| state(client).await.ok().map(|now| Change::State(now.state)));
    let members = answers(client, "groups.get", LEAD, json!({ "name": "broker.online" }))?;
    let members = members.filter_map(|answer| {
        future::ready(parse::<Members>("groups.get", answer).ok().map(|answer| Change::Online(answer.members)))
    });
    let changes = stream::select(Box::pin(states), Box::pin(members));
    // Both may end before the broker does: its end is the socket's.
    Ok(Box::pin(changes.chain(stream::once(client.closed()).filter_map(|()| future::ready(None)))))
}

/// Every answer to `topic` for as long as the broker lives. It takes connections before its services are there, and behind a
/// lead that is gone nobody answers: then it is asked again.
fn answers<'a>(
    client: &'a Client,
    topic: &'static str,
    nodeid: u32,
    payload: Value,
) -> Result<impl Stream<Item = Value> + Send + use<'a>, RpcError> {
    let first = client.stream(topic, nodeid, &payload)?;
    let again = stream::repeat_with(move || client.stream(topic, nodeid, &payload));
    let again = again.take_while(|asked| future::ready(asked.is_ok())).filter_map(|asked| future::ready(asked.ok()));
    let asked = stream::once(future::ready(first)).chain(again);
    Ok(asked
        .map(|asked| {
            let known = asked.take_while(|answer| future::ready(answer.is_ok()));
            let rest = stream::once(sleep(ASK_AGAIN)).filter_map(|()| future::ready(None));
            known.filter_map(|answer| future::ready(answer.ok())).chain(rest)
        })
        .flatten())
}

/// What an administrator looks for in a log: which brokers are online. Flux itself says it only until it has its quorum,
/// which is one.
pub fn online_line(names: &str, online: &IdSet) -> String {
    format!("broker.info[0]: online: {names} (ranks {online})")
}

#[derive(Deserialize)]
struct Members {
    members: IdSet,
}

/// The names of the ranks that jobs hold, by rank. It needs no scheduler.
///
/// # Errors
/// [`RpcError`].
pub async fn held_names(client: &Client) -> Result<BTreeMap<u32, String>, RpcError> {
    #[derive(Deserialize)]
    struct Held {
        allocated: Option<ResourceSet>,
    }
    let topic = "job-manager.resource-status";
    let Held { allocated } = parse(topic, client.rpc(topic, LEAD, Value::Null).await?)?;
    let held = allocated.map(|set| set.amount().ranks).unwrap_or_default();
    if held.is_empty() {
        return Ok(BTreeMap::new());
    }
    #[derive(Deserialize)]
    struct Resources {
        #[serde(rename = "R", default)]
        all: ResourceSet,
    }
    let topic = "resource.status";
    let names = match client.rpc_within(LEAD_TIMEOUT, topic, LEAD, Value::Null).await {
        // Not what the scheduler has, which knows nothing of excluded ranks.
        Ok(status) => parse::<Resources>(topic, status)?.all.names(),
        // The resource module was removed by a live change that was killed: what that one had loaded keeps these names.
        Err(RpcError::Service { errnum, .. }) if errnum == Errno::ENOSYS as u32 => loaded_names(client).await?,
        Err(error) => return Err(error),
    };
    Ok(names.into_iter().filter(|(rank, _)| held.contains(*rank)).collect())
}

/// The name of each rank by the configuration that is loaded: without a `[bootstrap]` table, ranks are in the order
/// of `[[resource.config]]` (flux-core src/modules/resource/inventory.c).
async fn loaded_names(client: &Client) -> Result<BTreeMap<u32, String>, RpcError> {
    #[derive(Deserialize)]
    struct Loaded {
        #[serde(default)]
        bootstrap: Option<Value>,
        #[serde(default)]
        resource: Declared,
    }
    #[derive(Deserialize, Default)]
    struct Declared {
        #[serde(default)]
        config: Vec<Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        hosts: String,
    }
    let Loaded { bootstrap, resource } = parse("config.get", client.rpc("config.get", LEAD, Value::Null).await?)?;
    let names = match bootstrap {
        Some(_) => hostlist::decode(&attribute(client, "hostlist").await?),
        None => resource.config.iter().flat_map(|entry| hostlist::decode(&entry.hosts)).collect(),
    };
    Ok((0..).zip(names).collect())
}

async fn scheduled(client: &Client) -> Result<Scheduled, RpcError> {
    let topic = "resource.sched-status";
    parse(topic, client.rpc_within(LEAD_TIMEOUT, topic, LEAD, Value::Null).await?)
}

/// What `resource.sched-status` answers.
#[derive(Deserialize)]
struct Scheduled {
    all: Option<ResourceSet>,
    down: Option<ResourceSet>,
    allocated: Option<ResourceSet>,
}

impl Scheduled {
    fn free(&self) -> BTreeMap<u32, usize> {
        let cores = |set: &Option<ResourceSet>| set.as_ref().map(ResourceSet::cores).unwrap_or_default();
        let (mut free, down, allocated) = (cores(&self.all), cores(&self.down), cores(&self.allocated));
        free.retain(|rank, cores| {
            *cores = cores.saturating_sub(allocated.get(rank).copied().unwrap_or_default());
            *cores > 0 && !down.contains_key(rank)
        });
        free
    }
}

/// R (RFC 20), as much of it as is counted.
#[derive(Deserialize, Clone, Debug, Default, PartialEq)]
pub struct ResourceSet {
    execution: Execution,
}

#[derive(Deserialize, Clone, Debug, Default, PartialEq)]
struct Execution {
    #[serde(rename = "R_lite", default)]
    entries: Vec<Entry>,
    #[serde(default)]
    nodelist: Vec<String>,
}

#[derive(Deserialize, Clone, Debug, PartialEq)]
struct Entry {
    rank: IdSet,
    children: BTreeMap<String, IdSet>,
}

impl ResourceSet {
    /// The names of its ranks: a nodelist is in the order of the ranks (RFC 20).
    fn names(&self) -> BTreeMap<u32, String> {
        let names = self.execution.nodelist.iter().flat_map(|names| hostlist::decode(names));
        self.amount().ranks.0.into_iter().zip(names).collect()
    }

    /// How many cores, by rank.
    fn cores(&self) -> BTreeMap<u32, usize> {
        let mut cores = BTreeMap::new();
        for Entry { rank, children } in &self.execution.entries {
            let each = children.get("core").map_or(0, IdSet::len);
            rank.0.iter().for_each(|rank| *cores.entry(*rank).or_default() += each);
        }
        cores
    }

    fn amount(&self) -> Amount {
        self.amount_on(|_| true)
    }

    fn amount_on(&self, is_meant: impl Fn(u32) -> bool) -> Amount {
        let mut amount = Amount::default();
        for Entry { rank, children } in &self.execution.entries {
            let ranks = rank.0.iter().copied().filter(|rank| is_meant(*rank)).collect::<IdSet>();
            let count = |kind| ranks.len() * children.get(kind).map_or(0, IdSet::len);
            amount.cores += count("core");
            amount.gpus += count("gpu");
            amount.ranks.0.extend(ranks.0);
        }
        amount
    }
}

pub(super) fn parse<T: DeserializeOwned>(topic: &str, value: Value) -> Result<T, RpcError> {
    serde_json::from_value(value).map_err(|source| RpcError::Payload { topic: topic.to_owned(), source })
}
