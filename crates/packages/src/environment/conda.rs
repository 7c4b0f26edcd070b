//! Builds an environment's tree from conda packages.
//!
//! Each archive is hashed and unpacked into a directory of its own beside the environment; rattler links the files into
//! the environment, and then the directory is removed. Several archives are unpacked at a time, as soon as they arrive;
//! linking goes in order, one by one. The files are hard links only until then; in the end each has one name, so an
//! edit never affects a second file.
//!
//! Packages' link scripts don't run: they are shell scripts, and no package that Flux needs has one.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, mpsc},
};

use rattler::install::{ExternalSymlinkPolicy, InstallOptions, PythonInfo, Transaction, link_package_sync};
use rattler_conda_types::{
    PackageRecord, PrefixRecord, RepoDataRecord, Subdir,
    package::{IndexJson, LinkJson, NoArchLinks, PackageFile, PathsJson},
    prefix::Prefix,
};

use crate::{
    Limits,
    environment::{
        Build,
        arrivals::Arrivals,
        clobbers::has_clobbers,
        entry_points::Programs,
        extract::{check_and_correct_paths, check_copies, check_metadata, check_site_packages, extract},
        failed,
        limits::Memory,
        places::EntryPlaces,
        refused, room,
    },
    fetch::archive,
    unpack_error::UnpackError,
};
use base::error_chain;
use base::redact::shown;
use hostapi::{Progress, Refusal};
use locks::Locked;

/// A host may have hundreds of cores; one thread per core would gain little and disturb jobs.
const THREADS: usize = 4;

/// Memory for all decoders together: enough for four packages with the usual window of 8 MiB.
const MEMORY: u64 = 48 << 20;

/// A package that is unpacked, checked, and ready to be linked.
struct Unpacked {
    directory: PathBuf,
    paths: PathsJson,
    index: IndexJson,
    /// A file to report with [`Build::warn_of`].
    privileged: Option<PathBuf>,
}

/// The state of an archive's file.
enum Archive {
    Intact(File),
    /// A file with another sha256, with this inode, or no file.
    Other(Option<u64>),
}

