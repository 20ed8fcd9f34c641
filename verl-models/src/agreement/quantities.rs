//! The quantities that are compared, and their bounds.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use verl_decoder::decoder::Decoder;
use verl_kernels::random::{DrawKey, Purpose};
use verl_kernels::scoring::Extras;
use verl_rollout::engine::{RolloutError, RolloutOutput, RolloutRequest, SamplingSettings};

use super::measure::{largest, mean, norm, relative};
use super::{AgreementError, Distance, Measure, Sides, Subject, name_of};
use crate::model::{ModelError, ModelInterface, PolicyModel, ScoreRow, Scores};
use crate::optim::{AdamW, OptimizerConfig, TrainableParameters};
use crate::policy::Policy;
use crate::weights::Weights;

/// Probabilities that a rollout reports, compared with those that training computes: the mean difference, then the
/// largest.
pub(super) const OF_ROLLOUTS: [&str; 2] = [
    "rollout probabilities against training",
    "the largest of them",
];

/// Largest allowed distances.
struct Bounds {
    logits: f64,
    /// Mean over tokens, nats.
    log_probs: f64,
    /// Relative to the loss.
    loss: f64,
    /// All gradients together; `parameter` bounds each parameter's gradient on its own.
    gradients: f64,
    parameter: f64,
    /// The change of the weights.
    update: f64,
    rollout: f64,
}

/// f32 sums in a different order.
const F32: Bounds = Bounds {
    logits: 1e-4,
    log_probs: 1e-4,
    loss: 1e-4,
    gradients: 1e-3,
    parameter: 5e-3,
    update: 1e-3,
    rollout: 1e-3,
};

/// Eight bits of mantissa in every product and every sum that is stored.
const BF16: Bounds = Bounds {
    logits: 3e-2,
    log_probs: 5e-2,
    loss: 2e-2,
    gradients: 6e-2,
    parameter: 2e-1,
    // Equal gradients and f32 state: weights are rounded once per step.
    update: 1e-3,
    rollout: 5e-3,
};

/// Gradients below this share of the largest parameter's are rounding noise, such as those of key biases.
const SILENT: f64 = 1e-3;

pub(super) fn all(
    subject: &Subject,
    dtype: DType,
    reference: &Decoder,
    other: &Decoder,
) -> Result<Vec<Distance>, AgreementError> {
    let model = |source| AgreementError::Model {
        subject: subject.name.clone(),
        source,
    };
    let rollout = |source| AgreementError::Rollout {
        subject: subject.name.clone(),
        source,
    };
    let sides = Sides { reference, other };
    let mut comparison = Comparison {
        subject,
        dtype,
        bounds: if dtype == DType::BF16 { &BF16 } else { &F32 },
        distances: Vec::new(),
    };
    if comparison.sequences().is_empty() {
        return Err(AgreementError::Context {
            subject: subject.name.clone(),
            limit: subject.config().max_tokens,
        });
    }
    comparison.logits(&sides);
    comparison.scores(&sides).map_err(model)?;
    comparison.training(&sides).map_err(model)?;
    comparison.update(&sides).map_err(model)?;
    comparison.texts(&sides).map_err(rollout)?;
    comparison.repeated(&sides).map_err(rollout)?;
    comparison.rollout(&sides)?;
    Ok(comparison.distances)
}

struct Comparison<'a> {
    subject: &'a Subject,
    dtype: DType,
    bounds: &'a Bounds,
    distances: Vec<Distance>,
}

