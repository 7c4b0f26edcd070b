//! `kubectl flux` as a program by itself, for people's own machines.

use std::process::ExitCode;

fn main() -> ExitCode {
    kubectl::main()
}
