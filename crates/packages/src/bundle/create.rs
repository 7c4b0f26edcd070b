//! `flux-distribute bundle create`: makes a bundle from an installed Flux or from a lock.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{ArgGroup, Args};
use serde_json::json;
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    time::timeout,
};

use crate::{
    Access, BundleError, BundleManifest, HttpClient, OutputFormat, Sources, Style,
    bundle::{
        downloads::Downloads,
        file_url, in_instance,
        manifest::check_prefix,
        pack::{self, PackError},
        packages::{self, ByPlatform, archives, by_platform},
    },
    fetch::{archive::Hashing, fetch},
    files::{Aside, directory_of, publish, rename_target},
    holds, native_platform,
    progress::size,
    shown,
};
use api::PackageSet;
use base::error_chain;
use host::{
    child::{Kept, wait_until},
    files::{FileError, remove_if_there},
    opening::open_plain,
    room::Room,
};
use hostapi::Progress;
use locks::LockError;

/// Size of the write buffer; tar writes smaller pieces.
const BUFFER: usize = 1 << 16;
/// How long Flux may take to say where it reads its configuration: milliseconds, but on a busy disk seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// What takes less than this shows no progress.
const NOT_LONG: Duration = Duration::from_secs(1);

/// Arguments of [`BundleCommand::Create`](super::BundleCommand::Create).
#[derive(Args, Debug, Clone, Default)]
#[command(group = ArgGroup::new("content").required(true).args(["from_prefix", "lock"]))]
pub struct CreateBundle {
    /// Pack an installed Flux: the directory that contains bin/flux.
    #[arg(long, value_name = "DIR")]
    pub from_prefix: Option<PathBuf>,
    /// Download and pack all packages of a lock. If the command is interrupted, its downloads stay beside --out, in
    /// .NAME.download, and the next run resumes them. Credentials come from the file named by RATTLER_AUTH_FILE.
    #[arg(long, value_name = "FILE")]
    pub lock: Option<PathBuf>,
    /// The bundle to write, such as flux.tar.gz.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The prefix that Flux was configured with, if it was installed into a staging directory. Default: --from-prefix.
    #[arg(long, value_name = "DIR", conflicts_with = "lock")]
    pub compiled_prefix: Option<PathBuf>,
    /// conda's name of a platform; with --lock repeatable. Default: this machine's platform, with --lock all of the
    /// lock's.
    #[arg(long, value_name = "PLATFORM", value_parser = clap::builder::PossibleValuesParser::new(api::rules::PLATFORMS))]
    pub platform: Vec<String>,
    /// The format of the result and of the progress. json: one object per line on stdout, each with `event`: `progress`
    /// and `phase-ended` (phase, packages and bytes with done and total, bytesPerSecond, secondsLeft, seconds), then
    /// `done` (file, url, size, sha256, kind, platforms, prefix or packages, and `warning` if the bundle lacks
    /// something).
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    pub output: OutputFormat,
}

/// A finished bundle.
struct CreatedBundle {
    manifest: BundleManifest,
    sha256: String,
    bytes: u64,
    /// Number of archives; `None` for a tree.
    packages: Option<usize>,
    /// What the bundle lacks, for people.
    warning: Option<String>,
}

impl CreateBundle {
    /// Writes the bundle and returns the text to print. Must not be called within a Tokio runtime, because it starts
    /// its own.
    ///
    /// # Errors
    /// The input is unusable, or reading, downloading or writing failed. `--out` is then unchanged.
    pub fn run(&self) -> Result<String, BundleError> {
        if self.out.is_dir() {
            return Err(BundleError::input(&self.out, "it is a directory; name the file to write"));
        }
        // Fail before anything is fetched or packed.
        self.target()?;
        let made = match (&self.from_prefix, &self.lock) {
            (Some(from), None) => self.tree(from)?,
            (None, Some(lock)) => self.packages(lock)?,
            _ => return Err(BundleError::input(&self.out, "give either --from-prefix or --lock")),
        };
        let path = fs::canonicalize(&self.out).map_err(FileError::on("read", &self.out))?;
        Ok(made.report(&path, self.output))
    }

    fn parent(&self) -> &Path {
        directory_of(&self.out)
    }

