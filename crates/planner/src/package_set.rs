//! Publishes the package set in ConfigMap `flux-packages`. The planner resolves each question once, and a restart never
//! resolves again.

use std::{sync::Arc, time::Duration};

use kube::Client;
use tokio::{
    task::{JoinError, JoinSet},
    time::Instant,
};
use tracing::info;

use api::{CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_EPOCH_KEY, CONFIGMAP_PACKAGES_KEY, PackageSet, Packages};
use cluster::{
    ApiError, access,
    store::{self, Document},
    version::Version,
};
use locks::question::question;

use crate::kept::Kept;
use packages::{Access, HttpError, SolveError, resolve};

/// Resolves packages in a task of its own, because reading conda-forge's index alone can take minutes.
#[derive(Default)]
pub struct Resolver {
    /// The question, and the task that resolves it. Dropping the JoinSet aborts the task: if the question changes, or
    /// if another agent becomes the planner.
    running: Option<(String, JoinSet<Result<PackageSet, ResolveError>>)>,
    failed: Option<Failure>,
    /// What is published.
    document: Kept<Option<Arc<Document>>>,
}

/// A question that could not be resolved. Only the same question waits; a changed one is asked at once.
struct Failure {
    question: String,
    reason: Arc<ResolveError>,
    /// How many times in a row it has failed.
    count: u32,
    /// When to ask again.
    again: Instant,
}

