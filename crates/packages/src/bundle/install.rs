//! Builds an environment from a bundle of either kind.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use crate::{
    Limits,
    bundle::{packages::Target, unpack},
    environment::{Build, failed, refused, room},
    fetch::archive::{self, Hashing},
    unpack_error::UnpackError,
};
use api::BundleSource;
use base::error_chain;
use base::redact::shown;
use hostapi::{Progress, Refusal};

impl Build<'_> {
    /// Unpacks the bundle. Returns the prefix that is compiled into it if it is a tree, `None` if it holds packages.
    pub(crate) fn bundle(
        &self,
        source: &BundleSource,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Option<PathBuf>, Refusal> {
        let archives = self.beside(".bundle");
        let done = self.unpack_bundle(source, &archives, progress);
        match fs::remove_dir_all(&archives) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                done.and(Err(failed(format!("can't remove {}: {e}", archives.display()))))
            }
            _ => done,
        }
    }

    /// Unpacks the bundle; the archives of a packages bundle go to `archives`.
    fn unpack_bundle(
        &self,
        source: &BundleSource,
        archives: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Option<PathBuf>, Refusal> {
        let path = self.pkgs.join(archive::bundle_name(self.digest));
        let name = format!("bundle {}", shown(&source.url));
        let unread = |e: io::Error| failed(format!("can't read {}: {e}", path.display()));
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(self.missing_or_damaged(&path, &name)),
            Err(e) => return Err(unread(e)),
        };
        let size = file.metadata().map_err(unread)?.len();
        room::check(self.prefix(), room::unpacked_gzip(&mut file).map_err(unread)?)?;
        let mut reader = Hashing::new(file);
        let target = Target { platform: self.platform, tree: self.partial, archives };
        let unpacked = unpack::unpack(&mut reader, size, Some(target), Limits::default(), progress);
        // Read the rest to get the sha256. Checking it only now is safe, because the environment isn't in use yet, and
        // if unpacking failed, the sha256 tells a damaged bundle from a full or faulty disk.
        io::copy(&mut reader, &mut io::sink()).map_err(unread)?;
        if !reader.sha256().eq_ignore_ascii_case(&source.sha256) {
            return Err(self.missing_or_damaged(&path, &name));
        }
        let unpacked = unpacked.map_err(|error| match error {
            UnpackError::Write { .. } => failed(format!("can't unpack {name}: {error}")),
            error => refused(format!("can't use {name}: {}", error_chain(&error))),
        })?;
        self.warn_of(&name, unpacked.privileged.as_deref());
        let Some(contents) = unpacked.contents else {
            return Ok(Some(unpacked.manifest.prefix));
        };
        let from_archives = Build { pkgs: archives.to_owned(), more: None, ..*self };
        let in_bundle = |refusal: Refusal| Refusal { message: format!("{name}: {refusal}"), ..refusal };
        from_archives.conda(&contents.lock, progress).map_err(in_bundle)?;
        Ok(None)
    }
}
