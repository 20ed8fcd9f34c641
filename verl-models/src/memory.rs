//! Bytes that a decoder needs on its device besides weights and optimiser state: an upper estimate from its config.
//!
//! For comparison, on an NVIDIA H200 a decoder of 24 layers, width 896, 14 query heads over 2 key heads of 64,
//! feed-forward 4,864, vocabulary 151,936, in bf16 with f32 masters, trained on 8 × 1,024 tokens in one micro-batch,
//! used at most 21.0 GB, and 13.5 GB with recomputation. The estimates are 21.8 and 14.4 GB: they assume that the sums
//! of gradients (2.0 GB) exist before the backward pass, which is true from the second micro-batch on.

use burn::tensor::DType;
use verl_decoder::decoder::DecoderConfig;
use verl_kernels::device::DeviceKind;
use verl_kernels::{KEPT_LOGIT_BYTES, LOGIT_BYTES};
use verl_rollout::batched::{CACHE_SHARE, MAX_ROWS};

use crate::rows::{CallLimits, TRAIN_CHUNK};

/// Minimum and maximum rows of a rollout's buffers on a GPU; the number is a power of two. The minimum is kept even if it
/// takes more than [`CACHE_SHARE`].
const GPU_ROWS: [usize; 2] = [16, 512];

/// Working memory of a decoder, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Footprint {
    /// Keys and values per token of a rollout.
    pub cache_per_token: u64,
    /// Minimum and maximum rows of a rollout's buffers, powers of two.
    pub cache_rows: [usize; 2],
    /// Share of the device's memory that the cache may take; if that is too little, the cache has fewer rows.
    pub cache_share: Option<f64>,
    /// Bytes per token that the forward pass keeps for the backward pass.
    pub kept_per_token: u64,
    /// Bytes per token in the layer being computed, in either pass.
    pub layer_per_token: u64,
    /// Approximate tokens per call without gradient; a longer row is a separate call.
    pub call_tokens: usize,
    /// Logits in memory at once and, in training, the head's gradient in addition to its sum.
    pub logits: u64,
    /// Logits per token that training keeps for the backward pass.
    pub kept_logits_per_token: u64,
    /// Maximum of these in total; logits of further tokens are recomputed, a chunk at a time.
    pub kept_logits: u64,
    /// Copies of weights that training keeps for the backward pass.
    pub copies: u64,
    /// What the [native engine](verl_rollout::native) keeps between calls.
    pub engine: u64,
}

/// How and where a decoder is used.
#[derive(Debug, Clone, Copy)]
pub struct Usage<'a> {
    /// Type of the weights.
    pub dtype: DType,
    /// Name of the device.
    pub device: &'a str,
    /// Whether logits are computed; a value model has none.
    pub scores_tokens: bool,
    /// Whether the backward pass recomputes the activations inside layers.
    pub recompute: bool,
}

/// The footprint of a decoder.
///
/// With `b` bytes per element, `D` width, `I` feed-forward, `H`/`K` query/key heads of width `Dh`, `L` layers, `V`
/// vocabulary and `C` tokens per chunk of logits:
///
/// - cache, per token: 2 L K Dh b
/// - kept, per token: L (b (4 D + 2 H Dh + 2 K Dh + 3 I) + 4 (2 + H)) + 2 b D. A layer keeps the inputs and outputs of
///   its two norms, rotated queries and keys, values, the output of attention, gate, up, and their product; and in f32
///   a scale per norm and a log-sum per head. Norms on heads keep b (H + K) Dh + 4 (H + K) more. The last norm keeps
///   its input and output. With recomputation a layer keeps 2 b D, the inputs of its halves.
/// - layer, per token: b (4 D + 2 H Dh + 2 K Dh + 3 I), the gradients of all these; twice as much with recomputation
/// - logits: on a GPU at most max(C V b, 768 MiB); on the CPU, where operations are composed, 4 · 4 C V. Plus (b + 4) V
///   D, the gradients of the head and of the embedding before they are summed.
/// - kept logits: on a GPU V b per token, up to 3 GiB
/// - copies: on a GPU b D (H Dh + 2 K Dh + 2 I) per layer, because the projections of a half are multiplied as one
///   matrix; with recomputation, only for one layer
/// - engine: on the CPU 4 bytes per parameter, without the embedding of an untied decoder: the packed weights
///
/// ```
/// use burn::tensor::DType;
/// use verl_models::bench::preset;
/// use verl_models::memory::{Usage, footprint};
///
/// let config = preset("qwen2.5-0.5b").unwrap();
/// let usage = Usage { dtype: DType::BF16, device: "cuda:0", scores_tokens: true, recompute: false };
/// let taken = footprint(&config, usage);
/// assert_eq!(taken.cache_per_token, 2 * 24 * 2 * 64 * 2);
/// // Just below 1 MB per token; a tenth of that with recomputation.
/// assert_eq!(taken.kept_per_token, 975_872);
/// let taken = footprint(&config, Usage { recompute: true, ..usage });
/// assert_eq!(taken.kept_per_token, 89_600);
/// ```
pub fn footprint(config: &DecoderConfig, usage: Usage<'_>) -> Footprint {
    let Usage {
        dtype,
        device,
        scores_tokens,
        recompute,
    } = usage;
    let on_gpu = DeviceKind::named(device).is_some_and(|kind| !kind.is_host());
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
    let (of_layer, at_work) = if recompute {
        (2 * element * width, 2 * layer)
    } else {
        (layer + of_norms + statistics, layer)
    };
    let keeps_logits = on_gpu && scores_tokens;
    let joined = element * width * (queries + 2 * keys + 2 * config.intermediate_size);
    Footprint {
        cache_per_token: (2 * layers * keys * element) as u64,
        cache_rows,
        cache_share,
        kept_per_token: (layers * of_layer + 2 * element * width) as u64,
        layer_per_token: at_work as u64,
        call_tokens: limits.call_tokens(),
        logits: if scores_tokens {
            logits(config, element, on_gpu)
        } else {
            0
        },
        kept_logits_per_token: if keeps_logits {
            (config.vocab_size * element) as u64
        } else {
            0
        },
        kept_logits: if keeps_logits {
            KEPT_LOGIT_BYTES as u64
        } else {
            0
        },
        copies: match (on_gpu, recompute) {
            (false, _) => 0,
            (true, false) => (layers * joined) as u64,
            (true, true) => joined as u64,
        },
        engine: if on_gpu || !scores_tokens {
            0
        } else {
            4 * packed(config)
        },
    }
}

