//! Corrections by name.

use super::{
    BypassLoss, Divergence, Mode, RejectionLevel, RejectionRule, RolloutCorrection, RolloutWeights,
    WeightBound, WeightLevel,
};
use crate::losses::ClippedPolicyLoss;
use crate::names::names;

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

names! {
    /// The name of a correction, as in verl's configurations.
    ///
    /// `is` and `tis`: truncated importance weights, of tokens or of rows (`seq`), at most 2. `icepop`: weights outside
    /// 0.5 to 5 become 0. `rs` rejects rows: with `seq_is` by the product of their ratios (Seq-MIS), with `geo` by its
    /// geometric mean, with `k3` by the mean k3. `pg` is the `reinforce` loss. `disabled` only measures.
    Preset, "rollout correction" {
        /// Bypass mode with `reinforce`: rejects rows by their geometric mean.
        BypassPgGeoRs = "bypass_pg_geo_rs",
        /// The same, with weights of rows.
        BypassPgGeoRsSeqTis = "bypass_pg_geo_rs_seq_tis",
        /// The same, with weights of tokens.
        BypassPgGeoRsTokenTis = "bypass_pg_geo_rs_token_tis",
        /// Bypass mode with `reinforce`: weights of rows.
        BypassPgIs = "bypass_pg_is",
        /// Bypass mode with `reinforce`: weights of tokens in a band.
        BypassPgTokenIcepop = "bypass_pg_token_icepop",
        /// Bypass mode with PPO's clip, whose ratio includes the weights.
        BypassPpoClip = "bypass_ppo_clip",
        /// The same, and rejects rows by their geometric mean.
        BypassPpoClipGeoRs = "bypass_ppo_clip_geo_rs",
        /// The same, and rejects rows by their mean k3.
        BypassPpoClipK3Rs = "bypass_ppo_clip_k3_rs",
        /// Rejects rows by their geometric mean.
        DecoupledGeoRs = "decoupled_geo_rs",
        /// The same, with weights of rows.
        DecoupledGeoRsSeqTis = "decoupled_geo_rs_seq_tis",
        /// The same, with weights of tokens.
        DecoupledGeoRsTokenTis = "decoupled_geo_rs_token_tis",
        /// Rejects rows by their mean k3.
        DecoupledK3Rs = "decoupled_k3_rs",
        /// The same, with weights of rows.
        DecoupledK3RsSeqTis = "decoupled_k3_rs_seq_tis",
        /// The same, with weights of tokens.
        DecoupledK3RsTokenTis = "decoupled_k3_rs_token_tis",
        /// Weights of rows.
        DecoupledSeqIs = "decoupled_seq_is",
        /// Weights of rows, and rejects rows by the product of their ratios.
        DecoupledSeqIsRs = "decoupled_seq_is_rs",
        /// Weights of tokens in a band.
        DecoupledTokenIcepop = "decoupled_token_icepop",
        /// Weights of tokens.
        DecoupledTokenIs = "decoupled_token_is",
        /// Only measures.
        Disabled = "disabled",
    }
}

impl From<Preset> for RolloutCorrection {
    fn from(preset: Preset) -> RolloutCorrection {
        match preset {
            Preset::BypassPgGeoRs => reinforce(None, &[GEO_RS]),
            Preset::BypassPgGeoRsSeqTis => reinforce(Some(SEQ_TIS), &[GEO_RS]),
            Preset::BypassPgGeoRsTokenTis => reinforce(Some(TOKEN_TIS), &[GEO_RS]),
            Preset::BypassPgIs => reinforce(Some(SEQ_TIS), &[]),
            Preset::BypassPgTokenIcepop => reinforce(Some(TOKEN_ICEPOP), &[]),
            Preset::BypassPpoClip => ppo_clip(&[]),
            Preset::BypassPpoClipGeoRs => ppo_clip(&[GEO_RS]),
            Preset::BypassPpoClipK3Rs => ppo_clip(&[K3_RS]),
            Preset::DecoupledGeoRs => decoupled(None, &[GEO_RS]),
            Preset::DecoupledGeoRsSeqTis => decoupled(Some(SEQ_TIS), &[GEO_RS]),
            Preset::DecoupledGeoRsTokenTis => decoupled(Some(TOKEN_TIS), &[GEO_RS]),
            Preset::DecoupledK3Rs => decoupled(None, &[K3_RS]),
            Preset::DecoupledK3RsSeqTis => decoupled(Some(SEQ_TIS), &[K3_RS]),
            Preset::DecoupledK3RsTokenTis => decoupled(Some(TOKEN_TIS), &[K3_RS]),
            Preset::DecoupledSeqIs => decoupled(Some(SEQ_TIS), &[]),
            Preset::DecoupledSeqIsRs => decoupled(Some(SEQ_TIS), &[SEQ_RS]),
            Preset::DecoupledTokenIcepop => decoupled(Some(TOKEN_ICEPOP), &[]),
            Preset::DecoupledTokenIs => decoupled(Some(TOKEN_TIS), &[]),
            Preset::Disabled => decoupled(None, &[]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sorted_valid_and_name_their_mode() {
        assert!(Preset::ALL.is_sorted_by_key(|preset| preset.as_str()));
        for preset in Preset::ALL {
            let correction = RolloutCorrection::from(*preset);
            correction.check().unwrap();
            let bypass = matches!(correction.mode, Mode::Bypass(_));
            assert_eq!(bypass, preset.as_str().starts_with("bypass"), "{preset}");
        }
    }
}
