use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    decide,
    next_step::next_step,
    start::{FreshLook, confirm},
};
use crate::{
    fixture::{broker, inputs},
    inputs::{
        applied::Applied,
        assignment::{agreed, held_by},
        broker_state::BrokerState,
        local_roster::{host_roster, leads, names_another_machine},
        node_inputs::{Instance, NodeInputs},
    },
    memory::{Memory, Trouble},
    step::Step,
};
use api::{Adopted, Closing, FetchFrom, FluxNode, FluxNodeSpec, FluxNodeStatus, Member, NodePhase, Roster, Want};
use broker::status::{Drained, InstanceStatus};
use hostapi::{EpochId, HostState, HostView, Preflight};
use model::{conditions::SHUT_DOWN_MESSAGE, fixture::roster};

struct World {
    instance: &'static str,
    spec: Option<FluxNodeSpec>,
    roster: Option<Roster>,
    host: HostView,
    preflight: Option<Preflight>,
    published: Option<&'static str>,
    applied: Option<Applied>,
    told: Option<InstanceStatus>,
    is_up: bool,
    was_up: bool,
    unheard: Duration,
    silent: Duration,
    leaving: Duration,
    holds: Vec<String>,
    alone: bool,
    node_uid: Option<&'static str>,
    replaced: bool,
    newer_roster: Option<&'static str>,
}

impl World {
    /// node2, rank 1, wanted to run, installed.
    fn new() -> Self {
        let roster = roster(4, &[("node1", 2), ("node2", 2)]);
        let preflight = inputs().preflight;
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
                resources: preflight.as_ref().unwrap().resources,
                ..Default::default()
            },
            preflight,
            published: Some("digest"),
            applied: None,
            told: None,
            is_up: true,
            was_up: false,
            unheard: Duration::ZERO,
            silent: Duration::ZERO,
            leaving: Duration::ZERO,
            alone: false,
            node_uid: Some("uid-node2"),
            replaced: false,
            newer_roster: None,
            holds: Vec::new(),
        }
    }

    fn decide(&self) -> Step {
        next_step(&self.inputs(), &self.memory())
    }

    fn memory(&self) -> Memory {
        let mut memory = Memory::default();
        if self.was_up {
            memory.starts.seen(true, true, None, Instant::now());
        }
        memory
    }

    fn inputs(&self) -> NodeInputs {
        // Later than now, since a machine that has just booted has no earlier instant.
        let at = Instant::now() + Duration::from_secs(10_000);
        let begin = |time: Duration| (!time.is_zero()).then(|| at.checked_sub(time).unwrap());
        NodeInputs {
            at,
            instance: match self.instance {
                "" => Instance::Unknown,
                "over" => Instance::Over,
                uid => Instance::Here { uid: uid.to_owned() },
            },
            agent_age: Duration::from_secs(if self.alone { 60 } else { 1 }),
            node_uid: self.node_uid.map(str::to_owned),
            is_replaced: self.replaced,
            flux_node: self.spec.clone().map(|spec| FluxNode::new(&spec.node_name.clone(), spec)),
            roster: self.roster.clone().map(Arc::new),
            newer_roster: self.newer_roster.map(str::to_owned),
            published: self.published.map(str::to_owned).into_iter().collect(),
            held_archives: self.holds.clone(),
            host: self.host.clone(),
            local_roster: host_roster(&self.host),
            preflight: self.preflight.clone(),
            applied: self.applied,
            broker: BrokerState {
                pid: Some(7),
                state: if self.is_up { "run" } else { "join" }.to_owned(),
                instance: self.told.clone(),
                lead_unreachable_since: begin(self.unheard),
                silent_since: begin(self.silent),
                leaving_since: begin(self.leaving),
                ..BrokerState::default()
            },
            ..inputs()
        }
    }
}

/// By a live change of this revision.
fn applied(revision: u64) -> Option<Applied> {
    Some(Applied { pid: 1, start_time: 1, revision, settled: true })
}

