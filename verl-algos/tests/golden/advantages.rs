//! The functions of advantages, and of the correction of the sampler, that golden cases name.

use burn::tensor::DType;
use serde_json::{Map, Value};
use verl_algos::advantages::{
    AdvantageInputs, AdvantageScale, ComponentOrder, Gdpo, GrpoTrl, OptimalTokenBaseline, RlooTrl,
};
use verl_algos::losses::{ClippedPolicyLoss, MetricSum, Objective};
use verl_algos::rollout_correction::{
    BypassLoss, Correction, LogProbPair, Mode, RejectionRule, RolloutCorrection, RolloutWeights,
    TrlSamplerRatio, WeightBound, WeightLevel, all_scored,
};
use verl_algos::{Aggregation, AlgoError, Counts, Ragged};

use crate::cases::{Answer, Case, json, json_rows, number};
use crate::functions::{Outcome, estimate, gradient, leaf, object, read};

/// The answer to a case; `None` for a function that is not here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        "bypass_loss" => bypass_loss(case, dtype),
        "gdpo" => {
            let weights = case.get("weights").map(|_| case.numbers("weights"));
            let gdpo = Gdpo {
                weights,
                ..Gdpo::default()
            };
            estimate(case, &gdpo)
        }
        "grpo_trl" => grpo_trl(case),
        "otb" => estimate(case, &with_tail(case, OptimalTokenBaseline::flat())),
        "rloo_trl" => rloo_trl(case),
        "rollout_correction" => rollout_correction(case),
        "tir_otb" => estimate(case, &with_tail(case, OptimalTokenBaseline::multi_turn())),
        "trl_sampler_ratio" => trl_sampler_ratio(case),
        _ => return None,
    };
    Some(answer.map_err(|error| error.to_string()))
}

fn list(values: impl IntoIterator<Item = f64>) -> Value {
    values.into_iter().map(json).collect()
}

fn flag(case: &Case, key: &str) -> bool {
    case.get(key) == Some(&Value::Bool(true))
}

// ---- advantages

fn with_tail(case: &Case, otb: OptimalTokenBaseline) -> OptimalTokenBaseline {
    OptimalTokenBaseline {
        handle_zero_tail: flag(case, "handle_zero_tail"),
        ..otb
    }
}

/// Scores of rows, where NaN is none.
fn scores(values: &[f64]) -> Vec<Option<f64>> {
    values.iter().map(|v| (!v.is_nan()).then_some(*v)).collect()
}

/// The groups of neighbours that the case's `group_size` makes.
fn neighbours(case: &Case, num_rows: usize) -> Vec<u64> {
    let size = case.count("group_size").expect("a group size");
    (0..num_rows).map(|b| (b / size) as u64).collect()
}

fn grpo_trl(case: &Case) -> Outcome {
    let rewards = case.rows("rewards").expect("rewards");
    let functions = rewards.row(0).len();
    let column = |k: usize| scores(&rewards.rows().map(|row| row[k]).collect::<Vec<f64>>());
    let components: Vec<Vec<Option<f64>>> = (0..functions).map(column).collect();
    let grpo = GrpoTrl {
        weights: Some(case.numbers("reward_weights")),
        scale: match case.text("scale_rewards") {
            "group" => AdvantageScale::Group,
            "batch" => AdvantageScale::Batch,
            "none" => AdvantageScale::None,
            name => panic!("unknown scale {name}"),
        },
        order: match case.text("aggregation") {
            "sum_then_normalize" => ComponentOrder::SumThenNormalize,
            "normalize_then_sum" => ComponentOrder::NormalizeThenSum,
            name => panic!("unknown aggregation {name}"),
        },
        ..GrpoTrl::default()
    };
    let actions = Ragged::<bool>::from_rows(vec![[true]; rewards.num_rows()]);
    let groups = neighbours(case, rewards.num_rows());
    let mut inputs = AdvantageInputs::new(&actions);
    inputs.groups = Some(&groups);
    inputs.reward_components = Some(&components);
    Ok(object([(
        "advantages",
        list(grpo.row_advantages(&inputs)?),
    )]))
}

fn rloo_trl(case: &Case) -> Outcome {
    let rloo = RlooTrl {
        beta: case.number("beta").expect("beta"),
        reward_clip: case.get("reward_clip_range").map(|_| {
            let range = case.numbers("reward_clip_range");
            (range[0], range[1])
        }),
        normalize: flag(case, "normalize_advantages"),
        ..RlooTrl::default()
    };
    let actions = case.mask();
    let scores = scores(&case.numbers("rewards"));
    let groups = neighbours(case, scores.len());
    let (old, reference) = (case.rows("old_log_probs"), case.rows("ref_log_probs"));
    let mut inputs = AdvantageInputs::new(&actions);
    inputs.scores = Some(&scores);
    inputs.groups = Some(&groups);
    inputs.old_log_probs = old.as_ref();
    inputs.ref_log_probs = reference.as_ref();
    Ok(object([(
        "advantages",
        list(rloo.row_advantages(&inputs)?),
    )]))
}

// ---- the sampler

