// Root-mean-square norm and its backward pass.
//
//   s = 1 / sqrt(mean(x²) + ε);  y = w · (x · s)
//   with q = g · w:  dx = s q − x s³ mean(q x) (+ the gradient that reaches x around the norm);  dw = Σ_rows g x s
//
// x · s is rounded to the element's type, as a separate norm would round it.
//
// Shapes: x, y, g, dx: [rows, WIDTH]; w: [WIDTH]; rstd (s): [rows] f32; partial: [grid, WIDTH] f32; dw: [WIDTH] f32.
// Launch: block 256. Forward: grid ceil(rows / NORM_ROWS). Backward: grid min(ceil(rows / NORM_ROWS), 2 · SMs) and the
// same number as `blocks` of rms_norm_weight_gradient (block 1024, grid ceil(WIDTH / 32)).
// NORM_ROWS = 256 / LANES, where LANES is the least power of two with LANES ≥ min(32, accesses of a row) and at most 32
// values a lane: 8 rows for WIDTH 256 (bf16) to 1024.
// Bytes a row: forward 2 · WIDTH elements, backward (3 or 4) · WIDTH, all read or written once.
// Limits: WIDTH ≤ 8192; buffers aligned to 16 bytes where WIDTH is a multiple of VEC. dx may be g or the other
// gradient.

#ifndef WIDTH
#define WIDTH 896
#endif

constexpr int THREADS = 256;
constexpr int MOST_VALUES = 32;
// Elements of an access, accesses of a row.
constexpr int W = WIDTH % VEC == 0 ? VEC : 1;
constexpr int PIECES = WIDTH / W;

__device__ constexpr int row_lanes() {
    int lanes = 1;
    while (lanes < 32 && lanes < PIECES) lanes *= 2;
    while (lanes < THREADS && lanes * MOST_VALUES < WIDTH) lanes *= 2;
    return lanes;
}

constexpr int LANES = row_lanes();
constexpr int ROWS = THREADS / LANES;
constexpr int STEPS = (PIECES + LANES - 1) / LANES;
static_assert(WIDTH <= THREADS * MOST_VALUES, "WIDTH is above 8192");

struct NormScalars {
    u64 rows;
    double epsilon;
};

// Sum over the threads of a row, the same bits in each; every thread of the block takes part.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int step = (LANES < 32 ? LANES : 32) / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    if constexpr (LANES > 32) {
        __shared__ float parts[THREADS / 32];
        __syncthreads();
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
        __syncthreads();
        x = 0.0f;
#pragma unroll
        for (int i = 0; i < LANES / 32; i++) x += parts[threadIdx.x / LANES * (LANES / 32) + i];
    }
    return x;
}

// W adjacent elements in memory order: they stay packed in registers between uses.
struct Wide {
    uint4 bits;

    __device__ __forceinline__ void load(const elem* from) { bits = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ void get(float (&x)[VEC]) const { unpack(bits, x); }
    __device__ __forceinline__ void clear() { bits = make_uint4(0, 0, 0, 0); }
};

struct Single {
    elem value;

    __device__ __forceinline__ void load(const elem* from) { value = *from; }
    __device__ __forceinline__ void get(float (&x)[1]) const { x[0] = to_float(value); }
    __device__ __forceinline__ void clear() { assign(value, 0.0f); }
};

template <int> struct PieceOf {
    typedef Wide type;
};
template <> struct PieceOf<1> {
    typedef Single type;
};
typedef PieceOf<W>::type Piece;

// The thread's share of a row, zero-filled.
__device__ __forceinline__ void load_row(const elem* row, bool live, Piece (&own)[STEPS]) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int piece = step * LANES + threadIdx.x % LANES;
        if (live && piece < PIECES) {
            own[step].load(row + piece * W);
        } else {
            own[step].clear();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const elem* x, const elem* weight, elem* y, float* rstd, const __grid_constant__ NormScalars s) {
    for (u64 base = u64(blockIdx.x) * ROWS; base < s.rows; base += u64(gridDim.x) * ROWS) {
        const u64 row = base + threadIdx.x / LANES;
        const bool live = row < s.rows;
        Piece own[STEPS];
        load_row(x + row * WIDTH, live, own);
        float squares = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float value[W];
            own[step].get(value);
#pragma unroll
            for (int i = 0; i < W; i++) squares = fmaf(value[i], value[i], squares);
        }
        const float scale = 1.0f / sqrtf(row_sum(squares) / float(WIDTH) + float(s.epsilon));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int piece = step * LANES + threadIdx.x % LANES;
            if (!live || piece >= PIECES) continue;
            float value[W], w[W];
            own[step].get(value);
            load<W>(weight + piece * W, w);
#pragma unroll
            for (int i = 0; i < W; i++) w[i] *= rounded(value[i] * scale);
            store<W>(y + row * WIDTH + piece * W, w);
        }
        if (live && threadIdx.x % LANES == 0) rstd[row] = scale;
    }
}

