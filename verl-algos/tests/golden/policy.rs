//! Policy and value losses, verl's and TRL's.

use burn::tensor::DType;
use serde_json::Value;
use verl_algos::kl::KlEstimator;
use verl_algos::losses::{
    CispoLoss, ClipCovLoss, DppoLoss, DroLoss, GmpoLoss, ImportanceKlLoss, KlCovLoss, KlLoss,
    Objective, OffPolicyRows, RatioLevel, SapoLoss, TokenFilter, TokenLoss, TopEntropyBonus,
    TopEntropyTokens, TrlGrpoLoss, ValueLoss, VespoLoss,
};
use verl_algos::{Aggregation, AlgoError, Counts, MiniBatch};

use crate::cases::{Answer, Case, json};
use crate::functions::{Outcome, aggregation, clips, evaluate, mini_batch, token_loss};

/// The answer to a case; `None` for a function that is not here.
pub fn run(case: &Case, dtype: DType) -> Option<Answer> {
    let answer = match case.function.as_str() {
        "gmpo" => {
            let (clip_low, clip_high) = clips(case);
            let loss = GmpoLoss {
                clip_low,
                clip_high,
            };
            token_loss(case, dtype, "log_probs", loss)
        }
        "sapo" => {
            let loss = SapoLoss {
                tau_pos: number(case, "tau_pos"),
                tau_neg: number(case, "tau_neg"),
            };
            token_loss(case, dtype, "log_probs", loss)
        }
        "dppo_tv" => dppo(case, dtype, DppoLoss::tv()),
        "dppo_kl" => dppo(case, dtype, DppoLoss::kl()),
        "dro" => DroLoss::new(case.number("dro_beta"))
            .and_then(|loss| token_loss(case, dtype, "log_probs", loss)),
        "kl_cov" => {
            let loss = KlCovLoss {
                ratio: number(case, "kl_cov_ratio"),
                kl_coef: number(case, "ppo_kl_coef"),
            };
            selective(case, dtype, loss)
        }
        "clip_cov" => {
            let (clip_low, clip_high) = clips(case);
            let loss = ClipCovLoss {
                clip_low,
                clip_high,
                ratio: number(case, "clip_cov_ratio"),
                lower: number(case, "clip_cov_lb"),
                upper: number(case, "clip_cov_ub"),
            };
            selective(case, dtype, loss)
        }
        "value_loss" => value(case, dtype),
        "trl_gmpo" | "trl_rloo_loss" | "trl_grpo" | "trl_bnpo" | "trl_dr_grpo" | "trl_dapo"
        | "trl_cispo" | "trl_sapo" | "trl_luspo" | "trl_vespo" => trl(case, dtype),
        _ => return None,
    };
    Some(answer.map_err(|error| error.to_string()))
}

fn number(case: &Case, key: &str) -> f64 {
    case.number(key)
        .unwrap_or_else(|| panic!("{}: no number `{key}`", case.name))
}

fn dppo(case: &Case, dtype: DType, default: DppoLoss) -> Outcome {
    let (clip_low, clip_high) = clips(case);
    let ratio_cap = case.number("clip_ratio_c").unwrap_or(default.ratio_cap);
    let loss = DppoLoss {
        clip_low,
        clip_high,
        ratio_cap,
        ..default
    };
    token_loss(case, dtype, "log_probs", loss)
}

/// A loss that selects among the tokens of the whole mini-batch.
fn selective(case: &Case, dtype: DType, loss: impl TokenLoss + 'static) -> Outcome {
    let mut batch = mini_batch(case);
    batch.current_log_probs = case.packed("log_probs");
    batch.draws = Some(vec![0.5; batch.num_tokens()]);
    let objective = Objective::new(aggregation(case)?).with(1.0, loss);
    evaluate(case, dtype, "log_probs", &objective, &batch)
}

fn value(case: &Case, dtype: DType) -> Outcome {
    let mut batch = mini_batch(case);
    batch.old_values = case.packed("old_values");
    batch.returns = case.packed("returns");
    let loss = ValueLoss {
        clip: case.number("cliprange_value"),
    };
    let objective = Objective::new(aggregation(case)?).with(1.0, loss);
    evaluate(case, dtype, "values", &objective, &batch)
}

// ---- TRL

