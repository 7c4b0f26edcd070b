//! The broker's log: whatever jobs and brokers write into it.
#![no_main]

use std::{
    future::Future,
    task::{Context, Poll, Waker},
};

use broker::log::{LogFollower, rejection};
use host::log::{tail, why};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("a temporary file");
    let _ = why(&tail(file.path(), 0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _entered = runtime.enter();
    let mut follower = LogFollower::from_start(file.path());
    let mut context = Context::from_waker(Waker::noop());
    // At most one line for each byte; pending is the end.
    for _ in 0..=bytes.len() {
        let Poll::Ready(line) = std::pin::pin!(follower.next_line()).poll(&mut context) else { break };
        let _ = rejection(&line);
    }
});
