//! Small reads, writes and prints, with errors that name the object.

use std::{fs, io::Write, net::SocketAddr, path::Path};

use tokio::net::TcpListener;

use crate::error::{Context, LocalError};

/// Prints a line of a result.
pub(crate) fn print_line(line: &str) -> Result<(), LocalError> {
    writeln!(std::io::stdout(), "{line}").context(|| "can't write to stdout".to_owned())
}

/// What is in a small file of /proc or /sys; empty if it can't be read.
pub(crate) fn read_line(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Rows of cells in aligned columns, two spaces apart. Every row has as many cells as the first one.
pub(crate) fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let widths = std::array::from_fn::<_, N, _>(|column| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    });
    let mut text = String::new();
    for row in rows {
        // `{:<width$}` takes no width above 65535.
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Writes a file.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), LocalError> {
    fs::write(path, text).context(|| format!("can't write {}", path.display()))
}

/// Listens at `address`.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener, LocalError> {
    TcpListener::bind(address).await.context(|| format!("can't listen on {address}"))
}
