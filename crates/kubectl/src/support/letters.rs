//! A text by its letters and digits alone, as whoever decodes it would read them: neither escapes, quotes and signs nor the ends of lines keep
//! a long secret from being found. Pure.

/// Deepest nesting of percent-encoding that is undone.
const MOST_ENCODINGS: usize = 4;
/// What stands for a sign in XML and HTML.
const ENTITIES: [&str; 5] = ["&amp;", "&lt;", "&gt;", "&quot;", "&apos;"];

/// The letters and digits of a text, in lower case, and where each one begins and ends in it.
#[derive(Debug, Default)]
pub(super) struct Letters {
    pub letters: Vec<u8>,
    pub places: Vec<(usize, usize)>,
}

impl Letters {
    /// Those of `text`. What percent-encoding, escapes such as `\u0041`, and entities stand for counts as what it is. The time at the begin of
    /// a log's line doesn't count. The bytes of a character that ASCII lacks are letters.
    pub fn of(text: &str) -> Self {
        let mut found = Self::default();
        let mut at = time(text);
        while let Some(first) = text[at..].chars().next() {
            let rest = &text[at..];
            let (letter, length) = match first {
                '%' => percent(rest),
                '\\' => escape(rest),
                '&' => entity(rest),
                '\n' => (None, 1 + time(&rest[1..])),
                _ => (None, first.len_utf8()),
            };
            let place = (at, at + length);
            match letter {
                Some(letter) => found.push(letter, place),
                None if first.is_ascii_alphanumeric() || !first.is_ascii() => {
                    rest[..length].bytes().for_each(|letter| found.push(letter, place));
                }
                None => {}
            }
            at += length;
        }
        found
    }

    fn push(&mut self, letter: u8, place: (usize, usize)) {
        if letter.is_ascii_alphanumeric() || !letter.is_ascii() {
            self.letters.push(letter.to_ascii_lowercase());
            self.places.push(place);
        }
    }
}

/// What `%41` at the begin of `text` stands for, also if it is encoded once more as `%2541`; and its length.
fn percent(text: &str) -> (Option<u8>, usize) {
    let again = text.as_bytes()[1..].chunks(2).take(MOST_ENCODINGS).take_while(|pair| *pair == b"25").count();
    let begin = 1 + 2 * again;
    hexadecimal(text, begin, 2).map_or((None, begin), |byte| (u8::try_from(byte).ok(), begin + 2))
}

/// What an escape at the begin of `text` stands for, whether it is escaped once more or not, and its length. White space is no letter.
fn escape(text: &str) -> (Option<u8>, usize) {
    let begin = text.bytes().take_while(|byte| *byte == b'\\').count();
    let digits = match text.as_bytes().get(begin) {
        Some(b'n' | b'r' | b't') => return (None, begin + 1),
        Some(b'x') => 2,
        Some(b'u') => 4,
        Some(b'0'..=b'3') => {
            let code = text.get(begin..begin + 3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
            return code.map_or((None, begin), |code| (Some(code), begin + 3));
        }
        _ => return (None, begin),
    };
    hexadecimal(text, begin + 1, digits).map_or((None, begin), |code| (u8::try_from(code).ok(), begin + 1 + digits))
}

/// What `&#65;`, `&#x41;` or a name at the begin of `text` stands for, and its length.
fn entity(text: &str) -> (Option<u8>, usize) {
    if let Some(sign) = ENTITIES.iter().find(|sign| text.starts_with(**sign)) {
        return (None, sign.len());
    }
    let code = text.strip_prefix("&#").and_then(|rest| rest.get(..rest.bytes().take(5).position(|byte| byte == b';')?));
    let Some(code) = code else { return (None, 1) };
    let number = match code.strip_prefix(['x', 'X']) {
        Some(digits) => u8::from_str_radix(digits, 16).ok(),
        None => code.parse().ok(),
    };
    (number, code.len() + "&#;".len())
}

fn hexadecimal(text: &str, begin: usize, digits: usize) -> Option<u32> {
    let digits = text.get(begin..begin + digits)?;
    if digits.bytes().all(|digit| digit.is_ascii_hexdigit()) { u32::from_str_radix(digits, 16).ok() } else { None }
}

/// Length of the time at the begin of a log's line, as kubelet writes it (RFC 3339); 0 if there is none.
fn time(text: &str) -> usize {
    const SHAPE: &[u8] = b"0000-00-00T00:00:00";
    let bytes = text.as_bytes();
    let is_like = |(byte, shape): (&u8, &u8)| if *shape == b'0' { byte.is_ascii_digit() } else { byte == shape };
    if bytes.len() < SHAPE.len() || !bytes.iter().zip(SHAPE).all(is_like) {
        return 0;
    }
    let rest = bytes[SHAPE.len()..].iter();
    SHAPE.len() + rest.take_while(|byte| byte.is_ascii_digit() || b".:+-Z".contains(byte)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_escapes_and_the_ends_of_lines_are_no_letters() {
        for (text, expected) in [
            ("Ab-1_2", "ab12"),
            ("a%62%2563%25-%zz%4", "abczz4"),
            (r#"a\\n\u0062\\x63\\\"d\q\u00zz"#, "abcdqu00zz"),
            (r"\141\\142\14\9\3", "ab1493"),
            ("a&amp;b&#99;&#x64;&#;&x", "abcdx"),
            ("2026-11-28T18:07:03.123Z ab\n2026-11-28T18:07:04+01:00 cd\n2026", "abcd2026"),
            ("%&\\&#", ""),
            ("\\ä%ä&ä&#ä", "ääää"),
        ] {
            assert_eq!(String::from_utf8(Letters::of(text).letters).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn each_letter_has_its_place() {
        let text = r"-%2541ä\\u0042&#67;-";
        let places = Letters::of(text).places;
        let pieces: Vec<_> = places.iter().map(|(begin, end)| &text[*begin..*end]).collect();
        assert_eq!(pieces, ["%2541", "ä", "ä", r"\\u0042", "&#67;"]);
    }
}
