"""Golden tokens of chat templates: how transformers tokenizes prompts and finished conversations.

    pip install transformers==5.24.0
    python scripts/targets.py            # writes verl-models/text/tests/targets/{tokenizers,cases.json}

The templates in verl-models/text/tests/targets/templates are written from the published descriptions of the formats. The
tokenizers are trained here on a few lines: byte-level BPE, two in the style of SentencePiece (a space before the text,
added by the normalizer or by the pre-tokenizer), and words. Each template is tried with its own special tokens on each.

cases.json contains, for each conversation and answer, the ids of the prompt (`add_generation_prompt=True`), those of the
finished conversation after the `shared` ones at its beginning, and for templates with `{% generation %}` marks the mask of
`return_assistant_tokens_mask`. verl-models/text/tests/it/targets.rs compares `verl_text::targets` with them.
"""

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent.parent / "verl-models/text/tests/targets"

LINES = [
    "What is 2+2? The answer is four, because 2 and 2 are 4.",
    "The cat sat on the mat and said: hello, world!",
    "user assistant system model User: Assistant: ### Instruction: ### Response:",
    'def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n{"name": "add", "arguments": {"a": 2, "b": 2}}',
    "Let me think about it. First, I add the numbers; then I tell the result.\n\n",
    "You are a helpful assistant. Answer in one word. Today Date: 26 Jul 2024",
    "Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the market.\n#### 18",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. Ça va? Привет, мир. 你好，世界。",
]

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def bytes_bpe():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(LINES * 3, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False))
    return tok


def llama_bpe():
    """Like Llama 2's: the normalizer adds a space before every text between special tokens."""
    tok = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = pre_tokenizers.Split("▁", "merged_with_next")
    tok.pre_tokenizer = words
    tok.train_from_iterator(LINES * 3, trainers.BpeTrainer(vocab_size=560, special_tokens=["<unk>"] + BYTES, show_progress=False))
    tok.pre_tokenizer = None
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return plain_bytes(tok)


