//! `kubectl flux uninstall`: first the hosts, while agents are there to clean them; then the objects.

use std::{
    collections::BTreeMap,
    io::{BufRead, IsTerminal, Write},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use kube::{Api, ResourceExt, api::DeleteParams};

use crate::{
    arguments::UninstallOptions,
    error::KubectlError,
    observed::Cluster,
    overview::overview,
    screen::{print, visible, word},
    through_kubectl::kubectl_command,
};
use api::{FluxInstance, FluxNode, INSTANCE, NAMESPACE};
use base::words::many;
use cluster::{call, gone_is_fine};
use model::hostlist;

/// The objects of an installation, in the order in which they go: whoever gets the agents' ServiceAccount next must not get the rights of the
/// bridge with it. Only their kinds and names matter here.
const OBJECTS: [&str; 2] =
    [include_str!("../../../deploy/pods.yaml"), include_str!("../../../deploy/daemonset-installer.yaml")];
/// How often to look.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Removes Flux from all hosts, and then what is left in the cluster.
///
/// # Errors
/// Nobody has agreed; hosts are not clean in time, and each says why; or the API server refuses.
pub(crate) async fn run(cluster: &Cluster, options: &UninstallOptions) -> Result<ExitCode, KubectlError> {
    let is_there = match cluster.observe().await {
        Ok(observed) => {
            let overview = overview(&observed);
            let jobs = overview.instance.jobs.map_or(String::new(), |jobs| {
                format!("; {} run, and hosts with jobs wait for them", many(jobs.running, "job"))
            });
            let hosts = many(overview.nodes.len() as u64, "host");
            agree(&format!("This removes Flux from {hosts}{jobs}."), options.yes)?;
            true
        }
        Err(KubectlError::NoInstance) => {
            agree("There is no FluxInstance; this removes what else is there.", options.yes)?;
            false
        }
        // Hosts of a cluster that doesn't answer must not look as if they were clean.
        Err(error) => return Err(error),
    };
    if is_there {
        let instances: Api<FluxInstance> = Api::namespaced(cluster.client.clone(), NAMESPACE);
        let what = format!("delete FluxInstance {INSTANCE}");
        gone_is_fine(call(what, instances.delete(INSTANCE, &DeleteParams::default())).await)?;
    }
    wait_for_hosts(cluster, Duration::from_secs(options.timeout)).await?;
    for objects in OBJECTS {
        let code = delete(cluster, objects)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn agree(what: &str, is_agreed: bool) -> Result<(), KubectlError> {
    if is_agreed {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(KubectlError::Input(format!("{what} To agree, add --yes")));
    }
    print(&format!("{what} Go on? [y/N] "))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(KubectlError::Input("nothing was changed".to_owned())),
    }
}

/// Waits until the last FluxNode is gone, and prints what the others wait for, each time that it changes.
async fn wait_for_hosts(cluster: &Cluster, limit: Duration) -> Result<(), KubectlError> {
    let nodes: Api<kube::core::DeserializeGuard<FluxNode>> = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let (begin, mut printed) = (Instant::now(), String::new());
    loop {
        let left = call("list FluxNodes", nodes.list(&Default::default())).await?.items;
        if left.is_empty() {
            return Ok(print("all hosts are clean\n")?);
        }
        let mut by_words: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for node in &left {
            let status = node.0.as_ref().ok().and_then(|node| node.status.as_ref());
            let message = status.and_then(|status| status.message.as_deref()).unwrap_or_default();
            let phase = status.map_or(String::new(), |status| word(&status.phase));
            by_words.entry(visible(&format!("{phase} {message}"))).or_default().push(node.name_any());
        }
        let lines: String = by_words
            .iter()
            .map(|(words, nodes)| format!("  {}: {}\n", hostlist::encode(nodes), words.trim_end()))
            .collect();
        if begin.elapsed() > limit {
            return Err(KubectlError::State(format!(
                "not clean after {} s:\n{lines}\
                 - A host that waits for running jobs: let them end or cancel them (flux cancel --all), then uninstall again.\n\
                 - A node that is gone for good: kubectl -n {NAMESPACE} delete fluxnode NODE\n\
                 - A node without an agent, as by a taint or label that came later: take that off, or run flux-distribute \
                 uninstall there",
                limit.as_secs()
            )));
        }
        let text = format!("{} to clean\n{lines}", many(left.len() as u64, "host"));
        if text != printed {
            print(&text)?;
            printed = text;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// kubectl knows in which order kinds go, and what is gone already.
fn delete(cluster: &Cluster, objects: &str) -> Result<ExitCode, KubectlError> {
    let arguments = ["delete", "--ignore-not-found", "-f", "-"].map(str::to_owned);
    let mut command: Command = kubectl_command(&cluster.connection, &arguments);
    let mut child = command.stdin(Stdio::piped()).spawn().map_err(KubectlError::Kubectl)?;
    if let Some(mut stdin) = child.stdin.take() {
        // It says itself why it has ended.
        let _ = stdin.write_all(objects.as_bytes());
    }
    let status = child.wait().map_err(KubectlError::Kubectl)?;
    Ok(crate::through_kubectl::code_of(status))
}
