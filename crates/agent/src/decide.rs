//! What the agent does next on its node: one pure function, [`decide`], from what was observed to a [`Step`]. The rungs of
//! the ladder: preflight, claim and install, configure and start, verify and report.

#[cfg(test)]
mod tests;

use std::time::Duration;

use super::{applied::Applied, copied::host_roster, drain};
use api::{BROKER_RUN_DIR, Closing, FluxNodeSpec, Rank, Roster, RosterEntry, Want};
use broker::status::InstanceStatus;
use hostapi::{EpochId, HostView, Preflight, RunningBroker};
use model::{names::misnamed, roster::is_lead_fixed, status::SHUT_DOWN_MESSAGE};

/// What is known of the FluxInstance. Only the positive words count as evidence that it is over: no answer, 401, 403, 429,
/// 5xx, or a 404 that isn't the API server's own leave everything as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instance<'a> {
    /// No word.
    Unknown,
    /// It is there.
    Here {
        /// metadata.uid
        uid: &'a str,
    },
    /// It has a deletionTimestamp, was DELETED, is answered by a 404 that names it, or its Namespace is being deleted.
    Over,
}

/// Everything the agent has seen.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The FluxInstance.
    pub instance: Instance<'a>,
    /// Our Node's name.
    pub node: &'a str,
    /// Our Node's uid; None: not known yet.
    pub node_uid: Option<&'a str>,
    /// This agent has lived for some time and the API has not said a word yet.
    pub alone: bool,
    /// What is said to our name is for another machine, by `copied::names_another_machine`.
    pub replaced: bool,
    /// Our FluxNode's spec: the planner's words to us.
    pub spec: Option<&'a FluxNodeSpec>,
    /// The roster, read at least at `spec.revision`.
    pub roster: Option<&'a Roster>,
    /// Why the published one can't be understood by this version; `roster` is older then.
    pub newer_roster: Option<&'a str>,
    /// Digest of the published package set.
    pub published: Option<&'a str>,
    /// The host.
    pub host: &'a HostView,
    /// What preflight said, once it has passed.
    pub preflight: Option<&'a Preflight>,
    /// Lead only: the resources that the running broker has taken in.
    pub applied: Option<Applied>,
    /// The broker is in state `run`.
    pub is_up: bool,
    /// The broker that this agent started last was in state `run`.
    pub was_up: bool,
    /// How long the lead has not answered this broker, or has not counted it in.
    pub unheard: Duration,
    /// How long the broker has not answered this agent.
    pub silent: Duration,
    /// How long the broker has been on its way out.
    pub leaving: Duration,
    /// Digests of the package sets whose archives are on this host.
    pub holds: &'a [String],
    /// Lead only: what is drained and what is excluded, by its broker's word.
    pub told: Option<&'a InstanceStatus>,
    /// This host's clock, in seconds since 1970.
    pub now: f64,
}

/// A broker that is cut off or hangs for so long is given up, if the lead has given it up: longer than any outage that the overlay
/// itself outlives (`tcp_user_timeout` is 2 minutes).
const LOST: Duration = Duration::from_secs(150);
/// A follower that is on its way out for so long is stuck: rc3 takes seconds.
const STUCK: Duration = Duration::from_secs(60);

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// What is wanted holds.
    Hold,
    /// Others have to do something first.
    Wait(String),
    /// Lead: its broker has ended, with these words, before the instance was ever online. Which node tries next, and when, is
    /// the planner's to say.
    GiveWay(String),
    /// Look whether the host can carry a broker.
    Preflight,
    /// Claim the host, fetch and link this package set.
    Install {
        /// Its digest.
        digest: String,
    },
    /// Fetch and link this package set beside the broker that runs: it is for the next epoch.
    Prepare {
        /// Its digest.
        digest: String,
    },
    /// Write the files and start the broker.
    Start(Assignment),
    /// Lead: take in what the roster declares now, live.
    Reload(Assignment),
    /// Lead: have the broker drain and undrain ranks.
    Drain(drain::Change),
    /// Lead: end the epoch by stopping the instance.
    Close(Closing),
    /// Stop the broker: the roster gives us another rank, or it is of another instance.
    Stop {
        /// Why, in words.
        reason: String,
        /// Jobs that run here are waited for. Not where they are lost already, or their time is over.
        waits_for_jobs: bool,
    },
    /// Take everything off the host.
    Remove,
}

impl Step {
    /// One word for a log line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Wait(_) => "wait",
            Self::GiveWay(_) => "give way",
            Self::Preflight => "preflight",
            Self::Install { .. } => "install",
            Self::Prepare { .. } => "prepare",
            Self::Start(_) => "start",
            Self::Reload(_) => "reload",
            Self::Drain(_) => "drain",
            Self::Close(_) => "close",
            Self::Stop { .. } => "stop",
            Self::Remove => "remove",
        }
    }
}

