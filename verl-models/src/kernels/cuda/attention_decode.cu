// Attention of one new token of each row over a cache of keys and values in blocks, and the kernels that fill the cache.
//
//   attention_decode       out_h = softmax(scale q_h.k_j) v_j over the `lengths[row]` tokens that the cache holds
//   attention_decode_step  from the new token's projection: adds a bias, norms heads (both if the model has them), turns
//                          queries and key to position lengths[row], appends key and value there, then attends to the
//                          lengths[row] + 1 tokens
//   kv_store               keys and values of packed tokens to their slots (after a prompt's forward pass)
//   kv_copy_blocks         copies blocks, for a row that writes into a block shared until then
//
// A row is not live if its length is negative (attention_decode: or 0), or if its table has no room for its tokens: its
// output is zeros, and neither its table nor the cache is read or written. A step may begin a row, at length 0.
// What lies in the cache beyond a row's length is never used, whatever it is.
//
// Shapes: k_cache, v_cache [blocks, K, 64, Dh]; table [rows, max_blocks] i32: block of tokens 64 i .. 64 i + 63;
//   lengths [rows] i32; q, out [rows, H*Dh]; qkv [rows, (H+2K)*Dh]; bias [(H+2K)*Dh]; q_norm, k_norm [Dh];
//   cos, sin [positions, Dh] f32 (signed sines, see rope.cu); slots [tokens] i32: block * 64 + place, negative: not stored;
//   pairs [pairs, 2] i32: from, to; a negative one is skipped. All tensors of elements aligned to 16 bytes.
//
// Launches: attention_decode, attention_decode_step: grid (K * HEAD_TILES, rows, CLUSTER), block 128, where
//   HEAD_TILES = ceil((H/K) / TILE_HEADS), TILE_HEADS = min(H/K, 16) (8 for f32 and for Dh over 128 or no multiple of 16).
//   CLUSTER (1, 2, 4 or 8) blocks share the tokens of a row. A row's bits depend on it, not on the other rows.
//   kv_store: grid ceil(tokens*K*Dh / (256*CHUNK)), block 256, CHUNK elements = 16 bytes (1 element if Dh has no such).
//   kv_copy_blocks: grid (pairs, 2), block 256.
//
// A warp streams tiles of 32 tokens (16 for wide heads) through its own shared memory with cp.async, keys and values in
// turn; all query heads of a group share them, as columns of mma.m16n8k16. The four warps are merged in their order, then
// the blocks of a cluster in theirs, through each other's shared memory.
// Bytes: keys and values once, 2 * K * Dh * 2 a token of a row (bf16).

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef unsigned int u32;

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
// 1: the projection has yet to get its bias.
#ifndef QKV_BIAS
#define QKV_BIAS 0
#endif
// 1: each head of queries and keys is divided by its root mean square and weighed, before it is turned.
#ifndef QK_NORM
#define QK_NORM 0
#endif
// Blocks that share a row.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(1, 1, CLUSTER)
#else
#define CLUSTERED
#endif
// 1: launched with programmatic serialization, lengths, table and cached tokens are read before the preceding kernel has
// ended: nothing but this kernel may write them within a graph.
#ifndef CACHE_EARLY
#define CACHE_EARLY 0
#endif

#define IS_F32_float 1
#define IS_F32_bf16 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define IS_F32 JOIN(IS_F32_, ELEMENT)
#define PLAIN (IS_F32 || HEAD_DIM % 16 != 0 || HEAD_DIM > 128)
typedef ELEMENT T;

