//! Single operations at the sizes of a decoder: times, and shares of the device's peak rates.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use serde::Serialize;
use verl_decoder::blocks::rope::Rope;
use verl_decoder::decoder::DecoderConfig;
use verl_kernels::device::DeviceKind;
use verl_kernels::scoring::{Extras, linear_log_probs};
use verl_kernels::{
    self as kernels, AttentionParameters, AttentionShape, HalfSettings, Sequences, attention_block,
    compiled, indices, linear, mlp_block, rms_norm, swiglu, take_rows,
};

use super::{BenchError, Ceilings, Times, at_least, fits_on, peak_bytes, repeat};
use crate::optim::kernels::{AdamWScalars, AdamWUpdate, adamw_all, sum_of_squares};

/// What is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelWork {
    /// Tokens in a call.
    pub tokens: usize,
    /// Tokens in a sequence.
    pub sequence: usize,
    /// Parameters in an optimiser step.
    pub parameters: usize,
    /// Timed runs of each operation.
    pub runs: usize,
}

impl Default for KernelWork {
    fn default() -> Self {
        KernelWork {
            tokens: 8192,
            sequence: 1024,
            parameters: 1 << 28,
            runs: 5,
        }
    }
}

/// Measurements of one operation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelFigure {
    /// Its name.
    pub name: String,
    /// Sizes.
    pub sizes: String,
    /// Times of a call.
    pub times: Times,
    /// Bytes that it must move at least.
    pub bytes: f64,
    /// Arithmetic operations, a multiply-add counted as two; 0 for operations that only move data.
    pub operations: f64,
    /// Share of a copy's rate.
    pub bandwidth_share: f64,
    /// Share of a large product's rate, where `operations` is not 0.
    pub matrix_share: Option<f64>,
    /// Share of [`Ceilings::arithmetic_tflop_s`], where that is known and `operations` is not 0.
    pub arithmetic_share: Option<f64>,
}

/// Measurements of single operations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelFigures {
    /// The work.
    pub work: KernelWork,
    /// In the order in which a step runs them.
    pub kernels: Vec<KernelFigure>,
    /// Peak memory, in bytes.
    pub peak_bytes: Option<u64>,
    /// The device's peak rates.
    pub ceilings: Ceilings,
}

/// Times the operations of a decoder of these sizes on random numbers. Calls of a few microseconds are launched back to
/// back, so that the device is timed rather than the launches.
///
/// # Errors
/// Sizes that are zero or exceed the memory; a type without fused operations on the device; a device failure.
pub fn kernels(
    config: &DecoderConfig,
    device: &Device,
    dtype: DType,
    work: &KernelWork,
    ceilings: &Ceilings,
) -> Result<KernelFigures, BenchError> {
    at_least("--tokens", work.tokens, 1)?;
    at_least("--sequence", work.sequence, 1)?;
    at_least("--parameters", work.parameters, 1)?;
    at_least("--runs", work.runs, 1)?;
    if !kernels::are_fused(device, dtype) {
        return Err(BenchError::Dtype {
            dtype: format!("{dtype:?}").to_lowercase(),
        });
    }
    operands_fit(config, device, work)?;
    let mut bench = Bench {
        config,
        device: device.clone(),
        dtype,
        work,
        ceilings,
        found: Vec::new(),
    };
    bench.products()?;
    bench.rows()?;
    bench.attention()?;
    bench.halves()?;
    bench.vocabulary()?;
    bench.optimizer()?;
    Ok(KernelFigures {
        kernels: bench.found,
        peak_bytes: peak_bytes(device),
        ceilings: *ceilings,
        work: work.clone(),
    })
}

/// Rejects sizes where the operands of one operation do not fit on the device. Numbers are drawn in f32.
fn operands_fit(
    config: &DecoderConfig,
    device: &Device,
    work: &KernelWork,
) -> Result<(), BenchError> {
    let width = config.hidden_size + 2 * config.intermediate_size;
    for (tokens, option) in [(work.tokens, "`--tokens`"), (work.sequence, "`--sequence`")] {
        let bytes = 4.0 * tokens as f64 * width as f64;
        fits_on(device, format!("a call of {tokens} tokens"), bytes, option)?;
    }
    let state = format!(
        "{} parameters, their gradients and two moments",
        work.parameters
    );
    fits_on(
        device,
        state,
        16.0 * work.parameters as f64,
        "`--parameters`",
    )
}

struct Bench<'a> {
    config: &'a DecoderConfig,
    device: Device,
    dtype: DType,
    work: &'a KernelWork,
    ceilings: &'a Ceilings,
    found: Vec<KernelFigure>,
}

