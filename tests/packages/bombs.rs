//! A small archive fills neither the disk nor the memory.

use std::io::Write;

use serde_json::json;
use tar::EntryType;

use super::{forged::*, *};

#[tokio::test]
async fn a_zip_bomb_is_stopped_during_unpacking() {
    let content = [Entry::file("bin/flux", &vec![0; 200 << 20])];
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        assert!(lie.archive.len() < 1 << 20);
        let refusal = told(&[lie]).await;
        assert!(refusal.message.contains("evil-1.0-0"), "{refusal}");
        assert!(refusal.message.contains("it holds more than 100 times its own size"), "{refusal}");
        assert!(!refusal.transient, "{refusal}");
    }
}

#[tokio::test]
async fn a_zstd_frame_that_needs_too_much_memory_is_refused() {
    let content = [Entry::file("bin/flux", b"x")];
    let mut lie = Lie::new("evil-1.0-0.conda", conda(&info("evil", &honest(&content)), &content));
    // The descriptors of both frames: no single segment, and a window of 2 GiB.
    let frames = lie.archive.windows(4).enumerate().filter(|(_, w)| w == &[0x28, 0xb5, 0x2f, 0xfd]);
    for at in frames.map(|(at, _)| at).collect::<Vec<_>>() {
        lie.archive[at + 4..at + 6].copy_from_slice(&[0, 21 << 3]);
    }
    let refusal = told(&[lie]).await;
    assert!(refusal.message.contains("it holds more than 128 MiB of window"), "{refusal}");
}

#[tokio::test]
async fn a_later_zstd_frame_gets_no_more_memory_than_the_first() {
    let content = [Entry::file("bin/flux", b"x")];
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, entries) in [("pkg-a.tar.zst", &content[..]), ("info-a.tar.zst", &info("evil", &honest(&content)))] {
        zip.start_file(name, stored).unwrap();
        zip.write_all(&zstd::encode_all(&tar(entries)[..], 3).unwrap()).unwrap();
        // A window of 128 MiB, and one empty block.
        zip.write_all(&[0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3, 1, 0, 0]).unwrap();
    }
    let refusal = told(&[Lie::new("evil-1.0-0.conda", zip.finish().unwrap().into_inner())]).await;
    assert!(refusal.message.contains("evil-1.0-0") && refusal.message.contains("too much memory"), "{refusal}");
}

#[tokio::test]
async fn a_name_that_would_fill_the_memory_is_refused() {
    let named = |kind, bytes: usize| {
        let name = Entry { bytes: vec![b'a'; bytes], ..Entry::link(kind, "name", "") };
        [Entry::file("bin/flux", &noise(3 << 20)), name, Entry::file("bin/other", b"x")]
    };
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
        for lie in Lie::both(&info("evil", &[]), &named(kind, 2 << 20)) {
            let refusal = told(&[lie]).await;
            let words = ["package evil-1.0-0 from", "it holds more than 1 MiB of names and headers for one entry"];
            assert!(words.iter().all(|words| refusal.message.contains(words)), "{kind:?}: {refusal}");
            assert!(!refusal.transient, "{refusal}");
        }
    }
}

/// rattler copies a file under each of its names if the package says so, and a longer prefix makes a file longer.
#[tokio::test]
async fn a_package_that_grows_only_when_it_is_linked_is_a_bomb_too() {
    let link = |number: usize| Entry::link(EntryType::Link, &format!("share/{number}"), "share/one");
    let copied: Vec<_> = [Entry::file("share/one", &vec![0; 1 << 20])].into_iter().chain((0..100).map(link)).collect();
    let mut no_link = honest(&copied);
    no_link.iter_mut().for_each(|path| path["no_link"] = json!(true));
    let patched = [Entry::file("share/one", &vec![b'/'; 32 << 20])];
    let mut placeholder = honest(&patched);
    placeholder[0]["file_mode"] = json!("text");
    placeholder[0]["prefix_placeholder"] = json!("////////");
    for (content, paths) in [(&copied[..], no_link), (&patched[..], placeholder)] {
        for lie in Lie::both(&info("evil", &paths), content) {
            let refusal = told(&[lie]).await;
            let words = ["can't use package evil-1.0-0", "it holds more than 100 times its own size once linked"];
            assert!(words.iter().all(|words| refusal.message.contains(words)) && !refusal.transient, "{refusal}");
        }
    }
}

/// Beyond the links that a file system allows to one file, rattler copies.
#[tokio::test]
async fn a_file_with_more_names_than_links_to_it_are_allowed_is_refused() {
    let link = |number: usize| Entry::link(EntryType::Link, &format!("share/{number}"), "share/one");
    let content: Vec<_> = [Entry::file("share/one", &noise(64))].into_iter().chain((0..10_001).map(link)).collect();
    for lie in Lie::both(&info("evil", &honest(&content)), &content) {
        let refusal = told(&[lie]).await;
        let words =
            ["can't use package evil-1.0-0", "its entry share/9999 is one of more than 10000 names of one file"];
        assert!(words.iter().all(|words| refusal.message.contains(words)) && !refusal.transient, "{refusal}");
    }
}

/// For each, rattler writes a file of which the package has no more than a few bytes.
#[tokio::test]
async fn a_package_with_many_entry_points_is_refused() {
    let entry_points: Vec<_> = (0..10_001).map(|number| format!("e{number} = a:b")).collect();
    let entry_points: Vec<&str> = entry_points.iter().map(String::as_str).collect();
    let evil = Lie::new("evil-1.0-0.conda", conda(&with_entry_points("evil", &entry_points, &[]), &[]));
    let python = [Entry::file("lib/flux", b""), Entry::file("lib/python1.0", b"")];
    let python = Lie::new("python-1.0-0.conda", conda(&info("python", &honest(&python)), &python));
    let packages = [evil, python];
    let (host, set) = fetched(&packages);
    let refusal = host.link(&set).await.unwrap_err();
    assert!(refusal.message.contains("has 10001 entry points, more than 10000") && !refusal.transient, "{refusal}");
}

#[tokio::test]
async fn a_table_of_contents_that_would_fill_the_memory_is_refused() {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(conda(&[], &[])));
    for number in 0..30_000 {
        zip.start_file(format!("{number:030}"), zip::write::SimpleFileOptions::default()).unwrap();
    }
    let refusal = told(&[Lie::new("evil-1.0-0.conda", zip.finish().unwrap().into_inner())]).await;
    assert!(refusal.message.contains("its table of contents can't be read") && !refusal.transient, "{refusal}");
}