/// A rank that is ours by the word of both FluxNode and roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// The rank.
    pub rank: Rank,
    /// Its entry.
    pub entry: RosterEntry,
    /// Our Node's uid.
    pub node_uid: String,
    /// The epoch.
    pub epoch: u64,
    /// The least revision that the files must be made from.
    pub revision: u64,
}

/// Decides the next step.
pub fn decide(seen: &Seen) -> Step {
    let claimed_by = seen.host.state.as_ref().map(|state| state.instance_uid.as_str());
    let uid = match seen.instance {
        Instance::Unknown => return restart_without_api(seen),
        Instance::Over if claimed_by.is_some() || seen.host.broker.is_some() || seen.spec.is_some() => {
            return Step::Remove;
        }
        Instance::Over => return Step::Hold,
        Instance::Here { uid } => uid,
    };
    if claimed_by.is_some_and(|claimed| claimed != uid) {
        // Another instance's leavings: its brokers and files must not be mixed with ours.
        return Step::Remove;
    }
    if let Some(unknown) = &seen.host.unknown {
        // Nothing is written or begun beside it.
        return Step::Wait(unknown.clone());
    }
    if seen.preflight.is_none() {
        return Step::Preflight;
    }
    let Some(spec) = seen.spec.filter(|spec| spec.instance_uid.as_deref() == Some(uid)) else {
        return Step::Wait("waiting for the planner".to_owned());
    };
    if let Some(reason) = seen.newer_roster {
        return Step::Wait(reason.to_owned());
    }
    if let (Some(broker), Some(roster)) = (&seen.host.broker, seen.roster)
        && let Some(reason) = superseded(broker, spec, roster)
    {
        // The lead had lost it before it gave the rank to another one.
        let is_anothers = roster.member(broker.record.rank).is_some_and(|member| member.node != spec.node_name);
        let are_lost = is_anothers || broker.record.epoch < roster.jobs_lost_before;
        return Step::Stop { reason, waits_for_jobs: !are_lost };
    }
    if seen.replaced {
        return Step::Wait("another machine has this node's name: rename this one, or take it away".to_owned());
    }
    let has = |digest: &str| seen.host.has_environment(digest);
    match &spec.want {
        Want::Nothing | Want::Other(_) => Step::Wait(match &spec.reason {
            Some(reason) => format!("this node gets no rank: {reason}"),
            None => "the planner has no use for this node".to_owned(),
        }),
        Want::Install => match seen.published {
            Some(digest) if !has(digest) => install(seen, spec, digest),
            Some(_) if spec.rank.is_some() => Step::Wait(match &spec.reason {
                Some(reason) => format!("installed; {reason}"),
                None => "installed; waiting for the lead to take this node in".to_owned(),
            }),
            Some(_) => Step::Hold,
            None => Step::Wait("waiting for the packages to be resolved".to_owned()),
        },
        Want::Leave if !seen.roster.is_some_and(|roster| may_leave(seen.host, spec, roster)) => {
            Step::Wait("waiting for roster and FluxNode to say the same".to_owned())
        }
        Want::Leave => match &seen.host.broker {
            Some(_) => Step::Stop { reason: "this node leaves the instance".to_owned(), waits_for_jobs: !spec.overdue },
            None => Step::Wait("this node has left the instance".to_owned()),
        },
        Want::Run => run(seen, spec, has),
    }
}

/// Where the archives come from is the planner's to say, so that the source is asked once for all nodes.
fn install(seen: &Seen, spec: &FluxNodeSpec, digest: &str) -> Step {
    if is_fetchable(seen, spec, digest) {
        Step::Install { digest: digest.to_owned() }
    } else {
        Step::Wait("waiting for another node to hold the packages".to_owned())
    }
}

fn is_fetchable(seen: &Seen, spec: &FluxNodeSpec, digest: &str) -> bool {
    let told = spec.fetch_from.as_ref().is_some_and(|from| from.digest == digest);
    told || seen.holds.iter().any(|held| held == digest)
}

