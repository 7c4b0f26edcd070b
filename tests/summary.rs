//! What `scripts/test.sh` prints at its end, with a cargo that prints what it is given. And what ends a test early.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "support/needs.rs"]
mod needs;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use needs::{Need, is_required};

/// One test program: what runs before its result, and the names of its failed tests.
fn program(name: &str, said: &str, (passed, ignored): (u32, u32), failed: &[&str]) -> String {
    let word = if failed.is_empty() { "ok" } else { "FAILED" };
    let names: String = failed.iter().map(|name| format!("    {name}\n")).collect();
    let list = if failed.is_empty() { String::new() } else { format!("failures:\n\nfailures:\n{names}\n") };
    format!(
        "     Running tests/{name}/main.rs (target/x/debug/deps/{name}-0123456789abcdef)\n\nrunning 9 tests\n{said}\n{list}\
         test result: {word}. {passed} passed; {} failed; {ignored} ignored; 0 measured; 0 filtered out; finished in 0.03s\n\n",
        failed.len()
    )
}

/// All that `scripts/test.sh` prints from its summary on if cargo prints `said` and ends with `code`, and its own exit code.
fn summary(said: &str, code: i32, arguments: &[&str]) -> (Vec<String>, i32) {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("said"), said).unwrap();
    let put = |name: &str, script: &str| {
        let path = directory.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    put("cargo", &format!("cat '{}'; exit {code}", directory.path().join("said").display()));
    put("docker", "exit 1");
    let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/test.sh");
    let output = Command::new(script).args(arguments).env("PATH", path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, summary) = text.split_once("\n== tests ==\n").unwrap();
    (summary.lines().map(str::to_owned).collect(), output.status.code().unwrap())
}

const NO_FLUX: &str = "there is no Flux in /opt/flux; name another place by FLUX_PREFIX";

#[test]
fn tests_that_ended_early_do_not_count_as_passed_and_are_counted_by_need() {
    let early = |test: &str| format!("skipped: local_flux::{test}: needs flux: {NO_FLUX}\n");
    // A line of another test may stand before it, and a test may say it twice.
    let said = format!("{}test x ... {}{}", early("trees::kary"), early("state::kept"), early("state::kept"));
    let said = program("host", "test a ... ok", (3, 1), &[]) + &program("local_flux", &said, (2, 0), &[]);
    let (lines, code) = summary(&said, 0, &[]);
    assert_eq!(
        lines,
        [
            "ran: 2 test programs; 5 tests ended well, 2 of them early",
            "ignored: 1, which other tests run in processes of their own",
            &format!("skipped: 2 tests need flux: {NO_FLUX}"),
            "skipped: the test on a kind cluster: there is no Docker daemon or no kind here; 0 of 2 end-to-end tests passed in \
             local mode",
            "3 passed, 0 failed, 3 skipped",
        ]
    );
    assert_eq!(code, 0);
}

#[test]
fn failed_tests_are_named_again_right_before_the_last_line() {
    // A test of `host` runs its own program once more: what that printed does not count.
    let inner = "running 1 test\nfailures:\n    boundary::inner\n\ntest result: FAILED. 0 passed; 1 failed; 0 ignored; 0 \
                 measured; 40 filtered out; finished in 0.01s";
    let died = "     Running tests/docs.rs (target/x/debug/deps/docs-0123456789abcdef)\n\nrunning 3 tests\n";
    let said = program("host", inner, (4, 0), &["boundary::outer", "pod::b"])
        + died
        + &program("local_flux", "", (7, 0), &[])
        + "error: 2 targets failed:\n    `--test host`\n    `--test docs`\n";
    let (lines, code) = summary(&said, 101, &[]);
    let end = &lines[lines.len() - 5..];
    assert!(end[0].ends_with("no kind here; 7 of 7 end-to-end tests passed in local mode"), "{end:?}");
    assert_eq!(
        end[1..],
        [
            "FAILED: host: boundary::outer",
            "FAILED: host: pod::b",
            "FAILED: docs: it ended without a result",
            "11 passed, 3 failed, 1 skipped",
        ]
    );
    assert_eq!(code, 101);
}

#[test]
fn a_program_that_does_not_compile_is_a_failure_too() {
    let (lines, code) = summary("error: could not compile `flux-distribute`\n", 101, &["--test", "host"]);
    assert_eq!(lines[1..], ["FAILED: cargo test: it ended with 101, see above", "0 passed, 1 failed, 0 skipped"]);
    assert_eq!(code, 101);
}

#[test]
fn a_need_that_is_required_fails_the_test_and_another_one_ends_it() {
    for (required, expected) in [("", false), ("root", false), ("root, flux", true), ("flux", true)] {
        assert_eq!(is_required(Need::Flux, required), expected, "{required}");
    }
    assert_eq!(Need::ApiServer.name(), "apiserver");
    assert_eq!(Need::MemfdNoexec.name(), "memfd-noexec");
    let misspelt = std::panic::catch_unwind(|| is_required(Need::Flux, "root,fluks"));
    assert!(
        misspelt.unwrap_err().downcast_ref::<String>().unwrap().starts_with("REQUIRE lists fluks; known are root,")
    );
}

#[test]
fn each_need_that_the_script_looks_for_is_one_of_the_tests() {
    let script = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/needs.sh")).unwrap();
    let looked: Vec<_> = script.lines().filter_map(|line| line.strip_prefix("look ")?.split(' ').next()).collect();
    assert!(looked.len() > 10);
    for need in looked {
        is_required(Need::Root, need);
    }
}

/// All Rust files below `directory`.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let below = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    below.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

#[test]
fn no_test_prints_a_skip_of_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for path in ["src", "tests"].iter().flat_map(|directory| sources(&root.join(directory))) {
        let is_ours = ["tests/support/needs.rs", "tests/summary.rs"].iter().any(|ours| path.ends_with(ours));
        assert!(is_ours || !fs::read_to_string(&path).unwrap().contains("\"skipped: "), "{}", path.display());
    }
}
