// AdamW with f32 state, and sums of squares in a fixed order, for several tensors per launch: most of a model's tensors
// are small, and a launch costs as much as some megabytes of traffic.
//
//   g <- scale g;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
//   p <- decay p - m / (sqrt(v) / second_correction + eps) step_size
//
// Every operation is rounded separately, in this order, as on the CPU: equal inputs give equal bits.
//
// update: for each of COUNT tensors p, m, v, g, and the outputs (each may alias its input), [n] f32; with CAST also w,
// the
//   new p in bf16. Block 256; a block has TASK elements, those of tensor i are blocks starts[i] .. starts[i + 1].
// squares: COUNT tensors x, [n] f32 -> partial [first ..] f64, one per block; blocks as for update.
// sums: partial f64, starts [tensors + 1] i32 -> y [tensors] f32, the sum of each tensor's blocks; grid tensors, block
// 256. Limits: buffers aligned to 16 bytes. Bytes per element: 28 for update, 30 with CAST, 4 for squares.

#include <cuda_bf16.h>

#define THREADS 256
#define TASK 16384

#ifndef CAST
#define CAST 0
#endif
// Tensors of a launch, 1 to 16.
#ifndef COUNT
#define COUNT 16
#endif

// LIST(X) is X(0) X(1) ... X(COUNT - 1).
#define LIST_1(X) X(0)
#define LIST_2(X) LIST_1(X) X(1)
#define LIST_3(X) LIST_2(X) X(2)
#define LIST_4(X) LIST_3(X) X(3)
#define LIST_5(X) LIST_4(X) X(4)
#define LIST_6(X) LIST_5(X) X(5)
#define LIST_7(X) LIST_6(X) X(6)
#define LIST_8(X) LIST_7(X) X(7)
#define LIST_9(X) LIST_8(X) X(8)
#define LIST_10(X) LIST_9(X) X(9)
#define LIST_11(X) LIST_10(X) X(10)
#define LIST_12(X) LIST_11(X) X(11)
#define LIST_13(X) LIST_12(X) X(12)
#define LIST_14(X) LIST_13(X) X(13)
#define LIST_15(X) LIST_14(X) X(14)
#define LIST_16(X) LIST_15(X) X(15)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define LIST(X) JOIN(LIST_, COUNT)(X)

// The tensor of a block, and the block's first element in it.
struct Place {
    int tensor;
    long long first;
};
template <typename Scalars> __device__ __forceinline__ Place place(const Scalars& s) {
    int tensor = 0;
    while (tensor + 1 < COUNT && (long long)blockIdx.x >= s.starts[tensor + 1]) tensor++;
    return {tensor, ((long long)blockIdx.x - s.starts[tensor]) * TASK};
}

struct Tensors {
    const float *p, *m, *v, *g;
    float *p_out, *m_out, *v_out;
    __nv_bfloat16* w_out;
};

struct UpdateScalars {
    double scale, beta1, beta2, epsilon;
    long long starts[COUNT];
    long long n[COUNT];
    double decay[COUNT], step_size[COUNT], second_correction[COUNT];
};

struct Update {
    float scale, beta1, rest1, beta2, rest2, decay, step_size, correction, epsilon;

    __device__ __forceinline__ void apply(float& p, float& m, float& v, float g) const {
        const float x = __fmul_rn(g, scale);
        m = __fadd_rn(__fmul_rn(m, beta1), __fmul_rn(x, rest1));
        v = __fadd_rn(__fmul_rn(v, beta2), __fmul_rn(__fmul_rn(x, x), rest2));
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), correction), epsilon);
        const float change = __fmul_rn(__fdiv_rn(m, root), step_size);
        p = __fsub_rn(__fmul_rn(p, decay), change);
    }
};

#if CAST
#define WEIGHT(i) __nv_bfloat16 *w##i,
#define CHOSEN(i) {p##i, m##i, v##i, g##i, po##i, mo##i, vo##i, w##i}
#else
#define WEIGHT(i)
#define CHOSEN(i) {p##i, m##i, v##i, g##i, po##i, mo##i, vo##i, nullptr}
#endif
#define OPERANDS(i) \
    const float *p##i, const float *m##i, const float *v##i, const float *g##i, float *po##i, float *mo##i, float *vo##i, \
        WEIGHT(i)