impl Comparison<'_> {
    fn add(&mut self, quantity: &'static str, measure: Measure, distance: f64, bound: f64) {
        self.add_at(quantity, measure, distance, bound, None);
    }

    fn add_at(
        &mut self,
        quantity: &'static str,
        measure: Measure,
        distance: f64,
        bound: f64,
        at: Option<String>,
    ) {
        self.distances.push(Distance {
            subject: self.subject.name.clone(),
            dtype: name_of(self.dtype),
            quantity,
            measure,
            distance,
            bound,
            at,
        });
    }

    fn vocab(&self) -> u32 {
        self.subject.config().vocab_size as u32
    }

    /// Prompts and responses of unequal lengths that fit the context.
    fn sequences(&self) -> Vec<(Vec<u32>, Vec<u32>)> {
        let context = self.subject.config().max_tokens;
        let vocab = u64::from(self.vocab());
        let ids = |salt: u64, count: usize| -> Vec<u32> {
            let key = DrawKey {
                seed: 23,
                purpose: Purpose::Data,
                step: 0,
                row: salt,
                attempt: 0,
            };
            let stream = key.stream();
            (0..count as u32)
                .map(|at| (u64::from(stream.word(at, 0)) % vocab) as u32)
                .collect()
        };
        [
            (3, 9),
            (17, 30),
            (1, 63),
            (70, 60),
            (5, 1),
            (33, 64),
            (24, 1000),
            (300, 500),
        ]
        .into_iter()
        .enumerate()
        .filter(|(_, (prompt, response))| prompt + response <= context)
        .map(|(at, (prompt, response))| {
            let at = 2 * at as u64;
            (ids(at, prompt), ids(at + 1, response))
        })
        .collect()
    }

    fn logits(&mut self, sides: &Sides<'_>) {
        let sequences = self.sequences();
        let width = sequences
            .iter()
            .map(|(p, r)| p.len() + r.len())
            .max()
            .unwrap_or(1);
        let mut ids = Vec::new();
        for (row, (prompt, response)) in sequences.iter().enumerate() {
            ids.extend(prompt.iter().chain(response).map(|&id| id as i32));
            ids.resize((row + 1) * width, 0);
        }
        let of = |decoder: &Decoder| {
            let ids = TensorData::new(ids.clone(), [sequences.len(), width]);
            let decoder = decoder.valid();
            let ids = Tensor::<2, Int>::from_data(ids, &device(&decoder));
            numbers(decoder.forward(ids))
        };
        let distance = relative(&of(sides.other), &of(sides.reference));
        self.add("logits", Measure::Relative, distance, self.bounds.logits);
    }

    fn scores(&mut self, sides: &Sides<'_>) -> Result<(), ModelError> {
        let sequences = self.sequences();
        let rows = rows(&sequences);
        let of = |decoder: &Decoder| {
            let policy = frozen(decoder);
            policy.score(&rows, 0.9, Extras::ENTROPIES)
        };
        let (got, want) = (of(sides.other)?, of(sides.reference)?);
        let log_probs = |scores: &Scores| scores.log_probs.clone();
        let entropies = |scores: &Scores| scores.entropies.clone();
        let bound = self.bounds.log_probs;
        let distance = mean(&flat(&got, log_probs), &flat(&want, log_probs));
        self.add("log-probs", Measure::Mean, distance, bound);
        let distance = mean(&flat(&got, entropies), &flat(&want, entropies));
        self.add("entropies", Measure::Mean, distance, bound);
        Ok(())
    }

    fn training(&mut self, sides: &Sides<'_>) -> Result<(), ModelError> {
        let sequences = self.sequences();
        let got = Trained::of(sides.other, &sequences)?;
        let want = Trained::of(sides.reference, &sequences)?;
        let distance = relative(&[got.loss], &[want.loss]);
        self.add("loss", Measure::Relative, distance, self.bounds.loss);
        let all = |trained: &Trained| -> Vec<f64> {
            trained
                .gradients
                .iter()
                .flat_map(|(_, g)| g.clone())
                .collect()
        };
        let distance = relative(&all(&got), &all(&want));
        self.add(
            "gradients",
            Measure::Relative,
            distance,
            self.bounds.gradients,
        );
        let sizes = want.gradients.iter().map(|(_, gradient)| norm(gradient));
        let floor = SILENT * sizes.fold(0.0, f64::max);
        let mut worst = (0.0, None);
        for ((name, got), (_, want)) in got.gradients.iter().zip(&want.gradients) {
            let distance = relative(got, want) * norm(want) / norm(want).max(floor);
            if distance.is_nan() || distance > worst.0 {
                worst = (distance, Some(name.clone()));
            }
        }
        if got.gradients.len() != want.gradients.len() {
            worst = (f64::NAN, Some("parameters differ in number".to_owned()));
        }
        let (distance, at) = worst;
        let bound = self.bounds.parameter;
        self.add_at(
            "gradient of each parameter",
            Measure::Relative,
            distance,
            bound,
            at,
        );
        let mut saving = sides.other.clone();
        saving.model.recompute = true;
        let again = Trained::of(&saving, &sequences)?;
        let differing = got.gradients.iter().zip(&again.gradients);
        let differing = differing.filter(|(kept, again)| kept != again).count();
        self.add(
            "gradients with recomputation",
            Measure::Count,
            differing as f64,
            0.0,
        );
        let distance = relative(&[got.norm], &[want.norm]);
        self.add(
            "gradient norm",
            Measure::Relative,
            distance,
            self.bounds.gradients,
        );
        Ok(())
    }

    /// Two optimiser steps on the same gradients: the second one has moments.
    fn update(&mut self, sides: &Sides<'_>) -> Result<(), ModelError> {
        let got = updated(sides.other)?;
        let want = updated(sides.reference)?;
        let mut worst = (0.0, None);
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            let distance = relative(got, want);
            if distance.is_nan() || distance > worst.0 {
                worst = (distance, Some(name.clone()));
            }
        }
        let (distance, at) = worst;
        let bound = self.bounds.update;
        self.add_at("optimiser step", Measure::Relative, distance, bound, at);
        Ok(())
    }

    fn requests(&self) -> Vec<RolloutRequest> {
        // An odd count, so that response buffers end in padding.
        let room = (self.subject.config().max_tokens - 1).min(23);
        let prompts = self.sequences().into_iter();
        // The first prompt appears twice: both share a pass.
        let prompts = prompts.clone().take(1).chain(prompts);
        prompts
            .enumerate()
            .map(|(row, (mut prompt, _))| {
                prompt.truncate((self.subject.config().max_tokens / 2).max(1));
                RolloutRequest {
                    max_new_tokens: room.saturating_sub(row).max(1),
                    prompt,
                    key: DrawKey {
                        seed: 5,
                        purpose: Purpose::Rollout,
                        step: 1,
                        row: row as u64,
                        attempt: 0,
                    },
                }
            })
            .collect()
    }

    fn texts(&mut self, sides: &Sides<'_>) -> Result<(), RolloutError> {
        // In bf16 the two largest logits often tie.
        if self.dtype == DType::BF16 {
            return Ok(());
        }
        let greedy = SamplingSettings {
            temperature: 0.0,
            ..SamplingSettings::default()
        };
        let truncated = SamplingSettings {
            top_k: 20,
            top_p: 0.9,
            ..SamplingSettings::default()
        };
        for (quantity, settings) in [
            ("greedy texts", greedy),
            ("sampled texts", SamplingSettings::default()),
            ("sampled texts, truncated", truncated),
        ] {
            let requests = self.requests();
            let got = generate(sides.other, &requests, &settings)?;
            let want = generate(sides.reference, &requests, &settings)?;
            let differing = got.iter().zip(&want).filter(|(a, b)| a.tokens != b.tokens);
            let differing = differing.count() as f64;
            self.add(quantity, Measure::Count, differing, 0.0);
        }
        Ok(())
    }

    fn repeated(&mut self, sides: &Sides<'_>) -> Result<(), RolloutError> {
        let requests = self.requests();
        let settings = SamplingSettings::default();
        let first = generate(sides.other, &requests, &settings)?;
        let second = generate(sides.other, &requests, &settings)?;
        let bits = |output: &RolloutOutput| -> Vec<u32> {
            output.log_probs.iter().map(|x| x.to_bits()).collect()
        };
        let differing = first
            .iter()
            .zip(&second)
            .filter(|(a, b)| a.tokens != b.tokens || bits(a) != bits(b));
        let differing = differing.count() as f64;
        self.add(
            "texts of a seed, sampled twice",
            Measure::Count,
            differing,
            0.0,
        );
        Ok(())
    }

    fn rollout(&mut self, sides: &Sides<'_>) -> Result<(), AgreementError> {
        let requests = self.requests();
        let settings = SamplingSettings::default();
        let outputs = generate(sides.other, &requests, &settings).map_err(|source| {
            AgreementError::Rollout {
                subject: self.subject.name.clone(),
                source,
            }
        })?;
        let rows: Vec<ScoreRow<'_>> = requests
            .iter()
            .zip(&outputs)
            .map(|(request, output)| ScoreRow {
                prompt: &request.prompt,
                response: &output.tokens,
            })
            .collect();
        let scores = frozen(sides.other)
            .score(&rows, 1.0, Extras::NONE)
            .map_err(|source| AgreementError::Model {
                subject: self.subject.name.clone(),
                source,
            })?;
        let probability = |x: &f32| libm::exp(f64::from(*x));
        let got: Vec<f64> = outputs
            .iter()
            .flat_map(|output| output.log_probs.iter().map(probability))
            .collect();
        let want: Vec<f64> = scores
            .iter()
            .flat_map(|scores| scores.log_probs.iter().map(probability))
            .collect();
        self.add(
            OF_ROLLOUTS[0],
            Measure::Mean,
            mean(&got, &want),
            self.bounds.rollout,
        );
        let distance = largest(&got, &want);
        self.add(
            OF_ROLLOUTS[1],
            Measure::Largest,
            distance,
            20.0 * self.bounds.rollout,
        );
        Ok(())
    }
}

