//! Properties of offline training: ILQL, and distillation for every divergence, tail rule and aggregation.

use burn::tensor::{DType, Device, Tensor, TensorData};
use proptest::prelude::*;
use verl_algos::ilql::{IlqlBatch, IlqlLoss, IlqlMicroBatch};
use verl_algos::losses::{
    DistillationBatch, DistillationLoss, DistillationMicroBatch, Divergence, DivergenceName,
    MetricSum, Tail,
};
use verl_algos::{Aggregation, Counts, Ragged};

use super::{aggregations, close, is_slope, metric, read};

fn leaf<const D: usize>(values: Vec<f64>, shape: [usize; D]) -> Tensor<D> {
    let data = TensorData::new(values, shape);
    let tensor = Tensor::from_data(data, (&Device::flex(), DType::F64));
    tensor.autodiff().require_grad()
}

// ---- ILQL

/// Size of the vocabulary.
const VOCAB: usize = 3;
/// Numbers that belong to an action: two Q heads and logits of each token, two target heads, V, and a reward.
const NUMBERS: usize = 3 * VOCAB + 4;

/// An action with its state.
#[derive(Debug, Clone)]
struct Step {
    token: u32,
    alive: bool,
    numbers: Vec<f64>,
}

#[derive(Debug, Clone)]
struct Trajectory {
    steps: Vec<Step>,
    /// Whether the final state is alive, and its V.
    end: (bool, f64),
}

fn trajectories() -> impl Strategy<Value = Vec<Trajectory>> {
    let step = (
        0..VOCAB as u32,
        prop::bool::weighted(0.8),
        prop::collection::vec(-2.0..2.0, NUMBERS),
    );
    let step = step.prop_map(|(token, alive, numbers)| Step {
        token,
        alive,
        numbers,
    });
    let row = (
        prop::collection::vec(step, 0..4),
        (any::<bool>(), -2.0..2.0),
    );
    let row = row.prop_map(|(steps, end)| Trajectory { steps, end });
    prop::collection::vec(row, 1..5)
}

fn batch(rows: &[Trajectory], counts: Counts) -> IlqlBatch {
    let column = |of: fn(&Step) -> f64| {
        let rows = rows.iter();
        Ragged::<f64>::from_rows(rows.map(|row| row.steps.iter().map(of).collect::<Vec<_>>()))
    };
    IlqlBatch {
        actions: column(|step| f64::from(step.token)).map(|_, _, token| token as u32),
        rewards: column(|step| step.numbers[NUMBERS - 1]),
        alive: Ragged::from_rows(rows.iter().map(|row| {
            let mut alive: Vec<bool> = row.steps.iter().map(|step| step.alive).collect();
            alive.push(row.end.0);
            alive
        })),
        counts,
    }
}

/// Loss, gradients of each row (Q heads, logits, values), and metrics, with the rows divided into `parts`.
fn evaluate_ilql(
    rows: &[Trajectory],
    loss: IlqlLoss,
    counts: Counts,
    parts: &[Vec<usize>],
) -> (f64, Vec<Vec<f64>>, Vec<MetricSum>) {
    let batch = batch(rows, counts);
    let prepared = loss.prepare(&batch).unwrap();
    let (mut total, mut metrics) = (0.0, Vec::new());
    let mut grads = vec![Vec::new(); rows.len()];
    for part in parts {
        let steps: Vec<&Step> = part.iter().flat_map(|b| &rows[*b].steps).collect();
        let cut = |from: usize, len: usize| -> Vec<f64> {
            let numbers = steps.iter().map(|step| &step.numbers[from..from + len]);
            numbers.collect::<Vec<_>>().concat()
        };
        let wide = [0, 1, 2].map(|i| leaf(cut(i * VOCAB, VOCAB), [steps.len(), VOCAB]));
        let narrow = [0, 1].map(|i| leaf(cut(3 * VOCAB + i, 1), [steps.len()]));
        let values: Vec<f64> = part
            .iter()
            .flat_map(|b| {
                let own = rows[*b].steps.iter().map(|step| step.numbers[NUMBERS - 2]);
                own.chain([rows[*b].end.1]).collect::<Vec<_>>()
            })
            .collect();
        let states = values.len();
        let values = leaf(values, [states]);
        let [q, other, logits] = wide.clone();
        let partial = prepared
            .loss(&IlqlMicroBatch {
                rows: part.clone(),
                qs: vec![q, other],
                target_qs: narrow.to_vec(),
                values: values.clone(),
                logits,
            })
            .unwrap();
        MetricSum::add_to(&mut metrics, partial.read_metrics().unwrap());
        if part.is_empty() {
            continue;
        }
        let gradients = partial.loss.backward();
        for target in &narrow {
            assert!(target.grad(&gradients).is_none(), "targets are constants");
        }
        let wide = wide.map(|tensor| {
            let grad = tensor.grad(&gradients).map(read);
            grad.unwrap_or_else(|| vec![0.0; steps.len() * VOCAB])
        });
        let values = read(values.grad(&gradients).unwrap());
        let (mut action, mut state) = (0, 0);
        for &b in part {
            let len = rows[b].steps.len();
            for grad in &wide {
                grads[b].extend(&grad[action * VOCAB..(action + len) * VOCAB]);
            }
            grads[b].extend(&values[state..=state + len]);
            action += len;
            state += len + 1;
        }
        total += read(partial.loss)[0];
    }
    (total, grads, metrics)
}

