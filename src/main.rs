//! flux-distribute

fn main() -> std::process::ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("stage") => flux_distribute::host::stage::main(),
        _ => std::process::ExitCode::FAILURE,
    }
}
