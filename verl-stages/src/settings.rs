//! What settings of this crate's stages and parts are written with.

use verl_algos::AlgoError;
use verl_pipe::diagnostic::suggest;
use verl_pipe::stage::ConfigError;

/// Settings as a plain struct: each with its documentation, its type and its default.
macro_rules! settings {
    (
        $(#[$about:meta])*
        $name:ident { $($(#[$doc:meta])* $setting:ident: $ty:ty = $default:expr),* $(,)? }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(default)]
        pub struct $name { $($(#[$doc])* pub $setting: $ty,)* }

        impl Default for $name {
            fn default() -> Self {
                $name { $($setting: $default,)* }
            }
        }
    };
}
pub(crate) use settings;

/// Metrics that are means, each with its name, unit and meaning.
macro_rules! metrics {
    ($($ident:ident: $name:literal, $unit:literal, $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub const $ident: verl_pipe::stage::Metric = verl_pipe::stage::Metric {
                name: $name,
                unit: $unit,
                meaning: $meaning,
                reduce: verl_pipe::stage::Reduce::Mean,
            };
        )*
    };
}
pub(crate) use metrics;

/// What the maths refuses, as the refusal of a setting: the one that it names, else `setting`.
pub(crate) fn refusal(setting: &str, error: &AlgoError) -> ConfigError {
    match error {
        AlgoError::Setting {
            setting,
            value,
            rule,
        } => ConfigError::new(
            *setting,
            format!("is {value}, but {rule}"),
            "set it to a value that it can have; `pipe schema` tells what it does",
        ),
        AlgoError::MissingSetting {
            algorithm,
            setting,
            reason,
        } => ConfigError::new(
            *setting,
            format!("is not set, but `{algorithm}` needs it and there is no default"),
            *reason,
        ),
        AlgoError::UnknownName { what, name, known } => ConfigError::new(
            setting,
            format!("is `{name}`, which is the name of no {what}"),
            suggest(name, "names", known.iter().copied()),
        ),
        error => ConfigError::new(
            setting,
            format!("is refused: {error}"),
            "`pipe schema` tells what it does",
        ),
    }
}

/// What is wrong with a coefficient.
pub(crate) fn coefficient_fault(name: &str, value: f64) -> Option<ConfigError> {
    let sound = value >= 0.0 && value.is_finite();
    let fault = || ConfigError::new(name, format!("is {value}"), "set it to a number from 0");
    (!sound).then(fault)
}

/// What is wrong with the name of a model or data set that the pipeline does not declare.
pub(crate) fn undeclared(
    setting: &str,
    name: &str,
    known: &[String],
    kind: &str,
) -> Option<ConfigError> {
    let fault = || {
        ConfigError::new(
            setting,
            format!("names `{name}`, but the pipeline declares no such {kind}"),
            format!("declared are: {}", known.join(", ")),
        )
    };
    (!known.iter().any(|known| known == name)).then(fault)
}
