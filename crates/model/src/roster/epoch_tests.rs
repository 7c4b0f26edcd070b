use k8s_openapi::api::core::v1::Taint;

use super::{
    Decision, decide,
    epoch::{Restart, restart},
    tests::World,
};
use crate::{
    broker_toml::render,
    members::{Members, Planned},
    status::status,
};
use api::{Closing, InstancePhase, NodePhase, OnFailure, ROSTER_FORMAT, Roster, Want};

/// Three members, online and idle.
pub(super) fn idle() -> World {
    let mut world = World::up(3);
    jobs_on(&mut world, Some(""));
    world
}

pub(super) fn jobs_on(world: &mut World, ranks: Option<&str>) {
    world.reports.get_mut("node1").unwrap().allocated = ranks.map(|ranks| ranks.parse().unwrap());
}

/// The lead's agent has stopped its broker; the others end with it.
pub(super) fn close(world: &mut World) {
    let epoch = world.roster.as_ref().unwrap().epoch;
    world.reports.values_mut().for_each(|report| report.adopted = None);
    world.reports.get_mut("node1").unwrap().closed_epoch = Some(epoch);
}

pub(super) fn waits_for(world: &World) -> String {
    match world.restart() {
        Restart::Waits { reason, .. } | Restart::Blocked { reason, .. } | Restart::Refused { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_change_that_needs_a_restart_waits_until_the_instance_is_idle() {
    let mut world = idle();
    world.spec.broker.port = Some(9000);
    for (jobs, reason) in [(Some("0-2"), "the jobs on ranks 0-2 to end"), (None, "the lead to report whether jobs run")]
    {
        jobs_on(&mut world, jobs);
        assert_eq!(world.settle(), Decision::Keep);
        assert_eq!(waits_for(&world), reason);
    }
    jobs_on(&mut world, Some(""));
    world.settle();
    let roster = world.roster.clone().unwrap();
    assert_eq!((roster.epoch, roster.closing), (1, Some(Closing::WhenIdle)));
    assert_eq!(roster.ranks[&0].revision, roster.revision, "the lead must notice the change");

    // No epoch begins before the lead's agent reports that its broker has ended.
    assert_eq!(world.settle(), Decision::Keep);
    world.reports.get_mut("node1").unwrap().closed_epoch = Some(1);
    assert_eq!(world.settle(), Decision::Keep);
    close(&mut world);
    world.settle();
    let next = world.roster.clone().unwrap();
    assert_eq!((next.epoch, next.closing, next.settings.port), (2, None, 9000));
    assert_eq!(next.previous, Some(roster.settings));
    assert_eq!(next.instance_id, roster.instance_id);
    assert!(next.established);
    assert!(next.ranks.keys().eq([0, 1, 2].iter()));

    world.online("node1");
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().previous, None);
}

#[test]
fn an_epoch_ends_only_once_every_online_member_has_the_packages() {
    let mut world = idle();
    world.digest = "new";
    assert_eq!(waits_for(&world), "the packages to be installed on the lead");
    world.reports.get_mut("node1").unwrap().digest = Some("new".to_owned());
    assert_eq!(waits_for(&world), "the packages to be installed on node node2");
    // It doesn't wait for a member that is away.
    world.reports.get_mut("node2").unwrap().phase = NodePhase::Offline;
    world.reports.get_mut("node3").unwrap().digest = Some("new".to_owned());
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::WhenIdle));
}

#[test]
fn a_request_or_the_deadline_ends_an_epoch_even_if_jobs_run() {
    let mut world = idle();
    jobs_on(&mut world, Some("0"));
    world.restart_word = Some("2026-01-01");
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::AtOnce));
    close(&mut world);
    world.settle();
    let roster = world.roster.clone().unwrap();
    assert_eq!((roster.epoch, roster.restart.as_deref()), (2, Some("2026-01-01")));
    // The same request causes only one restart.
    (1..=3).for_each(|number| world.online(&format!("node{number}")));
    world.settle();
    assert_eq!(world.restart(), Restart::None);

    jobs_on(&mut world, Some("0"));
    world.spec.broker.port = Some(9000);
    world.spec.upgrade.deadline = Some("1h".to_owned());
    world.status = status(&world.seen(), 1, world.planned().as_ref(), None);
    world.now += 3599;
    assert_eq!(world.settle(), Decision::Keep);
    world.now += 1;
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::AtOnce));
}

