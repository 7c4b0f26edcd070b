//! What a site's channels, mirrors and bundles demand of those who ask: Secret `flux-packages-access`.

use std::{fmt, path::PathBuf};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use url::Url;

use crate::{
    HttpClient, HttpError,
    fetch::credentials::{Credential, CredentialStore, Unusable, taken_from},
};
use api::{
    DEFAULT_CHANNEL, Packages, SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_CREDENTIALS_KEY, SECRET_PACKAGES_TOKEN_KEY,
};
use locks::lock_urls;

/// The content of Secret `flux-packages-access`, and what the spec says about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// PEM certificates of private authorities, besides those that are built in.
    pub authorities: Option<String>,
    /// Sent to the servers that the spec's URLs name, and to no others.
    pub token: Option<Token>,
    /// `spec.packages.allowHttpCredentials`: credentials are sent to http URLs too, and not to https URLs only.
    pub allow_http: bool,
    /// Each for a server of its own; the text of the Secret's `credentials.json`.
    pub credentials: Option<Token>,
    /// Those that a command was given: in its URLs, and by the file that `RATTLER_AUTH_FILE` names.
    pub given: Vec<Credential>,
}

/// Environment variable: where pixi, rattler-build and we look for `credentials.json`.
const AUTH_FILE: &str = "RATTLER_AUTH_FILE";

/// A bearer token (RFC 6750), or another text that nobody may see.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// White space around it, as files end with, is not part of it.
    pub fn new(token: &str) -> Self {
        Self(token.trim().to_owned())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl Access {
    /// From the values of the Secret's keys `ca.crt`, `token` and `credentials.json`; an empty value is as good as none.
    ///
    /// # Errors
    /// A value is not text, or `credentials.json` can't be read.
    pub fn from_secret(
        authorities: Option<&[u8]>,
        token: Option<&[u8]>,
        credentials: Option<&[u8]>,
    ) -> Result<Self, HttpError> {
        let text = |key: &'static str, value: Option<&[u8]>| match value.map(std::str::from_utf8) {
            Some(Err(_)) => Err(HttpError::Secret { key, reason: "is not text".to_owned() }),
            Some(Ok(text)) if !text.trim().is_empty() => Ok(Some(text.to_owned())),
            _ => Ok(None),
        };
        Ok(Self {
            authorities: text(SECRET_PACKAGES_CA_KEY, authorities)?,
            token: text(SECRET_PACKAGES_TOKEN_KEY, token)?.as_deref().map(Token::new),
            credentials: text(SECRET_PACKAGES_CREDENTIALS_KEY, credentials)?.as_deref().map(Token::new),
            ..Self::default()
        })
    }

    /// A client for the servers that `packages` names, with this access.
    ///
    /// # Errors
    /// What is wrong with a certificate or a credential.
    pub fn client_for(self, packages: &Packages) -> Result<HttpClient, HttpError> {
        HttpClient::with_access(&Self { allow_http: packages.allow_http_credentials, ..self }, &named(packages))
    }

    /// For a command: the file that `RATTLER_AUTH_FILE` names, which pixi and rattler-build read too.
    ///
    /// # Errors
    /// It can't be read, or is not such a file.
    pub fn from_environment() -> Result<Self, HttpError> {
        let Some(path) = std::env::var_os(AUTH_FILE).filter(|path| !path.is_empty()).map(PathBuf::from) else {
            return Ok(Self::default());
        };
        let text =
            std::fs::read_to_string(&path).map_err(|source| HttpError::AuthFile { path: path.clone(), source })?;
        let given = Credential::parse_all(&text, false).map_err(|reason| HttpError::AuthContent { path, reason })?;
        Ok(Self { given, ..Self::default() })
    }

    /// Takes the credentials out of a URL, and shows them to its server from now on. What is not a URL comes back as it is.
    pub fn take_from(&mut self, url: &str) -> String {
        let Ok(parsed) = Url::parse(url) else { return url.to_owned() };
        let (plain, credentials) = taken_from(&parsed);
        let is_plain = credentials.is_empty() && plain == parsed;
        self.given.extend(credentials);
        if is_plain { url.to_owned() } else { plain.to_string() }
    }

    pub(crate) fn certificates(&self) -> Result<Vec<reqwest::Certificate>, HttpError> {
        let unusable = |reason: &str| HttpError::Secret { key: SECRET_PACKAGES_CA_KEY, reason: reason.to_owned() };
        let Some(pem) = &self.authorities else { return Ok(Vec::new()) };
        let mut certificates = Vec::new();
        for der in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let der = der.map_err(|_| unusable("is not whole PEM: -----BEGIN CERTIFICATE----- up to the END line"))?;
            // The client would say no more than that it could not be made.
            let added = RootCertStore::empty().add(der.clone());
            let certificate = added.ok().and_then(|()| reqwest::Certificate::from_der(&der).ok());
            certificates.push(certificate.ok_or_else(|| unusable("holds something that is not a certificate"))?);
        }
        if certificates.is_empty() {
            return Err(unusable("holds no certificate in PEM: -----BEGIN CERTIFICATE----- and so on"));
        }
        Ok(certificates)
    }

    /// `urls`: the servers that [`Self::token`] is for.
    pub(crate) fn credentials(&self, urls: &[String]) -> Result<CredentialStore, HttpError> {
        let wrong = |key, reason: String| HttpError::Secret { key, reason };
        let mut credentials = self.given.clone();
        if let Some(Token(json)) = &self.credentials {
            let parsed = Credential::parse_all(json, self.allow_http);
            credentials.extend(parsed.map_err(|reason| wrong(SECRET_PACKAGES_CREDENTIALS_KEY, reason))?);
        }
        if let Some(Token(token)) = &self.token {
            let unfit = |Unusable| {
                wrong(SECRET_PACKAGES_TOKEN_KEY, "is not a token: one line of letters, digits and -._~+/=".to_owned())
            };
            for url in urls.iter().filter_map(|url| Url::parse(url).ok()) {
                credentials.extend(Credential::bearer(&url, token, self.allow_http).map_err(unfit)?);
            }
            // It is looked at even if nobody gets it.
            let anywhere = Url::parse("https://localhost").map_err(|_| unfit(Unusable))?;
            Credential::bearer(&anywhere, token, false).map_err(unfit)?;
        }
        Ok(CredentialStore::new(credentials))
    }
}

