//! How long the planner's pure functions take for large instances.
//!
//!     cargo bench --bench pure
//!
//! Before the measurements it prints a line of JSON with the sizes of what they make.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::{collections::BTreeMap, hint::black_box, time::Duration};

use api::{
    Adopted, Facts, FluxInstanceSpec, FluxInstanceStatus, FluxNode, FluxNodeSpec, FluxNodeStatus, NodePhase, Resources,
    Roster, packed::pack,
};
use criterion::Criterion;
use model::{
    broker_toml::render,
    eligibility::NodeView,
    fixture::roster,
    members::Planned,
    observed::Observed,
    project::project_all,
    roster::{Decision, decide},
    status::status,
};
use serde_json::json;

/// Members of this many kinds: each kind has a number of cores of its own.
fn members(count: u32, kinds: u32) -> Roster {
    let names: Vec<_> = (0..count).map(|number| (format!("node{number}"), 8 + number * kinds / count)).collect();
    let nodes: Vec<_> = names.iter().map(|(name, cores)| (name.as_str(), *cores)).collect();
    roster(count, &nodes)
}

/// What a planner sees of an instance.
struct World {
    spec: FluxInstanceSpec,
    status: FluxInstanceStatus,
    nodes: Vec<NodeView>,
    reports: BTreeMap<String, FluxNodeStatus>,
    roster: Roster,
}

impl World {
    /// All members are online, and one more node has passed preflight.
    fn of_a_join(mut roster: Roster) -> Self {
        roster.settings.max_size += 1;
        let joins = format!("node{}", roster.ranks.len());
        let names = roster.members().map(|member| member.node.clone()).chain([joins]);
        let nodes: Vec<_> = (0..).zip(names).map(|(number, name)| view(number, name)).collect();
        let adopted = |node: &NodeView| {
            let (rank, entry) = roster.ranks.iter().find(|(_, entry)| entry.broker_name == node.name)?;
            Some(Adopted {
                rank: *rank,
                broker_name: entry.broker_name.clone(),
                node_uid: node.uid.clone(),
                instance_uid: Some(roster.instance_uid.clone()),
                instance_id: roster.instance_id.clone(),
                epoch: roster.epoch,
                pid: 100,
                digest: roster.settings.digest.clone(),
            })
        };
        let report = |node: &NodeView| {
            let adopted = adopted(node);
            let phase = if adopted.is_some() { NodePhase::Online } else { NodePhase::Preflight };
            let report = FluxNodeStatus { facts: Some(facts()), phase, adopted, ..FluxNodeStatus::default() };
            (node.name.clone(), report)
        };
        let reports = nodes.iter().map(report).collect();
        let spec = FluxInstanceSpec { max_size: Some(roster.settings.max_size), ..FluxInstanceSpec::default() };
        let lead = nodes.first().map(|node| node.name.clone());
        let status =
            FluxInstanceStatus { instance_id: Some(roster.instance_id.clone()), lead, ..FluxInstanceStatus::default() };
        Self { spec, status, nodes, reports, roster }
    }

    fn seen<'a>(
        &'a self,
        none: &'a BTreeMap<String, String>,
        usable: &'a BTreeMap<String, model::observed::Unusable>,
    ) -> Observed<'a> {
        Observed {
            instance_uid: &self.roster.instance_uid,
            spec: &self.spec,
            generation: 1,
            status: &self.status,
            nodes: self.nodes.iter().collect(),
            reports: self.reports.iter().map(|(name, report)| (name.as_str(), report)).collect(),
            roster: Some(&self.roster),
            digest: Some(&self.roster.settings.digest),
            certificate: Some(&self.roster.settings.certificate),
            is_certificate_gone: false,
            now: 1000,
            waited: Duration::from_secs(1000),
            restart_word: None,
            fresh_id: "fresh",
            agentless: none,
            unusable: usable,
        }
    }
}

fn reported(name: &str, report: &FluxNodeStatus) -> FluxNode {
    let mut node = FluxNode::new(name, FluxNodeSpec::default());
    node.status = Some(report.clone());
    node
}

/// As clouds make them: twenty labels.
fn view(number: u16, name: String) -> NodeView {
    let [high, low] = number.to_be_bytes();
    let label = |label| (format!("topology.example.org/label-{label}"), format!("value-{label}-of-the-node"));
    NodeView {
        uid: format!("uid-{name}"),
        boot_id: "boot".to_owned(),
        ready: true,
        linux: true,
        address: Some([10, 0, high, low].into()),
        architecture: "amd64".to_owned(),
        labels: (0..20).map(label).collect(),
        name,
        ..NodeView::default()
    }
}

fn facts() -> Facts {
    Facts {
        resources: Resources { cores: 8, gpus: 0 },
        memory_mib: 131_072,
        platform: "linux-64".into(),
        glibc: "2.36".into(),
        boot_id: "boot".into(),
        systemd: true,
        static_cpus: false,
        prefix: "/opt/flux-distribute".into(),
    }
}

fn main() {
    let (large, usual) = (members(10_000, 20), members(5000, 4));
    let (broker_toml, text) = (render(&large).unwrap(), serde_json::to_string(&usual).unwrap());
    let sizes = json!({
        "broker_toml_bytes": broker_toml.len(), "broker_toml_packed": pack(&broker_toml).unwrap().0.len(),
        "roster_bytes": text.len(), "roster_packed": pack(&text).unwrap().0.len(),
    });
    println!("{sizes}");
    // Shorter than criterion's own times, so that the whole suite takes less than half an hour.
    let (warm_up, measurement) = (Duration::from_secs(1), Duration::from_secs(3));
    let mut criterion = Criterion::default().warm_up_time(warm_up).measurement_time(measurement).configure_from_args();
    criterion.bench_function("render", |bench| bench.iter(|| render(black_box(&large))));
    criterion.bench_function("write_roster", |bench| {
        bench.iter(|| pack(&serde_json::to_string(black_box(&usual)).unwrap()).unwrap());
    });
    criterion.bench_function("read_roster", |bench| bench.iter(|| Roster::parse(black_box(&text))));
    let (world, none, usable) = (World::of_a_join(usual), BTreeMap::new(), BTreeMap::new());
    let seen = world.seen(&none, &usable);
    assert!(matches!(decide(&seen), Decision::Write(next) if next.ranks.len() > world.roster.ranks.len()));
    criterion.bench_function("index", |bench| bench.iter(|| drop(black_box(&world).seen(&none, &usable))));
    criterion.bench_function("decide_join", |bench| bench.iter(|| decide(black_box(&seen))));
    criterion.bench_function("observe_members", |bench| {
        bench.iter(|| drop(black_box(Planned::observe(black_box(&seen), &world.roster))));
    });
    let planned = Planned::observe(&seen, &world.roster);
    let present: Vec<_> = world.reports.iter().map(|(name, report)| reported(name, report)).collect();
    criterion.bench_function("project_all", |bench| {
        bench.iter(|| drop(black_box(project_all(black_box(&seen), Some(&planned), &present, |_| true))));
    });
    criterion.bench_function("instance_status", |bench| {
        bench.iter(|| status(black_box(&seen), 1, Some(&planned), None));
    });
    criterion.final_summary();
}