#[test]
fn an_agent_older_than_the_roster_does_nothing_and_says_so() {
    let mut world = World::new();
    assert!(matches!(world.decide(), Step::Start(_)));
    world.newer_roster = Some("finish the upgrade");
    assert_eq!(world.decide(), Step::Wait("finish the upgrade".to_owned()));
}

#[test]
fn a_start_must_be_confirmed_by_a_fresh_look() {
    let decided = || {
        let world = World::new();
        agreed(world.spec.as_ref().unwrap(), world.roster.as_ref().unwrap()).unwrap()
    };
    type Change = fn(&mut FluxNodeSpec, &mut Roster);
    let cases: [(&str, bool, Change); 8] = [
        ("nothing has changed", true, |_, _| {}),
        ("the epoch ends", false, |_, roster| roster.closing = Some(Closing::AtOnce)),
        ("others have joined", true, |spec, roster| (spec.revision, roster.revision) = (7, 7)),
        ("the rank is another node's", false, |_, roster| {
            roster.ranks.get_mut(&1).unwrap().member.as_mut().unwrap().uid = "another".into();
        }),
        ("the rank is free", false, |spec, roster| {
            spec.rank = None;
            roster.ranks.get_mut(&1).unwrap().member = None;
        }),
        ("the next epoch has begun", false, |spec, roster| (spec.epoch, roster.epoch) = (2, 2)),
        ("the node is to leave", false, |spec, _| spec.want = Want::Leave),
        ("another instance has the name", false, |spec, roster| {
            spec.instance_uid = Some("next".into());
            roster.instance_uid = "next".into();
        }),
    ];
    for (what, starts, change) in cases {
        let world = World::new();
        let (mut spec, mut roster) = (world.spec.clone().unwrap(), world.roster.clone().unwrap());
        change(&mut spec, &mut roster);
        let flux_node = Some(FluxNode::new("node2", spec));
        let fresh = FreshLook { flux_node, roster: Some(Arc::new(roster)) };
        let confirmed = confirm(&world.inputs(), &world.memory(), &decided(), fresh);
        assert_eq!(confirmed.is_ok(), starts, "{what}: {confirmed:?}");
    }
}

#[test]
fn what_the_planner_wants_of_another_machine_of_this_name_starts_nothing() {
    for (uid, died, starts) in [
        (Some("uid-node2"), None, true),
        (Some("another"), None, false),
        (None, None, false),
        // It was registered again, and the planner has not seen it yet.
        (Some("another"), Some("exit code 1"), true),
    ] {
        let mut world = World::new();
        world.node_uid = uid;
        world.host.died = died.map(str::to_owned);
        assert_eq!(matches!(world.decide(), Step::Start(_)), starts, "{uid:?} {died:?}");
    }
}

#[test]
fn a_machine_whose_name_another_has_stops_its_broker_and_starts_nothing() {
    let mut world = World::new();
    world.host.broker = Some(broker(3, 1));
    world.replaced = true;
    assert!(matches!(world.decide(), Step::Stop { .. }));
    world.host.broker = Some(broker(1, 1));
    assert!(matches!(world.decide(), Step::Wait(_)));
    world.host.broker = None;
    assert!(matches!(world.decide(), Step::Wait(_)));
}

