//! This program under the name by which kubectl finds it: `kubectl flux` runs `kubectl-flux`.

use std::{path::Path, process::ExitCode};

use clap::Parser;

use super::{Failure, block_on, exit_code, forbid_cores, install_crypto, print};

/// The name of a plugin (kubectl's documentation, "Extend kubectl with plugins").
const NAME: &str = "kubectl-flux";

/// What kubectl runs to complete a command line of `kubectl flux`.
const COMPLETES: &str = "kubectl_complete-flux";

/// Runs the command of kubectl flux if this process was called by one of the plugin's names, and returns its exit code.
pub(super) fn main() -> Option<ExitCode> {
    let called = std::env::args_os().next()?;
    match Path::new(&called).file_name()?.to_str()? {
        NAME => Some(command()),
        COMPLETES => Some(complete()),
        _ => None,
    }
}

/// A kubeconfig holds tokens and keys, and kubectl, which reads it too, inherits the protection.
fn prepare() {
    forbid_cores();
    install_crypto();
}

fn complete() -> ExitCode {
    prepare();
    let words: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    exit_code(COMPLETES, print(&kubectl::complete(&words)))
}

fn command() -> ExitCode {
    let arguments = kubectl::Arguments::parse();
    prepare();
    let done = block_on(async {
        match kubectl::run(arguments).await {
            Err(error) if error.is_closed_output() => Ok(ExitCode::SUCCESS),
            done => done.map_err(|error| Failure { message: error.text(), code: error.exit_code().into() }),
        }
    });
    exit_code("kubectl flux", done)
}