    fn tree(&self, given: &Path) -> Result<CreatedBundle, BundleError> {
        let from = fs::canonicalize(given).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => BundleError::input(given, "there is no such directory"),
            _ => FileError::on("read", given)(e).into(),
        })?;
        if !from.join("bin/flux").is_file() {
            return Err(BundleError::input(given, "it has no bin/flux; give the directory that contains it"));
        }
        let prefix = match &self.compiled_prefix {
            Some(prefix) => prefix.clone(),
            None => std::path::absolute(given).map_err(FileError::on("read", given))?,
        };
        check_prefix(&prefix).map_err(|error| BundleError::input(&prefix, error.to_string()))?;
        let parent = self.parent();
        let parent_real = fs::canonicalize(parent).map_err(FileError::on("write to", parent))?;
        if parent_real.starts_with(&from) {
            return Err(BundleError::input(&self.out, "the bundle can't be written into the directory that it packs"));
        }
        let platform = match self.platform.as_slice() {
            [] => native_platform().to_owned(),
            [one] => one.clone(),
            _ => return Err(BundleError::input(given, "an installed Flux runs on one platform; give --platform once")),
        };
        let manifest = BundleManifest::tree(prefix, platform);
        let write = || FileError::on("write", &self.out);
        let target = self.target()?;
        let aside = Aside::in_directory(directory_of(&target)).map_err(write())?;
        let out = Hashing::new(BufWriter::with_capacity(BUFFER, aside.file().map_err(write())?));
        let (sender, events) = unbounded_channel();
        let pack = || {
            let mut progress = |now| drop(sender.send(now));
            let packed = pack::pack(&from, &manifest, out, &mut progress)
                .map_err(|e| not_packed(e, &self.out, Path::to_owned))?;
            progress(Progress::begun("syncing"));
            Ok::<_, BundleError>(finish(packed).map_err(write())?)
        };
        let (sha256, bytes) = self.beside_progress(events, pack)?;
        aside.keep(&target).map_err(write())?;
        let warning = warning_of_configuration(&from, given, &manifest.prefix);
        Ok(CreatedBundle { manifest, sha256, bytes, packages: None, warning })
    }

    /// Runs `work` on this thread, while another one shows its progress, if it takes long enough for anybody to wonder.
    fn beside_progress<T>(
        &self,
        events: UnboundedReceiver<Progress>,
        work: impl FnOnce() -> Result<T, BundleError>,
    ) -> Result<T, BundleError> {
        let (ended, mut end) = oneshot::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else { return };
                runtime.block_on(async {
                    if timeout(NOT_LONG, &mut end).await.is_err() {
                        // The work itself says why it has failed.
                        let _ = shown(Style::of(self.output), events, async { end.await.unwrap_or(Err(())) }).await;
                    }
                });
            });
            let done = work();
            let _ = ended.send(done.as_ref().map(drop).map_err(drop));
            done
        })
    }

    fn target(&self) -> Result<PathBuf, BundleError> {
        rename_target(&self.out).map_err(|e| BundleError::input(&self.out, e.to_string()))
    }

    fn packages(&self, given: &Path) -> Result<CreatedBundle, BundleError> {
        let lock = open_plain(given).and_then(io::read_to_string).map_err(BundleError::unread(given, "lock"))?;
        let unusable = |e: LockError| BundleError::input(given, error_chain(&e));
        // The lock becomes part of the bundle. Before parsing, because the parser's error may quote credentials.
        locks::check_lock(&lock, &self.platform).map_err(unusable)?;
        let lock = locks::normalise_lock(&lock).map_err(unusable)?;
        let mut platforms = match self.platform.as_slice() {
            [] => locks::platforms(&lock).map_err(unusable)?,
            asked => asked.to_vec(),
        };
        platforms.sort_unstable();
        platforms.dedup();
        let packages = Arc::new(by_platform(&lock, &platforms).map_err(unusable)?);
        if archives(&packages).is_empty() {
            return Err(BundleError::input(given, "the lock has no packages"));
        }
        let downloads = Downloads::beside(&self.out, self.parent())?;
        self.check_room(&packages, &downloads)?;

        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(FileError::on("start threads for", &self.out))?;
        let packed = downloads.bundle();
        let (sender, events) = unbounded_channel();
        let work = async {
            download(&lock, &packages, &downloads, &sender).await?;
            let (lock, packages, pkgs) = (lock.to_string(), Arc::clone(&packages), downloads.pkgs());
            let (out, packed, name_of) = (self.out.clone(), packed.clone(), downloads.name_of());
            let packing = tokio::task::spawn_blocking(move || {
                let write = || FileError::on("write", &out);
                remove_if_there(&packed).map_err(write())?;
                let file = File::create_new(&packed).map_err(write())?;
                let hashing = Hashing::new(BufWriter::with_capacity(BUFFER, file));
                let mut progress = |now| drop(sender.send(now));
                let hashed = packages::pack(&lock, &packages, &pkgs, hashing, &mut progress)
                    .map_err(|e| not_packed(e, &out, name_of))?;
                progress(Progress::begun("syncing"));
                Ok::<_, BundleError>(finish(hashed).map_err(write())?)
            });
            packing.await.map_err(|e| FileError::on("write", &self.out)(io::Error::other(e)))?
        };
        let (sha256, bytes) = runtime.block_on(async { shown(Style::of(self.output), events, work).await })?;
        fs::rename(&packed, self.target()?).map_err(FileError::on("write", &self.out))?;
        let warning = downloads.remove().err().map(|error| error_chain(&error));
        let packages = Some(archives(&packages).len());
        Ok(CreatedBundle { manifest: BundleManifest::packages(platforms), sha256, bytes, packages, warning })
    }

    /// Checks the free space: until the bundle is complete, the archives exist twice on disk. Skipped if the lock
    /// doesn't have all sizes.
    fn check_room(&self, packages: &ByPlatform, downloads: &Downloads) -> Result<(), BundleError> {
        let archives = archives(packages);
        let mut sizes = archives.values().map(|package| package.record.package_record.size);
        let Some(bytes) = sizes.try_fold(0_u64, |sum, size| Some(sum.saturating_add(size?))) else { return Ok(()) };
        let there = archives.keys().filter_map(|name| fs::metadata(downloads.pkgs().join(name)).ok());
        let there = there.map(|there| there.len()).fold(0, u64::saturating_add);
        let needed = bytes.saturating_mul(2).saturating_sub(there);
        let free = Room::of(&downloads.pkgs()).map_err(FileError::on("look at", downloads.path()))?.available;
        if needed <= free {
            return Ok(());
        }
        let (path, needed, free) = (self.parent().display().to_string(), size(needed), size(free));
        Err(BundleError::Room { path, needed, free })
    }
}

