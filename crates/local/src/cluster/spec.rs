//! The spec of the first FluxInstance, from the options of `local up`.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use futures::TryStreamExt;
use sha2::{Digest, Sha256};
use url::Url;

use super::{check, options::Up, root::IMAGE};
use crate::error::{Context, LocalError};
use api::FluxInstanceSpec;
use base::{error_chain, redact::redacted};

/// The FluxInstance's spec: the file's content, overridden by the options.
pub(crate) async fn from_options(up: &Up) -> Result<FluxInstanceSpec, LocalError> {
    let mut spec = match &up.instance {
        None => FluxInstanceSpec::default(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| LocalError::Usage(format!("can't read {}: {error}", file.display())))?;
            let wrong = |findings: Vec<api::Finding>| match findings.as_slice() {
                [_] => api::by_line(file, &findings),
                _ => format!("{} is invalid:\n{}", file.display(), api::by_line(file, &findings)),
            };
            model::read::read_instance(&text).map_err(|findings| LocalError::Usage(wrong(findings)))?
        }
    };
    if let Some(given) = &up.bundle {
        let url = source(given)?;
        let sha256 = match &up.sha256 {
            Some(given) => given.to_ascii_lowercase(),
            None => digest(&url).await?,
        };
        spec.packages.bundle = Some(api::BundleSource { url: url.to_string(), sha256 });
    }
    if !up.channel.is_empty() {
        let channels = up.channel.iter().map(|given| Ok(source(given)?.to_string().trim_end_matches('/').to_owned()));
        spec.packages.channels = channels.collect::<Result<_, LocalError>>()?;
    }
    if !up.spec.is_empty() {
        spec.packages.specs.clone_from(&up.spec);
    }
    spec.pods.enabled |= up.pods;
    if up.topology.is_some() {
        spec.topology.clone_from(&up.topology);
    }
    Ok(spec)
}

/// Returns a URL unchanged, and converts the path of a file or directory on this machine to a URL.
fn source(given: &str) -> Result<Url, LocalError> {
    if given.contains("://") {
        return Url::parse(given).map_err(|error| LocalError::Usage(format!("{given} is not a URL: {error}")));
    }
    let path = Path::new(given).canonicalize();
    let path = path.map_err(|error| LocalError::Usage(format!("can't find {given}: {error}")))?;
    Url::from_file_path(&path).map_err(|()| LocalError::Usage(format!("{given} can't be written as a URL")))
}

/// The sha256 of the bundle at `url` as it is now. A download is checked as thoroughly as a bundle on this machine.
async fn digest(url: &Url) -> Result<String, LocalError> {
    let failed = || format!("can't read {}{}", redacted(url.as_str()), check::through(url.as_str()));
    if let Ok(path) = url.to_file_path() {
        return sha256_of(&path);
    }
    let usage =
        |error: reqwest::Error| LocalError::Usage(format!("{}: {}", failed(), error_chain(&error.without_url())));
    let response = check::client(url.as_str())?.get(url.clone()).send().await.map_err(usage)?;
    let mut chunks = response.error_for_status().map_err(usage)?.bytes_stream();
    let (mut sha256, mut file) = (Sha256::new(), tempfile::NamedTempFile::new().context(failed)?);
    while let Some(chunk) = chunks.try_next().await.map_err(usage)? {
        sha256.update(&chunk);
        file.write_all(&chunk).context(failed)?;
    }
    let sha256 = hex::encode(sha256.finalize());
    let (wanted, shown) = (sha256.clone(), redacted(url.as_str()));
    let inspected = tokio::task::spawn_blocking(move || {
        let path = file.path().display().to_string();
        check::inspect(file.path(), &wanted).map_err(|error| error_chain(&error).replace(&path, &shown))
    });
    inspected.await.context(failed)?.map_err(LocalError::Usage)?;
    Ok(sha256)
}

/// The sha256 of a file, in hex.
pub(crate) fn sha256_of(path: &Path) -> Result<String, LocalError> {
    let unread = |error: io::Error| LocalError::Usage(format!("can't read {}: {error}", path.display()));
    let mut sha256 = Sha256::new();
    let (mut file, mut buffer) = (File::open(path).map_err(unread)?, vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(unread)? {
            0 => break,
            length => sha256.update(&buffer[..length]),
        }
    }
    Ok(hex::encode(sha256.finalize()))
}

/// The paths of this machine that nodes must see. Those below /usr are visible anyway.
pub(crate) fn shown(spec: &FluxInstanceSpec) -> Result<Vec<PathBuf>, LocalError> {
    let urls = spec.packages.channels.iter().chain(spec.packages.bundle.as_ref().map(|bundle| &bundle.url));
    let mut shown = Vec::new();
    for url in urls.filter(|url| url.starts_with("file:")) {
        let path = Url::parse(url).ok().and_then(|url| url.to_file_path().ok());
        let path = path.ok_or_else(|| LocalError::Usage(format!("{url} is not the URL of a file")))?;
        if path.starts_with(IMAGE) {
            // The path exists only on the nodes.
            continue;
        }
        // In a node's root, symlinks on the way would lead elsewhere.
        if path.canonicalize().ok().as_ref() != Some(&path) {
            return Err(LocalError::Usage(format!(
                "{url} does not exist, or its path contains symlinks; give the real path"
            )));
        }
        if !path.starts_with("/usr") {
            shown.push(path);
        }
    }
    Ok(shown)
}
