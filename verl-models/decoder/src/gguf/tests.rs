use std::collections::HashMap;
use std::fs::File;

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use serde_json::json;

use super::*;

const WIDTH: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const MLP: usize = 64;

/// A file under construction: metadata and tensors by name.
struct Writer {
    metadata: Vec<(String, GgufValue)>,
    tensors: Vec<(String, QTensor)>,
}

fn text(value: &str) -> GgufValue {
    GgufValue::String(value.to_owned())
}

fn texts(values: &[&str]) -> GgufValue {
    GgufValue::Array(values.iter().map(|v| text(v)).collect())
}

/// The numbers of tensor `seed`, with enough structure that a wrong row order is noticed.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 37 + seed * 101) % 997) as f32 / 997.0 - 0.5)
        .collect()
}

impl Writer {
    /// One layer of `architecture` with a byte-level tokenizer.
    fn new(architecture: &str, dtype: GgmlDType) -> Writer {
        let mut writer = Writer {
            metadata: Vec::new(),
            tensors: Vec::new(),
        };
        let tokens = [
            "<|end|>", "<|user|>", "a", "b", "c", "1", "2", "3", "Ġ", "ab", "Ġab", "Ċ", "<tool>",
        ];
        let kinds = [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4];
        let key = |name: &str| format!("{architecture}.{name}");
        writer.metadata = vec![
            ("general.architecture".to_owned(), text(architecture)),
            (key("block_count"), GgufValue::U32(1)),
            (key("context_length"), GgufValue::U32(128)),
            (key("embedding_length"), GgufValue::U32(WIDTH as u32)),
            (key("feed_forward_length"), GgufValue::U32(MLP as u32)),
            (key("attention.head_count"), GgufValue::U32(HEADS as u32)),
            (
                key("attention.head_count_kv"),
                GgufValue::U32(KV_HEADS as u32),
            ),
            (
                key("attention.layer_norm_rms_epsilon"),
                GgufValue::F32(1e-5),
            ),
            (key("rope.freq_base"), GgufValue::F32(100_000.0)),
            ("tokenizer.ggml.model".to_owned(), text("gpt2")),
            ("tokenizer.ggml.pre".to_owned(), text("smollm")),
            ("tokenizer.ggml.tokens".to_owned(), texts(&tokens)),
            (
                "tokenizer.ggml.token_type".to_owned(),
                GgufValue::Array(kinds.map(GgufValue::I32).to_vec()),
            ),
            ("tokenizer.ggml.merges".to_owned(), texts(&["a b", "Ġ ab"])),
            ("tokenizer.ggml.bos_token_id".to_owned(), GgufValue::U32(1)),
            ("tokenizer.ggml.eos_token_id".to_owned(), GgufValue::U32(0)),
            ("tokenizer.ggml.eot_token_id".to_owned(), GgufValue::U32(1)),
            (
                "tokenizer.ggml.add_bos_token".to_owned(),
                GgufValue::Bool(false),
            ),
            (
                "tokenizer.chat_template".to_owned(),
                text("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"),
            ),
        ];
        let head = WIDTH / HEADS;
        let (q, kv) = (HEADS * head, KV_HEADS * head);
        for (seed, (name, rows, columns)) in [
            ("token_embd", tokens.len(), WIDTH),
            ("blk.0.attn_q", q, WIDTH),
            ("blk.0.attn_k", kv, WIDTH),
            ("blk.0.attn_v", kv, WIDTH),
            ("blk.0.attn_output", WIDTH, q),
            ("blk.0.ffn_gate", MLP, WIDTH),
            ("blk.0.ffn_up", MLP, WIDTH),
            ("blk.0.ffn_down", WIDTH, MLP),
        ]
        .into_iter()
        .enumerate()
        {
            writer.tensor(name, numbers(seed, rows * columns), &[rows, columns], dtype);
        }
        for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
            writer.tensor(name, numbers(9, WIDTH), &[WIDTH], GgmlDType::F32);
        }
        writer
    }

    fn tensor(&mut self, name: &str, values: Vec<f32>, shape: &[usize], dtype: GgmlDType) {
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        let name = if name.contains("bias") {
            name.to_owned()
        } else {
            format!("{name}.weight")
        };
        self.tensors.retain(|(other, _)| *other != name);
        self.tensors
            .push((name, QTensor::quantize(&tensor, dtype).unwrap()));
    }

    /// Replaces the tensor `name` by one without rows.
    fn empty(&mut self, name: &str) {
        let tensor = Tensor::zeros((0, WIDTH), candle_core::DType::F32, &Device::Cpu).unwrap();
        self.tensors.retain(|(other, _)| other != name);
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
        self.tensors.push((name.to_owned(), tensor));
    }

    fn set(&mut self, key: &str, value: GgufValue) {
        self.remove(key);
        self.metadata.push((key.to_owned(), value));
    }

    fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    fn write(&self, path: &Path) {
        let metadata: Vec<_> = self.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
        gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
    }

    fn import(&self, weight_type: WeightType) -> Result<Imported, GgufError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.gguf");
        self.write(&file);
        let folder = dir.path().join("out");
        let result = import(&file, &folder, weight_type);
        let left = std::fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(
            left,
            if result.is_ok() { 2 } else { 1 },
            "a failed import leaves no files"
        );
        let report = result?;
        let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
        let tensors = tensors
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let values = match view.dtype() {
                    safetensors::Dtype::F32 => view
                        .data()
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                        .collect(),
                    _ => Vec::new(),
                };
                (name, (view.shape().to_vec(), values))
            })
            .collect();
        Ok(Imported {
            dir,
            report,
            tensors,
        })
    }
}

