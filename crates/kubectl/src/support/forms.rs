//! In which parts and forms a secret that is known may stand in a text. Pure.

use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD, BASE64_URL_SAFE},
};
use serde_json::Value;

use super::{
    looks::{is_blank, is_end, is_quote},
    plain::Plain,
};

/// Shortest secret that is looked for, in bytes: a shorter one is found in half of all words.
pub(super) const SHORTEST: usize = 4;
/// Shortest secret of digits alone: ports and process IDs are shorter.
const SHORTEST_NUMBER: usize = 6;
/// Fewest letters and digits by which a form is known whatever stands between them: fewer are found in sentences.
const FEWEST_LETTERS: usize = 12;
/// Shortest word of a longer secret, such as a key in a certificate, that is looked for by itself.
const SHORTEST_WORD: usize = 16;
/// Most aliases of a YAML document that is read: with more of them, a few kilobytes can stand for gigabytes. Its lines are read anyhow.
const MOST_ALIASES: usize = 8;
/// Most names of a document's fields that are left out of its words: files with logins have few.
const MOST_NAMES: usize = 1000;
/// Most parts of a Secret's value that are looked for: a value has at most 1 MiB, and only a file of another kind than those that hold
/// credentials has more.
const MOST_PARTS: usize = 20_000;
/// Longest part that is looked for by its letters, in bytes. A longer one is looked for as it is, and in its words.
const LONGEST_BY_LETTERS: usize = 1 << 14;
/// Shortest line without a blank and with a digit that is looked for by itself: a file may have a token in each line.
const SHORTEST_LINE: usize = 8;
/// Fields that hold no secret, although they stand beside one: these, and those that end so, such as `DB_HOST`.
const PUBLIC_FIELDS: [&str; 21] = [
    "username",
    "user",
    "email",
    "namespace",
    "ca.crt",
    "host",
    "hostname",
    "port",
    "server",
    "database",
    "dbname",
    "sslmode",
    "mode",
    "level",
    "name",
    "kind",
    "apiversion",
    "cluster",
    "context",
    "registry",
    "version",
];
/// Words of objects and logs. As a secret they would protect nothing, and without them no report could be read.
const COMMON: [&str; 23] = [
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
    "kubernetes",
    "config",
    "localhost",
    "http",
    "https",
    "json",
    "text",
    "debug",
    "info",
    "warning",
    "error",
];

/// True if a field of that name, in any case, holds no secret, whatever is in it.
fn is_public_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let end = name.rsplit(['_', '-', '.']).next().unwrap_or_default();
    PUBLIC_FIELDS.iter().any(|public| *public == name || *public == end)
}

/// True if a field holds no secret. The URL of a `server` or `database` may have a password, and what has lines is a file.
pub(super) fn is_public(name: &str, value: &str) -> bool {
    is_public_name(name) && !value.contains("://") && !value.trim().contains('\n')
}

/// What stands before a sign between a name and its value.
struct Before {
    /// A name whose value is public. `user:password` is a login, and no field `user`.
    is_public: bool,
    /// No such sign stands before the name.
    is_first: bool,
}

impl Before {
    fn of(line: &str, at: usize) -> Self {
        let before = line[..at].trim_end_matches(|c| is_blank(c) || is_quote(c));
        let name = before.rsplit(|c| is_end(c) || matches!(c, '&' | ':' | '=')).next().unwrap_or_default();
        let is_field =
            line[at..].starts_with('=') || line[..at].ends_with(is_quote) || line[at + 1..].starts_with(is_blank);
        let is_first = before[..before.len() - name.len()].chars().next_back().is_none_or(is_end);
        Self { is_public: is_field && is_public_name(name), is_first }
    }
}

