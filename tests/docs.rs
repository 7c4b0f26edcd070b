//! What the documents claim to be tested is tested: every row of docs/failures.md names tests that are there, and so does
//! docs/threat-model.md. README.md lists exactly the fields that the kind has.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{collections::BTreeSet, fs, path::Path};

use api::FluxInstance;
use kube::CustomResourceExt;
use serde_json::{Value, json};

/// The source that holds `module`'s tests, such as `local_flux/loss`, or `lib/agent::decide` for the own ones of the crate `agent`.
/// `document` names it.
fn source(root: &Path, document: &str, module: &str) -> String {
    let candidates = match (module.strip_prefix("lib/"), module.strip_prefix("scripts/")) {
        (Some(path), _) => {
            let (name, path) = path.split_once("::").unwrap_or((path, "lib"));
            let path = format!("crates/{name}/src/{}", path.replace("::", "/"));
            vec![format!("{path}/tests.rs"), format!("{path}.rs")]
        }
        // On a real cluster.
        (_, Some(_)) => vec![format!("{module}.py")],
        _ => vec![format!("tests/{module}.rs"), format!("tests/{module}/main.rs")],
    };
    let found = candidates.iter().find_map(|path| fs::read_to_string(root.join(path)).ok());
    found.unwrap_or_else(|| panic!("{document} names {module}, which is none of {candidates:?}"))
}

/// Looks for `test`, such as `local_flux/loss::NAME`, which `document` names. `*` stands for all of a module.
fn assert_is_there(root: &Path, document: &str, test: &str) {
    let (module, name) = test.rsplit_once("::").unwrap_or_else(|| panic!("{document}: {test} is no test's name"));
    let source = source(root, document, module);
    let words = [format!("fn {name}("), format!("def {name}("), format!("\"{name}\"")];
    let is_there = name == "*" || words.iter().any(|word| source.contains(word));
    assert!(is_there, "{document}: there is no test {test}");
}

#[test]
fn every_row_of_the_failure_table_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = "docs/failures.md";
    let text = fs::read_to_string(root.join(document)).unwrap();
    let rows: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| situation"))
        .map(|line| line.trim_end_matches(" |").rsplit(" | ").next().unwrap())
        .collect();
    assert!(rows.len() > 20, "{rows:?}");
    for test in rows.iter().flat_map(|row| row.trim_matches('`').split("`, `")) {
        assert_is_there(root, document, test);
    }
}

/// It names whole files and modules too, such as `tests/deploy.rs` and `host/trust`.
#[test]
fn the_threat_model_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = "docs/threat-model.md";
    let text = fs::read_to_string(root.join(document)).unwrap();
    let is_module = |word: &str| {
        let directory = word.split_once('/').map(|(directory, _)| directory).filter(|directory| !directory.is_empty());
        directory.is_some_and(|directory| root.join("tests").join(directory).is_dir())
    };
    let mut tests = Vec::new();
    for word in text.split('`').skip(1).step_by(2) {
        match word.strip_prefix("tests/") {
            Some(file) => tests.push(format!("{}::*", file.trim_end_matches(".rs"))),
            None if word.contains("::") => tests.push(word.to_owned()),
            None if is_module(word) => tests.push(format!("{word}::*")),
            None => assert!(!word.ends_with(".rs"), "{document}: name {word} from `tests/` on"),
        }
    }
    assert!(tests.len() > 20, "{tests:?}");
    tests.iter().for_each(|test| assert_is_there(root, document, test));
}

/// The fields of README.md's table, as paths below `spec`; `.name` stands beside the one before it.
fn told(readme: &str) -> BTreeSet<String> {
    let rows = readme.lines().skip_while(|line| !line.starts_with("| field of `spec` |")).skip(2);
    let cells = rows.take_while(|line| line.starts_with("| ")).map(|line| line.split('|').nth(1).unwrap());
    let mut fields = BTreeSet::new();
    for cell in cells {
        let mut beside = String::new();
        for field in cell.split(',').map(|field| field.trim().trim_matches('`')) {
            let field = if field.starts_with('.') { format!("{beside}{field}") } else { field.to_owned() };
            beside = field.rsplit_once('.').map(|(above, _)| above.to_owned()).unwrap_or_default();
            fields.insert(field);
        }
    }
    fields
}

/// Every path below `schema`, and those of them that have nothing below.
fn paths(schema: &Value, above: &str, all: &mut BTreeSet<String>, leaves: &mut BTreeSet<String>) {
    let Some(properties) = schema["properties"].as_object() else {
        leaves.insert(above.to_owned());
        return;
    };
    for (name, schema) in properties {
        let path = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        all.insert(path.clone());
        paths(schema, &path, all, leaves);
    }
}

#[test]
fn the_readme_tells_of_every_field_of_the_spec_and_of_no_other() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let told = told(&readme);
    let crd = json!(FluxInstance::crd());
    let (mut all, mut leaves) = (BTreeSet::new(), BTreeSet::new());
    paths(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"], "", &mut all, &mut leaves);
    assert!(leaves.len() > 20, "{leaves:?}");
    let strange: Vec<_> = told.difference(&all).collect();
    assert!(strange.is_empty(), "README.md tells of {strange:?}, which is no field of the spec");
    let is_told = |leaf: &str| {
        told.iter().any(|field| leaf.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    };
    let missing: Vec<_> = leaves.iter().filter(|leaf| !is_told(leaf)).collect();
    assert!(missing.is_empty(), "README.md's table lacks {missing:?}");
}