fn ilql() -> IlqlLoss {
    IlqlLoss {
        beta: 0.7,
        ..IlqlLoss::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn ilql_does_not_depend_on_the_cut((rows, cuts) in trajectories().prop_flat_map(|rows| {
        let len = rows.len();
        (Just(rows), prop::collection::vec(0usize..2, len))
    }), declared in prop::option::of(20usize..30)) {
        let counts = Counts { tokens: declared, ..Counts::LOCAL };
        let all: Vec<usize> = (0..rows.len()).collect();
        let whole = evaluate_ilql(&rows, ilql(), counts, std::slice::from_ref(&all));
        let part = |p| all.iter().copied().filter(|b| cuts[*b] == p).collect();
        let single: Vec<Vec<usize>> = all.iter().rev().map(|b| vec![*b]).collect();
        for parts in [&[part(0), part(1)][..], &single[..]] {
            let cut = evaluate_ilql(&rows, ilql(), counts, parts);
            close(&[cut.0], &[whole.0]);
            close(&cut.1.concat(), &whole.1.concat());
            for m in &whole.2 {
                close(&[metric(&cut.2, m.name())], &[m.value()]);
            }
        }
    }

    #[test]
    fn ilql_ignores_what_is_not_alive(rows in trajectories(), junk in prop::sample::select(vec![f64::NAN, f64::INFINITY, -1e10])) {
        let all: Vec<Vec<usize>> = vec![(0..rows.len()).collect()];
        let clean = evaluate_ilql(&rows, ilql(), Counts::LOCAL, &all);
        let mut dirty = rows.clone();
        for row in &mut dirty {
            for step in row.steps.iter_mut().filter(|step| !step.alive) {
                step.numbers.fill(junk);
            }
            if !row.end.0 {
                row.end.1 = junk;
            }
        }
        prop_assert_eq!(evaluate_ilql(&dirty, ilql(), Counts::LOCAL, &all), clean);
    }

    #[test]
    fn ilql_gradients_are_finite_differences_where_none_is_stopped(rows in trajectories(), at in any::<prop::sample::Index>()) {
        const STEP: f64 = 1e-6;
        let places: Vec<(usize, usize)> = (0..rows.len())
            .flat_map(|b| (0..rows[b].steps.len()).map(move |t| (b, t)))
            .collect();
        prop_assume!(!places.is_empty());
        // Q heads and logits of one action: V is a constant in Q's target and in AWAC's weight.
        let (b, t) = *at.get(&places);
        let all: Vec<Vec<usize>> = vec![(0..rows.len()).collect()];
        let grads = evaluate_ilql(&rows, ilql(), Counts::LOCAL, &all).1;
        for number in 0..3 * VOCAB {
            let moved = |step: f64| {
                let mut rows = rows.clone();
                rows[b].steps[t].numbers[number] += step;
                evaluate_ilql(&rows, ilql(), Counts::LOCAL, &all).0
            };
            let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let (tensor, token) = (number / VOCAB, number % VOCAB);
            let grad = grads[b][(tensor * rows[b].steps.len() + t) * VOCAB + token];
            prop_assert!(is_slope(grad, slope, 1e-5), "{} differs from {}", grad, slope);
        }
    }

    #[test]
    fn half_an_expectile_is_half_the_squared_error(rows in trajectories()) {
        let half = IlqlLoss { tau: 0.5, ..ilql() };
        let all: Vec<Vec<usize>> = vec![(0..rows.len()).collect()];
        let (_, _, metrics) = evaluate_ilql(&rows, half, Counts::LOCAL, &all);
        let alive: Vec<&Step> = rows.iter().flat_map(|row| &row.steps).filter(|s| s.alive).collect();
        let errors = alive.iter().map(|step| {
            let target = step.numbers[3 * VOCAB].min(step.numbers[3 * VOCAB + 1]);
            (target - step.numbers[NUMBERS - 2]).powi(2)
        });
        let expected = errors.sum::<f64>() / alive.len().max(1) as f64 / 2.0;
        close(&[metric(&metrics, "v_loss")], &[expected]);
    }
}

// ---- distillation

/// Tokens of the teacher.
const TOP_K: usize = 3;

/// Log-probs over a vocabulary of K + 2 tokens; the first K are listed.
fn listed() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(-2.0f64..2.0, TOP_K + 2).prop_map(|logits| {
        let sum = logits.iter().map(|z| z.exp()).sum::<f64>().ln();
        logits[..TOP_K].iter().map(|z| z - sum).collect()
    })
}

