//! The rules of every [`ModelInterface`], as checks to call from a model's tests.
//!
//! ```
//! use burn::tensor::Device;
//! use verl_models::{Decoder, conformance::check_model};
//!
//! let model = Decoder::load("tests/models/tiny-random-qwen3".as_ref(), &Device::flex())?;
//! let violations = check_model(&model);
//! assert!(violations.is_empty(), "{violations:#?}");
//! # Ok::<(), verl_models::hf::LoadError>(())
//! ```

mod probe;
mod values;

use std::fmt;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor};
use verl_kernels::random::{DrawKey, Purpose};
use verl_rollout::engine::{
    FinishReason, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings,
};

pub use values::check_values;

use probe::{TOLERANCE, apart, ids, one_step, sequences, unmoved, weights};

use crate::model::{ModelError, ModelInterface, PolicyModel, ScoreRow, TrainedModel};
use crate::policy::Policy;

/// A logit this close to the largest may be chosen instead of it.
const TIE: f32 = 1e-4;

/// A rule that a model breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The rule, in a few words.
    pub rule: &'static str,
    /// What was observed instead.
    pub found: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.found)
    }
}

/// Finds all rules that `model` breaks, with a few forward passes on short sequences.
///
/// - Shapes are as documented in [`ModelInterface`], parameter names are unique, and repeating a pass gives the same
///   bits.
/// - Later tokens and other rows change nothing at a position.
/// - `forward` is `hidden · headᵀ`.
/// - Gradients reach every parameter whose group is not frozen, and a training step does not change the others.
/// - `generate` answers each request once, within its limit and the vocabulary; a response depends only on its
///   request's prompt and key; greedy tokens are the most probable ones; log-probs match those of a forward pass; an
///   end-of-sequence id ends a response; invalid requests are refused.
pub fn check_model<M: ModelInterface>(model: &M) -> Vec<Violation> {
    let mut check = Check::new(model);
    if check.shapes() {
        check.causality();
        check.rows();
        check.forward();
        check.gradients();
        check.limits_and_seeds();
        check.greedy();
        check.log_probs();
        check.refusals();
    }
    check.violations
}

/// Finds what is lost when `model` is saved to `dir` (which must not exist) and loaded from there with `load`.
pub fn check_saving<M: ModelInterface>(
    model: &M,
    dir: &Path,
    load: impl FnOnce(&Path) -> Result<M, ModelError>,
) -> Vec<Violation> {
    let mut check = Check::new(model);
    let loaded = match model.save(dir).and_then(|()| load(dir)) {
        Ok(loaded) => loaded,
        Err(error) => {
            check.fail("a saved model can be loaded", error.to_string());
            return check.violations;
        }
    };
    let (own, saved) = (weights(&model.valid()), weights(&loaded.valid()));
    if own.len() != saved.len() {
        let counts = format!("{} parameters became {}", own.len(), saved.len());
        check.fail("a saved model can be loaded", counts);
    }
    for ((name, own), (other, saved)) in own.iter().zip(&saved) {
        if name != other || own != saved {
            let found = format!("parameter `{name}` changed (loaded as `{other}`)");
            check.fail("a saved model has the same weights", found);
        }
    }
    let ids = check.sequences(1, check.length);
    let before = check.hidden(&ids);
    if before != Check::new(&loaded).hidden(&ids) {
        let found = "hidden states of the same tokens differ".to_owned();
        check.fail("a saved model computes the same", found);
    }
    check.violations
}

struct Check<M> {
    /// Without autodiff.
    model: M,
    device: Device,
    vocab: usize,
    /// Tokens per test sequence.
    length: usize,
    violations: Vec<Violation>,
}

impl<M: ModelInterface> Check<M> {
    fn new(model: &M) -> Self {
        let model = model.valid();
        let devices = model.devices();
        Check {
            device: devices.into_iter().next().unwrap_or_else(Device::flex),
            vocab: model.vocab_size(),
            length: model.max_tokens().min(12),
            model,
            violations: Vec::new(),
        }
    }

    fn fail(&mut self, rule: &'static str, found: String) {
        self.violations.push(Violation { rule, found });
    }

    fn sequences(&self, rows: usize, length: usize) -> Vec<Vec<u32>> {
        sequences(rows, length, self.vocab)
    }

