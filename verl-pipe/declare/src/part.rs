//! Parts: configurable components of a stage that are selected by kind, such as the loss that an update minimises.
//!
//! A [`Slot`] is what all parts of one sort are built into. A [`PartConfig`] is the settings of one kind. A [`Part`] is
//! the field of a stage's settings that contains any of them: in a pipeline file a table with `kind` and the kind's
//! settings, or just the name of the kind; in Rust the result of `into` on the settings. A pipeline file finds kinds by
//! name in the registry; a part made in Rust carries its own builder, registered or not.
//!
//! ```
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//! use verl_pipe::part::{Part, PartConfig, Slot};
//! use verl_pipe::registry::Registry;
//! use verl_pipe::stage::{BuildContext, ConfigError};
//!
//! /// A price of a number of tokens: what parts of the slot are built into.
//! struct Price(fn(f64, f64) -> f64, f64);
//! impl Slot for Price {
//!     const NAME: &'static str = "price";
//! }
//!
//! #[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
//! #[serde(default)]
//! struct Linear {
//!     /// Price of a token.
//!     each: f64,
//! }
//! impl PartConfig for Linear {
//!     type Slot = Price;
//!     const KIND: &'static str = "linear";
//!     const SUMMARY: &'static str = "each token costs the same";
//!     fn build(&self, _: &BuildContext) -> Result<Price, Vec<ConfigError>> {
//!         Ok(Price(|each, tokens| each * tokens, self.each))
//!     }
//! }
//!
//! let part: Part<Price> = Linear { each: 0.5 }.into();
//! let Price(cost, each) = part.build("price", &BuildContext::default()).unwrap();
//! assert_eq!(cost(each, 8.0), 4.0);
//! // Pipeline files that this registry reads may say `price = { kind = "linear", each = 0.5 }`.
//! let registry = Registry::new().part::<Linear>();
//! let known: Vec<_> = registry.slot("price").unwrap().iter().map(|kind| kind.name).collect();
//! assert_eq!(known, ["linear"]);
//! ```

use std::any::{Any, TypeId};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use verl_words::diagnostic::suggest;
use verl_words::stage::{BuildContext, ConfigError, config_json};

use crate::config::decode::{Decoded, Fault, decode_known};
use crate::registry::Kinds;

/// What the parts of one sort are built into; a stage's settings have such a part as a field of type [`Part`].
pub trait Slot: Sized + 'static {
    /// Its name in messages, in the schema and in the registry: one word, such as `loss`.
    const NAME: &'static str;
}

/// The settings of one kind of part. A new kind only has to implement this.
///
/// Implementors derive `Deserialize`, `Serialize` and `JsonSchema`. A key that the schema does not have is an error, so
/// `deny_unknown_fields` is not needed, and `flatten` is possible.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the settings of a part (a loss, an estimator)",
    note = "implement `PartConfig` for them: derive `Clone`, `Serialize`, `Deserialize` and `JsonSchema` (with `#[serde(crate = \"verl::serde\")]` and `#[schemars(crate = \"verl::schemars\")]` if your crate does not depend on them); a policy loss implements `PolicyLoss` and is used as `PolicyObjective<{Self}>`"
)]
pub trait PartConfig:
    DeserializeOwned + Serialize + JsonSchema + Clone + Send + Sync + 'static
{
    /// What it is built into.
    type Slot: Slot;
    /// Registered name.
    const KIND: &'static str;
    /// One line for lists.
    const SUMMARY: &'static str;

    /// Builds it; loads nothing.
    ///
    /// # Errors
    /// All invalid settings.
    fn build(&self, context: &BuildContext) -> Result<Self::Slot, Vec<ConfigError>>;
}

/// Builds a part.
type Builder<S> = Arc<dyn Fn(&BuildContext) -> Result<S, Vec<ConfigError>> + Send + Sync>;

/// A part of any kind: its kind, its settings, and how it is built. See the [module](self).
pub struct Part<S> {
    kind: &'static str,
    settings: Map<String, Value>,
    build: Builder<S>,
}

