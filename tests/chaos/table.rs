//! The results, as a table in Markdown.

use std::{fmt::Write, time::Duration};

use crate::{
    oracle::Outcome,
    rows::{OFTEN, Row},
};

/// What is known of one row.
#[derive(Default, Clone)]
pub struct Results {
    pub outcomes: Vec<Outcome>,
    pub failed: usize,
}

/// The faults that no job may notice are marked.
pub fn markdown(rows: &[(&Row, Results)]) -> String {
    let mut text = "| fault | runs | failed | jobs lost | brokers restarted | healed after (median) | (max) |\n\
                    |---|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    for (row, results) in rows {
        let name = row.name;
        let mark = if row.runs == OFTEN && !row.job_dies { " \\*" } else { "" };
        let mut times: Vec<Duration> = results.outcomes.iter().map(|outcome| outcome.healed).collect();
        times.sort_unstable();
        let seconds =
            |time: Option<&Duration>| time.map_or_else(|| "-".to_owned(), |t| format!("{:.1} s", t.as_secs_f64()));
        let jobs: usize = results.outcomes.iter().map(|outcome| outcome.jobs_lost).sum();
        let brokers: usize = results.outcomes.iter().map(|outcome| outcome.brokers_restarted).sum();
        let _ = writeln!(
            text,
            "| {name}{mark} | {} | {} | {jobs} | {brokers} | {} | {} |",
            times.len() + results.failed,
            results.failed,
            seconds(times.get(times.len().saturating_sub(1) / 2)),
            seconds(times.last())
        );
    }
    text
}
