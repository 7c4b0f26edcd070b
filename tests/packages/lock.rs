//! `flux-distribute lock`, and what may stand in packages.lock.

use std::{
    process::{Command, Output},
    sync::{Arc, Mutex, atomic::AtomicU64},
};

use super::*;

fn run(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
    for name in ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
    command.arg("lock").args(words).output().unwrap()
}

/// In a thread of its own: the server that it asks runs on this one.
async fn run_beside(words: &[&str]) -> Output {
    let words = words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let run = move || run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What stderr says, and with which code it ended.
fn complaint(output: &Output) -> (Option<i32>, String) {
    assert!(output.stdout.is_empty(), "{}", said(output));
    (output.status.code(), String::from_utf8(output.stderr.clone()).unwrap())
}

fn given(lock: &str) -> Packages {
    Packages { lock: Some(lock.to_owned()), ..Packages::default() }
}

fn lock_of(set: PackageSet) -> String {
    match set {
        PackageSet::Lock { lock, .. } => lock,
        PackageSet::Bundle(_) => panic!("not a lock"),
    }
}

fn url(name: &str) -> String {
    format!("https://channel/{name}")
}

/// An `@EXPLICIT` list of packages whose digests are all the same letter.
fn list(packages: &[(&str, char)]) -> String {
    let line = |(name, letter): &(&str, char)| format!("{}#{}\n", url(name), letter.to_string().repeat(64));
    format!("# platform: linux-64\n@EXPLICIT\n{}", packages.iter().map(line).collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_for_two_platforms_is_reproducible_and_valid_in_a_spec() {
    let channel = Channel::with_flux();
    channel.list_for("linux-aarch64");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("flux.lock").display().to_string();
    let channel_url = channel.file_url();
    let words =
        ["--channel", &channel_url, "--spec", "flux-core", "--platform", "linux-aarch64", "--platform", "linux-64"];
    let output = run(&words);
    assert!(output.status.success(), "{output:?}");
    let lock = said(&output);
    let written = run(&[&words[..], &["--out", &file]].concat());
    assert!(written.status.success(), "{written:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), lock);
    assert!(said(&written).contains("linux-aarch64: 2 packages, "), "{written:?}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);

    locks::check_lock(&lock, &[]).unwrap();
    let both = ["linux-64".to_owned(), "linux-aarch64".to_owned()];
    let set = packages::resolve(&given(&lock), &both, &http(), None, host_file, |_| ()).await.unwrap();
    assert_eq!(lock_of(set.clone()), lock);
    let host = Host::new();
    host.fetch(&set).await.unwrap();
}

#[test]
fn a_failed_lock_command_prints_one_message_and_leaves_no_file() {
    let channel = Channel::with_flux();
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("flux.lock").display().to_string();
    let nowhere = directory.path().join("gone/flux.lock").display().to_string();
    let place = channel.file_url();
    for (words, code, expected) in [
        (vec!["--channel", "conda-forge"], 2, "channel conda-forge is not an http, https or file URL"),
        (vec!["--channel", &place, "--spec", "flux-nonsense"], 2, "flux-nonsense"),
        (vec!["--channel", &place, "--spec", "flux-core >=>1"], 2, "spec `flux-core >=>1` can't be used"),
        (vec!["--channel", &place, "--spec", "flux-core", "--platform", "win-64"], 2, "win-64 is not a conda platform"),
        (vec!["--channel", &place, "--spec", "flux-core", "--glibc", "new!"], 2, "glibc new! is not a version"),
        (vec!["--channel", "http://127.0.0.1:1/lost", "--spec", "flux-core"], 1, "channel http://127.0.0.1:1/lost"),
        (vec!["--out", &nowhere], 2, "gone/flux.lock: its directory doesn't exist"),
    ] {
        let words = if words[0] == "--out" { words } else { [&words[..], &["--out", &out]].concat() };
        let (found, text) = complaint(&run(&words));
        let text = text.lines().last().unwrap();
        assert_eq!(found, Some(code), "{words:?}: {text}");
        assert!(text.starts_with("flux-distribute: ") && text.contains(expected), "{words:?}: {text}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

/// Not a promise of its own: a server that says when it is asked, and never answers.
fn silent_server() -> (String, std::sync::mpsc::Receiver<std::net::TcpStream>) {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let (sender, asked) = std::sync::mpsc::channel();
    std::thread::spawn(move || listener.incoming().flatten().try_for_each(|stream| sender.send(stream)));
    (url, asked)
}

#[test]
fn a_killed_lock_command_leaves_nothing_once_the_next_one_has_run() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("flux.lock").display().to_string();
    let (url, asked) = silent_server();
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-distribute"));
        let child = command.args(["lock", "--channel", &url, "--spec", "flux-core", "--out", &out]).spawn().unwrap();
        (child, asked.recv().unwrap())
    };
    let (mut killed, _connection) = start();
    killed.kill().unwrap();
    killed.wait().unwrap();
    let left = || fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left(), 1);

    // One that lives is not disturbed by another.
    let (mut living, _connection) = start();
    assert_eq!(left(), 1, "only what the living one writes");
    let channel = Channel::with_flux();
    let output = run(&["--channel", &channel.file_url(), "--spec", "flux-core", "--out", &out]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(left(), 2, "the lock, and what the living one writes");
    living.kill().unwrap();
    living.wait().unwrap();
    assert!(run(&["--channel", &channel.file_url(), "--spec", "flux-core", "--out", &out]).status.success());
    assert_eq!(left(), 1);
}

#[tokio::test]
async fn a_byte_order_mark_before_a_lock_is_ignored() {
    for text in [pixi(&["default"]), list(&[("linux-64/flux-core-0.88.0-h_0.conda", 'a')])] {
        let marked = format!("\u{feff}{text}");
        locks::check_lock(&marked, &[]).unwrap();
        let (marked, plain) = (resolve(&given(&marked)).await.unwrap(), resolve(&given(&text)).await.unwrap());
        assert_eq!(marked.digest(), plain.digest());
        assert_eq!(lock_of(marked), lock_of(plain));
    }
}

#[test]
fn a_diff_compares_locks_of_any_format() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let old = list(&[("linux-64/flux-core-0.87.0-h_0.conda", 'a'), ("noarch/gone-1-0.conda", 'b')]);
    let new = list(&[("linux-64/flux-core-0.88.0-h_0.conda", 'c'), ("linux-64/come-1-0.conda", 'd')]);
    let old = write("old.txt", &old);
    let new = write("new.lock", &locks::normalise_lock(&new).unwrap());
    let output = run(&["diff", &old, &new]);
    assert!(output.status.success(), "{output:?}");
    let text = said(&output);
    for line in [
        "linux-64: 3 packages changed, 2 in all; 2 to download, of unknown size",
        "  upgraded    flux-core 0.87.0 → 0.88.0",
        "  added       come 1",
        "  removed     gone 1",
        "flux-core changes from 0.87 to 0.88 on linux-64: all brokers must be restarted together, as a new epoch.",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&said(&run(&["diff", &old, &new, "--output", "json"]))).unwrap();
    assert_eq!(json["newEpochNeeded"], true);
    assert_eq!(json["diff"]["platforms"]["linux-64"]["download"]["packages"], 2);
    assert_eq!(json["diff"]["platforms"]["linux-64"]["changes"][1]["change"], "upgraded");

    let same = run(&["diff", &new, &new]);
    assert!(same.status.success() && said(&same).contains("linux-64: nothing changes, 2 packages"), "{same:?}");
    let torn = write("torn.lock", "version: 7\nenv");
    for broken in [&torn, &directory.path().join("gone").display().to_string()] {
        let (code, text) = complaint(&run(&["diff", &old, broken]));
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(broken.as_str()) && text.trim().lines().count() == 1, "{text}");
    }
}

#[test]
fn the_help_names_the_exit_codes() {
    for words in [&["--help"][..], &["diff", "--help"]] {
        let output = run(words);
        assert!(said(&output).contains("Exit code: 0"), "{output:?}");
    }
}

#[tokio::test]
async fn an_explicit_list_becomes_a_lock_that_is_installed() {
    let channel = Channel::with_flux();
    let solved = lock_of(resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap());
    let digest = |name: &str| {
        let bytes = fs::read(channel.archive(name)).unwrap();
        hex::encode(<sha2::Sha256 as sha2::Digest>::digest(bytes))
    };
    let names = ["libflux-1.0-0.tar.bz2", "flux-core-1.0-0.conda"];
    let place = channel.file_url();
    let [library, core] = names.map(digest);
    // As conda writes it, as pixi does, with the lines of several hands.
    let text = format!(
        "# This file may be used to create an environment using:\n# platform: linux-64\n\n@EXPLICIT\n\
         {place}linux-64/{}#{library}\n{place}linux-64/{}#sha256:{core}\r\n",
        names[0], names[1],
    );
    let set = resolve(&given(&text)).await.unwrap();
    assert_eq!(set, resolve(&given(&text)).await.unwrap());
    let lock = lock_of(set.clone());
    for digest in [&library, &core] {
        assert!(solved.contains(digest.as_str()) && lock.contains(digest.as_str()), "{lock}");
    }
    assert_eq!(lock_of(resolve(&given(&lock)).await.unwrap()), lock);
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    assert!(host.environment(&set).join("bin/flux").is_file());
}

#[test]
fn a_noarch_package_belongs_to_the_platform_of_its_list() {
    let any = "noarch/any-1-0.conda";
    let core = |platform: &str| format!("{}#{}", url(&format!("{platform}/flux-core-1-0.conda")), "a".repeat(64));
    let any = format!("{}#{}", url(any), "b".repeat(64));
    let [x86, arm] = ["linux-64", "linux-aarch64"].map(core);
    let both = ["linux-64".to_owned(), "linux-aarch64".to_owned()];
    let holds = |text: &str, platform: &str| {
        let lock = locks::normalise_lock(text).unwrap().into_owned();
        let lock = rattler_lock::LockFile::from_str_with_base_directory(&lock, None).unwrap();
        let found = lock.default_environment().unwrap();
        let platform = lock.platform(platform).unwrap();
        found.packages(platform).unwrap().any(|package| package.name() == "any")
    };
    let unmarked = format!("@EXPLICIT\n{x86}\n{arm}\n{any}\n");
    assert!(both.iter().all(|platform| holds(&unmarked, platform)));
    let marked =
        format!("# platform: linux-64\n@EXPLICIT\n{x86}\n{any}\n# platform: linux-aarch64\n@EXPLICIT\n{arm}\n");
    assert!(holds(&marked, "linux-64") && !holds(&marked, "linux-aarch64"));
    locks::check_lock(&marked, &both).unwrap();
    locks::check_lock(&format!("# platform: linux-64\n@EXPLICIT\n{any}\n"), &both[..1]).unwrap();
}

#[test]
fn an_unusable_explicit_list_is_refused_with_the_package() {
    let line = |name: &str, digest: &str| format!("@EXPLICIT\n{}{digest}\n", url(name));
    let core = "linux-64/flux-core-0.88.0-h_0.conda";
    let sha256 = format!("#{}", "a".repeat(64));
    let [md5, cut, letters] = [32, 63, 64].map(|digits| "a".repeat(digits)).map(|digits| format!("#{digits}"));
    let letters = letters.replace('a', "g");
    for (text, expected) in [
        (line(core, ""), "package flux-core has no sha256"),
        (line(core, &md5), "conda list --explicit --sha256"),
        (line(core, &md5.replace('#', "#md5:")), "pixi project export conda-explicit-spec"),
        (line(core, &cut), "package flux-core has the sha256 `aaa"),
        (line(core, &letters), "package flux-core has the sha256 `ggg"),
        (line("osx-64/flux-core-0.88.0-h_0.conda", &sha256), "package flux-core is built for osx-64"),
        (line("linux-65/flux-core-0.88.0-h_0.conda", &sha256), "package flux-core is built for linux-65"),
        (line("noarch/any-1-0.conda", &sha256), "names no platform"),
        (line("linux-64/flux-core.zip", &sha256), "line 2 of the @EXPLICIT list"),
        ("@EXPLICIT\nflux-core\n".to_owned(), "line 2 of the @EXPLICIT list"),
        ("@EXPLICIT\n".to_owned(), "names no platform"),
        (format!("# platform: linux-65\n{}", line(core, &sha256)), "the platform linux-65"),
        (
            line(core, &sha256) + &line("linux-64/flux-core-0.87.0-h_0.conda", &sha256),
            "lists the package flux-core twice",
        ),
        (line(core, &sha256).replace("https", "ftp"), "package flux-core is not at an http, https or file URL"),
    ] {
        let error = locks::check_lock(&text, &[]).unwrap_err().to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
    }
}

/// A lock of pixi with these environments, each with one package.
fn pixi(environments: &[&str]) -> String {
    let core = url("linux-64/flux-core-0.88.0-h_0.conda");
    let environment = |name: &&str| {
        format!(
            "  {name}:\n    channels:\n    - url: https://channel/\n    packages:\n      linux-64:\n      - conda: {core}\n"
        )
    };
    let environments = environments.iter().map(environment).collect::<String>();
    let digest = "a".repeat(64);
    format!("version: 6\nenvironments:\n{environments}packages:\n- conda: {core}\n  sha256: {digest}\n  size: 7\n")
}

#[tokio::test]
async fn a_pixi_lock_is_accepted_if_its_environment_is_unambiguous() {
    for environments in [&["default"][..], &["flux"], &["default", "flux"]] {
        let text = pixi(environments);
        assert_eq!(lock_of(resolve(&given(&text)).await.unwrap()), text, "{environments:?}");
    }
    let error = resolve(&given(&pixi(&["gpu", "flux"]))).await.unwrap_err().to_string();
    assert!(error.contains("needs an environment `default`") && error.contains("flux, gpu"), "{error}");
}

#[test]
fn an_unusable_lock_is_refused_with_a_sentence_that_names_the_mistake() {
    let good = pixi(&["default"]);
    locks::check_lock(&good, &[]).unwrap();
    let pypi = "https://files/x-1-py3-none-any.whl";
    let with_pypi =
        good.replace("packages:\n- conda", &format!("packages:\n- pypi: {pypi}\n  name: x\n  version: '1'\n- conda"));
    let with_pypi = with_pypi.replacen("      - conda", &format!("      - pypi: {pypi}\n      - conda"), 1);
    let cut_at = |end: &str| good[..good.find(end).unwrap()].to_owned();
    for (text, expected) in [
        (good.replace(&"a".repeat(64), &"a".repeat(63)), "package flux-core has the sha256 `aaa"),
        (good.replace(&"a".repeat(64), "none"), "package flux-core has the sha256 `none`"),
        (cut_at("  sha256"), "package flux-core has no sha256"),
        (
            cut_at("- conda: https://channel/linux-64/flux-core-0.88.0-h_0.conda\n  sha256"),
            "lists the package flux-core for an environment",
        ),
        (cut_at("packages:\n- conda"), "the lock can't be read"),
        (
            good.replace("packages:\n- conda", "packages: []\nrest:\n- conda"),
            "lists the package flux-core for an environment",
        ),
        (good.replace("linux-64:", "linux-65:"), "linux-65"),
        (good.replace("https://channel/linux", "ftp://channel/linux"), "package flux-core is not at an http"),
        (good.replace("linux-64", "osx-64"), "no packages for platform linux-64; it has osx-64"),
        (good.replace("version: 6", "version: 99"), "version 99"),
        (good.replace("https://channel/linux-64", "./linux-64"), "package flux-core is not at an http"),
        (with_pypi, "package x comes from PyPI"),
        ("nonsense: [".to_owned(), "the lock can't be read"),
        ("just words".to_owned(), "the lock can't be read"),
        (String::new(), "the lock can't be read"),
        (good + &"# more\n".repeat(100_000), "published in a ConfigMap"),
    ] {
        let error = locks::check_lock(&text, &[]).unwrap_err();
        let error = base::error_chain(&error);
        assert!(error.contains(expected) && !error.contains('\n'), "{expected}: {error}");
    }
}

/// Answers each request for the index of linux-64 with the next of `moods`.
fn index_in_moods(server: &Server, moods: impl Iterator<Item = Option<Response>> + Send + 'static) -> Arc<AtomicU64> {
    let (given, moods) = (Arc::new(AtomicU64::new(0)), Mutex::new(moods));
    let count = given.clone();
    server.hook(move |request| {
        let asked = request.uri().path().ends_with("linux-64/repodata.json");
        let mood = asked.then(|| moods.lock().unwrap().next()).flatten()?;
        count.fetch_add(1, Ordering::SeqCst);
        mood
    });
    given
}

#[tokio::test]
async fn the_lock_command_obeys_retry_after() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    let asked = asked(server.url(), &["flux-core"]);
    let expected = resolve(&asked).await.unwrap();
    let other = Server::start(channel.path()).await;
    let elsewhere = format!("{}linux-64/repodata.json", other.url());
    let mood = |status: u16, headers: &[_]| answer(StatusCode::from_u16(status).unwrap(), headers, "");
    let at_once = [(header::RETRY_AFTER, "0")];
    for moods in [
        vec![mood(429, &at_once)],
        vec![mood(503, &at_once), mood(429, &at_once), mood(502, &at_once)],
        vec![mood(503, &[])],
        vec![mood(304, &[])],
        vec![mood(307, &[(header::LOCATION, &elsewhere)])],
    ] {
        let count = moods.len() as u64;
        let given = index_in_moods(&server, moods.into_iter());
        assert_eq!(resolve(&asked).await.unwrap(), expected);
        assert_eq!(given.load(Ordering::SeqCst), count);
    }
    assert!(other.trouble().sent.load(Ordering::SeqCst) > 0);
}

#[tokio::test]
async fn a_server_that_always_answers_not_modified_is_an_error() {
    let channel = Channel::with_flux();
    let server = Server::start(channel.path()).await;
    index_in_moods(&server, std::iter::repeat_with(|| answer(StatusCode::NOT_MODIFIED, &[], "")));
    let error = resolve(&asked(server.url(), &["flux-core"])).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("304 Not Modified"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_not_modified_answer_without_a_validator_works() {
    let channel = Channel::with_flux();
    channel.list_for("linux-aarch64");
    let server = Server::start(channel.path()).await;
    // As python's http.server does.
    server.hook(|request| {
        let conditions = [header::IF_NONE_MATCH, header::IF_MODIFIED_SINCE];
        let conditional = conditions.iter().any(|name| request.headers().contains_key(name));
        conditional.then(|| answer(StatusCode::NOT_MODIFIED, &[], "")).flatten()
    });
    let cache = tempfile::tempdir().unwrap();
    let asked = asked(server.url(), &["flux-core"]);
    let expected = resolve(&asked).await.unwrap();
    let (client, platforms) = (http(), [PLATFORM.to_owned()]);
    for _ in 0..3 {
        let again = packages::resolve(&asked, &platforms, &client, Some(cache.path()), host_file, |_| ());
        assert_eq!(again.await.unwrap(), expected);
    }
    // noarch is asked for once for each platform, the second time with a condition.
    let both =
        ["--channel", server.url(), "--spec", "flux-core", "--platform", "linux-64", "--platform", "linux-aarch64"];
    let output = run_beside(&both).await;
    assert!(output.status.success(), "{output:?}");
}
