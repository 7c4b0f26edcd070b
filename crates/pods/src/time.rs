//! Times, as the caller passes them in.

/// A moment: milliseconds since the Unix epoch.
pub type Moment = i64;

/// A span, in milliseconds.
pub type Millis = i64;

/// A second.
pub const SECOND: Millis = 1000;
