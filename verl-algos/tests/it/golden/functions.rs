//! The functions of golden cases.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use serde_json::{Map, Value};
use verl_algos::advantages::{
    AdvantageEstimator, AdvantageInputs, ESTIMATORS, Gae, Gpg, Grpo, GrpoPassK, Opo, ReMax,
    ReinforcePlusPlus, ReinforcePlusPlusBaseline, Rloo,
};
use verl_algos::kl::{KlEstimator, KlEstimatorName, kl_in_reward};
use verl_algos::kl_control::KlController;
use verl_algos::log_probs::{entropy_from_logits, log_probs_from_logits};
use verl_algos::losses::{
    CispoLoss, ClippedPolicyLoss, GpgLoss, GspoLoss, KlLoss, MetricId, MetricSum, Objective,
    PerToken, PreparedTokens, TokenLoss,
};
use verl_algos::{Aggregation, AlgoError, Counts, MicroBatch, MiniBatch, Ragged, masked};

use super::cases::{Answer, Case, json, json_rows, number};
use super::{advantages, offline, policy, preferences};

/// The answer to a case; `None` if its function is not implemented here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        "grpo" | "grpo_vectorized" | "dr_grpo" | "dr_grpo_vectorized" => {
            let std = case.flag("norm_adv_by_std_in_grpo", !case.function.starts_with("dr_"));
            let epsilon = case.number("epsilon").or(Grpo::default().epsilon);
            let epsilon = epsilon.filter(|_| std);
            estimate(case, &Grpo { epsilon })
        }
        "rloo" | "rloo_vectorized" => estimate(case, &Rloo),
        "opo" => estimate(case, &Opo),
        "gpg_advantage" => {
            let f_norm = case.number_or("f_norm", Gpg::default().f_norm);
            estimate(case, &Gpg { f_norm })
        }
        "grpo_passk" => {
            let epsilon = case.number("epsilon").or(GrpoPassK::default().epsilon);
            let epsilon = epsilon.filter(|_| case.flag("norm_adv_by_std_in_grpo", true));
            estimate(case, &GrpoPassK { epsilon })
        }
        "reinforce_plus_plus" => {
            let gamma = case.number_or("gamma", ReinforcePlusPlus::default().gamma);
            estimate(case, &ReinforcePlusPlus { gamma })
        }
        "reinforce_plus_plus_baseline" => estimate(case, &ReinforcePlusPlusBaseline),
        "remax" => estimate(case, &ReMax),
        "gae" => gae(case),
        "vanilla" => vanilla(case, dtype),
        "gspo" => {
            let (clip_low, clip_high) = clips(case);
            let loss = GspoLoss {
                clip_low,
                clip_high,
            };
            token_loss(case, dtype, "log_probs", loss)
        }
        "cispo" => {
            let (clip_low, clip_high) = clips(case);
            let loss = CispoLoss {
                clip_low,
                clip_high,
            };
            token_loss(case, dtype, "log_probs", loss)
        }
        "gpg_loss" => token_loss(case, dtype, "log_probs", GpgLoss),
        "agg_loss" => agg_loss(case, dtype),
        "kl_penalty" | "kl_penalty_trl" => kl_penalty(case, dtype),
        "kl_in_reward" => reward_with_kl(case),
        "adaptive_kl" => adaptive_kl(case),
        "masked" => masked_ops(case),
        "entropy" => entropy(case, dtype),
        "entropy_and_log_probs_trl" => entropy_and_log_probs(case, dtype),
        "log_probs_from_logits" => log_probs(case, dtype),
        _ => {
            let families = [advantages::run, offline::run, policy::run, preferences::run];
            return families.iter().find_map(|run| run(case, dtype));
        }
    };
    Some(answer.map_err(|error| error.to_string()))
}

pub type Outcome = Result<Value, AlgoError>;

pub fn object(entries: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    let entries = entries.into_iter();
    Value::Object(entries.map(|(k, v)| (k.to_owned(), v)).collect())
}

pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f64>().expect("numbers")
}

/// A leaf that tracks its gradient.
pub fn leaf(values: Vec<f64>, dtype: DType) -> Tensor<1> {
    let len = values.len();
    let data = TensorData::new(values, [len]);
    Tensor::from_data(data, (&Device::flex(), dtype))
        .autodiff()
        .require_grad()
}

/// Gradient of a loss with respect to a leaf; empty for an empty leaf.
pub fn gradient<const D: usize>(leaf: &Tensor<D>, loss: &Tensor<1>) -> Vec<f64> {
    if leaf.dims().contains(&0) {
        return Vec::new();
    }
    let grads = loss.backward();
    leaf.grad(&grads).map(read).expect("a gradient")
}

