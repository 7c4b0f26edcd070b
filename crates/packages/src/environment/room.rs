//! Estimates the disk space for unpacking before it starts.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use host::room::Room;
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

/// Checks whether `need` bytes can be written below `directory`, which must exist. Preflight checks the reserve that
/// the kubelet wants; this only avoids work that must fail.
///
/// # Errors
/// Too little space, with both figures and the remedy; or the file system can't be queried.
pub(crate) fn check(directory: &Path, need: u64) -> Result<(), Refusal> {
    let free = Room::of(directory).map_err(|error| Refusal::io("look at", directory, &error))?.available;
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
    fn the_gzip_trailer_counts_for_the_size_of_a_bundle() {
        let mut file = tempfile::tempfile().unwrap();
        let mut gzip = flate2::write::GzEncoder::new(&mut file, flate2::Compression::fast());
        gzip.write_all(&vec![0; 5_000_000]).unwrap();
        gzip.finish().unwrap();
        assert_eq!(unpacked_gzip(&mut file).unwrap(), 5_000_000);
        assert_eq!(file.stream_position().unwrap(), 0, "the file is rewound");
        assert_eq!(unpacked_gzip(&mut tempfile::tempfile().unwrap()).unwrap(), 0);
    }

    #[test]
    fn the_error_about_a_full_disk_has_both_figures() {
        let directory = tempfile::tempdir().unwrap();
        let refusal = check(directory.path(), 1 << 60).unwrap_err();
        let words = ["MiB are free", "the packages need 1099511627776 MiB", &directory.path().display().to_string()];
        assert!(words.iter().all(|word| refusal.message.contains(word)), "{refusal}");
        assert!(refusal.transient);
    }
}
