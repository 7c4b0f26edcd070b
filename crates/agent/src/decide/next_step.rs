//! The next step of one node, as a pure function of what was observed. The ladder: preflight, claim and install, configure and
//! start, then hold.

use std::time::Duration;

use crate::{
    drains::{self, DrainChange},
    inputs::{
        applied::Applied,
        assignment::{Assignment, agreed, held_by, may_leave},
        node_inputs::{Instance, NodeInputs},
        shutdown::{is_shut_down, was_shut_down_here},
    },
    memory::Memory,
    step::Step,
};
use api::{BROKER_SOCKET_DIR, FluxNodeSpec, IdSet, Roster, Want};
use hostapi::RunningBroker;
use model::{conditions::SHUT_DOWN_MESSAGE, lead::is_lead_fixed, names::misnamed};

/// A broker that is cut off or hangs for this long is of no use any more if the lead has given it up: longer than any outage that
/// the overlay itself survives (`tcp_user_timeout` is 2 minutes).
const LOST: Duration = Duration::from_secs(150);
/// A follower that has been shutting down for this long is stuck: rc3 takes seconds.
const STUCK: Duration = Duration::from_mins(1);
/// A new agent waits this long for the API server before it starts a broker from the host's own files.
const ALONE: Duration = Duration::from_secs(5);

/// Chooses the next step.
pub fn next_step(inputs: &NodeInputs, memory: &Memory) -> Step {
    let host = &inputs.host;
    let claimed_for = host.state.as_ref().map(|state| state.instance_uid.as_str());
    let uid = match &inputs.instance {
        Instance::Unknown => return restart_without_api(inputs),
        Instance::Over if claimed_for.is_some() || host.broker.is_some() || inputs.own_spec().is_some() => {
            return Step::Remove;
        }
        Instance::Over => return Step::Hold,
        Instance::Here { uid } => uid,
    };
    if claimed_for.is_some_and(|claimed| claimed != uid) {
        // Another instance's brokers and files must not be mixed with ours.
        return Step::Remove;
    }
    if let Some(unknown) = &host.unknown {
        // It may lead and have jobs, so nothing is written or started beside it.
        return Step::Wait(unknown.clone());
    }
    if inputs.preflight.is_none() {
        return Step::Preflight;
    }
    let Some(spec) = inputs.spec_for(uid) else {
        return Step::Wait("waiting for the planner".to_owned());
    };
    if let Some(reason) = &inputs.newer_roster {
        return Step::Wait(reason.clone());
    }
    if let (Some(broker), Some(roster)) = (&host.broker, &inputs.roster)
        && let Some(reason) = superseded(broker, spec, roster)
    {
        // The lead had lost this broker before the planner gave its rank to another node.
        let is_anothers = roster.member(broker.record.rank).is_some_and(|member| member.node != spec.node_name);
        let are_lost = is_anothers || broker.record.epoch < roster.jobs_lost_before;
        return Step::Stop { reason, waits_for_jobs: !are_lost };
    }
    if inputs.is_replaced {
        return Step::Wait("another machine has this node's name: rename this one, or take it away".to_owned());
    }
    match &spec.want {
        Want::Nothing | Want::Other(_) => Step::Wait(match &spec.reason {
            Some(reason) => format!("this node gets no rank: {reason}"),
            None => "the planner has no use for this node".to_owned(),
        }),
        Want::Install => match inputs.wanted_digest() {
            Some(digest) if !host.has_environment(digest) => install(inputs, spec, digest),
            Some(_) if spec.rank.is_some() => Step::Wait(match &spec.reason {
                Some(reason) => format!("installed; {reason}"),
                None => "installed; waiting for the lead to take this node in".to_owned(),
            }),
            Some(_) => Step::Hold,
            None => Step::Wait("waiting for the packages to be resolved".to_owned()),
        },
        Want::Leave if !inputs.roster.as_deref().is_some_and(|roster| may_leave(host, spec, roster)) => {
            Step::Wait("waiting for roster and FluxNode to agree".to_owned())
        }
        Want::Leave => match &host.broker {
            Some(_) => Step::Stop {
                reason: "this node leaves the instance".to_owned(),
                waits_for_jobs: !spec.stop_despite_jobs,
            },
            None => Step::Wait("this node has left the instance".to_owned()),
        },
        Want::Run => run(inputs, memory, spec),
    }
}

/// The planner decides where the archives come from, so that the source is asked once for all nodes.
fn install(inputs: &NodeInputs, spec: &FluxNodeSpec, digest: &str) -> Step {
    if is_fetchable(inputs, spec, digest) {
        Step::Install { digest: digest.to_owned() }
    } else {
        Step::Wait("waiting for another node to hold the packages".to_owned())
    }
}

