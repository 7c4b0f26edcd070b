//! Each step of the ladder as a command, for people who look for the step that fails: `kubectl exec POD -- /flux-distribute preflight`.
//! The commands do what the agent does, except for what only the agent remembers. The agent adopts a broker that a command starts
//! like any other broker.

use std::{process::ExitCode, sync::Arc};

use kube::{Api, ResourceExt};
use serde_json::json;

use crate::{
    AgentArguments, AgentError, client,
    error::StepError,
    execute::install::{self, Claimant, Installing, Wanted},
    inputs::{
        assignment::{Assignment, agreed},
        broker_state,
        published::read_roster,
    },
    node_ops::NodeOps,
    reporter::Reporter,
    say,
    status::node_status::facts,
};
use api::{FluxInstance, FluxNode, FluxNodeSpec, INSTANCE, NAMESPACE, PackageSet, Packages, Roster, Want};
use broker::{
    reload::{ReloadError, reload},
    status::state,
};
use cluster::{call, published::read_packages};
use host::{NsHost, host_root::open_in_host_root, opening::path_of, state::environment};
use hostapi::Preflight;
use model::names::live_configuration;
use packages::{OutputFormat, Style, linked, shown};

/// A step of the ladder, by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManualStep {
    /// Check whether the host can carry a broker.
    Preflight,
    /// Make the prefix and `state.json`.
    Claim,
    /// Fetch and link the packages, and show how far that is in this form.
    Install(OutputFormat),
    /// Write what the broker reads at its start.
    Configure,
    /// Start the broker unless it runs.
    Start,
    /// Lead: make its broker load once more what the roster declares.
    Reload,
    /// Fail unless the broker is online.
    Online,
    /// Write the facts to the FluxNode.
    Report,
}

