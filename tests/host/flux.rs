//! The command `flux` on the host.

use std::{fs, os::unix::fs::PermissionsExt};

use hostapi::FluxOrder;
use stage::flux;

use crate::support::*;

fn flux_script(host: &TestHost, script: &str) {
    let path = format!("{PREFIX}/envs/{DIGEST}/bin/flux");
    host.write(&path, &format!("#!/bin/sh\n{script}\n"));
    fs::set_permissions(host.at(&path), fs::Permissions::from_mode(0o755)).unwrap();
    // The broker's user must be able to reach it.
    fs::set_permissions(host.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

fn flux_order(args: &[&str], timeout_secs: u64) -> FluxOrder {
    FluxOrder {
        prefix: PREFIX.into(),
        digest: DIGEST.into(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        run_as: "flux".into(),
        timeout_secs,
    }
}

#[test]
fn flux_runs_as_the_brokers_user_with_nothing_of_our_environment() {
    need_root!();
    let host = TestHost::new();
    flux_script(&host, "id -u; id -g; id -G; echo $HOME $FLUX_URI $CARGO_MANIFEST_DIR \"$@\"; echo oops >&2; exit 3");
    let ran = flux(&host.root, &flux_order(&["resource", "a b"], 60)).unwrap();
    let expected = "500\n501\n501 44\n/var/lib/flux local:///run/flux-distribute/broker/local resource a b\n";
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (3, expected, "oops\n"));
}

#[test]
fn the_output_and_the_time_of_a_flux_command_are_limited() {
    need_root!();
    let host = TestHost::new();
    flux_script(&host, "head -c 1000000 /dev/zero | tr '\\0' x; kill -9 $$");
    let ran = flux(&host.root, &flux_order(&[], 60)).unwrap();
    assert_eq!((ran.code, ran.stdout.len()), (128 + 9, 64 << 10));
    flux_script(&host, "sleep 1000 & wait");
    let refusal = flux(&host.root, &flux_order(&["job", "wait"], 1)).unwrap_err();
    assert!(refusal.transient && refusal.message.contains("flux job"), "{refusal}");
}