#[derive(Debug, Clone)]
struct Lesson {
    rows: Vec<usize>,
    num_rows: usize,
    teacher: Vec<f64>,
    student: Vec<f64>,
}

fn lessons() -> impl Strategy<Value = Lesson> {
    let lengths = prop::collection::vec(0usize..4, 2..5);
    lengths
        .prop_filter("at least one token", |lengths| {
            lengths.iter().any(|n| *n > 0)
        })
        .prop_flat_map(|lengths| {
            let each = lengths.iter().enumerate();
            let rows: Vec<usize> = each.flat_map(|(b, &n)| std::iter::repeat_n(b, n)).collect();
            let n = rows.len();
            let column = move || prop::collection::vec(listed(), n);
            (Just(rows), Just(lengths.len()), column(), column())
        })
        .prop_map(|(rows, num_rows, teacher, student)| Lesson {
            rows,
            num_rows,
            teacher: teacher.concat(),
            student: student.concat(),
        })
}

fn divergences() -> impl Iterator<Item = Divergence> {
    DivergenceName::ALL.iter().flat_map(|name| {
        let betas: &[f64] = match name {
            DivergenceName::JensenShannon => &[0.1, 0.5, 0.8],
            _ => &[0.5],
        };
        let named = |beta: &f64| Divergence::named(*name, Some(*beta)).unwrap();
        betas.iter().map(named)
    })
}

fn tails() -> impl Iterator<Item = Tail> {
    Tail::ALL.iter().copied()
}

fn constant(values: &[f64]) -> Tensor<2> {
    let shape = [values.len() / TOP_K, TOP_K];
    let data = TensorData::new(values.to_vec(), shape);
    Tensor::from_data(data, (&Device::flex(), DType::F64))
}

/// Divergence of each token.
fn of(divergence: Divergence, tail: Tail, teacher: &[f64], student: &[f64]) -> Vec<f64> {
    let [teacher, student] = [teacher, student].map(|l| tail.distribution(constant(l)));
    read(divergence.tokens(teacher, student))
}

