//! [`Registry`]: maps names of kinds to their builders. The pipeline file, the schema and the command line read it.

use std::borrow::Cow;
use std::sync::Arc;

use schemars::{Schema, SchemaGenerator};
use serde_json::Value;
use verl_rules::{Rule, RuleDecl};
use verl_words::diagnostic::suggest;
use verl_words::stage::{DataConfig, ModelConfig, StageConfig};

use crate::config::decode::{Decoded, decode_known};
use crate::config::{Synonym, Synonyms};
use crate::part::{self, AnyPart, PartConfig, Slot, Slots};
use crate::pipe::{DataDecl, ModelDecl, StageDecl};

/// A registered kind of stage, part, model or data set; `D` is what it declares.
pub struct Kind<D> {
    /// Registered name.
    pub name: &'static str,
    /// One line about it.
    pub summary: &'static str,
    /// Rust type of its settings, with its path.
    pub rust_type: &'static str,
    /// Makes the declaration from a name in the pipeline and a configuration.
    pub declare: fn(&str, Value) -> Decoded<D>,
    /// JSON Schema of its configuration.
    pub schema: fn(&mut SchemaGenerator) -> Schema,
    /// File name extensions that select it (data sets).
    pub extensions: Vec<&'static str>,
}

// A derived `Clone` would require `D: Clone`.
impl<D> Clone for Kind<D> {
    fn clone(&self) -> Self {
        Kind {
            extensions: self.extensions.clone(),
            ..*self
        }
    }
}

/// Kinds of one sort, in the order of registration.
pub struct Kinds<D> {
    what: Cow<'static, str>,
    list: Vec<Kind<D>>,
}

impl<D> Clone for Kinds<D> {
    fn clone(&self) -> Self {
        Kinds {
            what: self.what.clone(),
            list: self.list.clone(),
        }
    }
}

/// A name that is registered for two kinds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there are two {what} called `{name}`")]
pub struct DuplicateKind {
    /// Stage kinds, loss kinds, model kinds, …
    pub what: Cow<'static, str>,
    /// The name.
    pub name: &'static str,
}

impl<D> Kinds<D> {
    pub(crate) fn new(what: impl Into<Cow<'static, str>>) -> Self {
        Kinds {
            what: what.into(),
            list: Vec::new(),
        }
    }

