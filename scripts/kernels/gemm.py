#!/usr/bin/env python3
"""Checks and times the matrix-product kernels of verl-models/kernels/src/cuda (gemm.cu, gemm_dyn.cu, gemm_skinny.cu).

    python3 scripts/kernels/gemm.py [check] [large] [decode] [chain]      (default: all; names may be longer)

Needs a Hopper GPU, PyTorch, and NVRTC or nvcc of CUDA 12.8 or later. `check` compares every configuration with a float64
product of the same bf16 inputs, on ragged shapes, into outputs full of NaN, twice for equal bits. `large` times
products of training, `decode` those of a decode step (weights rotated through more than the L2 cache, many launches in
one CUDA graph), `chain` all products of a 24-layer step one after another. Exit code 1 if any check failed.
"""
import ctypes
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "verl-models/kernels/src/cuda"
COPY_TBS, PEAK_TFLOPS = 4.3, 790.0
DYNAMIC = int(os.environ.get("DYNAMIC", "0")) # 1: large kernels take dynamic shared memory instead of static
START = time.time()


# ---- compilation ---------------------------------------------------------------------------------------------------


def cuda_roots():
    roots = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))]
    for p in sys.path:
        roots += [Path(p) / "nvidia/cu13", Path(p) / "nvidia/cuda_nvrtc"]
    return [r for r in roots if r.exists()]


def load_nvrtc():
    for folder in [r / d for r in cuda_roots() for d in ("lib64", "lib")]:
        for path in sorted(folder.glob("libnvrtc.so*")):
            try:
                # The library opens its built-ins by name: open them in advance.
                for part in sorted(folder.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(part))
                return ctypes.CDLL(str(path))
            except OSError:
                continue
    return ctypes.CDLL("libnvrtc.so.13")


def compile_cubin(job):
    """(file, ((name, value), ...)) to (machine code, log)."""
    file, defines = job
    text = "".join(f"#define {k} {v}\n" for k, v in defines)
    return compile_text(text + (CUDA / "gemm_tile.cuh").read_text() * (file != "gemm_skinny.cu") + (CUDA / file).read_text(), file)


def compile_text(text, file):
    """A whole text to (machine code, log)."""
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None)
    options = ["--gpu-architecture=sm_90a"] + [f"-I{r / 'include'}" for r in cuda_roots() if (r / "include").exists()]
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status:
        return None, log.value.decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    return code.raw, log.value.decode()


# ---- launching -----------------------------------------------------------------------------------------------------


