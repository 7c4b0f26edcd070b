//! What the node's status page says: pure.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{
    act::launch_order,
    applied::Applied,
    copied::leads,
    decide::{Assignment, Seen, Step, agreed, is_shut_down},
    drain,
    live::Live,
    log::Rejected,
    tries::Trouble,
};
use crate::{
    api::{
        Adopted, Dump, Facts, FluxNodeStatus, IdSet, LeadFailed, NodePhase, ROSTER_FORMAT, Rank, Roster, Takeover,
        Want, packed,
    },
    broker::STAND_IN,
    host::{HostView, Preflight, dump::is_of},
    plan::roster::is_lead_fixed,
};

/// What the agent knows besides what it has seen.
pub struct Known<'a> {
    /// The next step.
    pub step: &'a Step,
    /// What the broker says.
    pub live: &'a Live,
    /// Why the last step failed, if it did.
    pub trouble: Option<&'a Trouble>,
    /// The last words of a broker that was started several times in a row without coming up, or of a host that refuses to
    /// have it started or never gets its packages.
    pub keeps_dying: Option<&'a str>,
    /// The lead's word on why it refuses us, or another hint on a broker that does not come up.
    pub hint: Option<&'a str>,
    /// The agent has begun just now.
    pub is_new: bool,
    /// What a long step is at.
    pub progress: Option<&'a str>,
    /// What preflight has found.
    pub facts: Option<&'a Facts>,
    /// Whom the lead's broker has refused.
    pub rejected: &'a Rejected,
    /// Digests of the published package sets whose archives are here; None: not known yet.
    pub holds: Option<&'a [String]>,
    /// Where the archives are served.
    pub peer: Option<String>,
    /// Why the agent can't have ports of its own.
    pub ports: Vec<String>,
    /// The roster is gone from the API: the lead tells its copy.
    pub roster_is_gone: bool,
    /// What was found to differ from what was installed here, and what became of it.
    pub damage: Option<String>,
}

/// The broker of this host is in the overlay.
pub fn is_online(host: &HostView, live: &Live) -> bool {
    host.broker.as_ref().is_some_and(|broker| live.pid == Some(broker.pid) && live.state == "run")
}

/// What the roster wants of this node holds.
pub fn is_ready(seen: &Seen, live: &Live) -> bool {
    let Some(spec) = seen.spec.filter(|spec| spec.instance_uid.is_some()) else { return false };
    match (spec.rank, &spec.want) {
        (Some(_), _) => is_online(seen.host, live) && !is_silent(live),
        (None, Want::Nothing) => true,
        (None, _) => seen.published.is_some_and(|digest| seen.host.has_environment(digest)),
    }
}

