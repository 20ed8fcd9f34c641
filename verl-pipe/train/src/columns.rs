//! The line that the console prints after a step: which metrics, in which order, and how wide.
//!
//! Stages declare the metrics that matter ([`Shown`]); the engine adds speed and memory. Columns stay the same from
//! step to step so that lines align, and as many are used as fit into 100 characters.

use std::collections::BTreeSet;

use verl_plan::Plan;
use verl_run::metrics::StepMetrics;
use verl_run::records::{MEMORY_MB, TOKENS_PER_S};
use verl_words::stage::{Cadence, MetricRole, Shown};

/// Maximum width of a line (characters).
const WIDTH: usize = 100;
/// Metrics that the engine adds.
const ENGINE: [Shown; 2] = [
    Shown::of(&TOKENS_PER_S, "tok/s", Shown::SPEED).narrow(),
    Shown::of(&MEMORY_MB, "MB", Shown::DETAIL + 9).narrow(),
];
/// Metrics that are shown for stages that declare none, by their roles.
const USUAL: [(MetricRole, &str, u8); 3] = [
    (MetricRole::Loss, "loss", Shown::LOSS),
    (MetricRole::Reward, "reward", Shown::OUTCOME),
    (MetricRole::ReferenceKl, "kl", Shown::DISTANCE),
];

/// The columns of a run. A declared metric gets a column in the first step that reports it, so metrics that a loss
/// never reports take no space.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns {
    declared: Vec<Column>,
    /// Declared columns whose metric some step reported, by rank, as many as fit.
    chosen: Vec<Column>,
    seen: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq)]
struct Column {
    metric: String,
    label: String,
    rank: u8,
    width: usize,
}

impl Column {
    /// Number of characters it takes in a line.
    fn takes(&self) -> usize {
        2 + self.label.chars().count() + 1 + self.width
    }
}

impl From<&Shown> for Column {
    fn from(shown: &Shown) -> Column {
        Column {
            metric: shown.metric.to_owned(),
            label: shown.label.to_owned(),
            rank: shown.rank,
            width: shown.width,
        }
    }
}

impl Columns {
    /// The columns that the stages of a plan declare.
    pub fn of(plan: &Plan) -> Columns {
        let steps = plan.stages().iter();
        let shown = steps
            .filter(|stage| stage.spec().cadence == Cadence::Step)
            .flat_map(|stage| &stage.spec().shows);
        Columns {
            declared: shown.map(Column::from).collect(),
            ..Columns::default()
        }
    }

    /// The usual columns that are present in the metrics of a step, for stages that declare none.
    fn usual(metrics: &StepMetrics) -> Vec<Column> {
        let found = USUAL.iter().filter_map(|(role, label, rank)| {
            let (metric, _) = metrics.with_role(*role)?;
            Some(Column {
                metric: metric.to_owned(),
                label: (*label).to_owned(),
                rank: *rank,
                width: 6,
            })
        });
        found.collect()
    }

    /// Chooses columns whose metric some step reported, as many as fit; of two with the same label, the first.
    fn choose(&mut self, steps: u64) {
        let engine = ENGINE.iter().map(Column::from);
        let all = self.declared.iter().cloned().chain(engine);
        let mut chosen: Vec<Column> = all.filter(|c| self.seen.contains(&c.metric)).collect();
        chosen.sort_by_key(|column| column.rank);
        let mut room = WIDTH.saturating_sub(head(steps, steps).len());
        let mut labels = BTreeSet::new();
        chosen.retain(|column| {
            let fits = column.takes() <= room && labels.insert(column.label.clone());
            room -= if fits { column.takes() } else { 0 };
            fits
        });
        self.chosen = chosen;
    }

    /// The line of a step of a run of `steps` steps.
    pub fn line(&mut self, metrics: &StepMetrics, steps: u64) -> String {
        if self.declared.is_empty() {
            self.declared = Columns::usual(metrics);
        }
        let before = self.seen.len();
        let names = self.declared.iter().map(|column| column.metric.as_str());
        let names = names.chain(ENGINE.iter().map(|shown| shown.metric));
        let new: Vec<String> = names
            .filter(|name| metrics.values.contains_key(*name))
            .map(str::to_owned)
            .collect();
        self.seen.extend(new);
        if self.seen.len() > before {
            self.choose(steps);
        }
        let mut line = head(metrics.step, steps);
        for column in &self.chosen {
            let value = metrics.get(&column.metric);
            let value = value.map_or_else(|| "-".to_owned(), |v| cell(v, column.width));
            line += &format!("  {} {value:>width$}", column.label, width = column.width);
        }
        line
    }
}

/// `step  10/400`.
fn head(step: u64, steps: u64) -> String {
    let width = steps.to_string().len();
    format!("step {step:>width$}/{steps}")
}

