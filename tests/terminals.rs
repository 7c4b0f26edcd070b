//! The program on terminals as people have them: narrow ones, dumb ones, without UTF-8, closed too early; and what Ctrl-C does.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "support/api_server.rs"]
mod api_server;
mod apiserver_support;
#[path = "support/needs.rs"]
mod needs;

use std::{
    fs::{self, File},
    io::Read,
    net::TcpListener,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{PermissionsExt, symlink},
            process::CommandExt,
        },
    },
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
};

use api::{CONFIGMAP_ROSTER, CONFIGMAP_ROSTER_KEY, FluxInstance, FluxNode};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::{Pid, dup},
};
use serde_json::{Value, json};

use api_server::ApiServer;
use apiserver_support::{LONG, Server, start};
use needs::{Need, kubectl, skips_without};

/// A person's directory, with the program under its two names.
struct Person {
    home: tempfile::TempDir,
    /// For `kubectl flux`; its API server ends with this.
    server: Option<Server>,
}

impl Person {
    fn without_cluster() -> Self {
        let person = Self { home: tempfile::tempdir().unwrap(), server: None };
        let program = env!("CARGO_BIN_EXE_flux-distribute");
        ["kubectl-flux", "flux-distribute"].iter().for_each(|name| symlink(program, person.at(name)).unwrap());
        person
    }

