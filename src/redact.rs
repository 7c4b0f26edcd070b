//! The last door before the log: URLs lose what may be a secret, whoever wrote the line. Libraries write the URLs they ask.

use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;

/// Environment variable: how much is logged, in tracing's words. Every process of ours hands it on to those it starts.
pub(crate) const LOG_VARIABLE: &str = "FLUX_DISTRIBUTE_LOG";

/// Makes writers to standard error that show no password, no conda token and no query of a URL.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stderr;

impl MakeWriter<'_> for Stderr {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

impl Write for Stderr {
    // The subscriber writes each event in one piece.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(redacted(&String::from_utf8_lossy(line)).as_bytes()).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Whether a segment of a URL's path is conda's token, `/t/<token>/`: never in a file's path, and never a file's name.
pub(crate) fn is_token(scheme: &str, before: &str, segment: &str) -> bool {
    scheme != "file" && before == "t" && !segment.is_empty() && !segment.contains('.')
}

/// `text` without user and password, `/t/<token>`, and query of the URLs in it.
pub fn redacted(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        safe.push_str(before);
        let scheme = &before[..at];
        let scheme = scheme.rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        let end = after.find(|c: char| c.is_whitespace() || "\"'`<>()[]{}\\,;".contains(c)).unwrap_or(after.len());
        let (url, next) = after.split_at(end);
        push_url(&mut safe, scheme, url);
        rest = next;
    }
    safe + rest
}

/// What stands behind a URL's `://`.
fn push_url(safe: &mut String, scheme: &str, url: &str) {
    let (url, query) = url.split_once('?').map_or((url, false), |(url, _)| (url, true));
    let (authority, path) = url.find('/').map_or((url, ""), |at| url.split_at(at));
    if let Some((_, host)) = authority.rsplit_once('@') {
        safe.push_str("***@");
        safe.push_str(host);
    } else {
        safe.push_str(authority);
    }
    let mut before = "";
    for (place, segment) in path.split('/').enumerate() {
        if place > 0 {
            safe.push('/');
        }
        safe.push_str(if is_token(scheme, before, segment) { "***" } else { segment });
        before = segment;
    }
    if query {
        safe.push_str("?***");
    }
}

#[cfg(test)]
mod tests {
    use super::redacted;

    #[test]
    fn a_line_of_a_library_shows_no_secret_of_a_url() {
        for (line, safe) in [
            ("GET 'http://me:s3cret@h:8/t/tk-1/linux-64/x.zst': no", "GET 'http://***@h:8/t/***/linux-64/x.zst': no"),
            ("(https://h/t/tk-1) and https://h/x?sig=1, twice", "(https://h/t/***) and https://h/x?***, twice"),
            ("http://h/conda/t/tk-1/noarch", "http://h/conda/t/***/noarch"),
            // No token: a directory, a file, and nothing at all.
            ("file:///srv/t/x and no://", "file:///srv/t/x and no://"),
            ("http://h/t/flux.tar.gz", "http://h/t/flux.tar.gz"),
            ("(url=http://h/t/)", "(url=http://h/t/)"),
            ("http://a@b@h/x", "http://***@h/x"),
            ("nothing here: a/t/b?c", "nothing here: a/t/b?c"),
        ] {
            assert_eq!(redacted(line), safe);
        }
    }
}
