#!/usr/bin/env python3
"""Checks the products of a decode step, and times whole steps and each of its kernels.

    python3 scripts/kernels/decode.py [--quick] [check] [layers] [step] [step16 ... step512] [profile16 ... profile128] [compile]
    (default: check and step, which is all sizes)

Needs a Hopper GPU, PyTorch, and NVRTC of CUDA 13. `check` compares products of separate matrices and shared sums with
float64, on ragged shapes, into outputs full of NaN, twice for equal bits. `step` captures all kernels of a step of a 0.5B
decoder (24 layers with separate weights, a cache of 258 tokens and more) into a graph: as it is, with the previous
divisions, and with one other division at a time. Then each kind of kernel by itself, all its launches of a step one after
another, and the step without it. A step without its bookkeeping attends to fewer tokens, and one without its embedding adds
to the result of the step before: for these two only the time by itself shows their cost. `layers` compares steps whose
layers are one kernel with float64, on several models and numbers of rows; `profile` prints when its blocks end each phase.
`compile` compiles every configuration and needs no GPU. `--quick` times no other divisions. Exit code 1 if any check failed.
"""
import math
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import gemm
from gemm import CUDA, Driver, attempt, compile_text, error, longs, report

LAYERS, WIDTH, HEADS, KEYS, DIM, INNER, VOCAB, EPS = 24, 896, 14, 2, 64, 4864, 151936, 1e-6
JOINT = (HEADS + 2 * KEYS) * DIM
# Whether projections have a bias, and heads a norm.
BIAS, HEAD_NORM = 1, 0
# Cached tokens of a row, two more than complete tiles, so that the tokens which the replays add start no new tile; its
# blocks of 64.
TOKENS, BLOCKS = 258, 7


def become(width, heads, keys, dim, inner, bias, head_norm, blocks=7):
    """Switches to a decoder of this shape."""
    global WIDTH, HEADS, KEYS, DIM, INNER, BIAS, HEAD_NORM, JOINT, BLOCKS
    WIDTH, HEADS, KEYS, DIM, INNER, BIAS, HEAD_NORM, BLOCKS = width, heads, keys, dim, inner, bias, head_norm, blocks
    JOINT = (HEADS + 2 * KEYS) * DIM


# Decoders of which the layers in one kernel are checked: 0.5B, 135M, one with norms of heads, a tiny one, a ragged one, and
# long contexts, which several groups share.
MODELS = {"0.5B": (896, 14, 2, 64, 4864, 1, 0), "135M": (576, 9, 3, 64, 1536, 0, 0), "norms": (1024, 16, 8, 128, 3072, 0, 1),
          "tiny": (64, 4, 2, 16, 128, 1, 0), "ragged": (200, 5, 1, 48, 328, 1, 1), "long": (896, 14, 2, 64, 4864, 1, 0, 48)}
SECONDS = 30.0  # of the timings of one size
QUICK = "--quick" in sys.argv
SMS = 132
# Ids of a row's shortlist, and below which complements of words ids are on it, for 48 of them.
SHORTLIST, LIMIT = 128, (48 << 32) // VOCAB
PREFIXES = {"decode_layers.cu": ["gemm_tile.cuh", "attention_decode.cu", "philox.cuh"], "gemm.cu": ["gemm_tile.cuh"], "gemm_dyn.cu": ["gemm_tile.cuh"], "race.cu": ["rowwise.cuh", "philox.cuh", "draw.cuh"],
            "advance.cu": ["rowwise.cuh", "philox.cuh", "draw.cuh"], "embed.cu": ["rowwise.cuh"], "norm.cu": ["rowwise.cuh"]}
START = time.time()
COMPILING = False  # launches only note what has to be compiled
JOBS = set()
CODES, FUNCTIONS = {}, {}
DRIVER = None


def compile_job(job):
    file, defines = job
    text = "".join(f"#define {k} {v}\n" for k, v in defines)
    return compile_text(text + "".join((CUDA / f).read_text() for f in PREFIXES.get(file, [])) + (CUDA / file).read_text(), file)


def real(x):
    return struct.unpack("<q", struct.pack("<d", x))[0]


def launch(file, entry, defines, grid, block, args, scalars):
    """Tensors, or (tensor, box, swizzle) for a tensor map, then the scalars."""
    import torch

    job = (file, tuple(sorted(defines.items())))
    if COMPILING:
        JOBS.add(job)
        return
    if (job, entry) not in FUNCTIONS:
        code, log = CODES[job]
        if code is None:
            raise RuntimeError(f"does not compile: {log[:300]}")
        FUNCTIONS[job, entry] = DRIVER.function(code, entry, 0)[0]
    values = [gemm.tensor_map(DRIVER, *a) if isinstance(a, tuple) else a.data_ptr() for a in args]
    if scalars:
        values.append(longs(*scalars))
    DRIVER.launch(FUNCTIONS[job, entry], (*grid, 1, 1)[:3], block, 0, torch.cuda.current_stream().cuda_stream, values)


