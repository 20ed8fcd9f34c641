//! Valid, unusual and invalid folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{LoadReport, SaveDType};
use crate::Decoder;
use crate::parameters::visit_parameters;

const TIED: &str = "tiny-random-llama-tied";
const QWEN3: &str = "tiny-random-qwen3";

#[test]
fn saved_weights_equal_the_loaded_bytes() {
    for name in [TIED, QWEN3] {
        let (from, to) = (folder(name), TempDir::new().unwrap());
        let to = to.path().join("saved");
        let decoder = Decoder::load(&from, &Device::flex()).unwrap();
        decoder.save_as(&to, SaveDType::F32).unwrap();
        let bytes = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        assert!(bytes(&from) == bytes(&to), "{name}: bytes differ");
        assert_eq!(config(&from), config(&to));
        assert!(to.join("generation_config.json").exists());
    }
}

#[test]
fn bf16_halves_the_file_and_is_named_in_the_config() {
    let scratch = TempDir::new().unwrap();
    let (once, twice) = (scratch.path().join("once"), scratch.path().join("twice"));
    load(&folder(TIED))
        .0
        .save_as(&once, SaveDType::BF16)
        .unwrap();
    assert_eq!(config(&once)["dtype"], "bfloat16");
    // Rounding again changes nothing.
    let rounded = load(&once).0;
    rounded.save_as(&twice, SaveDType::BF16).unwrap();
    let bytes = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
    assert!(bytes(&once) == bytes(&twice));
    let size = |dir: &Path| bytes(dir).len() as f64;
    assert!(size(&once) < 0.52 * size(&folder(TIED)));
    let (rough, exact) = (parameters(&rounded), parameters(&load(&folder(TIED)).0));
    for (name, values) in exact {
        for (a, b) in values.iter().zip(&rough[&name]) {
            assert!((a - b).abs() <= a.abs() / 256.0, "{name}: {a} became {b}");
        }
    }
}

#[test]
fn shards_load_the_same_model_as_a_single_file() {
    let dir = sharded();
    assert_eq!(
        parameters(&load(dir.path()).0),
        parameters(&load(&folder(TIED)).0)
    );
}

#[test]
fn names_without_the_prefix_are_found() {
    let dir = edited(TIED, |tensors| {
        let renamed = std::mem::take(tensors).into_iter();
        *tensors = renamed
            .map(|(name, tensor)| (name.trim_start_matches("model.").to_string(), tensor))
            .collect();
    });
    assert_eq!(
        parameters(&load(dir.path()).0),
        parameters(&load(&folder(TIED)).0)
    );
}

#[test]
fn rotary_buffers_and_the_copy_of_a_tied_head_are_ignored() {
    let dir = edited(TIED, |tensors| {
        let head = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), head);
        let buffer = Stored::zeros(Dtype::F32, &[8]);
        tensors.insert(
            "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
            buffer,
        );
    });
    let (_, report) = load(dir.path());
    assert_eq!(
        report.ignored,
        [
            "lm_head.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq"
        ]
    );
    assert!(report.unused.is_empty());
    assert_eq!(report.applied.len(), 20);
}

/// The head in the file differs from the embedding to which config.json ties it.
#[test]
fn a_head_that_differs_from_the_tied_embedding_is_kept() {
    const AT: usize = 64 * 5;
    let dir = edited(TIED, |tensors| {
        let mut head = tensors["model.embed_tokens.weight"].clone();
        // The sign of one number; the first rows may be zeros.
        head.2[4 * AT + 3] ^= 0x80;
        tensors.insert("lm_head.weight".into(), head);
    });
    let (decoder, report) = load(dir.path());
    assert!(!decoder.config.tied_head && decoder.lm_head.is_some());
    assert!(report.ignored.is_empty());
    let values = parameters(&decoder);
    let (head, embedding) = (
        &values["lm_head.weight"],
        &values["model.embed_tokens.weight"],
    );
    assert_eq!(head[AT], -embedding[AT]);
    assert_eq!(head[AT + 1..], embedding[AT + 1..]);
    // The saved folder declares what it contains and loads as the same model.
    let saved = dir.path().join("saved");
    decoder.save_as(&saved, SaveDType::F32).unwrap();
    assert_eq!(config(dir.path())["tie_word_embeddings"], true);
    assert_eq!(config(&saved)["tie_word_embeddings"], false);
    assert_eq!(parameters(&load(&saved).0), values);
    let origin = super::Origin::read(dir.path()).unwrap();
    assert!(origin.decoder_config().unwrap().tied_head);
    assert!(!origin.stored_config().unwrap().tied_head);
}

