//! Why the planner can't continue.

/// Why the planner can't continue, for the status and an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// Something that the planner or the agents will do without help.
    Waiting(String),
    /// Something that a user has to fix.
    Problem {
        /// CamelCase, for the condition and the Event.
        reason: &'static str,
        /// One sentence.
        message: String,
    },
}