// Adds up the blocks' rows of dw in registers, then those of a block through shared memory, row group by row group.
template <bool ADDS>
__device__ __forceinline__ void backward(const elem* h, const elem* weight, const float* rstd, const elem* g,
                                         const elem* past, elem* dh, float* partial, const NormScalars& s) {
    __shared__ float total[WIDTH];
    float dw[STEPS][W] = {};
    for (u64 base = u64(blockIdx.x) * ROWS; base < s.rows; base += u64(gridDim.x) * ROWS) {
        const u64 row = base + threadIdx.x / LANES;
        const bool live = row < s.rows;
        Piece own[STEPS], gradient[STEPS], other[ADDS ? STEPS : 1];
        load_row(h + row * WIDTH, live, own);
        load_row(g + row * WIDTH, live, gradient);
        if constexpr (ADDS) load_row(past + row * WIDTH, live, other);
        const float scale = live ? rstd[row] : 0.0f;
        float pull = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int piece = step * LANES + threadIdx.x % LANES;
            if (piece >= PIECES) continue;
            float x[W], q[W], w[W];
            own[step].get(x);
            gradient[step].get(q);
            load<W>(weight + piece * W, w);
#pragma unroll
            for (int i = 0; i < W; i++) {
                dw[step][i] = fmaf(q[i] * x[i], scale, dw[step][i]);
                pull = fmaf(q[i] * w[i], x[i], pull);
            }
        }
        pull = row_sum(pull) / float(WIDTH) * scale * scale * scale;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int piece = step * LANES + threadIdx.x % LANES;
            if (!live || piece >= PIECES) continue;
            float x[W], q[W], w[W], d[W];
            own[step].get(x);
            gradient[step].get(q);
            load<W>(weight + piece * W, w);
            if constexpr (ADDS) {
                other[step].get(d);
            } else {
#pragma unroll
                for (int i = 0; i < W; i++) d[i] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < W; i++) d[i] += q[i] * w[i] * scale - x[i] * pull;
            store<W>(dh + row * WIDTH + piece * W, d);
        }
    }
    for (int group = 0; group < ROWS; group++) {
        if (threadIdx.x / LANES == group) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int piece = step * LANES + threadIdx.x % LANES;
                if (piece >= PIECES) continue;
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const int column = piece * W + i;
                    total[column] = group == 0 ? dw[step][i] : total[column] + dw[step][i];
                }
            }
        }
        __syncthreads();
    }
    for (int column = threadIdx.x; column < WIDTH; column += THREADS) {
        partial[u64(blockIdx.x) * WIDTH + column] = total[column];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    rms_norm_backward(const elem* h, const elem* weight, const float* rstd, const elem* g, elem* dh, float* partial,
                      const __grid_constant__ NormScalars s) {
    backward<false>(h, weight, rstd, g, nullptr, dh, partial, s);
}

// `past` is the gradient that reaches h around the norm, along the residual.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    rms_norm_backward_add(const elem* h, const elem* weight, const float* rstd, const elem* g, const elem* past,
                          elem* dh, float* partial, const __grid_constant__ NormScalars s) {
    backward<true>(h, weight, rstd, g, past, dh, partial, s);
}

struct WeightScalars {
    u64 blocks;
    // Whether dw is added to the buffer's contents.
    u64 adds;
};

// dw (+)= Σ_blocks partial: 32 columns per block, 32 interleaved sums per column, added in order.
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_weight_gradient(const float* partial, float* dw, const __grid_constant__ WeightScalars s) {
    __shared__ float sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x % 32;
    const int slice = threadIdx.x / 32;
    float sum = 0.0f;
    if (column < WIDTH) {
#pragma unroll 4
        for (u64 block = slice; block < s.blocks; block += 32) sum += partial[block * WIDTH + column];
    }
    sums[slice][threadIdx.x % 32] = sum;
    __syncthreads();
    if (slice != 0 || column >= WIDTH) return;
    sum = s.adds ? dw[column] : 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) sum += sums[i][threadIdx.x];
    dw[column] = sum;
}
