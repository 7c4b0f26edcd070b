//! Draws the tree in which the members' brokers connect (the overlay, TBON): as text, for Graphviz, or as SVG.

use std::collections::BTreeMap;

use super::{hostlist, tree::parent};
use api::{IdSet, Rank, Roster};
use base::words::visible;

/// What a drawing says of a member besides its rank and node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// A word or two, such as `free`.
    pub word: String,
    /// A colour that Graphviz and SVG know.
    pub colour: &'static str,
}

/// The members, and the children of each.
#[derive(Debug)]
pub struct Drawing {
    members: BTreeMap<Rank, Drawn>,
    children: BTreeMap<Rank, Vec<Rank>>,
}

#[derive(Debug)]
struct Drawn {
    node: String,
    mark: Mark,
}

/// Ranks that are drawn together: leaves that are alike. Or one rank.
struct Group {
    ranks: Vec<Rank>,
    depth: usize,
    /// Index of the group above, in the order from the top.
    above: Option<usize>,
}

/// As many leaves that are alike get boxes of their own in an SVG; more share one.
const SINGLE_LEAVES: usize = 4;
/// Measures of an SVG, in pixels: a box, what a box and the gap after it take, and the distance of two layers.
const BOX: (usize, usize) = (170, 62);
const STEP: (usize, usize) = (186, 110);
/// As many characters fit into a box.
const FITTING: usize = 24;

impl Drawing {
    /// The drawing of a roster; `mark` says what to write at each rank that has a member.
    pub fn of(roster: &Roster, mark: impl Fn(Rank) -> Mark) -> Self {
        let entries = roster.ranks.iter().filter_map(|(rank, entry)| Some((*rank, entry.member.as_ref()?)));
        let members: BTreeMap<Rank, Drawn> =
            entries.map(|(rank, member)| (rank, Drawn { node: visible(&member.node), mark: mark(rank) })).collect();
        let mut children: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
        for rank in members.keys().copied() {
            if let Some(parent) = parent(roster, rank) {
                children.entry(parent).or_default().push(rank);
            }
        }
        Self { members, children }
    }

    /// One line for each group, below its parent's; neighbours without children that are alike share a line.
    pub fn text(&self) -> String {
        let line = |group: &Group| {
            let [ranks, names, word] = self.words(&group.ranks);
            format!("{:indent$}{ranks} {names} {word}\n", "", indent = 2 * group.depth)
        };
        self.groups(2).iter().map(line).collect()
    }

    /// For Graphviz's dot.
    pub fn dot(&self) -> String {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
        let nodes = self.members.iter().map(|(rank, Drawn { node, mark })| {
            format!("  {rank} [label=\"{rank}\\n{}\\n{}\", color={}];\n", quoted(node), quoted(&mark.word), mark.colour)
        });
        let edges = self
            .children
            .iter()
            .flat_map(|(parent, children)| children.iter().map(move |child| format!("  {parent} -> {child};\n")));
        format!("digraph flux {{\n  node [shape=box];\n{}}}\n", nodes.chain(edges).collect::<String>())
    }

