//! Writes the man pages of `kubectl flux` into a directory: one for each command, from its help.
//!
//!     cargo run --package kubectl --example man -- DIRECTORY

use std::{fs, io, path::PathBuf};

use clap::CommandFactory;

fn main() -> io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::other("which directory?"));
    };
    fs::create_dir_all(&directory)?;
    // kubectl-flux.1, kubectl-flux-status.1 and so on, as man(1) finds them by `man kubectl-flux-status`.
    clap_mangen::generate_to(kubectl::Arguments::command(), directory)
}