def metaspace_unigram():
    """Like Gemma's and T5's: a unigram model after the pre-tokenizer Metaspace, which adds a space before the first text."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tok.train_from_iterator(LINES * 3, trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False))
    state = json.loads(tok.to_str())
    state["model"]["vocab"] += [[byte, -20.0] for byte in BYTES]
    state["model"]["byte_fallback"] = True
    tok = Tokenizer.from_str(json.dumps(state))
    tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False)])
    return plain_bytes(tok)


def words():
    names = sorted({word for line in LINES for word in line.split()})
    tok = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<unk>"] + names)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


def plain_bytes(tok):
    """Training declares bytes as special tokens; make them ordinary pieces."""
    state = json.loads(tok.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(state))


BASES = {"bytes": bytes_bpe, "llama": llama_bpe, "metaspace": metaspace_unigram, "words": words}


class Form:
    """A template with its special tokens: the first one, those at which generation stops, others."""

    def __init__(self, name, bos, eos, stops=(), more=(), system=True, tools=False, variables=({},), rstrip=()):
        self.name, self.bos, self.eos, self.system, self.tools = name, bos, eos, system, tools
        self.stops, self.variables, self.rstrip = [eos, *stops], variables, rstrip
        names = [bos, *self.stops, *more]
        self.special = [name for at, name in enumerate(names) if name and name not in names[:at]]


IM = ["<|im_start|>"]
FORMS = [
    Form("llama2", "<s>", "</s>"),
    Form("llama3", "<|begin_of_text|>", "<|end_of_text|>", ["<|eot_id|>"], ["<|start_header_id|>", "<|end_header_id|>"]),
    Form("llama31", "<|begin_of_text|>", "<|end_of_text|>", ["<|eom_id|>", "<|eot_id|>"], ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"], tools=True),
    Form("chatml", None, "<|im_end|>", ["<|endoftext|>"], IM),
    Form("qwen25", None, "<|im_end|>", ["<|endoftext|>"], IM, tools=True),
    Form("qwen3", None, "<|im_end|>", ["<|endoftext|>"], IM, tools=True, variables=({}, {"enable_thinking": False})),
    Form("gemma", "<bos>", "<eos>", ["<end_of_turn>"], ["<start_of_turn>"], system=False),
    Form("gemma3", "<bos>", "<eos>", ["<end_of_turn>"], ["<start_of_turn>", "<start_of_image>"]),
    Form("mistral1", "<s>", "</s>", system=False),
    Form("mistral3", "<s>", "</s>", more=["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], tools=True),
    Form("phi3", "<s>", "<|endoftext|>", ["<|end|>"], ["<|system|>", "<|user|>", "<|assistant|>"], rstrip=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]),
    Form("phi4", None, "<|im_end|>", ["<|endoftext|>"], [*IM, "<|im_sep|>"]),
    Form("deepseek2", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    Form("deepseek_r1", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", more=["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]),
    Form("smollm2", None, "<|im_end|>", ["<|endoftext|>"], IM),
    Form("smollm3", None, "<|im_end|>", ["<|end_of_text|>"], [*IM, "<think>", "</think>"], variables=({}, {"enable_thinking": False})),
    Form("zephyr", "<s>", "</s>"),
    Form("alpaca", "<s>", "</s>"),
    Form("marked", "<s>", "</s>"),
    Form("granite", None, "<|end_of_text|>", more=["<|start_of_role|>", "<|end_of_role|>"]),
]

SYSTEM = {"role": "system", "content": "Answer in one word."}
USER = {"role": "user", "content": "What is 2+2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]}
RESULT = {"role": "tool", "name": "add", "content": "4"}


def says(text):
    return {"role": "assistant", "content": text}


def answers(form):
    return [
        "four",
        "The cat sat.",
        "\n four \n",
        "  four",
        "four\n\n",
        "",
        " \n ",
        "four" + form.eos,
        form.eos + "four",
        "fo" + form.stops[-1] + "ur" + form.special[-1],
        "<think>\nFirst, I add.\n</think>\n\nfour",
        "<think></think>four",
        "Über 你好 🦆 é",
        "```python\ndef add(a, b):\n    return a + b\n```\n",
        "What is 2+2?",
        "assistant",
    ]


def conversations(form):
    """Messages before the answer, tools, and whether all answers are tried."""
    yield [USER], None, True
    yield [USER, says("five"), {"role": "user", "content": "Think again. "}], None, False
    if form.system:
        yield [SYSTEM, {"role": "user", "content": "What is 2+2? "}], None, False
    if form.tools:
        yield [USER], [TOOL], False
        yield [USER, CALL, RESULT], [TOOL], False


def ids_of_case(prompt, whole):
    """Both lists of ids, the second without the beginning that it shares with the first."""
    pairs = zip(prompt, whole)
    shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(prompt), len(whole)))
    return {"prompt": ids(prompt), "shared": shared, "rest": ids(whole[shared:])}


def ids(tokens):
    return " ".join(str(token) for token in tokens)


def tokenizer(form, base):
    tok = Tokenizer.from_str(base)
    # Not normalized, so that both readers use the same flags.
    tok.add_special_tokens([AddedToken(name, normalized=False, special=True, rstrip=name in form.rstrip) for name in form.special])
    template = (OUT / "templates" / f"{form.name}.jinja").read_text()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=form.bos, eos_token=form.eos, chat_template=template)
    return fast, json.loads(tok.to_str())["added_tokens"]


def cases(form, fast, base):
    has_marks = "generation %}" in fast.chat_template
    for before, tools, is_full in conversations(form):
        for variables in form.variables:
            given = answers(form) if is_full and base in ("bytes", "llama") else answers(form)[:3]
            given = [says(text) for text in given]
            if tools and len(before) == 1:
                given.append(CALL)
            for answer in given:
                options = dict(tools=tools, return_dict=False, **variables)
                prompt = fast.apply_chat_template(before, add_generation_prompt=True, **options)
                options["return_dict"] = True
                whole = fast.apply_chat_template([*before, answer], return_assistant_tokens_mask=has_marks, **options)
                case = {"before": before, "answer": answer}
                case |= {"tools": tools} if tools else {}
                case |= {"variables": variables} if variables else {}
                case |= ids_of_case(prompt, whole["input_ids"])
                if has_marks:
                    case["mask"] = "".join(str(kind) for kind in whole["assistant_masks"])
                yield case


def plain_cases(base):
    """Prompt and answer as one text, with the tokens that a tokenizer adds to a sequence."""
    for added in ["none", "bos", "both"]:
        tok = Tokenizer.from_str(base)
        tok.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ["<s>", "</s>"]])
        start, end = tok.token_to_id("<s>"), tok.token_to_id("</s>")
        single = {"none": "$A", "bos": "<s> $A", "both": "<s> $A </s>"}[added]
        tok.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", start), ("</s>", end)])
        fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")
        found = []
        for question in ["What is 2+2?", "What is 2+2? ", "2+2=\n"]:
            for answer in ["four", " four", "four</s>", "four</s>\n", "</s>", "\nfour", "", "fo</s>ur", "你好"]:
                found.append({
                    "question": question,
                    "answer": answer,
                    **ids_of_case(fast(question)["input_ids"], fast(question + answer)["input_ids"]),
                })
        state = json.loads(tok.to_str())
        yield {"added_tokens": state["added_tokens"], "post_processor": state["post_processor"], "cases": found}


def main():
    (OUT / "tokenizers").mkdir(parents=True, exist_ok=True)
    golden = {"transformers": transformers.__version__, "forms": [], "plain": []}
    for name, make in BASES.items():
        base = make().to_str()
        (OUT / "tokenizers" / f"{name}.json").write_text(json.dumps(json.loads(base), ensure_ascii=False) + "\n")
        for form in FORMS:
            fast, added = tokenizer(form, base)
            golden["forms"].append({
                "template": form.name,
                "tokenizer": name,
                "bos": form.bos,
                "eos": form.eos,
                "stops": [fast.convert_tokens_to_ids(stop) for stop in form.stops],
                "added_tokens": added,
                "cases": list(cases(form, fast, name)),
            })
        if name != "words":
            golden["plain"] += [{"tokenizer": name, **found} for found in plain_cases(base)]
    lines = json.dumps(golden, ensure_ascii=False).replace('{"before"', '\n{"before"').replace('{"question"', '\n{"question"')
    (OUT / "cases.json").write_text(lines + "\n")
    print(sum(len(form["cases"]) for form in golden["forms"]), "conversations,", sum(len(p["cases"]) for p in golden["plain"]), "plain texts")


if __name__ == "__main__":
    main()
