//! The rules of [`ValueInterface`].

use burn::tensor::Device;

use super::Violation;
use super::probe::{apart, ids, one_step, sequences, unmoved, weights};
use crate::critic::Critic;
use crate::model::{PackedValues, ScoreRow, TrainedModel, ValueInterface, ValueModel};

/// Finds all rules that a value model breaks, with a few forward passes on short sequences.
///
/// - Shapes are as documented in [`ValueInterface`], parameter names are unique, and repeating a pass gives the same
///   bits.
/// - Later tokens and other rows change nothing at a position; a row has the same bits at any place in a call.
/// - Gradients reach every parameter whose group is not frozen, and a training step does not change the others. A zero
///   head blocks all gradients, so use other weights.
///
/// ```
/// use burn::tensor::Device;
/// use verl_models::conformance::check_values;
/// use verl_models::value_head::{FreshHead, HeadInit, HeadKind, ValueDecoder};
///
/// let head = FreshHead {
///     kind: HeadKind::SequenceClassification,
///     init: HeadInit::Normal { seed: 1 },
/// };
/// let dir = "tests/models/tiny-random-qwen3".as_ref();
/// let model = ValueDecoder::load(dir, &Device::flex(), Some(head))?;
/// let violations = check_values(&model);
/// assert!(violations.is_empty(), "{violations:#?}");
/// # Ok::<(), verl_models::hf::LoadError>(())
/// ```
pub fn check_values<M: ValueInterface>(model: &M) -> Vec<Violation> {
    let model = model.valid();
    let devices = model.devices();
    let mut check = Check {
        device: devices.into_iter().next().unwrap_or_else(Device::flex),
        length: model.max_tokens().min(12),
        model,
        violations: Vec::new(),
    };
    if check.shapes() {
        check.causality();
        check.rows();
        check.gradients();
    }
    check.violations
}

struct Check<M> {
    /// Without autodiff.
    model: M,
    device: Device,
    /// Tokens per test sequence.
    length: usize,
    violations: Vec<Violation>,
}

impl<M: ValueInterface> Check<M> {
    fn fail(&mut self, rule: &'static str, found: String) {
        self.violations.push(Violation { rule, found });
    }

    fn sequences(&self, rows: usize) -> Vec<Vec<u32>> {
        sequences(rows, self.length, self.model.vocab_size())
    }

    /// Values `[B, S]`, flattened.
    fn values(&self, rows: &[Vec<u32>]) -> Vec<f32> {
        let values = self.model.values(ids(rows, &self.device)).into_data();
        values.iter::<f32>().collect()
    }

    /// Checks sizes and shapes; returns whether the other checks can run.
    fn shapes(&mut self) -> bool {
        let before = self.violations.len();
        let rule = "sizes and shapes are as declared";
        let vocab = self.model.vocab_size();
        if vocab < 2 || self.length < 2 {
            let context = self.model.max_tokens();
            let found =
                format!("vocabulary {vocab} and context {context}; both must be at least 2");
            self.fail(rule, found);
            return false;
        }
        let rows = self.sequences(2);
        let shape = self.model.values(ids(&rows, &self.device)).dims();
        if shape != [2, self.length] {
            let found = format!("[B, S] = [2, {}] gives values {shape:?}", self.length);
            self.fail(rule, found);
        }
        let mut names: Vec<String> = weights(&self.model).into_iter().map(|(n, _)| n).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        if names.is_empty() || names.len() < count {
            let found = format!("{count} parameters with {} names", names.len());
            self.fail("parameter names are unique", found);
        }
        if self.values(&rows) != self.values(&rows) {
            let found = "two passes over the same tokens differ".to_owned();
            self.fail("repeating a pass gives the same bits", found);
        }
        self.violations.len() == before
    }

    fn causality(&mut self) {
        let rows = self.sequences(1);
        let whole = self.values(&rows);
        let rule = "later tokens change nothing";
        for seen in [1, self.length / 2, self.length - 1] {
            let mut changed = rows.clone();
            for id in &mut changed[0][seen..] {
                *id = (*id + 1) % self.model.vocab_size() as u32;
            }
            let cut = self.values(&[rows[0][..seen].to_vec()]);
            for (what, other) in [
                ("values before a changed token", self.values(&changed)),
                ("values of only the first tokens", cut),
            ] {
                let found = apart(rule, what, &other[..seen], &whole[..seen]);
                self.violations.extend(found);
            }
        }
    }

    fn rows(&mut self) {
        let mut rows = self.sequences(5);
        let together = self.values(&rows);
        for (row, together) in rows.iter().zip(together.chunks(self.length)) {
            let alone = self.values(std::slice::from_ref(row));
            let rule = "other rows change nothing";
            let found = apart(rule, "values of a single row", &alone, together);
            self.violations.extend(found);
        }
        rows.reverse();
        let reversed = self.values(&rows);
        let backwards = reversed.chunks(self.length).rev().collect::<Vec<_>>();
        if backwards.concat() != together {
            let found = "five rows in reverse order have different bits".to_owned();
            self.fail("a row has the same bits at any place in a call", found);
        }
    }

    fn gradients(&mut self) {
        let rule = "gradients reach every parameter that is trained";
        let trained = Critic::new(self.model.clone(), Some(one_step()))
            .map_err(|error| error.to_string())
            .and_then(|mut critic| {
                let rows = self.sequences(4);
                let rows: Vec<ScoreRow<'_>> = rows
                    .iter()
                    .map(|row| ScoreRow {
                        prompt: &row[..1],
                        response: &row[1..],
                    })
                    .collect();
                let mut loss = |packed: PackedValues| {
                    let target = packed.values.clone().detach() + 1.0;
                    let error = packed.values - target;
                    (error.clone() * error).mean()
                };
                critic
                    .accumulate(&rows, &|_, _| true, &mut loss)
                    .and_then(|_| critic.optimizer_step())
                    .map_err(|error| error.to_string())?;
                Ok(critic)
            });
        match trained {
            Err(error) => self.fail("a training step succeeds", error),
            Ok(critic) => {
                let group = |name: &str, rank| self.model.parameter_group(name, rank);
                let found = unmoved(&self.model, critic.module(), group);
                found.into_iter().for_each(|found| self.fail(rule, found));
            }
        }
    }
}
