//! `flux-distribute bundle`: makes and inspects bundles, for sites without internet or with their own build of Flux.

pub(crate) mod create;
mod downloads;
pub(crate) mod install;
pub(crate) mod manifest;
pub(crate) mod pack;
pub(crate) mod packages;
pub(crate) mod unpack;

use std::{
    fmt::Write as _,
    io::{self, BufReader},
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use crate::{
    BundleManifest, CreateBundle, FetchError, HttpError, Limits, bundle::downloads::Downloads,
    bundle::packages::Contents, fetch::archive, files::print, progress::size, unpack_error::UnpackError,
};
use host::{files::FileError, opening::open_plain};
use locks::Locked;

/// Make or inspect a bundle: one file that contains a complete Flux.
#[derive(Subcommand, Debug, Clone)]
pub enum BundleCommand {
    /// Pack an installed Flux, or all packages of a lock, into a bundle. The same input gives the same bundle, bit for
    /// bit.
    Create(CreateBundle),
    /// Show a bundle's content, and what to write into the FluxInstance to use it.
    Inspect(InspectBundle),
}

/// Arguments of [`BundleCommand::Inspect`].
#[derive(Args, Debug, Clone)]
pub struct InspectBundle {
    /// The bundle.
    pub file: PathBuf,
    /// The output format.
    #[arg(long, short, value_enum, default_value_t = OutputFormat::Text)]
    pub output: OutputFormat,
}

/// The format of a command's output.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutputFormat {
    /// For people.
    #[default]
    #[value(alias = "table")]
    Text,
    /// For programs.
    Json,
}

/// Why a bundle could not be made or inspected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The input is not a bundle, or can't be made into one.
    #[error("{path}: {reason}")]
    Input {
        /// The file or directory.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] FileError),
    /// A package can't be downloaded.
    #[error("can't download the packages; the next run resumes from the downloads in {kept}")]
    Fetch {
        /// The directory of the downloads.
        kept: String,
        /// Why the download failed.
        #[source]
        source: FetchError,
    },
    /// The HTTP client can't be set up.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The disk has too little free space.
    #[error(
        "{path}: the packages and the bundle need {needed}, but only {free} are free; free some space or choose another --out"
    )]
    Room {
        /// The directory.
        path: String,
        /// The size needed, with unit.
        needed: String,
        /// The free space, with unit.
        free: String,
    },
    /// Another process writes the same bundle; two would destroy each other's downloads.
    #[error("another `bundle create` is writing {path}")]
    Busy {
        /// The bundle.
        path: String,
    },
}

impl BundleError {
    /// The process's exit code: 2 if the user must change the input, 1 for any other failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input { .. } | Self::Fetch { source: FetchError::Lock(_) | FetchError::NotAUrl { .. }, .. } => 2,
            _ => 1,
        }
    }

    pub(crate) fn input(path: &Path, reason: impl Into<String>) -> Self {
        Self::Input { path: path.display().to_string(), reason: reason.into() }
    }

    /// Converts the error from opening or reading `path`, which the user gave as a `kind` (lock or bundle).
    pub(crate) fn unread(path: &Path, kind: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| match error.kind() {
            io::ErrorKind::NotFound => Self::input(path, "there is no such file"),
            io::ErrorKind::IsADirectory => Self::input(path, format!("it is a directory, not a {kind}")),
            io::ErrorKind::InvalidInput => Self::input(path, error.to_string()),
            io::ErrorKind::InvalidData => Self::input(path, format!("it is not text, so it can't be a {kind}")),
            _ => FileError::on("read", path)(error).into(),
        }
    }
}

impl BundleCommand {
    /// What stays on disk if this command is interrupted, and why; None if nothing does.
    pub fn keeps(&self) -> Option<String> {
        let Self::Create(create) = self else { return None };
        let directory = create.lock.as_ref().and_then(|_| Downloads::name_beside(&create.out))?;
        Some(format!("what was downloaded stays in {}, and the same command goes on with it", directory.display()))
    }

    /// Runs the command and prints its result to stdout.
    ///
    /// # Errors
    /// See [`BundleError::exit_code`].
    pub fn run(self) -> Result<(), BundleError> {
        let text = match self {
            Self::Create(create) => create.run()?,
            Self::Inspect(inspect) => inspect.run()?,
        };
        Ok(print(&text)?)
    }
}