    fn ids(&self, rows: &[Vec<u32>]) -> Tensor<2, Int> {
        ids(rows, &self.device)
    }

    /// Hidden states `[B, S, D]`, flattened.
    fn hidden(&self, rows: &[Vec<u32>]) -> Vec<f32> {
        let hidden = self.model.hidden(self.ids(rows)).into_data();
        hidden.iter::<f32>().collect()
    }

    /// Logits `[B, S, V]`, flattened.
    fn logits(&self, rows: &[Vec<u32>]) -> Vec<f32> {
        let logits = self.model.forward(self.ids(rows)).into_data();
        logits.iter::<f32>().collect()
    }

    fn close(&mut self, rule: &'static str, what: &str, got: &[f32], want: &[f32]) {
        self.violations.extend(apart(rule, what, got, want));
    }

    /// Checks sizes and shapes; returns whether the other checks can run.
    fn shapes(&mut self) -> bool {
        let rule = "sizes and shapes are as declared";
        let before = self.violations.len();
        if self.vocab < 2 || self.length < 2 {
            let found = format!(
                "vocabulary {} and context {}; both must be at least 2",
                self.vocab,
                self.model.max_tokens()
            );
            self.fail(rule, found);
            return false;
        }
        let rows = self.sequences(2, self.length);
        let hidden = self.model.hidden(self.ids(&rows)).dims();
        let head = self.model.head().dims();
        let logits = self.model.forward(self.ids(&rows)).dims();
        let expected = ([2, self.length, head[1]], [self.vocab, head[1]]);
        if (hidden, head) != expected || logits != [2, self.length, self.vocab] {
            let found = format!(
                "[B, S] = [2, {}] gives hidden {hidden:?}, head {head:?}, logits {logits:?} with V = {}",
                self.length, self.vocab
            );
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
        if self.hidden(&rows) != self.hidden(&rows) {
            let found = "two passes over the same tokens differ".to_owned();
            self.fail("repeating a pass gives the same bits", found);
        }
        self.violations.len() == before
    }

    fn causality(&mut self) {
        let rows = self.sequences(1, self.length);
        let width = self.model.head().dims()[1];
        let whole = self.hidden(&rows);
        let rule = "later tokens change nothing";
        for seen in [1, self.length / 2, self.length - 1] {
            let mut changed = rows.clone();
            for id in &mut changed[0][seen..] {
                *id = (*id + 1) % self.vocab as u32;
            }
            let other = self.hidden(&changed);
            let what = format!("hidden states before position {seen}");
            self.close(rule, &what, &other[..seen * width], &whole[..seen * width]);
            let cut = self.hidden(&[rows[0][..seen].to_vec()]);
            let what = format!("hidden states of only the first {seen} tokens");
            self.close(rule, &what, &cut, &whole[..seen * width]);
        }
    }

    fn rows(&mut self) {
        let rows = self.sequences(5, self.length);
        let together = self.hidden(&rows);
        let one = together.len() / rows.len();
        for (row, together) in rows.iter().zip(together.chunks(one)) {
            let alone = self.hidden(std::slice::from_ref(row));
            self.close(
                "other rows change nothing",
                "hidden states of a single row",
                &alone,
                together,
            );
        }
    }

    fn forward(&mut self) {
        let rows = self.sequences(2, self.length);
        let hidden = self.model.hidden(self.ids(&rows));
        let [b, s, d] = hidden.dims();
        let logits = hidden
            .reshape([b * s, d])
            .matmul(self.model.head().transpose());
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        let forward = self.logits(&rows);
        self.close("forward is hidden · headᵀ", "logits", &forward, &logits);
    }

    fn gradients(&mut self) {
        let rule = "gradients reach every parameter that is trained";
        let trained = Policy::new(self.model.clone(), Some(one_step()))
            .map_err(|error| error.to_string())
            .and_then(|mut policy| {
                let rows = self.sequences(4, self.length);
                let rows: Vec<ScoreRow<'_>> = rows
                    .iter()
                    .map(|row| ScoreRow {
                        prompt: &row[..1],
                        response: &row[1..],
                    })
                    .collect();
                policy
                    .accumulate(&rows, &|_, _| true, 1.0, false, &mut |packed| {
                        -packed.log_probs.mean()
                    })
                    .and_then(|_| policy.optimizer_step())
                    .map_err(|error| error.to_string())?;
                Ok(policy)
            });
        let policy = match trained {
            Ok(policy) => policy,
            Err(error) => return self.fail("a training step succeeds", error),
        };
        let group = |name: &str, rank| self.model.parameter_group(name, rank);
        let found = unmoved(&self.model, policy.module(), group);
        found.into_iter().for_each(|found| self.fail(rule, found));
    }

    fn request(&self, row: u64, prompt: &[u32], max_new_tokens: usize) -> RolloutRequest {
        RolloutRequest {
            prompt: prompt.to_vec(),
            key: DrawKey {
                seed: 3,
                purpose: Purpose::Rollout,
                step: 1,
                row,
                attempt: 0,
            },
            max_new_tokens,
        }
    }

    /// Responses in the order of the requests; `None` if there is not exactly one per request.
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
    ) -> Option<Vec<RolloutOutput>> {
        let rule = "each request is answered once";
        let mut outputs: Vec<Vec<RolloutOutput>> = vec![Vec::new(); requests.len()];
        let mut unknown = 0;
        let result = self.model.generate(requests, settings, &mut |at, output| {
            match outputs.get_mut(at) {
                Some(answers) => answers.push(output),
                None => unknown += 1,
            }
            Ok(())
        });
        if let Err(error) = result {
            self.fail(rule, error.to_string());
            return None;
        }
        let counts: Vec<usize> = outputs.iter().map(Vec::len).collect();
        if unknown > 0 || counts.iter().any(|&count| count != 1) {
            let found =
                format!("answers per request: {counts:?}, and {unknown} for unknown requests");
            self.fail(rule, found);
            return None;
        }
        Some(outputs.into_iter().flatten().collect())
    }

