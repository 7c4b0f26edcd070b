//! Credentials and certificates for a site's channels, mirrors and bundles: Secret `flux-packages-access`.

use std::{fmt, path::PathBuf};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use url::Url;

use crate::{
    HttpClient, HttpError,
    fetch::credentials::{Credential, CredentialStore, Unusable, extract_credentials},
};
use api::{
    DEFAULT_CHANNEL, Packages, SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_CREDENTIALS_KEY, SECRET_PACKAGES_TOKEN_KEY,
};
use locks::lock_urls;

/// The content of Secret `flux-packages-access`, and the related settings of the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// PEM certificates of private authorities, trusted in addition to the built-in ones.
    pub authorities: Option<String>,
    /// Sent to the servers that the spec's URLs name, and to no other server.
    pub token: Option<Token>,
    /// `spec.packages.allowHttpCredentials`: also send credentials to http URLs, not only to https URLs.
    pub allow_http: bool,
    /// Credentials for particular servers: the text of the Secret's `credentials.json`.
    pub credentials: Option<Token>,
    /// Credentials that the user gave to a command: in its URLs, and in the file named by `RATTLER_AUTH_FILE`.
    pub given: Vec<Credential>,
}

/// Environment variable that names a `credentials.json`, as for pixi and rattler-build.
const AUTH_FILE: &str = "RATTLER_AUTH_FILE";

/// A bearer token (RFC 6750) or another secret text. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Removes white space around the token, such as the newline at the end of a file.
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
    /// Reads the values of the Secret's keys `ca.crt`, `token` and `credentials.json`. An empty value counts as absent.
    ///
    /// # Errors
    /// A value is not UTF-8 text. The contents are checked later, by [`HttpClient::with_access`](crate::HttpClient::with_access).
    pub fn from_secret(
        authorities: Option<&[u8]>,
        token: Option<&[u8]>,
        credentials: Option<&[u8]>,
    ) -> Result<Self, HttpError> {
        let text = |key: &'static str, value: Option<&[u8]>| match value.map(std::str::from_utf8) {
            Some(Err(_)) => Err(HttpError::Secret { key, reason: "is not UTF-8 text".to_owned() }),
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
    /// The file can't be read, or its content is not in the format of pixi's `credentials.json`.
    pub fn from_environment() -> Result<Self, HttpError> {
        let Some(path) = std::env::var_os(AUTH_FILE).filter(|path| !path.is_empty()).map(PathBuf::from) else {
            return Ok(Self::default());
        };
        let text =
            std::fs::read_to_string(&path).map_err(|source| HttpError::AuthFile { path: path.clone(), source })?;
        let given = Credential::parse_all(&text, false).map_err(|reason| HttpError::AuthContent { path, reason })?;
        Ok(Self { given, ..Self::default() })
    }

    /// Removes the credentials from a URL and keeps them for requests to its server. Returns text that is not a URL
    /// unchanged.
    pub fn take_from(&mut self, url: &str) -> String {
        let Ok(parsed) = Url::parse(url) else { return url.to_owned() };
        let (plain, credentials) = extract_credentials(&parsed);
        let is_plain = credentials.is_empty() && plain == parsed;
        self.given.extend(credentials);
        if is_plain { url.to_owned() } else { plain.to_string() }
    }

    pub(crate) fn certificates(&self) -> Result<Vec<reqwest::Certificate>, HttpError> {
        let unusable = |reason: &str| HttpError::Secret { key: SECRET_PACKAGES_CA_KEY, reason: reason.to_owned() };
        let Some(pem) = &self.authorities else { return Ok(Vec::new()) };
        let mut certificates = Vec::new();
        for der in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let der =
                der.map_err(|_| unusable("is not complete PEM: -----BEGIN CERTIFICATE----- up to the END line"))?;
            // Checked here because the client's own error would only say that the client can't be built.
            let added = RootCertStore::empty().add(der.clone());
            let certificate = added.ok().and_then(|()| reqwest::Certificate::from_der(&der).ok());
            certificates.push(certificate.ok_or_else(|| unusable("contains something that is not a certificate"))?);
        }
        if certificates.is_empty() {
            return Err(unusable("contains no certificate in PEM format: -----BEGIN CERTIFICATE----- and so on"));
        }
        Ok(certificates)
    }

    /// All credentials. `urls` name the servers that get [`Self::token`].
    pub(crate) fn credentials(&self, urls: &[String]) -> Result<CredentialStore, HttpError> {
        let wrong = |key, reason: String| HttpError::Secret { key, reason };
        let mut credentials = self.given.clone();
        if let Some(Token(json)) = &self.credentials {
            let parsed = Credential::parse_all(json, self.allow_http);
            credentials.extend(parsed.map_err(|error| wrong(SECRET_PACKAGES_CREDENTIALS_KEY, error.to_string()))?);
        }
        if let Some(Token(token)) = &self.token {
            let unfit = |Unusable| {
                wrong(SECRET_PACKAGES_TOKEN_KEY, "is not a token: one line of letters, digits and -._~+/=".to_owned())
            };
            for url in urls.iter().filter_map(|url| Url::parse(url).ok()) {
                credentials.extend(Credential::bearer(&url, token, self.allow_http).map_err(unfit)?);
            }
            // Check the token even if no server gets it.
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
    // An installation reports a lock that can't be read.
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
