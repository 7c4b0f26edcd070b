//! What is in an archive was made elsewhere: no byte of it is believed, and every refusal names the package and where it
//! is from.

use serde_json::json;
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::{forged::*, verify::verify, *};

#[tokio::test]
async fn an_entry_outside_of_the_tree_is_refused_before_it_is_written() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().to_str().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, "not yours").unwrap();
    let absolute = format!("{out}/evil");
    let deep = format!("a/{}{absolute}", "../".repeat(20));
    for (content, words) in [
        (vec![Entry::file("../evil", b"x")], "its entry ../evil would be outside of the tree"),
        (vec![Entry::file(&deep, b"x")], "would be outside of the tree"),
        (vec![Entry::file(&absolute, b"x")], "would be outside of the tree"),
        (vec![Entry::symlink("lib/evil", "../../etc")], "its entry lib/evil is a symlink out of the environment"),
        // Only what a package for any Python has there is moved deeper.
        (
            vec![Entry::symlink("site-packages/evil", "../../etc")],
            "site-packages/evil is a symlink out of the environment",
        ),
        (
            vec![Entry::symlink("lib/out", out), Entry::file("lib/out/evil", b"x")],
            "its entry lib/out/evil would be written through lib/out",
        ),
        (
            vec![Entry::symlink("lib/out", out), Entry::link(EntryType::Directory, "lib/out/evil/", "")],
            "would be written through lib/out",
        ),
        (
            vec![Entry::symlink("out", "."), Entry::symlink("out/evil", out), Entry::file("evil/evil", b"x")],
            "its entry out/evil would be written through out",
        ),
        (
            vec![Entry::link(EntryType::Link, "evil", secret.to_str().unwrap())],
            "its entry evil is a hard link out of the tree",
        ),
        (vec![Entry::link(EntryType::Link, "evil", "../../secret")], "is a hard link out of the tree"),
        (
            vec![Entry::symlink("lib/out", out), Entry::link(EntryType::Link, "evil", "lib/out/secret")],
            "would be written through lib/out",
        ),
        (vec![Entry::symlink("s", &absolute), Entry::link(EntryType::Link, "evil", "s")], "is a hard link to s"),
        (vec![Entry::link(EntryType::Char, "dev/null", "")], "its entry dev/null is a device"),
        (vec![Entry::link(EntryType::Block, "dev/sda", "")], "is a device"),
        (vec![Entry::link(EntryType::Fifo, "run/fifo", "")], "its entry run/fifo is a device, a fifo"),
        (vec![Entry::file("lib/a/b", b"x"), Entry::file("lib/a", b"x")], "its entry lib/a would replace a directory"),
        (vec![Entry::file("lib/a", b"x"), Entry::file("lib/a/b", b"x")], "would be written through lib/a"),
    ] {
        for lie in Lie::both(&info("evil", &honest(&content)), &content) {
            let refusal = told(std::slice::from_ref(&lie)).await;
            let from = format!("can't use package evil-1.0-0 from {SOURCE}/{}: ", lie.file_name);
            assert!(refusal.message.starts_with(&from) && refusal.message.contains(words), "{words}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1, "something was written outside");
    assert_eq!(fs::read_to_string(secret).unwrap(), "not yours");
}

#[tokio::test]
async fn set_user_id_bits_of_a_package_are_dropped_with_a_warning() {
    let with_mode = |path: &str, mode| Entry { mode, ..Entry::file(path, b"#!/bin/sh\n") };
    let content = [with_mode("bin/flux", 0o4755), with_mode("bin/other", 0o2755), with_mode("bin/plain", 0o755)];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        let (host, set) = fetched(&[lie]);
        let linked = host.link(&set).await.unwrap();
        let words = "package evil-1.0-0 has files with set-user-ID or set-group-ID bits, such as bin/flux;";
        assert!(matches!(&linked.warnings[..], [only] if only.starts_with(words)), "{:?}", linked.warnings);
        for path in ["bin/flux", "bin/other", "bin/plain"] {
            let found = fs::metadata(host.environment(&set).join(path)).unwrap();
            assert_eq!(found.permissions().mode() & 0o7777, 0o755, "{path}");
        }
        assert_eq!(host.link(&set).await.unwrap().warnings, Vec::<String>::new(), "it is said once");
    }
}

#[tokio::test]
async fn nobody_but_root_can_write_what_a_package_brought() {
    let with_mode = |path: &str, mode| Entry { mode, ..Entry::file(path, b"#!/bin/sh\n") };
    let directory = Entry { mode: 0o777, ..Entry::link(EntryType::Directory, "share/", "") };
    let files = [with_mode("bin/flux", 0o777), with_mode("share/open", 0o666), with_mode("share/group", 0o2464)];
    let (listed, content) = (honest(&files), files.into_iter().chain([directory]).collect::<Vec<_>>());
    for lie in Lie::both(&info("evil", &listed), &content) {
        let (host, set) = fetched(&[lie]);
        host.link(&set).await.unwrap();
        for (path, mode) in [("bin/flux", 0o755), ("share/open", 0o644), ("share/group", 0o444), ("share", 0o755)] {
            let found = fs::metadata(host.environment(&set).join(path)).unwrap();
            assert_eq!(found.permissions().mode() & 0o7777, mode, "{path}");
        }
        assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
    }
}

#[tokio::test]
async fn nobody_but_root_can_write_the_scripts_that_a_python_package_asks_for() {
    let python = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::file("bin/python1.0", b"")];
    let evil = with_entry_points("evil", &["evil = evil:main"], &[]);
    let packages = [
        Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)),
        Lie::new("evil-1.0-0.conda", conda(&evil, &[])),
    ];
    let (host, set) = fetched(&packages);
    host.link(&set).await.unwrap();
    let script = fs::metadata(host.environment(&set).join("bin/evil")).unwrap();
    assert_eq!(script.permissions().mode() & 0o7777, 0o755);
    assert_eq!(verify(host.prefix(), &set.digest()).differences, []);
}

