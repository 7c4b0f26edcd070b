//! What a person's Ctrl-C does to a command that writes a file.

use std::{
    io::{self, Write},
    process,
    sync::mpsc::{Sender, channel},
    thread,
};

use tokio::signal::unix::{SignalKind, signal};

use crate::{OutputFormat, files::remove_unfinished, progress::show::Style};

/// From now on, SIGINT and SIGTERM end this process at once: what is unfinished is removed, and a person reads `what_stays`. The exit code is
/// 128 + signal, as in a shell. If nothing can wait for them, they end the process as they do any other.
pub fn end_if_interrupted(what_stays: String) {
    let (waits, is_waiting) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let Some(number) = runtime.ok().and_then(|runtime| runtime.block_on(first_signal(waits))) else { return };
        // Until the end, nothing else can be begun.
        let _held = remove_unfinished();
        // The bar, and the terminal's own `^C`.
        let erase = if Style::of(OutputFormat::Text) == Style::Bar { "\r\x1b[2K" } else { "" };
        let _ = writeln!(io::stderr(), "{erase}flux-distribute: interrupted: {what_stays}");
        process::exit(128 + number);
    });
    // An error says that nothing waits.
    let _ = is_waiting.recv();
}

/// The number of the first signal; None if none can be waited for. Says when the wait begins.
async fn first_signal(waits: Sender<()>) -> Option<i32> {
    let [mut interrupt, mut terminate] = [signal(SignalKind::interrupt()).ok()?, signal(SignalKind::terminate()).ok()?];
    let _ = waits.send(());
    tokio::select! {
        _ = interrupt.recv() => Some(SignalKind::interrupt().as_raw_value()),
        _ = terminate.recv() => Some(SignalKind::terminate().as_raw_value()),
    }
}
