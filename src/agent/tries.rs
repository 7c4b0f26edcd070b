//! Trying again: with growing pauses, and at once where something else is to be done.

use std::time::Duration;

use tokio::time::Instant;

use super::decide::Step;

/// The longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Failures in a row of one step.
#[derive(Default)]
pub struct Tries {
    step: Option<std::mem::Discriminant<Step>>,
    failures: u32,
    /// Why the last one failed.
    pub trouble: Option<String>,
    not_before: Option<Instant>,
}

impl Tries {
    /// `step` failed.
    pub fn failed(&mut self, step: &Step, trouble: String) {
        let kind = std::mem::discriminant(step);
        self.failures = if self.step == Some(kind) { self.failures.saturating_add(1) } else { 1 };
        self.step = Some(kind);
        self.trouble = Some(trouble);
        self.not_before = Some(Instant::now() + pause(self.failures));
    }

    /// Something worked.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// How long `step` has to rest yet.
    pub fn rest(&self, step: &Step) -> Option<Duration> {
        let until = self.not_before.filter(|_| self.step == Some(std::mem::discriminant(step)))?;
        until.checked_duration_since(Instant::now())
    }

    /// How long the step that failed last rests.
    pub fn pause(&self) -> Duration {
        pause(self.failures)
    }
}

/// 1 s, 2 s, 4 s, … 60 s.
pub fn pause(failures: u32) -> Duration {
    Duration::from_secs(1 << failures.saturating_sub(1).min(6)).min(MAX_PAUSE)
}
