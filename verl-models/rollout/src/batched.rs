//! Continuous batching with a KV cache: waiting requests take the slots of those that finish, and adjacent requests
//! with equal prompts share the prompt's keys and values.

use burn::module::Module;
use rayon::prelude::*;
use verl_decoder::decoder::Decoder;
use verl_kernels::device::DeviceKind;

use super::engine::{
    FinishReason, OutputSink, PreparedModel, RolloutError, RolloutRequest, SamplingSettings,
    check_requests,
};
use super::host::HostDecoder;
use super::row::Row;
use super::row_steps;
use super::sampling::Sampler;
use super::stop::StopRules;
use super::tensor::TensorDecoder;
use crate::interface::ModelInterface;

/// Rows that are decoded at once.
pub const MAX_ROWS: usize = 64;

/// Share of a GPU's memory that keys and values of a rollout may take.
pub const CACHE_SHARE: f64 = 0.4;

/// How a step is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Loops over packed weights on the host, in f32.
    Host,
    /// Tensor operations of fixed shapes on the model's device, in its dtype.
    Tensors,
}

impl Arithmetic {
    /// Loops for a model on the CPU, tensors for any other.
    #[must_use]
    pub fn of(model: &Decoder) -> Self {
        match DeviceKind::of(&model.head().device()).is_host() {
            true => Arithmetic::Host,
            false => Arithmetic::Tensors,
        }
    }
}

/// A decoder that is prepared for continuous batching.
pub struct Batched {
    arithmetic: Prepared,
    vocab_size: usize,
    max_tokens: usize,
}

/// What is kept between calls.
enum Prepared {
    /// Packed weights.
    Host(HostDecoder),
    /// The decoder, which shares the weights of the original. Caches and graphs are made for each call: their sizes
    /// follow from its requests, and only one decoder of a process may have the kernel of all layers.
    Tensors {
        decoder: Decoder,
        /// Whether the device decodes on its own where it can.
        #[cfg_attr(
            not(feature = "cuda"),
            expect(dead_code, reason = "only read with CUDA")
        )]
        on_device: bool,
    },
}

impl Batched {
    /// Prepares the current weights of `model`, with the arithmetic for its device.
    ///
    /// # Errors
    /// [`RolloutError::Device`] when weights cannot be read.
    pub fn new(model: &Decoder) -> Result<Self, RolloutError> {
        Self::prepared(model, Arithmetic::of(model), true)
    }

    /// The same with a chosen arithmetic.
    ///
    /// # Errors
    /// As [`Batched::new`].
    pub fn by(arithmetic: Arithmetic, model: &Decoder) -> Result<Self, RolloutError> {
        Self::prepared(model, arithmetic, false)
    }

    fn prepared(
        model: &Decoder,
        arithmetic: Arithmetic,
        on_device: bool,
    ) -> Result<Self, RolloutError> {
        // The snapshot shares the weights and records no graph.
        let decoder = model.valid();
        Ok(Batched {
            vocab_size: model.vocab_size(),
            max_tokens: model.max_tokens(),
            arithmetic: match arithmetic {
                Arithmetic::Host => Prepared::Host(HostDecoder::new(&decoder)?),
                Arithmetic::Tensors => Prepared::Tensors { decoder, on_device },
            },
        })
    }
}

impl PreparedModel for Batched {
    fn generate(
        &mut self,
        requests: &[RolloutRequest],
        settings: &SamplingSettings,
        on_done: &mut OutputSink<'_>,
    ) -> Result<(), RolloutError> {
        let sampling = Sampling::new(settings)?;
        check_requests(requests, self.vocab_size, self.max_tokens)?;
        let sampling = sampling.within(self.max_tokens);
        let tokens = longest(requests, self.max_tokens);
        match &mut self.arithmetic {
            Prepared::Host(steps) => {
                let rows = requests.len().min(MAX_ROWS);
                steps.begin(rows, tokens);
                let done = Rollout::new(steps, rows, requests, &sampling).run(on_done);
                steps.end();
                done
            }
            #[cfg(feature = "cuda")]
            Prepared::Tensors {
                decoder,
                on_device: true,
            } if super::device::supports(decoder, settings) => {
                super::device::generate(decoder, requests, settings, on_done)
            }
            Prepared::Tensors { decoder, .. } => {
                let mut steps = TensorDecoder::new(decoder.clone(), MAX_ROWS, tokens);
                Rollout::new(&mut steps, MAX_ROWS, requests, &sampling).run(on_done)
            }
        }
    }
}

