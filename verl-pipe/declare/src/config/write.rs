//! A [`DataPipe`] as the text of a pipeline file.

use std::path::Path;

use serde::ser::Error as _;
use serde_json::{Map, Value};

use crate::pipe::DataPipe;

/// The pipeline as a file with every setting written out; objects given in code appear by name only. Relative paths of
/// data and models that exist become absolute, so that the file means the same in any folder.
///
/// # Errors
/// A number that TOML cannot represent (above 2⁶³ − 1), a path of the run that is not valid UTF-8.
pub fn to_toml(pipe: &DataPipe) -> Result<String, toml::ser::Error> {
    let entry = |kind: &str, config: &Value| {
        let mut entry = Map::new();
        entry.insert("kind".to_owned(), kind.into());
        entry.extend(config.as_object().cloned().unwrap_or_default());
        if let Some(Value::String(path)) = entry.get_mut("path") {
            *path = absolute_if_exists(&pipe.base, path);
        }
        Value::Object(entry)
    };
    let mut document = Map::new();
    document.insert("name".to_owned(), pipe.name.clone().into());
    for (section, value) in [
        ("run", serde_json::to_value(&pipe.run)),
        ("batch", serde_json::to_value(&pipe.batch)),
        ("devices", serde_json::to_value(&pipe.devices)),
        ("trace", serde_json::to_value(&pipe.trace)),
    ] {
        let value = value.map_err(toml::ser::Error::custom)?;
        document.insert(section.to_owned(), value);
    }
    if !pipe.groups.is_empty() {
        let groups = pipe.groups.iter().map(|(name, config)| {
            let config = serde_json::to_value(config).map_err(toml::ser::Error::custom)?;
            Ok((name.clone(), config))
        });
        let groups: Result<Map<String, Value>, toml::ser::Error> = groups.collect();
        document.insert("groups".to_owned(), Value::Object(groups?));
    }
    let data = pipe
        .data
        .iter()
        .map(|data| (data.name.clone(), entry(&data.kind, &data.config)));
    document.insert("data".to_owned(), Value::Object(data.collect()));
    let models = pipe.models.iter().map(|model| {
        let mut entry = entry(&model.kind, &model.config);
        if let (Some(group), Some(entry)) = (&model.group, entry.as_object_mut()) {
            entry.insert("group".to_owned(), group.clone().into());
        }
        (model.name.clone(), entry)
    });
    document.insert("models".to_owned(), Value::Object(models.collect()));
    let stages = pipe.stages.iter().map(|stage| {
        let mut map = Map::new();
        map.insert("kind".to_owned(), stage.kind.clone().into());
        map.insert("name".to_owned(), stage.name.clone().into());
        if !stage.rename.is_empty() {
            let rename = stage
                .rename
                .iter()
                .map(|(own, key)| (own.clone(), key.clone().into()));
            map.insert("rename".to_owned(), Value::Object(rename.collect()));
        }
        if stage.debug {
            map.insert("debug".to_owned(), true.into());
        }
        if let Some(group) = &stage.group {
            map.insert("group".to_owned(), group.clone().into());
        }
        map.extend(stage.config.as_object().cloned().unwrap_or_default());
        Value::Object(map)
    });
    document.insert("stages".to_owned(), stages.collect());
    let mut document = Value::Object(document);
    drop_nulls(&mut document);
    toml::to_string(&document)
}

/// Makes a path relative to `base` absolute; unchanged if nothing exists there.
fn absolute_if_exists(base: &Path, path: &str) -> String {
    let joined = base.join(path);
    if base.as_os_str().is_empty() || !joined.exists() {
        return path.to_owned();
    }
    let absolute = std::path::absolute(&joined).unwrap_or(joined);
    absolute.to_str().unwrap_or(path).to_owned()
}

/// TOML has no null, so absent options are omitted.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}
