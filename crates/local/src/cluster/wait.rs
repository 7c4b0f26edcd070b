//! Waits until all nodes are online, or until it is certain that they won't be.

use std::{collections::BTreeMap, pin::pin, time::Duration};

use futures::{StreamExt, stream};
use kube::{
    Api, Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, watcher},
    },
};
use tokio::time::{Instant, interval};

use super::{
    control::Client as Control,
    io::print_line,
    layout::{Cluster, Layout},
    objects,
};
use crate::error::LocalError;
use api::{FluxInstance, FluxInstanceStatus, FluxNode, FluxNodeStatus, InstancePhase, NodePhase};
use base::words::many;
use model::conditions::SHUT_DOWN_MESSAGE;

/// A node that has been `Failed` for this long won't recover by itself.
const FAILED_LIMIT: Duration = Duration::from_mins(1);

/// [`SHUT_DOWN_MESSAGE`] with the command of local mode.
const SHUT_DOWN_HERE: &str = "an administrator has shut the instance down (flux shutdown): to start it again, with its queue, run \
                              `flux-distribute local restart`";

/// A node's status, and for how long it has been `Failed`.
#[derive(Clone, Debug, Default)]
struct Report {
    status: FluxNodeStatus,
    failed_for: Option<Duration>,
}

/// Whether to go on waiting.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// They may still come online.
    Wait,
    /// All nodes are online.
    Online,
    /// They won't come online by themselves.
    GiveUp {
        /// The reason.
        why: String,
    },
}

/// Decides whether to go on waiting for `wanted` nodes. Pure.
fn verdict(wanted: u32, instance: &FluxInstanceStatus, reports: &BTreeMap<String, Report>) -> Verdict {
    if instance.online >= wanted {
        return Verdict::Online;
    }
    let message = || instance.message.clone().unwrap_or_else(|| "the FluxInstance failed without a message".to_owned());
    // LeadNotOnline is about a lead that was online before and may come back.
    let degraded = instance.holding("Degraded").filter(|condition| condition.reason != "LeadNotOnline");
    if instance.phase == InstancePhase::Failed || degraded.is_some() {
        let why = degraded.map(|condition| condition.message.clone()).filter(|words| !words.is_empty());
        return Verdict::GiveUp { why: why.unwrap_or_else(message) };
    }
    let is_lasting = |report: &Report| {
        let failed = report.status.phase == NodePhase::Failed;
        failed && (report.status.needs_attention || report.failed_for.is_some_and(|time| time >= FAILED_LIMIT))
    };
    match reports.iter().find(|(_, report)| is_lasting(report)) {
        Some((node, report)) => {
            let words = report.status.message.as_deref().unwrap_or("its agent gives no reason");
            Verdict::GiveUp { why: format!("{node} has failed: {words}") }
        }
        None => Verdict::Wait,
    }
}

enum Update {
    Instance(Option<Box<FluxInstance>>),
    Node(Box<FluxNode>),
}

/// Prints the instance's state when it changes, until all of `nodes` are online.
///
/// # Errors
/// [`LocalError::GivenUp`] if they won't be. [`LocalError::TakenDown`] by another command. [`LocalError::Late`] at
/// `end`.
pub(crate) async fn run(layout: &Layout, cluster: &Cluster, nodes: u32, end: Instant) -> Result<(), LocalError> {
    let client: Client = objects::client(layout, cluster)?;
    let mut daemon = Control::connect(layout).await?;
    let instances: Api<FluxInstance> = Api::default_namespaced(client.clone());
    let flux_nodes: Api<FluxNode> = Api::default_namespaced(client);
    let instances = watcher::watch_object(instances, api::INSTANCE).default_backoff();
    // Drop errors: the watches reconnect by themselves.
    let instances = instances.filter_map(async |change| Some(Update::Instance(change.ok()?.map(Box::new))));
    let flux_nodes = watcher(flux_nodes, watcher::Config::default()).default_backoff().applied_objects();
    let flux_nodes = flux_nodes.filter_map(async |change| Some(Update::Node(Box::new(change.ok()?))));
    let mut changes = pin!(stream::select(Box::pin(instances), Box::pin(flux_nodes)));
    let mut closed = pin!(daemon.closed());
    let mut every = interval(Duration::from_secs(1));
    let mut status = FluxInstanceStatus::default();
    let mut seen: BTreeMap<String, (FluxNodeStatus, Option<Instant>)> = BTreeMap::new();
    let mut printed = String::new();
    loop {
        tokio::select! {
            Some(change) = changes.next() => match change {
                Update::Instance(instance) => status = instance.and_then(|found| found.status).unwrap_or_default(),
                Update::Node(node) => {
                    let now = node.status.clone().unwrap_or_default();
                    let (before, since) = seen.entry(node.name_any()).or_default();
                    *since = (now.phase == NodePhase::Failed).then(|| since.unwrap_or_else(Instant::now));
                    *before = now;
                }
            },
            _ = every.tick() => {}
            () = &mut closed => return Err(ended(layout, cluster)),
            () = tokio::time::sleep_until(end) => {
                return Err(LocalError::Late(format!(
                    "not all of {} came online in time ({printed}). The cluster keeps running: see `flux-distribute local status`, and take \
                     it down with `flux-distribute local down`",
                    many(nodes, "node")
                )));
            }
        }
        let line = describe(&status);
        if line != printed {
            print_line(&line)?;
            printed = line;
        }
        let report = |(name, (status, since)): (&String, &(FluxNodeStatus, Option<Instant>))| {
            (name.clone(), Report { status: status.clone(), failed_for: since.map(|since| since.elapsed()) })
        };
        match verdict(nodes, &status, &seen.iter().map(report).collect()) {
            Verdict::Wait => {}
            Verdict::Online => return Ok(()),
            Verdict::GiveUp { why } => return Err(LocalError::GivenUp(why)),
        }
    }
}

