//! Bundles: the input is the tar inside; inspecting and installing it must refuse or install, and never leave the tree.
#![no_main]

use std::{fs, io::Write, path::Path};

use flate2::{Compression, write::GzEncoder};
use api::{BundleSource, PackageSet};
use hostapi::LinkOrder;
use stage::launch::Places;
use packages::{InspectBundle, OutputFormat, archives, link, native_platform};
use sha2::{Digest, Sha256};

libfuzzer_sys::fuzz_target!(|tar: &[u8]| {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("bundle.tar.gz");
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(tar).expect("memory");
    let bytes = gzip.finish().expect("memory");
    fs::write(&file, &bytes).expect("a temporary file");
    let _ = InspectBundle { file: file.clone(), output: OutputFormat::Text }.run();

    let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let set = PackageSet::Bundle(BundleSource { url: format!("file://{}", file.display()), sha256 });
    let prefix = directory.path().join("prefix");
    let order = LinkOrder { prefix: prefix.clone(), digest: set.digest(), set: set.clone(), platform: native_platform().to_owned(), follow: false };
    let pkgs = prefix.join("pkgs");
    fs::create_dir_all(&pkgs).expect("a temporary directory");
    for archive in archives(&set, native_platform()).into_iter().flatten() {
        fs::copy(&file, pkgs.join(archive)).expect("a temporary file");
    }
    let _ = link(&order, &Places::of_host(), &mut |_| {});
    assert!(only(directory.path(), &["bundle.tar.gz", "prefix"]), "something is outside of the prefix");
});

fn only(directory: &Path, names: &[&str]) -> bool {
    fs::read_dir(directory).is_ok_and(|entries| {
        entries.flatten().all(|entry| names.iter().any(|name| entry.file_name() == *name))
    })
}
