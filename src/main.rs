//! flux-distribute
use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(flux_distribute::host::launch::LAUNCHER) => flux_distribute::host::launch::launcher_main(),
        _ => ExitCode::FAILURE,
    }
}
