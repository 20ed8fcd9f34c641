// Rotary positions between a fused projection and attention, preceded by norms of the heads if the model has them.
//
//   rope_split     q, k, v = parts of qkv, with q and k rotated: y_d = x_d cos_d + x_{d+-Dh/2} sin_d
//   rope_backward  d_qkv from dq, dk, dv, rotated back:          x_d = y_d cos_d + y_{d+-Dh/2} sin_{d+-Dh/2}
//
//   rope_norm_split     the same with x = w n, n = z s, s = 1 / sqrt(mean(z^2) + epsilon) for each head z of qkv's q and k
//   rope_norm_backward  with g the gradient of x:  dz_d = s (w_d g_d - n_d mean(w g n)), dw_d = sum g_d n_d in parts
//   rope_norm_weights   d_norms = sum of those parts
//
// A head's dims d and d + Dh/2 are a pair. The tables have a row for each position, with signed sines: -sin of the
// angle in the first half, sin in the second. Cosines are the same in both halves, so only the second halves are read.
// Gradients of keys and values arrive in parts, in f32, which are added in order.
//
// Shapes: qkv, d_qkv [tokens, (H+2K)*Dh]; q, dq [tokens, H*Dh]; k, v [tokens, K*Dh]; positions [tokens] i32;
//   cos, sin [positions, Dh] f32; dk_parts, dv_parts [splits, tokens, K*Dh] f32;
//   q_norm, k_norm [Dh]; norm_parts [grid, 2*Dh] f32; d_norms [2*Dh] f32: of queries, then of keys. Dh even; all aligned
//   to 16 bytes.
// Grid ceil(tokens * THREADS_PER_TOKEN / 256), block 256, with THREADS_PER_TOKEN = 4 * (Dh/2) / VECTOR, VECTOR
// = 8 (4 in f32) where that divides Dh/2, else 1; the rope_norm kernels with (Dh/2) / VECTOR rounded up to a power of two,
// which must be at most 32. Fewer than 2^32 threads. rope_norm_weights: grid ceil(2*Dh/32), block 256.
// Bytes: qkv read and written once (bf16, Dh 64, H 14, K 2: 4.6 KB per token), tables read once per token (256 bytes,
// mostly from the cache); backward adds 4 bytes * splits * 2K*Dh per token.

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

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
typedef ELEMENT T;

#define HALF (HEAD_DIM / 2)
// Adjacent dims of a thread: 16 bytes if that divides half of a head.
#define WIDE (JOIN(IS_F32_, ELEMENT) ? 4 : 8)
#define VECTOR (HALF % WIDE == 0 ? WIDE : 1)
#define PIECES (HALF / VECTOR)
#define HEADS (QUERY_HEADS + 2 * KEY_HEADS)
// Threads that share the heads of a token: each thread has every fourth head.
#define SHARE 4
#define HEADS_OF_THREAD ((HEADS + SHARE - 1) / SHARE)
#define ROTATED (QUERY_HEADS + KEY_HEADS)

struct Scalars {
    long long tokens;
    long long splits;
};
struct NormScalars {
    Scalars sizes;
    double epsilon;
};

struct alignas(VECTOR % 4 == 0 ? 16 : 4) Dims {
    float x[VECTOR];
};
struct alignas(VECTOR * sizeof(T)) Packed {
    T x[VECTOR];
};

__device__ __forceinline__ Packed load(const T* from) { return *reinterpret_cast<const Packed*>(from); }
__device__ __forceinline__ Dims load_f32(const float* from) { return *reinterpret_cast<const Dims*>(from); }
__device__ __forceinline__ Dims unpack(const Packed& packed) {
    Dims dims;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) dims.x[i] = (float)packed.x[i];
    return dims;
}
__device__ __forceinline__ void store(T* to, const Dims& dims) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) packed.x[i] = (T)dims.x[i];
    *reinterpret_cast<Packed*>(to) = packed;
}
__device__ __forceinline__ Dims zeros() {
    Dims dims;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) dims.x[i] = 0.0f;
    return dims;
}

// The token, first head and first dim of a thread; `lanes` threads share the pairs of a head.
struct Place {
    long long token;
    int head;
    int dim;
};
__device__ __forceinline__ Place place_of_thread(unsigned lanes) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    return {i / (lanes * SHARE), (int)(i / lanes % SHARE), (int)(i % lanes) * VECTOR};
}

// Cosines and sines of a thread's dims.
struct Turn {
    Dims cosines, sines;

    __device__ __forceinline__ Turn(const float* cos, const float* sin, int position, int dim) {
        const long long at = (long long)position * HEAD_DIM + HALF + dim;
        cosines = load_f32(cos + at), sines = load_f32(sin + at);
    }
    __device__ __forceinline__ void forth(Dims& low, Dims& high) const {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const float a = low.x[i], b = high.x[i];
            low.x[i] = a * cosines.x[i] - b * sines.x[i];
            high.x[i] = b * cosines.x[i] + a * sines.x[i];
        }
    }
    __device__ __forceinline__ void back(Dims& low, Dims& high) const {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const float a = low.x[i], b = high.x[i];
            low.x[i] = a * cosines.x[i] + b * sines.x[i];
            high.x[i] = b * cosines.x[i] - a * sines.x[i];
        }
    }
};