// ---- advantages

pub fn estimate(case: &Case, estimator: &dyn AdvantageEstimator) -> Outcome {
    let mask = case.mask();
    let rewards = case.rows("token_level_rewards");
    let components = case.get("component_scores").and_then(Value::as_array);
    let components: Option<Vec<Vec<Option<f64>>>> = components.map(|components| {
        let scores = |row: &Value| row.as_array().expect("scores").iter().map(number).collect();
        components.iter().map(scores).collect()
    });
    let old_log_probs = case.rows("old_log_probs");
    let sum_pi_squared = case.rows("sum_pi_squared");
    let rollout_weights = case.rows("rollout_is_weights");
    let groups = case.groups();
    let values = case.rows("values");
    let baselines = case.get("reward_baselines");
    let baselines = baselines.map(|_| case.numbers("reward_baselines"));
    let mut inputs = AdvantageInputs::new(&mask);
    inputs.token_level_rewards = rewards.as_ref();
    inputs.groups = groups.as_deref();
    inputs.values = values.as_ref();
    inputs.reward_baselines = baselines.as_deref();
    inputs.reward_components = components.as_deref();
    inputs.old_log_probs = old_log_probs.as_ref();
    inputs.sum_pi_squared = sum_pi_squared.as_ref();
    inputs.rollout_weights = rollout_weights.as_ref();
    let result = estimator.estimate(&inputs)?;
    let mut answer = vec![("advantages", json_rows(&result.advantages))];
    if let Some(returns) = &result.returns {
        answer.push(("returns", json_rows(returns)));
    }
    assert!(ESTIMATORS.iter().any(|(name, _)| *name == estimator.name()));
    Ok(object(answer))
}

fn gae(case: &Case) -> Outcome {
    let mut gae = Gae {
        gamma: case.number_or("gamma", Gae::default().gamma),
        gae_lambda: case.number_or("lam", Gae::default().gae_lambda),
        whiten: false,
    };
    let raw = estimate(case, &gae)?;
    gae.whiten = true;
    let mut answer = estimate(case, &gae)?;
    answer["advantages_raw"] = raw["advantages"].clone();
    Ok(answer)
}

// ---- losses

pub fn aggregation(case: &Case) -> Result<Aggregation, AlgoError> {
    // The reference falls back to the width of the array.
    let width = case.mask().rows().map(<[bool]>::len).max().unwrap_or(1);
    let factor = case.number("loss_scale_factor").unwrap_or(width as f64);
    // GSPO's is the mean over rows unless another one is declared.
    let default = match case.function.as_str() {
        "gspo" => "seq-mean-token-mean",
        _ => "token-mean",
    };
    Aggregation::named(
        case.text_or("loss_agg_mode", default).parse()?,
        Some(factor),
    )
}

pub fn mini_batch(case: &Case) -> MiniBatch {
    MiniBatch {
        counts: Counts {
            tokens: case.count("batch_num_tokens"),
            sequences: case.count("global_batch_size"),
            dp_size: case.count("dp_size").unwrap_or(1),
        },
        old_log_probs: case.packed("old_log_probs"),
        advantages: case.packed("advantages"),
        ref_log_probs: case.packed("ref_log_probs"),
        rollout_weights: case.packed("rollout_is_weights"),
        ..MiniBatch::new(case.mask().packed_rows())
    }
}

/// Row lists of the micro-batches; a single one with all rows if the case has none.
fn parts(case: &Case, num_rows: usize) -> Vec<Vec<usize>> {
    let Some(parts) = case.get("parts").and_then(Value::as_array) else {
        return vec![(0..num_rows).collect()];
    };
    let rows = |part: &Value| part.as_array().expect("rows").clone();
    parts
        .iter()
        .map(|part| {
            rows(part)
                .iter()
                .map(|r| r.as_u64().expect("a row") as usize)
                .collect()
        })
        .collect()
}

/// Loss, gradient and metrics of an objective with one term.
pub fn token_loss(
    case: &Case,
    dtype: DType,
    input: &str,
    loss: impl TokenLoss + 'static,
) -> Outcome {
    let objective = Objective::new(aggregation(case)?).with(1.0, loss);
    evaluate(case, dtype, input, &objective, &mini_batch(case))
}

