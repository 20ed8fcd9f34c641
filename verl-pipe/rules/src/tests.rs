//! Every built-in rule fires on its anomaly, lists the rows, and is silent otherwise.

use std::collections::VecDeque;

use verl_words::batch::RaggedColumn;
use verl_words::batch::arrow::ArrowBatch;
use verl_words::keys::{ADVANTAGES, FINISH_REASONS, MASK_KINDS, RESPONSES, REWARDS};

use super::*;
use crate::config::RuleSetting;
use crate::stats::{KeyStats, Place, RatioStats};

fn ids(n: u64) -> Vec<RowId> {
    (0..n)
        .map(|at| RowId::prompt(0, at / 2).and_then(|id| id.sample(at % 2)))
        .collect::<Result<_, _>>()
        .expect("in range")
}

fn stats(stage: &str, side: Side, batch: &Batch) -> Vec<StatRow> {
    let ids: Vec<u64> = batch.ids().iter().map(|id| id.0).collect();
    batch
        .keys()
        .iter()
        .map(|key| {
            let mut stats = KeyStats::default();
            stats.add((0, 0), batch.column(key).expect("is there"), &ids);
            stats.row(Place {
                step: 3,
                stage,
                side,
                key,
                name: key,
                brief: true,
            })
        })
        .collect()
}

fn ratio(k1: f64, ess: f64, probability_diff: f64) -> RatioStats {
    RatioStats {
        counterpart: "rollout_log_probs".to_owned(),
        tokens: 1000,
        diff_mean: 0.0,
        diff_max: 0.0,
        k1,
        k1_error: Some(0.01),
        rows: 100,
        ratio_min: 1.0,
        ratio_max: 1.0,
        probability_diff,
        ess,
    }
}

/// Anomalies of a step in which `stage` wrote `batch`, which the update reads too.
fn of_step(batch: &Batch, change: impl Fn(&mut StatRow)) -> Vec<Anomaly> {
    let mut book = RuleBook::new(Vec::new(), &BTreeMap::new());
    let mut rows = stats("writer", Side::Output, batch);
    rows.iter_mut().for_each(change);
    let seen = |stage, side| SeenBatch { stage, side, batch };
    let distances = [(RowId(4096), 0.5), (RowId(1), 2.0)].to_vec();
    let view = StepView {
        step: 3,
        stats: &rows,
        batches: &[seen("writer", Side::Output)],
        update: Some(seen("update", Side::Input)),
        distances: &BTreeMap::from([("old_log_probs".to_owned(), distances)]),
        limits: &BTreeMap::from([("writer".to_owned(), ("max_new_tokens", 24))]),
    };
    book.before_update(&view, &|hit| format!("look at {}", hit.stage))
}

/// Roles of the metrics in these tests.
fn roles() -> MetricRoles {
    let roles = [
        ("actor/entropy", MetricRole::Entropy),
        ("actor/first_ppo_kl", MetricRole::SameWeightsDifference),
        ("actor/grad_norm", MetricRole::GradientNorm),
        ("actor/kl", MetricRole::ReferenceKl),
        ("actor/learning_rate", MetricRole::LearningRate),
        ("actor/optimizer_steps", MetricRole::OptimizerSteps),
        ("actor/pg_clipfrac", MetricRole::ClippedShare),
        ("actor/ppo_kl", MetricRole::UpdateKl),
        ("critic/explained_variance", MetricRole::ExplainedVariance),
        ("critic/grad_norm", MetricRole::GradientNorm),
        ("preference/kl", MetricRole::RewardBaseline),
        ("preference/log_probs_chosen", MetricRole::ChosenLogProb),
        ("preference/log_probs_rejected", MetricRole::RejectedLogProb),
        ("response/length_mean", MetricRole::ResponseLength),
        ("response/sampled_entropy", MetricRole::Entropy),
        ("response/truncated_share", MetricRole::TruncatedShare),
        ("reward/kl", MetricRole::ReferenceKl),
        ("reward/mean", MetricRole::Reward),
        ("reward/row_errors", MetricRole::RowErrors),
    ];
    MetricRoles::from_iter(roles.map(|(name, role)| (name.to_owned(), role)))
}

