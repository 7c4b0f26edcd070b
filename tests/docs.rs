//! What the documents claim to be tested is tested: every row of docs/failures.md names a test that is there.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{fs, path::Path};

/// The source that holds `module`'s tests, such as `local_flux/loss`, or `lib/agent::decide` for the library's own.
fn source(root: &Path, module: &str) -> String {
    let candidates = match (module.strip_prefix("lib/"), module.strip_prefix("scripts/")) {
        (Some(path), _) => {
            let path = format!("src/{}", path.replace("::", "/"));
            vec![format!("{path}/tests.rs"), format!("{path}.rs")]
        }
        // On a real cluster.
        (_, Some(_)) => vec![format!("{module}.py")],
        _ => vec![format!("tests/{module}.rs"), format!("tests/{module}/main.rs")],
    };
    let found = candidates.iter().find_map(|path| fs::read_to_string(root.join(path)).ok());
    found.unwrap_or_else(|| panic!("docs/failures.md names {module}, which is none of {candidates:?}"))
}

#[test]
fn every_row_of_the_failure_table_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/failures.md")).unwrap();
    let rows: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| situation"))
        .map(|line| line.trim_end_matches(" |").rsplit(" | ").next().unwrap())
        .collect();
    assert!(rows.len() > 20, "{rows:?}");
    for row in rows {
        let test = row.trim_matches('`');
        let (module, name) = test.rsplit_once("::").unwrap_or_else(|| panic!("{row} is no test's name"));
        let source = source(root, module);
        let words = [format!("fn {name}("), format!("def {name}("), format!("\"{name}\"")];
        let is_there = name == "*" || words.iter().any(|word| source.contains(word));
        assert!(is_there, "there is no test {test}");
    }
}
