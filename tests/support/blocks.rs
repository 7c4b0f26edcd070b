//! The blocks of commands and of YAML in the documents: fenced ones, and those that are indented by four spaces or more.

use std::{fs, path::Path};

/// A block of a document.
pub struct Block {
    /// Where it begins, such as `README.md:41`.
    pub place: String,
    /// Its lines, without the indentation of the first.
    pub text: String,
    /// What an HTML comment right before it says.
    pub marker: Option<String>,
}

impl Block {
    /// True for fields of a FluxInstance; all others are commands.
    pub fn is_yaml(&self) -> bool {
        self.text.split_whitespace().next().is_some_and(|word| word.ends_with(':'))
    }
}

/// All blocks of this document. A fence with the word `text` is a picture.
pub fn blocks(root: &Path, document: &str) -> Vec<Block> {
    let text = fs::read_to_string(root.join(document)).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < lines.len() {
        let fence = lines[at].trim_start().strip_prefix("```");
        let is_indented = lines[at].starts_with("    ") && at > 0 && lines[at - 1].is_empty();
        let (first, end) = match fence {
            Some(_) => (at + 1, at + 1 + lines[at + 1..].iter().take_while(|line| line.trim() != "```").count()),
            None if is_indented => {
                (at, at + lines[at..].iter().take_while(|line| line.starts_with("    ") || line.is_empty()).count())
            }
            None => {
                at += 1;
                continue;
            }
        };
        if fence != Some("text") {
            let indent = lines[first].len() - lines[first].trim_start().len();
            let text: Vec<_> = lines[first..end].iter().map(|line| line.get(indent..).unwrap_or("")).collect();
            let before = lines[..at].iter().rev().find(|line| !line.is_empty());
            let marker = before.and_then(|line| line.trim().strip_prefix("<!-- ")?.strip_suffix(" -->"));
            found.push(Block {
                place: format!("{document}:{}", first + 1),
                text: text.join("\n").trim_end().to_owned(),
                marker: marker.map(str::to_owned),
            });
        }
        at = end + 1;
    }
    found
}
