//! Removes credentials from URLs just before a line is logged. Libraries log the URLs they request, so every line
//! passes here.

use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;
use url::Url;

/// Environment variable with the log filter, in tracing's syntax. Each of our processes passes it on to its children.
pub const LOG_VARIABLE: &str = "FLUX_DISTRIBUTE_LOG";

/// Makes writers to standard error that mask the passwords, conda tokens and queries of URLs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stderr;

impl MakeWriter<'_> for Stderr {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

impl Write for Stderr {
    // Safe for URLs, because the subscriber writes each event in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(redacted(&String::from_utf8_lossy(line)).as_bytes()).map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Lower-case parts of the names of query parameters that grant access to whoever has the URL: tokens, and the
/// signatures of object stores. A false match costs little, because such a URL is refused with a remedy; a missed
/// secret leaks.
pub const SECRET_WORDS: [&str; 15] = [
    "auth",
    "code",
    "credential",
    "hash",
    "hdnts",
    "hmac",
    "jwt",
    "key",
    "md5",
    "pass",
    "pwd",
    "secret",
    "session",
    "sig",
    "token",
];

/// True if a segment of a URL's path is a conda token, `/t/<token>/`. A `file:` URL has none, and no file name is one.
fn is_token(scheme: &str, before: &str, segment: &str, is_last: bool) -> bool {
    scheme != "file" && before == "t" && !segment.is_empty() && !(is_last && segment.contains('.'))
}

/// `path` with `***` for each segment that is a conda token, or holds one for a server that decodes the path before it
/// splits it at slashes, such as the segment of `/a%2Ft%2F<token>/`. The first segment is the host, or empty.
fn masked(scheme: &str, path: &str) -> String {
    let segments: Vec<_> = path.split('/').collect();
    let last = segments.len() - 1;
    // What leads to a part. Servers take two slashes for one, and go one up at `..`.
    let mut above: Vec<String> = Vec::new();
    let mut masked = Vec::with_capacity(segments.len());
    for (at, segment) in segments.into_iter().enumerate() {
        let decoded = decoded(segment);
        let parts: Vec<_> = decoded.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        let mut is_hidden = false;
        for (number, part) in parts.iter().enumerate() {
            if *part == ".." {
                above.pop();
                continue;
            }
            let before = above.last().map_or("", String::as_str);
            is_hidden |= is_token(scheme, before, part, at == last && number + 1 == parts.len());
            // A host named `t` does not make the next segment a token.
            if at > 0 {
                above.push((*part).to_owned());
            }
        }
        masked.push(if is_hidden { "***" } else { segment });
    }
    masked.join("/")
}

/// Positions of conda tokens among the segments of a URL's path, which begins with a slash.
pub fn token_positions(scheme: &str, path: &str) -> impl Iterator<Item = usize> {
    let segments: Vec<_> = path.split('/').collect();
    let is_here = |at: &usize| is_token(scheme, segments[at - 1], segments[*at], at + 1 == segments.len());
    (2..segments.len()).filter(is_here).collect::<Vec<_>>().into_iter()
}

/// True if a query, such as `a=b&sig=c`, has a parameter with a credential.
pub fn is_secret_query(query: &str) -> bool {
    url::form_urlencoded::parse(query.as_bytes()).any(|(name, _)| {
        let name = name.to_ascii_lowercase();
        SECRET_WORDS.iter().any(|word| name.contains(word))
    })
}

/// How many times a text may be percent-encoded: more than any server decodes.
const MOST_ENCODINGS: usize = 8;

/// `text` without percent-encoding, also where that was encoded once more.
pub fn decoded(text: &str) -> String {
    let mut text = text.to_owned();
    for _ in 0..MOST_ENCODINGS {
        match percent_encoding::percent_decode_str(&text).decode_utf8_lossy() {
            once if once.len() < text.len() => text = once.into_owned(),
            _ => break,
        }
    }
    text
}

/// `text` with user and password, conda token and query of each URL in it masked.
pub fn redacted(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let rest = each_url(text, |before, url| {
        safe.push_str(before);
        url.push_to(&mut safe);
    });
    safe + rest
}

/// `url` as that of a directory, with one slash at its end: a token in the last place of a channel's URL is no file's name, and is found.
pub fn of_directory(url: &str) -> String {
    format!("{}/", url.trim_end_matches('/'))
}

/// The first URL in `text` that holds a credential, masked as by [`redacted`].
pub fn url_with_credentials(text: &str) -> Option<String> {
    let mut found = None;
    each_url(text, |_, url| {
        if found.is_none() && url.has_credentials() {
            let mut safe = format!("{}://", url.scheme);
            url.push_to(&mut safe);
            found = Some(safe);
        }
    });
    found
}

/// `url` without user, password, conda's `/t/<token>`, and a query that lets in.
pub fn stripped(url: &Url) -> Url {
    take_apart(url).0
}

/// User and password of a URL, without its encoding.
pub type User = Option<(String, String)>;
/// conda's token in a URL's path, and the segments before it.
pub type PathToken = Option<(Vec<String>, String)>;

/// `url` without what lets in, and what that is.
pub fn take_apart(url: &Url) -> (Url, User, PathToken) {
    let mut plain = url.clone();
    let text = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    let has_user = !url.username().is_empty() || url.password().is_some();
    let user = has_user.then(|| (text(url.username()), text(url.password().unwrap_or_default())));
    // Both fail only for URLs that can't have them.
    let _ = plain.set_username("");
    let _ = plain.set_password(None);
    if url.query().is_some_and(is_secret_query) {
        plain.set_query(None);
    }
    let path = url.path().split('/').map(str::to_owned).collect::<Vec<_>>();
    let Some(at) = token_positions(url.scheme(), url.path()).next() else { return (plain, user, None) };
    let (before, rest) = (&path[..at - 1], &path[at + 1..]);
    plain.set_path(&[before, rest].concat().join("/"));
    let before = before.iter().filter(|segment| !segment.is_empty()).cloned().collect();
    (plain, user, Some((before, path[at].clone())))
}

/// `url` as it may be shown, if whatever asks for it would find a credential in it: a parser of URLs takes more for one than a reader
/// of the text, such as `https:///USER:PASSWORD@HOST/`.
pub fn with_hidden_credentials(url: &str) -> Option<String> {
    let url = Url::parse(url).ok()?;
    (stripped(&url) != url).then(|| shown(url.as_str()))
}

/// `url` as it may be shown: without user, password, query, and conda's `/t/<token>/`.
pub fn shown(url: &str) -> String {
    let mut url = match Url::parse(url) {
        Ok(parsed) if !parsed.cannot_be_a_base() => parsed,
        // A mere name, most likely; what looks like more may hold a secret.
        _ if !url.contains(['/', '@', ':']) => return url.to_owned(),
        _ => return "(not a URL)".to_owned(),
    };
    // Both fail only for URLs that can't have them.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    let path = masked(url.scheme(), url.path());
    url.set_path(&path);
    url.to_string()
}

/// Calls `see` with each URL in `text`, and what is between it and the one before, its scheme and `://` included. Returns
/// what follows the last one.
fn each_url<'a>(text: &'a str, mut see: impl FnMut(&'a str, Pieces<'a>)) -> &'a str {
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        let scheme = before[..at].rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        let (url, next) = Pieces::at_start_of(scheme, after);
        see(before, url);
        rest = next;
    }
    rest
}

