//! The commands for people in the pod: `connect`, `shell`, `status`.

use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use crate::{
    inputs::{broker_state, local_roster::host_roster},
    queue_dump::DumpError,
    status::summary::Summary,
};
use api::BROKER_URI;
use broker::{queues::queues_in_time, rfc3::RpcError, status::status as broker_status};
use host::{NsHost, enter, users::User};
use hostapi::{HostError, HostView, look};
use packages::OutputFormat;

/// Why a command could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnterError {
    /// The host stage failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No broker runs on this host.
    #[error("no broker runs on this node; `kubectl -n flux-distribute get fxn -o wide` says why")]
    NoBroker,
    /// Nothing is installed on this host.
    #[error("nothing is installed on this node; on a host, name where it is with --prefix")]
    NotClaimed,
    /// The queue could not be dumped.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// The program could not be run.
    #[error("can't run {program} on the host")]
    Program {
        /// Its path.
        program: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The broker does not answer at its socket.
    #[error("the broker of this node does not answer")]
    Broker(#[from] RpcError),
    /// The copy of a dump could not be written.
    #[error("can't write {out} on the host; the dump is kept there as {kept}")]
    Copy {
        /// Where the copy was to be.
        out: PathBuf,
        /// Where the dump is.
        kept: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Standard output can't be written.
    #[error("can't write")]
    Write(#[from] std::io::Error),
    /// Anything else, for people.
    #[error("{0}")]
    Other(String),
}

impl EnterError {
    /// 2 if only another command can help, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotClaimed | Self::Dump(DumpError::NotLead { .. }) => 2,
            Self::Dump(DumpError::Host(error)) => error.exit_code(),
            Self::Host(error) => error.exit_code(),
            _ => 1,
        }
    }
}

/// Arguments of `status`.
#[derive(clap::Args, Debug, Clone)]
pub struct StatusArguments {
    /// Output format
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Opens a shell in the instance, or runs `command` in it: on the host, as the owner of the brokers, with the running broker's
/// packages.
///
/// # Errors
/// No broker runs, or the program can't be run.
pub fn connect(command: &[String]) -> Result<ExitCode, EnterError> {
    let view = view()?;
    let (Some(_), Some(state)) = (view.broker, view.state) else { return Err(EnterError::NoBroker) };
    let script = state.prefix.join("bin/flux-connect.sh");
    run(&script, command, &[("FLUX_URI".into(), BROKER_URI.into())])
}

/// Opens a shell on the host, or runs `command` there: the image has none.
///
/// # Errors
/// The program can't be run.
pub fn shell(command: &[String]) -> Result<ExitCode, EnterError> {
    match command.split_first() {
        Some((program, arguments)) => run(Path::new(program), arguments, &[]),
        None => run(Path::new("/bin/bash"), &[], &[]).or_else(|_| run(Path::new("/bin/sh"), &[], &[])),
    }
}

fn run(program: &Path, arguments: &[String], env: &[(OsString, OsString)]) -> Result<ExitCode, EnterError> {
    let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
    let root = User::root();
    enter(program, &arguments, env, Some(&root))
        .map_err(|source| EnterError::Program { program: program.display().to_string(), source })
}

fn view() -> Result<HostView, EnterError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| EnterError::Other(error.to_string()))?;
    Ok(runtime.block_on(look(&NsHost::open()?))?)
}

/// Prints what the broker says over its own socket.
///
/// # Errors
/// No broker runs, or it does not answer.
pub async fn status(arguments: StatusArguments) -> Result<ExitCode, EnterError> {
    let client = broker_state::connect().await?;
    let status = broker_status(&client).await?;
    // The roster knows which ranks are spares; without it, the brokers' names show that.
    let host = match NsHost::open() {
        Ok(host) => look(&host).await.ok(),
        Err(_) => None,
    };
    // Only the lead knows the queues.
    let queues = match &status.instance {
        Some(_) => queues_in_time(&client).await,
        None => None,
    };
    let roster = host.as_ref().and_then(host_roster);
    let summary = Summary::of(&status, queues, roster.as_deref());
    let text = match arguments.output {
        OutputFormat::Text => summary.text(),
        OutputFormat::Json => {
            let text = serde_json::to_string_pretty(&summary);
            text.map_err(|error| EnterError::Other(error.to_string()))? + "\n"
        }
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
