//! Asking a channel's server for its index as long as it makes sense: what it answers in a bad moment is no answer.

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

/// How often one file is asked for.
const ATTEMPTS: u32 = 5;
/// The first pause where the server names none; twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// A server that wants a longer pause is told to the user, who may know a better one.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The server says "not modified" to somebody who has nothing yet.
#[derive(Debug, thiserror::Error)]
#[error("the server answers 304 Not Modified to a request without a condition; a proxy before it may be broken")]
struct NothingToKeep;

/// The client for the solver: it waits where a server asks for it, and takes no answer that makes no sense.
pub(crate) fn patient(http: &HttpClient) -> rattler_networking::LazyClient {
    ClientBuilder::from_client(http.for_rattler().client().clone()).with(ask).build().into()
}

/// What to do with an answer.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Take,
    /// Ask again after this time.
    Wait(Duration),
    /// Ask again, past any cache on the way.
    AskPlainly,
    /// The caller would take it for a promise that there is something in its cache.
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
                    // Not the URL: it may hold a token.
                    tracing::info!(
                        status = response.status().as_u16(),
                        ?pause,
                        "the channel's server asks for patience"
                    );
                    tokio::time::sleep(pause).await;
                }
                Verdict::AskPlainly => {
                    request.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
                }
                Verdict::Refuse => return Err(Error::middleware(NothingToKeep)),
            }
        }
        next.run(request, extensions).await
    })
}

/// RFC 9110 wants the validator in a 304, and caches look for it; some servers leave it out. It can only be the one that
/// was asked about.
fn restore_validators(sent: &HeaderMap, received: &mut HeaderMap) {
    if received.contains_key(header::ETAG) || received.contains_key(header::LAST_MODIFIED) {
        return;
    }
    for (asked, told) in [(header::IF_NONE_MATCH, header::ETAG), (header::IF_MODIFIED_SINCE, header::LAST_MODIFIED)] {
        if let Some(value) = sent.get(asked) {
            received.insert(told, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_given_the_time_it_asks_for_within_reason() {
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
