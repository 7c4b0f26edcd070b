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
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::act::{Actor, StepError};
use crate::{
    api::{PackageSet, Packages},
    host::{
        Answer, LinkOrder, Order, Preflight, Progress,
        files::{host_path, make_dirs_in_host_root},
    },
    packages::{Sources, fetch},
    planner::access,
};

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

    async fn fetch(
        &self,
        preflight: &Preflight,
        wanted: &Wanted<'_>,
        progress: impl FnMut(Progress),
    ) -> Result<(), StepError> {
        let path = preflight.prefix.join("pkgs");
        let pkgs = make_dirs_in_host_root(&path).map_err(|source| StepError::Directory { path, source })?;
        let host_file = |path: &str| crate::host::open_host_file(Path::new(path));
        let http = access::http_client(&self.client, wanted.packages).await?;
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
        let order = LinkOrder {
            prefix: preflight.prefix.clone(),
            digest: set.digest(),
            set: set.clone(),
            platform: preflight.platform.clone(),
            follow: coming.is_some(),
        };
        let coming = coming.unwrap_or_else(|| ready(()).boxed());
        if let Answer::Linked(linked) = self.host.run_while(Order::Link(order), coming, &mut progress).await? {
            linked.warnings.iter().for_each(|warning| warn!("{warning}"));
        }
        info!("packages are installed");
        Ok(())
    }
}
