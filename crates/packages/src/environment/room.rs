//! How much room archives need when they are unpacked, told before anything is.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use crate::files::free;
use hostapi::Refusal;

/// What a `.tar.gz` unpacks to, as a rule, or by its own last word where that is more: gzip ends with the size of its
/// content, but counts it in 32 bits and for its last member only.
pub(crate) fn unpacked_gzip(archive: &mut File) -> io::Result<u64> {
    let bytes = archive.seek(SeekFrom::End(0))?;
    let mut size = [0; 4];
    if bytes >= 18 {
        archive.seek(SeekFrom::End(-4))?;
        archive.read_exact(&mut size)?;
    }
    archive.rewind()?;
    Ok(locks::unpacked(bytes).max(u64::from(u32::from_le_bytes(size))))
}

/// Whether `need` bytes can be written below `directory`, which is there. What kubelet wants to keep free is a matter of
/// preflight; this is about work that can only fail.
///
/// # Errors
/// Both figures and the remedy, or why the file system can't be looked at.
pub(crate) fn check(directory: &Path, need: u64) -> Result<(), Refusal> {
    let free = free(directory).map_err(|error| Refusal::io("look at", directory, &error))?.bytes;
    if free >= need {
        return Ok(());
    }
    Err(Refusal::transient(format!(
        "{} has too little room: {} MiB are free, and the packages need {} MiB; make room, or set spec.prefix to another \
         file system",
        directory.display(),
        free >> 20,
        need.div_ceil(1 << 20),
    )))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_bundle_tells_how_big_it_will_be() {
        let mut file = tempfile::tempfile().unwrap();
        let mut gzip = flate2::write::GzEncoder::new(&mut file, flate2::Compression::fast());
        gzip.write_all(&vec![0; 5_000_000]).unwrap();
        gzip.finish().unwrap();
        assert_eq!(unpacked_gzip(&mut file).unwrap(), 5_000_000);
        assert_eq!(file.stream_position().unwrap(), 0, "it is read from its start afterwards");
        assert_eq!(unpacked_gzip(&mut tempfile::tempfile().unwrap()).unwrap(), 0);
    }

    #[test]
    fn a_full_disk_is_told_with_both_figures() {
        let directory = tempfile::tempdir().unwrap();
        let refusal = check(directory.path(), 1 << 60).unwrap_err();
        let words = ["MiB are free", "the packages need 1099511627776 MiB", &directory.path().display().to_string()];
        assert!(words.iter().all(|word| refusal.message.contains(word)), "{refusal}");
        assert!(refusal.transient);
    }
}
