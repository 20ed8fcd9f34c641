//! The batched engine for a device that decodes on its own: a step is a captured graph that draws its tokens and does
//! its bookkeeping, and the host checks the result every few steps.
//!
//! Requests wait in order for rows and for blocks of the cache; a row that ends is given to the next request. Once no
//! request waits, the remaining rows move into smaller buffers ([`ROWS`]), whose steps take less time.
//!
//! The bits of a response depend on its prompt, its key and the number of rows in the buffers while it is sampled,
//! because products of other sizes run in other kernels. They do not depend on the contents of the other rows, but on
//! when few rows remain. The same requests give the same bits.

use burn::module::Param;
use burn::tensor::{DType, Tensor};
use verl_decoder::blocks::linear::Linear;
use verl_decoder::blocks::norm::RmsNorm;
use verl_decoder::decoder::{Decoder, DecoderConfig, DecoderLayer};
use verl_kernels::cuda::decode::{
    self, DeviceDecoder, Drawing, LayerWeights, Response, Shape, Sizes, Start, Weights, state,
};
use verl_kernels::pool::{BLOCK, blocks_for, blocks_of};

use super::batched::CACHE_SHARE;
use super::engine::{
    FinishReason, OutputSink, RolloutError, RolloutOutput, RolloutRequest, SamplingSettings,
};
use super::row_steps;
use crate::interface::ModelInterface;

/// Numbers of rows that buffers may have.
const ROWS: &[usize] = &[16, 32, 64, 128, 256, 512];
/// Steps between two checks by the host.
const STEPS: usize = 8;
/// Rows are filled once 1 / this of them are free, because a pass over a few prompts takes about as long as one over
/// some dozens.
const FILLED: usize = 16;
/// Fewest remaining steps that justify moving into smaller buffers: the move and a new recording take as long as about
/// ten.
const MIN_STEPS_TO_MOVE: usize = 32;
/// Most ids that end a response.
const MAX_EOS_IDS: usize = 32;

/// Whether the device can answer requests on its own: the host must check stop texts, and a penalty needs all ids of
/// the prompt.
pub(crate) fn supports(model: &Decoder, settings: &SamplingSettings) -> bool {
    settings.stop_texts.is_empty()
        && settings.repetition_penalty == 1.0
        && settings.eos_ids.len() <= MAX_EOS_IDS
        && !model.config.output_bias
        && !model.config.mlp_bias
        && decode::supports(&shape(&model.config), embedding(model))
}

fn embedding(model: &Decoder) -> Tensor<2> {
    model.model.embed_tokens.weight.val()
}

fn shape(config: &DecoderConfig) -> Shape {
    Shape {
        width: config.hidden_size,
        inner: config.intermediate_size,
        vocab: config.vocab_size,
        heads: config.heads,
        epsilon: config.norm_epsilon,
    }
}

/// The weights of a decoder for rows with buffers of these sizes.
fn weights(model: &Decoder, sizes: &Sizes) -> Weights {
    let embedding = embedding(model);
    let rotation = model
        .rope
        .leading(sizes.positions(), &embedding.device(), DType::F32);
    Weights {
        layers: model.model.layers.iter().map(layer_weights).collect(),
        norm: gain(&model.model.norm),
        head: model.lm_head.as_ref().map(weight),
        rotation: rotation.tables(),
        embedding,
    }
}

fn layer_weights(layer: &DecoderLayer) -> LayerWeights {
    let (attention, mlp) = (&layer.self_attn, &layer.mlp);
    let projections = [&attention.q_proj, &attention.k_proj, &attention.v_proj];
    let biases = projections.map(|linear| linear.bias.as_ref().map(Param::val));
    let biases: Vec<Tensor<1>> = biases.into_iter().flatten().collect();
    let norms = attention.q_norm.as_ref().zip(attention.k_norm.as_ref());
    LayerWeights {
        input_norm: gain(&layer.input_layernorm),
        projections: projections.map(weight),
        bias: (!biases.is_empty()).then(|| Tensor::cat(biases, 0)),
        head_norms: norms.map(|(queries, keys)| [gain(queries), gain(keys)]),
        output: weight(&attention.o_proj),
        mlp_norm: gain(&layer.post_attention_layernorm),
        gate: weight(&mlp.gate_proj),
        up: weight(&mlp.up_proj),
        down: weight(&mlp.down_proj),
    }
}

fn weight(linear: &Linear) -> Tensor<2> {
    linear.weight.val()
}

