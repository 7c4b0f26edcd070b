//! `kubectl flux support-bundle`: one archive for whoever is asked for help, without secrets.

mod gather;
mod scrub;

use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use k8s_openapi::jiff::Timestamp;

use crate::{arguments::SupportOptions, error::KubectlError, observed::Cluster, screen::print};
use base::words::many;
use gather::{Piece, gather, secrets};
use scrub::Scrub;

/// Writes the archive.
///
/// # Errors
/// The file is there already, or can't be written. What can't be read is named in the archive.
pub(crate) async fn run(cluster: &Cluster, options: &SupportOptions) -> Result<(), KubectlError> {
    let now = Timestamp::now();
    let file =
        options.file.clone().unwrap_or_else(|| PathBuf::from(format!("flux-support-{}.tar.gz", now.as_second())));
    // Before anything is read: who has no room or no right hears it at once.
    let mut out = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&file)
        .map_err(|error| KubectlError::Input(format!("can't create {}: {error}", file.display())))?;
    let (secrets, pieces) = futures::join!(secrets(cluster), gather(cluster, options.all_logs));
    let scrub = Scrub::of(secrets.values.iter().map(Vec::as_slice));
    let mut pieces: Vec<Piece> = pieces.into_iter().chain(secrets.note).collect();
    for piece in &mut pieces {
        piece.text = scrub.text(&piece.text);
    }
    let written = archive(&mut out, &pieces, now);
    if let Err(error) = written.and_then(|()| out.sync_all()) {
        // A half of an archive helps nobody.
        let _ = std::fs::remove_file(&file);
        return Err(KubectlError::Input(format!("can't write {}: {error}", file.display())));
    }
    let count = many(pieces.len() as u64, "file");
    Ok(print(&format!("{} holds {count}; read them before you pass them on\n", file.display()))?)
}

fn archive(out: impl Write, pieces: &[Piece], now: Timestamp) -> io::Result<()> {
    let mut archive = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    for Piece { name, text } in pieces {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o600);
        header.set_size(text.len() as u64);
        header.set_mtime(now.as_second().try_into().unwrap_or(0));
        archive.append_data(&mut header, Path::new("flux-support").join(name), text.as_bytes())?;
    }
    archive.into_inner()?.finish().map(drop)
}