fn run(seen: &Seen, spec: &FluxNodeSpec, has: impl Fn(&str) -> bool) -> Step {
    let Some((roster, assignment)) = seen.roster.and_then(|roster| Some((roster, agreed(spec, roster)?))) else {
        return Step::Wait("waiting for roster and FluxNode to say the same".to_owned());
    };
    if let (0, Some(closing)) = (assignment.rank, roster.closing) {
        return match &seen.host.broker {
            // The next lead would not start without it.
            Some(broker) if seen.host.statedir_lost => statedir_lost(seen, broker),
            Some(_) => Step::Close(closing),
            None => Step::Wait("the epoch has ended; waiting for the planner to begin the next one".to_owned()),
        };
    }
    if let (0, true) = (assignment.rank, is_shut_down(seen.host, roster)) {
        return Step::Wait(SHUT_DOWN_MESSAGE.to_owned());
    }
    if seen.host.broker.is_none() {
        // What the planner says by our name may be about the machine before us, which may even run, cut off. One that ran the
        // broker of this rank is that machine, whatever uid its Node has now.
        if seen.host.died.is_none() && seen.node_uid != Some(&assignment.node_uid) {
            return Step::Wait(format!(
                "rank {} is another machine's of this name: waiting for the planner",
                assignment.rank
            ));
        }
        if let Some(why) = failed_as_lead(seen, roster).filter(|_| assignment.rank == 0) {
            return Step::GiveWay(why.to_owned());
        }
        let digest = &roster.settings.digest;
        return if has(digest) { Step::Start(assignment) } else { install(seen, spec, digest) };
    }
    if let Some(broker) = seen.host.broker.as_ref().filter(|_| seen.host.rundir_lost) {
        return Step::Wait(format!(
            "{BROKER_RUN_DIR} was removed while the broker runs as process {0}, so nobody can ask it or give it jobs here: \
             once its jobs have ended, end it by `kill {0}` on this host, and it is started again",
            broker.pid
        ));
    }
    if assignment.rank != 0 && seen.leaving >= STUCK {
        // It waits for a child that will never leave, and lets nobody in. Its parent has lost it, and so are its jobs.
        let reason = "the broker has been on its way out for more than a minute".to_owned();
        return Step::Stop { reason, waits_for_jobs: false };
    }
    if assignment.rank != 0
        && spec.missed
        && let Some(reason) = given_up(seen)
    {
        return Step::Stop { reason: reason.to_owned(), waits_for_jobs: true };
    }
    let change = seen.told.filter(|_| assignment.rank == 0).and_then(|told| drain::change(&spec.drain, told, seen.now));
    // Who leaves gets no new jobs, also where the resources can't be taken in; who comes back gets some only with its own.
    if let Some(drain) = change.as_ref().and_then(drain::Change::less) {
        return Step::Drain(drain);
    }
    // One that is not up yet has read what was there at its start, and can't be told.
    let is_current =
        |applied: &Applied| applied.revision >= spec.revision && (applied.settled || !is_misnamed(seen, roster));
    if assignment.rank == 0 && seen.is_up && !seen.applied.as_ref().is_some_and(is_current) {
        return Step::Reload(assignment);
    }
    if let Some(change) = change {
        return Step::Drain(change);
    }
    if let Some(broker) = seen.host.broker.as_ref().filter(|_| seen.host.statedir_lost) {
        return statedir_lost(seen, broker);
    }
    // Last of all: nothing that runs depends on it.
    match seen.published {
        Some(digest) if !has(digest) && is_fetchable(seen, spec, digest) => Step::Prepare { digest: digest.to_owned() },
        _ => Step::Hold,
    }
}

/// Why a broker that the lead has given up is of no use any more. One that is on its way up is waited for.
fn given_up(seen: &Seen) -> Option<&'static str> {
    match () {
        () if seen.silent >= LOST => Some("the broker has not answered for minutes, and the lead has given it up"),
        () if seen.is_up && seen.unheard >= LOST => Some("the lead has lost this broker, which doesn't know it"),
        () => None,
    }
}

/// An administrator has ended the epoch of `roster` by flux-shutdown(1) on its lead, which is this host. Only the next epoch takes
/// that back. After a signal or a crash the broker is started again.
pub fn is_shut_down(host: &HostView, roster: &Roster) -> bool {
    roster.established && was_shut_down_here(host, roster)
}

/// As [`is_shut_down`], by a copy of the roster that may be older than the lead's first time online.
fn was_shut_down_here(host: &HostView, roster: &Roster) -> bool {
    let is_of = |ended: &EpochId| (&ended.instance_id, ended.epoch) == (&roster.instance_id, roster.epoch);
    host.broker.is_none() && host.shut_down.as_ref().is_some_and(is_of)
}

/// Flux could know members by other names than it does: the lead's broker did not take in the live configuration at its start, or a
/// job kept a rank from having its name, and has ended.
fn is_misnamed(seen: &Seen, roster: &Roster) -> bool {
    seen.told.is_some_and(|told| misnamed(roster, &told.names, &told.allocated.ranks))
}

/// The last words of the broker that was started for `roster`, where its lead was never online. One that was up has shown that
/// it can be started here, and may have jobs.
fn failed_as_lead<'a>(seen: &'a Seen, roster: &Roster) -> Option<&'a str> {
    let is_of_roster = seen.host.died_instance_id.as_ref() == Some(&roster.instance_id);
    seen.host.died.as_deref().filter(|_| is_of_roster && !is_lead_fixed(roster) && !seen.was_up)
}