impl Build<'_> {
    /// Unpacks and links the packages of `lock`.
    pub(crate) fn conda(&self, lock: &str, progress: &mut dyn FnMut(Progress)) -> Result<(), Refusal> {
        let mut packages = locks::packages(lock, self.platform).map_err(|e| refused(error_chain(&e)))?;
        locks::biggest_first(&mut packages);
        room::check(self.prefix(), packages.iter().map(|p| self.room_for(p)).fold(0, u64::saturating_add))?;
        // In the environment's file system, so that files can be hard-linked.
        let unpacked = self.beside("");
        fs::create_dir(&unpacked).map_err(|e| failed(format!("can't make {}: {e}", unpacked.display())))?;
        let done = self.unpack_and_link(&packages, &unpacked, progress);
        let removed = remove_all(&unpacked);
        done.and(removed)
    }

    fn room_for(&self, package: &Locked) -> u64 {
        match (fs::metadata(self.pkgs.join(&package.archive)), self.more, package.record.package_record.size) {
            (Ok(found), ..) => locks::unpacked(found.len()),
            (Err(_), Some(_), Some(size)) => locks::unpacked(size).saturating_add(size),
            // A missing archive is reported later, by name.
            _ => 0,
        }
    }

    fn unpack_and_link(
        &self,
        packages: &[Locked],
        unpacked: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), Refusal> {
        let linker = Linker::new(self, packages)?;
        // rattler's registry of which package has which file; its type can't be named here.
        let registry = Arc::default();
        let mut records = Vec::with_capacity(packages.len());
        let mut programs = Programs::default();
        let mut link = |package: &Locked, unpacked: Unpacked| {
            let name = file_name(&package.record);
            let wrong = |e: &dyn std::error::Error| failed(format!("can't link package {name}: {}", error_chain(e)));
            let Unpacked { directory, paths, index, privileged } = unpacked;
            self.warn_of(&format!("package {name}"), privileged.as_deref());
            if let Some(wrong) = programs.add(&name, &directory, &index, &paths, linker.python.as_ref()) {
                return Err(refused(wrong));
            }
            let places = EntryPlaces::new(&paths, &index, linker.python.as_ref());
            if let Err(error) = places.check(&directory, linker.partial.path()) {
                let url = shown(package.record.url.as_str());
                return Err(refused(format!("can't use package {name} from {url}: {error}")));
            }
            has_clobbers(linker.partial.path()).map_err(|e| wrong(&e))?;
            let options = linker.options(paths, index);
            let (paths, _) = link_package_sync(&directory, &linker.partial, Arc::clone(&registry), options)
                .map_err(|e| wrong(&e))?;
            let record = PrefixRecord::from_repodata_record(package.record.clone(), paths);
            linker.write(&record).map_err(|e| wrong(&e))?;
            records.push(record);
            Ok(directory)
        };
        let memory = Memory::new(MEMORY);
        let arrivals = Arrivals::new(&self.pkgs, packages.iter().map(|package| &package.archive), self.more);
        let arrivals = arrivals.map_err(|e| failed(format!("can't wait for archives: {e}")))?;
        let (sender, receiver) = mpsc::channel();
        let (remove, removable) = mpsc::channel();
        let (working, idle) = mpsc::channel::<()>();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let (sender, memory, arrivals, working) = (sender.clone(), &memory, &arrivals, working.clone());
                scope.spawn(move || {
                    let _working = working;
                    while let Some(next) = arrivals.next() {
                        let package = &packages[next.number];
                        let archive = match self.open_one(package, next.coming) {
                            Ok(Archive::Intact(archive)) => Ok(archive),
                            Ok(Archive::Other(inode)) => {
                                arrivals.give_back(next.number, inode);
                                continue;
                            }
                            Err(refusal) => Err(refusal),
                        };
                        let directory = unpacked.join(next.number.to_string());
                        let done = archive.and_then(|archive| self.unpack_one(package, archive, directory, memory));
                        if sender.send((next.number, done)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            drop(working);
            // Remove while linking, but only after all unpacking: an ext4 without journal goes through all recently
            // deleted inodes before it creates a file.
            let remover = scope.spawn(move || {
                let _ = idle.recv();
                removable.iter().try_for_each(|directory: PathBuf| remove_all(&directory))
            });
            let done = link_in_order(packages, receiver, progress, |package, unpacked| {
                // If the remover has ended early, its own error says why.
                link(package, unpacked).map(|directory| drop(remove.send(directory)))
            });
            arrivals.stop();
            drop(remove);
            let removed = remover
                .join()
                .unwrap_or_else(|_| Err(failed("the removal of the unpacked packages panicked".to_owned())));
            done.and(removed)
        })?;
        // If several packages contain the same file, keep that of the package on which none of the others depends.
        let records = PackageRecord::sort_topologically(records.iter().collect());
        let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
        let wrong = |e: &dyn std::error::Error| failed(format!("can't link the packages: {}", error_chain(e)));
        has_clobbers(linker.partial.path()).map_err(|e| wrong(&e))?;
        let clobbered = registry.unclobber(&records, linker.partial.path()).map_err(|e| wrong(&e))?;
        for path in clobbered.keys() {
            tracing::info!(path = %path.display(), "more than one package contains this file");
        }
        Ok(())
    }

    /// Opens an archive and checks its sha256. While more are `coming`, a wrong file (a power failure may leave one) is
    /// left for the fetching process to replace; later it is removed.
    fn open_one(&self, package: &Locked, coming: bool) -> Result<Archive, Refusal> {
        let path = self.pkgs.join(&package.archive);
        let name = file_name(&package.record);
        if !may_be_a_path(&name) {
            return Err(refused(format!("the lock's package {name:?} has a name that can't be part of a path")));
        }
        let unreadable = |e: io::Error| failed(format!("can't read {} of package {name}: {e}", path.display()));
        let mut archive = match File::open(&path) {
            Ok(archive) => archive,
            Err(e) if e.kind() == io::ErrorKind::NotFound && coming => return Ok(Archive::Other(None)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(self.missing_or_damaged(&path, &name)),
            Err(e) => return Err(unreadable(e)),
        };
        let (sha256, _) = archive::sha256_of(&archive).map_err(unreadable)?;
        if sha256 == package.sha256 {
            archive.rewind().map_err(unreadable)?;
            return Ok(Archive::Intact(archive));
        }
        if coming {
            return Ok(Archive::Other(Some(archive.metadata().map_err(unreadable)?.ino())));
        }
        Err(self.missing_or_damaged(&path, &name))
    }

    /// Unpacks an archive whose sha256 is right, so any defect is in the package itself.
    fn unpack_one(
        &self,
        package: &Locked,
        mut archive: File,
        directory: PathBuf,
        memory: &Memory,
    ) -> Result<Unpacked, Refusal> {
        let name = file_name(&package.record);
        fs::create_dir(&directory).map_err(|e| failed(format!("can't make {}: {e}", directory.display())))?;
        let packed = archive.metadata().map_err(|e| failed(format!("can't read package {name}: {e}")))?.len();
        let checked =
            extract(&mut archive, &directory, Limits::default(), memory).and_then(|(contents, privileged)| {
                let unreadable =
                    |what: &str, e: io::Error| UnpackError::Archive(format!("its {what} can't be read: {e}"));
                check_metadata(&directory, &contents)?;
                let mut paths = PathsJson::from_package_directory_with_deprecated_fallback(&directory)
                    .map_err(|e| unreadable("list of files", e))?;
                check_and_correct_paths(&mut paths, &contents)?;
                check_copies(&directory, &paths, self.ready, packed, Limits::default())?;
                let index =
                    IndexJson::from_package_directory(&directory).map_err(|e| unreadable("info/index.json", e))?;
                check_index(&index, &package.record, &directory)?;
                if !index.noarch.is_python() {
                    check_site_packages(&directory, &contents)?;
                }
                Ok((paths, index, privileged))
            });
        match checked {
            Ok((paths, index, privileged)) => Ok(Unpacked { directory, paths, index, privileged }),
            Err(error @ UnpackError::Write { .. }) => Err(failed(format!("can't unpack package {name}: {error}"))),
            Err(error) => {
                let url = shown(package.record.url.as_str());
                Err(refused(format!("can't use package {name} from {url}: {error}")))
            }
        }
    }
}

/// Name and build become parts of paths.
fn may_be_a_path(name: &str) -> bool {
    !name.starts_with('.') && !name.contains(|c: char| c == '/' || c.is_control())
}

/// Checks that the package's own metadata agree with the lock, as far as rattler builds paths from them.
fn check_index(index: &IndexJson, record: &RepoDataRecord, directory: &Path) -> Result<(), UnpackError> {
    if index.name != record.package_record.name {
        let (found, wanted) = (index.name.as_normalized(), record.package_record.name.as_normalized());
        return Err(UnpackError::Archive(format!("it is package {found}, but the lock has it as {wanted}")));
    }
    // rattler panics in this case.
    if index.noarch.is_python()
        && let Ok(LinkJson { noarch: NoArchLinks::Generic, .. }) = LinkJson::from_package_directory(directory)
    {
        return Err(UnpackError::Archive("its info/link.json is not that of a Python package".to_owned()));
    }
    Ok(())
}

/// Links each package as soon as it and all packages before it are unpacked.
fn link_in_order(
    packages: &[Locked],
    unpacked: mpsc::Receiver<(usize, Result<Unpacked, Refusal>)>,
    progress: &mut dyn FnMut(Progress),
    mut link: impl FnMut(&Locked, Unpacked) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let total = packages.len() as u64;
    let mut say = |what: &str, done: u64| progress(Progress::packages(what, done, total));
    let mut waiting = BTreeMap::new();
    let (mut arrived, mut linked) = (0, 0);
    for (number, done) in unpacked {
        waiting.insert(number, done?);
        arrived += 1;
        say("unpacking packages", arrived);
        while let Some(unpacked) = waiting.remove(&linked) {
            link(&packages[linked], unpacked)?;
            linked += 1;
            if arrived == total {
                say("linking packages", linked as u64);
            }
        }
    }
    Ok(())
}

/// Links packages into the environment with rattler.
struct Linker<'a> {
    partial: Prefix,
    ready: &'a Path,
    python: Option<PythonInfo>,
    platform: Subdir,
}

impl<'a> Linker<'a> {
    fn new(build: &Build<'a>, packages: &[Locked]) -> Result<Self, Refusal> {
        let platform = build.platform.parse::<Subdir>().map_err(|e| refused(e.to_string()))?;
        // rattler distributes a package's directories in chunks of hundreds, and hardly any package has more, so a
        // second thread would idle. If the global pool already exists, that one is used, which is fine too.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(1).build_global();
        let records = packages.iter().map(|p| &p.record);
        let none = Vec::<&RepoDataRecord>::new();
        let transaction = Transaction::from_current_and_desired(none, records, None, None, platform)
            .map_err(|e| refused(format!("can't use the lock: {}", error_chain(&e))))?;
        let partial = Prefix::create(build.partial)
            .map_err(|e| failed(format!("can't write to {}: {e}", build.partial.display())))?;
        Ok(Self { partial, ready: build.ready, python: transaction.python_info, platform })
    }

    fn options(&self, paths: PathsJson, index: IndexJson) -> InstallOptions {
        InstallOptions {
            target_prefix: Some(self.ready.to_owned()),
            paths_json: Some(paths),
            index_json: Some(index),
            allow_symbolic_links: Some(true),
            allow_hard_links: Some(true),
            // Attempted for every file and unsupported by most file systems; a hard link does the same and is always
            // cheap.
            allow_ref_links: Some(false),
            platform: Some(self.platform),
            python_info: self.python.clone(),
            external_symlink_policy: ExternalSymlinkPolicy::Allow,
            ..InstallOptions::default()
        }
    }

    /// Writes a package's record. Not synced, unlike rattler does: the whole environment is synced once before it is
    /// ready.
    fn write(&self, record: &PrefixRecord) -> io::Result<()> {
        let path = self.partial.path().join("conda-meta").join(record.file_name());
        let mut file = BufWriter::new(File::create_new(path)?);
        record.write_to(&mut file, true)?;
        file.flush()
    }
}

fn remove_all(directory: &Path) -> Result<(), Refusal> {
    fs::remove_dir_all(directory).map_err(|e| failed(format!("can't remove {}: {e}", directory.display())))
}

/// A package's name, version and build, for messages and file names.
pub(crate) fn file_name(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build)
}