    /// Requests with all limits that the context allows, every prompt twice.
    fn requests(&self) -> Vec<RolloutRequest> {
        let prompts = self.sequences(3, self.length / 2);
        let room = self.length - self.length / 2;
        (0..6)
            .map(|at| self.request(at as u64, &prompts[at / 2], 1 + (at * 2) % room))
            .chain([self.request(6, &prompts[0][..1], room)])
            .collect()
    }

    fn limits_and_seeds(&mut self) {
        let requests = self.requests();
        let settings = SamplingSettings::default();
        let Some(outputs) = self.generate(&requests, &settings) else {
            return;
        };
        for (at, (request, output)) in requests.iter().zip(&outputs).enumerate() {
            let count = output.tokens.len();
            let outside = output.tokens.iter().any(|&id| id as usize >= self.vocab);
            // Without an end-of-sequence id, only the limit ends a response.
            if count != request.max_new_tokens || output.finish != FinishReason::Length || outside {
                let found = format!(
                    "request {at} for {} tokens got {:?}, {:?}, with vocabulary {}",
                    request.max_new_tokens, output.tokens, output.finish, self.vocab
                );
                self.fail("responses respect the limit and the vocabulary", found);
            }
            let log_probs = [&output.log_probs, &output.sampling_log_probs];
            if log_probs.iter().any(|values| {
                values.len() != count || values.iter().any(|x| !x.is_finite() || *x > TOLERANCE)
            }) {
                let found = format!("request {at} got {log_probs:?} for {count} tokens");
                self.fail("every token has a log-prob", found);
            }
        }
        let rule = "a response depends only on prompt and key";
        let mut reversed = requests.clone();
        reversed.reverse();
        if let Some(mut again) = self.generate(&reversed, &settings) {
            again.reverse();
            for (at, (output, again)) in outputs.iter().zip(&again).enumerate() {
                if output.tokens != again.tokens {
                    let (a, b) = (&output.tokens, &again.tokens);
                    self.fail(rule, format!("request {at} gave {a:?}, then {b:?}"));
                }
            }
        }
        if let Some(alone) = self.generate(&requests[2..3], &settings)
            && alone[0].tokens != outputs[2].tokens
        {
            let (a, b) = (&alone[0].tokens, &outputs[2].tokens);
            self.fail(
                rule,
                format!("request 2 alone gave {a:?}, among others {b:?}"),
            );
        }
        self.other_keys();
    }