#[test]
fn another_machine_has_the_name_if_a_broker_is_reported_for_a_node_this_host_never_was() {
    let reported = |uid: &str| Adopted {
        rank: 3,
        broker_name: "flux-spare-3".into(),
        node_uid: uid.to_owned(),
        instance_uid: Some("instance".into()),
        instance_id: "id".into(),
        epoch: 1,
        pid: 7,
        digest: "digest".into(),
    };
    for (configured_as, now, reported, expected) in [
        (Some("old"), "new", Some(reported("new")), true),
        // It was registered again, and its own broker runs.
        (Some("old"), "new", Some(reported("old")), false),
        (Some("old"), "new", None, false),
        // The one before has its rank still.
        (Some("new"), "new", Some(reported("new")), false),
        // It was installed anew under the same Node.
        (None, "new", Some(reported("new")), false),
    ] {
        let mut world = World::new();
        let spec = FluxNodeSpec { node_uid: Some(now.to_owned()), ..world.spec.take().unwrap() };
        if let Some(uid) = configured_as {
            let mut copy = world.roster.take().unwrap();
            let own = copy.ranks.get_mut(&1).unwrap();
            own.member.as_mut().unwrap().uid = uid.to_owned();
            if uid == "new" {
                let mut gone = own.clone();
                gone.member.as_mut().unwrap().uid = "old".to_owned();
                copy.ranks.insert(0, gone);
            }
            world.host.roster = serde_json::to_string(&copy).ok().map(Into::into);
        }
        let told = FluxNodeStatus { adopted: reported, ..FluxNodeStatus::default() };
        assert_eq!(
            names_another_machine(&world.host, &spec, Some(&told)),
            expected,
            "{configured_as:?} {:?}",
            told.adopted
        );
    }
}

#[test]
fn the_ladder_is_climbed_step_by_step() {
    let mut world = World::new();
    world.preflight = None;
    world.host.environments.clear();
    assert_eq!(world.decide(), Step::Preflight);
    world.preflight = inputs().preflight;
    assert_eq!(world.decide(), Step::Install { digest: "digest".into() });
    world.host.environments.push("digest".into());
    assert!(matches!(world.decide(), Step::Start(assignment) if assignment.rank == 1));
    world.host.broker = Some(broker(1, 1));
    assert_eq!(world.decide(), Step::Hold);
}

#[test]
fn packages_of_the_next_epoch_are_prepared_if_nothing_else_is_to_do() {
    let mut world = World::new();
    world.published = Some("newer");
    assert!(matches!(world.decide(), Step::Start(_)), "{:?}", world.decide());
    world.host.broker = Some(broker(1, 1));
    assert_eq!(world.decide(), Step::Hold, "the planner has not named a source yet");
    world.spec.as_mut().unwrap().fetch_from = Some(FetchFrom { digest: "newer".into(), ..FetchFrom::default() });
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
        let mut world =
            World { host: world.host.clone(), roster: world.roster.clone(), spec: world.spec.clone(), ..World::new() };
        world.published = Some("newer");
        change(&mut world);
        assert!(!matches!(world.decide(), Step::Prepare { .. }), "{what}");
    }
}

#[test]
fn packages_are_fetched_only_if_the_planner_names_a_source() {
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
            (spec.want, spec.fetch_from) = (want.clone(), fetch_from);
            world.holds = vec![holds.to_owned()];
            let expected = match installs {
                true => Step::Install { digest: "digest".into() },
                false => Step::Wait("waiting for another node to hold the packages".into()),
            };
            assert_eq!(world.decide(), expected);
        }
    }
}

fn of_the_lead() -> World {
    let mut world = World::new();
    let spec = world.spec.as_mut().unwrap();
    (spec.node_name, spec.rank, spec.node_uid) = ("node1".into(), Some(0), Some("uid-node1".into()));
    world.host.broker = Some(broker(0, 1));
    world
}

#[test]
fn a_lead_drains_before_it_reloads_and_undrains_after() {
    let mut world = of_the_lead();
    let drained = |ranks: &str| {
        let ours = Drained { ranks: ranks.parse().unwrap(), reason: "flux-distribute: c".to_owned(), since: 0.0 };
        Some(InstanceStatus { drained: vec![ours], ..InstanceStatus::default() })
    };
    world.spec.as_mut().unwrap().drain = [("c".to_owned(), "1".parse().unwrap())].into();
    world.told = drained("2");
    assert!(matches!(world.decide(), Step::Drain(change) if change.undrain.is_empty() && !change.drain.is_empty()));
    world.told = drained("1-2");
    assert!(matches!(world.decide(), Step::Reload(_)));
    world.applied = applied(1);
    assert!(matches!(world.decide(), Step::Drain(change) if change.undrain == "2".parse().unwrap()));
}

