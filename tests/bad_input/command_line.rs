//! Wrong arguments on the command line: exit code 2, one message, and nothing is changed.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
};

use super::{
    cluster::Case,
    needs::{Need, skips_without},
};

fn refused(words: &[&str], state: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    let output = command.args(words).env("FLUX_DISTRIBUTE_LOCAL_DIR", state).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
    assert!(!state.exists(), "{words:?}");
    said
}

#[test]
fn arguments_that_are_wrong_exit_with_2_and_change_nothing() {
    if skips_without([Need::Root]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("bad.yaml"), "topology: ring\n").unwrap();
    fs::write(at("torn.yaml"), "{").unwrap();
    fs::write(at("misspelt.yaml"), "sise: 3\n").unwrap();
    fs::write(at("other.yaml"), "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n").unwrap();
    fs::write(at("empty.yaml"), "# size: 3\n").unwrap();
    fs::create_dir(at("no-flux")).unwrap();
    let before = fs::read_dir(directory.path()).unwrap().count();
    for (words, expected) in [
        (vec!["local", "up", "--nodes", "0"], "0 is not in 1..=10000"),
        (vec!["local", "up", "--bundle", &at("gone.tar.gz")], "gone.tar.gz"),
        (vec!["local", "up", "--topology", "nonsense"], "spec.topology: "),
        (vec!["local", "up", "--timeout", "soon"], "is not a duration such as 30s, 10m or 24h"),
        (vec!["local", "up", "--instance", &at("misspelt.yaml")], "misspelt.yaml:1: spec.sise: there is no such field"),
        (vec!["local", "up", "--instance", &at("empty.yaml")], "empty.yaml: holds no FluxInstance: it is empty"),
        (vec!["validate", &at("empty.yaml")], "empty.yaml: holds no FluxInstance: it is empty"),
        (
            vec!["validate", &at("misspelt.yaml")],
            "misspelt.yaml:1: spec.sise: there is no such field: did you mean size?",
        ),
        (vec!["validate", &at("other.yaml")], "other.yaml: holds no FluxInstance, only ConfigMap a"),
        (vec!["bundle", "create", "--from-prefix", &at("no-flux"), "--out", &at("b.tar.gz")], "it has no bin/flux"),
        (
            vec!["bundle", "create", "--from-prefix", &at("gone"), "--out", &at("b.tar.gz")],
            "there is no such directory",
        ),
        (vec!["bundle", "inspect", &at("bad.yaml")], "bad.yaml"),
        (vec!["bundle", "inspect", &at("gone.tar.gz")], "gone.tar.gz"),
        (vec!["validate", &at("bad.yaml")], "spec.topology: "),
        (vec!["validate", &at("torn.yaml")], "torn.yaml"),
        (vec!["validate", &at("gone.yaml")], "gone.yaml"),
    ] {
        let said = refused(&words, &directory.path().join("state"));
        assert!(said.contains(expected), "{words:?}: {said}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), before);
}

/// What the command says, and with which code it ends: stdout, stderr.
fn said(words: &[&str]) -> (Option<i32>, String, String) {
    said_to(words, "/dev/null")
}

/// The same, with the file `stdin`.
fn said_to(words: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    let output = command.args(words).stdin(File::open(stdin).unwrap()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn validate_names_every_mistake_of_every_document_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("site.yaml");
    let text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: flux-distribute}\n---\n\
                apiVersion: distribute.flux-framework.org/v1\nkind: FluxInstance\nmetadata:\n  name: mine\n\
                spec:\n  broker:\n    cpuWeight: 0\n  nodes:\n    selector:\n      pool: hpc\n    tolerations:\n\
                \x20   - {key: hpc, operator: Equals}\n  packages:\n    glibc: two\n    specs: [flux-core ===]\n";
    fs::write(&file, text).unwrap();
    let (code, out, complaints) = said(&["validate", file.to_str().unwrap()]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    let expected = [
        (5, "apiVersion: \"distribute.flux-framework.org/v1\" is not served: write distribute"),
        (8, "metadata.name: \"mine\" is not served: only FluxInstance flux"),
        (11, "spec.broker.cpuWeight: 0 is less than 1"),
        (14, "spec.nodes.selector.pool: there is no such field: write pool below matchLabels"),
        (16, "spec.nodes.tolerations[0].operator: \"Equals\" is none of \"Equal\", \"Exists\""),
        (18, "spec.packages.glibc: \"two\" is not a version such as 2.28"),
        (19, "spec.packages.specs[0]: "),
    ];
    assert_eq!(complaints.lines().count(), expected.len(), "{complaints}");
    for (line, (number, words)) in complaints.lines().zip(expected) {
        assert!(line.starts_with(&format!("{}:{number}: {words}", file.display())), "{line}, not {number}: {words}");
    }

    let (code, out, complaints) = said(&["validate", file.to_str().unwrap(), "-o", "json"]);
    assert_eq!((code, complaints.as_str()), (Some(2), ""));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["valid"], json["findings"].as_array().unwrap().len()), (&serde_json::json!(false), 7));
    assert_eq!(
        json["findings"][2],
        serde_json::json!({"field": "spec.broker.cpuWeight", "line": 11, "problem": "0 is less than 1"})
    );
    assert_eq!(json["notLookedAt"], serde_json::json!(["Namespace flux-distribute"]));
}

#[test]
fn validate_accepts_the_file_to_apply_and_lists_what_it_did_not_check() {
    let installer = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/daemonset-installer.yaml");
    let (code, out, complaints) = said(&["validate", installer]);
    assert_eq!((code, complaints.as_str()), (Some(0), ""), "{out}");
    assert!(
        out.starts_with("valid; it sets no field, so each has its default\nnot checked: Namespace flux-distribute, "),
        "{out}"
    );
    assert_eq!(out.lines().count(), 2, "{out}");
}

/// Today's rules must not keep anybody from comparing with what was made under older ones.
#[test]
fn an_instance_that_is_no_longer_valid_can_still_be_compared_with() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("old.yaml"), "topology: kary:0\n").unwrap();
    fs::write(at("new.yaml"), "topology: flat\n").unwrap();
    let (code, out, _) = said(&["validate", &at("new.yaml"), "--against", &at("old.yaml")]);
    assert_eq!(code, Some(0));
    assert!(out.starts_with("spec.topology: takes effect at the next coordinated restart"), "{out}");
    assert_eq!(said(&["validate", &at("old.yaml"), "--against", &at("new.yaml")]).0, Some(2));
}

