//! Every built-in rule fires on what it is for, names the rows, and is silent otherwise.

use super::*;
use crate::batch::RaggedColumn;
use crate::keys::{ADVANTAGES, FINISH_REASONS, MASK_KINDS, REWARDS};
use crate::trace::config::RuleSetting;
use crate::trace::ratio::RatioStats;
use crate::trace::stats::{KeyStats, Place};

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
        tokens: 100,
        diff_mean: 0.0,
        diff_max: 0.0,
        k1,
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
    book.before_update(&StepView {
        step: 3,
        stats: &rows,
        batches: &[seen("writer", Side::Output)],
        update: Some(seen("update", Side::Input)),
        distances: &BTreeMap::from([("old_log_probs".to_owned(), distances)]),
    })
}

fn of_metrics(book: &mut RuleBook, step: u64, history: &[f64], now: &[(&str, f64)]) -> Vec<String> {
    let named = |value: f64| BTreeMap::from([("actor/grad_norm".to_owned(), value)]);
    let metrics = now.iter().map(|(name, v)| ((*name).to_owned(), *v));
    let found = book.after_step(&MetricsView {
        step,
        metrics: &metrics.collect(),
        history: &history.iter().map(|v| named(*v)).collect(),
        versions: &[],
        on_cpu: true,
    });
    found.into_iter().map(|anomaly| anomaly.rule).collect()
}

