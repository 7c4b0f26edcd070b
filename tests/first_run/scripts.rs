//! The Makefile's targets say what is missing before they begin.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use crate::{
    BINARY, Place, Said,
    needs::{Need, skips_without},
    root,
};

/// Nothing listens there.
const UNREACHABLE: &str = "http://127.0.0.1:1/channel";

fn script(name: &str) -> Command {
    let mut command = Command::new(root().join("scripts").join(name));
    command.current_dir(root());
    for variable in ["BUNDLE", "CHANNEL", "FLUX", "BINARY", "KUBECTL"] {
        command.env_remove(variable);
    }
    command
}

/// A directory for PATH with these programs of this machine.
fn programs(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let paths = ["/usr/bin", "/bin"].map(|path| Path::new(path).join(name));
        let program = paths.iter().find(|path| path.exists()).unwrap_or_else(|| panic!("no {name}"));
        symlink(program, directory.path().join(name)).unwrap();
    }
    directory
}

#[test]
fn the_demo_looks_for_flux_before_anything_is_installed_or_compiled() {
    if skips_without([Need::Root]) {
        return;
    }
    let programs = programs(&["bash", "env", "dirname", "id", "timeout", "make", "sed", "head", "od", "tr"]);
    // The tools for a build are missing, so a script that begins a build fails in another way.
    let path = programs.path();
    for (variables, words) in [
        (&[("CHANNEL", UNREACHABLE)][..], "can't reach http://127.0.0.1:1/channel"),
        (
            &[("BUNDLE", "http://127.0.0.1:1/flux.tar.gz"), ("FLUX", "required")],
            "can't reach http://127.0.0.1:1/flux.tar.gz",
        ),
        (
            &[("CHANNEL", "https://packages.invalid/channel"), ("HTTPS_PROXY", "http://127.0.0.1:1")],
            "can't reach https://packages.invalid/channel, nor the proxy that the environment names",
        ),
        (&[("BUNDLE", "/nowhere.tar.gz")], "there is no bundle /nowhere.tar.gz"),
        (&[("BUNDLE", "/etc/passwd")], "/etc/passwd is no .tar.gz"),
        (&[("CHANNEL", "/etc")], "/etc is not a conda channel"),
        (&[("FLUX", "perhaps")], "FLUX is perhaps"),
    ] {
        let mut make = Command::new("/usr/bin/make");
        make.args(["--silent", "demo"]).current_dir(root()).env_clear().env("PATH", path).env("HOME", "/nowhere");
        make.env("FLUX_DISTRIBUTE_LOCAL_DIR", path.join("state")).envs(variables.iter().copied());
        let said = Said::of(make.output().unwrap());
        let first = said.err.lines().next().unwrap_or_default();
        assert!(said.code == Some(2) && first.contains(words) && said.out.is_empty(), "{variables:?}: {said:?}");
        assert!(words.starts_with("FLUX") || first.contains("BUNDLE=FILE|URL"), "{first}");
    }
}

#[test]
fn the_demo_without_flux_says_so_and_a_second_one_says_how_to_continue() {
    let Some(place) = Place::new() else { return };
    let demo = |words: &[&str]| {
        let mut demo = script("demo.sh");
        demo.args(words).env("FLUX", "none").env("NODES", "2").env("BINARY", BINARY);
        Said::of(demo.env("FLUX_DISTRIBUTE_LOCAL_DIR", place.state()).output().unwrap())
    };
    let first = demo(&[]);
    assert_eq!(first.code, Some(0), "{first:?}");
    let lines: Vec<&str> = first.out.lines().collect();
    assert!(lines[0].starts_with("No Flux will run in this demo"), "{}", lines[0]);
    assert!(lines[lines.len() - 1].starts_with("No Flux ran in this demo"), "{}", lines[lines.len() - 1]);
    assert!(first.out.contains("node3 is up") && first.out.contains("ranks 0-1"), "{first:?}");
    let taken_over = |line: &&&str| line.starts_with("node2: agent ") && line.contains(" has taken over");
    assert!(lines.iter().find(taken_over).is_some_and(|line| line.ends_with("the same process")), "{first:?}");

    let second = demo(&[]);
    assert_eq!(second.code, Some(2));
    assert!(second.err.contains("`make demo-down`") && second.err.lines().count() == 1, "{second:?}");
    assert_eq!(demo(&["down"]).code, Some(0));
    assert!(!place.state().exists());
}

#[test]
fn a_demo_whose_up_has_begun_nothing_takes_nothing_down() {
    let Some(place) = Place::new() else { return };
    let cut = place.path("cut.tar.gz");
    let bytes = fs::read(place.bundle()).unwrap();
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let mut demo = script("demo.sh");
    demo.env("BUNDLE", &cut).env("BINARY", BINARY).env("FLUX_DISTRIBUTE_LOCAL_DIR", place.state());
    let said = Said::of(demo.output().unwrap());
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.err.contains("it is truncated") && !said.out.contains("taken down"), "{said:?}");
}

#[test]
fn a_program_that_is_missing_is_named_before_the_work_begins() {
    let bare = programs(&["bash", "env", "dirname", "id"]);
    let fake = tempfile::tempdir().unwrap();
    let docker = fake.path().join("docker");
    fs::write(&docker, "#!/bin/sh\nexit 1\n").unwrap();
    fs::set_permissions(&docker, fs::Permissions::from_mode(0o755)).unwrap();
    let with_docker = format!("{}:{}", fake.path().display(), bare.path().display());
    let without = bare.path().display().to_string();
    for (name, words, path, missing) in [
        ("deploy.sh", &["up", "image"][..], &without, "there is no kubectl"),
        ("deploy.sh", &["down"], &without, "there is no kubectl"),
        ("kind-test.sh", &[], &without, "there is no docker"),
        ("kind-test.sh", &[], &with_docker, "there is no kind"),
    ] {
        let said = Said::of(script(name).args(words).env("PATH", path).output().unwrap());
        assert_eq!(said.code, Some(2), "{name}: {said:?}");
        assert!(said.err.starts_with(missing) && said.err.lines().count() == 1, "{name}: {said:?}");
    }

    // A docker without its daemon can't push, and making the image takes a long time.
    let programs = programs(&["bash", "env", "dirname", "id", "make", "sh", "sed", "head"]);
    let path = format!("{}:{}", fake.path().display(), programs.path().display());
    for path in [path, programs.path().display().to_string()] {
        for targets in [&["push"][..], &["image", "push"]] {
            let mut push = Command::new("/usr/bin/make");
            push.arg("--silent").args(targets).current_dir(root()).env("PATH", &path);
            let said = Said::of(push.output().unwrap());
            assert_eq!(said.code, Some(2), "{targets:?}: {said:?}");
            assert!(said.err.starts_with("there is no Docker daemon") && said.out.is_empty(), "{targets:?}: {said:?}");
        }
    }
}
