use super::*;
use crate::roster::tests::World;

fn report<'a>(world: &'a mut World, node: &str) -> &'a mut FluxNodeStatus {
    world.reports.get_mut(node).unwrap()
}

#[test]
fn each_member_has_one_state() {
    use MemberState::*;
    type Edit = fn(&mut World);
    let cases: [(&str, Edit, u32, MemberState); 16] = [
        ("it is online", |_| {}, 1, Online),
        ("no rank", |_| {}, 99, Vacant),
        ("no member", |world| world.roster.as_mut().unwrap().ranks.get_mut(&1).unwrap().vacate(), 1, Vacant),
        ("no report", |world| drop(world.reports.remove("node2")), 1, NotReported),
        ("no broker", |world| report(world, "node2").adopted = None, 1, NotRunning),
        ("another rank", |world| report(world, "node2").adopted.as_mut().unwrap().rank = 2, 1, Elsewhere),
        ("another epoch", |world| report(world, "node2").adopted.as_mut().unwrap().epoch += 1, 1, Elsewhere),
        (
            "another instance",
            |world| report(world, "node2").adopted.as_mut().unwrap().instance_id = "other".into(),
            1,
            Elsewhere,
        ),
        ("it joins", |world| report(world, "node2").phase = NodePhase::Starting, 1, ComingUp),
        ("it is drained", |world| report(world, "node2").phase = NodePhase::Draining, 1, Online),
        ("it doesn't answer", |world| report(world, "node2").phase = NodePhase::Offline, 1, Offline),
        ("the lead has lost it", |world| report(world, "node1").offline = vec![1], 1, Lost),
        (
            "it doesn't answer, and the lead has lost it",
            |world| {
                report(world, "node2").phase = NodePhase::Offline;
                report(world, "node1").offline = vec![1];
            },
            1,
            Lost,
        ),
        (
            "it doesn't answer, and the lead gives it no jobs",
            |world| {
                report(world, "node2").phase = NodePhase::Offline;
                report(world, "node1").torpid = "1".parse().unwrap();
                report(world, "node1").allocated = Some("2".parse().unwrap());
            },
            1,
            Lost,
        ),
        (
            "it doesn't answer and gets no new jobs, but has one",
            |world| {
                report(world, "node2").phase = NodePhase::Offline;
                report(world, "node1").torpid = "1".parse().unwrap();
                report(world, "node1").allocated = Some("1".parse().unwrap());
            },
            1,
            Offline,
        ),
        (
            "the lead, and nobody hears it",
            |world| ["node2", "node3"].into_iter().for_each(|node| report(world, node).lead_unreachable = true),
            0,
            Lost,
        ),
    ];
    for (what, change, rank, expected) in cases {
        let mut world = World::up(3);
        change(&mut world);
        let members = Members::observe(&world.seen(), world.roster.as_ref().unwrap());
        assert_eq!(members.state(rank), expected, "{what}");
    }
}