#define CASE(i) case i: t = CHOSEN(i); break;
#define PARAMETERS LIST(OPERANDS)
#define CASES LIST(CASE)

extern "C" __global__ void __launch_bounds__(THREADS)
update(PARAMETERS const __grid_constant__ UpdateScalars s) {
    const Place at = place(s);
    Tensors t;
    switch (at.tensor) {
        CASES
    }
    const Update u = {(float)s.scale,
                      (float)s.beta1,
                      (float)(1.0 - s.beta1),
                      (float)s.beta2,
                      (float)(1.0 - s.beta2),
                      (float)s.decay[at.tensor],
                      (float)s.step_size[at.tensor],
                      (float)s.second_correction[at.tensor],
                      (float)s.epsilon};
    const long long left = s.n[at.tensor] - at.first;
    if (left >= TASK) {
#pragma unroll 2
        for (int i = 0; i < TASK / 4 / THREADS; i++) {
            const long long piece = at.first / 4 + i * THREADS + threadIdx.x;
            float4 p = reinterpret_cast<const float4*>(t.p)[piece];
            float4 m = reinterpret_cast<const float4*>(t.m)[piece];
            float4 v = reinterpret_cast<const float4*>(t.v)[piece];
            const float4 g = reinterpret_cast<const float4*>(t.g)[piece];
            u.apply(p.x, m.x, v.x, g.x);
            u.apply(p.y, m.y, v.y, g.y);
            u.apply(p.z, m.z, v.z, g.z);
            u.apply(p.w, m.w, v.w, g.w);
            reinterpret_cast<float4*>(t.p_out)[piece] = p;
            reinterpret_cast<float4*>(t.m_out)[piece] = m;
            reinterpret_cast<float4*>(t.v_out)[piece] = v;
#if CAST
            const __nv_bfloat162 low = __floats2bfloat162_rn(p.x, p.y), high = __floats2bfloat162_rn(p.z, p.w);
            reinterpret_cast<uint2*>(t.w_out)[piece] =
                make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
#endif
        }
        return;
    }
    for (long long i = at.first + threadIdx.x; i < at.first + left; i += THREADS) {
        float p = t.p[i], m = t.m[i], v = t.v[i];
        u.apply(p, m, v, t.g[i]);
        t.p_out[i] = p;
        t.m_out[i] = m;
        t.v_out[i] = v;
#if CAST
        t.w_out[i] = __float2bfloat16_rn(p);
#endif
    }
}

// Sum over the block, in a fixed order.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    return parts[0];
}

struct SquareScalars {
    long long first;
    long long starts[COUNT];
    long long n[COUNT];
};

#define OPERAND_X(i) const float *x##i,
#define CASE_X(i) case i: task = x##i; break;
#define PARAMETERS_X LIST(OPERAND_X)
#define CASES_X LIST(CASE_X)

extern "C" __global__ void __launch_bounds__(THREADS)
squares(PARAMETERS_X double* partial, const __grid_constant__ SquareScalars s) {
    const Place at = place(s);
    const float* task;
    switch (at.tensor) {
        CASES_X
    }
    task += at.first;
    const long long left = s.n[at.tensor] - at.first;
    double sum = 0.0;
    if (left >= TASK) {
#pragma unroll 8
        for (int i = threadIdx.x; i < TASK / 4; i += THREADS) {
            const float4 four = reinterpret_cast<const float4*>(task)[i];
            sum = fma((double)four.x, (double)four.x, sum);
            sum = fma((double)four.y, (double)four.y, sum);
            sum = fma((double)four.z, (double)four.z, sum);
            sum = fma((double)four.w, (double)four.w, sum);
        }
    } else {
        for (int i = threadIdx.x; i < left; i += THREADS) sum = fma((double)task[i], (double)task[i], sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[s.first + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sums(const double* partial, const int* starts, float* y) {
    const int end = starts[blockIdx.x + 1];
    double total = 0.0;
    for (int i = starts[blockIdx.x] + threadIdx.x; i < end; i += THREADS) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) y[blockIdx.x] = (float)total;
}
