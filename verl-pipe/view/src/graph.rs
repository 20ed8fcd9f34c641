//! The pipeline as a drawing: stages as boxes with the place where they run, edges with the keys that they carry.

use std::fmt::Write;

use serde::Serialize;
use verl_plan::PlannedStage;
use verl_plan::schedule::placement::{Place, Schedule};
use verl_trace::text::width;
use verl_words::stage::{Access, Cadence};

use super::layout::{Link, Size, place};

/// Width of a character of a box's name, of its other lines, and of a label (CSS pixels at the sizes of `view.css`).
const NAME_CHAR: f64 = 8.0;
const LINE_CHAR: f64 = 6.3;
const LABEL_CHAR: f64 = 6.4;
/// Height of a box's name, of its other lines, and of a line of a label.
const NAME_HEIGHT: f64 = 19.0;
const LINE_HEIGHT: f64 = 14.0;
const LABEL_HEIGHT: f64 = 13.0;
/// Space inside a box on either side.
const PADDING: f64 = 10.0;
/// Most keys that a label lists before it only counts them.
const LABELLED_KEYS: usize = 3;

/// Keys of an edge: the pipeline's and the reader's names.
type Keys = Vec<(String, String)>;

/// A drawing; coordinates in CSS pixels.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Graph {
    w: f64,
    h: f64,
    pub nodes: Vec<Node>,
    pub edges: Vec<Arrow>,
}

/// A stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Node {
    name: String,
    kind: String,
    x: f64,
    y: f64,
    w: f64,
    h: f64,
    /// The lines below the name.
    lines: Vec<String>,
    /// Metrics that it records.
    metrics: Vec<&'static str>,
}

/// Keys passed from one stage to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Arrow {
    from: String,
    to: String,
    /// The keys that it carries; none if the reader only waits.
    keys: Keys,
    /// The line, as SVG.
    path: String,
    /// Middle of the label, and its lines.
    label: (f64, f64),
    lines: Vec<String>,
    w: f64,
}

/// Draws a placed pipeline.
pub(crate) fn graph(schedule: &Schedule) -> Graph {
    let stages = schedule.plan().stages();
    let lines: Vec<Vec<String>> = (0..stages.len()).map(|i| box_lines(schedule, i)).collect();
    let boxes: Vec<Size> = stages
        .iter()
        .zip(&lines)
        .map(|(stage, lines)| box_size(stage.name(), lines))
        .collect();
    let arrows = arrows(stages);
    let labels: Vec<(Vec<String>, Size)> = arrows.iter().map(|a| label(&a.2)).collect();
    let links: Vec<Link> = arrows
        .iter()
        .zip(&labels)
        .map(|((from, to, _), (_, label))| Link {
            from: *from,
            to: *to,
            label: *label,
        })
        .collect();
    let placed = place(&boxes, &links);
    let nodes = stages
        .iter()
        .zip(lines)
        .enumerate()
        .map(|(i, (stage, lines))| Node {
            name: stage.name().to_owned(),
            kind: stage.kind().to_owned(),
            x: tenths(placed.boxes[i].0),
            y: tenths(placed.boxes[i].1),
            w: boxes[i].w,
            h: boxes[i].h,
            lines,
            metrics: stage
                .spec()
                .metrics
                .iter()
                .map(|metric| metric.name)
                .collect(),
        });
    let edges = arrows.into_iter().zip(labels).zip(placed.routes);
    let edges = edges.map(|(((from, to, keys), (lines, size)), route)| Arrow {
        from: stages[from].name().to_owned(),
        to: stages[to].name().to_owned(),
        keys,
        path: path(&route.points),
        label: (tenths(route.label.0), tenths(route.label.1)),
        lines,
        w: size.w,
    });
    Graph {
        w: placed.size.w.ceil(),
        h: placed.size.h.ceil(),
        nodes: nodes.collect(),
        edges: edges.collect(),
    }
}

/// Writer, reader, and the keys passed from one to the other; none if the reader only waits.
fn arrows(stages: &[PlannedStage]) -> Vec<(usize, usize, Keys)> {
    let mut arrows: Vec<(usize, usize, Keys)> = Vec::new();
    for (reader, stage) in stages.iter().enumerate() {
        for edge in stage.inputs() {
            let key = (edge.key.clone(), edge.local.clone());
            let known = arrows
                .iter_mut()
                .find(|a| (a.0, a.1) == (edge.writer, reader));
            match known {
                Some((.., keys)) => keys.push(key),
                None => arrows.push((edge.writer, reader, vec![key])),
            }
        }
        for writer in stage.after() {
            if !arrows.iter().any(|a| (a.0, a.1) == (*writer, reader)) {
                arrows.push((*writer, reader, Keys::new()));
            }
        }
    }
    arrows
}

