//! Checks `spec.packages`, without any network access.

use api::{BundleSource, Finding, Packages, rules::PLATFORMS};
use base::{
    error_chain,
    redact::{of_directory, redacted, url_with_credentials, with_hidden_credentials},
};
use locks::{
    check_lock, credentials_remedy,
    question::{check_glibc, check_spec},
};

/// Returns what is wrong with the URL at `field` of the spec, if anything.
fn url(field: &str, given: &str) -> Option<Finding> {
    credentials_in(field, given).or_else(|| no_url(field, given))
}

/// As [`url`], for a URL to which paths are appended: its last part is a directory, so it may be the TOKEN of conda's
/// `/t/TOKEN/`.
fn base(field: &str, given: &str) -> Option<Finding> {
    let has_more = || {
        let problem = format!(
            "{:?} has a query or a fragment: remove it, because paths are appended to the URL",
            redacted(given)
        );
        (is_url(given) && given.contains(['?', '#'])).then(|| Finding::new(field, problem))
    };
    credentials_in(field, &of_directory(given)).or_else(has_more).or_else(|| no_url(field, given))
}

fn credentials_in(field: &str, url: &str) -> Option<Finding> {
    let safe = url_with_credentials(url).or_else(|| with_hidden_credentials(url))?;
    let problem = format!(
        "{safe} has credentials, which everyone with read access to the FluxInstance or ConfigMap flux-packages could see"
    );
    Some(Finding::new(field, problem).with_remedy(credentials_remedy()))
}

fn no_url(field: &str, given: &str) -> Option<Finding> {
    // Without a scheme, `redacted` can't find the credentials before the `@`, so the message doesn't quote the text.
    let shown = if given.contains('@') { "it".to_owned() } else { format!("{:?}", redacted(given)) };
    if let Ok(url) = url::Url::parse(given)
        && url.scheme() == "file"
        && let Some(host) = url.host_str()
    {
        let problem = format!("{shown} names the machine {host:?}, but each node looks on its own disk");
        return Some(Finding::new(field, problem).with_remedy("write three slashes: file:///PATH"));
    }
    (!is_url(given)).then(|| Finding::new(field, format!("{shown} is not an http, https or file URL")))
}

pub(super) fn validate(packages: &Packages, wrong: &mut Vec<Finding>) {
    let asks = !(packages.channels.is_empty() && packages.specs.is_empty());
    if packages.bundle.is_some() && (asks || packages.lock.is_some()) {
        let problem = "has a bundle and channels, specs or a lock: a bundle holds a whole package set";
        wrong.push(Finding::new("spec.packages", problem));
    } else if packages.lock.is_some() && asks {
        let problem = "has a lock and channels or specs: a lock names every package already";
        wrong.push(Finding::new("spec.packages", problem));
    }
    if let Some(source) = &packages.bundle {
        bundle(source, wrong);
    }
    // Check the lock only against valid platform names; the invalid ones get a finding of their own below.
    let platforms: Vec<_> = packages.platforms.iter().filter(|name| is_platform(name)).cloned().collect();
    if let Some(Err(error)) = packages.lock.as_deref().map(|lock| check_lock(lock, &platforms)) {
        wrong.push(Finding::new("spec.packages.lock", error_chain(&error)));
    }
    if packages.refresh.as_ref().is_some_and(|value| value.trim().is_empty()) {
        let problem = "is empty: write any text, such as a date, or leave it out";
        wrong.push(Finding::new("spec.packages.refresh", problem));
    }
    wrong.extend(packages.mirror.as_ref().and_then(|mirror| base("spec.packages.mirror", mirror)));
    if packages.keep == Some(0) {
        let problem = "is 0: the environment in use is always kept, so write at least 1";
        wrong.push(Finding::new("spec.packages.keep", problem));
    }
    for (index, channel) in packages.channels.iter().enumerate() {
        let finding = base(&format!("spec.packages.channels[{index}]"), channel);
        wrong.extend(finding.map(|finding| match channel.contains([':', '/', '.', '@']) || channel.is_empty() {
            true => finding,
            false => finding.with_remedy(format!("write https://conda.anaconda.org/{channel}")),
        }));
    }
    for (index, spec) in packages.specs.iter().enumerate() {
        if let Err(error) = check_spec(spec) {
            wrong.push(Finding::new(format!("spec.packages.specs[{index}]"), error.to_string()));
        }
    }
    for (index, platform) in packages.platforms.iter().enumerate().filter(|(_, name)| !is_platform(name)) {
        let problem = format!("{platform:?} is neither {}", PLATFORMS.join(" nor "));
        wrong.push(Finding::new(format!("spec.packages.platforms[{index}]"), problem));
    }
    if let Some(glibc) = packages.glibc.as_deref().filter(|glibc| !check_glibc(glibc)) {
        wrong.push(Finding::new("spec.packages.glibc", format!("{glibc:?} is not a version such as 2.28")));
    }
}

fn bundle(BundleSource { url: source, sha256 }: &BundleSource, wrong: &mut Vec<Finding>) {
    wrong.extend(url("spec.packages.bundle.url", source));
    let is_digest = sha256.len() == 64 && sha256.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c));
    if !is_digest {
        let problem =
            "is not 64 hex digits in lower case: take what `flux-distribute bundle create` or sha256sum prints";
        wrong.push(Finding::new("spec.packages.bundle.sha256", problem));
    }
}

fn is_url(url: &str) -> bool {
    let has_scheme = ["http://", "https://", "file://"].iter().any(|scheme| url.starts_with(scheme));
    has_scheme && url::Url::parse(url).is_ok()
}

fn is_platform(name: &str) -> bool {
    PLATFORMS.contains(&name)
}
