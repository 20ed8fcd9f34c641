// Causal grouped-query attention over packed sequences, forward and backward, without a buffer of scores.
//
//   o_i = sum_j p_ij v_j,   p_ij = exp(scale q_i.k_j - lse_i),   lse_i = log sum_j exp(scale q_i.k_j),
//   j over the tokens of i's sequence with i - window < j <= i (window 0: all j <= i).
//   With g the gradient of o:  delta_i = g_i.o_i,   ds_ij = p_ij (g_i.v_j - delta_i),
//   dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij g_i   (over all heads of a group).
//
// Queries and keys are already rotated (see rope.cu). The sequences are concatenated: sequence b is tokens
// starts[b] .. starts[b+1]. A padded batch is the case of equal lengths. Tokens outside all sequences are not written.
//
// Shapes: q, out, d_out, dq [tokens, H*Dh]; k, v [tokens, K*Dh]; starts [sequences+1] i32; lse, delta [H, tokens] f32;
//   dk_parts, dv_parts [splits, tokens, K*Dh] f32. All but starts, lse, delta aligned to 16 bytes.
//
// Kernels, in the order in which they are launched; ROWS = 64, `longest` = the longest sequence:
//   attention_forward        grid (H, sequences, ceil(longest/ROWS)), block 128: out, lse
//   attention_backward_q     the same grid and block:                            dq, delta
//   attention_backward_kv    grid (K*splits, sequences, ceil(longest/ROWS)), block 128: dk_parts, dv_parts
// The parts are added by their reader (rope_backward).
// `splits` (1 .. H/K) divides the query heads of a group between blocks. Best is the smallest for which the longest
// block does about a multiprocessor's share:  ceil(H/K/splits) * longest <= 1.2 * H * sum of length^2 / (256 *
// multiprocessors).
// No sum depends on the order in which blocks run: two runs give the same bits.
//
// Arithmetic: bf16 with Dh a multiple of 16 up to 128 goes through wgmma with f32 accumulators. A block is a warpgroup
// that owns 64 rows, whose operands stay in registers (probabilities too); the other side arrives through shared memory
// in tiles, loaded by cp.async one tile ahead. Concurrent blocks on a multiprocessor hide each other's waits. f32, and
// other widths up to 256, use plain multiply-adds, a warp per row.
// Work: Dh multiply-adds per visible pair and product; 2 products forward, 7 backward (5, and 2 that are recomputed).

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

// float or bf16.
#ifndef ELEMENT
#define ELEMENT bf16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef QUERY_HEADS
#define QUERY_HEADS 14
#endif
#ifndef KEY_HEADS
#define KEY_HEADS 2
#endif

#define IS_F32_float 1
#define IS_F32_bf16 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define PLAIN (JOIN(IS_F32_, ELEMENT) || HEAD_DIM % 16 != 0 || HEAD_DIM > 128)

typedef ELEMENT T;

#define GROUP (QUERY_HEADS / KEY_HEADS)
#define QUERY_WIDTH (QUERY_HEADS * HEAD_DIM)
#define KEY_WIDTH (KEY_HEADS * HEAD_DIM)
// Queries (or keys) of a block.
#define ROWS 64
#define THREADS 128
#define LOG2E 1.4426950408889634f
#define NOTHING __int_as_float(0xff800000)

struct Scalars {
    double scale;
    long long tokens;
    // 0: every token attends to all tokens before it.
    long long window;
    // Parts of dk and dv; unused in the forward pass.
    long long splits;
};

// Tokens of this block's sequence.
struct Sequence {
    int first;
    int length;
};

__device__ __forceinline__ Sequence sequence_of_block(const int* starts) {
    const int first = starts[blockIdx.y];
    return {first, starts[blockIdx.y + 1] - first};
}

// The window, or if there is none a distance greater than any length.
__device__ __forceinline__ int window_of(const Scalars& s) { return s.window > 0 ? (int)s.window : 1 << 30; }

