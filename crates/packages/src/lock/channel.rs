//! A channel of a question, and where it is read.

use std::{fs::File, io, os::fd::AsRawFd, path::PathBuf};

use base::redact::{shown, stripped};
use rattler_conda_types::{Channel, RepoDataRecord};
use url::Url;

use crate::SolveError;

/// A channel as it was given, and as it is read.
pub(crate) struct Source {
    pub given: Url,
    pub read: Channel,
    /// Keeps `/proc/self/fd/N` in `read` alive.
    _directory: Option<File>,
}

impl Source {
    pub(crate) fn new(given: &str, host_dir: &impl Fn(&str) -> io::Result<File>) -> Result<Self, SolveError> {
        let not_a_channel = || SolveError::NotAChannel { channel: shown(given) };
        let url = Url::parse(given.trim_end_matches('/')).map_err(|_| not_a_channel())?;
        // It is written into the lock.
        let url = stripped(&url);
        match url.scheme() {
            "http" | "https" if url.has_host() => {
                Ok(Self { read: Channel::from_url(url.clone()), given: url, _directory: None })
            }
            "file" => {
                let unreadable = |e: io::Error| SolveError::Channel { channel: shown(given), reason: e.to_string() };
                let path = url.to_file_path().map_err(|()| not_a_channel())?;
                let directory = host_dir(&path.to_string_lossy()).map_err(unreadable)?;
                let open = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
                let read = Channel::try_from_directory(&open).map_err(|_| not_a_channel())?;
                Ok(Self { given: url, read, _directory: Some(directory) })
            }
            _ => Err(not_a_channel()),
        }
    }

    /// Puts the channel that was given in the place of the one that was read.
    pub(crate) fn restore(&self, record: &mut RepoDataRecord) {
        let Some(below) = record.url.as_str().strip_prefix(self.read.base_url.as_str()) else {
            return;
        };
        let given = self.given.as_str().trim_end_matches('/');
        if let Ok(url) = Url::parse(&format!("{given}/{}", below.trim_start_matches('/'))) {
            record.url = url;
            record.channel = Some(format!("{given}/"));
        }
    }
}