/// The pause after the first failure; it doubles with each further one.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// The longest pause. Not shorter, because a channel's full index is a big download.
const LONGEST_REST: Duration = Duration::from_mins(2);

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// Secret `flux-packages-access` can't be read.
    #[error(transparent)]
    Access(#[from] ApiError),
    /// What the Secret holds can't be used.
    #[error("packages")]
    Http(#[from] HttpError),
    /// The channels can't be read, or have no such packages.
    #[error(transparent)]
    Solve(#[from] SolveError),
    /// The task was cancelled or panicked.
    #[error("resolving the packages was interrupted")]
    Interrupted(#[from] JoinError),
}

/// The state of the published package set.
pub enum Published {
    /// The set that the spec asks for is published.
    Is(PackageSet),
    /// No set is published yet; the planner is resolving one.
    Pending,
    /// No set is published, because resolving failed for this reason.
    Failed(Arc<ResolveError>),
    /// An earlier set is still published, because resolving the new one failed for this reason.
    Still(PackageSet, Arc<ResolveError>),
}

impl Resolver {
    /// Returns the published package set. If none answers the present question, starts to resolve one, and publishes it
    /// when it is done.
    ///
    /// `platforms` are those of the existing nodes; `running` is the digest of the running epoch's set. A published set
    /// answers for the platforms that it was made for: a node of another platform that joins later doesn't cause a new
    /// resolution until a user asks for one (`spec.packages.refresh`). `may_keep`: while the answer is not known, the published set may
    /// be used. False before the instance's first start: the set may be a deleted instance's. `version`: that of ConfigMap `flux-packages`.
    ///
    /// # Errors
    /// If a call to the API server fails.
    pub async fn published(
        &mut self,
        client: &Client,
        packages: &Packages,
        platforms: &[String],
        running: Option<&str>,
        may_keep: bool,
        version: Version,
    ) -> Result<Published, ApiError> {
        let read = async { Ok(store::read(client, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY).await?.map(Arc::new)) };
        let document = self.document.or_read(version, read).await?;
        let published = document.as_ref().and_then(|document| serde_json::from_str::<PackageSet>(&document.text).ok());
        let kept = published.clone().filter(|_| may_keep);
        if let Some(set) = published.as_ref().filter(|set| answers(set, packages)) {
            (self.running, self.failed) = (None, None);
            return Ok(Published::Is(set.clone()));
        }
        let question = question(packages, platforms);
        let outcome = match self.running.take() {
            Some((asked, mut work)) if asked == question => match work.try_join_next() {
                None => {
                    self.running = Some((asked, work));
                    None
                }
                Some(ended) => Some(ended.unwrap_or_else(|error| Err(error.into()))),
            },
            _ => self.ask(client.clone(), question.clone(), packages.clone(), platforms.to_vec()),
        };
        match outcome {
            Some(Ok(set)) => {
                self.document.forget();
                let mut document = document.as_deref().cloned();
                if let (Some(document), Some(published)) = (&mut document, &published)
                    && running == Some(published.digest().as_str())
                {
                    let text = std::mem::take(&mut document.text);
                    document.others.insert(CONFIGMAP_PACKAGES_EPOCH_KEY.to_owned(), text);
                }
                publish(client, &set, document.as_ref()).await?;
                Ok(Published::Is(set))
            }
            Some(Err(reason)) => {
                let before = self.failed.take().filter(|failure| failure.question == question);
                let count = before.map_or(0, |failure| failure.count) + 1;
                let rest = ASK_AGAIN.saturating_mul(1 << (count - 1).min(8)).min(LONGEST_REST);
                let reason = Arc::new(reason);
                self.failed = Some(Failure { question, reason: reason.clone(), count, again: Instant::now() + rest });
                Ok(until_answered(kept, reason))
            }
            None => match &self.failed {
                Some(failure) if failure.question == question => Ok(until_answered(kept, failure.reason.clone())),
                _ => Ok(kept.map_or(Published::Pending, Published::Is)),
            },
        }
    }

    /// Reads what is published again the next time.
    pub fn forget(&mut self) {
        self.document.forget();
    }

    fn ask(
        &mut self,
        client: Client,
        question: String,
        packages: Packages,
        platforms: Vec<String>,
    ) -> Option<Result<PackageSet, ResolveError>> {
        if packages.bundle.is_none() && packages.platforms.is_empty() && platforms.is_empty() {
            return None;
        }
        if let Some(failure) = &self.failed
            && failure.question == question
            && Instant::now() < failure.again
        {
            return None;
        }
        // Don't log the question itself: a channel's URL may contain a token.
        info!("resolving the packages");
        let work = async move {
            let access = access::read(&client).await?;
            let http = Access::from_secret(
                access.authorities.as_deref(),
                access.token.as_deref(),
                access.credentials.as_deref(),
            );
            let http = http.and_then(|access| access.client_for(&packages))?;
            let open = |path: &str| host::host_root::open_host_file(path.as_ref());
            Ok(resolve(&packages, &platforms, &http, None, open, |_| ()).await?)
        };
        self.running = Some((question, JoinSet::from_iter([work])));
        None
    }
}

/// The state while a question has no answer: an earlier set stays published.
fn until_answered(kept: Option<PackageSet>, reason: Arc<ResolveError>) -> Published {
    match kept {
        Some(set) => Published::Still(set, reason),
        None => Published::Failed(reason),
    }
}

fn answers(set: &PackageSet, packages: &Packages) -> bool {
    match set {
        PackageSet::Bundle(source) => packages.bundle.as_ref() == Some(source),
        PackageSet::Lock { question: asked, .. } => {
            let solved_for = serde_json::from_str::<serde_json::Value>(asked)
                .ok()
                .and_then(|asked| serde_json::from_value::<Vec<String>>(asked.get("platforms")?.clone()).ok());
            *asked == question(packages, &solved_for.unwrap_or_default())
        }
    }
}

async fn publish(client: &Client, set: &PackageSet, before: Option<&Document>) -> Result<(), ApiError> {
    let text = serde_json::to_string(set).map_err(|error| ApiError::Content {
        object: format!("ConfigMap {CONFIGMAP_PACKAGES}"),
        reason: error.to_string(),
    })?;
    store::write(client, CONFIGMAP_PACKAGES, CONFIGMAP_PACKAGES_KEY, text, before).await.map(drop)
}

#[cfg(test)]
mod tests;
