//! Checks whether the packages are available before anything is started, because a wrong source won't fix itself later.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use reqwest::StatusCode;
use serde_json::Value;
use url::Url;

use super::proxy;
use crate::error::{Context, LocalError};
use api::{BundleSource, DEFAULT_CHANNEL, Packages};
use base::{error_chain, redact::redacted};
use locks::lock_urls;
use packages::{BundleError, InspectBundle, OutputFormat, native_platform};

/// Timeout for a source to answer.
const LIMIT: Duration = Duration::from_secs(2);
/// The index files of a channel, of which any one suffices; not every channel has the smaller one.
const INDEXES: [&str; 2] = ["repodata.json.zst", "repodata.json"];

/// The result of checking the packages' source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// It answers, and what was checked is right.
    Good,
    /// It doesn't answer, which may change.
    Unreachable(String),
    /// It is unusable, and won't change by itself.
    Wrong(String),
}

/// What the nodes are to run.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flux {
    /// Flux; or a stand-in without jobs if conda-forge can't be reached
    Auto,
    /// Flux, or fail
    Required,
    /// The stand-in, without jobs
    None,
}

/// What to install on the nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// What the spec says.
    Packages,
    /// The stand-in, for this reason.
    StandIn(String),
    /// Nothing, for this reason.
    Refuse(String),
}

/// Decides what to install. `is_named`: the user named the source. `waits`: the command waits until the nodes are
/// online.
pub(crate) fn choose(flux: Flux, source: Source, is_named: bool, waits: bool) -> Choice {
    const REMEDIES: &str = "give a bundle (--bundle FILE|URL; `flux-distribute bundle create` makes one on a machine with Flux or \
                            internet access) or a channel (--channel DIR|URL)";
    match (flux, source) {
        (Flux::None, _) => Choice::StandIn("--flux none asks for it".to_owned()),
        (_, Source::Good) => Choice::Packages,
        (_, Source::Wrong(why)) => Choice::Refuse(why),
        (Flux::Auto, Source::Unreachable(why)) if !is_named => Choice::StandIn(format!("{why}; for Flux, {REMEDIES}")),
        // The source may be up by the time a node needs it.
        (_, Source::Unreachable(_)) if !waits => Choice::Packages,
        (_, Source::Unreachable(why)) if is_named => Choice::Refuse(why),
        (_, Source::Unreachable(why)) => {
            Choice::Refuse(format!("{why}; {REMEDIES}, or run without Flux (--flux none)"))
        }
    }
}

/// Checks the source that `packages` names, for nodes like this machine. `ask_servers`: check servers too, not only
/// files.
///
/// # Errors
/// The check itself failed, which says nothing about the source.
pub(crate) async fn check_source(packages: &Packages, ask_servers: bool) -> Result<Source, LocalError> {
    if let Some(bundle) = &packages.bundle {
        return check_bundle(bundle, ask_servers).await;
    }
    if let Some(lock) = &packages.lock {
        // The lock was parsed when the spec was checked.
        let urls = lock_urls(lock).unwrap_or_default();
        return Ok(if packages.mirror.is_some() { Source::Good } else { check_archives(&urls, ask_servers).await? });
    }
    let default = [DEFAULT_CHANNEL.to_owned()];
    let channels = if packages.channels.is_empty() { &default } else { packages.channels.as_slice() };
    for channel in channels {
        let found = check_channel(channel, ask_servers).await?;
        if found != Source::Good {
            return Ok(found);
        }
    }
    Ok(Source::Good)
}

async fn check_bundle(bundle: &BundleSource, ask_servers: bool) -> Result<Source, LocalError> {
    let Some(path) = file_of(&bundle.url) else { return get(std::slice::from_ref(&bundle.url), ask_servers).await };
    let wanted = bundle.sha256.to_ascii_lowercase();
    let inspected = tokio::task::spawn_blocking(move || inspect(&path, &wanted)).await;
    Ok(inspected
        .context(|| "the check of the bundle panicked".to_owned())?
        .map_or_else(|error| Source::Wrong(error_chain(&error)), |()| Source::Good))
}

