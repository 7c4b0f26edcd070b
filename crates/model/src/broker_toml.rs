//! Renders `broker.toml` from the roster alone. It is the same for all nodes of an epoch, except for the certificate's
//! path.

use std::net::IpAddr;

use super::{
    broker_names::broker_name,
    hostlist,
    resource_config::resource_config,
    topology::{Topology, TopologyError},
};
use api::{IdSet, Roster};

/// Tables that only flux-distribute writes. `kvs` is among them because its checkpoint-period is a field of the spec,
/// and `access` because guests must not get access.
pub const OWN_TABLES: [&str; 5] = ["bootstrap", "tbon", "resource", "kvs", "access"];
/// Fluxion's table for its queues. [`render`] adds a queue policy if it has none.
const QUEUE_MANAGER: &str = "sched-fluxion-qmanager";
/// The table of the queues (flux-config-job-manager(5)). [`render`] adds to it if pods get their nodes from Flux.
const JOB_MANAGER: &str = "job-manager";
/// Its key that has a restart stop all queues that were started.
const STOP_ON_RESTART: &str = "stop-queues-on-restart";
/// Fluxion's table for its resource graph. [`render`] adds a match format if it has none.
const RESOURCE_GRAPH: &str = "sched-fluxion-resource";
/// After this time a broker notices that a peer is lost; a node that is cut off for longer loses its jobs. flux-core's
/// default of 20 s is shorter than the reboot of many a switch.
const TCP_USER_TIMEOUT: &str = "2m";
/// With zmq's own backoff, nodes would join minutes late (flux-core issue 5134).
const CONNECT_TIMEOUT: &str = "5s";
/// Start of the first line, which [`made_from`] reads.
const HEADER: &str = "# flux-distribute: ";

/// Why `spec.broker.config` is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExtraError {
    /// The text is not TOML.
    #[error("is not TOML: {0}")]
    NotToml(String),
    /// It has one of [`OWN_TABLES`].
    #[error("has the table [{0}], which flux-distribute writes itself; remove it")]
    Ours(String),
    /// It defines as a value what must be a table.
    #[error("defines {0}, but not as a table; write [{0}] above its keys")]
    NotATable(String),
}