    /// Eight keys for one prompt must not all give the same response, unless it is almost certain.
    fn other_keys(&mut self) {
        let prompt = self.sequences(1, self.length / 2).concat();
        let room = self.length - prompt.len();
        let requests: Vec<_> = (0..8).map(|row| self.request(row, &prompt, room)).collect();
        let Some(outputs) = self.generate(&requests, &SamplingSettings::default()) else {
            return;
        };
        let certain = outputs[0].log_probs.iter().sum::<f32>() > -0.5;
        if !certain && outputs.iter().all(|o| o.tokens == outputs[0].tokens) {
            let found = format!("all of eight keys gave {:?}", outputs[0].tokens);
            self.fail("different keys give different draws", found);
        }
    }

    fn greedy(&mut self) {
        let requests = self.requests();
        let settings = SamplingSettings {
            temperature: 0.0,
            ..SamplingSettings::default()
        };
        let Some(outputs) = self.generate(&requests, &settings) else {
            return;
        };
        for (at, (request, output)) in requests.iter().zip(&outputs).enumerate() {
            let row = [request.prompt.as_slice(), &output.tokens].concat();
            let logits = self.logits(std::slice::from_ref(&row));
            let steps = logits.chunks(self.vocab).skip(request.prompt.len() - 1);
            for (logits, &token) in steps.zip(&output.tokens) {
                let largest = logits.iter().copied().fold(f32::MIN, f32::max);
                let chosen = logits.get(token as usize).copied().unwrap_or(f32::MIN);
                if largest - chosen > TIE * largest.abs().max(1.0) {
                    let found =
                        format!("request {at}: token {token} has {chosen}, the largest {largest}");
                    self.fail("greedy tokens are the most probable ones", found);
                }
            }
        }
        let Some(&first) = outputs[0].tokens.first() else {
            return;
        };
        let settings = SamplingSettings {
            eos_ids: vec![first],
            ..settings
        };
        if let Some(ended) = self.generate(&requests[..1], &settings)
            && (ended[0].tokens != [first] || ended[0].finish != FinishReason::Eos)
        {
            let found = format!(
                "id {first} gave {:?}, {:?}",
                ended[0].tokens, ended[0].finish
            );
            self.fail(
                "an end-of-sequence id ends a response and is part of it",
                found,
            );
        }
    }

    fn log_probs(&mut self) {
        let temperature = 0.7;
        let requests = self.requests();
        let settings = SamplingSettings {
            temperature,
            ..SamplingSettings::default()
        };
        let Some(outputs) = self.generate(&requests, &settings) else {
            return;
        };
        for (at, (request, output)) in requests.iter().zip(&outputs).enumerate() {
            let row = [request.prompt.as_slice(), &output.tokens].concat();
            let logits = self.logits(std::slice::from_ref(&row));
            let steps = logits.chunks(self.vocab).skip(request.prompt.len() - 1);
            for ((logits, &token), &reported) in steps.zip(&output.tokens).zip(&output.log_probs) {
                let scaled = logits.iter().map(|&l| f64::from(l) / temperature);
                let largest = scaled.clone().fold(f64::MIN, f64::max);
                let sum: f64 = scaled.map(|l| libm::exp(l - largest)).sum();
                let own = logits.get(token as usize).copied().unwrap_or(f32::NAN);
                let expected = f64::from(own) / temperature - largest - libm::log(sum);
                let difference = (f64::from(reported) - expected).abs();
                if difference.is_nan() || difference > 1e-3 {
                    let found = format!(
                        "request {at}, token {token}: {reported}, but forward has {expected}"
                    );
                    self.fail("log-probs match those of a forward pass", found);
                }
            }
        }
    }

    fn refusals(&mut self) {
        let prompt = self.sequences(1, 1).concat();
        let full = vec![prompt[0]; self.model.max_tokens()];
        let unknown = [self.vocab as u32];
        for (what, request) in [
            ("an empty prompt", self.request(0, &[], 1)),
            ("a prompt that fills the context", self.request(0, &full, 1)),
            ("an id outside the vocabulary", self.request(0, &unknown, 1)),
        ] {
            let result =
                self.model
                    .generate(&[request], &SamplingSettings::default(), &mut |_, _| {
                        Ok::<(), RolloutError>(())
                    });
            if result.is_ok() {
                self.fail(
                    "invalid requests are refused",
                    format!("{what} was accepted"),
                );
            }
        }
    }
}

#[cfg(test)]
#[path = "conformance_tests.rs"]
mod tests;
