//! Makes an environment's tree from conda packages.
//!
//! Each archive is hashed, unpacked into a directory of its own beside the environment, linked into it by rattler, and
//! that directory is removed: several are unpacked at a time, as soon as they are there, and one after the other is linked.
//! The files are hard links for that moment only; what stays has no second name, so an edit of one file is never an edit
//! of two.
//!
//! Packages' link scripts are not run: they are shell, and nothing that Flux needs has one.

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
    bundle::unpack::UnpackError,
    environment::{
        Build,
        arrivals::Arrivals,
        extract::{check_metadata, check_paths, extract},
        failed,
        limits::Memory,
        refused, room,
    },
    fetch::archive,
};
use base::error_chain;
use base::redact::shown;
use hostapi::{Progress, Refusal};
use locks::Locked;

/// A host may have hundreds of cores; a thread for each would cost more than it brings and would disturb jobs.
const THREADS: usize = 4;

/// What all decoders together may hold. Four packages as most are packed (a window of 8 MiB) fit at a time.
const MEMORY: u64 = 48 << 20;

/// A package that is unpacked and may be linked.
struct Unpacked {
    directory: PathBuf,
    paths: PathsJson,
    index: IndexJson,
    /// See [`Build::warn_of`].
    privileged: Option<PathBuf>,
}

/// What has an archive's name.
enum Archive {
    Intact(File),
    /// Something else, with this inode, or nothing.
    Other(Option<u64>),
}

impl Build<'_> {
    /// Unpacks and links the packages of `lock`.
    pub(crate) fn conda(&self, lock: &str, progress: &mut dyn FnMut(Progress)) -> Result<(), Refusal> {
        let mut packages = locks::packages(lock, self.platform).map_err(|e| refused(error_chain(&e)))?;
        locks::biggest_first(&mut packages);
        room::check(self.prefix(), packages.iter().map(|p| self.room_for(p)).fold(0, u64::saturating_add))?;
        // On the file system of the environment, so that files can be linked.
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
            // Those that are missing are told by name, later.
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
        // rattler's note of which package has which file; its type has no name outside.
        let registry = Arc::default();
        let mut records = Vec::with_capacity(packages.len());
        let mut link = |package: &Locked, unpacked: Unpacked| {
            let name = file_name(&package.record);
            let wrong = |e: &dyn std::error::Error| failed(format!("can't link package {name}: {}", error_chain(e)));
            let Unpacked { directory, paths, index, privileged } = unpacked;
            self.warn_of(&format!("package {name}"), privileged.as_deref());
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
            // Beside the linking but after the unpacking: an ext4 without journal looks at all that was just deleted
            // before it makes one file.
            let remover = scope.spawn(move || {
                let _ = idle.recv();
                removable.iter().try_for_each(|directory: PathBuf| remove_all(&directory))
            });
            let done = link_in_order(packages, receiver, progress, |package, unpacked| {
                // Where the remover has ended, it says why itself.
                link(package, unpacked).map(|directory| drop(remove.send(directory)))
            });
            arrivals.stop();
            drop(remove);
            let removed =
                remover.join().unwrap_or_else(|_| Err(failed("removing what was linked broke off".to_owned())));
            done.and(removed)
        })?;
        // Of a file that several packages bring, that of the package stays on which no other of them depends.
        let records = PackageRecord::sort_topologically(records.iter().collect());
        let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
        let clobbered = registry.unclobber(&records, linker.partial.path());
        let clobbered = clobbered.map_err(|e| failed(format!("can't link the packages: {}", error_chain(&e))))?;
        for path in clobbered.keys() {
            tracing::info!(path = %path.display(), "more than one package has this file");
        }
        Ok(())
    }

    /// Opens an archive and looks whether it is the one that is wanted. While more are `coming`, one that is not is about to
    /// be replaced by those who fetch, as one that a power cut has left; later it is removed.
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

    /// Unpacks an archive whose sha256 is right: whatever is wrong with it now was made by who made it.
    fn unpack_one(
        &self,
        package: &Locked,
        mut archive: File,
        directory: PathBuf,
        memory: &Memory,
    ) -> Result<Unpacked, Refusal> {
        let name = file_name(&package.record);
        fs::create_dir(&directory).map_err(|e| failed(format!("can't make {}: {e}", directory.display())))?;
        let checked =
            extract(&mut archive, &directory, Limits::default(), memory).and_then(|(contents, privileged)| {
                let told = |what: &str, e: io::Error| UnpackError::Archive(format!("its {what} can't be read: {e}"));
                check_metadata(&directory, &contents)?;
                let paths = PathsJson::from_package_directory_with_deprecated_fallback(&directory)
                    .map_err(|e| told("list of files", e))?;
                check_paths(&paths, &contents)?;
                let index = IndexJson::from_package_directory(&directory).map_err(|e| told("info/index.json", e))?;
                check_index(&index, &package.record, &directory)?;
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

/// Its name and its build become parts of paths.
fn may_be_a_path(name: &str) -> bool {
    !name.starts_with('.') && !name.contains(|c: char| c == '/' || c.is_control())
}

/// What the package says of itself must be what the lock says of it, as far as rattler makes paths of it.
fn check_index(index: &IndexJson, record: &RepoDataRecord, directory: &Path) -> Result<(), UnpackError> {
    if index.name != record.package_record.name {
        let (found, wanted) = (index.name.as_normalized(), record.package_record.name.as_normalized());
        return Err(UnpackError::Archive(format!("it is package {found}, but the lock has it as {wanted}")));
    }
    // rattler panics at this one.
    if index.noarch.is_python()
        && let Ok(LinkJson { noarch: NoArchLinks::Generic, .. }) = LinkJson::from_package_directory(directory)
    {
        return Err(UnpackError::Archive("its info/link.json is not that of a Python package".to_owned()));
    }
    Ok(())
}

/// Links each package as soon as it and all before it are unpacked.
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

/// Brings packages into the environment by rattler.
struct Linker<'a> {
    partial: Prefix,
    ready: &'a Path,
    python: Option<PythonInfo>,
    platform: Subdir,
}

impl<'a> Linker<'a> {
    fn new(build: &Build<'a>, packages: &[Locked]) -> Result<Self, Refusal> {
        let platform = build.platform.parse::<Subdir>().map_err(|e| refused(e.to_string()))?;
        // rattler shares out the directories of a package by hundreds, which hardly one has; a second thread would only
        // look for work. The global pool can be made once; then it is there, which is as good.
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
            // Tried on every file and refused by most file systems; a hard link is as good and always cheaper.
            allow_ref_links: Some(false),
            platform: Some(self.platform),
            python_info: self.python.clone(),
            external_symlink_policy: ExternalSymlinkPolicy::Allow,
            ..InstallOptions::default()
        }
    }

    /// Not synced as rattler would: the whole environment is, once, before it is ready.
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

/// A package's name for people.
pub(crate) fn file_name(record: &RepoDataRecord) -> String {
    let package = &record.package_record;
    format!("{}-{}-{}", package.name.as_normalized(), package.version, package.build)
}
