//! Memory, threads and disk are bounded whatever the packages are.

use std::{io::Write, os::unix::fs::MetadataExt};

use serde_json::json;
use sha2::{Digest, Sha256};

use super::*;
use stage::launch::HostPlaces;

const MIB: usize = 1 << 20;

/// A lock of one package that has one file of `bytes`, and its archive in the host's `pkgs/`.
fn one_big_file(host: &Host, bytes: usize) -> PackageSet {
    let index = json!({"name": "flux-core", "version": "1.0", "build": "0", "build_number": 0, "subdir": PLATFORM});
    let paths = json!({"paths_version": 1, "paths": [{"_path": "bin/flux", "path_type": "hardlink"}]});
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let header = |path: &str, size: usize| {
        let mut header = tar::Header::new_gnu();
        header.set_path(path).unwrap();
        header.set_size(size as u64);
        header.set_mode(0o755);
        header.set_cksum();
        header
    };
    zip.start_file("info-flux-core-1.0-0.tar.zst", stored).unwrap();
    let mut info = tar::Builder::new(zstd::Encoder::new(&mut zip, 3).unwrap());
    for (path, text) in [("info/index.json", index.to_string()), ("info/paths.json", paths.to_string())] {
        info.append(&header(path, text.len()), text.as_bytes()).unwrap();
    }
    info.into_inner().unwrap().finish().unwrap();
    zip.start_file("pkg-flux-core-1.0-0.tar.zst", stored).unwrap();
    // As much window as most packages want.
    let mut packed = zstd::Encoder::new(&mut zip, 3).unwrap();
    packed.window_log(23).unwrap();
    packed.write_all(header("bin/flux", bytes).as_bytes()).unwrap();
    // New often enough to be no bomb.
    let fresh = noise(bytes / 16);
    let mut block = noise(MIB);
    for (number, fresh) in fresh.chunks(MIB / 16).enumerate() {
        let at = number % 16 * fresh.len();
        block[at..at + fresh.len()].copy_from_slice(fresh);
        packed.write_all(&block).unwrap();
    }
    packed.write_all(&[0; 1024]).unwrap();
    packed.finish().unwrap();
    let archive = zip.finish().unwrap().into_inner();
    let sha256 = hex::encode(Sha256::digest(&archive));
    fs::write(host.pkgs().join(format!("{sha256}.conda")), &archive).unwrap();
    let url = "http://channel.invalid/linux-64";
    let lock = format!(
        "version: 6\nenvironments:\n  default:\n    channels:\n    - url: {url}/\n    packages:\n      {PLATFORM}:\n      \
         - conda: {url}/flux-core-1.0-0.conda\npackages:\n- conda: {url}/flux-core-1.0-0.conda\n  sha256: {sha256}\n"
    );
    PackageSet::Lock { lock, question: String::new() }
}

/// Not a promise of its own: the process that is measured.
#[test]
#[ignore = "runs in a child of another test"]
fn measured_child() {
    let Ok(order) = std::env::var("TEST_LINK_ORDER") else { return };
    let order = serde_json::from_str::<LinkOrder>(&order).unwrap();
    let status = |what: &str| {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(what)).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
    };
    let mut threads = 0;
    packages::link(&order, &HostPlaces::of_host(), &mut |_| threads = threads.max(status("Threads"))).unwrap();
    eprintln!("measured {} {threads}", status("VmHWM") * 1024);
}

