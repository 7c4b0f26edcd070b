//! `flux-distribute bundle`: makes and shows bundles, for sites without internet or with their own build of Flux.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand, ValueEnum};
use sha2::{Digest, Sha256};

use super::{
    BundleManifest, Limits, archive,
    manifest::check_prefix,
    native_platform,
    pack::{self, PackError},
    unpack::{self, UnpackError},
};

/// Make or look at a bundle: one file that holds a whole installation of Flux.
#[derive(Subcommand, Debug, Clone)]
pub enum BundleCommand {
    /// Pack an installed Flux into a bundle. The same files give the same bundle, bit by bit.
    Create(CreateBundle),
    /// Show what a bundle is, and what to write into the FluxInstance for it.
    Inspect(InspectBundle),
}

/// See [`BundleCommand::Create`].
#[derive(Args, Debug, Clone)]
pub struct CreateBundle {
    /// Directory that Flux is installed in: the one with bin/flux.
    #[arg(long, value_name = "DIR")]
    pub from_prefix: PathBuf,
    /// The bundle to write, such as flux.tar.gz.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The prefix Flux was configured with, if it was installed into a staging directory. Default: --from-prefix.
    #[arg(long, value_name = "DIR")]
    pub compiled_prefix: Option<PathBuf>,
    /// Conda's name of the platform it was built for. Default: this machine's.
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<String>,
}

/// See [`BundleCommand::Inspect`].
#[derive(Args, Debug, Clone)]
pub struct InspectBundle {
    /// The bundle.
    pub file: PathBuf,
    /// How to print it.
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    pub output: OutputFormat,
}

/// How to print something.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutputFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// What was given can't be made a bundle, or isn't one.
    #[error("{path}: {reason}")]
    Input {
        /// What was given.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Reading or writing failed.
    #[error("can't {what} {path}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// To which.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

impl BundleError {
    /// 2 where another input helps, 1 for all else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input { .. } => 2,
            Self::Io { .. } => 1,
        }
    }

    fn input(path: &Path, reason: impl Into<String>) -> Self {
        Self::Input { path: path.display().to_string(), reason: reason.into() }
    }

    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |source| Self::Io { what, path, source }
    }
}

impl BundleCommand {
    /// Does it, and prints to stdout.
    ///
    /// # Errors
    /// See [`BundleError::exit_code`].
    pub fn run(self) -> Result<(), BundleError> {
        let text = match self {
            Self::Create(create) => create.run()?,
            Self::Inspect(inspect) => inspect.run()?,
        };
        let stdout = Path::new("stdout");
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(BundleError::io("write to", stdout))
    }
}

impl CreateBundle {
    /// Writes the bundle and returns what is to be printed.
    ///
    /// # Errors
    /// Nothing of the bundle is left then.
    pub fn run(&self) -> Result<String, BundleError> {
        let from = fs::canonicalize(&self.from_prefix).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => BundleError::input(&self.from_prefix, "there is no such directory"),
            _ => BundleError::io("read", &self.from_prefix)(e),
        })?;
        if !from.join("bin/flux").is_file() {
            return Err(BundleError::input(&self.from_prefix, "it has no bin/flux; give the directory that has it"));
        }
        let prefix = match &self.compiled_prefix {
            Some(prefix) => prefix.clone(),
            None => std::path::absolute(&self.from_prefix).map_err(BundleError::io("read", &self.from_prefix))?,
        };
        check_prefix(&prefix).map_err(|reason| BundleError::input(&prefix, reason))?;
        let parent = self.out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent_real = fs::canonicalize(parent).map_err(BundleError::io("write to", parent))?;
        if parent_real.starts_with(&from) {
            return Err(BundleError::input(&self.out, "the bundle can't be inside of what it holds"));
        }
        let platform = self.platform.clone().unwrap_or_else(|| native_platform().to_owned());
        let manifest = BundleManifest::tree(prefix, platform);

        let write = || BundleError::io("write", &self.out);
        // Aside and in the same directory, so that a bundle under its name is a whole one.
        let aside = tempfile::Builder::new().prefix(".bundle-").tempfile_in(parent).map_err(write())?;
        let hashed = Hashed { inner: BufWriter::new(aside), hash: Sha256::new(), bytes: 0 };
        let hashed = pack::pack(&from, &manifest, hashed).map_err(|e| match e {
            PackError::Entry { path, reason } => BundleError::input(&path, reason),
            PackError::Read { path, source } => BundleError::io("read", &path)(source),
            PackError::Write(source) => write()(source),
        })?;
        let (sha256, bytes) = (hex::encode(hashed.hash.finalize()), hashed.bytes);
        let aside = hashed.inner.into_inner().map_err(|e| write()(e.into_error()))?;
        fs::set_permissions(aside.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644)).map_err(write())?;
        aside.as_file().sync_all().map_err(write())?;
        aside.persist(&self.out).map_err(|e| write()(e.error))?;
        let path = fs::canonicalize(&self.out).map_err(BundleError::io("read", &self.out))?;
        Ok(format!(
            "{}\n{bytes} bytes, {}, for {}\nsha256 {sha256}\n\n{}",
            path.display(),
            manifest.platform,
            manifest.prefix.display(),
            snippet(&path, &sha256),
        ))
    }
}

/// What to write into the FluxInstance.
fn snippet(path: &Path, sha256: &str) -> String {
    let url = url::Url::from_file_path(path).map_or_else(|()| "https://...".to_owned(), String::from);
    format!(
        "In the FluxInstance (the url may as well be http or https; file:// is a path on every node):\n\
         spec:\n  packages:\n    bundle:\n      url: {url}\n      sha256: {sha256}\n"
    )
}

impl InspectBundle {
    /// Reads the whole bundle, with the checks a host makes, and returns what is to be printed.
    ///
    /// # Errors
    /// Where a host would refuse it.
    pub fn run(&self) -> Result<String, BundleError> {
        let open = || {
            File::open(&self.file).map(BufReader::new).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => BundleError::input(&self.file, "there is no such file"),
                _ => BundleError::io("read", &self.file)(error),
            })
        };
        let found = unpack::unpack(open()?, None, None, Limits::default(), |_| ()).map_err(|e| match e {
            UnpackError::Write { source, .. } => BundleError::io("read", &self.file)(source),
            other => BundleError::input(&self.file, crate::error_chain(&other)),
        })?;
        let (sha256, size) = archive::sha256_of(open()?).map_err(BundleError::io("read", &self.file))?;
        let BundleManifest { kind, prefix, platform, created_by, .. } = &found.manifest;
        Ok(match self.output {
            OutputFormat::Json => {
                let json = serde_json::json!({
                    "manifest": found.manifest,
                    "files": found.entries,
                    "bytes": found.bytes,
                    "size": size,
                    "sha256": sha256,
                });
                format!("{json:#}\n")
            }
            OutputFormat::Text => format!(
                "kind        {kind}\nprefix      {}\nplatform    {platform}\ncreated by  {created_by}\n\
                 files       {}\nunpacked    {} bytes\nsize        {size} bytes\nsha256      {sha256}\n",
                prefix.display(),
                found.entries,
                found.bytes,
            ),
        })
    }
}

/// Hashes what is written.
struct Hashed<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buffer)?;
        self.hash.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
