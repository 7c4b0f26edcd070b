//! Takes secrets out of text. Pure.

use std::collections::{BTreeSet, HashMap};

use base::redact::redacted;
use serde_json::Value;

use super::{
    forms::{SHORTEST, forms, is_public, letters, parts},
    looks::{MASK, has_secret_name, without_patterns},
    plain::Plain,
};

/// Texts by their first bytes, in order.
#[derive(Default)]
struct ByBegin(HashMap<[u8; SHORTEST], Vec<Vec<u8>>>);

impl ByBegin {
    fn of(texts: BTreeSet<Vec<u8>>) -> Self {
        let mut known = Self::default();
        for text in texts {
            if let Some(begin) = text.first_chunk() {
                known.0.entry(*begin).or_default().push(text);
            }
        }
        known
    }

    /// Length of the longest of them with which `text` begins.
    fn longest(&self, text: &[u8]) -> Option<usize> {
        // In order, so that thousands that begin alike are not all compared with each place of a log.
        let mut same = text.first_chunk().and_then(|begin| self.0.get(begin))?.as_slice();
        let mut longest = None;
        for at in SHORTEST..=text.len() {
            if same.first()?.len() == at {
                longest = Some(at);
                same = &same[1..];
            }
            let (Some(byte), [first, rest @ ..]) = (text.get(at), same) else { break };
            if rest.is_empty() {
                return if text.starts_with(first) { Some(first.len()) } else { longest };
            }
            let begin = same.partition_point(|known| known[at] < *byte);
            let end = begin + same[begin..].partition_point(|known| known[at] == *byte);
            same = &same[begin..end];
            if same.is_empty() {
                break;
            }
        }
        longest
    }

    /// Where each of them begins and ends in the text that `plain` is of.
    fn places(&self, plain: &Plain) -> impl Iterator<Item = (usize, usize)> {
        (0..plain.bytes.len()).filter_map(|first| {
            let last = first + self.longest(&plain.bytes[first..])? - 1;
            Some((plain.places[first].0, plain.places[last].1))
        })
    }
}

/// What has to be taken out: the forms of all secrets, and the letters of these.
pub(super) struct Scrub {
    forms: ByBegin,
    letters: ByBegin,
}

impl Scrub {
    /// `secrets`: the names and values of Secrets. Each value is looked for whole and in parts, in all the forms in which logs and objects
    /// hold such things: as it is and backwards, in JSON and YAML, percent-encoded and escaped otherwise, in hexadecimal digits, and in base64
    /// and base85, alone or within something longer. If it is long, it is also looked for by its letters and digits alone.
    pub fn of<'a>(secrets: impl Iterator<Item = (&'a str, &'a [u8])>) -> Self {
        let secrets = secrets.filter(|(name, value)| !is_public(name, &String::from_utf8_lossy(value)));
        let parts: BTreeSet<Vec<u8>> = secrets.flat_map(|(_, value)| parts(value)).collect();
        let forms = parts.iter().flat_map(|part| forms(part)).flat_map(|form| {
            let plain = Plain::of(&form);
            let again = plain.again().map(|again| again.bytes);
            [plain.bytes, form.into_bytes()].into_iter().chain(again)
        });
        // What is no text stands in one as escapes.
        let forms = forms.chain(parts.iter().cloned());
        Self {
            forms: ByBegin::of(forms.collect()),
            letters: ByBegin::of(parts.iter().flat_map(|part| letters(part)).collect()),
        }
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
        let form = |at: usize| Some((at, text.ceil_char_boundary(at + self.forms.longest(&text.as_bytes()[at..])?)));
        let mut places: Vec<(usize, usize)> = text.char_indices().filter_map(|(at, _)| form(at)).collect();
        let plain = Plain::of(text);
        for plain in plain.again().iter().chain([&plain]) {
            places.extend(self.forms.places(plain));
            places.extend(self.letters.places(&plain.letters()));
        }
        places.sort_unstable();
        let (mut safe, mut done) = (String::with_capacity(text.len()), None);
        for (at, end) in places {
            if done.is_none_or(|done| at > done) {
                safe.push_str(&text[done.unwrap_or(0)..at]);
                safe.push_str(MASK);
            }
            done = done.max(Some(end));
        }
        safe + &text[done.unwrap_or(0)..]
    }
}