#if !PLAIN

// Elements of a row in one swizzled stripe of shared memory.
#define STRIPE (HEAD_DIM % 64 == 0 ? 64 : HEAD_DIM % 32 == 0 ? 32 : 16)
#define STRIPES (HEAD_DIM / STRIPE)
#define STRIPE_BYTES (STRIPE * 2)
// The swizzle's code in a matrix descriptor: 128, 64 or 32 bytes.
#define SWIZZLE (STRIPE == 64 ? 1 : STRIPE == 32 ? 2 : 3)
// Tokens of a streamed tile.
#define TILE (HEAD_DIM <= 64 ? 64 : 32)
#define TILE_BYTES (TILE * HEAD_DIM * 2)
#define STEPS (HEAD_DIM / 16)
#define TILE_STEPS (TILE / 16)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 (or 4) bytes to shared memory; writes zeros where `here` is false, without reading.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool here) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(here ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_4(u32 to, const void* from, bool here) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(here ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's copies and makes them visible to the matrix units; a barrier must follow.
__device__ __forceinline__ void finish_copies() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A tile of TILE tokens by HEAD_DIM from rows of `width`: consecutive stripes, each [TILE][STRIPE] with its 16-byte
// chunks swizzled as in the descriptor. Rows from `rows` on are zeros.
__device__ __forceinline__ void fetch_tile(u32 to, const bf16* from, int width, int rows) {
    const int chunks = HEAD_DIM / 8, stripe_chunks = STRIPE / 8;
#pragma unroll
    for (int base = 0; base < TILE * chunks; base += THREADS) {
        const int i = base + (int)threadIdx.x;
        if (TILE * chunks % THREADS == 0 || i < TILE * chunks) {
            const int row = i / chunks, chunk = i % chunks;
            const int stripe = chunk / stripe_chunks, place = chunk % stripe_chunks;
            const int swizzled = place ^ ((row / (8 / stripe_chunks)) % stripe_chunks);
            copy_16(to + (stripe * TILE + row) * STRIPE_BYTES + swizzled * 16, from + row * width + chunk * 8, row < rows);
        }
    }
}

// Descriptor of a tile in shared memory: its lower word has the address, the only part that changes from step to step;
// in the upper word, eight rows are one repeat of the swizzle.
__device__ __forceinline__ u32 descriptor(u32 tile) { return 1 << 16 | (tile & 0x3ffff) >> 4; }
#define UPPER_WORD ((u64)((u32)SWIZZLE << 30 | 8 * STRIPE_BYTES >> 4) << 32)
// The tile's rows as columns of B, 16 dims from 16*step on (the sum runs over dims).
__device__ __forceinline__ u32 by_dims(u32 tile, int step) {
    const int stripe = step * 16 / STRIPE, rest = step * 16 % STRIPE;
    return tile + ((stripe * TILE * STRIPE_BYTES + rest * 2) >> 4);
}
// One stripe of dims as columns of B, 16 tokens from 16*step on (the sum runs over tokens).
__device__ __forceinline__ u32 by_tokens(u32 tile, int stripe, int step) {
    return tile + ((stripe * TILE + step * 16) * STRIPE_BYTES >> 4);
}

#define REGS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define REGS_8(d, i) REGS_4(d, i), REGS_4(d, i + 4)
#define REGS_16(d, i) REGS_8(d, i), REGS_8(d, i + 8)

// d [64, N] = a [64, 16] b [16, N] (+ d if `keep`), f32 += bf16 * bf16; a thread has N/2 values of d.
// TOKENS: the sum runs over the rows of b's tile (see by_tokens), otherwise along them (by_dims).
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u32 b, int keep) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : REGS_16(d, 0), REGS_16(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(UPPER_WORD | b), "r"(keep), "n"(TOKENS));
}
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[16], const u32 (&a)[4], u32 b, int keep) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, %22;}"
        : REGS_16(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(UPPER_WORD | b), "r"(keep), "n"(TOKENS));
}
template <int TOKENS>
__device__ __forceinline__ void multiply(float (&d)[8], const u32 (&a)[4], u32 b, int keep) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;}"
        : REGS_8(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(UPPER_WORD | b), "r"(keep), "n"(TOKENS));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups of products are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Scores: rows in registers times the transpose of a tile.