#[test]
fn in_the_next_epoch_spares_get_their_nodes_names_and_lost_members_are_dropped() {
    let mut world = idle();
    world.add("node4", 4);
    world.passed("node4", 8);
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().ranks[&3].broker_name, "flux-spare-3");
    world.nodes.retain(|node| node.name != "node2");
    world.settle();
    world.now += 601;
    world.settle();
    world.passed("node3", 1);
    world.settle();
    world.now += 600;
    world.spec.broker.port = Some(9000);
    world.settle();
    close(&mut world);
    world.settle();
    let roster = world.roster.clone().unwrap();
    let members: Vec<_> = roster.ranks.iter().map(|(rank, entry)| (*rank, entry.broker_name.as_str())).collect();
    assert_eq!(members, [(0, "node1"), (2, "node3"), (3, "node4")]);
    assert_eq!(roster.ranks[&2].resources.clone().unwrap().cores, 1, "resources may shrink only between epochs");
}

/// Three members under their own names, and node4 under a spare's.
fn with_a_member_under_a_spares_name() -> World {
    let mut world = idle();
    world.add("node4", 4);
    world.passed("node4", 2);
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().ranks[&3].broker_name, "flux-spare-3");
    world
}

fn begin_an_epoch(world: &mut World, port: u16) -> Roster {
    world.spec.broker.port = Some(port);
    world.settle();
    close(world);
    world.settle();
    (1..=world.nodes.len()).for_each(|number| world.online(&format!("node{number}")));
    world.settle();
    jobs_on(world, Some(""));
    world.roster.clone().unwrap()
}

#[test]
fn a_node_name_that_pending_jobs_require_stays_a_property_in_later_epochs() {
    let mut world = with_a_member_under_a_spares_name();
    // An older version began the first epoch.
    world.roster.as_mut().unwrap().format = 1;
    let has_property = |roster: &Roster| render(roster).unwrap().contains("properties = [\"node4\"]");
    for (epoch, port) in [(2, 9000), (3, 9001)] {
        let roster = begin_an_epoch(&mut world, port);
        assert_eq!((roster.epoch, roster.ranks[&3].broker_name.as_str()), (epoch, "node4"));
        assert!(has_property(&roster), "epoch {epoch}");
        assert_eq!(render(&roster).unwrap().matches("properties").count(), 1, "no other rank has one");
    }
    // The next member of the rank has another name.
    world.nodes.pop();
    world.settle();
    world.now += 601;
    world.settle();
    assert!(!has_property(world.roster.as_ref().unwrap()));
    let entry = &world.roster.as_ref().unwrap().ranks[&0];
    assert!(!serde_json::to_string(entry).unwrap().contains("Property"), "older versions must read the same as before");
}

#[test]
fn an_epoch_in_an_old_format_stays_as_it_is_and_ends_once_it_is_idle() {
    let mut world = with_a_member_under_a_spares_name();
    assert_eq!(world.restart(), Restart::None);
    world.roster.as_mut().unwrap().format = 1;
    jobs_on(&mut world, Some("0"));
    let roster = world.roster.clone().unwrap();
    // The new format is no reason to end jobs, however long they run.
    world.spec.upgrade.deadline = Some("1s".to_owned());
    world.status = status(&world.seen(), 1, Some(&Planned::observe(&world.seen(), &roster)), None);
    world.now += 3600;
    let Restart::Waits { difference, reason } =
        restart(&world.seen(), &Members::observe(&world.seen(), &roster), &roster)
    else {
        panic!()
    };
    assert!(difference.contains("own names") && reason.contains("jobs"), "{difference} {reason}");
    assert!(!render(&roster).unwrap().contains("match-format"), "its running jobs have the other format");
    jobs_on(&mut world, Some(""));
    world.settle();
    close(&mut world);
    world.settle();
    let next = world.roster.as_ref().unwrap();
    assert_eq!((next.epoch, next.format), (2, ROSTER_FORMAT));
    assert!(!render(next).unwrap().contains("flux-spare-3"));
}

