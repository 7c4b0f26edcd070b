//! `kubectl flux doctor`: every check, with its remedy.

use std::{process::ExitCode, time::Duration};

use k8s_openapi::{
    api::{apps::v1::DaemonSet, coordination::v1::Lease},
    apimachinery::pkg::version::Info,
    jiff::Timestamp,
};
use serde::Serialize;

use crate::{
    arguments::DoctorFormat,
    error::KubectlError,
    observed::{Cluster, Observed, Surroundings},
    overview::{Overview, State, overview},
    screen::{Look, cell, json, print, table, width, word},
};
use api::{DAEMONSET, InstancePhase, LEASE_PLANNER, NAMESPACE, NodePhase};
use base::{error_chain, words::many};
use cluster::{ApiError, clock};
use model::{agents::AgentPod, hostlist, kubernetes::unsupported, obstacle::Obstacle};

/// A planner renews its Lease every two seconds or so; another agent takes over within some ten, or minutes if there are thousands.
const PLANNER_IS_GONE: Duration = Duration::from_mins(3);

/// What a check found.
#[derive(Serialize, Debug, Clone, PartialEq, Eq)]
pub(crate) struct Check {
    /// What was looked at.
    pub subject: String,
    pub verdict: Verdict,
    /// What is so.
    pub found: String,
    /// What to do. None: nothing, or `found` says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// How a check ends.
#[derive(Serialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Verdict {
    Good,
    /// It may pass by itself, or matters little.
    Notice,
    /// It could not be checked.
    Unknown,
    /// Somebody has to do something.
    Problem,
}