#[test]
fn a_head_with_the_numbers_of_the_embedding_is_tied() {
    // Zeros of either sign are the same number.
    let same = edited(TIED, |tensors| {
        let embedding = tensors.get_mut("model.embed_tokens.weight").unwrap();
        embedding.2[..4].copy_from_slice(&0.0f32.to_le_bytes());
        let mut head = embedding.clone();
        head.2[..4].copy_from_slice(&(-0.0f32).to_le_bytes());
        tensors.insert("lm_head.weight".into(), head);
    });
    let (decoder, report) = load(same.path());
    assert!(decoder.config.tied_head && decoder.lm_head.is_none());
    assert_eq!(report.ignored, ["lm_head.weight"]);
    // A head of another shape is not a copy.
    let narrow = edited(TIED, |tensors| {
        tensors.insert(
            "lm_head.weight".into(),
            Stored::zeros(Dtype::F32, &[319, 64]),
        );
    });
    assert!(refusal(narrow.path()).contains("mismatched `lm_head.weight`"));
}

/// The file has only the head.
#[test]
fn the_embedding_of_a_tied_model_may_be_stored_as_its_head() {
    let dir = edited(TIED, |tensors| {
        let embedding = tensors.remove("model.embed_tokens.weight").unwrap();
        tensors.insert("lm_head.weight".into(), embedding);
    });
    let (decoder, _) = load(dir.path());
    assert_eq!(parameters(&decoder), parameters(&load(&folder(TIED)).0));
    // Where nothing ties them, the embedding is missing.
    let mut untied = config(dir.path());
    untied["tie_word_embeddings"] = false.into();
    fs::write(dir.path().join("config.json"), untied.to_string()).unwrap();
    assert!(refusal(dir.path()).contains("missing `model.embed_tokens.weight`"));
}

/// The error names the weight.
#[test]
fn weights_that_are_not_finite_are_named() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let dir = edited(TIED, |tensors| {
            let weight = tensors
                .get_mut("model.layers.1.mlp.down_proj.weight")
                .unwrap();
            weight.2[4 * 5000..4 * 5001].copy_from_slice(&value.to_le_bytes());
        });
        let expected = format!(
            "`DIR/model.safetensors`: weight `model.layers.1.mlp.down_proj.weight` contains {shown} at position 5000"
        );
        assert_eq!(refusal(dir.path()), expected);
    }
}

/// Whoever can read config.json can read the weights, and copies from a read-only folder are writable.
#[cfg(unix)]
#[test]
fn saved_files_have_the_mode_of_new_files() {
    use std::os::unix::fs::PermissionsExt;
    let dir = copied(TIED);
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    fs::write(dir.path().join("generation_config.json"), "{}").unwrap();
    let narrow = fs::Permissions::from_mode(0o400);
    fs::set_permissions(dir.path().join("generation_config.json"), narrow).unwrap();
    let saved = dir.path().join("saved");
    load(dir.path()).0.save_as(&saved, SaveDType::F32).unwrap();
    fs::write(dir.path().join("plain"), "").unwrap();
    let plain = mode(dir.path().join("plain"));
    for name in ["model.safetensors", "config.json", "generation_config.json"] {
        assert_eq!(mode(saved.join(name)), plain, "{name}");
    }
}

/// An adapter is not a model on its own, and it changes a model in the same folder.
#[test]
fn the_folder_of_an_adapter_is_recognised() {
    let dir = copied(TIED);
    let about = json!({"peft_type": "LORA", "base_model_name_or_path": "org/base"});
    fs::write(dir.path().join("adapter_config.json"), about.to_string()).unwrap();
    let expected = "model folder `DIR` contains an adapter (LORA) of `org/base`; merge it into that model first \
                    (`merge_and_unload` of PEFT, then `save_pretrained`), and use the merged folder";
    assert_eq!(refusal(dir.path()), expected);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_eq!(refusal(dir.path()), expected);
}

#[test]
fn git_lfs_pointers_are_recognised() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    for name in ["model.safetensors", "config.json"] {
        let dir = copied(TIED);
        fs::write(dir.path().join(name), pointer).unwrap();
        assert_eq!(
            refusal(dir.path()),
            format!(
                "cannot read `DIR/{name}`: it is a Git LFS pointer, not the file; run `git lfs pull` in its folder"
            )
        );
    }
    let dir = sharded();
    fs::write(dir.path().join("part-2.safetensors"), pointer).unwrap();
    assert!(refusal(dir.path()).contains("part-2.safetensors`: it is a Git LFS pointer"));
    fs::write(dir.path().join("model.safetensors.index.json"), pointer).unwrap();
    assert!(refusal(dir.path()).contains("index.json`: it is a Git LFS pointer"));
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let dir = copied(TIED);
    let text = fs::read_to_string(dir.path().join("config.json")).unwrap();
    fs::write(dir.path().join("config.json"), format!("\u{feff}{text}")).unwrap();
    assert_eq!(
        parameters(&load(dir.path()).0),
        parameters(&load(&folder(TIED)).0)
    );
}