/// Formats a value with as many digits as fit into `width` characters, at most four after the decimal point. Values too
/// small to show two significant digits use exponent notation; a value is never truncated.
fn cell(value: f64, width: usize) -> String {
    let is_small = value != 0.0 && value.abs() < 1e-3;
    let fixed = (0..=4).rev().map(|digits| format!("{value:.digits$}"));
    let power = (0..=1).rev().map(|digits| format!("{value:.digits$e}"));
    let mut forms: Vec<String> = match is_small {
        true => power.collect(),
        false => fixed.chain(power).collect(),
    };
    let last = forms.len() - 1;
    let fits = forms.iter().position(|form| form.chars().count() <= width);
    match value.is_finite() {
        true => forms.swap_remove(fits.unwrap_or(last)),
        false => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use verl_words::stage::MetricRoles;

    use super::*;

    fn metrics(step: u64, values: &[(&str, f64)]) -> StepMetrics {
        let values = values.iter().map(|(name, v)| ((*name).to_owned(), *v));
        StepMetrics {
            step,
            values: values.collect(),
            ..StepMetrics::default()
        }
    }

    fn column(metric: &str, label: &str, rank: u8, width: usize) -> Column {
        Column {
            metric: metric.to_owned(),
            label: label.to_owned(),
            rank,
            width,
        }
    }

    #[test]
    fn values_fit_and_nonzero_values_do_not_look_like_zero() {
        for (value, width, expected) in [
            (0.0, 5, "0.000"),
            (0.5123, 6, "0.5123"),
            (-0.5123, 6, "-0.512"),
            (12.3456, 5, "12.35"),
            (9.99996, 5, "10.00"),
            (12346.0, 5, "12346"),
            (123_456.0, 5, "1.2e5"),
            (3.04e-7, 5, "3e-7"),
            (-3.04e-7, 6, "-3e-7"),
            (3.04e-7, 6, "3.0e-7"),
            (-123_456.0, 5, "-1e5"),
            (f64::NAN, 5, "NaN"),
        ] {
            assert_eq!(cell(value, width), expected, "{value} in {width}");
        }
    }

    #[test]
    fn lines_align_and_columns_that_do_not_fit_are_left_out() {
        let all = (0..9).map(|at| column(&format!("m/{at}"), &format!("name{at}"), 10 + at, 6));
        let mut columns = Columns {
            declared: all.rev().collect(),
            ..Columns::default()
        };
        let line = |columns: &mut Columns, step, value| {
            let all: Vec<(String, f64)> = (0..9).map(|at| (format!("m/{at}"), value)).collect();
            let all: Vec<(&str, f64)> = all.iter().map(|(n, v)| (n.as_str(), *v)).collect();
            columns.line(&metrics(step, &all), 1000)
        };
        let (short, long) = (line(&mut columns, 1, 0.5), line(&mut columns, 1000, -12.5));
        assert_eq!(
            short,
            "step    1/1000  name0 0.5000  name1 0.5000  name2 0.5000  name3 0.5000  name4 0.5000  name5 0.5000"
        );
        assert_eq!(short.len(), long.len());
        assert!(short.len() <= WIDTH);
        // A metric that is missing in a step leaves its column in place.
        let lacks = columns.line(&metrics(7, &[("m/1", 0.25)]), 1000);
        assert_eq!(lacks.len(), short.len());
        assert!(lacks.contains("name0      -  name1 0.2500"), "{lacks}");
    }

    #[test]
    fn a_metric_that_no_step_reports_has_no_column() {
        let mut columns = Columns {
            declared: vec![column("a/x", "x", 10, 5), column("a/y", "y", 20, 5)],
            ..Columns::default()
        };
        let y = columns.line(&metrics(1, &[("a/y", 0.5)]), 9);
        assert_eq!(y, "step 1/9  y 0.500");
        let both = columns.line(&metrics(2, &[("a/x", 1.0), ("a/y", 0.5)]), 9);
        assert_eq!(both, "step 2/9  x 1.000  y 0.500");
        let x = columns.line(&metrics(3, &[("a/x", 1.0)]), 9);
        assert_eq!(x, "step 3/9  x 1.000  y     -");
    }

    #[test]
    fn stages_that_declare_nothing_show_the_usual_metrics() {
        let mut columns = Columns::default();
        let values = [
            ("sft/loss", 2.0),
            ("eval/loss", 9.0),
            ("perf/memory_mb", 210.2),
        ];
        let first = StepMetrics {
            roles: MetricRoles::from_iter([("sft/loss".to_owned(), MetricRole::Loss)]),
            ..metrics(1, &values)
        };
        assert_eq!(
            columns.line(&first, 20),
            "step  1/20  loss 2.0000  MB 210.2"
        );
        let empty = metrics(2, &[]);
        assert_eq!(
            columns.line(&empty, 20),
            "step  2/20  loss      -  MB     -"
        );
    }
}