#[test]
fn no_epoch_begins_in_a_format_that_an_agent_can_not_read() {
    let mut world = idle();
    world.roster.as_mut().unwrap().format = 1;
    let report = |world: &mut World, node: &str, roster_format| {
        let report = world.reports.get_mut(node).unwrap();
        (report.agent_version, report.roster_format) = (Some("0.1.0".to_owned()), roster_format);
    };
    // An upgrade of the agents is in progress.
    report(&mut world, "node1", ROSTER_FORMAT);
    report(&mut world, "node2", 0);
    assert_eq!(world.restart(), Restart::None);
    assert_eq!(begin_an_epoch(&mut world, 9000).format, 1);
    report(&mut world, "node2", ROSTER_FORMAT);
    assert_eq!(begin_an_epoch(&mut world, 9001).format, ROSTER_FORMAT);
    report(&mut world, "node2", 0);
    assert_eq!(begin_an_epoch(&mut world, 9002).format, ROSTER_FORMAT, "it must not go back to an older format");
}

#[test]
fn a_member_that_an_administrator_has_drained_keeps_its_broker_name() {
    let mut world = with_a_member_under_a_spares_name();
    world.reports.get_mut("node1").unwrap().drained_by_others = "0,3".parse().unwrap();
    let roster = begin_an_epoch(&mut world, 9000);
    let names: Vec<_> = roster.ranks.values().map(|entry| entry.broker_name.as_str()).collect();
    assert_eq!(names, ["node1", "node2", "node3", "flux-spare-3"]);
    assert_eq!(roster.ranks[&3].reserved_for, None);
    world.reports.get_mut("node1").unwrap().drained_by_others = "0".parse().unwrap();
    assert_eq!(begin_an_epoch(&mut world, 9001).ranks[&3].broker_name, "node4");
}

#[test]
fn a_member_that_the_planner_drains_keeps_its_broker_name() {
    let mut world = with_a_member_under_a_spares_name();
    world.nodes[3].cordoned = true;
    assert_eq!(begin_an_epoch(&mut world, 9000).ranks[&3].broker_name, "flux-spare-3");
    world.nodes[3].cordoned = false;
    assert_eq!(begin_an_epoch(&mut world, 9001).ranks[&3].broker_name, "node4");
}

#[test]
fn a_member_that_somebody_has_drained_says_so() {
    let mut world = World::up(3);
    world.reports.get_mut("node1").unwrap().drained_by_others = "1".parse().unwrap();
    let reason = |name: &str| world.projected(name).reason;
    assert!(reason("node2").unwrap().contains("somebody has drained it in Flux"));
    assert_eq!((reason("node1"), reason("node3")), (None, None));
}

#[test]
fn a_cordoned_member_is_drained_in_the_first_roster_of_an_epoch() {
    let mut world = idle();
    world.nodes[2].cordoned = true;
    world.spec.broker.port = Some(9000);
    world.settle();
    close(&mut world);
    let Decision::Write(next) = decide(&world.seen()) else { panic!("no epoch") };
    assert_eq!(next.epoch, 2);
    world.roster = Some(*next);
    let drained: Vec<_> = world.projected("node1").drain.into_values().collect();
    assert_eq!(drained, ["2".parse().unwrap()], "if the planner dies here, the member must stay drained");
}

#[test]
fn cordoned_members_count_for_the_default_max_size() {
    let mut world = World::up(70);
    jobs_on(&mut world, Some(""));
    world.nodes.iter_mut().for_each(|node| node.cordoned = true);
    world.spec.broker.port = Some(9000);
    world.settle();
    close(&mut world);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!((roster.epoch, roster.settings.max_size, roster.members().count()), (2, 140, 70));
}

#[test]
fn with_a_smaller_size_the_highest_ranks_leave_once_they_are_drained_and_idle() {
    let mut world = idle();
    world.spec.size = Some(2);
    world.settle();
    let entry = world.roster.as_ref().unwrap().ranks[&2].clone();
    assert!(entry.drain.unwrap().leave);
    assert_eq!(world.wants("node3"), Want::Run);
    let lead = world.reports.get_mut("node1").unwrap();
    (lead.drained, lead.allocated) = (Some("2".parse().unwrap()), Some("2".parse().unwrap()));
    assert_eq!(world.wants("node3"), Want::Run, "a job runs there");
    jobs_on(&mut world, Some("0"));
    assert_eq!(world.wants("node3"), Want::Leave);
    world.settle();
    assert_eq!(world.rank("node3"), Some(2), "its broker runs");
    world.reports.get_mut("node3").unwrap().adopted = None;
    world.settle();
    assert_eq!(world.rank("node3"), Some(2), "its broker may be between two starts");
    world.reports.get_mut("node3").unwrap().leave_completed = true;
    world.settle();
    assert_eq!((world.rank("node3"), world.rank("node2"), world.rank("node1")), (None, Some(1), Some(0)));
    assert_eq!(world.wants("node3"), Want::Install);
    // With the old size it gets its rank back.
    world.spec.size = None;
    world.settle();
    assert_eq!(world.rank("node3"), Some(2));
    assert_eq!(world.roster.as_ref().unwrap().ranks[&2].drain, None);
}

