//! A container of a pod, as far as it is simulated: one process in its node, with the node's own files, in a cgroup of the
//! pod below the node's `kubepods`. Its parent is a [`shim`].

use std::process::{Child, Command, ExitCode, Stdio};

use k8s_openapi::api::core::v1::Container;
use nix::unistd::chdir;
use serde::{Deserialize, Serialize};

use super::{
    cgroup,
    layout::Layout,
    shim::{self, enter_node},
};
use crate::error::{Context, LocalError};
use host::HOST_PATH;

/// What a container runs.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    words: Vec<String>,
    environment: Vec<(String, String)>,
    directory: String,
}

impl Process {
    /// What `container` runs: its command and args, with those of its variables that have a value.
    ///
    /// # Errors
    /// [`LocalError::NoCommand`]: only its image says what it runs.
    pub(crate) fn of(container: &Container) -> Result<Self, LocalError> {
        let command = container.command.clone().unwrap_or_default();
        if command.is_empty() {
            return Err(LocalError::NoCommand(container.name.clone()));
        }
        let variables = container.env.iter().flatten();
        Ok(Self {
            words: command.into_iter().chain(container.args.clone().unwrap_or_default()).collect(),
            environment: variables.filter_map(|one| Some((one.name.clone(), one.value.clone()?))).collect(),
            directory: container.working_dir.clone().unwrap_or_else(|| "/".to_owned()),
        })
    }
}

/// Reads a [`Process`] from stdin, starts it in the pod `uid` on the node with that PID 1, and reports its PID on stdout.
/// Returns its exit code when it has exited.
pub(crate) async fn run(layout: &Layout, node: &str, init: i32, uid: &str) -> Result<ExitCode, LocalError> {
    let cluster = layout.load()?;
    let process: Process = serde_json::from_reader(std::io::stdin()).context(|| "can't read what to run".to_owned())?;
    cgroup::enter(&cluster.pod_cgroup(node, uid))?;
    shim::run("container", move || start(init, &process)).await
}

fn start(init: i32, process: &Process) -> Result<Child, LocalError> {
    enter_node(init)?;
    chdir(process.directory.as_str()).context(|| format!("can't change to {}", process.directory))?;
    let program = &process.words[0];
    let mut command = Command::new(program);
    command.args(&process.words[1..]).env_clear().env("PATH", HOST_PATH).envs(process.environment.iter().cloned());
    // Both streams go where this process logs.
    command.stdin(Stdio::null()).stdout(std::io::stderr());
    command.spawn().context(|| format!("can't run {program}"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(container: Value) -> Result<Process, LocalError> {
        Process::of(&serde_json::from_value(container).unwrap())
    }

    #[test]
    fn a_container_runs_its_command_and_args_with_its_values() {
        let value_from = json!({"fieldRef": {"fieldPath": "metadata.name"}});
        let process = of(json!({
            "name": "c", "image": "any", "command": ["sh", "-c"], "args": ["echo $A"], "workingDir": "/tmp",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": value_from}],
        }));
        let words = ["sh", "-c", "echo $A"].map(str::to_owned).to_vec();
        let environment = vec![("A".to_owned(), "1".to_owned())];
        assert_eq!(process.unwrap(), Process { words, environment, directory: "/tmp".to_owned() });
    }

    #[test]
    fn a_container_that_only_its_image_knows_is_refused_with_the_reason() {
        let error = of(json!({"name": "c", "image": "any", "args": ["x"]})).unwrap_err();
        assert_eq!(error.to_string(), "container c has no command, and local mode runs no images");
    }
}
