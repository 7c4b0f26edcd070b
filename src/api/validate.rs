use super::FluxInstanceSpec;

/// Why a spec cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("spec.{field}: {reason}")]
pub struct SpecError {
    /// Path below `spec`.
    pub field: &'static str,
    /// What is wrong with it, and what to write instead.
    pub reason: String,
}

/// Checks everything about a spec that its schema can't say.
///
/// # Errors
/// The first thing that is wrong.
pub fn validate(_spec: &FluxInstanceSpec) -> Result<(), SpecError> {
    Ok(())
}
