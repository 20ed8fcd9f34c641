// Attention of one new token of each row over a cache of keys and values in blocks, and the kernels that fill the cache.
//
//   attention_decode_step  from the new token's projection: adds a bias, norms heads (both if the model has them),
//                          rotates queries and key to position lengths[row], appends key and value there, then attends
//                          to the lengths[row] + 1 tokens: out_h = softmax(scale q_h.k_j) v_j
//   kv_store               writes keys and values of packed tokens to their slots (after a prompt's forward pass)
//   kv_copy_blocks         copies blocks, before a row writes into a block that it shares with others
//
// A row is not live if its length is negative, or if its tokens do not fit in its table: its output is zeros, and neither
// its table nor the cache is read or written. A step may begin a row, at length 0.
// The contents of the cache beyond a row's length are never used and may be anything.
//
// Shapes: k_cache, v_cache [blocks, K, 64, Dh]; table [rows, max_blocks] i32: block of tokens 64 i .. 64 i + 63;
//   lengths [rows] i32; out [rows, H*Dh]; qkv [rows, (H+2K)*Dh]; bias [(H+2K)*Dh]; q_norm, k_norm [Dh];
//   cos, sin [positions, Dh] f32 (signed sines, see rope.cu); slots [tokens] i32: block * 64 + offset, negative: not
//   stored; pairs [pairs, 2] i32: from, to; a negative pair is skipped. All tensors of elements aligned to 16 bytes.
//
// Launches: attention_decode_step: grid (K * HEAD_TILES, rows, CLUSTER), block 128, where
//   HEAD_TILES = ceil((H/K) / TILE_HEADS), TILE_HEADS = min(H/K, 16) (8 for f32 and for Dh over 128 or not a multiple
//   of 16).
//   CLUSTER (1, 2, 4 or 8) blocks share the tokens of a row. A row's bits depend on CLUSTER, not on the other rows.
//   kv_store: grid ceil(tokens*K*Dh / (256*CHUNK)), block 256, CHUNK elements = 16 bytes (1 element if that does not
//   divide Dh).
//   kv_copy_blocks: grid (pairs, 2), block 256.
//
// A warp streams tiles of 32 tokens (16 for wide heads) through its own shared memory with cp.async, alternating keys
// and values; all query heads of a group share them, as columns of mma.m16n8k16. The four warps are merged in order,
// then the blocks of a cluster in order, through each other's shared memory.
// Bytes: keys and values once, 2 * K * Dh * 2 per token of a row (bf16).

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
// 1: the bias is not yet added to the projection.
#ifndef QKV_BIAS
#define QKV_BIAS 0
#endif
// 1: each head of queries and keys is divided by its root mean square and multiplied by a gain before it is rotated.
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
// 1: launched with programmatic serialization, so lengths, table and cached tokens are read before the preceding kernel
// has ended: only this kernel may write them within a graph.
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
#define HEAD_GROUP (QUERY_HEADS / KEY_HEADS)
#define MOST_HEADS (PLAIN ? 8 : 16)
#define TILE_HEADS (HEAD_GROUP < MOST_HEADS ? HEAD_GROUP : MOST_HEADS)
#define HEAD_TILES ((HEAD_GROUP + TILE_HEADS - 1) / TILE_HEADS)
#define HEADS (QUERY_HEADS + 2 * KEY_HEADS)
#define HALF (HEAD_DIM / 2)
// Warps that attend together.
#ifndef WARPS
#define WARPS 4
#endif
#define THREADS (WARPS * 32)
// Groups of this many threads attend independently, each to a part of a row. A block has one, or with GROUPS 1 several,
// whose kernel is in another file.
#ifndef GROUPS
#define GROUPS 0
#endif
#if GROUPS
#define THREAD ((int)threadIdx.x % THREADS)
#define MEET() asm volatile("bar.sync %0, %1;" ::"r"(2 + (int)threadIdx.x / THREADS), "n"(THREADS) : "memory")
#else
#define THREAD ((int)threadIdx.x)
#define MEET() __syncthreads()
#endif
// Pieces [piece][row][..] in f32 whose sum is the projection; 0: the projection itself, in T.
#ifndef QKV_PIECES
#define QKV_PIECES 0
#endif
// Tokens of a warp's tile: 32 or 16.
#ifndef WARP_TOKENS
#define WARP_TOKENS (HEAD_DIM <= 64 ? 32 : 16)
#endif
// Blocks per multiprocessor, as many as shared memory and registers allow.
#define RESIDENT (!PLAIN && HEAD_DIM <= 64 && TILE_HEADS <= 8 ? (WARP_TOKENS == 32 ? 6 : 8) : 1)
#define LOG2E 1.4426950408889634f
#define NOTHING __int_as_float(0xff800000)