#[test]
fn a_leaving_member_is_stopped_when_the_drain_timeout_has_passed() {
    let mut world = idle();
    world.spec.size = Some(1);
    world.spec.drain.timeout = Some("1m".to_owned());
    world.settle();
    jobs_on(&mut world, Some("1-2"));
    world.now += 59;
    assert_eq!(world.wants("node2"), Want::Run);
    world.now += 1;
    assert_eq!((world.wants("node2"), world.wants("node1")), (Want::Leave, Want::Run));
}

/// Until its new broker joins, Flux may take the one of the boot before for one that lives, and start jobs there.
#[test]
fn a_node_that_is_uncordoned_after_a_reboot_stays_drained_until_its_new_broker_is_online() {
    let mut world = idle();
    let drained = |world: &mut World, phase: NodePhase, boot: &str| {
        let report = world.reports.get_mut("node2").unwrap();
        report.phase = phase;
        report.facts.as_mut().unwrap().boot_id = boot.to_owned();
        world.settle();
        world.roster.as_ref().unwrap().ranks[&1].drain.clone().map(|drain| drain.reason)
    };
    let because = |reason: &str| Some(reason.to_owned());
    world.nodes[1].cordoned = true;
    world.nodes[1].boot_id = "new".to_owned();
    assert_eq!(drained(&mut world, NodePhase::Draining, "old"), because("the node is cordoned"));
    world.nodes[1].cordoned = false;
    let is_old = because("its agent has not reported since the node booted");
    assert_eq!(drained(&mut world, NodePhase::Online, "old"), is_old);
    // Kubelet may report its new boot after the lead has lost the old broker.
    world.nodes[1].boot_id = "old".to_owned();
    world.reports.get_mut("node1").unwrap().offline = vec![1];
    assert_eq!(drained(&mut world, NodePhase::Online, "old"), because("its broker is not online yet"));
    world.reports.get_mut("node1").unwrap().offline.clear();
    world.nodes[1].boot_id = "new".to_owned();
    assert_eq!(drained(&mut world, NodePhase::Starting, "new"), because("its broker is not online yet"));
    assert_eq!(drained(&mut world, NodePhase::Online, "new"), None);
    assert_eq!(drained(&mut world, NodePhase::Starting, "new"), None, "no node is drained because it is down");
}

#[test]
fn a_cordon_drains_and_an_uncordon_undrains_but_node_conditions_do_neither() {
    let mut world = idle();
    let drained = |world: &mut World| {
        world.settle();
        let roster = world.roster.clone().unwrap();
        roster.ranks.into_iter().filter_map(|(rank, entry)| Some((rank, entry.drain?.reason))).collect::<Vec<_>>()
    };
    world.nodes[1].ready = false;
    world.nodes[1].taints =
        vec![Taint { key: "node.kubernetes.io/not-ready".into(), effect: "NoExecute".into(), ..Taint::default() }];
    assert_eq!(drained(&mut world), []);
    for key in ["ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"] {
        let taint = |key: &str| Taint { key: key.into(), effect: "NoSchedule".into(), ..Taint::default() };
        world.nodes[2].taints = vec![taint("example.org/maintenance"), taint(key)];
        assert_eq!(drained(&mut world), [(2, "an autoscaler is about to delete the node".to_owned())], "{key}");
        world.nodes[2].taints.pop();
        assert_eq!(drained(&mut world), [], "the autoscaler keeps the node");
    }
    world.nodes[0].cordoned = true;
    assert_eq!(drained(&mut world), [(0, "the node is cordoned".to_owned())]);
    assert_eq!(world.wants("node1"), Want::Run);
    world.nodes[0].cordoned = false;
    world.nodes[2].deleting = true;
    assert_eq!(drained(&mut world), [(2, "the node is being deleted".to_owned())]);
    assert_eq!(world.projected("node3").drain_reason.as_deref(), Some("the node is being deleted"));
    assert_eq!(world.projected("node2").drain_reason, None);
    assert_eq!((world.wants("node3"), world.rank("node3")), (Want::Run, Some(2)));
}

