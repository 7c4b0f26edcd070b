//! Helpers for sentences in messages.

/// `count` and `thing`, in the plural if needed: `1 node`, `2 nodes`.
pub fn many(count: impl Into<u64>, thing: &str) -> String {
    let count = count.into();
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// `text` on one line, without characters that steer a terminal: a space for a line break or a tab, `?` for any other control
/// character and for those that change the direction of text (Unicode Standard Annex 9). Whoever writes into an object or a file
/// that we print chooses its characters.
pub fn visible(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        c if is_visible(c) => c,
        _ => '?',
    };
    text.chars().map(shown).collect()
}

/// True unless a terminal obeys the character, or it changes the direction of those beside it.
pub fn is_visible(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !turns
}

/// The same of a text that has several lines.
pub fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_character_steers_a_terminal() {
        for (text, expected) in [
            ("a b\u{e4}", "a b\u{e4}"),
            ("a\u{1b}[2Jb\u{9b}1m", "a?[2Jb?1m"),
            ("a\tb\r\n", "a b  "),
            ("n1\u{202e}2n", "n1?2n"),
        ] {
            assert_eq!(visible(text), expected);
        }
        assert_eq!(visible_lines("a\u{7}\nb\r\n"), "a?\nb \n");
    }

    #[test]
    fn only_one_thing_is_singular() {
        for (count, expected) in [(0_u32, "0 nodes"), (1, "1 node"), (2, "2 nodes")] {
            assert_eq!(many(count, "node"), expected);
        }
    }
}
