#!/usr/bin/env python3
"""Checks and times the CUDA kernels of attention and rotary positions on a GPU.

Usage: scripts/kernels/attention.py [--quick]   (from the root of the repository; needs PyTorch with CUDA and NVRTC)

NVRTC compiles the sources as verl does, and the driver launches them. Results are compared with float64 references on
fresh random inputs: ragged lengths, outputs and unused inputs filled with NaN, two runs compared bit by bit. The exit code
is 0 if all checks passed.
"""

import ctypes
import functools
import glob
import math
import os
import struct
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F

QUICK = "--quick" in sys.argv
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SOURCES = os.path.join(ROOT, "verl-models", "kernels", "src", "cuda")
BANDWIDTH, RATE = 4.3e12, 790e12
BF16, F32 = torch.bfloat16, torch.float32
NAN = float("nan")
DEVICE = "cuda"


# Compiling and launching


def cuda_folders(name):
    """Folders called `name` in CUDA installations, both of the system and in Python packages."""
    packages = [f for p in sys.path for f in glob.glob(os.path.join(p, "nvidia", "*", name))]
    return [*glob.glob(f"/usr/local/cuda/{name}*"), *packages]


def load_nvrtc():
    for folder in cuda_folders("lib"):
        builtins = glob.glob(os.path.join(folder, "libnvrtc-builtins.so.13*"))
        if builtins and os.path.exists(os.path.join(folder, "libnvrtc.so.13")):
            ctypes.CDLL(builtins[0])
            return ctypes.CDLL(os.path.join(folder, "libnvrtc.so.13"))
    return ctypes.CDLL("libnvrtc.so.13")


def include_folder():
    for folder in cuda_folders("include"):
        if os.path.exists(os.path.join(folder, "cuda_bf16.h")):
            return folder
    raise RuntimeError("no folder with cuda_bf16.h")


@functools.cache
def nvrtc():
    return load_nvrtc()


@functools.cache
def driver():
    torch.zeros(1, device=DEVICE)
    return ctypes.CDLL("libcuda.so.1")


def call(function, *arguments):
    code = function(*arguments)
    if code:
        raise RuntimeError(f"{function.__name__} gave {code}")


