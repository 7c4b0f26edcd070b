//! Fetches missing archives in the pod, and meanwhile makes the environment from them on the host.

use std::{
    path::Path,
    pin::pin,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::future::{BoxFuture, Either, FutureExt, ready, select};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::{error::StepError, node_ops::NodeOps};
use api::{PackageSet, Packages, Uninstall};
use base::error_chain;
use cluster::{
    ApiError,
    access::{self, PackagesAccess},
};
use host::{host_root::make_dirs_in_host_root, opening::path_of};
use hostapi::{Answer, LinkOrder, Order, Preflight, Progress};
use kube::Client;
use packages::{Access, Fetched, HttpClient, Sources, fetch};

/// An event of an installation.
pub enum Installing {
    /// Archives arrive.
    Fetching(Progress),
    /// All archives are there.
    Fetched,
    /// The environment is being made. Not reported before [`Self::Fetched`]: people follow one of the two at a time.
    Linking(Progress),
}

/// What to install.
pub struct Wanted<'a> {
    /// The package set.
    pub set: &'a PackageSet,
    /// How to ask its source.
    pub packages: &'a Packages,
    /// Nodes to ask before the source.
    pub peers: Vec<String>,
    /// For which FluxInstance the host is claimed first.
    pub claimant: Claimant<'a>,
    /// A broker runs here. The installation is not urgent then, and does not hold the host's lock for as long as a slow network takes.
    pub beside_a_broker: bool,
}

/// The FluxInstance for which an installation claims the host.
#[derive(Debug, Clone, Copy)]
pub struct Claimant<'a> {
    /// metadata.uid of the FluxInstance.
    pub instance_uid: &'a str,
    /// How the instance is to end.
    pub uninstall: &'a Uninstall,
}

/// Claims the host, fills `pkgs/` from the pod, and makes the environment on the host from what has arrived, while the rest
/// arrives. `report` gets each event.
///
/// Returns what was fetched.
///
/// # Errors
/// The first failure; what is live is untouched.
pub async fn install(
    ops: &NodeOps,
    preflight: &Preflight,
    wanted: Wanted<'_>,
    report: impl FnMut(Installing) + Send,
) -> Result<Fetched, StepError> {
    ops.claim(preflight, wanted.claimant.instance_uid, wanted.claimant.uninstall).await?;
    let (report, is_fetched) = (Mutex::new(report), AtomicBool::new(false));
    let say = |event| (*report.lock().unwrap_or_else(PoisonError::into_inner))(event);
    let fetching = async {
        let Wanted { set, packages, peers, .. } = &wanted;
        let fetched =
            fetch_archives(ops, preflight, set, packages, peers, |now| say(Installing::Fetching(now))).await?;
        is_fetched.store(true, Ordering::Relaxed);
        say(Installing::Fetched);
        Ok(fetched)
    };
    let report_linking = |now| {
        if is_fetched.load(Ordering::Relaxed) {
            say(Installing::Linking(now));
        }
    };
    // A bundle is one archive: nothing can be made from a part of it.
    if wanted.beside_a_broker || matches!(wanted.set, PackageSet::Bundle(_)) {
        let fetched = fetching.await?;
        link(ops, preflight, wanted.set, None, report_linking).await?;
        return Ok(fetched);
    }
    let (coming, ended) = oneshot::channel::<()>();
    let fetching = async {
        let fetched = fetching.await;
        drop(coming);
        fetched
    };
    let linking = link(ops, preflight, wanted.set, Some(ended.map(drop).boxed()), report_linking);
    match select(pin!(fetching), pin!(linking)).await {
        Either::Left((fetched, linking)) => {
            // If archives are missing, the link ends too and removes what it began, which it gets the time for. Its own error
            // would only follow from that of the fetch.
            let linked = linking.await;
            fetched.and_then(|fetched| linked.map(|()| fetched))
        }
        Either::Right((linked, fetching)) => {
            linked?;
            fetching.await
        }
    }
}

/// Fetches the archives that damaged files of the environment of `set` come from, from `peers` first, and puts the files back.
///
/// # Errors
/// The first failure.
pub async fn mend(
    ops: &NodeOps,
    preflight: &Preflight,
    set: &PackageSet,
    packages: &Packages,
    peers: Vec<String>,
) -> Result<Answer, StepError> {
    fetch_archives(ops, preflight, set, packages, &peers, |_| ()).await?;
    ops.order(Order::Mend(link_order(preflight, set, false))).await
}

async fn fetch_archives(
    ops: &NodeOps,
    preflight: &Preflight,
    set: &PackageSet,
    packages: &Packages,
    peers: &[String],
    progress: impl FnMut(Progress),
) -> Result<Fetched, StepError> {
    let path = preflight.prefix.join("pkgs");
    let pkgs = make_dirs_in_host_root(&path).map_err(|source| StepError::Directory { path, source })?;
    let host_file = |path: &str| host::host_root::open_host_file(Path::new(path));
    let http = http_client(&ops.client, packages).await?;
    let sources = Sources { peers: peers.to_vec(), mirror: packages.mirror.clone() };
    let (digest, pkgs) = (set.digest(), path_of(&pkgs));
    let fetched = fetch(set, &digest, &preflight.platform, &pkgs, host_file, &http, &sources, progress).await?;
    info!(bytes = fetched.fetched_bytes, from_peers = fetched.from_peers, "packages are fetched");
    Ok(fetched)
}

/// A client for the servers that `packages` names.
async fn http_client(client: &Client, packages: &Packages) -> Result<HttpClient, ApiError> {
    let PackagesAccess { authorities, token, credentials } = access::read(client).await?;
    Access::from_secret(authorities.as_deref(), token.as_deref(), credentials.as_deref())
        .and_then(|access| access.client_for(packages))
        .map_err(|error| ApiError::Content { object: "packages".to_owned(), reason: error_chain(&error) })
}

