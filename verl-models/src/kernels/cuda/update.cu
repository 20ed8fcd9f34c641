// AdamW on one tensor with f32 state, and sums of squares in a fixed order.
//
//   g <- scale g;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
//   p <- decay p - m / (sqrt(v) / second_correction + eps) step_size
//
// Every operation is rounded by itself, in this order, as on the CPU: equal inputs give equal bits.
//
// update: p, m, v, g, and where they go (each may be where it comes from), [n] f32. Grid any, block 256.
// squares: x [n] f32 -> partial [first ..] f64, one a block; grid ceil(n / 16384), block 256.
// sums: partial f64, starts [tensors + 1] i32 -> y [tensors] f32, the sum of each tensor's blocks; grid tensors, block 256.
// Bytes an element: 28 for update, 4 for squares.

#define THREADS 256
#define TASK 16384

struct UpdateScalars {
    long long n;
    double scale, beta1, beta2, decay, step_size, second_correction, epsilon;
};

extern "C" __global__ void __launch_bounds__(THREADS)
update(const float* p, const float* m, const float* v, const float* g, float* p_out, float* m_out, float* v_out,
       const __grid_constant__ UpdateScalars s) {
    const float scale = (float)s.scale, beta1 = (float)s.beta1, beta2 = (float)s.beta2;
    const float rest1 = (float)(1.0 - s.beta1), rest2 = (float)(1.0 - s.beta2);
    const float decay = (float)s.decay, step_size = (float)s.step_size;
    const float correction = (float)s.second_correction, epsilon = (float)s.epsilon;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < s.n; i += gridDim.x * (long long)THREADS) {
        const float x = __fmul_rn(g[i], scale);
        const float first = __fadd_rn(__fmul_rn(m[i], beta1), __fmul_rn(x, rest1));
        const float second = __fadd_rn(__fmul_rn(v[i], beta2), __fmul_rn(__fmul_rn(x, x), rest2));
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), correction), epsilon);
        const float change = __fmul_rn(__fdiv_rn(first, root), step_size);
        p_out[i] = __fsub_rn(__fmul_rn(p[i], decay), change);
        m_out[i] = first;
        v_out[i] = second;
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
    long long n;
    long long first;
};

extern "C" __global__ void __launch_bounds__(THREADS)
squares(const float* x, double* partial, const __grid_constant__ SquareScalars s) {
    const long long first = blockIdx.x * (long long)TASK;
    const long long end = first + TASK < s.n ? first + TASK : s.n;
    double sum = 0.0;
    for (long long i = first + threadIdx.x; i < end; i += THREADS) sum = fma((double)x[i], (double)x[i], sum);
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