/// The status.
pub fn status(seen: &Seen, known: &Known, before: &FluxNodeStatus) -> FluxNodeStatus {
    let (phase, message) = phase(seen, known, before);
    let message = with_ports(&phase, message, &known.ports);
    let flux = Some(&known.live.version).filter(|version| !version.is_empty()).or(before.flux.as_ref());
    let flux = flux.filter(|_| !seen.host.environments.is_empty()).cloned();
    let message = if flux.as_deref() == Some(STAND_IN) {
        Some(message.map_or_else(|| STAND_IN.to_owned(), |message| format!("{STAND_IN}: {message}")))
    } else {
        message
    };
    let broker = seen.host.broker.as_ref();
    let is_lead = broker.is_some_and(|broker| broker.record.rank == 0);
    let instance = known.live.instance.as_ref().filter(|_| is_lead);
    let newest = || seen.host.environments.last().cloned();
    let no_drains = BTreeMap::new();
    let copy = seen.host.roster.clone().filter(|_| known.roster_is_gone && leads(seen.host, seen.spec));
    let wanted_drains = seen.spec.map_or(&no_drains, |spec| &spec.drain);
    let is_lasting = known.trouble.is_some_and(|trouble| trouble.lasting);
    FluxNodeStatus {
        lasting: phase == NodePhase::Failed && is_lasting,
        phase,
        message,
        facts: known.facts.cloned(),
        digest: seen.published.filter(|digest| seen.host.has_environment(digest)).map(str::to_owned).or_else(newest),
        holds: known.holds.unwrap_or(&before.holds).to_vec(),
        peer: known.peer.clone(),
        flux,
        adopted: broker.map(|broker| Adopted {
            rank: broker.record.rank,
            broker_name: broker.record.broker_name.clone(),
            node_uid: broker.record.node_uid.clone(),
            instance_uid: Some(broker.record.instance_uid.clone()),
            instance_id: broker.record.instance_id.clone(),
            epoch: broker.record.epoch,
            pid: broker.pid,
            digest: broker.record.digest.clone(),
        }),
        unknown_broker: seen.host.unknown.is_some(),
        allocated: instance.map(|instance| instance.allocated.ranks.clone()),
        pending_nodes: known.live.pending.filter(|_| is_lead).map(|pending| pending.missing_nodes),
        held_back: known.live.fits_since.filter(|_| is_lead).and_then(held_back),
        drained: instance.map(|instance| drain::in_effect(wanted_drains, &instance.drained)),
        // The broker that is stopped for the next epoch still has them, and that is when they are asked for.
        drained_by_others: match instance {
            Some(instance) => drain::by_others(&instance.drained),
            None if leads(seen.host, seen.spec) => before.drained_by_others.clone(),
            None => IdSet::default(),
        },
        closed: closed(seen),
        shut_down: shut_down(seen),
        applied_revision: is_lead.then(|| Applied::of(seen.host)).flatten().map(|applied| applied.revision),
        torpid: instance.map(|instance| instance.torpid.clone()).unwrap_or_default(),
        offline: if is_lead { offline(seen, known.live) } else { Vec::new() },
        roster: copy.map(packed::to_field),
        dump: newest_dump(seen).cloned(),
        takeover: takeover(seen).cloned(),
        restart_pending: restart_pending(seen),
        lacks_packages: lacks_packages(known),
        damage: known.damage.clone(),
        left: nothing_runs(seen) && seen.spec.is_some_and(|spec| spec.want == Want::Leave),
        keeps_dying: known.keeps_dying.and(seen.roster).map(|roster| roster.epoch),
        lead_failed: lead_failed(seen, known),
        // A broker that hangs hears nobody, which says nothing about the lead.
        unheard: known.live.unheard_since.is_some() && known.live.silent_since.is_none(),
        rejected: if is_lead { known.rejected.clone() } else { Rejected::new() },
        roster_format: ROSTER_FORMAT,
        agent: Some(env!("CARGO_PKG_VERSION").to_owned()),
    }
}

/// Adds `ports` to the message; a Failed node's message stays alone. A new agent repeats its predecessor's message, which may have
/// them already.
fn with_ports(phase: &NodePhase, message: Option<String>, ports: &[String]) -> Option<String> {
    let ports = ports.iter().filter(|_| *phase != NodePhase::Failed);
    let new = ports.filter(|said| message.as_ref().is_none_or(|message| !message.contains(said.as_str())));
    let all = message.iter().chain(new).cloned().collect::<Vec<_>>();
    (!all.is_empty()).then(|| all.join("; "))
}

/// The attempt of this host to lead an instance that was never online has failed.
fn lead_failed(seen: &Seen, known: &Known) -> Option<LeadFailed> {
    let roster = seen.roster.filter(|roster| !is_lead_fixed(roster))?;
    agreed(seen.spec?, roster).filter(|own| own.rank == 0)?;
    let refused = known.trouble.filter(|trouble| !trouble.waiting).map(|trouble| trouble.words.clone());
    let last_words = match (known.step, refused) {
        (Step::GiveWay(why), _) => Some(has_ended(why)),
        (Step::Start(_), Some(words)) => Some(words),
        (Step::Preflight | Step::Install { .. }, Some(_)) => None,
        _ => return None,
    };
    Some(LeadFailed { instance_id: roster.instance_id.clone(), last_words })
}