async fn link(
    ops: &NodeOps,
    preflight: &Preflight,
    set: &PackageSet,
    coming: Option<BoxFuture<'_, ()>>,
    mut progress: impl FnMut(Progress) + Send,
) -> Result<(), StepError> {
    let order = link_order(preflight, set, coming.is_some());
    let coming = coming.unwrap_or_else(|| ready(()).boxed());
    if let Answer::Linked(linked) = ops.host.run_while(Order::Link(order), coming, &mut progress).await? {
        linked.warnings.iter().for_each(|warning| warn!("{warning}"));
    }
    info!("packages are installed");
    Ok(())
}

fn link_order(preflight: &Preflight, set: &PackageSet, follow: bool) -> LinkOrder {
    LinkOrder {
        prefix: preflight.prefix.clone(),
        digest: set.digest(),
        set: set.clone(),
        platform: preflight.platform.clone(),
        follow,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::{
        fixture::{ops, preflight},
        needs::{Need, skips_without},
    };
    use hostapi::{FakeHost, HostError, Linked, Refusal};
    use packages::FetchError;

    const ARCHIVE: &str = "linux-64/flux-core-1.0-0.conda";
    const CONTENT: &str = "an archive";

    /// A set of one archive, [`ARCHIVE`] of the channel at `url`, and its name in `pkgs/`.
    fn set(url: &str) -> (PackageSet, String) {
        let sha256 = hex::encode(Sha256::digest(CONTENT));
        let lock = format!(
            "version: 6\nenvironments:\n  default:\n    channels:\n    - url: {url}/\n    packages:\n      linux-64:\n      \
             - conda: {url}/{ARCHIVE}\npackages:\n- conda: {url}/{ARCHIVE}\n  subdir: linux-64\n  sha256: {sha256}\n"
        );
        (PackageSet::Lock { lock, question: String::new() }, format!("{sha256}.conda"))
    }

    /// None if the test can't run: an agent installs below the root directory of process 1.
    async fn install(prefix: &Path, host: FakeHost, set: &PackageSet, beside_a_broker: bool) -> Option<Installed> {
        if skips_without([Need::Process1]) {
            return None;
        }
        let ops = ops(Arc::new(host));
        let preflight = Preflight { platform: "linux-64".to_owned(), ..preflight(prefix) };
        let claimant = Claimant { instance_uid: "uid", uninstall: &Uninstall::default() };
        let wanted = Wanted { set, packages: &Packages::default(), peers: Vec::new(), claimant, beside_a_broker };
        let mut was_fetched = false;
        let report = |event| was_fetched |= matches!(event, Installing::Fetched);
        let installing = super::install(&ops, &preflight, wanted, report);
        let outcome = tokio::time::timeout(Duration::from_mins(1), installing).await;
        Some(Installed { outcome: outcome.unwrap().map(drop), was_fetched })
    }

    struct Installed {
        outcome: Result<(), StepError>,
        was_fetched: bool,
    }

    fn linked() -> Answer {
        Answer::Linked(Linked { compiled_prefix: None, bytes: 0, warnings: Vec::new() })
    }

    #[tokio::test]
    async fn linking_begins_before_the_archives_are_there_unless_a_broker_runs() {
        let source = tempfile::tempdir().unwrap();
        std::fs::create_dir(source.path().join("linux-64")).unwrap();
        std::fs::write(source.path().join(ARCHIVE), CONTENT).unwrap();
        for beside in [false, true] {
            let prefix = tempfile::tempdir().unwrap();
            let (set, name) = set(&format!("file://{}", source.path().display()));
            let archive = prefix.path().join("pkgs").join(name);
            let host = FakeHost::new(move |order| match order {
                Order::Claim(_) => Ok(Answer::Done),
                Order::Link(order) => {
                    assert_eq!((order.follow, archive.exists()), (!beside, beside));
                    Ok(linked())
                }
                other => panic!("{other:?}"),
            });
            let Some(installed) = install(prefix.path(), host, &set, beside).await else { return };
            installed.outcome.unwrap();
            assert!(installed.was_fetched);
        }
    }

    #[tokio::test]
    async fn a_failed_fetch_is_reported_and_not_the_link_that_failed_because_of_it() {
        let prefix = tempfile::tempdir().unwrap();
        let host = FakeHost::new(|order| Ok(if matches!(order, Order::Link(_)) { linked() } else { Answer::Done }));
        let (set, _) = set("file:///nowhere");
        let Some(installed) = install(prefix.path(), host, &set, false).await else { return };
        let Err(StepError::Fetch(FetchError::HostFile { url, .. })) = installed.outcome else {
            panic!("{:?}", installed.outcome)
        };
        assert_eq!(url, format!("file:///nowhere/{ARCHIVE}"));
        assert!(!installed.was_fetched);
    }

    #[tokio::test]
    async fn a_link_that_fails_does_not_wait_for_a_slow_source() {
        let prefix = tempfile::tempdir().unwrap();
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (set, _) = set(&format!("http://{}", silent.local_addr().unwrap()));
        let host = FakeHost::new(|order| match order {
            Order::Link(_) => Err(Refusal::transient("too little room")),
            _ => Ok(Answer::Done),
        });
        let Some(installed) = install(prefix.path(), host, &set, false).await else { return };
        let Err(StepError::Host(HostError::Refused(refusal))) = installed.outcome else {
            panic!("{:?}", installed.outcome)
        };
        assert_eq!(refusal.message, "too little room");
    }
}
