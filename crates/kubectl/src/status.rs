//! `kubectl flux status`: one screen.

use std::{borrow::Cow, process::ExitCode, time::Duration};

use comfy_table::Cell;

use crate::{
    alike::alike,
    arguments::{StatusFormat, StatusOptions},
    error::KubectlError,
    observed::Cluster,
    overview::{Instance, Node, Overview, overview},
    screen::{Colour, Screen, cell, complain, json, plain, print, print_anew, table, word, yaml},
};
use api::IdSet;
use base::words::many;
use model::hostlist::shortened;

/// How often `--watch` looks.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Most characters of a node's message where nodes share a screen: a node may say up to 8 KiB.
const LONGEST_MESSAGE: usize = 300;
/// Most lines of nodes on one screen.
const MOST_LINES: usize = 40;

/// Prints the status, once or until Ctrl-C.
///
/// # Errors
/// There is no instance, or the API server fails; with `--watch` both are shown, and may pass, unless the API server refuses. Or the
/// output fails.
pub(crate) async fn run(cluster: &Cluster, options: &StatusOptions) -> Result<ExitCode, KubectlError> {
    let look =
        async || Ok::<_, KubectlError>(render(&overview(&cluster.observe().await?), options.output, Screen::stdout())?);
    if !options.watch {
        print(&look().await?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut printed = None;
    loop {
        // After a while without an answer there may be one again, but nobody becomes known or gets rights by waiting.
        let text = match look().await {
            Err(error) if error.is_denied() => return Err(error),
            looked => looked.map_err(|error| error.text() + "\n"),
        };
        if printed.as_ref() != Some(&text) {
            match &text {
                Ok(text) => print_anew(text, if printed.is_some() { between(options.output) } else { "" })?,
                Err(complaint) => complain(complaint),
            }
            printed = Some(text);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What stands between two of them in a file, so that a reader of that format knows where one ends.
fn between(format: StatusFormat) -> &'static str {
    match format {
        StatusFormat::Text | StatusFormat::Wide => "\n",
        StatusFormat::Json => "",
        StatusFormat::Yaml => "---\n",
    }
}

/// The status in that format.
///
/// # Errors
/// It can't be turned into JSON or YAML.
pub(crate) fn render(overview: &Overview, format: StatusFormat, screen: Screen) -> Result<String, KubectlError> {
    match format {
        StatusFormat::Json => json(overview),
        StatusFormat::Yaml => yaml(overview),
        StatusFormat::Text => Ok(format!("{}\n{}", head(&overview.instance, screen), nodes(overview, screen))),
        StatusFormat::Wide => Ok(format!("{}\n{}", head(&overview.instance, screen), wide(overview, screen))),
    }
}

/// What is true of the instance as a whole.
fn head(instance: &Instance, screen: Screen) -> String {
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    let mut row = |name: &str, text: String, colour| rows.push(vec![plain(name), cell(text, colour)]);
    let (phase, colour) = (word(&instance.phase), Colour::from(instance.attention));
    row("instance", instance.message.as_ref().map_or(phase.clone(), |message| format!("{phase}: {message}")), colour);
    if let Some(lead) = &instance.lead {
        let flux = instance.flux_version.as_ref().map_or(String::new(), |version| format!(", Flux {version}"));
        row("lead", format!("{lead}, epoch {}{flux}", instance.epoch), Colour::Plain);
    }
    let Instance { size, online, max_size, .. } = instance;
    row("nodes", format!("{online} of {size} online, room for {max_size}"), Colour::Plain);
    if let Some(jobs) = instance.jobs {
        row("jobs", format!("{} running, {} pending", jobs.running, jobs.pending), Colour::Plain);
    }
    if let Some(pods) = &instance.pods {
        let refused = if pods.refused == 0 { String::new() } else { format!(", {} refused", pods.refused) };
        let text = format!("{} running, {} queued{refused}", many(pods.running, "gang"), pods.queued);
        row("pods", text, Colour::Plain);
    }
    for notice in &instance.notices {
        row(&notice.subject, notice.message.clone(), Colour::from(notice.attention));
    }
    table(rows, screen)
}

/// Nodes that are alike share a line.
fn nodes(overview: &Overview, screen: Screen) -> String {
    let shown = |node: &&Node| {
        let message = node.message.clone();
        (node.rank.is_some(), node.phase.clone(), node.state, node.attention, node.cores, node.gpus, message)
    };
    let groups = alike(&overview.nodes, shown);
    let left_out: usize = groups.iter().skip(MOST_LINES).map(|(_, group)| group.len()).sum();
    let head = ["NODES", "RANKS", "PHASE", "STATE", "CORES", "GPUS", "MESSAGE"];
    let lines = groups.iter().take(MOST_LINES).filter_map(|(_, group)| {
        let first = group.first()?;
        let ranks: IdSet = group.iter().filter_map(|node| node.rank).collect();
        let mut line = vec![
            plain(shortened(group.iter().map(|node| node.name.as_str()))),
            plain(if ranks.is_empty() { "-".to_owned() } else { ranks.to_string() }),
        ];
        line.extend(common(first));
        line.push(plain(short(first.message.as_deref().unwrap_or_default())));
        Some(line)
    });
    let mut text = table(std::iter::once(titles(&head)).chain(lines), screen);
    if left_out > 0 {
        text.push_str(&format!("and {}: -o wide shows all\n", many(left_out as u64, "more node")));
    }
    text + &unreadable(overview)
}

/// The begin of a message that would fill the screen.
fn short(message: &str) -> Cow<'_, str> {
    match message.char_indices().nth(LONGEST_MESSAGE) {
        Some((end, _)) => format!("{}...", message[..end].trim_end()).into(),
        None => message.into(),
    }
}

/// A line for each node.
fn wide(overview: &Overview, screen: Screen) -> String {
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
        let number = |number: Option<u32>| plain(number.map_or("-".to_owned(), |number| number.to_string()));
        let text = |text: &Option<String>| plain(text.as_deref().unwrap_or("-"));
        let mut line = vec![plain(&node.name), number(node.rank)];
        line.extend(common(node));
        line.extend([
            number(node.account.map(|account| account.host_jobs)),
            number(node.account.map(|account| account.gangs)),
            number(node.account.map(|account| account.other_pods)),
            text(&node.flux_version),
            plain(node.digest.as_deref().map_or("-", |digest| digest.get(..12).unwrap_or(digest))),
            plain(node.message.as_deref().unwrap_or_default()),
        ]);
        line
    });
    table(std::iter::once(titles(&head)).chain(lines), screen.endless()) + &unreadable(overview)
}

fn unreadable(overview: &Overview) -> String {
    if overview.unreadable.is_empty() {
        return String::new();
    }
    format!(
        "not shown, because another version has written them: {}\n",
        shortened(overview.unreadable.iter().map(String::as_str))
    )
}

fn titles(words: &[&str]) -> Vec<Cell> {
    words.iter().map(plain).collect()
}

/// The columns that both tables have.
fn common(node: &Node) -> Vec<Cell> {
    let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    vec![
        cell(word(&node.phase), node.attention),
        cell(node.state.word(), node.attention),
        plain(number(node.cores)),
        plain(number(node.gpus)),
    ]
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
        let screen = Screen { width: Some(width), has_colours: false };
        render(&overview(observed), StatusFormat::Text, screen).unwrap()
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
    fn no_node_fills_the_screen() {
        let mut observed = observed(2, &Value::Null, &Value::Null);
        change(&mut observed, 1, &Value::Null, &json!({"message": "long ".repeat(1600)}));
        let text = screen(&observed, 100);
        assert!(text.lines().count() < 20 && text.contains("..."), "{text}");
        let wide = render(&overview(&observed), StatusFormat::Wide, Screen::FILE).unwrap();
        assert!(wide.contains(&"long ".repeat(1599)), "{wide}");
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
        let json: Value = serde_json::from_str(&render(&overview, StatusFormat::Json, Screen::FILE).unwrap()).unwrap();
        let yaml: Value =
            serde_norway::from_str(&render(&overview, StatusFormat::Yaml, Screen::FILE).unwrap()).unwrap();
        assert_eq!(json, yaml);
        assert_eq!(json["nodes"][1]["state"], "free");
        assert_eq!(json["instance"]["jobs"], json!({"running": 0, "pending": 0}));
    }
}