fn is_fetchable(inputs: &NodeInputs, spec: &FluxNodeSpec, digest: &str) -> bool {
    let has_source = spec.fetch_from.as_ref().is_some_and(|from| from.digest == digest);
    has_source || inputs.held_archives.iter().any(|held| held == digest)
}

fn run(inputs: &NodeInputs, memory: &Memory, spec: &FluxNodeSpec) -> Step {
    let Some((roster, assignment)) = inputs.roster.as_deref().and_then(|roster| Some((roster, agreed(spec, roster)?)))
    else {
        return Step::Wait("waiting for roster and FluxNode to agree".to_owned());
    };
    let is_lead = assignment.rank == 0;
    if let (true, Some(closing)) = (is_lead, roster.closing) {
        return match &inputs.host.broker {
            // Without its statedir, the next epoch could not have the queue.
            Some(broker) if inputs.host.statedir_lost => statedir_lost(inputs, broker),
            Some(_) => Step::Close(closing),
            None => Step::Wait("the epoch has ended; waiting for the planner to begin the next one".to_owned()),
        };
    }
    if is_lead && is_shut_down(&inputs.host, roster) {
        return Step::Wait(SHUT_DOWN_MESSAGE.to_owned());
    }
    match &inputs.host.broker {
        None => start(inputs, memory, spec, roster, assignment),
        Some(broker) => keep(inputs, spec, roster, assignment, broker),
    }
}

/// No broker runs, and one should.
fn start(inputs: &NodeInputs, memory: &Memory, spec: &FluxNodeSpec, roster: &Roster, assignment: Assignment) -> Step {
    // What the planner wants of our name may be meant for an earlier machine of that name, which may even run, cut off. A host that
    // ran the broker of this rank is that machine, whatever uid its Node has now.
    if inputs.host.died.is_none() && inputs.node_uid.as_ref() != Some(&assignment.node_uid) {
        return Step::Wait(format!(
            "rank {} belongs to another machine of this name: waiting for the planner",
            assignment.rank
        ));
    }
    if let Some(why) = failed_as_lead(inputs, memory, roster).filter(|_| assignment.rank == 0) {
        return Step::GiveWay(why.to_owned());
    }
    let digest = &roster.settings.digest;
    if !inputs.host.has_environment(digest) {
        return install(inputs, spec, digest);
    }
    if roster.closing.is_some() {
        // A broker that joins a lead which shuts down fails, and that would look like trouble.
        return Step::Wait("this epoch ends: waiting for the next one".to_owned());
    }
    Step::Start(assignment)
}

/// The broker runs, and should.
fn keep(
    inputs: &NodeInputs,
    spec: &FluxNodeSpec,
    roster: &Roster,
    assignment: Assignment,
    broker: &RunningBroker,
) -> Step {
    let (host, is_lead) = (&inputs.host, assignment.rank == 0);
    if host.socket_lost {
        return Step::Wait(format!(
            "{BROKER_SOCKET_DIR} was removed while the broker runs as process {0}, so it can't be asked or get jobs here: once its \
             jobs have ended, end it by `kill {0}` on this host, and the agent starts it again",
            broker.pid
        ));
    }
    if !is_lead && inputs.broker.leaving_for(inputs.at) >= STUCK {
        // It waits for a child that will never leave, and lets no new one in. Its parent has lost it, and so are its jobs.
        let reason = "the broker has been shutting down for more than a minute".to_owned();
        return Step::Stop { reason, waits_for_jobs: false };
    }
    if !is_lead
        && spec.lost_by_lead
        && let Some(reason) = given_up(inputs)
    {
        return Step::Stop { reason: reason.to_owned(), waits_for_jobs: true };
    }
    let drains = inputs.broker.instance.as_ref().filter(|_| is_lead);
    let drains = drains.and_then(|instance| {
        let has_bridge = inputs.roster.as_ref().is_some_and(|roster| roster.settings.pods);
        let overlapping_on = if has_bridge { inputs.overlapping_on.clone() } else { Some(IdSet::default()) };
        let wanted = drains::wanted(&spec.drain, overlapping_on, &instance.drained);
        drains::change(&wanted, instance, inputs.unix_time)
    });
    // A rank that leaves gets no new jobs, also if the resources can't be loaded; one that comes back gets jobs only with its own
    // resources. So drains come before the reload, and undrains after it.
    if let Some(drain) = drains.as_ref().and_then(DrainChange::only_drains) {
        return Step::Drain(drain);
    }
    // A broker that is not up yet has read the files of its start, and can't load new ones.
    let is_current =
        |applied: &Applied| applied.revision >= spec.revision && (applied.settled || !is_misnamed(inputs, roster));
    if is_lead && inputs.is_online() && !inputs.applied.as_ref().is_some_and(is_current) {
        return Step::Reload(assignment);
    }
    if let Some(change) = drains {
        return Step::Drain(change);
    }
    if host.statedir_lost {
        return statedir_lost(inputs, broker);
    }
    // Last of all, since nothing that runs depends on it.
    match inputs.wanted_digest() {
        Some(digest) if !host.has_environment(digest) && is_fetchable(inputs, spec, digest) => {
            Step::Prepare { digest: digest.to_owned() }
        }
        _ => Step::Hold,
    }
}