#[test]
fn fewer_ranks_than_members_keep_the_lowest() {
    let mut world = idle();
    world.spec.max_size = Some(2);
    world.settle();
    close(&mut world);
    world.settle();
    assert!(world.roster.as_ref().unwrap().ranks.keys().eq([0, 1].iter()));
}

#[test]
fn if_the_lead_does_not_come_up_the_instance_goes_back_once() {
    let fail = |on_failure| {
        let mut world = idle();
        world.spec.upgrade.on_failure = on_failure;
        world.spec.broker.config = Some("[content]\nwrong = 1".to_owned());
        world.settle();
        close(&mut world);
        world.settle();
        let lead = world.reports.get_mut("node1").unwrap();
        (lead.phase, lead.message) = (NodePhase::Failed, Some("exit code 1".to_owned()));
        lead.start_failing_epoch = Some(2);
        world.settle();
        world
    };
    let mut world = fail(OnFailure::GoBack);
    let roster = world.roster.clone().unwrap();
    assert_eq!((roster.epoch, roster.settings.config.as_str(), roster.previous), (3, "", None));
    assert_eq!(roster.refused.unwrap().reason, "exit code 1");
    (1..=3).for_each(|number| world.online(&format!("node{number}")));
    jobs_on(&mut world, Some(""));
    assert_eq!(world.settle(), Decision::Keep);
    assert!(waits_for(&world).contains("exit code 1"), "{}", waits_for(&world));
    world.spec.broker.config = None;
    assert_eq!(world.restart(), Restart::None);

    assert_eq!(fail(OnFailure::Stay).roster.unwrap().epoch, 2);
}

#[test]
fn a_member_that_the_lead_reports_offline_is_marked_as_missed() {
    let mut world = idle();
    assert!(!world.projected("node2").lost_by_lead);
    world.reports.get_mut("node1").unwrap().offline = vec![1];
    assert!(world.projected("node2").lost_by_lead && !world.projected("node3").lost_by_lead);
    // Its own agent reports it too.
    let report = world.reports.get_mut("node2").unwrap();
    (report.phase, report.adopted) = (NodePhase::Offline, None);
    assert!(!world.projected("node2").lost_by_lead);
}

#[test]
fn a_job_that_starts_before_the_epoch_is_closed_keeps_it_open() {
    let mut world = idle();
    world.spec.broker.port = Some(9000);
    world.settle();
    assert!(world.roster.as_ref().unwrap().closing.is_some());
    jobs_on(&mut world, Some("1"));
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    assert_eq!(roster.closing, None);
    assert_eq!(roster.ranks[&0].revision, roster.revision, "the lead must notice the change");
    assert_eq!(waits_for(&world), "the jobs on ranks 1 to end");
    jobs_on(&mut world, Some(""));
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::WhenIdle));
}

#[test]
fn a_lead_whose_machine_is_off_is_not_online_although_its_last_report_says_so() {
    let mut world = idle();
    let phase = |world: &World| status(&world.seen(), 1, world.planned().as_ref(), None).phase;
    world.nodes[0].ready = false;
    assert_eq!(phase(&world), InstancePhase::Running, "a Node that is not Ready alone proves nothing");
    world.reports.get_mut("node2").unwrap().lead_unreachable = true;
    assert_eq!(phase(&world), InstancePhase::Degraded);
    let message = status(&world.seen(), 1, world.planned().as_ref(), None).message.unwrap();
    assert!(message.contains("node1 (rank 0, started): its Node is not Ready"), "{message}");
    world.nodes[0].ready = true;
    assert_eq!(phase(&world), InstancePhase::Running);
}

