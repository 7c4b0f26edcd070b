//! What every crate may use: errors as sentences, words for messages, how a process prints and ends,
//! chance, and a log without secrets.
//!
//! It knows nothing of this project's objects, of Kubernetes, of hosts, or of packages.

pub mod chance;
pub mod process;
pub mod redact;
pub mod words;

/// An error and its causes as one sentence, for a log, the wire, and errors that can't carry a source. Without the
/// credentials of URLs: the errors of libraries name what they asked.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut sentence = without_kube_debug(error.to_string());
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let words = without_kube_debug(cause.to_string());
        // Many errors repeat their source in their own words.
        if !sentence.contains(&words) {
            sentence = format!("{sentence}: {words}");
        }
    }
    redact::redacted(&sentence)
}

/// Removes what crate kube adds to the API server's message: the prefix `ApiError: ` and, in parentheses, the debug form of the whole
/// Status.
fn without_kube_debug(mut words: String) -> String {
    if let Some(begin) = words.find(" (Status { ")
        && let Some(end) = words.rfind(" })")
        && begin < end
    {
        words.replace_range(begin..end + " })".len(), "");
    }
    words.replace("ApiError: ", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Says(&'static str, #[source] Option<Box<Says>>);

    #[test]
    fn an_error_and_its_causes_become_one_sentence_without_the_fields_of_an_answer() {
        let answer = "ApiError: leases \"a\" not found: NotFound (Status { status: Some(Failure), details: Some(Details { uid: \"\" }) })";
        for (error, sentence) in [
            (Says("can't read", Some(Box::new(Says("no such file", None)))), "can't read: no such file"),
            (Says("no such file", Some(Box::new(Says("no such file", None)))), "no such file"),
            (
                Says("can't read it", Some(Box::new(Says(answer, None)))),
                "can't read it: leases \"a\" not found: NotFound",
            ),
            (Says("can't (Status {", None), "can't (Status {"),
        ] {
            assert_eq!(error_chain(&error), sentence);
        }
    }
}
