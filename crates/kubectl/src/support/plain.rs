//! A text as a decoder reads it: escapes don't keep a secret from being found, nor, if it is long, do quotes, signs and the ends
//! of lines. Pure.

/// Deepest nesting of percent-encoding that is undone.
const MOST_ENCODINGS: usize = 4;
/// What stands for a sign in XML and HTML.
const ENTITIES: [(&str, char); 5] = [("&amp;", '&'), ("&lt;", '<'), ("&gt;", '>'), ("&quot;", '"'), ("&apos;", '\'')];
/// Longest entity that is undone, in bytes: `&#x10FFFF;`.
const LONGEST_ENTITY: usize = 10;

/// What a piece of a text stands for.
enum Piece {
    Nothing,
    Byte(u8),
    Character(char),
}

/// The bytes for which a text stands, and where each one begins and ends in the text.
#[derive(Debug, Default)]
pub(super) struct Plain {
    pub bytes: Vec<u8>,
    pub places: Vec<(usize, usize)>,
}

impl Plain {
    /// Those of `text`: percent-encoding, escapes such as `\u0041`, and entities count as what they stand for. Other backslashes don't count,
    /// and neither does the time at the beginning of a log's line.
    pub fn of(text: &str) -> Self {
        let mut found = Self::default();
        let mut at = time(text);
        while let Some(first) = text[at..].chars().next() {
            let rest = &text[at..];
            let (stands_for, length) = match first {
                '%' => percent(rest),
                '\\' => escape(rest),
                '&' => entity(rest),
                '\n' => (Piece::Character('\n'), 1 + time(&rest[1..])),
                _ => (Piece::Character(first), first.len_utf8()),
            };
            let place = (at, at + length);
            match stands_for {
                Piece::Nothing => {}
                Piece::Byte(byte) => found.push(byte, place),
                Piece::Character(character) => {
                    character.encode_utf8(&mut [0; 4]).bytes().for_each(|byte| found.push(byte, place));
                }
            }
            at += length;
        }
        found
    }

    /// The same for what it stands for: text is escaped more than once, such as HTML in JSON. `None` if nothing is.
    pub fn again(&self) -> Option<Self> {
        if !self.bytes.iter().any(|byte| b"%\\&".contains(byte)) {
            return None;
        }
        let chunk = |chunk: std::str::Utf8Chunk| format!("{}{}", chunk.valid(), "?".repeat(chunk.invalid().len()));
        let mut again = Self::of(&self.bytes.utf8_chunks().map(chunk).collect::<String>());
        for (begin, end) in &mut again.places {
            (*begin, *end) = (self.places[*begin].0, self.places[*end - 1].1);
        }
        Some(again)
    }

    /// Its letters and digits alone, in lower case. The bytes of a character that ASCII lacks are letters.
    pub fn letters(&self) -> Self {
        let mut letters = Self::default();
        for (byte, place) in self.bytes.iter().zip(&self.places) {
            if byte.is_ascii_alphanumeric() || !byte.is_ascii() {
                letters.push(byte.to_ascii_lowercase(), *place);
            }
        }
        letters
    }

    fn push(&mut self, byte: u8, place: (usize, usize)) {
        self.bytes.push(byte);
        self.places.push(place);
    }
}

/// What `%41` at the beginning of `text` stands for, also if it is encoded once more as `%2541`; and its length.
fn percent(text: &str) -> (Piece, usize) {
    let again = text.as_bytes()[1..].chunks(2).take(MOST_ENCODINGS).take_while(|pair| *pair == b"25").count();
    let begin = 1 + 2 * again;
    match byte(text, begin) {
        Some(byte) => (Piece::Byte(byte), begin + 2),
        None => (Piece::Character('%'), begin),
    }
}