/// Loss, gradient and metrics of an objective over `input`, and over `entropies` if the case has them.
pub fn evaluate(
    case: &Case,
    dtype: DType,
    input: &str,
    objective: &Objective,
    batch: &MiniBatch,
) -> Outcome {
    let mask = case.mask();
    let values = case.packed(input).expect("the input");
    let entropies = case.packed("entropies").unwrap_or_else(|| values.clone());
    let prepared = objective.prepare(batch)?;
    let mut grad = vec![0.0; values.len()];
    let mut part_losses = Vec::new();
    let mut metrics = Vec::new();
    for part in parts(case, mask.num_rows()) {
        let in_part = |t: &usize| part.contains(&batch.rows[*t]);
        let tokens: Vec<usize> = (0..values.len()).filter(in_part).collect();
        let own = |column: &[f64]| leaf(tokens.iter().map(|&t| column[t]).collect(), dtype);
        let leaf = own(&values);
        let micro = MicroBatch {
            values: Some(leaf.clone()),
            entropies: Some(own(&entropies)),
            ..MicroBatch::new(tokens.clone(), leaf.clone())
        };
        let partial = prepared.loss(&micro)?;
        MetricSum::add_to(&mut metrics, partial.read_metrics()?);
        part_losses.push(read(partial.loss.clone())[0]);
        if !tokens.is_empty() {
            let own = gradient(&leaf, &partial.loss);
            tokens.iter().zip(own).for_each(|(&t, g)| grad[t] = g);
        }
    }
    let total = json(part_losses.iter().sum());
    let grad = json_rows(&mask.scatter(&grad)?);
    let mut answer = zero_metrics(values.len());
    for metric in metrics {
        answer.insert(metric.name().to_owned(), json(metric.value()));
    }
    answer.insert("loss".to_owned(), total.clone());
    answer.insert("value".to_owned(), total);
    answer.insert(format!("grad_{input}"), grad);
    answer.insert(
        "part_losses".to_owned(),
        part_losses.into_iter().map(json).collect(),
    );
    Ok(Value::Object(answer))
}