#[tokio::test]
async fn a_file_list_that_does_not_match_the_archive_is_refused() {
    let content = [
        Entry::file("bin/flux", b"#!/bin/sh\n"),
        Entry::symlink("etc/host", "/etc/hostname"),
        Entry::symlink("etc/all", "/etc"),
    ];
    let patched = |path: &str, kind: &str| json!({"_path": path, "path_type": kind, "file_mode": "text", "prefix_placeholder": "/opt/placeholder"});
    for (path, words) in [
        (json!({"_path": "../../evil", "path_type": "hardlink"}), "../../evil in info/paths.json would be outside"),
        (json!({"_path": "/etc/evil", "path_type": "hardlink"}), "/etc/evil in info/paths.json would be outside"),
        (json!({"_path": "lib/none", "path_type": "hardlink"}), "lib/none in info/paths.json is not in the archive"),
        (json!({"_path": "lib/none", "path_type": "softlink"}), "lib/none in info/paths.json is not in the archive"),
        (
            json!({"_path": "bin/flux", "path_type": "hardlink", "file_mode": "text", "prefix_placeholder": "/"}),
            "bin/flux in info/paths.json has a placeholder that is too short",
        ),
        (json!({"_path": "bin/flux", "path_type": "softlink"}), "bin/flux in info/paths.json is something else"),
        (json!({"_path": "bin", "path_type": "softlink"}), "bin in info/paths.json is not in the archive"),
        // Its target is a file of the host, and would be read.
        (patched("etc/host", "hardlink"), "etc/host in info/paths.json is something else"),
        (patched("etc/host", "softlink"), "etc/host in info/paths.json is a symlink that should be patched"),
        // rattler would copy this file of the host.
        (
            json!({"_path": "etc/all/passwd", "path_type": "directory"}),
            "etc/all/passwd in info/paths.json is not in the archive",
        ),
        (json!({"_path": "conda-meta/other-1.0-0.json", "path_type": "hardlink"}), "would be the record of a package"),
    ] {
        let mut paths = honest(&content);
        paths.push(path);
        for lie in Lie::both(&info("evil", &paths), &content) {
            let refusal = told(&[lie]).await;
            assert!(refusal.message.contains("evil-1.0-0") && refusal.message.contains(words), "{words}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
}

#[tokio::test]
async fn a_package_with_another_packages_metadata_is_refused() {
    let content = [Entry::file("bin/flux", b"x")];
    for lie in Lie::both(&info("..", &honest(&content)), &content) {
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("evil-1.0-0") && !refusal.transient, "{refusal}");
    }
    for lie in Lie::both(&info("other", &honest(&content)), &content) {
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("it is package other, but the lock has it as evil"), "{refusal}");
    }
}

#[tokio::test]
async fn a_truncated_archive_or_another_file_is_refused() {
    let content = [Entry::file("bin/flux", &noise(300_000))];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        for keep in [lie.archive.len() - 1, lie.archive.len() - 100_000, 100, 3, 0] {
            let cut = Lie::new(&lie.file_name, lie.archive[..keep].to_vec());
            let refusal = told(&[cut]).await;
            assert!(refusal.message.starts_with("can't use package evil-1.0-0 from"), "{keep}: {refusal}");
            assert!(!refusal.transient, "{keep}: {refusal}");
        }
        let other = Lie::new(&lie.file_name, b"<html>404</html>".to_vec());
        assert!(told(&[other]).await.message.contains("neither a .conda nor a .tar.bz2"));
    }
}