fn has_ended(why: &str) -> String {
    format!("the broker has ended; its log says: {why}")
}

/// The status where the host can't be looked at: what was known of it stands, but nobody sees to it.
pub fn blind(why: String, before: Option<&FluxNodeStatus>) -> FluxNodeStatus {
    FluxNodeStatus { phase: NodePhase::Failed, message: Some(why), ..before.cloned().unwrap_or_default() }
}

/// Of the instance that this host was told of last; a dump of another one is no help to it.
fn newest_dump<'a>(seen: &Seen<'a>) -> Option<&'a Dump> {
    let running = seen.host.broker.as_ref().map(|broker| broker.record.instance_id.as_str());
    let instance_id = seen.roster.map(|roster| roster.instance_id.as_str()).or(running)?;
    seen.host.dumps.iter().rev().find(|dump| is_of(dump, instance_id))
}

/// What was said of an epoch that is over was acted on.
fn takeover<'a>(seen: &Seen<'a>) -> Option<&'a Takeover> {
    seen.host.takeover.as_ref().filter(|takeover| seen.spec.is_none_or(|spec| spec.epoch <= takeover.epoch))
}

fn nothing_runs(seen: &Seen) -> bool {
    seen.host.broker.is_none() && seen.host.unknown.is_none()
}

/// The epoch that has ended here: nothing of it runs, and nothing of it will be started.
fn closed(seen: &Seen) -> Option<u64> {
    seen.roster
        .filter(|roster| roster.closing.is_some() && nothing_runs(seen))
        .and_then(|roster| led_epoch(seen, roster))
}

/// The epoch that an administrator has shut down here.
fn shut_down(seen: &Seen) -> Option<u64> {
    seen.roster.filter(|roster| is_shut_down(seen.host, roster)).and_then(|roster| led_epoch(seen, roster))
}

/// The epoch of `roster`, if this node leads it.
fn led_epoch(seen: &Seen, roster: &Roster) -> Option<u64> {
    agreed(seen.spec?, roster).filter(|own| own.rank == 0).map(|own| own.epoch)
}

fn is_silent(live: &Live) -> bool {
    live.silent_since.is_some_and(|since| since.elapsed() >= SILENT)
}

/// A broker answers within milliseconds; the lead of a big instance may take seconds. So long none is merely slow.
const SILENT: Duration = Duration::from_secs(60);

/// A job at the head of the queue gets cores that are free within seconds.
const HELD_BACK: Duration = Duration::from_secs(60);

/// What to say of a job that has been at the head of the queue since then, while what it asks for was free.
fn held_back((job, since): (u64, Instant)) -> Option<String> {
    (since.elapsed() >= HELD_BACK).then(|| {
        format!(
            "job {job} waits although Flux calls free what it asks for, so the scheduler has lost cores: run `flux-distribute \
             reload` in the pod of the lead's node; it reloads the scheduler while jobs keep running"
        )
    })
}

/// Ranks that have or had a member, and that the lead's broker misses. Of a broker that has not told yet who is online
/// nothing is known.
fn offline(seen: &Seen, live: &Live) -> Vec<Rank> {
    let Some(roster) = seen.roster.filter(|_| is_online(seen.host, live) && live.online.contains(0)) else {
        return Vec::new();
    };
    roster.ranks.keys().copied().filter(|rank| !live.online.contains(*rank)).collect()
}

fn is_up(phase: &NodePhase) -> bool {
    matches!(phase, NodePhase::Online | NodePhase::Draining)
}