#[test]
fn a_fresh_decoder_can_be_saved_and_loaded() {
    let scratch = TempDir::new().unwrap();
    let dir = scratch.path().join("fresh");
    for name in [TIED, QWEN3] {
        let config = load(&folder(name)).0.config;
        let mut next = 0.0f32;
        let fresh = Decoder::fresh(config.clone(), &Device::flex(), |_, count| {
            next += 1.0;
            vec![next; count]
        });
        fresh.save_as(&dir, SaveDType::F32).unwrap();
        let loaded = load(&dir).0;
        assert_eq!(loaded.config, config);
        assert_eq!(parameters(&loaded), parameters(&fresh));
        let weight = &parameters(&fresh)["model.embed_tokens.weight"];
        assert_eq!(weight[0], config.initializer_range as f32);
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn a_folder_with_content_is_not_overwritten() {
    let scratch = TempDir::new().unwrap();
    let dir = scratch.path().join("taken");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("mine"), "kept").unwrap();
    let error = load(&folder(TIED)).0.save_as(&dir, SaveDType::F32);
    let error = message(error.unwrap_err(), scratch.path());
    insta::assert_snapshot!(error, @"cannot write `DIR/taken`: it exists and is not empty");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(dir.join("mine")).unwrap(), "kept");
}

#[test]
fn a_tokenizer_with_more_ids_than_rows_is_refused() {
    let decoder = load(&folder(TIED)).0;
    assert!(decoder.check_vocabulary(320).is_ok());
    insta::assert_snapshot!(
        decoder.check_vocabulary(321).unwrap_err(),
        @"the tokenizer has 321 ids, but the embedding has 320 rows: ids from 320 on have no embedding"
    );
}

