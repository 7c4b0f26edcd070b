//! The commands for people in the pod: `connect`, `shell`, `status`.

use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::{copied::host_roster, live, summary::Summary};
use api::BROKER_URI;
use broker::{rfc3::RpcError, status::status as broker_status};
use host::{NsHost, enter, users::User};
use hostapi::{HostError, HostView, look};
use packages::OutputFormat;

/// Why a command could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnterError {
    /// The host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No broker.
    #[error("no broker runs on this node; `kubectl -n flux-distribute get fxn` says why")]
    NoBroker,
    /// Nothing of ours is here.
    #[error("nothing is installed on this node; on a host, name where it is with --prefix")]
    NotClaimed,
    /// Another node has what is asked for.
    #[error("{0}")]
    NotLead(String),
    /// The program.
    #[error("can't run {program} on the host")]
    Program {
        /// Which.
        program: String,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The broker's socket.
    #[error("the broker of this node does not answer")]
    Broker(#[from] RpcError),
    /// The second copy of a dump.
    #[error("can't write {out} on the host; the dump is kept there as {kept}")]
    Copy {
        /// Where it was to be.
        out: PathBuf,
        /// Where it is.
        kept: PathBuf,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// stdout.
    #[error("can't write")]
    Write(#[from] std::io::Error),
    /// What else is in the way, in a sentence.
    #[error("{0}")]
    Other(String),
}

impl EnterError {
    /// 2 where the command has to be another one, 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotClaimed | Self::NotLead(_) => 2,
            Self::Host(error) => error.exit_code(),
            _ => 1,
        }
    }
}

/// How `status` shows itself.
#[derive(clap::Args, Debug, Clone)]
pub struct StatusArguments {
    /// Form
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
}

/// Opens a shell in the instance, or runs `command` in it: as the owner of the brokers, on the host, with the packages of the
/// broker that runs.
///
/// # Errors
/// There is no broker, or the program can't be run.
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

/// What the broker says, over its own socket.
///
/// # Errors
/// There is no broker, or it does not answer.
pub async fn status(arguments: StatusArguments) -> Result<ExitCode, EnterError> {
    let client = live::connect().await?;
    let status = broker_status(&client).await?;
    // It alone knows which ranks are nobody's; without it the brokers' names tell.
    let host = match NsHost::open() {
        Ok(host) => look(&host).await.ok(),
        Err(_) => None,
    };
    let summary = Summary::of(&status, host.as_ref().and_then(host_roster).as_ref());
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