impl InspectBundle {
    /// Reads the whole bundle with the same checks as a host does, and returns the text to print.
    ///
    /// # Errors
    /// The file can't be read, or a host would refuse the bundle.
    pub fn run(&self) -> Result<String, BundleError> {
        let open = || open_plain(&self.file).map(BufReader::new).map_err(BundleError::unread(&self.file, "bundle"));
        let unread = || FileError::on("read", &self.file);
        let found = unpack::unpack(open()?, 0, None, Limits::default(), &mut |_| ()).map_err(|e| match e {
            UnpackError::Write { source, .. } => unread()(source).into(),
            other => BundleError::input(&self.file, base::error_chain(&other)),
        })?;
        let (sha256, size) = archive::sha256_of(open()?).map_err(unread())?;
        let url = file_url(&std::path::absolute(&self.file).map_err(unread())?);
        if self.output == OutputFormat::Json {
            let mut json = json!({
                "manifest": found.manifest,
                "files": found.entries,
                "bytes": found.bytes,
                "size": size,
                "url": url,
                "sha256": sha256,
            });
            if let Some(contents) = &found.contents {
                json["packages"] = contents.json();
            }
            return Ok(format!("{json:#}\n"));
        }
        let BundleManifest { kind, prefix, platform, created_by, .. } = &found.manifest;
        let (entries, bytes, created_by) = (found.entries, found.bytes, plain(created_by));
        let end = format!("size        {size} bytes\nsha256      {sha256}\n\n{}", in_instance(&url, &sha256));
        Ok(match &found.contents {
            Some(contents) => format!(
                "kind        {kind}\nplatforms   {}\ncreated by  {created_by}\narchives    {entries}, {bytes} bytes\n\
                 {end}{}",
                plain(&found.manifest.platforms().join(", ")),
                contents.text(),
            ),
            None => format!(
                "kind        {kind}\nprefix      {}\nplatform    {}\ncreated by  {created_by}\n\
                 entries     {entries}\nunpacked    {bytes} bytes\n{end}",
                plain(&prefix.display().to_string()),
                plain(platform),
            ),
        })
    }
}

/// The file's URL, which can go into a FluxInstance if the file has the same path on every node.
fn file_url(path: &Path) -> String {
    url::Url::from_file_path(path).map_or_else(|()| "https://...".to_owned(), String::from)
}

/// The lines of a FluxInstance that use this bundle.
fn in_instance(url: &str, sha256: &str) -> String {
    format!(
        "In the FluxInstance (the url can also be http or https; a file:// url is a path on every node):\n\
         spec:\n  packages:\n    bundle:\n      url: {url}\n      sha256: {sha256}\n"
    )
}

/// Removes control characters: text from a foreign file must not control the terminal.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// The columns that describe a package.
fn columns(package: &Locked) -> [String; 4] {
    let record = &package.record.package_record;
    let text = [record.name.as_normalized().to_owned(), record.version.to_string(), record.build.to_string()];
    let [name, version, build] = text.map(|text| plain(&text));
    [name, version, build, record.size.map_or_else(|| "?".to_owned(), size)]
}

impl Contents {
    fn json(&self) -> serde_json::Value {
        let platforms = self.packages.iter().map(|(platform, packages)| {
            let packages = packages.iter().map(|package| {
                let record = &package.record.package_record;
                json!({
                    "name": record.name.as_normalized(), "version": record.version.to_string(),
                    "build": record.build.to_string(), "size": record.size, "sha256": package.sha256,
                })
            });
            (platform.clone(), packages.collect())
        });
        serde_json::Value::Object(platforms.collect())
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (platform, packages) in &self.packages {
            let total = packages.iter().filter_map(|package| package.record.package_record.size);
            let total = size(total.fold(0, u64::saturating_add));
            let mut rows = packages.iter().map(columns).collect::<Vec<_>>();
            rows.sort();
            let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
            let [name, version, build, bytes] = [0, 1, 2, 3].map(width);
            // Writing to a string can't fail.
            let _ = writeln!(text, "\n{}: {} packages, {total}", plain(platform), packages.len());
            for [a, b, c, d] in &rows {
                let _ = writeln!(text, "  {a:name$}  {b:version$}  {c:build$}  {d:>bytes$}");
            }
        }
        text
    }
}
