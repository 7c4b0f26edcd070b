//! Each rung of the ladder as a command of its own, for people who want to see where it breaks: `kubectl exec POD --
//! /flux-distribute preflight`. What they do is what the agent does, but for what it alone remembers: it finds a broker that
//! was started here as any other one.

use std::{process::ExitCode, sync::Arc};

use kube::{Api, ResourceExt};
use serde_json::json;

use super::{
    AgentArguments, AgentError,
    act::{Actor, StepError},
    client,
    decide::{Assignment, agreed, confirmed},
    install::{Installing, Wanted},
    live,
    published::read_roster,
    report::Reporter,
    say,
    tell::facts,
};
use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE, PackageSet, Packages, Roster};
use broker::{
    reload::{ReloadError, reload},
    status::state,
};
use cluster::{call, published::read_packages};
use host::{
    NsHost,
    files::{host_path, open_in_host_root},
    state::environment,
};
use hostapi::Preflight;
use model::names::live_configuration;
use packages::{OutputFormat, Style, linked, shown};

/// A rung of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// Look whether the host can carry a broker.
    Preflight,
    /// Make the prefix and `state.json`.
    Claim,
    /// Fetch and link the packages; how far it is, is shown this way.
    Install(OutputFormat),
    /// Write what the broker reads at start.
    Configure,
    /// Start the broker unless it runs.
    Start,
    /// On the lead: have its broker take in what the roster declares once more.
    Reload,
    /// Fail unless the broker is online.
    Online,
    /// Write the facts to the FluxNode.
    Report,
}

