//! The conditions of a FluxInstance.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{
    findings::{self, NotApplied},
    observed::{Observed, participant_count},
    obstacle::Obstacle,
    roster::epoch::Restart,
};
use api::{
    CONDITION_AGENTS_MISSING, CONDITION_CERTIFICATE_MISSING, CONDITION_FLUX_NODES_UNUSABLE, CONDITION_NOT_APPLIED,
    CONDITION_RESTART_PENDING, CONDITION_SCALE_DENIED, FluxInstanceStatus, Roster,
};
use base::words::many;

/// Reason of Degraded if a job waits although enough cores are free.
pub(super) const CORES_LOST: &str = "CoresLost";
/// Reason of RestartPending if the restart comes by itself.
pub(super) const WAITS: &str = "Waits";
/// Reason of RestartPending if the planner went back to the previous epoch's settings.
pub(super) const TAKEN_BACK: &str = "TakenBack";
/// Reason of RestartPending if a node can't install the packages until a user fixes something.
pub(super) const PACKAGES_UNAVAILABLE: &str = "PackagesUnavailable";
/// Reason of Degraded if an administrator has shut the instance down.
pub const SHUT_DOWN_REASON: &str = "ShutDown";

/// Message of the FluxInstance and of the FluxNodes while the instance is shut down.
pub const SHUT_DOWN_MESSAGE: &str = "an administrator has shut the instance down (flux shutdown): to start it again, with its queue, run \
                             `kubectl -n flux-distribute annotate fxi flux --overwrite \
                             distribute.flux-framework.org/restart=\"$(date +%s)\"`";

/// Message while the certificate's Secret is gone and brokers may still use the certificate that was in it.
pub const CERTIFICATE_IS_GONE: &str = "Secret flux-curve is gone: the lead's agent brings it back, or after one to two minutes another \
                                       member's agent that has the same certificate; if no host has it any more, put it back";

/// The types of the conditions that the planner writes, in the order of the values that [`status`](super::status::status) gives them.
pub(super) const OURS: [&str; 9] = [
    "Ready",
    "Progressing",
    "Degraded",
    CONDITION_CERTIFICATE_MISSING,
    CONDITION_SCALE_DENIED,
    CONDITION_RESTART_PENDING,
    CONDITION_NOT_APPLIED,
    CONDITION_AGENTS_MISSING,
    CONDITION_FLUX_NODES_UNUSABLE,
];
/// Longest message of the status or of a condition, in characters.
const LONGEST_MESSAGE: usize = 8192;

/// The message, or its beginning: it may quote what somebody has written, and the status has to fit into etcd.
pub(super) fn bounded(message: &str) -> String {
    message.chars().take(LONGEST_MESSAGE).collect()
}

/// One of each type that we write. A captured agent's token can add others, and large ones, until no status can be written any more.
pub(super) fn ours(conditions: &[Condition]) -> Vec<Condition> {
    let is_kept = |type_: &str, condition: &Condition| {
        let texts = [&condition.message, &condition.reason, &condition.status];
        condition.type_ == type_ && texts.iter().all(|text| text.chars().count() <= LONGEST_MESSAGE)
    };
    let find = |type_: &&str| conditions.iter().find(|condition| is_kept(type_, condition)).cloned();
    OURS.iter().filter_map(find).collect()
}

/// What a condition says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionValue {
    /// True if its status is `True`, which is the normal case for Ready only.
    pub is_true: bool,
    /// CamelCase.
    pub reason: &'static str,
    /// One sentence with the remedy; empty if all is normal.
    pub message: String,
}

impl ConditionValue {
    /// The condition holds.
    pub fn yes(reason: &'static str, message: impl Into<String>) -> Self {
        Self { is_true: true, reason, message: message.into() }
    }

    /// The condition does not hold.
    pub fn no(reason: &'static str) -> Self {
        Self { is_true: false, reason, message: String::new() }
    }

