//! How the processes of local mode talk to each other. Commands and daemon: a Unix socket in the state directory, which
//! only root can reach; one JSON line asks, one JSON line answers. Started processes and who started them: stdout.

use std::{io::Write, process::ExitCode, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::UnixStream,
    process::ChildStdout,
    time::timeout,
};

use super::{kind::Kind, layout::Layout};
use crate::error::{Context, LocalError};
use apiserver::Fault;
use base::error_chain;

/// What one of our own processes says on stdout to the one that started it: a line for each step, or this and why not.
const FAILED: &str = "failed: ";

/// Says `line` to the process that started this one.
pub(crate) fn tell(line: &str) -> Result<(), LocalError> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).context(|| "can't write to stdout".to_owned())
}

/// Ends one of our own processes: what failed is said on stdout, since only the one that started it can say it better.
pub(crate) fn tell_failure(ended: Result<ExitCode, LocalError>) -> Result<ExitCode, LocalError> {
    ended.or_else(|error| {
        tell(&format!("{FAILED}{}", error_chain(&error).replace('\n', " ")))?;
        Ok(error.exit_code())
    })
}

/// The next line that a process of ours says.
///
/// # Errors
/// It failed, has ended, or says nothing for `limit`; `who` begins the message.
pub(crate) async fn listen(
    lines: &mut Lines<BufReader<ChildStdout>>,
    limit: Duration,
    who: &str,
) -> Result<String, LocalError> {
    match timeout(limit, lines.next_line()).await {
        Ok(Ok(Some(line))) => match line.strip_prefix(FAILED) {
            Some(why) => Err(LocalError::Refused(format!("{who} does not start: {why}"))),
            None => Ok(line),
        },
        Ok(_) => Err(LocalError::Refused(format!("{who} does not start: it ended without a word"))),
        Err(_) => Err(LocalError::Refused(format!("{who} does not start within {} s", limit.as_secs()))),
    }
}

/// What a command wants. Each is answered when it is done, with all nodes.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    /// Nothing but the answer.
    Status,
    /// New nodes, under the lowest free numbers. The answer holds the new ones only.
    Add { count: u32, kind: Kind },
    /// One node: powered off and gone, as a machine that is taken out.
    Remove { node: String },
    /// SIGTERM to the agent, then a new pod: what a rollout does.
    RestartAgent { node: String },
    /// SIGKILL to the agent; the same pod gets a new one.
    KillAgent { node: String },
    /// The whole node is killed; its disk and its Node object stay.
    PowerOff { node: String },
    /// It boots again.
    PowerOn { node: String },
    /// The embedded API server gets a fault, or none.
    Api { fault: Fault },
}

/// A node as the daemon sees it.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) address: String,
    /// On the machine; None while the node is off.
    pub(crate) init_pid: Option<i32>,
    /// On the machine; None while no agent runs.
    pub(crate) agent_pid: Option<i32>,
    /// How often an agent has ended.
    pub(crate) restarts: u32,
    /// Why the last boot or the last start of a pod failed.
    pub(crate) error: Option<String>,
}

pub(crate) type Answer = Result<Vec<NodeView>, String>;

/// A connection to the daemon.
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// # Errors
    /// [`LocalError::NotUp`], or the daemon of a cluster that is there does not run.
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

    /// Returns once the daemon has ended.
    pub(crate) async fn closed(&mut self) {
        let mut line = String::new();
        // It says nothing that it was not asked.
        while self.stream.read_line(&mut line).await.is_ok_and(|read| read > 0) {}
    }

    pub(crate) async fn ask(&mut self, request: Request) -> Result<Vec<NodeView>, LocalError> {
        let failed = || "the local cluster's daemon does not answer".to_owned();
        let mut line = serde_json::to_string(&request).context(failed)?;
        line.push('\n');
        self.stream.write_all(line.as_bytes()).await.context(failed)?;
        line.clear();
        self.stream.read_line(&mut line).await.context(failed)?;
        serde_json::from_str::<Answer>(&line).context(failed)?.map_err(LocalError::Refused)
    }
}
