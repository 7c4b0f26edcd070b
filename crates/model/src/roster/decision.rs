use api::Roster;

/// What to do about the roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The roster needs no change.
    Keep,
    /// Write this roster.
    Write(Box<Roster>),
    /// The planner can't decide yet; the sentence says what it waits for.
    Wait(String),
}
