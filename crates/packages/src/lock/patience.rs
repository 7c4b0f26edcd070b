//! Retries requests for a channel's index: an error that a server returns while it is overloaded is not final.

use std::{future::Future, pin::Pin, time::Duration};

use axum::http::Extensions;
use reqwest::{
    Request, Response, StatusCode,
    header::{self, HeaderMap, HeaderValue},
};
use reqwest_middleware::{ClientBuilder, Error, Next};

use crate::{
    HttpClient,
    fetch::answer::{may_pass, retry_after},
};
use base::chance::jittered;

/// How often one file is requested.
const ATTEMPTS: u32 = 5;
/// The first pause if the server names none; doubled after each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// If the server asks for a longer pause, its answer is returned, and the user sees it.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// The server returned 304 although the request had no condition, so there is nothing cached to fall back on.
#[derive(Debug, thiserror::Error)]
#[error("the server answers 304 Not Modified to a request without a condition; a proxy before it may be broken")]
struct UnexpectedNotModified;

/// The HTTP client for the solver: it waits as long as a server asks for, and rejects nonsensical answers.
pub(crate) fn patient(http: &HttpClient) -> rattler_networking::LazyClient {
    ClientBuilder::from_client(http.for_rattler().client().clone()).with(ask).build().into()
}

/// What to do with a response.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Take,
    /// Repeat the request after this time.
    Wait(Duration),
    /// Repeat the request with `Cache-Control: no-cache`.
    AskPlainly,
    /// Fail: to the caller, a 304 would mean that its own cache holds the file.
    Refuse,
}

fn judge(status: StatusCode, retry_after: Option<Duration>, conditional: bool, attempt: u32) -> Verdict {
    match status {
        StatusCode::NOT_MODIFIED if !conditional && attempt == 1 => Verdict::AskPlainly,
        StatusCode::NOT_MODIFIED if !conditional => Verdict::Refuse,
        status if may_pass(status) && attempt < ATTEMPTS => {
            let pause = retry_after.unwrap_or(FIRST_PAUSE * (1 << (attempt - 1)));
            if pause > LONGEST_PAUSE { Verdict::Take } else { Verdict::Wait(pause) }
        }
        _ => Verdict::Take,
    }
}

type Asking<'a> = Pin<Box<dyn Future<Output = Result<Response, Error>> + Send + 'a>>;

fn ask<'a>(mut request: Request, extensions: &'a mut Extensions, next: Next<'a>) -> Asking<'a> {
    Box::pin(async move {
        let sent = request.headers().clone();
        let conditional = sent.contains_key(header::IF_NONE_MATCH) || sent.contains_key(header::IF_MODIFIED_SINCE);
        for attempt in 1.. {
            let Some(copy) = request.try_clone() else { break };
            let mut response = next.clone().run(copy, extensions).await?;
            let rest = retry_after(response.headers(), jiff::Timestamp::now());
            match judge(response.status(), rest, conditional, attempt) {
                Verdict::Take => {
                    if response.status() == StatusCode::NOT_MODIFIED {
                        restore_validators(&sent, response.headers_mut());
                    }
                    return Ok(response);
                }
                Verdict::Wait(pause) => {
                    let pause = jittered(pause);
                    // Without the URL: it may hold a token.
                    tracing::info!(
                        status = response.status().as_u16(),
                        ?pause,
                        "the channel's server is busy; retrying after a pause"
                    );
                    tokio::time::sleep(pause).await;
                }
                Verdict::AskPlainly => {
                    request.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
                }
                Verdict::Refuse => return Err(Error::middleware(UnexpectedNotModified)),
            }
        }
        next.run(request, extensions).await
    })
}

/// Adds the validator (`ETag`, `Last-Modified`) to a 304 that lacks it. RFC 9110 demands it and caches need it, but
/// some servers omit it; it must equal the one in the request.
fn restore_validators(sent: &HeaderMap, received: &mut HeaderMap) {
    if received.contains_key(header::ETAG) || received.contains_key(header::LAST_MODIFIED) {
        return;
    }
    for (condition, validator) in
        [(header::IF_NONE_MATCH, header::ETAG), (header::IF_MODIFIED_SINCE, header::LAST_MODIFIED)]
    {
        if let Some(value) = sent.get(condition) {
            received.insert(validator, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_is_retried_after_the_pause_that_it_asks_for() {
        let seconds = Duration::from_secs;
        for (status, retry_after, conditional, attempt, expected) in [
            (200, None, false, 1, Verdict::Take),
            (404, None, false, 1, Verdict::Take),
            (304, None, true, 1, Verdict::Take),
            (304, None, false, 1, Verdict::AskPlainly),
            (304, None, false, 2, Verdict::Refuse),
            (429, Some(seconds(7)), false, 1, Verdict::Wait(seconds(7))),
            (429, Some(seconds(3600)), false, 1, Verdict::Take),
            (503, None, true, 1, Verdict::Wait(FIRST_PAUSE)),
            (503, None, false, 3, Verdict::Wait(seconds(2))),
            (502, Some(seconds(0)), false, 4, Verdict::Wait(seconds(0))),
            (503, None, false, ATTEMPTS, Verdict::Take),
            (500, None, false, 1, Verdict::Wait(FIRST_PAUSE)),
            (501, None, false, ATTEMPTS, Verdict::Take),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(judge(status, retry_after, conditional, attempt), expected, "{status} {attempt}");
        }
    }
}