/// The parts of a URL after `://`.
struct Pieces<'a> {
    scheme: &'a str,
    user: Option<&'a str>,
    /// Host, port and path.
    place: &'a str,
    query: Option<&'a str>,
}

impl<'a> Pieces<'a> {
    fn at_start_of(scheme: &'a str, text: &'a str) -> (Self, &'a str) {
        let is_end = |c: char| c.is_whitespace() || "\"`<>{}\\".contains(c);
        let authority = &text[..text.find(|c| is_end(c) || "/?#".contains(c)).unwrap_or(text.len())];
        // A password may contain characters that would end a URL elsewhere.
        let (user, text) = match authority.rfind('@') {
            Some(at) => (Some(&text[..at]), &text[at + 1..]),
            None => (None, text),
        };
        // An IPv6 address is in brackets, which would otherwise end the URL.
        let host = match text.strip_prefix('[').and_then(|host| host.find(|c| is_end(c) || "]/?#".contains(c))) {
            Some(at) if text[at + 1..].starts_with(']') => at + 2,
            _ => 0,
        };
        let end = text[host..].find(|c| is_end(c) || "',;()[]".contains(c)).map_or(text.len(), |end| host + end);
        let (url, next) = text.split_at(end);
        let (place, query) = url.split_once('?').map_or((url, None), |(place, query)| (place, Some(query)));
        (Self { scheme, user, place, query }, next)
    }

