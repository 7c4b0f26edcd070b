//! What the documents claim to be tested is tested: every row of docs/failures.md has tests in tests/failures.txt, and
//! docs/threat-model.md names tests that exist. Links between documents lead somewhere. Each block of commands is executed, here or by the
//! test that a comment before it names, or the comment says why not.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

#[path = "support/api_server.rs"]
mod api_server;
#[path = "support/blocks.rs"]
mod blocks;
#[path = "support/needs.rs"]
mod needs;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use api_server::ApiServer;
use blocks::{Block, blocks};
use needs::{Need, flux_prefix, kubectl, skips_without};
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

/// Their paths from the root.
fn documents(root: &Path) -> Vec<String> {
    let names = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let documents = names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}"));
    let others = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(str::to_owned);
    let mut all: Vec<_> = documents.chain(others).collect();
    all.sort();
    all
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for path in documents(root).into_iter().map(|document| root.join(document)) {
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

/// What stands for a name or a number in a command.
const STAND_FOR: [(&str, &str); 4] = [("NODE", "n2"), ("N", "3"), ("NAMESPACE", "default"), ("ACCOUNT", "default")];

/// Nodes and objects of an instance, as agents and planner would have left them.
fn cluster() -> Vec<Value> {
    let version = "distribute.flux-framework.org/v1alpha1";
    let meta = |name: &str| json!({"name": name, "namespace": "flux-distribute"});
    let certificate =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta("flux-curve"), "stringData": {"curve.cert": ""}});
    let instance = json!({"apiVersion": version, "kind": "FluxInstance", "metadata": meta("flux"), "spec": {}});
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}});
    let nodes = ["n1", "n2"].iter().enumerate().flat_map(|(rank, name)| {
        let spec = json!({"nodeName": name, "rank": rank, "want": "Run"});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux"}}, "status": {
            "capacity": {"cpu": "8", "memory": "16Gi"}, "addresses": [{"type": "InternalIP", "address": format!("10.0.0.{rank}")}],
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": "linux", "kernelVersion": "6.12.0", "osImage": "", "kubeletVersion": "v1.36.2",
                "containerRuntimeVersion": "", "kubeProxyVersion": "", "machineID": "", "systemUUID": "", "bootID": "b",
            },
        }});
        [node, json!({"apiVersion": version, "kind": "FluxNode", "metadata": meta(name), "spec": spec})]
    });
    [certificate, instance, account].into_iter().chain(nodes).collect()
}

/// A directory as a user has it who is in a clone of the repository, with the programs in PATH and a kubeconfig.
struct Place {
    directory: tempfile::TempDir,
    server: ApiServer,
}