def compile_source(file, defines):
    text = "".join(f"#define {k} {v}\n" for k, v in defines) + open(os.path.join(SOURCES, file)).read()
    program = ctypes.c_void_p()
    call(nvrtc().nvrtcCreateProgram, ctypes.byref(program), text.encode(), file.encode(), 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"-I" + include_folder().encode()]
    code = nvrtc().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if code:
        call(nvrtc().nvrtcGetProgramLogSize, program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call(nvrtc().nvrtcGetProgramLog, program, log)
        raise RuntimeError(f"{file} {defines}: {log.value.decode()[:2000]}")
    call(nvrtc().nvrtcGetCUBINSize, program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    call(nvrtc().nvrtcGetCUBIN, program, binary)
    return binary.raw


BINARIES = {}
FUNCTIONS = {}


def function(file, defines, name):
    key = (file, defines, name)
    if key not in FUNCTIONS:
        if (file, defines) not in BINARIES:
            BINARIES[file, defines] = compile_source(file, defines)
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        call(driver().cuModuleLoadData, ctypes.byref(module), BINARIES[file, defines])
        call(driver().cuModuleGetFunction, ctypes.byref(handle), module, name.encode())
        FUNCTIONS[key] = handle
    return FUNCTIONS[key]


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


# Programmatic serialization: a kernel may start before the previous one has ended.
EARLY = LaunchAttribute(6, 0, (ctypes.c_int * 16)(1))


class Kernel:
    """A kernel with its scalars' struct format; calling it launches it on PyTorch's stream."""

    early = False

    def __init__(self, file, defines, name, scalars):
        self.handle = function(file, defines, name)
        self.name, self.scalars = name, scalars

    def __call__(self, grid, block, tensors, *scalars):
        values = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        if self.scalars:
            packed = struct.pack(self.scalars, *scalars)
            values.append(ctypes.create_string_buffer(packed, len(packed)))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        sizes = (ctypes.c_uint * 7)(*(*grid, 1, 1)[:3], block, 1, 1, 0)
        stream = torch.cuda.current_stream().cuda_stream
        config = LaunchConfig(sizes, stream, ctypes.pointer(EARLY), int(self.early))
        call(driver().cuLaunchKernelEx, ctypes.byref(config), self.handle, pointers, None)


# Reports

ROWS, FAILED = [], []


def check(what, got, want, limit):
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    good = error <= limit
    print(f"{'ok  ' if good else 'FAIL'} {what}: {error:.2e} (limit {limit:.0e})", flush=True)
    if not good:
        FAILED.append(what)
        wrong = ((got - want).abs() > 20 * limit * want.abs().max()) | got.isnan()
        first = wrong.flatten().nonzero()[:5].flatten().tolist()
        print(f"     {wrong.sum().item()} of {wrong.numel()} far off, first at {first}")


def ensure(what, good):
    print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)
    if not good:
        FAILED.append(what)


def same_bits(a, b):
    kinds = {2: torch.int16, 4: torch.int32}
    return torch.equal(a.view(kinds[a.element_size()]), b.view(kinds[b.element_size()]))


def attempt(what, run, *arguments):
    try:
        run(*arguments)
        torch.cuda.synchronize()
    except Exception as error:  # one failure must not hide the others
        print(f"FAIL {what}: {type(error).__name__}: {error}", flush=True)
        FAILED.append(what)


def milliseconds(launches, repeats=15):
    """Median time of one of `launches`, a list of calls over different buffers, run in turn from a graph."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(launches))
    return sorted(times)[len(times) // 2]


def report(kernel, shape, ms, work=None, bytes_moved=None):
    speed, share = "", ""
    if work:
        speed, share = f"{work / ms / 1e9:.0f} TFLOP/s", f"{work / ms / 1e-3 / RATE:.0%}"
    if bytes_moved:
        speed, share = f"{bytes_moved / ms / 1e6:.0f} GB/s", f"{bytes_moved / ms / 1e-3 / BANDWIDTH:.0%}"
    ROWS.append((kernel, shape, f"{ms * 1000:.1f} us", speed, share))


# Models


class Heads:
    def __init__(self, query, key, dim, dtype):
        self.query, self.key, self.dim, self.dtype = query, key, dim, dtype
        element = "float" if dtype == F32 else "bf16"
        self.defines = (("ELEMENT", element), ("HEAD_DIM", dim), ("QUERY_HEADS", query), ("KEY_HEADS", key))
        self.scale = dim**-0.5

    def __str__(self):
        return f"{'f32' if self.dtype == F32 else 'bf16'} H{self.query} K{self.key} Dh{self.dim}"

    def random(self, *shape):
        return torch.randn(*shape, device=DEVICE).to(self.dtype)

    def empty(self, *shape, dtype=None):
        return torch.full(shape, NAN, device=DEVICE, dtype=dtype or self.dtype)


def ints(values):
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def dense(q, k, v, scale, window=0):
    """q [N, H, Dh], k, v [M, K, Dh]; the last queries and keys are at the same place. Returns output and lse [H, N]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    n, m = q.shape[0], k.shape[0]
    distance = torch.arange(m - n, m, device=DEVICE)[:, None] - torch.arange(m, device=DEVICE)[None]
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1)


# Training


