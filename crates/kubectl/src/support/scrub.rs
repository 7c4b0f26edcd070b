//! Takes secrets out of text. Pure.

use std::collections::{BTreeSet, HashMap};

use base::redact::redacted;
use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE},
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde_json::Value;

/// What stands in the place of a secret.
pub(super) const MASK: &str = "***";
/// Shortest secret that is looked for, in bytes: a shorter one is found in half of all words.
const SHORTEST: usize = 4;
/// Shortest secret of digits alone: ports and process IDs are shorter.
const SHORTEST_NUMBER: usize = 6;
/// Shortest word of a longer secret, such as a key in a certificate, that is looked for by itself.
const SHORTEST_WORD: usize = 16;
/// Most parts of a Secret's value that are looked for: a value has at most 1 MiB, and only a file of another kind than those that hold
/// credentials has more.
const MOST_PARTS: usize = 20_000;
/// Most lines of a private key without an end: RSA keys of 16,384 bits have some 200.
const LONGEST_KEY: usize = 300;
/// A JSON Web Token (RFC 7519) begins with this: base64 of `{"`; and the same in base64 once more.
const JWT: [&str; 2] = ["eyJ", "ZXlK"];
/// Shortest word that is a JSON Web Token.
const SHORTEST_JWT: usize = 40;
/// Fields that hold no secret, although they stand beside one.
const PUBLIC_FIELDS: [&str; 5] = ["username", "user", "email", "namespace", "ca.crt"];
/// Words of objects and logs. As a secret they would protect nothing, and without them no report could be read.
const COMMON: [&str; 12] = [
    "flux",
    "flux-distribute",
    "true",
    "false",
    "null",
    "none",
    "default",
    "online",
    "offline",
    "running",
    "failed",
    "ready",
];
/// Names whose value is a secret, at their end and in lower case.
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
/// RFC 3986 leaves these as they are, and some programs encode them nevertheless.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// What has to be taken out: the forms of all secrets by their first bytes.
pub(super) struct Scrub(HashMap<[u8; SHORTEST], Vec<String>>);

impl Scrub {
    /// `secrets`: the names and values of Secrets. Each value is looked for whole and in parts, in all the forms in which logs and objects
    /// hold such things: as it is, in JSON and YAML, percent-encoded, in hexadecimal digits, and in base64, alone or within something
    /// longer.
    pub fn of<'a>(secrets: impl Iterator<Item = (&'a str, &'a [u8])>) -> Self {
        let secrets = secrets.filter(|(name, _)| !PUBLIC_FIELDS.contains(name));
        let parts: BTreeSet<Vec<u8>> = secrets.flat_map(|(_, value)| parts(value)).collect();
        let forms: BTreeSet<String> = parts.iter().flat_map(|part| forms(part)).collect();
        let mut by_begin: HashMap<[u8; SHORTEST], Vec<String>> = HashMap::new();
        for form in forms {
            if let Some(begin) = form.as_bytes().first_chunk() {
                by_begin.entry(*begin).or_default().push(form);
            }
        }
        Self(by_begin)
    }

    /// `text` without the secrets, without what looks like a token or a key, and without credentials in URLs.
    pub fn text(&self, text: &str) -> String {
        // A URL without its credentials would no longer hold the whole of a secret that is a URL, so these go last.
        redacted(&without_patterns(&self.without_forms(text)))
    }

    /// The same for all texts in a document: YAML may fold and quote them in ways that no form here has.
    pub fn tree(&self, tree: &mut Value) {
        match tree {
            Value::String(text) => *text = self.text(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.tree(item)),
            Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| match value {
                // As YAML, a value of several lines would not stand behind its name any more.
                Value::String(text) if has_secret_name(name) => MASK.clone_into(text),
                value => self.tree(value),
            }),
            _ => {}
        }
    }

    /// Masks every place where a form stands. Forms may overlap, so all places are found before any is masked.
    fn without_forms(&self, text: &str) -> String {
        let mut places: Vec<(usize, usize)> = Vec::new();
        for (at, _) in text.char_indices() {
            let forms = text.as_bytes()[at..].first_chunk().and_then(|begin| self.0.get(begin));
            let found = forms.into_iter().flatten().filter(|form| text[at..].starts_with(form.as_str()));
            let Some(end) = found.map(|form| at + form.len()).max() else { continue };
            match places.last_mut() {
                Some((_, last)) if at <= *last => *last = end.max(*last),
                _ => places.push((at, end)),
            }
        }
        let (mut safe, mut done) = (String::with_capacity(text.len()), 0);
        for (at, end) in places {
            safe.push_str(&text[done..at]);
            safe.push_str(MASK);
            done = end;
        }
        safe + &text[done..]
    }
}

