//! Shaping of rewards by how a response ends.

use crate::error::{AlgoError, check_given, check_len, check_setting};
use crate::ragged::Ragged;

/// Tokens of the response up to and including its first end-of-sequence token; all if there is none.
///
/// # Shapes
/// `tokens`: `[T]`, one response; result: a number of tokens.
/// # Differences
/// In a padded array verl also counts the padding if there is no such token; ragged rows have none.
/// # Source
/// verl `get_response_mask`.
pub fn response_length(tokens: &[u32], eos_ids: &[u32]) -> usize {
    let end = tokens.iter().position(|token| eos_ids.contains(token));
    end.map_or(tokens.len(), |end| end + 1)
}

/// Subtracts `penalty` from the score of each row that did not end on its own.
///
/// # Shapes
/// `scores`, `ended`, result: `[B]`
/// # Errors
/// Lengths that differ; a score or penalty that is not finite, or a negative penalty.
/// # Differences
/// TRL looks for the token in the padded response; here the caller says which rows ended.
/// # Source
/// `missing_eos_penalty` of TRL's PPO.
pub fn missing_eos_penalty(
    scores: &[Option<f64>],
    ended: &[bool],
    penalty: f64,
) -> Result<Vec<Option<f64>>, AlgoError> {
    let valid = penalty >= 0.0 && penalty.is_finite();
    let rule = "it must be a finite number of at least 0";
    check_setting("missing_eos_penalty", penalty, valid, rule)?;
    of_unended(scores, ended, |score| score - penalty)
}

/// Changes the score of each row that did not end on its own: a coefficient from 0 to 1 multiplies
/// it, a negative one replaces it.
///
/// # Shapes
/// `scores`, `ended`, result: `[B]`
/// # Errors
/// Lengths that differ; a score that is not finite; a coefficient that is above 1 or not finite.
/// # Differences
/// None known compared with OpenRLHF, which also goes by the finish reason.
/// # Source
/// The "stop properly" penalty of OpenRLHF, after ProRL: Liu et al. 2025, arXiv:2505.24864.
pub fn stop_properly(
    scores: &[Option<f64>],
    ended: &[bool],
    coef: f64,
) -> Result<Vec<Option<f64>>, AlgoError> {
    let valid = coef <= 1.0 && coef.is_finite();
    let rule = "it must lie in [0, 1], or be negative to replace the score";
    check_setting("stop_properly_coef", coef, valid, rule)?;
    of_unended(
        scores,
        ended,
        |score| {
            if coef >= 0.0 { score * coef } else { coef }
        },
    )
}

/// The mask without the rows that did not end on their own: they are not trained on.
///
/// Their scores still count in their group.
///
/// # Shapes
/// `actions`, result: `[B, T~]`; `ended`: `[B]`
/// # Errors
/// A wrong number of rows.
/// # Differences
/// TRL considers a row truncated if its last token neither ends nor pads, verl if it has no end-of-sequence token; here
/// the caller says which rows ended, as reported by engines.
/// # Source
/// `mask_truncated_completions` of TRL; Yu et al. 2025 (DAPO), arXiv:2503.14476, overlong filtering.
pub fn without_truncated(
    actions: &Ragged<bool>,
    ended: &[bool],
) -> Result<Ragged<bool>, AlgoError> {
    check_len("ended", "rows", ended.len(), actions.num_rows())?;
    Ok(actions.map(|b, _, action| action && ended[b]))
}

fn of_unended(
    scores: &[Option<f64>],
    ended: &[bool],
    change: impl Fn(f64) -> f64,
) -> Result<Vec<Option<f64>>, AlgoError> {
    check_len("ended", "rows", ended.len(), scores.len())?;
    check_given("scores", scores)?;
    let each = scores.iter().zip(ended);
    Ok(each
        .map(|(score, ended)| match ended {
            true => *score,
            false => score.map(&change),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: [Option<f64>; 3] = [Some(2.0), Some(2.0), None];
    const ENDED: [bool; 3] = [true, false, false];

    #[test]
    fn a_response_ends_with_its_first_eos() {
        assert_eq!(response_length(&[5, 9, 7, 9], &[7, 9]), 2);
        assert_eq!(response_length(&[5, 6], &[7, 9]), 2);
        assert_eq!(response_length(&[7], &[7]), 1);
        assert_eq!(response_length(&[], &[7]), 0);
    }

    #[test]
    fn only_rows_that_did_not_end_are_penalised() {
        let got = missing_eos_penalty(&SCORES, &ENDED, 0.5).unwrap();
        assert_eq!(got, [Some(2.0), Some(1.5), None]);
        let got = stop_properly(&SCORES, &ENDED, 0.25).unwrap();
        assert_eq!(got, [Some(2.0), Some(0.5), None]);
        let got = stop_properly(&SCORES, &ENDED, -1.0).unwrap();
        assert_eq!(got, [Some(2.0), Some(-1.0), None]);
    }

    #[test]
    fn truncated_rows_leave_the_mask() {
        let actions = Ragged::<bool>::from_rows([vec![true, false], vec![true], vec![]]);
        let kept = without_truncated(&actions, &ENDED).unwrap();
        assert_eq!(kept.values(), [true, false, false]);
        assert!(without_truncated(&actions, &ENDED[1..]).is_err());
    }

    #[test]
    fn rejects_invalid_inputs() {
        assert!(missing_eos_penalty(&SCORES, &ENDED, -1.0).is_err());
        assert!(missing_eos_penalty(&SCORES, &ENDED[1..], 1.0).is_err());
        assert!(missing_eos_penalty(&[Some(f64::INFINITY)], &[true], 1.0).is_err());
        assert!(stop_properly(&SCORES, &ENDED, 1.5).is_err());
        assert!(stop_properly(&SCORES, &ENDED, f64::NAN).is_err());
    }
}
