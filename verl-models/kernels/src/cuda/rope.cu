// Rotary positions between a fused projection and attention.
//
//   rope_split     q, k, v = parts of qkv, with q and k rotated: y_d = x_d cos_d + x_{d+-Dh/2} sin_d
//   rope_backward  d_qkv from dq, dk, dv, rotated back:          x_d = y_d cos_d + y_{d+-Dh/2} sin_{d+-Dh/2}
//
// A head's dims d and d + Dh/2 are a pair. The tables have a row for each position, with signed sines: -sin of the
// angle in the first half, sin in the second. Cosines are the same in both halves, so only the second halves are read.
// Gradients of keys and values arrive in parts, in f32, which are added in order.
//
// Shapes: qkv, d_qkv [tokens, (H+2K)*Dh]; q, dq [tokens, H*Dh]; k, v [tokens, K*Dh]; positions [tokens] i32;
//   cos, sin [positions, Dh] f32; dk_parts, dv_parts [splits, tokens, K*Dh] f32. Dh even; all aligned to 16 bytes.
// Grid ceil(tokens * THREADS_PER_TOKEN / 256), block 256, with THREADS_PER_TOKEN = 4 * (Dh/2) / VECTOR, VECTOR
// = 8 (4 in f32) where that divides Dh/2, else 1. Fewer than 2^32 threads.
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
#define ROTATED (QUERY_HEADS + KEY_HEADS)

struct Scalars {
    long long tokens;
    long long splits;
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

// The token, first head and first dim of a thread; PIECES threads share the pairs of a head.
struct Place {
    long long token;
    int head;
    int dim;
};
__device__ __forceinline__ Place place_of_thread() {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    return {i / (PIECES * SHARE), (int)(i / PIECES % SHARE), (int)(i % PIECES) * VECTOR};
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
    const Place at = place_of_thread();
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
    const Place at = place_of_thread();
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