#[test]
fn a_lead_stops_excluding_a_rank_before_it_drains_it() {
    let mut world = of_the_lead();
    world.spec.as_mut().unwrap().drain = [("c".to_owned(), "1".parse().unwrap())].into();
    world.told = Some(InstanceStatus { excluded: "1".parse().unwrap(), ..InstanceStatus::default() });
    assert!(matches!(world.decide(), Step::Reload(_)));
    world.told = Some(InstanceStatus::default());
    assert!(matches!(world.decide(), Step::Drain(_)));
}

#[test]
fn a_lead_reloads_before_it_prepares_packages() {
    let mut world = of_the_lead();
    world.published = Some("newer");
    world.spec.as_mut().unwrap().fetch_from = Some(FetchFrom { digest: "newer".into(), ..FetchFrom::default() });
    assert!(matches!(world.decide(), Step::Reload(_)));
    world.applied = applied(1);
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
    assert!(matches!(world.decide(), Step::Stop { reason, .. } if reason.contains("rank 3 is no longer")));
    world.host.broker = Some(broker(1, 1));
    world.roster.as_mut().unwrap().epoch = 2;
    assert!(matches!(world.decide(), Step::Stop { .. }));
}

#[test]
fn a_broker_whose_rank_moved_is_stopped_although_its_node_has_none() {
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    let spec = world.spec.as_mut().unwrap();
    (spec.want, spec.rank) = (Want::Install, None);
    let entry = world.roster.as_mut().unwrap().ranks.get_mut(&1).unwrap();
    entry.member.as_mut().unwrap().node = "another".to_owned();
    match world.decide() {
        Step::Stop { reason, waits_for_jobs: false } => assert!(reason.contains("node another has it now"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stop_waits_for_jobs_unless_their_queue_is_lost() {
    for (begun_by_takeover, now, lost) in [(0, 2, false), (2, 2, true), (2, 3, true), (1, 3, false)] {
        let mut world = World::new();
        world.host.broker = Some(broker(1, 1));
        let roster = world.roster.as_mut().unwrap();
        (roster.jobs_lost_before, roster.epoch) = (begun_by_takeover, now);
        assert!(matches!(world.decide(), Step::Stop { waits_for_jobs, .. } if waits_for_jobs != lost));
    }
}

#[test]
fn a_fluxnode_that_claims_another_nodes_rank_has_no_effect() {
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
    let host = HostView { roster: Some(text.into()), ..HostView::default() };
    let of = |node: &str| FluxNodeSpec { node_name: node.into(), ..world.spec.clone().unwrap() };
    assert!(leads(&host, Some(&of("node1"))));
    assert!(!leads(&host, Some(&of("node2"))));
    assert!(!leads(&HostView::default(), Some(&of("node1"))));
}

#[test]
fn only_positive_evidence_removes() {
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
fn the_lead_loads_a_new_revision_live() {
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
    world.applied = applied(2);
    assert!(matches!(world.decide(), Step::Reload(assignment) if assignment.rank == 0));
    world.applied = applied(3);
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

#[test]
fn a_broker_is_restarted_only_if_the_lead_lost_it_and_is_unreachable() {
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    for (missed, unheard, restarts) in [(true, 149, false), (false, 9000, false), (true, 150, true)] {
        world.spec.as_mut().unwrap().lost_by_lead = missed;
        world.unheard = Duration::from_secs(unheard);
        assert_eq!(matches!(world.decide(), Step::Stop { .. }), restarts, "{missed} {unheard}");
    }
}

#[test]
fn a_follower_that_hangs_is_restarted_once_the_lead_has_given_it_up() {
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    for (missed, silent, restarts) in [(true, 149, false), (false, 9000, false), (true, 150, true)] {
        world.spec.as_mut().unwrap().lost_by_lead = missed;
        world.silent = Duration::from_secs(silent);
        let stops = matches!(world.decide(), Step::Stop { waits_for_jobs: true, .. });
        assert_eq!(stops, restarts, "{missed} {silent}");
    }
    let spec = world.spec.as_mut().unwrap();
    (spec.rank, spec.node_name, spec.node_uid) = (Some(0), "node1".into(), Some("uid-node1".into()));
    world.host.broker = Some(broker(0, 1));
    assert!(!matches!(world.decide(), Step::Stop { .. }), "nothing can give the lead up");
}

#[test]
fn a_broker_on_its_way_up_is_not_restarted_because_the_lead_does_not_answer() {
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    world.spec.as_mut().unwrap().lost_by_lead = true;
    (world.unheard, world.is_up) = (Duration::from_mins(150), false);
    assert!(!matches!(world.decide(), Step::Stop { .. }));
}

/// node1, rank 0, whose broker was shut down in epoch 1.
fn shut_down() -> World {
    let mut world = World::new();
    let spec = world.spec.as_mut().unwrap();
    (spec.rank, spec.node_name, spec.node_uid) = (Some(0), "node2".into(), Some("uid-node2".into()));
    let roster = world.roster.as_mut().unwrap();
    roster.ranks.get_mut(&0).unwrap().member = roster.ranks[&1].member.clone();
    world.host.roster = serde_json::to_string(&world.roster).ok().map(Into::into);
    world.host.shut_down = Some(EpochId { instance_id: "id".to_owned(), epoch: 1 });
    world.host.died = Some("the last line".into());
    world
}

#[test]
fn a_lead_that_an_administrator_has_shut_down_stays_down_until_the_next_epoch() {
    type Change = fn(&mut World);
    for (what, change, stays) in [
        ("shut down", (|_| {}) as Change, true),
        ("after a reboot", |world| world.host.died = None, true),
        ("without API", |world| world.instance = "", true),
        ("a signal or a crash", |world| world.host.shut_down = None, false),
        ("it was never online", |world| world.roster.as_mut().unwrap().established = false, false),
        (
            "without API, by files from before it was online",
            |world| {
                world.instance = "";
                world.roster.as_mut().unwrap().established = false;
            },
            true,
        ),
        (
            "the next epoch",
            |world| {
                world.roster.as_mut().unwrap().epoch = 2;
                world.spec.as_mut().unwrap().epoch = 2;
            },
            false,
        ),
        ("an epoch before was shut down", |world| world.host.shut_down.as_mut().unwrap().epoch = 0, false),
        ("another instance was", |world| world.host.shut_down.as_mut().unwrap().instance_id.push('x'), false),
        (
            "the files of the next epoch are written, and its broker has never run",
            |world| {
                let roster = world.roster.as_mut().unwrap();
                roster.epoch = 2;
                world.spec.as_mut().unwrap().epoch = 2;
                world.host.roster = serde_json::to_string(roster).ok().map(Into::into);
            },
            false,
        ),
    ] {
        let mut world = shut_down();
        change(&mut world);
        let step = world.decide();
        assert_eq!(!matches!(step, Step::Start(_)), stays, "{what}: {step:?}");
        if world.instance.is_empty() {
            continue;
        }
        assert_eq!(step == Step::Wait(SHUT_DOWN_MESSAGE.to_owned()), stays, "{what}: {step:?}");
    }
}

#[test]
fn an_agent_without_api_starts_a_dead_broker_from_the_hosts_files() {
    let mut world = World::new();
    world.instance = "";
    world.host.died = Some("killed".into());
    world.host.roster = serde_json::to_string(&world.roster).ok().map(Into::into);
    (world.spec, world.roster, world.preflight) = (None, None, None);
    assert_eq!(world.decide(), Step::Hold, "the API may answer yet");
    world.alone = true;
    assert_eq!(world.decide(), Step::Preflight);
    world.preflight = inputs().preflight;
    assert!(matches!(world.decide(), Step::Start(assignment) if assignment.rank == 1));
    world.host.state.as_mut().unwrap().instance_uid = "another".into();
    assert_eq!(world.decide(), Step::Hold, "the roster is of another instance");
    world.host.state.as_mut().unwrap().instance_uid = "instance".into();
    let mut heard = World::new().roster.unwrap();
    heard.ranks.get_mut(&1).unwrap().member = None;
    world.roster = Some(heard);
    assert_eq!(world.decide(), Step::Hold, "the newer roster gives the rank to no node");
}

#[test]
fn a_follower_that_is_stuck_on_its_way_out_is_stopped() {
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    world.leaving = Duration::from_secs(59);
    assert_eq!(world.decide(), Step::Hold);
    world.leaving = Duration::from_mins(1);
    assert!(matches!(world.decide(), Step::Stop { waits_for_jobs: false, .. }), "{:?}", world.decide());
}

#[test]
fn a_broker_is_stopped_for_leaving_only_where_fluxnode_and_roster_agree() {
    let leaving = |leave| Some(api::Draining { reason: "size is 1".into(), leave, since: 0 });
    type Change = fn(&mut FluxNodeSpec, &mut Roster);
    let cases: [(&str, Change, bool); 6] = [
        ("patched by hand", |_, _| (), false),
        ("drained only", |_, roster| roster.ranks.get_mut(&1).unwrap().drain.as_mut().unwrap().leave = false, false),
        ("leaves", |_, _| (), true),
        ("of another epoch", |spec, _| spec.epoch = 0, false),
        ("no member any more", |_, roster| roster.ranks.get_mut(&1).unwrap().member = None, true),
        ("another's rank in the FluxNode", |spec, _| spec.rank = Some(3), false),
    ];
    for (name, change, stops) in cases {
        let mut world = World::new();
        world.host.broker = Some(broker(1, 1));
        let (spec, roster) = (world.spec.as_mut().unwrap(), world.roster.as_mut().unwrap());
        spec.want = Want::Leave;
        roster.ranks.get_mut(&1).unwrap().drain = match name {
            "leaves" | "of another epoch" | "drained only" => leaving(true),
            _ => None,
        };
        change(spec, roster);
        let step = world.decide();
        assert_eq!(matches!(step, Step::Stop { waits_for_jobs: true, .. }), stops, "{name}: {step:?}");
        assert_eq!(matches!(step, Step::Wait(_)), !stops, "{name}: {step:?}");
    }
    let mut world = World::new();
    (world.spec.as_mut().unwrap().want, world.roster) = (Want::Leave, None);
    assert!(matches!(world.decide(), Step::Wait(reason) if reason.contains("agree")));
}

#[test]
fn nothing_starts_beside_a_broker_that_is_unknown_or_unreachable() {
    let mut world = World::new();
    world.host.unknown = Some("a broker runs".into());
    assert_eq!(world.decide(), Step::Wait("a broker runs".into()));
    world.instance = "over";
    assert_eq!(world.decide(), Step::Remove);
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    assert_eq!(world.decide(), Step::Hold);
    world.host.socket_lost = true;
    assert!(matches!(world.decide(), Step::Wait(words) if words.contains("kill 7")));
}

#[test]
fn the_end_of_an_epoch_does_not_stop_the_last_copy_of_the_queue() {
    for closing in [true, false] {
        let mut world = World::new();
        let spec = world.spec.as_mut().unwrap();
        (spec.node_name, spec.node_uid, spec.rank) = ("node1".into(), Some("uid-node1".into()), Some(0));
        world.applied = applied(1);
        world.host.broker = Some(broker(0, 1));
        world.host.broker.as_mut().unwrap().record.instance_id = world.roster.as_ref().unwrap().instance_id.clone();
        world.roster.as_mut().unwrap().closing = closing.then_some(Closing::WhenIdle);
        let is_as_ever = |step: &Step| if closing { matches!(step, Step::Close(_)) } else { *step == Step::Hold };
        let step = world.decide();
        assert!(is_as_ever(&step), "{step:?}");
        world.host.statedir_lost = true;
        assert!(matches!(world.decide(), Step::Wait(words) if words.contains("flux-distribute dump")));
    }
}

#[test]
fn a_node_holds_its_own_rank_and_not_that_of_the_machine_it_replaced() {
    let mut copy = roster(4, &[("node1", 2), ("node2", 2), ("node3", 2)]);
    let new = model::fixture::member("node2", 9);
    copy.ranks.get_mut(&2).unwrap().member = Some(Member { uid: "uid-new".into(), ..new });
    let rank = |copy: &Roster| held_by(copy, "node2").map(|held| (held.rank, held.node_uid));
    copy.ranks.get_mut(&1).unwrap().member.as_mut().unwrap().gone_since = Some(1);
    assert_eq!(rank(&copy), Some((2, "uid-new".to_owned())));
    copy.ranks.get_mut(&2).unwrap().vacate();
    assert_eq!(rank(&copy), Some((1, "uid-node2".to_owned())));
}

#[test]
fn a_lead_that_was_never_online_gives_way_once_its_broker_has_ended() {
    type Change = fn(&mut World);
    let changes: [(&str, Change, bool); 7] = [
        ("its broker of this attempt has ended", |_| {}, true),
        ("of the attempt before", |world| world.host.died_instance_id = Some("another".into()), false),
        ("no broker has ended", |world| (world.host.died, world.host.died_instance_id) = (None, None), false),
        ("it was online", |world| world.was_up = true, false),
        ("the instance was online", |world| world.roster.as_mut().unwrap().established = true, false),
        ("an administrator has named it", |world| world.roster.as_mut().unwrap().jobs_lost_before = 1, false),
        (
            "it does not lead",
            |world| {
                let roster = world.roster.as_mut().unwrap();
                let (lead, other) = (roster.ranks[&0].clone(), roster.ranks[&1].clone());
                roster.ranks.extend([(0, other), (1, lead)]);
                world.spec.as_mut().unwrap().rank = Some(1);
            },
            false,
        ),
    ];
    for (what, change, gives_way) in changes {
        let mut world = World::new();
        let roster = world.roster.as_mut().unwrap();
        roster.established = false;
        let (lead, other) = (roster.ranks[&0].clone(), roster.ranks[&1].clone());
        roster.ranks.extend([(0, other), (1, lead)]);
        world.spec.as_mut().unwrap().rank = Some(0);
        (world.host.died, world.host.died_instance_id) = (Some("no".into()), Some("id".into()));
        change(&mut world);
        match world.decide() {
            Step::GiveWay(why) => assert!(gives_way && why == "no", "{what}"),
            step => assert!(!gives_way && matches!(step, Step::Start(_)), "{what}: {step:?}"),
        }
    }
}

#[test]
fn a_decision_holds_step_report_and_pause() {
    let mut world = World::new();
    // A new agent says nothing about a broker to which it has not connected yet.
    world.alone = true;
    let memory = Memory::default();
    let first = decide(&world.inputs(), &memory);
    assert!(matches!(first.step, Step::Start(_)));
    assert_eq!((first.rest, first.readiness), (None, Some(false)), "a start begins at once");
    assert_eq!(first.status.map(|status| status.phase), Some(NodePhase::Starting));

    let mut failed = Memory::default();
    let trouble = Trouble { words: "port 8050 is taken".to_owned(), waiting: false, lasting: false, by_others: false };
    let inputs = world.inputs();
    failed.attempts.failed(&first.step, inputs.generation, trouble, inputs.at, 0.0);
    let second = decide(&inputs, &failed);
    assert_eq!(second.rest, Some(Duration::from_secs(1)), "a step that failed just now pauses");
    assert_eq!(second.status.and_then(|status| status.message).as_deref(), Some("port 8050 is taken"));

    world.host.broker = Some(broker(1, 1));
    let held = decide(&world.inputs(), &memory);
    assert_eq!((held.step, held.readiness, held.rest), (Step::Hold, Some(true), Some(super::CALM)));

    world.is_up = false;
    let coming_up = decide(&world.inputs(), &memory);
    assert_eq!((coming_up.readiness, coming_up.rest), (Some(false), Some(super::SOON)));

    world.replaced = true;
    let replaced = decide(&world.inputs(), &memory);
    assert_eq!(
        (replaced.status, replaced.readiness),
        (None, Some(false)),
        "another machine's FluxNode is not ours to write"
    );
}

#[test]
fn an_agent_rests_for_thirty_seconds_only_if_it_will_hear_what_to_do() {
    type Change = fn(&mut World);
    for (what, change, expected) in [
        ("a follower's broker is online", (|_| {}) as Change, super::CALM),
        ("the broker comes up", |world| world.is_up = false, super::SOON),
        ("the broker does not answer", |world| world.silent = Duration::from_secs(1), super::RESYNC),
        ("the lead does not answer the broker", |world| world.unheard = Duration::from_secs(1), super::RESYNC),
        ("the broker leaves", |world| world.leaving = Duration::from_secs(1), super::RESYNC),
        ("the host has lost the broker's socket", |world| world.host.socket_lost = true, super::RESYNC),
        ("another GPU was observed once", |world| world.host.resources.gpus += 1, super::RESYNC),
        ("the planner has said nothing yet", before_the_planner, super::CALM),
        ("there is no FluxNode", |world| (world.host, world.spec) = (HostView::default(), None), super::RESYNC),
        (
            "a broker of an unknown instance runs",
            |world| {
                before_the_planner(world);
                world.host.unknown = Some("a broker runs".into());
            },
            super::RESYNC,
        ),
        (
            "the planner has no use for the node",
            |world| {
                world.host.broker = None;
                world.spec.as_mut().unwrap().want = Want::Nothing;
            },
            super::RESYNC,
        ),
        (
            "the lead's broker is online",
            |world| {
                world.host.broker = Some(broker(0, 1));
                let spec = world.spec.as_mut().unwrap();
                (spec.node_name, spec.rank, spec.node_uid) = ("node1".into(), Some(0), Some("uid-node1".into()));
                (world.node_uid, world.applied) = (Some("uid-node1"), applied(1));
            },
            super::RESYNC,
        ),
        ("the API server has not answered yet", |world| (world.instance, world.spec) = ("", None), super::RESYNC),
    ] {
        let mut world = World::new();
        world.host.broker = Some(broker(1, 1));
        change(&mut world);
        assert_eq!(decide(&world.inputs(), &Memory::default()).rest, Some(expected), "{what}");
    }
    let mut world = World::new();
    world.host.broker = Some(broker(1, 1));
    for (what, inputs, expected) in [
        ("a port is taken", NodeInputs { port_problems: vec!["8052".into()], ..world.inputs() }, super::RESYNC),
        ("the roster could not be read", NodeInputs { is_behind: true, ..world.inputs() }, super::RESYNC),
        (
            "damage stays reported for a day",
            NodeInputs { damage: Some("libflux".into()), ..world.inputs() },
            super::CALM,
        ),
    ] {
        assert_eq!(decide(&inputs, &Memory::default()).rest, Some(expected), "{what}");
    }
    let expecting = NodeInputs { packages_expected: true, is_behind: true, ..world.inputs() };
    let rest = decide(&expecting, &Memory::default()).rest;
    assert_eq!(rest, Some(super::SOON), "the package sets can probably be read soon");
}

/// No broker runs, and the planner has not written the FluxNode's spec.
fn before_the_planner(world: &mut World) {
    world.host = HostView { resources: world.host.resources, ..HostView::default() };
    let own = world.spec.as_ref().unwrap().node_name.clone();
    world.spec = Some(FluxNodeSpec { node_name: own, ..FluxNodeSpec::default() });
}
