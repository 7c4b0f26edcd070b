//! Credentials for servers, kept apart from the URLs: URLs are stored and logged in many places, credentials must not
//! be.

use std::{collections::BTreeMap, fmt, sync::Arc};

use base64::{Engine, prelude::BASE64_STANDARD};
use rattler_networking::Authentication;
use reqwest::{
    Request, Response,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
};
use reqwest_middleware::{Middleware, Next};
use url::Url;

use api::SECRET_PACKAGES;
use base::redact::take_apart;

/// What is wrong with a `credentials.json`, which is the subject of the messages. Nothing of it is quoted that may be secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// It is not JSON of this form. The parser's own message may quote a secret.
    #[error("is not JSON such as {{\"HOST\": {{\"CondaToken\": \"TOKEN\"}}}}: line {line}, column {column}")]
    Json {
        /// Where, from 1.
        line: usize,
        /// Where, from 1.
        column: usize,
    },
    /// A key names no servers.
    #[error("has a key that is not HOST, HOST:PORT, HOST/PATH or *.DOMAIN")]
    Key,
    /// An entry can't be sent.
    #[error("has an entry for {host} that is not a usable BearerToken, BasicHTTP or CondaToken")]
    Entry {
        /// Its host.
        host: String,
    },
}

/// A secret and the servers that may get it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    scope: Scope,
    /// It may be sent over http, where anyone on the way can read it.
    over_http: bool,
    presentation: Presentation,
}

/// How a request carries the credential.
#[derive(Clone, PartialEq, Eq)]
enum Presentation {
    /// In the header `Authorization`.
    Header(HeaderValue),
    /// As conda's `/t/<token>`, inserted into the path after the scope's own segments.
    Path(String),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({:?}, ***)", self.scope)
    }
}

/// The URLs that a credential is for: `host`, `host:port`, either followed by a path, or `*.domain`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Scope {
    /// In lower case; `*.` before it means all hosts below this domain.
    host: String,
    /// `None`: the default port of the URL's scheme.
    port: Option<u16>,
    /// The leading segments of the path.
    path: Vec<String>,
}

impl Scope {
    fn parse(text: &str) -> Option<Self> {
        let (wildcard, rest) = text.strip_prefix("*.").map_or((false, text), |rest| (true, rest));
        // A scope has no scheme; https only serves to parse it.
        let url = Url::parse(&format!("https://{rest}")).ok()?;
        let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        let host = url.host_str().filter(|_| is_plain && !rest.contains(['@', '#', '?']))?;
        let host = if wildcard { format!("*.{host}") } else { host.to_owned() };
        Some(Self { host, port: url.port(), path: segments(&url) })
    }

    fn of(url: &Url, path: Vec<String>) -> Option<Self> {
        Some(Self { host: url.host_str()?.to_owned(), port: url.port(), path })
    }

    /// How specifically the scope matches `url` (exact host, length of the path), for comparison; `None` if it doesn't
    /// match.
    fn fits(&self, url: &Url) -> Option<(bool, usize)> {
        let host = url.host_str()?;
        let is_host = match self.host.strip_prefix('*') {
            Some(domain) => host.ends_with(domain) && host.len() > domain.len(),
            None => host == self.host,
        };
        let fits = is_host && self.port == url.port() && segments(url).starts_with(&self.path);
        fits.then(|| (!self.host.starts_with('*'), self.path.len()))
    }
}

/// The segments of the path without empty ones.
fn segments(url: &Url) -> Vec<String> {
    let all = url.path_segments().into_iter().flatten();
    all.filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
}

impl Credential {
    /// A bearer token (RFC 6750) for the whole server of `url`. `None` if the URL has no host.
    ///
    /// # Errors
    /// The token can't be sent in a header.
    pub(crate) fn bearer(url: &Url, token: &str, over_http: bool) -> Result<Option<Self>, Unusable> {
        let presentation = Presentation::header(&format!("Bearer {token}"))?;
        Ok(Scope::of(url, Vec::new()).map(|scope| Self { scope, over_http, presentation }))
    }

    /// Parses the `credentials.json` of pixi and rattler-build: `{"HOST": {"CondaToken": "…"}}`, and so on.
    ///
    /// # Errors
    /// If `json` is not such a file.
    pub(crate) fn parse_all(json: &str, over_http: bool) -> Result<Vec<Self>, CredentialsError> {
        let all: BTreeMap<String, Authentication> = serde_json::from_str(json)
            .map_err(|error| CredentialsError::Json { line: error.line(), column: error.column() })?;
        let parse = |(key, authentication): (String, Authentication)| {
            let scope = Scope::parse(&key).ok_or(CredentialsError::Key)?;
            let unusable = |Unusable| CredentialsError::Entry { host: scope.host.clone() };
            let presentation = Presentation::from(&authentication).map_err(unusable)?;
            Ok(Self { scope, over_http, presentation })
        };
        all.into_iter().map(parse).collect()
    }
}

/// The value can't be sent in a header or a path.
#[derive(Debug)]
pub(crate) struct Unusable;

