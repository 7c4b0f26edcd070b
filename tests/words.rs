//! The worst phrases that a reader must read twice stay out of sources, messages and documents.

#![allow(clippy::unwrap_used)] // clippy.toml's exception ends at the tests' own functions

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Phrases, and why not to use them.
const PHRASES: [(&[&str], &str); 6] = [
    (&["is told", "are told", "was told", "were told", "be told", "being told", "been told"], "name what reports it"),
    (&["by its word", "by its own word", "by their word", "by their own word"], "say what the report shows"),
    (&["whom", "his", "him", "he", "she"], "a process is no person"),
    (&["nobody knows", "nobody says", "somebody says so", "made up for"], "name the subject, and what it does"),
    (&["so long", "is had", "are had", "there is begun", "gone on with", "is none to"], "not English in this sense"),
    (&["where there is", "where there are"], "\"if\" is for conditions, \"where\" for places"),
];

/// Uses that stay: file and phrase.
const EXCEPTIONS: [(&str, &str); 1] = [
    // The planner does tell this member to leave.
    ("crates/model/src/roster/drain.rs", "was told"),
];

const PLACES: [&str; 16] = [
    "src",
    "crates",
    "tests",
    "benches",
    "fuzz/targets",
    "scripts",
    "docs",
    "deploy",
    "docker",
    "example",
    ".github",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
];

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| collect(&entry.unwrap().path(), files));
        return;
    }
    let kind = path.extension().and_then(|kind| kind.to_str());
    if path.ends_with("Makefile") || matches!(kind, Some("rs" | "md" | "sh" | "py" | "yaml" | "yml" | "txt")) {
        files.push(path.to_owned());
    }
}

/// True if `phrase` begins in the first `end` bytes of `text`, between word boundaries.
fn has(text: &str, phrase: &str, end: usize) -> bool {
    let in_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + phrase.len()..]);
        at < end && !before.ends_with(in_word) && !after.starts_with(in_word)
    })
}

#[test]
fn sources_and_documents_avoid_phrases_that_need_a_second_reading() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    PLACES.iter().for_each(|place| collect(&root.join(place), &mut files));
    assert!(files.len() > 300, "{}", files.len());
    let mut found = Vec::new();
    for path in files.iter().filter(|path| !path.ends_with("tests/words.rs")) {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap();
        let text = fs::read_to_string(path).unwrap().to_lowercase();
        let lines: Vec<_> =
            text.lines().map(|line| line.trim().trim_start_matches(['/', '#', '!']).trim_start()).collect();
        for (number, line) in lines.iter().enumerate() {
            // A phrase may go on in the next line.
            let both = format!("{line} {}", lines.get(number + 1).unwrap_or(&""));
            for (phrases, reason) in PHRASES {
                for phrase in phrases.iter().filter(|phrase| has(&both, phrase, line.len())) {
                    if !EXCEPTIONS.contains(&(name, *phrase)) {
                        found.push(format!("{name}:{}: \"{phrase}\": {reason}", number + 1));
                    }
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