/// Why what a broker reads can't be made from a roster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// The roster's topology is none.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The roster's extra tables are refused.
    #[error("spec.broker.config {0}")]
    Extra(ExtraError),
    /// A table that we add keys to is another value.
    #[error("spec.broker.config: {0} is not a table")]
    NotATable(String),
    /// TOML has no words for a value.
    #[error("broker.toml")]
    Toml(#[from] toml::ser::Error),
    /// JSON has no words for a value.
    #[error("the live configuration")]
    Json(#[from] serde_json::Error),
    /// The published text is not TOML.
    #[error("published broker.toml")]
    Published(#[from] toml::de::Error),
}

/// Parses `spec.broker.config`, the tables that a user adds to `broker.toml`.
///
/// # Errors
/// If it is not TOML, has a table of [`OWN_TABLES`], or has a value in place of a table to which [`render`] adds keys.
pub fn extra_tables(text: &str) -> Result<toml::Table, ExtraError> {
    let table: toml::Table = text.parse().map_err(|error| ExtraError::NotToml(with_line(text, &error)))?;
    if let Some(ours) = table.keys().find(|key| OWN_TABLES.contains(&key.as_str())) {
        return Err(ExtraError::Ours(ours.clone()));
    }
    let is_no_table = |name: &&str| table.get(*name).is_some_and(|value| !value.is_table());
    match [QUEUE_MANAGER, RESOURCE_GRAPH, JOB_MANAGER].into_iter().find(is_no_table) {
        Some(name) => Err(ExtraError::NotATable(name.to_owned())),
        None => Ok(table),
    }
}

/// Most characters of a line that a message quotes.
const LONGEST_QUOTE: usize = 80;

/// What is wrong with `text`, and the line in it, as a person counts them: the text is often a block in a YAML file.
fn with_line(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', ", ");
    let before = error.span().and_then(|span| text.get(..span.start));
    let Some(number) = before.map(|before| before.matches('\n').count()) else { return message };
    let line: String = text.lines().nth(number).unwrap_or_default().trim().chars().take(LONGEST_QUOTE).collect();
    format!("its line {}, `{line}`: {message}", number + 1)
}

/// Renders the epoch's broker.toml, without `curve_cert` (see [`for_host`]).
///
/// # Errors
/// If [`extra_tables`] refuses the roster's extra tables, or the roster's topology doesn't parse.
pub fn render(roster: &Roster) -> Result<String, RenderError> {
    let text = toml::to_string(&tables(roster)?)?;
    let Roster { instance_id, epoch, revision, .. } = roster;
    let made_from = format!("instance {instance_id} epoch {epoch} revision {revision}");
    Ok(format!("{HEADER}{made_from}, made by flux-distribute: changes are overwritten\n{text}"))
}

/// The tables that [`render`] writes.
///
/// # Errors
/// As [`render`].
pub(super) fn tables(roster: &Roster) -> Result<toml::Table, RenderError> {
    let size = roster.settings.max_size;
    let topology = Topology::parse(&roster.settings.topology, size)?;
    let mut file = extra_tables(&roster.settings.config).map_err(RenderError::Extra)?;

    if roster.settings.pods {
        schedule_gangs(&mut file)?;
    }
    // With its default policy, Fluxion refuses a job that needs more nodes than are up; with "easy", the job waits for
    // them.
    table(&mut file, QUEUE_MANAGER)?.entry("queue-policy").or_insert_with(|| "easy".into());
    // When Fluxion 0.54 is reloaded with its default format, it later frees the cores of only one of the running jobs
    // on each node. An epoch that an older version began keeps the default, because its jobs have that format.
    if roster.declares_nodes() {
        table(&mut file, RESOURCE_GRAPH)?.entry("match-format").or_insert_with(|| "rv1".into());
    }

    let ipv6 = roster.members().any(|member| member.address.is_ipv6());
    let bootstrap = table(&mut file, "bootstrap")?;
    bootstrap.insert("hosts".into(), hosts(roster, topology).into());
    if ipv6 {
        bootstrap.insert("enable_ipv6".into(), true.into());
    }

    let tbon = table(&mut file, "tbon")?;
    tbon.insert("topo".into(), Topology::for_flux(&roster.settings.topology, size).into());
    tbon.insert("tcp_user_timeout".into(), TCP_USER_TIMEOUT.into());
    tbon.insert("connect_timeout".into(), CONNECT_TIMEOUT.into());

    table(&mut file, "kvs")?.insert("checkpoint-period".into(), roster.settings.checkpoint_period.clone().into());

    // The agent runs as root and talks to brokers that another user may own.
    table(&mut file, "access")?.insert("allow-root-owner".into(), true.into());

    let resource = table(&mut file, "resource")?;
    let mut verify = toml::Table::new();
    // A broker's name may differ from its host's name, more cores than declared are fine, and hwloc rarely detects
    // GPUs.
    verify.insert("default".into(), "allow-extra".into());
    verify.insert("hostname".into(), "ignore".into());
    verify.insert("gpu".into(), "ignore".into());
    resource.insert("verify".into(), verify.into());
    let names: Vec<_> = (0..size).map(|rank| broker_name(roster, rank)).collect();
    resource.insert("config".into(), resource_config(roster, &names).into());
    let excluded = excluded(roster);
    if !excluded.is_empty() {
        resource.insert("exclude".into(), excluded.to_string().into());
    }
    Ok(file)
}

/// Adds what the bridge between pods and jobs relies on, where the user's tables say nothing else.
///
/// # Errors
/// As [`render`].
fn schedule_gangs(file: &mut toml::Table) -> Result<(), RenderError> {
    // Until the bridge has given the pods that run their jobs again, nothing else may get their cores.
    table(file, JOB_MANAGER)?.insert(STOP_ON_RESTART.into(), true.into());
    let queues = table(file, QUEUE_MANAGER)?;
    if !queues.contains_key("queue-policy") {
        queues.insert("queue-policy".into(), "hybrid".into());
        // With one reservation, as "easy" makes, pods that wait for a node of their own would leave none for a gang.
        let parameters = [("policy-params", "reservation-depth", 64), ("queue-params", "queue-depth", 1024)];
        for (name, key, value) in parameters {
            table(queues, name)?.entry(key).or_insert_with(|| value.into());
        }
    }
    Ok(())
}

/// True if these extra tables have queues stopped by every restart: then an administrator starts them.
pub fn stops_queues_on_restart(config: &str) -> bool {
    let extra = extra_tables(config).unwrap_or_default();
    extra.get(JOB_MANAGER).and_then(|table| table.get(STOP_ON_RESTART)?.as_bool()).unwrap_or_default()
}

/// Reads epoch and revision of the roster from which [`render`] made `text`. None if `text` has no such header or
/// belongs to another instance, whose numbers can't be compared with this one's.
pub fn made_from(text: &str, instance_id: &str) -> Option<(u64, u64)> {
    let mut parts = text.strip_prefix(HEADER)?.lines().next()?.split([' ', ',']);
    let mut value_of = |name| if parts.next() == Some(name) { parts.next() } else { None };
    if value_of("instance")? != instance_id {
        return None;
    }
    Some((value_of("epoch")?.parse().ok()?, value_of("revision")?.parse().ok()?))
}

/// Makes one host's file from the epoch's: adds the path of the certificate, which depends on the host.
///
/// # Errors
/// If `text` is not a file that [`render`] made.
pub fn for_host(text: &str, certificate: &str) -> Result<String, RenderError> {
    let mut file: toml::Table = text.parse()?;
    table(&mut file, "bootstrap")?.insert("curve_cert".into(), certificate.into());
    let made = toml::to_string(&file)?;
    let header = text.lines().next().filter(|line| line.starts_with(HEADER)).unwrap_or_default();
    Ok(format!("{header}\n{made}"))
}

/// Ranks that get no jobs at all, including ranks whose member is gone, because their brokers may still run. Empty if
/// it would be all ranks: if nothing is left to schedule, Fluxion 0.54's resource module stops, and flux-core ends the
/// broker as if it had crashed.
fn excluded(roster: &Roster) -> IdSet {
    let excluded: IdSet = roster.ranks.iter().filter(|(_, entry)| entry.is_excluded()).map(|(rank, _)| *rank).collect();
    if excluded.len() == roster.settings.max_size as usize { IdSet::default() } else { excluded }
}

fn table<'a>(file: &'a mut toml::Table, name: &str) -> Result<&'a mut toml::Table, RenderError> {
    file.entry(name)
        .or_insert_with(|| toml::Table::new().into())
        .as_table_mut()
        .ok_or_else(|| RenderError::NotATable(name.to_owned()))
}

