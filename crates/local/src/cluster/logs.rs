//! `local logs`: prints the log of a node's agent or broker. Works without the daemon and while the node is off.

use std::{fs::File, io};

use super::layout::{Layout, node_number};
use crate::error::{Context, LocalError};
use host::log;

/// Prints the log of the agent of `node`, or of its broker.
///
/// # Errors
/// [`LocalError::NotUp`]; there is no such node; nothing has been written yet.
pub(crate) fn run(layout: &Layout, node: &str, is_broker: bool) -> Result<(), LocalError> {
    let cluster = layout.load()?;
    if node_number(node).is_none() || !layout.node(node).is_dir() {
        return Err(LocalError::NoNode(node.to_owned()));
    }
    let path = if is_broker {
        let path = log::path(cluster.prefix.as_deref().unwrap_or(api::DEFAULT_PREFIX).as_ref());
        layout.node_root(node).join(path.strip_prefix("/").unwrap_or(&path))
    } else {
        layout.agent_log(node)
    };
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let who = if is_broker { "broker" } else { "agent" };
            return Err(LocalError::NoLog { who, node: node.to_owned() });
        }
        Err(error) => return Err(error).context(|| format!("can't read {}", path.display())),
    };
    match io::copy(&mut file, &mut io::stdout()) {
        // The reader, such as `head`, has closed the pipe because it needs no more.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        copied => copied.map(drop).context(|| format!("can't print {}", path.display())),
    }
}
