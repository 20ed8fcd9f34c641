//! The functions of golden cases for preference losses.
//!
//! Row 2i of a mini-batch is the chosen and row 2i + 1 the rejected response of pair i. Losses and gradients are those
//! of one micro-batch with all rows; losses of single pairs are those of micro-batches with one pair each.

use burn::tensor::{DType, Gradients, Int, Tensor, TensorData};
use serde_json::Value;
use verl_algos::log_probs::log_probs_from_logits;
use verl_algos::losses::{
    Cpo, CpoLoss, Dpo, FDivergence, Kto, MetricSum, Objective, OrpoOdds, PreferenceLoss,
    PreferenceLossName, RewardModelLoss, RowLoss, kl_baseline, orpo,
};
use verl_algos::{Aggregation, AlgoError, Counts, CutUnit, MicroBatch, MiniBatch, Ragged, masked};

use super::cases::{Answer, Case, json, json_rows, number};
use super::functions::{Outcome, gradient, leaf, object, read};

/// The answer to a case; `None` if its function is not implemented here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        name if name.starts_with("dpo_") => dpo(case, dtype),
        "kto_kto" => kto(case, dtype, Kto::default()),
        "kto_apo_zero_unpaired" => kto(case, dtype, Kto::apo_zero_unpaired()),
        "orpo_odds" => orpo_odds(case, dtype),
        "orpo" => from_logits(case, dtype, &orpo(beta(case))),
        name if name.ends_with("_from_logits") => {
            let cpo_alpha = case.number_or("cpo_alpha", 1.0);
            from_logits(case, dtype, &cpo_loss(case).objective(cpo_alpha))
        }
        name if name.starts_with("cpo_") => cpo(case, dtype),
        "reward_model" => reward_model(case, dtype),
        _ => return None,
    };
    Some(answer.map_err(|error| error.to_string()))
}

/// β; all losses here have the same default.
fn beta(case: &Case) -> f64 {
    case.number_or("beta", Dpo::default().beta)
}

fn of_rows(loss: impl RowLoss + 'static) -> Objective {
    Objective::new(Aggregation::default()).with_rows(1.0, loss)
}

/// Results of an objective for a mini-batch.
struct Evaluated {
    loss: f64,
    grad: Vec<f64>,
    metrics: Vec<MetricSum>,
}

impl Evaluated {
    fn metric(&self, name: &str) -> Option<Value> {
        let found = self.metrics.iter().find(|m| m.name() == name)?;
        Some(json(found.value()))
    }

