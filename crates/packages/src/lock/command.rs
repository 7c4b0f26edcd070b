//! `flux-distribute lock`: a lock to commit, review and put into the FluxInstance, and what the next one would change.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};

use crate::{
    Access, HttpClient, HttpError, OutputFormat, SolveError,
    files::{Aside, FileError, directory_of, open_plain, print, rename_target},
    native_platform, resolve,
};
use api::{PackageSet, Packages};
use locks::{
    LockError,
    diff::{self, Bytes, Contents, Count, compare},
    normalise_lock,
};

const ABOUT_SOLVING: &str = "\
Asks the channels which packages satisfy the specs, on all platforms, and writes the answer as a
lock: URL and sha256 of each package, in the YAML of rattler and pixi. Commit it, review it, and put
its text into the FluxInstance as spec.packages.lock: nobody is then asked what to install. While the
channels stay as they are, the lock is the same, byte by byte.

Credentials for a channel come from the file that RATTLER_AUTH_FILE names, as for pixi, or from the
channel's URL. The lock holds none: an instance takes them from Secret flux-packages-access.

Exit code: 0 done, 2 the input can't be served, 1 anything else, such as a channel that can't be
reached. Nothing is written unless it is 0.";

const ABOUT_DIFF: &str = "\
Says for each platform which packages are added, removed, upgraded, downgraded, rebuilt (same
version, another build), replaced (same build, other content) or moved (same content from another
channel), and how much an instance that has the old packages must download. Where MAJOR.MINOR of
flux-core changes, all brokers must be restarted together, and that is said too.

Exit code: 0 whenever both can be read, whether anything changes or not; 2 where one is no lock.";

/// Write down which packages to install, or say what another such list would change.
#[derive(Args, Debug, Clone)]
#[command(args_conflicts_with_subcommands = true, after_help = ABOUT_SOLVING)]
pub struct LockCommand {
    /// Something else than solving.
    #[command(subcommand)]
    pub action: Option<LockAction>,
    /// Solving.
    #[command(flatten)]
    pub solve: SolveArguments,
}

/// What else can be done with locks.
#[derive(Subcommand, Debug, Clone)]
pub enum LockAction {
    /// Say in words what an upgrade from one lock to another would change
    Diff(LockDiffArguments),
}

/// What to solve.
#[derive(Args, Debug, Clone, Default)]
pub struct SolveArguments {
    /// A conda channel, the first one wins (repeatable). Default: conda-forge
    #[arg(long = "channel", value_name = "URL")]
    pub channels: Vec<String>,
    /// Package, such as 'flux-core 0.88.*' (repeatable). Default: flux-core, flux-sched, mpich
    #[arg(long = "spec", value_name = "SPEC")]
    pub specs: Vec<String>,
    /// linux-64 or linux-aarch64 (repeatable). Default: this machine's
    #[arg(long = "platform", value_name = "PLATFORM")]
    pub platforms: Vec<String>,
    /// The oldest glibc of any node. Default: 2.28
    #[arg(long, value_name = "VERSION")]
    pub glibc: Option<String>,
    /// The file to write. Default: stdout
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// See [`LockAction::Diff`].
#[derive(Args, Debug, Clone)]
#[command(after_help = ABOUT_DIFF)]
pub struct LockDiffArguments {
    /// What is installed now: a lock, a pixi.lock, or an @EXPLICIT list
    pub old: PathBuf,
    /// What would be installed instead, in any of these forms
    pub new: PathBuf,
    /// How to print it
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    pub output: OutputFormat,
}

/// Why there is no lock, or no comparison.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockCommandError {
    /// No answer to the question.
    #[error(transparent)]
    Solve(#[from] SolveError),
    /// The environment's settings for HTTP are wrong.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// A lock that can't even be looked at.
    #[error("can't read {path}")]
    Unreadable {
        /// As it was given.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// There is no such directory, or something else than a plain file is there already.
    #[error("{path}: no plain file can be written there")]
    NoPlainFile {
        /// As it was given.
        path: String,
    },
    /// A file that is no lock, or one that can't be installed.
    #[error("{path}")]
    Lock {
        /// As it was given.
        path: String,
        /// What is wrong with it.
        #[source]
        source: LockError,
    },
    /// Writing failed.
    #[error(transparent)]
    Io(#[from] FileError),
}

impl LockCommandError {
    /// 2 where another input helps, 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Solve(SolveError::Write { .. }) | Self::Http(_) | Self::Io(_) => 1,
            Self::Solve(error) if error.is_transient() => 1,
            Self::Solve(_) | Self::Unreadable { .. } | Self::NoPlainFile { .. } | Self::Lock { .. } => 2,
        }
    }
}

impl LockCommand {
    /// Does it, and prints to stdout.
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
    /// Solves, writes the file if there is one to write, and returns what is to be printed.
    ///
    /// # Errors
    /// Nothing is written then.
    pub async fn run(&self) -> Result<String, LockCommandError> {
        let target = self.out.as_deref().map(Target::open).transpose()?;
        let platforms = match self.platforms.as_slice() {
            [] => vec![native_platform().to_owned()],
            named => named.to_vec(),
        };
        let mut access = Access::from_environment()?;
        let channels = self.channels.iter().map(|channel| access.take_from(channel)).collect::<Vec<_>>();
        let asked = Packages { channels, specs: self.specs.clone(), glibc: self.glibc.clone(), ..Packages::default() };
        let http = HttpClient::with_access(&access, &[])?;
        let open = |path: &str| File::open(path);
        let PackageSet::Lock { lock, .. } = resolve(&asked, &platforms, &http, None, open).await? else {
            return Ok(String::new());
        };
        let Some(target) = target else { return Ok(lock) };
        let path = target.write(lock.as_bytes())?;
        let contents = diff::contents(&lock).map_err(SolveError::from)?;
        Ok(summary(&path, &contents))
    }
}

/// What is in the lock that was just written.
fn summary(path: &Path, contents: &Contents) -> String {
    let mut text = format!("{}\n", path.display());
    for (platform, packages) in contents {
        let bytes = packages.iter().filter_map(|package| package.bytes).fold(0, u64::saturating_add);
        text.push_str(&format!("  {platform}: {}, {} to download\n", Count(packages.len()), Bytes(bytes)));
    }
    text + &compare(&Contents::new(), contents).warning()
}

/// Where the lock is to be, and where it is written.
struct Target {
    path: PathBuf,
    aside: Aside,
}

impl Target {
    /// Before solving: nobody wants to hear of a wrong path after minutes.
    fn open(given: &Path) -> Result<Self, LockCommandError> {
        let unfit = || LockCommandError::NoPlainFile { path: given.display().to_string() };
        let path = rename_target(given).map_err(|_| unfit())?;
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
    /// Reads both and returns what is to be printed.
    ///
    /// # Errors
    /// Where one of them can't be read.
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
                format!("{diff}Package set {} takes the place of {}.\n", new.digest, old.digest)
            }
        })
    }
}

/// One of the two.
struct Side {
    contents: Contents,
    /// As the planner will name it.
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
