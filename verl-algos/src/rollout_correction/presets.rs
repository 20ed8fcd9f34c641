//! Corrections by name.

use super::{
    BypassLoss, Divergence, Mode, RejectionLevel, RejectionRule, RolloutCorrection, RolloutWeights,
    WeightBound, WeightLevel,
};
use crate::error::AlgoError;
use crate::losses::ClippedPolicyLoss;

const TOKEN_TIS: RolloutWeights = RolloutWeights {
    level: WeightLevel::Token,
    bound: WeightBound::Truncate(2.0),
    normalize: false,
};
const SEQ_TIS: RolloutWeights = RolloutWeights {
    level: WeightLevel::Sequence,
    ..TOKEN_TIS
};
const TOKEN_ICEPOP: RolloutWeights = RolloutWeights {
    bound: WeightBound::Band {
        low: 0.5,
        high: 5.0,
    },
    ..TOKEN_TIS
};
/// Keeps a row if the product of its π_roll/π_train is within a factor of 2.
const SEQ_RS: RejectionRule = RejectionRule {
    level: RejectionLevel::SequenceSum,
    divergence: Divergence::K1,
    low: Some(0.5),
    high: 2.0,
};
/// Keeps a row if the geometric mean of its π_roll/π_train is within a thousandth of 1.
const GEO_RS: RejectionRule = RejectionRule {
    level: RejectionLevel::SequenceMean,
    divergence: Divergence::K1,
    low: Some(0.999),
    high: 1.001,
};
/// Keeps a row if its mean k3 is at most 0.01 nats.
const K3_RS: RejectionRule = RejectionRule {
    level: RejectionLevel::SequenceMean,
    divergence: Divergence::K3,
    low: None,
    high: 0.01,
};

fn decoupled(weights: Option<RolloutWeights>, rules: &[RejectionRule]) -> RolloutCorrection {
    RolloutCorrection {
        mode: Mode::Decoupled,
        weights,
        rejection: rules.to_vec(),
    }
}

fn ppo_clip(rules: &[RejectionRule]) -> RolloutCorrection {
    RolloutCorrection {
        mode: Mode::Bypass(BypassLoss::PpoClip(ClippedPolicyLoss::default())),
        ..decoupled(None, rules)
    }
}

fn reinforce(weights: Option<RolloutWeights>, rules: &[RejectionRule]) -> RolloutCorrection {
    RolloutCorrection {
        mode: Mode::Bypass(BypassLoss::Reinforce),
        ..decoupled(weights, rules)
    }
}

/// Name of a preset, and its constructor.
pub type PresetEntry = (&'static str, fn() -> RolloutCorrection);

/// All presets, by the names of verl's configurations.
///
/// `is` and `tis`: truncated importance weights, of tokens or of rows (`seq`), at most 2. `icepop`: weights outside 0.5
/// to 5 become 0. `rs` rejects rows: with `seq_is` by the product of their ratios (Seq-MIS), with `geo` by its
/// geometric mean, with `k3` by the mean k3. `pg` is the `reinforce` loss. `disabled` only measures.
pub const PRESETS: &[PresetEntry] = &[
    ("bypass_pg_geo_rs", || reinforce(None, &[GEO_RS])),
    ("bypass_pg_geo_rs_seq_tis", || {
        reinforce(Some(SEQ_TIS), &[GEO_RS])
    }),
    ("bypass_pg_geo_rs_token_tis", || {
        reinforce(Some(TOKEN_TIS), &[GEO_RS])
    }),
    ("bypass_pg_is", || reinforce(Some(SEQ_TIS), &[])),
    ("bypass_pg_token_icepop", || {
        reinforce(Some(TOKEN_ICEPOP), &[])
    }),
    ("bypass_ppo_clip", || ppo_clip(&[])),
    ("bypass_ppo_clip_geo_rs", || ppo_clip(&[GEO_RS])),
    ("bypass_ppo_clip_k3_rs", || ppo_clip(&[K3_RS])),
    ("decoupled_geo_rs", || decoupled(None, &[GEO_RS])),
    ("decoupled_geo_rs_seq_tis", || {
        decoupled(Some(SEQ_TIS), &[GEO_RS])
    }),
    ("decoupled_geo_rs_token_tis", || {
        decoupled(Some(TOKEN_TIS), &[GEO_RS])
    }),
    ("decoupled_k3_rs", || decoupled(None, &[K3_RS])),
    ("decoupled_k3_rs_seq_tis", || {
        decoupled(Some(SEQ_TIS), &[K3_RS])
    }),
    ("decoupled_k3_rs_token_tis", || {
        decoupled(Some(TOKEN_TIS), &[K3_RS])
    }),
    ("decoupled_seq_is", || decoupled(Some(SEQ_TIS), &[])),
    ("decoupled_seq_is_rs", || {
        decoupled(Some(SEQ_TIS), &[SEQ_RS])
    }),
    ("decoupled_token_icepop", || {
        decoupled(Some(TOKEN_ICEPOP), &[])
    }),
    ("decoupled_token_is", || decoupled(Some(TOKEN_TIS), &[])),
    ("disabled", || decoupled(None, &[])),
];

/// The preset with this name.
///
/// # Errors
/// An unknown name.
pub fn preset(name: &str) -> Result<RolloutCorrection, AlgoError> {
    match PRESETS.iter().find(|(known, _)| *known == name) {
        Some((_, make)) => Ok(make()),
        None => Err(AlgoError::UnknownName {
            what: "rollout correction",
            name: name.to_owned(),
            known: PRESETS.iter().map(|(known, _)| *known).collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sorted_valid_and_name_their_mode() {
        assert!(PRESETS.is_sorted_by_key(|(name, _)| *name));
        for (name, make) in PRESETS {
            let correction = make();
            correction.check().unwrap();
            let bypass = matches!(correction.mode, Mode::Bypass(_));
            assert_eq!(bypass, name.starts_with("bypass"), "{name}");
            assert_eq!(preset(name).unwrap(), correction);
        }
        let error = preset("tis").unwrap_err().to_string();
        assert!(error.contains("decoupled_token_is"), "{error}");
    }
}