/// Parameters that the rollout packs: all but the embedding, unless it is also the head.
fn packed(config: &DecoderConfig) -> u64 {
    let embedding = match config.tied_head {
        true => 0,
        false => config.vocab_size * config.hidden_size,
    };
    config.num_parameters() - embedding as u64
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
    use verl_decoder::families::decoder_config;
    use verl_decoder::hf::config::Settings;

    fn qwen() -> DecoderConfig {
        preset("qwen2.5-0.5b").unwrap()
    }

    /// The largest sizes that [`decoder_config`] accepts: the limits in `families.rs` of `verl-decoder`.
    fn largest() -> DecoderConfig {
        let file = serde_json::json!({
            "model_type": "llama", "num_hidden_layers": 1 << 12, "hidden_size": 1 << 20,
            "intermediate_size": 1 << 20, "vocab_size": 1 << 24, "num_attention_heads": 1 << 12,
            "num_key_value_heads": 1 << 12, "head_dim": 1 << 12, "max_position_embeddings": 1 << 30,
        });
        let settings = Settings {
            path: "config.json".into(),
            map: file.as_object().unwrap(),
        };
        decoder_config(&settings).unwrap()
    }

    const CPU: Usage<'_> = Usage {
        dtype: DType::F32,
        device: "cpu",
        ..GPU
    };

    const GPU: Usage<'_> = Usage {
        dtype: DType::BF16,
        device: "cuda:0",
        scores_tokens: true,
        recompute: false,
    };

    #[test]
    fn the_estimate_is_slightly_above_the_measurement() {
        for (recompute, measured) in [(false, 21.0e9), (true, 13.54e9)] {
            let taken = footprint(&qwen(), Usage { recompute, ..GPU });
            let parameters = 494_032_768;
            // Weights, masters, two moments, gradients.
            let state = parameters * (2 + 4 + 8 + 4);
            let tokens = 8 * 1024;
            let token = taken.kept_per_token + taken.layer_per_token;
            let kept_logits = (tokens * taken.kept_logits_per_token).min(taken.kept_logits);
            let work = tokens * token + kept_logits + taken.logits + taken.copies;
            let share = (state + work) as f64 / measured;
            assert!((1.0..1.1).contains(&share), "{recompute}: {share}");
        }
    }

    #[test]
    fn sizes_depend_on_dtype_device_and_head() {
        let bf16 = footprint(&qwen(), GPU);
        let f32 = footprint(
            &qwen(),
            Usage {
                dtype: DType::F32,
                ..GPU
            },
        );
        assert_eq!(f32.cache_per_token, 2 * bf16.cache_per_token);
        assert_eq!(f32.layer_per_token, 2 * bf16.layer_per_token);
        // Statistics are f32 in both.
        let statistics = 24 * 4 * (2 + 14);
        assert_eq!(
            f32.kept_per_token - statistics,
            2 * (bf16.kept_per_token - statistics)
        );
        let values = footprint(
            &qwen(),
            Usage {
                scores_tokens: false,
                ..GPU
            },
        );
        assert_eq!(values.logits, 0);
        assert_eq!((values.engine, bf16.engine), (0, 0));
        let cpu = footprint(&qwen(), CPU);
        assert_eq!((cpu.cache_rows, cpu.cache_share), ([1, 64], None));
        assert_eq!(cpu.kept_per_token, f32.kept_per_token);
    }

    #[test]
    fn the_embedding_is_only_packed_as_a_head() {
        let tied = DecoderConfig {
            tied_head: true,
            ..qwen()
        };
        let untied = DecoderConfig {
            tied_head: false,
            ..qwen()
        };
        let packed = 4 * tied.num_parameters();
        assert_eq!(footprint(&tied, CPU).engine, packed);
        assert_eq!(footprint(&untied, CPU).engine, packed);
    }

    #[test]
    fn no_size_of_a_file_overflows_the_estimate() {
        for recompute in [false, true] {
            let usage = Usage {
                dtype: DType::F32,
                recompute,
                ..GPU
            };
            assert!(footprint(&largest(), usage).copies > 0);
        }
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
        let kept = |config: DecoderConfig| footprint(&config, CPU).kept_per_token;
        // 16 heads of 64, and a scale per head.
        assert_eq!(kept(normed) - kept(plain), 4 * 16 * 64 + 4 * 16);
    }
}
