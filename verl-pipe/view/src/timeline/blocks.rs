//! Lines of blocks: what ran in each column of time.

use verl_run::spans::CallSpan;

use super::intervals::{clip, total};
use super::lanes::{Lane, busy, label};
use super::units::Unit;

/// Letters of the stages in the lines of blocks, in the order of their first start.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// Letter of all further stages.
const FURTHER: char = '#';

/// A column in which a lane was mostly idle.
const IDLE: char = '·';

/// A row of the table: a stage at a place.
pub(super) struct StageTime<'a> {
    pub letter: char,
    pub label: String,
    pub place: &'a str,
    pub spans: Vec<&'a CallSpan>,
}

/// Stages at their places, in the order of their first start.
pub(super) fn stage_times<'a>(spans: &[&'a CallSpan]) -> Vec<StageTime<'a>> {
    let mut stages: Vec<StageTime<'a>> = Vec::new();
    let mut letters = LETTERS.chars();
    for span in spans {
        let name = label(span);
        let known = stages
            .iter_mut()
            .find(|stage| stage.label == name && stage.place == span.place);
        match known {
            Some(stage) => stage.spans.push(span),
            None => stages.push(StageTime {
                letter: letters.next().unwrap_or(FURTHER),
                label: name,
                place: &span.place,
                spans: vec![span],
            }),
        }
    }
    stages
}

/// Five times along the axis, each at its column.
pub(super) fn axis(columns: usize, step_s: f64, unit: Unit) -> String {
    let mut text = String::new();
    for tick in 0..=4 {
        let mark = match tick {
            0 => format!("0 {}", unit.name),
            _ => unit.number(step_s * tick as f64 / 4.0),
        };
        let at = match tick {
            4 => columns.saturating_sub(mark.chars().count()),
            _ => columns * tick / 4,
        };
        let used = text.chars().count();
        if used == 0 || at > used {
            text += &" ".repeat(at - used);
            text += &mark;
        }
    }
    text
}

/// The line of a lane: in each column the letter of the stage that ran longest, unless the lane was idle for longer. A
/// stage that would not be visible gets its fullest column. Wide blocks contain the stage's name.
pub(super) fn lane_blocks(
    lane: &Lane,
    stages: &[StageTime<'_>],
    columns: usize,
    step_s: f64,
) -> String {
    let column_s = step_s / columns as f64;
    let own: Vec<&StageTime<'_>> = stages
        .iter()
        .filter(|stage| stage.spans.iter().any(|span| Lane::of(span) == *lane))
        .collect();
    let shares: Vec<Vec<f64>> = own
        .iter()
        .map(|stage| {
            let spans = stage.spans.iter().copied();
            let times = busy(spans.filter(|span| Lane::of(span) == *lane));
            let within = |at: usize| {
                let column = (at as f64 * column_s, (at + 1) as f64 * column_s);
                total(&clip(&times, column)) / column_s
            };
            (0..columns).map(within).collect()
        })
        .collect();
    let mut cells: Vec<Option<usize>> = (0..columns)
        .map(|at| {
            let busy: f64 = shares.iter().map(|share| share[at]).sum();
            let longest = (0..own.len()).max_by(|a, b| shares[*a][at].total_cmp(&shares[*b][at]));
            longest.filter(|_| busy >= 0.5)
        })
        .collect();
    for (stage, share) in shares.iter().enumerate() {
        let fullest = (0..columns).max_by(|a, b| share[*a].total_cmp(&share[*b]));
        if let Some(at) = fullest.filter(|_| !cells.contains(&Some(stage))) {
            cells[at] = Some(stage);
        }
    }
    let mut text = String::new();
    for block in cells.chunk_by(|a, b| a == b) {
        match block[0].map(|stage| own[stage]) {
            None => text.extend(std::iter::repeat_n(IDLE, block.len())),
            Some(stage) => text += &block_text(stage.letter, &stage.label, block.len()),
        }
    }
    text
}

/// A block of `columns`, with the name in its middle if it fits.
fn block_text(letter: char, name: &str, columns: usize) -> String {
    let letters = |n| std::iter::repeat_n(letter, n).collect::<String>();
    match columns.checked_sub(name.chars().count() + 4) {
        None => letters(columns),
        Some(free) => {
            let left = 1 + free / 2;
            let right = 2 + free - left;
            format!("{} {name} {}", letters(left), letters(right))
        }
    }
}
