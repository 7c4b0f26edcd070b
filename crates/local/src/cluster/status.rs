//! `local status`: shows the instance's state, and the nodes' from the daemon and from their FluxNodes.

use std::{collections::BTreeMap, io::Write};

use kube::{Api, ResourceExt, api::ListParams, core::DeserializeGuard};
use serde::Serialize;

use super::{
    control::{Client, NodeView, Request},
    io,
    layout::Layout,
    objects, wait,
};
use crate::error::{Context, LocalError};
use api::{FluxInstance, FluxNode};

/// One line of the table.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    #[serde(flatten)]
    node: NodeView,
    phase: Option<String>,
    rank: Option<u32>,
    /// PID in the node's PID namespace.
    broker_pid: Option<i32>,
    message: Option<String>,
}

/// Prints the table, or JSON.
pub(crate) async fn run(layout: &Layout, json: bool) -> Result<(), LocalError> {
    let cluster = layout.load()?;
    let nodes = Client::connect(layout).await?.ask(Request::Status).await?;
    let client = objects::client(layout, &cluster)?;
    let flux_nodes: Api<DeserializeGuard<FluxNode>> = Api::default_namespaced(client.clone());
    let flux_nodes = flux_nodes.list(&ListParams::default()).await.context(|| "can't list the FluxNodes".to_owned())?;
    // Skip FluxNodes of another version that this one can't read.
    let readable = flux_nodes.items.into_iter().filter_map(|node| node.0.ok());
    let mut flux_nodes: BTreeMap<String, FluxNode> = readable.map(|node| (node.name_any(), node)).collect();
    let lines: Vec<Line> = nodes.into_iter().map(|node| line(flux_nodes.remove(&node.name), node)).collect();
    let text = if json {
        let mut text = serde_json::to_string_pretty(&lines).context(|| "can't write JSON".to_owned())?;
        text.push('\n');
        text
    } else {
        let instances: Api<DeserializeGuard<FluxInstance>> = Api::default_namespaced(client);
        let instance = instances.get_opt(api::INSTANCE).await.context(|| "can't read the FluxInstance".to_owned())?;
        let first = match instance.map(|instance| instance.0.ok()) {
            None => "there is no FluxInstance".to_owned(),
            Some(None) => {
                "another version of flux-distribute wrote the FluxInstance, and this one can't read it".to_owned()
            }
            Some(Some(instance)) => wait::describe(&instance.status.unwrap_or_default()),
        };
        format!("INSTANCE  {first}\n{}", table(&lines))
    };
    std::io::stdout().write_all(text.as_bytes()).context(|| "can't write to stdout".to_owned())
}

fn line(flux_node: Option<FluxNode>, node: NodeView) -> Line {
    let rank = flux_node.as_ref().and_then(|flux_node| flux_node.spec.rank);
    let reason = flux_node.as_ref().and_then(|flux_node| flux_node.spec.reason.clone());
    let status = flux_node.and_then(|flux_node| flux_node.status);
    Line {
        rank,
        phase: status.as_ref().map(|status| format!("{:?}", status.phase)),
        broker_pid: status.as_ref().and_then(|status| status.adopted.as_ref()).map(|broker| broker.pid),
        message: node.error.clone().or_else(|| Some(wait::for_local(&status?.message.or(reason)?))),
        node,
    }
}

fn table(lines: &[Line]) -> String {
    const HEAD: [&str; 7] = ["NODE", "ADDRESS", "AGENT PID", "PHASE", "RANK", "BROKER PID", "MESSAGE"];
    let absent = || "-".to_owned();
    let rows: Vec<[String; 7]> = std::iter::once(HEAD.map(str::to_owned))
        .chain(lines.iter().map(|line| {
            let off = line.node.init_pid.is_none();
            [
                line.node.name.clone(),
                line.node.address.clone(),
                line.node.agent_pid.map_or_else(absent, |pid| pid.to_string()),
                if off { "Off".to_owned() } else { line.phase.clone().unwrap_or_else(absent) },
                line.rank.map_or_else(absent, |rank| rank.to_string()),
                line.broker_pid.map_or_else(absent, |pid| pid.to_string()),
                line.message.clone().unwrap_or_default(),
            ]
        }))
        .collect();
    io::table(&rows)
}