/// Carries out one step of the ladder.
///
/// # Errors
/// Why the step failed, or what must be there before it and is not.
pub async fn manual_step(step: ManualStep, arguments: AgentArguments) -> Result<ExitCode, AgentError> {
    let client = client().await?;
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let nodes = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    let name = &arguments.node_name;
    let instance = call("get FluxInstance flux", instances.get_opt(INSTANCE)).await?;
    let instance = instance.ok_or_else(|| AgentError::Precondition(format!("there is no FluxInstance {INSTANCE}")))?;
    let ops = NodeOps { host: Arc::new(NsHost::open()?), client: client.clone(), address: arguments.host_ip };
    let instance_uid = instance.uid().unwrap_or_default();
    let claimant = Claimant { instance_uid: &instance_uid, uninstall: &instance.spec.uninstall };
    let set = read_packages(&client).await?.into_iter().next();
    let mut spec = instance.spec.clone();
    let node = call(format!("get FluxNode {name}"), nodes.get_opt(name)).await?;
    let own = node.as_ref().filter(|node| node.spec.instance_uid == instance.uid());
    spec.prefix = own.and_then(|node| node.spec.prefix.clone()).or(spec.prefix);
    let preflight = ops.preflight(&spec, set.as_ref()).await?;
    match step {
        ManualStep::Preflight => {
            let text = serde_json::to_string_pretty(&facts(&preflight))
                .map_err(|error| AgentError::Precondition(error.to_string()))?;
            say(&text);
            preflight.warnings.iter().for_each(|warning| say(&format!("warning: {warning}")));
        }
        ManualStep::Claim => {
            Reporter::new(client, name.clone(), &arguments.pod_name).create().await?;
            ops.claim(&preflight, claimant.instance_uid, claimant.uninstall).await?;
            say(&format!("claimed at {}", preflight.prefix.display()));
        }
        ManualStep::Install(output) => {
            let set = set.ok_or_else(|| AgentError::Precondition("no package set is published yet".to_owned()))?;
            // A command waits for no other node: unless the planner names peers, it asks the source.
            let told = node.and_then(|node| node.spec.fetch_from).filter(|told| told.digest == set.digest());
            let peers = told.map(|told| told.peers).unwrap_or_default();
            install_shown(&ops, &preflight, &set, &instance.spec.packages, peers, claimant, output).await?;
        }
        ManualStep::Configure | ManualStep::Start => {
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let (roster, assignment) = assigned(&node, read_roster(&client).await?)?;
            let running = ops.observe().await?.broker;
            if step == ManualStep::Configure {
                ops.configure(&preflight, &roster, &assignment, running.is_some()).await?;
                say(&format!("configured for rank {}", assignment.rank));
            } else {
                let broker = match running {
                    Some(broker) => Some(broker),
                    None => {
                        let now = startable(&node.spec, &roster, &instance_uid);
                        let words = || {
                            AgentError::Precondition(
                                "no broker is to run on this node now: see its FluxNode".to_owned(),
                            )
                        };
                        ops.start(&preflight, &roster, &now.ok_or_else(words)?).await?.broker
                    }
                };
                let pid = broker.map(|broker| broker.pid.to_string()).unwrap_or_default();
                say(&format!("the broker of rank {} runs as process {pid}", assignment.rank));
            }
        }
        ManualStep::Reload => {
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let (roster, assignment) = assigned(&node, read_roster(&client).await?)?;
            let running = ops.observe().await?.broker;
            if assignment.rank != 0 || running.is_none() {
                let lead = roster.lead().map_or("nobody", |lead| lead.node.as_str());
                return Err(AgentError::Precondition(format!(
                    "no broker of rank 0 runs on this node; the lead is {lead}"
                )));
            }
            let said = |error: ReloadError| AgentError::Precondition(base::error_chain(&error));
            let socket =
                broker_state::connect().await.map_err(|error| AgentError::Precondition(base::error_chain(&error)))?;
            reload(&socket, |held| live_configuration(&roster, held)).await.map_err(said)?;
            say("reloaded the scheduler; no job was ended");
        }
        ManualStep::Online => {
            let broker = ops.observe().await?.broker;
            let broker = broker.ok_or_else(|| AgentError::Precondition("no broker runs on this node".to_owned()))?;
            let socket =
                broker_state::connect().await.map_err(|error| AgentError::Precondition(base::error_chain(&error)))?;
            let now = state(&socket).await.map_err(|error| AgentError::Precondition(base::error_chain(&error)))?.state;
            if socket.peer_pid() != Some(broker.pid) || now != "run" {
                return Err(AgentError::Precondition(format!(
                    "the broker of rank {} is in state {now}",
                    broker.record.rank
                )));
            }
            say(&format!("the broker of rank {} is online", broker.record.rank));
        }
        ManualStep::Report => {
            let mut reporter = Reporter::new(client, name.clone(), &arguments.pod_name);
            reporter.create().await?;
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let mut status = node.status.clone().unwrap_or_default();
            status.facts = Some(facts(&preflight));
            reporter.write(&node, &status, drop).await?;
            say("reported");
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn install_shown(
    ops: &NodeOps,
    preflight: &Preflight,
    set: &PackageSet,
    packages: &Packages,
    peers: Vec<String>,
    claimant: Claimant<'_>,
    output: OutputFormat,
) -> Result<(), StepError> {
    if !is_installed(preflight, set) {
        let (sender, events) = tokio::sync::mpsc::unbounded_channel();
        let wanted = Wanted { set, packages, peers, claimant, beside_a_broker: false };
        let tell = |event| {
            if let Installing::Fetching(now) | Installing::Linking(now) = event {
                drop(sender.send(now));
            }
        };
        shown(Style::of(output), events, install::install(ops, preflight, wanted, tell)).await?;
    }
    let digest = set.digest();
    let environment = environment(&preflight.prefix, &digest);
    say(&match output {
        OutputFormat::Text => format!("installed at {}", environment.display()),
        OutputFormat::Json => json!({ "event": "done", "digest": digest, "environment": environment }).to_string(),
    });
    Ok(())
}

/// The environment is ready, so no archive is needed any more, and hashing all of them would only take time.
fn is_installed(preflight: &Preflight, set: &PackageSet) -> bool {
    let prefix = open_in_host_root(&preflight.prefix);
    prefix.is_ok_and(|prefix| linked(&path_of(&prefix), &set.digest()).is_some())
}

/// The assignment, unless the planner wants no broker here now, or the epoch ends.
fn startable(spec: &FluxNodeSpec, roster: &Roster, instance_uid: &str) -> Option<Assignment> {
    let is_wanted = spec.want == Want::Run && roster.closing.is_none() && roster.instance_uid == instance_uid;
    agreed(spec, roster).filter(|_| is_wanted)
}

fn assigned(node: &FluxNode, roster: Option<Roster>) -> Result<(Roster, Assignment), AgentError> {
    let pair = roster.and_then(|roster| agreed(&node.spec, &roster).map(|assignment| (roster, assignment)));
    pair.ok_or_else(|| AgentError::Precondition("roster and FluxNode do not agree on a rank of this node".to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        fixture::{ops, preflight},
        needs::{Need, skips_without},
    };
    use hostapi::FakeHost;
    use packages::ENVIRONMENT_MARKER;

    #[tokio::test]
    async fn an_installed_set_is_neither_fetched_nor_linked_again() {
        if skips_without([Need::Process1]) {
            return;
        }
        let prefix = tempfile::tempdir().unwrap();
        let host = Arc::new(FakeHost::blank());
        let ops = ops(host.clone());
        let set = PackageSet::Lock { lock: "not even a lock".to_owned(), question: String::new() };
        let preflight = preflight(prefix.path());
        let packages = Packages::default();
        let uninstall = Default::default();
        let claimant = Claimant { instance_uid: "uid", uninstall: &uninstall };
        let installing = || install_shown(&ops, &preflight, &set, &packages, Vec::new(), claimant, OutputFormat::Text);
        assert!(installing().await.is_err(), "there is nothing yet");
        assert!(!host.take_orders().is_empty());

        let environment = prefix.path().join("envs").join(set.digest());
        std::fs::create_dir_all(&environment).unwrap();
        let marker = json!({ "digest": set.digest(), "bytes": 1, "archives": [] });
        std::fs::write(environment.join(ENVIRONMENT_MARKER), marker.to_string()).unwrap();
        installing().await.unwrap();
        assert_eq!(host.orders(), []);
    }
}
