//! Takes secrets out of text. Pure.

use std::collections::BTreeSet;

use base::redact::redacted;
use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE},
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

/// What stands in the place of a secret.
const MASK: &str = "***";
/// Shortest secret that is looked for: a shorter one is found in half of all words.
const SHORTEST: usize = 4;
/// Shortest word of a longer secret, such as a key in a certificate, that is looked for by itself.
const SHORTEST_WORD: usize = 16;
/// A JSON Web Token (RFC 7519) begins with this: base64 of `{"`.
const JWT: &str = "eyJ";

/// What has to be taken out.
pub(super) struct Scrub(Vec<String>);

impl Scrub {
    /// `secrets`: the values of Secrets. Each one is looked for whole and in parts, in all the forms in which logs and objects hold such
    /// things: as it is, in JSON, percent-encoded, in hexadecimal digits, and in base64, alone or within something longer.
    pub fn of<'a>(secrets: impl Iterator<Item = &'a [u8]>) -> Self {
        let parts: BTreeSet<Vec<u8>> = secrets.flat_map(parts).collect();
        let mut forms: Vec<String> = parts.iter().flat_map(|part| forms(part)).collect();
        // A part of a secret must not be taken out of the whole, which then would not be found.
        forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
        forms.dedup();
        Self(forms)
    }

    /// `text` without the secrets, without credentials in URLs, and without what looks like a token or a key.
    pub fn text(&self, text: &str) -> String {
        let mut text = redacted(text);
        for form in &self.0 {
            if text.contains(form.as_str()) {
                text = text.replace(form.as_str(), MASK);
            }
        }
        text.split_inclusive('\n').map(without_patterns).collect()
    }
}

/// A line without a private key in PEM or ZPL, without `Bearer TOKEN`, and without JSON Web Tokens.
fn without_patterns(line: &str) -> String {
    if line.contains("PRIVATE KEY") || line.contains("secret-key") {
        return format!("{MASK}\n");
    }
    let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',');
    let mut after_bearer = false;
    line.split_inclusive(is_end)
        .map(|word| {
            let bare = word.trim_end_matches(is_end);
            let is_secret = after_bearer || bare.contains(JWT) && bare.len() > 40;
            after_bearer = bare.eq_ignore_ascii_case("bearer");
            if is_secret && !bare.is_empty() { word.replace(bare, MASK) } else { word.to_owned() }
        })
        .collect()
}

/// A secret, and the parts of it that are secrets themselves.
fn parts(secret: &[u8]) -> Vec<Vec<u8>> {
    let text = String::from_utf8_lossy(secret);
    let mut parts = vec![secret.to_vec(), text.trim().as_bytes().to_vec()];
    // `.dockerconfigjson`, `credentials.json`
    if let Ok(json) = serde_json::from_str::<Value>(&text) {
        leaves(&json, &mut parts);
    }
    let is_end = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',');
    let words = text.split(is_end).filter(|word| word.len() >= SHORTEST_WORD);
    parts.extend(words.map(|word| word.as_bytes().to_vec()));
    parts.retain(|part| part.len() >= SHORTEST);
    parts
}

/// The texts in a JSON document; of `user:password` in base64, as registries have it, the password too.
fn leaves(json: &Value, found: &mut Vec<Vec<u8>>) {
    match json {
        Value::String(text) => {
            found.push(text.as_bytes().to_vec());
            if let Some((_, password)) = BASE64_STANDARD
                .decode(text)
                .ok()
                .and_then(|login| String::from_utf8(login).ok())
                .as_deref()
                .and_then(|login| login.split_once(':'))
            {
                found.push(password.as_bytes().to_vec());
            }
        }
        Value::Array(items) => items.iter().for_each(|item| leaves(item, found)),
        Value::Object(fields) => fields.values().for_each(|value| leaves(value, found)),
        _ => {}
    }
}

fn forms(part: &[u8]) -> Vec<String> {
    let hex: String = part.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![hex.to_uppercase(), hex];
    if let Ok(text) = std::str::from_utf8(part) {
        let json = Value::from(text).to_string();
        let encoded = utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        forms.extend([text.to_owned(), json[1..json.len() - 1].to_owned(), encoded.to_lowercase(), encoded]);
    }
    forms.extend((0..3).flat_map(|before| within_base64(part, before)));
    forms.retain(|form| form.len() >= SHORTEST);
    forms
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
    use super::*;

    const CERTIFICATE: &str = "metadata\n    name = \"flux\"\ncurve\n    public-key = \"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\"\n    secret-key = \"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6\"\n";

    #[test]
    fn no_secret_is_left_in_any_form() {
        let login = BASE64_STANDARD.encode("robot:hunter2-of-the-registry");
        let docker = format!("{{\"auths\":{{\"registry.example.org\":{{\"auth\":\"{login}\"}}}}}}");
        let secrets = [CERTIFICATE, "t0ken/with+signs=", &docker];
        let scrub = Scrub::of(secrets.iter().map(|secret| secret.as_bytes()));
        let key = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6";
        for secret in [key, "t0ken/with+signs=", "hunter2-of-the-registry", &login] {
            let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
            let percent = utf8_percent_encode(secret, NON_ALPHANUMERIC).to_string();
            for form in [
                secret.to_owned(),
                Value::from(secret).to_string(),
                percent.to_lowercase(),
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

    #[test]
    fn what_nobody_has_told_of_is_found_by_its_looks() {
        let scrub = Scrub::of(std::iter::empty());
        for (line, expected) in [
            ("https://me:pass@example.org/x\n", "https://***@example.org/x\n"),
            ("Authorization: Bearer abcdef, next\n", "Authorization: Bearer ***, next\n"),
            ("token eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrIn0.c2ln\n", "token ***\n"),
            ("    secret-key = \"x\"\n", "***\n"),
            ("-----BEGIN PRIVATE KEY-----\n", "***\n"),
            ("all 4 nodes are online\n", "all 4 nodes are online\n"),
        ] {
            assert_eq!(scrub.text(line), expected);
        }
    }
}