struct Scalars {
    double scale;
    double epsilon;
    long long max_blocks;
};

// exp2: nearly exact for f32.
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

// Padding of query rows, so that a warp's reads go to different banks.
#define QUERY_STRIDE (HEAD_DIM + 8)

#if PLAIN
#define STREAM_BYTES (WARPS * TILE_HEADS * HEAD_DIM * 4)
#else
#define STREAM_BYTES (WARPS * WARP_TOKENS * HEAD_DIM * 4)
#endif

struct Shared {
    // Tiles of keys and values of each warp; later their mixtures [WARPS][TILE_HEADS][Dh], the first one merged.
    alignas(128) unsigned char stream[STREAM_BYTES];
    alignas(16) T queries[TILE_HEADS * QUERY_STRIDE];
    alignas(16) T key[HEAD_DIM];
    alignas(16) T value[HEAD_DIM];
    // Highest score (times log2 e) of each warp, then of the new token, whose weight is 1; sum of weights of each warp.
    float top[WARPS + 1][TILE_HEADS];
    float sum[WARPS][TILE_HEADS];
    // The same for the whole block.
    float block_top[TILE_HEADS];
    float block_sum[TILE_HEADS];

    __device__ __forceinline__ float* mixtures(int warp) {
        return reinterpret_cast<float*>(stream) + warp * TILE_HEADS * HEAD_DIM;
    }
};

// The work of a block.
struct Work {
    int row;
    int key_head;
    int first_head;
    int heads;
    // Cached tokens.
    int tokens;
    // Rank of this group among those that share a row, and their number.
    int rank;
    int sharing;
    // This block also has the new token.
    bool appends;
    // Per lane: the block of the warp's `lane`-th tile, valid only if the row has that many tokens.
    int block;

    // The warp's first token, and the distance between its tiles: tiles go round-robin to blocks, then to warps.
    __device__ __forceinline__ int first_token() const {
        return (THREAD / 32 * sharing + rank) * WARP_TOKENS;
    }
    __device__ __forceinline__ int tokens_between() const { return WARPS * sharing * WARP_TOKENS; }
    // The block of the `tile`-th tile, which begins at `token`; called by a whole warp.
    __device__ __forceinline__ int block_of(int tile, int token, const int* blocks) const {
        if (tile < 32) return __shfl_sync(~0u, block, tile);
        return token < tokens ? blocks[token / BLOCK] : 0;
    }
};

// Position of `token` of this row and key head in a cache.
__device__ __forceinline__ long long slot(int block, int key_head, int token) {
    return (((long long)block * KEY_HEADS + key_head) * BLOCK + token % BLOCK) * HEAD_DIM;
}

// Adjacent elements that a lane reads and writes at once.
#define W (HALF % 4 == 0 ? 4 : HALF % 2 == 0 ? 2 : 1)
template <class E>
struct alignas(W * sizeof(E)) Neighbours {
    E of[W];
};
template <class E>
__device__ __forceinline__ void load(const E* from, float (&x)[W]) {
    const Neighbours<E> all = *reinterpret_cast<const Neighbours<E>*>(from);
#pragma unroll
    for (int i = 0; i < W; i++) x[i] = (float)all.of[i];
}
__device__ __forceinline__ void store(T* to, const float (&x)[W]) {
    Neighbours<T> all;
#pragma unroll
    for (int i = 0; i < W; i++) all.of[i] = (T)x[i];
    *reinterpret_cast<Neighbours<T>*>(to) = all;
}

// Buffers from which queries and the new key and value are made.
struct Step {
#if QKV_PIECES
    const float* qkv;
    // Distance between pieces.
    long long piece;
#else
    const T* qkv;
#endif
    const T* bias;
    const T* q_norm;
    const T* k_norm;
    const float* cos;
    const float* sin;

