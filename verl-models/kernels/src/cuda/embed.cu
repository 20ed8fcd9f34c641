// Rows of a table by index (embedding; hidden states of the scored tokens), and the backward passes.
//
//   take_rows:           y[m] = x[index[m]]
//   take_rows_backward:  dx[n] = Σ_{m: index[m] = n} g[m], 0 where there is none; `index` in ascending order
//   embed_backward:      dw[t] += Σ_{n: ids[n] = t} g[n]
//
// embed_backward needs neither a sort nor atomics: the block of position n exits at once if an earlier position has the
// same id; the first one finds all later ones and adds their rows in an order that depends only on the ids. It reads
// `ids` once per distinct id, from L2, so its time grows with the square of the tokens, from a small share of a step at
// 8,192 tokens. The contents of dw, such as the gradient of a tied head, stay in the sum; rows of ids that do not occur
// are not changed.
//
// Shapes: x, dx: [rows, WIDTH]; y, g: [count, WIDTH]; index, ids: [count] i32; dw: [rows, WIDTH] f32.
// Launch: take_rows: block 256, grid ceil(count · PIECES / 256) or less; take_rows_backward: block 256, grid
// ceil(rows / 8) or less; embed_backward: block 128, grid count. An index outside of the table yields a row of NaN and
// no gradient.
// Limits: WIDTH ≤ 8192; buffers aligned to 16 bytes where WIDTH is a multiple of VEC; ids always.

#ifndef WIDTH
#define WIDTH 896
#endif

constexpr int THREADS = 256;
constexpr int W = WIDTH % VEC == 0 ? VEC : 1;
constexpr unsigned PIECES = WIDTH / W;

struct RowScalars {
    // Of the table (x, dx, dw).
    u64 rows;
    // Of the list (y, g, index).
    u64 count;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    take_rows(const elem* x, const int* index, elem* y, const __grid_constant__ RowScalars s) {
    const u64 pieces = s.count * PIECES;
    for (u64 piece = u64(blockIdx.x) * THREADS + threadIdx.x; piece < pieces; piece += u64(gridDim.x) * THREADS) {
        const u64 line = piece / PIECES;
        const u64 column = (piece - line * PIECES) * W;
        const int from = index[line];
        float value[W];
        if (from >= 0 && from < s.rows) {
            load<W>(x + u64(from) * WIDTH + column, value);
        } else {
#pragma unroll
            for (int i = 0; i < W; i++) value[i] = NOT_A_NUMBER;
        }
        store<W>(y + piece * W, value);
    }
}

// The first position in `index` whose value is at least `row`.
__device__ __forceinline__ u64 first_at_least(const int* index, u64 count, u64 row) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 middle = (low + high) / 2;
        if (u64(index[middle]) < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// A warp per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    take_rows_backward(const elem* g, const int* index, elem* dx, const __grid_constant__ RowScalars s) {
    const u64 warps = u64(gridDim.x) * (THREADS / 32);
    for (u64 row = u64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32; row < s.rows; row += warps) {
        const u64 first = first_at_least(index, s.count, row);
        u64 end = first;
        while (end < s.count && u64(index[end]) == row) end++;
#pragma unroll 4
        for (unsigned piece = threadIdx.x % 32; piece < PIECES; piece += 32) {
            float sum[W] = {};
            for (u64 at = first; at < end; at++) {
                float value[W];
                load<W>(g + at * WIDTH + piece * W, value);
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += value[i];
            }
            store<W>(dx + row * WIDTH + piece * W, sum);
        }
    }
}

constexpr int EMBED_THREADS = 128;
// Ids that a thread and a block examine at once.
constexpr int RUN = 32;
constexpr int TILE = EMBED_THREADS * RUN;
constexpr int STEPS = (PIECES + EMBED_THREADS - 1) / EMBED_THREADS;
// Rows in flight.
constexpr int AHEAD = STEPS == 1 ? 8 : 2;

// Position of a thread's id `i` in a tile: four adjacent ids at a time, next to those of the next thread.
__device__ __forceinline__ int place_of(int i) { return (i / 4 * EMBED_THREADS + int(threadIdx.x)) * 4 + i % 4; }

// Bit i is set if the thread's id `i` of the tile at `tile` is `id` and lies in from..to.
__device__ __forceinline__ unsigned matches(const int* ids, int tile, int from, int to, int id) {
    unsigned found = 0;
    if (tile >= from && tile + TILE <= to) {
        int4 four[RUN / 4];
#pragma unroll
        for (int i = 0; i < RUN / 4; i++) four[i] = *reinterpret_cast<const int4*>(ids + tile + place_of(4 * i));
#pragma unroll
        for (int i = 0; i < RUN / 4; i++) {
            found |= unsigned(four[i].x == id) << (4 * i) | unsigned(four[i].y == id) << (4 * i + 1);
            found |= unsigned(four[i].z == id) << (4 * i + 2) | unsigned(four[i].w == id) << (4 * i + 3);
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            const int at = tile + place_of(i);
            if (at >= from && at < to) found |= unsigned(ids[at] == id) << i;
        }
    }
    return found;
}

// sum += the rows of g at `list`, in order.
__device__ __forceinline__ void add_rows(const elem* g, const int* list, int length, float (&sum)[STEPS][W]) {
    for (int first = 0; first < length; first += AHEAD) {
        float value[AHEAD][STEPS][W];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int piece = step * EMBED_THREADS + threadIdx.x;
                if (first + j < length && piece < PIECES) {
                    load<W>(g + u64(list[first + j]) * WIDTH + piece * W, value[j][step]);
                } else {
#pragma unroll
                    for (int i = 0; i < W; i++) value[j][step][i] = 0.0f;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int i = 0; i < W; i++) sum[step][i] += value[j][step][i];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(EMBED_THREADS)
    embed_backward(const elem* g, const int* ids, float* dw, const __grid_constant__ RowScalars s) {
    __shared__ int list[TILE];
    __shared__ int warp_counts[EMBED_THREADS / 32];
    const int here = blockIdx.x;
    const int count = int(s.count);
    const int id = ids[here];
    if (id < 0 || id >= s.rows) return;
    for (int tile = 0; tile < here; tile += TILE) {
        if (__syncthreads_or(matches(ids, tile, 0, here, id) != 0)) return;
    }
    float sum[STEPS][W] = {};
    for (int tile = here / TILE * TILE; tile < count; tile += TILE) {
        unsigned found = matches(ids, tile, here, count, id);
        if (!__syncthreads_or(found != 0)) continue;
        // Positions of the thread's matches in the list: matches of lower lanes and lower warps come first.
        const int own = __popc(found);
        int before = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, before, step);
            if (threadIdx.x % 32 >= step) before += other;
        }
        if (threadIdx.x % 32 == 31) warp_counts[threadIdx.x / 32] = before;
        __syncthreads();
        int length = 0;
        before -= own;
#pragma unroll
        for (int warp = 0; warp < EMBED_THREADS / 32; warp++) {
            if (warp < threadIdx.x / 32) before += warp_counts[warp];
            length += warp_counts[warp];
        }
        for (; found != 0; found &= found - 1) list[before++] = tile + place_of(__ffs(found) - 1);
        __syncthreads();
        add_rows(g, list, length, sum);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int piece = step * EMBED_THREADS + threadIdx.x;
        if (piece >= PIECES) continue;
        float* to = dw + u64(id) * WIDTH + piece * W;
#pragma unroll
        for (int i = 0; i < W; i++) to[i] += sum[step][i];
    }
}
