//! What `flux-distribute status` prints: the broker's status, with spare ranks kept apart from members that are down. Pure.

use std::fmt::Write;

use serde::Serialize;

use api::{IdSet, Roster};
use base::words::many;
use broker::{queues::Queue, resource_set::Amount, status::BrokerStatus};
use model::{broker_names::spare_name, hostlist};

/// A broker and its instance, for a person or a program.
#[derive(Serialize, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Summary<'a> {
    #[serde(flatten)]
    broker: &'a BrokerStatus,
    /// Name of the broker's node. A member that has joined since the start has the name of a spare in `hostlist` and
    /// `brokerName`.
    node: &'a str,
    /// Ranks without a member, and what they declare. Flux counts them as down.
    spares: Amount,
    /// Members that are not online. None: the lead does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    away: Option<IdSet>,
    /// The queues that start no jobs ([`Queue::stopped`]). None: the lead does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_queues: Option<Vec<String>>,
}

impl<'a> Summary<'a> {
    /// `roster` is the host's copy, which may lack members that have joined since; every online rank counts as a member.
    pub fn of(broker: &'a BrokerStatus, queues: Option<Vec<Queue>>, roster: Option<&'a Roster>) -> Self {
        let names = hostlist::decode(&broker.hostlist);
        let is_spare = |rank: &u32| match roster {
            Some(roster) => roster.member(*rank).is_none(),
            None => usize::try_from(*rank).ok().and_then(|rank| names.get(rank)) == Some(&spare_name(*rank)),
        };
        let instance = broker.instance.as_ref();
        let is_online = |rank: &u32| instance.is_some_and(|instance| instance.online.contains(*rank));
        let spares: IdSet = (0..broker.size).filter(|rank| is_spare(rank) && !is_online(rank)).collect();
        let away =
            instance.map(|_| (0..broker.size).filter(|rank| !is_online(rank) && !spares.contains(*rank)).collect());
        let spares = match instance {
            Some(instance) => Amount { ranks: spares.clone(), ..instance.declared_by(&spares) },
            None => Amount { ranks: spares, ..Amount::default() },
        };
        let member = roster.and_then(|roster| roster.member(broker.rank));
        let node = member.map_or(broker.broker_name.as_str(), |member| &member.node);
        let stopped_queues = queues.map(|queues| queues.iter().filter_map(Queue::stopped).collect());
        Self { broker, node, spares, away, stopped_queues }
    }

    /// For a person.
    pub fn text(&self) -> String {
        let BrokerStatus { rank, size, state, .. } = self.broker;
        let mut lines = vec![
            ("broker", format!("{} (rank {rank} of {size}), state {state}", self.node)),
            ("overlay", self.overlay().to_owned()),
        ];
        match &self.away {
            None => lines.push(("members", "the lead does not answer, so it is not known who is online".to_owned())),
            Some(away) => lines.push(("members", self.members(away))),
        }
        let spares = &self.spares.ranks;
        if !spares.is_empty() {
            let ranks = many(spares.len() as u64, "rank");
            lines.push((
                "spares",
                format!("{ranks} ({spares}) kept free for nodes that may join; Flux lists them as down"),
            ));
        }
        if let Some(instance) = &self.broker.instance {
            let of_spares = |amount: &Amount| instance.declared_by(&common(&amount.ranks, spares)).cores;
            let (all, down) = (&instance.all, &instance.down);
            lines.push((
                "cores",
                format!(
                    "{} in all, {} down, {} allocated",
                    all.cores.saturating_sub(of_spares(all)),
                    down.cores.saturating_sub(of_spares(down)),
                    instance.allocated.cores
                ),
            ));
            lines.extend(instance.drained.iter().map(|drained| {
                let ranks = if drained.ranks.len() == 1 { "rank" } else { "ranks" };
                ("drained", format!("{ranks} {}: {}", drained.ranks, drained.reason))
            }));
        }
        lines.extend(self.stopped_queues.iter().flatten().map(|stopped| ("queue", stopped.clone())));
        lines.iter().fold(String::new(), |mut text, (what, words)| {
            let _ = writeln!(text, "{what:<8} {words}");
            text
        })
    }

    fn members(&self, away: &IdSet) -> String {
        let online = self.broker.instance.as_ref().map(|instance| instance.online.clone()).unwrap_or_default();
        let all = many((online.len() + away.len()) as u64, "member");
        match away.is_empty() {
            true => format!("{all}, all online (ranks {online})"),
            false => format!("{all}, online: ranks {online}; not online: ranks {away}"),
        }
    }