    // Adjacent elements of the projection.
    __device__ __forceinline__ void read(long long at, float (&x)[W]) const {
#if QKV_PIECES
        static_assert(W == 4, "pieces are read in fours");
        float4 pieces[QKV_PIECES];
#pragma unroll
        for (int i = 0; i < QKV_PIECES; i++) pieces[i] = __ldcg(reinterpret_cast<const float4*>(qkv + i * piece + at));
        float4 sum = pieces[0];
#pragma unroll
        for (int i = 1; i < QKV_PIECES; i++)
            sum.x += pieces[i].x, sum.y += pieces[i].y, sum.z += pieces[i].z, sum.w += pieces[i].w;
        x[0] = (float)(T)sum.x, x[1] = (float)(T)sum.y, x[2] = (float)(T)sum.z, x[3] = (float)(T)sum.w;
#else
        load(qkv + at, x);
#endif
    }
};

// Queries, and the new key and value if the block appends, from the projection: bias, norm, rotation. LANES lanes share
// a head; each has W adjacent elements of its first half and those of its second. All loads are in flight before the
// first use.
__host__ __device__ constexpr int lanes_of(int accesses) { return accesses <= 1 ? 1 : 2 * lanes_of((accesses + 1) / 2); }
#define LANES (lanes_of(HALF / W))
static_assert(LANES <= 32, "a head fits in a warp");
#define PREPARED ((TILE_HEADS + 2 + THREADS / LANES - 1) / (THREADS / LANES))
struct Preparation {
    float bias[PREPARED][2][W], cos[W], sin[W];

    static __device__ __forceinline__ int dim() { return THREAD % LANES * W; }
    // The head of a lane's `i`-th turn; after the queries come the key and the value.
    static __device__ __forceinline__ int head_of(int i) { return (i * THREADS + THREAD) / LANES; }
    static __device__ __forceinline__ bool has(const Work& work, int head) {
        return head < work.heads + (work.appends ? 2 : 0) && dim() < HALF;
    }
    static __device__ __forceinline__ int column_of(const Work& work, int head) {
        const int place = head - work.heads;
        return (place < 0 ? work.first_head + head : QUERY_HEADS + place * KEY_HEADS + work.key_head) * HEAD_DIM + dim();
    }

    // Loads data that exists before the step.
    __device__ __forceinline__ void begin(const Work& work, const Step& step, int position) {
#pragma unroll
        for (int i = 0; i < (QKV_BIAS ? PREPARED : 0); i++) {
            const int head = head_of(i);
            if (!has(work, head)) continue;
            load(step.bias + column_of(work, head), bias[i][0]);
            load(step.bias + column_of(work, head) + HALF, bias[i][1]);
        }
        // The second half of a row repeats the first.
        const long long at = (long long)position * HEAD_DIM + HALF + (dim() < HALF ? dim() : 0);
        load(step.cos + at, cos);
        load(step.sin + at, sin);
    }

    __device__ __forceinline__ void finish(Shared& shared, const Work& work, const Step& step, float epsilon) const {
        float raw[PREPARED][2][W] = {};
#pragma unroll
        for (int i = 0; i < PREPARED; i++) {
            const int head = head_of(i);
            if (!has(work, head)) continue;
            const long long from = (long long)work.row * HEADS * HEAD_DIM + column_of(work, head);
            step.read(from, raw[i][0]);
            step.read(from + HALF, raw[i][1]);
        }
#pragma unroll
        for (int i = 0; i < PREPARED; i++) {
            const int head = head_of(i), place = head - work.heads;
            float(&a)[W] = raw[i][0], (&b)[W] = raw[i][1];
            const bool here = has(work, head);
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; here && j < W; j++) {
                // Rounded like a projection with a bias.
                if (QKV_BIAS) a[j] = (float)(T)(a[j] + bias[i][0][j]), b[j] = (float)(T)(b[j] + bias[i][1][j]);
                squares = fmaf(a[j], a[j], fmaf(b[j], b[j], squares));
            }
            if (QK_NORM) {
                // Called by whole warps, whether or not they have this head.
#pragma unroll
                for (int other = LANES / 2; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
            }
            if (!here) continue;
            if (QK_NORM && place <= 0) {
                const T* norm = place < 0 ? step.q_norm : step.k_norm;
                const float factor = rsqrtf(squares / HEAD_DIM + epsilon);
                float low[W], high[W];
                load(norm + dim(), low);
                load(norm + dim() + HALF, high);
                // Rounded where a separate norm would round.
#pragma unroll
                for (int j = 0; j < W; j++) {
                    a[j] = (float)(T)((float)(T)(a[j] * factor) * low[j]);
                    b[j] = (float)(T)((float)(T)(b[j] * factor) * high[j]);
                }
            }
            if (place <= 0) {
#pragma unroll
                for (int j = 0; j < W; j++) {
                    const float turned = a[j] * cos[j] - b[j] * sin[j];
                    b[j] = b[j] * cos[j] + a[j] * sin[j];
                    a[j] = turned;
                }
            }
            T* to = place < 0 ? shared.queries + head * QUERY_STRIDE : place == 0 ? shared.key : shared.value;
            store(to + dim(), a);
            store(to + dim() + HALF, b);
        }
    }
};

