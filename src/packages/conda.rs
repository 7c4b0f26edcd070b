//! Makes an environment's tree from conda packages.

use std::{fs, io, path::Path};

use rattler::install::{Installer, LinkOptions};
use rattler_cache::{package_cache::PackageCache, validation::ValidationMode};
use rattler_conda_types::{RepoDataRecord, Subdir};

use super::{
    HttpClient, archive,
    environment::{Build, failed, refused},
    lock::{self, Locked},
};
use crate::{
    error_chain,
    host::{Progress, Refusal},
};

/// A host may have hundreds of cores; a pool for each would cost more than it brings and would disturb jobs.
const THREADS: usize = 4;

impl Build<'_> {
    /// Unpacks and links the packages of `lock`.
    pub(super) fn conda(&self, lock: &str, progress: &mut dyn FnMut(Progress)) -> Result<(), Refusal> {
        let packages = lock::packages(lock, self.platform).map_err(|e| refused(error_chain(&e)))?;
        let platform = self.platform.parse::<Subdir>().map_err(|e| refused(e.to_string()))?;
        // The global pool can be made once; then it is there, which is as good.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(2 * THREADS)
            .enable_all()
            .build()
            .map_err(|e| failed(format!("can't start threads: {e}")))?;
        // Beside the environment, so that files are moved and not copied, and for this one run only: a package cache
        // that stayed would share its files with the environment, and an edit of one would be an edit of both.
        let unpacked = self.ready.with_file_name(format!(".{}.unpacked", self.digest));
        let done = runtime.block_on(self.unpack_and_install(&packages, platform, &unpacked, progress));
        let removed = match fs::remove_dir_all(&unpacked) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(failed(format!("can't remove {}: {e}", unpacked.display())))
            }
            _ => Ok(()),
        };
        done.and(removed)
    }

    async fn unpack_and_install(
        &self,
        packages: &[Locked],
        platform: Subdir,
        unpacked: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Refusal> {
        use futures::StreamExt;
        let cache = PackageCache::new_layered([unpacked.to_owned()], false, ValidationMode::Skip);
        let total = packages.len() as u64;
        let mut each = futures::stream::iter(packages.iter().map(|package| self.unpack_one(package, &cache)))
            .buffer_unordered(THREADS);
        let mut done = 0;
        while let Some(result) = each.next().await {
            result?;
            done += 1;
            progress(Progress::packages("unpacking packages", done, total));
        }
        drop(each);
        progress(Progress::packages("linking packages", 0, total));
        let offline = HttpClient::offline().map_err(|e| failed(error_chain(&e)))?;
        let installed = Installer::new()
            .with_package_cache(cache)
            .with_download_client(offline.for_rattler())
            .with_target_platform(platform)
            .with_installed_packages(Vec::new())
            .with_alternative_target_prefix(self.ready)
            .with_execute_link_scripts(false)
            .with_io_concurrency_limit(2 * THREADS)
            .with_link_options(LinkOptions {
                allow_symbolic_links: None,
                allow_hard_links: Some(true),
                // Tried on every file and refused by most file systems; a hard link is as good and always cheaper.
                allow_ref_links: Some(false),
            })
            .install(self.partial, packages.iter().map(|p| p.record.clone()))
            .await
            .map_err(|e| failed(format!("can't link the packages: {}", error_chain(&e))))?;
        for path in installed.clobbered_paths.keys() {
            tracing::info!(path = %path.display(), "more than one package has this file");
        }
        progress(Progress::packages("linking packages", total, total));
        Ok(())
    }

    async fn unpack_one(&self, package: &Locked, cache: &PackageCache) -> Result<(), Refusal> {
        let archive = self.pkgs.join(&package.archive);
        let Err(error) = cache.get_or_fetch_from_path(&archive, Some(&package.record.package_record), None).await
        else {
            return Ok(());
        };
        let name = file_name(&package.record);
        match archive::intact(&archive, &package.sha256) {
            Ok(Some(_)) => Err(failed(format!("can't unpack package {name}: {}", error_chain(&error)))),
            Ok(None) => Err(self.missing_or_damaged(&archive, &name)),
            Err(e) => Err(failed(format!("can't read {} of package {name}: {e}", archive.display()))),
        }
    }
}

/// A package's name for people.
pub(super) fn file_name(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build)
}
