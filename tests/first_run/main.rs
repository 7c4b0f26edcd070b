//! What somebody sees who tries local mode for the first time: mistakes that are reported before anything starts, ends in the
//! middle, and nodes without Flux. Needs root for most; makes namespaces, cgroups and links, and takes them down.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

mod ends;
mod mistakes;
#[path = "../support/needs.rs"]
mod needs;
mod proxy;
mod scripts;
mod stand_in;
#[path = "../support/traces.rs"]
mod traces;

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use needs::{NODES, skips_without};

const PATIENCE: Duration = Duration::from_mins(2);
const BINARY: &str = env!("CARGO_BIN_EXE_flux-distribute");

/// What must not come from the environment of the tests.
const OUTSIDE: [&str; 9] = [
    "KUBEBUILDER_ASSETS",
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
];

/// Two clusters that come up at the same time cost more than a small machine has.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A place for one local cluster, which is taken down at the end.
struct Place {
    directory: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Place {
    /// None if the test can't run: local mode needs root.
    fn new() -> Option<Self> {
        if skips_without(NODES) {
            return None;
        }
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { directory: tempfile::tempdir().unwrap(), _turn: turn })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn state(&self) -> PathBuf {
        self.path("state")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.arg("local").args(words).stdin(Stdio::null());
        command.env("FLUX_DISTRIBUTE_LOCAL_DIR", self.state());
        for name in OUTSIDE {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, words: &[&str]) -> Said {
        Said::of(self.command(words).output().unwrap())
    }

    /// What it says; it must succeed.
    fn must(&self, words: &[&str]) -> String {
        let said = self.run(words);
        assert_eq!(said.code, Some(0), "local {words:?}: {said:?}");
        said.out.trim().to_owned()
    }

    /// A `local up` that has said a line with `words`; its later output is discarded.
    fn begin(&self, options: &[&str], words: &str) -> Child {
        let words_of_up = [&["up", "--nodes", "2", "--flux", "none"], options].concat();
        let mut up = self.command(&words_of_up).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(up.stdout.take().unwrap()).lines();
        let found = lines.by_ref().map(Result::unwrap).any(|line| line.contains(words));
        assert!(found, "it has ended without saying {words}");
        std::thread::spawn(move || lines.for_each(drop));
        up
    }

    fn bridge(&self) -> String {
        traces::bridge(&self.state())
    }

    /// Dead processes stay visible until the machine's PID 1 has reaped them.
    fn leaves_nothing(&self, bridge: &str) {
        until("the cluster's end", || traces::traces(&self.state(), bridge).is_empty().then_some(()));
    }

    /// A bundle without Flux, which can be installed for all that.
    fn bundle(&self) -> PathBuf {
        let program = self.path("tree/bin/flux");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        fs::write(&program, "#!/bin/sh\n".repeat(1000)).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let out = self.path("flux.tar.gz");
        let mut create = Command::new(BINARY);
        create.args(["bundle", "create", "--from-prefix"]).arg(self.path("tree"));
        create.args(["--compiled-prefix", "/opt/none-such", "--out"]).arg(&out).stdout(Stdio::null());
        assert!(create.status().unwrap().success());
        out
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let down = self.run(&["down"]);
        if down.code != Some(0) {
            eprintln!("down: {down:?}");
        }
    }
}

/// What a command has said, and its exit code.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Said {
    fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        sleep(Duration::from_millis(100));
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
