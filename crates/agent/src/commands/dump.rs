//! The command `dump`: writes the queue of the instance to a file on the lead's host.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::enter::EnterError;
use crate::queue_dump;
use host::{
    NsHost,
    host_root::{copy_in_host_root, open_host_file},
};
use hostapi::look;

/// Arguments of the command.
#[derive(clap::Args, Debug, Clone)]
pub struct DumpArguments {
    /// Also write it to this file on the host (0600), or with - to stdout, to get it off the lead's disk
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Dumps the queue, keeps the dump on the host and prints its path.
///
/// # Errors
/// The lead's broker does not run here, the host stage failed, or the copy can't be written.
pub async fn dump(arguments: DumpArguments) -> Result<ExitCode, EnterError> {
    let host = NsHost::open()?;
    let view = look(&host).await?;
    let dumped = queue_dump::make(&host, queue_dump::order(&view)?).await?;
    let words = format!("{} ({} KiB)", dumped.path.display(), dumped.dump.bytes.div_ceil(1024));
    let mut stderr = io::stderr();
    if !dumped.warnings.is_empty() {
        writeln!(stderr, "{}", dumped.warnings)?;
    }
    match arguments.out.as_deref() {
        None => writeln!(io::stdout(), "{words}")?,
        Some(out) if out == Path::new("-") => {
            let mut stdout = io::stdout().lock();
            io::copy(&mut open_host_file(&dumped.path)?, &mut stdout)?;
            stdout.flush()?;
            writeln!(stderr, "{words}")?;
        }
        Some(out) => {
            copy_in_host_root(&dumped.path, out).map_err(|source| EnterError::Copy {
                out: out.to_owned(),
                kept: dumped.path.clone(),
                source,
            })?;
            writeln!(io::stdout(), "{words}, and {}", out.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