impl Bench<'_> {
    fn random<const R: usize>(&self, shape: [usize; R]) -> Tensor<R> {
        let normal = Distribution::Normal(0.0, 1.0);
        let count: usize = shape.iter().product();
        // Drawn as a vector first: a GPU may pad the rows of a matrix.
        let flat = Tensor::<1>::random([count], normal, (&self.device, DType::F32));
        flat.cast(self.dtype).reshape(shape)
    }

    fn add(
        &mut self,
        name: &str,
        sizes: String,
        [elements, operations]: [usize; 2],
        mut call: impl FnMut(),
    ) -> Result<(), BenchError> {
        // Counting slows down launches a little, so it ends before timing starts.
        compiled::begin();
        call();
        compiled::tally();
        let calls = if DeviceKind::of(&self.device).queues() {
            20
        } else {
            1
        };
        let mut times = repeat(&self.device, 2, self.work.runs, || {
            (0..calls).for_each(|_| call());
            Ok::<(), BenchError>(())
        })?;
        for time in [&mut times.median_ms, &mut times.min_ms, &mut times.max_ms] {
            *time /= f64::from(calls);
        }
        let bytes = (elements * self.dtype.size()) as f64;
        let operations = operations as f64;
        let rate = operations / times.median_ms * 1e-9;
        let share = |ceiling: f64| (operations > 0.0).then_some(rate / ceiling);
        self.found.push(KernelFigure {
            name: name.to_owned(),
            sizes,
            bandwidth_share: bytes / times.median_ms * 1e-6 / self.ceilings.copy_gb_s,
            matrix_share: share(self.ceilings.product_tflop_s),
            arithmetic_share: self.ceilings.arithmetic_tflop_s.and_then(share),
            bytes,
            operations,
            times,
        });
        Ok(())
    }

    fn query_width(&self) -> usize {
        self.config.heads.query_width()
    }

    fn key_width(&self) -> usize {
        self.config.heads.key_width()
    }

    fn products(&mut self) -> Result<(), BenchError> {
        let (n, d, inner) = (
            self.work.tokens,
            self.config.hidden_size,
            self.config.intermediate_size,
        );
        let joined = self.query_width() + 2 * self.key_width();
        for (name, out, terms) in [
            ("product: queries, keys, values", joined, d),
            ("product: output", d, self.query_width()),
            ("product: gate, up", 2 * inner, d),
            ("product: down", d, inner),
        ] {
            let (x, weight) = (self.random([n, terms]), self.random([out, terms]));
            let sizes = format!("{n} x {out} x {terms}");
            let cost = [n * terms + out * terms + n * out, 2 * n * out * terms];
            self.add(name, sizes, cost, || {
                drop(linear(x.clone(), weight.clone()));
            })?;
        }
        Ok(())
    }

    fn rows(&mut self) -> Result<(), BenchError> {
        let (n, d, inner) = (
            self.work.tokens,
            self.config.hidden_size,
            self.config.intermediate_size,
        );
        let table = self.random([self.config.vocab_size, d]);
        let ids = (0..n).map(|at| (at * 7919 % self.config.vocab_size) as i32);
        let ids: Tensor<1, Int> = indices(ids.collect(), &self.device);
        self.add("embedding", format!("{n} x {d}"), [2 * n * d, 0], || {
            drop(take_rows(table.clone(), ids.clone(), false));
        })?;
        let (x, gain) = (self.random([n, d]), self.random([d]));
        self.add("norm", format!("{n} x {d}"), [2 * n * d, 0], || {
            drop(rms_norm(x.clone(), gain.clone(), 1e-6));
        })?;
        let (gate, up) = (self.random([n, inner]), self.random([n, inner]));
        self.add(
            "swiglu",
            format!("{n} x {inner}"),
            [3 * n * inner, 0],
            || {
                drop(swiglu(gate.clone(), up.clone()));
            },
        )
    }

    /// Complete sequences in a call.
    fn sequences(&self) -> usize {
        (self.work.tokens / self.work.sequence).max(1)
    }

    fn attention(&mut self) -> Result<(), BenchError> {
        let heads = self.config.heads;
        if !kernels::attention_is_fused(&self.device, self.dtype, heads.dim) {
            return Ok(());
        }
        let shape = AttentionShape {
            sequences: self.sequences(),
            tokens: self.work.sequence,
            heads,
            segments: None,
        };
        let n = shape.sequences * shape.tokens;
        let (width, key_width) = (self.query_width(), self.key_width());
        let queries = self.random([n, width]);
        let (keys, values) = (self.random([n, key_width]), self.random([n, key_width]));
        let rope = Rope::new(self.config.rope, heads.dim);
        let rotation = rope.leading(shape.tokens, &self.device, DType::F32);
        let [cos, sin] = rotation.tables();
        let sizes = format!("{} x {}", shape.sequences, shape.tokens);
        // Two products over half of the pairs.
        let cost = [2 * n * (width + key_width), 2 * n * shape.tokens * width];
        self.add("attention", sizes, cost, || {
            let [queries, keys, values] = [&queries, &keys, &values].map(Clone::clone);
            let (cos, sin) = (cos.clone(), sin.clone());
            drop(kernels::attention(
                shape.clone(),
                queries,
                keys,
                values,
                cos,
                sin,
            ));
        })?;
        // Two products forward and five backward, because backward recomputes the weights.
        let cost = [6 * n * (width + key_width), 7 * n * shape.tokens * width];
        let sizes = format!("{} x {}", shape.sequences, shape.tokens);
        let [cos, sin] = [cos, sin].map(Tensor::from_inner);
        self.add("attention, with gradients", sizes, cost, || {
            let [queries, keys, values] =
                [&queries, &keys, &values].map(|x| Tensor::from_inner(x.clone()).require_grad());
            let (cos, sin) = (cos.clone(), sin.clone());
            let mixed = kernels::attention(shape.clone(), queries, keys, values, cos, sin);
            drop(mixed.sum().backward());
        })
    }

    /// The two halves of a layer, forward and backward.
    fn halves(&mut self) -> Result<(), BenchError> {
        let heads = self.config.heads;
        let (d, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let (width, key_width) = (self.query_width(), self.key_width());
        let n = self.sequences() * self.work.sequence;
        let sequences = Sequences::new(&vec![self.work.sequence; self.sequences()], &self.device);
        let rope = Rope::new(self.config.rope, heads.dim);
        let tables = rope.full_tables(self.work.sequence, &self.device);
        let settings = HalfSettings {
            epsilon: 1e-6,
            recompute: false,
        };
        let tracked = |x: Tensor<2>| Tensor::from_inner(x).require_grad();
        let x = self.random([n, d]);
        let gain = self.random([d]);
        let projections = [width, key_width, key_width].map(|out| self.random([out, d]));
        let output = self.random([d, width]);
        let weights = d * (2 * width + 2 * key_width);
        let operations = 6 * n * weights + 6 * n * self.work.sequence * width;
        let cost = [4 * n * d + 2 * weights, operations];
        let call = format!("{} x {}", self.sequences(), self.work.sequence);
        self.add(
            "layer: attention, with gradients",
            call.clone(),
            cost,
            || {
                let parameters = AttentionParameters {
                    gain: Tensor::from_inner(gain.clone()).require_grad(),
                    projections: projections.clone().map(tracked),
                    bias: None,
                    output: tracked(output.clone()),
                };
                let tables = tables.clone().map(Tensor::from_inner);
                let x = tracked(x.clone());
                let y = attention_block(x, parameters, tables, &sequences, heads, settings);
                drop(y.backward());
            },
        )?;
        let gate_up_down = [[inner, d], [inner, d], [d, inner]].map(|shape| self.random(shape));
        let cost = [4 * n * d + 6 * inner * d, 18 * n * inner * d];
        self.add("layer: MLP, with gradients", call, cost, || {
            let weights = gate_up_down.clone().map(tracked);
            let gain = Tensor::from_inner(gain.clone()).require_grad();
            drop(mlp_block(tracked(x.clone()), gain, weights, settings).backward());
        })
    }

    fn vocabulary(&mut self) -> Result<(), BenchError> {
        let (n, d, v) = (
            self.work.tokens,
            self.config.hidden_size,
            self.config.vocab_size,
        );
        let (hidden, head) = (self.random([n, d]), self.random([v, d]));
        let targets = (0..n).map(|at| (at * 7919 % v) as i32).collect();
        let targets = indices(targets, &self.device);
        let scores = |hidden: Tensor<2>, head: Tensor<2>| {
            let targets = targets.clone();
            linear_log_probs(hidden, head, targets, 1.0, Extras::ENTROPIES, 256).log_probs
        };
        let sizes = format!("{n} x {v} x {d}");
        let cost = [n * d + v * d, 2 * n * d * v];
        self.add("scores of tokens", sizes.clone(), cost, || {
            drop(scores(hidden.clone(), head.clone()));
        })?;
        let cost = [2 * n * d + 3 * v * d, 6 * n * d * v];
        self.add("scores, with gradients", sizes, cost, || {
            let tracked = |x: &Tensor<2>| Tensor::from_inner(x.clone()).require_grad();
            drop(scores(tracked(&hidden), tracked(&head)).sum().backward());
        })
    }

    fn optimizer(&mut self) -> Result<(), BenchError> {
        let n = self.work.parameters;
        let device = self.device.clone();
        let zeros = || Tensor::<1>::zeros([n], (&device, DType::F32));
        let gradient = zeros();
        // Four bytes an element; bytes are counted in elements of the dtype.
        let wide = 4 / self.dtype.size();
        self.add("sum of squares", format!("{n}"), [wide * n, 0], || {
            drop(sum_of_squares(gradient.clone()));
        })?;
        let mut state = Some((zeros(), [zeros(), zeros()]));
        let narrow = self.dtype != DType::F32;
        let (dtype, elements) = (self.dtype, 7 * wide * n + usize::from(narrow) * n);
        self.add("AdamW", format!("{n}"), [elements, 0], || {
            let Some((parameter, moments)) = state.take() else {
                return;
            };
            let update = AdamWUpdate {
                parameter,
                moments,
                gradient: gradient.clone(),
                scalars: AdamWScalars {
                    gradient_scale: 1.0,
                    beta1: 0.9,
                    beta2: 0.999,
                    decay: 1.0,
                    step_size: 1e-6,
                    second_correction: 1.0,
                    epsilon: 1e-8,
                },
            };
            let updated = adamw_all(vec![update], dtype);
            state = updated.into_iter().next().map(|own| {
                drop(own.weight);
                (own.parameter, own.moments)
            });
        })
    }
}
