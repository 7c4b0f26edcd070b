//! What the packages part promises, with a small channel that is made here.
#![allow(clippy::unwrap_used)]

mod access;
mod air_gap;
mod bombs;
mod bundle;
#[path = "../support/channel.rs"]
mod channel;
mod collect;
mod crash;
mod credentials;
mod disk;
mod fetch;
mod forged;
mod lies;
mod limits;
mod link;
mod lock;
mod mend;
#[path = "../support/needs.rs"]
mod needs;
mod overlap;
mod peers;
mod serve;
mod solve;
mod verify;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use api::{PackageSet, Packages};
use axum::{
    body::Body,
    http::{StatusCode, header},
    response::Response,
};
use channel::{Channel, Content, Server, noise};
use hostapi::{LinkOrder, Linked, Progress, Refusal};
use needs::{Need, skip, skips_without};
use packages::{FetchError, Fetched, HttpClient, SolveError, Sources};
use stage::launch::HostPlaces;

const PLATFORM: &str = "linux-64";

fn http() -> HttpClient {
    HttpClient::new().unwrap()
}

fn host_file(path: &str) -> io::Result<File> {
    File::open(path)
}

fn asked(channel: &str, specs: &[&str]) -> Packages {
    Packages {
        channels: vec![channel.to_owned()],
        specs: specs.iter().map(|s| (*s).to_owned()).collect(),
        ..Packages::default()
    }
}

async fn resolve(packages: &Packages) -> Result<PackageSet, SolveError> {
    packages::resolve(packages, &[PLATFORM.to_owned()], &http(), None, host_file, |_| ()).await
}

/// What a server's hook gives.
fn answer(status: StatusCode, headers: &[(header::HeaderName, &str)], body: impl Into<Body>) -> Option<Response> {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = status;
    answer.headers_mut().extend(headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())));
    Some(answer)
}

/// A host's prefix with an empty `pkgs/`.
struct Host(tempfile::TempDir);

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        fs::create_dir(host.pkgs()).unwrap();
        host
    }

    fn prefix(&self) -> &Path {
        self.0.path()
    }

    fn pkgs(&self) -> PathBuf {
        self.prefix().join("pkgs")
    }

    /// What is in `pkgs/` besides its lock.
    fn archives(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.pkgs()).unwrap().map(|entry| entry.unwrap());
        entries.filter(|entry| entry.file_name() != ".lock").map(|entry| entry.path()).collect()
    }

    fn environment(&self, set: &PackageSet) -> PathBuf {
        self.prefix().join("envs").join(set.digest())
    }

    async fn fetch(&self, set: &PackageSet) -> Result<Fetched, FetchError> {
        self.fetch_from(set, &http(), &Sources::default()).await
    }

    async fn fetch_from(&self, set: &PackageSet, http: &HttpClient, from: &Sources) -> Result<Fetched, FetchError> {
        // As the agent does it: through a descriptor, since the path is another one in the pod.
        let directory = File::open(self.pkgs()).unwrap();
        let pkgs = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
        packages::fetch(set, &set.digest(), PLATFORM, Path::new(&pkgs), host_file, http, from, |_| ()).await
    }

    async fn link(&self, set: &PackageSet) -> Result<Linked, Refusal> {
        self.link_for(set, PLATFORM).await
    }

    async fn link_for(&self, set: &PackageSet, platform: &str) -> Result<Linked, Refusal> {
        let order = LinkOrder {
            prefix: self.prefix().to_owned(),
            digest: set.digest(),
            set: set.clone(),
            platform: platform.to_owned(),
            follow: false,
        };
        tokio::task::spawn_blocking(move || packages::link(&order, &HostPlaces::of_host(), &mut |_| ())).await.unwrap()
    }

    /// Names in `envs/`, the hidden ones too, but not its locks.
    fn envs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.prefix().join("envs")).into_iter().flatten();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| ![".lock", ".mending.lock"].contains(&name.as_str())).collect()
    }
}
