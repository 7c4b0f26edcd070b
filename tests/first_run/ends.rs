//! An end in the middle of `local up` is one clear end, and leaves nothing.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{Place, Said};

#[test]
fn a_signal_during_up_ends_it_with_one_message_and_leaves_nothing() {
    for (signal, code, words) in [
        (Signal::SIGINT, 130, "API server at"),
        (Signal::SIGINT, 130, "node2 is up"),
        (Signal::SIGTERM, 143, "Starting"),
        (Signal::SIGHUP, 129, "node1 is up"),
    ] {
        let Some(place) = Place::new() else { return };
        let up = place.begin(&["--api", "embedded"], words);
        let bridge = place.bridge();
        kill(Pid::from_raw(up.id().cast_signed()), signal).unwrap();
        let said = Said::of(up.wait_with_output().unwrap());
        assert_eq!(said.code, Some(code), "{signal} after {words}: {said:?}");
        assert_eq!(said.err, "flux-distribute: interrupted; everything it had made is removed\n");
        place.leaves_nothing(&bridge);
    }
}

#[test]
fn an_up_whose_reader_is_gone_ends_and_leaves_nothing() {
    let Some(place) = Place::new() else { return };
    let mut up = place.command(&["up", "--nodes", "2", "--flux", "none", "--api", "embedded"]);
    let mut up = up.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(up.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.by_ref().any(|line| line.contains("API server at")));
    let bridge = place.bridge();
    drop(said);
    let said = Said::of(up.wait_with_output().unwrap());
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.err.contains("can't write to stdout"), "{said:?}");
    place.leaves_nothing(&bridge);
}

#[test]
fn a_down_during_up_ends_both_with_one_message_each() {
    for words in ["API server at", "node2 is up", "Starting"] {
        let Some(place) = Place::new() else { return };
        let up = place.begin(&["--api", "embedded", "--timeout", "1h"], words);
        let bridge = place.bridge();
        assert_eq!(place.must(&["down"]), "stopping the nodes, which takes some seconds\nthe local cluster is down");
        let said = Said::of(up.wait_with_output().unwrap());
        assert_eq!(said.code, Some(1), "after {words}: {said:?}");
        let expected = "flux-distribute: `flux-distribute local down` took the cluster down while it was starting\n";
        assert_eq!(said.err, expected, "after {words}");
        place.leaves_nothing(&bridge);
    }
}