#[tokio::test]
async fn an_archive_with_a_flipped_bit_is_fetched_again_and_never_goes_live() {
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let archives = host.archives();
    for archive in archives.iter().filter(|path| path.extension().is_some()) {
        let mut bytes = fs::read(archive).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(archive, &bytes).unwrap();
        let refusal = host.link(&set).await.unwrap_err();
        assert!(refusal.transient && refusal.message.contains("was damaged"), "{refusal}");
        assert!(["flux-core-1.0-0", "libflux-1.0-0"].iter().any(|n| refusal.message.contains(n)), "{refusal}");
        assert!(!archive.exists(), "the next fetch must bring it again");
        assert!(host.envs().is_empty());
        host.fetch(&set).await.unwrap();
    }
    host.link(&set).await.unwrap();
}

#[tokio::test]
async fn one_package_can_not_write_through_the_symlink_of_another() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().to_str().unwrap();
    let flux = Entry::file("bin/flux", b"#!/bin/sh\n");
    let guest = [Entry::file("share/evil", b"x"), Entry::file("share/deep/evil", b"x"), flux];
    // The biggest is linked first.
    for bytes in [10, 100_000] {
        let door = [Entry::symlink("share", out), Entry::file("noise", &noise(bytes))];
        let packages = [
            Lie::new("evil-1.0-0.conda", conda(&info("evil", &honest(&door)), &door)),
            Lie::new("good-1.0-0.conda", conda(&info("good", &honest(&guest)), &guest)),
        ];
        let (host, set) = fetched(&packages);
        // It may be refused or one of them may win; nothing but the outside matters.
        let _ = host.link(&set).await;
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
    }
}

/// rattler makes a package's directories through symlinks of others, though these lead nowhere until then.
#[tokio::test]
async fn no_package_makes_directories_through_a_symlink_that_leads_nowhere_yet() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let flux = Entry::file("bin/flux", b"#!/bin/sh\n");
    let door = [
        Entry::symlink("w", outside.path().to_str().unwrap()),
        Entry::symlink("x", "d/../w"),
        Entry::file("noise", &noise(100_000)),
    ];
    let guest = [Entry::file("d/f", b"x"), Entry::file("x/nologin/f", b"x"), flux];
    let packages = [
        Lie::new("evil-1.0-0.conda", conda(&info("evil", &honest(&door)), &door)),
        Lie::new("good-1.0-0.conda", conda(&info("good", &honest(&guest)), &guest)),
    ];
    let (host, set) = fetched(&packages);
    let linked = host.link(&set).await;
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
    let refusal = linked.unwrap_err();
    assert!(refusal.message.contains("can't use package good-1.0-0") && !refusal.transient, "{refusal}");
    assert!(refusal.message.contains("would be written through x, another package's symlink"), "{refusal}");
}

/// rattler moves what is in a Python package's `site-packages`, and copies through what is there already.
#[tokio::test]
async fn no_package_writes_through_a_symlink_of_its_own_that_is_moved() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let job = outside.path().join("job");
    let python = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::file("bin/python1.0", &noise(10_000))];
    let evil = [
        Entry::symlink("site-packages/job", job.to_str().unwrap()),
        Entry::file("lib/python1.0/site-packages/job", b"* * * * * root evil\n"),
    ];
    let mut paths = honest(&evil);
    paths[1]["no_link"] = json!(true);
    let packages = [
        Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)),
        Lie::new("evil-1.0-0.conda", conda(&with_entry_points("evil", &[], &paths), &evil)),
    ];
    let (host, set) = fetched(&packages);
    let linked = host.link(&set).await;
    assert!(!job.exists(), "something was written outside");
    let refusal = linked.unwrap_err();
    assert!(refusal.message.contains("job would be in the place of another one of its entries"), "{refusal}");
    assert!(refusal.message.contains("can't use package evil-1.0-0") && !refusal.transient, "{refusal}");
}