#if !PLAIN

#define CHUNKS (HEAD_DIM / 8)
// Chunks of 16 bytes are permuted within this many, so that eight rows of a matrix are in different banks.
#define SWIZZLED (CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2)
#define STEPS (HEAD_DIM / 16)

__device__ __forceinline__ u32 place(u32 tile, u32 token, u32 chunk) {
    return tile + (token * CHUNKS + (chunk ^ (token / (8 / SWIZZLED) % SWIZZLED))) * 16;
}
// A warp's tile of a cache: all of it, or with SOME the first `tokens`, followed by zeros.
template <bool SOME>
__device__ __forceinline__ void fetch(u32 tile, const T* from, int tokens) {
    const u32 lane = THREAD % 32;
    from += lane * 8;
#pragma unroll
    for (u32 i = 0; i < WARP_TOKENS * CHUNKS / 32; i++) {
        // Written so that the compiler sees that lanes change few bits of an address where a warp copies whole tokens.
        const u32 token = 32 % CHUNKS == 0 ? i * (32 / CHUNKS) + lane / CHUNKS : (i * 32 + lane) / CHUNKS;
        const u32 chunk = 32 % CHUNKS == 0 ? lane % CHUNKS : (i * 32 + lane) % CHUNKS;
        if (SOME) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(tile, token, chunk)), "l"(from + i * 256),
                         "r"((int)token < tokens ? 16 : 0)
                         : "memory");
        } else {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place(tile, token, chunk)), "l"(from + i * 256)
                         : "memory");
        }
    }
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of a warp's copies except the latest group.
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

// The transpose of an 8 x 8 matrix that a warp has as the values of a product.
__device__ __forceinline__ u32 transpose(u32 m) {
    u32 t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
    return t;
}

// Heads are columns of the products, in eights; rows are tokens, then dims.
#define EIGHTS ((TILE_HEADS + 7) / 8)

// A warp's part of the cached tokens, left in `shared`. The first tiles are in flight before the queries arrive.
struct Stream {
    u32 keys;
    u32 values;
    const T* k_cache;
    const T* v_cache;
    const int* blocks;

    __device__ __forceinline__ void fetch_keys(const Work& work, int token, int block) const {
        // Keys that do not exist get no score, whatever the memory contains.
        if (token < work.tokens) fetch<false>(keys, k_cache + slot(block, work.key_head, token), 0);
        commit();
    }
    __device__ __forceinline__ void fetch_values(const Work& work, int token, int block) const {
        const T* from = v_cache + slot(block, work.key_head, token);
        if (token + WARP_TOKENS <= work.tokens) {
            fetch<false>(values, from, 0);
        } else if (token < work.tokens) {
            fetch<true>(values, from, work.tokens - token);
        }
        commit();
    }

