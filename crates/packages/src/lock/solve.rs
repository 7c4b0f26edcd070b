//! Solving: the planner finds out once which packages to install.
//!
//! The result must not depend on the node on which the planner runs, so nothing here inspects the machine: the solver
//! gets a fixed glibc and kernel version.

use std::{fs::File, io, path::Path, time::Duration};

use rattler_conda_types::{GenericVirtualPackage, MatchSpec, RepoDataRecord, Subdir};
use rattler_lock::{CondaPackageData, DEFAULT_ENVIRONMENT_NAME, LockFile, PlatformData, PlatformName};
use rattler_repodata_gateway::{ChannelConfig, Gateway, RepoData, SourceConfig, fetch::CacheAction};
use rattler_solve::{SolverImpl, SolverTask, resolvo};

use crate::{
    HttpClient,
    lock::{channel::Source, patience::patient},
};
use api::{PackageSet, Packages};
use base::{error_chain, redact::shown};
use hostapi::Progress;
use locks::{
    LockError,
    question::{QuestionError, channels, glibc, parse_platform, parse_spec, question, specs, wanted_platforms},
};

/// Limit for all platforms together. The full index of conda-forge takes minutes over a slow line; a dead server must
/// not take hours.
const RESOLVE_TIMEOUT: Duration = Duration::from_mins(15);
/// Limit for solving one platform, which normally takes seconds.
const SOLVER_TIMEOUT: Duration = Duration::from_mins(2);
/// How often the channels' index is requested.
const ATTEMPTS: u32 = 3;