/// If several packages have something in one place, rattler puts the loser aside, with the files below it. If the loser is a symlink,
/// rattler would move those files through it.
#[tokio::test]
async fn no_package_has_its_files_put_aside_through_a_symlink_of_its_own() {
    if skips_without([Need::Root]) {
        return;
    }
    let python = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::file("bin/python1.0", &noise(10_000))];
    let other =
        [Entry::file("lib/python1.0/site-packages/foo/other", b"x"), Entry::file("share/noise", &noise(100_000))];
    for (moved, below) in [
        ("site-packages/foo", "lib/python1.0/site-packages/foo/job"),
        ("lib/python1.0/site-packages/foo", "site-packages/foo/job"),
    ] {
        let outside = outside();
        let job = Entry::file(below, b"* * * * * root evil\n");
        let evil = [Entry::symlink(moved, outside.path().to_str().unwrap()), job];
        let packages = [
            Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)),
            Lie::new("other-1.0-0.conda", conda(&info("other", &honest(&other)), &other)),
            Lie::new("evil-1.0-0.conda", conda(&with_entry_points("evil", &[], &honest(&evil)), &evil)),
        ];
        let (host, set) = fetched(&packages);
        // Of two that have something in one place, the one that depends on the other wins.
        let set = also_locked(set, &packages[2], "  depends:\n  - other\n");
        let linked = host.link(&set).await;
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
        let refusal = linked.unwrap_err();
        assert!(refusal.message.contains("can't use package evil-1.0-0") && !refusal.transient, "{refusal}");
        assert!(refusal.message.contains("would be below another one of its entries"), "{refusal}");
    }
}

/// A lock says where Python's packages have their modules, so a symlink there may lead further up than it seems.
#[tokio::test]
async fn no_symlink_leaves_the_environment_when_it_is_moved() {
    let python = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::file("bin/python1.0", &noise(10_000))];
    for (modules, target, leads_out) in
        [("modules", "../../victim", true), ("modules", "../bin/flux", false), ("lib/modules", "../../bin/flux", false)]
    {
        let evil = [Entry::symlink("site-packages/evil", target)];
        let packages = [
            Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)),
            Lie::new("evil-1.0-0.conda", conda(&with_entry_points("evil", &[], &honest(&evil)), &evil)),
        ];
        let (host, set) = fetched(&packages);
        let set = also_locked(set, &packages[0], &format!("  python_site_packages_path: {modules}\n"));
        match host.link(&set).await {
            Ok(_) => {
                assert!(!leads_out, "{modules}: a symlink to {target} was linked");
                let link = host.environment(&set).join(modules).join("evil");
                assert_eq!(fs::read_link(link).unwrap(), Path::new(target));
            }
            Err(refusal) => {
                assert!(leads_out && !refusal.transient, "{modules}, {target}: {refusal}");
                let words = "its entry site-packages/evil is a symlink out of the environment, to ../../victim";
                assert!(refusal.message.contains(words), "{refusal}");
            }
        }
    }
}

/// rattler puts all but one of the files with the same path aside, below a directory of its own.
#[tokio::test]
async fn no_package_says_where_the_files_of_other_packages_are_put_aside() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    fs::create_dir(outside.path().join("empty")).unwrap();
    let out = outside.path().to_str().unwrap();
    let flux = || Entry::file("bin/flux", b"#!/bin/sh\n");
    let job = || [Entry::file("job", b"* * * * * root evil\n")];
    for door in [Entry::symlink("__clobbers__", out), Entry::symlink("__clobbers__/cron.d", out)] {
        // The biggest is linked first.
        let first = [door, flux(), Entry::file("share/noise", &noise(100_000))];
        let mut packages = vec![Lie::new("a-1.0-0.conda", conda(&info("a", &honest(&first)), &first))];
        for name in ["b", "cron.d"] {
            packages.push(Lie::new(&format!("{name}-1.0-0.conda"), conda(&info(name, &honest(&job())), &job())));
        }
        let (host, set) = fetched(&packages);
        let refusal = host.link(&set).await.unwrap_err();
        assert!(refusal.message.contains("can't use package a-1.0-0") && !refusal.transient, "{refusal}");
        assert!(refusal.message.contains("would be where files of several packages are put aside"), "{refusal}");
        let left: Vec<_> = fs::read_dir(outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["empty"]);
    }
}

