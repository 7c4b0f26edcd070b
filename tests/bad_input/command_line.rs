//! Bad words on the command line: exit code 2, one message, and nothing is changed.

use std::{fs, path::Path, process::Command};

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
fn words_that_can_not_be_served_end_with_2_and_change_nothing() {
    if skips_without([Need::Root]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    fs::write(at("bad.yaml"), "topology: ring\n").unwrap();
    fs::write(at("torn.yaml"), "{").unwrap();
    fs::write(at("misspelt.yaml"), "kind: FluxInstance\nspec: {sise: 3}\n").unwrap();
    fs::create_dir(at("no-flux")).unwrap();
    let before = fs::read_dir(directory.path()).unwrap().count();
    for (words, expected) in [
        (vec!["local", "up", "--nodes", "0"], "0 is not in 1..=10000"),
        (vec!["local", "up", "--bundle", &at("gone.tar.gz")], "gone.tar.gz"),
        (vec!["local", "up", "--topology", "nonsense"], "spec.topology: "),
        (vec!["local", "up", "--instance", &at("misspelt.yaml")], "misspelt.yaml: can't be served: spec.sise: "),
        (vec!["validate", &at("misspelt.yaml")], "misspelt.yaml: can't be served: spec.sise: "),
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
