//! The rung install: fetches what is missing, in the pod, and makes the environment of it, on the host, beside each other.

use std::{
    path::Path,
    pin::pin,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::future::{BoxFuture, Either, FutureExt, ready, select};
use kube::Client;
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::act::{Actor, StepError};
use api::{PackageSet, Packages};
use base::error_chain;
use cluster::{
    ApiError,
    access::{self, PackagesAccess},
};
use host::files::{host_path, make_dirs_in_host_root};
use hostapi::{Answer, LinkOrder, Order, Preflight, Progress};
use packages::{Access, HttpClient, Sources, fetch};

/// What happens while packages are installed.
pub(super) enum Installing {
    /// Archives come.
    Fetching(Progress),
    /// They are all there.
    Fetched,
    /// The environment is made. Not told before [`Self::Fetched`]: one of two at a time is enough to look at.
    Linking(Progress),
}

/// What is installed.
pub(super) struct Wanted<'a> {
    pub(super) set: &'a PackageSet,
    /// How its source is asked.
    pub(super) packages: &'a Packages,
    /// Asked before the set's own source.
    pub(super) peers: Vec<String>,
    /// A broker runs here. Then nobody is in a hurry, and the host's lock is not held for as long as a slow network takes.
    pub(super) beside_a_broker: bool,
}

impl Actor {
    /// Claims the host, fills `pkgs/` from the pod, and makes the environment on the host: of what has come already, while
    /// the rest comes.
    ///
    /// # Errors
    /// The first thing that failed; what is live is untouched.
    pub(super) async fn install(
        &self,
        preflight: &Preflight,
        wanted: Wanted<'_>,
        tell: impl FnMut(Installing) + Send,
    ) -> Result<(), StepError> {
        self.claim(preflight).await?;
        let (tell, is_fetched) = (Mutex::new(tell), AtomicBool::new(false));
        let say = |event| (*tell.lock().unwrap_or_else(PoisonError::into_inner))(event);
        let fetching = async {
            self.fetch(preflight, &wanted, |now| say(Installing::Fetching(now))).await?;
            is_fetched.store(true, Ordering::Relaxed);
            say(Installing::Fetched);
            Ok(())
        };
        let see = |now| {
            if is_fetched.load(Ordering::Relaxed) {
                say(Installing::Linking(now));
            }
        };
        // A bundle is one archive: nothing can be done before it is there.
        if wanted.beside_a_broker || matches!(wanted.set, PackageSet::Bundle(_)) {
            fetching.await?;
            return self.link(preflight, wanted.set, None, see).await;
        }
        let (coming, ended) = oneshot::channel::<()>();
        let fetching = async {
            let fetched = fetching.await;
            drop(coming);
            fetched
        };
        let linking = self.link(preflight, wanted.set, Some(ended.map(drop).boxed()), see);
        match select(pin!(fetching), pin!(linking)).await {
            Either::Left((fetched, linking)) => {
                // Where archives are lacking it ends too, and takes away what it began: it gets the time. It would only say
                // what follows from the other's failure.
                let linked = linking.await;
                fetched.and(linked)
            }
            Either::Right((linked, fetching)) => {
                linked?;
                fetching.await
            }
        }
    }

    /// Puts back what is damaged in the environment of `set`, once the archives that it takes are there, from `peers` first.
    ///
    /// # Errors
    /// The first thing that failed.
    pub(super) async fn mend(
        &self,
        preflight: &Preflight,
        set: &PackageSet,
        packages: &Packages,
        peers: Vec<String>,
    ) -> Result<Answer, StepError> {
        let wanted = Wanted { set, packages, peers, beside_a_broker: true };
        self.fetch(preflight, &wanted, |_| ()).await?;
        self.order(Order::Mend(link_order(preflight, set, false))).await
    }

    async fn fetch(
        &self,
        preflight: &Preflight,
        wanted: &Wanted<'_>,
        progress: impl FnMut(Progress),
    ) -> Result<(), StepError> {
        let path = preflight.prefix.join("pkgs");
        let pkgs = make_dirs_in_host_root(&path).map_err(|source| StepError::Directory { path, source })?;
        let host_file = |path: &str| host::open_host_file(Path::new(path));
        let http = http_client(&self.client, wanted.packages).await?;
        let sources = Sources { peers: wanted.peers.clone(), mirror: wanted.packages.mirror.clone() };
        let (digest, pkgs) = (wanted.set.digest(), host_path(&pkgs));
        let fetched =
            fetch(wanted.set, &digest, &preflight.platform, &pkgs, host_file, &http, &sources, progress).await?;
        info!(bytes = fetched.fetched_bytes, from_peers = fetched.from_peers, "packages are fetched");
        Ok(())
    }

    async fn link(
        &self,
        preflight: &Preflight,
        set: &PackageSet,
        coming: Option<BoxFuture<'_, ()>>,
        mut progress: impl FnMut(Progress) + Send,
    ) -> Result<(), StepError> {
        let order = link_order(preflight, set, coming.is_some());
        let coming = coming.unwrap_or_else(|| ready(()).boxed());
        if let Answer::Linked(linked) = self.host.run_while(Order::Link(order), coming, &mut progress).await? {
            linked.warnings.iter().for_each(|warning| warn!("{warning}"));
        }
        info!("packages are installed");
        Ok(())
    }
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

/// A client for the servers that `packages` names.
async fn http_client(client: &Client, packages: &Packages) -> Result<HttpClient, ApiError> {
    let PackagesAccess { authorities, token, credentials } = access::read(client).await?;
    Access::from_secret(authorities.as_deref(), token.as_deref(), credentials.as_deref())
        .and_then(|access| access.client_for(packages))
        .map_err(|error| ApiError::Content { object: "packages".to_owned(), reason: error_chain(&error) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::{
        fixture::{actor, preflight},
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
        let actor = actor(Arc::new(host));
        let preflight = Preflight { platform: "linux-64".to_owned(), ..preflight(prefix) };
        let wanted = Wanted { set, packages: &Packages::default(), peers: Vec::new(), beside_a_broker };
        let mut was_fetched = false;
        let tell = |event| was_fetched |= matches!(event, Installing::Fetched);
        let outcome = tokio::time::timeout(Duration::from_secs(60), actor.install(&preflight, wanted, tell)).await;
        Some(Installed { outcome: outcome.unwrap(), was_fetched })
    }

    struct Installed {
        outcome: Result<(), StepError>,
        was_fetched: bool,
    }

    fn linked() -> Answer {
        Answer::Linked(Linked { compiled_prefix: None, bytes: 0, warnings: Vec::new() })
    }

    #[tokio::test]
    async fn the_environment_is_begun_before_the_archives_are_there_unless_a_broker_runs() {
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
    async fn what_could_not_be_fetched_is_told_and_not_what_was_lacking_then() {
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
