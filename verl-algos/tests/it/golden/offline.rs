//! The functions of golden cases for offline training.

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde_json::{Map, Value};
use verl_algos::ilql::{IlqlBatch, IlqlDecoding, IlqlLoss, IlqlMicroBatch, TargetSync};
use verl_algos::losses::MetricSum;
use verl_algos::{Counts, Ragged};

use super::cases::{Answer, Case, json, number};
use super::functions::{Outcome, object, read};

/// The answer to a case; `None` if its function is not implemented here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        "ilql" => ilql(case, dtype),
        "ilql_decoding" => decoding(case, dtype),
        "ilql_target_sync" => target_sync(case, dtype),
        _ => return None,
    };
    Some(answer.map_err(|error| error.to_string()))
}

/// All numbers of a nested list.
fn flat(value: &Value) -> Vec<f64> {
    match value.as_array() {
        Some(list) => list.iter().flat_map(flat).collect(),
        None => vec![number(value).expect("a number")],
    }
}

fn tensor<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), dtype))
}

/// A leaf that tracks its gradient.
fn leaf<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
    tensor(values, shape, dtype).autodiff().require_grad()
}

fn matrix(values: &[f64], columns: usize) -> Value {
    let rows = values.chunks(columns);
    rows.map(|row| row.iter().map(|v| json(*v)).collect::<Value>())
        .collect()
}

/// The tensors of one row of a case.
struct Row {
    micro: IlqlMicroBatch,
    /// Positions of the row's actions in its sequence.
    positions: Vec<usize>,
    vocab: usize,
}

impl Row {
    fn new(case: &Case, batch: &IlqlBatch, b: usize, dtype: DType) -> Row {
        let lists = |key: &str| case.get(key).and_then(Value::as_array).expect("a list");
        let tokens = batch.actions.row(b);
        let positions = case.rows("action_positions").expect("positions");
        let positions: Vec<usize> = positions.row(b).iter().map(|p| *p as usize).collect();
        let logits = &lists("logits")[b];
        let vocab = flat(&logits[0]).len();
        let shape = [tokens.len(), vocab];
        let at_actions = positions.iter().flat_map(|p| flat(&logits[*p]));
        let taken = |q: &Value| -> Vec<f64> {
            let rows = flat(&q[b]);
            let each = tokens.iter().enumerate();
            each.map(|(t, a)| rows[t * vocab + *a as usize]).collect()
        };
        let qs = lists("qs").iter();
        let target_qs = lists("target_qs").iter();
        let values = flat(&lists("values")[b]);
        let states = values.len();
        Row {
            micro: IlqlMicroBatch {
                rows: vec![b],
                qs: qs.map(|q| leaf(flat(&q[b]), shape, dtype)).collect(),
                target_qs: target_qs
                    .map(|q| tensor(taken(q), [tokens.len()], dtype))
                    .collect(),
                values: leaf(values, [states], dtype),
                logits: leaf(at_actions.collect(), shape, dtype),
            },
            positions,
            vocab,
        }
    }

    /// Gradient of the logits of the row's entire sequence.
    fn sequence_gradient(&self, at_actions: &[f64], length: usize) -> Value {
        let mut rows = vec![vec![0.0; self.vocab]; length];
        for (position, own) in self.positions.iter().zip(at_actions.chunks(self.vocab)) {
            rows[*position] = own.to_vec();
        }
        matrix(&rows.concat(), self.vocab)
    }
}

