//! What `scripts/bench-packages.sh` measures: the code paths of the agent (fetch) and of the host stage (link), one
//! command each, so that time and memory of a process are those of the step.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::{
    fs::{self, File},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use api::{PackageSet, Packages};
use hostapi::LinkOrder;
use packages::{HttpClient, Sources};
use stage::launch::HostPlaces;

fn main() {
    let arguments = std::env::args().skip(1).filter(|a| a != "--bench").collect::<Vec<_>>();
    let arguments = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    match arguments[..] {
        ["lock", channel, out] => lock(channel, Path::new(out)),
        ["fetch", lock, prefix] => fetch(&read(lock), Path::new(prefix)),
        ["link", lock, prefix] => link(&read(lock), Path::new(prefix), None),
        ["install", lock, prefix] => install(lock, Path::new(prefix)),
        ["follow", lock, prefix] => link(&read(lock), Path::new(prefix), Some(std::io::stdin().as_fd())),
        _ => return eprintln!("usage: lock CHANNEL OUT | fetch LOCK PREFIX | link LOCK PREFIX | install LOCK PREFIX"),
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    print!("{}", status.lines().filter(|line| line.starts_with("VmHWM")).collect::<String>());
}

fn read(lock: &str) -> PackageSet {
    PackageSet::Lock { lock: fs::read_to_string(lock).unwrap(), question: String::new() }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).max_blocking_threads(16).enable_all().build().unwrap().block_on(future)
}

fn lock(channel: &str, out: &Path) {
    let asked =
        Packages { channels: vec![channel.to_owned()], specs: vec!["flux-core".to_owned()], ..Packages::default() };
    let platforms = [packages::native_platform().to_owned()];
    let resolving = async {
        let http = HttpClient::new().unwrap();
        packages::resolve(&asked, &platforms, &http, None, |path: &str| File::open(path), |_| ()).await
    };
    match block_on(resolving).unwrap() {
        PackageSet::Lock { lock, .. } => fs::write(out, lock).unwrap(),
        PackageSet::Bundle(_) => {}
    }
}

/// As the command does it: linked by another process, for which the end of its stdin means that all archives are there.
fn install(lock: &str, prefix: &Path) {
    let set = read(lock);
    if packages::linked(prefix, &set.digest()).is_none() {
        fs::create_dir_all(prefix.join("pkgs")).unwrap();
        let mut linking = Command::new(std::env::current_exe().unwrap());
        linking.args(["follow", lock]).arg(prefix).stdin(Stdio::piped());
        let mut linking = linking.spawn().unwrap();
        fetch(&set, prefix);
        // Closes its stdin.
        assert!(linking.wait().unwrap().success());
    }
}

fn fetch(set: &PackageSet, prefix: &Path) {
    let start = Instant::now();
    let pkgs = prefix.join("pkgs");
    fs::create_dir_all(&pkgs).unwrap();
    let fetching = async {
        let (http, platform) = (HttpClient::new().unwrap(), packages::native_platform());
        packages::fetch(
            set,
            &set.digest(),
            platform,
            &pkgs,
            |path: &str| File::open(path),
            &http,
            &Sources::default(),
            |_| (),
        )
        .await
    };
    let fetched = block_on(fetching).unwrap();
    println!("fetch {:.4} s, {} bytes of {}", start.elapsed().as_secs_f64(), fetched.fetched_bytes, fetched.bytes);
}

fn link(set: &PackageSet, prefix: &Path, more: Option<BorrowedFd<'_>>) {
    let start = Instant::now();
    let platform = packages::native_platform().to_owned();
    let order = LinkOrder {
        prefix: prefix.to_owned(),
        digest: set.digest(),
        set: set.clone(),
        platform,
        follow: more.is_some(),
    };
    let linked = packages::link_while(&order, &HostPlaces::of_host(), more, &mut |_| ()).unwrap();
    println!("link {:.4} s, {} bytes", start.elapsed().as_secs_f64(), linked.bytes);
}