__device__ __forceinline__ void multiply_by_rows(float (&d)[TILE / 2], const u32 (&rows)[STEPS][4], u32 tile) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) multiply<0>(d, rows[step], by_dims(tile, step), step > 0);
}
// Mixtures: weights in registers times a tile, added to d.
__device__ __forceinline__ void add_mixture(float (&d)[STRIPES][STRIPE / 2], const u32 (&weights)[TILE_STEPS][4],
                                            u32 tile) {
#pragma unroll
    for (int step = 0; step < TILE_STEPS; step++)
#pragma unroll
        for (int stripe = 0; stripe < STRIPES; stripe++)
            multiply<1>(d[stripe], weights[step], by_tokens(tile, stripe, step), 1);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&both);
}
// The layout of scores is that of the next product's left operand.
__device__ __forceinline__ void to_operand(u32 (&a)[TILE_STEPS][4], const float (&x)[TILE / 2]) {
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) a[i / 4][i % 4] = pack(x[2 * i], x[2 * i + 1]);
}

// Positions of a thread's values in a [64, N] product: rows row and row + 8, columns 8 i + column and the next.
struct Lane {
    int row;
    int column;
};
__device__ __forceinline__ Lane lane_of_thread() {
    const int thread = threadIdx.x;
    return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
}