/// Results of a training pass.
struct Trained {
    loss: f64,
    gradients: Vec<(String, Vec<f64>)>,
    norm: f64,
}

impl Trained {
    fn of(decoder: &Decoder, sequences: &[(Vec<u32>, Vec<u32>)]) -> Result<Self, ModelError> {
        let mut policy = trainable(decoder);
        let rows = rows(sequences);
        // Some tokens of each row are observations.
        let select = |_: usize, token: usize| token % 5 != 4;
        let mut loss = 0.0;
        // Two micro-batches, whose gradients add up.
        for rows in rows.chunks(rows.len().div_ceil(2)) {
            loss += policy.accumulate(rows, &select, 1.3, true, &mut |packed| {
                let entropies = packed.entropies.expect("entropies were requested");
                -packed.log_probs.mean() - 0.1 * entropies.mean()
            })?;
        }
        let training = policy.trained.training.as_ref();
        let training = training.expect("the policy has an optimiser");
        let names = TrainableParameters::new(policy.module());
        let sums = training.accumulator.sums().iter();
        let gradients: Vec<(String, Vec<f64>)> = names
            .iter()
            .zip(sums)
            .filter_map(|(parameter, sum)| {
                let sum = sum.as_ref()?;
                Some((parameter.name.clone(), numbers(sum.clone())))
            })
            .collect();
        let report = crate::model::TrainedModel::optimizer_step(&mut policy)?;
        Ok(Trained {
            loss,
            gradients,
            norm: report.grad_norm,
        })
    }
}