#define BLOCK 64
#define GROUP (QUERY_HEADS / KEY_HEADS)
#define MOST_HEADS (PLAIN ? 8 : 16)
#define TILE_HEADS (GROUP < MOST_HEADS ? GROUP : MOST_HEADS)
#define HEAD_TILES ((GROUP + TILE_HEADS - 1) / TILE_HEADS)
#define HEADS (QUERY_HEADS + 2 * KEY_HEADS)
#define HALF (HEAD_DIM / 2)
#define THREADS 128
#define WARPS 4
// Tokens of a warp's tile: 32 or 16.
#ifndef WARP_TOKENS
#define WARP_TOKENS (HEAD_DIM <= 64 ? 32 : 16)
#endif
// Blocks of a multiprocessor, as many as shared memory and registers admit.
#define RESIDENT (!PLAIN && HEAD_DIM <= 64 && TILE_HEADS <= 8 ? (WARP_TOKENS == 32 ? 6 : 8) : 1)
#define LOG2E 1.4426950408889634f
#define NOTHING __int_as_float(0xff800000)

struct Scalars {
    double scale;
    double epsilon;
    long long max_blocks;
};

// exp2: close to exact for f32.
__device__ __forceinline__ float power(float x) {
#if IS_F32
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

// Pads rows of queries, so that a warp's reads fall into different banks.
#define QUERY_STRIDE (HEAD_DIM + 8)

#if PLAIN
#define STREAM_BYTES (WARPS * TILE_HEADS * HEAD_DIM * 4)
#else
#define STREAM_BYTES (WARPS * WARP_TOKENS * HEAD_DIM * 4)
#endif

struct Shared {
    // Tiles of keys and values of each warp; then their mixtures [WARPS][TILE_HEADS][Dh], the first one merged.
    alignas(128) unsigned char stream[STREAM_BYTES];
    alignas(16) T queries[TILE_HEADS * QUERY_STRIDE];
    T key[HEAD_DIM];
    T value[HEAD_DIM];
    // Highest score (times log2 e) of each warp, then of the new token, whose weight is 1; sum of weights of each warp.
    float top[WARPS + 1][TILE_HEADS];
    float sum[WARPS][TILE_HEADS];
    // The same of the whole block.
    float block_top[TILE_HEADS];
    float block_sum[TILE_HEADS];

    __device__ __forceinline__ float* mixtures(int warp) {
        return reinterpret_cast<float*>(stream) + warp * TILE_HEADS * HEAD_DIM;
    }
};

// What a block works on.
struct Work {
    int row;
    int key_head;
    int first_head;
    int heads;
    // Cached tokens.
    int tokens;
    // This block has the new token as well.
    bool appends;

    // The warp's first token, and what lies between its tiles: blocks take tiles in turn, then warps.
    __device__ __forceinline__ int first_token() const {
        return ((int)threadIdx.x / 32 * CLUSTER + (int)blockIdx.z) * WARP_TOKENS;
    }
};
#define TOKENS_BETWEEN (WARPS * CLUSTER * WARP_TOKENS)

// Where `token` of this row and key head lies in a cache.
__device__ __forceinline__ long long slot(int block, int key_head, int token) {
    return (((long long)block * KEY_HEADS + key_head) * BLOCK + token % BLOCK) * HEAD_DIM;
}

// Buffers of the step that are not there without it.
struct Step {
    const T* qkv;
    const T* bias;
    const T* q_norm;
    const T* k_norm;
    const float* cos;
    const float* sin;
};

// Queries, and the new key and value where the block appends, from the projection: bias, norm, rotation. A head is a warp's;
// a lane has dims d and d + Dh/2 for d = lane, lane + 32, ... All loads are under way before the first use.
#define PREPARED ((TILE_HEADS + 2 + WARPS - 1) / WARPS)
#define PAIRS ((HALF + 31) / 32)
__device__ __forceinline__ void prepare(Shared& shared, const Work& work, const Step& step, int position, float epsilon) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = work.heads + (work.appends ? 2 : 0);
    float raw[PREPARED][PAIRS][2], bias[PREPARED][PAIRS][2], cos[PAIRS], sin[PAIRS];
#pragma unroll
    for (int i = 0; i < PREPARED; i++) {
        const int head = warp + i * WARPS, place = head - work.heads;
        const int at = place < 0 ? work.first_head + head : QUERY_HEADS + place * KEY_HEADS + work.key_head;
        const long long from = ((long long)work.row * HEADS + at) * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < PAIRS * 2; j++) {
            const int d = lane + j / 2 * 32, dim = d + j % 2 * HALF;
            const bool here = head < heads && d < HALF;
            raw[i][j / 2][j % 2] = here ? (float)step.qkv[from + dim] : 0.0f;
            bias[i][j / 2][j % 2] = QKV_BIAS && here ? (float)step.bias[at * HEAD_DIM + dim] : 0.0f;
        }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        // The second half of a row has all that the first has.
        const long long at = (long long)position * HEAD_DIM + HALF + min(lane + j * 32, HALF - 1);
        cos[j] = step.cos[at];
        sin[j] = step.sin[at];
    }