/// Samples once; see [`PreparedModel::generate`].
///
/// # Errors
/// The same as [`PreparedModel::generate`].
pub fn generate(
    model: &Decoder,
    requests: &[RolloutRequest],
    settings: &SamplingSettings,
    on_done: &mut OutputSink<'_>,
) -> Result<(), RolloutError> {
    Batched::new(model)?.generate(requests, settings, on_done)
}

/// Tokens of the longest sequence that `requests` and the context allow.
fn longest(requests: &[RolloutRequest], max_tokens: usize) -> usize {
    let lengths = requests
        .iter()
        .map(|request| request.prompt.len() + request.room(max_tokens));
    lengths.max().unwrap_or(0)
}

/// A computed prompt.
pub(crate) struct Prompt<K> {
    /// Its keys and values.
    pub keys: K,
    /// Logits of the token after it: `[V]`.
    pub logits: Vec<f32>,
}

/// The prompts of requests that are admitted together.
struct Prompts<K> {
    computed: Vec<Prompt<K>>,
    /// The prompt's index for each request.
    of_place: Vec<usize>,
}

impl<K> Prompts<K> {
    fn of(&self, place: usize) -> &Prompt<K> {
        &self.computed[self.of_place[place]]
    }
}

/// A model that appends tokens to sequences in numbered slots. The bits of its results for a slot do not depend on the
/// contents of the other slots.
pub(crate) trait StepModel {
    /// Keys and values of a prompt, which several slots may continue.
    type Keys;

    /// Computes prompts.
    fn prefill(&mut self, prompts: &[&[u32]]) -> Result<Vec<Prompt<Self::Keys>>, RolloutError>;

    /// Puts a sequence that begins with a prompt into a free slot.
    fn occupy(&mut self, slot: usize, keys: &Self::Keys);

    /// Frees a slot.
    fn release(&mut self, slot: usize);

    /// Appends one token to each slot that is given one; returns the logits of those slots, in ascending order: `[live,
    /// V]`.
    fn step(&mut self, ids: &[Option<u32>]) -> Result<Vec<f32>, RolloutError>;
}

/// Checked settings of a rollout.
pub(crate) struct Sampling<'a> {
    settings: &'a SamplingSettings,
    sampler: Sampler<'a>,
    rules: StopRules<'a>,
    /// Longest sequence of the model.
    max_tokens: usize,
}

impl<'a> Sampling<'a> {
    /// Checks `settings`.
    ///
    /// # Errors
    /// [`RolloutError::Setting`].
    pub fn new(settings: &'a SamplingSettings) -> Result<Self, RolloutError> {
        Ok(Sampling {
            settings,
            sampler: Sampler::new(settings)?,
            rules: StopRules::new(settings)?,
            max_tokens: usize::MAX,
        })
    }

    /// The same for a model with a context of `max_tokens`.
    #[must_use]
    pub fn within(self, max_tokens: usize) -> Self {
        Sampling { max_tokens, ..self }
    }

    /// Samples a token for each row; returns why each response ends, if it does.
    fn advance(
        &self,
        rows: Vec<(&mut Row, &[f32])>,
    ) -> Result<Vec<Option<FinishReason>>, RolloutError> {
        // With fewer numbers per piece, a thread costs more than it saves.
        const PIECE: usize = 8 << 10;
        let vocab = rows.first().map_or(1, |(_, logits)| logits.len());
        rows.into_par_iter()
            .with_min_len(PIECE.div_ceil(vocab))
            .map_init(
                || self.sampler.clone(),
                |sampler, (row, logits)| row.advance(logits, sampler, &self.rules),
            )
            // The first error in row order, regardless of which thread failed first.
            .collect::<Vec<_>>()
            .into_iter()
            .collect()
    }
}

/// A running rollout.
pub(crate) struct Rollout<'a, M: StepModel> {
    model: &'a mut M,
    requests: &'a [RolloutRequest],
    sampling: &'a Sampling<'a>,
    slots: Vec<Option<Row>>,
    /// Requests that were admitted.
    admitted: usize,
    /// The prompt of the last admitted request, for adjacent requests that wait.
    prompt: Option<Prompt<M::Keys>>,
}

