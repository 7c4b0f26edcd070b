//! `deploy/daemonset-installer.yaml` is made of `deploy/parts` and the CRDs.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{fs, path::Path};

use api::crds;
use serde_json::Value;

/// The one file to apply: the namespace first, then the kinds, then what uses both.
fn installer() -> String {
    let parts = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/parts");
    let part = |name: &str| fs::read_to_string(parts.join(name)).unwrap();
    [
        "# Made by `make manifests` from deploy/parts and the CRDs; don't edit this file.\n".to_owned(),
        part("1-namespace.yaml"),
        crds().unwrap(),
        part("3-rbac.yaml"),
        part("4-admission.yaml"),
        part("5-default.yaml"),
        part("6-daemonset.yaml"),
        merged(&part("6-daemonset.yaml"), &part("7-control-planes.yaml")),
    ]
    .concat()
}

/// The object that a merge patch (RFC 7396) makes of another one, under the patch's own comment.
fn merged(object: &str, patch: &str) -> String {
    let comment: String = patch.split_inclusive('\n').take_while(|line| line.starts_with('#')).collect();
    let mut merged: Value = serde_norway::from_str(object).unwrap();
    json_patch::merge(&mut merged, &serde_norway::from_str(patch).unwrap());
    format!("{comment}---\n{}", serde_norway::to_string(&merged).unwrap())
}

/// With UPDATE_MANIFESTS set it is written, which is what `make manifests` does.
#[test]
fn the_installer_is_what_its_parts_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/daemonset-installer.yaml");
    let installer = installer();
    if std::env::var_os("UPDATE_MANIFESTS").is_some() {
        fs::write(&path, &installer).unwrap();
    }
    assert!(fs::read_to_string(&path).unwrap() == installer, "{} is stale: run `make manifests`", path.display());
}