/// Loss and gradients from one micro-batch per row, so that the parts have to add up. Rows keep their states after the
/// end.
fn ilql(case: &Case, dtype: DType) -> Outcome {
    let rows = |key: &str| case.rows(key).expect("rows");
    let tokens = rows("actions").map(|_, _, a| a as u32);
    let batch = IlqlBatch {
        actions: tokens,
        rewards: rows("rewards"),
        alive: rows("alive").map(|_, _, c| c != 0.0),
        counts: Counts::LOCAL,
    };
    let default = IlqlLoss::default();
    let loss = IlqlLoss {
        gamma: case.number_or("gamma", default.gamma),
        tau: case.number_or("tau", default.tau),
        beta: case.number_or("beta", default.beta),
        cql_scale: case.number_or("cql_scale", default.cql_scale),
        awac_scale: case.number_or("awac_scale", default.awac_scale),
    };
    let prepared = loss.prepare(&batch)?;
    let heads = case.get("qs").and_then(Value::as_array).expect("heads");
    let logits = case
        .get("logits")
        .and_then(Value::as_array)
        .expect("logits");
    let mut total = 0.0;
    let mut metrics = Vec::new();
    let mut grad_qs = vec![Vec::new(); heads.len()];
    let (mut grad_values, mut grad_logits) = (Vec::new(), Vec::new());
    for (b, sequence) in logits.iter().enumerate() {
        let row = Row::new(case, &batch, b, dtype);
        let partial = prepared.loss(&row.micro)?;
        MetricSum::add_to(&mut metrics, partial.read_metrics()?);
        total += read(partial.loss.clone())[0];
        let grads = partial.loss.backward();
        // A row without actions excludes the heads from the graph.
        let of = |grad: Option<Vec<f64>>, len: usize| grad.unwrap_or_else(|| vec![0.0; len]);
        let size = row.positions.len() * row.vocab;
        for (head, q) in row.micro.qs.iter().enumerate() {
            let grad = of(q.grad(&grads).map(read), size);
            grad_qs[head].push(matrix(&grad, row.vocab));
        }
        let grad = row.micro.values.grad(&grads).map(read).expect("a gradient");
        grad_values.push(grad.into_iter().map(json).collect::<Value>());
        let grad = of(row.micro.logits.grad(&grads).map(read), size);
        let length = sequence.as_array().expect("a sequence").len();
        grad_logits.push(row.sequence_gradient(&grad, length));
    }
    let mut answer = Map::new();
    for (key, name) in [
        ("loss_q", "q_loss"),
        ("loss_v", "v_loss"),
        ("loss_cql", "cql_loss"),
        ("loss_awac", "awac_loss"),
    ] {
        let metric = metrics.iter().find(|m| m.name() == name);
        answer.insert(key.to_owned(), json(metric.map_or(0.0, MetricSum::value)));
    }
    answer.insert("loss".to_owned(), json(total));
    let grad_qs = grad_qs.into_iter().map(Value::from).collect();
    answer.insert("grad_qs".to_owned(), grad_qs);
    answer.insert("grad_values".to_owned(), grad_values.into());
    answer.insert("grad_logits".to_owned(), grad_logits.into());
    Ok(Value::Object(answer))
}

fn decoding(case: &Case, dtype: DType) -> Outcome {
    let default = IlqlDecoding::default();
    let decoding = IlqlDecoding {
        beta: case.number_or("beta_gen", default.beta),
        top_k: case.count("top_k").unwrap_or(default.top_k),
        temperature: case.number_or("temperature", default.temperature),
    };
    let logits: Ragged<f64> = case.rows("logits").expect("logits");
    let shape = [logits.num_rows(), logits.row(0).len()];
    let [rows, vocab] = shape;
    let heads = case.get("target_qs").and_then(Value::as_array);
    let heads = heads.expect("heads").iter();
    let target_qs: Vec<_> = heads.map(|q| tensor(flat(q), shape, dtype)).collect();
    let logits = tensor(logits.values().to_vec(), shape, dtype);
    let values = tensor(case.numbers("values"), [rows], dtype);
    let best = decoding.best(logits.clone(), &target_qs, values.clone())?;
    let best: Vec<i64> = best.try_into_vec_as().expect("tokens");
    let probabilities = decoding.probabilities(logits, &target_qs, values)?;
    let probabilities = read(probabilities);
    if decoding.temperature == 0.0 {
        for (row, best) in probabilities.chunks(vocab).zip(&best) {
            assert_eq!(row[*best as usize], 1.0, "all mass on the best token");
        }
    }
    Ok(object([
        ("probs", matrix(&probabilities, vocab)),
        ("argmax", best.into_iter().map(Value::from).collect()),
    ]))
}

fn target_sync(case: &Case, dtype: DType) -> Outcome {
    let default = TargetSync::default();
    let sync = TargetSync {
        alpha: case.number_or("alpha", default.alpha),
        ..default
    };
    let weights = case.numbers("weights");
    let len = weights.len();
    let mut plain = case.numbers("target_weights");
    let mut targets = tensor(plain.clone(), [len], dtype);
    let mut answers = Vec::new();
    for _ in 0..case.count("times").unwrap_or(1) {
        plain = sync.values(&plain, &weights)?;
        targets = sync.tensor(targets, tensor(weights.clone(), [len], dtype))?;
        let values = read(targets.clone());
        for (tensor, plain) in values.iter().zip(&plain) {
            assert!((tensor - plain).abs() < 1e-6, "the two forms differ");
        }
        answers.push(values.into_iter().map(json).collect::<Value>());
    }
    Ok(object([("target_weights", answers.into())]))
}
