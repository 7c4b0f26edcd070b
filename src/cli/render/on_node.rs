//! What would be done on one node's host, in words. Pure.

use std::path::Path;

use api::{
    BROKER_URI, FluxInstanceSpec, METRICS_PORT, Member, PEER_PORT, PREFIX_CANDIDATES, RUN_DIR, Rank, Roster,
    RosterEntry,
};
use base::error_chain;
use broker::{
    command::{BrokerIdentity, launch, rundir},
    files::{APPLIED, FileTexts, files},
    unit::{SERVICE, SLICE_DROP_IN, service},
};
use host::{
    lock::LOCK,
    log,
    state::{self, CONNECT_AT_ROOT, POINTER, RAISED, STATE},
    statedir::STATEDIR,
    users::{User, resolve},
};
use model::{broker_toml::RenderError, preview::Preview, tree};

/// Where systemd looks for units that last until the next boot.
const UNITS: &str = "/run/systemd/system";
/// Stands for a number that only the host's /etc/passwd has.
const UID: &str = "UID";
/// A uid that no spec can ask for by number, and that no text but [`UID`] takes the place of.
const UNKNOWN: u32 = u32::MAX - 1;

/// A rank with its entry and member.
struct Place<'a> {
    rank: Rank,
    entry: &'a RosterEntry,
    member: &'a Member,
}

/// The rank of `node`, or of the lead.
fn place<'a>(roster: &'a Roster, node: Option<&str>) -> Option<Place<'a>> {
    let mut places = roster
        .ranks
        .iter()
        .filter_map(|(rank, entry)| Some(Place { rank: *rank, entry, member: entry.member.as_ref()? }));
    places.find(|place| node.is_none_or(|node| place.member.node == node))
}

/// Says that there is no rank for `node`.
fn no_rank(preview: &Preview, node: &str) -> String {
    match preview.without_rank.get(node) {
        Some(without) => format!("node {node} gets no rank, so no broker runs there: {}", without.reason),
        None => format!("there is no node {node:?} among the given ones"),
    }
}

/// The unit of the broker of `node`, or of the lead's. Adds to `notes` what it takes for granted.
///
/// # Errors
/// If the node has no rank.
pub(super) fn unit(preview: &Preview, node: Option<&str>, notes: &mut Vec<String>) -> Result<String, String> {
    let roster = &preview.roster;
    let place = place(roster, node).ok_or_else(|| no_rank(preview, node.unwrap_or("of rank 0")))?;
    let user = user(&roster.settings.run_as, notes);
    notes.push(format!("systemd runs on the host; the unit is {UNITS}/{SERVICE}, and is gone with the next boot"));
    let identity = BrokerIdentity {
        prefix: Path::new(&preview.prefix),
        rank: place.rank,
        broker_name: &place.entry.broker_name,
        node_uid: &place.member.uid,
        instance_uid: &roster.instance_uid,
        instance_id: &roster.instance_id,
        epoch: roster.epoch,
        loads_live_configuration: roster.declares_nodes(),
    };
    let text = service(&launch(&roster.settings, &identity), &user, None).map_err(|error| error.to_string())?;
    Ok(text.replace(&format!("\nUser={UNKNOWN}\n"), &format!("\nUser={UID}\n")))
}

/// The brokers' user, as far as the spec says.
fn user(run_as: &str, notes: &mut Vec<String>) -> User {
    match resolve(run_as, "", "") {
        Ok(root) if root.uid == 0 => root,
        Ok(user) => {
            notes.push(format!(
                "assumed: the host's /etc/passwd has user {run_as}; if not, ExecStart becomes that user by setpriv(1)"
            ));
            User { known: true, ..user }
        }
        Err(_) => {
            notes.push(format!("{UID} stands for the number that the host's /etc/passwd has for user {run_as}"));
            User { name: run_as.to_owned(), uid: UNKNOWN, gid: UNKNOWN, known: true, ..User::root() }
        }
    }
}