fn gain(norm: &RmsNorm) -> Tensor<1> {
    norm.weight.val()
}

/// Samples all responses; `requests` and `settings` must have been checked.
///
/// # Errors
/// See [`RolloutError`].
pub(crate) fn generate(
    model: &Decoder,
    requests: &[RolloutRequest],
    settings: &SamplingSettings,
    on_done: &mut OutputSink<'_>,
) -> Result<(), RolloutError> {
    let rooms: Vec<usize> = requests
        .iter()
        .map(|request| request.room(model.max_tokens()))
        .collect();
    let lengths = requests.iter().zip(&rooms);
    let tokens = lengths
        .map(|(request, room)| request.prompt.len() + room)
        .max();
    let new_tokens = rooms.iter().copied().max();
    let (Some(tokens), Some(new_tokens @ 1..)) = (tokens, new_tokens) else {
        // There are no requests, or none asks for a token.
        return (0..requests.len()).try_for_each(|at| on_done(at, empty()));
    };
    let lengths = requests.iter().zip(&rooms);
    let needs: Vec<usize> = lengths
        .map(|(request, room)| blocks_of(request.prompt.len() + room))
        .collect();
    let rows = rows(model, &needs);
    let sizes = Sizes {
        rows,
        tokens,
        new_tokens,
        blocks: blocks_for(&needs, rows),
    };
    let weights = weights(model, &sizes);
    let decoder = DeviceDecoder::new(shape(&model.config), weights, sizes, drawing(settings));
    let batch = Batch {
        decoder,
        requests,
        settings,
        rooms,
        max_tokens: model.max_tokens(),
        slots: vec![None; sizes.rows],
        left: vec![0; sizes.rows],
        admitted: 0,
    };
    batch.run(on_done)
}

fn empty() -> RolloutOutput {
    RolloutOutput {
        tokens: Vec::new(),
        sampling_log_probs: Vec::new(),
        log_probs: Vec::new(),
        finish: FinishReason::Length,
    }
}

/// Rows of the buffers: enough for requests that need `needs` blocks, or as many as the memory allows.
fn rows(model: &Decoder, needs: &[usize]) -> usize {
    let config = &model.config;
    let element = model.head().dtype().size();
    let token = 2 * config.layers * config.heads.key_value * config.heads.dim * element;
    let room =
        decode::memory(embedding(model)).map_or(f64::INFINITY, |bytes| CACHE_SHARE * bytes as f64);
    let fits = |rows: &&usize| (blocks_for(needs, **rows) * BLOCK * token) as f64 <= room;
    let fitting: Vec<usize> = ROWS.iter().take_while(fits).copied().collect();
    let enough = fitting.iter().find(|&&rows| rows >= needs.len());
    enough.or(fitting.last()).copied().unwrap_or(ROWS[0])
}

fn drawing(settings: &SamplingSettings) -> Drawing {
    let mut eos: Vec<i32> = settings.eos_ids.iter().map(|&id| id as i32).collect();
    eos.sort_unstable();
    eos.dedup();
    let stop = |ids: &Vec<u32>| ids.iter().map(|&id| id as i32).collect();
    Drawing {
        temperature: settings.temperature,
        top_k: settings.top_k,
        top_p: settings.top_p,
        min_p: settings.min_p,
        min_new_tokens: settings.min_new_tokens,
        eos,
        stops: settings.stop_ids.iter().map(stop).collect(),
    }
}

/// A running rollout.
struct Batch<'a> {
    decoder: DeviceDecoder,
    requests: &'a [RolloutRequest],
    settings: &'a SamplingSettings,
    /// Most tokens of each response.
    rooms: Vec<usize>,
    /// Tokens of the model's context.
    max_tokens: usize,
    /// The request of each row.
    slots: Vec<Option<usize>>,
    /// Tokens that a row may still draw.
    left: Vec<usize>,
    admitted: usize,
}