#[test]
fn either_file_of_a_comparison_can_be_stdin_but_not_both() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("old.yaml"), "spec:\n  topology: kary:2\n").unwrap();
    fs::write(at("new.yaml"), "topology: flat\n").unwrap();
    let named = said(&["validate", &at("new.yaml"), "--against", &at("old.yaml")]);
    assert!(named.0 == Some(0) && named.1.starts_with("spec.topology: "), "{named:?}");
    assert_eq!(said_to(&["validate", "-", "--against", &at("old.yaml")], &at("new.yaml")), named);
    assert_eq!(said_to(&["validate", &at("new.yaml"), "--against", "-"], &at("old.yaml")), named);
    let (code, out, complaint) = said(&["validate", "-", "--against", "-"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(complaint.contains("stdin can be read only once"), "{complaint}");
    let (code, _, complaint) = said(&["validate", "-"]);
    assert_eq!((code, complaint.as_str()), (Some(2), "stdin: holds no FluxInstance: it is empty\n"));
}

#[test]
fn a_field_that_a_comparison_leaves_out_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("values.yaml"), "flux:\n  size: 2\n").unwrap();
    fs::write(at("new.yaml"), "size: 2\n").unwrap();
    let (code, out, complaint) = said(&["validate", &at("new.yaml"), "--against", &at("values.yaml")]);
    assert!(code == Some(0) && out.starts_with("spec.size: "), "{out}");
    assert_eq!(complaint, format!("{}:1: spec.flux: there is no such field\n", at("values.yaml")));
}

#[test]
fn a_change_by_which_members_can_leave_says_how_long_they_keep_their_jobs() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("old.yaml"), "size: 4\n").unwrap();
    fs::write(at("new.yaml"), "size: 2\ndrain: {timeout: 5m}\n").unwrap();
    let (code, out, _) = said(&["validate", &at("new.yaml"), "--against", &at("old.yaml")]);
    assert_eq!(code, Some(0));
    let effect = "takes effect at once; a member that leaves keeps its jobs until they end, or until spec.drain.timeout if \
                  that is set";
    assert_eq!(out, format!("spec.drain.timeout: {effect}\nspec.size: {effect}\n"));
}

/// Nothing listens there; a command tries an unreachable server again, and reports only the final failure.
#[test]
fn lock_without_a_network_fails_with_one_sentence() {
    let (code, out, complaint) = said(&["lock", "--channel", "http://127.0.0.1:1/conda", "--spec", "flux-core"]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{complaint}");
    // Before it is what was done for longer than a second.
    let (_, last) = complaint.trim_end().rsplit_once('\n').unwrap_or(("", complaint.trim_end()));
    assert!(last.starts_with("flux-distribute: channel http://127.0.0.1:1/conda can't be read: "), "{complaint}");
    assert_eq!(complaint.matches("can't be read").count(), 1, "{complaint}");
}

#[test]
fn the_help_of_each_command_says_what_it_needs() {
    for words in [["recover", "--help"], ["reset", "--help"]] {
        assert!(said(&words).1.contains("--node-name <NODE_NAME>"), "{words:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_not_there_is_named() {
    let Some(case) = Case::on(1).await else { return };
    for words in [
        vec!["exec", "node7", "--", "true"],
        vec!["agent", "node7", "restart"],
        vec!["remove-node", "node7"],
        vec!["remove-node", "../node1"],
    ] {
        let output = case.cluster.run(&words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains(words[1]) && said.trim().lines().count() == 1, "{words:?}: {said}");
    }
    case.exec("node1", &["true"]);
}