/// Why solving failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SolveError {
    /// A channel's index can't be read.
    #[error("channel {channel} can't be read: {reason}")]
    Channel {
        /// The channel's URL without secrets.
        channel: String,
        /// The error of the server or the client.
        reason: String,
    },
    /// The text is not the URL of a channel.
    #[error(
        "channel {channel} is not an http, https or file URL such as https://conda.anaconda.org/conda-forge; that of a directory is file:///DIRECTORY"
    )]
    NotAChannel {
        /// The channel's URL without secrets.
        channel: String,
    },
    /// What is asked can't be read.
    #[error(transparent)]
    Question(#[from] QuestionError),
    /// No node, and none asked for.
    #[error("there is no platform to solve for; name one")]
    NoPlatform,
    /// No packages satisfy the specs.
    #[error("no packages in {channels} satisfy the specs ({specs}) for {platform}: {reason}")]
    Unsolvable {
        /// All channels, without secrets.
        channels: String,
        /// The platform that has no solution.
        platform: String,
        /// All specs.
        specs: String,
        /// The solver's explanation.
        reason: String,
    },
    /// The lock in the spec can't be used.
    #[error("packages.lock: {0}")]
    Lock(#[from] LockError),
    /// A package has no sha256, so its archive can't be verified.
    #[error("package {package} of channel {channel} has no sha256 in the channel's index")]
    NoSha256 {
        /// The archive's file name.
        package: String,
        /// The channel's URL without secrets.
        channel: String,
    },
    /// Solving took too long.
    #[error("solving for {what} took longer than {seconds} s")]
    Timeout {
        /// The platform, or "all platforms".
        what: String,
        /// The limit in seconds.
        seconds: u64,
    },
    /// No temporary directory for the channels' indexes can be created.
    #[error("can't create a directory for the channels' indexes; mount an emptyDir at /tmp")]
    Scratch(#[source] io::Error),
    /// The solution can't be written as a lock.
    #[error("can't write the lock")]
    Write(#[source] Box<dyn std::error::Error + Send + Sync>),
}

fn unwritten(error: impl std::error::Error + Send + Sync + 'static) -> SolveError {
    SolveError::Write(error.into())
}

impl SolveError {
    /// True if the same question may succeed later. Any other error remains until the question changes.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Channel { .. } | Self::Timeout { .. } | Self::Scratch(_))
    }
}

/// Resolves the spec to a package set: solves, or checks the lock that the spec contains.
///
/// `host_dir` opens a directory in the host's root, for `file://` channels. `cache_dir` keeps the channels' indexes for
/// the next call; without it they go to a temporary directory that is removed afterwards. `tell` gets each phase as it begins.
///
/// # Errors
/// Each error names the channel, spec or platform; see [`SolveError::is_transient`] for whether to retry.
pub async fn resolve(
    packages: &Packages,
    platforms: &[String],
    http: &HttpClient,
    cache_dir: Option<&Path>,
    host_dir: impl Fn(&str) -> io::Result<File>,
    tell: impl Fn(Progress),
) -> Result<PackageSet, SolveError> {
    if let Some(bundle) = &packages.bundle {
        return Ok(PackageSet::Bundle(bundle.clone()));
    }
    let question = question(packages, platforms);
    let platforms = wanted_platforms(packages, platforms);
    if platforms.is_empty() {
        return Err(SolveError::NoPlatform);
    }
    if let Some(text) = &packages.lock {
        locks::check_lock(text, &platforms.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>())?;
        return Ok(PackageSet::Lock { lock: locks::normalise_lock(text)?.into_owned(), question });
    }
    let solving = async {
        let task = Task::new(packages, &platforms, host_dir)?;
        let lock = task.solve(http, cache_dir, tell).await?;
        Ok(PackageSet::Lock { lock, question })
    };
    let too_long = SolveError::Timeout { what: "all platforms".to_owned(), seconds: RESOLVE_TIMEOUT.as_secs() };
    tokio::time::timeout(RESOLVE_TIMEOUT, solving).await.map_err(|_| too_long)?
}

struct Task {
    sources: Vec<Source>,
    specs: Vec<MatchSpec>,
    platforms: Vec<(Subdir, Vec<GenericVirtualPackage>)>,
}

impl Task {
    fn new(
        packages: &Packages,
        platforms: &[&str],
        host_dir: impl Fn(&str) -> io::Result<File>,
    ) -> Result<Self, SolveError> {
        let specs = specs(packages).into_iter().map(parse_spec).collect::<Result<_, _>>()?;
        let platforms = platforms.iter().map(|p| parse_platform(p, glibc(packages))).collect::<Result<_, _>>()?;
        let sources = channels(packages).into_iter().map(|c| Source::new(c, &host_dir)).collect::<Result<_, _>>()?;
        Ok(Self { sources, specs, platforms })
    }

    async fn solve(
        self,
        http: &HttpClient,
        cache_dir: Option<&Path>,
        tell: impl Fn(Progress),
    ) -> Result<String, SolveError> {
        let scratch = match cache_dir {
            Some(_) => None,
            None => Some(scratch().map_err(SolveError::Scratch)?),
        };
        let cache = cache_dir.unwrap_or_else(|| scratch.as_ref().map_or(Path::new("/"), tempfile::TempDir::path));
        let mut answers = Vec::with_capacity(self.platforms.len());
        for (platform, virtual_packages) in &self.platforms {
            tell(Progress::begun(&format!("reading the channels' index for {platform}")));
            let repodata = self.read_channels(*platform, http, cache).await?;
            tell(Progress::begun(&format!("solving for {platform}")));
            let mut records = self.choose(*platform, virtual_packages.clone(), repodata).await?;
            for record in &mut records {
                if let Some(source) = self.source_of(record) {
                    source.restore(record);
                }
                if record.package_record.sha256.is_none() {
                    return Err(SolveError::NoSha256 {
                        package: record.identifier.to_string(),
                        channel: record.channel.as_deref().map_or_else(String::new, shown),
                    });
                }
            }
            answers.push((*platform, virtual_packages, records));
        }
        let text = self.write(answers)?;
        // Agents must be able to read what is published.
        let platforms = self.platforms.iter().map(|(platform, _)| platform.to_string()).collect::<Vec<_>>();
        locks::check_lock(&text, &platforms)?;
        Ok(text)
    }

    async fn read_channels(
        &self,
        platform: Subdir,
        http: &HttpClient,
        cache: &Path,
    ) -> Result<Vec<RepoData>, SolveError> {
        let mut delays = backon::BackoffBuilder::build(backon::ExponentialBuilder::default().with_jitter());
        let mut attempt = 1;
        loop {
            let gateway = gateway(http, cache, attempt);
            let channels = self.sources.iter().map(|s| s.read.clone());
            let query = gateway.query(channels, [platform, Subdir::NoArch], self.specs.clone()).recursive(true);
            match query.await {
                Ok(answer) => return Ok(answer.repodata),
                Err(error) if attempt == ATTEMPTS => {
                    return Err(self.blame(platform, http, &gateway, error_chain(&error)).await);
                }
                Err(error) => {
                    tracing::info!(
                        attempt,
                        error = error_chain(&error),
                        "can't read the channels' index; trying again"
                    );
                }
            }
            attempt += 1;
            tokio::time::sleep(delays.next().unwrap_or(Duration::from_secs(4))).await;
        }
    }

    /// Finds the channel to name in the error. The gateway doesn't report which one failed, so each is queried alone.
    async fn blame(&self, platform: Subdir, http: &HttpClient, gateway: &Gateway, reason: String) -> SolveError {
        if self.sources.len() > 1 {
            for source in &self.sources {
                let query = gateway.query(
                    [source.read.clone()],
                    [platform, Subdir::NoArch],
                    self.specs.iter().take(1).cloned(),
                );
                if let Err(error) = query.await {
                    return SolveError::Channel {
                        channel: shown(source.given.as_str()),
                        reason: clean(error_chain(&error)) + &http.withheld(&source.given),
                    };
                }
            }
        }
        let withheld = self.sources.iter().map(|source| http.withheld(&source.given)).find(|words| !words.is_empty());
        SolveError::Channel { channel: self.shown_channels(), reason: clean(reason) + &withheld.unwrap_or_default() }
    }

    async fn choose(
        &self,
        platform: Subdir,
        virtual_packages: Vec<GenericVirtualPackage>,
        repodata: Vec<RepoData>,
    ) -> Result<Vec<RepoDataRecord>, SolveError> {
        let specs = self.specs.clone();
        // Solving computes for seconds and must not block the threads that serve the probes.
        let solving = tokio::task::spawn_blocking(move || {
            let task = SolverTask {
                virtual_packages,
                specs,
                timeout: Some(SOLVER_TIMEOUT),
                ..repodata.iter().map(RepoData::iter).collect::<SolverTask<'_, Vec<_>>>()
            };
            resolvo::Solver.solve(task)
        });
        match solving.await {
            Ok(Ok(answer)) => Ok(answer.records),
            Ok(Err(rattler_solve::SolveError::Cancelled)) => {
                Err(SolveError::Timeout { what: platform.to_string(), seconds: SOLVER_TIMEOUT.as_secs() })
            }
            Ok(Err(error)) => Err(SolveError::Unsolvable {
                channels: self.shown_channels(),
                platform: platform.to_string(),
                specs: self.specs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                reason: match error {
                    rattler_solve::SolveError::Unsolvable(reasons) => one_line(&reasons.join("\n")),
                    other => error_chain(&other),
                },
            }),
            Err(error) => Err(unwritten(error)),
        }
    }

    fn write(
        &self,
        answers: Vec<(Subdir, &Vec<GenericVirtualPackage>, Vec<RepoDataRecord>)>,
    ) -> Result<String, SolveError> {
        let platforms = answers.iter().map(|(platform, virtual_packages, _)| PlatformData {
            name: PlatformName::from(platform),
            subdir: *platform,
            virtual_packages: virtual_packages.iter().map(ToString::to_string).collect(),
        });
        let mut builder = LockFile::builder().with_platforms(platforms.collect()).map_err(unwritten)?;
        let channels = self.sources.iter().map(|s| s.given.as_str());
        builder.set_channels(DEFAULT_ENVIRONMENT_NAME, channels);
        for (platform, _, records) in answers {
            for record in records {
                builder
                    .add_conda_package(DEFAULT_ENVIRONMENT_NAME, platform.as_str(), CondaPackageData::from(record))
                    .map_err(unwritten)?;
            }
        }
        builder.finish().render_to_string().map_err(unwritten)
    }

    fn source_of(&self, record: &RepoDataRecord) -> Option<&Source> {
        self.sources.iter().find(|s| record.url.as_str().starts_with(s.read.base_url.as_str()))
    }

    fn shown_channels(&self) -> String {
        self.sources.iter().map(|s| shown(s.given.as_str())).collect::<Vec<_>>().join(", ")
    }
}

/// Joins the solver's multi-line tree into one line, for places that show only one.
fn one_line(reason: &str) -> String {
    let drawn = |c: char| c.is_whitespace() || "├─└│".contains(c);
    let lines = reason.lines().map(|line| line.trim_matches(drawn)).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

/// The gateway's errors name files by the descriptor's path under `/proc`, which means nothing to users.
fn clean(reason: String) -> String {
    match reason.find("/proc/self/fd/") {
        None => reason,
        Some(_) => reason.replace("file:///proc/self/fd/", "descriptor ").replace("/proc/self/fd/", "descriptor "),
    }
}

/// The last attempt avoids what fails with some mirrors: sharded indexes, and "not modified" responses that lack a
/// validator.
fn gateway(http: &HttpClient, cache: &Path, attempt: u32) -> Gateway {
    let last = attempt == ATTEMPTS;
    let source = SourceConfig {
        sharded_enabled: !last,
        cache_action: if last { CacheAction::NoCache } else { CacheAction::default() },
        ..SourceConfig::default()
    };
    Gateway::builder()
        .with_client(patient(http))
        .with_cache_dir(cache)
        .with_max_concurrent_requests(16)
        .with_channel_config(ChannelConfig { default: source, ..ChannelConfig::default() })
        .finish()
}

/// A temporary directory. The pod's root may be read-only, but one of these parents always exists and is writable.
fn scratch() -> io::Result<tempfile::TempDir> {
    let make = |parent: &Path| tempfile::Builder::new().prefix("flux-distribute-index-").tempdir_in(parent);
    make(&std::env::temp_dir()).or_else(|_| make(Path::new("/dev/shm"))).or_else(|_| make(Path::new("/run")))
}
