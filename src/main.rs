//! `flux-distribute`: see `flux-distribute --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    flux_distribute::main()
}