#pragma unroll
    for (int i = 0; i < PREPARED; i++) {
        const int head = warp + i * WARPS, place = head - work.heads;
        if (head >= heads) break;
        T* to = place < 0 ? shared.queries + head * QUERY_STRIDE : place == 0 ? shared.key : shared.value;
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < PAIRS * 2; j++) {
            float& x = raw[i][j / 2][j % 2];
            // Rounded like a projection that has its bias.
            if (QKV_BIAS) x = (float)(T)(x + bias[i][j / 2][j % 2]);
            squares = fmaf(x, x, squares);
        }
        const float factor = QK_NORM ? rsqrtf(warp_sum(squares) / HEAD_DIM + epsilon) : 1.0f;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int d = lane + j * 32;
            if (d >= HALF) continue;
            float a = raw[i][j][0], b = raw[i][j][1];
            if (QK_NORM && place <= 0) {
                const T* norm = place < 0 ? step.q_norm : step.k_norm;
                // Rounded where a norm of its own rounds.
                a = (float)(T)((float)(T)(a * factor) * (float)norm[d]);
                b = (float)(T)((float)(T)(b * factor) * (float)norm[d + HALF]);
            }
            to[d] = (T)(place <= 0 ? a * cos[j] - b * sin[j] : a);
            to[d + HALF] = (T)(place <= 0 ? b * cos[j] + a * sin[j] : b);
        }
    }
}

#if !PLAIN

#define CHUNKS (HEAD_DIM / 8)
// Chunks of 16 bytes are permuted within this many, so that eight rows of a matrix fall into different banks.
#define SWIZZLED (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)
#define STEPS (HEAD_DIM / 16)

__device__ __forceinline__ u32 place(u32 tile, int token, int chunk) {
    return tile + (token * CHUNKS + (chunk ^ (token / (8 / SWIZZLED) % SWIZZLED))) * 16;
}
// A warp's tile of a cache; zeros from token `tokens` on.
__device__ __forceinline__ void fetch(u32 tile, const T* from, int tokens) {
#pragma unroll
    for (int i = 0; i < WARP_TOKENS * CHUNKS / 32; i++) {
        const int at = i * 32 + threadIdx.x % 32, token = at / CHUNKS, chunk = at % CHUNKS;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(tile, token, chunk)),
                     "l"(from + at * 8), "r"(token < tokens ? 16 : 0)
                     : "memory");
    }
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of a warp's copies but the latest group.
__device__ __forceinline__ void wait_for_older() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
}
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&m)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(from)
                 : "memory");
}
// d [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}
__device__ __forceinline__ u32 pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&both);
}

// The transpose of a matrix of 8 x 8 that a warp holds as a product's values.
__device__ __forceinline__ u32 transpose(u32 m) {
    u32 t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
    return t;
}

// Heads are columns of the products, in eights; tokens, then dims, are rows.
#define EIGHTS ((TILE_HEADS + 7) / 8)

// A warp's part of the cached tokens, left in `shared`. The first tiles are under way before the queries are there.
struct Stream {
    u32 keys;
    u32 values;
    const T* k_cache;
    const T* v_cache;
    const int* blocks;

    __device__ __forceinline__ void fetch_keys(const Work& work, int token, int block) const {
        if (token < work.tokens) fetch(keys, k_cache + slot(block, work.key_head, token), work.tokens - token);
        commit();
    }
    __device__ __forceinline__ void fetch_values(const Work& work, int token, int block) const {
        if (token < work.tokens) fetch(values, v_cache + slot(block, work.key_head, token), work.tokens - token);
        commit();
    }

