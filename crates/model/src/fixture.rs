//! A roster for tests, of this crate and of others.

use std::collections::BTreeSet;

use api::{FailedLeads, FluxInstanceSpec, Member, ROSTER_FORMAT, Resources, Roster, RosterEntry};

use crate::settings::settings;

/// The member that runs on `node`.
pub fn member(node: &str, number: u16) -> Member {
    let [high, low] = number.to_be_bytes();
    Member { node: node.to_owned(), uid: format!("uid-{node}"), address: [10, 0, high, low].into(), gone_since: None }
}

/// A roster of `max_size` ranks, the first of which are held by `(node, cores)`.
pub fn roster(max_size: u32, nodes: &[(&str, u32)]) -> Roster {
    let ranks = (0..).zip(1..).zip(nodes).map(|((rank, number), (node, cores))| {
        let entry = RosterEntry {
            broker_name: (*node).to_owned(),
            reserved_for: Some(format!("uid-{node}")),
            member: Some(member(node, number)),
            resources: Some(Resources { cores: *cores, gpus: 0 }.into()),
            lacks_since: None,
            static_cpus: false,
            properties: BTreeSet::new(),
            has_node_property: false,
            drain: None,
            revision: 1,
        };
        (rank, entry)
    });
    Roster {
        format: ROSTER_FORMAT,
        instance_uid: "instance".into(),
        instance_id: "id".into(),
        established: true,
        epoch: 1,
        revision: 1,
        settings: settings(
            &FluxInstanceSpec { max_size: Some(max_size), ..Default::default() },
            "root",
            0,
            "digest",
            "cert",
        ),

        closing: None,
        previous: None,
        refused: None,
        restart: None,
        jobs_lost_before: 0,
        failed_leads: FailedLeads::default(),
        ranks: ranks.collect(),
    }
}

/// xorshift64* (Vigna), so that a seed gives the same steps on every machine.
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33).unwrap_or_default() % limit
    }

    /// True half of the time.
    pub fn flips(&mut self) -> bool {
        self.below(2) == 0
    }
}
