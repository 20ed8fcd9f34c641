//! The outcome for each tensor of a checkpoint.

use std::fmt;

/// The outcome for every tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters loaded from the file.
    pub applied: Vec<String>,
    /// Parameters that the file lacks.
    pub missing: Vec<Unmatched>,
    /// Tensors of the file that the model lacks.
    pub unused: Vec<Unmatched>,
    /// Tensors with the wrong shape or a dtype that cannot be converted.
    pub mismatched: Vec<Mismatch>,
    /// Tensors skipped on purpose: rotary buffers, and the stored copy of a tied head.
    pub ignored: Vec<String>,
}

/// A name without counterpart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmatched {
    /// The name.
    pub name: String,
    /// The most similar name on the other side without a counterpart.
    pub nearest: Option<String>,
}

/// A tensor that does not match its parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The name.
    pub name: String,
    /// What the file has and what the model needs.
    pub reason: String,
}

impl LoadReport {
    /// Whether the model may be used: every parameter was loaded, and every tensor inside the decoder was used.
    ///
    /// A tensor outside the decoder (such as a value head) may be unused; an unused tensor inside it (such as a bias
    /// that the config does not declare) would mean that this is not the model that was trained.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
            && self.mismatched.is_empty()
            && self.unused_inside().next().is_none()
    }

    fn unused_inside(&self) -> impl Iterator<Item = &Unmatched> {
        let inside = |name: &str| {
            self.applied
                .iter()
                .map(String::as_str)
                .chain(self.missing.iter().map(|missing| missing.name.as_str()))
                .any(|parameter| parameter.split('.').next() == name.split('.').next())
        };
        self.unused
            .iter()
            .filter(move |unused| inside(&unused.name))
    }

    /// Fills in the nearest names. Call it once all names without a counterpart are known.
    pub(crate) fn suggest(&mut self) {
        let names = |list: &[Unmatched]| list.iter().map(|u| u.name.clone()).collect::<Vec<_>>();
        let (missing, unused) = (names(&self.missing), names(&self.unused));
        for entry in &mut self.missing {
            entry.nearest = nearest(&entry.name, &unused);
        }
        for entry in &mut self.unused {
            entry.nearest = nearest(&entry.name, &missing);
        }
    }
}

/// Names less similar than this are not suggested.
const MIN_SIMILARITY: f64 = 0.6;

fn nearest(name: &str, candidates: &[String]) -> Option<String> {
    candidates
        .iter()
        .map(|candidate| (strsim::normalized_levenshtein(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.clone())
}

/// Maximum number of lines per kind; otherwise a wrong prefix would print every tensor.
const SHOWN: usize = 6;

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unmatched = |kind: &str, side: &str, list: &[Unmatched]| {
            let line = |entry: &Unmatched| match &entry.nearest {
                Some(nearest) => format!("{kind} `{}`; {side} has `{nearest}`", entry.name),
                None => format!("{kind} `{}`", entry.name),
            };
            shortened(kind, list.iter().map(line).collect())
        };
        let mismatched = self.mismatched.iter();
        let mismatched = mismatched.map(|m| format!("mismatched `{}`: {}", m.name, m.reason));
        let lines = [
            unmatched("missing", "the file", &self.missing),
            shortened("mismatched", mismatched.collect()),
            unmatched("unused", "the model", &self.unused),
        ];
        for line in lines.into_iter().flatten() {
            writeln!(f, "  {line}")?;
        }
        write!(f, "  {} tensors match", self.applied.len())
    }
}

fn shortened(kind: &str, mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(SHOWN);
    if more > 0 {
        lines.truncate(SHOWN);
        lines.push(format!("{more} more {kind}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unmatched(names: &[&str]) -> Vec<Unmatched> {
        let entry = |name: &&str| Unmatched {
            name: name.to_string(),
            nearest: None,
        };
        names.iter().map(entry).collect()
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let mut report = LoadReport {
            applied: vec!["model.norm.weight".into()],
            missing: unmatched(&[
                "model.layers.0.mlp.up_proj.weight",
                "model.embed_tokens.weight",
            ]),
            unused: unmatched(&["model.layers.0.mlp.up_project.weight"]),
            mismatched: vec![Mismatch {
                name: "lm_head.weight".into(),
                reason: "the file has [2, 3], the model needs [3, 2]".into(),
            }],
            ignored: vec![],
        };
        report.suggest();
        assert!(!report.is_complete());
        insta::assert_snapshot!(report, @"
        missing `model.layers.0.mlp.up_proj.weight`; the file has `model.layers.0.mlp.up_project.weight`
        missing `model.embed_tokens.weight`
        mismatched `lm_head.weight`: the file has [2, 3], the model needs [3, 2]
        unused `model.layers.0.mlp.up_project.weight`; the model has `model.layers.0.mlp.up_proj.weight`
        1 tensors match
        ");
    }

    #[test]
    fn long_lists_are_shortened() {
        let names: Vec<String> = (0..9).map(|i| format!("model.layers.{i}.x")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let report = LoadReport {
            missing: unmatched(&names),
            ..LoadReport::default()
        };
        let text = report.to_string();
        assert!(text.contains("model.layers.5.x") && !text.contains("model.layers.6.x"));
        assert!(text.contains("3 more missing"), "{text}");
    }

    #[test]
    fn only_tensors_outside_the_decoder_may_be_unused() {
        let mut report = LoadReport {
            applied: vec!["model.norm.weight".into()],
            unused: unmatched(&["score.weight"]),
            ..LoadReport::default()
        };
        assert!(report.is_complete());
        report.unused = unmatched(&["model.layers.0.self_attn.q_proj.bias"]);
        assert!(!report.is_complete());
    }
}