#[test]
fn a_huge_file_is_linked_in_little_memory_by_few_threads() {
    let host = Host::new();
    let set = one_big_file(&host, 300 * MIB);
    let order = LinkOrder {
        prefix: host.prefix().to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform: PLATFORM.to_owned(),
        follow: false,
    };
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "limits::measured_child", "--ignored", "--nocapture"])
        .env("TEST_LINK_ORDER", serde_json::to_string(&order).unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(child.stderr).unwrap();
    let measured = said.lines().find_map(|line| line.strip_prefix("measured ")).unwrap_or_else(|| panic!("{said}"));
    let [memory, threads] = measured.split(' ').map(|n| n.parse::<usize>().unwrap()).collect::<Vec<_>>()[..] else {
        panic!("{measured}")
    };
    assert_eq!(fs::metadata(host.environment(&set).join("bin/flux")).unwrap().size(), 300 * MIB as u64);
    assert!(memory < 100 * MIB, "{} MiB", memory / MIB);
    // Those that unpack, one that removes, rattler's, the test harness' own two.
    assert!(threads <= 4 + 1 + 1 + 2, "{threads} threads");
}

#[tokio::test]
async fn if_two_packages_have_the_same_file_the_same_one_always_wins() {
    let mut channel = Channel::new();
    let both = |text: &str| [Content::plain("share/both", text.as_bytes()), Content::plain("share/big", &noise(MIB))];
    channel.add("first", ".conda", &[], &both("first"));
    channel.add("second", ".tar.bz2", &["first"], &both("second"));
    channel.add("flux-core", ".conda", &["second"], &[Content::script("bin/flux", "#!/bin/sh\n")]);
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let host = Host::new();
    host.fetch(&set).await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        host.link(&set).await.unwrap();
        let environment = host.environment(&set);
        let records = ["first", "second"]
            .map(|name| fs::read_to_string(environment.join(format!("conda-meta/{name}-1.0-0.json"))).unwrap());
        seen.push((fs::read_to_string(environment.join("share/both")).unwrap(), records));
        fs::remove_dir_all(&environment).unwrap();
    }
    assert!(seen.iter().all(|one| *one == seen[0]), "{seen:?}");
}

/// A file system of so many bytes, until it is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(bytes: usize) -> Self {
        let small = Self(tempfile::tempdir().unwrap());
        small.mount(bytes, nix::mount::MsFlags::empty());
        small
    }

    fn mount(&self, bytes: usize, flags: nix::mount::MsFlags) {
        let options = format!("size={bytes}");
        nix::mount::mount(Some("tmpfs"), self.0.path(), Some("tmpfs"), flags, Some(options.as_str())).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn a_disk_that_is_too_small_is_a_transient_error_with_both_figures() {
    if skips_without([Need::Namespaces]) {
        return;
    }
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let small = Small::new(MIB);
    let host = Host(tempfile::tempdir_in(small.0.path()).unwrap());
    fs::create_dir(host.pkgs()).unwrap();
    host.fetch(&set).await.unwrap();
    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.message.contains("0 MiB are free, and the packages need 2 MiB"), "{refusal}");
    assert!(refusal.transient && host.envs().is_empty());
    small.mount(64 * MIB, nix::mount::MsFlags::MS_REMOUNT);
    host.link(&set).await.unwrap();
}

#[tokio::test]
async fn a_disk_that_is_too_small_is_reported_before_the_first_archive_comes() {
    if skips_without([Need::Namespaces]) {
        return;
    }
    let channel = Channel::with_flux();
    let set = resolve(&asked(&channel.file_url(), &["flux-core"])).await.unwrap();
    let small = Small::new(MIB);
    let host = Host(tempfile::tempdir_in(small.0.path()).unwrap());
    fs::create_dir(host.pkgs()).unwrap();
    let order = LinkOrder {
        prefix: host.prefix().to_owned(),
        digest: set.digest(),
        set,
        platform: PLATFORM.to_owned(),
        follow: true,
    };
    let linking = tokio::task::spawn_blocking(move || {
        let (more, _until) = io::pipe().unwrap();
        packages::link_while(&order, &HostPlaces::of_host(), Some(std::os::fd::AsFd::as_fd(&more)), &mut |_| ())
    });
    let refusal = linking.await.unwrap().unwrap_err();
    assert!(refusal.message.contains("MiB are free, and the packages need"), "{refusal}");
    assert!(refusal.transient && host.envs().is_empty());
}