/// The reason why the daemon closed the connection.
fn ended(layout: &Layout, cluster: &Cluster) -> LocalError {
    if layout.is_current(&cluster.token) {
        return LocalError::GivenUp("the local cluster's daemon has ended".to_owned());
    }
    LocalError::TakenDown
}

/// The instance's phase and message; unless there is a problem, the message says how many nodes are online.
pub(crate) fn describe(status: &FluxInstanceStatus) -> String {
    let message = status.message.as_deref().unwrap_or("no status yet");
    format!("{:?}: {}", status.phase, for_local(message))
}

/// A message with what to do here, if its remedy needs kubectl.
pub(crate) fn for_local(message: &str) -> String {
    message.replace(SHUT_DOWN_MESSAGE, SHUT_DOWN_HERE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::conditions::ConditionValue;

    #[test]
    fn waiting_ends_on_problems_that_will_not_go_away_by_themselves() {
        type Case = (&'static str, Box<dyn Fn(&mut FluxInstanceStatus, &mut Report)>, Verdict);
        let degraded = |status: &mut FluxInstanceStatus, reason: &'static str| {
            let value = ConditionValue::yes(reason, "the bundle is broken");
            value.set("Degraded", &mut status.conditions, 1, Default::default());
        };
        let gives_up = |why: &str| Verdict::GiveUp { why: why.to_owned() };
        let failed = |report: &mut Report, seconds| {
            report.status.phase = NodePhase::Failed;
            report.status.message = Some("sha256 differs".to_owned());
            report.failed_for = Some(Duration::from_secs(seconds));
        };
        let cases: Vec<Case> = vec![
            ("nothing is known yet", Box::new(|_, _| {}), Verdict::Wait),
            ("all are online", Box::new(|status, _| status.online = 4), Verdict::Online),
            ("some are online", Box::new(|status, _| status.online = 3), Verdict::Wait),
            (
                "the spec can't be served",
                Box::new(|status, _| {
                    status.phase = InstancePhase::Failed;
                    status.message = Some("no".to_owned());
                }),
                gives_up("no"),
            ),
            (
                "a condition needs an administrator, and the lead is online",
                Box::new(move |status, _| {
                    (status.phase, status.online) = (InstancePhase::Running, 1);
                    degraded(status, "NoLead");
                }),
                gives_up("the bundle is broken"),
            ),
            ("the lead is away", Box::new(move |status, _| degraded(status, "LeadNotOnline")), Verdict::Wait),
            ("a node failed just now", Box::new(move |_, report| failed(report, 1)), Verdict::Wait),
            (
                "a node keeps failing",
                Box::new(move |_, report| failed(report, 60)),
                gives_up("node2 has failed: sha256 differs"),
            ),
            (
                "a node has failed for good",
                Box::new(move |_, report| {
                    failed(report, 0);
                    report.status.needs_attention = true;
                }),
                gives_up("node2 has failed: sha256 differs"),
            ),
            ("a lasting failure is over", Box::new(|_, report| report.status.needs_attention = true), Verdict::Wait),
        ];
        for (what, change, expected) in cases {
            let (mut status, mut report) = (FluxInstanceStatus::default(), Report::default());
            change(&mut status, &mut report);
            let reports = [("node1".to_owned(), Report::default()), ("node2".to_owned(), report)].into();
            assert_eq!(verdict(4, &status, &reports), expected, "{what}");
        }
    }
}