class Driver:
    """The few driver calls that PyTorch does not provide."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.keep = []

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else status}")

    def function(self, code, entry, dynamic):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if dynamic:
            self.call("cuFuncSetAttribute", function, 8, dynamic)
        attribute = {}
        for key, number in (("registers", 4), ("local", 3), ("shared", 1)):
            value = ctypes.c_int()
            self.call("cuFuncGetAttribute", ctypes.byref(value), number, function)
            attribute[key] = value.value
        return function, attribute

    def launch(self, function, grid, block, dynamic, stream, args, early=False):
        """`args`: addresses (int), or bytes-like structs. `early`: may start before the previous kernel has ended."""
        holders = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
        attributes = (LaunchAttribute * 1)()
        attributes[0].id, attributes[0].value[0] = 6, 1
        config = LaunchConfig(grid[0], grid[1], grid[2], block, 1, 1, dynamic, stream, attributes, 1 if early else 0)
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [(f"d{i}", ctypes.c_uint) for i in range(7)] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)]


def longs(*values):
    return (ctypes.c_longlong * len(values))(*values)


MAP_STORE = {}


def tensor_map(driver, tensor, box, swizzle):
    """A map of a row-major bf16 matrix; `box` is (inner, outer), `swizzle` in bytes."""
    key = (tensor.data_ptr(), tuple(tensor.shape), box, swizzle)
    if key in MAP_STORE:
        return MAP_STORE[key]
    raw = (ctypes.c_uint8 * 192)()
    at = (ctypes.addressof(raw) + 63) // 64 * 64
    rows, columns = tensor.shape
    driver.call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(at), 9, 2, ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * 2),
        (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1), 0, {64: 2, 128: 3}[swizzle], 2, 0)
    view = (ctypes.c_uint8 * 128).from_address(at)
    view.raw = raw
    MAP_STORE[key] = view
    return view


class Kernel:
    """One compiled configuration."""

    registry = []

    def __init__(self, name, file, entry, **defines):
        self.name, self.file, self.entry, self.defines = name, file, entry, defines
        self.job = (file, tuple(sorted(defines.items())))
        self.function = None
        Kernel.registry.append(self)

    def get(self, key, default):
        return self.defines.get(key, default)

    def load(self, driver, code):
        self.driver = driver
        self.function, self.attribute = driver.function(code, self.entry, self.dynamic())

    def dynamic(self):
        return 0


LAYOUT = {"nt": (0, 0), "nn": (0, 1), "tn": (1, 1)}


class Gemm(Kernel):
    """gemm.cu: C[m, n] = sum over k of A[m, k] B[n, k]; operands as they lie in memory."""

    block = 128

    def __init__(self, layout, name="", file="gemm.cu", **defines):
        a, b = LAYOUT[layout]
        self.layout = layout
        super().__init__(f"{file[:-3]} {layout} {name}", file, "gemm", A_MN=a, B_MN=b, **defines)
        d = {"BM": 128, "BN": 128, "BK": 32, "STAGES": 2, "CM": 2, "CN": 1, "CS": 1, "SWIGLU": 0} | defines
        self.d = d
        self.f32 = defines.get("OUT_F32", 0)
        bk, cm, cn = d["BK"], d["CM"], d["CN"]
        cut_a, cut_b = max(1, cn * 64 // d["BM"]), cm if math.ceil(d["BN"] / 64) % cm else 1
        self.box_a = ((64, bk // cut_a), 128) if a else ((bk, d["BM"] // cn), bk * 2)
        self.box_b = ((64, bk // cut_b), 128) if b else ((bk, d["BN"] // max(cm, 1 + d["SWIGLU"])), bk * 2)

    def dynamic(self):
        d = self.d
        columns = math.ceil(d["BN"] / 64) * 64 if self.layout != "nt" else d["BN"]
        return (d["STAGES"] * (d["BM"] + columns) * d["BK"] * 2 + 1024) * d.get("DYNAMIC", 0)

    def sizes(self, a, b):
        m, k = a.shape if self.layout != "tn" else a.shape[::-1]
        n = b.shape[0] if self.layout == "nt" else b.shape[1]
        return m, n, k

    def clusters(self, m, n):
        d = self.d
        return math.ceil(m / (d["CM"] * d["BM"])) * math.ceil(n / (d["CN"] * d["BN"]))

    def target(self, c):
        return c.data_ptr()

    def grid(self, m, n, pieces):
        d = self.d
        return (self.clusters(m, n) * d["CM"] * d["CN"] * d["CS"], pieces, 1)

    def __call__(self, a, b, c, bias=None, add=None, pieces=1, early=False):
        import torch

        m, n, k = self.sizes(a, b)
        split = k if pieces == 1 else math.ceil(math.ceil(k / pieces) / self.d["BK"]) * self.d["BK"]
        assert math.ceil(k / split) == pieces
        args = [tensor_map(self.driver, a, *self.box_a), tensor_map(self.driver, b, *self.box_b), self.target(c)]
        args += [t.data_ptr() for t in (bias, add) if t is not None]
        args.append(longs(m, n, k, split))
        self.driver.launch(self.function, self.grid(m, n, pieces), self.block, self.dynamic(),
                           torch.cuda.current_stream().cuda_stream, args, early)


class Dynamic(Gemm):
    """gemm_dyn.cu."""

    block = 384

    def __init__(self, layout, name, **defines):
        super().__init__(layout, name, file="gemm_dyn.cu", **{"BK": 64, "STAGES": 4, "DYNAMIC": DYNAMIC} | defines)
        self.store = self.d.get("STORE", int(not self.f32 and not self.d.get("ADD", 0)))

    def dynamic(self):
        return super().dynamic() + DYNAMIC * self.store * 256 * self.d["BN"] // (1 + self.d["SWIGLU"])

    def load(self, driver, code):
        super().load(driver, code)
        self.size = self.d["CM"] * self.d["CN"] * self.d["CS"]
        self.most = 132 // self.size
        if self.size > 1:
            # Larger clusters do not fit everywhere.
            attributes = (LaunchAttribute * 1)()
            attributes[0].id = 4
            attributes[0].value[0], attributes[0].value[1], attributes[0].value[2] = self.size, 1, 1
            config = LaunchConfig(self.most * self.size, 1, 1, self.block, 1, 1, self.dynamic(), None, attributes, 1)
            count = ctypes.c_int()
            driver.call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self.function, ctypes.byref(config))
            self.most = min(self.most, count.value)

    def target(self, c):
        return tensor_map(self.driver, c, (32, 64), 64) if self.store else c.data_ptr()

    def grid(self, m, n, pieces):
        return (min(self.clusters(m, n) * pieces, self.most) * self.size, 1, 1)


class Reduce(Kernel):
    """gemm_reduce of gemm.cu."""

    def __init__(self, **defines):
        super().__init__("gemm_reduce", "gemm.cu", "gemm_reduce", **defines)

    def __call__(self, partial, out, add=None):
        import torch

        args = [partial.data_ptr(), out.data_ptr()] + ([add.data_ptr()] if add is not None else [])
        args.append(longs(out.numel(), partial.shape[0]))
        grid = min(1056, math.ceil(out.numel() / 1024))
        self.driver.launch(self.function, (grid, 1, 1), 256, 0, torch.cuda.current_stream().cuda_stream, args)


class Skinny(Kernel):
    """gemm_skinny.cu."""

    def __init__(self, k, name="", blocks=None, **defines):
        super().__init__(f"skinny {name}", "gemm_skinny.cu", "gemm_skinny", K_DIM=k, **defines)
        self.d = {"TOKENS": 16, "ROW_TILES": 4, "K_WARPS": 4, "CS": 1, "SWIGLU": 0, "NORM": 0} | defines
        self.blocks, self.f32 = blocks, defines.get("OUT_F32", 0)

    def dynamic(self):
        d = self.d
        slices = math.ceil(math.ceil(self.defines["K_DIM"] / 32) / d["CS"])
        staged = d["TOKENS"] * (slices | 1) * 64 if d["ROW_TILES"] > 1 else 16
        units = d["TOKENS"] * d["ROW_TILES"] // 8
        sums = 512 * (units * (d["K_WARPS"] - 1) + (d["CS"] > 1) * d["CS"] * math.ceil(units / d["CS"]))
        return (staged + sums) * d.get("DYNAMIC", 0)

    def __call__(self, x, w, y, gain=None, bias=None, add=None, early=False):
        import torch

        d = self.d
        m, n = x.shape[0], w.shape[0]
        groups = math.ceil(n / (16 * d["ROW_TILES"])) # with SWIGLU 8 columns of n / 2 a tile
        groups = min(groups, self.blocks or groups)
        args = [t.data_ptr() for t in (x, w, y, gain, bias, add) if t is not None]
        dims = [m, n]
        if d["NORM"]:
            dims.append(ctypes.c_longlong.from_buffer(ctypes.c_double(EPS)).value)
        args.append(longs(*dims))
        self.driver.launch(self.function, (groups * d["CS"], math.ceil(m / d["TOKENS"]), 1),
                           d["ROW_TILES"] * d["K_WARPS"] * 32, self.dynamic(), torch.cuda.current_stream().cuda_stream, args, early)


EPS = 1e-6


# ---- the configurations --------------------------------------------------------------------------------------------

# Training. Names contain the columns of a tile and the cluster: CM x CN.
RING = {256: 4, 224: 4, 192: 5, 128: 6}


def dynamics(layout, *shapes, **defines):
    """Tiles of `bn` columns, clusters of `cm` x `cn`, `cs` blocks to a sum."""
    stages = 0 if defines.get("STORE", layout != "tn") == 0 else 1
    name = " direct" if stages == 0 and layout != "tn" else ""
    return [Dynamic(layout, f"{bn} {cm}x{cn} /{cs}{name}", BN=bn, CM=cm, CN=cn, CS=cs, STAGES=RING[bn] - stages, **defines)
            for bn, cm, cn, cs in shapes]


ONE = [(bn, 1, 1, 1) for bn in (256, 224, 192, 128)]
LARGE = {
    "nt": [Gemm("nt", "1x1", CM=1)] + dynamics("nt", *ONE, (256, 2, 1, 1)) + dynamics("nt", ONE[0], STORE=0),
    "nn": [Gemm("nn", "1x1", CM=1)] + dynamics("nn", *ONE, (224, 2, 1, 1)) + dynamics("nn", ONE[0], STORE=0),
    "tn": [Gemm("tn", "1x1", CM=1, OUT_F32=1)]
    + dynamics("tn", *ONE, (256, 1, 1, 2), (192, 1, 1, 2), (128, 1, 1, 2), (192, 1, 1, 3), (224, 1, 1, 4), OUT_F32=1),
}
REDUCE = Reduce(OUT_F32=1)
REDUCE_ADD = Reduce(OUT_F32=1, ADD=1)
EXTRA = [
    Gemm("nt", "2x1 bias", BIAS=1),
    Gemm("nt", "4x1", CM=4),
    Gemm("nt", "1x1 bias f32", CM=1, BIAS=1, OUT_F32=1),
    Gemm("nt", "2x1 add", ADD=1),
    Gemm("nt", "2x1 swiglu", SWIGLU=1),
    Gemm("nt", "1x1 swiglu", SWIGLU=1, CM=1),
    Gemm("nn", "2x1 f32", OUT_F32=1),
    Gemm("tn", "2x1 add", OUT_F32=1, ADD=1),
    Gemm("tn", "2x1 bf16"),
    Gemm("nn", "2x2", CN=2),
    Gemm("tn", "2x2", CN=2, OUT_F32=1),
    Dynamic("nt", "256 2x1 swiglu", BN=256, SWIGLU=1),
    Dynamic("nt", "256 1x1 swiglu", BN=256, SWIGLU=1, CM=1),
    Dynamic("nt", "192 1x1 bias", BN=192, CM=1, BIAS=1),
    Dynamic("tn", "192 1x1 /2 add", BN=192, CM=1, CS=2, OUT_F32=1, ADD=1),
    Dynamic("nt", "256 1x1 bias add", BN=256, CM=1, BIAS=1, ADD=1),
    Dynamic("tn", "256 1x2 add", BN=256, CM=1, CN=2, OUT_F32=1, ADD=1),
    Gemm("nt", "64 rows, 1x4", BM=64, CM=1, CN=4, BLOCKS_PER_SM=4),
]


def mid(bm, bn, stages, cs=1, cn=1, per_sm=1, **defines):
    """Decoding with gemm.cu and dynamic shared memory: rows x columns of a tile, stages, blocks that share the sum."""
    return Gemm("nt", f"{bm}x{bn} s{stages} 1x{cn} /{cs}", BM=bm, BN=bn, BK=64, STAGES=stages, CM=1, CN=cn, CS=cs,
                BLOCKS_PER_SM=per_sm, DYNAMIC=DYNAMIC, WEIGHTS_EARLY=1, **defines)


STATIC_MID = [Gemm("nt", "64x32x64 static /4", BM=64, BN=32, BK=64, STAGES=3, CM=1, CS=4, WEIGHTS_EARLY=1),
              Gemm("nt", "128x64x32 static /4", BM=128, BN=64, BK=32, STAGES=3, CM=1, CS=4, WEIGHTS_EARLY=1)]
MID = {
    (9728, 896): {
        64: [mid(64, 80, 10), mid(64, 64, 6, per_sm=2), mid(64, 80, 10, cn=2), mid(64, 32, 8, per_sm=2)],
        128: [mid(128, 80, 8), mid(128, 80, 8, cn=2), mid(128, 64, 4, per_sm=2), mid(128, 32, 5, per_sm=2)],
    },
    (896, 4864): {
        64: [mid(64, 64, 10, 8), mid(64, 32, 14, 4)],
        128: [mid(128, 64, 8, 8), mid(128, 32, 10, 4)],
    },
    (151936, 896): {
        64: [mid(64, 128, 4, per_sm=2), mid(64, 64, 6, per_sm=2), Dynamic("nt", "128 s6 64", BN=128, CM=1, STAGES=6)],
        128: [mid(128, 128, 3, per_sm=2), mid(128, 64, 4, per_sm=2), Dynamic("nt", "128 s6", BN=128, CM=1, STAGES=6)],
    },
    (1152, 896): {
        64: [mid(64, 64, 2, 8), mid(64, 32, 4, 4), mid(64, 16, 7, 2)],
        128: [mid(128, 64, 2, 8), mid(128, 32, 4, 4), mid(64, 32, 4, 4), mid(64, 64, 4, 4)],
    },
    (896, 896): {
        64: [mid(64, 64, 2, 8), mid(64, 32, 4, 4), mid(64, 16, 7, 2)],
        128: [mid(128, 64, 2, 8), mid(128, 32, 4, 4), mid(128, 16, 7, 2)],
    },
}
MID_ALL = STATIC_MID + [k for by_rows in MID.values() for kernels in by_rows.values() for k in kernels]

# Decoding with gemm_skinny.cu, by the shape (N, K) each is meant for: tiles of a block, warps of a tile, blocks of a sum.


def skinny(k, tiles, warps, ahead, cs=1, per_sm=1, blocks=None, note="", **defines):
    name = f"{tiles}t {warps}w a{ahead} /{cs}" + (f" {blocks}" if blocks else "") + (f" {note}" if note else "")
    return Skinny(k, name, blocks, ROW_TILES=tiles, K_WARPS=warps, AHEAD=ahead, CS=cs, BLOCKS_PER_SM=per_sm,
                  ONCE=0 if blocks else 1, **defines)


EARLY = {"WEIGHTS_EARLY": 1, "note": "W first"}
SKINNY = {
    (9728, 896): [skinny(896, 5, 4, 7), skinny(896, 5, 4, 7, **EARLY), skinny(896, 2, 4, 7, per_sm=2), skinny(896, 4, 4, 3, per_sm=2),
                  skinny(896, 4, 4, 3, per_sm=2, **EARLY), skinny(896, 1, 7, 4, per_sm=4)],
    (896, 4864): [skinny(4864, 1, 19, 4, 2), skinny(4864, 1, 19, 4, 2, **EARLY), skinny(4864, 1, 10, 4, 4), skinny(4864, 1, 10, 4, 4, **EARLY),
                  skinny(4864, 1, 5, 4, 8, per_sm=4), skinny(4864, 2, 5, 4, 8, per_sm=2), skinny(4864, 1, 16, 10)],
    (151936, 896): [skinny(896, 2, 4, 4, per_sm=3, blocks=396), skinny(896, 2, 4, 7, per_sm=2, blocks=264), skinny(896, 4, 4, 3, per_sm=2, blocks=264),
                    skinny(896, 1, 7, 4, per_sm=4, blocks=528)],
    (1152, 896): [skinny(896, 1, 14, 2), skinny(896, 1, 14, 2, **EARLY), skinny(896, 1, 7, 4), skinny(896, 1, 28, 1), skinny(896, 1, 14, 1, 2)],
    (896, 896): [skinny(896, 1, 14, 2, per_sm=2), skinny(896, 1, 14, 2, per_sm=2, **EARLY), skinny(896, 1, 28, 1), skinny(896, 1, 14, 1, 2, per_sm=2)],
}
WIDE = {
    tokens: {
        (9728, 896): [skinny(896, 5, 4, 4, **wide), skinny(896, 4, 4, 7, **wide)],
        (896, 4864): [skinny(4864, 4, 5, 4, 8, **wide), skinny(4864, 2, 5, 4, 8, per_sm=2, **wide)],
        (151936, 896): [skinny(896, 4, 4, 4, blocks=132, **wide), skinny(896, 5, 4, 4, blocks=132, **wide)],
        (1152, 896): [skinny(896, 2, 7, 1, 4, **wide), skinny(896, 2, 4, 2, 4, **wide), skinny(896, 4, 4, 1, 8, **wide)],
        (896, 896): [skinny(896, 2, 7, 1, 4, **wide), skinny(896, 2, 4, 2, 4, **wide)],
    }
    for tokens in (32, 64)
    for wide in [{"TOKENS": tokens, "DYNAMIC": DYNAMIC, "WEIGHTS_EARLY": 1, "note": f"{tokens} tokens"}]
}
def chain_kernels(tokens, early):
    """The products of a layer and the head, fused with what surrounds them."""
    wide = {"WEIGHTS_EARLY": early, "note": "fused"} | ({"TOKENS": tokens, "DYNAMIC": DYNAMIC} if tokens > 16 else {})
    if tokens <= 16:
        return {
            "qkv": skinny(896, 1, 7, 4, NORM=1, BIAS=1, **wide),
            "o": skinny(896, 1, 14, 2, ADD=1, **wide),
            "gate up": skinny(896, 5, 4, 7, NORM=1, SWIGLU=1, **wide),
            "down": skinny(4864, 1, 5, 4, 8, per_sm=4, ADD=1, **wide),
            "head": skinny(896, 2, 4, 4, per_sm=3, blocks=396, NORM=1, OUT_F32=1, **wide),
        }
    return {
        "qkv": skinny(896, 2, 7, 1, 4, NORM=1, BIAS=1, **wide),
        "o": skinny(896, 2, 7, 1, 4, ADD=1, **wide),
        "gate up": skinny(896, 5, 4, 4, NORM=1, SWIGLU=1, **wide),
        "down": skinny(4864, 4, 5, 4, 8, ADD=1, **wide),
        "head": skinny(896, 4, 4, 4, blocks=132, NORM=1, OUT_F32=1, **wide),
    }


def chain_tiles(rows):
    """The same with gemm.cu, where the norm is a separate kernel and omitted here."""
    return {
        "qkv": mid(rows, 32, 4, 4, BIAS=1),
        "o": mid(rows, 32, 4, 4, ADD=1),
        "gate up": mid(rows, 64, 4, per_sm=2, SWIGLU=1),
        "down": mid(rows, 64, 8, 8, ADD=1),
        "head": mid(64, 64, 6, per_sm=2, OUT_F32=1) if rows == 64 else Dynamic("nt", "head f32", BN=128, CM=1, STAGES=6, OUT_F32=1),
    }


CHAIN = {(tokens, early): chain_kernels(tokens, early) for tokens, early in ((16, 0), (16, 1), (32, 0), (64, 0))}
CHAIN_TILES = {rows: chain_tiles(rows) for rows in (64, 128)}
SKINNY_EXTRA = [k for c in ((16, 0), (64, 0)) for k in CHAIN[c].values()] + [
    skinny(896, 5, 4, 7, TOKENS=8, note="8 tokens"),
    skinny(896, 2, 4, 4, 2, TOKENS=32, note="32 tokens"),
    skinny(888, 2, 3, 4, OUT_F32=1, BIAS=1, ADD=1, note="ragged"),
    skinny(904, 2, 3, 4, NORM=1, note="ragged norm"),
    skinny(904, 1, 3, 4, 4, ADD=1, note="ragged"),
    skinny(904, 1, 3, 3, 2, NORM=1, note="ragged norm"),
]


# ---- measuring -----------------------------------------------------------------------------------------------------

FAILED = []
TABLE = []


def report(ok, text):
    if not ok:
        FAILED.append(text)
    print(("ok    " if ok else "WRONG ") + text, flush=True)


def attempt(what, body):
    import torch

    try:
        body()
        torch.cuda.synchronize()
    except Exception as e:  # one kernel must not stop the others
        traceback.print_exc(limit=3)
        report(False, f"{what}: {type(e).__name__}: {str(e)[:200]}")


def error(out, ref):
    import torch

    return (torch.linalg.vector_norm(out.double() - ref) / torch.linalg.vector_norm(ref)).item()


def limit(out, k):
    import torch

    # Tensor cores truncate sums: the error grows with the number of additions.
    return 5e-3 if out.dtype == torch.bfloat16 else 1e-5 * max(1.0, k / 1024)


def operands(layout, m, n, k):
    import torch

    a = torch.randn(*((m, k) if layout != "tn" else (k, m)), device="cuda", dtype=torch.bfloat16)
    b = torch.randn(*((n, k) if layout == "nt" else (k, n)), device="cuda", dtype=torch.bfloat16)
    return a, b


def reference(layout, a, b):
    a, b = a.double(), b.double()
    return (a.T if layout == "tn" else a) @ (b.T if layout == "nt" else b)


def swiglu(x):
    import torch

    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def check_gemm(kernel, m, n, k, pieces=1):
    import torch

    a, b = operands(kernel.layout, m, n, k)
    ref = reference(kernel.layout, a, b)
    d = kernel.d
    dtype = torch.float32 if kernel.f32 else torch.bfloat16
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) * 20 if d.get("BIAS") else None
    ref = ref + bias.double() if bias is not None else ref
    ref = swiglu(ref / math.sqrt(k)) if d["SWIGLU"] else ref
    if d["SWIGLU"]:
        a = (a.double() / math.sqrt(k)).to(torch.bfloat16)
        ref = swiglu(reference(kernel.layout, a, b))
    old = torch.randn(*ref.shape, device="cuda", dtype=dtype) * 20 if d.get("ADD") else None
    ref = ref + old.double() if old is not None else ref
    outs = []
    for _ in range(2):
        if pieces > 1:
            partial = torch.full((pieces, m, n), float("nan"), device="cuda")
            kernel(a, b, partial, pieces=pieces)
            out = torch.randn(m, n, device="cuda") if not outs else outs_old.clone()
            if not outs:
                outs_old = out.clone()
                ref = ref + out.double()
            REDUCE_ADD(partial, out, out)
        else:
            out = torch.full(ref.shape, float("nan"), device="cuda", dtype=dtype) if old is None else old.clone()
            kernel(a, b, out, bias=bias, add=None if old is None else out)
        outs.append(out)
    torch.cuda.synchronize()
    e, same = error(outs[0], ref), torch.equal(outs[0], outs[1])
    report(e <= limit(outs[0], k) and same,
           f"{kernel.name} [{m}, {n}, {k}]{f' in {pieces}' if pieces > 1 else ''} error {e:.1e} {'same bits' if same else 'OTHER BITS'}")


def check_skinny(kernel, m, n):
    import torch

    d, k = kernel.d, kernel.defines["K_DIM"]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3
    w = (torch.randn(n, k, device="cuda") / math.sqrt(k)).to(torch.bfloat16)
    gain = torch.rand(k, device="cuda").add(0.5).to(torch.bfloat16) if d["NORM"] else None
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if d.get("BIAS") else None
    xs = x.double()
    if d["NORM"]:
        xs = xs * torch.rsqrt(xs.square().mean(-1, keepdim=True) + EPS) * gain.double()
    ref = xs @ w.double().T
    ref = ref + bias.double() if bias is not None else ref
    ref = swiglu(ref) if d["SWIGLU"] else ref
    dtype = torch.float32 if kernel.f32 else torch.bfloat16
    old = torch.randn(*ref.shape, device="cuda", dtype=dtype) if d.get("ADD") else None
    ref = ref + old.double() if old is not None else ref
    outs = []
    for _ in range(2):
        out = torch.full(ref.shape, float("nan"), device="cuda", dtype=dtype) if old is None else old.clone()
        kernel(x, w, out, gain=gain, bias=bias, add=None if old is None else out)
        outs.append(out)
    torch.cuda.synchronize()
    e, same = error(outs[0], ref), torch.equal(outs[0], outs[1])
    most = 5e-3 if d["NORM"] else limit(outs[0], k)
    report(e <= most and same, f"{kernel.name} [{m}, {n}, {k}] error {e:.1e} {'same bits' if same else 'OTHER BITS'}")


def event_ms(calls, warm=3, repeats=12):
    """Median time of a call; `calls` are used in turn."""
    import torch

    for i in range(warm):
        calls[i % len(calls)]()
    pairs = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[i % len(calls)]()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) for s, e in pairs)[repeats // 2]


def graph_us(calls, repeats=7):
    """Time of a call when all `calls` are launched from one CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return event_ms([graph.replay], warm=2, repeats=repeats) * 1000 / len(calls)


