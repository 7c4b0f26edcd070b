//! What looks like a secret, whoever it belongs to. Pure.

/// What stands in the place of a secret.
pub(super) const MASK: &str = "***";
/// Most lines of a private key without an end: RSA keys of 16,384 bits have some 200.
const LONGEST_KEY: usize = 300;
/// How text begins that may hide a secret from [`forms`](super::forms::forms): base64 of `{"`, as JSON Web Tokens do (RFC 7519), and of the first
/// bytes of gzip (RFC 1952), zstd (RFC 8878), xz, bzip2 and zip; the first two of them also in base64 once more.
const OPAQUE: [&str; 8] = ["eyJ", "ZXlK", "H4sI", "SDRzS", "KLUv/", "/Td6WFoA", "Qlpo", "UEsDB"];
/// Fewest bytes of a word that is masked for it.
const SHORTEST_OPAQUE: usize = 41;
/// Names whose value is a secret, at their end and in lower case. Unlike the words of [`base::redact::SECRET_WORDS`], which may stand anywhere in
/// the name of a parameter of a URL, these must not take the values of most fields of an object: `key` and `code` would.
const SECRET_NAMES: [&str; 13] = [
    "password",
    "passphrase",
    "passwd",
    "pwd",
    "token",
    "secret",
    "apikey",
    "api_key",
    "api-key",
    "access_key",
    "accesskey",
    "private_key",
    "secretkey",
];
/// HTTP's schemes of authentication (RFC 9110) whose next word is a secret.
const SCHEMES: [&str; 2] = ["bearer", "basic"];

/// `text` without private keys in PEM or ZPL, without values whose names say that they are secrets, without what follows the name of a
/// scheme of authentication, without JSON Web Tokens, and without what is packed.
pub(super) fn without_patterns(text: &str) -> String {
    let mut left_of_key = 0;
    let line = |line: &str| {
        let (is_begin, is_end) = (line.contains("BEGIN "), line.contains("END "));
        let is_key = line.contains("PRIVATE KEY");
        let is_within = left_of_key > 0;
        left_of_key = match (is_key && is_begin && !is_end, is_key && is_end) {
            (true, _) => LONGEST_KEY,
            (_, true) => 0,
            _ => usize::saturating_sub(left_of_key, 1),
        };
        if is_within || is_key || line.contains("secret-key") {
            return if line.ends_with('\n') { format!("{MASK}\n") } else { MASK.to_owned() };
        }
        // The names last: the scheme of `X-Auth-Token: Bearer TOKEN` is a value of the name.
        without_opaque(&without_named(&without_credentials(line)))
    };
    text.split_inclusive('\n').map(line).collect()
}

/// True if the value of a field of that name is a secret.
pub(super) fn has_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|secret| name.ends_with(secret))
}

/// What ends a word in a log, in JSON and in a Go struct that is printed.
pub(super) fn is_end(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | '[' | ']' | '{' | '}' | '(' | ')')
}

pub(super) fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t')
}

pub(super) fn is_quote(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\')
}

/// A line without the values that follow one of [`SECRET_NAMES`] and `=` or `:`.
fn without_named(line: &str) -> String {
    mask_after(line, &SECRET_NAMES, |rest| {
        let rest = rest.trim_start_matches(|c| is_quote(c) || is_blank(c));
        // Go prints the values of a header in brackets.
        let value = rest.strip_prefix(['=', ':'])?.trim_start_matches(|c| is_blank(c) || c == '[');
        let opening = ["\\\"", "\\'", "\"", "'"].into_iter().find(|quote| value.starts_with(quote)).unwrap_or_default();
        let bare = &value[opening.len()..];
        let end = match opening.len() {
            0 => bare.find(|c| is_end(c) || c == '&'),
            1 => unescaped(bare, opening),
            _ => bare.find(opening),
        };
        Some((bare, end.unwrap_or(bare.trim_end_matches('\n').len())))
    })
}

/// Where `quote` stands in `text` without a backslash before it.
fn unescaped(text: &str, quote: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        if !is_escaped && text[at..].starts_with(quote) {
            return Some(at);
        }
        is_escaped = !is_escaped && c == '\\';
    }
    None
}

/// A line without the word that follows one of [`SCHEMES`].
fn without_credentials(line: &str) -> String {
    mask_after(line, &SCHEMES, |rest| {
        let bare = rest.trim_start_matches(is_blank);
        (bare.len() < rest.len()).then(|| (bare, bare.find(is_end).unwrap_or(bare.len())))
    })
}

/// Masks what follows each of `names`, in any case. `value` gets the rest of the line behind a name, and returns the rest from the value on,
/// and the value's length.
fn mask_after(line: &str, names: &[&str], value: impl Fn(&str) -> Option<(&str, usize)>) -> String {
    let lower = line.to_ascii_lowercase();
    let (mut safe, mut done) = (String::new(), 0);
    // All places at once: whoever can write a line of megabytes must not make each of them a search to its end.
    let mut places: Vec<(usize, usize)> =
        names.iter().flat_map(|name| lower.match_indices(name).map(|(at, name)| (at, name.len()))).collect();
    places.sort_unstable();
    for (at, length) in places {
        if at < done {
            continue;
        }
        let behind = at + length;
        safe.push_str(&line[done..behind]);
        done = behind;
        if let Some((rest, length)) = value(&line[behind..]).filter(|(_, length)| *length > 0) {
            let begin = line.len() - rest.len();
            safe.push_str(&line[behind..begin]);
            safe.push_str(MASK);
            done = begin + length;
        }
    }
    safe + &line[done..]
}

/// Masks each word that has one of [`OPAQUE`], also after a name, as in `token=…`.
fn without_opaque(line: &str) -> String {
    line.split_inclusive(is_end)
        .map(|word| {
            let bare = word.trim_end_matches(is_end);
            let is_opaque = bare.len() >= SHORTEST_OPAQUE && OPAQUE.iter().any(|begin| bare.contains(begin));
            if is_opaque { word.replace(bare, MASK) } else { word.to_owned() }
        })
        .collect()
}