    fn add(&mut self, kind: Kind<D>, duplicates: &mut Vec<DuplicateKind>) {
        if self.get(kind.name).is_some() {
            duplicates.push(DuplicateKind {
                what: self.what.clone(),
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

    /// Help for an unknown `name`: the nearest name and the known ones.
    pub fn suggest(&self, name: &str) -> String {
        let known: Vec<&str> = self.list.iter().map(|kind| kind.name).collect();
        suggest(name, &self.what, known.iter().copied())
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
/// // A duplicate name is reported when the registry is used.
/// assert_eq!(registry.stage::<Judge>().duplicates()[0].to_string(), "there are two stage kinds called `judge`");
/// ```
pub struct Registry {
    stages: Kinds<StageDecl>,
    models: Kinds<ModelDecl>,
    data: Kinds<DataDecl>,
    slots: Arc<Slots>,
    rules: Vec<RuleDecl>,
    synonyms: Vec<Synonym>,
    duplicates: Vec<DuplicateKind>,
}

impl Default for Registry {
    fn default() -> Self {
        Registry::new()
    }
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Registry {
            stages: Kinds::new("stage kinds"),
            models: Kinds::new("model kinds"),
            data: Kinds::new("data kinds"),
            slots: Arc::default(),
            rules: Vec::new(),
            synonyms: Vec::new(),
            duplicates: Vec::new(),
        }
    }

    /// Adds a kind of stage.
    pub fn stage<C: StageConfig>(mut self) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            rust_type: std::any::type_name::<C>(),
            declare: |name, config| {
                decode_known::<C>(config, &[]).map(|config| StageDecl::new(name, config))
            },
            schema: C::json_schema,
            extensions: Vec::new(),
        };
        self.stages.add(kind, &mut self.duplicates);
        self
    }

    /// Adds an anomaly rule to every pipeline that is read with this registry; see
    /// [`DataPipe::rule`](crate::pipe::DataPipe::rule).
    pub fn rule<R: Rule + 'static>(mut self, make: impl Fn() -> R + Send + Sync + 'static) -> Self {
        self.rules.push(RuleDecl::new(make));
        self
    }

    /// Anomaly rules in addition to the built-in ones, in the order in which they were added.
    pub fn rules(&self) -> &[RuleDecl] {
        &self.rules
    }

    /// Adds names that other trainers use for settings of registered kinds.
    pub fn synonyms(mut self, settings: &[Synonym]) -> Self {
        self.synonyms.extend_from_slice(settings);
        self
    }

    /// Names of settings in other trainers.
    pub(crate) fn known_synonyms(&self) -> Synonyms<'_> {
        Synonyms(&self.synonyms)
    }

    /// Adds a kind of part to its slot.
    pub fn part<C: PartConfig>(mut self) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            rust_type: std::any::type_name::<C>(),
            declare: |_, settings| part::declare::<C>(settings),
            schema: C::json_schema,
            extensions: Vec::new(),
        };
        match Arc::make_mut(&mut self.slots).kinds_for::<C>() {
            Some(kinds) => kinds.add(kind, &mut self.duplicates),
            None => self.duplicates.push(DuplicateKind {
                what: "slots".into(),
                name: <C::Slot as Slot>::NAME,
            }),
        }
        self
    }

    /// Adds a kind of model. The one added first is the default of a pipeline file.
    pub fn model<C: ModelConfig>(mut self) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            rust_type: std::any::type_name::<C>(),
            declare: |name, config| {
                decode_known::<C>(config, &[]).map(|config| ModelDecl::new(name, config))
            },
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

    /// Adds a kind of data set that reads files: a path with one of these extensions (no dot) selects this kind.
    pub fn data_files<C: DataConfig>(mut self, extensions: &[&'static str]) -> Self {
        let kind = Kind {
            name: C::KIND,
            summary: C::SUMMARY,
            rust_type: std::any::type_name::<C>(),
            declare: |name, config| {
                decode_known::<C>(config, &[]).map(|config| DataDecl::new(name, config))
            },
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

    /// Kinds of the parts of slot `name`, such as `loss`; `None` if no part of it is registered.
    pub fn slot(&self, name: &str) -> Option<&Kinds<AnyPart>> {
        self.slots.get(name)
    }

    /// Calls `read`, which can deserialise parts of the registered kinds. Required for reading pipeline files.
    ///
    /// ```
    /// # use verl_pipe::part::{Part, Slot};
    /// # use verl_pipe::registry::Registry;
    /// # #[derive(Debug)]
    /// # struct Price;
    /// # impl Slot for Price { const NAME: &'static str = "price"; }
    /// let read = || serde_json::from_str::<Part<Price>>("\"linear\"");
    /// let error = Registry::new().reading(read).unwrap_err();
    /// assert!(error.to_string().contains("unknown price kind `linear`"));
    /// ```
    pub fn reading<T>(&self, read: impl FnOnce() -> T) -> T {
        part::reading(&self.slots, read)
    }

    /// All slots, by name.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Names that were registered twice; the first registration is kept.
    pub fn duplicates(&self) -> &[DuplicateKind] {
        &self.duplicates
    }

    /// The kind of data set that a path selects: the one with its extension, else the kind `file`.
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

    /// The kind of a model that does not set `kind`.
    pub fn default_model(&self) -> Option<&'static str> {
        self.models.iter().next().map(|kind| kind.name)
    }
}

/// Kind of data set for paths whose extension no kind claims.
pub const FILE: &str = "file";
