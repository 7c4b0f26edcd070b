//! Shows the progress of a command: a bar on a terminal, lines elsewhere, JSON for programs.

use std::{
    future::Future,
    io::{self, IsTerminal, Write},
    pin::pin,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{sync::mpsc::UnboundedReceiver, time::interval_at};

use crate::{
    OutputFormat,
    progress::{Meter, Reading},
};
use hostapi::Progress;

/// The interval of [`Style::Lines`].
pub const LINE_EVERY: Duration = Duration::from_secs(5);

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// One line on stderr that is redrawn.
    Bar,
    /// Lines on stderr.
    Lines,
    /// One JSON object per line on stdout.
    Json,
}

impl Style {
    /// The style for an output format; for text it depends on whether stderr is a terminal that obeys escape sequences.
    pub fn of(output: OutputFormat) -> Self {
        let obeys = || io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|kind| kind != "dumb");
        match output {
            OutputFormat::Json => Self::Json,
            OutputFormat::Text if obeys() => Self::Bar,
            OutputFormat::Text => Self::Lines,
        }
    }

    fn every(self) -> Duration {
        match self {
            Self::Bar => Duration::from_millis(200),
            Self::Lines => LINE_EVERY,
            Self::Json => Duration::from_secs(1),
        }
    }

    fn now(self, reading: &Reading) {
        match self {
            // Disable wrapping: a bar that wrapped into a second line could not be redrawn. The cursor returns to the
            // first column so that a log line overwrites the bar instead of continuing it.
            Self::Bar => to_stderr(&format!("\r\x1b[2K\x1b[?7l{}\x1b[?7h\r", bar(reading))),
            Self::Lines => to_stderr(&format!("{reading}\n")),
            Self::Json => to_stdout(&event("progress", reading)),
        }
    }

    fn ended(self, reading: &Reading) {
        match self {
            Self::Bar => to_stderr(&format!("\r\x1b[2K{reading}\n")),
            Self::Lines => to_stderr(&format!("{reading}\n")),
            Self::Json => to_stdout(&event("phase-ended", reading)),
        }
    }

    fn failed(self) {
        if self == Self::Bar {
            to_stderr("\r\x1b[2K");
        }
    }
}

/// Runs `work` and shows the events that it sends.
///
/// # Errors
/// The error of `work`.
pub async fn shown<T, E>(
    style: Style,
    mut events: UnboundedReceiver<Progress>,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let mut work = pin!(work);
    let mut meter = Meter::default();
    // A phase that ends within the first interval is only reported by its end.
    let mut every = interval_at(tokio::time::Instant::now() + style.every(), style.every());
    let see = |meter: &mut Meter, event| {
        if let Some(ended) = meter.see(event, Instant::now()) {
            style.ended(&ended);
        }
    };
    let outcome = loop {
        tokio::select! {
            outcome = &mut work => break outcome,
            Some(event) = events.recv() => see(&mut meter, event),
            _ = every.tick() => meter.read(Instant::now()).iter().for_each(|reading| style.now(reading)),
        }
    };
    while let Ok(event) = events.try_recv() {
        see(&mut meter, event);
    }
    match outcome {
        Ok(_) => meter.end(Instant::now()).iter().for_each(|ended| style.ended(ended)),
        Err(_) => style.failed(),
    }
    outcome
}

const BAR: usize = 20;

fn bar(reading: &Reading) -> String {
    let Progress { done, total, .. } = reading.progress;
    let filled = (u128::from(done.min(total)) * BAR as u128).checked_div(total.into()).map(|filled| filled as usize);
    let drawn =
        filled.map_or_else(String::new, |filled| format!("[{}{}] ", "#".repeat(filled), ".".repeat(BAR - filled)));
    format!("{drawn}{reading}")
}

fn event(name: &str, reading: &Reading) -> String {
    let mut event = json!({ "event": name, "phase": reading.progress.what });
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            event[key] = value;
        }
    };
    put("packages", reading.progress.packages.map(|packages| json!(packages)));
    put("bytes", reading.progress.bytes.map(|bytes| json!(bytes)));
    put("bytesPerSecond", reading.rate.map(Value::from));
    put("secondsLeft", reading.left.map(|left| left.as_secs().into()));
    put("seconds", reading.took.map(|took| took.as_secs_f64().into()));
    format!("{event}\n")
}

// If the output is closed, the work continues.
fn to_stderr(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

fn to_stdout(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(progress: Progress) -> Reading {
        Reading { progress, rate: Some(2_000_000), left: Some(Duration::from_secs(30)), took: None }
    }

    #[test]
    fn a_bar_fills_from_left_to_right() {
        for (done, drawn) in [(0, "...................."), (50, "##########.........."), (200, "####################")]
        {
            let bar = bar(&reading(Progress::packages("linking", done, 100)));
            assert!(bar.starts_with(&format!("[{drawn}] linking: {done}")), "{bar}");
        }
        let unknown = bar(&reading(Progress::bytes("fetching", 5, 0)));
        assert_eq!(unknown, "fetching: 5 B, 2.0 MB/s, 30 s left", "a bar needs a total");
    }

    #[test]
    fn a_json_event_has_the_known_fields_and_no_others() {
        let reading = reading(Progress::bytes("fetching", 40, 100).with_packages(1, 2));
        let event: Value = serde_json::from_str(&event("progress", &reading)).unwrap();
        let expected = json!({
            "event": "progress", "phase": "fetching", "bytes": {"done": 40, "total": 100},
            "packages": {"done": 1, "total": 2}, "bytesPerSecond": 2_000_000, "secondsLeft": 30,
        });
        assert_eq!(event, expected);
        let ended =
            Reading { progress: Progress::begun("syncing"), rate: None, left: None, took: Some(Duration::ZERO) };
        let event: Value = serde_json::from_str(&super::event("phase-ended", &ended)).unwrap();
        assert_eq!(event, json!({"event": "phase-ended", "phase": "syncing", "seconds": 0.0}));
    }
}