/// Does one rung, once.
///
/// # Errors
/// The rung's own, or what must be there before it and is not.
pub async fn rung(rung: Rung, arguments: AgentArguments) -> Result<ExitCode, AgentError> {
    let client = client().await?;
    let instances = Api::<FluxInstance>::namespaced(client.clone(), NAMESPACE);
    let nodes = Api::<FluxNode>::namespaced(client.clone(), NAMESPACE);
    let name = &arguments.node_name;
    let instance = call("get FluxInstance flux", instances.get_opt(INSTANCE)).await?;
    let instance = instance.ok_or_else(|| AgentError::NotSo(format!("there is no FluxInstance {INSTANCE}")))?;
    let actor = Actor {
        host: Arc::new(NsHost::open()?),
        client: client.clone(),
        instance_uid: instance.uid().unwrap_or_default(),
        uninstall: instance.spec.uninstall.clone(),
        address: arguments.host_ip,
    };
    let set = read_packages(&client).await?.into_iter().next();
    let mut spec = instance.spec.clone();
    let node = call(format!("get FluxNode {name}"), nodes.get_opt(name)).await?;
    let own = node.as_ref().filter(|node| node.spec.instance_uid == instance.uid());
    spec.prefix = own.and_then(|node| node.spec.prefix.clone()).or(spec.prefix);
    let preflight = actor.preflight(&spec, set.as_ref()).await?;
    match rung {
        Rung::Preflight => {
            let text = serde_json::to_string_pretty(&facts(&preflight))
                .map_err(|error| AgentError::NotSo(error.to_string()))?;
            say(&text);
            preflight.warnings.iter().for_each(|warning| say(&format!("warning: {warning}")));
        }
        Rung::Claim => {
            Reporter::new(client, name.clone(), &arguments.pod_name).create().await?;
            actor.claim(&preflight).await?;
            say(&format!("claimed at {}", preflight.prefix.display()));
        }
        Rung::Install(output) => {
            let set = set.ok_or_else(|| AgentError::NotSo("no package set is published yet".to_owned()))?;
            // By hand nobody is waited for: without a word of the planner it is the source.
            let told = node.and_then(|node| node.spec.fetch_from).filter(|told| told.digest == set.digest());
            let peers = told.map(|told| told.peers).unwrap_or_default();
            install(&actor, &preflight, &set, &instance.spec.packages, peers, output).await?;
        }
        Rung::Configure | Rung::Start => {
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let (roster, assignment) = assigned(&node, read_roster(&client).await?)?;
            let running = actor.observe().await?.broker;
            if rung == Rung::Configure {
                actor.configure(&preflight, &roster, &assignment, running.is_some()).await?;
                say(&format!("configured for rank {}", assignment.rank));
            } else {
                let broker = match running {
                    Some(broker) => Some(broker),
                    None => {
                        let now = confirmed(&assignment, &actor.instance_uid, &node.spec, &roster);
                        let words =
                            || AgentError::NotSo("no broker is to run on this node now: see its FluxNode".to_owned());
                        actor.start(&preflight, &roster, &now.ok_or_else(words)?).await?.broker
                    }
                };
                let pid = broker.map(|broker| broker.pid.to_string()).unwrap_or_default();
                say(&format!("the broker of rank {} runs as process {pid}", assignment.rank));
            }
        }
        Rung::Reload => {
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let (roster, assignment) = assigned(&node, read_roster(&client).await?)?;
            let running = actor.observe().await?.broker;
            if assignment.rank != 0 || running.is_none() {
                let lead = roster.lead().map_or("nobody", |lead| lead.node.as_str());
                return Err(AgentError::NotSo(format!("no broker of rank 0 runs on this node; the lead is {lead}")));
            }
            let said = |error: ReloadError| AgentError::NotSo(base::error_chain(&error));
            let socket = live::connect().await.map_err(|error| AgentError::NotSo(base::error_chain(&error)))?;
            reload(&socket, |held| live_configuration(&roster, held)).await.map_err(said)?;
            say("the scheduler was loaded again, and no job was ended");
        }
        Rung::Online => {
            let broker = actor.observe().await?.broker;
            let broker = broker.ok_or_else(|| AgentError::NotSo("no broker runs on this node".to_owned()))?;
            let socket = live::connect().await.map_err(|error| AgentError::NotSo(base::error_chain(&error)))?;
            let now = state(&socket).await.map_err(|error| AgentError::NotSo(base::error_chain(&error)))?.state;
            if socket.peer_pid() != Some(broker.pid) || now != "run" {
                return Err(AgentError::NotSo(format!("the broker of rank {} is in state {now}", broker.record.rank)));
            }
            say(&format!("the broker of rank {} is online", broker.record.rank));
        }
        Rung::Report => {
            let mut reporter = Reporter::new(client, name.clone(), &arguments.pod_name);
            reporter.create().await?;
            let node = call(format!("get FluxNode {name}"), nodes.get(name)).await?;
            let mut status = node.status.clone().unwrap_or_default();
            status.facts = Some(facts(&preflight));
            reporter.write(&node, &status).await?;
            say("reported");
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn install(
    actor: &Actor,
    preflight: &Preflight,
    set: &PackageSet,
    packages: &Packages,
    peers: Vec<String>,
    output: OutputFormat,
) -> Result<(), StepError> {
    if !is_installed(preflight, set) {
        let (sender, events) = tokio::sync::mpsc::unbounded_channel();
        let wanted = Wanted { set, packages, peers, beside_a_broker: false };
        let tell = |event| {
            if let Installing::Fetching(now) | Installing::Linking(now) = event {
                drop(sender.send(now));
            }
        };
        shown(Style::of(output), events, actor.install(preflight, wanted, tell)).await?;
    }
    let digest = set.digest();
    let environment = environment(&preflight.prefix, &digest);
    say(&match output {
        OutputFormat::Text => format!("installed at {}", environment.display()),
        OutputFormat::Json => json!({ "event": "done", "digest": digest, "environment": environment }).to_string(),
    });
    Ok(())
}

/// Whether the environment is ready: then no archive is needed any more, and hashing all of them would only take time.
fn is_installed(preflight: &Preflight, set: &PackageSet) -> bool {
    let prefix = open_in_host_root(&preflight.prefix);
    prefix.is_ok_and(|prefix| linked(&host_path(&prefix), &set.digest()).is_some())
}

fn assigned(node: &FluxNode, roster: Option<Roster>) -> Result<(Roster, Assignment), AgentError> {
    let pair = roster.and_then(|roster| agreed(&node.spec, &roster).map(|assignment| (roster, assignment)));
    pair.ok_or_else(|| AgentError::NotSo("this node has no rank by the word of both roster and FluxNode".to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{
        fixture::{actor, preflight},
        needs::{Need, skips_without},
    };
    use hostapi::FakeHost;
    use packages::ENVIRONMENT_MARKER;

    #[tokio::test]
    async fn what_is_installed_is_neither_fetched_nor_linked_again() {
        if skips_without([Need::Process1]) {
            return;
        }
        let prefix = tempfile::tempdir().unwrap();
        let host = Arc::new(FakeHost::blank());
        let actor = actor(host.clone());
        let set = PackageSet::Lock { lock: "not even a lock".to_owned(), question: String::new() };
        let preflight = preflight(prefix.path());
        let packages = Packages::default();
        let installing = || install(&actor, &preflight, &set, &packages, Vec::new(), OutputFormat::Text);
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
