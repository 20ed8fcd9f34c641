//! Functions of golden cases for advantages and for the correction of the sampler.

use burn::tensor::DType;
use serde_json::{Map, Value};
use verl_algos::advantages::{
    AdvantageInputs, AdvantageScale, ComponentOrder, Gdpo, GrpoTrl, OptimalTokenBaseline, RlooTrl,
};
use verl_algos::losses::{ClippedPolicyLoss, MetricSum, Objective};
use verl_algos::rollout_correction::{
    BypassLoss, Correction, LogProbPair, Mode, RejectionRule, RolloutCorrection, RolloutWeights,
    TrlSamplerRatio, WeightBound, all_scored,
};
use verl_algos::{AlgoError, Ragged};

use super::cases::{Answer, Case, json, json_rows, number};
use super::functions::{
    Outcome, aggregation, clips, dual_clip, estimate, gradient, leaf, mini_batch, object, read,
    zero_metrics,
};

/// The answer to a case; `None` if its function is not implemented here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        "bypass_loss" => bypass_loss(case, dtype),
        "gdpo" => {
            let weights = case.get("weights").map(|_| case.numbers("weights"));
            let epsilon = case.number("epsilon").or(Gdpo::default().epsilon);
            let gdpo = Gdpo { weights, epsilon };
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

// ---- advantages

fn with_tail(case: &Case, otb: OptimalTokenBaseline) -> OptimalTokenBaseline {
    OptimalTokenBaseline {
        handle_zero_tail: case.flag("handle_zero_tail", otb.handle_zero_tail),
        ..otb
    }
}

/// The groups of adjacent rows given by the case's `group_size`, or those that it lists.
fn neighbours(case: &Case, num_rows: usize) -> Vec<u64> {
    match case.count("group_size") {
        Some(size) => (0..num_rows).map(|b| (b / size) as u64).collect(),
        None => case.groups().expect("a group size"),
    }
}

fn grpo_trl(case: &Case) -> Outcome {
    let rewards = case.get("rewards").and_then(Value::as_array);
    let rewards = rewards.expect("rewards").iter();
    // A single function may be given as a list of scores, one per row.
    let rewards = Ragged::from_rows(rewards.map(|row| match row.as_array() {
        Some(row) => row.iter().map(number).collect::<Vec<_>>(),
        None => vec![number(row)],
    }));
    let functions = rewards.row(0).len();
    let scored = |score: Option<f64>| score.filter(|s| !s.is_nan());
    let column = |k: usize| rewards.rows().map(|row| scored(row[k])).collect();
    let components: Vec<Vec<Option<f64>>> = (0..functions).map(column).collect();
    let grpo = GrpoTrl {
        weights: case
            .get("reward_weights")
            .map(|_| case.numbers("reward_weights")),
        scale: match case.get("scale_rewards").and_then(Value::as_bool) {
            Some(true) => AdvantageScale::Group,
            Some(false) => AdvantageScale::None,
            None => match case.text_or("scale_rewards", "group") {
                "group" => AdvantageScale::Group,
                "batch" => AdvantageScale::Batch,
                "none" => AdvantageScale::None,
                name => panic!("unknown scale {name}"),
            },
        },
        order: match case.text_or("aggregation", "sum_then_normalize") {
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
    let default = RlooTrl::default();
    let rloo = RlooTrl {
        beta: case.number_or("beta", default.beta),
        reward_clip: case.get("reward_clip_range").map(|_| {
            let range = case.numbers("reward_clip_range");
            (range[0], range[1])
        }),
        normalize: case.flag("normalize_advantages", default.normalize),
        ..default
    };
    let actions = case.mask();
    let rewards = case.get("rewards").and_then(Value::as_array);
    let rewards = rewards.expect("rewards").iter().map(number);
    let scores: Vec<Option<f64>> = rewards.map(|r| r.filter(|r| !r.is_nan())).collect();
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

/// A threshold, which may be a number, a text, or neither.
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
                level: case.text("rollout_is").parse()?,
                bound: WeightBound::parse(bound.as_deref().unwrap_or("2"))?,
                normalize: case.flag("rollout_is_batch_normalize", false),
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
    let (clip_low, clip_high) = clips(case);
    let loss = match case.text_or("loss_type", "ppo_clip") {
        "ppo_clip" => BypassLoss::PpoClip(ClippedPolicyLoss {
            clip_low,
            clip_high,
            dual_clip: dual_clip(case),
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
    let counts = mini_batch(case).counts;
    let (batch, correction) = correction.mini_batch(&pair, &advantages, counts)?;
    let objective = Objective::new(aggregation(case)?).with_boxed(1.0, loss.policy_loss());
    let values = log_probs.select("log_probs", &correction.actions)?;
    let leaf = leaf(values, dtype);
    let partial = objective
        .prepare(&batch)?
        .loss(&batch.whole(leaf.clone(), None))?;
    let gradient = correction
        .actions
        .scatter(&gradient(&leaf, &partial.loss))?;
    let mut answer = zero_metrics(batch.num_tokens());
    for metric in partial.read_metrics()? {
        answer.insert(metric.name().to_owned(), json(MetricSum::value(&metric)));
    }
    answer.insert("loss".to_owned(), json(read(partial.loss)[0]));
    answer.insert("grad_log_probs".to_owned(), json_rows(&gradient));
    Ok(Value::Object(answer))
}

fn trl_sampler_ratio(case: &Case) -> Outcome {
    let mode = case.text_or("mode", "sequence_mask");
    let clip_max = case.number_or("clip_max", TrlSamplerRatio::default().clip_max);
    let ratio = TrlSamplerRatio::named(mode.parse()?, case.number("clip_min"), clip_max)?;
    // TRL has no other marker for a token that the sampler did not score.
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
