//! Which packages: asked of the channels once, by the planner.
//!
//! The answer must not depend on where the planner happens to run, so nothing here looks at the machine: the solver is
//! told a fixed glibc and kernel.

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
use locks::{
    LockError,
    question::{QuestionError, channels, glibc, parse_platform, parse_spec, question, specs, wanted_platforms},
};

/// Everything together. The full index of conda-forge over a slow line takes minutes, a dead server must not take hours.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(900);
/// For one platform; a real one takes seconds.
const SOLVER_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a channel is asked.
const ATTEMPTS: u32 = 3;

/// Why there is no package set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SolveError {
    /// A channel's index could not be read.
    #[error("channel {channel} can't be read: {reason}")]
    Channel {
        /// Without secrets.
        channel: String,
        /// In its own words.
        reason: String,
    },
    /// Not a channel at all.
    #[error("channel {channel} is not an http, https or file URL such as https://conda.anaconda.org/conda-forge")]
    NotAChannel {
        /// Without secrets.
        channel: String,
    },
    /// What is asked can't be read.
    #[error(transparent)]
    Question(#[from] QuestionError),
    /// No node, and none asked for.
    #[error("there is no platform to solve for; name one")]
    NoPlatform,
    /// No packages satisfy the specs.
    #[error("no packages of {channels} for {platform} satisfy the specs ({specs}): {reason}")]
    Unsolvable {
        /// All of them.
        channels: String,
        /// The platform that has no answer.
        platform: String,
        /// All of them.
        specs: String,
        /// What the solver says.
        reason: String,
    },
    /// The lock that was given can't be used.
    #[error("packages.lock: {0}")]
    Lock(#[from] LockError),
    /// A package of a channel that nobody could check.
    #[error("package {package} of channel {channel} has no sha256 in the channel's index")]
    NoSha256 {
        /// File name.
        package: String,
        /// Without secrets.
        channel: String,
    },
    /// It took too long.
    #[error("solving for {what} took longer than {seconds} s")]
    Timeout {
        /// All or one platform.
        what: String,
        /// The limit.
        seconds: u64,
    },
    /// Where the indices go for the moment.
    #[error("no directory for the channels' indices can be written; mount an emptyDir at /tmp")]
    Scratch(#[source] io::Error),
    /// The lock could not be put together.
    #[error("can't write the lock: {reason}")]
    Write {
        /// Why.
        reason: String,
    },
}

impl SolveError {
    /// The same question may have another answer later. All others stay until somebody changes the question.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Channel { .. } | Self::Timeout { .. } | Self::Scratch(_))
    }
}

/// Answers the question.
///
/// `host_dir` opens a directory in the host's root, for `file://` channels. `cache_dir` keeps the channels' indices for
/// next time; without it they go to a scratch directory and are gone afterwards.
///
/// # Errors
/// Named by channel, spec or platform; see [`SolveError::is_transient`].
pub async fn resolve(
    packages: &Packages,
    platforms: &[String],
    http: &HttpClient,
    cache_dir: Option<&Path>,
    host_dir: impl Fn(&str) -> io::Result<File>,
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
        let lock = task.solve(http, cache_dir).await?;
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

    async fn solve(self, http: &HttpClient, cache_dir: Option<&Path>) -> Result<String, SolveError> {
        let scratch = match cache_dir {
            Some(_) => None,
            None => Some(scratch().map_err(SolveError::Scratch)?),
        };
        let cache = cache_dir.unwrap_or_else(|| scratch.as_ref().map_or(Path::new("/"), tempfile::TempDir::path));
        let mut answers = Vec::with_capacity(self.platforms.len());
        for (platform, virtual_packages) in &self.platforms {
            let repodata = self.read_channels(*platform, http, cache).await?;
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
        let unwritten = |reason: String| SolveError::Write { reason };
        let text = self.write(answers).map_err(unwritten)?;
        // What is published must be what the agents can read.
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
                Err(error) => tracing::info!(attempt, error = error_chain(&error), "channels could not be read"),
            }
            attempt += 1;
            tokio::time::sleep(delays.next().unwrap_or(Duration::from_secs(4))).await;
        }
    }

    /// The gateway does not say which channel failed, so each is asked alone.
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
        // Seconds of pure computing: not on the threads that serve the probes.
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
            Err(error) => Err(SolveError::Write { reason: error.to_string() }),
        }
    }

    fn write(
        &self,
        answers: Vec<(Subdir, &Vec<GenericVirtualPackage>, Vec<RepoDataRecord>)>,
    ) -> Result<String, String> {
        let platforms = answers.iter().map(|(platform, virtual_packages, _)| PlatformData {
            name: PlatformName::from(platform),
            subdir: *platform,
            virtual_packages: virtual_packages.iter().map(ToString::to_string).collect(),
        });
        let mut builder = LockFile::builder().with_platforms(platforms.collect()).map_err(|e| error_chain(&e))?;
        let channels = self.sources.iter().map(|s| s.given.as_str());
        builder.set_channels(DEFAULT_ENVIRONMENT_NAME, channels);
        for (platform, _, records) in answers {
            for record in records {
                builder
                    .add_conda_package(DEFAULT_ENVIRONMENT_NAME, platform.as_str(), CondaPackageData::from(record))
                    .map_err(|e| error_chain(&e))?;
            }
        }
        builder.finish().render_to_string().map_err(|e| error_chain(&e))
    }

    fn source_of(&self, record: &RepoDataRecord) -> Option<&Source> {
        self.sources.iter().find(|s| record.url.as_str().starts_with(s.read.base_url.as_str()))
    }

    fn shown_channels(&self) -> String {
        self.sources.iter().map(|s| shown(s.given.as_str())).collect::<Vec<_>>().join(", ")
    }
}

/// The solver draws a tree over several lines; where it is shown there is one.
fn one_line(reason: &str) -> String {
    let drawn = |c: char| c.is_whitespace() || "├─└│".contains(c);
    let lines = reason.lines().map(|line| line.trim_matches(drawn)).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

/// Error texts of the gateway name files by the descriptor they were opened through, which helps nobody.
fn clean(reason: String) -> String {
    match reason.find("/proc/self/fd/") {
        None => reason,
        Some(_) => reason.replace("file:///proc/self/fd/", "descriptor ").replace("/proc/self/fd/", "descriptor "),
    }
}

/// The last attempt does without what makes trouble with some mirrors: sharded indices, and answers of "not modified"
/// that lack a validator.
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

/// The pod's root may be read-only; one of these is always there and writable.
fn scratch() -> io::Result<tempfile::TempDir> {
    let make = |parent: &Path| tempfile::Builder::new().prefix("flux-distribute-index-").tempdir_in(parent);
    make(&std::env::temp_dir()).or_else(|_| make(Path::new("/dev/shm"))).or_else(|_| make(Path::new("/run")))
}
