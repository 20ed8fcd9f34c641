"""Reference values of special tokens: which ids, texts and template variables `transformers` reads from a folder.

    python -m venv v4 && v4/bin/pip install "transformers==4.57.6"
    python -m venv v5 && v5/bin/pip install "transformers==5.24.0"
    v4/bin/python scripts/tokenizers/special_tokens.py verl-models/text/tests/golden/special_tokens.json
    v5/bin/python scripts/tokenizers/special_tokens.py verl-models/text/tests/golden/special_tokens.json

Each run adds the values of its version to those in the file; `verl-models/text/tests/it/special_tokens.rs` compares them. torch
is not needed.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerFast


def added(content, id=None, special=True, **flags):
    entry = {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special,
        "special": special,
        **flags,
    }
    return entry if id is None else {"id": id, **entry}


def letters(extra=(), added_tokens=()):
    """A tokenizer of single characters."""
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for character in [*characters, *extra]:
        vocab.setdefault(character, len(vocab))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added("<unk>", 0), added("<s>", 1), added("</s>", 2), *added_tokens],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
    }


def pieces():
    """A tokenizer in the style of SentencePiece: a space is `▁`, and one is added before a text."""
    tokenizer = letters(extra=["▁", "▁a"])
    tokenizer["model"]["merges"] = [["▁", "a"]]
    replace = lambda a, b: {"type": "Replace", "pattern": {"String": a}, "content": b}
    tokenizer["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
    }
    tokenizer["decoder"] = {
        "type": "Sequence",
        "decoders": [
            replace("▁", " "),
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return tokenizer


SIZE = len(letters()["model"]["vocab"])
START, END = SIZE, SIZE + 1
TEXTS = ["a<|start|>b <|end|> c", "<s>a</s>", "x [PAD] <image> <tool>", " a  <|end|>\n", "ab cab ab"]


def config(**entries):
    return {"tokenizer_class": "PreTrainedTokenizerFast", **entries}


def decoder(*tokens, **flags):
    return {str(START + i): added(token, **flags) for i, token in enumerate(tokens)}


CASES = {
    "plain": {"tokenizer.json": letters()},
    # transformers' files of a fine-tuned model (tokenizers#1422).
    "decoder": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(
            added_tokens_decoder=decoder("<|start|>", "<|end|>"), eos_token="<|end|>", bos_token="<s>"
        ),
    },
    "decoder_of_pieces": {
        "tokenizer.json": pieces(),
        "tokenizer_config.json": config(
            added_tokens_decoder={str(SIZE + 2): added("<|start|>"), str(SIZE + 3): added("<|end|>")},
            eos_token="<|end|>",
        ),
    },
    "decoder_flags": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder=decoder("<|start|>", "<|end|>", lstrip=True, rstrip=True)),
    },
    "decoder_of_ordinary_tokens": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder=decoder("<|start|>", "<|end|>", special=False)),
    },
    "decoder_single_word": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(
            added_tokens_decoder={str(START): added("ab", special=False, single_word=True)}
        ),
    },
    # For a token that tokenizer.json has too, the flags of the configuration apply.
    "decoder_changes_flags": {
        "tokenizer.json": letters(added_tokens=[added("<|start|>", START), added("<|end|>", END)]),
        "tokenizer_config.json": config(
            added_tokens_decoder={str(END): added("<|end|>", lstrip=True), str(START): added("<|start|>", special=False)}
        ),
    },
    # The legacy map is not read if there is a decoder.
    "decoder_hides_the_map": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder=decoder("<|start|>", "<|end|>"), bos_token="<s>"),
        "special_tokens_map.json": {"eos_token": "<|end|>", "bos_token": "</s>"},
        "added_tokens.json": {"<tool>": START},
    },
    "map_alone": {
        "tokenizer.json": letters(),
        "special_tokens_map.json": {"eos_token": "</s>", "bos_token": added("<s>"), "unk_token": "<unk>"},
    },
    "map_before_config": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(eos_token="<unk>", pad_token="<s>"),
        "special_tokens_map.json": {"eos_token": "</s>", "bos_token": "<s>"},
    },
    "map_clears": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(eos_token="</s>", pad_token="<s>"),
        "special_tokens_map.json": {"pad_token": None},
    },
    "added_tokens": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(eos_token="<|end|>"),
        "added_tokens.json": {"<|end|>": END, "<|start|>": START},
    },
    "added_tokens_and_map": {
        "tokenizer.json": letters(),
        "special_tokens_map.json": {
            "eos_token": "</s>",
            "additional_special_tokens": ["<|start|>", "<|end|>"],
        },
        "added_tokens.json": {"<|start|>": START, "<|end|>": END},
    },
    "further": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(additional_special_tokens=["<|start|>", "<|end|>"], eos_token="</s>"),
    },
    "extra": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(extra_special_tokens={"image_token": "<image>"}, eos_token="</s>"),
    },
    "extra_by_any_name": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(extra_special_tokens={"image": "<image>"}, pad_token="[PAD]"),
    },
    "flags_of_a_role": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(
            eos_token="</s>", pad_token={**added("<|end|>", lstrip=True), "__type": "AddedToken"}
        ),
    },
    "roles_get_ids": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(pad_token="[PAD]", eos_token="</s>", bos_token="<s>"),
    },
    "roles_are_found_in_texts": {
        "tokenizer.json": letters(extra=["<|end|>"]),
        "tokenizer_config.json": config(pad_token="<|end|>", eos_token="</s>"),
    },
    "empty_bos": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(bos_token="", eos_token="</s>"),
    },
    "split": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(eos_token="</s>", split_special_tokens=True),
    },
    # Rejected here, since the ids differ from those in the files.
    "gap": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder={str(START + 3): added("<|start|>")}),
    },
    "taken": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder={"40": added("<|start|>")}),
    },
    "elsewhere": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(added_tokens_decoder={str(START): added("</s>")}),
    },
    "unknown_eos": {
        "tokenizer.json": letters(),
        "tokenizer_config.json": config(eos_token="<|end|>"),
    },
}


def read(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    roles = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    return {
        "length": len(tokenizer),
        "ids": ids,
        "visible": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
        "spelled": [tokenizer.decode(i, skip_special_tokens=False) for i in ids],
        "roles": roles,
        "role_ids": {k: tokenizer.convert_tokens_to_ids(v) for k, v in roles.items() if v},
        "variables": tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False,
                                                   chat_template=TEMPLATE),
    }


TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


def main():
    path = Path(sys.argv[1])
    known = json.loads(path.read_text()) if path.exists() else {"template": TEMPLATE, "texts": TEXTS, "cases": {}}
    version = ".".join(transformers.__version__.split(".")[:2])
    for name, files in CASES.items():
        case = known["cases"].setdefault(name, {})
        case["files"] = files
        with tempfile.TemporaryDirectory() as folder:
            for file, content in files.items():
                Path(folder, file).write_text(json.dumps(content))
            try:
                case[version] = read(folder)
            except Exception as error:  # what a version rejects is part of the comparison
                case[version] = {"refused": f"{type(error).__name__}: {error}"}
    path.write_text(json.dumps(known, ensure_ascii=False, separators=(",", ":")) + "\n")


main()
