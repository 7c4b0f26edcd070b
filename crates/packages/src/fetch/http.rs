//! One HTTP client for the pod.

use std::{path::PathBuf, time::Duration};

use reqwest::{RequestBuilder, redirect};
use url::Url;

use crate::{Access, fetch::credentials::CredentialStore};
use base::redact::token_positions;

/// Long enough for a far proxy, short enough that a wrong address is told while somebody still looks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two reads. There is no limit on the whole: an archive may be large and the line slow.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(60);
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
    credentials: CredentialStore,
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
    #[error("Secret {} can't be used: its key {key} {reason}", api::SECRET_PACKAGES)]
    Secret {
        /// Which of its keys.
        key: &'static str,
        /// What is wrong with the value, without the value.
        reason: String,
    },
    /// The file that environment variable `RATTLER_AUTH_FILE` names is not there, or nobody may read it.
    #[error("can't read {}, which RATTLER_AUTH_FILE names", path.display())]
    AuthFile {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// That file can be read, and not used.
    #[error("{}, which RATTLER_AUTH_FILE names, can't be used: it {reason}", path.display())]
    AuthContent {
        /// Its path.
        path: PathBuf,
        /// What is wrong with the content, without the content.
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

    /// Makes a client that trusts the authorities of `access`, shows its token to the servers of `urls` (what the spec names
    /// as channels, mirror and bundle), and its other credentials to the servers that they are for. Never to another server,
    /// and so neither to peers nor along a redirect.
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
            credentials: access.credentials(urls)?,
            patience_with_peers: PEERS_READ_TIMEOUT,
        })
    }

    /// How long a peer may be silent before the others are asked; 5 seconds unless told.
    pub fn with_patience_with_peers(self, patience: Duration) -> Self {
        Self { patience_with_peers: patience, ..self }
    }

    pub(crate) fn patience_with_peers(&self) -> Duration {
        self.patience_with_peers
    }

    pub(crate) fn ask(&self, url: &Url) -> RequestBuilder {
        let (url, headers) = self.credentials.open(url);
        self.client.get(url).headers(headers)
    }

    /// For the end of a sentence on a request that `url`'s server refused; empty if nothing was withheld from it.
    pub(crate) fn withheld(&self, url: &Url) -> String {
        self.credentials.withheld(url)
    }

    pub(crate) fn ask_peer(&self, url: &str) -> RequestBuilder {
        self.peers.get(url)
    }

    /// Asks a peer only whether it has it.
    pub(crate) fn look_at_peer(&self, url: &str) -> RequestBuilder {
        self.peers.head(url)
    }

    pub(crate) fn for_rattler(&self) -> rattler_networking::LazyClient {
        reqwest_middleware::ClientBuilder::new(self.client.clone()).with(self.credentials.middleware()).build().into()
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
        .redirect(redirect::Policy::custom(|attempt| match redirected(attempt.previous(), attempt.url()) {
            Ok(()) => attempt.follow(),
            Err(refused) => attempt.error(refused),
        }))
        .user_agent(USER_AGENT)
}

/// Redirects that are followed for one request.
const MOST_REDIRECTS: usize = 10;

/// Why a redirect is not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Redirected {
    #[error("it redirects more than {MOST_REDIRECTS} times")]
    TooOften,
    #[error("it redirects from https to http, where everybody on the way could read and change what is sent")]
    ToHttp,
    #[error("it redirects to another server with the token in the URL")]
    WithToken,
}

/// Whether a request may go on to `next`. The client takes headers off by itself when the server is another one.
fn redirected(previous: &[Url], next: &Url) -> Result<(), Redirected> {
    let Some((first, last)) = previous.first().zip(previous.last()) else { return Ok(()) };
    let is_other = |url: &Url| url.origin() != first.origin();
    match () {
        () if previous.len() > MOST_REDIRECTS => Err(Redirected::TooOften),
        () if last.scheme() == "https" && next.scheme() != "https" => Err(Redirected::ToHttp),
        () if is_other(next) && tokens(first).iter().any(|token| next.as_str().contains(token)) => {
            Err(Redirected::WithToken)
        }
        () => Ok(()),
    }
}

/// conda's tokens in the path of `url`.
fn tokens(url: &Url) -> Vec<&str> {
    let segments: Vec<_> = url.path().split('/').collect();
    token_positions(url.scheme(), url.path()).map(|at| segments[at]).collect()
}

/// What went wrong, with all causes in one line, and without the URL: it may hold a password.
pub(crate) fn words(error: reqwest::Error) -> String {
    base::error_chain(&error.without_url())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_never_takes_a_credential_to_another_server_or_to_http() {
        for (previous, next, expected) in [
            (&["https://h/t/tk/c/x"][..], "https://h/t/tk/d/x", Ok(())),
            (&["https://h/t/tk/c/x"], "https://cdn/c/x", Ok(())),
            (&["https://h/t/tk/c/x"], "https://cdn/t/tk/c/x", Err(Redirected::WithToken)),
            (&["https://h/t/tk/c/x"], "https://cdn/x?back=/t/tk/c/x", Err(Redirected::WithToken)),
            (&["https://h/t/tk/c/x"], "https://h:8/t/tk/c/x", Err(Redirected::WithToken)),
            (&["https://h/t/tk/c/x", "https://cdn/x"], "https://other/tk", Err(Redirected::WithToken)),
            (&["https://h/c/x"], "http://h/c/x", Err(Redirected::ToHttp)),
            (&["https://h:8/c/x"], "http://h:8/c/x", Err(Redirected::ToHttp)),
            (&["http://h/c/x"], "http://cdn/c/x", Ok(())),
            (&["http://h/c/x"], "https://h/c/x", Ok(())),
            (&["https://h/x"; 11], "https://h/x", Err(Redirected::TooOften)),
        ] {
            let url = |url: &str| Url::parse(url).unwrap();
            let before = previous.iter().map(|one| url(one)).collect::<Vec<_>>();
            assert_eq!(redirected(&before, &url(next)), expected, "{previous:?} {next}");
        }
    }

    #[test]
    fn no_secret_of_a_url_is_shown() {
        for (url, safe) in [
            ("https://me:secret@host/channel", "https://host/channel"),
            ("https://host/t/secret/channel/x.conda", "https://host/t/***/channel/x.conda"),
            ("https://host/x.tar.gz?X-Amz-Signature=secret", "https://host/x.tar.gz"),
            ("file:///srv/t/x.tar.gz", "file:///srv/t/x.tar.gz"),
            ("https://host/t/x.tar.gz", "https://host/t/x.tar.gz"),
            ("//me:secret@host/channel", "(not a URL)"),
            ("me:secret@host/channel", "(not a URL)"),
            ("conda-forge", "conda-forge"),
        ] {
            assert_eq!(base::redact::shown(url), safe);
        }
    }
}
