use std::path::Path;

use super::links;
use host::{
    Root,
    files::{Owner, write_atomic},
    opening::stays_below,
    state, statedir, sysctl, trust,
    users::{self, User},
};
use hostapi::{ConfigureOrder, HostFile, Refusal};

/// Writes the files that a broker reads at start. Prepares the statedir first: it is the only step whose failure is
/// permanent.
///
/// # Errors
/// If the prefix is not claimed, the user is unknown, the statedir is lost, or a file can't be written.
pub fn configure(root: &Root, order: &ConfigureOrder) -> Result<(), Refusal> {
    let (_lock, mut state) = state::lock_claimed(root, &order.prefix)?;
    let user = users::resolve_on(root, &order.run_as)?;
    if let Some(wanted) = &order.statedir
        && !order.live
    {
        statedir::prepare(&root.path(&order.prefix), wanted, user.owner())?;
    }
    sysctl::raise(root, &mut state, &order.sysctls)?;
    for file in &order.files {
        write(root, &order.prefix, file, &user)?;
    }
    links::flip(root, &mut state, order)?;
    if let Some(script) = order.files.iter().find(|file| file.path == Path::new(links::CONNECT)) {
        links::connect_at_root(root, &mut state, &script.content)?;
    }
    Ok(())
}

fn write(root: &Root, prefix: &Path, file: &HostFile, user: &User) -> Result<(), Refusal> {
    if !stays_below(&file.path) {
        return Err(Refusal::new(format!("{} is no path below the prefix", file.path.display())));
    }
    let path = prefix.join(&file.path);
    trust::make_directories(root, path.parent().unwrap_or(prefix))?;
    let owner = if file.broker_owned { user.owner() } else { Owner::ROOT };
    write_atomic(&root.path(&path), file.content.as_bytes(), file.mode, owner)
}
