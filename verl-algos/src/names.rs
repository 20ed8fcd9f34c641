//! Enums whose variants have names: the words that settings of pipelines and other trainers use.

/// An enum whose variants have names; the text after the type's name is what messages call it.
///
/// Values are serialised, deserialised and parsed by name; variants are ordered as declared.
macro_rules! names {
    (
        $(#[$about:meta])*
        $type:ident, $what:literal { $($(#[$doc:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        pub enum $type { $($(#[$doc])* #[serde(rename = $name)] $variant,)+ }

        impl $type {
            /// All, in order.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// Its name.
            pub const fn as_str(self) -> &'static str {
                match self { $($type::$variant => $name),+ }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::AlgoError;

            fn from_str(name: &str) -> Result<$type, Self::Err> {
                let found = $type::ALL.iter().find(|known| known.as_str() == name);
                found.copied().ok_or_else(|| $crate::error::AlgoError::UnknownName {
                    what: $what,
                    name: name.to_owned(),
                    known: $type::ALL.iter().map(|known| known.as_str()).collect(),
                })
            }
        }
    };
}
pub(crate) use names;

#[cfg(test)]
mod tests {
    use crate::kl::KlEstimatorName;

    #[test]
    fn names_are_parsed_and_serialised() {
        for name in KlEstimatorName::ALL {
            assert_eq!(name.as_str().parse(), Ok(*name));
            let json = serde_json::to_value(name).unwrap();
            assert_eq!(json, name.as_str());
            assert_eq!(serde_json::from_value(json).ok(), Some(*name));
        }
        let error = "k4".parse::<KlEstimatorName>().unwrap_err().to_string();
        assert!(
            error.starts_with("unknown KL estimator `k4`; known names: kl, "),
            "{error}"
        );
    }
}