def row(kind, name, shape, ms, flops, data, torch_ms):
    rate, band = flops / ms / 1e9, data / ms / 1e9
    TABLE.append((kind, name, shape, ms, rate, band, torch_ms))
    print(f"{kind:7} {name:34} {shape:22} {ms * 1000:9.1f} us {rate:6.0f} TF/s {rate / PEAK_TFLOPS * 100:4.0f} % "
          f"{band:5.2f} TB/s {band / COPY_TBS * 100:4.0f} %   torch {torch_ms * 1000:8.1f} us  x{torch_ms / ms:.2f}", flush=True)


def torch_product(layout, a, b, out):
    import torch

    return torch.mm(a.T if layout == "tn" else a, b.T if layout == "nt" else b, out=out)


def time_large(layout, m, n, k):
    import torch

    size = f"{m}x{n}x{k}"
    sets = [operands(layout, m, n, k) for _ in range(3 if m * n < 1e9 else 1)]
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    repeats = max(1, min(12, round(2.5e12 / (2 * m * n * k)))) # calls of one graph
    base = graph_us([lambda s=sets[i % len(sets)]: torch_product(layout, *s, out) for i in range(repeats)]) / 1000
    for kernel in LARGE[layout]:
        if time.time() - START > 45 and kernel.name[-1] != "1":
            continue

        def body(kernel=kernel):
            dtype = torch.float32 if kernel.f32 else torch.bfloat16
            target = torch.empty(m, n, device="cuda", dtype=dtype)
            clusters = kernel.clusters(m, n)
            slots = 132 if kernel.block == 384 else 396
            pieces = max(1, min(8, round(slots / clusters))) if layout == "tn" and kernel.d["CS"] == 1 and clusters < slots * 0.6 else 1
            if pieces > 1:
                partial = torch.empty(pieces, m, n, device="cuda")

                def call(a, b):
                    kernel(a, b, partial, pieces=pieces)
                    REDUCE(partial, target)
            else:
                def call(a, b):
                    kernel(a, b, target)
            ms = graph_us([lambda s=sets[i % len(sets)]: call(*s) for i in range(repeats)]) / 1000
            data = 2 * (m * k + n * k) + m * n * target.element_size()
            row("large", kernel.name + (f" in {pieces}" if pieces > 1 else ""), size, ms, 2.0 * m * n * k, data, base)

        attempt(f"time {kernel.name} {size}", body)