#[test]
fn a_node_that_was_created_again_has_its_name_alone_in_the_next_epoch() {
    let mut world = idle();
    world.nodes[1].uid = "uid-other".into();
    world.reports.get_mut("node2").unwrap().adopted = None;
    world.settle();
    world.online("node2");
    world.spec.broker.port = Some(9000);
    world.settle();
    close(&mut world);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    let names: Vec<_> = roster.ranks.iter().map(|(rank, entry)| (*rank, entry.broker_name.as_str())).collect();
    assert_eq!((roster.epoch, names), (2, vec![(0, "node1"), (2, "node3"), (3, "node2")]));
}

#[test]
fn rank_0_stays_with_the_queue_if_its_node_is_created_again_meanwhile() {
    let mut world = idle();
    world.spec.size = Some(3);
    world.add("node4", 4);
    world.passed("node4", 2);
    world.settle();
    assert_eq!(world.rank("node4"), None);
    world.spec.broker.port = Some(9000);
    world.settle();
    close(&mut world);
    (world.nodes[0].uid, world.nodes[0].created) = ("uid-again".into(), 100);
    world.settle();
    let roster = world.roster.as_ref().unwrap();
    let places: Vec<_> = roster.ranks.iter().map(|(rank, entry)| (*rank, entry.broker_name.as_str())).collect();
    assert_eq!((roster.epoch, places), (2, vec![(0, "node1"), (1, "node2"), (2, "node3")]));
    let (lead, entry) = (roster.lead().unwrap(), &roster.ranks[&0]);
    assert_eq!((lead.uid.as_str(), entry.reserved_for.as_deref()), ("uid-again", Some("uid-again")));
}

#[test]
fn a_node_that_was_deleted_stays_drained() {
    let mut world = idle();
    world.nodes[1].cordoned = true;
    world.settle();
    let drain = world.roster.as_ref().unwrap().ranks[&1].drain.clone();
    assert!(drain.is_some());
    world.nodes.retain(|node| node.name != "node2");
    world.settle();
    assert_eq!(world.roster.as_ref().unwrap().ranks[&1].drain, drain);
}

#[test]
fn an_old_report_about_another_epoch_causes_no_restart() {
    let mut world = idle();
    let report = world.reports.get_mut("node3").unwrap();
    report.restart_pending = Some("another command line".to_owned());
    report.adopted.as_mut().unwrap().epoch = 0;
    assert_eq!(world.restart(), Restart::None);
    world.reports.get_mut("node3").unwrap().adopted.as_mut().unwrap().epoch = 1;
    assert_ne!(world.restart(), Restart::None);
}

/// The lead's agent reports that an administrator has shut the instance down.
fn shut_down() -> World {
    let mut world = idle();
    world.reports.values_mut().for_each(|report| (report.phase, report.adopted) = (NodePhase::Waiting, None));
    world.reports.get_mut("node1").unwrap().shut_down = Some(1);
    world
}

#[test]
fn an_instance_that_was_shut_down_stays_down_until_an_administrator_restarts_it() {
    type Edit = fn(&mut World);
    for (what, change) in [
        ("nothing", (|_| {}) as Edit),
        ("a change of the spec", |world| world.spec.broker.port = Some(9000)),
        ("another package set", |world| world.digest = "other"),
        ("a lead that would not come up", |world| {
            world.reports.get_mut("node1").unwrap().start_failing_epoch = Some(1);
        }),
    ] {
        let mut world = shut_down();
        change(&mut world);
        assert_eq!(world.settle(), Decision::Keep, "{what}");
        let roster = world.roster.clone().unwrap();
        assert_eq!((roster.epoch, roster.closing), (1, None), "{what}");
        let instance_status = status(&world.seen(), 1, Some(&Planned::observe(&world.seen(), &roster)), None);
        let line = instance_status.message.clone().unwrap();
        assert!(line.contains("shut the instance down") && line.contains("annotate fxi flux"), "{what}: {line}");
        assert_eq!(instance_status.holding("Degraded").unwrap().reason, "ShutDown", "{what}");
        assert_eq!([1, 2, 3].map(|n| world.wants(&format!("node{n}"))), [Want::Run, Want::Install, Want::Install]);
        assert!(world.projected("node2").reason.unwrap().contains("shut the instance down"));

        world.restart_word = Some("go on");
        world.settle();
        assert_eq!(world.roster.as_ref().unwrap().closing, Some(Closing::AtOnce), "{what}");
        close(&mut world);
        world.settle();
        assert_eq!(world.roster.as_ref().unwrap().epoch, 2, "{what}");
        let instance_status = status(&world.seen(), 1, world.planned().as_ref(), None);
        assert!(instance_status.holding("Degraded").is_none_or(|degraded| degraded.reason != "ShutDown"), "{what}");
    }
}

