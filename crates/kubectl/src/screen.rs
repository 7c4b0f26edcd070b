//! How results are printed: tables, colours if a terminal shows them, and no character that steers the terminal.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Cell, Color, ContentArrangement, Table, presets};

use crate::{error::KubectlError, overview::Attention};
use base::words::{is_visible, visible, visible_lines};

/// Columns of an output that doesn't say how many it has.
const WIDTH: u16 = 100;

/// Fewest columns of a terminal that can show a table.
const LEAST_WIDTH: u16 = 20;

/// Where a table goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Screen {
    /// Most columns; None: as many as the longest line has.
    pub width: Option<u16>,
    /// Whether it obeys escape sequences.
    pub has_colours: bool,
}

impl Screen {
    /// One that has neither an end of its lines nor colours.
    #[cfg(test)]
    pub const FILE: Self = Self { width: None, has_colours: false };

    /// stdout as it is now: a terminal can change its width.
    pub fn stdout() -> Self {
        let is_terminal = io::stdout().is_terminal();
        let wants_none = std::env::var_os("NO_COLOR").is_some_and(|wish| !wish.is_empty());
        // Without a width of its own, a table asks the terminal. Some terminals say 0.
        let width = if is_terminal { Table::new().width().filter(|width| *width >= LEAST_WIDTH) } else { None };
        let has_colours = is_terminal && obeys_escapes() && !wants_none;
        Self { width: Some(width.unwrap_or(WIDTH)), has_colours }
    }

    /// The same without an end of its lines.
    pub fn endless(self) -> Self {
        Self { width: None, ..self }
    }
}

/// The colour of a cell on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colour {
    /// The terminal's own.
    Plain,
    Red,
    Yellow,
    Green,
}

impl From<Attention> for Colour {
    fn from(attention: Attention) -> Self {
        match attention {
            Attention::Nothing => Self::Green,
            Attention::Look => Self::Yellow,
            Attention::Act => Self::Red,
        }
    }
}

/// A cell in the terminal's own colour.
pub(crate) fn plain(text: impl AsRef<str>) -> Cell {
    cell(text, Colour::Plain)
}

/// One cell.
pub(crate) fn cell(text: impl AsRef<str>, colour: impl Into<Colour>) -> Cell {
    let cell = Cell::new(visible(text.as_ref()));
    match colour.into() {
        Colour::Plain => cell,
        Colour::Red => cell.fg(Color::Red),
        Colour::Yellow => cell.fg(Color::Yellow),
        Colour::Green => cell.fg(Color::Green),
    }
}

/// A table without lines between its cells. Pure: the screen says what stdout can show.
pub(crate) fn table(rows: impl IntoIterator<Item = Vec<Cell>>, screen: Screen) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows).force_no_tty();
    if screen.has_colours {
        table.enforce_styling();
    }
    if let Some(width) = screen.width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Writes to stdout.
///
/// # Errors
/// stdout can't be written.
pub(crate) fn print(text: &str) -> Result<(), KubectlError> {
    base::process::print(text).map_err(KubectlError::Write)
}

/// Writes to stderr. If nobody reads that, nobody can hear it.
pub(crate) fn complain(text: &str) {
    let _ = io::stderr().write_all(visible_lines(text).as_bytes());
}

/// True if TERM names a terminal that obeys escape sequences.
pub(crate) fn obeys_escapes() -> bool {
    std::env::var_os("TERM").is_some_and(|kind| !kind.is_empty() && kind != "dumb")
}

/// Writes over what stands on the screen; if stdout is none that can be written over, after `between`.
///
/// # Errors
/// stdout can't be written.
pub(crate) fn print_anew(text: &str, between: &str) -> Result<(), KubectlError> {
    // ECMA-48: to the first column of the first line, and erase what follows.
    let clear = if io::stdout().is_terminal() && obeys_escapes() { "\x1b[H\x1b[2J" } else { between };
    print(&format!("{clear}{text}"))
}

/// As JSON, for programs.
///
/// # Errors
/// The value has no form in JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String, KubectlError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| KubectlError::Format("JSON", error.into()))?;
    // RFC 8259: a string may hold any character of these as it is, but a terminal obeys some.
    let escaped = |c: char| if c == '\n' || is_visible(c) { c.to_string() } else { format!("\\u{:04x}", u32::from(c)) };
    Ok(text.chars().map(escaped).collect::<String>() + "\n")
}

/// As YAML, for people and programs.
///
/// # Errors
/// The value has no form in YAML.
pub(crate) fn yaml(value: &impl serde::Serialize) -> Result<String, KubectlError> {
    let text = serde_norway::to_string(value).map_err(|error| KubectlError::Format("YAML", io::Error::other(error)))?;
    // A plain string of YAML has no escapes.
    Ok(text.chars().map(|c| if c == '\n' || is_visible(c) { c } else { '?' }).collect())
}

/// The word that stands in the object for a phase.
pub(crate) fn word(phase: &impl serde::Serialize) -> String {
    serde_json::to_value(phase).ok().and_then(|word| word.as_str().map(visible)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_screen_with_colours_gets_them() {
        let rows = || [vec![cell("bad", Colour::Red), plain("x".repeat(20))]];
        let wide = format!("bad  {}\n", "x".repeat(20));
        assert_eq!(table(rows(), Screen::FILE), wide);
        let narrow = table(rows(), Screen { width: Some(12), has_colours: false });
        assert!(narrow.lines().count() > 1 && narrow.lines().all(|line| line.len() <= 12), "{narrow}");
        let coloured = table(rows(), Screen { width: None, has_colours: true });
        assert!(coloured.contains('\u{1b}') && coloured.contains("bad"), "{coloured:?}");
    }

    #[test]
    fn no_format_for_programs_steers_a_terminal() {
        let text = "a\u{9b}31m\u{202e}\u{1b}b\n";
        assert_eq!(json(&text).unwrap(), "\"a\\u009b31m\\u202e\\u001bb\\n\"\n");
        assert_eq!(serde_json::from_str::<String>(&json(&text).unwrap()).unwrap(), text);
        assert!(yaml(&text).unwrap().chars().all(|c| c == '\n' || is_visible(c)));
    }
}
