//! `flux-distribute lock`: writes a lock to commit, review and put into the FluxInstance, and compares two locks.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use tokio::sync::mpsc::unbounded_channel;

use crate::{
    Access, HttpClient, HttpError, OutputFormat, SolveError, Style,
    files::{Aside, directory_of, print, rename_target},
    native_platform, resolve, shown,
};
use api::{PackageSet, Packages};
use base::redact::of_directory;
use host::{files::FileError, opening::open_plain};
use locks::{
    LockError,
    diff::{self, Bytes, Contents, Count, compare},
    normalise_lock,
};

const ABOUT_SOLVING: &str = "\
Finds the packages in the channels that satisfy the specs, on all platforms, and writes them as a
lock: URL and sha256 of each package, in the YAML of rattler and pixi. Commit it, review it, and put
its text into the FluxInstance as spec.packages.lock: then nothing is solved in the cluster. While
the channels stay the same, the lock stays the same, byte for byte.

Credentials for a channel come from the file named by RATTLER_AUTH_FILE, as for pixi, or from the
channel's URL. The lock contains none: an instance takes them from Secret flux-packages-access.

Exit code: 0 success, 2 the input can't be used, 1 any other failure, such as a channel that can't be
reached, 130 after Ctrl-C. A file is written only on success.";

const ABOUT_DIFF: &str = "\
Lists for each platform which packages are added, removed, upgraded, downgraded, rebuilt (same
version, another build), replaced (same build, other content) or moved (same content from another
channel), and how much an instance that has the old packages must download. If MAJOR.MINOR of
flux-core changes, all brokers must be restarted together, and the output says so.

Exit code: 0 if both files can be read, whether or not anything changes; 2 if one is not a lock.";

/// Write a lock of the packages to install, or compare two locks
#[derive(Args, Debug, Clone)]
#[command(args_conflicts_with_subcommands = true, after_help = ABOUT_SOLVING)]
pub struct LockCommand {
    /// A subcommand; without one, the command solves.
    #[command(subcommand)]
    pub action: Option<LockAction>,
    /// What to solve; conflicts with a subcommand.
    #[command(flatten)]
    pub solve: SolveArguments,
}

/// Subcommands of `lock`.
#[derive(Subcommand, Debug, Clone)]
pub enum LockAction {
    /// Show what an upgrade from one lock to another would change
    Diff(LockDiffArguments),
}