    /// As SVG: a layer for each depth, a box for each group, parents in the middle above their children.
    pub fn svg(&self) -> String {
        let groups = self.groups(SINGLE_LEAVES + 1);
        let (columns, width) = columns(&groups);
        let layers = groups.iter().map(|group| group.depth + 1).max().unwrap_or(1);
        let (wide, high) = (width * STEP.0, layers * STEP.1);
        let corner = |index: usize| (columns[index], groups[index].depth * STEP.1 + (STEP.1 - BOX.1) / 2);
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 {wide} {high}\" \
             font-family=\"sans-serif\" font-size=\"12\" text-anchor=\"middle\">\n"
        );
        for (index, group) in groups.iter().enumerate() {
            let (left, top) = corner(index);
            let middle = left + BOX.0 / 2;
            if let Some(above) = group.above {
                let (from_left, from_top) = corner(above);
                let (from, end) = (from_left + BOX.0 / 2, from_top + BOX.1);
                text.push_str(&format!(
                    "<line x1=\"{from}\" y1=\"{end}\" x2=\"{middle}\" y2=\"{top}\" stroke=\"gray\"/>\n"
                ));
            }
            let words = self.words(&group.ranks);
            let colour = group.ranks.first().and_then(|rank| self.members.get(rank)).map_or("gray", |m| m.mark.colour);
            text.push_str(&format!(
                "<g><title>{}</title><rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" rx=\"4\" fill=\"white\" \
                 stroke=\"{colour}\"/>",
                escaped(&words.join(" ")),
                BOX.0,
                BOX.1
            ));
            for (line, word) in (1..).zip(&words) {
                let base = top + 18 * line;
                text.push_str(&format!("<text x=\"{middle}\" y=\"{base}\">{}</text>", escaped(&fitting(word))));
            }
            text.push_str("</g>\n");
        }
        text + "</svg>\n"
    }

    /// All groups from the top down, each below its parent. At least `fewest` leaves that are neighbours and alike make one group.
    fn groups(&self, fewest: usize) -> Vec<Group> {
        let mut groups = Vec::new();
        // Groups still to come, the next one last: a tree may be as deep as it has ranks.
        let mut left = vec![Group { ranks: vec![0], depth: 0, above: None }];
        while let Some(group) = left.pop() {
            let below = group.ranks.first().and_then(|rank| self.children.get(rank)).map_or(&[][..], Vec::as_slice);
            let (above, depth) = (Some(groups.len()), group.depth + 1);
            let alike = below.chunk_by(|one, next| self.are_alike(*one, *next));
            let chunks: Vec<&[Rank]> = alike
                .flat_map(|chunk| if chunk.len() < fewest { chunk.chunks(1) } else { chunk.chunks(chunk.len()) })
                .collect();
            left.extend(chunks.into_iter().rev().map(|ranks| Group { ranks: ranks.to_vec(), depth, above }));
            groups.push(group);
        }
        groups
    }

    /// True for two leaves with the same mark.
    fn are_alike(&self, one: Rank, other: Rank) -> bool {
        let leaf = |rank| self.members.get(&rank).filter(|_| !self.children.contains_key(&rank));
        leaf(one).zip(leaf(other)).is_some_and(|(one, other)| one.mark == other.mark)
    }

    /// Ranks, nodes and mark of a group.
    fn words(&self, ranks: &[Rank]) -> [String; 3] {
        let members = || ranks.iter().filter_map(|rank| self.members.get(rank));
        let word = members().next().map_or_else(|| "no member".to_owned(), |member| member.mark.word.clone());
        let nodes = hostlist::shortened(members().map(|member| &member.node));
        [ranks.iter().copied().collect::<IdSet>().to_string(), nodes, word]
    }
}

