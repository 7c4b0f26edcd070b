//! Which clients may read the metrics: those that the API server permits `get` of the path `/metrics`, as kubelet and kube-rbac-proxy ask it, by a
//! TokenReview and a SubjectAccessReview. What a token may is remembered for a while, and strangers can make the agent ask only now
//! and then.

use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tracing::{info, warn};

use api::METRICS_AUDIENCE;
use base::error_chain;
use cluster::{ApiError, call};

/// The path, as an RBAC rule names it.
pub const PATH: &str = "/metrics";
/// How long the API server's yes counts: for a Prometheus that asks every 15 s, one question in twenty scrapes.
const ALLOWED_FOR: Duration = Duration::from_mins(5);
/// Most tokens that are remembered.
const MOST_TOKENS: usize = 64;
/// How many tokens that are not remembered may be reviewed at once, and how often one more.
const STRANGERS: u32 = 10;
const STRANGER_EVERY: Duration = Duration::from_secs(2);

/// The answer to whoever shows a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// May read the metrics.
    Allowed,
    /// The API server does not know the token.
    Unknown,
    /// It knows the token, and does not permit it to read the metrics.
    Forbidden,
    /// It does not say.
    NotReviewed,
    /// Too many strangers ask.
    Busy,
}

/// Asks the API server, and remembers which tokens it permits.
pub struct Reviews {
    client: Client,
    known: Mutex<Known>,
    /// The API server did not answer the last time: the log says so once.
    failed: AtomicBool,
}

