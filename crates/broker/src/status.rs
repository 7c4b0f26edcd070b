//! The live status of a running broker and, from the lead, of the instance.

use std::{collections::BTreeMap, time::Duration};

use futures::{Stream, StreamExt, future, stream};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::time::sleep;
use tracing::debug;

use super::{
    message::{ANY, ENOSYS, LEAD},
    resource_set::{Amount, ResourceSet},
    rfc3::{Client, RpcError},
};
use api::{IdSet, MOST_RANKS};
use model::hostlist;

/// Limit for requests to the lead: if the lead is gone, nothing answers.
pub(super) const LEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before repeating a request that a broker can't answer yet.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A broker's status, and its view of the instance.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BrokerStatus {
    /// Its rank.
    pub rank: u32,
    /// Number of declared ranks, spares included: its attribute `size`.
    pub size: u32,
    /// Broker names by rank, in RFC 29's form.
    pub hostlist: String,
    /// Its `hostname` attribute.
    pub broker_name: String,
    /// `join`, `config-sync`, `init`, `quorum`, `run`, `cleanup`, `shutdown`, `finalize`, `goodbye`, `exit`.
    pub state: String,
    /// Seconds since it entered that state.
    pub state_secs: f64,
    /// Process id of the socket's peer, from the kernel (SO_PEERCRED); None if the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The tree below it.
    pub overlay: Overlay,
    /// The lead's report; None if the lead did not answer all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceStatus>,
}

/// The overlay at and below a broker (flux-overlay(1)).
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Overlay {
    /// `full`, `partial`, `degraded`, `lost`.
    pub status: String,
    /// Seconds since it has that status.
    pub secs: f64,
    /// Children whose status is not `full`.
    pub not_full: Vec<Child>,
    /// Ranks of the children that are connected to this broker.
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
    /// Seconds since it has that status.
    #[serde(rename = "secs", alias = "duration", default)]
    pub secs: f64,
    /// Flux's explanation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The lead's report about the instance.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct InstanceStatus {
    /// Ranks that are online.
    pub online: IdSet,
    /// Drained ranks, which get no jobs.
    pub drained: Vec<Drained>,
    /// Ranks that the configuration excludes; they can't be drained.
    #[serde(default)]
    pub excluded: IdSet,
    /// Ranks that are slow to answer.
    pub torpid: IdSet,
    /// All schedulable resources.
    pub all: Amount,
    /// Those of them on ranks that get no jobs: offline, drained or torpid.
    pub down: Amount,
    /// Those of them that jobs use.
    pub allocated: Amount,
    /// The resources behind `all`, by rank.
    #[serde(skip)]
    pub declared: ResourceSet,
    /// The resources behind `allocated`, by rank.
    #[serde(skip)]
    pub allocated_resources: ResourceSet,
    /// The names of all ranks, including excluded ones.
    #[serde(skip)]
    pub names: BTreeMap<u32, String>,
    /// Number of cores that no job holds, for each rank that may get jobs and has such a core.
    #[serde(skip)]
    pub free: BTreeMap<u32, usize>,
}

impl InstanceStatus {
    /// The resources that these ranks declare, whether they are up or down.
    pub fn declared_by(&self, ranks: &IdSet) -> Amount {
        self.declared.amount_on(|rank| ranks.contains(rank))
    }
}

/// Ranks that were drained for one reason at one time.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Drained {
    /// The drained ranks.
    pub ranks: IdSet,
    /// Why; empty if nobody gave a reason.
    pub reason: String,
    /// When they were drained first, by the lead's clock, in whole seconds since 1970. Only [`DrainMode::Renew`]
    /// changes it.
    #[serde(skip)]
    pub since: f64,
}

/// A change of a broker's state or of the instance's membership.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The broker's new state (see [`BrokerStatus::state`]).
    State(String),
    /// The ranks that are online now, according to the lead.
    Online(IdSet),
}