#[cfg(test)]
mod tests {
    use base64::{
        Engine,
        prelude::{BASE64_STANDARD, BASE64_URL_SAFE},
    };

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
            let percent = |encoded: fn(u8) -> String| -> String {
                let one = |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte).into() } else { encoded(byte) };
                secret.bytes().map(one).collect()
            };
            for form in [
                secret.to_owned(),
                Value::from(secret).to_string(),
                percent(|byte| format!("%{byte:02x}")),
                Value::from(secret).to_string().replace('>', "\\u003e").replace('<', "\\u003c").replace('&', "\\u0026"),
                percent(|byte| format!("%{byte:02X}")),
                // What RFC 3986 leaves as it is.
                percent(|byte| if b"-_.~".contains(&byte) { char::from(byte).into() } else { format!("%{byte:02X}") }),
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
            ("https://me:pw-77@example.org/x@2", "pw-77!", "***!"),
            ("https://a:pw-one1@h1.x,https://b:pw-two2@h2.x", "pw-one1 pw-two2", "*** ***"),
            ("https://me:p%40ss%2Fword@example.org/x", "bWU6cEBzcy93b3Jk", "bWU6***"),
            ("URL=https://me:pw-77@example.org/x\n", "get https://other.org/y", "get https://other.org/y"),
            ("level=info\nhost=login1\npin=abcd1\n", "INFO info login1 abcd1", "INFO info login1 ***"),
            ("tokA-123\ntokB-456\n", "used tokB-456", "used ***"),
            ("two wo ab", "two+wo+ab", "***"),
            ("{\"auth\": \"bWU6aHVudGVyMg\"}", "hunter2", "***"),
            ("it's", "key 'it''s'", "key '***'"),
            ("abcdef", "abcdef", "***"),
            // A login of someone named as a field is, and what has no scheme, or more signs and blanks than one expects.
            ("user:hunter2", "hunter2!", "***!"),
            ("localhost:5432:app:user:hunter2", "hunter2!", "***!"),
            ("me:pw-77@tcp(db:3306)/x", "pw-77!", "***!"),
            ("Server=db1;Password=pw=77x:yz1;", "pw=77x:yz1!", "***!"),
            ("Password=my pass 1;Server=x", "my pass 1!", "***!"),
            ("host=h password='my pass' dbname=d", "my pass!", "***!"),
            ("https://a:p/w-one@h1 https://b:p/w-two@h2", "p/w-one!", "***!"),
            ("{\"u\": \"https:\\/\\/me:pw-77@h\\/x\"}", "pw-77!", "***!"),
            ("{\"tok-abcdef1234567890\": \"alice\"}", "tok-abcdef1234567890!", "***!"),
            ("pw 'q' 7", r"'pw '\''q'\'' 7'", "'***'"),
        ] {
            assert_eq!(scrubbed(&[("value", secret)], text), expected, "{secret}");
        }
        assert_eq!(scrubbed(&[("username", "robot"), ("password", "wxyz9")], "robot wxyz9"), "robot ***");
        for (name, value) in [("database", "postgres://app:pw-77@db/app"), ("server", "a: pw-77\nb: c")] {
            assert_eq!(scrubbed(&[(name, value)], "pw-77!"), "***!", "{name}");
        }
    }

    #[test]
    fn a_long_secret_is_found_whatever_stands_between_its_letters() {
        let secret = "correct-Horse/\"battery\"+Staple=42&<x>";
        let base64 = |text: &str| BASE64_STANDARD.encode(text);
        let split = |text: &str, end: &str| {
            let pieces: Vec<_> = text.as_bytes().chunks(7).map(String::from_utf8_lossy).collect();
            pieces.join(end)
        };
        let json = Value::from(secret).to_string();
        for form in [
            split(secret, "\n  "),
            split(&base64(secret), "\n2026-11-28T18:07:03.123456789Z "),
            split(&base64(secret), "\\n"),
            split(&hex::encode(secret), ":"),
            hex::encode(secret)
                .as_bytes()
                .chunks(2)
                .map(|pair| format!("\\x{}", String::from_utf8_lossy(pair)))
                .collect(),
            format!("{:?}", secret.as_bytes()),
            format!("{:?}", secret.as_bytes()).replace(',', ""),
            secret.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;"),
            Value::from(json.clone()).to_string(),
            base64(&json),
            base64(&base64(secret)),
            base64(&hex::encode(secret)),
            BASE64_STANDARD.encode(secret.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>()),
            secret.bytes().map(|byte| format!("\\{byte:03o}")).collect(),
            "MNXXE4TFMN2C2SDPOJZWKLZCMJQXI5DFOJ4SEK2TORQXA3DFHU2DEJR4PA7A====".to_owned(),
            base64(secret).replace('+', "%2B").replace('/', "%2f").replace('=', "%3D"),
            secret.replace('H', "%2548").replace('S', "%53"),
            secret.to_uppercase(),
            secret.bytes().map(|byte| format!("{byte:#x}, ")).collect(),
            secret.chars().rev().collect(),
            base64(secret).chars().rev().collect(),
            r"V{dYDWn*+LNN;j;WiKLPVRUq5a(N;vQ*>c)Y-K$(GA2BDJ^".to_owned(),
            r"v@DydwN/*lnn&J&wIklpvruQ5A^n&Vq/(C!y?k:^ga2bdj]".to_owned(),
            Value::from(r"@rHC.ARfg688iNiAM56:@<?U&Ed8iZ;flGeCh5ad1+#,.4o").to_string(),
        ] {
            let text = scrubbed(&[("value", secret)], &format!("before {form} after\n"));
            let rest = text.replace(MASK, "");
            assert!(rest.starts_with("before ") && rest.ends_with(" after\n"), "{form}: {text}");
            // Of base64, letters are left that the secret shares with what stands beside it.
            assert!(Plain::of(&rest).letters().bytes.len() < "beforeafter".len() + 5, "{form}: {text}");
        }
        let sentence = "The horse is correct, and the staple holds 42 batteries.\n";
        assert_eq!(scrubbed(&[("value", secret)], sentence), sentence);
    }

    #[test]
    fn a_short_secret_is_found_escaped_backwards_or_in_base85() {
        let secret = "pw-77-xy";
        for form in [
            "\\x70\\x77-77-xy",
            "pw\\\\u002d77\\\\u002dxy",
            r"\160\167\055\067\067\055\170\171",
            "&#112;w&#x2d;77-xy",
            "p%77-77-x%2579",
            "yx-77-wp",
            "aCa>?H!XO1",
            "E-Elm2_B9\"",
            "AcA()h.xo1",
        ] {
            assert_eq!(scrubbed(&[("value", secret)], &format!("<{form}>")), "<***>", "{form}");
        }
        // Within something longer, in RFC 1924's base85: "a…b", and "…z" with the end of a line.
        assert!(!scrubbed(&[("value", secret)], "VQ_aXH#aSKd13").contains("H#aSK"));
        assert!(!scrubbed(&[("value", "pw-77-xyz")], "aCa>?H!XO1dI|").contains("H!XO1"));
        for form in [
            r"pw%5Cu002d77-xy",
            "pw&amp;#45;77-xy",
            r"pw\u0026#45;77-xy",
            r"pw\x2577-xy".replace("77", "2d77").as_str(),
        ] {
            assert_eq!(scrubbed(&[("value", secret)], &format!("<{form}>")), "<***>", "{form}");
        }
        let secret = "pä-7ß-x€";
        for form in [r"p\u00e4-7\u00df-x\u20ac", "p&#228;-7&#xdf;-x&#8364;", "p%C3%A4-7%c3%9f-x%e2%82%ac"] {
            assert_eq!(scrubbed(&[("value", secret)], &format!("<{form}>")), "<***>", "{form}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_found_as_escapes() {
        let secret: Vec<u8> = (0..32_u8).map(|byte| byte.wrapping_mul(73).wrapping_add(131)).collect();
        let scrub = Scrub::of(std::iter::once(("value", secret.as_slice())));
        let escapes: [fn(&u8) -> String; 3] =
            [|byte| format!("\\x{byte:02x}"), |byte| format!("\\{byte:03o}"), |byte| format!("%{byte:02X}")];
        for escape in escapes {
            let text: String = secret.iter().map(escape).collect();
            assert_eq!(scrub.text(&format!("<{text}>")), "<***>", "{text}");
        }
        // The form of a secret may end within a character of the text.
        assert_eq!(scrubbed(&[("value", "abcd%c3")], "%4abcdä!"), "%4***!");
    }

    #[test]
    fn a_small_secret_takes_no_gigabytes() {
        let aliases = format!("a: &a [{}]\nb: [{}]\nkey: pw-77\n", "a,".repeat(1 << 15), "*a ,".repeat(1 << 15));
        assert_eq!(scrubbed(&[("value", &aliases)], "pw-77!"), "***!");
        let urls = "\"https://u:p-1@h/x\",".repeat(1 << 12);
        assert!(parts(urls.as_bytes()).iter().map(Vec::len).sum::<usize>() < 4 * urls.len());
    }

    #[test]
    fn the_longest_text_is_found_among_those_that_begin_alike() {
        let known: BTreeSet<Vec<u8>> = ["abcd", "abcde", "abcdxyz", "abcdef", "abcx", "abcdefgh"]
            .iter()
            .map(|text| text.as_bytes().to_vec())
            .collect();
        let by_begin = ByBegin::of(known.clone());
        for text in ["abcd", "abcdx", "abcdxyz1", "abcdefg", "abcdefghi", "abcx", "abc", "", "abcy", "abcdz"] {
            let text = text.as_bytes();
            let expected = known.iter().filter(|known| text.starts_with(known)).map(Vec::len).max();
            assert_eq!(by_begin.longest(text), expected, "{text:?}");
        }
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
    fn what_stands_beside_a_secret_stays_readable() {
        let key = "+8M}7Mne75j8311?gT{DDzC62brArt0zcS88asUB";
        let keygen = format!(
            "#  ZeroMQ CURVE **Secret** Certificate\n\nmetadata\n    name = \"flux\"\n    keygen.flux-core-version = \"0.88.0\"\n    \
             keygen.hostname = \"login1\"\n    keygen.time = \"2026-11-28T19:32:38\"\ncurve\n    secret-key = \"{key}\"\n"
        );
        let log = "2026-11-28T19:32:40Z login1 has Flux 0.88.0\n";
        assert_eq!(scrubbed(&[("curve.cert", &keygen)], &format!("{log}{key}")), format!("{log}{MASK}"));
        let login = r#"{"auths": {"https://registry.example.org/v2": {"username": "robot", "password": "hunter2hunter2hunter2"}}}"#;
        let log = "GET https://registry.example.org/v2: 401\n";
        let told = format!("{log}hunter2hunter2hunter2");
        assert_eq!(scrubbed(&[(".dockerconfigjson", login)], &told), format!("{log}{MASK}"));
        let log = "INFO login1.cluster.example.org: ConfigMap flux-roster, kubernetes.io/os, registry.example.org/flux:0.88.0, level=info, information\n";
        for (name, value) in [
            (
                "curve.cert",
                "#   ZeroMQ CURVE **Secret** Certificate\nmetadata\n    name = \"login1.cluster.example.org\"\n",
            ),
            (
                "config",
                "apiVersion: v1\nkind: Config\ncontexts:\n- context:\n    cluster: kubernetes\n    user: me\n  name: kubernetes\n",
            ),
            (".netrc", "machine registry.example.org login me password pw-77\n"),
            (".npmrc", "//registry.example.org/:_authToken=npm-1\n"),
            ("url", "https://me:pw-77@registry.example.org/x\n"),
            ("env", "LOG_LEVEL=info\nDB_HOST=registry.example.org\nFORMAT=info\n"),
            ("DB_HOST", "registry.example.org"),
        ] {
            assert_eq!(scrubbed(&[(name, value)], log), log, "{name}");
        }
        let in_name = r#"{"https://robot:hunter2hunter2@registry.example.org": "x"}"#;
        assert_eq!(scrubbed(&[("logins", in_name)], "hunter2hunter2"), MASK);
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
            ("x: KLUv/SQKUQAAaGVsbG8gd29ybGT/AAAAAAAAAAAAAAA=\n", "x: ***\n"),
            ("x=/Td6WFoAAATm1rRGBMAODiEBFgAAAAAAAAAAAAAAAAA=\n", "***\n"),
            ("x: QlpoMTFBWSZTWb0AAAFRAAAQYAQAABAgADDMDBpAAAA=\n", "x: ***\n"),
            ("x: UEsDBBQAAAAIAAAAIQAAAAAAAAAAAAAAAAAFAAAAaGVs\n", "x: ***\n"),
            ("roster: H4sIAAAAAAAAA8tIzcnJVyjPL8pJUQQAjRqfDgwAAAA=\n", "roster: ***\n"),
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