// Position of a head of the projection in q, k or v.
__device__ __forceinline__ T* split_place(long long token, int head, T* q, T* k, T* v) {
    if (head < QUERY_HEADS) return q + (token * QUERY_HEADS + head) * HEAD_DIM;
    if (head < ROTATED) return k + (token * KEY_HEADS + head - QUERY_HEADS) * HEAD_DIM;
    return v + (token * KEY_HEADS + head - ROTATED) * HEAD_DIM;
}

extern "C" __global__ void __launch_bounds__(256)
rope_split(const T* qkv, const int* positions, const float* cos, const float* sin, T* q, T* k, T* v,
           const __grid_constant__ Scalars s) {
    const Place at = place_of_thread(PIECES);
    if (at.token >= s.tokens) return;
    const Turn turn(cos, sin, positions[at.token], at.dim);
#pragma unroll 6
    for (int head = at.head; head < HEADS; head += SHARE) {
        const T* from = qkv + (at.token * HEADS + head) * HEAD_DIM + at.dim;
        Dims low = unpack(load(from)), high = unpack(load(from + HALF));
        if (head < ROTATED) turn.forth(low, high);
        T* to = split_place(at.token, head, q, k, v) + at.dim;
        store(to, low);
        store(to + HALF, high);
    }
}

// Sum of the parts of a gradient, `size` elements apart.
__device__ __forceinline__ Dims sum_parts(const float* parts, long long size, long long splits) {
    Dims sum = load_f32(parts);
    for (long long split = 1; split < splits; split++) {
        const Dims part = load_f32(parts + split * size);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum.x[i] += part.x[i];
    }
    return sum;
}

// The gradient of attention's input.
__device__ __forceinline__ void load_gradient(const T* dq, const float* dk_parts, const float* dv_parts, const Scalars& s,
                                              const Place& at, int head, Dims& low, Dims& high) {
    if (head < QUERY_HEADS) {
        const T* from = dq + (at.token * QUERY_HEADS + head) * HEAD_DIM + at.dim;
        low = unpack(load(from));
        high = unpack(load(from + HALF));
    } else {
        const long long size = s.tokens * KEY_HEADS * HEAD_DIM;
        const bool is_key = head < ROTATED;
        const int key_head = head - (is_key ? QUERY_HEADS : ROTATED);
        const float* from = (is_key ? dk_parts : dv_parts) + (at.token * KEY_HEADS + key_head) * HEAD_DIM + at.dim;
        low = sum_parts(from, size, s.splits);
        high = sum_parts(from + HALF, size, s.splits);
    }
}

extern "C" __global__ void __launch_bounds__(256)
rope_backward(const T* dq, const float* dk_parts, const float* dv_parts, const int* positions, const float* cos,
              const float* sin, T* d_qkv, const __grid_constant__ Scalars s) {
    const Place at = place_of_thread(PIECES);
    if (at.token >= s.tokens) return;
    const Turn turn(cos, sin, positions[at.token], at.dim);
#pragma unroll 6
    for (int head = at.head; head < HEADS; head += SHARE) {
        Dims low, high;
        load_gradient(dq, dk_parts, dv_parts, s, at, head, low, high);
        if (head < ROTATED) turn.back(low, high);
        T* to = d_qkv + (at.token * HEADS + head) * HEAD_DIM + at.dim;
        store(to, low);
        store(to + HALF, high);
    }
}

// Threads that share a normed head.
#define LANES (PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : PIECES)

#if PIECES <= 32

// Sum over the threads of a head.
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}
// Sum of a * b over a head.
__device__ __forceinline__ float head_dot(const Dims& a_low, const Dims& a_high, const Dims& b_low, const Dims& b_high) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum += a_low.x[i] * b_low.x[i] + a_high.x[i] * b_high.x[i];
    return head_sum(sum);
}
// 1 / root mean square of a head.
__device__ __forceinline__ float head_scale(const Dims& low, const Dims& high, double epsilon) {
    return 1.0f / sqrtf(head_dot(low, high, low, high) / HEAD_DIM + (float)epsilon);
}
// w n, rounded where a separate norm would round.
__device__ __forceinline__ Dims normed(const Dims& x, float scale, const Dims& weight) {
    Dims y;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) y.x[i] = (float)(T)((float)(T)(x.x[i] * scale) * weight.x[i]);
    return y;
}

