//! The host: its boundary, and all that a stage does there.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

/// Without root neither owners nor users can be changed.
macro_rules! need_root {
    () => {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
    };
}

mod boundary;
mod configure;
mod flux;
mod lifecycle;
mod pod;
mod support;
mod takeover;