    /// Sets condition `type_` to this value, as observed in this `generation` of the object. Its transition time changes only with
    /// its status, as the Kubernetes API conventions demand.
    pub fn set(self, type_: &str, conditions: &mut Vec<Condition>, generation: i64, now: Timestamp) {
        let status = if self.is_true { "True" } else { "False" };
        let mut next = Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: self.reason.to_owned(),
            message: bounded(&self.message),
            observed_generation: Some(generation),
            last_transition_time: Time(now),
        };
        match conditions.iter_mut().find(|condition| condition.type_ == type_) {
            Some(old) => {
                // A time in the future is none of ours: with it, a deadline would never come.
                if old.status == status && old.last_transition_time.0 <= now {
                    next.last_transition_time = old.last_transition_time.clone();
                }
                *old = next;
            }
            None => conditions.push(next),
        }
    }
}

/// The state of the instance that phase, conditions and message depend on.
#[derive(Clone, Copy)]
pub(super) struct Standing {
    /// The lead's broker is online.
    pub lead_online: bool,
    /// The lead was online once. The instance id, which the status keeps even without a roster, says so.
    pub established: bool,
    /// Not all nodes were online yet, and those that are missing are still coming up.
    pub coming_up: bool,
    /// An administrator has shut the instance down.
    pub shut_down: bool,
}

/// Condition Ready. `message` is the instance's.
pub(super) fn ready(lead_online: bool, message: &str) -> ConditionValue {
    let reason = if lead_online { "LeadOnline" } else { "LeadNotOnline" };
    ConditionValue { is_true: lead_online, reason, message: message.to_owned() }
}

/// Condition Progressing. `message` is the instance's.
pub(super) fn progressing(complete: bool, message: &str) -> ConditionValue {
    let reason = if complete { "Complete" } else { "NodesToCome" };
    ConditionValue { is_true: !complete, reason, message: message.to_owned() }
}

/// Condition Degraded.
pub(super) fn degraded(
    obstacle: Option<&Obstacle>,
    cores_lost: Option<&str>,
    standing: Standing,
    message: &str,
) -> ConditionValue {
    match (obstacle, cores_lost) {
        (Some(Obstacle::Problem { reason, message }), _) => ConditionValue::yes(reason, message.as_str()),
        _ if standing.shut_down => ConditionValue::yes(SHUT_DOWN_REASON, SHUT_DOWN_MESSAGE),
        _ if standing.established && !standing.lead_online => ConditionValue::yes("LeadNotOnline", message),
        (_, Some(lost)) => ConditionValue::yes(CORES_LOST, lost),
        _ => ConditionValue::no("AsExpected"),
    }
}

/// Condition NotApplied.
pub(super) fn not_applied(seen: &Observed, roster: Option<&Roster>) -> ConditionValue {
    let found = roster.map(|roster| findings::not_applied(seen, roster)).unwrap_or_default();
    let Some(NotApplied { reason, .. }) = found.first() else { return ConditionValue::no("AsExpected") };
    let messages: Vec<_> = found.iter().map(|part| part.message.as_str()).collect();
    ConditionValue::yes(reason, messages.join("; "))
}

/// Condition AgentsMissing: without an agent, a member's FluxNode keeps its last report even if the broker's state
/// changes.
pub(super) fn agents_missing(seen: &Observed, roster: Option<&Roster>) -> ConditionValue {
    let members = roster.into_iter().flat_map(Roster::members);
    let mut missing = members.filter_map(|member| Some((&member.node, seen.agentless.get(&member.node)?)));
    let Some((node, why)) = missing.next() else { return ConditionValue::no("AsExpected") };
    let others = match missing.count() {
        0 => String::new(),
        more => format!(" (and {})", many(more as u64, "other node")),
    };
    let message = format!(
        "{node} has no agent{others}: {why}; its broker and jobs keep running, but no agent repairs or reports anything there"
    );
    ConditionValue::yes("AgentNotRunning", message)
}

/// Condition FluxNodesUnusable. It is none of the reasons for Degraded: the planner goes on with all other nodes, and whoever has the
/// token of one agent can make that node's FluxNode unusable.
pub(super) fn flux_nodes_unusable(seen: &Observed) -> ConditionValue {
    let mut unusable = seen.unusable.iter();
    let Some((node, why)) = unusable.next() else { return ConditionValue::no("AsExpected") };
    let first = why.message(node);
    let message = match unusable.count() {
        0 => first,
        more => format!("of {} that can't be used, the first: {first}", many(1 + more as u64, "FluxNode")),
    };
    ConditionValue::yes(why.reason(), message)
}