#[tokio::test]
async fn no_entry_point_is_written_through_a_symlink_or_over_a_file() {
    if skips_without([Need::Root]) {
        return;
    }
    let outside = outside();
    let out = outside.path().join("evil");
    let out = out.to_str().unwrap();
    let python = [Entry::file("lib/flux", b""), Entry::file("lib/python1.0", b"")];
    let entry = |name: &str| format!("{name} = evil:main");
    for (door, entry_points) in [
        (vec![Entry::symlink("bin/evil", out)], vec![entry("evil")]),
        (vec![Entry::symlink("python-scripts/evil", out)], vec![entry("evil")]),
        (vec![Entry::symlink("bin", outside.path().to_str().unwrap())], vec![entry("evil")]),
        (vec![Entry::file("bin/evil", b"x")], vec![entry("evil")]),
    ] {
        let entry_points: Vec<&str> = entry_points.iter().map(String::as_str).collect();
        let both = conda(&with_entry_points("evil", &entry_points, &honest(&door)), &door);
        let mut sets = vec![vec![Lie::new("evil-1.0-0.conda", both)]];
        // Whichever comes first.
        for [first, second] in [["evil", "good"], ["good", "evil"]] {
            sets.push(vec![
                Lie::new(&format!("{first}-1.0-0.conda"), conda(&with_entry_points(first, &entry_points, &[]), &[])),
                Lie::new(
                    &format!("{second}-1.0-0.conda"),
                    conda(&with_entry_points(second, &[], &honest(&door)), &door),
                ),
            ]);
        }
        for mut packages in sets {
            packages.push(Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python)));
            let (host, set) = fetched(&packages);
            let linked = host.link(&set).await;
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "something was written outside");
            let refusal = linked.unwrap_err();
            assert!(refusal.message.contains("bin/evil of package ") && !refusal.transient, "{refusal}");
            assert!(refusal.message.contains("is an entry point"), "{refusal}");
        }
    }
}

#[tokio::test]
async fn a_package_has_no_symlink_to_where_users_can_write() {
    for (target, place) in [
        ("/tmp/x.so", "/tmp"),
        ("/var/tmp", "/var/tmp"),
        ("/proc/self/cwd/x.so", "/proc"),
        ("/dev/fd/3", "/dev/fd"),
        ("/dev/stdin", "/dev/stdin"),
        ("/run/screen/x.so", "/run/screen"),
        ("/", "/"),
    ] {
        let content = [Entry::symlink("lib/x.so", target)];
        for lie in Lie::both(&info("evil", &honest(&content)), &content) {
            let refusal = told(&[lie]).await;
            let words = format!("its entry lib/x.so is a symlink to {target}, and users can write to {place}");
            assert!(refusal.message.contains(&words) && !refusal.transient, "{refusal}");
        }
    }
}

#[tokio::test]
async fn what_a_symlink_leads_to_is_not_read_though_the_package_calls_it_a_file() {
    let outside = outside();
    let secret = outside.path().join("secret");
    fs::write(&secret, "not yours").unwrap();
    let content = [Entry::file("bin/flux", b"#!/bin/sh\n"), Entry::symlink("lib/x", secret.to_str().unwrap())];
    let mut paths = honest(&content);
    paths[1] = json!({"_path": "lib/x", "path_type": "hardlink"});
    for lie in Lie::both(&info("evil", &paths), &content) {
        let (host, set) = fetched(&[lie]);
        host.link(&set).await.unwrap();
        let record = fs::read_to_string(host.environment(&set).join("conda-meta/evil-1.0-0.json")).unwrap();
        assert!(
            !record.contains(&hex::encode(Sha256::digest(b"not yours"))),
            "the record has the sha256 of a file of the host: {record}"
        );
        assert_eq!(fs::read_link(host.environment(&set).join("lib/x")).unwrap(), secret);
    }
}

#[tokio::test]
async fn an_absolute_symlink_is_kept_and_not_followed() {
    let content = [
        Entry::file("bin/flux", b"#!/bin/sh\n"),
        Entry::symlink("etc/localtime", "/etc/localtime"),
        Entry::symlink("lib/libc.so", "../bin/flux"),
    ];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        let extension = lie.file_name.trim_start_matches("evil-1.0-0.").to_owned();
        let packages = [lie];
        let (host, set) = (Host::new(), lock(&packages));
        fs::write(host.pkgs().join(format!("{}.{extension}", packages[0].sha256())), &packages[0].archive).unwrap();
        host.link(&set).await.unwrap();
        let environment = host.environment(&set);
        assert_eq!(fs::read_link(environment.join("etc/localtime")).unwrap(), Path::new("/etc/localtime"));
        assert_eq!(fs::read_link(environment.join("lib/libc.so")).unwrap(), Path::new("../bin/flux"));
    }
}