/// The change of the weights after two steps on random gradients.
fn updated(decoder: &Decoder) -> Result<Vec<(String, Vec<f64>)>, ModelError> {
    let decoder = decoder.valid();
    let parameters = TrainableParameters::new(&decoder);
    let before = weights(&decoder);
    let mut optimizer = AdamW::new(settings()).expect("the settings are in range");
    let mut module = decoder.clone();
    for step in 0..2 {
        let gradients = parameters.iter().map(|parameter| {
            let draws = verl_kernels::random::normals(step, &parameter.name, parameter.length);
            let draws = TensorData::new(draws, [parameter.length]);
            Some(Tensor::from_data(draws, (&device(&decoder), DType::F32)))
        });
        let (moved, report) = optimizer.step(module, &parameters, gradients.collect());
        report?;
        module = moved;
    }
    // The optimiser's f32 masters, where the module stores a narrower type.
    let masters = optimizer.masters(&parameters);
    let after = if masters.is_empty() {
        weights(&module)
    } else {
        host(masters)
    };
    let change = |((name, before), (_, after)): ((String, Vec<f64>), (String, Vec<f64>))| {
        let change = after
            .iter()
            .zip(&before)
            .map(|(after, before)| after - before);
        (name, change.collect())
    };
    Ok(before.into_iter().zip(after).map(change).collect())
}

fn settings() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 1e-2,
        weight_decay: 0.1,
        max_grad_norm: Some(1.0),
        ..OptimizerConfig::default()
    }
}

fn weights(decoder: &Decoder) -> Vec<(String, Vec<f64>)> {
    host(Weights::of(decoder).named)
}

fn host(named: Vec<(String, Tensor<1>)>) -> Vec<(String, Vec<f64>)> {
    let values = named
        .into_iter()
        .map(|(name, weight)| (name, numbers(weight)));
    values.collect()
}

fn generate(
    decoder: &Decoder,
    requests: &[RolloutRequest],
    settings: &SamplingSettings,
) -> Result<Vec<RolloutOutput>, RolloutError> {
    let mut outputs: Vec<Option<RolloutOutput>> = vec![None; requests.len()];
    decoder.generate(requests, settings, &mut |at, output| {
        outputs[at] = Some(output);
        Ok(())
    })?;
    Ok(outputs.into_iter().flatten().collect())
}

fn rows(sequences: &[(Vec<u32>, Vec<u32>)]) -> Vec<ScoreRow<'_>> {
    sequences
        .iter()
        .map(|(prompt, response)| ScoreRow { prompt, response })
        .collect()
}

fn frozen(decoder: &Decoder) -> Policy<Decoder> {
    Policy::new(decoder.clone(), None).expect("a frozen model has no settings")
}

fn trainable(decoder: &Decoder) -> Policy<Decoder> {
    Policy::new(decoder.clone(), Some(settings())).expect("the settings are in range")
}

fn device(decoder: &Decoder) -> Device {
    decoder.head().device()
}

fn flat(scores: &[Scores], of: impl Fn(&Scores) -> Vec<f32>) -> Vec<f64> {
    scores.iter().flat_map(of).map(f64::from).collect()
}

fn numbers<const R: usize>(tensor: Tensor<R>) -> Vec<f64> {
    tensor.cast(DType::F32).into_data().iter::<f64>().collect()
}
