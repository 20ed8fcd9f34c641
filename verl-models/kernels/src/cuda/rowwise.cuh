// Shared by the row-wise kernels: the element type, 16-byte accesses, exponentials, reductions in a fixed order.
//
// The launcher concatenates its #defines, this text and one kernel file into one source; nothing is included by path.
//
// ELEMENT is the type of activations, weights and logits: __nv_bfloat16 (default) or float. Arithmetic is f32. In f32,
// exponentials are the accurate ones, so that results agree with the CPU to rounding; in bf16 they are the fast ones,
// whose error (2⁻²²) is far below that of the element.

#include <cuda_bf16.h>

#ifndef ELEMENT
#define ELEMENT __nv_bfloat16
#endif

typedef ELEMENT elem;
typedef unsigned long long u64;

// Elements of a 16-byte access.
[[maybe_unused]] constexpr int VEC = 16 / int(sizeof(elem));
[[maybe_unused]] constexpr bool IS_F32 = sizeof(elem) == 4;
[[maybe_unused]] constexpr unsigned ALL_LANES = 0xffffffffu;
// Replaces −∞ where a difference of two of them must not be NaN.
[[maybe_unused]] constexpr float LOWEST = -1e30f;
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void assign(float& to, float x) { to = x; }
__device__ __forceinline__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

// x rounded to the element type.
__device__ __forceinline__ float rounded(float x) {
    elem element;
    assign(element, x);
    return to_float(element);
}

__device__ __forceinline__ void unpack(uint4 raw, float (&x)[4]) {
    x[0] = __uint_as_float(raw.x);
    x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z);
    x[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void unpack(uint4 raw, float (&x)[8]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 packed(const float (&x)[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

__device__ __forceinline__ unsigned two_halves(float low, float high) {
    const unsigned bits = __bfloat16_as_ushort(__float2bfloat16_rn(low));
    return bits | unsigned(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

__device__ __forceinline__ uint4 packed(const float (&x)[8]) {
    return make_uint4(two_halves(x[0], x[1]), two_halves(x[2], x[3]), two_halves(x[4], x[5]), two_halves(x[6], x[7]));
}

// W adjacent elements as floats: one 16-byte access if W is VEC, otherwise single accesses.
template <int W> __device__ __forceinline__ void load(const elem* from, float (&x)[W]) {
    if constexpr (W == VEC) {
        unpack(*reinterpret_cast<const uint4*>(from), x);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = to_float(from[i]);
    }
}

template <int W> __device__ __forceinline__ void store(elem* to, const float (&x)[W]) {
    if constexpr (W == VEC) {
        *reinterpret_cast<uint4*>(to) = packed(x);
    } else {
#pragma unroll
        for (int i = 0; i < W; i++) assign(to[i], x[i]);
    }
}

// The larger of two numbers, NaN where one is NaN (fmaxf would hide it).
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// The larger number of each of two bf16 pairs: with NaN if one is NaN, and without.
__device__ __forceinline__ unsigned max_or_nan_pair(unsigned a, unsigned b) {
    unsigned y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b) {
    unsigned y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// 2^x; results below 2⁻¹²⁶ become 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x = power(x · POWER_SCALE).
[[maybe_unused]] constexpr float POWER_SCALE = IS_F32 ? 1.0f : 1.4426950408889634f;
__device__ __forceinline__ float power(float x) {
    if constexpr (IS_F32) {
        return expf(x);
    } else {
        return exp2_fast(x);
    }
}

// Sum over the warp; the same bits in every lane.
template <typename N> __device__ __forceinline__ N warp_sum(N x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