def weight_sets(n, k):
    import torch

    return [(torch.randn(n, k, device="cuda") / math.sqrt(k)).to(torch.bfloat16)
            for _ in range(min(160, max(2, math.ceil(150e6 / (n * k * 2)))))]


def time_decode(m, n, k, kernels):
    import torch

    weights = weight_sets(n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    base = graph_us([lambda w=w: torch.mm(x, w.T, out=y) for w in weights])
    for kernel in kernels:
        def body(kernel=kernel):
            target = y.float() if kernel.f32 else y
            us = graph_us([lambda w=w: kernel(x, w, target) for w in weights])
            early = graph_us([lambda w=w: kernel(x, w, target, early=True) for w in weights])
            data = 2 * n * k + 2 * m * k + m * n * target.element_size()
            row("decode", kernel.name, f"{m}x{n}x{k}", us / 1000, 2.0 * m * n * k, data, base / 1000)
            row(" early", kernel.name, f"{m}x{n}x{k}", early / 1000, 2.0 * m * n * k, data, base / 1000)

        attempt(f"time {kernel.name} {m}x{n}x{k}", body)


def time_chain(m, layers=24):
    """All products of a decode step of a 0.5B decoder, each waiting for the one before; attention is omitted."""
    import torch

    def weight(n, k):
        return (torch.randn(n, k, device="cuda") / math.sqrt(k)).to(torch.bfloat16)

    params = [(weight(1152, 896), weight(896, 896), weight(9728, 896), weight(896, 4864)) for _ in range(layers)]
    head, bias, gain = weight(151936, 896), torch.zeros(1152, device="cuda", dtype=torch.bfloat16), torch.ones(896, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, 896, device="cuda", dtype=torch.bfloat16)
    qkv, hidden = torch.empty(m, 1152, device="cuda", dtype=torch.bfloat16), torch.empty(m, 4864, device="cuda", dtype=torch.bfloat16)
    o_in = torch.randn(m, 896, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(m, 151936, device="cuda")
    def ours(kernels, early=False):
        fused = {"gain": gain} if kernels["qkv"].file == "gemm_skinny.cu" else {}
        for q, o, gu, down in params:
            kernels["qkv"](x, q, qkv, bias=bias, early=early, **fused)
            kernels["o"](o_in, o, x, add=x, early=early)
            kernels["gate up"](x, gu, hidden, early=early, **fused)
            kernels["down"](hidden, down, x, add=x, early=early)
        kernels["head"](x, head, logits, early=early, **fused)

    def theirs():
        for q, o, gu, down in params:
            torch.addmm(bias, torch.nn.functional.rms_norm(x, (896,), gain, EPS), q.T, out=qkv)
            x.add_(o_in @ o.T)
            g, u = (torch.nn.functional.rms_norm(x, (896,), gain, EPS) @ gu.T).chunk(2, -1)
            x.add_((torch.nn.functional.silu(g) * u) @ down.T)
        torch.mm(torch.nn.functional.rms_norm(x, (896,), gain, EPS), head.T)

    data = sum(w.numel() for p in params for w in p) * 2 + head.numel() * 2
    runs = [("torch", theirs)]
    width = 16 if m <= 16 else m
    for early in (0, 1):
        if (width, early) in CHAIN:
            runs.append((f"fused{', early start' * early}", lambda k=CHAIN[width, early], e=early: ours(k, bool(e))))
    for early in (False, True) if m in CHAIN_TILES else ():
        runs.append((f"gemm.cu without norms{', early start' * early}", lambda k=CHAIN_TILES[m], e=early: ours(k, e)))
    for name, what in runs:
        ms = graph_us([what]) / 1000
        print(f"chain   {m} rows, {layers} layers and head, {name}: {ms:.3f} ms ({data / ms / 1e9:.2f} TB/s)", flush=True)


# ---- the run -------------------------------------------------------------------------------------------------------


def check_large():
    for layout, kernels in LARGE.items():
        # The rows of a weight gradient are a row's elements of dY: a multiple of 8.
        shapes = [(8, 8, 1), (1152, 896, 77), (904, 888, 1000), (136, 264, 257)] if layout == "tn" else [
            (1, 8, 8), (77, 1152, 896), (1000, 904, 888), (257, 136, 4872)]
        for kernel in kernels:
            for shape in shapes:
                attempt(f"{kernel.name} {shape}", lambda k=kernel, s=shape: check_gemm(k, *s))
        for kernel in kernels[1:3] + kernels[6:7]:
            for shape in {"nt": [(2048, 9728, 896), (8192, 896, 4864)], "nn": [(8192, 896, 9728), (8192, 4864, 896)],
                          "tn": [(9728, 896, 8192), (896, 4864, 8192)]}[layout]:
                attempt(f"{kernel.name} {shape}", lambda k=kernel, s=shape: check_gemm(k, *s))
    attempt("head", lambda: check_gemm(LARGE["nt"][2], 512, 151936, 896))
    for kernel in [k for k in LARGE["tn"] if k.d["CS"] == 1]:
        for shape in ((1152, 896, 8192), (136, 264, 1000)):
            attempt(f"{kernel.name} pieces {shape}", lambda k=kernel, s=shape: check_gemm(k, *s, pieces=4))
    for kernel in EXTRA:
        for shape in ((8, 16, 8), (80, 1168, 904), (1000, 9728, 896)):
            attempt(f"{kernel.name} {shape}", lambda k=kernel, s=shape: check_gemm(k, *s))


def check_decode():
    for kernel in {id(k.job): k for k in MID_ALL}.values():
        for shape in ((1, 8, 8), (33, 1152, 896), (128, 904, 4864), (200, 136, 904)):
            attempt(f"{kernel.name} {shape}", lambda k=kernel, s=shape: check_gemm(k, *s))


def check_skinny_all():
    for (n, _), kernels in [g for table in (SKINNY, WIDE[32], WIDE[64]) for g in table.items()]:
        for kernel in kernels:
            for m in (1, 16, 33):
                attempt(kernel.name, lambda k=kernel, m=m: check_skinny(k, m, n))
    for kernel in SKINNY_EXTRA:
        for m, n in ((1, 16), (5, 9728), (16, 1168), (33, 912)):
            attempt(kernel.name, lambda k=kernel, m=m, n=n: check_skinny(k, m, n))


def large():
    m = 8192
    for layout, shapes in (
        ("nt", [(m, 9728, 896), (m, 896, 4864), (m, 1152, 896), (m, 896, 896), (4096,) * 3, (8192,) * 3, (m, 151936, 896)]),
        ("nn", [(m, 896, 9728), (m, 4864, 896), (m, 896, 1152), (m, 896, 896), (4096,) * 3, (8192,) * 3]),
        ("tn", [(9728, 896, m), (896, 4864, m), (1152, 896, m), (896, 896, m), (4096,) * 3, (8192,) * 3]),
    ):
        for shape in shapes:
            attempt(f"large {layout} {shape}", lambda: time_large(layout, *shape))


def decode():
    for n, k in SKINNY:
        attempt(f"decode {n} {k}", lambda: time_decode(16, n, k, SKINNY[n, k] + MID[n, k][64][:1]))
        for m in (64, 128):
            attempt(f"decode {m} {n} {k}", lambda: time_decode(m, n, k, MID[n, k][m] + (WIDE[64][n, k] if m == 64 else STATIC_MID[1:])))
        attempt(f"decode 32 {n} {k}", lambda: time_decode(32, n, k, WIDE[32][n, k]))
    attempt("decode 1", lambda: time_decode(1, 9728, 896, SKINNY[9728, 896][:1]))
    attempt("decode 512", lambda: time_decode(512, 9728, 896, LARGE["nt"][:5] + MID[9728, 896][128]))


def chain():
    for m in (1, 16, 32, 64, 128):
        attempt(f"chain {m}", lambda: time_chain(m))


def probe():
    """Whether static shared memory beyond 48 KB works; if not, everything uses dynamic memory."""
    check_gemm(LARGE["nt"][1], 256, 512, 896)


SECTIONS = {"probe": probe, "check_skinny": check_skinny_all, "check_large": check_large, "check_decode": check_decode, "large": large, "decode": decode, "chain": chain}


def section(name, cubins):
    """One section, in this process."""
    import torch

    codes = pickle.loads(Path(cubins).read_bytes())
    torch.manual_seed(int(time.time()))
    torch.zeros(1, device="cuda")
    driver = Driver()
    for kernel in Kernel.registry:
        code, _ = codes[kernel.job]
        if code is not None:
            attempt(f"load {kernel.name}", lambda: kernel.load(driver, code))
    for group in list(LARGE.values()) + list(SKINNY.values()) + [g for t in (*MID.values(), *WIDE.values()) for g in t.values()] + [EXTRA, MID_ALL, STATIC_MID, SKINNY_EXTRA]:
        group[:] = [k for k in group if k.function]
    print(f"-- {name} on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    SECTIONS[name]()
    print(f"-- {name}: {len(FAILED)} wrong, {time.time() - START:.1f} s", flush=True)
    return 1 if FAILED else 0


def main():
    if sys.argv[1:2] == ["--section"]:
        return section(sys.argv[2], sys.argv[3])
    wanted = [s for s in SECTIONS if s != "probe" and (not sys.argv[1:] or any(s.startswith(w) for w in sys.argv[1:]))]
    jobs = sorted({k.job for k in Kernel.registry})
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        codes = dict(zip(jobs, pool.map(compile_cubin, jobs)))
    print(f"{len(jobs)} configurations compiled after {time.time() - START:.1f} s", flush=True)
    for kernel in Kernel.registry:
        code, log = codes[kernel.job]
        if code is None:
            report(False, f"{kernel.name} does not compile:\n{log[:2000]}")
    with tempfile.NamedTemporaryFile(suffix=".cubins") as file:
        file.write(pickle.dumps(codes))
        file.flush()
        if not DYNAMIC and subprocess.run([sys.executable, __file__, "--section", "probe", file.name], timeout=60).returncode:
            print("static shared memory beyond 48 KB does not run here: dynamic from now on", flush=True)
            return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | {"DYNAMIC": "1"}).returncode
        # One process each, so that a kernel that never ends or a broken context affects only one section.
        for name in wanted:
            try:
                status = subprocess.run([sys.executable, __file__, "--section", name, file.name], timeout=60).returncode
                if status:
                    FAILED.append(f"{name} (status {status})")
            except subprocess.TimeoutExpired:
                report(False, f"{name}: no end within 60 s")
    print(f"after {time.time() - START:.1f} s: {'wrong: ' + ', '.join(f[:80] for f in FAILED) if FAILED else 'all right'}")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
