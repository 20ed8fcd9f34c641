//! [`Registry`]: names of kinds → what they are made by. The pipeline file, the schema and the command line read it.

use serde_json::Value;

use crate::config::decode::{Decoded, decode};
use crate::diagnostic::suggest;
use crate::pipe::{DataDecl, ModelDecl, StageDecl};
use crate::stage::{DataConfig, ModelConfig, StageConfig};
use schemars::{Schema, SchemaGenerator};

/// A registered kind of stage, model or data set; `D` is what it declares.
pub struct Kind<D> {
    /// Registered name.
    pub name: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// Makes the declaration from a name in the pipeline and a configuration.
    pub(crate) declare: fn(&str, Value) -> Decoded<D>,
    /// JSON Schema of its configuration.
    pub(crate) schema: fn(&mut SchemaGenerator) -> Schema,
    /// File name extensions that choose it (data sets).
    pub(crate) extensions: Vec<&'static str>,
}

/// Kinds of one sort, in the order of registration.
pub struct Kinds<D> {
    what: &'static str,
    list: Vec<Kind<D>>,
}

/// A name that two kinds want.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there are two {what} called `{name}`")]
pub struct DuplicateKind {
    /// Stage kinds, model kinds or data kinds.
    pub what: &'static str,
    /// The name.
    pub name: &'static str,
}

impl<D> Kinds<D> {
    fn new(what: &'static str) -> Self {
        Kinds {
            what,
            list: Vec::new(),
        }
    }

    fn add(&mut self, kind: Kind<D>, duplicates: &mut Vec<DuplicateKind>) {
        if self.get(kind.name).is_some() {
            duplicates.push(DuplicateKind {
                what: self.what,
                name: kind.name,
            });
        } else {
            self.list.push(kind);
        }
    }

    /// The kind `name`.
    pub fn get(&self, name: &str) -> Option<&Kind<D>> {
        self.list.iter().find(|kind| kind.name == name)
    }

    /// The kinds, in the order of registration.
    pub fn iter(&self) -> impl Iterator<Item = &Kind<D>> {
        self.list.iter()
    }

    /// Help for somebody who wrote `name`: the nearest name and the known ones.
    pub fn suggest(&self, name: &str) -> String {
        let known: Vec<&str> = self.list.iter().map(|kind| kind.name).collect();
        suggest(name, self.what, known.iter().copied())
    }
}

/// The kinds that pipeline files may use.
///
/// ```
/// # use schemars::JsonSchema;
/// # use serde::{Deserialize, Serialize};
/// # use verl_pipe::stage::{BuildContext, ConfigError, Stage, StageConfig};
/// use verl_pipe::registry::Registry;
///
/// # #[derive(Clone, Serialize, Deserialize, JsonSchema)]
/// # struct Judge;
/// # impl StageConfig for Judge {
/// #     const KIND: &'static str = "judge";
/// #     const SUMMARY: &'static str = "judges";
/// #     fn build(&self, _: &BuildContext) -> Result<Box<dyn Stage>, Vec<ConfigError>> { Err(Vec::new()) }
/// # }
/// let registry = Registry::new().stage::<Judge>();
/// assert!(registry.stages().get("judge").is_some());
/// assert!(registry.stages().suggest("jugde").starts_with("did you mean `judge`?"));
/// // The same name twice is refused when the registry is used.
/// assert_eq!(registry.stage::<Judge>().duplicates()[0].to_string(), "there are two stage kinds called `judge`");
/// ```
pub struct Registry {
    stages: Kinds<StageDecl>,
    models: Kinds<ModelDecl>,
    data: Kinds<DataDecl>,
    duplicates: Vec<DuplicateKind>,
}

impl Default for Registry {
    fn default() -> Self {
        Registry::new()
    }
}

impl Registry {
    /// A registry that knows nothing.
    pub fn new() -> Self {
        Registry {
            stages: Kinds::new("stage kinds"),
            models: Kinds::new("model kinds"),
            data: Kinds::new("data kinds"),
            duplicates: Vec::new(),
        }
    }

    /// Adds a kind of stage.
    pub fn stage<C: StageConfig>(mut self) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            declare: |name, config| decode::<C>(config).map(|config| StageDecl::new(name, config)),
            schema: C::json_schema,
            extensions: Vec::new(),
        };
        self.stages.add(kind, &mut self.duplicates);
        self
    }

    /// Adds a kind of model. The one that was added first is meant where a pipeline file names none.
    pub fn model<C: ModelConfig>(mut self) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            declare: |name, config| decode::<C>(config).map(|config| ModelDecl::new(name, config)),
            schema: C::json_schema,
            extensions: Vec::new(),
        };
        self.models.add(kind, &mut self.duplicates);
        self
    }

    /// Adds a kind of data set.
    pub fn data<C: DataConfig>(self) -> Self {
        self.data_files::<C>(&[])
    }

    /// Adds a kind of data set that reads files: a path with one of these extensions (without the dot) means this kind.
    pub fn data_files<C: DataConfig>(mut self, extensions: &[&'static str]) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            declare: |name, config| decode::<C>(config).map(|config| DataDecl::new(name, config)),
            schema: C::json_schema,
            extensions: extensions.to_vec(),
        };
        self.data.add(kind, &mut self.duplicates);
        self
    }

    /// Kinds of stages.
    pub fn stages(&self) -> &Kinds<StageDecl> {
        &self.stages
    }

    /// Kinds of models.
    pub fn models(&self) -> &Kinds<ModelDecl> {
        &self.models
    }

    /// Kinds of data sets.
    pub fn data_kinds(&self) -> &Kinds<DataDecl> {
        &self.data
    }

    /// Names that were registered twice; the first one stays.
    pub fn duplicates(&self) -> &[DuplicateKind] {
        &self.duplicates
    }

    /// The kind of data set that a path means: the one with its extension, else the kind `file`.
    pub(crate) fn kind_of_path(&self, path: &str) -> Option<&'static str> {
        let extension = std::path::Path::new(path)
            .extension()
            .and_then(|text| text.to_str())
            .unwrap_or_default();
        let by_extension = self.data.iter().find(|kind| {
            kind.extensions
                .iter()
                .any(|known| known.eq_ignore_ascii_case(extension))
        });
        by_extension
            .or_else(|| self.data.get(FILE))
            .map(|kind| kind.name)
    }

    /// The kind of model where none is named.
    pub(crate) fn default_model(&self) -> Option<&'static str> {
        self.models.iter().next().map(|kind| kind.name)
    }
}

/// Kind of data set for paths whose extension no kind claims.
pub(crate) const FILE: &str = "file";