struct Imported {
    dir: tempfile::TempDir,
    report: ImportReport,
    tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Imported {
    fn json(&self, name: &str) -> Value {
        let text = std::fs::read(self.dir.path().join("out").join(name)).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::load(&self.dir.path().join("out")).unwrap()
    }
}

/// llama.cpp's `permute`, from the checkpoint's row order to the file's.
fn permute(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let mut out = vec![0.0; values.len()];
    for h in 0..heads {
        for r in 0..head {
            let (j, i) = (r / (head / 2), r % (head / 2));
            let (from, to) = (h * head + r, h * head + 2 * i + j);
            out[to * columns..(to + 1) * columns]
                .copy_from_slice(&values[from * columns..(from + 1) * columns]);
        }
    }
    out
}

#[test]
fn llama_rows_are_restored_to_the_checkpoints_order() {
    let mut writer = Writer::new("llama", GgmlDType::F32);
    let q = numbers(1, WIDTH * WIDTH);
    let k = numbers(2, WIDTH / 2 * WIDTH);
    writer.tensor(
        "blk.0.attn_q",
        permute(&q, HEADS, WIDTH),
        &[WIDTH, WIDTH],
        GgmlDType::F32,
    );
    writer.tensor(
        "blk.0.attn_k",
        permute(&k, KV_HEADS, WIDTH),
        &[WIDTH / 2, WIDTH],
        GgmlDType::F32,
    );
    let imported = writer.import(WeightType::F32).unwrap();
    let layer = |name: &str| &imported.tensors[&format!("model.layers.0.{name}.weight")];
    assert_eq!(layer("self_attn.q_proj"), &(vec![WIDTH, WIDTH], q));
    assert_eq!(layer("self_attn.k_proj"), &(vec![WIDTH / 2, WIDTH], k));
    assert_eq!(layer("self_attn.v_proj").1, numbers(3, WIDTH / 2 * WIDTH));
    assert_eq!(
        layer("mlp.down_proj"),
        &(vec![WIDTH, MLP], numbers(7, WIDTH * MLP))
    );
    assert_eq!(layer("input_layernorm").1, numbers(9, WIDTH));
    assert_eq!(imported.tensors["model.embed_tokens.weight"].0, [13, WIDTH]);
    assert_eq!(imported.tensors.len(), 11);
    assert_eq!(
        imported.json("config.json"),
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 13, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 100_000.0, "attention_bias": false, "tie_word_embeddings": true, "bos_token_id": 1,
            "eos_token_id": 0, "torch_dtype": "float32"
        })
    );
    assert_eq!(imported.report.num_tensors, 11);
    assert_eq!(imported.report.stored_types["F32"], 11);
    assert_eq!(imported.report.eos_ids, [0, 1]);
    assert_eq!(imported.report.chat_template, Some(Ok(())));
    assert!(
        imported
            .report
            .to_string()
            .contains("11 tensors, 9728 parameters in f32 (stored as 11 F32)")
    );
}