impl Place {
    fn new(root: &Path) -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap(), server: ApiServer::up() };
        let own = PathBuf::from(env!("CARGO_BIN_EXE_flux-distribute"));
        let at = |name: &str| place.directory.path().join(name);
        fs::create_dir(at("bin")).unwrap();
        for (target, name) in [
            (kubectl().unwrap(), "bin/kubectl"),
            (own.clone(), "bin/kubectl-flux"),
            (own, "bin/flux-distribute"),
            (root.join("deploy"), "deploy"),
            (root.join("example"), "example"),
        ] {
            symlink(target, at(name)).unwrap();
        }
        fs::copy(root.join("example/fluxinstance-conda.yaml"), at("new.yaml")).unwrap();
        place.server.wait(&kubectl().unwrap());
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": cluster()});
        for (command, input) in [
            ("kubectl apply -k deploy", String::new()),
            ("kubectl wait --for=condition=Established crd --all", String::new()),
            ("kubectl create -f -", objects.to_string()),
            // Admission has put it on all new nodes; the node controller, which is not here, would take it off.
            ("kubectl taint nodes --all node.kubernetes.io/not-ready:NoSchedule-", String::new()),
        ] {
            place.run(command, &input).unwrap();
        }
        place
    }

    /// Runs this script; what it said, if it failed.
    fn run(&self, script: &str, input: &str) -> Result<(), String> {
        let path = format!("{}/bin:{}/bin:/usr/bin:/bin", self.directory.path().display(), flux_prefix().display());
        let mut command = Command::new("timeout");
        command
            .args(["60", "bash", "-eu", "-o", "pipefail", "-c", script])
            .env_clear()
            .current_dir(self.directory.path());
        command.env("PATH", path).env("HOME", self.directory.path()).env("KUBECONFIG", self.server.kubeconfig());
        // An editor that changes nothing.
        command.env("KUBE_EDITOR", "true").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{script}\n{said}")) }
    }

    fn run_block(&self, block: &Block) -> Result<(), String> {
        if block.is_yaml() {
            let fields: Value = serde_norway::from_str(&block.text).unwrap();
            let spec = if fields["spec"].is_null() { json!({ "spec": fields }) } else { fields };
            let mut instance = cluster().swap_remove(1);
            instance["spec"] = spec["spec"].clone();
            return self.run(
                "tee spec.yaml | flux-distribute validate - && kubectl apply --dry-run=server -f spec.yaml",
                &instance.to_string(),
            );
        }
        let is_word = |c: char| c.is_alphanumeric() || "_-".contains(c);
        let mut script = String::new();
        for piece in block.text.split_inclusive(|c| !is_word(c)) {
            let (word, rest) = piece.split_at(piece.trim_end_matches(|c| !is_word(c)).len());
            let given = STAND_FOR.iter().find(|(name, _)| *name == word).map_or(word, |(_, given)| given);
            script += &format!("{given}{rest}");
        }
        self.run(&script, "")
    }
}

/// All blocks, without those of the changes of other versions.
fn all_blocks(root: &Path) -> Vec<Block> {
    documents(root)
        .iter()
        .filter(|document| *document != "CHANGELOG.md")
        .flat_map(|document| blocks(root, document))
        .collect()
}

#[test]
fn a_block_that_is_not_executed_here_names_the_test_that_does_it_or_says_why_not() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let all = all_blocks(root);
    assert!(all.len() > 40, "{} blocks", all.len());
    for Block { place, marker, .. } in &all {
        let Some(marker) = marker else { continue };
        match marker.split_once(": ") {
            Some(("not run", reason)) => assert!(reason.len() > 10, "{place}: {reason}"),
            Some(("run by", tests)) => tests.split(", ").for_each(|test| assert_is_there(root, place, test)),
            _ => panic!("{place}: {marker:?} is neither `not run: REASON` nor `run by: TEST, …`"),
        }
    }
}

#[test]
fn the_commands_in_the_documents_work() {
    if skips_without([Need::ApiServer, Need::Kubectl, Need::Flux]) {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = Place::new(root);
    let ours = all_blocks(root).into_iter().filter(|block| block.marker.is_none());
    let failed: Vec<_> =
        ours.filter_map(|block| Some(format!("{}: {}", block.place, place.run_block(&block).err()?))).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    for entry in fs::read_dir(root.join("example")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // The first is for kind, the second of a kind that the Flux Operator brings.
        if name.ends_with(".yaml") && !["kind-config.yaml", "pods-minicluster.yaml"].contains(&name.as_str()) {
            place.run(&format!("kubectl apply --dry-run=server -f example/{name}"), "").unwrap();
        }
    }
}

#[test]
fn each_target_of_make_that_the_documents_name_is_in_the_makefile() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let makefile = fs::read_to_string(root.join("Makefile")).unwrap();
    for document in documents(root) {
        let text = fs::read_to_string(root.join(&document)).unwrap();
        let starts = ["`make ", "\n    make "].iter().flat_map(|start| text.split(*start).skip(1));
        for rest in starts {
            let target = rest.trim_start().split(|c: char| !c.is_alphanumeric() && c != '-').next().unwrap();
            assert!(makefile.contains(&format!("\n{target}:")), "{document}: make {target}");
        }
    }
}
