#!/usr/bin/env python3
"""Checks and times the row-wise CUDA kernels: norm, mlp, vocab, embed, columns, update, race, sample, advance.

Every kernel is compiled with NVRTC as verl does and compared with float64 (drawn ids: with the CPU's rules, one by one) on
random inputs of ragged shapes, into outputs filled with NaN, twice, bit for bit. Then it is timed against the PyTorch
operations that do the same.

    python3 scripts/kernels/rowwise.py [--only norm,vocab] [--no-times]

Exit code 0: all checks passed.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import os
import struct
import sys
import time
import traceback

import numpy as np
import torch
import torch.nn.functional as F

DEVICE = "cuda"
SOURCES = os.path.join(os.path.dirname(__file__), "../../verl-models/kernels/src/cuda")
PRELUDES = {kernel: ["philox", "draw"] for kernel in ("race", "sample", "advance")}
ELEMENTS = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}
DTYPES = [torch.float32, torch.bfloat16]
# Largest ‖out − ref‖ / ‖ref‖ due to rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
COPY_GB_S = 4300.0


# ------------------------------------------------------------------------------------------------ compile and launch


def library(name, patterns):
    """A shared library that is already loaded, or found in the usual places."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        pass
    roots = [p for p in sys.path if p.endswith("site-packages")] + ["/usr/local/cuda"]
    for root in roots:
        for pattern in patterns:
            for path in sorted(glob.glob(os.path.join(root, pattern))):
                return ctypes.CDLL(path)
    raise OSError(f"{name} was not found")


def include_folder():
    roots = [os.environ.get("CUDA_PATH", "/usr/local/cuda")]
    roots += [os.path.join(p, "nvidia/cu13") for p in sys.path]
    for root in roots:
        if os.path.exists(os.path.join(root, "include/cuda_bf16.h")):
            return os.path.join(root, "include")
    raise OSError("cuda_bf16.h was not found; set CUDA_PATH")


def source_of(file, dtype, defines):
    texts = [f"#define ELEMENT {ELEMENTS[dtype]}\n"]
    texts += [f"#define {name} {value}\n" for name, value in defines]
    for name in ["rowwise"] + PRELUDES.get(file, []):
        texts.append(open(os.path.join(SOURCES, name + ".cuh")).read())
    texts.append(open(os.path.join(SOURCES, file + ".cu")).read())
    return "".join(texts)


class Module:
    """One source, compiled and loaded."""

    nvrtc = None
    cuda = None

    @classmethod
    def start(cls):
        torch.zeros(1, device=DEVICE)
        cls.nvrtc = library("libnvrtc.so.13", ["nvidia/cu13/lib/libnvrtc.so.13", "lib64/libnvrtc.so.13"])
        cls.cuda = ctypes.CDLL("libcuda.so.1")
        cls.include = include_folder()

    @classmethod
    def compile(cls, text):
        rtc = cls.nvrtc
        program = ctypes.c_void_p()
        code = rtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        assert code == 0, f"nvrtcCreateProgram gave {code}"
        options = [b"--gpu-architecture=sm_90a", b"-I" + cls.include.encode()]
        code = rtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        if code != 0:
            rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            rtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.value.decode())
        rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetCUBIN(program, binary)
        rtc.nvrtcDestroyProgram(ctypes.byref(program))
        return binary

    def __init__(self, binary):
        self.module = ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(self.module), binary), "cuModuleLoadData")
        self.functions = {}

    @staticmethod
    def check(code, what):
        if code != 0:
            raise RuntimeError(f"{what} gave CUDA error {code}")

    def function(self, name):
        if name not in self.functions:
            function = ctypes.c_void_p()
            self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()), name)
            self.functions[name] = function
        return self.functions[name]

    def attribute(self, name, which):
        value = ctypes.c_int()
        self.check(self.cuda.cuFuncGetAttribute(ctypes.byref(value), which, self.function(name)), name)
        return value.value

    def run(self, name, grid, block, pointers, scalars):
        values = [ctypes.c_uint64(p) for p in pointers]
        if scalars:
            values.append(ctypes.create_string_buffer(scalars, len(scalars)))
        parameters = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self.cuda.cuLaunchKernel(self.function(name), *grid, block, 1, 1, 0, stream, parameters, None)
        self.check(code, f"launch of {name}")


MODULES = {}
BINARIES = {}


def key_of(file, dtype, **defines):
    return (file, dtype, tuple(sorted(defines.items())))


def module(file, dtype, **defines):
    key = key_of(file, dtype, **defines)
    if key not in MODULES:
        binary = BINARIES.get(key) or Module.compile(source_of(*key))
        if isinstance(binary, concurrent.futures.Future):
            binary = binary.result()
        MODULES[key] = Module(binary)
    return MODULES[key]


def launch(mod, name, grid, block, buffers, *scalars):
    """Buffers in order, then scalars as 8-byte fields: integers or doubles."""
    grid = (grid, 1, 1) if isinstance(grid, int) else (tuple(grid) + (1, 1))[:3]
    for buffer in buffers:
        assert buffer.is_contiguous()
    data = b"".join(struct.pack("d" if isinstance(s, float) else "q", s) for s in scalars)
    mod.run(name, grid, block, [b.data_ptr() for b in buffers], data)


# ------------------------------------------------------------------------------------------------ checks and times

FAILED = []
ROWS = []
GENERATOR = torch.Generator()


def report(name, right, detail=""):
    print(f"{'ok  ' if right else 'FAIL'} {name:58s} {detail}", flush=True)
    if not right:
        FAILED.append(name)


def error(out, ref):
    out, ref = out.double(), ref.double()
    scale = ref.norm().item()
    return (out - ref).norm().item() / (scale if scale > 0 else 1.0)


def close(name, pairs, tolerance):
    """pairs: {what: (out, ref)}."""
    errors = {what: error(out, ref) for what, (out, ref) in pairs.items()}
    right = all(e <= tolerance for e in errors.values())
    report(name, right, "  ".join(f"{what} {e:.1e}" for what, e in errors.items()))


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=GENERATOR) * scale).to(dtype).to(DEVICE)


def uniform_ids(high, *shape):
    return torch.randint(0, high, shape, generator=GENERATOR, dtype=torch.int32).to(DEVICE)


def poison(*shape, dtype=torch.float32):
    value = float("nan") if dtype.is_floating_point else -7
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def twice(run):
    """Runs twice; returns the results of the first run, and whether the second has the same bits."""
    first = run()
    second = run()
    sync()
    return first, all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second))


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(run, repeats=30):
    """Median of events around each call; `run(i)` gets the number of the call, to alternate between input sets."""
    for i in range(5):
        run(i)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in events]))