/// Why a host like this machine would not install a bundle.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Description(#[from] serde_json::Error),
    #[error("{} has sha256 {found}, but {wanted} is expected", path.display())]
    Sha256 { path: PathBuf, found: String, wanted: String },
    #[error("{} is for {platforms}, but this machine is {}", path.display(), native_platform())]
    Platform { path: PathBuf, platforms: String },
}

/// Checks whether a host like this machine would install the bundle at `path`.
///
/// # Errors
/// If it wouldn't.
pub(crate) fn inspect(path: &Path, wanted: &str) -> Result<(), Unfit> {
    let inspection = InspectBundle { file: path.to_owned(), output: OutputFormat::Json };
    let found: Value = serde_json::from_str(&inspection.run()?)?;
    let sha256 = found["sha256"].as_str().unwrap_or_default();
    if sha256 != wanted {
        return Err(Unfit::Sha256 { path: path.to_owned(), found: sha256.to_owned(), wanted: wanted.to_owned() });
    }
    let manifest = &found["manifest"];
    let platforms = manifest["platforms"].as_array().map_or(std::slice::from_ref(&manifest["platform"]), Vec::as_slice);
    if !platforms.iter().any(|platform| platform == native_platform()) {
        let platforms: Vec<_> = platforms.iter().filter_map(Value::as_str).collect();
        return Err(Unfit::Platform { path: path.to_owned(), platforms: platforms.join(" and ") });
    }
    Ok(())
}

async fn check_channel(channel: &str, ask_servers: bool) -> Result<Source, LocalError> {
    let indexes = ["noarch", native_platform()]
        .into_iter()
        .flat_map(|platform| INDEXES.map(|index| format!("{}/{platform}/{index}", channel.trim_end_matches('/'))));
    let indexes: Vec<String> = indexes.collect();
    let Some(directory) = file_of(channel) else { return get(&indexes, ask_servers).await };
    if indexes.iter().filter_map(|index| file_of(index)).any(|index| index.is_file()) {
        return Ok(Source::Good);
    }
    let (directory, platform) = (directory.display(), native_platform());
    Ok(Source::Wrong(format!(
        "{directory} is not a conda channel: it has neither noarch/repodata.json nor {platform}/repodata.json"
    )))
}

/// Checks every file on this machine, and one archive on each server.
async fn check_archives(urls: &[String], ask_servers: bool) -> Result<Source, LocalError> {
    let mut servers = std::collections::BTreeSet::new();
    for url in urls {
        let found = match file_of(url) {
            Some(path) => match std::fs::File::open(&path) {
                Ok(_) => Source::Good,
                Err(error) => Source::Wrong(format!("the lock names {}, which can't be read: {error}", path.display())),
            },
            None if servers.insert(host_of(url)) => get(std::slice::from_ref(url), ask_servers).await?,
            None => Source::Good,
        };
        if found != Source::Good {
            return Ok(found);
        }
    }
    Ok(Source::Good)
}

fn host_of(url: &str) -> Option<String> {
    Some(Url::parse(url).ok()?.host_str()?.to_owned())
}

fn file_of(url: &str) -> Option<PathBuf> {
    Url::parse(url).ok().filter(|url| url.scheme() == "file")?.to_file_path().ok()
}

/// Checks whether one of `urls` exists, without reading its content.
async fn get(urls: &[String], ask_servers: bool) -> Result<Source, LocalError> {
    if !ask_servers {
        return Ok(Source::Good);
    }
    let mut last = Source::Good;
    for url in urls {
        let client = match client(url) {
            Ok(client) => client,
            Err(LocalError::Usage(why)) => {
                return Ok(Source::Unreachable(format!("can't reach {}: {why}", redacted(url))));
            }
            Err(error) => return Err(error),
        };
        last = match tokio::time::timeout(LIMIT, client.get(url).send()).await {
            Ok(Ok(answer)) => source_of_status(url, answer.status()),
            Ok(Err(error)) => Source::Unreachable(unreachable(url, &innermost(&error.without_url()))),
            Err(_) => Source::Unreachable(unreachable(url, &format!("no answer within {} s", LIMIT.as_secs()))),
        };
        if !matches!(last, Source::Wrong(_)) {
            break;
        }
    }
    Ok(last)
}