/// True for the name of a host with a domain: logs are about these.
fn is_host(word: &str) -> bool {
    let is_of_hosts = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-".contains(&byte);
    let domain = word.rsplit_once('.').map_or("", |(_, domain)| domain);
    word.bytes().all(is_of_hosts) && domain.len() > 1 && domain.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// A secret, and the parts of it that are secrets themselves.
pub(super) fn parts(secret: &[u8]) -> Vec<Vec<u8>> {
    let text = String::from_utf8_lossy(secret);
    let text = without_public_text(&text);
    let mut parts: Vec<String> = vec![text.trim().to_owned()];
    // `.dockerconfigjson`, `credentials.json`, `values.yaml`
    let is_bounded = !text.contains('&') || text.matches('*').count() <= MOST_ALIASES;
    let yaml = || is_bounded.then(|| serde_norway::from_str::<Value>(&text).ok()).flatten();
    let document = serde_json::from_str(&text).ok().or_else(yaml);
    let mut names = Vec::new();
    if let Some(document) = document {
        leaves(&document, &mut parts, &mut names);
    }
    let mut words = Vec::new();
    // `.env`, `.npmrc`, `.condarc`
    for line in text.lines() {
        let signs = ['=', ':'].iter().filter_map(|sign| line.find(*sign));
        let values = signs.filter(|at| !Before::of(line, *at).is_public).map(|at| &line[at + 1..]);
        words.extend(
            values.map(|value| value.trim_matches(|c| is_blank(c) || is_quote(c) || matches!(c, ',' | ';')).to_owned()),
        );
        // `.pgpass`, connection strings, several of them in a line.
        for (at, _) in line.match_indices(['=', ':']) {
            let before = Before::of(line, at);
            let value = line[at + 1..].trim_start_matches(|c| is_blank(c) || is_quote(c));
            let word = value.split(|c| is_end(c) || matches!(c, '&' | ':' | '=')).next().unwrap_or_default();
            let is_scheme = value[word.len()..].starts_with("://");
            if before.is_public || is_scheme {
                continue;
            }
            words.push(word.to_owned());
            // `me:password@tcp(host)/database` has no scheme.
            words.extend(word.rsplit_once('@').map(|(password, _)| password.to_owned()));
            // A value in quotes may hold blanks.
            let quoted = line[at + 1..].trim_start_matches(is_blank);
            let quote = quoted.chars().next().filter(|c| matches!(c, '"' | '\''));
            words.extend(quote.and_then(|quote| quoted.split(quote).nth(1)).map(str::to_owned));
            // A value may hold such signs too. Only behind the first of them, or a long line would be read again and again.
            if before.is_first {
                words.push(value.split(is_end).next().unwrap_or_default().to_owned());
            }
        }
        // Connection strings, whose values may hold blanks.
        let fields = line.split(';').filter_map(|field| field.split_once('='));
        words.extend(fields.filter(|(name, _)| !is_public_name(name.trim())).map(|(_, value)| value.trim().to_owned()));
        words.extend(passwords_of_urls(line));
        let word = line.trim();
        let is_token = !word.contains(is_blank) && word.contains(|c: char| c.is_ascii_digit());
        words.extend((is_token && word.len() >= SHORTEST_LINE).then(|| word.to_owned()));
        // `.netrc`
        let pairs = line.split_whitespace().zip(line.split_whitespace().skip(1));
        words.extend(pairs.filter(|(name, _)| *name == "password").map(|(_, value)| value.to_owned()));
    }
    let is_sign = |c: char| is_end(c) || matches!(c, '=' | ':' | '@' | '/');
    for splits in [&is_end as &dyn Fn(char) -> bool, &is_sign] {
        let long = text.split(splits).filter(|word| word.len() >= SHORTEST_WORD && !is_host(word));
        words.extend(long.map(str::to_owned));
    }
    words.truncate(MOST_PARTS);
    names.truncate(MOST_NAMES);
    // A field's name is no secret: `credentials.json` and `.dockerconfigjson` name hosts so, and errors are about these.
    parts.extend(words.into_iter().filter(|word| !names.iter().any(|name: &String| name.contains(word))));
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

/// The passwords of the URLs in a line, as they stand there and decoded.
fn passwords_of_urls(line: &str) -> Vec<String> {
    // A password may hold what ends a host: so also up to the last `@` before the next URL.
    let hosts = line.split("://").skip(1).flat_map(|url| {
        let host = url.split(|c| is_end(c) || c == '/').next().unwrap_or_default();
        [host, url]
    });
    let passwords = hosts.filter_map(|host| Some(host.rsplit_once('@')?.0.split_once(':')?.1));
    passwords.flat_map(|text| [text.to_owned(), String::from_utf8_lossy(&Plain::of(text).bytes).into_owned()]).collect()
}

/// Drops what is public: certificates in PEM, which are long, and the host, time and versions that flux-keygen(1) writes above its keys, which
/// stand in each log.
fn without_public_text(text: &str) -> String {
    let is_of_keygen = text.contains("ZeroMQ CURVE");
    // flux-keygen(1) names a key after its host, unless `--name` gives another name.
    let is_public = |line: &str| ["keygen.", "name "].iter().any(|begin| line.trim_start().starts_with(begin));
    let is_kept = |line: &&str| !is_of_keygen || !is_public(line);
    let text: String = text.split_inclusive('\n').filter(is_kept).collect();
    let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----");
    let (mut left, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once(begin) {
        left.push_str(before);
        rest = after.split_once(end).map_or("", |(_, after)| after);
    }
    left + rest
}

/// The texts and numbers in a document; of `user:password` in base64, as registries have it, the password too. And the names of its fields.
fn leaves(document: &Value, found: &mut Vec<String>, names: &mut Vec<String>) {
    match document {
        Value::String(text) => {
            found.push(text.clone());
            found.extend(passwords_of_urls(text));
            if let Some((_, password)) = BASE64_STANDARD_NO_PAD
                .decode(text.trim_end_matches('='))
                .ok()
                .and_then(|login| String::from_utf8(login).ok())
                .as_deref()
                .and_then(|login| login.split_once(':'))
            {
                found.push(password.to_owned());
            }
        }
        Value::Number(number) => found.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| leaves(item, found, names)),
        Value::Object(fields) => {
            // The user of a kubeconfig is an object, and holds a token.
            let secret =
                fields.iter().filter(|(name, value)| !value.as_str().is_some_and(|value| is_public(name, value)));
            secret.for_each(|(_, value)| leaves(value, found, names));
            // A URL with a password in it is no mere name, and neither is a token.
            let is_token = |name: &str| {
                name.len() >= SHORTEST_WORD && !name.contains('.') && name.contains(|c: char| c.is_ascii_digit())
            };
            names.extend(fields.keys().filter(|name| !name.contains('@') && !is_token(name)).cloned());
        }
        _ => {}
    }
}

/// Each way to write `part`, but for escapes: [`Plain`] undoes those.
pub(super) fn forms(part: &[u8]) -> Vec<String> {
    let mut forms = vec![hex::encode(part), hex::encode_upper(part)];
    if let Ok(text) = std::str::from_utf8(part) {
        let in_quotes_of_yaml = text.replace('\'', "''");
        let in_quotes_of_shells = text.replace('\'', r"'\''");
        let in_form = text.replace(' ', "+");
        let backwards = text.chars().rev().collect();
        forms.extend([text.to_owned(), in_quotes_of_yaml, in_quotes_of_shells, in_form, backwards]);
    }
    forms.extend((0..3).flat_map(|before| within_base64(part, before)));
    forms.extend((0..4).flat_map(|before| within_base85(part, before)));
    forms.retain(|form| form.len() >= SHORTEST);
    forms
}

/// The letters of each form, of rarer ones, and of forms within forms: bytes that are printed as numbers, base32, UTF-16 or JSON in base64,
/// base64 in base64. And all of these backwards.
pub(super) fn letters(part: &[u8]) -> Vec<Vec<u8>> {
    if part.len() > LONGEST_BY_LETTERS {
        return Vec::new();
    }
    let mut forms = forms(part);
    let numbers: [fn(&u8) -> String; 3] = [u8::to_string, |byte| format!("{byte:#x}"), |byte| format!("{byte:#04x}")];
    forms.extend(numbers.map(|number| part.iter().map(number).collect()));
    forms.extend((0..5).map(|before| within_base32(part, before)));
    let mut inner = vec![BASE64_STANDARD_NO_PAD.encode(part).into_bytes(), hex::encode(part).into_bytes()];
    if let Ok(text) = std::str::from_utf8(part) {
        inner.push(Value::from(text).to_string().trim_matches('"').into());
        inner.push(text.encode_utf16().flat_map(u16::to_le_bytes).collect());
    }
    let within = |bytes: &Vec<u8>| (0..3).flat_map(|before| within_base64(bytes, before)).collect::<Vec<_>>();
    forms.extend(inner.iter().flat_map(within));
    let letters = forms.iter().map(|form| Plain::of(form).letters().bytes);
    let long = letters.filter(|letters| letters.len() >= FEWEST_LETTERS);
    long.flat_map(|letters| [letters.iter().rev().copied().collect(), letters]).collect()
}

/// The letters of base32 (RFC 4648) that stand for `part` alone if `before` bytes (modulo 5) precede it.
fn within_base32(part: &[u8], before: usize) -> String {
    const LETTERS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let bit = |at: usize| usize::from((part[at / 8 - before] >> (7 - at % 8)) & 1);
    let letter = |first: usize| char::from(LETTERS[(first..first + 5).fold(0, |letter, at| (letter << 1) | bit(at))]);
    // A letter is five bits.
    ((8 * before).div_ceil(5)..8 * (before + part.len()) / 5).map(|letter_at| letter(letter_at * 5)).collect()
}

/// The letters that stand for `part` alone if `before` bytes (modulo 3) precede it, in both alphabets of RFC 4648.
fn within_base64(part: &[u8], before: usize) -> [String; 2] {
    let bytes: Vec<u8> = std::iter::repeat_n(0, before).chain(part.iter().copied()).collect();
    // A letter is six bits. Those at the ends are mixed with what stands before or after.
    let (first, last) = ((8 * before).div_ceil(6), 8 * bytes.len() / 6);
    let cut = |text: String| text.get(first..last).unwrap_or_default().to_owned();
    [cut(BASE64_STANDARD.encode(&bytes)), cut(BASE64_URL_SAFE.encode(&bytes))]
}

/// The digits of base85 from 0 on: of Z85 (RFC 32 of ZeroMQ), of RFC 1924 as Python and git write it, and of Ascii85.
const BASE85: [&[u8; 85]; 3] = [
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    b"!\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstu",
];

/// The digits that stand for `part` alone if `before` bytes (modulo 4) precede it, in each of [`BASE85`]: four bytes are five digits. Up to its
/// last whole group, because other bytes may follow, and to its end.
fn within_base85(part: &[u8], before: usize) -> Vec<String> {
    let part = part.get((4 - before) % 4..).unwrap_or_default();
    let whole = &part[..part.len() / 4 * 4];
    let encoded = |bytes: &[u8], alphabet: &[u8; 85]| {
        let digits = bytes.chunks(4).flat_map(|group| {
            // What is lacking in the last group counts as zeros, and has no digits.
            let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or_default());
            let number = (0..4).fold(0, |number, at| (number << 8) | byte(at));
            let digit = move |at: u32| char::from(alphabet[(number / 85_u32.pow(4 - at) % 85) as usize]);
            (0..=4).take(group.len() + 1).map(digit)
        });
        digits.collect()
    };
    BASE85.into_iter().flat_map(|alphabet| [encoded(whole, alphabet), encoded(part, alphabet)]).collect()
}