def up(a, b):
    return -(-a // b)


# ---- products, divided as product/*.rs divide them -----------------------------------------------------------------


class Product:
    """A product of X and W: `weight` is a list of matrices whose rows follow one another."""

    def __init__(self, x, weight, to, into="product", normed=None):
        self.x, self.weight, self.to, self.into = x, weight, to, into
        self.normed = normed  # gain: skinny kernels norm X themselves
        self.m, self.k, self.n = x.shape[0], x.shape[1], sum(w.shape[0] for w in weight)

    def firsts(self):
        """Rows before the second and the third matrix."""
        if len(self.weight) == 1:
            return []
        second = self.weight[0].shape[0]
        return [second, second + self.weight[1].shape[0] if len(self.weight) > 2 else self.n]

    def flags(self):
        return {"ADD": int(self.into == "sum"), "SWIGLU": int(self.into == "swiglu"), "PARTS": len(self.weight)}

    def tail(self):
        """Buffers and scalars after C."""
        return [self.to] if self.into == "sum" else [], [self.m, self.n, self.k, self.k] + self.firsts()


def skinny(p, tiles, warps, ahead, cs=1, per_sm=1, most=None):
    groups = up(p.n, 16 * tiles)
    defines = {"K_DIM": p.k, "TOKENS": 16, "ROW_TILES": tiles, "K_WARPS": warps, "AHEAD": ahead, "CS": cs,
               "BLOCKS_PER_SM": per_sm, "ONCE": int(most is None), "NORM": int(p.normed is not None)} | p.flags()
    buffers = [p.x, *p.weight, p.to] + ([p.normed] if p.normed is not None else []) + ([p.to] if p.into == "sum" else [])
    scalars = [p.m, p.n] + p.firsts() + ([real(EPS)] if p.normed is not None else [])
    launch("gemm_skinny.cu", "gemm_skinny", defines, (cs * min(groups, most or groups),), 32 * tiles * warps, buffers, scalars)


def tile(p, bm, bn, stages, cs=1, per_sm=1, bk=64):
    halves = 1 + (p.into == "swiglu")
    defines = {"BM": bm, "BN": bn, "BK": bk, "STAGES": stages, "CM": 1, "CS": cs, "BLOCKS_PER_SM": per_sm} | p.flags()
    buffers, scalars = p.tail()
    maps = [(p.x, (bk, bm), bk * 2)] + [(w, (bk, bn // halves), bk * 2) for w in p.weight]
    launch("gemm.cu", "gemm", defines, (cs * up(p.m, bm) * up(p.n, bn),), 128, maps + [p.to] + buffers, scalars)


def deep(p, bn, cs=1):
    halves = 1 + (p.into == "swiglu")
    stored = p.into != "sum" and cs == 1
    stages = (232448 - 1024 - stored * 256 * bn // halves) // (16384 + 128 * bn)
    defines = {"BM": 128, "BN": bn, "BK": 64, "STAGES": stages, "CM": 1, "CS": cs, "STORE": int(stored)} | p.flags()
    buffers, scalars = p.tail()
    maps = [(p.x, (64, 128), 128)] + [(w, (64, bn // halves), 128) for w in p.weight]
    tiles = up(p.m, 128) * up(p.n, bn)
    launch("gemm_dyn.cu", "gemm", defines, (cs * min(tiles, SMS // cs),), 384,
           maps + [(p.to, (32, 64), 64) if stored else p.to] + buffers, scalars)


def best_columns(m, n, sizes=(256, 192, 128)):
    more = (224,) if n % 224 == 0 else ()
    return min((*sizes, *more), key=lambda c: up(up(m, 128) * up(n, c), SMS) * (c + 32))


def unit(columns, terms, rows, most):
    """Columns of a unit of the layers' kernel, and pieces of the sum."""
    chunks = up(terms, 128)
    fits = [(up(chunks, pieces) * (rows + tile), pieces, tile) for pieces in range(1, min(most, chunks) + 1) for tile in range(16, 129, 16)
            if up(up(columns, tile), 2) * 2 * pieces <= SMS]
    _, pieces, tile = min(fits)
    return tile, pieces


KINDS = ("embed", "norm", "qkv", "attention", "o", "gate_up", "down", "head", "race", "advance")
# With how many blocks of a cluster a row attends, and with how many blocks it races.
BEFORE = {
    16: {"qkv": (skinny, 1, 7, 4), "o": (skinny, 1, 7, 4), "gate_up": (skinny, 5, 4, 7), "down": (skinny, 1, 5, 4, 8, 4),
         "head": (skinny, 2, 4, 4, 1, 3, 3 * SMS), "attention": 8, "splits": 32},
    64: {"qkv": (tile, 64, 32, 4, 4), "o": (tile, 64, 32, 4, 4), "gate_up": (tile, 64, 64, 6, 1, 2), "down": (tile, 64, 64, 10, 8),
         "head": (tile, 64, 64, 6, 1, 2), "attention": 4, "splits": 9},
    128: {"qkv": (tile, 128, 32, 4, 4), "o": (tile, 128, 32, 4, 4), "gate_up": (tile, 128, 64, 4, 1, 2), "down": (tile, 128, 64, 8, 8),
          "head": (deep, 128), "attention": 2, "splits": 5},
} | {rows: {"qkv": (deep, 128, 2), "o": (deep, 128, 2), "gate_up": (deep, best_columns(rows, 2 * INNER)), "down": (deep, 128, shared),
            "head": (deep, best_columns(rows, VOCAB)), "attention": 1, "splits": splits} for rows, shared, splits in ((256, 8, 3), (512, 4, 2))}
NEW = {
    16: BEFORE[16] | {"head": (skinny, 2, 4, 4, 1, 2, 2 * SMS), "splits": 24},
    64: BEFORE[64] | {"splits": 6},
    128: BEFORE[128] | {"qkv": (tile, 64, 32, 7, 2, 2), "o": (tile, 64, 32, 7, 2, 2), "gate_up": (tile, 64, 128, 4, 1, 2), "attention": 1, "splits": 3},
    256: BEFORE[256] | {"splits": 1},
    512: BEFORE[512] | {"qkv": (tile, 128, 64, 4, 1, 2), "o": (tile, 128, 64, 4, 2, 2), "splits": 1},
}
# Other divisions, one at a time, in addition to the previous ones.
TRIED = {
    16: {"qkv": [(skinny, 1, 14, 2)], "o": [(skinny, 1, 14, 2)], "head": [(skinny, 2, 4, 7, 1, 2, 2 * SMS), (skinny, 2, 4, 5, 1, 2, 2 * SMS)],
         "attention": [4], "splits": [16, 32]},
    64: {"qkv": [(tile, 64, 32, 7, 2, 2), (tile, 64, 16, 7, 2)], "o": [(tile, 64, 32, 7, 2, 2), (tile, 64, 16, 7, 2)],
         "gate_up": [(tile, 64, 128, 4, 1, 2), (tile, 64, 128, 6), (tile, 64, 32, 7, 1, 2)],
         "down": [(tile, 64, 32, 14, 4), (tile, 64, 64, 6, 4, 2), (tile, 64, 32, 7, 4, 2)], "head": [(deep, 128), (tile, 64, 128, 4, 1, 2)],
         "attention": [8, 2, 1], "splits": [8, 12]},
    128: {"qkv": [(tile, 64, 64, 4, 4, 2), (tile, 64, 64, 4, 2, 2)], "o": [(tile, 64, 64, 4, 4, 2), (tile, 64, 64, 4, 2, 2)],
          "gate_up": [(deep, 128), (tile, 64, 64, 4, 1, 3)], "down": [(tile, 64, 64, 6, 4, 2), (tile, 64, 32, 7, 4, 2)], "head": [(deep, 192)],
          "attention": [2], "splits": [4, 6]},
    256: {"qkv": [(tile, 128, 64, 4, 2, 2), (tile, 128, 64, 4, 4, 2), (tile, 64, 64, 4, 2, 2), (deep, 128)],
          "o": [(tile, 128, 64, 4, 2, 2), (tile, 128, 64, 4, 4, 2), (tile, 64, 64, 4, 2, 2), (deep, 128, 4)],
          "gate_up": [(deep, 128), (deep, 192), (tile, 128, 64, 4, 1, 2)], "down": [(tile, 128, 64, 8, 8), (tile, 128, 64, 4, 8, 2), (deep, 128, 4)],
          "attention": [2], "splits": [2, 3]},
    512: {"qkv": [(deep, 128), (tile, 128, 64, 4, 2, 2), (tile, 128, 128, 3, 1, 2)], "o": [(deep, 128, 4), (tile, 128, 64, 4, 4, 2), (tile, 128, 64, 4, 1, 2)],
          "gate_up": [(deep, 128), (deep, 192), (deep, 256)], "down": [(deep, 128, 8), (tile, 128, 64, 4, 4, 2)], "head": [(deep, 192)], "splits": [2, 3]},
}


# ---- a step --------------------------------------------------------------------------------------------------------


class Step:
    """Weights and buffers of a decoder, and its kernels for `rows` rows."""

    def __init__(self, rows, layers=LAYERS, vocab=VOCAB, device="cuda"):
        import torch

        self.rows, self.vocab = rows, vocab
        bf16 = torch.bfloat16

        def weight(n, k):
            return (torch.randn(n, k, device=device) / math.sqrt(k)).to(bf16)

        def empty(*shape, dtype=bf16):
            return torch.zeros(*shape, device=device, dtype=dtype)

        def ints(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.layers = []
        for _ in range(layers):
            q, k, v = weight(HEADS * DIM, WIDTH), weight(KEYS * DIM, WIDTH), weight(KEYS * DIM, WIDTH)
            gate, upper = weight(INNER, WIDTH), weight(INNER, WIDTH)
            self.layers.append({
                "qkv": [q, k, v], "gate_up": [gate, upper], "o": [weight(WIDTH, HEADS * DIM)], "down": [weight(WIDTH, INNER)],
                "bias": weight(1, JOINT)[0],
                "cache": [torch.randn(rows * BLOCKS, KEYS, 64, DIM, device=device).to(bf16) for _ in range(2)]})
            self.layers[-1]["qkv_packed"], self.layers[-1]["gate_up_packed"] = [torch.cat([q, k, v])], [torch.cat([gate, upper])]
        self.gain = torch.ones(WIDTH, device=device, dtype=bf16)
        self.embedding = weight(vocab, WIDTH)
        self.x, self.normed, self.scale = empty(rows, WIDTH), empty(rows, WIDTH), empty(rows, dtype=torch.float32)
        self.qkv, self.mixed, self.inner, self.logits = empty(rows, JOINT), empty(rows, HEADS * DIM), empty(rows, INNER), empty(rows, vocab)
        angle = torch.rand(BLOCKS * 64, DIM, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.table = ints(range(rows * BLOCKS))
        self.streams = torch.randint(0, 1 << 30, (rows, 4), device=device, dtype=torch.int32)
        self.token, self.positions, self.lengths, self.states = (ints([v] * rows) for v in (5, TOKENS, 0, 0))
        self.limits, self.eos, self.stops = ints([1 << 20] * rows), ints([-1]), ints([-1])
        self.log_probs = [empty(rows, dtype=torch.float32) for _ in range(2)]
        self.responses = [empty(rows * 4096, dtype=torch.float32) for _ in range(3)]
        self.partial = empty(rows * 32 * 4, dtype=torch.float64)
        self.ended, self.shortlisted = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.shortlist = empty(rows, SHORTLIST, 2, dtype=torch.int32)
        self.pieces = empty(rows * 16 * max(JOINT, WIDTH), dtype=torch.float32)
        self.parts = empty(rows * KEYS * 8 * 16 * (DIM + 2), dtype=torch.float32)
        self.counts = empty(32 + rows * KEYS * 2, dtype=torch.int32)
        self.stamps = empty(SMS * (1 + 7 * layers), dtype=torch.int64)
        gain = [[w.data_ptr() if device != "meta" else 0 for w in (
            *layer["qkv"], layer["bias"], self.gain, self.gain, self.gain, *layer["o"], self.gain, *layer["gate_up"], *layer["down"],
            *layer["cache"])] + [0, 0] for layer in self.layers]
        self.pointers = torch.tensor(gain, dtype=torch.int64, device=device)

    def reset(self):
        self.positions.fill_(TOKENS)
        self.lengths.zero_()
        self.states.zero_()

    def calls(self, table, packed=False, tokens=None, limit=0):
        """(kind, launch) of all kernels in their order; the race goes by shortlists up to `limit`, if there is one."""
        rows = self.rows
        calls = []
        cluster = table["attention"]
        tokens = tokens or (32 if rows * KEYS <= 6 * SMS else 16)

        def product(kind, *args, **kwargs):
            p = Product(*args, **kwargs)
            how, *rest = table[kind]
            calls.append((kind, lambda: how(p, *rest)))

        def normed(kind, weight, to, into):
            if rows <= 16:
                product(kind, self.x, weight, to, into, normed=self.gain)
                return
            calls.append(("norm", lambda: launch("norm.cu", "rms_norm", {"ELEMENT": "__nv_bfloat16", "WIDTH": WIDTH}, (up(rows, 8),), 256,
                                                 [self.x, self.gain, self.normed, self.scale], [rows, real(EPS)])))
            product(kind, self.normed, weight, to, into)

        calls.append(("embed", lambda: launch("embed.cu", "take_rows", {"ELEMENT": "__nv_bfloat16", "WIDTH": WIDTH}, (up(rows * WIDTH // 8, 256),), 256,
                                              [self.embedding, self.token, self.x], [self.vocab, rows])))
        suffix = "_packed" if packed else ""
        for layer in self.layers:
            normed("qkv", layer["qkv" + suffix], self.qkv, "product")
            calls.append(("attention", lambda layer=layer: launch(
                "attention_decode.cu", "attention_decode_step",
                {"QUERY_HEADS": HEADS, "KEY_HEADS": KEYS, "HEAD_DIM": DIM, "QKV_BIAS": BIAS, "QK_NORM": HEAD_NORM, "CLUSTER": cluster, "WARP_TOKENS": tokens},
                (KEYS, rows, cluster), 128,
                [self.qkv, layer["bias"], self.gain, self.gain, self.cos, self.sin, *layer["cache"], self.table, self.positions, self.mixed],
                [real(DIM ** -0.5), real(EPS), BLOCKS])))
            product("o", self.mixed, layer["o"], self.x, "sum")
            normed("gate_up", layer["gate_up" + suffix], self.inner, "swiglu")
            product("down", self.inner, layer["down"], self.x, "sum")
        normed("head", [self.embedding], self.logits, "product")
        parts = table["splits"]
        scalars = [rows, self.vocab, parts, 0, 0, 0, real(1.0), real(1.0), real(0.0), real(1.0), limit]
        inputs = [self.logits, self.streams, self.lengths, self.states, self.eos]
        race = {"ELEMENT": "__nv_bfloat16"}
        calls.append(("race", lambda: launch("race.cu", "race", race, (parts, rows), 256, inputs + [
            self.partial, self.ended, self.shortlist, self.shortlisted, self.token, *self.log_probs], scalars)))
        calls.append(("advance", lambda: launch("advance.cu", "advance", race, (up(rows, 32),), 32, [
            self.token, *self.log_probs, self.eos, self.stops, self.limits, self.lengths, self.positions, self.states, self.token, *self.responses],
            [rows, 4096, self.vocab, 0, 0, 1, 0, 0])))
        return calls

    def joined(self, table, stamps=0, layers=None, limit=LIMIT):
        """(kind, launch) of a step whose layers are one kernel, divided as product/divisions.rs divides them."""
        rows = self.rows
        tile = next(size for size in (16, 32, 64, 128) if size >= rows)
        limit *= tile >= 64
        group = HEADS // KEYS
        units = KEYS * up(group, min(group, 16))
        qkv, out, down = (unit(n, k, tile, most) for n, k, most in ((JOINT, WIDTH, 4), (WIDTH, HEADS * DIM, 4), (WIDTH, INNER, 9)))
        defines = {"BK": 64, "GROUPS": 1, "QUERY_HEADS": HEADS, "KEY_HEADS": KEYS, "HEAD_DIM": DIM, "QKV_BIAS": BIAS, "QK_NORM": HEAD_NORM,
                   "ROWS": tile, "LAYERS": layers or len(self.layers), "WIDTH": WIDTH, "INNER": INNER, "BLOCKS": SMS, "STAMPS": stamps,
                   "QKV_TILE": qkv[0], "QKV_PIECES": qkv[1], "OUT_TILE": out[0], "OUT_PIECES": out[1], "DOWN_TILE": down[0], "DOWN_PIECES": down[1],
                   "MLP_TILE": unit(2 * INNER, WIDTH, tile, 1)[0], "ATTENTION_PARTS": max(1, min(8, 2 * SMS // (rows * units)))}
        defines |= {} if tile == 128 else {"WARPS": 8}

        def boxes(x):
            return (x, (64, tile // 2), 128)

        layers = ("layers", lambda: launch(
            "decode_layers.cu", "decode_layers", defines, (SMS,), 384,
            [boxes(self.normed), boxes(self.mixed), boxes(self.inner), self.pointers, self.embedding, self.token, self.gain, self.cos, self.sin,
             self.table, self.positions, self.x, self.normed, self.mixed, self.inner, self.pieces, self.parts, self.counts,
             self.streams, self.lengths, self.states, self.shortlist, self.shortlisted]
            + [self.stamps] * stamps, [rows, self.vocab, limit, real(DIM ** -0.5), real(EPS), BLOCKS]))
        calls = self.calls(table, limit=limit)
        last = max(i for i, (kind, _) in enumerate(calls) if kind == "down")
        rest = [c for c in calls[last + 1:] if c[0] != "norm"]
        if rows <= 16:
            # The norm is part of the kernel of the layers.
            p = Product(self.normed, [self.embedding], self.logits)
            how, *more = table["head"]
            rest = [("head", lambda: how(p, *more)) if kind == "head" else (kind, call) for kind, call in rest]
        return [layers] + rest

    def ms(self, calls, repeats=15):
        import torch

        stream = torch.cuda.Stream()
        self.reset()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _, call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _, call in calls:
                call()
        self.reset()
        return gemm.event_ms([graph.replay], warm=3, repeats=repeats)


def one_kernel(step, rows):
    return step.joined(NEW[rows]) if rows <= 128 else step.calls(NEW[rows])


VARIANTS = {
    "as it is": lambda step, rows: step.calls(NEW[rows]),
    "layers in one kernel": one_kernel,
    "the same without shortlists": lambda step, rows: step.joined(NEW[rows], limit=0) if rows <= 128 else step.calls(NEW[rows]),
    "divisions before": lambda step, rows: step.calls(BEFORE[rows]),
    "weights packed": lambda step, rows: step.calls(NEW[rows], packed=True),
    "attention in sixteens": lambda step, rows: step.calls(NEW[rows], tokens=16),
    "attention in thirty-twos": lambda step, rows: step.calls(NEW[rows], tokens=32),
}


def name_of(kind, how):
    return f"{kind} {how}" if isinstance(how, int) else f"{kind} {how[0].__name__} {' '.join(map(str, how[1:]))}"


def tried(rows):
    """Every single change: the previous division, then the others."""
    before = {kind: [how] for kind, how in BEFORE[rows].items() if how != NEW[rows][kind]}
    for others in (before, TRIED[rows]):
        for kind, hows in others.items():
            for how in hows:
                yield name_of(kind, how), lambda step, k=kind, h=how: step.calls(NEW[rows] | {k: h})


def time_step(rows):
    step = Step(rows)
    weights = sum(w.numel() * 2 for layer in step.layers for kind in ("qkv", "o", "gate_up", "down") for w in layer[kind])
    data = weights + step.embedding.numel() * 2 + LAYERS * rows * TOKENS * 2 * KEYS * DIM * 2
    reached = {}

    def show(name, calls):
        ms = step.ms(calls)
        reached[name] = ms
        print(f"step {rows:4} rows  {name:40} {len(calls):4} kernels {ms:7.4f} ms {data / ms / 1e9:5.2f} TB/s "
              f"{data / ms / 1e9 / gemm.COPY_TBS * 100:4.0f} %  {(ms / reached['as it is'] - 1) * 100 if 'as it is' in reached else 0:+5.1f} %", flush=True)

    for name, make in VARIANTS.items():
        attempt(f"{rows} rows, {name}", lambda: show(name, make(step, rows)))

    def shares():
        calls = VARIANTS["as it is"](step, rows)
        for kind in KINDS:
            own = [c for c in calls if c[0] == kind]
            if not own:
                continue
            # Each at least 24 times, one after another, in an otherwise empty graph.
            single = step.ms(own * up(24, len(own)), repeats=9) / up(24, len(own)) / len(own)
            less = reached["as it is"] - step.ms([c for c in calls if c[0] != kind], repeats=9)
            print(f"step {rows:4} rows  {kind:9} {len(own):3} x {single * 1000:6.1f} us by itself = {single * len(own) * 1000:6.0f} us; "
                  f"a step minus one without: {less * 1000:6.0f} us", flush=True)

    attempt(f"{rows} rows, shares", shares)
    for name, make in () if QUICK else tried(rows):
        if time.time() - START < SECONDS:
            attempt(f"{rows} rows, {name}", lambda: show(name, make(step)))


PHASES = ("qkv", "attention", "out", "settle", "mlp", "down", "settle")


def profile(rows):
    """When the blocks of the layers' kernel end each phase, in us after the last block ended the phase before."""
    import torch

    step = Step(rows)
    calls = step.joined(NEW[rows], stamps=1)[:1]
    for _ in range(3):
        step.reset()
        calls[0][1]()
    torch.cuda.synchronize()
    stamps = step.stamps.view(SMS, -1)
    stamps = ((stamps - stamps.min()).double() / 1000).cpu()
    ends = stamps.max(0).values
    print(f"profile {rows} rows: {ends[-1]:.1f} us, {LAYERS} layers")
    for i, phase in enumerate(PHASES):
        took = stamps[:, 1 + i::7] - ends[i::7][:LAYERS]
        last, mean, first = (x.median().item() for x in (took.max(0).values, took.mean(0), took.min(0).values))
        print(f"profile {rows} rows: {phase:10} {last:6.2f} us to the last block, {mean:6.2f} on average, {first:6.2f} to the first")


def steps(rows):
    time_step(int(rows))


# ---- correctness ---------------------------------------------------------------------------------------------------


def double_product(x, weight, into):
    import torch

    y = x.double() @ torch.cat(weight).double().T
    if into == "swiglu":
        gate, upper = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * upper
    return y


def twice(name, make, expected, limit=6e-3):
    """`make` returns tensors; `expected` the float64 of each, or none."""
    import torch

    first, second = make(), make()
    torch.cuda.synchronize()
    for i, (a, b, want) in enumerate(zip(first, second, expected)):
        e = error(a, want)
        report(e <= limit and torch.equal(a, b), f"{name} [{i}] error {e:.1e} {'same bits' if torch.equal(a, b) else 'OTHER BITS'}")


def cases():
    """Name, how a product is divided, m, rows of the matrices, k, what is done with the result."""
    everything = []
    for rows in NEW:
        for m in {16: (1, 16), 64: (17, 64), 128: (65, 128), 256: (129, 256), 512: (300, 512)}[rows]:
            shapes = {"qkv": ([896, 128, 128], 896, "product"), "o": ([896], 896, "sum"), "gate_up": ([4864, 4864], 896, "swiglu"), "down": ([896], 4864, "sum")}
            for kind, (parts, k, into) in shapes.items():
                for how in [NEW[rows][kind], BEFORE[rows][kind]] + TRIED[rows].get(kind, []):
                    everything.append((kind, how, m, parts, k, into))
    for how in ((tile, 64, 32, 4, 4), (tile, 128, 64, 4, 1, 2), (deep, 128), (deep, 128, 4), (deep, 128, 8)):
        everything += [("ragged", how, 77, [904], 1032, "sum"), ("ragged", how, 200, [128, 256, 64], 904, "product")]
    for how in ((tile, 64, 64, 4), (tile, 128, 64, 4, 1, 2), (deep, 128), (deep, 192), (deep, 256)):
        everything += [("ragged", how, 77, [472, 472], 904, "swiglu"), ("ragged", how, 300, [136, 136], 72, "swiglu")]
    for how in ((skinny, 1, 4, 4), (skinny, 5, 4, 7), (skinny, 2, 4, 4, 1, 3, 396), (skinny, 1, 4, 4, 4, 4)):
        everything += [("ragged", how, 13, [144, 16, 48], 904, "product"), ("ragged", how, 3, [136, 136], 104, "swiglu")]
    return everything


def check_case(kind, how, m, parts, k, into):
    import torch

    bf16, device = torch.bfloat16, "meta" if COMPILING else "cuda"
    how, *rest = how
    n = sum(parts) // (1 + (into == "swiglu"))
    x, gain = torch.randn(m, k, device=device).to(bf16), torch.randn(k, device=device).to(bf16)
    weight = [(torch.randn(rows, k, device=device) / math.sqrt(k)).to(bf16) for rows in parts]
    old = torch.randn(m, n, device=device).to(bf16)
    name = f"{kind} {how.__name__} {rest} [{m}, {parts}, {k}] {into}"
    norm = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * gain.double()

    def nan(*shape, dtype=bf16):
        return torch.full(shape, float("nan"), device=device, dtype=dtype)

    def target():
        return old.clone() if into == "sum" else nan(m, n)

    def plain():
        y = target()
        how(Product(x, weight, y, into), *rest)
        return [y]

    base = old.double() if into == "sum" else 0.0
    if COMPILING:
        plain()
    else:
        twice(name, plain, [double_product(x, weight, into) + base])
    if how is skinny and into != "sum":
        def inside():
            y = target()
            how(Product(x, weight, y, into, normed=gain), *rest)
            return [y]

        inside() if COMPILING else twice(name + " normed", inside, [double_product(norm, weight, into)])


def check_step():
    """A whole step divided in each way: the same tokens' logits within bf16, the same bits where only places differ."""
    import torch

    for rows in NEW:
        device = "meta" if COMPILING else "cuda"
        step = Step(rows, layers=2, vocab=1024, device=device)

        def logits(make):
            step.reset()
            step.token.fill_(5)
            for _, call in make(step, rows):
                call()
            if not COMPILING:
                torch.cuda.synchronize()
            return step.logits.clone()

        caches = [[c.clone() for c in layer["cache"]] for layer in step.layers]
        results = {}
        for name, make in VARIANTS.items():
            for layer, kept in zip(step.layers, caches):
                for cache, old in zip(layer["cache"], kept):
                    cache.copy_(old)
            results[name] = logits(make)
        if COMPILING:
            continue
        base = results["as it is"]
        for name, found in results.items():
            e = error(found, base.double())
            same = torch.equal(found, base)
            report(e < 2e-2 and (same or name != "weights packed"), f"step {rows} rows, {name}: error {e:.1e}{' same bits' if same else ''}")


def reference(step):
    """x and logits of a step, and keys and values of its tokens: in float64, rounded to bf16 where the kernels round."""
    import torch

    def rounded(x):
        return x.to(torch.bfloat16).double()

    def norm(x, gain):
        return rounded(rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)) * gain.double())

    def turned(heads, cos, sin):
        a, b = heads[..., :DIM // 2], heads[..., DIM // 2:]
        return rounded(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    rows, caches = step.rows, []
    x = step.embedding[step.token.long()].double()
    at = step.positions.clamp(min=0).long()
    cos, sin = (t[at, DIM // 2:].double()[:, None] for t in (step.cos, step.sin))
    for layer in step.layers:
        joint = rounded(norm(x, step.gain[:WIDTH]) @ torch.cat(layer["qkv"]).double().T)
        joint = rounded(joint + layer["bias"].double()) if BIAS else joint
        q, k, v = joint.view(rows, -1, DIM).split([HEADS, KEYS, KEYS], 1)
        if HEAD_NORM:
            q, k = norm(q, step.gain[:DIM]), norm(k, step.gain[:DIM])
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        caches.append((k, v))
        mixed = torch.zeros(rows, HEADS, DIM, dtype=torch.float64, device=x.device)
        for row, tokens in enumerate(step.positions.tolist()):
            if tokens < 0:
                continue
            blocks = step.table[row * BLOCKS:(row + 1) * BLOCKS].long()
            keys, values = (torch.cat([cache[blocks].transpose(1, 2).reshape(-1, KEYS, DIM)[:tokens].double(), new[row][None]])
                            for cache, new in zip(layer["cache"], (k, v)))
            group = q[row].view(KEYS, -1, DIM)
            weights = torch.einsum("kgd,tkd->kgt", group, keys).mul(DIM ** -0.5).softmax(-1)
            mixed[row] = torch.einsum("kgt,tkd->kgd", weights, values).reshape(HEADS, DIM)
        x = rounded(x + rounded(mixed.view(rows, -1)) @ layer["o"][0].double().T)
        gate, upper = (norm(x, step.gain[:WIDTH]) @ torch.cat(layer["gate_up"]).double().T).chunk(2, -1)
        x = rounded(x + rounded(torch.nn.functional.silu(gate) * upper) @ layer["down"][0].double().T)
    return x, norm(x, step.gain[:WIDTH]) @ step.embedding.double().T, caches


def shortlist_of(step, row):
    length = int(step.shortlisted[row])
    return sorted((id, word % 2**32) for id, word in step.shortlist[row, :length].tolist())


def wanted_shortlist(step, row, vocab, limit):
    from rowwise import words_of

    if step.rows <= 32 or int(step.states[row]):
        return []
    words = words_of([int(x) % 2**32 for x in step.streams[row]], int(step.lengths[row]), vocab)
    return [(id, int(word)) for id, word in enumerate(words) if 2**32 - 1 - int(word) < limit]


def check_layers():
    """Steps whose layers are one kernel, twice each: of several models and numbers of rows, some rows not live. And the
    shortlists that it makes, of a vocabulary with half a group of ids more than whole groups."""
    import torch

    vocab = 1024 + 128
    limit = (48 << 32) // vocab

    before = (WIDTH, HEADS, KEYS, DIM, INNER, BIAS, HEAD_NORM, BLOCKS)
    device = "meta" if COMPILING else "cuda"
    for name, shape in MODELS.items():
        become(*shape)
        for rows in (1, 7, 16, 33, 128) if name != "0.5B" else (1, 7, 16, 17, 32, 33, 64, 100, 128):
            if name == "long" and rows > 33:
                continue
            step = Step(rows, layers=3, vocab=vocab, device=device)
            launched = step.joined(NEW[512], limit=limit)[0][1]
            if COMPILING:
                launched()
                continue
            step.positions.copy_(torch.randint(0, BLOCKS * 64 - 1, (rows,), device=device, dtype=torch.int32))
            step.positions[0] = 0 if rows > 1 else BLOCKS * 64 - 1
            if rows > 2:
                step.positions[2] = -1
            step.token.copy_(torch.arange(rows, device=device, dtype=torch.int32))
            step.lengths.copy_(torch.randint(0, 4096, (rows,), device=device, dtype=torch.int32))
            step.states[rows // 2:rows // 2 + rows // 7] = 1
            step.gain.copy_(1 + 0.1 * torch.randn(WIDTH, device=device))
            x, logits, new = reference(step)
            caches = [[c.clone() for c in layer["cache"]] for layer in step.layers]
            results = []
            for _ in range(2):
                for buffer in (step.x, step.normed, step.mixed, step.inner, step.pieces, step.parts):
                    buffer.fill_(float("nan"))
                step.shortlisted.zero_()
                for layer, kept in zip(step.layers, caches):
                    for cache, old in zip(layer["cache"], kept):
                        cache.copy_(old)
                launched()
                torch.cuda.synchronize()
                results.append([step.x.clone(), step.normed.double() @ step.embedding.double().T] + [c.clone() for layer in step.layers for c in layer["cache"]])
            live = (step.positions >= 0).nonzero().flatten()
            at = step.positions[live].long()
            place = step.table.view(rows, BLOCKS)[live, at // 64].long()
            errors = [error(results[0][0], x), error(results[0][1], logits)]
            others = True
            for found, kept, wanted in zip(results[0][2:], sum(caches, []), [t for pair in new for t in pair]):
                errors.append(error(found[place, :, at % 64], wanted[live]))
                rest = found.clone()
                rest[place, :, at % 64] = kept[place, :, at % 64]
                others &= torch.equal(rest, kept)
            same = all(torch.equal(a, b) for a, b in zip(*results))
            listed = all(shortlist_of(step, row) == wanted_shortlist(step, row, vocab, limit) for row in range(rows))
            report(max(errors) < 1.5e-2 and same and others and listed and int(step.counts.abs().sum()) == 0,
                   f"layers of {name}, {rows} rows: x {errors[0]:.1e}, logits {errors[1]:.1e}, caches {max(errors[2:]):.1e}{' same bits' if same else ' OTHER BITS'}"
                   f"{'' if others else ', OTHER TOKENS WRITTEN'}{'' if listed else ', OTHER SHORTLISTS'}")
    become(*before)


def check():
    for case in cases():
        attempt(str(case), lambda: check_case(*case))
    attempt("step", check_step)
    attempt("layers", check_layers)


# ---- the run -------------------------------------------------------------------------------------------------------


def gather(sections):
    """Every configuration that these sections launch."""
    global COMPILING
    COMPILING = True
    if "check" in sections:
        for case in cases():
            check_case(*case)
        check_step()
    if {"check", "layers"} & set(sections):
        check_layers()
    for rows in NEW:
        step = Step(rows, layers=2, vocab=1024, device="meta")
        if rows <= 128 and f"profile{rows}" in sections:
            step.joined(NEW[rows], stamps=1, layers=LAYERS)[0][1]()
        if f"step{rows}" not in sections:
            continue
        if rows <= 128:
            step.joined(NEW[rows], layers=LAYERS)[0][1]()
        for make in VARIANTS.values():
            for _, call in make(step, rows):
                call()
        for _, make in () if QUICK else tried(rows):
            for _, call in make(step):
                call()
    COMPILING = False


def section(name, cubins):
    global DRIVER
    import torch

    with open(cubins, "rb") as file:
        CODES.update(pickle.load(file))
    torch.manual_seed(int(time.time()))
    torch.zeros(1, device="cuda")
    DRIVER = Driver()
    print(f"-- {name} on {torch.cuda.get_device_name()}", flush=True)
    if name == "check":
        check()
    elif name.startswith("profile"):
        profile(int(name.removeprefix("profile")))
    elif name.startswith("layers"):
        check_layers()
    else:
        steps(name.removeprefix("step"))
    print(f"-- {name}: {len(gemm.FAILED)} wrong, {time.time() - START:.1f} s", flush=True)
    return 1 if gemm.FAILED else 0


def main():
    if sys.argv[1:2] == ["--section"]:
        return section(sys.argv[2], sys.argv[3])
    wanted = [word for word in sys.argv[1:] if word != "--quick"] or ["check", "step"]
    sections = [s for w in wanted for s in ([f"step{rows}" for rows in NEW] if w == "step" else [w]) if s != "compile"]
    gather(sections or ["check"] + [f"{kind}{rows}" for rows in NEW for kind in ("step", "profile")])
    jobs = sorted(JOBS)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        codes = dict(zip(jobs, pool.map(compile_job, jobs)))
    print(f"{len(jobs)} configurations compiled after {time.time() - START:.1f} s", flush=True)
    for job, (code, log) in codes.items():
        if code is None:
            report(False, f"{job} does not compile:\n{log[:1500]}")
    with tempfile.NamedTemporaryFile(suffix=".cubins") as file:
        file.write(pickle.dumps(codes))
        file.flush()
        # One process each, so that a kernel that never ends or a broken context affects only one section.
        for name in sections:
            try:
                if subprocess.run([sys.executable, __file__, "--section", name, file.name] + ["--quick"] * QUICK, timeout=90).returncode:
                    gemm.FAILED.append(name)
            except subprocess.TimeoutExpired:
                report(False, f"{name}: no end within 90 s")
    print(f"after {time.time() - START:.1f} s: {'wrong: ' + ', '.join(f[:80] for f in gemm.FAILED) if gemm.FAILED else 'all right'}")
    return 1 if gemm.FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