// Rows `row` and `row + 8` of a left operand, from rows of `width`; zeros from row `rows` on.
__device__ __forceinline__ void load_rows(u32 (&a)[STEPS][4], const bf16* from, int width, int row, int rows,
                                          int column) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool here = row + 8 * half < rows;
        const u32* line = reinterpret_cast<const u32*>(from + (long long)(row + 8 * half) * width + column);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            a[step][half] = here ? line[step * 8] : 0;
            a[step][half + 2] = here ? line[step * 8 + 4] : 0;
        }
    }
}
// Both rows of a result, multiplied by a factor each.
__device__ __forceinline__ void store_rows(const float (&d)[STRIPES][STRIPE / 2], bf16* to, int width, int row, int rows,
                                           int column, const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= rows) continue;
        u32* line = reinterpret_cast<u32*>(to + (long long)(row + 8 * half) * width + column);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) {
            const float* x = d[i * 8 / STRIPE] + i * 8 % STRIPE / 2 + 2 * half;
            line[i * 4] = pack(x[0] * factor[half], x[1] * factor[half]);
        }
    }
}
__device__ __forceinline__ void store_rows(const float (&d)[STRIPES][STRIPE / 2], float* to, int width, int row,
                                           int rows, int column, float factor) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= rows) continue;
        float* line = to + (long long)(row + 8 * half) * width + column;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) {
            const float* x = d[i * 8 / STRIPE] + i * 8 % STRIPE / 2 + 2 * half;
            *reinterpret_cast<float2*>(line + i * 8) = make_float2(x[0] * factor, x[1] * factor);
        }
    }
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Key tiles that a block of queries attends to: from..to.
struct Span {
    int from;
    int to;
};
__device__ __forceinline__ Span tiles_of_queries(int query, int length, int window) {
    const int end = min(length, query + ROWS);
    return {max(0, query - window + 1) / TILE, (end + TILE - 1) / TILE};
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM <= 64 ? 4 : 3)
attention_forward(const bf16* q, const bf16* k, const bf16* v, const int* starts, bf16* out, float* lse,
                  const __grid_constant__ Scalars s) {
    __shared__ __align__(1024) unsigned char tiles[3 * 2 * TILE_BYTES];
    const Sequence sequence = sequence_of_block(starts);
    const int head = blockIdx.x;
    // The longest rows first.
    const int block_query = (gridDim.z - 1 - blockIdx.z) * ROWS;
    if (block_query >= sequence.length) return;
    const int window = window_of(s);
    const Lane lane = lane_of_thread();
    const int row = block_query + lane.row;
    const long long start = (long long)sequence.first * QUERY_WIDTH + head * HEAD_DIM;
    const long long key_start = (long long)sequence.first * KEY_WIDTH + head / GROUP * HEAD_DIM;
    const u32 shared = shared_address(tiles);
    const Span span = tiles_of_queries(block_query, sequence.length, window);
    const float scale = (float)s.scale * LOG2E;

    auto fetch = [&](int tile) {
        const u32 to = shared + tile % 3 * 2 * TILE_BYTES;
        const long long from = key_start + (long long)tile * TILE * KEY_WIDTH;
        fetch_tile(to, k + from, KEY_WIDTH, sequence.length - tile * TILE);
        fetch_tile(to + TILE_BYTES, v + from, KEY_WIDTH, sequence.length - tile * TILE);
        commit_copies();
    };
    fetch(span.from);
    u32 queries[STEPS][4];
    load_rows(queries, q + start, QUERY_WIDTH, row, sequence.length, lane.column);
    float mixed[STRIPES][STRIPE / 2] = {};
    float top[2] = {NOTHING, NOTHING}, sum[2] = {0.0f, 0.0f};

    for (int tile = span.from; tile < span.to; tile++) {
        finish_copies();
        // The tile has arrived, and nobody reads the one before the last any more.
        __syncthreads();
        if (tile + 1 < span.to) fetch(tile + 1);
        const int key = tile * TILE;
        const u32 keys = descriptor(shared + tile % 3 * 2 * TILE_BYTES);
        float scores[TILE / 2];
        begin_products();
        multiply_by_rows(scores, queries, keys);
        commit_products();
        wait_products<0>();
        if (key + TILE - 1 > block_query || key <= block_query + 63 - window) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const int distance = row + i / 2 % 2 * 8 - (key + i / 4 * 8 + lane.column + i % 2);
                if (distance < 0 || distance >= window) scores[i] = NOTHING;
            }
        }