impl<'a, M: StepModel> Rollout<'a, M> {
    /// A rollout of checked `requests`, at most `slots` at once.
    pub fn new(
        model: &'a mut M,
        slots: usize,
        requests: &'a [RolloutRequest],
        sampling: &'a Sampling<'a>,
    ) -> Self {
        Rollout {
            model,
            requests,
            sampling,
            slots: (0..slots).map(|_| None).collect(),
            admitted: 0,
            prompt: None,
        }
    }

    /// Samples all responses.
    ///
    /// # Errors
    /// See [`RolloutError`].
    pub fn run(mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        loop {
            self.sampling.settings.check_cancelled()?;
            self.admit(on_done)?;
            if self.slots.iter().all(Option::is_none) {
                return Ok(());
            }
            self.step(on_done)?;
        }
    }

    /// Fills free slots with waiting requests until no slot is free or no request waits. A response that ends with its
    /// first token leaves its slot free for the next request.
    fn admit(&mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        loop {
            let free: Vec<usize> = (0..self.slots.len())
                .filter(|&slot| self.slots[slot].is_none())
                .collect();
            let first = self.admitted;
            let last = self.requests.len().min(first + free.len());
            if first == last {
                return Ok(());
            }
            self.admitted = last;
            let prompts = self.prompts(first, last)?;
            let mut rows: Vec<Row> = (first..last)
                .map(|index| {
                    let Sampling {
                        settings,
                        max_tokens,
                        ..
                    } = *self.sampling;
                    Row::new(index, &self.requests[index], settings, max_tokens)
                })
                .collect();
            let ends = self.first_tokens(&mut rows, &prompts)?;
            for (place, (row, end)) in rows.into_iter().zip(ends).enumerate() {
                match end {
                    Some(finish) => on_done(row.request, row.into_output(finish))?,
                    None => {
                        self.model.occupy(free[place], &prompts.of(place).keys);
                        self.slots[free[place]] = Some(row);
                    }
                }
            }
            self.prompt = prompts.computed.into_iter().last();
        }
    }

    /// The prompts of requests `first..last`, each computed once for adjacent requests that share it.
    fn prompts(&mut self, first: usize, last: usize) -> Result<Prompts<M::Keys>, RolloutError> {
        let requests = self.requests;
        let shares =
            |index: usize| index > 0 && requests[index].prompt == requests[index - 1].prompt;
        let kept = self.prompt.take().filter(|_| shares(first));
        let mut computed: Vec<Prompt<M::Keys>> = kept.into_iter().collect();
        let known = computed.len();
        let mut fresh: Vec<&[u32]> = Vec::new();
        let mut of_place = Vec::with_capacity(last - first);
        for (index, request) in requests.iter().enumerate().take(last).skip(first) {
            if known + fresh.len() == 0 || !shares(index) {
                fresh.push(&request.prompt);
            }
            of_place.push(known + fresh.len() - 1);
        }
        computed.extend(self.model.prefill(&fresh)?);
        Ok(Prompts { computed, of_place })
    }

    /// Samples the first token of new rows that have room for one.
    fn first_tokens(
        &self,
        rows: &mut [Row],
        prompts: &Prompts<M::Keys>,
    ) -> Result<Vec<Option<FinishReason>>, RolloutError> {
        let mut ends: Vec<Option<FinishReason>> = rows
            .iter()
            .map(|row| (row.limit() == 0).then_some(FinishReason::Length))
            .collect();
        let open = rows
            .iter_mut()
            .enumerate()
            .filter(|(_, row)| row.limit() > 0);
        let open = open.map(|(place, row)| (row, prompts.of(place).logits.as_slice()));
        let sampled = self.sampling.advance(open.collect())?;
        let places = ends.iter_mut().filter(|end| end.is_none());
        places.zip(sampled).for_each(|(place, end)| *place = end);
        Ok(ends)
    }

