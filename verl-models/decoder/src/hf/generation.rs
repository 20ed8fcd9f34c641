//! Special token ids of a folder: generation_config.json takes precedence over config.json.

use std::path::Path;

use super::LoadError;
use super::config::{Origin, Settings, read_object};

/// Special token ids of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// Every id that ends a sequence, in the file's order.
    pub eos_ids: Vec<u32>,
    /// The id that begins a sequence.
    pub bos_id: Option<u32>,
    /// The id declared for padding.
    pub declared_pad_id: Option<u32>,
}

impl GenerationConfig {
    /// Reads a folder. Each setting comes from generation_config.json, else from config.json.
    ///
    /// # Errors
    /// The folder has no config.json, or files or ids are malformed.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let origin = Origin::read(dir)?;
        let path = dir.join("generation_config.json");
        let generation = if path.exists() {
            read_object(&path)?
        } else {
            serde_json::Map::new()
        };
        let first = Settings {
            path,
            map: &generation,
        };
        let second = origin.settings();
        let ids = |name: &str| -> Result<Vec<u32>, LoadError> {
            let ids = first.token_ids(name)?;
            if ids.is_empty() {
                second.token_ids(name)
            } else {
                Ok(ids)
            }
        };
        Ok(GenerationConfig {
            eos_ids: ids("eos_token_id")?,
            bos_id: ids("bos_token_id")?.first().copied(),
            declared_pad_id: ids("pad_token_id")?.first().copied(),
        })
    }

    /// The id that fills rows inside a model call: the declared one, else the first end-of-sequence id, else 0.
    ///
    /// Any id works: pads are to the right of a row, where no earlier position attends to them, and they are never part
    /// of a loss.
    pub fn pad_id(&self) -> u32 {
        self.declared_pad_id
            .or(self.eos_ids.first().copied())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(config: &str, generation: Option<&str>) -> GenerationConfig {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), config).unwrap();
        if let Some(generation) = generation {
            fs::write(dir.path().join("generation_config.json"), generation).unwrap();
        }
        GenerationConfig::read(dir.path()).unwrap()
    }

    #[test]
    fn every_end_of_sequence_id_is_kept() {
        let read = read(
            r#"{"eos_token_id": 9, "bos_token_id": 1}"#,
            Some(r#"{"eos_token_id": [7, 5], "pad_token_id": 3}"#),
        );
        assert_eq!(read.eos_ids, [7, 5]);
        assert_eq!(read.bos_id, Some(1));
        assert_eq!(read.pad_id(), 3);
    }

    #[test]
    fn config_json_is_the_fallback() {
        assert_eq!(read(r#"{"eos_token_id": 9}"#, None).eos_ids, [9]);
        let read = read(r#"{"eos_token_id": 9, "pad_token_id": -1}"#, Some("{}"));
        assert_eq!(read.eos_ids, [9]);
        assert_eq!(read.pad_id(), 9);
    }
}
