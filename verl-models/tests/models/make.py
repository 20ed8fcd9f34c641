"""Tiny random models with long-context rotary scalings, for `verl-models/tests/it/parity.rs`.

    pip install torch transformers==5.24.0 safetensors
    python verl-models/tests/models/make.py

Writes tiny-random-qwen2-yarn, tiny-random-llama-dynamic and tiny-random-llama-own-head next to this file: config.json,
model.safetensors, and reference.safetensors with the results of transformers in f32. Rows are longer than the context of
pre-training, so that the scalings take effect; the second row is padded on the right.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
LENGTH = 40
SHAPE = dict(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    bos_token_id=1,
    eos_token_id=2,
)


def write(name, model, config, tied=None):
    torch.manual_seed(0)
    model = model(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.4 * noise)
    folder = HERE / name
    model.save_pretrained(folder)
    if tied is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}, indent=2) + "\n")
    model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(3, SHAPE["vocab_size"], (2, LENGTH))
    mask = torch.ones_like(ids)
    ids[1, LENGTH - 7 :] = 0
    mask[1, LENGTH - 7 :] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits
    distribution = logits.log_softmax(-1)
    log_probs = distribution[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    loss = -log_probs[mask[:, 1:].bool()].mean()
    loss.backward()
    reference = {
        "input_ids": ids,
        "attention_mask": mask,
        "logits": logits,
        "logprobs": log_probs,
        "entropy": -(distribution.exp() * distribution).sum(-1),
        "loss": loss.reshape(1),
    }
    for parameter_name, parameter in model.named_parameters():
        reference[f"grad.{parameter_name}"] = parameter.grad
    reference = {key: value.detach().contiguous() for key, value in reference.items()}
    save_file(reference, folder / "reference.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(folder, json.loads((folder / "config.json").read_text())["rope_parameters"])


yarn = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}
write("tiny-random-qwen2-yarn", Qwen2ForCausalLM, Qwen2Config(**SHAPE, rope_parameters=yarn))
dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
write("tiny-random-llama-dynamic", LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=dynamic))
write("tiny-random-llama-own-head", LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False), tied=True)