impl Reviews {
    /// Nobody is known yet.
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::new(Known::new(Instant::now())), failed: AtomicBool::new(false) }
    }

    /// What the bearer of `token` may.
    pub async fn verdict(&self, token: &str) -> Verdict {
        let digest = Sha256::digest(token).into();
        match self.known().ask(&digest, Instant::now()) {
            Standing::Allowed => return Verdict::Allowed,
            Standing::Busy => return Verdict::Busy,
            Standing::ToReview => {}
        }
        let reviewed = review(&self.client, token).await;
        self.note(token, &reviewed);
        let verdict = reviewed.unwrap_or(Verdict::NotReviewed);
        self.known().learn(digest, verdict, Instant::now());
        verdict
    }

    fn note(&self, token: &str, reviewed: &Result<Verdict, ApiError>) {
        let failed_before = self.failed.swap(reviewed.is_err(), Ordering::Relaxed);
        match reviewed {
            Err(error) if !failed_before => {
                // The API server's words may quote what they are about.
                let error = error_chain(error).replace(token, "…");
                warn!(error, "the API server does not say who may read the metrics: nobody can until it does");
            }
            Ok(_) if failed_before => info!("the API server says again who may read the metrics"),
            _ => {}
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// sha256 of a token: the token itself is kept nowhere.
type TokenDigest = [u8; 32];

/// What is remembered. Pure: callers pass the time.
struct Known {
    /// Tokens that were allowed, and until when that counts. Later, they are reviewed before those of strangers.
    allowed: HashMap<TokenDigest, Instant>,
    /// How many strangers may be reviewed now.
    strangers: u32,
    refilled: Instant,
}

#[derive(Debug, PartialEq, Eq)]
enum Standing {
    Allowed,
    ToReview,
    Busy,
}

impl Known {
    fn new(now: Instant) -> Self {
        Self { allowed: HashMap::new(), strangers: STRANGERS, refilled: now }
    }

    fn ask(&mut self, token: &TokenDigest, now: Instant) -> Standing {
        if let Some(until) = self.allowed.get(token) {
            return if now < *until { Standing::Allowed } else { Standing::ToReview };
        }
        while self.strangers < STRANGERS && now.saturating_duration_since(self.refilled) >= STRANGER_EVERY {
            self.strangers += 1;
            self.refilled += STRANGER_EVERY;
        }
        if self.strangers == STRANGERS {
            self.refilled = now;
        }
        match self.strangers.checked_sub(1) {
            Some(left) => {
                self.strangers = left;
                Standing::ToReview
            }
            None => Standing::Busy,
        }
    }

    fn learn(&mut self, token: TokenDigest, verdict: Verdict, now: Instant) {
        match verdict {
            Verdict::Allowed => {
                let is_full = self.allowed.len() >= MOST_TOKENS && !self.allowed.contains_key(&token);
                let oldest = self.allowed.iter().min_by_key(|(_, until)| **until).map(|(oldest, _)| *oldest);
                if let Some(oldest) = oldest.filter(|_| is_full) {
                    self.allowed.remove(&oldest);
                }
                self.allowed.insert(token, now + ALLOWED_FOR);
            }
            Verdict::Unknown | Verdict::Forbidden => drop(self.allowed.remove(&token)),
            // It is asked again, and refused until there is an answer.
            Verdict::NotReviewed | Verdict::Busy => {}
        }
    }
}

/// Asks the API server.
///
/// # Errors
/// It does not answer, does not know the reviews, or forbids them.
async fn review(client: &Client, token: &str) -> Result<Verdict, ApiError> {
    let audiences = is_for_metrics(token).then(|| vec![METRICS_AUDIENCE.to_owned()]);
    let spec = TokenReviewSpec { token: token.to_owned(), audiences };
    let for_metrics = spec.audiences.is_some();
    let tokens: Api<TokenReview> = Api::all(client.clone());
    let review = TokenReview { spec, ..TokenReview::default() };
    let answer = call("create TokenReview", tokens.create(&Default::default(), &review)).await?;
    let Some(user) = answer.status.and_then(|status| user(status, for_metrics)) else { return Ok(Verdict::Unknown) };
    let accesses: Api<SubjectAccessReview> = Api::all(client.clone());
    let review = SubjectAccessReview { spec: access(user), ..SubjectAccessReview::default() };
    let answer = call("create SubjectAccessReview", accesses.create(&Default::default(), &review)).await?;
    let is_allowed = answer.status.is_some_and(|status| status.allowed && status.denied != Some(true));
    Ok(if is_allowed { Verdict::Allowed } else { Verdict::Forbidden })
}

/// Whose token it is. An API server that knows no audiences answers without them, and would take a token for another audience.
fn user(status: TokenReviewStatus, for_metrics: bool) -> Option<UserInfo> {
    let audiences = status.audiences.unwrap_or_default();
    let is_ours = !for_metrics || audiences.iter().any(|audience| audience == METRICS_AUDIENCE);
    status.user.filter(|_| status.authenticated == Some(true) && is_ours)
}

/// The question whether `user` may read the metrics.
fn access(user: UserInfo) -> SubjectAccessReviewSpec {
    let path = NonResourceAttributes { path: Some(PATH.to_owned()), verb: Some("get".to_owned()) };
    SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        groups: user.groups,
        extra: user.extra,
        non_resource_attributes: Some(path),
        resource_attributes: None,
    }
}

/// The token says that it is for our audience. That is only a reason to ask the API server whether it is: any other token is for the API
/// server itself.
fn is_for_metrics(token: &str) -> bool {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Audience {
        One(String),
        Many(Vec<String>),
    }
    #[derive(Deserialize)]
    struct Claims {
        aud: Audience,
    }
    let claims = token.split('.').nth(1).and_then(|part| BASE64_URL_SAFE_NO_PAD.decode(part).ok());
    let claims = claims.and_then(|json| serde_json::from_slice::<Claims>(&json).ok());
    claims.is_some_and(|claims| match claims.aud {
        Audience::One(audience) => audience == METRICS_AUDIENCE,
        Audience::Many(audiences) => audiences.iter().any(|audience| audience == METRICS_AUDIENCE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: usize) -> TokenDigest {
        Sha256::digest(number.to_string()).into()
    }

    #[test]
    fn a_yes_counts_for_five_minutes_and_a_no_not_at_all() {
        let begin = Instant::now();
        let mut known = Known::new(begin);
        let at = |secs| begin + Duration::from_secs(secs);
        for verdict in [Verdict::Unknown, Verdict::Forbidden, Verdict::NotReviewed] {
            known.learn(digest(1), verdict, begin);
            assert_eq!(known.ask(&digest(1), begin), Standing::ToReview, "{verdict:?}");
        }
        known.learn(digest(1), Verdict::Allowed, begin);
        for (secs, expected) in [(0, Standing::Allowed), (299, Standing::Allowed), (300, Standing::ToReview)] {
            assert_eq!(known.ask(&digest(1), at(secs)), expected, "{secs}");
        }
        // A right that was taken away.
        known.learn(digest(1), Verdict::Forbidden, at(300));
        assert!(known.allowed.is_empty());
    }

    #[test]
    fn strangers_make_the_agent_ask_every_two_seconds_and_delay_nobody_who_was_allowed() {
        let begin = Instant::now();
        let mut known = Known::new(begin);
        known.learn(digest(0), Verdict::Allowed, begin);
        let later = begin + ALLOWED_FOR;
        let mut asked = |at: Instant| (1..100).filter(|n| known.ask(&digest(*n), at) == Standing::ToReview).count();
        let seconds = [0, 1, 2, 5, 60].map(|secs| asked(later + Duration::from_secs(secs)));
        assert_eq!(seconds, [10, 0, 1, 1, 10]);
        assert_eq!(known.ask(&digest(1000), later + Duration::from_mins(1)), Standing::Busy);
        assert_eq!(known.ask(&digest(0), later + Duration::from_mins(1)), Standing::ToReview);
    }

    #[test]
    fn no_more_tokens_are_remembered_than_there_are_readers() {
        let begin = Instant::now();
        let mut known = Known::new(begin);
        for (number, secs) in (0..1000).zip(0..) {
            known.learn(digest(number), Verdict::Allowed, begin + Duration::from_millis(secs));
        }
        assert_eq!(known.allowed.len(), MOST_TOKENS);
        let now = begin + Duration::from_secs(1);
        let newest = [0, 935, 936, 999].map(|number| known.ask(&digest(number), now) == Standing::Allowed);
        assert_eq!(newest, [false, false, true, true]);
    }

    #[test]
    fn a_token_for_the_metrics_is_reviewed_as_one_and_any_other_as_one_for_the_api_server() {
        let with = |claims: &str| format!("head.{}.signature", BASE64_URL_SAFE_NO_PAD.encode(claims));
        for (token, expected) in [
            (with(r#"{"aud":["flux-distribute-metrics"],"sub":"a"}"#), true),
            (with(r#"{"aud":"flux-distribute-metrics"}"#), true),
            (with(r#"{"aud":["https://kubernetes.default.svc"]}"#), false),
            (with(r#"{"aud":{"a":1}}"#), false),
            (with("[]"), false),
            (with(""), false),
            ("opaque".to_owned(), false),
            ("a.b".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_for_metrics(&token), expected, "{token}");
        }
    }

    #[test]
    fn only_a_user_whose_token_is_for_the_audience_that_was_asked_for_is_one() {
        let answer = |authenticated, audiences: &[&str]| TokenReviewStatus {
            authenticated,
            audiences: Some(audiences.iter().map(|audience| (*audience).to_owned()).collect()),
            user: Some(UserInfo::default()),
            error: None,
        };
        for (status, for_metrics, expected) in [
            (answer(Some(true), &[METRICS_AUDIENCE]), true, true),
            (answer(Some(true), &["another"]), true, false),
            (answer(Some(true), &[]), true, false),
            (answer(Some(true), &[]), false, true),
            (answer(Some(false), &[METRICS_AUDIENCE]), true, false),
            (answer(None, &[]), false, false),
            (TokenReviewStatus { authenticated: Some(true), ..TokenReviewStatus::default() }, false, false),
        ] {
            assert_eq!(user(status.clone(), for_metrics).is_some(), expected, "{status:?} {for_metrics}");
        }
    }
}
