//! What the planner tells Prometheus of the instance. Pure.

use std::time::Duration;

use api::{FluxInstanceStatus, NodePhase, Roster};
use metrics::InstanceFacts;
use model::observed::Reports;

/// The numbers of `status`, which this round has computed, and how many members are in which phase by the reports of their agents.
pub(super) fn measured(
    status: &FluxInstanceStatus,
    lead_online: bool,
    dump_every: Option<Duration>,
    roster: Option<&Roster>,
    reports: &Reports,
) -> InstanceFacts {
    let mut facts = InstanceFacts {
        online: status.online.into(),
        // While the first packages are installed, nothing is wrong.
        lead_online: status.instance_id.is_some().then_some(lead_online),
        dump_every: dump_every.map(|every| every.as_secs()),
        epoch: status.epoch,
        dumped_at: status.dump.as_ref().map(|kept| kept.dump.time.0.as_second()),
        ..InstanceFacts::default()
    };
    for member in roster.iter().flat_map(|roster| roster.members()) {
        facts.add_member(&reports.get(member.node.as_str()).map(|report| phase(&report.phase)).unwrap_or_default());
    }
    facts
}

/// The phase as the schema has it, which Debug prints too; nothing for a word of another version, which may be any.
fn phase(phase: &NodePhase) -> String {
    if matches!(phase, NodePhase::Other(_)) { String::new() } else { format!("{phase:?}") }
}

#[cfg(test)]
mod tests {
    use api::{Dump, FluxNodeStatus, KeptDump};
    use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
    use metrics::PHASES;
    use model::fixture::roster;

    use super::*;

    #[test]
    fn members_are_counted_by_the_phase_that_their_agents_report() {
        let roster = roster(8, &[("a", 4), ("b", 4), ("c", 4), ("d", 4)]);
        let report = |phase| FluxNodeStatus { phase, ..FluxNodeStatus::default() };
        let reports = [
            ("a", report(NodePhase::Online)),
            ("b", report(NodePhase::Installing)),
            ("c", report(NodePhase::Other("made up".to_owned()))),
            ("no member", report(NodePhase::Online)),
        ];
        let reports = reports.iter().map(|(name, report)| (*name, report)).collect();
        let time = Time(Timestamp::from_second(77).unwrap());
        let dump = KeptDump { node: "a".to_owned(), dump: Dump { name: "d".to_owned(), time, bytes: 1 } };
        let status = FluxInstanceStatus { epoch: 3, online: 1, dump: Some(dump), ..FluxInstanceStatus::default() };
        let facts = measured(&status, true, Some(Duration::from_mins(2)), Some(&roster), &reports);
        let counted: Vec<_> = PHASES.into_iter().zip(facts.members).filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("Installing", 1), ("Online", 1), ("Other", 2)]);
        assert_eq!((facts.online, facts.epoch, facts.dumped_at, facts.dump_every), (1, 3, Some(77), Some(120)));
        assert_eq!(facts.lead_online, None, "the first packages are installed");
        let established = FluxInstanceStatus { instance_id: Some("i".to_owned()), ..status };
        assert_eq!(measured(&established, true, None, None, &reports).lead_online, Some(true));
        assert_eq!(measured(&FluxInstanceStatus::default(), false, None, None, &reports), InstanceFacts::default());
    }

    /// So that a new phase gets its own series.
    #[test]
    fn each_phase_of_this_version_has_a_series() {
        use NodePhase::{Draining, Failed, Installing, Offline, Online, Preflight, Removing, Starting, Waiting};
        let all = [Waiting, Preflight, Installing, Starting, Online, Draining, Offline, Removing, Failed];
        assert!(all.iter().map(phase).chain(["Other".to_owned()]).eq(PHASES));
        assert_eq!(phase(&NodePhase::Other("Online".to_owned())), "");
    }
}
