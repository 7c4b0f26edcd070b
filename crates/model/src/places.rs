//! Which line of a YAML file a field is on. The file's values are read by serde_norway, which forgets the lines; this reads
//! the file's structure once more, by the parser that kube-client reads kubeconfigs with. Only lines come from here, never
//! values: if the two parsers disagree, a message lacks its line, or names a wrong one.

use std::{collections::BTreeMap, iter::Peekable};

use granit_parser::{Event, Parser, ScalarStyle};

/// The fields of one document, by path, such as `spec.packages.specs[1]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldLines {
    /// The line on which the document's content begins, counted from 1; 0 if not known.
    pub start: usize,
    lines: BTreeMap<String, usize>,
    /// Fields that stand there more than once, with the line of each repetition.
    pub repeated: Vec<(String, usize)>,
    /// Literal block scalars (`|`), with the line of their field.
    texts: BTreeMap<String, usize>,
}

impl FieldLines {
    /// The line of the field; if the file lacks it, of the nearest field that contains it.
    pub fn line(&self, path: &str) -> Option<usize> {
        let above = path.rfind(['.', '[']).map_or("", |at| &path[..at]);
        match self.lines.get(path) {
            Some(line) => Some(*line),
            None if path.is_empty() => (self.start > 0).then_some(self.start),
            None => self.line(above),
        }
    }

    /// The line of a field whose value is a literal block scalar. The lines of its text are counted from there.
    pub fn line_before_text(&self, path: &str) -> Option<usize> {
        self.texts.get(path).copied()
    }
}

/// The lines of each document in `text`, in their order; empty if the text can't be read. Only for text that another parser has
/// accepted already: deep nesting would overflow the stack here.
pub fn documents(text: &str) -> Vec<FieldLines> {
    let mut events = Parser::new_from_str(text)
        .map_while(Result::ok)
        .filter(|(event, _)| !matches!(event, Event::Comment(..)))
        .map(|(event, span)| (event, span.start.line()))
        .peekable();
    let mut documents = Vec::new();
    while let Some((event, _)) = events.next() {
        if matches!(event, Event::DocumentStart(..)) {
            let start = events.peek().map_or(0, |(_, line)| *line);
            let mut places = FieldLines { start, ..FieldLines::default() };
            read_value(&mut events, "", &mut places);
            documents.push(places);
        }
    }
    documents
}

/// Reads one value and all that is in it.
fn read_value<'a>(
    events: &mut Peekable<impl Iterator<Item = (Event<'a>, usize)>>,
    path: &str,
    places: &mut FieldLines,
) {
    match events.next() {
        Some((Event::SequenceStart(..), _)) => {
            let mut index = 0;
            while let Some((event, line)) = events.peek() {
                if *event == Event::SequenceEnd {
                    events.next();
                    return;
                }
                let path = format!("{path}[{index}]");
                places.lines.insert(path.clone(), *line);
                read_value(events, &path, places);
                index += 1;
            }
        }
        Some((Event::MappingStart(..), _)) => {
            while let Some((event, line)) = events.next() {
                let name = match event {
                    Event::MappingEnd => return,
                    Event::Scalar(name, ..) => name,
                    // A key that is a list or a mapping itself: the other parser has refused it.
                    _ => return,
                };
                let path = if path.is_empty() { name.into_owned() } else { format!("{path}.{name}") };
                if places.lines.insert(path.clone(), line).is_some() {
                    places.repeated.push((path.clone(), line));
                }
                if let Some((Event::Scalar(_, ScalarStyle::Literal, ..), _)) = events.peek() {
                    places.texts.insert(path.clone(), line);
                }
                read_value(events, &path, places);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_of_every_document_has_its_line() {
        let text = "# comment\nkind: A\nspec:\n  # comment\n  list:\n  - a\n  - {b: 1,\n     c: 2}\n---\n\nkind: B\n";
        let documents = documents(text);
        assert_eq!(documents.len(), 2);
        for (path, line) in [
            ("kind", 2),
            ("spec", 3),
            ("spec.list", 5),
            ("spec.list[0]", 6),
            ("spec.list[1]", 7),
            ("spec.list[1].b", 7),
            ("spec.list[1].c", 8),
        ] {
            assert_eq!(documents[0].line(path), Some(line), "{path}");
        }
        assert_eq!((documents[1].start, documents[1].line("kind")), (11, Some(11)));
    }

    #[test]
    fn what_is_missing_is_where_it_should_be() {
        let places = &documents("kind: A\nspec:\n  bundle:\n    url: x\n")[0];
        assert_eq!(places.line("spec.bundle.sha256"), Some(3));
        assert_eq!(places.line("spec.bundle[3].x"), Some(3));
        assert_eq!(places.line("metadata.name"), Some(1));
    }

    #[test]
    fn a_field_that_stands_there_twice_is_found() {
        let places = &documents("a: 1\nb: {c: 1,\n  c: 2}\na: 2\n")[0];
        assert_eq!(places.repeated, [("b.c".to_owned(), 3), ("a".to_owned(), 4)]);
    }

    #[test]
    fn text_in_a_block_has_its_lines_too() {
        let places = &documents("data:\n  spec.yaml: |\n    size: 3\n  other: 'size: 3'\n")[0];
        assert_eq!(places.line_before_text("data.spec.yaml"), Some(2));
        assert_eq!(places.line_before_text("data.other"), None);
    }

    #[test]
    fn torn_text_has_no_lines_and_does_no_harm() {
        for text in ["", "{", "a: [", "- - -", "? {a: b}\n: c", "*x", "a: *x", "\u{0}"] {
            documents(text);
        }
    }
}
