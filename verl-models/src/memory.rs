//! What a decoder takes on its device beside weights and optimiser state, in bytes: an upper estimate from its config.
//!
//! Measured against it, on an NVIDIA H200: a decoder of 24 layers, width 896, 14 query heads over 2 key heads of 64,
//! feed-forward 4,864, vocabulary 151,936, in bf16 with f32 masters, trained on 8 × 1,024 tokens in one micro-batch, held
//! 16 GB at most. The estimate is 18.7 GB, a sixth more: it counts the sums of gradients (2.0 GB) as if they were there
//! before the backward pass, as they are from the second micro-batch on, and logits of the largest chunk.

use burn::tensor::DType;

use crate::decoder::DecoderConfig;
use crate::device;
use crate::policy::TRAIN_CHUNK;
use crate::rollout::batched::MAX_ROWS;
use crate::rows::CallLimits;

/// Most bytes of logits that the kernels of a GPU have in memory at once, where `TRAIN_CHUNK` tokens take no more.
pub(crate) const LOGIT_BYTES: usize = 768 << 20;

/// Rows that buffers of a rollout have on a GPU: a power of two between these.
const GPU_ROWS: [usize; 2] = [16, 512];

/// Share of a GPU's memory that keys and values of a rollout may take, at least [`GPU_ROWS`]`[0]` rows of them.
pub(crate) const CACHE_SHARE: f64 = 0.4;

/// Bytes of a decoder's work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Footprint {
    /// Keys and values of a token of a rollout.
    pub cache_per_token: u64,
    /// Least and most rows of a rollout's buffers, powers of two.
    pub cache_rows: [usize; 2],
    /// Share of the device's memory that the cache may take; with less room than it would like it has fewer rows.
    pub cache_share: Option<f64>,
    /// What a forward pass keeps of a token for the backward pass.
    pub kept_per_token: u64,
    /// What a token takes in the layer at work, in either pass.
    pub layer_per_token: u64,
    /// Tokens of a call without gradient, about; a longer row is a call of its own.
    pub call_tokens: usize,
    /// Logits that are there at once, and in training what the head's gradient takes beside its sum.
    pub logits: u64,
}

/// The footprint of a decoder in `dtype` on the device called `device`; `scores_tokens` says whether it has logits, as a
/// model of values has none.
///
/// With `b` bytes an element, `D` width, `I` feed-forward, `H`/`K` query/key heads of width `Dh`, `L` layers, `V`
/// vocabulary and `C` tokens of a chunk of logits:
///
/// - cache, a token: 2 L K Dh b
/// - kept, a token: L (b (4 D + 2 H Dh + 2 K Dh + 3 I) + 4 (2 + H)) + 2 b D. A layer keeps the inputs of its two norms and
///   what they give, turned queries and keys, values, what attention gives, gate, up, and their product; and in f32 a scale
///   of each norm and a log-sum of each head. With norms on heads, those keep b (H + K) Dh + 4 (H + K) more. The last
///   norm keeps its input and what it gives.
/// - layer, a token: b (4 D + 2 H Dh + 2 K Dh + 3 I), the gradients of all that
/// - logits: on a GPU max(C V b, 768 MiB) at most; on the CPU, where operations are composed, 4 · 4 C V. And (b + 4) V D,
///   the head's own gradient and the embedding's before they are summed.
///
/// ```
/// use burn::tensor::DType;
/// use verl_models::bench::preset;
/// use verl_models::memory::footprint;
///
/// let config = preset("qwen2.5-0.5b").unwrap();
/// let taken = footprint(&config, DType::BF16, "cuda:0", true);
/// assert_eq!(taken.cache_per_token, 2 * 24 * 2 * 64 * 2);
/// // Just below 1 MB a token.
/// assert_eq!(taken.kept_per_token, 975_872);
/// ```
pub fn footprint(
    config: &DecoderConfig,
    dtype: DType,
    device: &str,
    scores_tokens: bool,
) -> Footprint {
    let on_gpu = device::has_bf16(device);
    let element = dtype.size();
    let (layers, width) = (config.layers, config.hidden_size);
    let (query, key) = (config.heads.query, config.heads.key_value);
    let (queries, keys) = (query * config.heads.dim, key * config.heads.dim);
    let layer = element * (4 * width + 2 * queries + 2 * keys + 3 * config.intermediate_size);
    let of_norms = if config.qk_norm {
        element * (queries + keys) + 4 * (query + key)
    } else {
        0
    };
    let statistics = 4 * (2 + query);
    let limits = CallLimits::named(on_gpu);
    let (cache_rows, cache_share) = if on_gpu {
        (GPU_ROWS, Some(CACHE_SHARE))
    } else {
        ([1, MAX_ROWS], None)
    };
    Footprint {
        cache_per_token: (2 * layers * keys * element) as u64,
        cache_rows,
        cache_share,
        kept_per_token: (layers * (layer + of_norms + statistics) + 2 * element * width) as u64,
        layer_per_token: layer as u64,
        call_tokens: limits.call_tokens(),
        logits: if scores_tokens {
            logits(config, element, on_gpu)
        } else {
            0
        },
    }
}

fn logits(config: &DecoderConfig, element: usize, on_gpu: bool) -> u64 {
    let chunk = TRAIN_CHUNK * config.vocab_size;
    let at_once = if on_gpu {
        (chunk * element).max(LOGIT_BYTES)
    } else {
        4 * 4 * chunk
    };
    (at_once + (element + 4) * config.vocab_size * config.hidden_size) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::preset;

    fn qwen() -> DecoderConfig {
        preset("qwen2.5-0.5b").unwrap()
    }

    #[test]
    fn the_estimate_is_a_sixth_above_what_was_measured() {
        let taken = footprint(&qwen(), DType::BF16, "cuda:0", true);
        let parameters = 494_032_768;
        // Weights, masters, two moments, gradients.
        let held = parameters * (2 + 4 + 8 + 4);
        let work = 8 * 1024 * (taken.kept_per_token + taken.layer_per_token) + taken.logits;
        let planned = (held + work) as f64;
        let measured = 16e9;
        assert!((1.1..1.2).contains(&(planned / measured)), "{planned}");
    }

    #[test]
    fn sizes_follow_dtype_device_and_head() {
        let bf16 = footprint(&qwen(), DType::BF16, "cuda:0", true);
        let f32 = footprint(&qwen(), DType::F32, "cuda:0", true);
        assert_eq!(f32.cache_per_token, 2 * bf16.cache_per_token);
        assert_eq!(f32.layer_per_token, 2 * bf16.layer_per_token);
        // Statistics are f32 in both.
        let statistics = 24 * 4 * (2 + 14);
        assert_eq!(
            f32.kept_per_token - statistics,
            2 * (bf16.kept_per_token - statistics)
        );
        let values = footprint(&qwen(), DType::BF16, "cuda:0", false);
        assert_eq!(values.logits, 0);
        let cpu = footprint(&qwen(), DType::F32, "cpu", true);
        assert_eq!((cpu.cache_rows, cpu.cache_share), ([1, 64], None));
        assert_eq!(cpu.kept_per_token, f32.kept_per_token);
    }

    #[test]
    fn norms_of_heads_keep_their_inputs() {
        let plain = DecoderConfig {
            layers: 1,
            ..qwen()
        };
        let normed = DecoderConfig {
            qk_norm: true,
            ..plain.clone()
        };
        let kept = |config| footprint(config, DType::F32, "cpu", true).kept_per_token;
        // 16 heads of 64, and a scale of each.
        assert_eq!(kept(&normed) - kept(&plain), 4 * 16 * 64 + 4 * 16);
    }
}
