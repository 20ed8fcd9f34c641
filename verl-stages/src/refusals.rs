//! Errors of models, rewritten to name the sample: a model knows only the row and request numbers within a call.

use std::fmt::Display;

use verl_models::model::ModelError;
use verl_models::rollout::engine::RolloutError;
use verl_words::batch::RowId;
use verl_words::stage::StageError;

/// The error of a rollout that was asked for `samples` responses to each row of `ids`, with the sample named.
pub(crate) fn refused_request(error: RolloutError, ids: &[RowId], samples: usize) -> StageError {
    let request = match &error {
        RolloutError::TooLong { request, .. }
        | RolloutError::EmptyPrompt { request }
        | RolloutError::TokenId { request, .. }
        | RolloutError::NonFinite { request, .. } => *request,
        RolloutError::Cancelled => return StageError::Cancelled,
        _ => return StageError::failed(error),
    };
    let samples = samples.max(1);
    let Some(id) = ids.get(request / samples) else {
        return StageError::failed(error);
    };
    let sample = match samples {
        1 => Ok(*id),
        _ => id.sample((request % samples) as u64),
    };
    match sample {
        Ok(id) => of_row(&error, &format!("request {request}"), request / samples, id),
        Err(_) => StageError::failed(error),
    }
}

/// The error of a model call on the rows of `ids`, with the sample named.
pub(crate) fn refused_row(error: ModelError, ids: &[RowId]) -> StageError {
    let row = match &error {
        ModelError::TooLong { row, .. }
        | ModelError::TokenId { row, .. }
        | ModelError::EmptyPrompt { row }
        | ModelError::Listed { row, .. } => *row,
        _ => return StageError::failed(error),
    };
    match ids.get(row) {
        Some(id) => of_row(&error, &format!("row {row}"), row, *id),
        None => StageError::failed(error),
    }
}

/// Replaces `named`, with which an error starts, by the sample and its row of the data set.
fn of_row(error: &impl Display, named: &str, row: usize, id: RowId) -> StageError {
    let text = error.to_string();
    let rest = text.strip_prefix(named);
    let reason = rest.map_or(text.as_str(), |rest| rest.trim_start_matches([':', ' ']));
    StageError::Row {
        row,
        id,
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids() -> Vec<RowId> {
        let rows = [3, 89, 7].map(|row| RowId::prompt(0, row).unwrap());
        rows.to_vec()
    }

    #[test]
    fn an_error_of_a_request_names_its_sample() {
        // Four samples per prompt; the error is in the last sample of the second prompt.
        let error = RolloutError::NonFinite {
            request: 7,
            tokens: 2,
        };
        assert_eq!(
            refused_request(error, &ids(), 4).to_string(),
            "sample 0.89#3 (row 90 of the data set): logits are not finite after 2 tokens"
        );
        // One response per row; the row may itself be a sample.
        let error = RolloutError::EmptyPrompt { request: 2 };
        let samples: Vec<RowId> = ids().iter().map(|id| id.sample(5).unwrap()).collect();
        assert_eq!(
            refused_request(error, &samples, 1).to_string(),
            "sample 0.7#5 (row 8 of the data set): has an empty prompt"
        );
        let error = RolloutError::TokenId {
            request: 99,
            id: 5,
            limit: 4,
        };
        assert!(
            refused_request(error, &ids(), 4)
                .to_string()
                .starts_with("request 99 contains")
        );
    }

    #[test]
    fn an_error_of_a_row_names_its_sample() {
        let error = ModelError::TokenId {
            row: 1,
            id: 100_000,
            limit: 512,
        };
        assert_eq!(
            refused_row(error, &ids()).to_string(),
            "sample 0.89#0 (row 90 of the data set): contains token id 100000, but the vocabulary ends at 512"
        );
        assert_eq!(
            refused_row(ModelError::Frozen, &ids()).to_string(),
            ModelError::Frozen.to_string()
        );
    }
}