/// `text` without private keys in PEM or ZPL, without values whose names say that they are secrets, without what follows the name of a
/// scheme of authentication, and without JSON Web Tokens.
fn without_patterns(text: &str) -> String {
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
        without_tokens(&without_named(&without_credentials(line)))
    };
    text.split_inclusive('\n').map(line).collect()
}

/// True if the value of a field of that name is a secret.
fn has_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|secret| name.ends_with(secret))
}

/// True for one of [`PUBLIC_FIELDS`], in any case.
fn is_public(name: &str) -> bool {
    PUBLIC_FIELDS.contains(&name.to_ascii_lowercase().as_str())
}

/// What ends a word in a log, in JSON and in a Go struct that is printed.
fn is_end(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | '[' | ']' | '{' | '}' | '(' | ')')
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t')
}

fn is_quote(c: char) -> bool {
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

/// A line without JSON Web Tokens.
fn without_tokens(line: &str) -> String {
    line.split_inclusive(is_end)
        .map(|word| {
            let bare = word.trim_end_matches(is_end);
            let is_token = bare.len() > SHORTEST_JWT && JWT.iter().any(|begin| bare.contains(begin));
            if is_token { word.replace(bare, MASK) } else { word.to_owned() }
        })
        .collect()
}

/// A secret, and the parts of it that are secrets themselves.
fn parts(secret: &[u8]) -> Vec<Vec<u8>> {
    let text = String::from_utf8_lossy(secret);
    let text = without_certificates(&text);
    let mut parts: Vec<String> = vec![text.trim().to_owned()];
    // `.dockerconfigjson`, `credentials.json`, `values.yaml`
    let document = serde_json::from_str(&text).ok().or_else(|| serde_norway::from_str::<Value>(&text).ok());
    if let Some(document) = document {
        leaves(&document, &mut parts);
    }
    // `.env`, `.npmrc`, `.condarc`
    for line in text.lines() {
        let named = ['=', ':'].iter().filter_map(|sign| line.split_once(*sign));
        let values = named.filter(|(name, _)| !is_public(name.trim()));
        parts.extend(
            values.map(|(_, value)| {
                value.trim_matches(|c| is_blank(c) || is_quote(c) || matches!(c, ',' | ';')).to_owned()
            }),
        );
        // `.pgpass`, connection strings, several of them in a line.
        for (at, _) in line.match_indices(['=', ':']) {
            let before = line[..at].trim_end_matches(|c| is_blank(c) || is_quote(c));
            let name = before.rsplit(|c| is_end(c) || matches!(c, '&' | ':' | '=')).next().unwrap_or_default();
            let value = line[at + 1..].trim_start_matches(|c| is_blank(c) || is_quote(c));
            let word = value.split(|c| is_end(c) || matches!(c, '&' | ':' | '=')).next().unwrap_or_default();
            parts.extend((!is_public(name)).then(|| word.to_owned()));
        }
        // A URL's password.
        let user = line.split_once("://").and_then(|(_, after)| after.rsplit_once('@')).map(|(user, _)| user);
        parts.extend(user.and_then(|user| user.split_once(':')).map(|(_, password)| password.to_owned()));
        // `.netrc`
        let words = line.split_whitespace().zip(line.split_whitespace().skip(1));
        parts.extend(words.filter(|(name, _)| *name == "password").map(|(_, value)| value.to_owned()));
    }
    let is_sign = |c: char| is_end(c) || matches!(c, '=' | ':' | '@' | '/');
    for splits in [&is_end as &dyn Fn(char) -> bool, &is_sign] {
        parts.extend(text.split(splits).filter(|word| word.len() >= SHORTEST_WORD).map(str::to_owned));
    }
    let is_secret = |part: &String| {
        let is_number = part.bytes().all(|byte| byte.is_ascii_digit());
        part.len() >= if is_number { SHORTEST_NUMBER } else { SHORTEST }
            && !COMMON.contains(&part.to_ascii_lowercase().as_str())
    };
    parts.retain(is_secret);
    parts.truncate(MOST_PARTS);
    let whole = (secret.len() >= SHORTEST && std::str::from_utf8(secret).is_err()).then(|| secret.to_vec());
    parts.into_iter().map(String::into_bytes).chain(whole).collect()
}

/// Certificates in PEM are public, and long.
fn without_certificates(text: &str) -> String {
    let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----");
    let (mut left, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(begin) {
        left.push_str(before);
        rest = after.split_once(end).map_or("", |(_, after)| after);
    }
    left + rest
}

/// The texts and numbers in a document; of `user:password` in base64, as registries have it, the password too.
fn leaves(document: &Value, found: &mut Vec<String>) {
    match document {
        Value::String(text) => {
            found.push(text.clone());
            if let Some((_, password)) = BASE64_STANDARD
                .decode(text)
                .ok()
                .and_then(|login| String::from_utf8(login).ok())
                .as_deref()
                .and_then(|login| login.split_once(':'))
            {
                found.push(password.to_owned());
            }
        }
        Value::Number(number) => found.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| leaves(item, found)),
        Value::Object(fields) => {
            // The user of a kubeconfig is an object, and holds a token.
            let secret = fields.iter().filter(|(name, value)| !(value.is_string() && is_public(name)));
            secret.for_each(|(_, value)| leaves(value, found));
        }
        _ => {}
    }
}

/// Each way in which a text or an object may hold `part`.
fn forms(part: &[u8]) -> Vec<String> {
    let mut forms = vec![hex::encode(part), hex::encode_upper(part)];
    for set in [NON_ALPHANUMERIC, RESERVED] {
        let encoded = percent_encode(part, set).to_string();
        forms.extend([lower_case_hex(&encoded), encoded]);
    }
    if let Ok(text) = std::str::from_utf8(part) {
        let json = Value::from(text).to_string();
        let json = json[1..json.len() - 1].to_owned();
        // As crate encoding/json of Go writes it.
        let go = |less: &str, greater: &str| json.replace('&', "\\u0026").replace('<', less).replace('>', greater);
        forms.extend([text.to_owned(), go("\\u003c", "\\u003e"), go("\\u003C", "\\u003E"), json]);
        // In single quotes of YAML.
        forms.push(text.replace('\'', "''"));
    }
    forms.extend((0..3).flat_map(|before| within_base64(part, before)));
    forms.retain(|form| form.len() >= SHORTEST);
    forms
}

/// Percent-encoded text with the digits of each `%XX` in lower case.
fn lower_case_hex(encoded: &str) -> String {
    let mut parts = encoded.split('%');
    let first = parts.next().unwrap_or_default().to_owned();
    let lower = |part: &str| {
        let (digits, rest) = part.split_at_checked(2).unwrap_or((part, ""));
        format!("%{}{rest}", digits.to_ascii_lowercase())
    };
    parts.map(lower).fold(first, |text, part| text + &part)
}

/// The letters that stand for `part` alone where `before` bytes (modulo 3) precede it, in both alphabets of RFC 4648.
fn within_base64(part: &[u8], before: usize) -> [String; 2] {
    let bytes: Vec<u8> = std::iter::repeat_n(0, before).chain(part.iter().copied()).collect();
    // A letter is six bits. Those at the ends are mixed with what stands before or after.
    let (first, last) = ((8 * before).div_ceil(6), 8 * bytes.len() / 6);
    let cut = |text: String| text.get(first..last).unwrap_or_default().to_owned();
    [cut(BASE64_STANDARD.encode(&bytes)), cut(BASE64_URL_SAFE.encode(&bytes))]
}

#[cfg(test)]
mod tests {
    use percent_encoding::utf8_percent_encode;

    use super::*;

    const CERTIFICATE: &str = "metadata\n    name = \"flux\"\ncurve\n    public-key = \"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\"\n    secret-key = \"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6\"\n";

    #[test]
    fn no_secret_is_left_in_any_form() {
        let login = BASE64_STANDARD.encode("robot:hunter2-of-the-registry");
        let docker = format!("{{\"auths\":{{\"registry.example.org\":{{\"auth\":\"{login}\"}}}}}}");
        let secrets = [CERTIFICATE, "t0ken/with+signs=", &docker];
        let scrub = Scrub::of(secrets.iter().map(|secret| ("value", secret.as_bytes())));
        let key = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6";
        for secret in [key, "t0ken/with+signs=", "hunter2-of-the-registry", &login] {
            let hex = hex::encode(secret);
            let percent = utf8_percent_encode(secret, NON_ALPHANUMERIC).to_string();
            for form in [
                secret.to_owned(),
                Value::from(secret).to_string(),
                lower_case_hex(&percent),
                utf8_percent_encode(secret, RESERVED).to_string(),
                Value::from(secret).to_string().replace('>', "\\u003e").replace('<', "\\u003c").replace('&', "\\u0026"),
                percent,
                hex.to_uppercase(),
                hex,
                BASE64_STANDARD.encode(secret),
                BASE64_URL_SAFE.encode(secret),
                BASE64_STANDARD.encode(format!("a{secret}b")),
                BASE64_STANDARD.encode(format!("ab{secret}")),
                BASE64_STANDARD.encode(format!("abc {secret} and more")),
            ] {
                let text = scrub.text(&format!("before {form} after\n"));
                assert!(
                    text.starts_with("before ") && text.ends_with(" after\n") && text.contains(MASK),
                    "{form}: {text}"
                );
                let core = form.trim_matches('"').get(4..form.len().saturating_sub(6)).unwrap_or_default().to_owned();
                assert!(core.len() < 4 || !text.contains(&core), "{form}: {text}");
            }
        }
    }

    /// What is left of `text` if these are the secrets.
    fn scrubbed(secrets: &[(&str, &str)], text: &str) -> String {
        Scrub::of(secrets.iter().map(|(name, value)| (*name, value.as_bytes()))).text(text)
    }

    #[test]
    fn values_in_files_of_any_kind_are_secrets() {
        for (secret, text, expected) in [
            ("h:5432:db:me:pw-77\n", "pw-77!", "***!"),
            ("Server=db1;Password=pw-77;\n", "pw-77!", "***!"),
            ("{\"user\": {\"token\": \"pw-77\"}}", "pw-77!", "***!"),
            ("API_TOKEN=abcd1\nOTHER='wxyz9'\n", "got abcd1 and wxyz9", "got *** and ***"),
            ("//registry.example.org/:_authToken=npm-1\n", "npm-1!", "***!"),
            ("machine h login me password pw-77\n", "me pw-77", "me ***"),
            (
                "login:\n  username: robot\n  pin: 123456\n  key: >-\n    a b\n    c\n",
                "robot 123456 a b c",
                "robot *** ***",
            ),
            ("{\"username\": \"robot\", \"key\": \"wxyz9\"}", "robot wxyz9", "robot ***"),
            ("flux", "flux is Online", "flux is Online"),
            ("mode: true\nport: 8051\n", "true 8051", "true 8051"),
            ("https://me:pw-77@example.org/x", "pw-77 at example.org", "*** at example.org"),
            ("it's", "key 'it''s'", "key '***'"),
            ("abcdef", "abcdef", "***"),
        ] {
            assert_eq!(scrubbed(&[("value", secret)], text), expected, "{secret}");
        }
        assert_eq!(scrubbed(&[("username", "robot"), ("password", "wxyz9")], "robot wxyz9"), "robot ***");
    }

    #[test]
    fn secrets_that_overlap_leave_no_rest() {
        assert_eq!(scrubbed(&[("a", "abcdef"), ("b", "defghi")], "x abcdefghi y"), "x *** y");
    }

    #[test]
    fn a_secret_that_is_a_url_is_found_before_its_credentials_go() {
        let url = "https://me:hunter2@example.org/with/path";
        assert_eq!(scrubbed(&[("url", url)], &format!("get {url}: 404")), "get ***: 404");
    }

    #[test]
    fn a_certificate_is_no_secret_but_its_key_is() {
        let body = "MIIBszCCAVmgAwIBAgIUabcdefghijklmnop";
        let pem = format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n");
        assert_eq!(scrubbed(&[("tls.crt", &pem)], body), body);
        let long = format!("{}k3y-of-the-certificate", pem.repeat(5000));
        assert_eq!(scrubbed(&[("bundle", &long)], "k3y-of-the-certificate"), MASK);
    }

    #[test]
    fn a_tree_has_no_secret_before_it_is_folded() {
        let scrub = Scrub::of(std::iter::once(("value", "two words".as_bytes())));
        let mut tree = serde_json::json!({"a": ["x two words y", 1], "b": {"c": "Bearer abc"}});
        scrub.tree(&mut tree);
        assert_eq!(tree, serde_json::json!({"a": ["x *** y", 1], "b": {"c": "Bearer ***"}}));
    }

    #[test]
    fn what_no_secret_holds_is_found_by_its_looks() {
        let key = "-----BEGIN RSA PRIVATE KEY-----\n2026-01-01T00:00:00Z MIIEpAIB\nAAKC\n-----END RSA PRIVATE KEY-----\nafter\n";
        let cut = format!("-----BEGIN PRIVATE KEY-----\n{}", "MIIE\n".repeat(250));
        for (text, expected) in [
            ("X-Auth-Token: Bearer abcdef\n", "X-Auth-Token: *** ***\n"),
            ("https://me:pass@example.org/x\n", "https://***@example.org/x\n"),
            ("Authorization: Bearer abcdef, next\n", "Authorization: Bearer ***, next\n"),
            ("map[Authorization:[Bearer  abcdef] Accept:[*/*]]\n", "map[Authorization:[Bearer  ***] Accept:[*/*]]\n"),
            ("authorization: basic cm9ib3Q6cHc=\n", "authorization: basic ***\n"),
            ("at eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrIn0.c2ln\n", "at ***\n"),
            ("at ZXlKaGJHY2lPaUpTVXpJMU5pSXNJbXRwWkNJNklqRWlmUS5leUpw\n", "at ***\n"),
            ("PASSWORD=ab DB_TOKEN = 'c d'\n", "PASSWORD=*** DB_TOKEN = '***'\n"),
            ("{\"apiKey\": \"x y\", \"n\": 1}\n", "{\"apiKey\": \"***\", \"n\": 1}\n"),
            ("{\\\"token\\\":\\\"xy\\\"}\n", "{\\\"token\\\":\\\"***\\\"}\n"),
            ("{\"token\":\"a\\\"b\",\"n\":\"\"}\n", "{\"token\":\"***\",\"n\":\"\"}\n"),
            ("map[X-Auth-Token:[ab] Accept:[*/*]]\n", "map[X-Auth-Token:[***] Accept:[*/*]]\n"),
            ("password: \"\" next\n", "password: \"\" next\n"),
            ("?access_key=ab&size=1\n", "?access_key=***&size=1\n"),
            ("secretName: flux-curve\n", "secretName: flux-curve\n"),
            ("Secret flux-curve is gone: put it back\n", "Secret flux-curve is gone: put it back\n"),
            ("    secret-key = \"x\"\n", "***\n"),
            (key, "***\n***\n***\n***\nafter\n"),
            (&cut, &"***\n".repeat(251)),
            ("all 4 nodes are online\n", "all 4 nodes are online\n"),
        ] {
            assert_eq!(scrubbed(&[], text), expected);
        }
    }

    /// Root on a node can write such a line into the agent's log.
    #[test]
    fn a_line_of_megabytes_is_read_once() {
        let long = "token ".repeat(1 << 19);
        assert_eq!(scrubbed(&[], &long), long);
        let urls = "://[".repeat(1 << 19);
        assert_eq!(scrubbed(&[], &urls), urls);
    }
}
