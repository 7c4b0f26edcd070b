//! Mistakes are reported before anything starts, or as soon as they are known.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::Command,
};

use crate::{
    BINARY, Place, Said,
    needs::{Need, skips_without},
};

/// `local up` refuses it as bad input, says why, and has begun nothing.
fn is_refused(place: &Place, options: &[&str], words: &str) {
    let said = place.run(&[&["up", "--nodes", "1"], options].concat());
    assert_eq!(said.code, Some(2), "{options:?}: {said:?}");
    assert!(said.err.contains(words), "{options:?} and not {words}: {said:?}");
    assert!(!place.state().exists(), "{options:?}");
}

#[test]
fn mistakes_in_the_packages_are_reported_before_anything_starts() {
    let Some(place) = Place::new() else { return };
    let bundle = place.bundle();
    let text = |path: &std::path::Path| path.display().to_string();
    let cut = place.path("cut.tar.gz");
    let bytes = fs::read(&bundle).unwrap();
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    is_refused(&place, &["--bundle", &text(&cut)], "cut.tar.gz: it is truncated");
    let other = place.path("other.tar.gz");
    fs::write(&other, "no archive").unwrap();
    is_refused(&place, &["--bundle", &text(&other)], "other.tar.gz: ");
    let wrong = "0".repeat(64);
    is_refused(&place, &["--bundle", &text(&bundle), "--sha256", &wrong], &format!("but {wrong} is expected"));

    let empty = place.path("empty");
    fs::create_dir(&empty).unwrap();
    is_refused(&place, &["--channel", &text(&empty)], "is not a conda channel");
    // Nothing listens there. A user who names a channel wants that one, and no stand-in.
    is_refused(&place, &["--channel", "http://127.0.0.1:1/channel"], "can't reach http://127.0.0.1:1/channel/");
    is_refused(&place, &["--flux", "required", "--channel", "http://127.0.0.1:1/"], "can't reach http://127.0.0.1:1/");

    let instance = place.path("instance.yaml");
    let lock =
        format!("# platform: linux-64\n    @EXPLICIT\n    file:///nowhere/linux-64/flux-core-1.0-0.conda#{wrong}");
    fs::write(&instance, format!("packages:\n  lock: |\n    {lock}\n")).unwrap();
    is_refused(
        &place,
        &["--instance", &text(&instance)],
        "/nowhere/linux-64/flux-core-1.0-0.conda, which can't be read",
    );
}

/// Serves `content` under every path, on loopback.
fn serve(content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/flux.tar.gz", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, content) = (stream.unwrap(), content.clone());
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", content.len());
                let _ = stream.write_all(&[head.as_bytes(), &content].concat());
            });
        }
    });
    url
}

#[test]
fn a_truncated_bundle_behind_a_url_is_reported_before_anything_starts() {
    let Some(place) = Place::new() else { return };
    let bytes = fs::read(place.bundle()).unwrap();
    let url = serve(bytes[..bytes.len() / 2].to_vec());
    is_refused(&place, &["--bundle", &url], &format!("{url}: it is truncated"));
}

#[test]
fn a_bundle_that_would_not_be_installed_is_refused() {
    let Some(place) = Place::new() else { return };
    let bundle = place.bundle();
    let words = "--flux none installs no Flux: leave out --bundle";
    is_refused(&place, &["--flux", "none", "--bundle", bundle.to_str().unwrap()], words);
}

#[test]
fn a_permanent_failure_of_a_node_ends_up_at_once_and_removes_the_cluster() {
    let Some(place) = Place::new() else { return };
    let url = serve(fs::read(place.bundle()).unwrap());
    let wrong = "0".repeat(64);
    let words = ["up", "--nodes", "1", "--api", "embedded", "--timeout", "1h", "--bundle", &url, "--sha256", &wrong];
    let said = place.run(&words);
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.err.contains("node1 has failed") && said.err.contains(&wrong), "{said:?}");
    assert!(said.err.contains("is taken down again") && !place.state().exists(), "{said:?}");
}

#[test]
fn an_up_that_runs_out_of_time_leaves_the_cluster_and_says_how_to_go_on() {
    let Some(place) = Place::new() else { return };
    let said = place.run(&["up", "--nodes", "1", "--api", "embedded", "--flux", "none", "--timeout", "0"]);
    assert_eq!(said.code, Some(1), "{said:?}");
    for words in ["not all of 1 node came online in time", "`flux-distribute local status`", "local down`"] {
        assert!(said.err.contains(words), "{words}: {said:?}");
    }
    assert!(place.must(&["status"]).contains("node1"));
}

#[test]
fn every_local_command_says_that_it_needs_root() {
    if skips_without([Need::Root]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("flux-distribute");
    fs::copy(BINARY, &program).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for words in [
        &["up"][..],
        &["status"],
        &["add-node"],
        &["remove-node", "node1"],
        &["agent", "node1", "kill"],
        &["exec", "node1", "--", "true"],
        &["logs", "node1"],
        &["kubeconfig"],
        &["down"],
    ] {
        let mut command = Command::new(&program);
        let said = Said::of(command.arg("local").args(words).uid(65534).gid(65534).output().unwrap());
        assert_eq!(said.code, Some(2), "{words:?}: {said:?}");
        assert!(said.err.contains("run it as root") && said.err.lines().count() == 1, "{words:?}: {said:?}");
    }
}