/// A run with given metrics, step by step.
struct Series {
    book: RuleBook,
    history: VecDeque<BTreeMap<String, f64>>,
    early: Vec<BTreeMap<String, f64>>,
    step: u64,
}

impl Series {
    fn new() -> Series {
        Series::with(&BTreeMap::new())
    }

    fn with(settings: &BTreeMap<String, RuleSetting>) -> Series {
        Series {
            book: RuleBook::new(Vec::new(), settings),
            history: VecDeque::new(),
            early: Vec::new(),
            step: 0,
        }
    }

    /// The findings of the next step.
    fn step(&mut self, now: &[(&str, f64)]) -> Vec<Anomaly> {
        self.step += 1;
        let metrics: BTreeMap<String, f64> = now
            .iter()
            .map(|(name, v)| ((*name).to_owned(), *v))
            .collect();
        let view = MetricsView {
            step: self.step,
            metrics: &metrics,
            roles: &roles(),
            history: &self.history,
            early: &self.early,
            versions: &[],
            on_cpu: true,
        };
        let found = self.book.after_step(&view, &|_| String::new());
        if self.early.len() < EARLY_STEPS {
            self.early.push(metrics.clone());
        }
        self.history.push_back(metrics);
        if self.history.len() > HISTORY_STEPS {
            self.history.pop_front();
        }
        found
    }

    /// Step and rule of all findings in a series of one metric.
    fn all(name: &str, values: impl IntoIterator<Item = f64>) -> Vec<(u64, String)> {
        let mut series = Series::new();
        let steps = values.into_iter().map(|value| vec![(name, value)]);
        series.of_all(steps)
    }

    /// Step and rule of all findings in a series of several metrics.
    fn of_all<'a>(
        &mut self,
        steps: impl IntoIterator<Item = Vec<(&'a str, f64)>>,
    ) -> Vec<(u64, String)> {
        let found = steps.into_iter().flat_map(|now| self.step(&now));
        found.map(|found| (found.step, found.rule)).collect()
    }
}

