//! Times, as the caller passes them in.

/// A moment, in milliseconds since the Unix epoch; or a span, in milliseconds.
pub type Millis = i64;

/// A second.
pub const SECOND: Millis = 1000;
