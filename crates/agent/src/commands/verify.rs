//! The command `verify`: checks whether the environments of a host still are what was installed. Needs no API server.

use std::{
    fmt::Write as _,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::enter::EnterError;
use base::words::visible;
use host::NsHost;
use hostapi::{Answer, Host, HostError, Order, Verified, VerifyOrder, look};
use packages::{self, OutputFormat};

/// Arguments of the command.
#[derive(clap::Args, Debug, Clone)]
pub struct VerifyArguments {
    /// Digest of one environment; by default, all that are ready
    digest: Option<String>,
    /// The prefix, if this runs on a host itself; by default, checks the host of this pod
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Hashes the packages again and prints each difference on a line.
///
/// # Errors
/// Nothing is installed, or it can't be read.
pub async fn verify(arguments: VerifyArguments) -> Result<ExitCode, EnterError> {
    let VerifyArguments { digest, prefix, output } = arguments;
    let verified = match prefix {
        Some(prefix) => {
            let looked = tokio::task::spawn_blocking(move || {
                packages::verify(&VerifyOrder { prefix, digest, ..VerifyOrder::default() }, &mut |_| {})
            })
            .await;
            looked.map_err(|error| EnterError::Other(error.to_string()))?.map_err(hostapi::HostError::Refused)?
        }
        None => verify_host(&NsHost::open()?, digest).await?,
    };
    let text = match output {
        OutputFormat::Json => {
            let text = serde_json::to_string_pretty(&verified).map_err(|error| EnterError::Other(error.to_string()))?;
            format!("{text}\n")
        }
        OutputFormat::Text => verified.iter().map(in_words).collect(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    let same = verified.iter().all(|environment| environment.differences.is_empty());
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn verify_host(host: &dyn Host, digest: Option<String>) -> Result<Vec<Verified>, EnterError> {
    let prefix = look(host).await?.state.ok_or(EnterError::NotClaimed)?.prefix;
    match host.run(Order::Verify(VerifyOrder { prefix, digest, ..VerifyOrder::default() }), &mut |_| {}).await? {
        Answer::Verified(verified) => Ok(verified),
        other => Err(HostError::unexpected(&other).into()),
    }
}

fn in_words(environment: &Verified) -> String {
    let Verified { path, files, bytes, differences, .. } = environment;
    let mut text = String::new();
    for difference in differences {
        let full = path.join(&difference.path);
        let _ = writeln!(text, "{:<10} {}", difference.what.to_string(), shown(&full));
    }
    let (path, mebibytes) = (path.display(), bytes.div_ceil(1 << 20));
    let _ = match differences.len() {
        0 => writeln!(text, "{path}: as it was installed ({files} files, {mebibytes} MiB)"),
        count => writeln!(text, "{path}: {count} differences ({files} files, {mebibytes} MiB)"),
    };
    text
}

/// Escapes a name, which may hold any character, so that it stays one line.
fn shown(path: &Path) -> String {
    visible(&path.to_string_lossy())
}