/// What an escape at the beginning of `text` stands for, whether it is escaped once more or not, and its length.
fn escape(text: &str) -> (Piece, usize) {
    let begin = text.bytes().take_while(|byte| *byte == b'\\').count();
    let known = match text.as_bytes().get(begin) {
        Some(b'n') => Some((Piece::Character('\n'), 1)),
        Some(b'r') => Some((Piece::Character('\r'), 1)),
        Some(b't') => Some((Piece::Character('\t'), 1)),
        Some(b'x') => byte(text, begin + 1).map(|byte| (Piece::Byte(byte), 3)),
        Some(b'u') => of_utf16(&text[begin..], begin).or_else(|| in_braces(&text[begin..])),
        Some(b'U') => hexadecimal(text, begin + 1, 8).and_then(char::from_u32).map(|c| (Piece::Character(c), 9)),
        Some(b'0'..=b'3') => {
            let byte = text.get(begin..begin + 3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
            byte.map(|byte| (Piece::Byte(byte), 3))
        }
        _ => None,
    };
    known.map_or((Piece::Nothing, begin), |(piece, length)| (piece, begin + length))
}

/// What `u0041` stands for, or two such with `backslashes` before the second, as UTF-16 has it; and their length.
fn of_utf16(text: &str, backslashes: usize) -> Option<(Piece, usize)> {
    let unit = |at: usize| u16::try_from(hexadecimal(text, at, 4)?).ok();
    let (first, second) = (unit(1)?, 5 + backslashes);
    let is_pair = text[5..].starts_with(&format!("{}u", "\\".repeat(backslashes)));
    let units = [Some(first), is_pair.then(|| unit(second + 1)).flatten()];
    let letter = char::decode_utf16(units.into_iter().flatten()).next()?.ok()?;
    Some((Piece::Character(letter), if letter.len_utf16() == 2 { second + 5 } else { 5 }))
}

/// What `u{41}`, as Rust and JavaScript write it, stands for, and its length.
fn in_braces(text: &str) -> Option<(Piece, usize)> {
    let digits = text.strip_prefix("u{")?.bytes().take(7).position(|byte| byte == b'}')?;
    let letter = char::from_u32(hexadecimal(text, 2, digits)?)?;
    Some((Piece::Character(letter), digits + 3))
}

/// What `&#65;`, `&#x41;` or a name at the beginning of `text` stands for, and its length.
fn entity(text: &str) -> (Piece, usize) {
    if let Some((name, sign)) = ENTITIES.iter().find(|(name, _)| text.starts_with(name)) {
        return (Piece::Character(*sign), name.len());
    }
    let end = text.bytes().take(LONGEST_ENTITY).position(|byte| byte == b';');
    let code = text.strip_prefix("&#").and_then(|rest| rest.get(..end? - 2));
    let number = code.and_then(|code| match code.strip_prefix(['x', 'X']) {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => code.parse().ok(),
    });
    let letter = number.and_then(char::from_u32).zip(end);
    letter.map_or((Piece::Character('&'), 1), |(letter, end)| (Piece::Character(letter), end + 1))
}

fn byte(text: &str, begin: usize) -> Option<u8> {
    u8::try_from(hexadecimal(text, begin, 2)?).ok()
}

fn hexadecimal(text: &str, begin: usize, digits: usize) -> Option<u32> {
    let digits = text.get(begin..begin + digits)?;
    if digits.bytes().all(|digit| digit.is_ascii_hexdigit()) { u32::from_str_radix(digits, 16).ok() } else { None }
}

/// Length of the time at the beginning of a log's line, as kubelet writes it (RFC 3339); 0 if there is none.
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
    fn signs_and_the_ends_of_lines_are_no_letters() {
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
            assert_eq!(String::from_utf8(Plain::of(text).letters().bytes).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn escapes_are_undone_and_signs_stay() {
        for (text, expected) in [
            ("a-%62%2563%25-%zz%4", "a-bc%-%zz%4"),
            (r#"{\"a\":\"\\n\u002d\\x2b"}"#, "{\"a\":\"\n-+\"}"),
            (r"C:\\d \055\9", "C:d -9"),
            ("&lt;a&amp;&quot;&#45;&#x2b;&;&gt;", "<a&\"-+&;>"),
            ("2026-11-28T18:07:03Z a b\n2026-11-28T18:07:03Z c", " a b\n c"),
            ("%&\\&#", "%&&#"),
            ("ä\\ß", "äß"),
            (r"\u00e4\xc3\xa4%C3%A4&#228;&#x1F600;\ud83d", "ääää😀ud83d"),
            (r"\ud83d\ude00\\ud83d\\ude00\u0041\u0042\ud83d\u0041", "😀😀ABud83dA"),
            (r"\u{e4}\\u{1F600}\u{}\u{1F6000000}\U0001f600\U00110000\u{ä}", "ä😀u{}u{1F6000000}😀U00110000u{ä}"),
            ("&#0000000000065;", "&#0000000000065;"),
        ] {
            assert_eq!(String::from_utf8(Plain::of(text).bytes).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn each_letter_has_its_place() {
        let text = r"-%2541ä\\u0042&#67;-";
        let places = Plain::of(text).letters().places;
        let pieces: Vec<_> = places.iter().map(|(begin, end)| &text[*begin..*end]).collect();
        assert_eq!(pieces, ["%2541", "ä", "ä", r"\\u0042", "&#67;"]);
    }
}