impl<S: Slot> Part<S> {
    /// Its kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// All its settings, including defaults.
    pub fn settings(&self) -> &Map<String, Value> {
        &self.settings
    }

    /// Builds the part. `field` is the setting of the stage that contains it, for messages.
    ///
    /// # Errors
    /// All invalid settings, prefixed with `field`.
    pub fn build(&self, field: &str, context: &BuildContext) -> Result<S, Vec<ConfigError>> {
        (self.build)(context).map_err(|errors| {
            let within = errors.into_iter().map(|error| ConfigError {
                setting: format!("{field}.{}", error.setting),
                ..error
            });
            within.collect()
        })
    }
}

impl<C: PartConfig> From<C> for Part<C::Slot> {
    fn from(config: C) -> Self {
        let settings = match config_json(C::KIND, &config) {
            Ok(Value::Object(settings)) => settings,
            // No settings, or settings that `build` refuses.
            _ => Map::new(),
        };
        Part {
            kind: C::KIND,
            settings,
            build: Arc::new(move |context| {
                config_json(C::KIND, &config)?;
                config.build(context)
            }),
        }
    }
}

impl<S> Clone for Part<S> {
    fn clone(&self) -> Self {
        Part {
            kind: self.kind,
            settings: self.settings.clone(),
            build: self.build.clone(),
        }
    }
}

impl<S> PartialEq for Part<S> {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, &self.settings) == (other.kind, &other.settings)
    }
}

impl<S> fmt::Debug for Part<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part")
            .field("kind", &self.kind)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl<S> Serialize for Part<S> {
    fn serialize<R: Serializer>(&self, serializer: R) -> Result<R::Ok, R::Error> {
        let mut map = serializer.serialize_map(Some(self.settings.len() + 1))?;
        map.serialize_entry(KIND, self.kind)?;
        for (key, value) in &self.settings {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de, S: Slot> Deserialize<'de> for Part<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let Some(slots) = READING.with_borrow(|reading| Some(reading.as_ref()?.slots.clone()))
        else {
            return Err(D::Error::custom(
                "only a registry knows the kinds of parts: deserialise it within `Registry::reading`",
            ));
        };
        slots.read(value).map_err(|faults| {
            let messages: Vec<String> = faults.iter().map(ToString::to_string).collect();
            store_faults(faults);
            D::Error::custom(format!("invalid {}: {}", S::NAME, messages.join("; ")))
        })
    }
}

impl<S: Slot> JsonSchema for Part<S> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        S::NAME.into()
    }

    /// A reference to the kinds of the slot, which `pipeline_schema` fills in.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let kinds = generator.definitions_mut().entry(S::NAME);
        kinds.or_insert(Value::Bool(false));
        Schema::new_ref(format!("#/$defs/{}", S::NAME))
    }
}

/// Key of a part's table that selects its kind.
const KIND: &str = "kind";

/// A part whose slot is known only at run time.
pub struct AnyPart(Box<dyn Any>);

