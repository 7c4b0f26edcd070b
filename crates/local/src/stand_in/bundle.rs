//! The bundle that installs the stand-in on a node. It contains one script.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use crate::{
    cluster::root::IMAGE,
    error::{Context, LocalError},
};
use packages::CreateBundle;

/// The bundle's file name.
pub(crate) const NAME: &str = "no-flux.tar.gz";
/// The prefix in the bundle's manifest. As with every bundle, a node gets a symlink there.
const PREFIX: &str = "/opt/no-flux";

/// Writes the bundle into `directory`, which must exist, along with the files it packs.
///
/// # Errors
/// The disk refused a write.
pub(crate) fn make(directory: &Path) -> Result<(), LocalError> {
    let tree = directory.join("no-flux");
    let program = tree.join("bin/flux");
    let failed = || format!("can't write {}", program.display());
    fs::create_dir_all(tree.join("bin")).context(failed)?;
    let script = format!("#!/bin/sh\nexec {IMAGE}/flux-distribute local stand-in \"$@\"\n");
    fs::write(&program, script).context(failed)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context(failed)?;
    let create = CreateBundle {
        from_prefix: Some(tree),
        out: directory.join(NAME),
        compiled_prefix: Some(PREFIX.into()),
        ..CreateBundle::default()
    };
    create.run().map(drop).context(|| "can't pack the stand-in for Flux".to_owned())
}
