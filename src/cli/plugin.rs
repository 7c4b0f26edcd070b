//! This program under the name by which kubectl finds it: `kubectl flux` runs `kubectl-flux`.

use std::process::ExitCode;

use super::forbid_cores;

/// Runs the command of kubectl flux if this process was called by one of the plugin's names, and returns its exit code.
pub(super) fn main() -> Option<ExitCode> {
    kubectl::is_called().then(|| {
        // A kubeconfig holds tokens and keys, and kubectl, which reads it too, inherits the protection.
        forbid_cores();
        kubectl::main()
    })
}
