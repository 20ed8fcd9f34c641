//! Policy and value losses, verl's and TRL's.

use burn::tensor::DType;
use verl_algos::kl::{KlEstimator, KlEstimatorName};
use verl_algos::losses::{
    CispoLoss, ClipCovLoss, DppoLoss, DroLoss, GmpoLoss, ImportanceKlLoss, KlCovLoss, KlLoss,
    Objective, OffPolicyRows, RatioLevel, SapoLoss, TokenFilter, TokenLoss, TopEntropyBonus,
    TopEntropyTokens, TrlGrpoLoss, ValueLoss, VespoLoss,
};
use verl_algos::{Aggregation, AggregationName, AlgoError, Counts, MiniBatch};

use super::cases::{Answer, Case, json};
use super::functions::{Outcome, aggregation, clips, evaluate, mini_batch, token_loss};

/// The answer to a case; `None` if its function is not implemented here.
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
        "sapo" => token_loss(case, dtype, "log_probs", sapo(case, "tau_pos", "tau_neg")),
        "dppo_tv" => dppo(case, dtype, DppoLoss::tv()),
        "dppo_kl" => dppo(case, dtype, DppoLoss::kl()),
        "dro" => DroLoss::new(case.number("dro_beta"))
            .and_then(|loss| token_loss(case, dtype, "log_probs", loss)),
        "kl_cov" => {
            let default = KlCovLoss::default();
            let loss = KlCovLoss {
                ratio: case.number_or("kl_cov_ratio", default.ratio),
                kl_coef: case.number_or("ppo_kl_coef", default.kl_coef),
            };
            selective(case, dtype, loss)
        }
        "clip_cov" => {
            let (clip_low, clip_high) = clips(case);
            let default = ClipCovLoss::default();
            let loss = ClipCovLoss {
                clip_low,
                clip_high,
                ratio: case.number_or("clip_cov_ratio", default.ratio),
                lower: case.number_or("clip_cov_lb", default.lower),
                upper: case.number_or("clip_cov_ub", default.upper),
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

/// A loss that selects among the tokens of the entire mini-batch.
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
        clip: case.number("cliprange_value").or(ValueLoss::default().clip),
    };
    let objective = Objective::new(aggregation(case)?).with(1.0, loss);
    evaluate(case, dtype, "values", &objective, &batch)
}

// ---- TRL

/// TRL's loss types as a loss, an aggregation, and additional terms and filters.
fn trl(case: &Case, dtype: DType) -> Outcome {
    let batch = trl_batch(case);
    let steps = case.number("gradient_accumulation_steps").unwrap_or(1.0);
    let default = match case.function.as_str() {
        "trl_gmpo" => GmpoLoss::default().clip_low,
        _ => TrlGrpoLoss::default().clip_low,
    };
    let low = case.number_or("epsilon_low", case.number_or("epsilon", default));
    let high = case.number("epsilon_high");
    let loss: Box<dyn TokenLoss> = match case.function.as_str() {
        "trl_cispo" => Box::new(CispoLoss::with_cap(high.unwrap_or(5.0))),
        "trl_gmpo" => Box::new(GmpoLoss {
            clip_low: low,
            clip_high: high.unwrap_or(low),
        }),
        "trl_sapo" => {
            let (pos, neg) = ("sapo_temperature_pos", "sapo_temperature_neg");
            Box::new(sapo(case, pos, neg))
        }
        "trl_vespo" => Box::new(vespo(case)),
        "trl_rloo_loss" => Box::new(TrlGrpoLoss {
            clip_low: low,
            clip_high: high.unwrap_or(low),
            ..TrlGrpoLoss::rloo()
        }),
        _ => Box::new(TrlGrpoLoss {
            clip_low: low,
            clip_high: high.unwrap_or(low),
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
        let quantile = case.number_or("top_entropy_quantile", 1.0);
        objective = objective.with(-coef, TopEntropyBonus { quantile });
    }
    let mut answer = evaluate(case, dtype, "log_probs", &objective, &batch)?;
    answer["kl"] = answer["ref_kl"].clone();
    if case.function == "trl_rloo_loss" {
        let loss = answer["loss"].as_f64().expect("a number");
        answer["loss"] = json(loss + of_empty_rows(case));
    }
    Ok(answer)
}

/// TRL's RLOO term for rows without tokens, whose ratio is e^0: −A over the rows. It has no gradient, and here rows
/// without tokens add nothing.
fn of_empty_rows(case: &Case) -> f64 {
    let advantages = case.numbers("advantages");
    let counts = case.mask().counts();
    let empty = counts.iter().zip(&advantages).filter(|(n, _)| **n == 0);
    -empty.map(|(_, a)| a).sum::<f64>() / counts.len() as f64
}

/// The columns of a case; there is one advantage per row.
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
        // Without any, the first step's ratio is 1.
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
        "trl_bnpo" | "trl_dapo" | "trl_cispo" | "trl_vespo" => AggregationName::TokenMean,
        "trl_dr_grpo" => AggregationName::SeqMeanTokenSumNorm,
        "trl_luspo" => AggregationName::SeqMeanTokenSum,
        _ => AggregationName::SeqMeanTokenMean,
    };
    // If the case has no maximum, rows are as wide as the arrays.
    let width = case.mask().rows().map(<[bool]>::len).max().unwrap_or(1);
    let longest = case.number_or("max_completion_length", width as f64);
    Aggregation::named(name, Some(longest))
}

fn level(case: &Case) -> Result<RatioLevel, AlgoError> {
    match case.get("importance_sampling_level") {
        Some(_) => RatioLevel::parse(case.text("importance_sampling_level")),
        None => Ok(RatioLevel::Token),
    }
}

fn sapo(case: &Case, pos: &str, neg: &str) -> SapoLoss {
    let default = SapoLoss::default();
    SapoLoss {
        tau_pos: case.number_or(pos, default.tau_pos),
        tau_neg: case.number_or(neg, default.tau_neg),
    }
}

fn vespo(case: &Case) -> VespoLoss {
    let default = VespoLoss::default();
    VespoLoss {
        k_pos: case.number_or("vespo_k_pos", default.k_pos),
        lambda_pos: case.number_or("vespo_lambda_pos", default.lambda_pos),
        k_neg: case.number_or("vespo_k_neg", default.k_neg),
        lambda_neg: case.number_or("vespo_lambda_neg", default.lambda_neg),
    }
}

fn kl(case: &Case) -> Result<Box<dyn TokenLoss>, AlgoError> {
    let estimator = KlEstimator::from(KlEstimatorName::K3Unclamped);
    if case.flag("use_bias_correction_kl", false) {
        let level = level(case)?;
        return Ok(Box::new(ImportanceKlLoss { estimator, level }));
    }
    Ok(Box::new(KlLoss { estimator }))
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
