//! The live change of what a running instance declares (flux-config(1), flux-module(1)).

use std::time::Duration;

use nix::errno::Errno;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    message::ANY,
    rfc3::{Client, RpcError},
    status::parse,
};

/// A scheduler that is loaded hears of all running jobs first.
const TIMEOUT: Duration = Duration::from_secs(60);
/// In the order in which they are loaded.
const FLUXION: [&str; 3] = ["sched-fluxion-resource", "sched-fluxion-feasibility", "sched-fluxion-qmanager"];
const SIMPLE: &str = "sched-simple";
const RESOURCE: &str = "resource";

/// Has the lead take in what its configuration declares now. The scheduler is off for a moment and running jobs stay; killed
/// in between, the next run does all of it again, so it ends with a scheduler that schedules.
///
/// # Errors
/// The step that failed.
pub async fn reload(client: &Client) -> Result<(), RpcError> {
    ask(client, "config.reload", Value::Null).await?;
    let loaded = modules(client).await?;
    let is_loaded = |module: &&str| loaded.iter().any(|loaded| loaded == module);
    // Which scheduler this instance has, if it is off right now because an earlier run was killed: Fluxion where the
    // package set brings it (its modprobe priority says so, flux-sched etc/modprobe/modprobe.d/fluxion.toml).
    let simple = is_loaded(&SIMPLE);
    for module in [SIMPLE].iter().chain(FLUXION.iter().rev()).chain([&RESOURCE]).filter(|module| is_loaded(module)) {
        ask(client, "module.remove", json!({ "name": module })).await?;
    }
    load(client, RESOURCE).await?;
    let is_fluxion = !simple && has_fluxion(load(client, FLUXION[0]).await)?;
    let rest = if is_fluxion { &FLUXION[1..] } else { &[SIMPLE] };
    for module in rest {
        load(client, module).await?;
    }
    // `flux resource list` looks healthy without a scheduler. Fluxion counts as loaded before the job manager has taken it: it
    // answers once it is, and if it never is, it ends.
    let last = rest.last().unwrap_or(&SIMPLE);
    ask(client, &format!("{last}.ping"), json!({})).await.map(drop)
}

/// Only where there is no such module: whatever else is in its way, Fluxion is not exchanged for another scheduler.
fn has_fluxion(loaded: Result<(), RpcError>) -> Result<bool, RpcError> {
    match loaded {
        Err(RpcError::Service { errnum, .. }) if errnum == Errno::ENOENT as u32 => Ok(false),
        other => other.map(|()| true),
    }
}

async fn ask(client: &Client, topic: &str, payload: Value) -> Result<Value, RpcError> {
    client.rpc_within(TIMEOUT, topic, ANY, payload).await
}

async fn load(client: &Client, module: &str) -> Result<(), RpcError> {
    ask(client, "module.load", json!({ "path": module, "args": [] })).await.map(drop)
}

async fn modules(client: &Client) -> Result<Vec<String>, RpcError> {
    #[derive(Deserialize)]
    struct Modules {
        mods: Vec<Module>,
    }
    #[derive(Deserialize)]
    struct Module {
        name: String,
    }
    let topic = "module.list";
    let Modules { mods } = parse(topic, ask(client, topic, Value::Null).await?)?;
    Ok(mods.into_iter().map(|module| module.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fluxion_is_never_exchanged_for_another_scheduler_because_it_fails_or_is_slow() {
        let topic = || "module.load".to_owned();
        let refused = |errno: Errno| RpcError::Service { topic: topic(), errnum: errno as u32, text: String::new() };
        assert!(has_fluxion(Ok(())).unwrap());
        assert!(!has_fluxion(Err(refused(Errno::ENOENT))).unwrap());
        assert!(has_fluxion(Err(refused(Errno::EINVAL))).is_err());
        assert!(has_fluxion(Err(RpcError::Timeout { topic: topic(), seconds: 60 })).is_err());
    }
}