/// What an agent would do on the host of `node`, from the first step to a broker that is online.
///
/// # Errors
/// If there is no such node.
pub(super) fn steps(preview: &Preview, spec: &FluxInstanceSpec, node: &str) -> Result<String, String> {
    let prefix = Path::new(&preview.prefix);
    let roster = &preview.roster;
    let environment = state::environment(prefix, &roster.settings.digest);
    let preflight =
        "looks at the host, and changes nothing: glibc, systemd or a writable cgroup, room at the prefix, a free port";
    let mut claim = vec![format!("makes {}, and in it the undo list {STATE} and the file {LOCK}", prefix.display())];
    if !PREFIX_CANDIDATES.contains(&preview.prefix.as_str()) {
        let places = PREFIX_CANDIDATES.join(", ");
        claim.push(format!(
            "writes {POINTER}, which names that directory, to the first that it can of {places}, {RUN_DIR}"
        ));
    }
    let install = format!(
        "fetches the packages to {}, and links them to {}",
        prefix.join("pkgs").display(),
        environment.display()
    );
    let mut steps = vec![("preflight", vec![preflight.to_owned()])];
    let Some(place) = place(roster, Some(node)) else {
        let without = preview.without_rank.get(node).ok_or_else(|| no_rank(preview, node))?;
        if without.installs {
            steps.extend([("claim", claim), ("install", vec![install])]);
        }
        return Ok(format!("node {node}: no rank: {}\n\n{}", without.reason, table(&steps)));
    };
    let configure = configure(preview, spec, &place).map_err(|error| error_chain(&error))?;
    let mut start = vec![
        match place.rank {
            0 => "as soon as it is configured".to_owned(),
            _ => {
                "once the lead has loaded the resources of this rank, and the broker of its parent is online".to_owned()
            }
        },
        format!("with systemd: starts {SERVICE} in flux.slice, from {UNITS}/{SERVICE} and {UNITS}/{SLICE_DROP_IN}"),
        "without: starts the broker in cgroups of its own, outside of the pod's".to_owned(),
        written(&log::path(prefix), "the broker's log"),
        written(&rundir(prefix), "the broker's rundir, with the temporary directories of jobs"),
    ];
    if place.rank == 0 {
        start.push(written(&prefix.join(APPLIED), "which revision of the roster the broker has loaded"));
    }
    steps.extend([
        ("claim", claim),
        ("install", vec![install]),
        ("configure", configure),
        ("start", start),
        ("online", vec![format!("waits until the broker answers at {BROKER_URI}, and is in state run")]),
        ("ports", ports(roster, &place)),
        ("mounts", vec!["none".to_owned()]),
        ("at the end", vec![format!("removes all of it, and {RUN_DIR}; {STATE} lists what to undo")]),
    ]);
    Ok(format!("{}\n\n{}", title(roster, &place), table(&steps)))
}

fn title(roster: &Roster, Place { rank, entry, member }: &Place) -> String {
    let declared = entry.resources.as_ref();
    let cores = declared.map(|declared| format!("; declares cores {}", declared.core_ids())).unwrap_or_default();
    let gpus = declared.filter(|declared| declared.gpus > 0).map(|declared| format!(" and {} GPUs", declared.gpus));
    let parent = tree::parent(roster, *rank).and_then(|parent| Some((parent, roster.member(parent)?)));
    let role = match parent {
        Some((parent, above)) => format!("a follower, child of rank {parent} ({})", above.node),
        None => "the lead".to_owned(),
    };
    let (node, broker, gpus) = (&member.node, &entry.broker_name, gpus.unwrap_or_default());
    format!("node {node}: rank {rank}, broker {broker}, {role}{cores}{gpus}")
}

/// What step `configure` writes.
fn configure(preview: &Preview, spec: &FluxInstanceSpec, place: &Place) -> Result<Vec<String>, RenderError> {
    let prefix = Path::new(&preview.prefix);
    let run_as = &preview.roster.settings.run_as;
    let raised = RAISED.map(|(name, value)| format!("raises {name} to {value}, if it is lower"));
    // Only paths and modes are shown, so the texts may be empty.
    let texts = FileTexts { broker_toml: "", certificate: "", roster: "" };
    let files = files(prefix, &preview.roster, place.rank, &texts, &User::root())?;
    let files = files.into_iter().map(|file| {
        let owner = if file.broker_owned { run_as.as_str() } else { "root" };
        written(&prefix.join(file.path), &format!("mode {:04o}, owner {owner}", file.mode))
    });
    let mut lines: Vec<String> = raised.into_iter().chain(files).collect();
    lines.push(written(&prefix.join("current"), "a symlink to the environment"));
    lines.push(written(Path::new(CONNECT_AT_ROOT), "the same script for people, if the root directory can be written"));
    if spec.packages.bundle.is_some() {
        let link = "writes a symlink at the prefix that the bundle's Flux was built for, if that is another one";
        lines.push(link.to_owned());
    }
    if place.rank == 0 {
        lines.push(written(&prefix.join(STATEDIR), &format!("the queue, owner {run_as}; it outlives the broker")));
    }
    Ok(lines)
}

fn written(path: &Path, what: &str) -> String {
    format!("writes {}: {what}", path.display())
}

fn ports(roster: &Roster, Place { rank, member, .. }: &Place) -> Vec<String> {
    let port = roster.settings.port;
    let is_parent = tree::topology(roster).is_some_and(|tree| tree.is_interior(*rank, roster.settings.max_size));
    let above = tree::parent(roster, *rank).and_then(|parent| roster.member(parent));
    let broker = [
        is_parent.then(|| format!("TCP {}: the broker listens for its children", socket(member, port))),
        above.map(|above| format!("the broker connects to {} ({})", socket(above, port), above.node)),
    ];
    let agent = [
        format!("TCP {}: the agent's metrics, for clients that the API server permits", socket(member, METRICS_PORT)),
        format!("TCP {}: the agent serves packages to other nodes", socket(member, PEER_PORT)),
    ];
    broker.into_iter().flatten().chain(agent).collect()
}

fn socket(member: &Member, port: u16) -> String {
    std::net::SocketAddr::new(member.address, port).to_string()
}

/// Each row's name before its first line.
fn table(rows: &[(&str, Vec<String>)]) -> String {
    let line = |(name, line): (&str, &String)| format!("{name:<11}{line}\n");
    rows.iter()
        .flat_map(|(name, lines)| std::iter::once(*name).chain(std::iter::repeat("")).zip(lines))
        .map(line)
        .collect()
}