#[test]
fn a_renamed_tensor_is_reported_with_the_nearest_name() {
    let dir = edited(TIED, |tensors| {
        let moved = tensors.remove("model.layers.1.mlp.up_proj.weight").unwrap();
        tensors.insert("model.layers.1.mlp.up_project.weight".into(), moved);
    });
    insta::assert_snapshot!(refusal(dir.path()), @"
    weights in `DIR` do not match the model:
      missing `model.layers.1.mlp.up_proj.weight`; the file has `model.layers.1.mlp.up_project.weight`
      unused `model.layers.1.mlp.up_project.weight`; the model has `model.layers.1.mlp.up_proj.weight`
      19 tensors match
    ");
}

#[test]
fn wrong_shapes_and_dtypes_are_reported_together() {
    let dir = edited(TIED, |tensors| {
        let norm = Stored::zeros(Dtype::F32, &[65]);
        tensors.insert("model.norm.weight".into(), norm);
        let whole = Stored::zeros(Dtype::I64, &[64, 176]);
        tensors.insert("model.layers.0.mlp.down_proj.weight".into(), whole);
    });
    insta::assert_snapshot!(refusal(dir.path()), @"
    weights in `DIR` do not match the model:
      mismatched `model.layers.0.mlp.down_proj.weight`: the file has I64 numbers; F32, BF16 and F16 can be read
      mismatched `model.norm.weight`: the file has [65], the model needs [64]
      18 tensors match
    ");
}

#[test]
fn a_bias_that_the_config_does_not_declare_is_refused() {
    let dir = edited(TIED, |tensors| {
        let bias = Stored::zeros(Dtype::F32, &[64]);
        tensors.insert("model.layers.0.self_attn.q_proj.bias".into(), bias);
    });
    insta::assert_snapshot!(refusal(dir.path()), @"
    weights in `DIR` do not match the model:
      unused `model.layers.0.self_attn.q_proj.bias`
      20 tensors match
    ");
}

#[test]
fn a_missing_shard_is_named() {
    let dir = sharded();
    fs::remove_file(dir.path().join("part-2.safetensors")).unwrap();
    insta::assert_snapshot!(
        refusal(dir.path()),
        @"cannot read `DIR/model.safetensors.index.json`: it lists missing files: part-2.safetensors"
    );
}

#[test]
fn an_index_that_points_elsewhere_is_not_followed() {
    let dir = sharded();
    let index = json!({"weight_map": {"model.norm.weight": "../part-1.safetensors"}});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    insta::assert_snapshot!(
        refusal(dir.path()),
        @r#"cannot read `DIR/model.safetensors.index.json`: `weight_map` places `model.norm.weight` in "../part-1.safetensors", which is not a file name"#
    );
}

#[test]
fn damaged_files_are_reported() {
    let dir = copied(TIED);
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let expected = [
        (
            bytes.len() - 1,
            "its size of N bytes does not match its header",
        ),
        (100, "it ends within its header after N bytes"),
        (3, "it ends within its header after N bytes"),
    ];
    for (length, reason) in expected {
        fs::write(&path, &bytes[..length]).unwrap();
        let error = refusal(dir.path());
        let reason = reason.replace('N', &length.to_string());
        assert!(
            error.starts_with("cannot read `DIR/model.safetensors`: "),
            "{error}"
        );
        assert!(error.contains(&reason), "{error}");
    }
    fs::write(&path, "").unwrap();
    assert!(refusal(dir.path()).starts_with("cannot read `DIR/model.safetensors`: "));
}

#[test]
fn folders_without_weights_are_reported_with_what_they_contain() {
    let dir = copied(TIED);
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let none = "model folder `DIR` has no model.safetensors and no model.safetensors.index.json: ";
    let found = |extra: &str| {
        fs::write(dir.path().join(extra), "x").unwrap();
        let error = refusal(dir.path());
        fs::remove_file(dir.path().join(extra)).unwrap();
        error.strip_prefix(none).unwrap_or(&error).to_string()
    };
    insta::assert_snapshot!(found("notes.txt"), @"it contains no weights");
    insta::assert_snapshot!(
        found("pytorch_model.bin"),
        @"`pytorch_model.bin` is pickled, which can run code when opened and is never read; convert it to safetensors"
    );
    insta::assert_snapshot!(
        found("m-Q4_0.gguf"),
        @"`m-Q4_0.gguf` must be imported first (`pipe import gguf`)"
    );
    insta::assert_snapshot!(
        found("consolidated.00.pth"),
        @"`consolidated.00.pth` is in the format of the model's authors, not of Hugging Face; convert it, or download the folder with config.json and model.safetensors"
    );
    insta::assert_snapshot!(
        found("adapter_model.safetensors"),
        @"`adapter_model.safetensors` is an adapter; merge it into its base model first"
    );
    insta::assert_snapshot!(
        found("flax_model.msgpack"),
        @"`flax_model.msgpack` has an unsupported format; convert it to safetensors"
    );
    insta::assert_snapshot!(
        found("weights.safetensors"),
        @"`weights.safetensors` is neither; its index is missing, or it was renamed"
    );
}

#[test]
fn missing_folders_and_configs_are_reported() {
    let dir = TempDir::new().unwrap();
    insta::assert_snapshot!(
        message(Decoder::load(&dir.path().join("none"), &Device::flex()).unwrap_err(), dir.path()),
        @"model folder `DIR/none` does not exist"
    );
    assert!(refusal(dir.path()).starts_with("cannot read `DIR/config.json`: "));
    fs::write(dir.path().join("m.gguf"), "").unwrap();
    insta::assert_snapshot!(
        refusal(dir.path()),
        @"model folder `DIR` has no config.json: `m.gguf` must be imported first (`pipe import gguf`)"
    );
    fs::write(dir.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert!(refusal(dir.path()).starts_with("cannot read `DIR/config.json`: malformed JSON: "));
}

/// A tensor's type, shape and bytes.
#[derive(Clone)]
struct Stored(Dtype, Vec<usize>, Vec<u8>);

impl Stored {
    fn zeros(dtype: Dtype, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        Stored(dtype, shape.to_vec(), vec![0; bytes])
    }
}

type Tensors = BTreeMap<String, Stored>;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/models")
        .join(name)
}

fn copied(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(folder(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn edited(name: &str, edit: impl Fn(&mut Tensors)) -> TempDir {
    let dir = copied(name);
    let path = dir.path().join("model.safetensors");
    let mut tensors = read(&path);
    edit(&mut tensors);
    write(&path, &tensors);
    dir
}

fn sharded() -> TempDir {
    let dir = copied(TIED);
    let whole = dir.path().join("model.safetensors");
    let mut first = read(&whole);
    fs::remove_file(whole).unwrap();
    let second = first.split_off("model.layers.1");
    let mut map = serde_json::Map::new();
    for (file, part) in [
        ("part-1.safetensors", &first),
        ("part-2.safetensors", &second),
    ] {
        write(&dir.path().join(file), part);
        map.extend(part.keys().map(|name| (name.clone(), Value::from(file))));
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    dir
}

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor =
        |view: TensorView<'_>| Stored(view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let tensors = file.tensors().into_iter();
    tensors.map(|(name, view)| (name, tensor(view))).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, Stored(dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn load(dir: &Path) -> (Decoder, LoadReport) {
    Decoder::load_as(dir, &Device::flex(), DType::F32).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn refusal(dir: &Path) -> String {
    message(Decoder::load(dir, &Device::flex()).unwrap_err(), dir)
}

fn message(error: impl ToString, dir: &Path) -> String {
    error.to_string().replace(&dir.display().to_string(), "DIR")
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

fn parameters(decoder: &Decoder) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    visit_parameters(decoder, |name, _, read| {
        all.insert(name.to_string(), read().as_slice::<f32>().unwrap().to_vec());
    });
    all
}