    __device__ __forceinline__ void run(Shared& shared, const Work& work, float scale) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int row = lane / 4, column = lane % 4 * 2, matrix = lane / 8, line = lane % 8;
        u32 queries[EIGHTS][STEPS][2];
#pragma unroll
        for (int i = 0; i < EIGHTS * STEPS * 2; i++) {
            const int head = i / (STEPS * 2) * 8 + row, d = i / 2 % STEPS * 16 + i % 2 * 8 + column;
            queries[i / (STEPS * 2)][i / 2 % STEPS][i % 2] =
                head < work.heads ? *reinterpret_cast<const u32*>(&shared.queries[head * QUERY_STRIDE + d]) : 0;
        }
        float mixed[STEPS][EIGHTS][4] = {}, top[EIGHTS][2], sum[EIGHTS][2];
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) top[i / 2][i % 2] = NOTHING, sum[i / 2][i % 2] = 0.0f;

        for (int token = work.first_token(); token < work.tokens; token += TOKENS_BETWEEN) {
            const int next = token + TOKENS_BETWEEN;
            const int next_block = next < work.tokens ? blocks[next / BLOCK] : 0;
            // Values of a thread: tokens `row` and `row` + 8 of a sixteen, heads `column` and the next of an eight.
            float scores[WARP_TOKENS / 16][EIGHTS][4] = {};
            wait_for_older();
#pragma unroll
            for (int i = 0; i < WARP_TOKENS / 16; i++)
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    u32 a[4];
                    load_matrices(a, place(keys, i * 16 + matrix % 2 * 8 + line, step * 2 + matrix / 2));
#pragma unroll
                    for (int eight = 0; eight < EIGHTS; eight++)
                        multiply(scores[i][eight], a, queries[eight][step][0], queries[eight][step][1]);
                }
            __syncwarp();
            fetch_keys(work, next, next_block);
            const bool edge = token + WARP_TOKENS > work.tokens;
#pragma unroll
            for (int head = 0; head < EIGHTS * 2; head++) {
                const int eight = head / 2, side = head % 2;
                float highest = top[eight][side];
#pragma unroll
                for (int i = 0; i < WARP_TOKENS / 8; i++) {
                    float& x = scores[i / 2][eight][i % 2 * 2 + side];
                    x = edge && token + i * 8 + row >= work.tokens ? NOTHING : x * scale;
                    highest = fmaxf(highest, x);
                }
#pragma unroll
                for (int other = 4; other < 32; other *= 2)
                    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
                const float shrink = power(top[eight][side] - highest);
                float partial = 0.0f;
#pragma unroll
                for (int i = 0; i < WARP_TOKENS / 8; i++) {
                    float& x = scores[i / 2][eight][i % 2 * 2 + side];
                    x = power(x - highest);
                    partial += x;
                }
                top[eight][side] = highest;
                sum[eight][side] = sum[eight][side] * shrink + partial;
#pragma unroll
                for (int i = 0; i < STEPS * 2; i++) mixed[i / 2][eight][i % 2 * 2 + side] *= shrink;
            }
            wait_for_older();
#pragma unroll
            for (int i = 0; i < WARP_TOKENS / 16; i++) {
                u32 weights[EIGHTS][2];
#pragma unroll
                for (int eight = 0; eight < EIGHTS; eight++) {
                    const float(&x)[4] = scores[i][eight];
                    weights[eight][0] = transpose(pack(x[0], x[1]));
                    weights[eight][1] = transpose(pack(x[2], x[3]));
                }
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    u32 a[4];
                    load_transposed(a, place(values, i * 16 + matrix / 2 * 8 + line, step * 2 + matrix % 2));
#pragma unroll
                    for (int eight = 0; eight < EIGHTS; eight++)
                        multiply(mixed[step][eight], a, weights[eight][0], weights[eight][1]);
                }
            }
            __syncwarp();
            fetch_values(work, next, next_block);
        }
        // The tiles give way to mixtures.
        __syncthreads();
        float* mixtures = shared.mixtures(warp);