/// Prints all checks. The exit code is 1 if one of them found a problem.
///
/// # Errors
/// The output can't be written. What the API server refuses is a finding.
pub(crate) async fn run(cluster: &Cluster, format: DoctorFormat) -> Result<ExitCode, KubectlError> {
    let checks = checks(&cluster.surroundings().await, clock::now());
    print(&match format {
        DoctorFormat::Json => json(&checks)?,
        DoctorFormat::Text => text(&checks, width()),
    })?;
    let is_bad = checks.iter().any(|check| check.verdict == Verdict::Problem);
    Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// For people, at most `width` columns wide.
pub(crate) fn text(checks: &[Check], width: u16) -> String {
    let rows = checks.iter().flat_map(|Check { subject, verdict, found, remedy }| {
        let (word, look) = match verdict {
            Verdict::Good => ("ok", Look::Good),
            Verdict::Notice => ("notice", Look::Unusual),
            Verdict::Unknown => ("unknown", Look::Unusual),
            Verdict::Problem => ("PROBLEM", Look::Bad),
        };
        let first = vec![cell(word, look), cell(subject, Look::Plain), cell(found, Look::Plain)];
        let second = remedy.as_ref().map(|remedy| {
            vec![cell("", Look::Plain), cell("", Look::Plain), cell(format!("remedy: {remedy}"), Look::Plain)]
        });
        std::iter::once(first).chain(second)
    });
    table(rows, Some(width))
}

/// Everything that may be wrong, by what was found at `now`.
pub(crate) fn checks(seen: &Surroundings, now: Timestamp) -> Vec<Check> {
    let mut checks = vec![version(&seen.version)];
    let observed = match &seen.observed {
        Ok(observed) => observed,
        Err(error) => {
            checks.push(Check::problem("FluxInstance", error_chain(error), None));
            checks.push(agents(&seen.daemonset, &seen.agents));
            return checks;
        }
    };
    let overview = overview(observed);
    checks.extend([
        agents(&seen.daemonset, &seen.agents),
        planner(&seen.planner, now),
        instance(&overview),
        versions(observed),
    ]);
    checks.extend(notices(&overview));
    checks.extend(nodes(&overview));
    checks
}

impl Check {
    fn new(subject: &str, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { subject: subject.to_owned(), verdict, found: found.into(), remedy: None }
    }

    fn good(subject: &str, found: impl Into<String>) -> Self {
        Self::new(subject, Verdict::Good, found)
    }

    fn problem(subject: &str, found: impl Into<String>, remedy: Option<String>) -> Self {
        Self { remedy, ..Self::new(subject, Verdict::Problem, found) }
    }

    fn unknown(subject: &str, error: &ApiError) -> Self {
        Self::new(subject, Verdict::Unknown, error_chain(error))
    }
}

fn version(version: &Result<Info, ApiError>) -> Check {
    const SUBJECT: &str = "Kubernetes";
    match version {
        Err(error) => Check::unknown(SUBJECT, error),
        Ok(Info { major, minor, git_version, .. }) => match unsupported(Some((major, minor))) {
            None => Check::good(SUBJECT, git_version),
            Some(Obstacle::Problem { message, .. } | Obstacle::Waiting(message)) => {
                Check::problem(SUBJECT, message, None)
            }
        },
    }
}

/// Whether the pods of the agents run. Those of DaemonSet install-flux-control-planes are among the pods.
fn agents(daemonset: &Result<Option<DaemonSet>, ApiError>, agents: &Result<Vec<AgentPod>, ApiError>) -> Check {
    const SUBJECT: &str = "agents";
    let (daemonset, agents) = match (daemonset, agents) {
        (Ok(daemonset), Ok(agents)) => (daemonset, agents),
        (Err(error), _) | (_, Err(error)) => return Check::unknown(SUBJECT, error),
    };
    let Some(daemonset) = daemonset else {
        let found = format!("there is no DaemonSet {DAEMONSET}: nothing watches over the brokers");
        return Check::problem(SUBJECT, found, Some("apply deploy/daemonset-installer.yaml".to_owned()));
    };
    // An evicted pod's object stays beside the pod that replaced it.
    let runs = |node: &str| agents.iter().any(|agent| agent.node == node && agent.down.is_none());
    let mut down: Vec<&AgentPod> = agents.iter().filter(|agent| !runs(&agent.node)).collect();
    down.sort_by_key(|agent| &agent.node);
    let wanted = daemonset.status.as_ref().map_or(0, |status| status.desired_number_scheduled);
    let missing = usize::try_from(wanted).unwrap_or(0).saturating_sub(agents.len());
    match down.first() {
        Some(first) => {
            let nodes = hostlist::encode(down.iter().map(|agent| &agent.node));
            let why = first.down.as_deref().unwrap_or_default();
            let remedy = format!("kubectl -n {NAMESPACE} describe pod {}", first.name);
            Check::problem(SUBJECT, format!("no agent runs on {nodes}: {why}"), Some(remedy))
        }
        None if missing > 0 => {
            let found = format!("{} not there yet", many(missing as u64, "pod"));
            let remedy = format!("kubectl -n {NAMESPACE} describe daemonset {DAEMONSET}");
            Check::problem(SUBJECT, found, Some(remedy))
        }
        None => Check::good(SUBJECT, format!("{} running", many(agents.len() as u64, "agent"))),
    }
}

/// Whether somebody plans.
fn planner(lease: &Result<Option<Lease>, ApiError>, now: Timestamp) -> Check {
    const SUBJECT: &str = "planner";
    let lease = match lease {
        Ok(lease) => lease.as_ref().and_then(|lease| lease.spec.as_ref()),
        Err(error) => return Check::unknown(SUBJECT, error),
    };
    let holder = lease.and_then(|spec| spec.holder_identity.as_deref()).filter(|holder| !holder.is_empty());
    let renewed = lease.and_then(|spec| spec.renew_time.as_ref());
    let remedy = || Some(format!("kubectl -n {NAMESPACE} logs ds/{DAEMONSET}"));
    match (holder, renewed) {
        (Some(holder), Some(renewed)) => {
            let age = now.duration_since(renewed.0);
            if age < PLANNER_IS_GONE.try_into().unwrap_or_default() {
                return Check::good(SUBJECT, holder);
            }
            let found = format!("{holder} has not renewed Lease {LEASE_PLANNER} for {} s", age.as_secs());
            Check::problem(SUBJECT, found, remedy())
        }
        _ => Check::problem(SUBJECT, format!("nobody holds Lease {LEASE_PLANNER}: no agent plans"), remedy()),
    }
}

fn instance(overview: &Overview) -> Check {
    let instance = &overview.instance;
    let message = instance.message.as_deref().unwrap_or("no planner has looked at it yet");
    let verdict = match instance.phase {
        InstancePhase::Running => Verdict::Good,
        InstancePhase::Degraded | InstancePhase::Failed | InstancePhase::Ignored => Verdict::Problem,
        InstancePhase::Pending | InstancePhase::Starting | InstancePhase::Restarting | InstancePhase::Other(_) => {
            Verdict::Notice
        }
    };
    Check::new("FluxInstance", verdict, format!("{}: {message}", word(&instance.phase)))
}

/// Agents of two versions work beside each other, but not for ever.
fn versions(observed: &Observed) -> Check {
    const SUBJECT: &str = "versions";
    let statuses = observed.nodes.iter().filter_map(|node| node.status.as_ref());
    let mut versions: Vec<&str> = statuses.filter_map(|status| status.agent_version.as_deref()).collect();
    versions.sort_unstable();
    versions.dedup();
    if !observed.unreadable.is_empty() {
        let names = hostlist::encode(&observed.unreadable);
        let found = format!("this program can't read the FluxNodes {names}: another version has written them");
        return Check::problem(
            SUBJECT,
            found,
            Some("use the program of the version that is installed there".to_owned()),
        );
    }
    match versions.as_slice() {
        [] => Check::new(SUBJECT, Verdict::Notice, "no agent has reported yet"),
        [one] => Check::good(SUBJECT, format!("all agents are of version {one}")),
        several => {
            let remedy = format!("kubectl -n {NAMESPACE} rollout status ds/{DAEMONSET}");
            let found = format!("agents of versions {} run side by side", several.join(", "));
            Check { remedy: Some(remedy), ..Check::new(SUBJECT, Verdict::Notice, found) }
        }
    }
}

/// Conditions and queues; each message names its remedy.
fn notices(overview: &Overview) -> impl Iterator<Item = Check> {
    overview.instance.notices.iter().map(|notice| {
        // These wait for something, and nothing is wrong.
        let waits = [api::CONDITION_RESTART_PENDING, api::CONDITION_SCALE_DENIED, "pods wait", "held back"];
        let verdict = if waits.contains(&notice.subject.as_str()) { Verdict::Notice } else { Verdict::Problem };
        Check::new(&notice.subject, verdict, notice.message.as_str())
    })
}

/// The nodes that are not as they are wanted, those that are alike in one check.
fn nodes(overview: &Overview) -> Vec<Check> {
    let mut groups: Vec<(Vec<&str>, Verdict, String)> = Vec::new();
    for node in &overview.nodes {
        let is_member = node.rank.is_some();
        let verdict = match (&node.phase, node.state) {
            _ if node.needs_attention => Verdict::Problem,
            (NodePhase::Failed | NodePhase::Offline, _) => Verdict::Problem,
            (_, State::Down) => Verdict::Problem,
            (NodePhase::Online, State::Free | State::Allocated) => continue,
            // It is not to run a broker, or not yet.
            _ if !is_member && node.message.is_none() => continue,
            _ => Verdict::Notice,
        };
        let state = if is_member { format!(", {}", node.state.word()) } else { String::new() };
        let message = node.message.as_ref().map_or(String::new(), |message| format!(": {message}"));
        let found = format!("{}{state}{message}", word(&node.phase));
        match groups.iter_mut().find(|(_, known, said)| (*known, said) == (verdict, &found)) {
            Some((names, ..)) => names.push(&node.name),
            None => groups.push((vec![&node.name], verdict, found)),
        }
    }
    if groups.is_empty() {
        return vec![Check::good("nodes", format!("all {} are as they are wanted", overview.nodes.len()))];
    }
    groups.sort_by_key(|(_, verdict, _)| std::cmp::Reverse(*verdict));
    let check = |(names, verdict, found): &(Vec<&str>, Verdict, String)| {
        let subject = hostlist::encode(names);
        let remedy = (*verdict == Verdict::Problem).then(|| {
            format!("`kubectl flux logs {}` shows more; docs/failures.md has a section for each phase", names[0])
        });
        Check { remedy, ..Check::new(&subject, *verdict, found.as_str()) }
    };
    groups.iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{change, observed};

    const NOW: &str = "2026-01-01T00:10:00Z";

    fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn agent(node: &str, down: Option<&str>) -> AgentPod {
        AgentPod { name: format!("install-flux-{node}"), node: node.to_owned(), down: down.map(str::to_owned) }
    }

    fn lease(holder: &str, renewed: &str) -> Lease {
        read(json!({"spec": {"holderIdentity": holder, "renewTime": renewed}}))
    }

    fn healthy() -> Surroundings {
        Surroundings {
            version: Ok(read(json!({
                "major": "1", "minor": "36", "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "", "buildDate": "",
                "goVersion": "", "compiler": "", "platform": "",
            }))),
            daemonset: Ok(Some(read(json!({
                "metadata": {}, "status": {"currentNumberScheduled": 2, "desiredNumberScheduled": 2, "numberMisscheduled": 0, "numberReady": 2},
            })))),
            agents: Ok(vec![agent("n1", None), agent("n2", None)]),
            planner: Ok(Some(lease("install-flux-n1", "2026-01-01T00:09:58.000000Z"))),
            observed: Ok(observed(2, &Value::Null, &Value::Null)),
        }
    }

    fn found(seen: &Surroundings) -> Vec<(Verdict, String)> {
        let checks = checks(seen, NOW.parse().unwrap()).into_iter();
        checks
            .filter(|check| check.verdict != Verdict::Good)
            .map(|check| (check.verdict, check.subject + ": " + &check.found))
            .collect()
    }

    #[test]
    fn an_instance_without_a_problem_is_well() {
        let seen = healthy();
        assert_eq!(found(&seen), []);
        let expected = "\
ok  Kubernetes    v1.36.2
ok  agents        2 agents running
ok  planner       install-flux-n1
ok  FluxInstance  Running: all 2 nodes are online
ok  versions      all agents are of version 0.1.0
ok  nodes         all 2 are as they are wanted
";
        assert_eq!(text(&checks(&seen, NOW.parse().unwrap()), 100), expected);
    }

    fn assert_finds(seen: &Surroundings, verdict: Verdict, expected: &str) {
        let found = found(seen);
        assert!(
            found.iter().any(|(found, text)| *found == verdict && text.starts_with(expected)),
            "{expected}: {found:?}"
        );
    }

    #[test]
    fn what_is_wrong_around_the_instance_is_found() {
        type Break = fn(&mut Surroundings);
        let cases: [(Break, Verdict, &str); 8] = [
            (
                |seen| seen.version.as_mut().unwrap().minor = "29".into(),
                Verdict::Problem,
                "Kubernetes: Kubernetes 1.29 has no",
            ),
            (|seen| seen.daemonset = Ok(None), Verdict::Problem, "agents: there is no DaemonSet install-flux"),
            (
                |seen| seen.agents = Ok(vec![agent("n1", None), agent("n2", Some("ImagePullBackOff"))]),
                Verdict::Problem,
                "agents: no agent runs on n2: ImagePullBackOff",
            ),
            (|seen| seen.agents = Ok(vec![agent("n1", None)]), Verdict::Problem, "agents: 1 pod not there yet"),
            (|seen| seen.planner = Ok(None), Verdict::Problem, "planner: nobody holds Lease flux-planner"),
            (
                |seen| seen.planner = Ok(Some(lease("x", "2026-01-01T00:06:00.000000Z"))),
                Verdict::Problem,
                "planner: x has not renewed Lease flux-planner for 240 s",
            ),
            (
                |seen| seen.observed = Err(KubectlError::NoInstance),
                Verdict::Problem,
                "FluxInstance: there is no FluxInstance flux",
            ),
            (
                |seen| seen.agents = Err(ApiError::Timeout("list pods".into())),
                Verdict::Unknown,
                "agents: list pods: no answer",
            ),
        ];
        for (break_it, verdict, expected) in cases {
            let mut seen = healthy();
            break_it(&mut seen);
            assert_finds(&seen, verdict, expected);
        }
    }

    #[test]
    fn what_the_instance_and_its_nodes_say_is_found() {
        use Verdict::{Notice, Problem};
        let none = Value::Null;
        let waits = json!({"phase": "Waiting", "message": "cordoned"});
        // The status of the instance, that of the lead; spec and status of the other node.
        for (instance, lead, spec, status, verdict, expected) in [
            (
                json!({"phase": "Degraded", "message": "queue lost"}),
                &none,
                &none,
                &none,
                Problem,
                "FluxInstance: Degraded: queue lost",
            ),
            (json!({"phase": "Starting"}), &none, &none, &none, Notice, "FluxInstance: Starting"),
            (none.clone(), &json!({"stoppedQueues": "stopped by X"}), &none, &none, Problem, "queues: stopped by X"),
            (
                none.clone(),
                &none,
                &none,
                &json!({"agentVersion": "0.2.0"}),
                Notice,
                "versions: agents of versions 0.1.0, 0.2.0",
            ),
            (
                none.clone(),
                &none,
                &none,
                &json!({"phase": "Failed", "message": "no space"}),
                Problem,
                "n2: Failed, free: no space",
            ),
            (none.clone(), &json!({"offline": [1]}), &none, &none, Problem, "n2: Online, down"),
            (none.clone(), &json!({"drainedByOthers": "1"}), &none, &none, Notice, "n2: Online, drained"),
            (none.clone(), &none, &json!({"rank": null}), &waits, Notice, "n2: Waiting: cordoned"),
        ] {
            let mut observed = observed(2, &instance, lead);
            change(&mut observed, 1, spec, status);
            assert_finds(&Surroundings { observed: Ok(observed), ..healthy() }, verdict, expected);
        }
        let mut observed = observed(2, &none, &none);
        observed.unreadable.push("n9".into());
        let seen = Surroundings { observed: Ok(observed), ..healthy() };
        assert_finds(&seen, Problem, "versions: this program can't read the FluxNodes n9");
    }
}