    /// A broker whose only missing children are spares is `partial` to Flux.
    fn overlay(&self) -> &str {
        let overlay = &self.broker.overlay;
        let are_spares = || overlay.not_full.iter().all(|child| self.spares.ranks.contains(child.rank));
        let nobody_is_away = self.away.as_ref().map_or_else(are_spares, IdSet::is_empty);
        if overlay.status == "partial" && nobody_is_away { "full" } else { &overlay.status }
    }
}

fn common(a: &IdSet, b: &IdSet) -> IdSet {
    IdSet(a.0.intersection(&b.0).copied().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use model::fixture::roster;

    /// Of a lead with three children, of which `online` are there.
    fn broker(overlay: &str, online: Option<&str>) -> BrokerStatus {
        let amount = |ranks: &str, cores: usize| json!({"ranks": ranks, "cores": cores, "gpus": 0});
        let instance = online.map(|online| {
            json!({"online": online, "drained": [], "torpid": "",
                "all": amount("0-3", 8), "down": amount("2-3", 4), "allocated": amount("0", 1)})
        });
        let not_full = json!([{"rank": 2, "status": "offline"}, {"rank": 3, "status": "offline"}]);
        serde_json::from_value(json!({
            "rank": 0, "size": 4, "hostlist": "node[1-2],flux-spare-[2-3]", "brokerName": "node1", "state": "run",
            "stateSecs": 1.0, "overlay": {"status": overlay, "secs": 1.0, "notFull": not_full, "connected": "1"},
            "instance": instance,
        }))
        .unwrap()
    }

    #[test]
    fn ranks_that_nobody_has_are_no_nodes_that_are_down() {
        let two = roster(4, &[("node1", 2), ("node2", 2)]);
        // Which joined under the name of a spare.
        let three = roster(4, &[("node1", 2), ("node2", 2), ("node3", 2)]);
        for (what, overlay, online, roster, expected) in [
            (
                "healthy",
                "partial",
                Some("0-1"),
                Some(&two),
                ["full", "2 members, all online (ranks 0-1)", "2 ranks (2-3)"],
            ),
            ("healthy, by names", "partial", Some("0-1"), None, ["full", "2 members, all online", "2 ranks (2-3)"]),
            ("a member is off", "partial", Some("0-1"), Some(&three), ["partial", "not online: ranks 2", "1 rank (3)"]),
            ("one lost", "degraded", Some("0-1"), Some(&three), ["degraded", "not online: ranks 2", "1 rank (3)"]),
            (
                "one has just joined",
                "partial",
                Some("0-2"),
                Some(&two),
                ["full", "3 members, all online", "1 rank (3)"],
            ),
            ("the lead is silent", "partial", None, Some(&two), ["full", "the lead does not answer", "2 ranks (2-3)"]),
        ] {
            let broker = broker(overlay, online);
            let text = Summary::of(&broker, None, roster).text();
            let line = |what: &str| text.lines().find(|line| line.starts_with(what)).unwrap_or_default();
            for (name, words) in ["overlay", "members", "spares"].into_iter().zip(expected) {
                assert!(line(name).contains(words), "{what}: {text}");
            }
        }
    }

    #[test]
    fn an_instance_without_spares_says_nothing_of_them() {
        let all = roster(4, &[("node1", 2), ("node2", 2), ("node3", 2), ("node4", 2)]);
        let text = Summary::of(&broker("full", Some("0-3")), None, Some(&all)).text();
        assert!(!text.contains("spare"), "{text}");
    }

    #[test]
    fn a_member_has_its_own_name_even_if_the_lead_is_silent() {
        let mut broker = broker("full", None);
        (broker.rank, broker.broker_name) = (2, "flux-spare-2".to_owned());
        let roster = roster(4, &[("node1", 2), ("node2", 2), ("node3", 2)]);
        assert!(Summary::of(&broker, None, Some(&roster)).text().starts_with("broker   node3 (rank 2 of 4)"));
    }

    #[test]
    fn a_stopped_queue_is_named() {
        let queues = vec![
            Queue { name: Some("batch".to_owned()), ..Queue::default() },
            Queue { start: true, ..Queue::default() },
        ];
        let text = Summary::of(&broker("full", Some("0-3")), Some(queues), None).text();
        assert!(text.ends_with("\nqueue    queue batch is stopped; `flux queue start batch` starts it\n"), "{text}");
    }
}