    __device__ __forceinline__ void run(Shared& shared, const Work& work, float scale) const {
        const int warp = THREAD / 32, lane = THREAD % 32;
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

        int tile = 0;
        for (int token = work.first_token(); token < work.tokens; token += work.tokens_between()) {
            const int next = token + work.tokens_between(), next_block = work.block_of(++tile, next, blocks);
            // Values of a thread: tokens `row` and `row` + 8 of sixteen, heads `column` and the next of eight.
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
        // The mixtures overwrite the tiles.
        MEET();
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
        const int warp = THREAD / 32, lane = THREAD % 32;
        float mixed[TILE_HEADS][LANE_DIMS] = {}, top[TILE_HEADS], sum[TILE_HEADS];
#pragma unroll
        for (int head = 0; head < TILE_HEADS; head++) top[head] = NOTHING, sum[head] = 0.0f;
        for (int first = work.first_token(); first < work.tokens; first += work.tokens_between()) {
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

// Score of the new token with each head, computed by sixteen lanes.
__device__ __forceinline__ void score_new_token(Shared& shared, const Work& work, float scale) {
#pragma unroll 1
    for (int first = 0; first < work.heads; first += THREADS / 16) {
        const int head = first + THREAD / 16, row = min(head, work.heads - 1) * QUERY_STRIDE;
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < (HEAD_DIM + 16 * W - 1) / (16 * W); i++) {
            const int d = (i * 16 + THREAD % 16) * W;
            if (d >= HEAD_DIM) continue;
            float query[W], key[W];
            load(shared.queries + row + d, query);
            load(shared.key + d, key);
#pragma unroll
            for (int j = 0; j < W; j++) score = fmaf(query[j], key[j], score);
        }
#pragma unroll
        for (int other = 8; other > 0; other /= 2) score += __shfl_xor_sync(~0u, score, other);
        if (THREAD % 16 == 0 && head < work.heads) shared.top[WARPS][head] = score * scale;
    }
}

// Merges the warps in order into the output if the row has one block, else into the block's mixture.
__device__ __forceinline__ void merge_warps(Shared& shared, const Work& work, T* out) {
#pragma unroll 1
    for (int i = THREAD * W; i < work.heads * HEAD_DIM; i += THREADS * W) {
        const int head = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = work.appends ? shared.top[WARPS][head] : NOTHING, sum = 0.0f, mixed[W] = {};
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) top = fmaxf(top, shared.top[warp][head]);
        // A block may have no token.
        const float shift = top == NOTHING ? 0.0f : top;
        const auto add = [&](float factor, float weights, const float(&values)[W]) {
            sum = fmaf(factor, weights, sum);
#pragma unroll
            for (int j = 0; j < W; j++) mixed[j] = fmaf(factor, values[j], mixed[j]);
        };
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            float values[W];
            load(shared.mixtures(warp) + i, values);
            add(power(shared.top[warp][head] - shift), shared.sum[warp][head], values);
        }
        if (work.appends) {
            float values[W];
            load(shared.value + d, values);
            add(power(shared.top[WARPS][head] - shift), 1.0f, values);
        }
        if (work.sharing == 1) {
#pragma unroll
            for (int j = 0; j < W; j++) mixed[j] /= sum;
            store(out + i, mixed);
        } else {
#pragma unroll
            for (int j = 0; j < W; j++) shared.mixtures(0)[i + j] = mixed[j];
            if (d == 0) shared.block_top[head] = top, shared.block_sum[head] = sum;
        }
    }
}

// The address of `shared` in block `rank` of the cluster.
__device__ __forceinline__ Shared* shared_of(Shared& shared, int rank) {
    Shared* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(&shared), "r"(rank));
    return other;
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Merges the blocks of a cluster in order; each block writes a part of the output.
__device__ __forceinline__ void merge_blocks(Shared& shared, const Work& work, T* out) {
    wait_for_cluster();
    for (int i = work.rank * THREADS + THREAD; i < work.heads * HEAD_DIM; i += CLUSTER * THREADS) {
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
    // No block exits while another reads its memory.
    wait_for_cluster();
}

// No-ops without programmatic serialization.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A group's part of a row, from the first fetch to its mixture in `shared`, or the output if no other group shares the
// row. `ready` waits for the step's inputs and for the output's last reader; lengths, table and cached tokens are read
// before it. False if the row is not live: then its output is zeros.
template <class Ready>
__device__ __forceinline__ bool attend(Shared& shared, const Work& work, const Step& step, T* k_cache, T* v_cache,
                                       const int* table, T* out, const Scalars& s, const Ready& ready) {
    const int head_tile = work.first_head % HEAD_GROUP / TILE_HEADS;
    const int* blocks = table + work.row * s.max_blocks;
    // The same for all groups that share the row.
    if (work.tokens < 0 || work.tokens + 1 > s.max_blocks * BLOCK) {
        ready();
        if (work.rank == 0) {
#pragma unroll 1
            for (int i = THREAD; i < work.heads * HEAD_DIM; i += THREADS) out[i] = (T)0.0f;
        }
        return false;
    }
    const float scale = (float)s.scale * LOG2E;
    Preparation preparation;
    // Before the copies, which take time.
    preparation.begin(work, step, work.tokens);

#if PLAIN
    const Stream stream = {k_cache, v_cache, blocks};
#else
    const u32 tiles = (u32)__cvta_generic_to_shared(shared.stream) + THREAD / 32 * WARP_TOKENS * HEAD_DIM * 4;
    const Stream stream = {tiles, tiles + WARP_TOKENS * HEAD_DIM * 2, k_cache, v_cache, blocks};
    const int first_token = work.first_token(), first_block = work.block_of(0, first_token, blocks);
    stream.fetch_keys(work, first_token, first_block);
    stream.fetch_values(work, first_token, first_block);
#endif
    ready();
    preparation.finish(shared, work, step, (float)s.epsilon);
    MEET();
    if (work.appends) score_new_token(shared, work, scale);
    stream.run(shared, work, scale);
    MEET();
    merge_warps(shared, work, out);
    if (work.appends && head_tile == 0) {
        const long long to = slot(blocks[work.tokens / BLOCK], work.key_head, work.tokens);
#pragma unroll 1
        for (int d = THREAD; d < HEAD_DIM; d += THREADS) {
            k_cache[to + d] = shared.key[d];
            v_cache[to + d] = shared.value[d];
        }
    }
    return true;
}

// The `tile`-th part of the heads of a row, over all key heads.
__device__ __forceinline__ Work work_of(int row, int tile, int rank, int sharing, const int* lengths, const int* table,
                                        long long max_blocks) {
    Work work;
    work.row = row;
    work.key_head = tile / HEAD_TILES;
    work.first_head = work.key_head * HEAD_GROUP + tile % HEAD_TILES * TILE_HEADS;
    work.heads = min(TILE_HEADS, HEAD_GROUP - tile % HEAD_TILES * TILE_HEADS);
    work.tokens = lengths[row];
    work.rank = rank;
    work.sharing = sharing;
    work.appends = rank == 0;
    // Read in parallel with the length.
    const int at = (work.first_token() + THREAD % 32 * work.tokens_between()) / BLOCK;
    work.block = at < max_blocks ? table[row * max_blocks + at] : 0;
    return work;
}
__device__ __forceinline__ long long output_of(const Work& work) {
    return ((long long)work.row * QUERY_HEADS + work.first_head) * HEAD_DIM;
}

#if !GROUPS

__device__ __forceinline__ void attend_block(const Step& step, T* k_cache, T* v_cache, const int* table, const int* lengths,
                                             T* out, const Scalars& s) {
    __shared__ Shared shared;
    allow_next_kernel();
    if (!CACHE_EARLY) wait_for_previous_kernel();
    const Work work = work_of(blockIdx.y, blockIdx.x, blockIdx.z, CLUSTER, lengths, table, s.max_blocks);
    out += output_of(work);
    const auto ready = [] {
        if (CACHE_EARLY) wait_for_previous_kernel();
    };
    const bool live = attend(shared, work, step, k_cache, v_cache, table, out, s, ready);
    if (CLUSTER > 1 && live) merge_blocks(shared, work, out);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
attention_decode_step(const T* qkv, const T* bias, const T* q_norm, const T* k_norm, const float* cos, const float* sin,
                      T* k_cache, T* v_cache, const int* table, const int* lengths, T* out,
                      const __grid_constant__ Scalars s) {
    const Step step = {qkv, bias, q_norm, k_norm, cos, sin};
    attend_block(step, k_cache, v_cache, table, lengths, out, s);
}

#endif

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

// No block may be both a source and a target in one launch.
extern "C" __global__ void __launch_bounds__(256) kv_copy_blocks(const int* pairs, T* k_cache, T* v_cache) {
    const int from = pairs[2 * blockIdx.x], to = pairs[2 * blockIdx.x + 1];
    if (from < 0 || to < 0) return;
    T* cache = blockIdx.y == 0 ? k_cache : v_cache;
    const int chunks = KEY_HEADS * BLOCK * HEAD_DIM / CHUNK;
    const Chunk* source = reinterpret_cast<const Chunk*>(cache) + (long long)from * chunks;
    Chunk* target = reinterpret_cast<Chunk*>(cache) + (long long)to * chunks;
    for (int i = threadIdx.x; i < chunks; i += 256) target[i] = source[i];
}