impl Presentation {
    fn header(value: &str) -> Result<Self, Unusable> {
        let mut value = HeaderValue::from_str(value).map_err(|_| Unusable)?;
        value.set_sensitive(true);
        Ok(Self::Header(value))
    }

    fn basic(user: &str, password: &str) -> Result<Self, Unusable> {
        Self::header(&format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
    }

    fn from(authentication: &Authentication) -> Result<Self, Unusable> {
        match authentication {
            Authentication::BearerToken(token) => Self::header(&format!("Bearer {token}")),
            Authentication::BasicHTTP { username, password } => Self::basic(username, password),
            Authentication::CondaToken(token) => {
                let is_segment = |c: char| c.is_ascii_alphanumeric() || "-._~+=:".contains(c);
                let fits = !token.is_empty() && token.chars().all(is_segment);
                fits.then(|| Self::Path(token.clone())).ok_or(Unusable)
            }
            _ => Err(Unusable),
        }
    }
}

/// Splits `url` into a URL without credentials and the credentials it contained.
pub(crate) fn extract_credentials(url: &Url) -> (Url, Vec<Credential>) {
    let (plain, user, token) = take_apart(url);
    let over_http = url.scheme() == "http";
    let mut credentials = Vec::new();
    if let Some((user, password)) = user
        && let Some(scope) = Scope::of(&plain, Vec::new())
        && let Ok(presentation) = Presentation::basic(&user, &password)
    {
        credentials.push(Credential { scope, over_http, presentation });
    }
    if let Some((before, token)) = token
        && let Some(scope) = Scope::of(&plain, before)
    {
        credentials.push(Credential { scope, over_http, presentation: Presentation::Path(token) });
    }
    (plain, credentials)
}

/// Attaches credentials to the requests that they are for, and to no others.
#[derive(Clone, Debug, Default)]
pub(crate) struct CredentialStore(Arc<[Credential]>);

impl CredentialStore {
    /// If several credentials match a URL, the most specific one is sent; of equally specific ones, the first.
    pub(crate) fn new(credentials: Vec<Credential>) -> Self {
        Self(credentials.into())
    }

    /// The most specific credential for `url` among those for which `kind` returns a value.
    fn find<T>(&self, url: &Url, kind: impl Fn(&Presentation) -> Option<T>) -> Option<(&Credential, T)> {
        let fitting = self.0.iter().filter_map(|one| Some((one.scope.fits(url)?, one, kind(&one.presentation)?)));
        let best = fitting.rev().max_by_key(|(fits, ..)| *fits);
        best.filter(|(_, one, _)| one.over_http || url.scheme() == "https")
            .map(|(_, one, presentation)| (one, presentation))
    }

    /// The URL to request instead of `url`, and the headers to send.
    pub(crate) fn open(&self, url: &Url) -> (Url, HeaderMap) {
        let header = self.find(url, |presentation| match presentation {
            Presentation::Header(value) => Some(value.clone()),
            Presentation::Path(_) => None,
        });
        let token = self.find(url, |presentation| match presentation {
            Presentation::Path(token) => Some(token.clone()),
            Presentation::Header(_) => None,
        });
        let mut asked = url.clone();
        if let Some((one, token)) = token {
            let path = url.path().split('/').collect::<Vec<_>>();
            // A path starts with a slash, so the first element is empty.
            let (before, rest) = path.split_at((1 + one.scope.path.len()).min(path.len()));
            asked.set_path(&[before, &["t", &token], rest].concat().join("/"));
        }
        (asked, header.into_iter().map(|(_, value)| (AUTHORIZATION, value)).collect())
    }

    /// If there is a credential for `url` that was not sent: a clause for an error message that says why. Empty
    /// otherwise.
    pub(crate) fn withheld(&self, url: &Url) -> String {
        let is_withheld = |one: &Credential| !one.over_http && one.scope.fits(url).is_some();
        match url.scheme() == "http" && self.0.iter().any(is_withheld) {
            true => format!(
                "; the credential for this server was not sent, because anyone on the way can read http: use https, or, for \
                 the credentials of Secret {SECRET_PACKAGES}, set spec.packages.allowHttpCredentials"
            ),
            false => String::new(),
        }
    }