float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = top[half];
#pragma unroll
            for (int i = 0; i < TILE / 4; i++)
                highest = fmaxf(highest, scores[i / 2 * 4 + half * 2 + i % 2]);
            highest = quad_max(highest);
            // A row may not have attended to any key yet.
            const float shift = highest == NOTHING ? 0.0f : highest * scale;
            shrink[half] = exp2_fast(top[half] * scale - shift);
            float partial = 0.0f;
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) {
                float& x = scores[i / 2 * 4 + half * 2 + i % 2];
                x = exp2_fast(fmaf(x, scale, -shift));
                partial += x;
            }
            top[half] = highest;
            sum[half] = sum[half] * shrink[half] + partial;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) mixed[i / (STRIPE / 2)][i % (STRIPE / 2)] *= shrink[i / 2 % 2];
        u32 weights[TILE_STEPS][4];
        to_operand(weights, scores);
        begin_products();
        add_mixture(mixed, weights, keys + (TILE_BYTES >> 4));
        commit_products();
    }
    wait_products<0>();
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = quad_sum(sum[half]);
        inverse[half] = 1.0f / sum[half];
        const int token = row + 8 * half;
        if (lane.column == 0 && token < sequence.length)
            lse[head * s.tokens + sequence.first + token] = top[half] * (float)s.scale + logf(sum[half]);
    }
    store_rows(mixed, out + start, QUERY_WIDTH, row, sequence.length, lane.column, inverse);
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM <= 64 ? 3 : 2)
attention_backward_q(const bf16* q, const bf16* k, const bf16* v, const int* starts, const bf16* out, const bf16* d_out,
                     const float* lse, bf16* dq, float* delta, const __grid_constant__ Scalars s) {
    __shared__ __align__(1024) unsigned char tiles[3 * 2 * TILE_BYTES];
    const Sequence sequence = sequence_of_block(starts);
    const int head = blockIdx.x;
    const int block_query = (gridDim.z - 1 - blockIdx.z) * ROWS;
    if (block_query >= sequence.length) return;
    const int window = window_of(s);
    const Lane lane = lane_of_thread();
    const int row = block_query + lane.row;
    const long long start = (long long)sequence.first * QUERY_WIDTH + head * HEAD_DIM;
    const long long key_start = (long long)sequence.first * KEY_WIDTH + head / GROUP * HEAD_DIM;
    const u32 shared = shared_address(tiles);
    const Span span = tiles_of_queries(block_query, sequence.length, window);
    const float scale = (float)s.scale * LOG2E;

    auto fetch = [&](int tile) {
        const u32 to = shared + tile % 3 * 2 * TILE_BYTES;
        const long long from = key_start + (long long)tile * TILE * KEY_WIDTH;
        fetch_tile(to, k + from, KEY_WIDTH, sequence.length - tile * TILE);
        fetch_tile(to + TILE_BYTES, v + from, KEY_WIDTH, sequence.length - tile * TILE);
        commit_copies();
    };
    fetch(span.from);
    u32 queries[STEPS][4], gradients[STEPS][4];
    load_rows(queries, q + start, QUERY_WIDTH, row, sequence.length, lane.column);
    load_rows(gradients, d_out + start, QUERY_WIDTH, row, sequence.length, lane.column);
    float means[2] = {0.0f, 0.0f}, norms[2];
    {
        u32 outputs[STEPS][4];
        load_rows(outputs, out + start, QUERY_WIDTH, row, sequence.length, lane.column);
#pragma unroll
        for (int i = 0; i < STEPS * 4; i++) {
            const float2 a = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&outputs[i / 4][i % 4]));
            const float2 b = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&gradients[i / 4][i % 4]));
            means[i % 2] += a.x * b.x + a.y * b.y;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            means[half] = quad_sum(means[half]);
            const int token = row + 8 * half;
            const long long at = head * s.tokens + sequence.first + token;
            norms[half] = token < sequence.length ? lse[at] * LOG2E : 0.0f;
            if (lane.column == 0 && token < sequence.length) delta[at] = means[half];
        }
    }
    float slopes_of_queries[STRIPES][STRIPE / 2] = {};

    for (int tile = span.from; tile < span.to; tile++) {
        finish_copies();
        __syncthreads();
        if (tile + 1 < span.to) fetch(tile + 1);
        const int key = tile * TILE;
        const u32 keys = descriptor(shared + tile % 3 * 2 * TILE_BYTES), values = keys + (TILE_BYTES >> 4);
        float scores[TILE / 2], slopes[TILE / 2];
        begin_products();
        multiply_by_rows(scores, queries, keys);
        commit_products();
        multiply_by_rows(slopes, gradients, values);
        commit_products();
        wait_products<1>();
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) scores[i] = exp2_fast(fmaf(scores[i], scale, -norms[i / 2 % 2]));
        if (key + TILE - 1 > block_query || key <= block_query + 63 - window) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const int distance = row + i / 2 % 2 * 8 - (key + i / 4 * 8 + lane.column + i % 2);
                if (distance < 0 || distance >= window) scores[i] = 0.0f;
            }
        }
        wait_products<0>();
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) slopes[i] = scores[i] * (slopes[i] - means[i / 2 % 2]);
        u32 weights[TILE_STEPS][4];
        to_operand(weights, slopes);
        begin_products();
        add_mixture(slopes_of_queries, weights, keys);
        commit_products();
        // Frees registers for a third block.
        wait_products<0>();
    }
    const float factor[2] = {(float)s.scale, (float)s.scale};
    store_rows(slopes_of_queries, dq + start, QUERY_WIDTH, row, sequence.length, lane.column, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_backward_kv(const bf16* q, const bf16* k, const bf16* v, const int* starts, const bf16* d_out,
                      const float* lse, const float* delta, float* dk_parts, float* dv_parts,
                      const __grid_constant__ Scalars s) {
    // Two stages, each a tile of queries and one of their gradients.
    __shared__ __align__(1024) unsigned char tiles[2 * 2 * TILE_BYTES];
    __shared__ __align__(16) float rows_lse[2][TILE], rows_delta[2][TILE];
    const Sequence sequence = sequence_of_block(starts);
    const int key_head = blockIdx.x % KEY_HEADS, split = blockIdx.x / KEY_HEADS;
    const int block_key = blockIdx.z * ROWS;
    if (block_key >= sequence.length) return;
    const int window = window_of(s);
    const Lane lane = lane_of_thread();
    const int row = block_key + lane.row;
    const long long key_start = (long long)sequence.first * KEY_WIDTH + key_head * HEAD_DIM;
    const u32 shared = shared_address(tiles);
    const float scale = (float)s.scale * LOG2E;
    // Query tiles that attend to one of the keys, for each of this block's heads.
    const int first_tile = block_key / TILE;
    const int end = min((long long)sequence.length, (long long)block_key + ROWS - 1 + window);
    const int tiles_of_head = (end + TILE - 1) / TILE - first_tile;
    const int first_head = key_head * GROUP + split * GROUP / (int)s.splits;
    const int heads = key_head * GROUP + (split + 1) * GROUP / (int)s.splits - first_head;
    const int rounds = heads * tiles_of_head;

    // Position of the round that is fetched next.
    int next_head = first_head, next_tile = first_tile;
    auto fetch = [&](int round) {
        const int query = next_tile * TILE, rows = sequence.length - query;
        const long long from = (long long)(sequence.first + query) * QUERY_WIDTH + next_head * HEAD_DIM;
        const u32 to = shared + round % 2 * 2 * TILE_BYTES;
        fetch_tile(to, q + from, QUERY_WIDTH, rows);
        fetch_tile(to + TILE_BYTES, d_out + from, QUERY_WIDTH, rows);
        const int i = threadIdx.x % TILE;
        if (threadIdx.x < 2 * TILE) {
            const long long at = next_head * s.tokens + sequence.first + (i < rows ? query + i : 0);
            const bool is_lse = threadIdx.x < TILE;
            copy_4(shared_address(is_lse ? &rows_lse[round % 2][i] : &rows_delta[round % 2][i]),
                   (is_lse ? lse : delta) + at, i < rows);
        }
        commit_copies();
        if (++next_tile == first_tile + tiles_of_head) {
            next_tile = first_tile;
            next_head++;
        }
    };
    if (rounds > 0) fetch(0);
    u32 keys[STEPS][4], values[STEPS][4];
    load_rows(keys, k + key_start, KEY_WIDTH, row, sequence.length, lane.column);
    load_rows(values, v + key_start, KEY_WIDTH, row, sequence.length, lane.column);
    float dk[STRIPES][STRIPE / 2] = {}, dv[STRIPES][STRIPE / 2] = {};

    int tile = first_tile;
    for (int round = 0; round < rounds; round++) {
        finish_copies();
        __syncthreads();
        if (round + 1 < rounds) fetch(round + 1);
        const int query = tile * TILE;
        if (++tile == first_tile + tiles_of_head) tile = first_tile;
        const u32 queries = descriptor(shared + round % 2 * 2 * TILE_BYTES), gradients = queries + (TILE_BYTES >> 4);
        float scores[TILE / 2], slopes[TILE / 2];
        begin_products();
        multiply_by_rows(scores, keys, queries);
        commit_products();
        multiply_by_rows(slopes, values, gradients);
        commit_products();
        wait_products<1>();
#pragma unroll
        for (int i = 0; i < TILE / 2; i += 2) {
            const float2 norm = *reinterpret_cast<const float2*>(&rows_lse[round % 2][i / 4 * 8 + lane.column]);
            scores[i] = exp2_fast(fmaf(scores[i], scale, -norm.x * LOG2E));
            scores[i + 1] = exp2_fast(fmaf(scores[i + 1], scale, -norm.y * LOG2E));
        }
        if (query < block_key + 63 || query + TILE - 1 >= block_key + window) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const int distance = query + i / 4 * 8 + lane.column + i % 2 - (row + i / 2 % 2 * 8);
                if (distance < 0 || distance >= window) scores[i] = 0.0f;
            }
        }
        u32 weights[TILE_STEPS][4];
        to_operand(weights, scores);
        begin_products();
        add_mixture(dv, weights, gradients);
        commit_products();
        wait_products<1>();
#pragma unroll
        for (int i = 0; i < TILE / 2; i += 2) {
            const float2 mean = *reinterpret_cast<const float2*>(&rows_delta[round % 2][i / 4 * 8 + lane.column]);
            slopes[i] = scores[i] * (slopes[i] - mean.x);
            slopes[i + 1] = scores[i + 1] * (slopes[i + 1] - mean.y);
        }
        u32 steep[TILE_STEPS][4];
        to_operand(steep, slopes);
        begin_products();
        add_mixture(dk, steep, queries);
        commit_products();
        // Products in flight across rounds would make the compiler wait after each of them.
        wait_products<0>();
    }
    const long long to = split * s.tokens * KEY_WIDTH + key_start;
    store_rows(dk, dk_parts + to, KEY_WIDTH, row, sequence.length, lane.column, (float)s.scale);
    store_rows(dv, dv_parts + to, KEY_WIDTH, row, sequence.length, lane.column, 1.0f);
}

