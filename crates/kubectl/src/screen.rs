//! How results are put on paper: tables, colours where a terminal shows them, and nothing that could steer the terminal.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Cell, Color, ContentArrangement, Table, presets};

/// Columns of a screen that doesn't say how many it has.
const WIDTH: u16 = 100;

/// `text` without control characters: an agent's token that was stolen may have written it, and a terminal obeys them.
pub(crate) fn visible(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// The same of a text that has several lines.
pub(crate) fn visible_lines(text: &str) -> String {
    text.split('\n').map(visible).collect::<Vec<_>>().join("\n")
}

/// How a cell looks on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    Plain,
    /// Somebody has to do something.
    Bad,
    /// Not as usual.
    Unusual,
    /// As wished.
    Good,
}

/// One cell.
pub(crate) fn cell(text: impl AsRef<str>, look: Look) -> Cell {
    let cell = Cell::new(visible(text.as_ref()));
    match look {
        Look::Plain => cell,
        Look::Bad => cell.fg(Color::Red),
        Look::Unusual => cell.fg(Color::Yellow),
        Look::Good => cell.fg(Color::Green),
    }
}

/// A table without lines, as wide as the terminal at most. `width` None: as wide as its longest lines.
pub(crate) fn table(rows: impl IntoIterator<Item = Vec<Cell>>, width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// The columns of the screen.
pub(crate) fn width() -> u16 {
    if !io::stdout().is_terminal() {
        return WIDTH;
    }
    // A table asks the terminal when it has no width of its own.
    Table::new().width().unwrap_or(WIDTH)
}

/// Writes to stdout.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Writes over what stands on the terminal; after it, elsewhere.
pub(crate) fn print_anew(text: &str) -> io::Result<()> {
    // ECMA-48: to the first column of the first line, and erase what follows.
    let clear = if io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    print(&format!("{clear}{text}"))
}

/// As JSON, for programs.
pub(crate) fn json(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// As YAML, for people and programs.
pub(crate) fn yaml(value: &impl serde::Serialize) -> io::Result<String> {
    serde_norway::to_string(value).map_err(io::Error::other)
}

/// The word that stands in the object for a phase.
pub(crate) fn word(phase: &impl serde::Serialize) -> String {
    serde_json::to_value(phase).ok().and_then(|word| word.as_str().map(visible)).unwrap_or_default()
}
