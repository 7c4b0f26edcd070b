//! Measures the progress of long work from its events. Pure: the caller passes the time in.

pub(crate) mod show;

use std::{
    collections::VecDeque,
    fmt,
    time::{Duration, Instant},
};

use hostapi::{Progress, Tally};

/// The rate is an average over this time. A shorter window makes it jump; with a longer one, a stalled line seems
/// alive.
const WINDOW: Duration = Duration::from_secs(10);
/// The minimum distance of two samples, which limits their number.
const SAMPLE: Duration = Duration::from_millis(500);
/// No rate or remaining time is estimated from a shorter period.
const SOON: Duration = Duration::from_secs(1);

/// Measures the progress of long work, phase by phase.
#[derive(Debug, Default)]
pub struct Meter(Option<Phase>);

#[derive(Debug)]
struct Phase {
    last: Progress,
    began: Instant,
    /// Bytes that were there when the phase began and so don't count for its rate.
    first: u64,
    samples: VecDeque<(Instant, u64)>,
}

/// The state of a phase, with estimates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// The phase's last event.
    pub progress: Progress,
    /// Bytes per second if the phase counts bytes: the recent rate, or that of the whole phase once it has ended.
    pub rate: Option<u64>,
    /// The estimated time until the phase ends.
    pub left: Option<Duration>,
    /// The duration of the phase, once it has ended.
    pub took: Option<Duration>,
}

impl Meter {
    /// Takes in an event. If it begins a new phase, returns the last reading of the one before.
    pub fn see(&mut self, event: Progress, now: Instant) -> Option<Reading> {
        let bytes = event.bytes.unwrap_or_default().done;
        if let Some(phase) = self.0.as_mut().filter(|phase| phase.last.what == event.what) {
            phase.last = event;
            if phase.samples.back().is_none_or(|(at, _)| now.duration_since(*at) >= SAMPLE) {
                phase.samples.push_back((now, bytes));
            }
            while phase.samples.get(1).is_some_and(|(at, _)| now.duration_since(*at) > WINDOW) {
                phase.samples.pop_front();
            }
            return None;
        }
        let ended = self.end(now);
        self.0 = Some(Phase { last: event, began: now, first: bytes, samples: VecDeque::from([(now, bytes)]) });
        ended
    }

    /// The current reading; `None` before the first event.
    pub fn read(&self, now: Instant) -> Option<Reading> {
        let phase = self.0.as_ref()?;
        let since = now.duration_since(phase.began);
        let rate = phase.rate(now);
        let left = match (phase.last.bytes, phase.last.packages) {
            (Some(bytes), _) => rate.filter(|rate| *rate > 0).map(|rate| bytes.left().div_ceil(rate)),
            (None, Some(packages)) if since >= SOON && packages.total > 0 => {
                since.as_secs().checked_mul(packages.left()).and_then(|work| work.checked_div(packages.done))
            }
            _ => None,
        };
        let left = left.filter(|left| *left > 0).map(Duration::from_secs);
        Some(Reading { progress: phase.last.clone(), rate, left, took: None })
    }

    /// Ends the work after success. Returns the last reading of its last phase.
    pub fn end(&mut self, now: Instant) -> Option<Reading> {
        let phase = self.0.take()?;
        let took = now.duration_since(phase.began);
        let moved = phase.last.bytes.map(|bytes| bytes.done.saturating_sub(phase.first));
        let rate = moved.filter(|_| took >= SOON).map(|moved| per_second(moved, took));
        Some(Reading { progress: phase.last, rate, left: None, took: Some(took) })
    }
}

impl Phase {
    fn rate(&self, now: Instant) -> Option<u64> {
        let bytes = self.last.bytes?.done;
        let recent = self.samples.iter().find(|(at, _)| now.duration_since(*at) <= WINDOW);
        let (from, had) = recent.or(self.samples.back())?;
        let since = now.duration_since(*from);
        (since >= SOON).then(|| per_second(bytes.saturating_sub(*had), since))
    }
}

fn per_second(bytes: u64, time: Duration) -> u64 {
    let rate = u128::from(bytes) * 1000 / time.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

/// The phase and its quarters, and what is in its way: for places where each word costs something, such as a status in the API.
/// Written at each percent, it would be a load on the API server that grows with the nodes.
pub fn quarters(now: &Progress) -> String {
    let phase = match (u128::from(now.done.min(now.total)) * 4).checked_div(now.total.into()) {
        Some(quarters) => format!("{} {} %", now.what, quarters * 25),
        None => now.what.clone(),
    };
    now.trouble.iter().fold(phase, |phase, trouble| format!("{phase}; {trouble}"))
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Progress { what, packages, bytes, trouble, .. } = &self.progress;
        let part = |tally: &Tally, show: fn(u64) -> String| match tally.total {
            total if total > 0 && total != tally.done => format!("{} of {}", show(tally.done), show(total)),
            _ => show(tally.done),
        };
        let mut parts = Vec::new();
        parts.extend(packages.as_ref().map(|packages| part(packages, |count| count.to_string()) + " packages"));
        parts.extend(bytes.as_ref().map(|bytes| part(bytes, size)));
        parts.extend(self.rate.map(|rate| size(rate) + "/s"));
        parts.extend(self.left.map(|left| time(left) + " left"));
        parts.extend(self.took.map(|took| format!("done in {}", time(took))));
        parts.extend(trouble.clone());
        if parts.is_empty() { f.write_str(what) } else { write!(f, "{what}: {}", parts.join(", ")) }
    }
}