#pragma unroll
        for (int i = 0; i < EIGHTS * 2; i++) {
            const int eight = i / 2, side = i % 2, head = eight * 8 + column + side;
#pragma unroll
            for (int other = 4; other < 32; other *= 2)
                sum[eight][side] += __shfl_xor_sync(~0u, sum[eight][side], other);
            if (head >= work.heads) continue;
            if (row == 0) {
                shared.top[warp][head] = top[eight][side];
                shared.sum[warp][head] = sum[eight][side];
            }
#pragma unroll
            for (int part = 0; part < STEPS * 2; part++)
                mixtures[head * HEAD_DIM + part * 8 + row] = mixed[part / 2][eight][part % 2 * 2 + side];
        }
    }
};

#else

#define LANE_DIMS ((HEAD_DIM + 31) / 32)

// A warp's part of the cached tokens, left in `shared`; a lane has dims lane, lane + 32, ...
struct Stream {
    const T* k_cache;
    const T* v_cache;
    const int* blocks;

    __device__ __forceinline__ void run(Shared& shared, const Work& work, float scale) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float mixed[TILE_HEADS][LANE_DIMS] = {}, top[TILE_HEADS], sum[TILE_HEADS];
#pragma unroll
        for (int head = 0; head < TILE_HEADS; head++) top[head] = NOTHING, sum[head] = 0.0f;
        for (int first = work.first_token(); first < work.tokens; first += TOKENS_BETWEEN) {
            const int block = blocks[first / BLOCK], end = min(first + WARP_TOKENS, work.tokens);
            for (int token = first; token < end; token++) {
                const long long at = slot(block, work.key_head, token);
                float key[LANE_DIMS], value[LANE_DIMS];
#pragma unroll
                for (int i = 0; i < LANE_DIMS; i++) {
                    const int d = lane + 32 * i;
                    key[i] = d < HEAD_DIM ? (float)k_cache[at + d] : 0.0f;
                    value[i] = d < HEAD_DIM ? (float)v_cache[at + d] : 0.0f;
                }
#pragma unroll
                for (int head = 0; head < TILE_HEADS; head++) {
                    if (head >= work.heads) continue;
                    float score = 0.0f;
#pragma unroll
                    for (int i = 0; i < LANE_DIMS; i++) {
                        const int d = min(lane + 32 * i, HEAD_DIM - 1);
                        score = fmaf((float)shared.queries[head * QUERY_STRIDE + d], key[i], score);
                    }
                    score = warp_sum(score) * scale;
                    const float highest = fmaxf(top[head], score), shrink = power(top[head] - highest);
                    const float weight = power(score - highest);
                    top[head] = highest;
                    sum[head] = sum[head] * shrink + weight;
#pragma unroll
                    for (int i = 0; i < LANE_DIMS; i++)
                        mixed[head][i] = fmaf(mixed[head][i], shrink, weight * value[i]);
                }
            }
        }
        float* mixtures = shared.mixtures(warp);
#pragma unroll
        for (int head = 0; head < TILE_HEADS; head++) {
            if (lane == 0) {
                shared.top[warp][head] = top[head];
                shared.sum[warp][head] = sum[head];
            }
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i++)
                if (lane + 32 * i < HEAD_DIM) mixtures[head * HEAD_DIM + lane + 32 * i] = mixed[head][i];
        }
    }
};

#endif

// Score of the new token with each head.
__device__ __forceinline__ void score_new_token(Shared& shared, const Work& work, float scale) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < work.heads; head += WARPS) {
        float score = 0.0f;
        for (int d = lane; d < HEAD_DIM; d += 32)
            score = fmaf((float)shared.queries[head * QUERY_STRIDE + d], (float)shared.key[d], score);
        score = warp_sum(score) * scale;
        if (lane == 0) shared.top[WARPS][head] = score;
    }
}

