//! What the documents claim to be tested is tested: every row of docs/failures.md has tests in tests/failures.txt, and
//! docs/threat-model.md names tests that exist. Links between documents lead somewhere.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

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

/// The causes in the tables of docs/failures.md, which are unique.
fn causes(text: &str) -> Vec<&str> {
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what you see"));
    rows.map(|line| line.split(" | ").nth(1).unwrap()).collect()
}

/// The tests of each cause, from tests/failures.txt.
fn tests_by_cause(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut tests: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut cause = "";
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix("    ") {
            Some(test) => tests.entry(cause).or_default().push(test),
            None => cause = line,
        }
    }
    tests
}

#[test]
fn every_row_of_the_failure_tables_has_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = "tests/failures.txt";
    let [document, tests] = ["docs/failures.md", list].map(|file| fs::read_to_string(root.join(file)).unwrap());
    let (causes, tests) = (causes(&document), tests_by_cause(&tests));
    assert!(causes.len() > 20, "{causes:?}");
    let unique: BTreeSet<&str> = causes.iter().copied().collect();
    assert_eq!(unique.len(), causes.len(), "two rows of docs/failures.md have the same cause");
    assert_eq!(unique, tests.keys().copied().collect(), "docs/failures.md (left) and {list} (right) differ");
    tests.values().flatten().for_each(|test| assert_is_there(root, list, test));
}

/// It names whole files and modules too, such as `tests/deploy.rs` and `host/trust`.
#[test]
fn the_threat_model_names_existing_tests() {
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

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let documents = documents.filter(|path| path.is_file());
    let others = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root.join(name));
    for path in documents.chain(others) {
        let text = fs::read_to_string(&path).unwrap();
        let links = text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
        for link in links.filter(|link| !link.starts_with("http")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link} leads nowhere", path.display());
            let has_heading = || {
                let target = fs::read_to_string(&target).unwrap();
                target
                    .lines()
                    .any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == heading)
            };
            assert!(heading.is_empty() || has_heading(), "{}: {link} has no such heading", path.display());
        }
    }
}

/// All of the program's sources, and those of its libraries.
fn sources(directory: &Path, all: &mut String) {
    for entry in fs::read_dir(directory).into_iter().flatten().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn the_constants_in_the_architecture_are_in_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let (_, tables) = text.split_once("\n## Constants").unwrap();
    let cells = tables.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split('`')).map(|name| name.trim_matches('`'));
    let names: Vec<_> =
        names.filter(|name| name.len() > 3 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')).collect();
    assert!(names.len() > 40, "{names:?}");
    let mut all = String::new();
    ["src", "crates"].iter().for_each(|directory| sources(&root.join(directory), &mut all));
    let missing: Vec<_> = names.iter().filter(|name| !all.contains(&format!("const {name}: "))).collect();
    assert!(missing.is_empty(), "docs/architecture.md explains {missing:?}, which are no constants any more");
}

/// `scripts/record` wrote both from one run: nobody has typed what the first screen of the README shows.
#[test]
fn the_picture_in_the_readme_shows_what_was_recorded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |file: &str| fs::read_to_string(root.join(file)).unwrap();
    let cast = text("docs/recorded/first-screen.cast");
    let mut lines = cast.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let header = lines.next().unwrap();
    assert_eq!((&header["version"], &header["width"]), (&2.into(), &100.into()));
    let printed: String = lines.map(|line| line[2].as_str().unwrap().to_owned()).collect();
    // Colours: an escape to the next `m`.
    let mut pieces = printed.split('\u{1b}');
    let first = pieces.next().unwrap().to_owned();
    let printed = pieces.fold(first, |printed, piece| printed + piece.split_once('m').unwrap().1).replace("\r\n", "\n");
    let picture = text("docs/recorded/first-screen.svg").replace("&#160;", " ");
    for line in printed.lines().map(str::trim_end) {
        assert!(line.chars().count() <= 100, "{line}");
        for word in line.split_whitespace() {
            let escaped = word.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            assert!(picture.contains(&escaped), "the picture lacks {word:?} of {line:?}");
        }
    }
    assert!(printed.contains("$ kubectl flux status\n") && printed.contains("4 of 4 online"), "{printed}");
    assert!(!picture.contains("url(\"http") && !picture.contains("<script"), "GitHub shows no such picture");
    assert!(text("README.md").contains("(docs/recorded/first-screen.svg)"));
}