#[test]
fn qwen_keeps_its_rows_and_has_biases_or_norms() {
    let mut writer = Writer::new("qwen2", GgmlDType::F32);
    for (seed, (name, rows)) in [("q", WIDTH), ("k", WIDTH / 2), ("v", WIDTH / 2)]
        .into_iter()
        .enumerate()
    {
        writer.tensor(
            &format!("blk.0.attn_{name}.bias"),
            numbers(20 + seed, rows),
            &[rows],
            GgmlDType::F32,
        );
    }
    writer.tensor(
        "output",
        numbers(30, 13 * WIDTH),
        &[13, WIDTH],
        GgmlDType::F32,
    );
    let imported = writer.import(WeightType::F32).unwrap();
    assert_eq!(
        imported.tensors["model.layers.0.self_attn.q_proj.weight"].1,
        numbers(1, WIDTH * WIDTH)
    );
    assert_eq!(
        imported.tensors["model.layers.0.self_attn.k_proj.bias"].1,
        numbers(21, WIDTH / 2)
    );
    assert_eq!(
        imported.tensors["lm_head.weight"].1,
        numbers(30, 13 * WIDTH)
    );
    let config = imported.json("config.json");
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["architectures"][0], "Qwen2ForCausalLM");

    let mut writer = Writer::new("qwen3", GgmlDType::F32);
    writer.tensor("blk.0.attn_q_norm", numbers(40, 8), &[8], GgmlDType::F32);
    writer.tensor("blk.0.attn_k_norm", numbers(41, 8), &[8], GgmlDType::F32);
    let imported = writer.import(WeightType::F32).unwrap();
    assert_eq!(
        imported.tensors["model.layers.0.self_attn.k_norm.weight"].1,
        numbers(41, 8)
    );
}

#[test]
fn quantised_weights_are_close_and_the_weight_type_is_used() {
    for (dtype, tolerance) in [
        (GgmlDType::F16, 3e-4),
        (GgmlDType::BF16, 2e-3),
        (GgmlDType::Q8_0, 3e-3),
        (GgmlDType::Q4_0, 0.08),
        (GgmlDType::Q4_1, 0.04),
    ] {
        let imported = Writer::new("qwen2", dtype).import(WeightType::F32).unwrap();
        let values = &imported.tensors["model.layers.0.mlp.up_proj.weight"].1;
        let worst = values
            .iter()
            .zip(numbers(6, MLP * WIDTH))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(worst < tolerance, "{dtype:?}: {worst}");
        assert!(worst > 0.0, "{dtype:?}");
    }
    for (weight_type, name) in [(WeightType::Bf16, "bfloat16"), (WeightType::F16, "float16")] {
        let imported = Writer::new("llama", GgmlDType::F32)
            .import(weight_type)
            .unwrap();
        assert_eq!(imported.json("config.json")["torch_dtype"], name);
    }
}

#[test]
fn byte_level_tokenizers_are_rebuilt() {
    let imported = Writer::new("llama", GgmlDType::F32)
        .import(WeightType::F32)
        .unwrap();
    let tokenizer = imported.tokenizer();
    let sample = "ab ab12\n<|end|><tool>c";
    let ids = tokenizer.encode(sample, true).unwrap();
    assert_eq!(ids, [9, 10, 5, 6, 11, 0, 12, 4]);
    assert_eq!(tokenizer.decode_with_special(&ids), sample);
    assert_eq!(tokenizer.decode(&ids), "ab ab12\n<tool>c");
    assert_eq!(tokenizer.eos_ids(), [0, 1]);

    let mut writer = Writer::new("llama", GgmlDType::F32);
    writer.remove("tokenizer.ggml.add_bos_token");
    writer.set("tokenizer.ggml.pre", text("llama-bpe"));
    let tokenizer = writer.import(WeightType::F32).unwrap().tokenizer();
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [1, 9]);
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [9]);
}

