//! The sha256 of a tree's files.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use rayon::prelude::{IntoParallelIterator, ParallelIterator};

use crate::{Limits, environment::tree::open_below, fetch::archive};
use host::host_root::HostRoot;

/// Concurrent files; more threads would disturb jobs.
const THREADS: usize = 4;

/// A file and its sha256.
pub(super) type Hashed = (PathBuf, io::Result<String>);

/// Like [`digests`], in batches of `AT_A_TIME` files. Calls `report` before each batch with the number of files done.
pub(super) fn digests_while(root: &Path, paths: Vec<PathBuf>, mut report: impl FnMut(u64)) -> io::Result<Vec<Hashed>> {
    const AT_A_TIME: usize = 64;
    let pool = pool()?;
    let mut all = Vec::with_capacity(paths.len());
    for some in paths.chunks(AT_A_TIME) {
        report(all.len() as u64);
        all.extend(hash(&pool, root, some.to_vec()));
    }
    Ok(all)
}

/// The sha256 of each file below `root`.
pub(super) fn digests(root: &Path, paths: Vec<PathBuf>) -> io::Result<Vec<Hashed>> {
    Ok(hash(&pool()?, root, paths))
}

/// The pool's threads inherit the priority of the calling thread.
fn pool() -> io::Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().map_err(io::Error::other)
}

/// The sha256 of a file of this `length`, or another one if the file is longer. Who has it open could make it grow for as long as
/// it is read; one byte more is enough for another sha256.
fn digest_up_to(file: impl Read, length: u64) -> io::Result<String> {
    Ok(archive::sha256_of(file.take(length + 1))?.0)
}

fn hash(pool: &rayon::ThreadPool, root: &Path, paths: Vec<PathBuf>) -> Vec<Hashed> {
    let below = HostRoot::without_mounts(root);
    let digest = |path: &Path| -> io::Result<String> {
        let below = below.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        let file = open_below(below, path)?;
        let length = file.metadata()?.len();
        // A file with holes can be of any length.
        if length > Limits::default().bytes {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        digest_up_to(file, length)
    };
    pool.install(|| {
        paths
            .into_par_iter()
            .map(|path| {
                let digest = digest(&path);
                (path, digest)
            })
            .collect()
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_grows_while_it_is_hashed_has_another_sha256() {
        let wanted = hex::encode(<sha2::Sha256 as sha2::Digest>::digest([0; 10]));
        assert_eq!(digest_up_to(io::repeat(0).take(10), 10).unwrap(), wanted);
        assert_ne!(digest_up_to(io::repeat(0), 10).unwrap(), wanted);
    }
}