def captured(run, sets):
    """A graph of one call for each input set, for kernels shorter than a launch; its replay as a `run`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(sets):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(sets):
            run(i)
    return lambda _: graph.replay()


def timed(name, shape, moved, run, other=None, graph=0):
    """`moved`: bytes. `graph`: input sets of a captured graph, 0 for plain launches."""
    try:
        def measure(call):
            if graph:
                return milliseconds(captured(call, graph)) / graph
            return milliseconds(call)

        ours = measure(run)
        again = measure(run)
        torch_ms = None
        if other is not None:
            try:
                torch_ms = measure(other)
            except Exception as exception:
                print(f"     torch for {name}: {exception}")
        ROWS.append((name, shape, min(ours, again), abs(ours - again), moved, torch_ms))
    except Exception:
        traceback.print_exc()
        FAILED.append(f"time of {name}")


def table():
    print(f"\n{'kernel':28s} {'shape':26s} {'ms':>8s} {'spread':>7s} {'GB/s':>6s} {'of 4300':>7s} {'torch ms':>8s}")
    for name, shape, ms, spread, moved, torch_ms in ROWS:
        rate = moved / ms / 1e6
        other = f"{torch_ms:8.4f}" if torch_ms is not None else ""
        print(f"{name:28s} {shape:26s} {ms:8.4f} {spread:7.4f} {rate:6.0f} {rate / COPY_GB_S:7.0%} {other}")


def ceil_div(a, b):
    return -(-a // b)


def short(dtype):
    return "f32 " if dtype == torch.float32 else "bf16"


# ------------------------------------------------------------------------------------------------------------- norm

EPSILON = 1e-6
NORM_WIDTHS = [(896, [1, 37, 2500]), (8, [5]), (37, [3, 70]), (100, [33]), (128, [9]), (4096, [6])]


def norm_rows(width, dtype):
    """Rows of a block: 256 threads over the lanes of a row, as norm.cu chooses them."""
    vec = 16 // dtype.itemsize
    pieces = width // vec if width % vec == 0 else width
    lanes = 1
    while lanes < 32 and lanes < pieces:
        lanes *= 2
    while lanes < 256 and lanes * 32 < width:
        lanes *= 2
    return 256 // lanes


def norm_forward(mod, x, weight):
    rows, width = x.shape
    grid = ceil_div(rows, norm_rows(width, x.dtype))
    y, rstd = poison(rows, width, dtype=x.dtype), poison(rows)
    launch(mod, "rms_norm", grid, 256, [x, weight, y, rstd], rows, EPSILON)
    return y, rstd


def norm_backward(mod, h, weight, rstd, g, past, dw):
    rows, width = h.shape
    blocks = min(ceil_div(rows, norm_rows(width, h.dtype)), 264)
    dh, partial = poison(rows, width, dtype=h.dtype), poison(blocks, width)
    if past is None:
        launch(mod, "rms_norm_backward", blocks, 256, [h, weight, rstd, g, dh, partial], rows, EPSILON)
    else:
        launch(mod, "rms_norm_backward_add", blocks, 256, [h, weight, rstd, g, past, dh, partial], rows, EPSILON)
    adds = 0 if bool(torch.isnan(dw).any()) else 1
    dw = dw.clone()
    launch(mod, "rms_norm_weight_gradient", ceil_div(width, 32), 1024, [partial, dw], blocks, adds)
    return dh, dw


def check_norm():
    for dtype in DTYPES:
        for width, row_counts in NORM_WIDTHS:
            mod = module("norm", dtype, WIDTH=width)
            for rows in row_counts:
                name = f"norm {short(dtype)} [{rows}, {width}]"
                x = randn(rows, width, dtype=dtype)
                weight = (1 + 0.3 * randn(width)).to(dtype)
                tolerance = TOLERANCE[dtype]
                (y, rstd), same = twice(lambda: norm_forward(mod, x, weight))
                scale = 1 / (x.double().pow(2).mean(1) + EPSILON).sqrt()
                plain = (x.double() * scale[:, None]).to(dtype).double() * weight.double()
                close(name + " rms_norm", {"y": (y, plain), "rstd": (rstd, scale)}, tolerance)

                g, past = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
                q = g.double() * weight.double()
                pull = (q * x.double()).mean(1, keepdim=True)
                s = scale[:, None]
                dh_ref = s * q - x.double() * s**3 * pull
                dw_ref = (g.double() * x.double() * s).sum(0)
                fresh, old = poison(width), randn(width)
                (dh, dw), same_back = twice(lambda: norm_backward(mod, x, weight, rstd, g, None, fresh))
                close(name + " backward", {"dh": (dh, dh_ref), "dw": (dw, dw_ref)}, tolerance)
                (dh, dw), same_both = twice(lambda: norm_backward(mod, x, weight, rstd, g, past, old))
                pairs = {"dh": (dh, dh_ref + past.double()), "dw": (dw, dw_ref + old.double())}
                close(name + " backward_add", pairs, tolerance)
                report(name + " same bits", same and same_back and same_both)


def time_norm():
    width, dtype = 896, torch.bfloat16
    mod = module("norm", dtype, WIDTH=width)
    for rows in [16, 128, 512, 8192]:
        sets = 8
        weight = torch.ones(width, dtype=dtype, device=DEVICE)
        data = [[randn(rows, width, dtype=dtype) for _ in range(4)] for _ in range(sets)]
        rstd = [torch.empty(rows, device=DEVICE) for _ in range(sets)]
        grid = ceil_div(rows, 8)
        shape = f"bf16 [{rows}, {width}]"

        def ours(i):
            x, _, _, y = data[i % sets]
            launch(mod, "rms_norm", grid, 256, [x, weight, y, rstd[i % sets]], rows, EPSILON)

        def theirs(i):
            F.rms_norm(data[i % sets][0], (width,), weight, EPSILON)

        timed("rms_norm", shape, rows * width * 4, ours, theirs, graph=sets)
        if rows < 8192:
            continue
        blocks = 264
        partial, dw = torch.empty(blocks, width, device=DEVICE), torch.zeros(width, device=DEVICE)

        def back(i):
            x, g, past, dh = data[i % sets]
            buffers = [x, weight, rstd[i % sets], g, past, dh, partial]
            launch(mod, "rms_norm_backward_add", blocks, 256, buffers, rows, EPSILON)
            launch(mod, "rms_norm_weight_gradient", 28, 1024, [partial, dw], blocks, 1)

        leaf = [d[0].clone().requires_grad_() for d in data]
        leaf_weight = weight.clone().requires_grad_()
        outs = [F.rms_norm(x, (width,), leaf_weight, EPSILON) for x in leaf]

        def torch_back(i):
            i %= sets
            a, b = torch.autograd.grad(outs[i], [leaf[i], leaf_weight], data[i][1], retain_graph=True)
            a + data[i][2]

        timed("rms_norm_backward_add", shape, rows * width * 8, back, torch_back)
        timed("rms_norm_backward_add graph", shape, rows * width * 8, back, None, graph=sets)


# -------------------------------------------------------------------------------------------------------------- mlp


def check_mlp():
    for dtype in DTYPES:
        for inner, row_counts in [(4864, [1, 130]), (36, [7]), (8, [5]), (21, [11])]:
            mod = module("mlp", dtype, INNER=inner)
            for rows in row_counts:
                name = f"mlp {short(dtype)} [{rows}, {inner}]"
                fused = randn(rows, 2 * inner, dtype=dtype, scale=3.0)
                fused[0, :2] = torch.tensor([-200.0, 200.0])
                gate, up = fused[:, :inner].contiguous(), fused[:, inner:].contiguous()
                g = randn(rows, inner, dtype=dtype)
                grid = ceil_div(rows * inner, 256)

                def forward():
                    y, y2 = poison(rows, inner, dtype=dtype), poison(rows, inner, dtype=dtype)
                    launch(mod, "swiglu_fused", grid, 256, [fused, y], rows)
                    launch(mod, "swiglu", min(grid, 3), 256, [gate, up, y2], rows)
                    return y, y2

                def backward():
                    d = poison(rows, 2 * inner, dtype=dtype)
                    dg, du = poison(rows, inner, dtype=dtype), poison(rows, inner, dtype=dtype)
                    launch(mod, "swiglu_fused_backward", grid, 256, [fused, g, d], rows)
                    launch(mod, "swiglu_backward", grid, 256, [gate, up, g, dg, du], rows)
                    in_place = fused.clone()
                    launch(mod, "swiglu_fused_backward", grid, 256, [in_place, g, in_place], rows)
                    return d, dg, du, in_place

                (y, y2), same = twice(forward)
                (d, dg, du, in_place), same_back = twice(backward)
                x, u = gate.double().requires_grad_(), up.double().requires_grad_()
                ref = F.silu(x) * u
                ref.backward(g.double())
                pairs = {"y": (y, ref.detach()), "dgate": (dg, x.grad), "dup": (du, u.grad)}
                close(name, pairs, TOLERANCE[dtype])
                both = torch.cat([dg, du], 1)
                agree = all(torch.equal(bits(a), bits(b)) for a, b in [(y, y2), (d, both), (d, in_place)])
                report(name + " same bits", same and same_back and agree)


def time_mlp():
    dtype, inner = torch.bfloat16, 4864
    mod = module("mlp", dtype, INNER=inner)
    for rows in [16, 512, 8192]:
        sets = 3 if rows > 1000 else 8
        data = [(randn(rows, 2 * inner, dtype=dtype), randn(rows, inner, dtype=dtype)) for _ in range(sets)]
        out = [(torch.empty_like(a), torch.empty_like(b)) for a, b in data]
        grid = ceil_div(rows * inner // 8, 256)
        shape = f"bf16 [{rows}, 2·{inner}]"

        def ours(i):
            launch(mod, "swiglu_fused", grid, 256, [data[i % sets][0], out[i % sets][1]], rows)

        def back(i):
            fused, g = data[i % sets]
            launch(mod, "swiglu_fused_backward", grid, 256, [fused, g, out[i % sets][0]], rows)

        def theirs(i):
            gate, up = data[i % sets][0].chunk(2, 1)
            F.silu(gate) * up

        timed("swiglu_fused", shape, rows * inner * 6, ours, theirs, graph=sets)
        if rows == 8192:
            timed("swiglu_fused_backward", shape, rows * inner * 10, back)


# ------------------------------------------------------------------------------------------------------------ vocab


def score(mod, logits, targets, temperature, first, tokens):
    rows, vocab = logits.shape
    scores, best = poison(5, tokens), poison(tokens, dtype=torch.int32)
    launch(mod, "score_rows", rows, 256, [logits, targets, temperature, scores, best], rows, vocab, first, tokens)
    return scores, best


def score_backward(mod, logits, targets, temperature, scores, gradients, first, lines=65535):
    rows, vocab = logits.shape
    tokens = targets.numel()
    out = logits.clone()
    grid = (ceil_div(vocab, 16 // logits.element_size() * 1024), min(rows, lines))
    buffers = [out, targets, temperature, scores, gradients]
    launch(mod, "score_rows_backward", grid, 256, buffers, rows, vocab, first, tokens)
    return (out,)


def check_vocab():
    shapes = [(3, 151936), (5, 50257), (7, 4099), (5, 333), (9, 32), (3, 8), (4, 5), (2, 1)]
    for dtype in DTYPES:
        mod = module("vocab", dtype)
        for rows, vocab in shapes:
            for temperature, scale in [(1.0, 3.0), (0.7, 10.0)]:
                name = f"vocab {short(dtype)} [{rows}, {vocab}] T {temperature}"
                first, tokens = 2, rows + 5
                logits = randn(rows, vocab, dtype=dtype, scale=scale)
                if vocab > 8:
                    logits[1, 3:6] = float("-inf")
                    logits[0, vocab // 2] = 30.0 * scale
                targets = uniform_ids(vocab, tokens)
                if vocab > 8:
                    targets[first + 1] = 7
                t = torch.tensor([temperature], device=DEVICE)
                (scores, best), same = twice(lambda: score(mod, logits, targets, t, first, tokens))
                z = (logits.double() / torch.tensor(temperature).float().double()).requires_grad_()
                log_p = z.log_softmax(1)
                p = log_p.exp()
                wanted = targets[first : first + rows].long()[:, None]
                log_prob = log_p.gather(1, wanted)[:, 0]
                entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(1)
                largest = z.detach().max(1).values
                log_sum = (z.detach() - largest[:, None]).exp().sum(1).log()
                own = scores[:, first : first + rows]
                refs = [log_prob.detach(), entropy.detach(), p.detach().pow(2).sum(1), largest, log_sum]
                names = ["log_prob", "entropy", "sum_sq", "largest", "log_sum"]
                # A peaked row has an entropy near 0, computed as a difference: the absolute error counts.
                errors = [((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(own.double(), refs)]
                right = all(e < 4e-6 for e in errors)
                ids = torch.arange(vocab, device=DEVICE)
                top = torch.where(logits == logits.max(1, keepdim=True).values, ids, vocab).min(1).values
                right = right and torch.equal(top.int(), best[first : first + rows])
                left = torch.cat([scores[:, :first], scores[:, first + rows :]], 1)
                right = right and bool(torch.isnan(left).all()) and int((best == -7).sum()) == 5
                report(name, right, "  ".join(f"{n} {e:.0e}" for n, e in zip(names, errors)))

                gradients = randn(2, tokens)
                gradients[:, first + rows - 1] = 0.0
                g = gradients[:, first : first + rows].double()
                value = (g[0] * log_prob).sum() + (g[1] * entropy).sum()
                (ref,) = torch.autograd.grad(value, z)
                ref = torch.nan_to_num(ref, nan=0.0) / torch.tensor(temperature).float().double()
                (out,), same_back = twice(lambda: score_backward(mod, logits, targets, t, scores, gradients, first))
                (out2,) = score_backward(mod, logits, targets, t, scores, gradients, first, lines=2)
                sync()
                close(name + " backward", {"dlogits": (out, ref)}, max(TOLERANCE[dtype], 1e-5))
                report(name + " same bits", same and same_back and torch.equal(bits(out), bits(out2)))
        logits = randn(3, 1000, dtype=dtype)
        logits[0, 500], logits[1, 3] = float("nan"), float("inf")
        targets, t = uniform_ids(1000, 3), torch.tensor([1.0], device=DEVICE)
        scores, _ = score(mod, logits, targets, t, 0, 3)
        sync()
        report(f"vocab {short(dtype)} NaN and infinity show", (~scores[0].isfinite()).tolist() == [True, True, False])


def time_vocab():
    dtype, vocab = torch.bfloat16, 151936
    mod = module("vocab", dtype)
    for rows in [256, 1024, 4096]:
        sets = 2
        data = [randn(rows, vocab, dtype=dtype, scale=2.5) for _ in range(sets)]
        targets, t = uniform_ids(vocab, rows), torch.tensor([1.0], device=DEVICE)
        scores, best = torch.empty(5, rows, device=DEVICE), torch.empty(rows, dtype=torch.int32, device=DEVICE)
        gradients = randn(2, rows)
        shape = f"bf16 [{rows}, {vocab}]"

        def ours(i):
            buffers = [data[i % sets], targets, t, scores, best]
            launch(mod, "score_rows", rows, 256, buffers, rows, vocab, 0, rows)

        scratch = [x.clone() for x in data]

        def back(i):
            buffers = [scratch[i % sets], targets, t, scores, gradients]
            launch(mod, "score_rows_backward", (19, rows), 256, buffers, rows, vocab, 0, rows)

        def theirs(i):
            log_p = data[i % sets].float().log_softmax(1)
            log_p.gather(1, targets.long()[:, None])
            -(log_p.exp() * log_p).sum(1)

        def cross_entropy(i):
            F.cross_entropy(data[i % sets], targets.long(), reduction="none")

        timed("score_rows", shape, rows * vocab * 2, ours, theirs if rows < 4096 else None)
        timed("score_rows (cross_entropy)", shape, rows * vocab * 2, ours, cross_entropy)
        timed("score_rows_backward", shape, rows * vocab * 4, back)
        del data, scratch
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------ embed


def check_embed():
    for dtype in DTYPES:
        for width, table_rows, count in [(896, 5000, 3001), (896, 7, 2500), (8, 32, 70), (37, 50, 4100), (4096, 300, 129)]:
            mod = module("embed", dtype, WIDTH=width)
            name = f"embed {short(dtype)} [{table_rows}, {width}] of {count}"
            x, ids = randn(table_rows, width, dtype=dtype), uniform_ids(table_rows, count)
            broken = ids.clone()
            broken[1], broken[2] = -1, table_rows
            pieces = ceil_div(count * width, 256)

            def take():
                y = poison(count, width, dtype=dtype)
                launch(mod, "take_rows", pieces, 256, [x, broken, y], table_rows, count)
                return (y,)

            (y,), same = twice(take)
            keep = torch.ones(count, dtype=torch.bool, device=DEVICE)
            keep[1:3] = False
            right = torch.equal(bits(y[keep]), bits(x[ids[keep].long()])) and bool(torch.isnan(y[1:3]).all())
            report(name + " take_rows", right and same)

            g, old = randn(count, width, dtype=dtype), randn(table_rows, width)

            def backward():
                dw = old.clone()
                launch(mod, "embed_backward", count, 128, [g, broken, dw], table_rows, count)
                return (dw,)

            (dw,), same = twice(backward)
            ref = old.double().index_add(0, ids[keep].long(), g[keep].double())
            close(name + " embed_backward", {"dw": (dw, ref)}, TOLERANCE[torch.float32])
            absent = torch.ones(table_rows, dtype=torch.bool, device=DEVICE)
            absent[ids[keep].long()] = False
            report(name + " same bits", same and torch.equal(dw[absent], old[absent]))

            index = torch.sort(uniform_ids(table_rows, min(count, table_rows))).values

            def scatter():
                dx = poison(table_rows, width, dtype=dtype)
                grid = ceil_div(table_rows * width, 256)
                launch(mod, "take_rows_backward", grid, 256, [g, index, dx], table_rows, index.numel())
                return (dx,)

            (dx,), same = twice(scatter)
            ref = torch.zeros(table_rows, width, dtype=torch.float64, device=DEVICE)
            ref.index_add_(0, index.long(), g[: index.numel()].double())
            close(name + " take_rows_backward", {"dx": (dx, ref)}, TOLERANCE[dtype])
            report(name + " take_rows_backward same bits", same)


def time_embed():
    dtype, width, vocab = torch.bfloat16, 896, 151936
    mod = module("embed", dtype, WIDTH=width)
    weight, dw = randn(vocab, width, dtype=dtype), torch.zeros(vocab, width, device=DEVICE)
    for count in [8192, 32768]:
        # As frequent as words: the share of id i falls as 1 / (i + 2).
        share = 1 / (torch.arange(vocab, dtype=torch.float64) + 2)
        sets = [torch.multinomial(share, count, replacement=True, generator=GENERATOR).int().to(DEVICE) for _ in range(3)]
        g, y = randn(count, width, dtype=dtype), torch.empty(count, width, dtype=dtype, device=DEVICE)
        distinct = len(torch.unique(sets[0]))
        shape = f"bf16 [{count}, {width}]"
        grid = ceil_div(count * width // 8, 256)
        timed("take_rows", shape, count * width * 4,
              lambda i: launch(mod, "take_rows", grid, 256, [weight, sets[i % 3], y], vocab, count),
              lambda i: F.embedding(sets[i % 3], weight), graph=3)
        timed("embed_backward", shape + f" {distinct}", (count * 2 + distinct * 8) * width,
              lambda i: launch(mod, "embed_backward", count, 128, [g, sets[i % 3], dw], vocab, count),
              lambda i: dw.index_add_(0, sets[i % 3], g.float()))
        index = torch.sort(torch.randperm(count, generator=GENERATOR)[: count // 2]).values.int().to(DEVICE)
        timed("take_rows_backward", shape, count * width * 3,
              lambda i: launch(mod, "take_rows_backward", grid, 256, [g, index, y], count, count // 2), graph=3)


# ---------------------------------------------------------------------------------------------------------- columns


def column_sums(mod, x):
    rows, width = x.shape
    vec = 16 // x.element_size()
    groups = ceil_div(width, 32 * (vec if width % vec == 0 else 1))
    stripes = min(ceil_div(rows, 32), 64)
    parts, y = poison(stripes, width), poison(width)
    launch(mod, "column_parts", (groups, stripes), 256, [x, parts], rows)
    launch(mod, "column_sums", ceil_div(width, 256), 256, [parts, y], stripes)
    return y


def check_columns():
    for dtype in DTYPES:
        for rows, width in [(1, 1152), (300, 1152), (8192, 1152), (77, 49)]:
            mod = module("columns", dtype, WIDTH=width)
            x = randn(rows, width, dtype=dtype)
            (y,), same = twice(lambda: [column_sums(mod, x)])
            far = error(y, x.double().sum(0))
            report(f"columns {short(dtype)} {rows} x {width}", far < 1e-5 and same, f"error {far:.1e}")


def time_columns():
    mod = module("columns", torch.bfloat16, WIDTH=1152)
    x = randn(8192, 1152, dtype=torch.bfloat16)
    timed("column sums", "bf16 [8192, 1152]", 2 * x.numel(), lambda _: column_sums(mod, x), lambda _: x.float().sum(0))


# ----------------------------------------------------------------------------------------------------------- update

TASK = 16384


def adamw_reference(p, m, v, g, factor, beta1, beta2, epsilon, step):
    """One operation after the other in f32, which numpy rounds like the CPU."""
    f = np.float32
    decay, step_size, correction = (f(x) for x in step)
    g = g * f(factor)
    m = m * f(beta1) + g * f(1.0 - beta1)
    v = v * f(beta2) + g * g * f(1.0 - beta2)
    root = np.sqrt(v) / correction + f(epsilon)
    return p * decay - m / root * step_size, m, v


def tasks(lengths):
    counts = [max(ceil_div(n, TASK), 1) for n in lengths]
    return [sum(counts[:i]) for i in range(len(counts))], sum(counts)


def check_update():
    lengths = [5, 16384, 40000, 1, 123457, 896, 16385]
    start, blocks = tasks(lengths)
    steps = [(1 - 1e-4 * (i % 2), 1e-3 / (1 + i), 0.9 + 0.01 * i) for i in range(len(lengths))]
    common = (0.37, 0.9, 0.95, 1e-8)
    state = [[randn(n), randn(n), randn(n).abs(), randn(n)] for n in lengths]
    for cast in [0, 1]:
        mod = module("update", torch.bfloat16, CAST=cast, COUNT=len(lengths))

        def run():
            kept = [[poison(n) for _ in range(3)] + [poison(n, dtype=torch.bfloat16)] * cast for n in lengths]
            buffers = [x for own, to in zip(state, kept) for x in own + to]
            launch(mod, "update", blocks, 256, buffers, *common, *start, *lengths, *(float(s[i]) for i in range(3) for s in steps))
            return [x for own in kept for x in own]

        got, same = twice(run)
        each = 3 + cast
        exact, rounded = True, True
        for i, own in enumerate(state):
            new = adamw_reference(*(x.cpu().numpy() for x in own), common[0], *common[1:], steps[i])
            mine = got[i * each : (i + 1) * each]
            exact = exact and all(np.array_equal(a, b.cpu().numpy()) for a, b in zip(new, mine))
            rounded = rounded and (not cast or torch.equal(mine[3], mine[0].bfloat16()))
        report(f"update of {len(lengths)} tensors, cast {cast}: the CPU's bits", exact and rounded and same)
    mod = module("update", torch.bfloat16, CAST=0, COUNT=len(lengths))
    starts = torch.tensor(start + [blocks], dtype=torch.int32, device=DEVICE)

    def sums():
        partial, y = poison(blocks, dtype=torch.float64), poison(len(lengths))
        launch(mod, "squares", blocks, 256, [own[3] for own in state] + [partial], 0, *start, *lengths)
        launch(mod, "sums", len(lengths), 256, [partial, starts, y])
        return [y]

    (y,), same = twice(sums)
    far = error(y, torch.stack([own[3].double().square().sum() for own in state]))
    report("squares and sums", far < 1e-6 and same, f"error {far:.1e}")


def time_update():
    mod = module("update", torch.bfloat16, CAST=1, COUNT=1)
    count = 1 << 28
    p, m, v, g = (torch.empty(count, device=DEVICE).normal_() for _ in range(4))
    v.abs_()
    weight = torch.empty(count, dtype=torch.bfloat16, device=DEVICE)
    leaf = torch.nn.Parameter(p.clone())
    leaf.grad = g
    optimizer = torch.optim.AdamW([leaf], lr=1e-6, fused=True)
    buffers = [p, m, v, g, p, m, v, weight]
    timed("update, cast", f"f32 [{count}]", count * 30,
          lambda _: launch(mod, "update", count // TASK, 256, buffers, 1.0, 0.9, 0.999, 1e-8, 0, count, 1.0, 1e-6, 1.0),
          lambda _: optimizer.step())


# ----------------------------------------------------------------------------------------------------------- sample


def philox(counter, key):
    """counter: four uint32 arrays, key: two; ten rounds."""
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    k = [np.asarray(x, dtype=np.uint64) for x in key]
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        half = np.uint64(32)
        c = [(b >> half) ^ c[1] ^ k[0], b & mask, (a >> half) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return c


def words_of(stream, position, vocab):
    blocks = np.arange(ceil_div(vocab, 4), dtype=np.uint64)
    four = philox([blocks, np.uint64(position), np.uint64(stream[2]), np.uint64(stream[3])], stream[:2])
    return np.stack([np.broadcast_to(x, blocks.shape) for x in four], 1).reshape(-1)[:vocab]


class Settings:
    def __init__(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0, eos=(), min_new=0):
        self.temperature, self.top_k, self.top_p, self.min_p = float(temperature), top_k, float(top_p), float(min_p)
        self.penalty, self.eos, self.min_new = float(penalty), tuple(eos), min_new

    def __str__(self):
        parts = [f"T {self.temperature:g}"]
        parts += [f"k {self.top_k}"] * (self.top_k > 0) + [f"p {self.top_p:g}"] * (self.top_p < 1)
        parts += [f"min-p {self.min_p:g}"] * (self.min_p > 0) + [f"penalty {self.penalty:g}"] * (self.penalty != 1)
        return " ".join(parts + [f"min new {self.min_new}"] * (self.min_new > 0))

    def plain(self, vocab):
        truncates = 0 < self.top_k < vocab
        return not truncates and self.top_p >= 1 and self.min_p <= 0 and self.penalty == 1

    def scalars(self, rows, vocab, splits, limit=0):
        return (rows, vocab, splits, len(self.eos), self.min_new, self.top_k, self.temperature, self.top_p, self.min_p,
                self.penalty, limit)


SHORTLIST = 128


def shortlists(words, lengths, states, vocab, limit):
    """Of live rows, the ids whose words have a complement below `limit`, with these words, in any order, and their number."""
    rows = len(words)
    lists, listed = np.zeros((rows, SHORTLIST, 2), dtype=np.uint32), np.zeros(rows, dtype=np.int32)
    for row in range(rows):
        if limit == 0 or int(states[row]) != 0:
            continue
        own = words_of(words[row].numpy(), int(lengths[row]), vocab)
        ids = np.random.permutation(np.flatnonzero(~own.astype(np.uint32) < limit))
        listed[row] = len(ids)
        ids = ids[:SHORTLIST]
        lists[row, : len(ids)] = np.stack([ids, own[ids]], 1)
    return torch.from_numpy(lists.view(np.int32)).to(DEVICE), torch.from_numpy(listed).to(DEVICE)


def reference_draw(logits, settings, stream, position, seen, nudge=0.0):
    """The CPU's rules on one row: token, its log-probs, and how many ids are kept. `nudge` moves the thresholds of top-p
    and min-p, where the rounding of weights may change the result."""
    raw = logits.astype(np.float64)
    temperature = settings.temperature or 1.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale = min(1.0 / temperature, np.finfo(np.float64).max)
        raw_max = raw.max()
        raw_sum = np.exp((raw - raw_max) * scale).sum()
        x = logits.copy()
        if settings.penalty != 1:
            ids = np.array(sorted(seen), dtype=np.int64)
            f = np.float32(settings.penalty)
            x[ids] = np.where(x[ids] > 0, x[ids] / f, x[ids] * f)
        if position < settings.min_new:
            x[[e for e in settings.eos if e < len(x)]] = -np.inf
        top = x.max()
        if not (np.isfinite(raw_max) and np.isfinite(raw_sum) and np.isfinite(top)):
            return -1, 0.0, 0.0, 0
        full = lambda t: (raw[t] - raw_max) / temperature - np.log(raw_sum)
        if settings.temperature == 0:
            token = int(np.argmax(x))
            return token, 0.0, full(token), 1
        weight = np.exp((x.astype(np.float64) - float(top)) * scale)
    # In numerical order, −0 before +0.
    bits = x.view(np.int32).astype(np.int64)
    order = np.lexsort((np.arange(len(x)), np.where(bits < 0, bits & 0x7FFFFFFF, -1 - bits)))
    order = order[x[order] > -np.inf]
    if 0 < settings.top_k < len(order):
        order = order[: settings.top_k]
    if settings.top_p < 1:
        reached = np.cumsum(weight[order])
        needed = (settings.top_p + nudge) * reached[-1]
        order = order[: min(int(np.searchsorted(reached, needed)) + 1, len(order))]
    if settings.min_p > 0:
        order = order[weight[order] >= settings.min_p * (1 + nudge)]
    kept = np.sort(order)
    u = (words_of(stream, position, len(x)).astype(np.float64) + 0.5) / 2.0**32
    with np.errstate(over="ignore"):
        race = (x[kept].astype(np.float64) - float(top)) * scale - np.log(-np.log(u[kept]))
    token = int(kept[np.argmax(race)])
    sampling = (float(x[token]) - float(top)) / temperature - np.log(weight[kept].sum())
    return token, sampling, full(token), len(kept)


def draw(dtype, logits, settings, streams, lengths, states, seen, splits=8, general=False, shortlist=None, limit=0):
    rows, vocab = logits.shape
    eos = torch.tensor(settings.eos or (0,), dtype=torch.int32, device=DEVICE)
    token, sampling, full = poison(rows, dtype=torch.int32), poison(rows), poison(rows)
    scalars = settings.scalars(rows, vocab, splits, limit)
    if settings.plain(vocab) and not general:
        mod = module("race", dtype)
        partial = poison(rows, splits, 4, dtype=torch.float64)
        ended = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        lists, listed = shortlist or (torch.zeros(1, SHORTLIST, 2, dtype=torch.int32, device=DEVICE), ended)
        listed = listed.clone()
        buffers = [logits, streams, lengths, states, eos, partial, ended, lists, listed, token, sampling, full]
        launch(mod, "race", (splits, rows), 256, buffers, *scalars)
        if ended.any() or listed.any():
            raise AssertionError("race left counts of ended blocks or of shortlists")
    else:
        mod = module("sample", dtype)
        inputs = [logits, streams, lengths, states, eos, seen, token, sampling, full]
        launch(mod, "sample", rows, 512, inputs, *scalars)
    return token, sampling, full


def random_streams(rows):
    words = torch.randint(0, 2**32, (rows, 4), generator=GENERATOR, dtype=torch.int64)
    return words, words.to(torch.uint32).view(torch.int32).to(DEVICE)


def seen_bits(rows, vocab, share=0.05):
    mask = torch.rand(rows, ceil_div(vocab, 32) * 32, generator=GENERATOR) < share
    mask[:, vocab:] = False
    lanes = 2 ** torch.arange(32, dtype=torch.int64)
    packed = (mask.view(rows, -1, 32).long() * lanes).sum(2)
    return [set(np.flatnonzero(m).tolist()) for m in mask.numpy()], packed.to(torch.uint32).view(torch.int32).to(DEVICE)


def model_like(rows, vocab, dtype):
    """Many improbable ids and some dozen probable ones, with equal logits among them in bf16."""
    logits = torch.randn(rows, vocab, generator=GENERATOR) * 2.5
    top = torch.randint(0, vocab, (rows, 40), generator=GENERATOR)
    logits.scatter_add_(1, top, 6 + 4 * torch.randn(rows, 40, generator=GENERATOR))
    return logits.to(dtype).to(DEVICE)


def check_draws(name, dtype, logits, settings, splits=8, general=False, mean=0):
    """`mean`: the mean number of ids on a row's shortlist; without it there is no shortlist."""
    rows, vocab = logits.shape
    words, streams = random_streams(rows)
    lengths = uniform_ids(6, rows)
    states = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    if rows > 3:
        states[2] = 1
    seen, packed = seen_bits(rows, vocab)
    limit = min((mean << 32) // vocab, 2**32 - 1)
    shortlist = shortlists(words, lengths, states, vocab, limit)
    (token, sampling, full), same = twice(
        lambda: draw(dtype, logits, settings, streams, lengths, states, packed, splits, general, shortlist, limit))
    host = logits.float().cpu().numpy()
    wrong, nudged, worst = [], 0, 0.0
    for row in range(rows):
        got = (int(token[row]), float(sampling[row]), float(full[row]))
        if int(states[row]) != 0:
            if got[0] != -7:
                wrong.append((row, "an ended row was drawn for"))
            continue
        for nudge in [0.0, -3e-6, 3e-6]:
            want = reference_draw(host[row], settings, words[row].numpy(), int(lengths[row]), seen[row], nudge)
            off = max(abs(got[1] - want[1]), abs(got[2] - want[2])) / (1 + abs(want[2]))
            if got[0] == want[0] and off <= 2e-5:
                worst = max(worst, off)
                nudged += nudge != 0
                break
        else:
            wrong.append((row, got, want))
    detail = f"{rows} rows, {nudged} at a border, log-probs {worst:.0e}, same bits {same}"
    report(f"{name} {short(dtype)} V {vocab} {settings}", not wrong and same and nudged <= 1 + rows // 8, detail)
    for line in wrong[:3]:
        print("      ", line)


def check_frequencies(name, settings, expected, logits, general=False):
    """χ² of many draws of one row, at the 0.9999 quantile by Wilson and Hilferty."""
    draws = 20_000 if DEVICE == "cuda" else 1_000
    vocab = logits.numel()
    many = logits.to(DEVICE).expand(draws, vocab).contiguous()
    _, streams = random_streams(draws)
    zeros = torch.zeros(draws, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(draws, ceil_div(vocab, 32), dtype=torch.int32, device=DEVICE)
    token, sampling, _ = draw(torch.float32, many, settings, streams, zeros, zeros, seen, 1, general)
    sync()
    counts = np.bincount(token.cpu().numpy(), minlength=vocab)
    p = np.asarray(expected)
    support = p > 0
    chi = float((((counts - p * draws) ** 2)[support] / (p[support] * draws)).sum())
    freedom = support.sum() - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    right = chi < bound and counts[~support].sum() == 0 and (counts[p * draws > 10] > 0).all()
    right = right and np.allclose(np.exp(sampling.cpu().numpy()), p[token.cpu().numpy()], rtol=1e-4)
    report(name, bool(right), f"χ² {chi:.1f} below {bound:.1f}, {support.sum()} of {vocab} ids")


def check_philox():
    got = philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0])
    report("sample philox of this script gives the published vector",
           [int(x) for x in got] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1])