extern "C" __global__ void __launch_bounds__(256)
rope_norm_split(const T* qkv, const int* positions, const float* cos, const float* sin, const T* q_norm, const T* k_norm,
                T* q, T* k, T* v, const __grid_constant__ NormScalars s) {
    const Place at = place_of_thread(LANES);
    const bool mine = at.token < s.sizes.tokens && at.dim < HALF;
    const int dim = mine ? at.dim : 0;
    const Turn turn(cos, sin, mine ? positions[at.token] : 0, dim);
#pragma unroll
    for (int i = 0; i < HEADS_OF_THREAD; i++) {
        const int head = at.head + i * SHARE;
        const bool here = mine && head < HEADS;
        const T* from = qkv + (at.token * HEADS + head) * HEAD_DIM + at.dim;
        Dims low = here ? unpack(load(from)) : zeros(), high = here ? unpack(load(from + HALF)) : zeros();
        // Every thread takes part in the sum.
        const float scale = head_scale(low, high, s.epsilon);
        if (!here) continue;
        if (head < ROTATED) {
            const T* norm = (head < QUERY_HEADS ? q_norm : k_norm) + dim;
            low = normed(low, scale, unpack(load(norm)));
            high = normed(high, scale, unpack(load(norm + HALF)));
            turn.forth(low, high);
        }
        T* to = split_place(at.token, head, q, k, v) + at.dim;
        store(to, low);
        store(to + HALF, high);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
rope_norm_backward(const T* qkv, const T* dq, const float* dk_parts, const float* dv_parts, const int* positions,
                   const float* cos, const float* sin, const T* q_norm, const T* k_norm, T* d_qkv, float* norm_parts,
                   const __grid_constant__ NormScalars s) {
    __shared__ float sums[256 / LANES][2 * HEAD_DIM];
    const Place at = place_of_thread(LANES);
    const bool mine = at.token < s.sizes.tokens && at.dim < HALF;
    const int dim = mine ? at.dim : 0;
    const Turn turn(cos, sin, mine ? positions[at.token] : 0, dim);
    // Gradients of the gains of queries and keys, low and high halves.
    Dims dw[2][2] = {{zeros(), zeros()}, {zeros(), zeros()}};
#pragma unroll 1
    for (int i = 0; i < HEADS_OF_THREAD; i++) {
        const int head = at.head + i * SHARE;
        const bool here = mine && head < HEADS;
        const long long place = (at.token * HEADS + head) * HEAD_DIM + at.dim;
        Dims low = here ? unpack(load(qkv + place)) : zeros(), high = here ? unpack(load(qkv + place + HALF)) : zeros();
        Dims g_low = zeros(), g_high = zeros();
        if (here) load_gradient(dq, dk_parts, dv_parts, s.sizes, at, head, g_low, g_high);
        const float scale = head_scale(low, high, s.epsilon);
        if (head < ROTATED) turn.back(g_low, g_high);
        const bool is_query = head < QUERY_HEADS;
        const T* norm = (is_query ? q_norm : k_norm) + dim;
        Dims wg_low = unpack(load(norm)), wg_high = unpack(load(norm + HALF));
#pragma unroll
        for (int d = 0; d < VECTOR; d++) {
            low.x[d] *= scale;
            high.x[d] *= scale;
            wg_low.x[d] *= g_low.x[d];
            wg_high.x[d] *= g_high.x[d];
        }
        const float mean = head_dot(wg_low, wg_high, low, high) / HEAD_DIM;
        if (!here) continue;
        if (head < ROTATED) {
#pragma unroll
            for (int d = 0; d < VECTOR; d++) {
                const float low_part = g_low.x[d] * low.x[d], high_part = g_high.x[d] * high.x[d];
                dw[0][0].x[d] += is_query ? low_part : 0.0f;
                dw[0][1].x[d] += is_query ? high_part : 0.0f;
                dw[1][0].x[d] += is_query ? 0.0f : low_part;
                dw[1][1].x[d] += is_query ? 0.0f : high_part;
                g_low.x[d] = scale * (wg_low.x[d] - low.x[d] * mean);
                g_high.x[d] = scale * (wg_high.x[d] - high.x[d] * mean);
            }
        }
        store(d_qkv + place, g_low);
        store(d_qkv + place + HALF, g_high);
    }
    if (at.dim < HALF) {
#pragma unroll
        for (int i = 0; i < 4 * VECTOR; i++) {
            const int half = i / VECTOR % 2;
            sums[threadIdx.x / LANES][i / (2 * VECTOR) * HEAD_DIM + half * HALF + at.dim + i % VECTOR] =
                dw[i / (2 * VECTOR)][half].x[i % VECTOR];
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < 2 * HEAD_DIM; d += 256) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < 256 / LANES; i++) sum += sums[i][d];
        norm_parts[(long long)blockIdx.x * 2 * HEAD_DIM + d] = sum;
    }
}

struct Parts {
    long long parts;
};

// Sums eight rows of parts at a time, then those eight sums in order.
extern "C" __global__ void __launch_bounds__(256)
rope_norm_weights(const float* norm_parts, float* d_norms, const __grid_constant__ Parts s) {
    __shared__ float sums[8][32];
    const int d = blockIdx.x * 32 + threadIdx.x % 32, row = threadIdx.x / 32;
    float sum = 0.0f;
    if (d < 2 * HEAD_DIM) {
#pragma unroll 8
        for (long long part = row; part < s.parts; part += 8) sum += norm_parts[part * 2 * HEAD_DIM + d];
    }
    sums[row][threadIdx.x % 32] = sum;
    __syncthreads();
    if (row > 0 || d >= 2 * HEAD_DIM) return;
    for (int i = 1; i < 8; i++) sum += sums[i][threadIdx.x];
    d_norms[d] = sum;
}

#endif
