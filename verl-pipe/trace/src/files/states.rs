//! State of models and stages at the start of traced steps: content-addressed, so an unchanged state is stored once.

use std::fs;
use std::io::Write;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use verl_rules::format::FORMAT;
use verl_words::resource::StoredState;

use crate::files::atomic::{make_dir, write_atomically, write_json};
use crate::files::documents::{Layout, StateRef, parse};
use crate::files::error::TraceError;
use crate::files::trace_dir::TraceDir;

/// The document next to the tensors: `trace/state/<sha256>.json`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Beside {
    /// Trace format number.
    format: u32,
    /// What the model or stage stores besides its tensors; only it interprets this value.
    about: Value,
}

/// Hash of a state's content, in hexadecimal.
fn name_of(tensors: &[u8], about: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(tensors);
    hash.update(about.as_bytes());
    let hash = hash.finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a state unless it is on disk already; returns its name and the number of bytes written.
pub(crate) fn write_state(
    layout: &Layout,
    state: &StoredState,
) -> Result<(String, u64), TraceError> {
    let dir = layout.state();
    make_dir(&dir)?;
    let about = state.about.to_string();
    let name = name_of(&state.tensors, &about);
    let document = dir.join(format!("{name}.json"));
    if document.exists() {
        return Ok((name, 0));
    }
    let path = dir.join(format!("{name}.safetensors"));
    write_atomically(&path, |mut file| {
        file.write_all(&state.tensors)
            .map_err(|e| TraceError::file("write", &path, e))
    })?;
    let beside = Beside {
        format: FORMAT,
        about: state.about.clone(),
    };
    // Written last: once the document exists, both files are complete.
    write_json(&document, &beside)?;
    Ok((name, (state.tensors.len() + about.len()) as u64))
}

impl TraceDir {
    /// The state that `reference` in a step's manifest refers to; `None` if only its version was recorded.
    ///
    /// # Errors
    /// A file that is missing, damaged or in another format.
    pub fn state(&self, reference: &StateRef) -> Result<Option<StoredState>, TraceError> {
        let Some(name) = &reference.state else {
            return Ok(None);
        };
        let dir = self.layout().state();
        let document = dir.join(format!("{name}.json"));
        let text =
            fs::read_to_string(&document).map_err(|e| TraceError::file("read", &document, e))?;
        let beside: Beside = parse(&document, &text)?;
        let path = dir.join(format!("{name}.safetensors"));
        let tensors = fs::read(&path).map_err(|e| TraceError::file("read", &path, e))?;
        if name_of(&tensors, &beside.about.to_string()) != *name {
            let reason =
                "its content does not match the hash in its name: it was changed or is incomplete";
            return Err(TraceError::damaged(&path, reason));
        }
        Ok(Some(StoredState {
            tensors,
            about: beside.about,
        }))
    }
}

#[cfg(test)]
mod tests {
    use verl_words::resource::WeightsVersion;

    use super::*;
    use crate::files::documents::TraceFormat;
    use crate::files::trace_writer::TraceWriter;

    #[test]
    fn equal_states_are_stored_once() {
        let temp = tempfile::tempdir().expect("a folder");
        let format = TraceFormat {
            format: FORMAT,
            verl: String::new(),
            pipeline: String::new(),
            plan_hash: String::new(),
            seed: 0,
            steps: 1,
            stages: Vec::new(),
        };
        let writer = TraceWriter::create(temp.path(), &format).expect("creates");
        let state = |byte| StoredState {
            tensors: vec![byte; 9],
            about: serde_json::json!({"steps": 3}),
        };
        let (one, bytes) = write_state(writer.layout(), &state(1)).expect("writes");
        assert!(bytes > 9);
        assert_eq!(
            write_state(writer.layout(), &state(1)).expect("writes"),
            (one.clone(), 0)
        );
        let (two, _) = write_state(writer.layout(), &state(2)).expect("writes");
        assert_ne!(one, two);
        let version = WeightsVersion {
            step: 0,
            hash: String::new(),
        };
        let reference = |state| StateRef {
            version: version.clone(),
            state,
        };
        let read = TraceDir::open(temp.path()).expect("opens");
        assert_eq!(
            read.state(&reference(Some(two))).expect("reads"),
            Some(state(2))
        );
        assert_eq!(read.state(&reference(None)).expect("reads"), None);
        let error = read
            .state(&reference(Some("no".to_owned())))
            .expect_err("missing");
        assert_eq!(error.code(), "T005");
        let changed = writer.layout().state().join(format!("{one}.safetensors"));
        fs::write(&changed, [1, 1, 1, 1, 2, 1, 1, 1, 1]).expect("a file");
        let error = read.state(&reference(Some(one))).expect_err("changed");
        assert_eq!(error.code(), "T003");
        assert!(
            error.to_string().contains("does not match the hash"),
            "{error}"
        );
    }
}