#[track_caller]
fn check(found: &[Anomaly], expected: &[(&str, Severity, &[&str])]) {
    let found: Vec<(&str, Severity, Vec<&str>)> = found
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
    check(&found, &[("non_finite", Severity::Stop, &["0.0#1"])]);
    let told = found[0].to_string();
    for part in [
        "step 3",
        "`update`",
        "`advantages`",
        "1 values under the mask",
        "first-bad",
    ] {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn rewards_advantages_and_lengths() {
    let mut batch = Batch::with_rows(&ids(4));
    let warn = Severity::Warn;
    batch
        .put(&REWARDS, vec![1.0, 1.0, 0.0, 1.0])
        .expect("four rows");
    check(&of_step(&batch, |_| ()), &[]);
    batch
        .put(&REWARDS, vec![1.0, 1.0, 0.0, 0.0])
        .expect("four rows");
    let found = of_step(&batch, |_| ());
    check(&found, &[("constant_reward", warn, &["0.0#0", "0.1#0"])]);
    assert!(found[0].what.contains("2 of 2 groups"));
    batch.put(&REWARDS, vec![0.5; 4]).expect("four rows");
    let all = ["0.0#0", "0.0#1", "0.1#0", "0.1#1"];
    check(&of_step(&batch, |_| ()), &[("constant_reward", warn, &all)]);

    let mut batch = Batch::with_rows(&ids(2));
    let rows = RaggedColumn::from_rows([[30.0f32, 0.0], [0.0, -31.0]]);
    batch.put(&ADVANTAGES, rows).expect("two rows");
    check(
        &of_step(&batch, |_| ()),
        &[("advantage_variance", warn, &["0.0#1", "0.0#0"])],
    );

    let mut batch = Batch::with_rows(&ids(2));
    batch.put(&FINISH_REASONS, vec![0u8, 2]).expect("two rows");
    check(&of_step(&batch, |row| row.truncated_share = Some(0.5)), &[]);
    check(
        &of_step(&batch, |row| row.truncated_share = Some(0.75)),
        &[("length_limit", warn, &["0.0#1"])],
    );
}

#[test]
fn ratios_of_log_probs() {
    let mut batch = Batch::with_rows(&ids(1));
    let rows = RaggedColumn::from_rows([[-1.0f32]]);
    batch
        .put(&crate::keys::OLD_LOG_PROBS, rows)
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
}

#[test]
fn metrics_are_judged_and_told_once() {
    let mut book = RuleBook::new(Vec::new(), &BTreeMap::new());
    let calm = [1.0; 8];
    let mut of = |history: &[f64], now: &[(&str, f64)]| of_metrics(&mut book, 9, history, now);
    assert_eq!(
        of(&calm, &[("actor/grad_norm", 9.0), ("actor/kl", 0.9)]),
        [""; 0]
    );
    assert_eq!(of(&calm[..7], &[("actor/grad_norm", 11.0)]), [""; 0]);
    assert_eq!(of(&calm, &[("actor/grad_norm", 11.0)]), ["grad_norm_spike"]);
    // It still holds, and is not told again until it has ceased to.
    assert_eq!(of(&calm, &[("actor/grad_norm", 12.0)]), [""; 0]);
    assert_eq!(of(&calm, &[("actor/grad_norm", 1.0)]), [""; 0]);
    assert_eq!(of(&calm, &[("actor/grad_norm", 12.0)]), ["grad_norm_spike"]);
    assert_eq!(of(&[], &[("reward/kl", f64::NAN)]), ["kl_blow_up"]);
    assert_eq!(of(&[], &[("actor/entropy", 0.001)]), ["entropy_collapse"]);
    assert_eq!(of(&[], &[("actor/first_ppo_kl", -1e-3)]), ["ratio_not_one"]);
    assert_eq!(of(&[], &[("actor/first_ppo_kl", 1e-6)]), [""; 0]);
}

#[test]
fn weights_that_do_not_change_although_the_optimiser_moves() {
    let version = |step, hash: &str| {
        let hash = hash.to_owned();
        BTreeMap::from([("actor".to_owned(), WeightsVersion { step, hash })])
    };
    let of = |versions: &[(u64, BTreeMap<String, WeightsVersion>)], norm: f64| {
        let mut book = RuleBook::new(Vec::new(), &BTreeMap::new());
        book.after_step(&MetricsView {
            step: 100,
            metrics: &BTreeMap::from([("actor/grad_norm".to_owned(), norm)]),
            history: &VecDeque::new(),
            versions,
            on_cpu: true,
        })
        .len()
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
fn rules_are_tuned_silenced_and_added() {
    let setting = |severity, limit| RuleSetting { severity, limit };
    let settings = BTreeMap::from([
        (
            "always".to_owned(),
            setting(Some(Severity::Stop), Some(7.0)),
        ),
        ("kl_blow_up".to_owned(), setting(Some(Severity::Off), None)),
        ("entropy_collapse".to_owned(), setting(None, Some(0.5))),
    ]);
    let mut book = RuleBook::new(vec![Box::new(Always)], &settings);
    assert!(!book.has("kl_blow_up") && book.has("always"));
    let now = [("actor/kl", 9.0), ("actor/entropy", 0.4)];
    assert_eq!(of_metrics(&mut book, 1, &[], &now), ["entropy_collapse"]);
    let found = book.before_update(&StepView {
        step: 5,
        stats: &[],
        batches: &[],
        update: None,
        distances: &BTreeMap::new(),
    });
    assert_eq!((found[0].severity, found[0].limit), (Severity::Stop, 7.0));
    let line = serde_json::to_string(&found[0]).expect("prints");
    assert_eq!(
        serde_json::from_str::<Anomaly>(&line).expect("reads"),
        found[0]
    );
}

#[test]
fn the_page_lists_every_rule_as_it_is() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/trace.md");
    let page = std::fs::read_to_string(path).expect("the page");
    for rule in RULES {
        let severity = match rule.severity {
            Severity::Off => "off",
            Severity::Warn => "warn",
            Severity::Stop => "stop",
        };
        let BuiltIn {
            name,
            limit,
            unit,
            meaning,
            ..
        } = rule;
        let line = format!("| `{name}` | {severity} | {limit} | {unit} | {meaning} |");
        assert!(page.contains(&line), "docs/trace.md lacks\n{line}");
    }
    let listed = page
        .lines()
        .filter(|line| line.starts_with("| `") && line.contains("` | warn |"));
    let stops = page.lines().filter(|line| line.contains("` | stop |"));
    assert_eq!(listed.count() + stops.count(), RULES.len());
}