// Merges the warps in their order: the output if the row has one block, else the block's own mixture.
__device__ __forceinline__ void merge_warps(Shared& shared, const Work& work, T* out) {
    for (int i = threadIdx.x; i < work.heads * HEAD_DIM; i += THREADS) {
        const int head = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = work.appends ? shared.top[WARPS][head] : NOTHING, sum = 0.0f, mixed = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) top = fmaxf(top, shared.top[warp][head]);
        // A block may have no token.
        const float shift = top == NOTHING ? 0.0f : top;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float factor = power(shared.top[warp][head] - shift);
            sum = fmaf(factor, shared.sum[warp][head], sum);
            mixed = fmaf(factor, shared.mixtures(warp)[i], mixed);
        }
        if (work.appends) {
            const float factor = power(shared.top[WARPS][head] - shift);
            sum += factor;
            mixed = fmaf(factor, (float)shared.value[d], mixed);
        }
        if (CLUSTER == 1) {
            out[i] = (T)(mixed / sum);
        } else {
            shared.mixtures(0)[i] = mixed;
            if (d == 0) shared.block_top[head] = top, shared.block_sum[head] = sum;
        }
    }
}

// What `shared` is in block `rank` of the cluster.
__device__ __forceinline__ Shared* shared_of(Shared& shared, int rank) {
    Shared* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(&shared), "r"(rank));
    return other;
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Merges the blocks of a cluster in their order, each of them a part of the output.
__device__ __forceinline__ void merge_blocks(Shared& shared, const Work& work, T* out) {
    wait_for_cluster();
    for (int i = blockIdx.z * THREADS + threadIdx.x; i < work.heads * HEAD_DIM; i += CLUSTER * THREADS) {
        const int head = i / HEAD_DIM;
        float tops[CLUSTER], sums[CLUSTER], mixtures[CLUSTER], top = NOTHING, sum = 0.0f, mixed = 0.0f;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            Shared* other = shared_of(shared, rank);
            tops[rank] = other->block_top[head];
            sums[rank] = other->block_sum[head];
            mixtures[rank] = other->mixtures(0)[i];
            top = fmaxf(top, tops[rank]);
        }
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            const float factor = power(tops[rank] - top);
            sum = fmaf(factor, sums[rank], sum);
            mixed = fmaf(factor, mixtures[rank], mixed);
        }
        out[i] = (T)(mixed / sum);
    }
    // Nobody leaves while another reads its memory.
    wait_for_cluster();
}

// Without programmatic serialization these do nothing.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <bool STEP>
__device__ __forceinline__ void attend(const T* q, const Step& step, T* k_cache, T* v_cache, const int* table,
                                       const int* lengths, T* out, const Scalars& s) {
    __shared__ Shared shared;
    allow_next_kernel();
    if (!CACHE_EARLY) wait_for_previous_kernel();
    Work work;
    work.row = blockIdx.y;
    work.key_head = blockIdx.x / HEAD_TILES;
    const int head_tile = blockIdx.x % HEAD_TILES;
    work.first_head = work.key_head * GROUP + head_tile * TILE_HEADS;
    work.heads = min(TILE_HEADS, GROUP - head_tile * TILE_HEADS);
    const int* blocks = table + work.row * s.max_blocks;
#if !PLAIN
    // Read side by side with the length; of use only if the length reaches it.
    const int first_token = work.first_token();
    const int first_block = first_token / BLOCK < s.max_blocks ? blocks[first_token / BLOCK] : 0;
#endif
    work.tokens = lengths[work.row];
    work.appends = STEP && blockIdx.z == 0;
    const long long first = ((long long)work.row * QUERY_HEADS + work.first_head) * HEAD_DIM;
    out += first;
    // The same for all blocks of a cluster.
    if (work.tokens < (STEP ? 0 : 1) || work.tokens + (STEP ? 1 : 0) > s.max_blocks * BLOCK) {
        if (CACHE_EARLY) wait_for_previous_kernel();
        if (blockIdx.z == 0)
            for (int i = threadIdx.x; i < work.heads * HEAD_DIM; i += THREADS) out[i] = (T)0.0f;
        return;
    }
    const float scale = (float)s.scale * LOG2E;

#if PLAIN
    const Stream stream = {k_cache, v_cache, blocks};
#else
    const u32 tiles = (u32)__cvta_generic_to_shared(shared.stream) + threadIdx.x / 32 * WARP_TOKENS * HEAD_DIM * 4;
    const Stream stream = {tiles, tiles + WARP_TOKENS * HEAD_DIM * 2, k_cache, v_cache, blocks};
    stream.fetch_keys(work, first_token, first_block);
    stream.fetch_values(work, first_token, first_block);
#endif
    if (CACHE_EARLY) wait_for_previous_kernel();
    if (STEP) {
        prepare(shared, work, step, work.tokens, (float)s.epsilon);
    } else {
        for (int i = threadIdx.x; i < work.heads * HEAD_DIM; i += THREADS)
            shared.queries[i / HEAD_DIM * QUERY_STRIDE + i % HEAD_DIM] = q[first + i];
    }
    __syncthreads();
    if (work.appends) {
        if (head_tile == 0) {
            const long long to = slot(blocks[work.tokens / BLOCK], work.key_head, work.tokens);
            for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
                k_cache[to + d] = shared.key[d];
                v_cache[to + d] = shared.value[d];
            }
        }
        score_new_token(shared, work, scale);
    }
    stream.run(shared, work, scale);
    __syncthreads();
    merge_warps(shared, work, out);
    if (CLUSTER > 1) merge_blocks(shared, work, out);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
