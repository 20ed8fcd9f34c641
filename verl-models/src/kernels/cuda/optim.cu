// AdamW with f32 master state over one flat buffer of all parameters, and the global norm that clips the gradient.
//
//   g ← factor · g;  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;
//   p ← decay · p − m / (√v / second_correction + ε) · step_size
//
// with factor = min(1, max_norm / (‖g‖ + 10⁻⁶)). Every operation is rounded by itself, in the order above, as on the CPU,
// so that equal inputs give equal bits there and here.
//
// Layout: each parameter begins at a multiple of TILE elements of the flat buffers, so that a tile holds elements of one
// parameter; what pads its last tile is 0 in all buffers and stays 0. `owner`: [tiles] i32 tells the parameter of a tile,
// less `first`; `starts`: [parameters + 1] i32 its first tile. One launch for all parameters beats one for each: most of
// a decoder's tensors are small, and a launch costs as much as some megabytes of traffic. For tensors in buffers of their
// own, launch sum_of_squares, parameter_sums and adamw for each, with `first` its position among the parameters, owner
// all 0, starts = [0, tiles] and its `length`, which need not fill the last tile.
//
// Shapes: master, first, second, gradient: [length] f32; weight: the same, bf16; partial: [tiles] f64;
// sums: [parameters] f32; report: [4] f32: norm, factor, position of the first parameter whose gradient is not finite or
// −1, and that parameter's sum of squares; steps: [parameters, 4] f32: decay, step_size, second_correction, and 0 where the
// parameter took part in no loss and stays as it is.
// Launch, in this order: sum_of_squares (block 256, grid tiles), parameter_sums (block 256, grid parameters),
// clip_factor (block 256, grid 1), adamw or adamw_cast (block 256, grid tiles).
// Where report[2] is not −1, adamw changes nothing. Bytes an element: 4 for the norm, 28 for adamw, 30 for adamw_cast.
// With tiles = ceil(length / TILE). Limits: buffers aligned to 16 bytes; fewer than 2³¹ tiles; ELEMENT is not read.

#ifndef TILE
#define TILE 4096
#endif

constexpr int THREADS = 256;
constexpr int PIECES = TILE / 4;
static_assert(PIECES % THREADS == 0, "TILE is no multiple of 1024");
constexpr int STEPS = PIECES / THREADS;

// Σ x² of each tile in f64, which squares of f32 cannot overflow; the order is fixed.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double parts[THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) x += parts[i];
    return x;
}