/// Numbers that the references report as 0: shares that a loss does not have, and every metric without tokens.
pub fn zero_metrics(num_tokens: usize) -> Map<String, Value> {
    let always = ["pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "vf_clipfrac"];
    let without_tokens = [
        "cispo_clip_ratio",
        "clip_ratio_high_max",
        "clip_ratio_high_mean",
        "clip_ratio_low_mean",
        "clip_ratio_low_min",
        "clip_ratio_region_mean",
        "ref_kl",
        "vespo_phi_seq_mean",
    ];
    let named = without_tokens.iter().filter(|_| num_tokens == 0);
    let each = always.iter().chain(named);
    each.map(|name| ((*name).to_owned(), json(0.0))).collect()
}

/// ε_low and ε_high, which default to ε.
pub fn clips(case: &Case) -> (f64, f64) {
    let both = case.number("clip_ratio").unwrap_or(0.2);
    let side = |key: &str| case.number(key).unwrap_or(both);
    (side("clip_ratio_low"), side("clip_ratio_high"))
}

pub fn dual_clip(case: &Case) -> Option<f64> {
    let given = case.number("clip_ratio_c");
    given.or(ClippedPolicyLoss::default().dual_clip)
}

fn vanilla(case: &Case, dtype: DType) -> Outcome {
    let (clip_low, clip_high) = clips(case);
    let loss = ClippedPolicyLoss {
        clip_low,
        clip_high,
        dual_clip: dual_clip(case),
    };
    token_loss(case, dtype, "log_probs", loss)
}

/// The elementwise loss of a case, so that its aggregation runs as for any other loss.
#[derive(Debug)]
struct Given;

impl TokenLoss for Given {
    fn id(&self) -> MetricId {
        MetricId::new("given")
    }

    fn tokens(&self, tokens: &PreparedTokens<'_>) -> Result<PerToken, AlgoError> {
        Ok(PerToken {
            loss: tokens.log_probs(),
            metrics: Vec::new(),
        })
    }
}

fn agg_loss(case: &Case, dtype: DType) -> Outcome {
    token_loss(case, dtype, "loss", Given)
}

// ---- KL

fn kl_estimator(case: &Case) -> Result<KlEstimator, AlgoError> {
    let name: KlEstimatorName = case.text_or("kl_penalty", "kl").parse()?;
    Ok(name.into())
}

fn kl_penalty(case: &Case, dtype: DType) -> Outcome {
    let estimator = kl_estimator(case)?;
    let mut answer = token_loss(case, dtype, "log_probs", KlLoss { estimator })?;
    let log_probs = case.packed("log_probs").expect("log-probs");
    let reference = case.packed("ref_log_probs").expect("log-probs");
    let each = log_probs.iter().zip(&reference);
    let kl: Vec<f64> = each.map(|(l, r)| estimator.value(*l, *r)).collect();
    answer["kl"] = json_rows(&case.mask().scatter(&kl)?);
    answer["kl_mean"] = answer["ref_kl"].clone();
    Ok(answer)
}

fn reward_with_kl(case: &Case) -> Outcome {
    let coef = case.number_or("init_kl_coef", 1e-3);
    let mut controller = match case.number("horizon") {
        Some(horizon) => {
            let target = case.number_or("target_kl", 0.1);
            KlController::adaptive(coef, target, horizon)?
        }
        None => KlController::fixed(coef)?,
    };
    let rows = |key: &str| case.rows(key).expect("rows");
    let result = kl_in_reward(
        &rows("token_level_scores"),
        &rows("old_log_probs"),
        &rows("ref_log_probs"),
        &case.mask(),
        kl_estimator(case)?,
        controller.coef(),
    )?;
    controller.update(result.reported_kl, result.num_sequences)?;
    Ok(object([
        (
            "token_level_rewards",
            json_rows(&result.token_level_rewards),
        ),
        ("reported_kl", json(result.reported_kl)),
        ("coef_used", json(coef)),
        ("coef_next", json(controller.coef())),
    ]))
}

fn adaptive_kl(case: &Case) -> Outcome {
    let number = |key: &str, default: f64| case.number_or(key, default);
    let coef = number("init_kl_coef", 1e-3);
    let mut controller = match case.text_or("type", "adaptive") {
        "fixed" => KlController::fixed(coef)?,
        "adaptive" => {
            let (target, horizon) = (number("target_kl", 0.1), number("horizon", 10_000.0));
            KlController::adaptive(coef, target, horizon)?
        }
        name => {
            return Err(AlgoError::UnknownName {
                what: "KL controller",
                name: name.to_owned(),
                known: vec!["fixed", "adaptive"],
            });
        }
    };
    let mut coefs = Vec::new();
    for (kl, n) in case.numbers("kls").iter().zip(case.numbers("n_steps")) {
        controller.update(*kl, n as usize)?;
        coefs.push(json(controller.coef()));
    }
    Ok(object([("coefs", coefs.into())]))
}

// ---- reductions

fn masked_ops(case: &Case) -> Outcome {
    let mask = case.mask();
    let values = case.packed("values").expect("values");
    let rows = mask.packed_rows();
    let list = |values: Vec<f64>| values.into_iter().map(json).collect::<Value>();
    let ops: Vec<&str> = match case.get("ops").and_then(Value::as_array) {
        Some(ops) => ops.iter().filter_map(Value::as_str).collect(),
        None => case
            .answer
            .as_object()
            .into_iter()
            .flatten()
            .map(|(op, _)| op.as_str())
            .collect(),
    };
    let mut answer = Map::new();
    for op in ops {
        let value = match op {
            "masked_sum" => json(masked::sum(&values)),
            "masked_sum_rows" => list(masked::row_sums(&values, &rows, mask.num_rows())?),
            "masked_mean" => json(masked::mean(&values)),
            "masked_mean_rows" => list(masked::row_means(&values, &rows, mask.num_rows())?),
            "masked_var" => json(masked::variance(&values)?),
            "masked_var_biased" => json(masked::variance_biased(&values)),
            "masked_whiten" => json_rows(&mask.scatter(&masked::whiten(&values)?)?),
            "masked_whiten_keep_mean" => {
                json_rows(&mask.scatter(&masked::whiten_keep_mean(&values)?)?)
            }
            _ => panic!("unknown operation {op}"),
        };
        answer.insert(op.to_owned(), value);
    }
    Ok(Value::Object(answer))
}

// ---- logits

/// Logits `[N, V]` of the tokens where `mask` is true, as a leaf.
struct Logits {
    leaf: Tensor<2>,
    mask: Ragged<bool>,
    vocab: usize,
}

impl Logits {
    fn new(case: &Case, mask: Ragged<bool>, dtype: DType) -> Logits {
        let rows = case
            .get("logits")
            .and_then(Value::as_array)
            .expect("logits");
        let mut values = Vec::new();
        let mut vocab = 0;
        for (b, row) in rows.iter().enumerate() {
            for (t, token) in row.as_array().expect("tokens").iter().enumerate() {
                let token = token.as_array().expect("logits");
                vocab = token.len();
                if mask.row(b)[t] {
                    values.extend(token.iter().map(|v| number(v).expect("a number")));
                }
            }
        }
        let n = values.len() / vocab.max(1);
        let data = TensorData::new(values, [n, vocab]);
        let leaf = Tensor::from_data(data, (&Device::flex(), dtype));
        Logits {
            leaf: leaf.autodiff().require_grad(),
            mask,
            vocab,
        }
    }

    /// Gradient as `[B, T, V]`, 0 where the mask is false.
    fn gradient(&self, loss: &Tensor<1>) -> Value {
        let grad = gradient(&self.leaf, loss);
        let mut tokens = grad.chunks(self.vocab.max(1));
        let mut token = |action: bool| -> Value {
            let zeros = vec![0.0; self.vocab];
            let own = if action {
                tokens.next().expect("a token")
            } else {
                &zeros
            };
            own.iter().map(|v| json(*v)).collect()
        };
        let rows = self.mask.rows();
        rows.map(|row| row.iter().map(|m| token(*m)).collect::<Value>())
            .collect()
    }

    fn rows(&self, packed: Tensor<1>) -> Result<Value, AlgoError> {
        Ok(json_rows(&self.mask.scatter(&read(packed))?))
    }
}

fn temperature(case: &Case) -> f64 {
    case.number_or("temperature", 1.0)
}

fn entropy(case: &Case, dtype: DType) -> Outcome {
    let logits = Logits::new(case, case.mask(), dtype);
    let entropies = entropy_from_logits(logits.leaf.clone(), temperature(case))?;
    let batch = mini_batch(case);
    let objective = Objective::new(aggregation(case)?).with(1.0, verl_algos::losses::EntropyBonus);
    let prepared = objective.prepare(&batch)?;
    let partial = prepared.loss(&batch.whole(entropies.clone(), Some(entropies.clone())))?;
    Ok(object([
        ("entropy", logits.rows(entropies)?),
        ("loss", json(read(partial.loss.clone())[0])),
        ("grad_logits", logits.gradient(&partial.loss)),
    ]))
}

fn targets(case: &Case, mask: &Ragged<bool>) -> Result<Tensor<1, Int>, AlgoError> {
    let labels = case
        .rows("labels")
        .expect("labels")
        .select("labels", mask)?;
    let labels: Vec<i64> = labels.iter().map(|y| *y as i64).collect();
    let len = labels.len();
    let data = TensorData::new(labels, [len]);
    Ok(Tensor::from_data(data, &Device::flex().autodiff()))
}

fn entropy_and_log_probs(case: &Case, dtype: DType) -> Outcome {
    let logits = Logits::new(case, case.mask(), dtype);
    let targets = targets(case, &logits.mask)?;
    let log_probs = log_probs_from_logits(logits.leaf.clone(), targets, temperature(case))?;
    let entropies = entropy_from_logits(logits.leaf.clone(), temperature(case))?;
    Ok(object([
        ("entropy", logits.rows(entropies.clone())?),
        ("log_probs", logits.rows(log_probs)?),
        (
            "grad_logits_of_entropy_sum",
            logits.gradient(&entropies.sum()),
        ),
    ]))
}

fn log_probs(case: &Case, dtype: DType) -> Outcome {
    let dtype = match case.text_or("dtype", "float64") {
        "float32" => DType::F32,
        _ => dtype,
    };
    let mask = match case.get("response_mask") {
        Some(_) => case.mask(),
        None => case.rows("labels").expect("labels").map(|_, _, _| true),
    };
    let logits = Logits::new(case, mask, dtype);
    let targets = targets(case, &logits.mask)?;
    let log_probs = log_probs_from_logits(logits.leaf.clone(), targets, temperature(case))?;
    let mut answer = vec![("log_probs", logits.rows(log_probs.clone())?)];
    if let Some(weights) = case.packed_under("weights", &logits.mask) {
        // The loss is Σ weight · log-prob; a weight of 0 removes its token.
        let kept: Vec<usize> = (0..weights.len()).filter(|i| weights[*i] != 0.0).collect();
        let index: Vec<i64> = kept.iter().map(|i| *i as i64).collect();
        let index = Tensor::<1, Int>::from_data(
            TensorData::new(index.clone(), [index.len()]),
            &Device::flex().autodiff(),
        );
        let weights: Vec<f64> = kept.iter().map(|i| weights[*i]).collect();
        let weights = leaf(weights, dtype).detach();
        let loss = (log_probs.select(0, index) * weights).sum();
        answer.push(("grad_logits", logits.gradient(&loss)));
    }
    Ok(object(answer))
}