class Training:
    """Buffers of one call over packed sequences; `spare` tokens at the end belong to no sequence."""

    def __init__(self, heads, lengths, window=0, splits=1, spare=0):
        self.heads, self.lengths, self.window, self.splits = heads, lengths, window, splits
        self.tokens = sum(lengths) + spare
        self.starts = ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])
        t, h, k, d = self.tokens, heads.query, heads.key, heads.dim
        self.q, self.d_out = heads.random(t, h * d), heads.random(t, h * d)
        self.k, self.v = heads.random(t, k * d), heads.random(t, k * d)
        if spare:
            for x in (self.q, self.d_out, self.k, self.v):
                x[-spare:] = NAN
        names = ["attention_forward", "attention_backward_q", "attention_backward_kv"]
        self.kernels = [Kernel("attention_train.cu", heads.defines, name, "dqqq") for name in names]
        self.poison()

    def poison(self):
        heads, t = self.heads, self.tokens
        query, key = heads.query * heads.dim, heads.key * heads.dim
        self.out, self.dq = heads.empty(t, query), heads.empty(t, query)
        self.lse, self.delta = (heads.empty(heads.query, t, dtype=F32) for _ in range(2))
        self.dk_parts, self.dv_parts = (heads.empty(self.splits, t, key, dtype=F32) for _ in range(2))

    def launch(self, index, *tensors):
        rows = -(-max(self.lengths) // 64)
        heads = self.heads.key * self.splits if index == 2 else self.heads.query
        grid = (heads, len(self.lengths), rows)
        self.kernels[index](grid, 128, tensors, self.heads.scale, self.tokens, self.window, self.splits)

    def forward(self):
        self.launch(0, self.q, self.k, self.v, self.starts, self.out, self.lse)

    def backward_q(self):
        self.launch(1, self.q, self.k, self.v, self.starts, self.out, self.d_out, self.lse, self.dq, self.delta)

    def backward_kv(self):
        self.launch(2, self.q, self.k, self.v, self.starts, self.d_out, self.lse, self.delta, self.dk_parts, self.dv_parts)

    def run(self):
        for step in (self.forward, self.backward_q, self.backward_kv):
            step()
        dk, dv = self.dk_parts.sum(0), self.dv_parts.sum(0)
        torch.cuda.synchronize()
        return [self.out, self.lse, self.dq, dk, dv]

    def reference(self):
        heads, results = self.heads, []
        for i, length in enumerate(self.lengths):
            first = int(self.starts[i])
            part = slice(first, first + length)
            q, k, v = (
                x[part].double().view(length, -1, heads.dim).requires_grad_() for x in (self.q, self.k, self.v)
            )
            out, lse = dense(q, k, v, heads.scale, self.window)
            out.backward(self.d_out[part].double().view(out.shape))
            flat = [x.detach().reshape(length, -1) for x in (out, lse.T, q.grad, k.grad, v.grad)]
            results.append(flat)
        return [torch.cat(parts) for parts in zip(*results)]


def check_training(heads, lengths, window=0, splits=1):
    name = f"{heads} lengths {lengths if len(lengths) < 6 else str(len(lengths)) + ' mixed'} window {window} splits {splits}"
    case = Training(heads, lengths, window, splits, spare=37)
    first = case.run()
    case.poison()
    second = case.run()
    ensure(f"same bits twice, {name}", all(same_bits(a, b) for a, b in zip(first, second)))
    live = sum(lengths)
    loose = heads.dtype != F32
    limits = [3e-3, 1e-6, 5e-3, 5e-3, 4e-3] if loose else [1e-6, 1e-6, 2e-6, 2e-6, 2e-6]
    for what, got, want, limit in zip(["out", "lse", "dq", "dk", "dv"], second, case.reference(), limits):
        got = got.T[:live] if what == "lse" else got[:live]
        check(f"{what}, {name}", got, want, limit)
    untouched = all(second[i][live:].isnan().all() for i in (0, 2))
    ensure(f"tokens of no sequence untouched, {name}", untouched)


def pairs_of(lengths):
    return sum(n * (n + 1) / 2 for n in lengths)


def time_training(heads, lengths, name):
    sets = 6
    work = 4 * heads.dim * heads.query * pairs_of(lengths)
    group = heads.query // heads.key
    cases = [Training(heads, lengths) for _ in range(sets)]
    report("attention_forward", name, milliseconds([c.forward for c in cases]), work)
    q_ms = milliseconds([c.backward_q for c in cases])
    report("attention_backward_q", name, q_ms, 1.5 * work)
    best = math.inf
    for splits in [n for n in (1, 2, 3, 4, 7) if n <= group]:
        for case in cases:
            case.splits = splits
            case.poison()
            case.forward()
            case.backward_q()
        ms = milliseconds([c.backward_kv for c in cases])
        report(f"attention_backward_kv, splits {splits}", name, ms, 2 * work)
        best = min(best, ms)
    report("attention backward, all (5 products counted)", name, q_ms + best, 2.5 * work)
    attempt("torch", time_torch_training, heads, lengths, name, cases, work)


def time_torch_training(heads, lengths, name, cases, work):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ops = torch.ops.aten
    starts, longest = cases[0].starts, max(lengths)
    packed = [[x.view(c.tokens, -1, heads.dim) for x in (c.q, c.k, c.v, c.d_out)] for c in cases]

    def flash(q, k, v):
        return ops._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=heads.scale)

    def flash_backward(saved, q, k, v, d_out):
        out, lse, seed, offset, _ = saved
        return ops._flash_attention_backward(
            d_out, q, k, v, out, lse, starts, starts, longest, longest, 0.0, True, seed, offset, scale=heads.scale
        )

    def timed(what, launches, factor):
        report(what, name, milliseconds(launches), factor * work)

    def varlen():
        timed("torch flash, packed", [lambda s=s: flash(*s[:3]) for s in packed], 1)
        saved = [flash(*s[:3]) for s in packed]
        timed("torch flash backward, packed", [lambda s=s, r=r: flash_backward(r, *s) for s, r in zip(packed, saved)], 2.5)

    attempt("torch flash, packed", varlen)
    if len(set(lengths)) > 1:
        return
    b, s = len(lengths), lengths[0]
    batches = [[x.view(b, s, -1, heads.dim).transpose(1, 2) for x in (c.q, c.k, c.v, c.d_out)] for c in cases]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def padded():
            with sdpa_kernel(backend):
                attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                timed(f"torch SDPA {backend.name}", [lambda x=x: attend(*x[:3]) for x in batches], 1)

                def both(x):
                    leaves = [y.detach().requires_grad_() for y in x[:3]]
                    torch.autograd.grad(attend(*leaves), leaves, x[3])

                timed(f"torch SDPA {backend.name}, forward and backward", [lambda x=x: both(x) for x in batches], 3.5)

        attempt(f"torch SDPA {backend.name}", padded)


