//! Which crate may know which: a crate depends only on those that stand above it in [`LAYERS`], and its files on each other in one
//! direction. And what the image must not have.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Every crate of the workspace, from those that know nothing to the program. Those in one line know nothing of each other.
const LAYERS: &[&[&str]] = &[
    &["base", "metrics"],
    &["api"],
    &["locks", "hostapi"],
    &["model", "cluster", "host"],
    &["broker", "packages", "apiserver"],
    &["pods"],
    &["bridge"],
    &["stage", "planner", "agent", "local", "kubectl"],
    &["flux-distribute"],
];
/// What must not be in the image: the program depends on these only if features `local` and `kubectl` are on.
const NOT_IN_THE_IMAGE: [&str; 3] = ["local", "apiserver", "kubectl"];
/// What each of these must not know, though it stands below: pure crates know no client, and a host no cluster. Without `nix`
/// (and `unsafe`) a crate makes no system call that std doesn't make for it: `host` does, and `local`, which makes hosts.
const APART: &[(&str, &[&str])] = &[
    ("model", &["cluster", "host", "hostapi", "kube-runtime", "tokio", "nix", "reqwest"]),
    ("metrics", &["tokio", "nix", "reqwest", "kube"]),
    ("locks", &["hostapi", "tokio", "nix", "reqwest", "kube"]),
    ("api", &["tokio", "nix", "reqwest"]),
    ("hostapi", &["tokio", "nix", "reqwest", "kube"]),
    ("host", &["model", "cluster", "kube", "reqwest"]),
    ("broker", &["cluster", "kube", "reqwest", "nix"]),
    ("packages", &["cluster", "kube", "model", "nix"]),
    ("pods", &["cluster", "host", "kube", "tokio", "nix", "reqwest"]),
    ("stage", &["cluster", "kube", "reqwest", "nix"]),
    ("cluster", &["model", "hostapi", "host", "locks", "nix"]),
    ("planner", &["hostapi", "stage", "broker", "nix"]),
    ("agent", &["planner", "stage", "nix"]),
    ("kubectl", &["host", "hostapi", "broker", "packages", "nix"]),
];

