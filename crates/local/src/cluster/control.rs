//! Communication between the processes of local mode. Commands talk to the daemon over a Unix socket in the state
//! directory, which only root can reach: one JSON line per request and per answer. Helper processes report to their
//! parent on stdout.

use std::{
    fs::File,
    io::Write,
    path::Path,
    process::{ExitCode, Stdio},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::UnixStream,
    process::{Child, ChildStdout},
    time::timeout,
};

use super::{kind::Kind, layout::Layout};
use crate::error::{Context, LocalError};
use apiserver::Fault;
use base::error_chain;

/// Limit for a boot or a start, which normally take tens of milliseconds, on an overloaded machine.
pub(crate) const START_LIMIT: Duration = Duration::from_mins(1);

/// Prefix of the line that reports a helper's failure to its parent. Other lines report one step each.
const FAILED: &str = "failed: ";

/// The lines that a helper process reports.
pub(crate) type Reports = Lines<BufReader<ChildStdout>>;

/// Starts a helper process, which gets `input` on stdin and appends to `log`.
///
/// # Errors
/// The log can't be opened, or the process can't be started.
pub(crate) async fn start_helper(
    layout: &Layout,
    words: &[&str],
    log: &Path,
    input: &[u8],
) -> Result<(Child, Reports), LocalError> {
    let failed = || format!("can't start {}", words.join(" "));
    let log = File::options().create(true).append(true).open(log).context(failed)?;
    let mut child = layout.helper(words, log).stdin(Stdio::piped()).spawn().context(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that has failed closes it, and reports why.
        let _ = stdin.write_all(input).await;
    }
    let stdout = child.stdout.take().ok_or("it has no stdout").context(failed)?;
    Ok((child, BufReader::new(stdout).lines()))
}

/// Reads the PID that a helper process reports of the process it has started.
///
/// # Errors
/// Those of [`read_report`]; the line is no PID.
pub(crate) async fn read_pid(reports: &mut Reports, who: &str) -> Result<i32, LocalError> {
    let line = read_report(reports, START_LIMIT, who).await?;
    line.parse().context(|| format!("{who} does not report its PID"))
}

/// Sends `line` to the parent process.
pub(crate) fn report_line(line: &str) -> Result<(), LocalError> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context(|| "can't write to stdout".to_owned())
}

/// Reports a helper's failure to its parent, which knows best how to show it. Returns the exit code.
pub(crate) fn report_failure(ended: Result<ExitCode, LocalError>) -> Result<ExitCode, LocalError> {
    ended.or_else(|error| {
        report_line(&format!("{FAILED}{}", error_chain(&error).replace('\n', " ")))?;
        Ok(error.exit_code())
    })
}

/// Reads the next line from a helper process.
///
/// # Errors
/// The helper failed, ended, or sent nothing within `limit`; `who` is the message's subject.
pub(crate) async fn read_report(
    lines: &mut Lines<BufReader<ChildStdout>>,
    limit: Duration,
    who: &str,
) -> Result<String, LocalError> {
    match timeout(limit, lines.next_line()).await {
        Ok(Ok(Some(line))) => match line.strip_prefix(FAILED) {
            Some(why) => Err(LocalError::NotStarted { who: who.to_owned(), why: why.to_owned() }),
            None => Ok(line),
        },
        Ok(_) => Err(LocalError::NotStarted { who: who.to_owned(), why: "it ended without a message".to_owned() }),
        Err(_) => Err(LocalError::Slow { who: who.to_owned(), seconds: limit.as_secs() }),
    }
}

/// A command's request to the daemon. The daemon answers once it is done, with the state of all nodes.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Only return the nodes' state.
    Status,
    /// Add nodes with the lowest free numbers. The answer contains only the new ones.
    Add { count: u32, kind: Kind },
    /// Power a node off and delete it, like a machine that is removed.
    Remove { node: String },
    /// SIGTERM the agent, then start a new pod, as in a rollout.
    RestartAgent { node: String },
    /// SIGKILL the agent; a new one starts in the same pod.
    KillAgent { node: String },
    /// Kill everything on the node; its disk and its Node object stay.
    PowerOff { node: String },
    /// Boot the node again.
    PowerOn { node: String },
    /// Set or clear a fault of the embedded API server.
    Api { fault: Fault },
}

/// The state of a node.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) address: String,
    /// On the machine; None while the node is off.
    /// PID in the machine's PID namespace; `None` while the node is off.
    pub(crate) init_pid: Option<i32>,
    /// PID in the machine's PID namespace; `None` while no agent runs.
    pub(crate) agent_pid: Option<i32>,
    /// How often an agent on this node has ended.
    pub(crate) restarts: u32,
    /// Why the last boot or the last start of a pod failed.
    pub(crate) error: Option<String>,
}

/// The daemon's answer: the nodes, or why not, in words for people.
pub(crate) type Answer = Result<Vec<NodeView>, String>;

/// A connection to the daemon.
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// # Errors
    /// [`LocalError::NotUp`], or the daemon of an existing cluster does not run.
    pub(crate) async fn connect(layout: &Layout) -> Result<Self, LocalError> {
        if !layout.cluster().exists() {
            return Err(LocalError::NotUp);
        }
        let stream = UnixStream::connect(layout.control()).await.context(|| {
            "the local cluster's daemon does not run; take down what is left with `flux-distribute local down`"
                .to_owned()
        })?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Returns when the daemon has closed the connection.
    pub(crate) async fn closed(&mut self) {
        let mut line = String::new();
        // The daemon sends nothing without a request.
        while self.stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {}
    }

    pub(crate) async fn ask(&mut self, request: Request) -> Result<Vec<NodeView>, LocalError> {
        let failed = || "the local cluster's daemon does not answer".to_owned();
        let mut line = serde_json::to_string(&request).context(failed)?;
        line.push('\n');
        self.stream.write_all(line.as_bytes()).await.context(failed)?;
        line.clear();
        self.stream.read_line(&mut line).await.context(failed)?;
        serde_json::from_str::<Answer>(&line).context(failed)?.map_err(LocalError::Daemon)
    }
}
