//! Secret `flux-packages-access`: the credentials and CA certificates for channels, mirrors and bundles. The planner
//! reads it each time it needs it, so that it uses a changed token at once and keeps none in memory.

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use url::Url;

use super::{PlannerError, call};
use crate::{
    api::{
        DEFAULT_CHANNEL, NAMESPACE, Packages, SECRET_PACKAGES, SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_CREDENTIALS_KEY,
        SECRET_PACKAGES_TOKEN_KEY,
    },
    error_chain,
    packages::{Access, HttpClient, lock_urls},
};

/// Makes an HTTP client for the servers that `packages` names. Usually there is no Secret; then it has no credentials.
///
/// # Errors
/// If the call to the API server fails; [`PlannerError::Content`] if the Secret has an unusable value.
pub async fn http_client(client: &Client, packages: &Packages) -> Result<HttpClient, PlannerError> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let found = call(format!("get Secret {SECRET_PACKAGES}"), secrets.get_opt(SECRET_PACKAGES)).await?;
    let data = found.and_then(|secret| secret.data).unwrap_or_default();
    let value = |key: &str| data.get(key).map(|value| value.0.as_slice());
    let keys = [SECRET_PACKAGES_CA_KEY, SECRET_PACKAGES_TOKEN_KEY, SECRET_PACKAGES_CREDENTIALS_KEY].map(value);
    let allow_http = packages.allow_http_credentials;
    Access::from_secret(keys[0], keys[1], keys[2])
        .and_then(|access| HttpClient::with_access(&Access { allow_http, ..access }, &named(packages)))
        .map_err(|error| PlannerError::Content { object: "packages".to_owned(), reason: error_chain(&error) })
}

/// The URLs that a spec names: the token is sent to their servers. URLs at the default channel's server are left out:
/// it is public and must not get the token, but every spec or lock with packages of conda-forge names it.
fn named(packages: &Packages) -> Vec<String> {
    let bundle = packages.bundle.iter().map(|bundle| bundle.url.as_str());
    let named = packages.channels.iter().chain(&packages.mirror).map(String::as_str).chain(bundle);
    // A lock that can't be read names no URL here; installing it reports the error.
    let locked = packages.lock.iter().flat_map(|lock| lock_urls(lock).unwrap_or_default());
    let server =
        |url: &str| Url::parse(url).ok().and_then(|url| Some(url.host_str()?.trim_end_matches('.').to_owned()));
    let public = server(DEFAULT_CHANNEL);
    named.map(str::to_owned).chain(locked).filter(|url| server(url) != public).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::BundleSource;

    #[test]
    fn the_token_goes_to_the_servers_that_the_spec_names() {
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
    fn the_token_never_goes_to_the_default_channel_even_if_the_spec_names_it() {
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
