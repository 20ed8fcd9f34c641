// Sums of the columns of a matrix, for gradients of biases.
//
//   y_c = sum_r x_rc
//
// Two kernels, so that the order of additions is fixed: column_parts adds up every `grid y`-th stripe of rows, and
// column_sums adds up the stripes.
//
// Shapes: x [rows, WIDTH]; parts [stripes, WIDTH] f32; y [WIDTH] f32.
// Launch: column_parts block 256, grid (ceil(WIDTH / (32 W)), stripes); column_sums block 256, grid ceil(WIDTH / 256).
// W = VEC where WIDTH is a multiple of it, else 1. Bytes: each element once.
// Limits: x aligned to 16 bytes where W is VEC.

#ifndef WIDTH
#define WIDTH 1152
#endif

constexpr int THREADS = 256;
constexpr int W = WIDTH % VEC == 0 ? VEC : 1;
// Rows that a block reads in parallel.
constexpr int ROWS = THREADS / 32;

struct ColumnScalars {
    u64 rows;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    column_parts(const elem* x, float* parts, const __grid_constant__ ColumnScalars s) {
    __shared__ float sums[ROWS][32 * W + 1];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    const u64 column = (u64(blockIdx.x) * 32 + lane) * W;
    float sum[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = 0.0f;
    if (column < WIDTH) {
#pragma unroll 4
        for (u64 row = u64(blockIdx.y) * ROWS + line; row < s.rows; row += u64(gridDim.y) * ROWS) {
            float value[W];
            load<W>(x + row * WIDTH + column, value);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += value[i];
        }
    }
#pragma unroll
    for (int i = 0; i < W; i++) sums[line][lane * W + i] = sum[i];
    __syncthreads();
    for (int at = threadIdx.x; at < 32 * W; at += THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < ROWS; other++) total += sums[other][at];
        const u64 to = u64(blockIdx.x) * 32 * W + at;
        if (to < WIDTH) parts[u64(blockIdx.y) * WIDTH + to] = total;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sums(const float* parts, float* y, const __grid_constant__ ColumnScalars s) {
    const u64 column = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (column >= WIDTH) return;
    float sum = 0.0f;
#pragma unroll 8
    for (u64 row = 0; row < s.rows; row++) sum += parts[row * WIDTH + column];
    y[column] = sum;
}
