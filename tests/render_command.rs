//! `flux-distribute render` through the program: pipes, exit codes, and that its files are those that the planner publishes.

#![allow(clippy::unwrap_used, reason = "clippy.toml's exception ends at the tests' own functions")]

use std::{
    fs,
    io::{Read, Write},
    process::{Command, Stdio},
};

use api::Roster;
use model::{broker_toml, fixture::roster};
use serde_json::{Value, json};

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs `render` with these words and this stdin.
fn render(words: &[&str], stdin: &str) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    command.arg("render").args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that refuses its arguments reads no stdin.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// What follows the comments that `render` adds.
fn published(out: &str) -> String {
    let notes = |line: &&str| line.starts_with("# assumed: ") || line.starts_with("# each host's file");
    out.lines().skip_while(notes).map(|line| format!("{line}\n")).collect()
}

fn node(name: &str, unschedulable: bool) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": format!("uid-{name}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"unschedulable": unschedulable},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "", "message": ""}],
            "capacity": {"cpu": "4"}, "allocatable": {"cpu": "4"},
        },
    })
}

#[test]
fn broker_toml_is_the_one_that_the_planner_publishes_for_the_same_roster() {
    let planned = Roster { instance_id: "ID".to_owned(), ..roster(64, &[("n1", 4), ("n2", 4), ("n3", 4)]) };
    let expected = broker_toml::render(&planned).unwrap();
    let hosts = render(&["--hosts", "n[1-3]", "--cores", "4", "--address-base", "10.0.0.1"], "");
    assert_eq!((hosts.code, hosts.err.as_str()), (Some(0), ""));
    assert_eq!(published(&hosts.out), expected);
    assert!(hosts.out.starts_with("# assumed: each host passes preflight"), "{}", hosts.out);
    let list = json!({"kind": "List", "items": [node("n2", false), node("n1", false), node("n3", false)]});
    for text in [list.to_string(), serde_norway::to_string(&list).unwrap()] {
        assert_eq!(published(&render(&["--nodes", "-", "broker-toml"], &text).out), expected);
    }
}

#[test]
fn a_node_that_gets_no_rank_is_named_beside_the_output() {
    let list = json!({"kind": "List", "items": [node("n1", false), node("n2", true)]}).to_string();
    let said = render(&["--nodes", "-", "tree"], &list);
    assert_eq!((said.code, said.err.as_str()), (Some(0), "n2 gets no rank: the node is cordoned\n"));
    assert!(said.out.ends_with("\n0 n1 4 cores\n"), "{}", said.out);
}

#[test]
fn the_spec_is_read_as_validate_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let installer = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/daemonset-installer.yaml");
    fs::write(at("good.yaml"), "spec:\n  topology: kary:2\n").unwrap();
    fs::write(at("bad.yaml"), "size: 0\nsise: 3\n").unwrap();
    assert_eq!(render(&["--hosts", "n1", "--spec", installer], "").code, Some(0));
    let good = render(&["--hosts", "n[1-7]", "--spec", &at("good.yaml"), "tree"], "");
    assert!(good.out.contains("\n    3-4 n[4-5] 1 core\n"), "{}", good.out);
    assert_eq!(render(&["--hosts", "n[1-7]", "--spec", "-", "tree"], "topology: kary:2").out, good.out);
    let bad = render(&["--hosts", "n1", "--spec", &at("bad.yaml")], "");
    let mut validate = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    let findings = String::from_utf8(validate.args(["validate", &at("bad.yaml")]).output().unwrap().stderr).unwrap();
    assert_eq!((bad.code, bad.out.as_str()), (Some(2), ""));
    assert_eq!(bad.err, format!("flux-distribute: {findings}"));
}

#[test]
fn what_is_wrong_exits_with_2_and_one_message() {
    for (words, stdin, expected) in [
        (&["--hosts", "n[1-x]"][..], "", "--hosts \"n[1-x]\" \"n[1-x]\" is neither a node's name nor a range"),
        (&["--hosts", ""], "", "names no host"),
        (&["--hosts", "n[1-20000]"], "", "names more than 16384 hosts"),
        (&["--hosts", "n1,n1"], "", "names n1 twice"),
        (&["--hosts", "n1", "--nodes", "-"], "", "cannot be used with"),
        (&["--hosts", "n1", "--cores", "0"], "", "0 is not in 1..=65536"),
        (&["--hosts", "n[1-2]", "--address-base", "255.255.255.255"], "", "begin with a lower one"),
        (&["--hosts", "n[1-2]", "node", "n3"], "", "there is no node \"n3\" among the given ones"),
        (&["--hosts", "n[1-2]", "tree", "-o", "png"], "", "invalid value 'png'"),
        (&["tree"], "", "required"),
        (&["--nodes", "-", "--spec", "-"], "", "stdin can be read only once"),
        (&["--nodes", "-"], "", "stdin: holds no Node"),
        (&["--nodes", "-"], "kind: Pod\n", "stdin: holds a Pod, and only Nodes are read"),
        (&["--nodes", "/nowhere/nodes.yaml"], "", "/nowhere/nodes.yaml: No such file"),
        (&["--hosts", "n1", "--spec", "-"], "lead: n2\n", "waiting for node n2, which is to be the lead"),
    ] {
        let said = render(words, stdin);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{words:?}: {}", said.err);
        assert!(said.err.contains(expected), "{words:?}: {}", said.err);
    }
}

#[test]
fn ten_thousand_hosts_are_rendered_and_every_rank_is_there() {
    let hosts = "n[1-10000]";
    let toml = render(&["--hosts", hosts, "--cores", "64"], "").out;
    assert!(toml.contains("\nhost = \"n[1-10000],flux-spare-[10000-16383]\"\n") && toml.contains("topo = \"mincrit\""));
    assert_eq!(toml.matches("[[resource.config]]").count(), 1);
    let tree = render(&["--hosts", hosts, "tree"], "").out;
    assert!(tree.lines().last().unwrap().starts_with("    "), "{tree}");
    let svg = render(&["--hosts", hosts, "tree", "-o", "svg"], "").out;
    assert!(svg.ends_with("</svg>\n") && (3..100).contains(&svg.matches("<rect").count()), "{svg:.1000}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    // More than a pipe holds.
    command.args(["render", "--hosts", "n[1-5000]", "tree", "-o", "dot"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 2];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice(), &first), (Some(0), &b""[..], b"//"));
}
