//! `kubectl flux doctor`: every check, with its remedy.

use std::{collections::BTreeMap, process::ExitCode, time::Duration};

use k8s_openapi::{
    api::{apps::v1::DaemonSet, coordination::v1::Lease},
    apimachinery::pkg::version::Info,
    jiff::Timestamp,
};
use serde::Serialize;

use crate::{
    alike::alike,
    arguments::DoctorFormat,
    error::{KubectlError, chain, remedy},
    observed::{Cluster, DoctorInputs, Observed},
    overview::{Attention, Node, Overview, overview},
    screen::{Colour, Screen, cell, json, plain, print, table, word},
};
use api::{DAEMONSET, LEASE_PLANNER, NAMESPACE};
use base::words::many;
use cluster::{ApiError, clock};
use model::{
    agents::{AgentPod, by_node},
    hostlist::shortened,
    kubernetes::unsupported,
    obstacle::Obstacle,
};

/// A planner renews its Lease every five seconds or so; another agent takes over within some sixteen, or minutes if none of those that watch it lives.
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
    #[serde(rename = "notice")]
    Minor,
    /// It could not be checked.
    Unknown,
    /// Somebody has to do something.
    Problem,
}

impl From<Attention> for Verdict {
    fn from(attention: Attention) -> Self {
        match attention {
            Attention::Nothing => Self::Good,
            Attention::Look => Self::Minor,
            Attention::Act => Self::Problem,
        }
    }
}