/// Queries the broker's status. Leaves out the lead's report if any part of it is missing.
///
/// # Errors
/// If the broker itself does not answer.
pub async fn status(client: &Client) -> Result<BrokerStatus, RpcError> {
    let (rank, size, hostlist, broker_name) = futures::try_join!(
        attribute(client, "rank"),
        attribute(client, "size"),
        attribute(client, "hostlist"),
        attribute(client, "hostname"),
    )?;
    let reported = async {
        let instance = instance(client).await;
        instance.inspect_err(|error| debug!(%error, "the lead did not report")).ok()
    };
    let (state, overlay, instance) = futures::join!(state(client), overlay(client), reported);
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
/// [`RpcError::Service`] if it has no such attribute.
pub async fn attribute(client: &Client, name: &str) -> Result<String, RpcError> {
    #[derive(Deserialize)]
    struct Attribute {
        value: String,
    }
    let answer = client.rpc("attr.get", ANY, json!({ "name": name })).await?;
    Ok(parse::<Attribute>("attr.get", answer)?.value)
}

/// The broker's state and its duration.
#[derive(Deserialize, Clone, Debug, PartialEq)]
pub struct State {
    /// See [`BrokerStatus::state`].
    pub state: String,
    /// Seconds since the broker entered it.
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
/// [`RpcError`]; a timeout if the lead is gone.
pub async fn online(client: &Client) -> Result<IdSet, RpcError> {
    let answer = client.rpc_within(LEAD_TIMEOUT, "groups.get", LEAD, json!({ "name": "broker.online" })).await?;
    Ok(parse::<Members>("groups.get", answer)?.members)
}

/// The lead's report about the instance.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone.
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
    let resources: Resources = parse("resource.status", resources)?;
    // Allocations are queried after drained ranks, so that a job that starts in between is not missed.
    let scheduler = scheduled(client).await?;
    // Flux lists no rank twice. Whoever answers in its place could repeat a few bytes that stand for thousands of ranks.
    let mut left = MOST_RANKS as usize;
    let drained = resources.drain.into_iter().filter_map(|(ranks, why)| {
        let ranks: IdSet = ranks.parse().ok()?;
        left = left.checked_sub(ranks.len())?;
        Some(Drained { ranks, reason: why.reason.unwrap_or_default(), since: why.timestamp })
    });
    let free = scheduler.free();
    let (declared, allocated_resources) = (scheduler.all.unwrap_or_default(), scheduler.allocated.unwrap_or_default());
    Ok(InstanceStatus {
        online,
        drained: drained.collect(),
        excluded: resources.exclude,
        torpid: resources.torpid,
        all: declared.amount(),
        down: scheduler.down.map(|set| set.amount()).unwrap_or_default(),
        allocated: allocated_resources.amount(),
        declared,
        allocated_resources,
        names: resources.all.names(),
        free,
    })
}

/// What a drain does to a rank that is drained already (flux-core, src/modules/resource/drain.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainMode {
    /// `update`: it keeps its reason, if it has one. Somebody may have drained it since the last report.
    Keep,
    /// `overwrite`: it gets the new reason, and keeps its time.
    Replace,
    /// `force-overwrite`: it gets the new reason, and the present time.
    Renew,
}

/// Drains `ranks`, so that they get no new jobs; running ones continue.
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone. Flux refuses an empty set.
pub async fn drain(client: &Client, ranks: &IdSet, reason: &str, mode: DrainMode) -> Result<(), RpcError> {
    let mode = match mode {
        DrainMode::Keep => "update",
        DrainMode::Replace => "overwrite",
        DrainMode::Renew => "force-overwrite",
    };
    let request = json!({ "targets": ranks.to_string(), "reason": reason, "mode": mode });
    client.rpc_within(LEAD_TIMEOUT, "resource.drain", LEAD, request).await.map(drop)
}

/// Undrains those of `ranks` that are drained. (Flux itself undrains ranks that it excludes.)
///
/// # Errors
/// [`RpcError`]; a timeout if the lead is gone. Flux refuses an empty set.
pub async fn undrain(client: &Client, ranks: &IdSet) -> Result<(), RpcError> {
    // Without `update`, Flux refuses the whole request if one rank is not drained.
    let request = json!({ "targets": ranks.to_string(), "mode": "update" });
    client.rpc_within(LEAD_TIMEOUT, "resource.undrain", LEAD, request).await.map(drop)
}