def check_sample():
    check_philox()
    big = 16 if DEVICE == "cuda" else 4
    for dtype in DTYPES:
        for rows, vocab in [(64, 11), (40, 333), (24, 5000), (big, 151936)]:
            eos = (1, 3, vocab - 1)
            logits = model_like(rows, vocab, dtype)
            plain = [Settings(), Settings(0.6), Settings(3.0), Settings(0.0), Settings(1e-3), Settings(1e-40),
                     Settings(1.0, eos=eos, min_new=4), Settings(0.0, eos=eos, min_new=4)]
            for settings in plain:
                check_draws("race", dtype, logits, settings, splits=8 if vocab > 1000 else 2)
            for mean in (2, 48, 200):  # of the last, lists overflow
                for settings in plain[:3] + plain[4:7]:
                    check_draws(f"race, {mean} listed", dtype, logits, settings, splits=8 if vocab > 1000 else 2, mean=mean)
            for settings in plain[:4] + plain[6:]:
                check_draws("sample", dtype, logits, settings, general=True)
            for settings in [Settings(top_k=1), Settings(top_k=5), Settings(0.8, top_k=50), Settings(top_p=0.9),
                             Settings(1.5, top_p=0.99), Settings(top_p=1e-6), Settings(min_p=0.05),
                             Settings(0.7, top_k=20, top_p=0.8, min_p=0.02), Settings(penalty=1.3),
                             Settings(penalty=1.3, top_k=30, top_p=0.9, eos=eos, min_new=4),
                             Settings(0.0, penalty=1.5), Settings(top_k=4999, top_p=0.95), Settings(4.0, top_k=9000),
                             Settings(4.0, top_k=30000, top_p=0.7), Settings(6.0, top_p=0.5)]:
                check_draws("sample", dtype, logits, settings)
        equal = torch.zeros(4, 151936, dtype=dtype, device=DEVICE)
        for mean in (0, 48):
            check_draws(f"race of equals, {mean} listed", dtype, equal, Settings(), mean=mean)
        check_draws("sample of equals", dtype, equal, Settings(top_k=3))
        check_draws("sample of equals", dtype, equal, Settings(top_k=70000, top_p=0.5000001))
        zeros = -randn(32, 77, dtype=dtype).abs()
        zeros[:, 5:30] = zeros[:, 5:30] * 0.0
        zeros[:, 9:30:3] = 0.0
        for settings in [Settings(top_k=5), Settings(top_k=12), Settings(top_p=0.3), Settings()]:
            check_draws("signed zeros", dtype, zeros, settings)
        masked = model_like(8, 151936, dtype)
        masked[:, 100:] = float("-inf")
        for mean in (0, 48):
            check_draws(f"race of masked, {mean} listed", dtype, masked, Settings(0.9), mean=mean)
        check_draws("sample of masked", dtype, masked, Settings(0.9, top_k=50, top_p=0.9))
        broken = randn(6, 1000, dtype=dtype)
        broken[0, 7], broken[1, 999], broken[3] = float("nan"), float("inf"), float("-inf")
        for mean in (0, 48):
            check_draws(f"race not finite, {mean} listed", dtype, broken, Settings(), mean=mean)
        check_draws("sample not finite", dtype, broken, Settings(top_k=5))

    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, float("-inf"), 1.0, 1.0, -0.5, 0.3, 2.0, -3.0, 0.1])
    softmax = lambda x: torch.softmax(x.double(), 0).numpy()
    only = lambda ids: softmax(torch.where(torch.isin(torch.arange(12), torch.tensor(ids)), logits, float("-inf")))
    check_frequencies("race frequencies", Settings(), softmax(logits), logits)
    check_frequencies("race frequencies, hot", Settings(2.5), softmax(logits / 2.5), logits)
    check_frequencies("sample frequencies", Settings(), softmax(logits), logits, general=True)
    check_frequencies("sample frequencies, top-k 3", Settings(top_k=3), only([2, 9, 5]), logits)
    check_frequencies("sample frequencies, top-k 4", Settings(top_k=4), only([2, 9, 5, 6]), logits)
    p = softmax(logits)
    order = sorted(range(12), key=lambda i: (-logits[i].item(), i))
    count = int(np.searchsorted(np.cumsum(p[order]), 0.8)) + 1
    check_frequencies("sample frequencies, top-p 0.8", Settings(top_p=0.8), only(order[:count]), logits)
    keep = [i for i in range(12) if np.exp(logits[i].item() - 2.0) >= 0.2]
    check_frequencies("sample frequencies, min-p 0.2", Settings(min_p=0.2), only(keep), logits)