fn phase(seen: &Seen, known: &Known, before: &FluxNodeStatus) -> (NodePhase, Option<String>) {
    let words = |text: &str| Some(text.to_owned());
    let ended = |why: &str| Some(has_ended(why));
    let trouble = || known.trouble.map(|trouble| trouble.words.clone());
    let progress = || known.progress.map(str::to_owned);
    let is_to_end = matches!(known.step, Step::Remove | Step::Stop { .. });
    if let Some(broker) = seen.host.broker.as_ref().filter(|_| is_silent(known.live) && !is_to_end) {
        let pid = broker.pid;
        let next = match broker.record.rank {
            0 => "it is not restarted, because jobs may be running",
            _ => "it is restarted once the lead has given it up, if it runs no job",
        };
        return (
            NodePhase::Offline,
            Some(format!(
                "the broker (process {pid}) has not answered for more than a minute: it hangs, or somebody has stopped it \
                 (`kill -CONT {pid}`); {next}"
            )),
        );
    }
    if is_online(seen.host, known.live) && !matches!(known.step, Step::Remove) {
        // A reason to wait is said beside a broker that is online only where somebody has to act: an agent that is too old,
        // a statedir that is gone.
        let must_be_known = || match known.step {
            Step::Wait(reason) if seen.host.statedir_lost || seen.newer_roster.is_some() => words(reason),
            _ => None,
        };
        // What can't be done beside it is said, but it is online.
        let damage = || known.damage.clone();
        let said = trouble().or_else(progress).or_else(must_be_known).or_else(damage);
        return match seen.spec.and_then(|spec| spec.draining.clone()) {
            Some(reason) => (NodePhase::Draining, said.or(Some(reason))),
            None => (NodePhase::Online, said),
        };
    }
    if known.is_new && seen.host.broker.is_some() && known.live.pid.is_none() && is_up(&before.phase) {
        // A new agent has not heard the broker yet: that is no news about the broker.
        let words = before.message.as_deref().map(|words| words.strip_prefix(STAND_IN).unwrap_or(words));
        let words = words.map(|words| words.trim_start_matches(": ")).filter(|words| !words.is_empty());
        return (before.phase.clone(), words.map(str::to_owned));
    }
    if let Step::Remove = known.step {
        return (NodePhase::Removing, trouble().or_else(progress));
    }
    let was_online = is_up(&before.phase) || before.phase == NodePhase::Offline;
    // What is for the next epoch says nothing about this one.
    let about_this_epoch = |_: &&Trouble| !matches!(known.step, Step::Prepare { .. });
    if let Some(trouble) = known.trouble.filter(about_this_epoch) {
        let phase = match trouble.waiting {
            true if was_online => NodePhase::Offline,
            true => NodePhase::Waiting,
            false => NodePhase::Failed,
        };
        return (phase, words(&trouble.words));
    }
    match known.step {
        Step::Preflight => (NodePhase::Preflight, None),
        Step::Install { .. } => (NodePhase::Installing, progress()),
        Step::Stop { reason, .. } => (NodePhase::Starting, words(reason)),
        Step::Drain(_) => (NodePhase::Starting, None),
        Step::Close(_) => (NodePhase::Starting, words("the instance is being stopped for the next epoch")),
        Step::Start(_) | Step::Reload(_) | Step::Prepare { .. } | Step::Hold
            if seen.host.broker.is_some() || matches!(known.step, Step::Start(_)) =>
        {
            match (&seen.host.died, known.hint) {
                (_, Some(hint)) if known.keeps_dying.is_some() => (NodePhase::Failed, words(hint)),
                _ if known.keeps_dying.is_some() => (NodePhase::Failed, known.keeps_dying.and_then(ended)),
                (Some(why), _) if was_online => (NodePhase::Offline, ended(why)),
                (_, Some(hint)) => (NodePhase::Starting, words(hint)),
                _ if known.live.state.is_empty() => (NodePhase::Starting, words("the broker has not answered yet")),
                _ => (NodePhase::Starting, Some(format!("the broker is in state {}", known.live.state))),
            }
        }
        Step::Wait(reason) => (NodePhase::Waiting, words(reason)),
        Step::GiveWay(why) => (NodePhase::Failed, ended(why)),
        _ => {
            let reason = seen.spec.and_then(|spec| spec.reason.as_ref());
            let no_rank = reason.map(|reason| format!("; this node gets no rank: {reason}")).unwrap_or_default();
            (NodePhase::Waiting, Some(format!("the packages are ready{no_rank}")))
        }
    }
}