/// A threshold, which may be a number, a text, or what is neither.
fn threshold(case: &Case, key: &str) -> Option<String> {
    let value = case.get(key)?;
    let text = value.as_str().map(str::to_owned);
    Some(text.unwrap_or_else(|| value.to_string()))
}

/// The weights and rules of a case, in a mode.
fn correction_of(case: &Case, mode: Mode) -> Result<RolloutCorrection, AlgoError> {
    let weights = match case.get("rollout_is") {
        None => None,
        Some(_) => {
            let bound = threshold(case, "rollout_is_threshold");
            Some(RolloutWeights {
                level: WeightLevel::parse(case.text("rollout_is"))?,
                bound: WeightBound::parse(bound.as_deref().unwrap_or("2"))?,
                normalize: flag(case, "rollout_is_batch_normalize"),
            })
        }
    };
    let rejection = match case.get("rollout_rs") {
        None => Vec::new(),
        Some(_) => {
            let bounds = threshold(case, "rollout_rs_threshold").unwrap_or_default();
            RejectionRule::parse_list(case.text("rollout_rs"), &bounds)?
        }
    };
    Ok(RolloutCorrection {
        mode,
        weights,
        rejection,
    })
}

fn json_mask(mask: &Ragged<bool>) -> Value {
    let row = |row: &[bool]| {
        row.iter()
            .map(|m| Value::from(u8::from(*m)))
            .collect::<Value>()
    };
    mask.rows().map(row).collect()
}

fn rollout_correction(case: &Case) -> Outcome {
    let correction = correction_of(case, Mode::Decoupled)?;
    let train = case.rows("train_log_probs").expect("log-probs");
    let rollout = all_scored(&case.rows("rollout_log_probs").expect("log-probs"));
    let got = correction.correct(&LogProbPair {
        actions: &case.mask(),
        train_log_probs: &train,
        rollout_log_probs: &rollout,
    })?;
    let mut answer = Map::new();
    if let Some(weights) = &got.weights {
        answer.insert("weights".to_owned(), json_rows(weights));
    }
    answer.insert("response_mask".to_owned(), json_mask(&got.actions));
    answer.insert("metrics".to_owned(), json_metrics(&got));
    Ok(Value::Object(answer))
}

fn json_metrics(correction: &Correction) -> Value {
    let metrics = correction.metrics().into_iter();
    Value::Object(metrics.map(|(name, value)| (name, json(value))).collect())
}

fn bypass_loss(case: &Case, dtype: DType) -> Outcome {
    let number_of = |key: &str| case.number(key).expect("a number");
    let loss = match case.text("loss_type") {
        "ppo_clip" => BypassLoss::PpoClip(ClippedPolicyLoss {
            clip_low: number_of("clip_ratio_low"),
            clip_high: number_of("clip_ratio_high"),
            dual_clip: case.number("clip_ratio_c"),
        }),
        "reinforce" => BypassLoss::Reinforce,
        name => panic!("unknown loss {name}"),
    };
    let correction = correction_of(case, Mode::Bypass(loss))?;
    let log_probs = case.rows("log_probs").expect("log-probs");
    let rollout = all_scored(&case.rows("rollout_log_probs").expect("log-probs"));
    let pair = LogProbPair {
        actions: &case.mask(),
        train_log_probs: &log_probs,
        rollout_log_probs: &rollout,
    };
    let advantages = case.rows("advantages").expect("advantages");
    let (batch, correction) = correction.mini_batch(&pair, &advantages, Counts::LOCAL)?;
    let aggregation = Aggregation::parse(case.text("loss_agg_mode"), None)?;
    let objective = Objective::new(aggregation).with_boxed(1.0, loss.policy_loss());
    let values = log_probs.select("log_probs", &correction.actions)?;
    let leaf = leaf(values, dtype);
    let partial = objective
        .prepare(&batch)?
        .loss(&batch.whole(leaf.clone(), None))?;
    let gradient = correction
        .actions
        .scatter(&gradient(&leaf, &partial.loss))?;
    let mut answer = Map::new();
    for metric in partial.read_metrics()? {
        answer.insert(metric.name.to_owned(), json(MetricSum::value(&metric)));
    }
    answer.insert("loss".to_owned(), json(read(partial.loss)[0]));
    answer.insert("grad_log_probs".to_owned(), json_rows(&gradient));
    Ok(Value::Object(answer))
}

fn trl_sampler_ratio(case: &Case) -> Outcome {
    let mode = case.text("mode");
    let clip_max = number(&case.inputs["clip_max"]).expect("a bound");
    let ratio = TrlSamplerRatio::parse(mode, case.number("clip_min"), clip_max)?;
    // TRL has no other sign for a token that the sampler did not score.
    let rollout = case.rows("rollout_log_probs").expect("log-probs");
    let rollout = rollout.map(|_, _, l| (!l.is_nan()).then_some(l));
    let ratios = ratio.ratios(&LogProbPair {
        actions: &case.mask(),
        train_log_probs: &case.rows("train_log_probs").expect("log-probs"),
        rollout_log_probs: &rollout,
    })?;
    let rows = if mode.starts_with("sequence") {
        ratios.rows().map(|row| list([row[0]])).collect()
    } else {
        json_rows(&ratios)
    };
    Ok(object([("sampler_ratio", rows)]))
}