/// Condition CertificateMissing.
pub(super) fn certificate_missing(seen: &Observed) -> ConditionValue {
    if seen.is_certificate_gone {
        ConditionValue::yes("SecretGone", CERTIFICATE_IS_GONE)
    } else {
        ConditionValue::no("AsExpected")
    }
}

/// Condition ScaleDenied.
pub(super) fn scale_denied(seen: &Observed, roster: Option<&Roster>) -> ConditionValue {
    let fits = ConditionValue::no("Fits");
    let Some(roster) = roster else { return fits };
    let max_size = roster.settings.max_size;
    let (asked, are) = match (seen.spec.size, seen.spec.max_size) {
        (Some(size), _) => (size, format!("size {size} is")),
        // A user who sets only maxSize has asked for no more nodes than that.
        (None, Some(_)) => return fits,
        (None, None) => {
            let count = u32::try_from(participant_count(seen, roster)).unwrap_or(u32::MAX);
            (count, format!("{count} members and eligible nodes are"))
        }
    };
    if asked <= max_size {
        return fits;
    }
    let more = match seen.spec.max_size {
        Some(next) => format!("maxSize {next} takes effect at the next coordinated restart"),
        None => "to allow more, set spec.maxSize".to_owned(),
    };
    let message = format!(
        "{are} more than maxSize {max_size} of the running epoch, so at most {max_size} nodes have a rank; {more}"
    );
    ConditionValue::yes("MoreThanMaxSize", message)
}

/// Condition RestartPending.
pub(super) fn restart_pending(restart: Restart) -> ConditionValue {
    match restart {
        Restart::None => ConditionValue::no("Same"),
        Restart::Waits { difference, reason } => {
            ConditionValue::yes(WAITS, format!("{difference}; waits for {reason}"))
        }
        Restart::Blocked { difference, reason } => {
            ConditionValue::yes(PACKAGES_UNAVAILABLE, format!("{difference}; {reason}"))
        }
        Restart::Refused { difference, reason } => {
            let message = format!(
                "{difference}; the instance did not come up with this and went back to its previous settings ({reason}): change \
                 the spec"
            );
            ConditionValue::yes(TAKEN_BACK, message)
        }
        Restart::Now { difference, .. } => ConditionValue::yes("Begins", difference),
    }
}

/// True if the restart that RestartPending explains by `reason` can't proceed until a user does something.
pub(super) fn needs_user(reason: &str) -> bool {
    [PACKAGES_UNAVAILABLE, TAKEN_BACK].contains(&reason)
}

/// True if the condition holds and a user has to do something.
pub fn needs_action(condition: &Condition) -> bool {
    let needs = match condition.type_.as_str() {
        "Degraded"
        | CONDITION_CERTIFICATE_MISSING
        | CONDITION_SCALE_DENIED
        | CONDITION_NOT_APPLIED
        | CONDITION_AGENTS_MISSING
        | CONDITION_FLUX_NODES_UNUSABLE => true,
        CONDITION_RESTART_PENDING => needs_user(&condition.reason),
        _ => false,
    };
    condition.status == "True" && needs
}

/// True if no warning Event is due although a user may have to act: an obstacle has Events of its own, and a lead or a certificate
/// that is away often comes back by itself.
fn has_no_warning(condition: &Condition) -> bool {
    match condition.type_.as_str() {
        "Degraded" => ![CORES_LOST, SHUT_DOWN_REASON].contains(&condition.reason.as_str()),
        CONDITION_CERTIFICATE_MISSING => true,
        _ => false,
    }
}

/// The conditions of `next` that deserve a warning Event: those that need a user's action and were not the same in
/// `before`. Obstacles have Events of their own.
pub fn warnings(before: Option<&FluxInstanceStatus>, next: &FluxInstanceStatus) -> Vec<Condition> {
    let has_changed = |condition: &&Condition| {
        before
            .and_then(|before| before.holding(&condition.type_))
            .is_none_or(|old| (&old.reason, &old.message) != (&condition.reason, &condition.message))
    };
    let due = next.conditions.iter().filter(|condition| needs_action(condition) && !has_no_warning(condition));
    due.filter(has_changed).cloned().collect()
}
