// Matrix product in f32 without tensor cores, which would round the operands: C[m, n] (+)= sum_k A[m, k] B[n, k]; with
// ADD 1 it is added to the contents of C.
//
// A[m, k] is at a[m * a_row + k * a_term], B[n, k] at b[n * b_row + k * b_term], C is dense.
// A block computes 64 x 64 of C, a thread 4 x 4; 16 terms at a time go through shared memory. The terms are added in
// ascending order, so the bits of a number do not depend on the sizes.
// Buffers: a, b, c f32. Scalars: m, n, k, a_row, a_term, b_row, b_term. Grid (ceil(n/64), ceil(m/64)), block 256.

struct Scalars {
    long long m, n, k;
    long long a_row, a_term;
    long long b_row, b_term;
};

#ifndef ADD
#define ADD 0
#endif
#define TILE 64
#define TERMS 16

// TERMS x TILE numbers of an operand, zeros outside; adjacent threads read adjacent numbers.
__device__ __forceinline__ void fetch(float (*tile)[TILE + 4], const float* from, long long rows, long long terms,
                                      long long first_row, long long first_term, long long row, long long term) {
    for (int i = threadIdx.x; i < TILE * TERMS; i += 256) {
        const int r = term == 1 ? i / TERMS : i % TILE;
        const int t = term == 1 ? i % TERMS : i / TILE;
        const long long at_row = first_row + r, at_term = first_term + t;
        tile[t][r] = at_row < rows && at_term < terms ? from[at_row * row + at_term * term] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256)
product_f32(const float* a, const float* b, float* c, const __grid_constant__ Scalars s) {
    __shared__ __align__(16) float left[TERMS][TILE + 4], right[TERMS][TILE + 4];
    const long long first_m = (long long)blockIdx.y * TILE, first_n = (long long)blockIdx.x * TILE;
    const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
    float sum[4][4] = {};
    for (long long k = 0; k < s.k; k += TERMS) {
        fetch(left, a, s.m, s.k, first_m, k, s.a_row, s.a_term);
        fetch(right, b, s.n, s.k, first_n, k, s.b_row, s.b_term);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TERMS; t++) {
            const float4 x = *reinterpret_cast<const float4*>(&left[t][m]);
            const float4 y = *reinterpret_cast<const float4*>(&right[t][n]);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] = fmaf(xs[i], ys[j], sum[i][j]);
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            const long long row = first_m + m + i, column = first_n + n + j;
            if (row >= s.m || column >= s.n) continue;
            float* to = c + row * s.n + column;
            *to = ADD ? *to + sum[i][j] : sum[i][j];
        }
    }
}
