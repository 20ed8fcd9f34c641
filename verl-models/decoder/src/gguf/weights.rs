//! Converts the tensors of a GGUF file to those of a checkpoint.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{Read, Seek};
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::Content;
use half::{bf16, f16};
use safetensors::{Dtype, View};
use verl_text::files;

use super::config::Model;
use super::{GgufError, WeightType};

/// Factors of rotary frequencies; they are part of the configuration, not of the weights.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A tensor in its output format.
pub(super) struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    pub(super) fn num_elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A tensor that the model has: its name in the file and in the checkpoint, its shape, and the number of heads whose
/// rows must be reordered.
struct Expected {
    stored: String,
    name: String,
    shape: Vec<usize>,
    heads: Option<usize>,
}

fn expected(model: &Model) -> Vec<Expected> {
    let mut all = Vec::new();
    let mut add = |stored: String, name: String, shape: &[usize], heads: Option<usize>| {
        all.push(Expected {
            stored,
            name,
            shape: shape.to_vec(),
            heads,
        });
    };
    let (d, f, v) = (model.width, model.mlp_width, model.vocab_size);
    let (q, kv) = (
        model.heads * model.head_width,
        model.kv_heads * model.head_width,
    );
    let permuted = |heads: usize| (model.architecture == "llama").then_some(heads);
    let top = |name: &str| format!("{name}.weight");
    add(top("token_embd"), top("model.embed_tokens"), &[v, d], None);
    add(top("output_norm"), top("model.norm"), &[d], None);
    if !model.tied {
        add(top("output"), top("lm_head"), &[v, d], None);
    }
    for layer in 0..model.layers {
        let stored = |name: &str| format!("blk.{layer}.{name}");
        let name = |name: &str| format!("model.layers.{layer}.{name}");
        for (from, to, shape, heads) in [
            ("attn_norm", "input_layernorm", vec![d], None),
            ("ffn_norm", "post_attention_layernorm", vec![d], None),
            (
                "attn_q",
                "self_attn.q_proj",
                vec![q, d],
                permuted(model.heads),
            ),
            (
                "attn_k",
                "self_attn.k_proj",
                vec![kv, d],
                permuted(model.kv_heads),
            ),
            ("attn_v", "self_attn.v_proj", vec![kv, d], None),
            ("attn_output", "self_attn.o_proj", vec![d, q], None),
            ("ffn_gate", "mlp.gate_proj", vec![f, d], None),
            ("ffn_up", "mlp.up_proj", vec![f, d], None),
            ("ffn_down", "mlp.down_proj", vec![d, f], None),
        ] {
            add(stored(&top(from)), name(&top(to)), &shape, heads);
            if model.attention_bias
                && (to.ends_with("q_proj") || to.ends_with("k_proj") || to.ends_with("v_proj"))
            {
                let (stored, name) = (stored(&format!("{from}.bias")), name(&format!("{to}.bias")));
                add(stored, name, &shape[..1], heads);
            }
        }
        if model.architecture == "qwen3" {
            for (from, to) in [("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm")] {
                let name = name(&format!("self_attn.{to}.weight"));
                add(stored(&top(from)), name, &[model.head_width], None);
            }
        }
    }
    all
}

fn names_of(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    let more = names.len().saturating_sub(8);
    names.truncate(8);
    let mut text = names.join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

fn values<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    file: &Path,
    name: &str,
) -> Result<Vec<f32>, GgufError> {
    content
        .tensor(reader, name, &Device::Cpu)
        .and_then(|tensor| tensor.dequantize(&Device::Cpu))
        .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
        .map_err(|e| GgufError::Read {
            path: file.display().to_string(),
            reason: format!("tensor `{name}`: {e}"),
        })
}

pub(super) fn rope_factors<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    file: &Path,
    model: &Model,
) -> Result<Option<Vec<f32>>, GgufError> {
    if content.tensor_infos.contains_key(ROPE_FACTORS) {
        check_shape(content, ROPE_FACTORS, &[model.head_width / 2])?;
        values(content, reader, file, ROPE_FACTORS).map(Some)
    } else {
        Ok(None)
    }
}

/// Refuses a tensor of the wrong shape before anything is allocated.
fn check_shape(content: &Content, name: &str, wanted: &[usize]) -> Result<(), GgufError> {
    let found = content.tensor_infos[name].shape.dims();
    if found == wanted {
        return Ok(());
    }
    Err(GgufError::Shape {
        name: name.to_owned(),
        found: found.to_vec(),
        wanted: wanted.to_vec(),
    })
}