    /// Decodes one token for every slot that has a row.
    fn step(&mut self, on_done: &mut OutputSink<'_>) -> Result<(), RolloutError> {
        let last = |row: &Option<Row>| row.as_ref().and_then(Row::last_token);
        let ids: Vec<Option<u32>> = self.slots.iter().map(last).collect();
        let logits = self.model.step(&ids)?;
        let live = self.slots.iter().flatten().count();
        row_steps::count(1, self.slots.len());
        row_steps::count_live(live);
        let rows = self.slots.iter_mut().flatten();
        let rows = rows.zip(logits.chunks_exact((logits.len() / live).max(1)));
        let ends = self.sampling.advance(rows.collect())?;
        let occupied = (0..self.slots.len()).filter(|&slot| ids[slot].is_some());
        for (slot, end) in occupied.collect::<Vec<_>>().into_iter().zip(ends) {
            let Some(finish) = end else { continue };
            self.model.release(slot);
            if let Some(row) = self.slots[slot].take() {
                on_done(row.request, row.into_output(finish))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verl_kernels::random::{DrawKey, Purpose};

    /// Three ids of equal probability; records its calls.
    #[derive(Default)]
    struct Fake {
        prompts: Vec<Vec<u32>>,
        occupied: Vec<usize>,
        live: Vec<usize>,
    }

    impl StepModel for Fake {
        type Keys = ();

        fn prefill(&mut self, prompts: &[&[u32]]) -> Result<Vec<Prompt<()>>, RolloutError> {
            self.prompts.extend(prompts.iter().map(|ids| ids.to_vec()));
            let prompt = |_: &&[u32]| Prompt {
                keys: (),
                logits: vec![0.0; 3],
            };
            Ok(prompts.iter().map(prompt).collect())
        }

        fn occupy(&mut self, slot: usize, (): &()) {
            assert!(!self.occupied.contains(&slot), "slot {slot} is occupied");
            self.occupied.push(slot);
        }

        fn release(&mut self, slot: usize) {
            self.occupied.retain(|&other| other != slot);
        }

        fn step(&mut self, ids: &[Option<u32>]) -> Result<Vec<f32>, RolloutError> {
            let live: Vec<usize> = (0..ids.len()).filter(|&slot| ids[slot].is_some()).collect();
            let mut occupied = self.occupied.clone();
            occupied.sort_unstable();
            assert_eq!(live, occupied);
            self.live.push(live.len());
            Ok(vec![0.0; 3 * live.len()])
        }
    }

    /// Runs requests of (prompt, limit) in `slots`; every response must be complete.
    fn run(asked: &[(u32, usize)], slots: usize) -> Fake {
        let request = |(row, &(prompt, limit)): (usize, &(u32, usize))| RolloutRequest {
            prompt: vec![prompt],
            key: DrawKey {
                seed: 0,
                purpose: Purpose::Rollout,
                step: 0,
                row: row as u64,
                attempt: 0,
            },
            max_new_tokens: limit,
        };
        let requests: Vec<RolloutRequest> = asked.iter().enumerate().map(request).collect();
        let settings = SamplingSettings::default();
        let sampling = Sampling::new(&settings).unwrap();
        let mut fake = Fake::default();
        let mut lengths = vec![None; asked.len()];
        Rollout::new(&mut fake, slots, &requests, &sampling)
            .run(&mut |index, output| {
                lengths[index] = Some(output.tokens.len());
                Ok(())
            })
            .unwrap();
        let limits: Vec<Option<usize>> = asked.iter().map(|&(_, limit)| Some(limit)).collect();
        assert_eq!(lengths, limits);
        assert!(fake.occupied.is_empty());
        fake
    }

    #[test]
    fn adjacent_requests_share_a_prompt_even_when_they_wait() {
        let asked: Vec<(u32, usize)> = [7, 7, 7, 7, 8, 8, 8, 7, 7, 7].map(|p| (p, 3)).into();
        for slots in 1..=10 {
            let fake = run(&asked, slots);
            assert_eq!(fake.prompts, [[7], [8], [7]], "{slots} slots");
        }
    }

    #[test]
    fn waiting_requests_take_free_slots_at_once() {
        // The first token comes from the prompt, so a response of n tokens takes n − 1 steps.
        let asked = [(1, 5), (2, 2), (3, 2), (4, 3), (5, 1), (6, 0), (7, 2)];
        // Slot 0: request 0. Slot 1: requests 1, 2, 3; then 4 and 5, which need no step, and 6 after the end of 0.
        assert_eq!(run(&asked, 2).live, [2, 2, 2, 2, 1]);
        assert_eq!(run(&asked, 1).live, [1; 9]);
        assert_eq!(run(&asked, 7).live, [5, 2, 1, 1]);
        assert_eq!(run(&[], 0).live, [0; 0]);
    }
}