/// Prints all checks. The exit code is 1 if one of them found a problem, or could not be made.
///
/// # Errors
/// The output can't be written. What the API server refuses is a finding.
pub(crate) async fn run(cluster: &Cluster, format: DoctorFormat) -> Result<ExitCode, KubectlError> {
    let checks = checks(&cluster.doctor_inputs().await, clock::now());
    print(&match format {
        DoctorFormat::Json => json(&checks)?,
        DoctorFormat::Text => text(&checks, Screen::stdout()),
    })?;
    let is_bad = checks.iter().any(|check| matches!(check.verdict, Verdict::Problem | Verdict::Unknown));
    Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// For people.
pub(crate) fn text(checks: &[Check], screen: Screen) -> String {
    let rows = checks.iter().flat_map(|Check { subject, verdict, found, remedy }| {
        let (word, colour) = match verdict {
            Verdict::Good => ("ok", Colour::Green),
            Verdict::Minor => ("notice", Colour::Yellow),
            Verdict::Unknown => ("unknown", Colour::Yellow),
            Verdict::Problem => ("PROBLEM", Colour::Red),
        };
        let first = vec![cell(word, colour), plain(subject), plain(found)];
        let second = remedy.as_ref().map(|remedy| vec![plain(""), plain(""), plain(format!("remedy: {remedy}"))]);
        std::iter::once(first).chain(second)
    });
    table(rows, screen)
}

/// Everything that may be wrong, by what was found at `now`.
pub(crate) fn checks(seen: &DoctorInputs, now: Timestamp) -> Vec<Check> {
    let mut checks = vec![version(&seen.version)];
    checks.extend(agents(&seen.daemonset, &seen.control_planes, &seen.agents));
    checks.push(planner(&seen.planner, now));
    match &seen.observed {
        Ok(observed) => {
            let overview = overview(observed);
            checks.extend([instance(&overview), versions(observed)]);
            checks.extend(notices(&overview));
            checks.extend(nodes(&overview));
        }
        Err(error @ KubectlError::NoInstance) => checks.push(Check::problem("FluxInstance", chain(error), None)),
        Err(error) => checks.push(Check::new("FluxInstance", Verdict::Unknown, chain(error))),
    }
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
        Self::new(subject, Verdict::Unknown, format!("{}: {}", remedy(error), chain(error)))
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

/// Whether the pods of the agents run, with a check for each reason why some don't. Those of DaemonSet install-flux-control-planes
/// are among the pods.
fn agents(
    daemonset: &Result<Option<DaemonSet>, ApiError>,
    control_planes: &Result<Option<DaemonSet>, ApiError>,
    agents: &Result<Vec<AgentPod>, ApiError>,
) -> Vec<Check> {
    const SUBJECT: &str = "agents";
    let (daemonset, control_planes, agents) = match (daemonset, control_planes, agents) {
        (Ok(daemonset), Ok(control_planes), Ok(agents)) => (daemonset, control_planes, agents),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => return vec![Check::unknown(SUBJECT, error)],
    };
    let Some(daemonset) = daemonset else {
        let found = format!("there is no DaemonSet {DAEMONSET}: nothing watches over the brokers");
        return vec![Check::problem(SUBJECT, found, Some("apply deploy/daemonset-installer.yaml".to_owned()))];
    };
    // Named in the order of the nodes.
    let agents: BTreeMap<_, _> = by_node(agents).into_iter().collect();
    let down = agents.values().filter_map(|agent| Some((agent.down.as_deref()?, agent)));
    let mut checks = Vec::new();
    for (why, group) in alike(down, |(why, _)| *why) {
        let nodes = shortened(group.iter().map(|(_, agent)| agent.node.as_str()));
        let remedy = group.first().map(|(_, agent)| format!("kubectl -n {NAMESPACE} describe pod {}", agent.name));
        checks.push(Check::problem(SUBJECT, format!("no agent runs on {nodes}: {why}"), remedy));
    }
    let statuses =
        [Some(daemonset), control_planes.as_ref()].into_iter().flatten().filter_map(|set| set.status.as_ref());
    let wanted: i32 = statuses.map(|status| status.desired_number_scheduled).sum();
    let missing = usize::try_from(wanted).unwrap_or(0).saturating_sub(agents.len());
    if missing > 0 {
        let found = format!("{} not there yet", many(missing as u64, "pod"));
        let remedy = format!("kubectl -n {NAMESPACE} describe daemonset {DAEMONSET}");
        checks.push(Check::problem(SUBJECT, found, Some(remedy)));
    }
    if checks.is_empty() && agents.is_empty() {
        let remedy = format!("kubectl -n {NAMESPACE} describe daemonset {DAEMONSET}");
        let found = format!("DaemonSet {DAEMONSET} wants a pod on no node");
        checks.push(Check { remedy: Some(remedy), ..Check::new(SUBJECT, Verdict::Minor, found) });
    } else if checks.is_empty() {
        checks.push(Check::good(SUBJECT, format!("{} running", many(agents.len() as u64, "agent"))));
    }
    checks
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
    Check::new("FluxInstance", instance.attention.into(), format!("{}: {message}", word(&instance.phase)))
}

/// Agents of two versions work beside each other, but not for ever.
fn versions(observed: &Observed) -> Check {
    const SUBJECT: &str = "versions";
    let statuses = observed.nodes.iter().filter_map(|node| node.status.as_ref());
    let mut versions: Vec<&str> = statuses.filter_map(|status| status.agent_version.as_deref()).collect();
    versions.sort_unstable();
    versions.dedup();
    if !observed.unreadable.is_empty() {
        let unreadable = shortened(observed.unreadable.iter().map(String::as_str));
        let found = format!("this program can't read the FluxNodes {unreadable}: another version has written them");
        return Check::problem(
            SUBJECT,
            found,
            Some("use the program of the version that is installed there".to_owned()),
        );
    }
    match versions.as_slice() {
        [] => Check::new(SUBJECT, Verdict::Minor, "no agent has reported yet"),
        [one] => Check::good(SUBJECT, format!("all agents are of version {one}")),
        several => {
            let remedy = format!("kubectl -n {NAMESPACE} rollout status ds/{DAEMONSET}");
            let found = format!("agents of versions {} run side by side", several.join(", "));
            Check { remedy: Some(remedy), ..Check::new(SUBJECT, Verdict::Minor, found) }
        }
    }
}

/// Conditions and queues; each message names its remedy.
fn notices(overview: &Overview) -> impl Iterator<Item = Check> {
    let notices = overview.instance.notices.iter();
    notices.map(|notice| Check::new(&notice.subject, notice.attention.into(), notice.message.as_str()))
}

/// The nodes that are not as they are wanted, those that are alike in one check.
fn nodes(overview: &Overview) -> Vec<Check> {
    let unwell = overview.nodes.iter().filter(|node| node.attention > Attention::Nothing);
    let found = |node: &&Node| {
        let state = if node.rank.is_some() { format!(", {}", node.state.word()) } else { String::new() };
        let message = node.message.as_ref().map_or(String::new(), |message| format!(": {message}"));
        (node.attention, format!("{}{state}{message}", word(&node.phase)))
    };
    let mut groups = alike(unwell, found);
    if groups.is_empty() {
        return vec![Check::good("nodes", format!("{} as wanted", many(overview.nodes.len() as u64, "node")))];
    }
    groups.sort_by_key(|((attention, _), _)| std::cmp::Reverse(*attention));
    let check = |((attention, found), nodes): &((Attention, String), Vec<&Node>)| {
        let subject = shortened(nodes.iter().map(|node| node.name.as_str()));
        let first = nodes.first().filter(|_| *attention == Attention::Act);
        let remedy = first.map(|node| {
            format!("`kubectl flux logs {}` shows more; docs/failures.md has a section for each phase", node.name)
        });
        Check { remedy, ..Check::new(&subject, (*attention).into(), found.as_str()) }
    };
    groups.iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{NOW, agent, around, change, lease, observed};

    fn healthy() -> DoctorInputs {
        around(observed(2, &Value::Null, &Value::Null))
    }

    fn found(seen: &DoctorInputs) -> Vec<(Verdict, String)> {
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
ok  nodes         2 nodes as wanted
";
        assert_eq!(text(&checks(&seen, NOW.parse().unwrap()), Screen::FILE), expected);
    }

    fn assert_finds(seen: &DoctorInputs, verdict: Verdict, expected: &str) {
        let found = found(seen);
        assert!(
            found.iter().any(|(found, text)| *found == verdict && text.starts_with(expected)),
            "{expected}: {found:?}"
        );
    }

    #[test]
    fn what_is_wrong_around_the_instance_is_found() {
        type Break = fn(&mut DoctorInputs);
        let cases: [(Break, Verdict, &str); 11] = [
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
            (
                |seen| {
                    let of_none = seen.daemonset.as_mut().unwrap().as_mut().unwrap().status.as_mut().unwrap();
                    of_none.desired_number_scheduled = 0;
                    seen.agents = Ok(Vec::new());
                },
                Verdict::Minor,
                "agents: DaemonSet install-flux wants a pod on no node",
            ),
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
                |seen| {
                    let down = ["n1", "n2", "n3"]
                        .map(|node| agent(node, Some(if node == "n2" { "evicted" } else { "crashes" })));
                    seen.agents = Ok(down.into());
                },
                Verdict::Problem,
                "agents: no agent runs on n[1,3]: crashes",
            ),
            (
                |seen| seen.observed = Err(ApiError::Timeout("list FluxNodes".into()).into()),
                Verdict::Unknown,
                "FluxInstance: the API server does not answer",
            ),
            (
                |seen| seen.agents = Err(ApiError::Timeout("list pods".into())),
                Verdict::Unknown,
                "agents: the API server does not answer: check the kubeconfig, and whether `kubectl version` works: list pods",
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
        use Verdict::{Minor, Problem};
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
            (json!({"phase": "Starting"}), &none, &none, &none, Minor, "FluxInstance: Starting"),
            (none.clone(), &json!({"stoppedQueues": "stopped by X"}), &none, &none, Problem, "queues: stopped by X"),
            (
                none.clone(),
                &none,
                &none,
                &json!({"agentVersion": "0.2.0"}),
                Minor,
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
            (none.clone(), &json!({"drainedByOthers": "1"}), &none, &none, Minor, "n2: Online, drained"),
            (none.clone(), &none, &json!({"rank": null}), &waits, Minor, "n2: Waiting: cordoned"),
        ] {
            let mut observed = observed(2, &instance, lead);
            change(&mut observed, 1, spec, status);
            assert_finds(&DoctorInputs { observed: Ok(observed), ..healthy() }, verdict, expected);
        }
        let mut observed = observed(2, &none, &none);
        observed.unreadable.push("n9".into());
        let seen = DoctorInputs { observed: Ok(observed), ..healthy() };
        assert_finds(&seen, Problem, "versions: this program can't read the FluxNodes n9");
    }
}