/// All tensors of the model, in checkpoint names, order and number format.
pub(super) fn read<R: Read + Seek>(
    content: &Content,
    reader: &mut R,
    file: &Path,
    model: &Model,
    weight_type: WeightType,
) -> Result<Vec<Tensor>, GgufError> {
    let expected = expected(model);
    let missing: Vec<&str> = expected
        .iter()
        .map(|e| e.stored.as_str())
        .filter(|&name| !content.tensor_infos.contains_key(name))
        .collect();
    if !missing.is_empty() {
        return Err(GgufError::MissingTensors {
            architecture: model.architecture.clone(),
            names: names_of(missing),
        });
    }
    let unknown: Vec<&str> = content
        .tensor_infos
        .keys()
        .map(String::as_str)
        .filter(|&name| name != ROPE_FACTORS && !expected.iter().any(|e| e.stored == name))
        .collect();
    if !unknown.is_empty() {
        return Err(GgufError::UnknownTensors {
            architecture: model.architecture.clone(),
            names: names_of(unknown),
        });
    }
    for e in &expected {
        check_shape(content, &e.stored, &e.shape)?;
    }
    expected
        .into_iter()
        .map(|e| {
            let mut values = values(content, reader, file, &e.stored)?;
            if let Some(heads) = e.heads {
                values = unpermute(&values, heads, e.shape[0] / heads);
            }
            let (dtype, bytes) =
                encode(&values, weight_type).map_err(|(index, value)| GgufError::Value {
                    name: e.stored,
                    value,
                    index,
                    dtype: weight_type,
                })?;
            Ok(Tensor {
                name: e.name,
                dtype,
                shape: e.shape,
                bytes,
            })
        })
        .collect()
}

/// Reorders the rows of each head from neighbouring rotary pairs to halves: row `2i + j` of a head becomes row
/// `j·Dh/2 + i`, with `j` in {0, 1}.
fn unpermute(values: &[f32], heads: usize, head_width: usize) -> Vec<f32> {
    let row = values.len() / (heads * head_width);
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for j in 0..2 {
            for i in 0..head_width / 2 {
                let from = (head * head_width + 2 * i + j) * row;
                out.extend_from_slice(&values[from..from + row]);
            }
        }
    }
    out
}

/// Little-endian bytes, or the position and value of the first number that the type cannot represent.
fn encode(values: &[f32], weight_type: WeightType) -> Result<(Dtype, Vec<u8>), (usize, f32)> {
    fn each<const N: usize>(
        values: &[f32],
        convert: impl Fn(f32) -> (bool, [u8; N]),
    ) -> Result<Vec<u8>, (usize, f32)> {
        let mut bytes = Vec::with_capacity(values.len() * N);
        for (index, &value) in values.iter().enumerate() {
            let (fits, encoded) = convert(value);
            if !fits {
                return Err((index, value));
            }
            bytes.extend_from_slice(&encoded);
        }
        Ok(bytes)
    }
    Ok(match weight_type {
        WeightType::Bf16 => (
            Dtype::BF16,
            each(values, |x| {
                let x = bf16::from_f32(x);
                (x.is_finite(), x.to_le_bytes())
            })?,
        ),
        WeightType::F16 => (
            Dtype::F16,
            each(values, |x| {
                let x = f16::from_f32(x);
                (x.is_finite(), x.to_le_bytes())
            })?,
        ),
        WeightType::F32 => (
            Dtype::F32,
            each(values, |x| (x.is_finite(), x.to_le_bytes()))?,
        ),
    })
}

pub(super) fn write(tensors: &[Tensor], path: &Path) -> Result<(), String> {
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let views = tensors.iter().map(|t| (t.name.as_str(), t));
    files::write_safetensors(views, metadata, path).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpermute_undoes_llama_cpp() {
        // llama.cpp: reshape(heads, 2, Dh/2, …) with its two middle dims exchanged. Rows are named head.row.
        let stored = [0.0, 0.2, 0.1, 0.3, 1.0, 1.2, 1.1, 1.3];
        assert_eq!(
            unpermute(&stored, 2, 4),
            [0.0, 0.1, 0.2, 0.3, 1.0, 1.1, 1.2, 1.3]
        );
        let wide: Vec<f32> = stored.iter().flat_map(|&x| [x, -x]).collect();
        assert_eq!(unpermute(&wide, 2, 4)[2..6], [0.1, -0.1, 0.2, -0.2]);
    }

    #[test]
    fn numbers_that_cannot_be_represented_are_reported() {
        assert_eq!(
            encode(&[1.0, 70_000.0], WeightType::F16),
            Err((1, 70_000.0))
        );
        assert!(encode(&[70_000.0], WeightType::Bf16).is_ok());
        assert_eq!(
            encode(&[f32::INFINITY], WeightType::F32),
            Err((0, f32::INFINITY))
        );
        assert_eq!(
            encode(&[1.0, -0.5], WeightType::Bf16),
            Ok((Dtype::BF16, vec![0x80, 0x3f, 0x00, 0xbf]))
        );
    }
}
