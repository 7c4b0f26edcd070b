//! What `scripts/release.sh` writes for krew.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

const PLATFORMS: [&str; 4] = ["linux-amd64", "linux-arm64", "darwin-amd64", "darwin-arm64"];

/// A copy of what the script reads, and the archives of these platforms.
fn files(platforms: &[&str]) -> tempfile::TempDir {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().unwrap();
    for folder in ["scripts", "deploy/krew", "target/release-files"] {
        fs::create_dir_all(directory.path().join(folder)).unwrap();
    }
    for file in ["scripts/release.sh", "Cargo.toml", "deploy/krew/flux.yaml"] {
        fs::copy(here.join(file), directory.path().join(file)).unwrap();
    }
    for platform in platforms {
        let name = format!("target/release-files/kubectl-flux-{}-{platform}.tar.gz", env!("CARGO_PKG_VERSION"));
        fs::write(directory.path().join(name), platform).unwrap();
    }
    directory
}

fn krew(directory: &Path) -> Output {
    let mut script = Command::new(directory.join("scripts/release.sh"));
    script.args(["krew", "https://example.org/download/v1"]).env("GITHUB_REPOSITORY", "someone/something");
    script.output().unwrap()
}

#[test]
fn the_manifest_for_krew_names_each_archive_with_its_checksum() {
    let directory = files(&PLATFORMS);
    let output = krew(directory.path());
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(directory.path().join("target/release-files/flux.yaml")).unwrap();
    let manifest = Value::deserialize(serde_norway::Deserializer::from_str(&text)).unwrap();
    assert_eq!(manifest["apiVersion"], "krew.googlecontainertools.github.com/v1alpha2");
    assert_eq!((&manifest["kind"], &manifest["metadata"]["name"]), (&"Plugin".into(), &"flux".into()));
    let spec = &manifest["spec"];
    assert_eq!(spec["version"], concat!("v", env!("CARGO_PKG_VERSION")));
    assert_eq!(spec["homepage"], "https://github.com/someone/something");
    assert!(spec["shortDescription"].as_str().unwrap().len() <= 50, "krew shows no more");
    let platforms = spec["platforms"].as_array().unwrap();
    for (platform, name) in platforms.iter().zip(PLATFORMS) {
        let (system, machine) = name.split_once('-').unwrap();
        assert_eq!(platform["selector"]["matchLabels"], serde_json::json!({"os": system, "arch": machine}));
        let archive = format!("kubectl-flux-{}-{name}.tar.gz", env!("CARGO_PKG_VERSION"));
        assert_eq!(platform["uri"], format!("https://example.org/download/v1/{archive}"));
        assert_eq!(platform["sha256"], hex::encode(Sha256::digest(name)));
        assert_eq!(platform["bin"], "kubectl-flux");
    }
    assert_eq!(platforms.len(), PLATFORMS.len());
}

#[test]
fn a_release_without_the_archive_of_a_platform_is_refused() {
    let directory = files(&PLATFORMS[..3]);
    let output = krew(directory.path());
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(words.contains("kubectl-flux") && words.contains("darwin-arm64.tar.gz"), "{words}");
}
