//! `kubectl flux support-bundle`: one archive for whoever is asked for help, without secrets.

mod forms;
mod gather;
mod looks;
mod plain;
mod scrub;

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use flate2::{Compression, write::GzEncoder};
use k8s_openapi::jiff::Timestamp;
use tempfile::TempPath;

use crate::{
    arguments::SupportOptions,
    error::KubectlError,
    observed::Cluster,
    screen::{complain, print, yaml},
    wait::unless_interrupted,
};
use base::words::many;
use gather::{BundleFile, Content, gather, secrets};
use scrub::Scrub;

/// Writes the archive, or nothing if a person interrupts it. The exit code is 1 if nothing could be read.
///
/// # Errors
/// The file is there already, or can't be written; or it was interrupted. What can't be read is named in the archive.
pub(crate) async fn run(cluster: &Cluster, options: &SupportOptions) -> Result<ExitCode, KubectlError> {
    unless_interrupted("nothing was written", write(cluster, options)).await
}

async fn write(cluster: &Cluster, options: &SupportOptions) -> Result<ExitCode, KubectlError> {
    let now = Timestamp::now();
    let file = options.out.clone().unwrap_or_else(|| PathBuf::from(format!("flux-support-{}.tar.gz", now.as_second())));
    let failed = |source| KubectlError::File { path: file.clone(), source };
    // Before anything is read: whoever has no room or no right learns it at once.
    let (mut out, part) = create(&file).map_err(failed)?;
    let (secrets, mut files) = futures::join!(secrets(cluster), gather(cluster, options.all_logs));
    let is_empty = is_all_unread(&files);
    if let Err(why) = &secrets {
        let note =
            format!("the Secrets could not be read, because {why}: only what looks like a secret was taken out\n");
        complain(&note);
        files.push(BundleFile { name: "READ-BEFORE-SENDING.txt".to_owned(), content: Content::Text(note) });
    }
    let secrets = secrets.unwrap_or_default();
    let scrub = Scrub::of(secrets.iter().map(|(name, value)| (name.as_str(), value.as_slice())));
    let count = many(files.len() as u64, "file");
    archive(&mut out, files, &scrub, now).await.and_then(|()| out.sync_all()).map_err(failed)?;
    part.persist_noclobber(&file).map_err(|error| failed(error.error))?;
    print(&format!("{} holds {count}; read them before you pass them on\n", file.display()))?;
    if is_empty {
        complain("nothing could be read from the cluster: doctor.yaml in the archive says why\n");
    }
    Ok(if is_empty { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Creates the file in which the archive is written, readable for its owner only. Dropping the path removes it; [`write`] renames it to `file`.
///
/// # Errors
/// There is a `file` already, or none can be made there.
fn create(file: &Path) -> io::Result<(File, TempPath)> {
    if file.symlink_metadata().is_ok() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let part = PathBuf::from(format!("{}.{}.part", file.display(), std::process::id()));
    let out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    Ok((out, TempPath::try_from_path(part)?))
}

/// True if no file holds anything of the cluster: the doctor always has something to say.
fn is_all_unread(files: &[BundleFile]) -> bool {
    files.iter().filter(|file| file.name != "doctor.yaml").all(|file| matches!(file.content, Content::Unread(_)))
}

/// A file's text without secrets. YAML folds and quotes texts, so they lose their secrets before and after.
fn text(scrub: &Scrub, content: Content) -> String {
    let text = match content {
        Content::Text(text) => text,
        Content::Unread(why) => format!("can't be read: {why}\n"),
        Content::Tree(mut tree) => {
            scrub.tree(&mut tree);
            yaml(&tree).unwrap_or_else(|error| format!("can't be written: {error}\n"))
        }
    };
    scrub.text(&text)
}

async fn archive(out: impl Write, files: Vec<BundleFile>, scrub: &Scrub, now: Timestamp) -> io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    for BundleFile { name, content } in files {
        let text = text(scrub, content);
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o600);
        header.set_size(text.len() as u64);
        header.set_mtime(now.as_second().try_into().unwrap_or(0));
        archive.append_data(&mut header, Path::new("flux-support").join(name), text.as_bytes())?;
        // Logs are long: a person who interrupts this does not wait for all of them.
        tokio::task::yield_now().await;
    }
    archive.into_inner()?.finish().map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_older_archive_stays_and_only_the_owner_reads_a_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.tar.gz");
        let names = || directory.path().read_dir().unwrap().count();
        let (out, part) = create(&file).unwrap();
        assert_eq!(out.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(part);
        assert_eq!(names(), 0, "what is unfinished is removed");
        create(&file).unwrap().1.persist_noclobber(&file).unwrap();
        assert_eq!(create(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names(), 1);
    }

    #[test]
    fn an_archive_without_anything_of_the_cluster_is_a_failure() {
        let file = |name: &str, content| BundleFile { name: name.to_owned(), content };
        let unread = || file("pods.yaml", Content::Unread("no".to_owned()));
        let doctor = || file("doctor.yaml", Content::Text("x".to_owned()));
        assert!(is_all_unread(&[doctor(), unread()]));
        assert!(!is_all_unread(&[doctor(), unread(), file("leases.yaml", Content::Text(String::new()))]));
    }
}
