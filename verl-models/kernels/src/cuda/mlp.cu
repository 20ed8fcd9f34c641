// SwiGLU and its backward pass, element-wise.
//
//   y = silu(gate) · up,  silu(x) = x σ(x)
//   d_up = g · silu(gate),  d_gate = g · up · σ (1 + gate (1 − σ))
//
// Shapes: gate, up, y, g: [rows, INNER]; fused gate_up and its gradient: [rows, 2 · INNER], gates first.
// Launch: block 256, grid ceil(rows · INNER / W / 256) or less (the kernels stride), W = VEC if INNER is a multiple of
// it and 1 otherwise. Bytes: forward 3, backward 5 elements per element of y.
// Limits: buffers aligned to 16 bytes where INNER is a multiple of VEC. Gradients may overwrite gate and up.

#ifndef INNER
#define INNER 4864
#endif

constexpr int THREADS = 256;
constexpr int W = INNER % VEC == 0 ? VEC : 1;
constexpr unsigned PIECES = INNER / W;

struct MlpScalars {
    u64 rows;
};

__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (IS_F32) {
        return 1.0f / (1.0f + expf(-x));
    } else {
        return __fdividef(1.0f, 1.0f + power(-x * POWER_SCALE));
    }
}

// Position of a piece: its row's start in buffers of `stride` elements per row, and its column.
__device__ __forceinline__ u64 place(u64 piece, unsigned stride) {
    const u64 row = piece / PIECES;
    return row * stride + (piece - row * PIECES) * W;
}

__device__ __forceinline__ void forward(const elem* gate, const elem* up, elem* y, unsigned stride,
                                        const MlpScalars& s) {
    const u64 pieces = s.rows * PIECES;
    for (u64 piece = u64(blockIdx.x) * THREADS + threadIdx.x; piece < pieces; piece += u64(gridDim.x) * THREADS) {
        const u64 at = place(piece, stride);
        float g[W], u[W];
        load<W>(gate + at, g);
        load<W>(up + at, u);
#pragma unroll
        for (int i = 0; i < W; i++) u[i] *= g[i] * sigmoid(g[i]);
        store<W>(y + piece * W, u);
    }
}

__device__ __forceinline__ void backward(const elem* gate, const elem* up, const elem* gradient, elem* d_gate,
                                         elem* d_up, unsigned stride, const MlpScalars& s) {
    const u64 pieces = s.rows * PIECES;
    for (u64 piece = u64(blockIdx.x) * THREADS + threadIdx.x; piece < pieces; piece += u64(gridDim.x) * THREADS) {
        const u64 at = place(piece, stride);
        float x[W], u[W], g[W];
        load<W>(gate + at, x);
        load<W>(up + at, u);
        load<W>(gradient + piece * W, g);
#pragma unroll
        for (int i = 0; i < W; i++) {
            const float share = sigmoid(x[i]);
            const float silu = x[i] * share;
            x[i] = g[i] * u[i] * (share + silu * (1.0f - share));
            u[i] = g[i] * silu;
        }
        store<W>(d_gate + at, x);
        store<W>(d_up + at, u);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu(const elem* gate, const elem* up, elem* y, const __grid_constant__ MlpScalars s) {
    forward(gate, up, y, INNER, s);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_fused(const elem* gate_up, elem* y, const __grid_constant__ MlpScalars s) {
    forward(gate_up, gate_up + INNER, y, 2 * INNER, s);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_backward(const elem* gate, const elem* up, const elem* gradient, elem* d_gate, elem* d_up,
                    const __grid_constant__ MlpScalars s) {
    backward(gate, up, gradient, d_gate, d_up, INNER, s);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    swiglu_fused_backward(const elem* gate_up, const elem* gradient, elem* d_gate_up,
                          const __grid_constant__ MlpScalars s) {
    backward(gate_up, gate_up + INNER, gradient, d_gate_up, d_gate_up + INNER, 2 * INNER, s);
}