    fn has_credentials(&self) -> bool {
        self.user.is_some_and(|user| !user.is_empty())
            || masked(self.scheme, self.place) != self.place
            || self.query.is_some_and(is_secret_query)
    }

    fn push_to(&self, safe: &mut String) {
        if self.user.is_some() {
            safe.push_str("***@");
        }
        safe.push_str(&masked(self.scheme, self.place));
        if self.query.is_some() {
            safe.push_str("?***");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{redacted, url_with_credentials};

    #[test]
    fn a_logged_line_shows_no_secret_of_a_url() {
        for (line, safe) in [
            ("GET 'http://me:s3cret@h:8/t/tk-1/linux-64/x.zst': no", "GET 'http://***@h:8/t/***/linux-64/x.zst': no"),
            ("(https://h/t/tk-1) and https://h/x?sig=1, twice", "(https://h/t/***) and https://h/x?***, twice"),
            ("http://h/conda/t/tk-1/noarch", "http://h/conda/t/***/noarch"),
            // No token: a directory, a file, or nothing at all.
            ("file:///srv/t/x and no://", "file:///srv/t/x and no://"),
            ("http://h/t/flux.tar.gz", "http://h/t/flux.tar.gz"),
            ("(url=http://h/t/)", "(url=http://h/t/)"),
            ("http://a@b@h/x", "http://***@h/x"),
            ("nothing here: a/t/b?c", "nothing here: a/t/b?c"),
            // A password may contain what ends a URL elsewhere, and a token may contain dots.
            ("at http://me:a,b;(c)'@h/x, then", "at http://***@h/x, then"),
            ("http://h/t/e.y.J/linux-64/x", "http://h/t/***/linux-64/x"),
            (
                "http://me@[::1]:8/t/tk/x, http://[::1], [http://[::1]:8/t/tk]",
                "http://***@[::1]:8/t/***/x, http://[::1], [http://[::1]:8/t/***]",
            ),
            ("http://a,http://me:x@b/", "http://a,http://***@b/"),
            ("[http://h] http://t/tk", "[http://h] http://t/tk"),
            // Some servers decode a path before they take it apart.
            ("http://h/a%2Ft%2Ftk-1/x http://h/%74/tk-1/x", "http://h/***/x http://h/%74/***/x"),
            ("http://h/t//tk-1/x http://h/a%2Ft%2F/tk-1/x", "http://h/t//***/x http://h/a%2Ft%2F/***/x"),
            ("http://h/t%252Ftk-1/x http://h/a%2ft/tk-1/x", "http://h/***/x http://h/a%2ft/***/x"),
            ("http://h/a%20b/x%2Ft%2Fy.conda", "http://h/a%20b/x%2Ft%2Fy.conda"),
            // A parser of URLs leaves out dots.
            ("http://h/t/./tk-1/x http://h/t/%2e/tk-1/x", "http://h/t/./***/x http://h/t/%2e/***/x"),
            ("http://h/t/a/../tk-1/x http://h/t/../tk-1/x", "http://h/t/***/../***/x http://h/t/../tk-1/x"),
        ] {
            assert_eq!(redacted(line), safe);
        }
    }

    #[test]
    fn a_credential_of_a_url_is_found_in_any_text() {
        for (text, found) in [
            ("- conda: https://h/c/x.conda\n- conda: https://me:s3cret@h/c/x.conda", Some("https://***@h/c/x.conda")),
            ("https://h/a/t/tk-1/c/linux-64/x.conda#0", Some("https://h/a/t/***/c/linux-64/x.conda#0")),
            ("https://h/t/tk-1", Some("https://h/t/***")),
            ("https://h/a%2Ft%2Ftk-1/c", Some("https://h/***/c")),
            ("https://h/x?a=b&X-Amz-Signature=s3cret", Some("https://h/x?***")),
            ("https://h/x?private_token=s3cret", Some("https://h/x?***")),
            ("https://h/x?a=b&to%6ben=s3cret", Some("https://h/x?***")),
            ("https://h/x?jwt=s3cret", Some("https://h/x?***")),
            ("https://h/x?md5=s3cret&expires=1", Some("https://h/x?***")),
            ("https://h/x?download=1&job=build", None),
            ("https://h/t/flux.tar.gz", None),
            ("https://@h/x", None),
            ("file:///srv/t/x/flux.tar.gz", None),
            ("me@h", None),
        ] {
            assert_eq!(url_with_credentials(text).as_deref(), found, "{text}");
        }
    }
}
