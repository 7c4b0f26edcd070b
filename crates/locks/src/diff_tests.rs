use super::*;

/// `name version build digest`, from the channel `one` unless a fifth word names another.
fn packages(lines: &[&str]) -> Vec<Package> {
    let package = |line: &&str| {
        let words = line.split(' ').collect::<Vec<_>>();
        Package {
            name: words[0].to_owned(),
            version: words[1].to_owned(),
            build: words[2].to_owned(),
            sha256: words[3].to_owned(),
            channel: (*words.get(4).unwrap_or(&"one")).to_owned(),
            bytes: (words[3] != "unknown").then_some(1500),
        }
    };
    lines.iter().map(package).collect()
}

fn on(platform: &str, lines: &[&str]) -> Contents {
    Contents::from([(platform.to_owned(), packages(lines))])
}

fn diff(old: &[&str], new: &[&str]) -> LockDiff {
    compare(&on("linux-64", old), &on("linux-64", new))
}

#[test]
fn each_kind_of_change_is_recognised_and_described() {
    for (old, new, expected) in [
        (None, Some("a 1.0 h_0 s"), "added       a 1.0"),
        (Some("a 1.0 h_0 s"), None, "removed     a 1.0"),
        (Some("a 1.9 h_0 s"), Some("a 1.10 h_0 t"), "upgraded    a 1.9 → 1.10"),
        (Some("a 1.10 h_0 s"), Some("a 1.9 h_0 t"), "downgraded  a 1.10 → 1.9"),
        (Some("a 2.0rc1 h_0 s"), Some("a 2.0 h_0 t"), "upgraded    a 2.0rc1 → 2.0"),
        (Some("a 1.0 h_0 s"), Some("a 1.0 h_1 t"), "rebuilt     a 1.0 (build h_0 → h_1)"),
        (Some("a 1.0 h_0 s"), Some("a 1.0 h_0 t"), "replaced    a 1.0 (same build, other content: sha256 s… → t…)"),
        (Some("a 1.0 h_0 s"), Some("a 1.0 h_0 s two"), "moved       a 1.0 (same content), from two instead of one"),
        (Some("a 1.0 h_0 s"), Some("a 1.1 h_0 t two"), "upgraded    a 1.0 → 1.1, from two instead of one"),
    ] {
        let diff = diff(&old.into_iter().collect::<Vec<_>>(), &new.into_iter().collect::<Vec<_>>());
        let changes = &diff.platforms["linux-64"].changes;
        assert_eq!(changes.iter().map(ToString::to_string).collect::<Vec<_>>(), [expected]);
        assert!(!diff.is_empty());
    }
    assert!(diff(&["a 1.0 h_0 s"], &["a 1.0 h_0 s"]).is_empty());
}

#[test]
fn archives_of_the_old_lock_are_not_downloaded_again() {
    for (old, new, expected) in [
        (&["a 1 0 s"][..], &["a 1 0 s"][..], Download::default()),
        (&["a 1 0 s"], &["a 1 0 s two"], Download::default()),
        (&["a 1 0 s"], &["b 1 0 s"], Download::default()),
        (&["a 1 0 s"], &["a 1 1 t", "b 1 0 u"], Download { packages: 2, bytes: 3000, unknown: 0 }),
        (&[], &["a 1 0 s", "b 1 0 unknown"], Download { packages: 2, bytes: 1500, unknown: 1 }),
    ] {
        assert_eq!(diff(old, new).platforms["linux-64"].download, expected, "{old:?} {new:?}");
    }
}

#[test]
fn only_a_change_of_flux_cores_major_minor_requires_a_new_epoch() {
    for (old, new, expected) in [
        ("flux-core 0.88.0 h_0 s", "flux-core 0.88.1 h_0 t", None),
        ("flux-core 0.88.0 h_0 s", "flux-core 0.88.0 h_1 t", None),
        ("flux-core 0.88.0 h_0 s", "flux-core 0.89.0 h_0 t", Some(("0.88", "0.89"))),
        ("flux-core 0.9.0 h_0 s", "flux-core 1.0.0 h_0 t", Some(("0.9", "1.0"))),
        ("flux-sched 0.40.0 h_0 s", "flux-sched 0.41.0 h_0 t", None),
        ("flux-core 0.88.0 h_0 s", "flux-sched 0.41.0 h_0 t", None),
    ] {
        let diff = diff(&[old], &[new]);
        let found = diff.flux_core.first().map(|change| (change.old.as_str(), change.new.as_str()));
        assert_eq!(found, expected, "{old} {new}");
        assert_eq!(diff.to_string().contains("as a new epoch"), expected.is_some());
    }
}

#[test]
fn the_diff_warns_if_platforms_disagree_about_flux_core() {
    let mut new = on("linux-64", &["flux-core 0.88.0 h_0 s"]);
    new.extend(on("linux-aarch64", &["flux-core 0.87.0 h_0 t"]));
    let said = compare(&on("linux-64", &["flux-core 0.88.0 h_0 s"]), &new).to_string();
    assert_eq!(
        said,
        "linux-64: nothing changes, 1 package\n\
         linux-aarch64: only the new lock has it, 1 package; 1 to download, 1.5 kB\n  \
         added       flux-core 0.87.0\n\
         flux-core would be 0.88 on linux-64, 0.87 on linux-aarch64: such brokers can't form one instance.\n"
    );
    let said = compare(&new, &on("linux-64", &["flux-core 0.88.0 h_0 s"])).to_string();
    assert!(said.contains("linux-aarch64: only the old lock has it, 1 package\n"), "{said}");
}

#[test]
fn bytes_are_shown_in_decimal_units() {
    for (bytes, expected) in [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_500, "1.5 kB"),
        (999_999, "1.0 MB"),
        (96_300_000, "96.3 MB"),
        (u64::MAX, "18446744.1 TB"),
    ] {
        assert_eq!(Bytes(bytes).to_string(), expected);
    }
}
