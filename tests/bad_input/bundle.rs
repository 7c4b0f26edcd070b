//! Bundles: changed, cut off, without Flux, or in the way of something.

use std::{fs, io::Write, os::unix::fs::PermissionsExt, path::Path};

use api::NodePhase;
use flate2::{Compression, write::GzEncoder};
use packages::{BUNDLE_MANIFEST, CreateBundle};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{channel::Server, cluster::Case};

/// A bundle whose bin/flux is `script`, built for `prefix`.
pub fn bundle(script: &str, prefix: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let (tree, out) = (directory.path().join("tree"), directory.path().join("bundle.tar.gz"));
    fs::create_dir_all(tree.join("bin")).unwrap();
    fs::write(tree.join("bin/flux"), script).unwrap();
    fs::set_permissions(tree.join("bin/flux"), PermissionsExt::from_mode(0o755)).unwrap();
    let create = CreateBundle {
        from_prefix: Some(tree),
        out: out.clone(),
        compiled_prefix: Some(prefix.into()),
        ..CreateBundle::default()
    };
    create.run().unwrap();
    fs::read(out).unwrap()
}

/// One whose broker does nothing, for long.
pub fn sleeper(prefix: &str) -> Vec<u8> {
    bundle("#!/bin/sh\n[ \"$1\" = config ] || exec sleep 1000\n", prefix)
}

pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

pub fn packages(server: &Server, name: &str, sha256: &str) -> Value {
    json!({"packages": {"bundle": {"url": format!("{}{name}", server.url()), "sha256": sha256}}})
}

async fn is_refused(case: &Case, words: &str) -> String {
    let message = case.node_says("node1", NodePhase::Failed, words).await;
    case.warned("FluxNode/node1", words).await;
    case.instance_says(words).await;
    assert!(!case.is_ready("node1"));
    case.nothing_half_made_is_live("node1");
    message
}

fn put(directory: &Path, name: &str, bytes: &[u8]) {
    fs::File::create(directory.join(name)).unwrap().write_all(bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_with_a_wrong_digest_is_refused_until_the_right_one_is_there() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let right = sleeper("/opt/flux-of-a-test");
    put(served.path(), "a.tar.gz", b"something else");
    case.create(packages(&server, "a.tar.gz", &sha256(&right))).await;
    let message = is_refused(&case, &format!("{}a.tar.gz has sha256 ", server.url())).await;
    assert!(message.contains(&sha256(&right)), "{message}");

    put(served.path(), "a.tar.gz", &right);
    case.has("node1", &sha256(&right)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_bundle_never_goes_live_and_another_one_is_used_at_once() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let whole = sleeper("/opt/flux-of-a-test");
    let cut = &whole[..whole.len() / 2];
    put(served.path(), "cut.tar.gz", cut);
    put(served.path(), "whole.tar.gz", &whole);
    case.create(packages(&server, "cut.tar.gz", &sha256(cut))).await;
    let message = is_refused(&case, "cut.tar.gz").await;
    assert!(message.contains("truncated") || message.contains("cut off"), "{message}");

    case.patch(packages(&server, "whole.tar.gz", &sha256(&whole))).await;
    case.has("node1", &sha256(&whole)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_package_set_without_flux_never_goes_live() {
    let Some(case) = Case::on(1).await else { return };
    let manifest = json!({
        "format": 1, "kind": "tree", "prefix": "/opt/flux-of-a-test", "platform": packages::native_platform(),
        "created_by": "a test",
    });
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (path, content) in [(BUNDLE_MANIFEST, manifest.to_string()), ("share/readme", "no Flux here".to_owned())] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, path, content.as_bytes()).unwrap();
    }
    let bytes = tar.into_inner().unwrap().finish().unwrap();
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    put(served.path(), "empty.tar.gz", &bytes);
    case.create(packages(&server, "empty.tar.gz", &sha256(&bytes))).await;
    is_refused(&case, "bin/flux").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_files_at_the_compiled_in_prefix_block_the_start_until_they_are_moved() {
    let Some(case) = Case::on(1).await else { return };
    let served = tempfile::tempdir().unwrap();
    let server = Server::start(served.path()).await;
    let bytes = sleeper("/opt/flux");
    put(served.path(), "a.tar.gz", &bytes);
    case.exec("node1", &["mkdir", "-p", "/opt/flux"]);
    case.exec("node1", &["touch", "/opt/flux/of-others"]);
    case.create(packages(&server, "a.tar.gz", &sha256(&bytes))).await;
    let message = is_refused(&case, "built for /opt/flux").await;
    assert!(message.contains("move it away"), "{message}");
    case.exec("node1", &["test", "-f", "/opt/flux/of-others"]);

    case.exec("node1", &["mv", "/opt/flux", "/opt/moved"]);
    case.is("node1", NodePhase::Starting).await;
    assert!(case.exec("node1", &["readlink", "/opt/flux"]).starts_with("/opt/flux-distribute/envs/"));
    case.delete_instance().await;
    case.exec("node1", &["test", "-f", "/opt/moved/of-others"]);
    case.exec("node1", &["rm", "-r", "/opt/moved"]);
}
