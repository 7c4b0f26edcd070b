//! `kubectl flux status`: one screen.

use std::{io, time::Duration};

use comfy_table::Cell;

use crate::{
    arguments::{StatusFormat, StatusOptions},
    error::KubectlError,
    observed::Cluster,
    overview::{Instance, Node, Overview, State, overview},
    screen::{Look, cell, json, print, print_anew, table, width, word, yaml},
};
use api::{IdSet, InstancePhase, NodePhase};
use base::words::many;
use model::hostlist;

/// How often `--watch` looks.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Most lines of nodes on one screen.
const MOST_LINES: usize = 40;

/// Prints the status, once or until Ctrl-C.
///
/// # Errors
/// There is no instance, or the API server fails; with `--watch` both are shown, and may pass. Or the output fails.
pub(crate) async fn run(cluster: &Cluster, options: &StatusOptions) -> Result<(), KubectlError> {
    let look = async || Ok::<_, KubectlError>(render(&overview(&cluster.observe().await?), options.output, width())?);
    if !options.watch {
        return Ok(print(&look().await?)?);
    }
    let mut printed = None;
    loop {
        let text = look().await.unwrap_or_else(|error| error.text() + "\n");
        if printed.as_ref() != Some(&text) {
            print_anew(&text)?;
            printed = Some(text);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn render(overview: &Overview, format: StatusFormat, width: u16) -> io::Result<String> {
    match format {
        StatusFormat::Json => json(overview),
        StatusFormat::Yaml => yaml(overview),
        StatusFormat::Text => Ok(format!("{}\n{}", head(&overview.instance, width), nodes(overview, width))),
        StatusFormat::Wide => Ok(format!("{}\n{}", head(&overview.instance, width), wide(overview))),
    }
}

/// What is true of the instance as a whole.
fn head(instance: &Instance, width: u16) -> String {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    let mut row = |name: &str, text: String, look| rows.push(vec![cell(name, Look::Plain), cell(text, look)]);
    let (phase, look) = (word(&instance.phase), look_of_instance(&instance.phase));
    row("instance", instance.message.as_ref().map_or(phase.clone(), |message| format!("{phase}: {message}")), look);
    if let Some(lead) = &instance.lead {
        let flux = instance.flux_version.as_ref().map_or(String::new(), |version| format!(", Flux {version}"));
        row("lead", format!("{lead}, epoch {}{flux}", instance.epoch), Look::Plain);
    }
    let Instance { size, online, max_size, .. } = instance;
    row("nodes", format!("{online} of {size} online, room for {max_size}"), Look::Plain);
    if let Some(jobs) = instance.jobs {
        row("jobs", format!("{} running, {} pending", jobs.running, jobs.pending), Look::Plain);
    }
    if let Some(pods) = &instance.pods {
        let refused = if pods.refused == 0 { String::new() } else { format!(", {} refused", pods.refused) };
        let text = format!("{} running, {} queued{refused}", many(pods.running, "gang"), pods.queued);
        row("pods", text, Look::Plain);
    }
    for notice in &instance.notices {
        row(&notice.subject, notice.message.clone(), Look::Unusual);
    }
    table(rows, Some(width))
}

/// Nodes that are alike share a line.
fn nodes(overview: &Overview, width: u16) -> String {
    let mut groups: Vec<Vec<&Node>> = Vec::new();
    for node in &overview.nodes {
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| are_alike(first, node))) {
            Some(group) => group.push(node),
            None => groups.push(vec![node]),
        }
    }
    let left_out: usize = groups.iter().skip(MOST_LINES).map(Vec::len).sum();
    let head = ["NODES", "RANKS", "PHASE", "STATE", "CORES", "GPUS", "MESSAGE"];
    let lines = groups.iter().take(MOST_LINES).filter_map(|group| {
        let first = group.first()?;
        let ranks: IdSet = group.iter().filter_map(|node| node.rank).collect();
        let mut line = vec![
            cell(hostlist::encode(group.iter().map(|node| &node.name)), Look::Plain),
            cell(if ranks.is_empty() { "-".to_owned() } else { ranks.to_string() }, Look::Plain),
        ];
        line.extend(common(first));
        line.push(cell(first.message.as_deref().unwrap_or_default(), Look::Plain));
        Some(line)
    });
    let mut text = table(std::iter::once(titles(&head)).chain(lines), Some(width));
    if left_out > 0 {
        text.push_str(&format!("and {}: -o wide shows all\n", many(left_out as u64, "more node")));
    }
    text + &unreadable(overview)
}

/// A line for each node.
fn wide(overview: &Overview) -> String {
    let head = [
        "NODE",
        "RANK",
        "PHASE",
        "STATE",
        "CORES",
        "GPUS",
        "HOST-JOBS",
        "GANGS",
        "OTHER-PODS",
        "FLUX",
        "PACKAGES",
        "MESSAGE",
    ];
    let lines = overview.nodes.iter().map(|node| {
        let number =
            |number: Option<u32>| cell(number.map_or("-".to_owned(), |number| number.to_string()), Look::Plain);
        let text = |text: &Option<String>| cell(text.as_deref().unwrap_or("-"), Look::Plain);
        let mut line = vec![cell(&node.name, Look::Plain), number(node.rank)];
        line.extend(common(node));
        line.extend([
            number(node.account.map(|account| account.host_jobs)),
            number(node.account.map(|account| account.gangs)),
            number(node.account.map(|account| account.other_pods)),
            text(&node.flux_version),
            cell(node.digest.as_deref().map_or("-", |digest| digest.get(..12).unwrap_or(digest)), Look::Plain),
            cell(node.message.as_deref().unwrap_or_default(), Look::Plain),
        ]);
        line
    });
    table(std::iter::once(titles(&head)).chain(lines), None) + &unreadable(overview)
}

fn unreadable(overview: &Overview) -> String {
    let names = &overview.unreadable;
    if names.is_empty() {
        return String::new();
    }
    format!("not shown, because another version has written them: {}\n", hostlist::encode(names))
}

fn titles(words: &[&str]) -> Vec<Cell> {
    words.iter().map(|word| cell(word, Look::Plain)).collect()
}

/// The columns that both tables have.
fn common(node: &Node) -> Vec<Cell> {
    let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    vec![
        cell(word(&node.phase), look_of_phase(&node.phase)),
        cell(node.state.word(), look_of_state(node.state)),
        cell(number(node.cores), Look::Plain),
        cell(number(node.gpus), Look::Plain),
    ]
}

fn are_alike(a: &Node, b: &Node) -> bool {
    let shown = |node: &Node| (node.rank.is_some(), node.phase.clone(), node.state, node.cores, node.gpus);
    shown(a) == shown(b) && a.message == b.message
}

fn look_of_instance(phase: &InstancePhase) -> Look {
    match phase {
        InstancePhase::Running => Look::Good,
        InstancePhase::Degraded | InstancePhase::Failed => Look::Bad,
        _ => Look::Unusual,
    }
}

fn look_of_phase(phase: &NodePhase) -> Look {
    match phase {
        NodePhase::Online => Look::Good,
        NodePhase::Failed | NodePhase::Offline => Look::Bad,
        _ => Look::Unusual,
    }
}

fn look_of_state(state: State) -> Look {
    match state {
        State::Down => Look::Bad,
        State::Drained | State::Draining | State::Unknown => Look::Unusual,
        State::Free | State::Allocated | State::NoRank => Look::Plain,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        fixture::{change, observed},
        observed::Observed,
    };

    fn screen(observed: &Observed, width: u16) -> String {
        render(&overview(observed), StatusFormat::Text, width).unwrap()
    }

    #[test]
    fn a_healthy_instance_fits_on_six_lines() {
        let jobs = json!({"allocated": "1-2", "jobs": {"running": 3, "pending": 1}});
        assert_eq!(
            screen(&observed(4, &Value::Null, &jobs), 100),
            "\
instance  Running: all 4 nodes are online
lead      n1, epoch 2, Flux 0.88.0
nodes     4 of 4 online, room for 64
jobs      3 running, 1 pending

NODES   RANKS  PHASE   STATE      CORES  GPUS  MESSAGE
n[1,4]  0,3    Online  free       8      0
n[2-3]  1-2    Online  allocated  8      0
"
        );
    }

    /// What a line says of a node of rank 1 with that spec and status, where the lead says that.
    fn line(lead: &Value, spec: &Value, status: &Value) -> String {
        let mut observed = observed(2, &Value::Null, lead);
        change(&mut observed, 0, &Value::Null, &json!({"message": "the lead"}));
        change(&mut observed, 1, spec, status);
        let screen = screen(&observed, 100);
        let line = screen.lines().find(|line| line.starts_with("n2")).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_state_of_a_node_has_a_word_and_says_why() {
        let none = Value::Null;
        let failed = json!({"phase": "Failed", "message": "sha256 differs", "needsAttention": true});
        for (lead, spec, status, expected) in [
            (json!({"allocated": "1"}), &none, &none, "n2 1 Online allocated 8 0"),
            (json!({"drained": "1"}), &json!({"drainReason": "leaves"}), &none, "n2 1 Online drained 8 0 leaves"),
            (json!({"drained": "1", "allocated": "1"}), &none, &none, "n2 1 Online draining 8 0"),
            (
                json!({"drainedByOthers": "1"}),
                &json!({"reason": "drained: disk"}),
                &none,
                "n2 1 Online drained 8 0 drained: disk",
            ),
            (json!({"offline": [1]}), &none, &json!({"phase": "Offline"}), "n2 1 Offline down 8 0"),
            (json!({"allocated": null}), &none, &none, "n2 1 Online unknown 8 0"),
            (json!({"torpid": "1"}), &none, &none, "n2 1 Online free 8 0 its broker is slow to answer"),
            (
                none.clone(),
                &json!({"rank": null}),
                &json!({"phase": "Waiting", "message": "cordoned"}),
                "n2 - Waiting - 8 0 cordoned",
            ),
            (none.clone(), &json!({"rank": null}), &failed, "n2 - Failed - 8 0 sha256 differs"),
            (none.clone(), &none, &json!({"phase": "Preflight", "facts": null}), "n2 1 Preflight free - -"),
            (
                none.clone(),
                &none,
                &json!({"phase": "Installing", "message": "3 of 20 packages"}),
                "n2 1 Installing free 8 0 3 of 20 packages",
            ),
            (none.clone(), &none, &json!({"phase": "Starting"}), "n2 1 Starting free 8 0"),
            (none.clone(), &none, &json!({"phase": "Draining"}), "n2 1 Draining free 8 0"),
            (none.clone(), &none, &json!({"phase": "Removing"}), "n2 1 Removing free 8 0"),
            (none.clone(), &none, &json!({"phase": "Dreaming"}), "n2 1 Dreaming free 8 0"),
        ] {
            assert_eq!(line(&lead, spec, status), expected);
        }
    }

    #[test]
    fn each_phase_of_the_instance_says_what_it_waits_for() {
        for phase in ["Pending", "Starting", "Running", "Restarting", "Degraded", "Failed", "Ignored"] {
            let status = json!({"phase": phase, "message": "the lead's disk is full"});
            let screen = screen(&observed(1, &status, &Value::Null), 100);
            assert_eq!(screen.lines().next(), Some(format!("instance  {phase}: the lead's disk is full").as_str()));
        }
    }

    #[test]
    fn what_holds_is_shown_once() {
        let condition = |type_: &str, message: &str| json!({"type": type_, "status": "True", "reason": "X", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({
            "phase": "Degraded", "message": "queue lost",
            "conditions": [condition("Ready", "x"), condition("Degraded", "queue lost"), condition("RestartPending", "packages")],
            "pods": {"running": 1, "queued": 2, "refused": 3, "waitsFor": "the scheduler"},
        });
        let screen = screen(&observed(1, &status, &json!({"stoppedQueues": "queue stopped"})), 100);
        let head: Vec<_> = screen.lines().take_while(|line| !line.is_empty()).collect();
        let expected = [
            "instance        Degraded: queue lost",
            "lead            n1, epoch 2, Flux 0.88.0",
            "nodes           1 of 1 online, room for 64",
            "jobs            0 running, 0 pending",
            "pods            1 gang running, 2 queued, 3 refused",
            "RestartPending  packages",
            "queues          queue stopped",
            "pods wait       the scheduler",
        ];
        assert_eq!(head, expected);
    }

    #[test]
    fn a_thousand_nodes_fit_on_a_page_and_no_line_is_wider_than_the_screen() {
        let alike = screen(&observed(1000, &Value::Null, &json!({"allocated": "0-499", "offline": [999]})), 100);
        assert!(alike.lines().count() < 12, "{alike}");
        let mut different = observed(1000, &Value::Null, &Value::Null);
        for rank in 0..1000 {
            change(&mut different, rank, &Value::Null, &json!({"message": format!("{rank} {}", "long ".repeat(20))}));
        }
        for width in [60, 100] {
            let screen = screen(&different, width);
            assert!(screen.lines().all(|line| line.chars().count() <= width.into()), "{screen}");
            assert!(screen.ends_with("and 960 more nodes: -o wide shows all\n"), "{screen}");
        }
    }

    #[test]
    fn no_message_steers_the_terminal() {
        let mut observed = observed(1, &json!({"message": "a\u{1b}[2Jb"}), &Value::Null);
        change(&mut observed, 0, &Value::Null, &json!({"message": "x\r\u{9b}31my"}));
        assert!(!screen(&observed, 100).chars().any(|c| c.is_control() && c != '\n'));
    }

    #[test]
    fn programs_get_all_of_it() {
        let overview = overview(&observed(2, &Value::Null, &Value::Null));
        let json: Value = serde_json::from_str(&render(&overview, StatusFormat::Json, 100).unwrap()).unwrap();
        let yaml: Value = serde_norway::from_str(&render(&overview, StatusFormat::Yaml, 100).unwrap()).unwrap();
        assert_eq!(json, yaml);
        assert_eq!(json["nodes"][1]["state"], "free");
        assert_eq!(json["instance"]["jobs"], json!({"running": 0, "pending": 0}));
    }
}