    /// Metrics under the names of the file.
    fn reported(&self, names: &[(&'static str, &str)]) -> Vec<(&'static str, Value)> {
        let each = names.iter();
        each.filter_map(|(theirs, ours)| Some((*theirs, self.metric(ours)?)))
            .collect()
    }
}

/// A mini-batch, and the model's outputs for its tokens.
struct Tokens {
    batch: MiniBatch,
    log_probs: Vec<f64>,
    log_sum_sq_probs: Option<Vec<f64>>,
    dtype: DType,
}

impl Tokens {
    fn new(rows: Vec<usize>, num_rows: usize, log_probs: Vec<f64>, dtype: DType) -> Tokens {
        let mut batch = MiniBatch::new(rows);
        batch.counts = Counts::declared(log_probs.len(), num_rows);
        Tokens {
            batch,
            log_probs,
            log_sum_sq_probs: None,
            dtype,
        }
    }

    /// The tokens at `positions` as a micro-batch; log-probs also serve as values, for losses that read those.
    fn evaluate(
        &self,
        objective: &Objective,
        positions: Vec<usize>,
    ) -> Result<Evaluated, AlgoError> {
        let of = |column: &[f64]| {
            let values = positions.iter().map(|&t| column[t]).collect();
            leaf(values, self.dtype)
        };
        let log_probs = of(&self.log_probs);
        let mut micro = MicroBatch::new(positions.clone(), log_probs.clone());
        micro.values = Some(log_probs.clone());
        micro.log_sum_sq_probs = self.log_sum_sq_probs.as_deref().map(of);
        let partial = objective.prepare(&self.batch)?.loss(&micro)?;
        Ok(Evaluated {
            metrics: partial.read_metrics()?,
            grad: gradient(&log_probs, &partial.loss),
            loss: read(partial.loss)[0],
        })
    }

    fn whole(&self, objective: &Objective) -> Result<Evaluated, AlgoError> {
        self.evaluate(objective, (0..self.log_probs.len()).collect())
    }

    /// Each pair by itself.
    fn pairs(&self, objective: &Objective) -> Result<Vec<Evaluated>, AlgoError> {
        let num_pairs = self.batch.counts.sequences.expect("declared") / 2;
        let positions = |pair: usize| {
            let all = 0..self.log_probs.len();
            all.filter(|&t| self.batch.rows[t] / 2 == pair).collect()
        };
        let each = 0..num_pairs;
        each.map(|pair| self.evaluate(objective, positions(pair)))
            .collect()
    }
}

/// Losses of single pairs: their shares times the number of pairs.
fn pair_losses(pairs: &[Evaluated]) -> Value {
    let each = pairs.iter();
    each.map(|p| json(p.loss * pairs.len() as f64)).collect()
}

// ---- rows of log-probs

/// A padded array under its mask.
fn packed(case: &Case, key: &str, mask: &Ragged<bool>) -> Vec<f64> {
    let rows = case
        .rows(key)
        .unwrap_or_else(|| panic!("{}: `{key}` has no rows", case.name));
    rows.select("input", mask).expect("rows like the mask")
}

fn mask(case: &Case, key: &str) -> Ragged<bool> {
    let mask = case.rows(key).expect("a mask");
    mask.map(|_, _, m| m != 0.0)
}

/// Chosen tokens and then rejected ones; rows are numbered as pairs.
fn rows_of_pairs(chosen: &Ragged<bool>, rejected: &Ragged<bool>) -> Vec<usize> {
    let chosen = chosen.packed_rows().into_iter().map(|row| 2 * row);
    let rejected = rejected.packed_rows().into_iter().map(|row| 2 * row + 1);
    chosen.chain(rejected).collect()
}

fn dpo(case: &Case, dtype: DType) -> Outcome {
    let sides = [mask(case, "chosen_mask"), mask(case, "rejected_mask")];
    let both = |chosen: &str, rejected: &str| {
        let mut column = packed(case, chosen, &sides[0]);
        column.extend(packed(case, rejected, &sides[1]));
        column
    };
    let num_pairs = sides[0].num_rows();
    let mut tokens = Tokens::new(
        rows_of_pairs(&sides[0], &sides[1]),
        2 * num_pairs,
        both("chosen_log_probs", "rejected_log_probs"),
        dtype,
    );
    tokens.batch.ref_log_probs = Some(both("ref_chosen_log_probs", "ref_rejected_log_probs"));
    if let Some(rows) = case.rows("log_sum_sq_probs") {
        // All chosen rows, followed by all rejected ones.
        let masks = sides[0].rows().chain(sides[1].rows());
        let each = rows.rows().zip(masks).flat_map(|(row, mask)| {
            let each = row.iter().zip(mask);
            each.filter(|(_, m)| **m).map(|(v, _)| *v)
        });
        tokens.log_sum_sq_probs = Some(each.collect());
    }
    let objective = dpo_objective(case)?;
    let whole = tokens.whole(&objective)?;
    let mut answer = whole.reported(&[
        ("accuracies", "reward_accuracies"),
        ("chosen", "rewards_chosen"),
        ("margins", "reward_margins"),
        ("rejected", "rewards_rejected"),
    ]);
    if objective.cut_unit() == CutUnit::Pair {
        let pairs = tokens.pairs(&objective)?;
        let sum: f64 = pairs.iter().map(|pair| pair.loss).sum();
        assert!((sum - whole.loss).abs() <= 1e-5 * whole.loss.abs().max(1.0));
        answer.push(("pair_losses", pair_losses(&pairs)));
    }
    let (chosen, rejected) = whole.grad.split_at(sides[0].counts().iter().sum::<usize>());
    answer.extend([
        ("loss", json(whole.loss)),
        (
            "grad_chosen_log_probs",
            json_rows(&sides[0].scatter(chosen)?),
        ),
        (
            "grad_rejected_log_probs",
            json_rows(&sides[1].scatter(rejected)?),
        ),
    ]);
    Ok(object(answer))
}

/// The loss of a case, or its mixture.
fn dpo_objective(case: &Case) -> Result<Objective, AlgoError> {
    let divergence = match case.get("f_divergence") {
        Some(_) => FDivergence::named(case.text("f_divergence").parse()?, case.number("alpha"))?,
        None => FDivergence::default(),
    };
    let dpo = Dpo {
        beta: beta(case),
        divergence,
        ld_alpha: case.number("ld_alpha"),
        wpo: case.get("log_sum_sq_probs").is_some(),
        ..Dpo::default()
    };
    let named = |name: &Value| -> Result<PreferenceLoss, AlgoError> {
        let name: PreferenceLossName = name.as_str().expect("a name").parse()?;
        let loss = match PreferenceLoss::from(name) {
            PreferenceLoss::DiscoPop { tau } => PreferenceLoss::DiscoPop {
                tau: case.number_or("discopop_tau", tau),
            },
            loss => loss,
        };
        // TRL passes ε to every loss, and those without label smoothing ignore it.
        match case
            .number("label_smoothing")
            .map(|epsilon| loss.with_label_smoothing(epsilon))
        {
            Some(Err(AlgoError::Conflict { .. })) | None => Ok(loss),
            Some(smoothed) => smoothed,
        }
    };
    let names = case.get("loss_type").expect("a loss");
    let names = match names.as_array() {
        Some(names) => names.clone(),
        None => vec![names.clone()],
    };
    let weights = match case.get("loss_weights") {
        Some(_) => case.numbers("loss_weights"),
        None => vec![1.0; names.len()],
    };
    let losses = names.iter().zip(weights);
    let losses: Result<Vec<_>, _> = losses.map(|(name, w)| Ok((w, named(name)?))).collect();
    Ok(dpo.mixture(&losses?))
}

fn kto(case: &Case, dtype: DType, kto: Kto) -> Outcome {
    let mask = case.mask();
    let labels = case.get("labels").and_then(Value::as_array);
    let labels: Vec<bool> = labels
        .expect("labels")
        .iter()
        .map(|label| number(label).expect("a label") != 0.0)
        .collect();
    let log_probs = packed(case, "log_probs", &mask);
    let mut tokens = Tokens::new(mask.packed_rows(), labels.len(), log_probs, dtype);
    tokens.batch.ref_log_probs = Some(packed(case, "ref_log_probs", &mask));
    tokens.batch.preferences.desirable = Some(labels);
    if case.get("kl_mask").is_some() {
        tokens.batch.preferences.kl_baseline = Some(kto_baseline(case)?);
    }
    let weight = |key: &str| case.number(key).unwrap_or(1.0);
    let objective = of_rows(Kto {
        beta: beta(case),
        desirable_weight: weight("desirable_weight"),
        undesirable_weight: weight("undesirable_weight"),
        ..kto
    });
    let whole = tokens.whole(&objective)?;
    let rows = (0..mask.num_rows()).filter(|&row| tokens.batch.rows.contains(&row));
    let alone: Result<Vec<_>, _> = rows
        .map(|row| {
            let all = 0..tokens.log_probs.len();
            let own = all.filter(|&t| tokens.batch.rows[t] == row).collect();
            Ok::<f64, AlgoError>(tokens.evaluate(&objective, own)?.loss)
        })
        .collect();
    let sum: f64 = alone?.iter().sum();
    assert!((sum - whole.loss).abs() <= 1e-5 * whole.loss.abs().max(1.0));
    let mut answer = whole.reported(&[
        ("rewards_chosen", "rewards_chosen"),
        ("rewards_rejected", "rewards_rejected"),
        ("z0", "kto_kl"),
    ]);
    answer.push(("loss", json(whole.loss)));
    answer.push(("grad_log_probs", json_rows(&mask.scatter(&whole.grad)?)));
    Ok(object(answer))
}

/// z₀ from the case's mismatched rows.
fn kto_baseline(case: &Case) -> Result<f64, AlgoError> {
    let mask = mask(case, "kl_mask");
    let now = packed(case, "kl_log_probs", &mask);
    let reference = packed(case, "ref_kl_log_probs", &mask);
    let each = now.iter().zip(&reference);
    let ratios: Vec<f64> = each.map(|(l, r)| l - r).collect();
    kl_baseline(&masked::row_sums(
        &ratios,
        &mask.packed_rows(),
        mask.num_rows(),
    )?)
}

// ---- one number per row

/// Pairs of rows with one token each, whose log-prob is the row's sum and mean.
fn single_tokens(case: &Case, chosen: &str, rejected: &str, dtype: DType) -> Tokens {
    let (chosen, rejected) = (case.numbers(chosen), case.numbers(rejected));
    let num_pairs = chosen.len();
    let each = chosen.into_iter().zip(rejected);
    let numbers = each.flat_map(|(c, r)| [c, r]).collect();
    Tokens::new((0..2 * num_pairs).collect(), 2 * num_pairs, numbers, dtype)
}

fn every_second(numbers: &[f64], first: usize) -> Value {
    let own = numbers.iter().skip(first).step_by(2);
    own.map(|v| json(*v)).collect()
}

fn orpo_odds(case: &Case, dtype: DType) -> Outcome {
    let names = ["chosen_mean_log_probs", "rejected_mean_log_probs"];
    let tokens = single_tokens(case, names[0], names[1], dtype);
    let objective = of_rows(OrpoOdds { beta: beta(case) });
    let whole = tokens.whole(&objective)?;
    let mut answer = whole.reported(&[("log_odds_mean", "log_odds")]);
    answer.extend([
        ("loss", json(whole.loss)),
        ("pair_losses", pair_losses(&tokens.pairs(&objective)?)),
        ("grad_chosen_mean_log_probs", every_second(&whole.grad, 0)),
        ("grad_rejected_mean_log_probs", every_second(&whole.grad, 1)),
    ]);
    Ok(object(answer))
}

fn cpo_loss(case: &Case) -> Cpo {
    // β and γ default to TRL's values; the library's defaults are within the ranges of SimPO's paper.
    let gamma = case.number_or("simpo_gamma", 0.5);
    let loss = match case.text("loss_type") {
        "hinge" => CpoLoss::Hinge,
        "ipo" => CpoLoss::Ipo,
        "sigmoid" => CpoLoss::Sigmoid,
        "simpo" => CpoLoss::Simpo { gamma },
        name => panic!("unknown loss {name}"),
    };
    Cpo {
        loss,
        beta: beta(case),
        label_smoothing: case.number("label_smoothing").unwrap_or(0.0),
        alphapo_alpha: case.number("alphapo_alpha"),
    }
}

fn cpo(case: &Case, dtype: DType) -> Outcome {
    let tokens = single_tokens(case, "chosen_logps", "rejected_logps", dtype);
    let objective = of_rows(cpo_loss(case));
    let whole = tokens.whole(&objective)?;
    let pairs = tokens.pairs(&objective)?;
    let of_pairs = |name: &str| -> Value {
        let each = pairs.iter().map(|pair| pair.metric(name));
        each.map(|value| value.expect("a metric")).collect()
    };
    Ok(object([
        ("loss", json(whole.loss)),
        ("pair_losses", pair_losses(&pairs)),
        ("rewards_chosen", of_pairs("rewards_chosen")),
        ("rewards_rejected", of_pairs("rewards_rejected")),
        ("grad_chosen_logps", every_second(&whole.grad, 0)),
        ("grad_rejected_logps", every_second(&whole.grad, 1)),
    ]))
}

fn reward_model(case: &Case, dtype: DType) -> Outcome {
    let mut tokens = single_tokens(case, "chosen_rewards", "rejected_rewards", dtype);
    tokens.batch.preferences.margins = case.get("margins").map(|_| case.numbers("margins"));
    let loss = RewardModelLoss {
        center_coefficient: case.number("center_coefficient").unwrap_or(0.0),
    };
    let whole = tokens.whole(&of_rows(loss))?;
    let mut answer = whole.reported(&[
        ("accuracy", "reward_accuracies"),
        ("mean_margin", "reward_margins"),
    ]);
    let side = |name: &str| whole.metric(name).as_ref().and_then(number).expect("one");
    let mean = (side("rewards_chosen") + side("rewards_rejected")) / 2.0;
    answer.extend([
        ("loss", json(whole.loss)),
        ("mean_reward", json(mean)),
        ("grad_chosen_rewards", every_second(&whole.grad, 0)),
        ("grad_rejected_rewards", every_second(&whole.grad, 1)),
    ]);
    Ok(object(answer))
}

// ---- logits

/// Logits `[B, T, V]` of one side; those before response tokens are a leaf `[N · V]`.
struct SideLogits {
    leaf: Tensor<1>,
    targets: Tensor<1, Int>,
    /// Whether the next token is a response token.
    mask: Ragged<bool>,
    vocab: usize,
}

impl SideLogits {
    fn new(case: &Case, side: &str, dtype: DType) -> SideLogits {
        let response = mask(case, &format!("{side}_response_mask"));
        let mask = response.map(|b, t, _| response.row(b).get(t + 1) == Some(&true));
        let ids = case.rows(&format!("{side}_ids")).expect("ids");
        let next = ids.map(|b, t, _| ids.row(b).get(t + 1).copied().unwrap_or(0.0));
        let targets = next.select("ids", &mask).expect("rows like the mask");
        let targets: Vec<i64> = targets.iter().map(|id| *id as i64).collect();
        let logits = case.get(&format!("{side}_logits"));
        let logits = logits.and_then(Value::as_array).expect("logits");
        let tokens = logits.iter().flat_map(|row| row.as_array().expect("row"));
        let kept = tokens.zip(mask.values()).filter(|(_, m)| **m);
        let values: Vec<f64> = kept
            .flat_map(|(token, _)| token.as_array().expect("logits"))
            .map(|v| number(v).expect("a number"))
            .collect();
        let n = targets.len();
        let vocab = logits[0][0].as_array().map_or(0, Vec::len);
        let leaf = leaf(values, dtype);
        let targets = Tensor::from_data(TensorData::new(targets, [n]), &leaf.device());
        SideLogits {
            leaf,
            targets,
            mask,
            vocab,
        }
    }

    fn log_probs(&self) -> Result<Tensor<1>, AlgoError> {
        let logits = self.leaf.clone().reshape([-1, self.vocab as i64]);
        log_probs_from_logits(logits, self.targets.clone(), 1.0)
    }

    /// Gradient as `[B, T, V]`, 0 where no response token follows.
    fn gradient(&self, gradients: &Gradients) -> Value {
        let grad = self.leaf.grad(gradients).map(read).unwrap_or_default();
        let mut tokens = grad.chunks(self.vocab.max(1));
        let zeros = vec![0.0; self.vocab];
        let mut token = |action: &bool| -> Value {
            let own = if *action {
                tokens.next().expect("a token")
            } else {
                &zeros
            };
            own.iter().map(|v| json(*v)).collect()
        };
        let rows = self.mask.rows();
        rows.map(|row| row.iter().map(&mut token).collect::<Value>())
            .collect()
    }
}

fn from_logits(case: &Case, dtype: DType, objective: &Objective) -> Outcome {
    let chosen = SideLogits::new(case, "chosen", dtype);
    let rejected = SideLogits::new(case, "rejected", dtype);
    let log_probs = Tensor::cat(vec![chosen.log_probs()?, rejected.log_probs()?], 0);
    let mut batch = MiniBatch::new(rows_of_pairs(&chosen.mask, &rejected.mask));
    batch.counts = Counts::declared(batch.num_tokens(), 2 * chosen.mask.num_rows());
    let prepared = objective.prepare(&batch)?;
    let partial = prepared.loss(&batch.whole(log_probs, None))?;
    let whole = Evaluated {
        loss: read(partial.loss.clone())[0],
        grad: Vec::new(),
        metrics: partial.read_metrics()?,
    };
    let mut answer = whole.reported(&[
        ("log_odds_chosen", "log_odds"),
        ("logps_chosen", "log_probs_chosen"),
        ("logps_rejected", "log_probs_rejected"),
        ("nll_loss", "chosen_nll"),
        ("rewards_chosen", "rewards_chosen"),
        ("rewards_margins", "reward_margins"),
        ("rewards_rejected", "rewards_rejected"),
    ]);
    if whole.metric("chosen_nll").is_none() {
        answer.push(("nll_loss", json(0.0)));
    }
    if let Some(odds) = whole.metric("orpo_odds").as_ref().and_then(number) {
        // Mean of log σ(log odds).
        answer.push(("log_odds_ratio", json(-odds / beta(case))));
    }
    let gradients = partial.loss.backward();
    answer.extend([
        ("loss", json(whole.loss)),
        ("grad_chosen_logits", chosen.gradient(&gradients)),
        ("grad_rejected_logits", rejected.gradient(&gradients)),
    ]);
    Ok(object(answer))
}