/// Formats a number of bytes with a decimal unit.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

fn time(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{:.1} s", time.as_secs_f64()),
        seconds @ 1..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    #[test]
    fn a_status_changes_only_with_phases_and_quarters() {
        for (done, total, words) in [
            (0, 100, "fetching 0 %"),
            (24, 100, "fetching 0 %"),
            (25, 100, "fetching 25 %"),
            (99, 100, "fetching 75 %"),
            (100, 100, "fetching 100 %"),
            (120, 100, "fetching 100 %"),
            (7, 0, "fetching"),
            (u64::MAX, u64::MAX, "fetching 100 %"),
        ] {
            assert_eq!(quarters(&Progress::bytes("fetching", done, total)), words);
        }
        let trouble = Some("can't fetch http://h/x: connection refused; trying again in 4 s".to_owned());
        assert_eq!(
            quarters(&Progress { trouble, ..Progress::bytes("fetching", 0, 9) }),
            "fetching 0 %; can't fetch http://h/x: connection refused; trying again in 4 s"
        );
    }

    #[test]
    fn a_line_shows_packages_bytes_rate_and_time_left() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let fetched = |packages, bytes| Progress::bytes("fetching", bytes, 100 * MB).with_packages(packages, 60);
        for (events, now, line) in [
            // Too early for an estimate.
            (vec![(0, fetched(0, 0))], 0, "fetching: 0 of 60 packages, 0 B of 100.0 MB"),
            (
                vec![(0, fetched(0, 0)), (2, fetched(3, 20 * MB))],
                2,
                "fetching: 3 of 60 packages, 20.0 MB of 100.0 MB, 10.0 MB/s, 8 s left",
            ),
            // Bytes that were there at the beginning don't count for the rate.
            (
                vec![(0, fetched(30, 50 * MB)), (5, fetched(31, 55 * MB))],
                5,
                "fetching: 31 of 60 packages, 55.0 MB of 100.0 MB, 1.0 MB/s, 45 s left",
            ),
            // A line that is silent for longer than the window has rate 0, whatever it was before.
            (
                vec![(0, fetched(0, 0)), (2, fetched(3, 20 * MB))],
                30,
                "fetching: 3 of 60 packages, 20.0 MB of 100.0 MB, 0 B/s",
            ),
            // Bytes are discarded and must come again.
            (
                vec![(0, fetched(0, 9 * MB)), (2, fetched(0, 0))],
                2,
                "fetching: 0 of 60 packages, 0 B of 100.0 MB, 0 B/s",
            ),
            (
                vec![(0, Progress::packages("linking", 0, 60)), (4, Progress::packages("linking", 20, 60))],
                4,
                "linking: 20 of 60 packages, 8 s left",
            ),
            (vec![(0, Progress::packages("linking", 0, 60))], 4, "linking: 0 of 60 packages"),
            (vec![(0, Progress::begun("syncing"))], 100, "syncing"),
            (vec![(0, Progress::bytes("fetching", 5, 0))], 0, "fetching: 5 B"),
            (
                vec![
                    (0, Progress::bytes("fetching", 0, 8_000 * MB)),
                    (2, Progress::bytes("fetching", 2 * MB, 8_000 * MB)),
                ],
                2,
                "fetching: 2.0 MB of 8.00 GB, 1.0 MB/s, 2 h 13 min left",
            ),
        ] {
            let mut meter = Meter::default();
            for (time, event) in events {
                assert_eq!(meter.see(event, at(time)), None);
            }
            assert_eq!(meter.read(at(now)).unwrap().to_string(), line);
        }
        assert_eq!(Meter::default().read(begin), None);
    }

    #[test]
    fn a_finished_phase_is_summed_up_once() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut meter = Meter::default();
        assert_eq!(meter.see(Progress::bytes("fetching", 0, 90 * MB).with_packages(0, 60), at(0)), None);
        assert_eq!(meter.see(Progress::bytes("fetching", 90 * MB, 90 * MB).with_packages(60, 60), at(9)), None);
        let ended = meter.see(Progress::begun("syncing"), at(9)).unwrap();
        assert_eq!(ended.to_string(), "fetching: 60 packages, 90.0 MB, 10.0 MB/s, done in 9 s");
        assert_eq!(meter.end(at(9)).unwrap().to_string(), "syncing: done in 0.0 s");
        assert_eq!(meter.end(at(99)), None);
    }

    #[test]
    fn the_rate_is_the_recent_one_and_the_number_of_samples_is_limited() {
        let begin = Instant::now();
        let mut meter = Meter::default();
        for step in 0..100_000_u64 {
            // 1 MB/s at first, 2 MB/s in the second half.
            let bytes = 1_000 * (step + step.saturating_sub(50_000));
            meter.see(Progress::bytes("fetching", bytes, 0), begin + Duration::from_millis(step));
        }
        let reading = meter.read(begin + Duration::from_millis(99_999)).unwrap();
        assert_eq!(reading.rate, Some(2_000_000));
        assert!(meter.0.unwrap().samples.len() < 30);
    }
}
