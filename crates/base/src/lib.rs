//! What every crate may use: errors as sentences, words for counts, chance, and a log without secrets.
//!
//! It knows nothing of this project's objects, of Kubernetes, of hosts, or of packages.

pub mod chance;
pub mod redact;
pub mod words;

/// An error and its causes as one sentence, for a log, the wire, and errors that can't carry a source. Without the
/// credentials of URLs: the errors of libraries name what they asked.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut sentence = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let words = cause.to_string();
        // Many errors repeat their source in their own words.
        if !sentence.contains(&words) {
            sentence = format!("{sentence}: {words}");
        }
    }
    redact::redacted(&sentence)
}