#[test]
fn sentence_piece_tokenizers_are_rebuilt_from_scores() {
    let mut writer = Writer::new("llama", GgmlDType::F32);
    let tokens = [
        "<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "c", "ab", "bc", "▁ab", "abc", "▁bc",
    ];
    let scores = [
        0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, -5.0,
    ];
    let kinds = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    writer.set("tokenizer.ggml.model", text("llama"));
    writer.set("tokenizer.ggml.tokens", texts(&tokens));
    writer.set(
        "tokenizer.ggml.scores",
        GgufValue::Array(scores.map(GgufValue::F32).to_vec()),
    );
    writer.set(
        "tokenizer.ggml.token_type",
        GgufValue::Array(kinds.map(GgufValue::I32).to_vec()),
    );
    writer.set("tokenizer.ggml.unknown_token_id", GgufValue::U32(0));
    writer.set("tokenizer.ggml.eos_token_id", GgufValue::U32(2));
    writer.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true));
    writer.remove("tokenizer.ggml.eot_token_id");
    let tokenizer = writer.import(WeightType::F32).unwrap().tokenizer();
    // `bc` has the best score, so it is joined before `ab`; then `a` and `bc` make `abc`.
    assert_eq!(
        tokenizer.encode("abc ab\n", true).unwrap(),
        [1, 4, 11, 10, 3]
    );
    assert_eq!(tokenizer.decode(&[1, 4, 11, 10, 3, 2]), "abc ab\n");
}

#[test]
fn errors_are_reported_and_leave_no_files() {
    let error = |change: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new("llama", GgmlDType::F32);
        change(&mut writer);
        writer
            .import(WeightType::F16)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    type Change<'a> = &'a dyn Fn(&mut Writer);
    let cases: [(Change, &str); 20] = [
        (
            &|w| w.set("general.architecture", text("mamba")),
            "architecture `mamba` is not supported; supported: llama, qwen2, qwen3",
        ),
        (
            &|w| w.remove("llama.block_count"),
            "metadata `llama.block_count` is missing",
        ),
        (
            &|w| w.set("llama.block_count", text("one")),
            "metadata `llama.block_count` is a String, not a count",
        ),
        (
            &|w| w.set("llama.block_count", GgufValue::U32(12)),
            "metadata `llama.block_count` gives 12 layers, but the file has 11 tensors",
        ),
        (
            &|w| w.set("llama.attention.key_length", GgufValue::U64(1 << 62)),
            "metadata `llama.attention.key_length` is 4611686018427387904, but the limit is 4096: no model is that \
             large, so the file is probably damaged",
        ),
        (
            &|w| w.set("llama.block_count", GgufValue::U64(u64::MAX)),
            "metadata `llama.block_count` is 18446744073709551615, but the limit is 4096: no model is that large, so \
             the file is probably damaged",
        ),
        (
            &|w| {
                w.set(
                    "llama.attention.layer_norm_rms_epsilon",
                    GgufValue::F32(0.0),
                )
            },
            "the metadata describe a model that does not load: `config.json`: `rms_norm_eps` must be a number above 0, \
             got 0.0",
        ),
        (
            &|w| {
                w.set(
                    "llama.attention.layer_norm_rms_epsilon",
                    GgufValue::F32(-1.0),
                )
            },
            "the metadata describe a model that does not load: `config.json`: `rms_norm_eps` must be a number above 0, \
             got -1.0",
        ),
        (
            &|w| {
                w.set("llama.rope.scaling.type", text("linear"));
                w.set("llama.rope.scaling.factor", GgufValue::F32(-2.0));
            },
            "metadata `llama.rope.scaling.factor` is -2, but must not be negative",
        ),
        (
            &|w| w.empty("token_embd.weight"),
            "metadata `rows of token_embd.weight` is 0",
        ),
        (
            &|w| w.tensor("rope_freqs", vec![1.0; 8], &[8], GgmlDType::F32),
            "tensor `rope_freqs.weight` has shape [8], but the metadata require [4]",
        ),
        (
            &|w| w.set("llama.attention.head_count", GgufValue::U32(0)),
            "metadata `llama.attention.head_count` is 0",
        ),
        (
            &|w| w.set("llama.rope.dimension_count", GgufValue::U32(4)),
            "rotation `4 of 8 dims of a head` is not supported; supported: all dims",
        ),
        (
            &|w| w.set("llama.rope.freq_base", GgufValue::F32(0.0)),
            "metadata `llama.rope.freq_base` is 0, but must be above 0",
        ),
        (
            &|w| w.set("tokenizer.ggml.pre", text("new-one")),
            "pre-tokenizer `new-one` is not supported; supported: smollm, llama-bpe, qwen2, gpt-2",
        ),
        (
            &|w| w.tensors.retain(|(name, _)| !name.contains("ffn_up")),
            "the file lacks tensors of `llama`: blk.0.ffn_up.weight",
        ),
        (
            &|w| w.tensor("blk.0.attn_sinks", vec![0.0], &[1], GgmlDType::F32),
            "the file contains tensors that `llama` does not have: blk.0.attn_sinks.weight",
        ),
        (
            &|w| w.tensor("output_norm", vec![0.0; 8], &[8], GgmlDType::F32),
            "tensor `output_norm.weight` has shape [8], but the metadata require [32]",
        ),
        (
            &|w| w.tensor("output_norm", vec![1e5; WIDTH], &[WIDTH], GgmlDType::F32),
            "tensor `output_norm.weight` contains 100000 at index 0, which f16 cannot represent",
        ),
        (
            &|w| w.set("tokenizer.ggml.eos_token_id", GgufValue::U32(99)),
            "metadata `tokenizer.ggml.eos_token_id` is 99, past the end of the vocabulary",
        ),
    ];
    for (change, words) in cases {
        assert_eq!(error(change), words);
    }
}