impl Batch<'_> {
    fn run(mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        loop {
            self.settings.check_cancelled()?;
            self.admit(on_done)?;
            let live = self.slots.iter().zip(&self.left);
            let longest = live
                .filter(|(slot, _)| slot.is_some())
                .map(|(_, &left)| left);
            let Some(longest) = longest.max() else {
                return Ok(());
            };
            self.shrink(longest)?;
            let steps = longest.min(STEPS);
            row_steps::count(steps, self.slots.len());
            for _ in 0..steps {
                self.decoder.step().map_err(device)?;
            }
            for left in &mut self.left {
                *left = left.saturating_sub(steps);
            }
            self.collect(on_done)?;
        }
    }

    /// Moves into smaller buffers if no request waits, few rows are left and one of them may go on for long.
    fn shrink(&mut self, longest: usize) -> Result<(), RolloutError> {
        let live: Vec<usize> = (0..self.slots.len())
            .filter(|&row| self.slots[row].is_some())
            .collect();
        let rows = ROWS.iter().copied().find(|&rows| rows >= live.len());
        let waiting = self.admitted < self.requests.len();
        let Some(rows) = rows
            .filter(|&rows| !waiting && longest >= MIN_STEPS_TO_MOVE && rows < self.slots.len())
        else {
            return Ok(());
        };
        self.decoder.shrink(rows, &live).map_err(device)?;
        self.slots = live.iter().map(|&row| self.slots[row]).collect();
        self.left = live.iter().map(|&row| self.left[row]).collect();
        self.slots.resize(rows, None);
        self.left.resize(rows, 0);
        Ok(())
    }

    /// Fills free rows with waiting requests, once enough are free. Adjacent requests with equal prompts share one pass
    /// over it.
    fn admit(&mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        let requests = self.requests;
        let rows = self.slots.len();
        let free = self.slots.iter().filter(|slot| slot.is_none()).count();
        let waiting = requests.len() - self.admitted;
        if free < rows && free < waiting.min(rows / FILLED) {
            return Ok(());
        }
        let mut prompts: Vec<(&[u32], Vec<usize>)> = Vec::new();
        let mut starts = Vec::new();
        let free = (0..self.slots.len()).filter(|&row| self.slots[row].is_none());
        let free: Vec<usize> = free.collect();
        let mut free = free.into_iter().peekable();
        while self.admitted < requests.len() {
            let at = self.admitted;
            let request = &requests[at];
            if self.rooms[at] == 0 {
                self.admitted += 1;
                on_done(at, empty())?;
                continue;
            }
            let Some(&row) = free.peek() else { break };
            let tokens = request.prompt.len() + self.rooms[at];
            if !self.decoder.reserve(row, tokens) {
                break;
            }
            free.next();
            self.admitted += 1;
            self.slots[row] = Some(at);
            self.left[row] = self.rooms[at];
            match prompts.last_mut() {
                Some((prompt, rows)) if *prompt == request.prompt.as_slice() => rows.push(row),
                _ => prompts.push((&request.prompt, vec![row])),
            }
            let position = request.prompt.len() - 1;
            starts.push(Start {
                row,
                token: request.prompt[position],
                position,
                limit: self.rooms[at],
                stream: request.key.stream().words(),
            });
        }
        if starts.is_empty() {
            return Ok(());
        }
        self.decoder.prefill(&prompts);
        self.decoder.start(&starts).map_err(device)
    }

    /// Returns the responses that have ended.
    fn collect(&mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        let current = self.decoder.row_states().map_err(device)?;
        let ended: Vec<usize> = (0..self.slots.len())
            .filter(|&row| self.slots[row].is_some() && current.states[row] != state::LIVE)
            .collect();
        if ended.is_empty() {
            return Ok(());
        }
        let lengths = ended.iter().map(|&row| current.lengths[row] as usize);
        let drawn: Vec<(usize, usize)> = ended.iter().copied().zip(lengths).collect();
        let responses = self.decoder.responses(&drawn).map_err(device)?;
        self.decoder.deactivate(&ended).map_err(device)?;
        for ((row, length), response) in drawn.into_iter().zip(responses) {
            let Some(request) = self.slots[row].take() else {
                continue;
            };
            row_steps::count_live(length);
            let finish = match current.states[row] {
                state::EOS => FinishReason::Eos,
                state::STOP => FinishReason::Stop,
                state::LENGTH => self.requests[request].limit(self.max_tokens),
                _ => {
                    return Err(RolloutError::NonFinite {
                        request,
                        tokens: length,
                    });
                }
            };
            on_done(request, output(response, finish))?;
        }
        Ok(())
    }
}

fn output(response: Response, finish: FinishReason) -> RolloutOutput {
    RolloutOutput {
        tokens: response.tokens.iter().map(|&id| id as u32).collect(),
        sampling_log_probs: response.sampling_log_probs,
        log_probs: response.log_probs,
        finish,
    }
}

fn device(reason: String) -> RolloutError {
    RolloutError::Device { reason }
}