attention_decode(const T* q, T* k_cache, T* v_cache, const int* table, const int* lengths, T* out,
                 const __grid_constant__ Scalars s) {
    attend<false>(q, Step(), k_cache, v_cache, table, lengths, out, s);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
attention_decode_step(const T* qkv, const T* bias, const T* q_norm, const T* k_norm, const float* cos, const float* sin,
                      T* k_cache, T* v_cache, const int* table, const int* lengths, T* out,
                      const __grid_constant__ Scalars s) {
    const Step step = {qkv, bias, q_norm, k_norm, cos, sin};
    attend<true>(nullptr, step, k_cache, v_cache, table, lengths, out, s);
}

#if IS_F32
#define WIDE 4
#else
#define WIDE 8
#endif
#if HEAD_DIM % WIDE == 0
#define CHUNK WIDE
typedef uint4 Chunk;
#else
#define CHUNK 1
typedef T Chunk;
#endif

struct Tokens {
    long long tokens;
};

extern "C" __global__ void __launch_bounds__(256)
kv_store(const T* k, const T* v, const int* slots, T* k_cache, T* v_cache, const __grid_constant__ Tokens s) {
    const int pieces = KEY_HEADS * HEAD_DIM / CHUNK;
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x, token = i / pieces;
    if (token >= s.tokens) return;
    const int at = slots[token], d = (int)(i % pieces) * CHUNK;
    if (at < 0) return;
    const long long to = slot(at / BLOCK, d / HEAD_DIM, at % BLOCK) + d % HEAD_DIM;
    *reinterpret_cast<Chunk*>(k_cache + to) = *reinterpret_cast<const Chunk*>(k + i * CHUNK);
    *reinterpret_cast<Chunk*>(v_cache + to) = *reinterpret_cast<const Chunk*>(v + i * CHUNK);
}

// No block may be both a source and a target of one launch.
extern "C" __global__ void __launch_bounds__(256) kv_copy_blocks(const int* pairs, T* k_cache, T* v_cache) {
    const int from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    if (from < 0 || to < 0) return;
    T* cache = blockIdx.y == 0 ? k_cache : v_cache;
    const int chunks = KEY_HEADS * BLOCK * HEAD_DIM / CHUNK;
    const Chunk* source = reinterpret_cast<const Chunk*>(cache) + (long long)from * chunks;
    Chunk* target = reinterpret_cast<Chunk*>(cache) + (long long)to * chunks;
    for (int i = threadIdx.x; i < chunks; i += 256) target[i] = source[i];
}
