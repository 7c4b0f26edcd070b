//! `flux-distribute render`: what the planner and the agents would write for some nodes, without a cluster and without hosts.

mod on_node;

use std::{
    io::{self, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, Subcommand};

use super::{
    Failure,
    input::{is_stdin, shown, text_of},
    print,
};
use api::{FluxInstanceSpec, MOST_CORES_OR_GPUS, Rank, by_line};
use base::{error_chain, words::many};
use kubectl::TreeFormat;
use model::{
    broker_toml,
    drawing::{Drawing, Mark},
    hostlist,
    preview::{AssumedResources, GivenNodes, Preview, preview},
    read::read_instance,
};

const ABOUT: &str = "\
Examples:
  flux-distribute render --hosts 'n[1-8]' --cores 64                broker.toml of 8 equal nodes
  flux-distribute render --hosts 'n[1-3000]' tree -o svg > t.svg    the tree of 3,000
  kubectl get nodes -o json | flux-distribute render --nodes - node node7

The same functions plan here as in the planner. What only a host or a running planner knows is assumed, and comments at the top
of the output list it. Nodes that get no rank are named on stderr, each with the reason.

Exit code: 0, or 2 if the nodes or the spec can't be served.";

/// What to render, and of which nodes.
#[derive(Args, Debug, Clone)]
#[command(after_help = ABOUT)]
pub struct RenderArguments {
    #[command(flatten)]
    from: From,
    /// The FluxInstance, as `validate` reads it; - reads stdin. Default: each field's default
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Physical cores of each host. Default: capacity.cpu of its Node, else 1
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CORES_OR_GPUS)))]
    cores: Option<u32>,
    /// GPUs of each host
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=i64::from(MOST_CORES_OR_GPUS)))]
    gpus: u32,
    /// Address of the first of --hosts; the others follow. The default is in a network for benchmarks (RFC 2544)
    #[arg(long, value_name = "ADDRESS", default_value = "198.18.0.1", conflicts_with = "nodes")]
    address_base: IpAddr,
    #[command(subcommand)]
    what: Option<What>,
}

/// Where the nodes come from.
#[derive(Args, Debug, Clone)]
#[group(required = true, multiple = false)]
struct From {
    /// Equal nodes with these names, such as `n[1-8]`
    #[arg(long, value_name = "HOSTLIST")]
    hosts: Option<String>,
    /// The Nodes in a file, as `kubectl get nodes -o yaml` or `-o json` prints them; - reads stdin
    #[arg(long, value_name = "FILE")]
    nodes: Option<PathBuf>,
}

#[derive(Subcommand, Debug, Clone)]
enum What {
    /// The configuration of all brokers, as the planner publishes it (the default)
    BrokerToml,
    /// The tree in which the brokers connect
    Tree {
        /// Output format
        #[arg(long, short, value_enum, default_value_t = TreeFormat::Text)]
        output: TreeFormat,
    },
    /// The systemd unit of a broker
    Unit {
        /// The node; by default the lead
        node: Option<String>,
    },
    /// What would be done on a node's host, step by step
    Node {
        /// The node
        node: String,
    },
}

/// Renders, and prints.
pub(super) fn render(arguments: RenderArguments) -> Result<ExitCode, Failure> {
    let both = [&arguments.from.nodes, &arguments.spec];
    if both.iter().all(|file| file.as_deref().is_some_and(is_stdin)) {
        return Err(Failure::bad_input(
            "both --nodes and --spec are -, but stdin can be read only once: name one of them".to_owned(),
        ));
    }
    let spec = arguments.spec.as_deref().map_or_else(|| Ok(FluxInstanceSpec::default()), spec_of)?;
    let (option, nodes) = match (&arguments.from.hosts, &arguments.from.nodes) {
        (Some(list), _) => {
            let wrong = |error| Failure::bad_input(format!("--hosts {list:?} {error}"));
            let hosts = hostlist::parse(list).map_err(wrong)?;
            ("--hosts".to_owned(), GivenNodes::invent(&hosts, arguments.address_base))
        }
        (None, Some(file)) => (shown(file).display().to_string(), GivenNodes::read(&text_of(file)?)),
        // clap has refused this already.
        (None, None) => return Err(Failure::bad_input("give --hosts or --nodes".to_owned())),
    };
    let assumed = AssumedResources { cores: arguments.cores, gpus: arguments.gpus };
    let refused = |error| Failure::bad_input(format!("{option}: {}", error_chain(&error)));
    let preview = nodes.and_then(|nodes| preview(&spec, &nodes, assumed)).map_err(refused)?;
    let text = text(&preview, &spec, arguments.what.unwrap_or(What::BrokerToml)).map_err(Failure::bad_input)?;
    for (node, without) in &preview.without_rank {
        // A closed stderr has no reader, so there is no way to report that.
        let _ = writeln!(io::stderr(), "{node} gets no rank: {}", without.reason);
    }
    print(&text)
}

/// The spec in a file, if it can be served.
fn spec_of(file: &Path) -> Result<FluxInstanceSpec, Failure> {
    let refused = |findings: Vec<_>| Failure::bad_input(by_line(shown(file), &findings));
    read_instance(&text_of(file)?).map_err(refused)
}

/// The output. Pure.
///
/// # Errors
/// Names the node that is not there, or says why its files can't be made.
fn text(preview: &Preview, spec: &FluxInstanceSpec, what: What) -> Result<String, String> {
    let assumed = preview.assumptions.iter().map(|sentence| format!("assumed: {sentence}"));
    let mut notes: Vec<String> = assumed.collect();
    let text = match what {
        What::BrokerToml => {
            notes.push("each host's file also has the path of its certificate: [bootstrap] curve_cert".to_owned());
            broker_toml::render(&preview.roster).map_err(|error| error_chain(&error))?
        }
        What::Tree { output } => {
            let (before, after) = match output {
                TreeFormat::Text => ("# ", ""),
                TreeFormat::Dot => ("// ", ""),
                TreeFormat::Svg => {
                    // XML's comments must not contain two hyphens.
                    notes.iter_mut().for_each(|note| *note = note.replace("--", "- -"));
                    ("<!-- ", " -->")
                }
            };
            let drawing = Drawing::of(&preview.roster, |rank| mark(preview, rank));
            return Ok(comments(before, after, &notes) + &output.draw(&drawing));
        }
        What::Unit { node } => on_node::unit(preview, node.as_deref(), &mut notes)?,
        What::Node { node } => on_node::steps(preview, spec, &node)?,
    };
    Ok(comments("# ", "", &notes) + &text)
}

fn comments(before: &str, after: &str, notes: &[String]) -> String {
    notes.iter().map(|note| format!("{before}{note}{after}\n")).collect()
}

/// What the drawing says of a rank: the resources that it declares.
fn mark(preview: &Preview, rank: Rank) -> Mark {
    let declared = preview.roster.ranks.get(&rank).and_then(|entry| entry.resources.as_ref());
    let (cores, gpus) = declared.map_or((0, 0), |declared| (declared.core_ids().len() as u64, declared.gpus));
    let is_excluded = declared.is_some_and(|declared| declared.excluded);
    let mut word = many(cores, "core");
    if gpus > 0 {
        word.push_str(&format!(", {}", many(gpus, "GPU")));
    }
    if is_excluded {
        word.push_str(", no jobs");
    }
    Mark { word, colour: if is_excluded { "gray" } else { "black" } }
}

#[cfg(test)]
mod tests;