#[test]
fn a_follower_that_hangs_is_given_up_if_the_lead_has_lost_it_or_it_is_idle() {
    type Edit = fn(&mut World);
    for (what, change, missed) in [
        ("the lead reports no problem", (|_| {}) as Edit, false),
        ("the lead has lost it", |world| world.reports.get_mut("node1").unwrap().offline = vec![1], true),
        ("it is slow, and idle", |world| world.reports.get_mut("node1").unwrap().torpid = "1".parse().unwrap(), true),
        (
            "it is slow, and has a job",
            |world| {
                jobs_on(world, Some("1"));
                world.reports.get_mut("node1").unwrap().torpid = "1".parse().unwrap();
            },
            false,
        ),
        (
            "it is slow, and its jobs are unknown",
            |world| {
                jobs_on(world, None);
                world.reports.get_mut("node1").unwrap().torpid = "1".parse().unwrap();
            },
            false,
        ),
        (
            "it is slow, but answers its agent",
            |world| {
                world.reports.get_mut("node2").unwrap().phase = NodePhase::Online;
                world.reports.get_mut("node1").unwrap().torpid = "1".parse().unwrap();
            },
            false,
        ),
    ] {
        let mut world = idle();
        world.reports.get_mut("node2").unwrap().phase = NodePhase::Offline;
        change(&mut world);
        assert_eq!(world.projected("node2").lost_by_lead, missed, "{what}");
    }
}

#[test]
fn an_instance_that_was_online_keeps_its_user() {
    let flux = || Some("flux".to_owned());
    let run_as = |world: &World| world.roster.as_ref().unwrap().settings.run_as.clone();
    // Whether its status says which user that is or, as after an upgrade, only its roster does.
    let mut world = idle();
    world.spec.broker.run_as = flux();
    assert_eq!(world.settle(), Decision::Keep, "no epoch begins for it");
    let next = begin_an_epoch(&mut world, 9000);
    assert_eq!((next.epoch, next.settings.run_as.as_str()), (2, "root"), "an epoch that begins for another reason");
    world.status = status(&world.seen(), 1, world.planned().as_ref(), None);
    assert_eq!(world.status.run_as.as_deref(), Some("root"));
    world.roster = None;
    world.reports.values_mut().for_each(|report| report.adopted = None);
    world.settle();
    assert_eq!(run_as(&world), "root", "its roster is lost");

    // An agent's token may write the status.
    let mut world = idle();
    world.status.run_as = Some("forged".to_owned());
    assert_eq!(begin_an_epoch(&mut world, 9000).settings.run_as, "root");
    assert_eq!(status(&world.seen(), 1, world.planned().as_ref(), None).run_as.as_deref(), Some("root"));

    // An earlier version began an epoch with another user, and it does not come up.
    let mut world = idle();
    let roster = world.roster.as_mut().unwrap();
    roster.previous = Some(roster.settings.clone());
    roster.settings.run_as = "typo".to_owned();
    world.reports.values_mut().for_each(|report| report.adopted = None);
    world.reports.get_mut("node1").unwrap().start_failing_epoch = Some(1);
    assert_eq!(status(&world.seen(), 1, world.planned().as_ref(), None).run_as.as_deref(), Some("root"));
    world.settle();
    close(&mut world);
    world.settle();
    assert_eq!(run_as(&world), "root");
}

#[test]
fn the_user_can_be_corrected_until_the_instance_was_online() {
    let before = |is_given_up: bool| {
        let mut world = World::new(2);
        world.status.run_as = Some("forged".to_owned());
        world.all_passed();
        world.settle();
        world.spec.broker.run_as = Some("flux".to_owned());
        // An administrator has given up the queue of an instance that was online.
        world.status.instance_id = is_given_up.then(|| "another".to_owned());
        world.settle();
        world.roster.unwrap().settings.run_as
    };
    assert_eq!((before(false).as_str(), before(true).as_str()), ("flux", "root"));
}