# Rotary positions


def tables(count, dim):
    angles = torch.arange(count, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).float().to(DEVICE), torch.cat([-sin, sin], 1).float().to(DEVICE)


def turn(x, cos, sin):
    """x [N, heads, Dh]; cos, sin [N, Dh]."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([high, low], -1) * sin[:, None]


class Rope:
    def __init__(self, heads, tokens, splits=1):
        h, k, d = heads.query, heads.key, heads.dim
        self.heads, self.tokens, self.splits = heads, tokens, splits
        self.cos, self.sin = tables(4096, d)
        self.positions = torch.randint(0, 4096, (tokens,), device=DEVICE, dtype=torch.int32)
        self.qkv, self.dq = heads.random(tokens, (h + 2 * k) * d), heads.random(tokens, h * d)
        self.dk_parts, self.dv_parts = (torch.randn(splits, tokens, k * d, device=DEVICE) for _ in range(2))
        self.q, self.k, self.v = heads.empty(tokens, h * d), heads.empty(tokens, k * d), heads.empty(tokens, k * d)
        self.d_qkv = heads.empty(tokens, (h + 2 * k) * d)
        wide = 4 if heads.dtype == F32 else 8
        pieces = d // 2 // wide if d // 2 % wide == 0 else d // 2
        self.grid = (-(-tokens * 4 * pieces // 256),)
        self.split_kernel, self.backward_kernel = (
            Kernel("rope.cu", heads.defines, name, "qq") for name in ("rope_split", "rope_backward")
        )

    def split(self):
        tensors = (self.qkv, self.positions, self.cos, self.sin, self.q, self.k, self.v)
        self.split_kernel(self.grid, 256, tensors, self.tokens, self.splits)

    def backward(self):
        tensors = (self.dq, self.dk_parts, self.dv_parts, self.positions, self.cos, self.sin, self.d_qkv)
        self.backward_kernel(self.grid, 256, tensors, self.tokens, self.splits)


def check_rope(heads, tokens, splits):
    case = Rope(heads, tokens, splits)
    case.split()
    case.backward()
    h, k, d = heads.query, heads.key, heads.dim
    cos, sin = (t[case.positions.long()].double() for t in (case.cos, case.sin))
    x = case.qkv.double().view(tokens, h + 2 * k, d).requires_grad_()
    q, key, v = x.split([h, k, k], 1)
    parts = [turn(q, cos, sin), turn(key, cos, sin), v]
    gradients = [case.dq.double(), case.dk_parts.double().sum(0), case.dv_parts.double().sum(0)]
    torch.autograd.backward(parts, [g.view(p.shape) for g, p in zip(gradients, parts)])
    limit = 5e-3 if heads.dtype == BF16 else 1e-6
    name = f"{heads} {tokens} tokens splits {splits}"
    for what, got, want in zip(["q", "k", "v", "d_qkv"], [case.q, case.k, case.v, case.d_qkv], [*parts, x.grad]):
        check(f"rope {what}, {name}", got, want.detach().reshape(got.shape), limit)


def time_rope(heads, tokens):
    name = f"{heads} {tokens} tokens"
    cases = [Rope(heads, tokens) for _ in range(8)]
    size = cases[0].qkv.numel() * 2
    report("rope_split", name, milliseconds([c.split for c in cases]), bytes_moved=2 * size)
    moved = size + cases[0].dq.numel() * 2 + cases[0].dk_parts.numel() * 8
    report("rope_backward", name, milliseconds([c.backward for c in cases]), bytes_moved=moved)

    def composed(c):
        q, k, v = c.qkv.view(tokens, -1, heads.dim).split([heads.query, heads.key, heads.key], 1)
        cos, sin = c.cos[c.positions].to(c.qkv.dtype), c.sin[c.positions].to(c.qkv.dtype)
        return turn(q, cos, sin), turn(k, cos, sin), v.contiguous()

    ms = milliseconds([lambda c=c: composed(c) for c in cases])
    report("torch, composed (of rope_split)", name, ms, bytes_moved=2 * size)


# Decoding


def decode_defines(heads, bias=False, norm=False, cluster=1, early=False):
    extra = (("QKV_BIAS", bias), ("QK_NORM", norm), ("CLUSTER", cluster), ("CACHE_EARLY", early))
    return heads.defines + tuple((name, int(value)) for name, value in extra)


class Decoding:
    """A cache with a shuffled table; it contains `lengths` tokens per row, everything else is NaN."""

    def __init__(self, heads, lengths, cluster, capacity, bias=False, norm=False, fresh=True, early=False):
        self.heads, self.lengths, self.cluster = heads, lengths, cluster
        rows, h, k, d = len(lengths), heads.query, heads.key, heads.dim
        self.rows, self.max_blocks = rows, -(-capacity // 64)
        blocks = rows * self.max_blocks
        order = torch.randperm(blocks, device=DEVICE).int().view(rows, self.max_blocks)
        self.cache = [heads.empty(blocks, k, 64, d) for _ in range(2)]
        self.table = order
        self.filled = None
        if fresh:
            self.filled = [[heads.random(max(n, 0), k, d) for n in lengths] for _ in range(2)]
            for cache, filled in zip(self.cache, self.filled):
                for row, tokens in enumerate(filled):
                    at = torch.arange(len(tokens), device=DEVICE)
                    cache[order[row].long()[at // 64], :, at % 64] = tokens
            # Entries that no token of a row needs are invalid.
            used = torch.tensor([[n // 64 + 1 if n >= 0 else 0] for n in lengths], device=DEVICE)
            places = torch.arange(self.max_blocks, device=DEVICE)[None]
            self.table = torch.where(places < used, order, torch.full_like(order, 1 << 30))
        else:
            for cache in self.cache:
                cache.normal_()
        self.length_buffer = ints(lengths)
        self.qkv = heads.random(rows, (h + 2 * k) * d)
        self.bias, self.q_norm, self.k_norm = heads.random((h + 2 * k) * d), heads.random(d), heads.random(d)
        self.bias_used, self.norm_used = bias, norm
        self.cos, self.sin = tables(capacity + 1, d)
        plain = heads.dtype == F32 or d % 16 or d > 128
        tile_heads = min(h // k, 8 if plain else 16)
        self.head_tiles = -(-(h // k) // tile_heads)
        defines = decode_defines(heads, bias, norm, cluster, early)
        self.step_kernel = Kernel("attention_decode.cu", defines, "attention_decode_step", "ddq")
        self.step_kernel.early = early
        self.poison()

    def poison(self):
        self.out = self.heads.empty(self.rows, self.heads.query * self.heads.dim)

    def step(self):
        grid = (self.heads.key * self.head_tiles, self.rows, self.cluster)
        projection = (self.qkv, self.bias, self.q_norm, self.k_norm, self.cos, self.sin)
        tensors = (*projection, *self.cache, self.table, self.length_buffer, self.out)
        self.step_kernel(grid, 128, tensors, self.heads.scale, 1e-6, self.max_blocks)

    def projected(self, row):
        """Rotated query and key and the value of a row's new token."""
        heads = self.heads
        x = self.qkv[row].double()
        if self.bias_used:
            x = (x + self.bias.double()).to(heads.dtype).double()
        x = x.view(1, -1, heads.dim)
        q, k, v = x.split([heads.query, heads.key, heads.key], 1)
        if self.norm_used:
            norm = lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
            q, k = norm(q, self.q_norm), norm(k, self.k_norm)
        position = self.lengths[row]
        cos, sin = (t[position : position + 1].double() for t in (self.cos, self.sin))
        return turn(q, cos, sin), turn(k, cos, sin), v