fn statedir_lost(seen: &Seen, broker: &RunningBroker) -> Step {
    Step::Wait(format!(
        "the statedir of instance {} is gone while the lead's broker runs, which alone has the queue now: dump it at once by \
         `flux-distribute dump` in this node's pod; once the jobs have ended, end the broker by `kill {}` on this host and \
         begin from the dump by `flux-distribute recover --lead {} --from DUMP`",
        broker.record.instance_id, broker.pid, seen.node
    ))
}

/// The assignment, where FluxNode and roster agree on rank, Node UID and epoch.
pub fn agreed(spec: &FluxNodeSpec, roster: &Roster) -> Option<Assignment> {
    let rank = spec.rank?;
    let entry = roster.ranks.get(&rank)?;
    let node_uid = spec.node_uid.clone()?;
    let member = entry.member.as_ref()?;
    let same_instance = spec.instance_uid.as_deref() == Some(&roster.instance_uid);
    let ours = member.uid == node_uid && member.node == spec.node_name;
    (ours && spec.epoch == roster.epoch && same_instance).then(|| Assignment {
        rank,
        entry: entry.clone(),
        node_uid,
        epoch: roster.epoch,
        revision: spec.revision.max(entry.revision),
    })
}

/// The roster, too, wants this host's broker to leave, or has no such member: FluxNode.spec alone stops nothing.
pub fn may_leave(host: &HostView, spec: &FluxNodeSpec, roster: &Roster) -> bool {
    let is_same = spec.instance_uid.as_deref() == Some(&roster.instance_uid) && spec.epoch == roster.epoch;
    let rank = host.broker.as_ref().map(|broker| broker.record.rank).or(spec.rank);
    let entry = rank.and_then(|rank| roster.ranks.get(&rank));
    let is_ours = |entry: &&RosterEntry| entry.member.as_ref().is_some_and(|member| member.node == spec.node_name);
    let leaves = |entry: &RosterEntry| entry.drain.as_ref().is_some_and(|drain| drain.leave);
    is_same && entry.filter(is_ours).is_none_or(leaves)
}

/// `decided` by the FluxNode and the roster that stand now. What it was decided by may be the memory of an agent that was
/// frozen for minutes: a broker of a rank that somebody else has by now would push that one's out.
pub fn confirmed(decided: &Assignment, instance_uid: &str, spec: &FluxNodeSpec, roster: &Roster) -> Option<Assignment> {
    let now = agreed(spec, roster).filter(|_| roster.instance_uid == instance_uid)?;
    // A broker that joins a lead on its way out fails, and its agent would report that as trouble.
    let is_over = spec.want != Want::Run || roster.closing.is_some();
    let is_same = (now.rank, &now.node_uid, now.epoch) == (decided.rank, &decided.node_uid, decided.epoch);
    (is_same && !is_over).then_some(now)
}

/// Why a running broker is none of this roster: only the roster's positive word counts, never its absence.
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
        let holder = holder.map_or_else(|| "nobody".to_owned(), |member| format!("node {}", member.node));
        return Some(format!("rank {} is no longer this node's: {holder} has it now", record.rank));
    }
    let assignment = agreed(spec, roster)?;
    // Not the Node's uid: a machine that was registered again has another, and the same broker.
    (assignment.rank != record.rank)
        .then(|| format!("rank {} is no longer this node's: it has rank {} now", record.rank, assignment.rank))
}

/// While the API server is away a broker that has died is started again as it was. An agent that is new has only the host's
/// word for how that was.
fn restart_without_api(seen: &Seen) -> Step {
    let copy = host_roster(seen.host);
    let roster = seen.roster.or(copy.as_ref());
    let last = roster.and_then(|roster| match seen.spec {
        Some(spec) => agreed(spec, roster),
        None if seen.alone => held_by(roster, seen.node),
        None => None,
    });
    match last {
        Some(Assignment { rank: 0, .. }) if roster.is_some_and(|roster| was_shut_down_here(seen.host, roster)) => {
            Step::Hold
        }
        Some(assignment) if seen.host.broker.is_none() && seen.host.died.is_some() => match seen.preflight {
            Some(_) => Step::Start(assignment),
            None => Step::Preflight,
        },
        _ => Step::Hold,
    }
}

/// The rank that `node` holds by `roster`.
pub fn held_by(roster: &Roster, node: &str) -> Option<Assignment> {
    let held = roster.ranks.iter().filter_map(|(rank, entry)| Some((rank, entry, entry.member.as_ref()?)));
    // A machine that this one has replaced keeps its rank for a while.
    let held = held.filter(|(.., member)| member.node == node);
    let (rank, entry, member) = held.min_by_key(|(.., member)| member.gone_since.is_some())?;
    Some(Assignment {
        rank: *rank,
        entry: entry.clone(),
        node_uid: member.uid.clone(),
        epoch: roster.epoch,
        revision: entry.revision,
    })
}