#[test]
fn existing_folders_and_truncated_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    Writer::new("llama", GgmlDType::F32).write(&file);
    assert!(matches!(
        import(&file, dir.path(), WeightType::Bf16),
        Err(GgufError::Exists { .. })
    ));
    let bytes = std::fs::read(&file).unwrap();
    for length in [0, 10, bytes.len() / 2, bytes.len() - 64] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        assert!(matches!(
            import(&file, &dir.path().join("out"), WeightType::Bf16),
            Err(GgufError::Read { .. })
        ));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_alignment_of_zero_is_refused_and_others_are_left_to_the_reader() {
    let with = |key: &str, alignment: GgufValue| {
        let mut writer = Writer::new("llama", GgmlDType::F32);
        writer.metadata.insert(1, (key.to_owned(), alignment));
        let nested = GgufValue::Array(vec![texts(&["a", "b"]), texts(&["c"])]);
        writer.metadata.insert(1, ("other".to_owned(), nested));
        writer.import(WeightType::F32).map(drop)
    };
    for key in ["general.alignment", "general.alignment\0"] {
        for zero in [GgufValue::U8(0), GgufValue::I16(0), GgufValue::U32(0)] {
            assert_eq!(
                with(key, zero).unwrap_err().to_string(),
                "metadata `general.alignment` is 0, but tensors start at multiples of it; the file is damaged"
            );
        }
    }
    for other in [GgufValue::U32(32), GgufValue::U64(0), text("0")] {
        with("general.alignment", other).unwrap();
    }
}