/// Why a broker that the lead has given up is of no use any more. One that is coming up gets its time.
fn given_up(inputs: &NodeInputs) -> Option<&'static str> {
    if inputs.broker.silent_for(inputs.at) >= LOST {
        Some("the broker has not answered for minutes, and the lead has given it up")
    } else if inputs.is_online() && inputs.broker.lead_unreachable_for(inputs.at) >= LOST {
        Some("the lead has lost this broker, which doesn't know it")
    } else {
        None
    }
}

/// Flux may use other names for members than the roster: the lead's broker did not load the live configuration at its start, or a
/// job that kept a rank under its old name has ended.
fn is_misnamed(inputs: &NodeInputs, roster: &Roster) -> bool {
    let instance = inputs.broker.instance.as_ref();
    instance.is_some_and(|instance| misnamed(roster, &instance.names, &instance.allocated.ranks))
}

/// The last log line of the broker that was started for `roster`, if that broker was never online. One that was online has shown
/// that it can be started here, and may have jobs.
fn failed_as_lead<'a>(inputs: &'a NodeInputs, memory: &Memory, roster: &Roster) -> Option<&'a str> {
    let is_of_roster = inputs.host.died_instance_id.as_ref() == Some(&roster.instance_id);
    let was_online = memory.starts.was_online();
    inputs.host.died.as_deref().filter(|_| is_of_roster && !is_lead_fixed(roster) && !was_online)
}

fn statedir_lost(inputs: &NodeInputs, broker: &RunningBroker) -> Step {
    Step::Wait(format!(
        "the statedir of instance {} is gone while the lead's broker runs, which alone has the queue now: dump it at once by \
         `flux-distribute dump` in this node's pod; once the jobs have ended, end the broker by `kill {}` on this host and \
         begin from the dump by `flux-distribute recover --lead {} --from DUMP`",
        broker.record.instance_id, broker.pid, inputs.node
    ))
}

/// Why the running broker does not belong to this roster. Only what the roster holds counts, never what it lacks.
fn superseded(broker: &RunningBroker, spec: &FluxNodeSpec, roster: &Roster) -> Option<String> {
    let record = &broker.record;
    if record.instance_id != roster.instance_id || record.epoch < roster.epoch {
        return Some(format!("the broker of epoch {} is running, the roster is at {}", record.epoch, roster.epoch));
    }
    let holder = roster.member(record.rank);
    if holder.is_some_and(|member| member.node == spec.node_name) {
        return None;
    }
    if spec.rank.is_none() && roster.ranks.contains_key(&record.rank) {
        let holder = holder.map_or_else(|| "no node".to_owned(), |member| format!("node {}", member.node));
        return Some(format!("rank {} is no longer this node's: {holder} has it now", record.rank));
    }
    let assignment = agreed(spec, roster)?;
    // The Node's uid does not count: a machine that was registered again has another one, and the same broker.
    (assignment.rank != record.rank)
        .then(|| format!("rank {} is no longer this node's: it has rank {} now", record.rank, assignment.rank))
}

/// While the API server is away, the agent starts a broker that has died again as it was. A new agent knows only from the host's
/// files how that was.
fn restart_without_api(inputs: &NodeInputs) -> Step {
    let roster = inputs.roster.as_deref().or(inputs.local_roster.as_deref());
    let last = roster.and_then(|roster| match inputs.own_spec() {
        Some(spec) => agreed(spec, roster),
        None if inputs.agent_age > ALONE => held_by(roster, &inputs.node),
        None => None,
    });
    let Some((roster, assignment)) = roster.zip(last) else { return Step::Hold };
    let host = &inputs.host;
    if (assignment.rank == 0 && was_shut_down_here(host, roster)) || host.broker.is_some() || host.died.is_none() {
        return Step::Hold;
    }
    if inputs.preflight.is_some() { Step::Start(assignment) } else { Step::Preflight }
}