/// Loss, gradient and metrics, with the tokens divided into `parts`.
fn evaluate_distillation(
    lesson: &Lesson,
    loss: DistillationLoss,
    parts: &[Vec<usize>],
) -> (f64, Vec<f64>, Vec<MetricSum>) {
    let ids = (0..lesson.teacher.len() as u32).collect();
    let mut batch = DistillationBatch::new(lesson.rows.clone(), TOP_K, ids, lesson.teacher.clone());
    batch.counts = Counts::declared(lesson.rows.len(), lesson.num_rows);
    let prepared = loss.prepare(&batch).unwrap();
    let (mut total, mut grad, mut metrics) = (0.0, vec![0.0; lesson.student.len()], Vec::new());
    for tokens in parts {
        let student: Vec<f64> = tokens
            .iter()
            .flat_map(|t| lesson.student[t * TOP_K..(t + 1) * TOP_K].to_vec())
            .collect();
        let log_probs = leaf(student, [tokens.len(), TOP_K]);
        let partial = prepared
            .loss(&DistillationMicroBatch {
                tokens: tokens.clone(),
                log_probs: log_probs.clone(),
            })
            .unwrap();
        MetricSum::add_to(&mut metrics, partial.read_metrics().unwrap());
        if let Some(own) = log_probs.grad(&partial.loss.backward()) {
            for (t, own) in tokens.iter().zip(read(own).chunks(TOP_K)) {
                grad[t * TOP_K..(t + 1) * TOP_K].copy_from_slice(own);
            }
        }
        total += read(partial.loss)[0];
    }
    (total, grad, metrics)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn divergences_are_never_negative_and_zero_at_equality(p in listed(), q in listed()) {
        for tail in tails() {
            for divergence in divergences() {
                let value = of(divergence, tail, &p, &q)[0];
                prop_assert!(value >= -1e-12, "{:?} {:?} is {}", divergence, tail, value);
                prop_assert!(of(divergence, tail, &p, &p)[0].abs() < 1e-12);
            }
        }
    }

    #[test]
    fn jensen_shannon_lies_between_its_limits(p in listed(), q in listed(), beta in 0.05f64..0.95) {
        for tail in tails() {
            let js = |beta, p: &[f64], q: &[f64]| of(Divergence::JensenShannon { beta }, tail, p, q)[0];
            let forward = of(Divergence::Forward, tail, &p, &q)[0];
            let reverse = of(Divergence::Reverse, tail, &p, &q)[0];
            let value = js(beta, &p, &q);
            let entropy = -beta * beta.ln() - (1.0 - beta) * (1.0 - beta).ln();
            prop_assert!(value <= entropy + 1e-12);
            // KL(p‖m) ≤ (1 − β) KL(p‖q) and KL(q‖m) ≤ β KL(q‖p), as KL is convex.
            prop_assert!(value <= beta * (1.0 - beta) * (forward + reverse) + 1e-12);
            close(&[js(beta, &p, &q)], &[js(1.0 - beta, &q, &p)]);
            close(&[js(0.5, &p, &q)], &[js(0.5, &q, &p)]);
            const SMALL: f64 = 1e-6;
            prop_assert!((js(SMALL, &p, &q) / SMALL - forward).abs() < 1e-3);
            prop_assert!((js(1.0 - SMALL, &p, &q) / SMALL - reverse).abs() < 1e-3);
        }
    }

    #[test]
    fn a_bucket_is_a_lower_bound_of_the_whole(logits in prop::collection::vec((-2.0f64..2.0, -2.0f64..2.0), TOP_K + 2)) {
        let log_probs = |of: fn(&(f64, f64)) -> f64| -> Vec<f64> {
            let sum = logits.iter().map(|z| of(z).exp()).sum::<f64>().ln();
            logits.iter().map(|z| of(z) - sum).collect()
        };
        let (p, q) = (log_probs(|z| z.0), log_probs(|z| z.1));
        let row = |values: &[f64]| {
            let data = TensorData::new(values.to_vec(), [1, values.len()]);
            Tensor::<2>::from_data(data, (&Device::flex(), DType::F64))
        };
        for divergence in divergences() {
            let whole = read(divergence.tokens(row(&p), row(&q)))[0];
            let bucket = of(divergence, Tail::Bucket, &p[..TOP_K], &q[..TOP_K])[0];
            prop_assert!(bucket <= whole + 1e-9, "{:?}: {} above {}", divergence, bucket, whole);
            // With the entire vocabulary listed, both rules give the complete divergence.
            for tail in tails() {
                let listed = divergence.tokens(tail.distribution(row(&p)), tail.distribution(row(&q)));
                prop_assert!((read(listed)[0] - whole).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn distillation_does_not_depend_on_the_cut((lesson, cuts) in lessons().prop_flat_map(|lesson| {
        let tokens = lesson.rows.len();
        (Just(lesson), prop::collection::vec(0usize..2, tokens))
    })) {
        let all: Vec<usize> = (0..lesson.rows.len()).collect();
        let part = |p| all.iter().copied().filter(|t| cuts[*t] == p).collect();
        let parts = [part(0), part(1)];
        for aggregation in aggregations() {
            for tail in tails() {
                for divergence in divergences() {
                    let loss = DistillationLoss { divergence, tail, aggregation };
                    let whole = evaluate_distillation(&lesson, loss, std::slice::from_ref(&all));
                    let cut = evaluate_distillation(&lesson, loss, &parts);
                    close(&[cut.0], &[whole.0]);
                    close(&cut.1, &whole.1);
                    for m in &whole.2 {
                        close(&[metric(&cut.2, m.name())], &[m.value()]);
                    }
                }
            }
        }
    }

    #[test]
    fn distillation_gradients_are_those_of_finite_differences(lesson in lessons(), at in any::<prop::sample::Index>()) {
        const STEP: f64 = 1e-6;
        let at = at.index(lesson.student.len());
        let all: Vec<Vec<usize>> = vec![(0..lesson.rows.len()).collect()];
        for tail in tails() {
            for divergence in divergences() {
                let loss = DistillationLoss { divergence, tail, aggregation: Aggregation::SeqMeanTokenMean };
                let grad = evaluate_distillation(&lesson, loss, &all).1[at];
                let moved = |step: f64| {
                    let mut lesson = lesson.clone();
                    lesson.student[at] += step;
                    evaluate_distillation(&lesson, loss, &all).0
                };
                let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                prop_assert!(is_slope(grad, slope, 1e-6), "{:?}: {} differs from {}", divergence, grad, slope);
            }
        }
    }
}
