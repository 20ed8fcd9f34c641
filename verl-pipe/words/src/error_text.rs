//! Serialises an error of any type as its text; it is read back as an error with that text.

use std::error::Error;

use serde::{Deserialize, Deserializer, Serializer};

/// Writes the text.
pub(crate) fn serialize<S: Serializer>(
    error: &impl ToString,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&error.to_string())
}

/// Reads an error with that text.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Box<dyn Error + Send + Sync>, D::Error> {
    String::deserialize(deserializer).map(Into::into)
}

#[cfg(test)]
mod tests {
    use crate::batch::{BatchError, RowId};
    use crate::data::DataError;
    use crate::resource::ResourceError;
    use crate::stage::{ConfigError, StageError};

    #[test]
    fn errors_keep_their_kind_and_text() {
        let io = std::io::Error::other("disk \"full\"");
        let missing = DataError::MissingColumn {
            path: "a.jsonl".to_owned(),
            row: 3,
            column: "answer".to_owned(),
            known: "it has: `prompt`".to_owned(),
        };
        let errors = [
            StageError::Batch(BatchError::Rows {
                key: "rewards".to_owned(),
                rows: 2,
                found: 3,
            }),
            StageError::Data(missing),
            StageError::Resource(ResourceError::NotStored),
            StageError::Resource(ResourceError::Failed(io.into())),
            StageError::Model {
                name: "actor".to_owned(),
                reason: "is not here".to_owned(),
            },
            StageError::Row {
                row: 1,
                id: RowId(u64::MAX),
                reason: "is empty".to_owned(),
            },
            StageError::Cancelled,
            StageError::failed("it broke\n  help: fix it"),
        ];
        for error in errors {
            let text = serde_json::to_string(&error).expect("written");
            let read: StageError = serde_json::from_str(&text).expect("read");
            assert_eq!(read.to_string(), error.to_string());
            let kinds = [&read, &error].map(std::mem::discriminant);
            assert_eq!(kinds[0], kinds[1], "{text}");
        }
        let error = ConfigError::new("temperature", "is negative", "use 1.0");
        let text = serde_json::to_string(&error).expect("written");
        assert_eq!(
            serde_json::from_str::<ConfigError>(&text).expect("read"),
            error
        );
    }
}