/// Rotary scaling is read as in llama.cpp.
#[test]
fn rotary_scaling_is_read_in_every_form() {
    let with = |entries: &[(&str, GgufValue)], factors: Option<Vec<f32>>| {
        let mut writer = Writer::new("llama", GgmlDType::F32);
        for (name, value) in entries {
            writer.set(&format!("llama.rope.{name}"), value.clone());
        }
        if let Some(factors) = factors {
            writer.tensor("rope_freqs", factors, &[4], GgmlDType::F32);
        }
        writer.import(WeightType::F32)
    };
    let scaling = |entries: &[(&str, GgufValue)]| {
        with(entries, None).unwrap().json("config.json")["rope_scaling"].clone()
    };
    let refused = |entries: &[(&str, GgufValue)], factors: Option<Vec<f32>>| {
        with(entries, factors).err().unwrap().to_string()
    };
    let float = GgufValue::F32;
    let kind = |name: &str| ("scaling.type", text(name));
    let factor = |value: f32| ("scaling.factor", float(value));
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    // A factor without a type is linear.
    assert_eq!(scaling(&[factor(4.0)]), linear);
    assert_eq!(scaling(&[kind("linear"), factor(4.0)]), linear);
    assert_eq!(scaling(&[("scale_linear", float(4.0))]), linear);
    assert_eq!(
        scaling(&[kind("linear"), ("scale_linear", float(4.0))]),
        linear
    );
    // The new key takes precedence, even where it has no effect.
    assert_eq!(
        scaling(&[factor(4.0), ("scale_linear", float(2.0))]),
        linear
    );
    assert_eq!(
        scaling(&[factor(0.0), ("scale_linear", float(2.0))]),
        Value::Null
    );
    assert_eq!(scaling(&[kind("none"), factor(4.0)]), Value::Null);
    assert_eq!(scaling(&[kind("linear")]), Value::Null);
    assert_eq!(scaling(&[kind("yarn")]), Value::Null);
    assert_eq!(scaling(&[factor(1.0)]), Value::Null);
    assert_eq!(
        scaling(&[("scaling.finetuned", GgufValue::Bool(true))]),
        Value::Null
    );

    let yarn = |length: f64, original: u32| {
        json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": length, "beta_fast": 32.0, "beta_slow": 1.0,
               "original_max_position_embeddings": original})
    };
    let longer = 0.1 * 4.0_f64.ln() + 1.0;
    let original = ("scaling.original_context_length", GgufValue::U32(32));
    let attention = |value: f32| ("scaling.attn_factor", float(value));
    assert_eq!(scaling(&[kind("yarn"), factor(4.0)]), yarn(longer, 128));
    assert_eq!(
        scaling(&[kind("yarn"), factor(4.0), original.clone()]),
        yarn(longer, 32)
    );
    let halved = [kind("yarn"), factor(4.0), original, attention(0.5)];
    assert_eq!(scaling(&halved), yarn(0.5 * longer, 32));
    // These are read for other architectures only.
    let others = [
        kind("yarn"),
        factor(4.0),
        ("scaling.yarn_log_multiplier", float(0.1)),
        ("scaling.yarn_beta_fast", float(8.0)),
    ];
    assert_eq!(scaling(&others), yarn(longer, 128));

    // Factors of 1 scale nothing, so they are allowed next to a scaling.
    let beside = with(&[factor(4.0)], Some(vec![1.0; 4])).unwrap();
    assert_eq!(beside.json("config.json")["rope_scaling"], linear);

    assert!(refused(&[kind("longrope"), factor(4.0)], None).contains("rope scaling `longrope`"));
    assert!(
        refused(&[factor(4.0), attention(0.5)], None).contains("attn_factor` 0.5 without yarn")
    );
    assert!(refused(&[factor(-4.0)], None).contains("is -4, but must not be negative"));
    let both = refused(&[factor(4.0)], Some(vec![1.0, 1.0, 2.0, 8.0]));
    assert!(
        both.contains("rope_freqs.weight and `rope.scaling.factor` 4"),
        "{both}"
    );
}

/// −1 means no token, as in llama.cpp; unused ids are not checked.
#[test]
fn negative_token_ids_mean_none() {
    let mut writer = Writer::new("llama", GgmlDType::F32);
    writer.set("tokenizer.ggml.padding_token_id", GgufValue::I32(-1));
    writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(u32::MAX));
    writer.set("tokenizer.ggml.unknown_token_id", GgufValue::U32(99));
    let imported = writer.import(WeightType::F32).unwrap();
    assert_eq!(imported.tokenizer().bos_id(), None);
    assert!(imported.json("config.json").get("pad_token_id").is_none());
    writer.set("tokenizer.ggml.eos_token_id", GgufValue::U32(99));
    let error = writer.import(WeightType::F32).err().unwrap().to_string();
    assert!(
        error.contains("is 99, past the end of the vocabulary"),
        "{error}"
    );
}

#[test]
fn a_git_lfs_pointer_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    std::fs::write(&file, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    let error = import(&file, &dir.path().join("out"), WeightType::F32).unwrap_err();
    assert!(error.to_string().contains("git lfs pull"), "{error}");
}

/// Whoever can read config.json can read the weights.
#[cfg(unix)]
#[test]
fn imported_files_have_the_same_mode() {
    use std::os::unix::fs::PermissionsExt;
    let imported = Writer::new("llama", GgmlDType::F32)
        .import(WeightType::F32)
        .unwrap();
    let mode = |name: &str| {
        let path = imported.dir.path().join("out").join(name);
        std::fs::metadata(path).unwrap().permissions().mode()
    };
    assert_eq!(mode("model.safetensors"), mode("config.json"));
}

#[test]
fn a_part_of_a_split_file_is_recognised() {
    let mut writer = Writer::new("llama", GgmlDType::F32);
    writer.set("split.count", GgufValue::U16(3));
    let error = writer.import(WeightType::F32).err().unwrap().to_string();
    assert!(
        error.contains("`one of 3 parts`") && error.contains("--merge"),
        "{error}"
    );
}