/// TRL's loss types as a loss, an aggregation, and terms and filters beside it.
fn trl(case: &Case, dtype: DType) -> Outcome {
    let batch = trl_batch(case);
    let steps = case.number("gradient_accumulation_steps").unwrap_or(1.0);
    let (low, high) = (number(case, "epsilon_low"), number(case, "epsilon_high"));
    let loss: Box<dyn TokenLoss> = match case.function.as_str() {
        "trl_cispo" => Box::new(CispoLoss::with_cap(high)),
        "trl_gmpo" => Box::new(GmpoLoss {
            clip_low: low,
            clip_high: high,
        }),
        "trl_sapo" => Box::new(sapo(case)),
        "trl_vespo" => Box::new(VespoLoss::default()),
        "trl_rloo_loss" => Box::new(TrlGrpoLoss {
            clip_low: low,
            clip_high: high,
            ..TrlGrpoLoss::rloo()
        }),
        _ => Box::new(TrlGrpoLoss {
            clip_low: low,
            clip_high: high,
            delta: case.number("delta"),
            level: level(case)?,
        }),
    };
    let mut objective =
        Objective::new(trl_aggregation(case)?).with_boxed_filters(1.0 / steps, loss, filters(case));
    if let Some(beta) = case.number("beta").filter(|beta| *beta != 0.0) {
        let kl = kl(case)?;
        objective = objective.with_boxed(beta / steps, kl);
    }
    if let Some(coef) = case.number("entropy_coef") {
        let quantile = number(case, "top_entropy_quantile");
        objective = objective.with(-coef, TopEntropyBonus { quantile });
    }
    let mut answer = evaluate(case, dtype, "log_probs", &objective, &batch)?;
    answer["kl"] = answer["ref_kl"].clone();
    if case.function == "trl_rloo_loss" {
        let loss = answer["loss"].as_f64().expect("a number");
        answer["loss"] = json(loss + of_empty_rows(case));
    }
    if batch.num_tokens() == 0 {
        let names = case.answer.as_object().expect("an answer").keys();
        for name in names.filter(|name| name.starts_with("clip_ratio")) {
            answer[name] = Value::from(0.0);
        }
    }
    Ok(answer)
}

/// What TRL's RLOO adds for rows without tokens, whose ratio is e^0: −A over the rows. It has no gradient, and rows that
/// are not there add nothing here.
fn of_empty_rows(case: &Case) -> f64 {
    let advantages = case.numbers("advantages");
    let counts = case.mask().counts();
    let empty = counts.iter().zip(&advantages).filter(|(n, _)| **n == 0);
    -empty.map(|(_, a)| a).sum::<f64>() / counts.len() as f64
}

/// The columns of a case; advantages are one number a row.
fn trl_batch(case: &Case) -> MiniBatch {
    let rows = case.mask().packed_rows();
    let advantages = case.numbers("advantages");
    MiniBatch {
        counts: Counts {
            tokens: case.count("num_items_in_batch"),
            sequences: case.count("num_sequences"),
            dp_size: 1,
        },
        advantages: Some(rows.iter().map(|&row| advantages[row]).collect()),
        // Where there are none, the first step's ratio is 1.
        old_log_probs: case
            .packed("old_log_probs")
            .or_else(|| case.packed("log_probs")),
        ref_log_probs: case.packed("ref_log_probs"),
        rollout_weights: case.packed("sampler_ratio"),
        rollout_log_probs: case.packed("sampling_log_probs"),
        current_entropies: case.packed("entropies"),
        ..MiniBatch::new(rows)
    }
}

fn trl_aggregation(case: &Case) -> Result<Aggregation, AlgoError> {
    let name = match case.function.as_str() {
        "trl_bnpo" | "trl_dapo" | "trl_cispo" | "trl_vespo" => "token-mean",
        "trl_dr_grpo" => "seq-mean-token-sum-norm",
        "trl_luspo" => "seq-mean-token-sum",
        _ => "seq-mean-token-mean",
    };
    Aggregation::parse(name, case.number("max_completion_length"))
}

fn level(case: &Case) -> Result<RatioLevel, AlgoError> {
    match case.get("importance_sampling_level") {
        Some(_) => RatioLevel::parse(case.text("importance_sampling_level")),
        None => Ok(RatioLevel::Token),
    }
}

fn sapo(case: &Case) -> SapoLoss {
    let default = SapoLoss::default();
    SapoLoss {
        tau_pos: case
            .number("sapo_temperature_pos")
            .unwrap_or(default.tau_pos),
        tau_neg: case
            .number("sapo_temperature_neg")
            .unwrap_or(default.tau_neg),
    }
}

fn kl(case: &Case) -> Result<Box<dyn TokenLoss>, AlgoError> {
    let estimator = KlEstimator::parse("k3_unclamped")?;
    Ok(match case.get("use_bias_correction_kl") {
        Some(Value::Bool(true)) => Box::new(ImportanceKlLoss {
            estimator,
            level: level(case)?,
        }),
        _ => Box::new(KlLoss { estimator }),
    })
}

fn filters(case: &Case) -> Vec<Box<dyn TokenFilter>> {
    let mut filters: Vec<Box<dyn TokenFilter>> = Vec::new();
    if let Some(threshold) = case.number("off_policy_mask_threshold") {
        filters.push(Box::new(OffPolicyRows { threshold }));
    }
    if let Some(quantile) = case.number("top_entropy_quantile") {
        filters.push(Box::new(TopEntropyTokens { quantile }));
    }
    filters
}