def check_full(heads):
    """A row whose table has no room for the new token stays unchanged; its neighbour does not."""
    case = Decoding(heads, [128, 127], 2, 128, fresh=False)
    before = [cache.clone() for cache in case.cache]
    case.step()
    last = case.table[1, 1].item()
    for cache, old in zip(case.cache, before):
        old[last, :, 63] = cache[last, :, 63]
    ensure("step: a full row changes nothing", all(same_bits(a, b) for a, b in zip(case.cache, before)))
    ensure("step: a full row gives zeros", bool((case.out[0] == 0).all() and (case.out[1] != 0).any()))


def check_step(heads, lengths, cluster, capacity, bias, norm, early=False):
    name = f"{heads} rows {len(lengths)} cluster {cluster} bias {bias} norm {norm}" + (" early" if early else "")
    case = Decoding(heads, lengths, cluster, capacity, bias, norm, early=early)
    before = [cache.clone() for cache in case.cache]
    case.step()
    first = case.out.clone()
    case.poison()
    case.step()
    ensure(f"step: same bits twice, {name}", same_bits(first, case.out))
    want = torch.zeros(case.rows, heads.query * heads.dim, device=DEVICE, dtype=torch.float64)
    appended, appended_want = [], []
    for row, length in enumerate(lengths):
        if length < 0:
            continue
        q, k, v = case.projected(row)
        keys, values = (torch.cat([f[row].double(), x]) for f, x in zip(case.filled, (k, v)))
        want[row] = dense(q, keys, values, heads.scale)[0].flatten()
        block, place = int(case.table[row, length // 64]), length % 64
        for cache, old, new in zip(case.cache, before, (k, v)):
            appended.append(cache[block, :, place].flatten())
            appended_want.append(new.flatten())
            old[block, :, place] = cache[block, :, place]
    low = heads.dtype == BF16
    check(f"step, {name}", case.out, want, 8e-3 if low else 5e-6)
    check(f"step: appended, {name}", torch.cat(appended), torch.cat(appended_want), 6e-3 if low else 2e-6)
    untouched = all(same_bits(cache, old) for cache, old in zip(case.cache, before))
    ensure(f"step: nothing else of the cache changed, {name}", untouched)
    dead = [row for row, n in enumerate(lengths) if n < 0]
    ensure(f"step: rows that are not live are zeros, {name}", bool((case.out[dead] == 0).all()))
    # A single row has the same bits.
    row = max(range(len(lengths)), key=lambda i: lengths[i])
    case.rows = 1
    for buffer in ("qkv", "table", "length_buffer"):
        setattr(case, buffer, getattr(case, buffer)[row : row + 1].clone())
    case.poison()
    case.step()
    ensure(f"step: a single row has the same bits, {name}", same_bits(case.out[0], first[row]))


def check_store(heads):
    tokens, blocks, k, d = 301, 9, heads.key, heads.dim
    keys, values = heads.random(tokens, k * d), heads.random(tokens, k * d)
    slots = torch.randperm(blocks * 64, device=DEVICE)[:tokens].int()
    slots[::7] = -1
    cache = [heads.empty(blocks, k, 64, d) for _ in range(2)]
    want = [c.clone() for c in cache]
    wide = 4 if heads.dtype == F32 else 8
    chunk = wide if d % wide == 0 else 1
    store = Kernel("attention_decode.cu", heads.defines, "kv_store", "q")
    store((-(-tokens * k * d // (256 * chunk)),), 256, (keys, values, slots, *cache), tokens)
    kept = (slots >= 0).nonzero().flatten()
    at = slots[kept].long()
    for c, x in zip(want, (keys, values)):
        c[at // 64, :, at % 64] = x[kept].view(-1, k, d)
    ensure(f"kv_store, {heads}", all(same_bits(a, b) for a, b in zip(cache, want)))
    pairs = ints([[0, 5], [-1, 6], [3, 8], [2, -1]])
    Kernel("attention_decode.cu", heads.defines, "kv_copy_blocks", "")((4, 2), 256, (pairs, *cache))
    for c in want:
        c[5], c[8] = c[0].clone(), c[3].clone()
    ensure(f"kv_copy_blocks, {heads}", all(same_bits(a, b) for a, b in zip(cache, want)))


def time_decode(heads, rows, length, capacity, clusters):
    name = f"{heads} {rows} rows x {length} of {capacity}"
    moved = rows * length * heads.key * heads.dim * 2 * 2
    sets = max(2, min(24, int(4e8 / moved)))
    for cluster in clusters:
        for early in (False, True):
            cases = [
                Decoding(heads, [length] * rows, cluster, capacity, bias=True, fresh=False, early=early)
                for _ in range(sets)
            ]
            suffix = ", early" if early else ""
            ms = milliseconds([c.step for c in cases])
            report(f"attention_decode_step, cluster {cluster}{suffix}", name, ms, bytes_moved=moved)
            if not early:
                # The cost of a launch without any tokens.
                for case in cases:
                    case.length_buffer.fill_(1)
                ms = milliseconds([c.step for c in cases])
                report(f"attention_decode_step, cluster {cluster}, one token", name, ms)
            del cases
    buffers = [torch.empty(2, moved // 4, device=DEVICE, dtype=BF16).normal_() for _ in range(sets)]
    ms = milliseconds([lambda b=b: b[0].copy_(b[1]) for b in buffers])
    report("torch copy of as many bytes", name, ms, bytes_moved=moved)
    if length > 2048:
        return

    def torch_decode():
        parts = ((heads.query, 1), (heads.key, length), (heads.key, length))
        sets_of = [[heads.random(rows, n, t, heads.dim) for n, t in parts] for _ in range(sets)]
        ms = milliseconds([lambda x=x: F.scaled_dot_product_attention(*x, enable_gqa=True) for x in sets_of])
        report("torch SDPA, contiguous cache, no append", name, ms, bytes_moved=moved)

    attempt("torch decode", torch_decode)


def main():
    began = time.time()
    torch.manual_seed(int(time.time()))
    torch.backends.cuda.matmul.allow_tf32 = False
    qwen, plain = Heads(14, 2, 64, BF16), Heads(14, 2, 64, F32)
    others = [Heads(*sizes, BF16) for sizes in ((8, 2, 128), (4, 4, 32), (6, 1, 96), (4, 2, 16), (8, 4, 8))]
    floats = [Heads(8, 4, 8, F32), Heads(4, 1, 128, F32), Heads(2, 1, 100, F32), Heads(2, 2, 256, F32)]
    every = [qwen, plain, *others, *floats]
    wide_group = Heads(40, 2, 64, BF16)
    wanted = [(file, h.defines) for h in every for file in ("attention_train.cu", "rope.cu", "attention_decode.cu")]
    wanted.append(("attention_train.cu", Heads(32, 8, 128, BF16).defines))
    options = [(0, 0, 1), (0, 0, 2), (1, 0, 2), (0, 1, 4)]
    wanted += [("attention_decode.cu", decode_defines(h, *option)) for h in [*every, wide_group] for option in options]
    wanted += [("attention_decode.cu", decode_defines(qwen, 1, 0, c, early)) for c in (1, 2, 4, 8) for early in (0, 1)]
    wanted += [("attention_decode.cu", decode_defines(qwen, 0, 0, 8))]

    # Separate processes, started before this one uses the device.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for key, job in [(key, pool.submit(compile_source, *key)) for key in wanted]:
            try:
                BINARIES[key] = job.result()
            except Exception as error:  # the others are still worth checking
                print(f"FAIL compile {key}: {error}")
                FAILED.append(f"compile {key}")
    print(f"{len(BINARIES)} sources compiled, {time.time() - began:.1f} s", flush=True)

    mixed = [2048, 32, 777, 1500, 64, 1024, 333, 1281, 96, 900, 137]
    attempt("training", check_training, qwen, [64])
    attempt("training", check_training, qwen, [1, 63, 128, 129, 300], 0, 4)
    attempt("training", check_training, qwen, mixed, 0, 7)
    attempt("training", check_training, qwen, [1, 65, 128, 300, 513], 0, 2)
    attempt("training", check_training, qwen, [500, 77, 260], 2, 1)
    attempt("training", check_training, qwen, [500, 77, 260], 100, 3)
    attempt("training", check_training, plain, [1, 63, 128, 129, 300], 0, 4)
    attempt("training", check_training, plain, [200, 77], 50, 1)
    for heads in [*others, *floats]:
        attempt("training", check_training, heads, [1, 33, 100, 257], 0, heads.query // heads.key)
        attempt("training", check_training, heads, [150, 200], 70, 1)
    for heads in every:
        attempt("rope", check_rope, heads, 333, 3)
        attempt("store", check_store, heads)
    ragged = [0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 640, 1000, -1]
    for heads in [*every, wide_group]:
        attempt("step", check_step, heads, ragged, 1, 1024, False, False)
        for bias, norm in ((False, False), (True, False), (False, True)):
            attempt("step", check_step, heads, ragged, 4 if norm else 2, 1024, bias, norm)
    for cluster in (1, 8):
        attempt("step", check_step, qwen, [8192, 5, 8191, 4097, 0], cluster, 8256, True, False)
        attempt("step", check_step, qwen, ragged, cluster, 1024, True, False, True)
    attempt("full", check_full, qwen)
    print(f"checks done, {time.time() - began:.1f} s", flush=True)

    attempt("time", time_decode, qwen, 128, 384, 448, [1, 2, 4])
    attempt("time", time_decode, qwen, 128, 384, 1024, [1])
    attempt("time", time_decode, qwen, 16, 384, 1024, [1, 2, 4, 8])
    if not QUICK:
        attempt("time", time_decode, qwen, 64, 384, 1024, [1, 2, 4])
        attempt("time", time_decode, qwen, 16, 8192, 8256, [2, 4, 8])
        attempt("time", time_decode, qwen, 512, 1024, 1088, [1, 2])
    attempt("time", time_rope, qwen, 8192)
    attempt("time", time_training, qwen, [1024] * 8, "8 x 1024")
    attempt("time", time_training, qwen, mixed, "8192 packed, 32 to 2048")
    if not QUICK:
        attempt("time", time_training, Heads(32, 8, 128, BF16), [2048] * 4, "H32 K8 Dh128, 4 x 2048")

    print()
    widths = [max(len(row[i]) for row in ROWS) for i in range(5)] if ROWS else []
    for row in ROWS:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    print(f"{time.time() - began:.1f} s; {len(FAILED)} failures" + "".join(f"\n  {f}" for f in FAILED))
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
