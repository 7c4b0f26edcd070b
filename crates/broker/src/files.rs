//! The files that a broker reads at its start, with those that help people and a later planner. Pure.

use std::{collections::BTreeMap, path::Path};

use super::command::{LIVE_CONFIGURATION, RC1_TASKS, connect_script, rc1_tasks};
use api::{Rank, Roster};
use host::{state, users::User};
use hostapi::HostFile;
use model::{broker_toml::RenderError, names::live_configuration};

/// The configuration, below the prefix.
const BROKER_TOML: &str = "etc/broker.toml";
/// The certificate, below the prefix.
pub const CERTIFICATE: &str = "etc/curve.cert";
/// The host's copy of the roster, below the prefix.
const ROSTER: &str = "etc/roster.json";
/// Lead: the revision that its broker has loaded, below the prefix. The agent writes it once the broker runs.
pub const APPLIED: &str = "etc/applied.json";
/// The connect script, below the prefix; it is copied to the host's root.
const CONNECT: &str = "bin/flux-connect.sh";

/// Texts that others have made.
#[derive(Debug)]
pub struct FileTexts<'a> {
    /// `broker.toml` for this host.
    pub broker_toml: &'a str,
    /// The certificate, with its secret key.
    pub certificate: &'a str,
    /// The roster as JSON.
    pub roster: &'a str,
}

/// The files on the host of `rank`, with paths below `prefix`. `owner`: the brokers' user there.
///
/// # Errors
/// If the roster can't be rendered.
pub fn files(
    prefix: &Path,
    roster: &Roster,
    rank: Rank,
    texts: &FileTexts,
    owner: &User,
) -> Result<Vec<HostFile>, RenderError> {
    let file = |path: &str, content: String, mode| HostFile { path: path.into(), content, mode, broker_owned: false };
    let environment = state::environment(prefix, &roster.settings.digest);
    let mut files = vec![
        file(BROKER_TOML, texts.broker_toml.to_owned(), 0o644),
        HostFile { broker_owned: true, ..file(CERTIFICATE, texts.certificate.to_owned(), 0o600) },
        file(ROSTER, texts.roster.to_owned(), 0o644),
        file(CONNECT, connect_script(&environment, owner.uid, owner.gid), 0o755),
    ];
    if rank == 0 && roster.declares_nodes() {
        let configuration = live_configuration(roster, &BTreeMap::new())?;
        files.push(file(LIVE_CONFIGURATION, configuration.to_string(), 0o644));
        files.push(file(RC1_TASKS, rc1_tasks(prefix), 0o644));
    }
    Ok(files)
}