/// The left edge of each group's box, and how many boxes the widest layer has room for.
fn columns(groups: &[Group]) -> (Vec<usize>, usize) {
    let mut first_and_last: Vec<Option<(usize, usize)>> = vec![None; groups.len()];
    let mut left = vec![0; groups.len()];
    let has_children: Vec<bool> = {
        let mut has = vec![false; groups.len()];
        groups.iter().filter_map(|group| group.above).for_each(|above| has[above] = true);
        has
    };
    let leaves = (0..groups.len()).filter(|index| !has_children[*index]);
    let width = leaves.zip(0..).map(|(index, column)| left[index] = column * STEP.0 + (STEP.0 - BOX.0) / 2).count();
    // From the bottom up, so that the children of a group have their places before it.
    for index in (0..groups.len()).rev() {
        if let Some((first, last)) = first_and_last[index] {
            left[index] = usize::midpoint(first, last);
        }
        if let Some(above) = groups[index].above {
            let (_, last) = first_and_last[above].unwrap_or((0, left[index]));
            first_and_last[above] = Some((left[index], last));
        }
    }
    (left, width)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// `text`, cut to what fits into a box.
fn fitting(text: &str) -> String {
    match text.chars().count() > FITTING {
        true => text.chars().take(FITTING - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawing(members: &[(Rank, &str, &str)], parents: &[(Rank, Rank)]) -> Drawing {
        let members = members.iter().map(|(rank, node, word)| {
            let mark = Mark { word: (*word).to_owned(), colour: if *word == "down" { "red" } else { "green" } };
            (*rank, Drawn { node: (*node).to_owned(), mark })
        });
        let mut children: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
        for (child, parent) in parents {
            children.entry(*parent).or_default().push(*child);
        }
        Drawing { members: members.collect(), children }
    }

    #[test]
    fn leaves_that_are_alike_share_a_line() {
        let deep = drawing(
            &[
                (0, "n1", "free"),
                (1, "n2", "allocated"),
                (2, "n3", "free"),
                (3, "n4", "free"),
                (4, "n5", "down"),
                (5, "n6", "free"),
            ],
            &[(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)],
        );
        let expected = "0 n1 free\n  1 n2 allocated\n    3 n4 free\n    4 n5 down\n    5 n6 free\n  2 n3 free\n";
        assert_eq!(deep.text(), expected);
        let members = [(0, "n1", "free"), (1, "n2", "free"), (2, "n3", "free"), (3, "n4", "down")];
        let flat = drawing(&members, &[(1, 0), (2, 0), (3, 0)]);
        assert_eq!(flat.text(), "0 n1 free\n  1-2 n[2-3] free\n  3 n4 down\n");
    }

    #[test]
    fn a_name_can_add_nothing_to_a_drawing() {
        let drawing = drawing(&[(0, "a\"]; x [label=\"", "down"), (1, "<b>&", "free")], &[(1, 0)]);
        let expected = "digraph flux {\n  node [shape=box];\n  0 [label=\"0\\na\\\"]; x [label=\\\"\\ndown\", color=red];\n  \
                        1 [label=\"1\\n<b>&\\nfree\", color=green];\n  0 -> 1;\n}\n";
        assert_eq!(drawing.dot(), expected);
        let svg = drawing.svg();
        assert!(svg.contains("&lt;b&gt;&amp;") && svg.contains("a&quot;]; x") && !svg.contains("<b>"), "{svg}");
    }

    #[test]
    fn an_svg_has_a_layer_for_each_depth_and_folds_leaves_that_are_alike() {
        let names: Vec<String> = (0..12).map(|rank| format!("n{rank}")).collect();
        let members: Vec<_> = (0..12).zip(&names).map(|(rank, name)| (rank, name.as_str(), "free")).collect();
        // Rank 1 has nine leaves, rank 2 none.
        let parents: Vec<_> = (1..12).map(|rank| (rank, u32::from(rank > 2))).collect();
        let svg = drawing(&members, &parents).svg();
        for (what, expected) in [("<rect", 4), ("<line", 3), ("<g>", 4), ("</g>", 4), ("</svg>", 1)] {
            assert_eq!(svg.matches(what).count(), expected, "{what}: {svg}");
        }
        assert!(svg.contains(">3-11</text>") && svg.contains(">n[3-11]</text>"), "{svg}");
        let tops: Vec<&str> = svg.split("<rect x=").skip(1).filter_map(|rest| rest.split('"').nth(3)).collect();
        assert_eq!(tops, ["24", "134", "244", "134"]);
    }

    #[test]
    fn the_deepest_tree_is_drawn() {
        let members: Vec<_> = (0..2_000).map(|rank| (rank, "n", "free")).collect();
        let parents: Vec<_> = (1..2_000).map(|rank| (rank, rank - 1)).collect();
        let drawing = drawing(&members, &parents);
        assert_eq!(drawing.svg().matches("<rect").count(), 2_000);
        assert!(drawing.text().lines().count() == 2_000 && drawing.dot().ends_with("1998 -> 1999;\n}\n"));
    }
}