#[track_caller]
fn check(found: &[Anomaly], expected: &[(&str, RuleSeverity, &[&str])]) {
    let found: Vec<(&str, RuleSeverity, Vec<&str>)> = found
        .iter()
        .map(|a| {
            let samples = a.samples.iter().map(String::as_str).collect();
            (a.rule.as_str(), a.severity, samples)
        })
        .collect();
    let expected: Vec<_> = expected
        .iter()
        .map(|(rule, severity, samples)| (*rule, *severity, samples.to_vec()))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn values_that_are_not_finite_stop_unless_they_are_observations() {
    let mut batch = Batch::with_rows(&ids(2));
    let kinds = RaggedColumn::from_rows([[1u8, 0], [1, 1]]);
    batch.put(&MASK_KINDS, kinds).expect("two rows");
    let mut with = |row: [f32; 2]| {
        let rows = RaggedColumn::from_rows([[0.5, f32::NAN], row]);
        batch.put(&ADVANTAGES, rows).expect("two rows");
        of_step(&batch, |_| ())
    };
    check(&with([0.0, 1.0]), &[]);
    let found = with([0.0, f32::INFINITY]);
    check(&found, &[("non_finite", RuleSeverity::Stop, &["0.0#1"])]);
    let message = found[0].to_string();
    for part in [
        "step 3",
        "`update`",
        "`advantages`",
        "1 value under the mask",
        "first-bad",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn rewards_advantages_and_lengths() {
    let mut batch = Batch::with_rows(&ids(8));
    let warn = RuleSeverity::Warn;
    let mut of = |rewards: [f32; 8]| {
        batch.put(&REWARDS, rewards.to_vec()).expect("eight rows");
        of_step(&batch, |_| ())
    };
    check(&of([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]), &[]);
    let found = of([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
    let firsts = ["0.0#0", "0.1#0", "0.2#0", "0.3#0"];
    check(&found, &[("constant_reward", warn, &firsts)]);
    assert!(found[0].what.contains("4 of 4 groups"));
    let found = of([0.5; 8]);
    let all = ["0.0#0", "0.0#1", "0.1#0", "0.1#1", "0.2#0"];
    check(&found, &[("constant_reward", warn, &all)]);
    assert_eq!(found[0].what, "all 8 rewards are 0.5");
    // Four rewards may be equal by chance.
    let mut few = Batch::with_rows(&ids(4));
    few.put(&REWARDS, vec![0.5; 4]).expect("four rows");
    check(&of_step(&few, |_| ()), &[]);

    let mut batch = Batch::with_rows(&ids(2));
    let rows = RaggedColumn::from_rows([[30.0f32, 0.0], [0.0, -31.0]]);
    batch.put(&ADVANTAGES, rows).expect("two rows");
    check(
        &of_step(&batch, |_| ()),
        &[("advantage_variance", warn, &["0.0#1", "0.0#0"])],
    );

    let mut batch = Batch::with_rows(&ids(8));
    let reasons = vec![0u8, 2, 0, 0, 0, 0, 0, 0];
    batch.put(&FINISH_REASONS, reasons).expect("eight rows");
    check(&of_step(&batch, |row| row.truncated_share = Some(0.5)), &[]);
    check(
        &of_step(&batch, |row| row.truncated_share = Some(0.75)),
        &[("length_limit", warn, &["0.0#1"])],
    );
}

/// A5: a prompt of 499 tokens in a context of 512 leaves 13 of `max_new_tokens = 24`.
#[test]
fn a5_the_limit_that_cut_responses_off_is_reported() {
    let what = |lengths: [usize; 8]| {
        let mut batch = Batch::with_rows(&ids(8));
        let rows = lengths.map(|length| (0..length as u32).collect::<Vec<u32>>());
        batch
            .put(&RESPONSES, RaggedColumn::from_rows(rows))
            .expect("eight rows");
        batch
            .put(&FINISH_REASONS, vec![2u8; 8])
            .expect("eight rows");
        let found = of_step(&batch, |row| row.truncated_share = Some(1.0));
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].what.clone()
    };
    let context = what([13; 8]);
    assert!(context.contains("all by the model's context"), "{context}");
    assert!(!context.contains("raise"), "{context}");
    let setting = what([24; 8]);
    assert!(
        setting.contains("all by `max_new_tokens = 24`; raise it"),
        "{setting}"
    );
    let both = what([24, 24, 24, 13, 13, 13, 13, 13]);
    let parts = "3 by `max_new_tokens = 24`, 5 by the model's context";
    assert!(both.contains(parts), "{both}");
}

#[test]
fn advantages_of_0_are_reported_unless_they_follow_from_equal_rewards() {
    let mut batch = Batch::with_rows(&ids(16));
    let rows = RaggedColumn::from_rows([[0.0f32, 0.0]; 16]);
    batch.put(&ADVANTAGES, rows).expect("sixteen rows");
    let rules = |batch: &Batch| -> Vec<String> {
        let found = of_step(batch, |_| ());
        found.into_iter().map(|found| found.rule).collect()
    };
    assert_eq!(rules(&batch), ["zero_advantages"]);
    batch.put(&REWARDS, vec![1.0; 16]).expect("sixteen rows");
    assert_eq!(rules(&batch), ["constant_reward"]);
    // The same if the cause is turned off.
    let off = RuleSetting {
        severity: Some(RuleSeverity::Off),
        limit: None,
    };
    let settings = BTreeMap::from([("constant_reward".to_owned(), off)]);
    let mut book = RuleBook::new(Vec::new(), &settings);
    assert!(!book.has("constant_reward"));
    let seen = SeenBatch {
        stage: "writer",
        side: Side::Output,
        batch: &batch,
    };
    let view = StepView {
        step: 3,
        stats: &stats("writer", Side::Output, &batch),
        batches: &[seen],
        update: None,
        distances: &BTreeMap::new(),
        limits: &BTreeMap::new(),
    };
    assert_eq!(book.before_update(&view, &|_| String::new()), []);
}

#[test]
fn responses_that_are_the_same_or_loop() {
    let of = |rows: Vec<Vec<u32>>| -> Vec<(String, Vec<String>)> {
        let mut batch = Batch::with_rows(&ids(rows.len() as u64));
        batch
            .put(&RESPONSES, RaggedColumn::from_rows(rows))
            .expect("as many rows");
        let found = of_step(&batch, |_| ());
        found.into_iter().map(|a| (a.rule, a.samples)).collect()
    };
    let own = |n: u32| -> Vec<Vec<u32>> { (0..n).map(|at| vec![at, 7, 1]).collect() };
    assert_eq!(of(own(20)), []);
    let mut same = vec![vec![5, 1]; 19];
    same.push(vec![6, 1]);
    let first = vec!["0.0#0".to_owned()];
    assert_eq!(of(same.clone()), [("same_responses".to_owned(), first)]);
    // 17 of 20 may be the answer to 17 questions; a few responses may be the same by chance.
    assert_eq!(of([vec![vec![5, 1]; 17], own(3)].concat()), []);
    assert_eq!(of(vec![vec![5, 1]; 6]), []);

    let looping = |at: u32| -> Vec<u32> {
        let head = [100 + at, 101];
        let period = [1, 2, 3, 4, 5].into_iter().cycle().take(40);
        head.into_iter().chain(period).collect()
    };
    let counting = |at: u32| -> Vec<u32> { (at..at + 40).collect() };
    let with = |loops: u32| -> Vec<Vec<u32>> {
        let rows = (0..8).map(|at| match at < loops {
            true => looping(at),
            false => counting(at),
        });
        rows.collect()
    };
    assert_eq!(of(with(2)), []);
    let three = ["0.0#0", "0.0#1", "0.1#0"].map(str::to_owned).to_vec();
    assert_eq!(of(with(3)), [("looping_responses".to_owned(), three)]);
}

#[test]
fn ratios_of_log_probs() {
    let mut batch = Batch::with_rows(&ids(1));
    let rows = RaggedColumn::from_rows([[-1.0f32]]);
    batch
        .put(&verl_words::keys::OLD_LOG_PROBS, rows)
        .expect("one row");
    let with = |ratio: RatioStats| {
        let found = of_step(&batch, |row| row.ratio = Some(ratio.clone()));
        let farthest_first = |a: &Anomaly| a.samples == ["0.0#1", "0.1#0"];
        assert!(found.iter().all(farthest_first), "{found:?}");
        found.into_iter().map(|a| a.rule).collect::<Vec<_>>()
    };
    assert_eq!(with(ratio(0.0, 1.0, 0.0)), [""; 0]);
    assert_eq!(with(ratio(-0.04, 0.6, 0.009)), [""; 0]);
    assert_eq!(with(ratio(-0.06, 1.0, 0.0)), ["negative_kl"]);
    assert_eq!(with(ratio(0.0, 0.4, 0.0)), ["low_ess"]);
    assert_eq!(with(ratio(0.0, 1.0, 0.02)), ["probability_difference"]);
    // P3-7: an estimate from 16 tokens is not meaningful, nor is one with a large standard error.
    let few = |ratio| RatioStats {
        tokens: 16,
        rows: 2,
        ..ratio
    };
    assert_eq!(with(few(ratio(-0.5, 0.1, 0.5))), [""; 0]);
    let unsure = RatioStats {
        k1_error: Some(0.02),
        ..ratio(-0.06, 1.0, 0.0)
    };
    assert_eq!(with(unsure), [""; 0]);
    let lone = RatioStats {
        k1_error: None,
        ..ratio(-0.06, 1.0, 0.0)
    };
    assert_eq!(with(lone), [""; 0]);
}

#[test]
fn weights_that_do_not_change_although_the_optimiser_runs() {
    let version = |step, hash: &str| {
        let hash = hash.to_owned();
        BTreeMap::from([("actor".to_owned(), WeightsVersion { step, hash })])
    };
    let of = |versions: &[(u64, BTreeMap<String, WeightsVersion>)], norm: f64| {
        let mut book = RuleBook::new(Vec::new(), &BTreeMap::new());
        let view = MetricsView {
            step: 100,
            metrics: &BTreeMap::from([("actor/grad_norm".to_owned(), norm)]),
            roles: &roles(),
            history: &VecDeque::new(),
            early: &[],
            versions,
            on_cpu: true,
        };
        book.after_step(&view, &|_| String::new()).len()
    };
    assert_eq!(
        of(&[(50, version(50, "a")), (100, version(100, "a"))], 1.0),
        1
    );
    assert_eq!(
        of(&[(50, version(50, "a")), (100, version(100, "b"))], 1.0),
        0
    );
    assert_eq!(
        of(&[(50, version(50, "a")), (100, version(50, "a"))], 1.0),
        0
    );
    assert_eq!(
        of(&[(50, version(50, "")), (100, version(100, ""))], 1.0),
        0
    );
    assert_eq!(
        of(&[(50, version(50, "a")), (100, version(100, "a"))], 0.0),
        0
    );
    assert_eq!(of(&[(100, version(100, "a"))], 1.0), 0);
}

/// Fires on every step.
struct Always;

impl Rule for Always {
    fn name(&self) -> &str {
        "always"
    }
    fn advice(&self) -> &str {
        "nothing to look at"
    }
    fn before_update(&mut self, view: &StepView<'_>, limit: f64) -> Vec<Hit> {
        vec![Hit {
            stage: format!("{}", view.step),
            value: limit,
            ..Hit::default()
        }]
    }
}

#[test]
fn rules_are_tuned_turned_off_and_added() {
    let setting = |severity, limit| RuleSetting { severity, limit };
    let settings = BTreeMap::from([
        (
            "always".to_owned(),
            setting(Some(RuleSeverity::Stop), Some(7.0)),
        ),
        (
            "kl_blow_up".to_owned(),
            setting(Some(RuleSeverity::Off), None),
        ),
        ("large_update".to_owned(), setting(None, Some(0.5))),
    ]);
    let mut book = RuleBook::new(vec![Box::new(Always)], &settings);
    assert!(!book.has("kl_blow_up") && book.has("always"));
    let mut series = Series::with(&settings);
    let mut of = |kl, update| series.of_all([vec![("actor/kl", kl), ("actor/ppo_kl", update)]]);
    assert_eq!(of(9.0, 0.4), []);
    // What follows from a rule that is off is not reported either.
    assert_eq!(of(9.0, 0.6), []);
    assert_eq!(of(0.1, 0.6), [(3, "large_update".to_owned())]);
    let view = StepView {
        step: 5,
        stats: &[],
        batches: &[],
        update: None,
        distances: &BTreeMap::new(),
        limits: &BTreeMap::new(),
    };
    let found = book.before_update(&view, &|_| String::new());
    assert_eq!(
        (found[0].severity, found[0].limit),
        (RuleSeverity::Stop, 7.0)
    );
    let line = serde_json::to_string(&found[0]).expect("prints");
    assert_eq!(
        serde_json::from_str::<Anomaly>(&line).expect("reads"),
        found[0]
    );
}

#[path = "page_tests.rs"]
mod page;
#[path = "series_tests.rs"]
mod series;
