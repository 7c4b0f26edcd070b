//! What is not as it was installed is named.

use std::{os::unix::fs::symlink, process::Command};

use hostapi::{Verified, VerifyOrder};

use super::*;

pub fn verify(prefix: &Path, digest: &str) -> Verified {
    let order = VerifyOrder { prefix: prefix.to_owned(), digest: Some(digest.to_owned()), ..VerifyOrder::default() };
    packages::verify(&order, &mut |_| ()).unwrap().remove(0)
}

fn differences(host: &Host, set: &PackageSet) -> Vec<String> {
    let found = verify(host.prefix(), &set.digest()).differences;
    found.into_iter().map(|difference| format!("{} {}", difference.what, difference.path.display())).collect()
}

fn command(words: &[&std::ffi::OsStr]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_flux-distribute")).arg("verify").args(words).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Two packages have one file, and one has symlinks.
async fn installed() -> (Host, PackageSet) {
    let mut channel = Channel::with_flux();
    channel.add(
        "one",
        ".conda",
        &[],
        &[
            Content::plain("share/both", b"one"),
            Content::script("bin/one", "#!PREFIX/sh"),
            Content::plain("lib/module.py", b"pass"),
        ],
    );
    channel.add(
        "two",
        ".tar.bz2",
        &[],
        &[Content::plain("share/both", b"two"), Content::link("lib/libtwo.so", "libflux.so")],
    );
    let set = resolve(&asked(&channel.file_url(), &["flux-core", "one", "two"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    host.link(&set).await.unwrap();
    (host, set)
}

#[tokio::test]
async fn a_fresh_installation_has_no_differences() {
    let (host, set) = installed().await;
    let verified = verify(host.prefix(), &set.digest());
    assert_eq!(verified.differences, []);
    assert!(verified.files >= 11 && verified.bytes > 300_000, "{verified:?}");
}

#[tokio::test]
async fn byte_code_is_accepted_only_beside_an_installed_module() {
    let (host, set) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    fs::create_dir(at("lib/__pycache__")).unwrap();
    let put = |path: &str, mode: u32| {
        fs::write(at(path), "").unwrap();
        fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    // Whatever the umask of the user who runs Python.
    fs::set_permissions(at("lib/__pycache__"), fs::Permissions::from_mode(0o700)).unwrap();
    put("lib/__pycache__/module.cpython-312.pyc", 0o600);
    put("lib/__pycache__/module.cpython-312.opt-1.pyc", 0o644);
    assert_eq!(differences(&host, &set), Vec::<String>::new());

    put("lib/__pycache__/gone.cpython-312.pyc", 0o644);
    put("lib/__pycache__/module.txt", 0o644);
    put("lib/module.pyc", 0o644);
    put("lib/new.py", 0o644);
    put("lib/__pycache__/new.cpython-312.pyc", 0o644);
    put("lib/__pycache__/module.cpython-312.pyc", 0o666);
    let expected = [
        "extra lib/__pycache__/gone.cpython-312.pyc",
        "mode lib/__pycache__/module.cpython-312.pyc",
        "extra lib/__pycache__/module.txt",
        "extra lib/__pycache__/new.cpython-312.pyc",
        "extra lib/module.pyc",
        "extra lib/new.py",
    ];
    assert_eq!(differences(&host, &set), expected);
}

#[tokio::test]
async fn other_permissions_and_another_owner_are_differences() {
    let (host, set) = installed().await;
    let at = |path: &str| host.environment(&set).join(path);
    let change = |path: &str, mode| fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
    for (path, mode) in
        [("bin/flux", 0o4755), ("share/flux", 0o600), ("lib", 0o700), (".flux-distribute.json", 0o600), ("", 0o700)]
    {
        let before = fs::metadata(at(path)).unwrap().permissions().mode();
        change(path, mode);
        assert_eq!(differences(&host, &set), [format!("mode {path}")]);
        change(path, before);
        assert_eq!(differences(&host, &set), Vec::<String>::new(), "{path}");
    }
    // Only root may give files to others.
    if skips_without([Need::Root]) {
        return;
    }
    // What is in another user's directory is not looked at: its owner can exchange it at any time.
    let in_lib = ["lib/libflux.so", "lib/libtwo.so", "lib/module.py"].map(|path| format!("unreadable {path}"));
    for (path, hidden) in [("bin/flux", &[][..]), ("lib", &in_lib), ("lib/libtwo.so", &[])] {
        std::os::unix::fs::lchown(at(path), Some(1), None).unwrap();
        assert_eq!(differences(&host, &set), [&[format!("owner {path}")], hidden].concat());
        std::os::unix::fs::lchown(at(path), Some(0), None).unwrap();
    }
}

#[tokio::test]
async fn every_kind_of_difference_is_named() {
    let (host, set) = installed().await;
    let environment = host.environment(&set);
    let at = |path: &str| environment.join(path);
    for (change, expected) in [
        ((&|| fs::write(at("share/flux"), "plaim").unwrap()) as &dyn Fn(), "changed share/flux"),
        (&|| fs::write(at("bin/one"), "").unwrap(), "changed bin/one"),
        (&|| fs::remove_file(at("lib/libflux.so")).unwrap(), "missing lib/libflux.so"),
        (&|| fs::write(at("lib/new"), "").unwrap(), "extra lib/new"),
        (&|| symlink("/etc/passwd", at("lib/passwd")).unwrap(), "extra lib/passwd"),
        (
            &|| {
                fs::remove_file(at("lib/libtwo.so")).unwrap();
                symlink("libother.so", at("lib/libtwo.so")).unwrap();
            },
            "changed lib/libtwo.so",
        ),
        (
            &|| {
                fs::remove_file(at("share/big")).unwrap();
                symlink("/dev/null", at("share/big")).unwrap();
            },
            "replaced share/big",
        ),
        (
            &|| {
                let record = at("conda-meta/two-1.0-0.json");
                let half = fs::metadata(&record).unwrap().len() / 2;
                File::options().write(true).open(record).unwrap().set_len(half).unwrap();
            },
            "changed conda-meta/two-1.0-0.json",
        ),
        (&|| fs::remove_file(at("conda-meta/one-1.0-0.json")).unwrap(), "missing conda-meta/one-1.0-0.json"),
    ] {
        let before = differences(&host, &set);
        change();
        let after = differences(&host, &set);
        assert!(
            !before.contains(&expected.to_owned()) && after.contains(&expected.to_owned()),
            "{expected}: {after:?}"
        );
    }
    assert!(differences(&host, &set).iter().all(|line| !line.contains("flux-core")));
}

#[tokio::test]
async fn the_command_names_each_difference_and_its_exit_code_says_so() {
    let (host, set) = installed().await;
    let digest = set.digest();
    let prefix: &std::ffi::OsStr = host.prefix().as_ref();
    let (code, said, _) = command(&["--prefix".as_ref(), prefix]);
    assert_eq!((code, said.lines().count()), (0, 1), "{said}");
    assert!(said.contains(": as it was installed ("), "{said}");

    let file = host.environment(&set).join("share/flux");
    fs::write(&file, "").unwrap();
    let (code, said, _) = command(&[digest.as_ref(), "--prefix".as_ref(), prefix]);
    assert_eq!(code, 1);
    assert_eq!(said.lines().next(), Some(format!("changed    {}", file.display()).as_str()));
    let (code, said, _) = command(&["--prefix".as_ref(), prefix, "--output".as_ref(), "json".as_ref()]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(code, 1);
    assert_eq!(said[0]["digest"], digest);
    assert_eq!(said[0]["differences"], serde_json::json!([{"path": "share/flux", "what": "changed"}]));

    let nothing = tempfile::tempdir().unwrap();
    for (words, expected) in [
        (&["--prefix".as_ref(), nothing.path().as_ref()] as &[&std::ffi::OsStr], "there is no environment in"),
        (&["0123".as_ref(), "--prefix".as_ref(), prefix], &format!("those that exist: {digest}")),
        (&["../etc".as_ref(), "--prefix".as_ref(), prefix], "not the digest of a package set"),
    ] {
        let (code, said, error) = command(words);
        assert_eq!((code, said.as_str()), (2, ""), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn an_environment_with_a_missing_or_truncated_marker_is_reported() {
    let (host, set) = installed().await;
    let marker = host.environment(&set).join(packages::ENVIRONMENT_MARKER);
    fs::write(&marker, "{\"digest\":").unwrap();
    assert_eq!(differences(&host, &set), ["changed .flux-distribute.json"]);
    fs::remove_file(&marker).unwrap();
    assert_eq!(differences(&host, &set), ["missing .flux-distribute.json"]);
    // Of these it is known only that they are gone.
    let records = host.environment(&set).join(".flux-distribute.records.json");
    fs::remove_file(&records).unwrap();
    assert_eq!(differences(&host, &set), ["missing .flux-distribute.json", "missing .flux-distribute.records.json"]);
    fs::write(&records, "{").unwrap();
    assert_eq!(differences(&host, &set), ["missing .flux-distribute.json", "changed .flux-distribute.records.json"]);
}