/// All changes of the broker's state, and `with_members` those of the membership, beginning with the present values; ends with
/// the broker. Leaves out the membership while the lead does not answer. The lead sends each change of it to each broker that
/// has asked.
///
/// # Errors
/// If the broker has closed the connection already.
pub fn watch(client: &Client, with_members: bool) -> Result<impl Stream<Item = Change> + Send + Unpin + '_, RpcError> {
    // The monitor sends numbers for states, which differ between versions of Flux. So each message only triggers a
    // query of the name.
    let states = answers(client, "state-machine.monitor", ANY, json!({ "final": i32::MAX }))?;
    let states = states.filter_map(async |_| state(client).await.ok().map(|now| Change::State(now.state)));
    let ask_members = || answers(client, "groups.get", LEAD, json!({ "name": "broker.online" }));
    let members = with_members.then(ask_members).transpose()?;
    let members = stream::iter(members).flatten().filter_map(|answer| {
        future::ready(parse::<Members>("groups.get", answer).ok().map(|answer| Change::Online(answer.members)))
    });
    let changes = stream::select(Box::pin(states), Box::pin(members));
    // Both streams may end before the broker does; only the end of the socket ends the broker.
    Ok(Box::pin(changes.chain(stream::once(client.closed()).filter_map(|()| future::ready(None)))))
}

/// All answers to `topic` while the broker lives. Asks again if a request fails: a broker accepts connections before
/// its services are up.
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

/// The log line that tells an administrator which brokers are online. Flux itself logs it only until it has its quorum,
/// which is one broker.
pub fn online_line(names: &str, online: &IdSet) -> String {
    format!("broker.info[0]: online: {names} (ranks {online})")
}

#[derive(Deserialize)]
struct Members {
    members: IdSet,
}

/// The names of the ranks that jobs hold, by rank. Works without a scheduler.
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
        // Not the scheduler's resources, which lack excluded ranks.
        Ok(status) => parse::<Resources>(topic, status)?.all.names(),
        // An interrupted live change removed the resource module; the configuration that it had loaded keeps these
        // names.
        Err(error) if error.is(ENOSYS) => loaded_names(client).await?,
        Err(error) => return Err(error),
    };
    Ok(names.into_iter().filter(|(rank, _)| held.contains(*rank)).collect())
}

/// The name of each rank in the loaded configuration. Without a `[bootstrap]` table, ranks are in the order of
/// `[[resource.config]]` (flux-core src/modules/resource/inventory.c).
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
        None => names_of_ranks(resource.config.iter().map(|entry| entry.hosts.as_str())),
    };
    Ok((0..).zip(names).collect())
}

/// The names that `lists` stand for together, as many as an instance has ranks: each list alone may stand for a million.
fn names_of_ranks<'a>(lists: impl Iterator<Item = &'a str>) -> Vec<String> {
    lists.flat_map(hostlist::decode).take(MOST_RANKS as usize).collect()
}

async fn scheduled(client: &Client) -> Result<Scheduled, RpcError> {
    let topic = "resource.sched-status";
    parse(topic, client.rpc_within(LEAD_TIMEOUT, topic, LEAD, Value::Null).await?)
}

/// The answer of `resource.sched-status`.
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

pub(super) fn parse<T: DeserializeOwned>(topic: &str, value: Value) -> Result<T, RpcError> {
    serde_json::from_value(value).map_err(|source| RpcError::Payload { topic: topic.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_hosts_together_stand_for_no_more_names_than_an_instance_has_ranks() {
        assert_eq!(names_of_ranks(["n[1-2]", "m"].into_iter()), ["n1", "n2", "m"]);
        let names = names_of_ranks(std::iter::repeat_n("n[0-1048575]", 100_000));
        assert_eq!(names.len(), MOST_RANKS as usize);
    }
}