struct SumScalars {
    u64 length;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_of_squares(const float* gradient, double* partial, const __grid_constant__ SumScalars s) {
    const float* tile = gradient + u64(blockIdx.x) * TILE;
    double sum = 0.0;
    if (u64(blockIdx.x + 1) * TILE <= s.length) {
        float4 x[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            x[step] = reinterpret_cast<const float4*>(tile)[step * THREADS + threadIdx.x];
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            sum = fma(double(x[step].x), double(x[step].x), sum);
            sum = fma(double(x[step].y), double(x[step].y), sum);
            sum = fma(double(x[step].z), double(x[step].z), sum);
            sum = fma(double(x[step].w), double(x[step].w), sum);
        }
    } else {
        const int left = int(s.length - u64(blockIdx.x) * TILE);
        for (int i = threadIdx.x; i < left; i += THREADS) sum = fma(double(tile[i]), double(tile[i]), sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

struct PlaceScalars {
    u64 first;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    parameter_sums(const double* partial, const int* starts, float* sums, const __grid_constant__ PlaceScalars s) {
    const int end = starts[blockIdx.x + 1];
    double sum = 0.0;
#pragma unroll 8
    for (int tile = starts[blockIdx.x] + threadIdx.x; tile < end; tile += THREADS) sum += partial[tile];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[s.first + blockIdx.x] = float(sum);
}

struct ClipScalars {
    u64 parameters;
    // Infinite where the norm has no limit.
    double max_norm;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    clip_factor(const float* sums, float* report, const __grid_constant__ ClipScalars s) {
    const int parameters = int(s.parameters);
    double sum = 0.0;
    int bad = parameters;
    for (int at = threadIdx.x; at < parameters; at += THREADS) {
        sum += double(sums[at]);
        if (!isfinite(sums[at])) bad = min(bad, at);
    }
    __shared__ int first[THREADS];
    first[threadIdx.x] = bad;
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    for (int i = 1; i < THREADS; i++) bad = min(bad, first[i]);
    const double norm = sqrt(sum);
    const double factor = s.max_norm / (norm + 1e-6);
    report[0] = float(norm);
    report[1] = factor < 1.0 ? float(factor) : 1.0f;
    report[2] = bad < parameters ? float(bad) : -1.0f;
    report[3] = bad < parameters ? sums[bad] : 0.0f;
}

struct AdamWScalars {
    u64 length;
    u64 first;
    double beta1;
    double beta2;
    double epsilon;
};

// The scalars of an element, in f32.
struct Update {
    float factor;
    float beta1, rest1;
    float beta2, rest2;
    float decay, step_size, second_correction, epsilon;

    __device__ __forceinline__ void apply(float& p, float& m, float& v, float g) const {
        g = __fmul_rn(g, factor);
        m = __fadd_rn(__fmul_rn(m, beta1), __fmul_rn(g, rest1));
        v = __fadd_rn(__fmul_rn(v, beta2), __fmul_rn(__fmul_rn(g, g), rest2));
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), second_correction), epsilon);
        p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(__fdiv_rn(m, root), step_size));
    }
};

template <bool CASTS>
__device__ __forceinline__ void update(float* master, float* first, float* second, const float* gradient,
                                       __nv_bfloat16* weight, const int* owner, const float* steps,
                                       const float* report, const AdamWScalars& s) {
    const float4 step = reinterpret_cast<const float4*>(steps)[s.first + owner[blockIdx.x]];
    if (report[2] >= 0.0f || step.w == 0.0f) return;
    const Update u = {report[1],
                      float(s.beta1),
                      float(1.0 - s.beta1),
                      float(s.beta2),
                      float(1.0 - s.beta2),
                      step.x,
                      step.y,
                      step.z,
                      float(s.epsilon)};
    if (u64(blockIdx.x + 1) * TILE > s.length) {
        for (u64 at = u64(blockIdx.x) * TILE + threadIdx.x; at < s.length; at += THREADS) {
            float p = master[at], m = first[at], v = second[at];
            u.apply(p, m, v, gradient[at]);
            master[at] = p;
            first[at] = m;
            second[at] = v;
            if constexpr (CASTS) weight[at] = __float2bfloat16_rn(p);
        }
        return;
    }
    const u64 start = u64(blockIdx.x) * PIECES + threadIdx.x;
#pragma unroll 2
    for (int i = 0; i < STEPS; i++) {
        const u64 at = start + i * THREADS;
        float4 p = reinterpret_cast<const float4*>(master)[at];
        float4 m = reinterpret_cast<const float4*>(first)[at];
        float4 v = reinterpret_cast<const float4*>(second)[at];
        const float4 g = reinterpret_cast<const float4*>(gradient)[at];
        u.apply(p.x, m.x, v.x, g.x);
        u.apply(p.y, m.y, v.y, g.y);
        u.apply(p.z, m.z, v.z, g.z);
        u.apply(p.w, m.w, v.w, g.w);
        reinterpret_cast<float4*>(master)[at] = p;
        reinterpret_cast<float4*>(first)[at] = m;
        reinterpret_cast<float4*>(second)[at] = v;
        if constexpr (CASTS) {
            reinterpret_cast<uint2*>(weight)[at] = make_uint2(two_halves(p.x, p.y), two_halves(p.z, p.w));
        }
    }
}

// The master is the weight.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw(float* master, float* first, float* second, const float* gradient, const int* owner, const float* steps,
          const float* report, const __grid_constant__ AdamWScalars s) {
    update<false>(master, first, second, gradient, nullptr, owner, steps, report, s);
}

// The weight is a bf16 copy of the master.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_cast(float* master, float* first, float* second, const float* gradient, __nv_bfloat16* weight,
               const int* owner, const float* steps, const float* report, const __grid_constant__ AdamWScalars s) {
    update<true>(master, first, second, gradient, weight, owner, steps, report, s);
}