#else

// Dims of a lane: lane, lane + 32, ...
#define LANE_DIMS ((HEAD_DIM + 31) / 32)
// Tokens whose scores are computed in parallel.
#define AT_ONCE 4

struct Vector {
    float x[LANE_DIMS];
};
__device__ __forceinline__ Vector load(const T* from) {
    Vector v;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int d = threadIdx.x % 32 + 32 * i;
        v.x[i] = d < HEAD_DIM ? (float)from[d] : 0.0f;
    }
    return v;
}
template <typename To>
__device__ __forceinline__ void store(To* to, const Vector& v, float factor) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int d = threadIdx.x % 32 + 32 * i;
        if (d < HEAD_DIM) to[d] = (To)(v.x[i] * factor);
    }
}
__device__ __forceinline__ void add(Vector& to, const Vector& v, float factor) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) to.x[i] = fmaf(v.x[i], factor, to.x[i]);
}
__device__ __forceinline__ float dot(const Vector& a, const Vector& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) sum = fmaf(a.x[i], b.x[i], sum);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const T* q, const T* k, const T* v, const int* starts, T* out, float* lse,
                  const __grid_constant__ Scalars s) {
    const Sequence sequence = sequence_of_block(starts);
    const int head = blockIdx.x, window = window_of(s);
    const int block_query = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const float scale = (float)s.scale;
    const int end = min(block_query + ROWS, sequence.length);
    for (int row = block_query + threadIdx.x / 32; row < end; row += THREADS / 32) {
        const long long at = (long long)(sequence.first + row) * QUERY_WIDTH + head * HEAD_DIM;
        const Vector query = load(q + at);
        Vector mixed = {};
        float top = NOTHING, sum = 0.0f;
        for (int key = max(0, row - window + 1); key <= row; key += AT_ONCE) {
            float scores[AT_ONCE], highest = top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const long long token = sequence.first + min(key + i, row);
                scores[i] = dot(query, load(k + token * KEY_WIDTH + head / GROUP * HEAD_DIM)) * scale;
                if (key + i > row) scores[i] = NOTHING;
                highest = fmaxf(highest, scores[i]);
            }
            const float shrink = expf(top - highest);
            sum *= shrink;
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i++) mixed.x[i] *= shrink;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const long long token = sequence.first + min(key + i, row);
                const float weight = expf(scores[i] - highest);
                sum += weight;
                add(mixed, load(v + token * KEY_WIDTH + head / GROUP * HEAD_DIM), weight);
            }
            top = highest;
        }
        store(out + at, mixed, 1.0f / sum);
        if (threadIdx.x % 32 == 0) lse[head * s.tokens + sequence.first + row] = top + logf(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_q(const T* q, const T* k, const T* v, const int* starts, const T* out, const T* d_out,
                     const float* lse, T* dq, float* delta, const __grid_constant__ Scalars s) {
    const Sequence sequence = sequence_of_block(starts);
    const int head = blockIdx.x, window = window_of(s);
    const int block_query = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const float scale = (float)s.scale;
    const int end = min(block_query + ROWS, sequence.length);
    for (int row = block_query + threadIdx.x / 32; row < end; row += THREADS / 32) {
        const long long at = (long long)(sequence.first + row) * QUERY_WIDTH + head * HEAD_DIM;
        const long long statistics = head * s.tokens + sequence.first + row;
        const Vector query = load(q + at), gradient = load(d_out + at);
        const float mean = dot(gradient, load(out + at)), norm = lse[statistics];
        Vector slope = {};
        for (int key = max(0, row - window + 1); key <= row; key++) {
            const long long from = (long long)(sequence.first + key) * KEY_WIDTH + head / GROUP * HEAD_DIM;
            const Vector keys = load(k + from);
            const float weight = expf(dot(query, keys) * scale - norm);
            add(slope, keys, weight * (dot(gradient, load(v + from)) - mean));
        }
        store(dq + at, slope, scale);
        if (threadIdx.x % 32 == 0) delta[statistics] = mean;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_backward_kv(const T* q, const T* k, const T* v, const int* starts, const T* d_out, const float* lse,
                      const float* delta, float* dk_parts, float* dv_parts, const __grid_constant__ Scalars s) {
    const Sequence sequence = sequence_of_block(starts);
    const int key_head = blockIdx.x % KEY_HEADS, split = blockIdx.x / KEY_HEADS;
    const int block_key = blockIdx.z * ROWS, window = window_of(s);
    const float scale = (float)s.scale;
    const int end = min(block_key + ROWS, sequence.length);
    const int first_head = key_head * GROUP + split * GROUP / (int)s.splits;
    const int end_head = key_head * GROUP + (split + 1) * GROUP / (int)s.splits;
    for (int row = block_key + threadIdx.x / 32; row < end; row += THREADS / 32) {
        const long long at = (long long)(sequence.first + row) * KEY_WIDTH + key_head * HEAD_DIM;
        const Vector key = load(k + at), value = load(v + at);
        Vector dk = {}, dv = {};
        const int last = min((long long)sequence.length, (long long)row + window);
        for (int head = first_head; head < end_head; head++) {
            for (int query = row; query < last; query++) {
                const long long from = (long long)(sequence.first + query) * QUERY_WIDTH + head * HEAD_DIM;
                const long long statistics = head * s.tokens + sequence.first + query;
                const Vector queries = load(q + from), gradient = load(d_out + from);
                const float weight = expf(dot(queries, key) * scale - lse[statistics]);
                add(dv, gradient, weight);
                add(dk, queries, weight * (dot(gradient, value) - delta[statistics]));
            }
        }
        const long long to = split * s.tokens * KEY_WIDTH + at;
        store(dk_parts + to, dk, scale);
        store(dv_parts + to, dv, 1.0f);
    }
}

#endif
