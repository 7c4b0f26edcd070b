//! Files that a command reads: by name, or from stdin.

use std::{io, path::Path};

use super::Failure;

/// The content of a file that a person named.
pub(super) fn text_of(file: &Path) -> Result<String, Failure> {
    let read = if is_stdin(file) { io::read_to_string(io::stdin()) } else { std::fs::read_to_string(file) };
    read.map_err(|error| Failure::bad_input(format!("{}: {error}", shown(file).display())))
}

/// True for `-`.
pub(super) fn is_stdin(file: &Path) -> bool {
    file == Path::new("-")
}

/// The file's name in messages.
pub(super) fn shown(file: &Path) -> &Path {
    if is_stdin(file) { Path::new("stdin") } else { file }
}