def time_sample():
    dtype, vocab = torch.bfloat16, 151936
    for rows in [16, 128, 512]:
        sets = 3
        data = [model_like(rows, vocab, dtype) for _ in range(sets)]
        flat = [randn(rows, vocab, dtype=dtype, scale=1.0) for _ in range(sets)]
        _, streams = random_streams(rows)
        zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        _, seen = seen_bits(rows, vocab)
        splits = max(1, min(32, 3 * 132 // rows))
        eos = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        token, sampling, full = zeros.clone(), torch.zeros(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
        partial = torch.empty(rows, splits, 4, dtype=torch.float64, device=DEVICE)
        ended = zeros.clone()
        shape = f"bf16 [{rows}, {vocab}]"

        def race(inputs, settings=Settings()):
            def run(i):
                buffers = [inputs[i % sets], streams, zeros, zeros, eos, partial, ended, zeros, zeros, token, sampling, full]
                launch(module("race", dtype), "race", (splits, rows), 256, buffers, *settings.scalars(rows, vocab, splits))
            return run

        def sample(inputs, settings):
            def run(i):
                buffers = [inputs[i % sets], streams, zeros, zeros, eos, seen, token, sampling, full]
                launch(module("sample", dtype), "sample", rows, 512, buffers, *settings.scalars(rows, vocab, 1))
            return run

        def theirs(i):
            torch.multinomial(torch.softmax(data[i % sets].float(), 1), 1)

        def theirs_truncated(i):
            values, ids = torch.topk(data[i % sets].float(), 50)
            p = torch.softmax(values, 1)
            p = torch.where(p.cumsum(1) - p < 0.95, p, 0.0)
            ids.gather(1, torch.multinomial(p, 1))

        moved = rows * vocab * 2
        timed(f"race, {splits} parts", shape, moved, race(data), theirs, graph=sets)
        timed("race, flat", shape, moved, race(flat), None, graph=sets)
        timed("race, greedy", shape, moved, race(data, Settings(0.0)), None, graph=sets)
        timed("sample k 50 p .95", shape, moved, sample(data, Settings(top_k=50, top_p=0.95)), theirs_truncated, graph=sets)
        timed("sample p .95", shape, moved, sample(data, Settings(top_p=0.95)), None, graph=sets)
        timed("sample p .95, flat", shape, moved, sample(flat, Settings(top_p=0.95)), None, graph=sets)
        timed("sample min-p .05", shape, moved, sample(data, Settings(min_p=0.05)), None, graph=sets)


# ---------------------------------------------------------------------------------------------------------- advance


def check_advance():
    mod = module("advance", torch.bfloat16)
    rows, most, vocab, pad = 1300, 9, 77, 5
    eos, stops = [3, 70], [[-1, 4], [8, 9]]
    rng = np.random.default_rng(7)
    limits = rng.integers(1, most + 1, rows)
    state = {name: np.zeros(rows, np.int32) for name in ["lengths", "states"]}
    prompts = rng.integers(1, 50, rows)
    device = lambda x, dtype=torch.int32: torch.tensor(x, dtype=dtype, device=DEVICE)
    lengths, states = device(state["lengths"]), device(state["states"])
    positions = device(prompts - 1)
    seen = torch.zeros(rows, 3, dtype=torch.int32, device=DEVICE)
    tokens, a, b = poison(rows, most, dtype=torch.int32), poison(rows, most), poison(rows, most)
    want = [[] for _ in range(rows)]
    ended = np.zeros(rows, np.int64)
    right = True
    for step in range(most):
        drawn = rng.integers(0, vocab, rows)
        # Stop sequences occur often enough to be tested.
        drawn = np.where(rng.random(rows) < 0.2, rng.choice([8, 9], rows), drawn)
        drawn = np.where(rng.random(rows) < 0.01, -1, drawn)
        token = device(drawn)
        sampling, full = device(-drawn / 7.0, torch.float32), device(-drawn / 9.0, torch.float32)
        buffers = [token, sampling, full, device(eos), device(stops), device(limits), lengths, positions, states, seen,
                   tokens, a, b]
        launch(mod, "advance", (rows + 31) // 32, 32, buffers, rows, most, vocab, len(eos), len(stops), 2, pad, 1)
        sync()
        fed = []
        for row in range(rows):
            if ended[row] == 0:
                t = int(drawn[row])
                if t < 0:
                    ended[row] = 4
                else:
                    want[row].append(t)
                    if t in eos:
                        ended[row] = 1
                    elif t == 4 or want[row][-2:] == [8, 9]:
                        ended[row] = 2
                    elif len(want[row]) >= limits[row]:
                        ended[row] = 3
            fed.append(int(drawn[row]) if ended[row] == 0 else pad)
        right = right and token.tolist() == fed and states.tolist() == ended.tolist()
    got = tokens.tolist()
    for row in range(rows):
        n = len(want[row])
        right = right and got[row] == want[row] + [-7] * (most - n) and int(lengths[row]) == n
        right = right and int(positions[row]) == prompts[row] - 1 + n
        bits_set = {i for i in range(96) if int(seen[row, i // 32]) >> (i % 32) & 1}
        right = right and bits_set == set(want[row])
        right = right and np.allclose(a[row, :n].tolist(), np.array(want[row]) / -7.0, atol=1e-6)
        right = right and np.allclose(b[row, :n].tolist(), np.array(want[row]) / -9.0, atol=1e-6)
    counts = np.bincount(ended, minlength=5)
    report("advance", right and bool((counts[1:] > 0).all()), f"ended by eos, stop, length, not finite: {counts[1:]}")


# ------------------------------------------------------------------------------------------------------------- main

CHECKS = {"norm": check_norm, "mlp": check_mlp, "vocab": check_vocab, "embed": check_embed, "columns": check_columns, "update": check_update,
          "sample": check_sample, "advance": check_advance}
TIMES = {"norm": time_norm, "mlp": time_mlp, "vocab": time_vocab, "embed": time_embed, "columns": time_columns, "update": time_update,
         "sample": time_sample}
ENTRIES = {
    key_of("norm", torch.bfloat16, WIDTH=896): ["rms_norm", "rms_norm_backward", "rms_norm_backward_add"],
    key_of("mlp", torch.bfloat16, INNER=4864): ["swiglu_fused", "swiglu_fused_backward"],
    key_of("vocab", torch.bfloat16): ["score_rows", "score_rows_backward"],
    key_of("embed", torch.bfloat16, WIDTH=896): ["take_rows", "take_rows_backward", "embed_backward"],
    key_of("columns", torch.bfloat16, WIDTH=1152): ["column_parts", "column_sums"],
    key_of("update", torch.bfloat16, CAST=1, COUNT=1): ["update"],
    key_of("race", torch.bfloat16): ["race"],
    key_of("sample", torch.bfloat16): ["sample"],
    key_of("advance", torch.bfloat16): ["advance"],
}


def compile_all():
    keys = list(ENTRIES)
    for dtype in DTYPES:
        keys += [key_of("norm", dtype, WIDTH=w) for w, _ in NORM_WIDTHS]
        keys += [key_of("mlp", dtype, INNER=i) for i in [4864, 36, 8, 21]]
        keys += [key_of("embed", dtype, WIDTH=w) for w in [896, 8, 37, 4096]]
        keys += [key_of(file, dtype) for file in ["vocab", "race", "sample"]]
    pool = concurrent.futures.ThreadPoolExecutor(12)
    for key in dict.fromkeys(keys):
        BINARIES[key] = pool.submit(Module.compile, source_of(*key))


def resources():
    print("registers, local bytes a thread, static shared bytes a block:")
    for key, names in ENTRIES.items():
        for name in names:
            mod = module(*key[:2], **dict(key[2]))
            print(f"    {name:26s} {mod.attribute(name, 4):4d} {mod.attribute(name, 3):5d} {mod.attribute(name, 1):6d}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--no-times", action="store_true")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name] or list(CHECKS)
    start = time.time()
    seed = int.from_bytes(os.urandom(4), "little")
    GENERATOR.manual_seed(seed)
    print(f"seed {seed}")
    Module.start()
    if DEVICE == "cuda":
        compile_all()
    for kind, functions in [("check", CHECKS)] + [("time", TIMES)] * (not arguments.no_times and DEVICE == "cuda"):
        for name in only:
            if name not in functions:
                continue
            began = time.time()
            try:
                functions[name]()
                sync()
            except Exception:
                traceback.print_exc()
                FAILED.append(f"{kind} of {name}")
            print(f"     {kind} of {name}: {time.time() - began:.1f} s", flush=True)
    if DEVICE == "cuda":
        try:
            resources()
        except Exception:
            traceback.print_exc()
    table()
    print(f"\n{time.time() - start:.0f} s; " + (f"WRONG: {FAILED}" if FAILED else "all right"))
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
