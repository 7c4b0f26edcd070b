//! `kubectl flux uninstall`: first the hosts, while agents are there to clean them; then the objects.

use std::{
    io::{BufRead, IsTerminal, Write},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use kube::{ResourceExt, api::DeleteParams, core::DeserializeGuard};

use crate::{
    alike::lines,
    arguments::UninstallOptions,
    error::KubectlError,
    kubectl,
    observed::{Cluster, Observed},
    overview::lead_of,
    screen::print,
    wait::{self, Step},
};
use api::{FluxNode, INSTANCE, NAMESPACE, RunningJobs};
use base::{
    process::exit_code,
    words::{many, visible},
};
use cluster::{call, gone_is_fine};

/// The objects of an installation, in the order in which they go: whoever gets the agents' ServiceAccount next must not get the rights of the
/// bridge with it. Only their kinds and names matter here.
const OBJECTS: [&str; 2] =
    [include_str!("../../../deploy/pods.yaml"), include_str!("../../../deploy/daemonset-installer.yaml")];

const GOES_ON: &str = "the agents go on cleaning the hosts; `kubectl flux uninstall` again removes the rest";

/// Removes Flux from all hosts, and then what is left in the cluster.
///
/// # Errors
/// Nobody has agreed; kubectl can't be run; hosts are not clean in time, and each says why; the kubeconfig has changed meanwhile; or the
/// API server refuses.
pub(crate) async fn run(cluster: &Cluster, options: &UninstallOptions) -> Result<ExitCode, KubectlError> {
    // Else all hosts would be clean before it turns out that the objects stay.
    kubectl::is_there()?;
    let observed = match cluster.observe().await {
        Ok(observed) => Some(observed),
        Err(error) if error.is_not_found() => {
            // An API server without our kinds has no hosts of ours. If none answers, that must not look the same.
            call("get the version of Kubernetes", cluster.client.apiserver_version()).await?;
            None
        }
        // Hosts of a cluster that doesn't answer must not look as if they were clean.
        Err(error) => return Err(error),
    };
    let what =
        observed.as_ref().map_or("There is no FluxInstance; this removes what else is there".to_owned(), consequences);
    agree(&format!("{} ({}).", visible(&what), visible(&cluster.name())), options.yes)?;
    if observed.is_some() {
        let what = format!("delete FluxInstance {INSTANCE}");
        gone_is_fine(call(what, cluster.instances().delete(INSTANCE, &DeleteParams::default())).await)?;
    }
    wait_for_hosts(cluster, Duration::from_secs(options.timeout)).await?;
    for objects in OBJECTS {
        // kubectl reads the kubeconfig anew, and somebody may have changed it while the hosts were cleaned.
        cluster.is_unchanged()?;
        let code = delete(cluster, objects, options.timeout)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What removing this instance does to hosts, jobs and queue. Pure.
fn consequences(observed: &Observed) -> String {
    let hosts = many((observed.nodes.len() + observed.unreadable.len()) as u64, "host");
    let lead = lead_of(observed).and_then(|lead| lead.status.as_ref());
    let spec = &observed.instance.spec.uninstall;
    let jobs = match (lead.and_then(|lead| lead.jobs).map(|jobs| jobs.running), &spec.running_jobs) {
        (Some(0), _) => "no job runs".to_owned(),
        (Some(running), RunningJobs::Cancel) => format!("{} running now will be cancelled", many(running, "job")),
        (Some(running), _) => format!("{} running now, and their hosts wait for them", many(running, "job")),
        (None, RunningJobs::Cancel) => "how many jobs run is not known; those that do will be cancelled".to_owned(),
        (None, _) => "how many jobs run is not known; hosts with jobs wait for them".to_owned(),
    };
    let queue = if spec.keep_state { "the queue stays on the lead's host" } else { "pending jobs are lost" };
    format!("This removes Flux from {hosts}; {jobs}; {queue}")
}

/// Asks whether to go on.
///
/// # Errors
/// The answer is no, or there is no terminal to ask on.
fn agree(what: &str, is_agreed: bool) -> Result<(), KubectlError> {
    if is_agreed {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(KubectlError::Input(format!("{what} To agree, add --yes")));
    }
    print(&format!("{what} Go on? [y/N] "))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).map_err(KubectlError::Answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(KubectlError::Declined),
    }
}

/// Waits until the last FluxNode is gone, and shows what the others wait for.
///
/// # Errors
/// A host is not clean at the limit, or the API server doesn't answer until then.
async fn wait_for_hosts(cluster: &Cluster, limit: Duration) -> Result<(), KubectlError> {
    let mut most = 0;
    let look = async || {
        let nodes = match cluster.nodes().await {
            // The kind itself is gone.
            Err(error) if error.code() == Some(404) => return Ok(Step::Done),
            nodes => nodes?,
        };
        most = most.max(nodes.len());
        let counted = Some((most - nodes.len(), most));
        Ok(left(&nodes).map_or(Step::Done, |text| Step::Waits { counted, text }))
    };
    let late = |text: &str| {
        format!(
            "not clean after {} s:\n{text}\n\
             - A host that waits for running jobs: let them end or cancel them (flux cancel --all), then uninstall again.\n\
             - A node that is gone for good: kubectl -n {NAMESPACE} delete fluxnode NODE\n\
             - A node without an agent, as by a taint or label that came later: take that off, or run flux-distribute \
             uninstall there\n\
             - To delete the rest now and leave these hosts as they are, with the files of this version: kubectl delete \
             --ignore-not-found -f deploy/pods.yaml -f deploy/daemonset-installer.yaml",
            limit.as_secs()
        )
    };
    wait::unless_interrupted(GOES_ON, wait::until(limit, look, late)).await?;
    print("all hosts are clean\n")
}

/// The hosts that are not clean, those with the same words in a line; None if there are none. Pure.
fn left(nodes: &[DeserializeGuard<FluxNode>]) -> Option<String> {
    let lines = lines(nodes, |node| (node.name_any(), node.0.as_ref().ok().and_then(|node| node.status.as_ref())));
    (!nodes.is_empty()).then(|| format!("{} to clean{lines}", many(nodes.len() as u64, "host")))
}

/// Deletes objects by kubectl, which knows in which order kinds go and what is gone already; returns its exit code.
///
/// # Errors
/// kubectl can't be run.
fn delete(cluster: &Cluster, objects: &str, timeout_secs: u64) -> Result<ExitCode, KubectlError> {
    let timeout = format!("--timeout={timeout_secs}s");
    let arguments = ["delete", "--ignore-not-found", &timeout, "-f", "-"].map(str::to_owned);
    let mut command: Command = kubectl::command(&cluster.connection, &arguments);
    let mut child = command.stdin(Stdio::piped()).spawn().map_err(KubectlError::Kubectl)?;
    if let Some(mut stdin) = child.stdin.take() {
        // It says itself why it has ended.
        let _ = stdin.write_all(objects.as_bytes());
    }
    Ok(exit_code(child.wait().map_err(KubectlError::Kubectl)?))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::observed;

    #[test]
    fn the_question_says_what_becomes_of_jobs_and_queue() {
        let jobs = |running: u32| json!({"jobs": {"running": running, "pending": 0}});
        for (lead, uninstall, expected) in [
            (jobs(0), json!({}), "no job runs; pending jobs are lost"),
            (jobs(2), json!({}), "2 jobs running now, and their hosts wait for them; pending jobs are lost"),
            (jobs(1), json!({"runningJobs": "Cancel"}), "1 job running now will be cancelled; pending jobs are lost"),
            (
                json!({"jobs": null}),
                json!({"runningJobs": "Cancel", "keepState": true}),
                "how many jobs run is not known; those that do will be cancelled; the queue stays on the lead's host",
            ),
            (
                json!({"jobs": null}),
                json!({}),
                "how many jobs run is not known; hosts with jobs wait for them; pending jobs are lost",
            ),
        ] {
            let mut observed = observed(2, &Value::Null, &lead);
            observed.instance.spec.uninstall = serde_json::from_value(uninstall).unwrap();
            observed.unreadable.push("n9".to_owned());
            assert_eq!(consequences(&observed), format!("This removes Flux from 3 hosts; {expected}"));
        }
    }

    #[test]
    fn hosts_with_the_same_words_share_a_line() {
        let node = |name: &str, status: Value| -> DeserializeGuard<FluxNode> {
            let object =
                json!({"metadata": {"name": name}, "spec": {"nodeName": name, "want": "Run"}, "status": status});
            serde_json::from_value(object).unwrap()
        };
        assert_eq!(left(&[]), None);
        let waits = || json!({"phase": "Removing", "message": "2 jobs\u{1b} run"});
        let nodes = [node("n1", waits()), node("n2", json!({"phase": "Removing"})), node("n3", waits())];
        let expected = "3 hosts to clean\n  n[1,3]: Removing 2 jobs? run\n  n2: Removing";
        assert_eq!(left(&nodes).as_deref(), Some(expected));
    }
}
