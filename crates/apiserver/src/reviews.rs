//! TokenReview and SubjectAccessReview, for the made-up users of tests. This server has one token of its own, which it tells nobody's
//! name; it knows a token `user:NAME`, and lets nobody but the user [`SCRAPER`] read paths of no resource.

use serde_json::{Value, json};

/// The user who may read metrics. Its token is `user:scraper`.
pub const SCRAPER: &str = "scraper";

/// The status of a TokenReview.
pub(crate) fn token(review: &Value) -> Value {
    match review["spec"]["token"].as_str().and_then(|token| token.strip_prefix("user:")) {
        Some(name) => {
            json!({ "authenticated": true, "user": { "username": name, "groups": ["system:authenticated"] } })
        }
        None => json!({ "authenticated": false }),
    }
}

/// The status of a SubjectAccessReview.
pub(crate) fn access(review: &Value) -> Value {
    let spec = &review["spec"];
    json!({ "allowed": spec["user"] == SCRAPER && spec["nonResourceAttributes"]["verb"] == "get" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_scraper_may_read_the_metrics() {
        for (shown, name, allowed) in [
            ("user:scraper", Some("scraper"), true),
            ("user:other", Some("other"), false),
            ("another token", None, false),
        ] {
            let status = token(&json!({ "spec": { "token": shown } }));
            assert_eq!((status["authenticated"] == true, status["user"]["username"].as_str()), (name.is_some(), name));
            let question = json!({ "user": name, "nonResourceAttributes": { "path": "/metrics", "verb": "get" } });
            assert_eq!(access(&json!({ "spec": question }))["allowed"], allowed, "{shown}");
        }
    }
}