    /// Does the same as [`Self::open`] for requests that rattler sends.
    pub(crate) fn middleware(&self) -> impl Middleware {
        let credentials = self.clone();
        sending(move |mut request, extensions, next| {
            let (url, headers) = credentials.open(request.url());
            let given = std::mem::replace(request.url_mut(), url);
            request.headers_mut().extend(headers);
            Box::pin(async move {
                let sent = next.run(request, extensions).await;
                // Errors must name the URL that the caller gave: the one that was requested may contain a token.
                sent.map_err(|error| match error {
                    reqwest_middleware::Error::Reqwest(error) => error.with_url(given).into(),
                    ours @ reqwest_middleware::Error::Middleware(_) => ours,
                })
            })
        })
    }
}

/// Lets the compiler infer the closure's higher-ranked lifetimes.
fn sending<F>(closure: F) -> F
where
    F: for<'a> Fn(
        Request,
        &'a mut axum::http::Extensions,
        Next<'a>,
    ) -> futures::future::BoxFuture<'a, reqwest_middleware::Result<Response>>,
{
    closure
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The URL that is requested for `url`, and the `Authorization` header.
    fn asked(credentials: &CredentialStore, url: &str) -> (String, Option<String>) {
        let (url, headers) = credentials.open(&Url::parse(url).unwrap());
        (url.to_string(), headers.get(AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned()))
    }

    #[test]
    fn a_credential_is_sent_only_to_its_own_server_and_path_and_only_over_https() {
        let json = r#"{
            "h": {"BearerToken": "b"}, "h:8": {"BasicHTTP": {"username": "me", "password": "pw"}},
            "*.d.org": {"CondaToken": "w"}, "a.d.org": {"CondaToken": "a"}, "p/conda": {"CondaToken": "p"}
        }"#;
        let credentials = CredentialStore::new(Credential::parse_all(json, false).unwrap());
        let allowed = CredentialStore::new(Credential::parse_all(json, true).unwrap());
        for (url, url_asked, header) in [
            ("https://h/c/x", "https://h/c/x", Some("Bearer b")),
            ("https://h:443/x", "https://h/x", Some("Bearer b")),
            ("https://h:8/x", "https://h:8/x", Some("Basic bWU6cHc=")),
            ("https://h:9/x", "https://h:9/x", None),
            ("https://hh/x", "https://hh/x", None),
            ("https://x.d.org/c/x?q", "https://x.d.org/t/w/c/x?q", None),
            ("https://a.d.org/c/x", "https://a.d.org/t/a/c/x", None),
            ("https://d.org/x", "https://d.org/x", None),
            ("https://evil-d.org/x", "https://evil-d.org/x", None),
            ("https://p/conda/c/x", "https://p/conda/t/p/c/x", None),
            ("https://p/condas/x", "https://p/condas/x", None),
            ("http://h/x", "http://h/x", None),
            ("http://a.d.org/x", "http://a.d.org/x", None),
        ] {
            assert_eq!(asked(&credentials, url), (url_asked.to_owned(), header.map(str::to_owned)), "{url}");
        }
        assert_eq!(asked(&allowed, "http://a.d.org/x").0, "http://a.d.org/t/a/x");
        assert_eq!(asked(&allowed, "http://h/x").1.as_deref(), Some("Bearer b"));
        let withheld =
            |credentials: &CredentialStore, url: &str| !credentials.withheld(&Url::parse(url).unwrap()).is_empty();
        assert!(
            withheld(&credentials, "http://h/x")
                && !withheld(&credentials, "http://i/x")
                && !withheld(&credentials, "https://h/x")
        );
        assert!(!withheld(&allowed, "http://h/x"));
        assert!(!format!("{allowed:?}").contains("pw"));
    }

    #[test]
    fn credentials_extracted_from_a_url_reproduce_its_request() {
        for (given, plain, header) in [
            ("https://h/c/x", "https://h/c/x", None),
            ("https://me:p%40w@h:8/c/x", "https://h:8/c/x", Some("Basic bWU6cEB3")),
            ("http://h/t/tk/c/x", "http://h/c/x", None),
            ("http://h/t/tk", "http://h/", None),
            ("https://me@h/conda/t/e.y.J/c/x", "https://h/conda/c/x", Some("Basic bWU6")),
        ] {
            let url = Url::parse(given).unwrap();
            let (found, credentials) = extract_credentials(&url);
            assert_eq!(found.as_str(), plain);
            let mut expected = url;
            let _ = (expected.set_username(""), expected.set_password(None));
            let (asked, sent) = asked(&CredentialStore::new(credentials), plain);
            assert_eq!((asked.trim_end_matches('/'), sent.as_deref()), (expected.as_str(), header));
        }
        let signed = Url::parse("https://h/x.tar.gz?X-Amz-Signature=s").unwrap();
        assert_eq!(base::redact::stripped(&signed).as_str(), "https://h/x.tar.gz");
        let file = Url::parse("file:///srv/t/x/y.conda").unwrap();
        assert_eq!(base::redact::stripped(&file), file);
    }

    #[test]
    fn an_unusable_credential_is_refused_without_quoting_it() {
        for json in [
            r#"{"h": {"s3cret": 1}}"#,
            r#"{"h": "s3cret"}"#,
            r#"{"h": {"CondaToken": "s3cret/x"}}"#,
            r#"{"h": {"BearerToken": "s3cret\n"}}"#,
            r#"{"me:s3cret@h": {"BearerToken": "b"}}"#,
            r#"{"h": {"S3Credentials": {"access_key_id": "a", "secret_access_key": "s3cret", "session_token": null}}}"#,
            "s3cret",
        ] {
            let reason = Credential::parse_all(json, true).unwrap_err().to_string();
            assert!(!reason.contains("s3cret"), "{reason}");
        }
    }
}