/// What to solve and where to write the lock.
#[derive(Args, Debug, Clone, Default)]
pub struct SolveArguments {
    /// A conda channel; earlier ones take precedence (repeatable). Default: conda-forge
    #[arg(long = "channel", value_name = "URL")]
    pub channels: Vec<String>,
    /// Package, such as 'flux-core 0.88.*' (repeatable). Default: flux-core, flux-sched, mpich
    #[arg(long = "spec", value_name = "SPEC")]
    pub specs: Vec<String>,
    /// linux-64 or linux-aarch64 (repeatable). Default: this machine's platform
    #[arg(long = "platform", value_name = "PLATFORM")]
    pub platforms: Vec<String>,
    /// The oldest glibc on any node. Default: 2.28
    #[arg(long, value_name = "VERSION")]
    pub glibc: Option<String>,
    /// The file to write. Default: stdout
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of [`LockAction::Diff`].
#[derive(Args, Debug, Clone)]
#[command(after_help = ABOUT_DIFF)]
pub struct LockDiffArguments {
    /// The lock in use now: a lock, a pixi.lock, or an @EXPLICIT list
    pub old: PathBuf,
    /// The lock to compare it with, in any of these formats
    pub new: PathBuf,
    /// The output format
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    pub output: OutputFormat,
}

/// Why `lock` or `lock diff` failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockCommandError {
    /// Solving failed.
    #[error(transparent)]
    Solve(#[from] SolveError),
    /// The HTTP settings in the process's environment are invalid.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A lock file can't be read.
    #[error("can't read {path}")]
    Unreadable {
        /// The path as given on the command line.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The directory of `--out` doesn't exist, or something other than a regular file has that name.
    #[error("can't write {path}: its directory doesn't exist, or something other than a regular file has that name")]
    NoPlainFile {
        /// The path as given on the command line.
        path: String,
    },
    /// `--out` may not be written, such as through another user's symlink.
    #[error("can't write {path}")]
    Forbidden {
        /// The path as given on the command line.
        path: String,
        /// Why, and what to do.
        source: io::Error,
    },
    /// A file is not a lock, or can't be installed.
    #[error("{path}")]
    Lock {
        /// The path as given on the command line.
        path: String,
        /// What is wrong with it.
        #[source]
        source: LockError,
    },
    /// Writing the lock or the output failed.
    #[error(transparent)]
    Io(#[from] FileError),
}

impl LockCommandError {
    /// The process's exit code: 2 if the user must change the input, 1 for any other failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Solve(SolveError::Write(_)) | Self::Http(_) | Self::Io(_) => 1,
            Self::Solve(error) if error.is_transient() => 1,
            Self::Solve(_)
            | Self::Unreadable { .. }
            | Self::NoPlainFile { .. }
            | Self::Forbidden { .. }
            | Self::Lock { .. } => 2,
        }
    }
}

impl LockCommand {
    /// Runs the command and prints its result to stdout.
    ///
    /// # Errors
    /// See [`LockCommandError::exit_code`].
    pub async fn run(self) -> Result<(), LockCommandError> {
        let text = match self.action {
            None => self.solve.run().await?,
            Some(LockAction::Diff(arguments)) => arguments.run()?,
        };
        Ok(print(&text)?)
    }
}

impl SolveArguments {
    /// Solves, writes the file if `--out` names one, and returns the text to print.
    ///
    /// # Errors
    /// The input is unusable, solving failed, or the file can't be written; the target file is unchanged in each case.
    pub async fn run(&self) -> Result<String, LockCommandError> {
        let target = self.out.as_deref().map(Target::open).transpose()?;
        let platforms = match self.platforms.as_slice() {
            [] => vec![native_platform().to_owned()],
            named => named.to_vec(),
        };
        let mut access = Access::from_environment()?;
        let channels = self.channels.iter().map(|channel| match channel.contains("://") {
            true => access.take_from(&of_directory(channel)),
            false => channel.clone(),
        });
        let channels = channels.collect::<Vec<_>>();
        let asked = Packages { channels, specs: self.specs.clone(), glibc: self.glibc.clone(), ..Packages::default() };
        let http = HttpClient::with_access(&access, &[])?;
        let open = |path: &str| File::open(path);
        let (sender, phases) = unbounded_channel();
        // The receiver outlives the sender.
        let tell = |phase| drop(sender.send(phase));
        let solving = resolve(&asked, &platforms, &http, None, open, tell);
        let PackageSet::Lock { lock, .. } = shown(Style::of(OutputFormat::Text), phases, solving).await? else {
            return Ok(String::new());
        };
        let Some(target) = target else { return Ok(lock) };
        let path = target.write(lock.as_bytes())?;
        let contents = diff::contents(&lock).map_err(SolveError::from)?;
        Ok(summary(&path, &contents))
    }
}

/// The text printed after a lock was written to a file.
fn summary(path: &Path, contents: &Contents) -> String {
    let mut text = format!("{}\n", path.display());
    for (platform, packages) in contents {
        let bytes = packages.iter().filter_map(|package| package.bytes).fold(0, u64::saturating_add);
        text.push_str(&format!("  {platform}: {}, {} to download\n", Count(packages.len()), Bytes(bytes)));
    }
    text + &compare(&Contents::new(), contents).warning()
}

/// The file that `--out` names, open under a temporary name.
struct Target {
    path: PathBuf,
    aside: Aside,
}

impl Target {
    /// Called before solving, so that a wrong path fails at once and not after minutes.
    fn open(given: &Path) -> Result<Self, LockCommandError> {
        let shown = || given.display().to_string();
        let unfit = || LockCommandError::NoPlainFile { path: shown() };
        let path = rename_target(given).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => LockCommandError::Forbidden { path: shown(), source },
            _ => unfit(),
        })?;
        if !directory_of(&path).is_dir() || path.file_name().is_none() {
            return Err(unfit());
        }
        let aside = Aside::in_directory(directory_of(&path)).map_err(FileError::on("write", &path))?;
        Ok(Self { path, aside })
    }

    fn write(self, bytes: &[u8]) -> Result<PathBuf, FileError> {
        let Self { path, aside } = self;
        let written = aside.file().and_then(|mut file| file.write_all(bytes)).and_then(|()| aside.keep(&path));
        written.map_err(FileError::on("write", &path))?;
        Ok(path)
    }
}

impl LockDiffArguments {
    /// Reads both locks and returns the text to print.
    ///
    /// # Errors
    /// One of them can't be read or is not a usable lock.
    pub fn run(&self) -> Result<String, LockCommandError> {
        let (old, new) = (Side::read(&self.old)?, Side::read(&self.new)?);
        let diff = compare(&old.contents, &new.contents);
        Ok(match self.output {
            OutputFormat::Json => {
                let json = serde_json::json!({
                    "oldDigest": old.digest,
                    "newDigest": new.digest,
                    "newEpochNeeded": !diff.flux_core.is_empty(),
                    "diff": diff,
                });
                format!("{json:#}\n")
            }
            OutputFormat::Text if old.digest == new.digest => format!("{diff}Both are package set {}.\n", old.digest),
            OutputFormat::Text => {
                format!("{diff}Package set {} replaces {}.\n", new.digest, old.digest)
            }
        })
    }
}

/// One of the two locks.
struct Side {
    contents: Contents,
    /// The digest that the planner would give this package set.
    digest: String,
}

impl Side {
    fn read(path: &Path) -> Result<Self, LockCommandError> {
        let shown = || path.display().to_string();
        let text = open_plain(path).and_then(io::read_to_string);
        let text = text.map_err(|source| LockCommandError::Unreadable { path: shown(), source })?;
        let wrong = |source| LockCommandError::Lock { path: shown(), source };
        let lock = normalise_lock(&text).map_err(wrong)?.into_owned();
        let contents = diff::contents(&lock).map_err(wrong)?;
        let digest = PackageSet::Lock { lock, question: String::new() }.digest();
        Ok(Self { contents, digest })
    }
}