/// Why the package set that is asked for is not here, as the last try has shown.
fn lacks_packages(known: &Known) -> Option<String> {
    let installs = matches!(known.step, Step::Install { .. } | Step::Prepare { .. });
    known.trouble.filter(|trouble| installs && !trouble.waiting).map(|trouble| trouble.words.clone())
}

/// A broker started now would be started in another way than the one that runs.
fn restart_pending(seen: &Seen) -> Option<String> {
    let (broker, roster, preflight) = (seen.host.broker.as_ref()?, seen.roster?, seen.preflight?);
    // A broker that is to be stopped here, for another rank or epoch, is no reason to restart all of them.
    let is_the_same = |own: &Assignment| (own.rank, own.epoch) == (broker.record.rank, broker.record.epoch);
    let assignment = agreed(seen.spec?, roster).filter(is_the_same)?;
    let order = launch_order(preflight, roster, &assignment);
    (order.record.launch != broker.record.launch)
        .then(|| "this version starts brokers with another command line".to_owned())
}

/// The part of preflight that the planner wants to know.
pub fn facts(preflight: &Preflight) -> Facts {
    Facts {
        resources: preflight.resources,
        memory_mib: preflight.memory_mib,
        platform: preflight.platform.clone(),
        glibc: preflight.glibc.clone(),
        boot_id: preflight.boot_id.clone(),
        systemd: preflight.systemd,
        prefix: preflight.prefix.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        broker::status::{Drained, InstanceStatus},
        host::{HostView, LaunchRecord, RunningBroker},
    };

    fn told(
        step: &Step,
        trouble: Option<&Trouble>,
        keeps_dying: Option<&str>,
        before: NodePhase,
    ) -> (NodePhase, String) {
        let before = FluxNodeStatus { phase: before, ..FluxNodeStatus::default() };
        let status = of_lead(step, trouble, keeps_dying, &Live::default(), &before);
        (status.phase, status.message.unwrap_or_default())
    }

    fn of_lead(
        step: &Step,
        trouble: Option<&Trouble>,
        keeps_dying: Option<&str>,
        live: &Live,
        before: &FluxNodeStatus,
    ) -> FluxNodeStatus {
        let record = LaunchRecord {
            rank: 0,
            broker_name: "node1".into(),
            node_uid: "uid".into(),
            instance_uid: "instance".into(),
            instance_id: "id".into(),
            epoch: 1,
            digest: "digest".into(),
            launch: "launch".into(),
        };
        let broker = RunningBroker { pid: 7, start_time: 7, systemd: false, record };
        let host = HostView { broker: Some(broker), ..HostView::default() };
        let seen = Seen {
            instance: super::super::decide::Instance::Unknown,
            node: "n1",
            node_uid: None,
            alone: false,
            replaced: false,
            spec: None,
            roster: None,
            newer_roster: None,
            published: None,
            host: &host,
            preflight: None,
            applied: None,
            holds: &[],
            told: None,
            now: 0.0,
            is_up: false,
            was_up: false,
            unheard: std::time::Duration::ZERO,
            silent: std::time::Duration::ZERO,
            leaving: std::time::Duration::ZERO,
        };
        let known = Known {
            step,
            live,
            trouble,
            keeps_dying,
            hint: None,
            is_new: false,
            progress: None,
            facts: None,
            rejected: &Rejected::new(),
            holds: None,
            peer: None,
            ports: Vec::new(),
            roster_is_gone: false,
            damage: None,
        };
        status(&seen, &known, before)
    }

    #[test]
    fn a_port_that_is_taken_is_said_once_beside_what_else_is_said() {
        let ports = ["port 1 is taken".to_owned(), "port 2 is taken".to_owned()];
        for (phase, message, ports, expected) in [
            (NodePhase::Online, None, &ports[..0], None),
            (NodePhase::Online, None, &ports[..], Some("port 1 is taken; port 2 is taken")),
            (NodePhase::Waiting, Some("no rank"), &ports[..1], Some("no rank; port 1 is taken")),
            (NodePhase::Online, Some("old; port 1 is taken"), &ports[..1], Some("old; port 1 is taken")),
            (NodePhase::Failed, Some("no disk"), &ports[..], Some("no disk")),
        ] {
            let said = with_ports(&phase, message.map(str::to_owned), ports);
            assert_eq!(said.as_deref(), expected, "{phase:?} {message:?}");
        }
    }

    #[test]
    fn what_people_have_drained_is_told_as_long_as_the_broker_is_silent() {
        let drained = |ranks: &str, reason: &str| Drained {
            ranks: ranks.parse().unwrap(),
            reason: reason.to_owned(),
            since: 0.0,
        };
        let drained = vec![
            drained("1", "flux-distribute: the node is cordoned"),
            drained("2", "rank 2 (node3) missing resources: core[2-7]"),
            drained("3", "bad disk"),
        ];
        let instance = Some(InstanceStatus { drained, ..InstanceStatus::default() });
        let live = Live { instance, ..Live::default() };
        let told = of_lead(&Step::Hold, None, None, &live, &FluxNodeStatus::default());
        assert_eq!(told.drained_by_others.to_string(), "3");
        let silent = of_lead(&Step::Hold, None, None, &Live::default(), &told);
        assert_eq!(silent.drained_by_others.to_string(), "3");
    }

    #[test]
    fn a_broker_that_has_stopped_answering_is_not_told_to_be_online() {
        let before = FluxNodeStatus { phase: NodePhase::Online, ..FluxNodeStatus::default() };
        let silent_for = |seconds| {
            let since = std::time::Instant::now().checked_sub(Duration::from_secs(seconds));
            let live = Live { pid: Some(7), state: "run".into(), silent_since: since, ..Live::default() };
            of_lead(&Step::Hold, None, None, &live, &before)
        };
        assert_eq!(silent_for(10).phase, NodePhase::Online);
        let told = silent_for(61);
        assert_eq!(told.phase, NodePhase::Offline);
        assert!(told.message.unwrap().contains("process 7"));
        assert!(told.adopted.is_some(), "it runs, and its rank is nobody else's");
    }

    #[test]
    fn waiting_for_others_is_no_failure() {
        let install = Step::Install { digest: "digest".to_owned() };
        for (waiting, before, expected) in [
            (true, NodePhase::Installing, NodePhase::Waiting),
            (true, NodePhase::Online, NodePhase::Offline),
            (false, NodePhase::Installing, NodePhase::Failed),
            (false, NodePhase::Online, NodePhase::Failed),
        ] {
            let trouble = Trouble {
                words: "waiting for Secret flux-curve".to_owned(),
                waiting,
                lasting: false,
                by_others: false,
            };
            assert_eq!(told(&install, Some(&trouble), None, before), (expected, trouble.words.clone()));
        }
    }

    #[test]
    fn the_words_of_a_broker_that_never_comes_up_stand_while_the_next_one_is_tried() {
        let dying = told(&Step::Hold, None, Some("broker.err[0]: no"), NodePhase::Failed);
        assert_eq!(dying, (NodePhase::Failed, "the broker has ended; its log says: broker.err[0]: no".to_owned()));
        assert_eq!(told(&Step::Hold, None, None, NodePhase::Failed).0, NodePhase::Starting);
    }
}
