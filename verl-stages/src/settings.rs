//! Macros and checks for the settings of this crate's stages and parts.

use verl_algos::AlgoError;
use verl_words::stage::ConfigError;

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

/// Metrics that are means, each with its name, unit, meaning and, if it has one, its role.
macro_rules! metrics {
    ($($ident:ident: $name:literal, $unit:literal, $meaning:literal $(, $role:ident)?;)*) => {
        $(
            #[doc = $meaning]
            pub const $ident: verl_words::stage::Metric = verl_words::stage::Metric {
                name: $name,
                unit: $unit,
                meaning: $meaning,
                reduce: verl_words::stage::Reduce::Mean,
                role: $crate::settings::metric_role!($($role)?),
            };
        )*
    };
}
pub(crate) use metrics;

/// The role of a metric: none, or a variant of `MetricRole`.
macro_rules! metric_role {
    () => {
        None
    };
    ($role:ident) => {
        Some(verl_words::stage::MetricRole::$role)
    };
}
pub(crate) use metric_role;

/// Turns an [`AlgoError`] into the error of a setting: the one that it names, otherwise `setting`.
pub(crate) fn refusal(setting: &str, error: &AlgoError) -> ConfigError {
    match error {
        AlgoError::Setting {
            setting,
            value,
            rule,
        } => ConfigError::new(
            *setting,
            format!("is {value}, but {rule}"),
            "use a value in the allowed range; `pipe schema` describes the setting",
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
        error => ConfigError::new(
            setting,
            format!("is refused: {error}"),
            "see `pipe schema` for a description of the setting",
        ),
    }
}

/// Refuses a coefficient that is negative or not finite.
pub(crate) fn coefficient_fault(name: &str, value: f64) -> Option<ConfigError> {
    let sound = value >= 0.0 && value.is_finite();
    let fault = || ConfigError::new(name, format!("is {value}"), "set it to 0 or more");
    (!sound).then(fault)
}

/// Refuses the name of a model or data set that the pipeline does not declare.
pub(crate) fn undeclared(
    setting: &str,
    name: &str,
    known: &[String],
    kind: &str,
) -> Option<ConfigError> {
    let fault = || {
        ConfigError::new(
            setting,
            format!("is `{name}`, but the pipeline declares no {kind} with this name"),
            format!("use a declared {kind}: {}", known.join(", ")),
        )
    };
    (!known.iter().any(|known| known == name)).then(fault)
}