/// The URLs that a spec names, without those at the default channel's server, which is public: a spec or a lock with packages of
/// conda-forge names it.
fn named(packages: &Packages) -> Vec<String> {
    let bundle = packages.bundle.iter().map(|bundle| bundle.url.as_str());
    let named = packages.channels.iter().chain(&packages.mirror).map(String::as_str).chain(bundle);
    // A lock that can't be read is told by those who install it.
    let locked = packages.lock.iter().flat_map(|lock| lock_urls(lock).unwrap_or_default());
    let server =
        |url: &str| Url::parse(url).ok().and_then(|url| Some(url.host_str()?.trim_end_matches('.').to_owned()));
    let public = server(DEFAULT_CHANNEL);
    named.map(str::to_owned).chain(locked).filter(|url| server(url) != public).collect()
}

#[cfg(test)]
mod tests {
    use api::BundleSource;

    use super::*;

    #[test]
    fn the_token_is_for_the_servers_that_the_spec_names_and_not_for_the_default_channel() {
        assert_eq!(named(&Packages::default()), Vec::<String>::new());
        let packages = Packages {
            channels: vec!["https://a/c".into()],
            mirror: Some("https://b/m".into()),
            lock: Some(locked(&["https://c/linux-64/x-1-0.conda"])),
            bundle: Some(BundleSource { url: "https://d/b.tar.gz".into(), sha256: String::new() }),
            ..Packages::default()
        };
        assert_eq!(
            named(&packages),
            ["https://a/c", "https://b/m", "https://d/b.tar.gz", "https://c/linux-64/x-1-0.conda"]
        );
    }

    #[test]
    fn the_token_is_not_for_the_default_channel_even_if_the_spec_or_its_lock_names_it() {
        let private = "https://a/linux-64/y-1-0.conda";
        let packages = Packages {
            channels: vec![
                "https://a/c".into(),
                DEFAULT_CHANNEL.into(),
                "https://CONDA.anaconda.org:443/bioconda".into(),
                "https://conda.anaconda.org./nvidia".into(),
            ],
            lock: Some(locked(&["https://conda.anaconda.org/conda-forge/linux-64/x-1-0.conda", private])),
            ..Packages::default()
        };
        assert_eq!(named(&packages), ["https://a/c", private]);
    }

    fn locked(urls: &[&str]) -> String {
        let lines = urls.iter().map(|url| format!("{url}#sha256:{}\n", "0".repeat(64)));
        ["@EXPLICIT\n".to_owned()].into_iter().chain(lines).collect()
    }
}
