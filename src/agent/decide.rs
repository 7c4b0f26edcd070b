//! What the agent does next on its node: one pure function, [`decide`], from what was observed to a [`Step`]. The rungs of
//! the ladder: preflight, claim and install, configure and start, verify and report.

use crate::{
    api::{FluxNodeSpec, ROSTER_FORMAT, Rank, Roster, RosterEntry, Want},
    host::{HostView, Preflight, RunningBroker},
};

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
    /// Our FluxNode's spec: the planner's words to us.
    pub spec: Option<&'a FluxNodeSpec>,
    /// The roster, read at least at `spec.revision`.
    pub roster: Option<&'a Roster>,
    /// Digest of the published package set.
    pub published: Option<&'a str>,
    /// The host.
    pub host: &'a HostView,
    /// What preflight said, once it has passed.
    pub preflight: Option<&'a Preflight>,
    /// Lead only: the revision whose resources the running broker has.
    pub applied: Option<u64>,
    /// Digests of the package sets whose archives are on this host.
    pub holds: &'a [String],
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// What is wanted holds.
    Hold,
    /// Others have to do something first.
    Wait(String),
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
    /// Stop the broker: the roster gives us another rank, or it is of another instance.
    Stop {
        /// Why, in words.
        reason: String,
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
            Self::Preflight => "preflight",
            Self::Install { .. } => "install",
            Self::Prepare { .. } => "prepare",
            Self::Start(_) => "start",
            Self::Reload(_) => "reload",
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
    if seen.preflight.is_none() {
        return Step::Preflight;
    }
    let Some(spec) = seen.spec.filter(|spec| spec.instance_uid.as_deref() == Some(uid)) else {
        return Step::Wait("waiting for the planner".to_owned());
    };
    if let Some(roster) = seen.roster.filter(|roster| roster.format > ROSTER_FORMAT) {
        return Step::Wait(format!(
            "the roster has format {}, this agent knows {ROSTER_FORMAT}: finish the upgrade",
            roster.format
        ));
    }
    if let (Some(broker), Some(roster)) = (&seen.host.broker, seen.roster)
        && let Some(reason) = superseded(broker, spec, roster)
    {
        return Step::Stop { reason };
    }
    let has = |digest: &str| seen.host.has_environment(digest);
    match spec.want {
        Want::Nothing => Step::Wait(match &spec.reason {
            Some(reason) => format!("this node gets no rank: {reason}"),
            None => "the planner has no use for this node".to_owned(),
        }),
        Want::Install => match seen.published {
            Some(digest) if !has(digest) => install(seen, spec, digest),
            Some(_) if spec.rank.is_some() => {
                Step::Wait("installed; waiting for the lead to take this node in".to_owned())
            }
            Some(_) => Step::Hold,
            None => Step::Wait("waiting for the packages to be resolved".to_owned()),
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
    if seen.host.broker.is_none() {
        let digest = &roster.settings.digest;
        return if has(digest) { Step::Start(assignment) } else { install(seen, spec, digest) };
    }
    if assignment.rank == 0 && seen.applied < Some(spec.revision) {
        return Step::Reload(assignment);
    }
    // Last of all: nothing that runs depends on it.
    match seen.published {
        Some(digest) if !has(digest) && is_fetchable(seen, spec, digest) => Step::Prepare { digest: digest.to_owned() },
        _ => Step::Hold,
    }
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

/// This host is the lead's: it runs rank 0, or it would by the roster that it was configured by last.
pub fn leads(host: &HostView, spec: Option<&FluxNodeSpec>) -> bool {
    if let Some(broker) = &host.broker {
        return broker.record.rank == 0;
    }
    let (Some(spec), Some(text)) = (spec, &host.roster) else { return false };
    serde_json::from_str::<Roster>(text).is_ok_and(|copy| {
        let lead = copy.ranks.get(&0).and_then(|entry| entry.member.as_ref());
        spec.instance_uid.as_deref() == Some(&copy.instance_uid) && lead.is_some_and(|lead| lead.node == spec.node_name)
    })
}

/// Why a running broker is none of this roster: only the roster's positive word counts, never its absence.
fn superseded(broker: &RunningBroker, spec: &FluxNodeSpec, roster: &Roster) -> Option<String> {
    let record = &broker.record;
    if record.instance_id != roster.instance_id || record.epoch < roster.epoch {
        return Some(format!("the broker of epoch {} is running, the roster is at {}", record.epoch, roster.epoch));
    }
    let holder = roster.ranks.get(&record.rank).and_then(|entry| entry.member.as_ref());
    if holder.is_some_and(|member| member.node == spec.node_name) {
        return None;
    }
    let assignment = agreed(spec, roster)?;
    // Not the Node's uid: a machine that was registered again has another, and the same broker.
    (assignment.rank != record.rank)
        .then(|| format!("rank {} is no longer this node's: it has rank {} now", record.rank, assignment.rank))
}

/// While the API server is away a broker that has died is started again as it was.
fn restart_without_api(seen: &Seen) -> Step {
    let copy = seen.host.roster.as_deref().and_then(|text| serde_json::from_str::<Roster>(text).ok());
    let last = seen.spec.and_then(|spec| agreed(spec, seen.roster.or(copy.as_ref())?));
    match last {
        Some(assignment) if seen.host.broker.is_none() && seen.host.died.is_some() && seen.preflight.is_some() => {
            Step::Start(assignment)
        }
        _ => Step::Hold,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{FetchFrom, Resources},
        host::{HostState, LaunchRecord},
        plan::roster::tests::roster,
    };

    struct World {
        instance: &'static str,
        spec: Option<FluxNodeSpec>,
        roster: Option<Roster>,
        host: HostView,
        preflight: Option<Preflight>,
        published: Option<&'static str>,
        applied: Option<u64>,
        holds: Vec<String>,
    }

    fn preflight() -> Preflight {
        Preflight {
            prefix: "/opt/flux-distribute".into(),
            resources: Resources { cores: 2, gpus: 0 },
            memory_mib: 1,
            platform: "linux-64".into(),
            glibc: "2.36".into(),
            boot_id: "boot".into(),
            systemd: false,
            warnings: vec![],
        }
    }

    fn broker(rank: Rank, epoch: u64) -> RunningBroker {
        RunningBroker {
            pid: 7,
            start_time: 1,
            systemd: false,
            record: LaunchRecord {
                rank,
                broker_name: format!("node{}", rank + 1),
                node_uid: "uid-node2".into(),
                instance_uid: "instance".into(),
                instance_id: "id".into(),
                epoch,
                digest: "digest".into(),
                launch: "hash".into(),
            },
        }
    }

    impl World {
        /// node2, rank 1, wanted to run, installed.
        fn new() -> Self {
            let roster = roster(4, &[("node1", 2), ("node2", 2)]);
            Self {
                instance: "instance",
                spec: Some(FluxNodeSpec {
                    node_name: "node2".into(),
                    want: Want::Run,
                    instance_uid: Some("instance".into()),
                    node_uid: Some("uid-node2".into()),
                    rank: Some(1),
                    epoch: 1,
                    revision: 1,
                    fetch_from: Some(FetchFrom { digest: "digest".into(), ..FetchFrom::default() }),
                    ..FluxNodeSpec::default()
                }),
                roster: Some(roster),
                host: HostView {
                    state: Some(HostState { instance_uid: "instance".into(), ..Default::default() }),
                    environments: vec!["digest".into()],
                    ..Default::default()
                },
                preflight: Some(preflight()),
                published: Some("digest"),
                applied: None,
                holds: Vec::new(),
            }
        }

        fn decide(&self) -> Step {
            decide(&Seen {
                instance: match self.instance {
                    "" => Instance::Unknown,
                    "over" => Instance::Over,
                    uid => Instance::Here { uid },
                },
                spec: self.spec.as_ref(),
                roster: self.roster.as_ref(),
                published: self.published,
                host: &self.host,
                preflight: self.preflight.as_ref(),
                applied: self.applied,
                holds: &self.holds,
            })
        }
    }

    #[test]
    fn the_ladder_is_climbed_rung_by_rung() {
        let mut world = World::new();
        world.preflight = None;
        world.host.environments.clear();
        assert_eq!(world.decide(), Step::Preflight);
        world.preflight = Some(preflight());
        assert_eq!(world.decide(), Step::Install { digest: "digest".into() });
        world.host.environments.push("digest".into());
        assert!(matches!(world.decide(), Step::Start(assignment) if assignment.rank == 1));
        world.host.broker = Some(broker(1, 1));
        assert_eq!(world.decide(), Step::Hold);
    }

    #[test]
    fn the_next_epochs_packages_are_prepared_when_nothing_else_is_to_be_done() {
        let mut world = World::new();
        world.published = Some("newer");
        assert!(matches!(world.decide(), Step::Start(_)), "{:?}", world.decide());
        world.host.broker = Some(broker(1, 1));
        assert_eq!(world.decide(), Step::Prepare { digest: "newer".into() });
        world.host.environments.push("newer".into());
        assert_eq!(world.decide(), Step::Hold);
        world.host.environments.pop();
        for (change, what) in [
            ((|w| w.host.broker = Some(broker(3, 1))) as fn(&mut World), "another rank"),
            (|w| w.roster.as_mut().unwrap().epoch = 2, "another epoch"),
            (|w| w.host.broker = None, "no broker"),
            (|w| w.instance = "over", "the end"),
        ] {
            let mut world = World {
                host: world.host.clone(),
                roster: world.roster.clone(),
                spec: world.spec.clone(),
                ..World::new()
            };
            world.published = Some("newer");
            change(&mut world);
            assert!(!matches!(world.decide(), Step::Prepare { .. }), "{what}");
        }
    }

    #[test]
    fn packages_are_fetched_only_by_the_planners_word_or_are_there_already() {
        let other = FetchFrom { digest: "other".into(), ..FetchFrom::default() };
        for want in [Want::Install, Want::Run] {
            for (fetch_from, holds, installs) in [
                (None, "", false),
                (Some(other.clone()), "", false),
                (None, "other", false),
                (None, "digest", true),
                (Some(FetchFrom { digest: "digest".into(), peers: vec!["10.0.0.1:8052".into()], since: 1 }), "", true),
            ] {
                let mut world = World::new();
                world.host.environments.clear();
                let spec = world.spec.as_mut().unwrap();
                (spec.want, spec.fetch_from) = (want, fetch_from);
                world.holds = vec![holds.to_owned()];
                let expected = match installs {
                    true => Step::Install { digest: "digest".into() },
                    false => Step::Wait("waiting for another node to hold the packages".into()),
                };
                assert_eq!(world.decide(), expected);
            }
        }
    }

    #[test]
    fn a_lead_takes_in_a_new_revision_before_it_prepares_anything() {
        let mut world = World::new();
        world.published = Some("newer");
        let spec = world.spec.as_mut().unwrap();
        (spec.node_name, spec.rank, spec.node_uid) = ("node1".into(), Some(0), Some("uid-node1".into()));
        world.host.broker = Some(broker(0, 1));
        assert!(matches!(world.decide(), Step::Reload(_)));
        world.applied = Some(1);
        assert!(matches!(world.decide(), Step::Prepare { .. }));
    }

    #[test]
    fn a_running_broker_is_left_alone_whatever_else_changes() {
        for change in [
            (|w: &mut World| w.published = Some("newer")) as fn(&mut World),
            |w| w.published = None,
            |w| w.roster = None,
            |w| w.spec = None,
            |w| w.spec.as_mut().unwrap().want = Want::Install,
            |w| w.spec.as_mut().unwrap().want = Want::Nothing,
            |w| w.spec.as_mut().unwrap().rank = None,
            |w| w.spec.as_mut().unwrap().epoch = 9,
            |w| w.instance = "",
            |w| w.roster.as_mut().unwrap().settings.port = 1,
            |w| w.roster.as_mut().unwrap().ranks.clear(),
            |w| w.host.broker.as_mut().unwrap().record.node_uid = "uid of an earlier Node object".into(),
            |w| w.host.broker.as_mut().unwrap().record.launch = "other version".into(),
        ] {
            let mut world = World::new();
            world.host.broker = Some(broker(1, 1));
            change(&mut world);
            let step = world.decide();
            assert!(!matches!(step, Step::Stop { .. } | Step::Remove | Step::Start(_)), "{step:?}");
        }
    }

    #[test]
    fn a_broker_that_lost_its_rank_is_stopped_first() {
        let mut world = World::new();
        world.host.broker = Some(broker(3, 1));
        assert!(matches!(world.decide(), Step::Stop { reason } if reason.contains("rank 3 is no longer")));
        world.host.broker = Some(broker(1, 1));
        world.roster.as_mut().unwrap().epoch = 2;
        assert!(matches!(world.decide(), Step::Stop { .. }));
    }

    #[test]
    fn words_that_give_a_node_the_rank_of_another_are_no_words() {
        let mut world = World::new();
        world.host.broker = Some(broker(1, 1));
        let spec = world.spec.as_mut().unwrap();
        (spec.rank, spec.node_uid) = (Some(0), Some("uid-node1".into()));
        assert!(!matches!(world.decide(), Step::Stop { .. } | Step::Start(_)));
        world.host.broker = None;
        assert!(matches!(world.decide(), Step::Wait(_)));
    }

    #[test]
    fn a_lead_whose_broker_is_down_is_still_the_lead() {
        let world = World::new();
        let text = serde_json::to_string(world.roster.as_ref().unwrap()).unwrap();
        let host = HostView { roster: Some(text), ..HostView::default() };
        let of = |node: &str| FluxNodeSpec { node_name: node.into(), ..world.spec.clone().unwrap() };
        assert!(leads(&host, Some(&of("node1"))));
        assert!(!leads(&host, Some(&of("node2"))));
        assert!(!leads(&HostView::default(), Some(&of("node1"))));
    }

    #[test]
    fn only_a_positive_word_removes() {
        let mut world = World::new();
        world.host.broker = Some(broker(1, 1));
        world.instance = "over";
        assert_eq!(world.decide(), Step::Remove);
        world.instance = "another-instance";
        assert_eq!(world.decide(), Step::Remove);
        world.instance = "";
        assert_eq!(world.decide(), Step::Hold);
        world.host = HostView::default();
        world.spec = None;
        world.instance = "over";
        assert_eq!(world.decide(), Step::Hold, "nothing of ours is there");
    }

    #[test]
    fn the_lead_takes_in_a_new_revision_live() {
        let mut world = World::new();
        world.spec = Some(FluxNodeSpec {
            node_name: "node1".into(),
            rank: Some(0),
            node_uid: Some("uid-node1".into()),
            revision: 3,
            ..world.spec.unwrap()
        });
        let mut running = broker(0, 1);
        running.record.node_uid = "uid-node1".into();
        world.host.broker = Some(running);
        world.applied = Some(2);
        assert!(matches!(world.decide(), Step::Reload(assignment) if assignment.rank == 0));
        world.applied = Some(3);
        assert_eq!(world.decide(), Step::Hold);
    }

    #[test]
    fn without_api_a_dead_broker_is_started_as_it_was() {
        let mut world = World::new();
        world.instance = "";
        assert_eq!(world.decide(), Step::Hold);
        world.host.died = Some("killed".into());
        assert!(matches!(world.decide(), Step::Start(_)));
    }
}
