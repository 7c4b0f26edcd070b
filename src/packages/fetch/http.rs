//! One HTTP client for the pod.

use std::time::Duration;

use reqwest::{RequestBuilder, redirect};
use url::Url;

use crate::{
    packages::{Access, fetch::access::Bearer},
    redact::is_token,
};

/// Long enough for a far proxy, short enough that a wrong address is told while somebody still looks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two reads. There is no limit on the whole: an archive may be large and the line slow.
pub(in crate::packages) const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// A peer is in the same data centre, and there are others.
const PEERS_CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const PEERS_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Shorter than what a peer's server waits for the next request, so that none is sent into a closing connection.
const PEERS_IDLE_TIMEOUT: Duration = Duration::from_secs(2);
const USER_AGENT: &str = concat!("flux-distribute/", env!("CARGO_PKG_VERSION"));

/// The HTTP client of this process. Cheap to clone.
///
/// Trusts the roots of Mozilla that are compiled in, and besides them the CA bundle of the system or of `SSL_CERT_FILE`.
/// Proxies come from `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`; peers are asked without any.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: reqwest::Client,
    peers: reqwest::Client,
    bearer: Bearer,
    patience_with_peers: Duration,
}

/// The client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The environment.
    #[error("can't set up the HTTP client; look at the proxy variables and at SSL_CERT_FILE")]
    Client(#[source] reqwest::Error),
    /// The Secret.
    #[error("Secret {} can't be used: its key {key} {reason}", crate::api::SECRET_PACKAGES)]
    Secret {
        /// Which of its keys.
        key: &'static str,
        /// What is wrong with the value, without the value.
        reason: String,
    },
}

impl HttpClient {
    /// Makes the client.
    ///
    /// # Errors
    /// Where the environment holds something that can't be used.
    pub fn new() -> Result<Self, HttpError> {
        Self::with_access(&Access::default(), &[])
    }

    /// Makes a client that trusts the authorities of `access`, and shows its token to the servers of `urls`: what the spec
    /// names as channels, mirror and bundle. Never to another server, and so neither to peers nor along a redirect.
    ///
    /// # Errors
    /// Where the environment or the Secret holds something that can't be used.
    pub fn with_access(access: &Access, urls: &[String]) -> Result<Self, HttpError> {
        let peers = reqwest::Client::builder()
            .tls_certs_only([])
            .no_proxy()
            .http1_only()
            .redirect(redirect::Policy::none())
            .connect_timeout(PEERS_CONNECT_TIMEOUT)
            .pool_idle_timeout(PEERS_IDLE_TIMEOUT)
            .user_agent(USER_AGENT);
        Ok(Self {
            client: build(base().tls_certs_merge(access.certificates()?))?,
            peers: build(peers)?,
            bearer: access.bearer(urls)?,
            patience_with_peers: PEERS_READ_TIMEOUT,
        })
    }

    /// How long a peer may be silent before the others are asked; 5 seconds unless told.
    pub fn with_patience_with_peers(self, patience: Duration) -> Self {
        Self { patience_with_peers: patience, ..self }
    }

    pub(in crate::packages) fn patience_with_peers(&self) -> Duration {
        self.patience_with_peers
    }

    pub(in crate::packages) fn ask(&self, url: &Url) -> RequestBuilder {
        self.client.get(url.clone()).headers(self.bearer.for_url(url))
    }

    pub(in crate::packages) fn ask_peer(&self, url: &str) -> RequestBuilder {
        self.peers.get(url)
    }

    /// Asks a peer only whether it has it.
    pub(in crate::packages) fn look_at_peer(&self, url: &str) -> RequestBuilder {
        self.peers.head(url)
    }

    pub(in crate::packages) fn for_rattler(&self) -> rattler_networking::LazyClient {
        reqwest_middleware::ClientBuilder::new(self.client.clone()).with(self.bearer.middleware()).build().into()
    }
}

fn build(builder: reqwest::ClientBuilder) -> Result<reqwest::Client, HttpError> {
    // Only the first call of the process does something; the error of the others says just that.
    let _ = rustls::crypto::ring::default_provider().install_default();
    builder.build().map_err(HttpError::Client)
}

fn base() -> reqwest::ClientBuilder {
    // A host or an image without a CA bundle would otherwise fail right here, even for http://.
    let roots =
        webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().filter_map(|der| reqwest::Certificate::from_der(der).ok());
    reqwest::Client::builder()
        .tls_certs_merge(roots)
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        // It would carry a URL's `/t/<token>` along a redirect.
        .referer(false)
        .user_agent(USER_AGENT)
}

/// `url` as it may be shown: without user, password, query, and conda's `/t/<token>/`.
pub(in crate::packages) fn shown(url: &str) -> String {
    let mut url = match url::Url::parse(url) {
        Ok(parsed) => parsed,
        // A mere name, most likely; what looks like more may hold a secret.
        Err(_) if !url.contains(['/', '@', ':']) => return url.to_owned(),
        Err(_) => return "(not a URL)".to_owned(),
    };
    // Both fail only for URLs that can't have them.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    let mut segments = url.path().split('/').map(str::to_owned).collect::<Vec<_>>();
    let token = segments.windows(2).position(|pair| is_token(url.scheme(), &pair[0], &pair[1]));
    if let Some(token) = token.and_then(|at| segments.get_mut(at + 1)) {
        *token = "***".to_owned();
        url.set_path(&segments.join("/"));
    }
    url.to_string()
}

/// What went wrong, with all causes in one line, and without the URL: it may hold a password.
pub(in crate::packages) fn words(error: reqwest::Error) -> String {
    crate::error_chain(&error.without_url())
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn no_secret_of_a_url_is_shown() {
        for (url, safe) in [
            ("https://me:secret@host/channel", "https://host/channel"),
            ("https://host/t/secret/channel/x.conda", "https://host/t/***/channel/x.conda"),
            ("https://host/x.tar.gz?X-Amz-Signature=secret", "https://host/x.tar.gz"),
            ("file:///srv/t/x.tar.gz", "file:///srv/t/x.tar.gz"),
            ("https://host/t/x.tar.gz", "https://host/t/x.tar.gz"),
            ("//me:secret@host/channel", "(not a URL)"),
            ("conda-forge", "conda-forge"),
        ] {
            assert_eq!(shown(url), safe);
        }
    }
}