    /// With an instance of three nodes whose messages are long.
    async fn with_cluster() -> Self {
        let person = Self { server: Some(start().await), ..Self::without_cluster() };
        fs::write(person.at("kubeconfig"), person.server().kubeconfig.to_string()).unwrap();
        fs::write(
            person.at("kubectl"),
            "#!/bin/sh\n[ \"$1\" != version ] || exit 0\necho followed\nexec /bin/sleep 1000\n",
        )
        .unwrap();
        fs::set_permissions(person.at("kubectl"), fs::Permissions::from_mode(0o755)).unwrap();
        let pending = json!({
            "type": "RestartPending", "status": "True", "reason": "Waits", "message": "packages change",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let status = json!({
            "phase": "Running", "message": format!("naïve {}", "message ".repeat(12)), "lead": "hpc-worker-gpu-node-0", "epoch": 1, "size": 3, "online": 2,
            "maxSize": 64, "observedGeneration": 99, "conditions": [pending],
        });
        let instances = person.server().api::<FluxInstance>();
        let object = serde_json::from_value(json!({"metadata": {"name": "flux"}, "spec": {}})).unwrap();
        instances.create(&PostParams::default(), &object).await.unwrap();
        let patch = |status: &Value| Patch::Merge(json!({"status": status}));
        instances.patch_status("flux", &PatchParams::default(), &patch(&status)).await.unwrap();
        let members = [0, 1, 2].map(|rank| format!("hpc-worker-gpu-node-{rank}"));
        let members = members.each_ref().map(|name| (name.as_str(), 8));
        let roster = serde_json::to_string(&model::fixture::roster(64, &members)).unwrap();
        let roster = json!({"metadata": {"name": CONFIGMAP_ROSTER}, "data": {CONFIGMAP_ROSTER_KEY: roster}});
        let maps = person.server().api::<ConfigMap>();
        maps.create(&PostParams::default(), &serde_json::from_value(roster).unwrap()).await.unwrap();
        let nodes = person.server().api::<FluxNode>();
        for rank in 0..3 {
            let name = format!("hpc-worker-gpu-node-{rank}");
            let object = json!({"metadata": {"name": name}, "spec": {"nodeName": name, "rank": rank, "want": "Run"}});
            nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
            let status = json!({"phase": "Online", "message": format!("naïve {rank} {}", "long ".repeat(30))});
            nodes.patch_status(&name, &PatchParams::default(), &patch(&status)).await.unwrap();
        }
        person
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// `kubectl flux` with these words, or another program of this person.
    fn command(&self, words: &str, variables: &[(&str, &str)]) -> Command {
        let mut words: Vec<_> = words.split(' ').collect();
        let name = if words[0] == "flux-distribute" { words.remove(0) } else { "kubectl-flux" };
        let mut command = Command::new(self.at(name));
        command.args(words).env_clear().current_dir(self.home.path()).stdin(Stdio::null());
        command.env("HOME", self.home.path()).env("PATH", format!("{}:/usr/bin:/bin", self.home.path().display()));
        command.env("KUBECONFIG", self.at("kubeconfig")).envs(variables.iter().copied());
        command
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.home.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| {
            !["kubectl-flux", "flux-distribute", "kubeconfig", "kubectl", ".cache"].contains(&name.as_str())
        });
        names.sort();
        names
    }
}

/// A terminal, with a program that has all three streams on it.
struct Terminal {
    child: Child,
    pieces: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn of(mut command: Command, columns: u16) -> Self {
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let stream = || Stdio::from(dup(&pty.slave).unwrap());
        // A group of its own, as a shell gives to each job.
        command.stdin(stream()).stdout(stream()).stderr(stream()).process_group(0);
        let child = command.spawn().unwrap();
        drop((command, pty.slave));
        Self { child, pieces: pieces(pty.master), seen: String::new() }
    }

    /// Waits until these words are on the screen.
    fn until(&mut self, words: &str) {
        while !self.seen.contains(words) {
            let piece = self.pieces.recv_timeout(LONG);
            let piece = piece.unwrap_or_else(|error| panic!("{words:?}, {error}: {}", self.seen));
            self.seen += &String::from_utf8_lossy(&piece);
        }
    }

    /// What the whole group gets from the terminal.
    fn press_ctrl_c(&self) {
        kill(Pid::from_raw(-i32::try_from(self.child.id()).unwrap()), Signal::SIGINT).unwrap();
    }

    /// Ctrl-C, or another signal for the program alone, as its parent would send it.
    fn send(&self, signal: Signal) {
        match signal {
            Signal::SIGINT => self.press_ctrl_c(),
            signal => kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap(),
        }
    }

    /// Waits for the end.
    fn end(mut self) -> (ExitStatus, String) {
        while let Ok(piece) = self.pieces.recv_timeout(LONG) {
            self.seen += &String::from_utf8_lossy(&piece);
        }
        (self.child.wait().unwrap(), self.seen)
    }
}

/// What is written to a terminal, until the last program on it has ended.
fn pieces(master: OwnedFd) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    let mut master = File::from(master);
    thread::spawn(move || {
        let mut piece = [0; 4096];
        // Without a program, a terminal gives EIO.
        while let Ok(length @ 1..) = master.read(&mut piece) {
            let _ = sender.send(piece[..length].to_vec());
        }
    });
    receiver
}

/// True if a terminal is left as it was found: what was hidden, or is written in another way, is so no more.
fn leaves_nothing_on(screen: &str) -> bool {
    let last = |on: &str, off: &str| screen.rfind(off) > screen.rfind(on) || !screen.contains(on);
    last("\x1b[?25l", "\x1b[?25h") && last("\x1b[?7l", "\x1b[?7h") && last("\x1b[?1049h", "\x1b[?1049l")
}

/// A screen without colours.
fn plain(screen: &str) -> String {
    let mut pieces = screen.split("\x1b[");
    let first = pieces.next().unwrap().to_owned();
    pieces.fold(first, |plain, piece| plain + piece.split_once('m').map_or(piece, |(_, rest)| rest))
}

const SHOWS: [&str; 4] =
    ["status", "status -o wide", "tree", "flux-distribute render --hosts hpc-worker-gpu-node-[1-8] tree"];

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_of_sixty_columns_shows_whole_lines_and_colours_only_where_they_are_wanted() {
    let person = Person::with_cluster().await;
    for words in ["--help", "scale --help", "flux-distribute --help", "flux-distribute bundle create --help"] {
        let (_, screen) = Terminal::of(person.command(words, &[("TERM", "dumb")]), 60).end();
        let plain = plain(&screen);
        // A synopsis is one line.
        let folded = plain.lines().filter(|line| !line.starts_with("Usage: "));
        let wide: Vec<_> = folded.filter(|line| line.chars().count() > 60).collect();
        assert!(wide.is_empty() && screen.len() > 60, "{words}: {wide:?}");
    }
    for words in ["status", "doctor", "tree"] {
        for (variables, has_colours) in [
            (&[("TERM", "xterm-256color")][..], words != "tree"),
            (&[("TERM", "xterm-256color"), ("NO_COLOR", "1")], false),
            (&[("TERM", "dumb")], false),
            (&[("TERM", "")], false),
            (&[], false),
        ] {
            let (_, screen) = Terminal::of(person.command(words, variables), 60).end();
            assert_eq!(screen.contains('\x1b'), has_colours, "{words} {variables:?}: {screen:?}");
            let wide: Vec<_> =
                plain(&screen).lines().filter(|line| line.chars().count() > 60).map(str::to_owned).collect();
            assert!(wide.is_empty() && screen.len() > 60, "{words} {variables:?}: {screen}");
            assert!(!screen.contains("panicked") && leaves_nothing_on(&screen), "{screen}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn our_own_words_need_no_utf_8() {
    let person = Person::with_cluster().await;
    for words in SHOWS.into_iter().chain([
        "doctor",
        "upgrade",
        "--help",
        "flux-distribute --help",
        "flux-distribute render --hosts n1",
    ]) {
        let output = person.command(words, &[("LANG", "C"), ("LC_ALL", "C")]).output().unwrap();
        // What others have written, such as a message, is shown as it is.
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap().replace("naïve", "");
        assert!(text.is_ascii() && text.len() > 20, "{words}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_has_gone_away_is_no_failure() {
    let person = Person::with_cluster().await;
    let help = ["--help", "flux-distribute --help", "flux-distribute crds", "flux-distribute render --hosts n1"];
    for words in SHOWS.into_iter().chain(["upgrade"]).chain(help) {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = person.command(words, &[]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""), "{words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_a_wait_at_once_and_says_what_goes_on() {
    let person = Person::with_cluster().await;
    for (words, shown, goes_on) in [
        ("scale 3 --wait", "of 3", Some("spec.size stays as it is now")),
        ("upgrade --wait", "of 3", Some("nothing was changed")),
        ("upgrade --now --wait", "of 3", Some("the restart goes on")),
        ("status --watch", "room for 64", None),
        // The last, because it deletes the instance before it waits.
        ("uninstall --yes", "3 hosts to clean", Some("the agents go on cleaning the hosts")),
    ] {
        for kind in ["xterm", "dumb"] {
            let mut terminal = Terminal::of(person.command(words, &[("TERM", kind)]), 100);
            terminal.until(shown);
            terminal.press_ctrl_c();
            let (status, screen) = terminal.end();
            assert_eq!(base::process::code(status), 130, "{words}: {screen}");
            assert!(
                goes_on.is_none_or(|goes_on| screen.contains(&format!("interrupted: {goes_on}"))),
                "{words}: {screen}"
            );
            assert!(leaves_nothing_on(&screen) && !screen.contains("panicked"), "{words}: {screen:?}");
        }
    }
}

#[test]
fn ctrl_c_leaves_no_file_that_is_unfinished() {
    let person = Person::without_cluster();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let asked = channel();
    let listener = silent.try_clone().unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let _ = asked.0.send(stream);
        }
    });

    let lock = format!("flux-distribute lock --channel {url} --spec flux-core --out flux.lock");
    let terminal = Terminal::of(person.command(&lock, &[]), 100);
    let _connection = asked.1.recv_timeout(LONG).unwrap();
    assert_eq!(person.names().len(), 1, "the unfinished lock");
    terminal.press_ctrl_c();
    let (status, screen) = terminal.end();
    assert_eq!((base::process::code(status), person.names()), (130, vec![]), "{screen}");
    assert!(screen.contains("interrupted: nothing was written") && leaves_nothing_on(&screen), "{screen:?}");

    let tree = person.at("tree");
    fs::create_dir_all(tree.join("bin")).unwrap();
    fs::write(tree.join("bin/flux"), "#!/bin/sh\n").unwrap();
    // It takes no room, and longer to read than this test takes.
    File::create(tree.join("large")).unwrap().set_len(1 << 34).unwrap();
    let bundle = "flux-distribute bundle create --from-prefix tree --out out/flux.tar.gz";
    fs::create_dir(person.at("out")).unwrap();
    let terminal = Terminal::of(person.command(bundle, &[]), 100);
    let is_begun = || fs::read_dir(person.at("out")).unwrap().next().is_some();
    while !is_begun() {
        thread::yield_now();
    }
    terminal.press_ctrl_c();
    let (status, screen) = terminal.end();
    assert_eq!((base::process::code(status), is_begun()), (130, false), "{screen}");
    assert!(screen.contains("interrupted: nothing was written") && leaves_nothing_on(&screen), "{screen:?}");

    let lock = format!(
        "version: 6\nenvironments:\n  default:\n    channels: [{{url: {url}}}]\n    packages:\n      linux-64:\n      - conda: {url}/linux-64/flux-core-1.0-0.conda\npackages:\n- conda: {url}/linux-64/flux-core-1.0-0.conda\n  sha256: {}\n",
        "1f".repeat(32)
    );
    fs::write(person.at("flux.lock"), lock).unwrap();
    let bundle = "flux-distribute bundle create --lock flux.lock --out out/flux.tar.gz";
    let mut terminal = Terminal::of(person.command(bundle, &[]), 100);
    terminal.until("fetching");
    terminal.press_ctrl_c();
    let (status, screen) = terminal.end();
    assert_eq!(base::process::code(status), 130, "{screen}");
    assert!(screen.contains("stays in out/.flux.tar.gz.download, and the same command"), "{screen}");
    assert!(!person.at("out/flux.tar.gz").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_while_a_support_bundle_is_gathered_leaves_no_archive() {
    let person = Person::without_cluster();
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // An API server that takes connections and says nothing.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", silent.local_addr().unwrap())}}],
            "users": [{"name": "u", "user": {}}],
        });
        fs::write(person.at("kubeconfig"), kubeconfig.to_string()).unwrap();
        let terminal = Terminal::of(person.command("support-bundle", &[("TERM", "xterm")]), 100);
        let _connection = silent.accept().unwrap();
        assert_eq!(person.names().len(), 1, "the unfinished archive");
        terminal.send(signal);
        let (status, screen) = terminal.end();
        assert_eq!((base::process::code(status), person.names()), (128 + signal as i32, vec![]), "{screen}");
        assert!(screen.contains("interrupted: nothing was written"), "{screen}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_log_that_is_followed() {
    let person = Person::with_cluster().await;
    let pod = json!({
        "metadata": {"name": "install-flux-n1", "labels": {"app": "install-flux"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "agent", "image": "x"}]},
    });
    let pods = person.server().api::<Pod>();
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let running = json!({"name": "agent", "image": "x", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}});
    let status = Patch::Merge(json!({"status": {"phase": "Running", "containerStatuses": [running]}}));
    pods.patch_status("install-flux-n1", &PatchParams::default(), &status).await.unwrap();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut terminal = Terminal::of(person.command("logs n1 -f", &[("TERM", "xterm")]), 100);
        terminal.until("followed");
        terminal.send(signal);
        let (status, screen) = terminal.end();
        assert_eq!(base::process::code(status), code, "{screen}");
        assert!(leaves_nothing_on(&screen) && !screen.contains("panicked"), "{screen}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistake_is_one_sentence_with_a_remedy_and_never_a_backtrace() {
    let person = Person::with_cluster().await;
    let kubeconfig = fs::read_to_string(person.at("kubeconfig")).unwrap();
    fs::write(person.at("broken"), "clusters: [").unwrap();
    fs::write(person.at("stranger"), kubeconfig.replace(apiserver_support::TOKEN, "guessed")).unwrap();
    // Nobody listens there any more.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fs::write(person.at("gone"), kubeconfig.replace(&person.server().address.to_string(), &gone.to_string())).unwrap();
    for (words, code, said) in [
        ("--kubeconfig nowhere status", 2, "name a kubeconfig by --kubeconfig or KUBECONFIG"),
        ("--kubeconfig broken status", 2, "name a kubeconfig by --kubeconfig or KUBECONFIG"),
        ("--kubeconfig stranger status", 1, "the API server doesn't know you: log in again"),
        ("--kubeconfig gone status", 1, "the API server does not answer: check the kubeconfig"),
        ("status --colour", 2, "unexpected argument '--colour'"),
        ("logs n9", 1, "no agent runs on node n9: `kubectl flux status -o wide` lists the nodes"),
        ("support-bundle --out /nowhere/x.tar.gz", 1, "can't write /nowhere/x.tar.gz"),
        ("flux-distribute validate nowhere.yaml", 2, "nowhere.yaml: No such file"),
        ("flux-distribute render --hosts n[1-", 2, "is neither a node's name nor a range"),
        ("flux-distribute bundle inspect nowhere", 2, "nowhere"),
    ] {
        let output = person.command(words, &[("RUST_BACKTRACE", "1")]).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]), "{words}: {complaint}");
        assert!(complaint.contains(said) && !complaint.contains("panicked"), "{words}: {complaint}");
        let is_of_clap = complaint.contains("For more information, try '--help'");
        assert!(is_of_clap || complaint.trim_end().lines().count() == 1, "{words}: {complaint}");
    }
}

#[test]
fn a_cluster_without_us_and_one_without_rights_say_so() {
    if skips_without([Need::ApiServer, Need::Kubectl]) {
        return;
    }
    let (person, server) = (Person::without_cluster(), ApiServer::up());
    server.wait(&kubectl().unwrap());
    let mut kubeconfig: Value = serde_json::from_slice(&fs::read(server.kubeconfig()).unwrap()).unwrap();
    let told = |kubeconfig: &Value, words: &str| {
        fs::write(person.at("kubeconfig"), kubeconfig.to_string()).unwrap();
        let output = person.command(words, &[]).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]), "{words}");
        String::from_utf8(output.stderr).unwrap()
    };
    let commands = ["status", "tree", "scale 3 --wait", "upgrade --now --wait", "logs"];
    for words in commands {
        let complaint = told(&kubeconfig, words);
        assert!(complaint.contains("flux-distribute is not installed there"), "{words}: {complaint}");
        assert_eq!(complaint.lines().count(), 1, "{words}: {complaint}");
    }
    // Nobody in particular.
    kubeconfig["users"][0]["user"] = json!({});
    for words in commands {
        let complaint = told(&kubeconfig, words);
        assert!(
            complaint.contains("you may not do this: somebody who may has to give you the right"),
            "{words}: {complaint}"
        );
        assert_eq!(complaint.lines().count(), 1, "{words}: {complaint}");
    }
}