fn cargo(words: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(env!("CARGO")).args(words).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What each crate of the workspace depends on itself, but for its tests.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = cargo(&["metadata", "--locked", "--offline", "--no-deps", "--format-version=1"]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let names = |package: &Value| {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let shipped = dependencies.filter(|dependency| dependency["kind"] != "dev");
        shipped.map(|dependency| dependency["name"].as_str().unwrap().to_owned()).collect()
    };
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages.map(|package| (package["name"].as_str().unwrap().to_owned(), names(package))).collect()
}

#[test]
fn a_crate_depends_only_on_layers_below_its_own() {
    let layer = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    let all = dependencies();
    for (name, dependencies) in &all {
        let own = layer(name).unwrap_or_else(|| panic!("tests/layers.rs has no layer for the crate {name}"));
        for below in dependencies.iter().filter(|below| all.contains_key(*below)) {
            assert!(layer(below) < Some(own), "{name} must not depend on {below}, which is not in a layer below");
        }
    }
    let listed: BTreeSet<_> = LAYERS.iter().flat_map(|layer| layer.iter().map(|name| (*name).to_owned())).collect();
    assert_eq!(listed, all.into_keys().collect());
}

#[test]
fn each_crate_names_only_what_its_layer_may_know() {
    let all = dependencies();
    for (name, apart) in APART {
        let known: Vec<_> = apart.iter().filter(|other| all[*name].contains(**other)).collect();
        assert!(known.is_empty(), "{name} must not depend on {known:?}");
    }
}

/// Without a crate's manifest the layer with the dependencies can't be built.
#[test]
fn the_dockerfile_copies_the_manifest_of_every_crate() {
    let file = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docker/Dockerfile")).unwrap();
    for name in dependencies().into_keys().filter(|name| name != "flux-distribute") {
        let line = format!("COPY crates/{name}/Cargo.toml crates/{name}/");
        assert!(file.lines().any(|copied| copied == line), "docker/Dockerfile lacks: {line}");
    }
}

/// As `cargo tree` resolves it for the image's build (docker/Dockerfile, `make image-binary`).
#[test]
fn the_images_program_has_no_local_mode_no_plugin_and_no_test_switches() {
    let tree = |features: &[&str]| {
        let words = ["tree", "--locked", "--offline", "--edges=normal,build", "--prefix=none", "--format={p} [{f}]"];
        cargo(&[&words, features].concat())
    };
    let has = |tree: &str, name: &str| tree.lines().any(|line| line.split(' ').next() == Some(name));
    let (whole, image) = (tree(&[]), tree(&["--no-default-features"]));
    for name in NOT_IN_THE_IMAGE {
        assert!(has(&whole, name) && !has(&image, name), "{name}");
    }
    assert!(whole.contains("test-switches") && !image.contains("test-switches"));
    assert!(!image.contains("test-support"));
}

/// `a::{b, c::{d}}` is `a::b` and `a::c::d`.
fn each_path(tree: &str) -> Vec<String> {
    let Some((before, inner)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inner = inner.strip_suffix('}').unwrap_or(inner);
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for letter in inner.chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        match letter {
            ',' if depth == 0 => parts.push(String::new()),
            _ => parts.last_mut().unwrap().push(letter),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| each_path(part.trim())).map(|path| format!("{}{path}", before.trim())).collect()
}

/// The files of a crate that `file` takes names from, its tests aside. The face of a folder (mod.rs, or a file with a folder of its
/// name) hands names on from below, so only what is imported by its own path counts.
fn imports(source: &Path, file: &Path) -> BTreeSet<PathBuf> {
    let text = fs::read_to_string(file).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let below = file.strip_prefix(source).unwrap().with_extension("");
    let mut module: Vec<String> = below.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if module.last().is_some_and(|last| ["lib", "mod"].contains(&last.as_str())) {
        module.pop();
    }
    let uses = text.split(";\n").filter_map(|item| item.rsplit_once("\nuse ").map(|(_, tree)| tree.replace('\n', " ")));
    let paths: Vec<String> = uses.flat_map(|tree| each_path(&tree)).collect();
    let named = paths.iter().filter_map(|path| {
        let mut at = module.clone();
        let mut parts = path.split("::").peekable();
        match parts.next()? {
            "crate" => at.clear(),
            "super" => drop(at.pop()),
            _ => return None,
        }
        while parts.next_if_eq(&"super").is_some() {
            at.pop();
        }
        at.extend(parts.map(str::to_owned));
        // The longest beginning of the path that is a file.
        (1..=at.len()).rev().find_map(|length| {
            let found = source.join(at[..length].iter().collect::<PathBuf>()).with_extension("rs");
            found.is_file().then_some(found)
        })
    });
    named.filter(|named| named != file).collect()
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    let is_code = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy();
        path.extension().is_some_and(|extension| extension == "rs") && !name.ends_with("tests") && name != "lib"
    };
    entries.flat_map(below).filter(is_code).collect()
}

#[test]
fn no_two_files_of_a_crate_import_each_other_in_a_circle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    for name in fs::read_dir(crates).unwrap() {
        let source = name.unwrap().path().join("src");
        let mut left: BTreeMap<_, _> =
            sources(&source).into_iter().map(|file| (file.clone(), imports(&source, &file))).collect();
        assert!(!left.is_empty());
        // Files that import none of the others are taken away until there are none, or each imports another one.
        while !left.is_empty() {
            let there: BTreeSet<_> = left.keys().cloned().collect();
            let before = left.len();
            left.retain(|_, imports| imports.intersection(&there).next().is_some());
            assert!(left.len() < before, "in a circle, or above one: {left:#?}");
        }
    }
}
