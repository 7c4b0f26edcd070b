//! Where the packages come from: what can be checked without asking anybody.

use crate::{
    api::{BundleSource, Finding, Packages},
    error_chain,
    packages::{check_glibc, check_lock, check_spec},
};

/// In the CRD; a URL by its scheme.
pub(in crate::api) const URL: &str = "^(https?|file)://.+$";
/// In the CRD; what [`sha256`] takes.
pub(in crate::api) const SHA256: &str = "^[0-9a-f]{64}$";
/// In the CRD; what [`check_glibc`] takes.
pub(in crate::api) const GLIBC: &str = r"^[0-9]+(\.[0-9]+)+$";
/// In the CRD; [`PLATFORMS`].
pub(in crate::api) const PLATFORM: &str = "^linux-(64|aarch64)$";
const PLATFORMS: [&str; 2] = ["linux-64", "linux-aarch64"];

pub(super) fn validate(packages: &Packages, wrong: &mut Vec<Finding>) {
    let asks = !(packages.channels.is_empty() && packages.specs.is_empty());
    if packages.bundle.is_some() && (asks || packages.lock.is_some()) {
        let problem = "has a bundle and something else: a bundle holds a whole package set";
        wrong.push(Finding::new("spec.packages", problem));
    } else if packages.lock.is_some() && asks {
        let problem = "has a lock and channels or specs: a lock names every package already";
        wrong.push(Finding::new("spec.packages", problem));
    }
    if let Some(source) = &packages.bundle {
        bundle(source, wrong);
    }
    // Against the platforms that can be one: what is wrong with the others is said below.
    let platforms: Vec<_> = packages.platforms.iter().filter(|name| is_platform(name)).cloned().collect();
    if let Some(Err(error)) = packages.lock.as_deref().map(|lock| check_lock(lock, &platforms)) {
        wrong.push(Finding::new("spec.packages.lock", error_chain(&error)));
    }
    if packages.refresh.as_ref().is_some_and(|word| word.trim().is_empty()) {
        let problem = "is empty: write any word, such as a date, or leave it out";
        wrong.push(Finding::new("spec.packages.refresh", problem));
    }
    if let Some(mirror) = &packages.mirror {
        if !is_url(mirror) {
            wrong.push(Finding::new("spec.packages.mirror", "is not an http, https or file URL"));
        } else if mirror.contains(['?', '#']) {
            let problem = "has a query or a fragment: the channels' paths are put behind it";
            wrong.push(Finding::new("spec.packages.mirror", problem));
        }
    }
    if packages.keep == Some(0) {
        let problem = "is 0: the environment in use is kept always, so write at least 1";
        wrong.push(Finding::new("spec.packages.keep", problem));
    }
    for (index, url) in packages.channels.iter().enumerate().filter(|(_, url)| !is_url(url)) {
        let finding = Finding::new(
            format!("spec.packages.channels[{index}]"),
            format!("{url:?} is not an http, https or file URL"),
        );
        wrong.push(match url.contains([':', '/', '.']) || url.is_empty() {
            true => finding,
            false => finding.with_remedy(format!("write https://conda.anaconda.org/{url}")),
        });
    }
    for (index, spec) in packages.specs.iter().enumerate() {
        if let Err(reason) = check_spec(spec) {
            wrong.push(Finding::new(format!("spec.packages.specs[{index}]"), reason));
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

fn bundle(BundleSource { url, sha256 }: &BundleSource, wrong: &mut Vec<Finding>) {
    if !is_url(url) {
        wrong.push(Finding::new("spec.packages.bundle.url", format!("{url:?} is not an http, https or file URL")));
    }
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