/// The `hosts` array: first all names in rank order, then another entry with the address for each parent. Flux merges
/// entries with the same name, and only parents need addresses (flux-config-bootstrap(5)).
fn hosts(roster: &Roster, topology: Topology) -> Vec<toml::Value> {
    let size = roster.settings.max_size;
    let names = (0..size).map(|rank| broker_name(roster, rank));
    let mut hosts = vec![toml::Table::from_iter([("host".to_owned(), hostlist::encode(names).into())])];
    for (rank, entry) in &roster.ranks {
        let Some(member) = &entry.member else { continue };
        if *rank < size && topology.is_interior(*rank, size) {
            let endpoint = endpoint(member.address, roster.settings.port);
            hosts.push(toml::Table::from_iter([
                ("host".to_owned(), entry.broker_name.clone().into()),
                ("bind".to_owned(), endpoint.clone().into()),
                ("connect".to_owned(), endpoint.into()),
            ]));
        }
    }
    hosts.into_iter().map(toml::Value::from).collect()
}

fn endpoint(address: IpAddr, port: u16) -> String {
    match address {
        IpAddr::V4(address) => format!("tcp://{address}:{port}"),
        IpAddr::V6(address) => format!("tcp://[{address}]:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        broker_names::spare_name,
        fixture::{member, roster},
    };
    use api::Resources;

    #[test]
    fn a_flat_instance_needs_one_address() {
        let text = render(&roster(4, &[("node1", 2), ("node2", 2), ("node3", 4)])).unwrap();
        let id = roster(1, &[]).instance_id;
        assert_eq!(made_from(&text, &id), Some((1, 1)));
        assert_eq!(made_from(&text, "another"), None);
        let text = text.split_once('\n').unwrap().1;
        let expected = r#"[access]
allow-root-owner = true

[[bootstrap.hosts]]
host = "node[1-3],flux-spare-3"

[[bootstrap.hosts]]
bind = "tcp://10.0.0.1:8050"
connect = "tcp://10.0.0.1:8050"
host = "node1"

[kvs]
checkpoint-period = "1m"

[[resource.config]]
cores = "0-1"
hosts = "node[1-2],flux-spare-3"

[[resource.config]]
cores = "0-3"
hosts = "node3"

[resource.verify]
default = "allow-extra"
gpu = "ignore"
hostname = "ignore"

[sched-fluxion-qmanager]
queue-policy = "easy"

[sched-fluxion-resource]
match-format = "rv1"

[tbon]
connect_timeout = "5s"
tcp_user_timeout = "2m"
topo = "kary:256"
"#;
        assert_eq!(text, expected);
        let host = for_host(text, "/opt/flux-distribute/etc/curve.cert").unwrap();
        assert!(host.contains("curve_cert = \"/opt/flux-distribute/etc/curve.cert\""));
    }

    #[test]
    fn every_interior_rank_of_a_deep_tree_has_an_address() {
        let mut roster = roster(5, &[("a", 1), ("b", 1), ("c", 1)]);
        roster.settings.topology = "kary:2".into();
        let text = render(&roster).unwrap();
        assert!(text.contains("bind = \"tcp://10.0.0.2:8050\""), "{text}");
        assert!(!text.contains("10.0.0.3"), "{text}");
    }

    #[test]
    fn in_an_old_format_a_member_with_a_spares_name_has_its_node_as_a_property() {
        let mut roster = Roster { format: 1, ..roster(4, &[("node1", 2)]) };
        let entry = api::RosterEntry {
            broker_name: spare_name(2),
            reserved_for: None,
            member: Some(member("a.example", 9)),
            resources: Some(Resources { cores: 8, gpus: 2 }.into()),
            lacks_since: None,
            static_cpus: false,
            properties: ["zone=eu-1a".to_owned()].into(),
            has_node_property: false,
            drain: None,
            revision: 2,
        };
        roster.ranks.insert(2, entry);
        let text = render(&roster).unwrap();
        let kind =
            "cores = \"0-7\"\ngpus = \"0-1\"\nhosts = \"flux-spare-2\"\nproperties = [\"a.example\", \"zone=eu-1a\"]";
        assert!(text.contains(kind), "{text}");
        roster.ranks.get_mut(&2).unwrap().member = None;
        assert!(!render(&roster).unwrap().contains("properties"));
    }

    #[test]
    fn left_out_cores_are_not_declared_and_excluded_ranks_are_listed() {
        let mut roster = roster(3, &[("node1", 4), ("node2", 4), ("node3", 4)]);
        assert!(!render(&roster).unwrap().contains("exclude"));
        let declared = |roster: &mut Roster, rank, left_out: &str, excluded| {
            let resources = roster.ranks.get_mut(&rank).unwrap().resources.as_mut().unwrap();
            (resources.left_out, resources.excluded) = (left_out.parse().unwrap(), excluded);
        };
        declared(&mut roster, 0, "0-1", true);
        declared(&mut roster, 1, "", true);
        let text = render(&roster).unwrap();
        assert!(text.contains("exclude = \"0-1\"") && text.contains("cores = \"2-3\"\nhosts = \"node1\""), "{text}");
        declared(&mut roster, 2, "", true);
        assert!(!render(&roster).unwrap().contains("exclude"), "some rank must run the jobs");
    }

    #[test]
    fn ipv6_addresses_are_in_brackets() {
        let mut roster = roster(2, &[("node1", 2)]);
        roster.ranks.get_mut(&0).unwrap().member.as_mut().unwrap().address = "fd00::1".parse().unwrap();
        let text = render(&roster).unwrap();
        assert!(text.contains("tcp://[fd00::1]:8050") && text.contains("enable_ipv6 = true"), "{text}");
    }

    #[test]
    fn extra_tables_are_merged_but_own_tables_are_refused() {
        let mut roster = roster(2, &[("node1", 2)]);
        roster.settings.config =
            "[sched-fluxion-qmanager]\nqueue-policy = \"fcfs\"\n[exec]\nkill-timeout = \"1m\"".into();
        let text = render(&roster).unwrap();
        assert!(text.contains("queue-policy = \"fcfs\"") && text.contains("[exec]"), "{text}");
        for ours in OWN_TABLES {
            assert_eq!(extra_tables(&format!("[{ours}]")), Err(ExtraError::Ours(ours.into())));
        }
        for (text, expected) in [
            ("[exec]\nimp = \"x\"\n\n  [unclosed\n", "its line 4, `[unclosed`: unclosed table"),
            ("[exec]\nkill-timeout =\n", "its line 2, `kill-timeout =`: "),
            ("[exec]\na = 1\n[exec]\n", "its line 3, `[exec]`: "),
            ("a = \"\"\"\nnever ends", "its line 2, `never ends`: "),
        ] {
            let Err(ExtraError::NotToml(message)) = extra_tables(text) else { panic!("{text:?} is TOML") };
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn a_queue_that_has_gangs_of_pods_reserves_nodes_for_many_of_them_unless_the_spec_names_a_policy() {
        let mut roster = roster(2, &[("node1", 2)]);
        let value = |roster: &Roster, path: &[&str]| {
            let file = toml::Value::from(tables(roster).unwrap());
            path.iter().try_fold(&file, |at, key| at.get(key)).map(ToString::to_string)
        };
        const POLICY: &[&str] = &[QUEUE_MANAGER, "queue-policy"];
        const DEPTH: &[&str] = &[QUEUE_MANAGER, "policy-params", "reservation-depth"];
        const STOPS: &[&str] = &[JOB_MANAGER, STOP_ON_RESTART];
        let policy = "[sched-fluxion-qmanager]\nqueue-policy = \"fcfs\"";
        for (pods, config, expected) in [
            (false, "", ["\"easy\"", "-", "-"]),
            (true, "", ["\"hybrid\"", "64", "true"]),
            (true, "[sched-fluxion-qmanager.policy-params]\nreservation-depth = 8", ["\"hybrid\"", "8", "true"]),
            (true, policy, ["\"fcfs\"", "-", "true"]),
        ] {
            (roster.settings.pods, roster.settings.config) = (pods, config.to_owned());
            let found = [POLICY, DEPTH, STOPS].map(|path| value(&roster, path).unwrap_or_else(|| "-".to_owned()));
            assert_eq!(found, expected.map(str::to_owned), "{pods} {config}");
        }
    }

    #[test]
    fn only_an_administrator_who_asks_for_it_has_every_restart_stop_the_queues() {
        for (config, expected) in [
            ("", false),
            ("[job-manager]\nstop-queues-on-restart = true", true),
            ("[job-manager]\nstop-queues-on-restart = false", false),
            ("[job-manager.housekeeping]\nrelease-after = \"1m\"", false),
        ] {
            assert_eq!(stops_queues_on_restart(config), expected, "{config}");
        }
    }
}