fn box_lines(schedule: &Schedule, index: usize) -> Vec<String> {
    let stage: &PlannedStage = &schedule.plan().stages()[index];
    let mut lines = Vec::new();
    if stage.kind() != stage.name() {
        lines.push(format!("kind {}", stage.kind()));
    }
    let mut runs = match schedule.places()[index] {
        Place::Group(group) => format!("on {}", schedule.groups()[group].name),
        Place::Host => "on host threads".to_owned(),
    };
    if let Cadence::Observer { every } = stage.spec().cadence {
        let _ = match every {
            0 => write!(runs, ", before and after"),
            every => write!(runs, ", every {every} steps"),
        };
    }
    lines.push(runs);
    for (model, access) in &stage.spec().models {
        lines.push(match access {
            Access::Read => format!("reads {model}"),
            Access::Update => format!("updates {model}"),
        });
    }
    let table = stage.table_out().or(stage.table_in());
    lines.extend(table.map(|table| {
        let table = &schedule.plan().tables()[table];
        let bound = if table.filtered { "≤" } else { "=" };
        format!("rows {} {bound} {}", table.rows, table.num_rows)
    }));
    lines
}

fn box_size(name: &str, lines: &[String]) -> Size {
    let wide = lines.iter().map(|line| width(line) as f64 * LINE_CHAR);
    Size {
        w: wide.fold(width(name) as f64 * NAME_CHAR, f64::max).ceil() + 2.0 * PADDING,
        h: NAME_HEIGHT + lines.len() as f64 * LINE_HEIGHT + PADDING,
    }
}

/// Lines of a label, and their size.
fn label(keys: &[(String, String)]) -> (Vec<String>, Size) {
    let name = |(key, local): &(String, String)| match key == local {
        true => key.clone(),
        false => format!("{key} as {local}"),
    };
    let lines: Vec<String> = match keys.len() {
        n if n <= LABELLED_KEYS => keys.iter().map(name).collect(),
        n => {
            let named = keys[..LABELLED_KEYS - 1].iter().map(name);
            let more = format!("+{} more", n + 1 - LABELLED_KEYS);
            named.chain([more]).collect()
        }
    };
    let chars = lines.iter().map(|line| width(line)).max().unwrap_or(0) as f64;
    let size = Size {
        w: (chars * LABEL_CHAR).ceil() + if lines.is_empty() { 0.0 } else { 8.0 },
        h: lines.len() as f64 * LABEL_HEIGHT,
    };
    (lines, size)
}

/// A line through the points: straight where it runs down, curved between rows.
fn path(points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    let mut last: Option<(f64, f64)> = None;
    for &(x, y) in points {
        let (x, y) = (tenths(x), tenths(y));
        // Writing to a string does not fail.
        let _ = match last {
            None => write!(text, "M{x} {y}"),
            Some((from, _)) if from == x => write!(text, "L{x} {y}"),
            Some((from, above)) => {
                let bend = tenths((above + y) / 2.0);
                write!(text, "C{from} {bend} {x} {bend} {x} {y}")
            }
        };
        last = Some((x, y));
    }
    text
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_list_a_few_keys_and_count_the_others() {
        let keys = |names: &[&str]| -> Vec<(String, String)> {
            let pair = |name: &&str| ((*name).to_owned(), (*name).to_owned());
            names.iter().map(pair).collect()
        };
        let lines = |names: &[&str]| label(&keys(names)).0;
        assert_eq!(lines(&["a", "b", "c"]), ["a", "b", "c"]);
        assert_eq!(lines(&["a", "b", "c", "d"]), ["a", "b", "+2 more"]);
        let (none, size) = label(&[]);
        assert_eq!((none.len(), size), (0, Size::default()));
        let renamed = [("scores".to_owned(), "rewards".to_owned())];
        assert_eq!(label(&renamed).0, ["scores as rewards"]);
    }

    #[test]
    fn lines_are_straight_downwards_and_curved_sideways() {
        let points = [(10.0, 0.0), (10.0, 20.0), (30.04, 40.0)];
        assert_eq!(path(&points), "M10 0L10 20C10 30 30 30 30 40");
    }
}