/// A warning if this Flux reads its configuration, such as which scheduler to load, outside of the packed directory:
/// `configure` had another `--sysconfdir`. None if it can't be asked, because it does not run here or does not answer.
fn warning_of_configuration(from: &Path, given: &Path, prefix: &Path) -> Option<String> {
    let configuration = PathBuf::from(answer(&from.join("bin/flux"), &["config", "builtin", "confdir"])?.trim());
    let is_packed = [from, given, prefix].iter().any(|tree| configuration.starts_with(tree));
    (configuration.is_absolute() && !is_packed).then(|| {
        format!(
            "this Flux reads {}, which is not in the bundle: on a node without that directory Flux loads sched-simple, not \
             Fluxion; configure Flux with --sysconfdir={}",
            configuration.display(),
            prefix.join("etc").display()
        )
    })
}

/// What a program prints if it succeeds within [`ANSWER_LIMIT`].
fn answer(program: &Path, args: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().ok()?;
    let printed = Kept::of(child.stdout.take());
    let status = wait_until(&mut child, Instant::now() + ANSWER_LIMIT).ok()??;
    status.success().then(|| printed.text())
}

fn not_packed(error: PackError, out: &Path, name_of: impl Fn(&Path) -> PathBuf) -> BundleError {
    match error {
        PackError::Entry { path, reason } => BundleError::input(&name_of(&path), reason),
        PackError::Read { path, source } => FileError::on("read", &name_of(&path))(source).into(),
        PackError::Write(source) => FileError::on("write", out)(source).into(),
    }
}

/// Downloads the archives of all platforms.
async fn download(
    lock: &str,
    packages: &ByPlatform,
    downloads: &Downloads,
    progress: &UnboundedSender<Progress>,
) -> Result<(), BundleError> {
    let set = PackageSet::Lock { lock: lock.to_owned(), question: String::new() };
    let (digest, pkgs) = (set.digest(), downloads.pkgs());
    let http = HttpClient::with_access(&Access::from_environment()?, &[])?;
    for (platform, _) in packages {
        // Not concurrently: a fetch for one platform deletes partial downloads of the others' archives.
        if holds(&set, &digest, platform, &pkgs) {
            continue;
        }
        let tell = |now: Progress| {
            let what = format!("{} for {platform}", now.what);
            // The receiver outlives all senders.
            let _ = progress.send(Progress { what, ..now });
        };
        let open = |path: &str| File::open(path);
        fetch(&set, &digest, platform, &pkgs, open, &http, &Sources::default(), tell)
            .await
            .map_err(|source| BundleError::Fetch { kept: downloads.path().display().to_string(), source })?;
    }
    Ok(())
}

impl CreatedBundle {
    fn report(&self, path: &Path, output: OutputFormat) -> String {
        let Self { manifest, sha256, bytes, packages, warning } = self;
        let url = file_url(path);
        if output == OutputFormat::Json {
            let mut done = json!({
                "event": "done", "file": path, "url": url, "size": bytes, "sha256": sha256,
                "kind": manifest.kind, "platforms": manifest.platforms(),
            });
            match packages {
                Some(packages) => done["packages"] = json!(packages),
                None => done["prefix"] = json!(manifest.prefix),
            }
            if let Some(warning) = warning {
                done["warning"] = json!(warning);
            }
            return format!("{done}\n");
        }
        let content = match packages {
            Some(packages) => format!("{packages} packages for {}", manifest.platforms.join(" and ")),
            None => format!("{}, for {}", manifest.platform, manifest.prefix.display()),
        };
        let warning = warning.as_ref().map_or(String::new(), |warning| format!("warning: {warning}\n"));
        let instance = in_instance(&url, sha256);
        format!("{}\n{bytes} bytes, {content}\nsha256 {sha256}\n{warning}\n{instance}", path.display())
    }
}

/// Makes the bundle world-readable and syncs it. Returns its sha256 in hex and its size in bytes.
fn finish(mut written: Hashing<BufWriter<File>>) -> io::Result<(String, u64)> {
    written.flush()?;
    let file = written.inner.get_ref();
    publish(file)?;
    let bytes = file.metadata()?.len();
    Ok((written.sha256(), bytes))
}
