//! In which parts and forms a secret that is known may stand in a text. Pure.

use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD, BASE64_URL_SAFE},
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use serde_json::Value;

use super::{
    letters::Letters,
    looks::{is_blank, is_end, is_quote},
};

/// Shortest secret that is looked for, in bytes: a shorter one is found in half of all words.
pub(super) const SHORTEST: usize = 4;
/// Shortest secret of digits alone: ports and process IDs are shorter.
const SHORTEST_NUMBER: usize = 6;
/// Fewest letters and digits by which a form is known whatever stands between them: fewer are found in sentences.
const FEWEST_LETTERS: usize = 12;
/// Shortest word of a longer secret, such as a key in a certificate, that is looked for by itself.
const SHORTEST_WORD: usize = 16;
/// Most parts of a Secret's value that are looked for: a value has at most 1 MiB, and only a file of another kind than those that hold
/// credentials has more.
const MOST_PARTS: usize = 20_000;
/// Fields that hold no secret, although they stand beside one.
pub(super) const PUBLIC_FIELDS: [&str; 5] = ["username", "user", "email", "namespace", "ca.crt"];
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
/// RFC 3986 leaves these as they are, and some programs encode them nevertheless.
pub(super) const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// True for one of [`PUBLIC_FIELDS`], in any case.
fn is_public(name: &str) -> bool {
    PUBLIC_FIELDS.contains(&name.to_ascii_lowercase().as_str())
}

/// A secret, and the parts of it that are secrets themselves.
pub(super) fn parts(secret: &[u8]) -> Vec<Vec<u8>> {
    let text = String::from_utf8_lossy(secret);
    let text = without_public_text(&text);
    let mut parts: Vec<String> = vec![text.trim().to_owned()];
    // `.dockerconfigjson`, `credentials.json`, `values.yaml`
    let document = serde_json::from_str(&text).ok().or_else(|| serde_norway::from_str::<Value>(&text).ok());
    let mut names = Vec::new();
    if let Some(document) = document {
        leaves(&document, &mut parts, &mut names);
    }
    let mut words = Vec::new();
    // `.env`, `.npmrc`, `.condarc`
    for line in text.lines() {
        let named = ['=', ':'].iter().filter_map(|sign| line.split_once(*sign));
        let values = named.filter(|(name, _)| !is_public(name.trim()));
        words.extend(
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
            words.extend((!is_public(name)).then(|| word.to_owned()));
        }
        // A URL's password.
        let user = line.split_once("://").and_then(|(_, after)| after.rsplit_once('@')).map(|(user, _)| user);
        words.extend(user.and_then(|user| user.split_once(':')).map(|(_, password)| password.to_owned()));
        // `.netrc`
        let pairs = line.split_whitespace().zip(line.split_whitespace().skip(1));
        words.extend(pairs.filter(|(name, _)| *name == "password").map(|(_, value)| value.to_owned()));
    }
    let is_sign = |c: char| is_end(c) || matches!(c, '=' | ':' | '@' | '/');
    for splits in [&is_end as &dyn Fn(char) -> bool, &is_sign] {
        words.extend(text.split(splits).filter(|word| word.len() >= SHORTEST_WORD).map(str::to_owned));
    }
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

/// Drops what is public: certificates in PEM, which are long, and the host, time and versions that flux-keygen(1) writes above its keys, which
/// stand in each log.
fn without_public_text(text: &str) -> String {
    let is_of_keygen = text.contains("ZeroMQ CURVE");
    let is_kept = |line: &&str| !is_of_keygen || !line.trim_start().starts_with("keygen.");
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
        Value::Array(items) => items.iter().for_each(|item| leaves(item, found, names)),
        Value::Object(fields) => {
            // The user of a kubeconfig is an object, and holds a token.
            let secret = fields.iter().filter(|(name, value)| !(value.is_string() && is_public(name)));
            secret.for_each(|(_, value)| leaves(value, found, names));
            // A URL with a password in it is no mere name.
            names.extend(fields.keys().filter(|name| !name.contains('@')).cloned());
        }
        _ => {}
    }
}

/// Each way in which a text or an object may hold `part`.
pub(super) fn forms(part: &[u8]) -> Vec<String> {
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

/// The letters of each form, of rarer ones, and of forms within forms: bytes that are printed as numbers, base32, UTF-16 or JSON in base64,
/// base64 in base64.
pub(super) fn letters(part: &[u8]) -> Vec<Vec<u8>> {
    let mut forms = forms(part);
    forms.push(part.iter().map(u8::to_string).collect());
    forms.push(base32(part));
    let mut inner = vec![BASE64_STANDARD_NO_PAD.encode(part).into_bytes(), hex::encode(part).into_bytes()];
    if let Ok(text) = std::str::from_utf8(part) {
        inner.push(Value::from(text).to_string().trim_matches('"').into());
        inner.push(text.encode_utf16().flat_map(u16::to_le_bytes).collect());
    }
    let within = |bytes: &Vec<u8>| (0..3).flat_map(|before| within_base64(bytes, before)).collect::<Vec<_>>();
    forms.extend(inner.iter().flat_map(within));
    let letters = forms.iter().map(|form| Letters::of(form).letters);
    letters.filter(|letters| letters.len() >= FEWEST_LETTERS).collect()
}

/// In base32 (RFC 4648), alone: as far as its letters stand for `part` only.
fn base32(part: &[u8]) -> String {
    const LETTERS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let bit = |at: usize| usize::from((part[at / 8] >> (7 - at % 8)) & 1);
    let letter = |first: usize| char::from(LETTERS[(first..first + 5).fold(0, |letter, at| (letter << 1) | bit(at))]);
    (0..part.len() * 8 / 5).map(|letter_at| letter(letter_at * 5)).collect()
}

/// Percent-encoded text with the digits of each `%XX` in lower case.
pub(super) fn lower_case_hex(encoded: &str) -> String {
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
