//! State that a stage keeps between steps, as snapshots contain it.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use verl_words::resource::{ResourceError, Snapshot, StoredState, WeightsVersion};
use verl_words::stage::StageError;

/// A snapshot of `state`; a stage has no weights, so the version is empty.
pub(crate) fn snapshot<T: Clone + Send + Sync + 'static>(state: &T) -> Snapshot {
    Snapshot {
        version: WeightsVersion {
            step: 0,
            hash: String::new(),
        },
        state: Arc::new(state.clone()),
    }
}

/// The state in a snapshot.
///
/// # Errors
/// A snapshot of another type.
pub(crate) fn restored<T: Clone + 'static>(snapshot: &Snapshot) -> Result<T, StageError> {
    let state = snapshot.state.downcast_ref::<T>();
    Ok(state.ok_or(ResourceError::ForeignSnapshot)?.clone())
}

/// The state in a snapshot, as it is stored on disk.
///
/// # Errors
/// A snapshot of another type.
pub(crate) fn stored<T: Clone + Serialize + 'static>(
    snapshot: &Snapshot,
) -> Result<Option<StoredState>, StageError> {
    let state: T = restored(snapshot)?;
    let about = serde_json::to_value(state).map_err(StageError::failed)?;
    Ok(Some(StoredState {
        tensors: Vec::new(),
        about: exact(about),
    }))
}

/// The snapshot that [`stored`] wrote.
///
/// # Errors
/// Stored state of another type.
pub(crate) fn recalled<T: Clone + DeserializeOwned + Send + Sync + 'static>(
    version: &WeightsVersion,
    stored: &StoredState,
) -> Result<Snapshot, StageError> {
    let about = inexact(stored.about.clone());
    let state: T = serde_json::from_value(about).map_err(StageError::failed)?;
    Ok(Snapshot {
        version: version.clone(),
        state: Arc::new(state),
    })
}

/// Key of the object that stores a number by its bits.
const BITS: &str = "f64";

/// Replaces floating-point numbers by their bits, since decimal text may be parsed as an adjacent number.
fn exact(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => {
            let bits = number.as_f64().unwrap_or_default().to_bits();
            json!({ BITS: format!("{bits:016x}") })
        }
        Value::Array(list) => list.into_iter().map(exact).collect(),
        Value::Object(map) => map.into_iter().map(|(k, v)| (k, exact(v))).collect(),
        other => other,
    }
}

/// Undoes [`exact`].
fn inexact(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let bits = map.get(BITS).and_then(Value::as_str);
            let bits = bits.and_then(|bits| u64::from_str_radix(bits, 16).ok());
            match bits {
                Some(bits) if map.len() == 1 => json!(f64::from_bits(bits)),
                _ => map.into_iter().map(|(k, v)| (k, inexact(v))).collect(),
            }
        }
        Value::Array(list) => list.into_iter().map(inexact).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_round_trips_bit_for_bit() {
        let third = 1.0 / 3.0;
        let state = (
            vec![third, f64::MIN_POSITIVE, -0.0, 1e300],
            Some(third),
            7u64,
        );
        let kept = snapshot(&state);
        let text = stored::<(Vec<f64>, Option<f64>, u64)>(&kept)
            .unwrap()
            .unwrap();
        let read: Value = serde_json::from_str(&text.about.to_string()).unwrap();
        let text = StoredState {
            about: read,
            ..text
        };
        let back = recalled::<(Vec<f64>, Option<f64>, u64)>(&kept.version, &text).unwrap();
        let back: (Vec<f64>, Option<f64>, u64) = restored(&back).unwrap();
        let bits = |state: &(Vec<f64>, Option<f64>, u64)| -> Vec<u64> {
            state.0.iter().map(|number| number.to_bits()).collect()
        };
        assert_eq!(
            (bits(&back), back.1, back.2),
            (bits(&state), state.1, state.2)
        );
        assert!(stored::<u64>(&kept).is_err());
        assert!(recalled::<u64>(&kept.version, &text).is_err());
    }
}