fn source_of_status(url: &str, status: StatusCode) -> Source {
    if status.is_success() {
        Source::Good
    } else if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        Source::Unreachable(unreachable(url, &status.to_string()))
    } else {
        Source::Wrong(unreachable(url, &status.to_string()))
    }
}

fn unreachable(url: &str, why: &str) -> String {
    format!("can't reach {}{}: {why}", redacted(url), through(url))
}

/// The proxy to `url`, for an error message: without the credentials that its variable may hold.
pub(crate) fn through(url: &str) -> String {
    let proxy = url.parse().ok().and_then(|url| proxy::upstream(&url).ok()?);
    let named = proxy.map(|proxy| format!(" through the proxy {} (NO_PROXY names hosts that need none)", proxy.uri()));
    named.unwrap_or_default()
}

/// The innermost cause, which says what happened; the outer ones only say that the request failed.
fn innermost(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error).to_string()
}

/// A client for `url`, which uses the same proxy as the nodes.
///
/// # Errors
/// [`LocalError::Usage`] if that proxy can't be used.
pub(crate) fn client(url: &str) -> Result<reqwest::Client, LocalError> {
    let proxy = proxy::upstream(&url.parse().unwrap_or_default()).map_err(LocalError::Usage)?;
    let mut client = reqwest::Client::builder().connect_timeout(LIMIT).read_timeout(LIMIT * 15);
    if proxy.is_none() {
        client = client.no_proxy();
    }
    client.build().context(|| "can't make a client for the packages' source".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stand_in_is_chosen_only_if_the_user_named_no_source() {
        let gone = || Source::Unreachable("can't reach it".to_owned());
        let wrong = || Source::Wrong("it is no bundle".to_owned());
        for (flux, source, is_named, waits, expected) in [
            (Flux::Auto, Source::Good, false, true, "packages"),
            (Flux::Auto, gone(), false, true, "stand-in can't reach it; for Flux, give a bundle"),
            (Flux::Auto, gone(), false, false, "stand-in can't reach it; for Flux, give a bundle"),
            (Flux::Auto, gone(), true, true, "refuse can't reach it"),
            (Flux::Auto, gone(), true, false, "packages"),
            (Flux::Auto, wrong(), true, false, "refuse it is no bundle"),
            (Flux::Required, gone(), false, true, "refuse can't reach it; give a bundle"),
            (Flux::Required, Source::Good, true, true, "packages"),
            (Flux::None, Source::Good, true, true, "stand-in --flux none"),
            (Flux::None, wrong(), true, true, "stand-in --flux none"),
        ] {
            let chosen = match choose(flux, source.clone(), is_named, waits) {
                Choice::Packages => "packages".to_owned(),
                Choice::StandIn(why) => format!("stand-in {why}"),
                Choice::Refuse(why) => format!("refuse {why}"),
            };
            assert!(chosen.starts_with(expected), "{flux:?} {source:?} {is_named} {waits}: {chosen}");
        }
    }

    #[test]
    fn permanent_http_errors_are_distinguished_from_temporary_ones() {
        for (status, is_wrong) in [(404, true), (403, true), (410, true), (500, false), (503, false), (429, false)] {
            let found = source_of_status("http://a/b", StatusCode::from_u16(status).unwrap());
            assert_eq!(matches!(found, Source::Wrong(_)), is_wrong, "{status}");
        }
        assert_eq!(source_of_status("http://a/b", StatusCode::OK), Source::Good);
    }
}