/// Slots by name, each with its kinds.
#[derive(Clone, Default)]
pub struct Slots(BTreeMap<&'static str, SlotKinds>);

#[derive(Clone)]
struct SlotKinds {
    slot: TypeId,
    kinds: Kinds<AnyPart>,
}

impl Slots {
    /// The kinds of the slot that `C` belongs to, created if necessary; `None` if a slot of another type has the same
    /// name.
    pub fn kinds_for<C: PartConfig>(&mut self) -> Option<&mut Kinds<AnyPart>> {
        let slot = TypeId::of::<C::Slot>();
        let name = <C::Slot as Slot>::NAME;
        let kinds = self.0.entry(name).or_insert_with(|| SlotKinds {
            slot,
            kinds: Kinds::new(format!("{name} kinds")),
        });
        (kinds.slot == slot).then_some(&mut kinds.kinds)
    }

    /// The kinds of the slot `name`.
    pub fn get(&self, name: &str) -> Option<&Kinds<AnyPart>> {
        self.0.get(name).map(|slot| &slot.kinds)
    }

    /// The slots by name, with their kinds.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Kinds<AnyPart>)> {
        self.0.iter().map(|(name, slot)| (*name, &slot.kinds))
    }

    /// Reads a part from a value of a pipeline file.
    fn read<S: Slot>(&self, value: Value) -> Result<Part<S>, Vec<Fault>> {
        let (kind, settings) = kind_and_settings(value).map_err(|fault| vec![fault])?;
        let kinds = self.get(S::NAME);
        let Some(entry) = kinds.and_then(|kinds| kinds.get(&kind)) else {
            let help = match kinds {
                Some(kinds) => kinds.suggest(&kind),
                None => suggest(&kind, &format!("{} kinds", S::NAME), []),
            };
            return Err(vec![Fault::UnknownKind {
                path: vec![KIND.to_owned()],
                what: S::NAME,
                kind,
                help,
            }]);
        };
        let Decoded { value, faults } = (entry.declare)(&kind, Value::Object(settings));
        match value.and_then(|part| part.0.downcast().ok()) {
            Some(part) if faults.is_empty() => Ok(*part),
            _ => Err(faults),
        }
    }
}

/// Splits a value into kind and settings; just the name of a kind stands for the kind with its defaults.
fn kind_and_settings(value: Value) -> Result<(String, Map<String, Value>), Fault> {
    let invalid = |path: &[&str], reason: &str| Fault::Invalid {
        path: path.iter().map(|part| (*part).to_owned()).collect(),
        reason: reason.to_owned(),
        known: Vec::new(),
    };
    match value {
        Value::String(kind) => Ok((kind, Map::new())),
        Value::Object(mut table) => match table.shift_remove(KIND) {
            Some(Value::String(kind)) => Ok((kind, table)),
            Some(_) => Err(invalid(&[KIND], "expected a string")),
            None => Err(Fault::Missing {
                path: vec![KIND.to_owned()],
            }),
        },
        _ => Err(invalid(
            &[],
            "expected the name of a kind or a table with `kind`",
        )),
    }
}

/// The part with these settings; keys that the kind does not have are faults.
pub(crate) fn declare<C: PartConfig>(settings: Value) -> Decoded<AnyPart> {
    decode_known::<C>(settings, &[KIND]).map(erase)
}

fn erase<C: PartConfig>(config: C) -> AnyPart {
    AnyPart(Box::new(Part::from(config)))
}

thread_local! {
    /// The state with which this thread reads a pipeline file. serde passes nothing down to a derived `Deserialize`,
    /// and only a string up from it; this does both for parts.
    static READING: RefCell<Option<Reading>> = const { RefCell::new(None) };
}

struct Reading {
    slots: Arc<Slots>,
    /// The faults of the part that failed last; paths begin at the part.
    faults: Vec<Fault>,
}

/// Calls `read`; parts that it deserialises are looked up in `slots`.
pub(crate) fn reading<T>(slots: &Arc<Slots>, read: impl FnOnce() -> T) -> T {
    /// Restores the previous state, also when `read` panics.
    struct Outer(Option<Reading>);
    impl Drop for Outer {
        fn drop(&mut self) {
            READING.set(self.0.take());
        }
    }
    let _outer = Outer(READING.replace(Some(Reading {
        slots: slots.clone(),
        faults: Vec::new(),
    })));
    read()
}

/// Stores the faults of a part for the code that reads the value around it.
fn store_faults(faults: Vec<Fault>) {
    READING.with_borrow_mut(|reading| {
        if let Some(reading) = reading {
            reading.faults = faults;
        }
    });
}

/// Takes the stored faults.
pub(crate) fn take_faults() -> Vec<Fault> {
    READING.with_borrow_mut(|reading| {
        let reading = reading.as_mut();
        reading.map_or_else(Vec::new, |reading| std::mem::take(&mut reading.faults))
    })
}
