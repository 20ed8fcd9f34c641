// Matrix products of a decode step: few rows of X times a whole weight matrix, so the time is that of reading W once.
//
//   Y[m, n] = sum_k norm(X)[m, k] W[n, k]  (+ bias[n])  (+ add[m, n])      bf16 in, f32 sums, bf16 or f32 out
//   norm(X)[m, k] = X[m, k] g[k] / sqrt(mean_k X[m, k]^2 + eps) with NORM, else X
//
// With SWIGLU the rows of W are the gate's followed by the up projection's, and Y[M, N/2] = silu(gate) * up.
//
// A warp computes the products of 16 rows of W with all rows of X. Its weights go from device memory straight into the
// registers from which the tensor cores read them (mma m16n8k16, W as the 16 rows): a lane's 16-byte load is its part
// of two instructions, because the order of the summed terms is free as long as W and X agree on it. AHEAD loads per
// lane stay in flight, also across tiles. With one tile per block each warp needs only its own terms of X and loads
// them the same way; otherwise X is staged in shared memory. With NORM, X g is multiplied, and the sum is scaled. With
// SWIGLU a tile is 8 rows of the gate and the same 8 of up, which end up in the same lane.
//
// # Launch
// Kernel `gemm_skinny(x, w, [w2], [w3], y, [gain], [bias], [add], dims)`, ROW_TILES * K_WARPS * 32 threads. Grid
// x: CS blocks for a group of ROW_TILES * 16 rows of W, so CS * ceil(N / (16 * ROW_TILES)); with ONCE 0 also fewer, each
// taking every (grid / CS)-th group. Grid y: ceil(M / TOKENS); each reads W again. K_DIM is a multiple of 8, N of 8 (with
// SWIGLU of 16); x, w and gain are 16-byte aligned. `add` has the type of `y` and may be `y`. Shared memory is static
// (compilers of CUDA 13 allow 232,448 bytes), or with DYNAMIC SHARED_BYTES of dynamic: 2 * TOKENS * PITCH, if ROW_TILES >
// 1, and 64 * TOKENS * ROW_TILES * (K_WARPS - 1), and with CS > 1 512 * CS * ceil(ROW_TILES * TOKENS / 8 / CS).
// With PARTS the rows of W are those of up to three matrices, which are not copied; dims.second and dims.third,
// multiples of 16 unless they divide gate from up, count the rows before them (third is N if there are two).
//
// # The sum
// K_DIM is split over CS blocks of a cluster, then over K_WARPS warps. Partial sums are collected in shared memory and
// added in the order of warps, then of ranks: the same bits on every run.
//
// # Bytes
// N * K * 2 of W from device memory, M * K * 2 of X for each block from the L2 cache, M * N * sizeof(Out) written.
#ifndef K_DIM
#define K_DIM 896
#endif
#ifndef TOKENS
#define TOKENS 16 // rows of X a block takes: a multiple of 8
#endif
#ifndef ROW_TILES
#define ROW_TILES 4 // tiles of 16 rows of W in a block
#endif
#ifndef K_WARPS
#define K_WARPS 4 // warps that share a tile's sum
#endif
#ifndef CS
#define CS 1 // blocks of a cluster that share a tile's sum
#endif
#ifndef AHEAD
#define AHEAD 4 // slices of 32 terms a warp keeps in flight
#endif
#ifndef ONCE
#define ONCE 1 // 1: a block takes one group only; 0: with fewer blocks than groups each takes several
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1 // caps the registers
#endif
#ifndef DYNAMIC
#define DYNAMIC 0 // 1: SHARED_BYTES of dynamic shared memory, else static
#endif
#ifndef PARTS
#define PARTS 1 // matrices, up to 3, whose concatenated rows are W
#endif
#ifndef WEIGHTS_EARLY
#define WEIGHTS_EARLY 0 // 1: fetch the first weights before the preceding kernel of the stream has ended
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef OUT_F32
#define OUT_F32 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef ADD
#define ADD 0
#endif
#ifndef SWIGLU
#define SWIGLU 0
#endif

#include <cuda_bf16.h>

typedef unsigned int u32;
typedef __nv_bfloat16 bf16;
#if OUT_F32
typedef float Out;
#else
typedef bf16 Out;
#endif

struct Dims {
  long long m, n; // rows of X and of W; n counts both halves with SWIGLU
#if PARTS > 1
  long long second, third; // rows of W before the second and before the third matrix
#endif
#if NORM
  double eps;
#endif
};

constexpr bool DIRECT = ROW_TILES == 1; // X goes into registers, not into shared memory
constexpr int WARPS = ROW_TILES * K_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int TT = TOKENS / 8;
constexpr int SLICES = (K_DIM + 31) / 32;                 // of 32 terms
constexpr int BLOCK_SLICES = (SLICES + CS - 1) / CS;      // of one block
constexpr int WARP_SLICES = (BLOCK_SLICES + K_WARPS - 1) / K_WARPS;
constexpr int ROUNDS = (WARP_SLICES + AHEAD - 1) / AHEAD; // of AHEAD slices
constexpr int PITCH = (BLOCK_SLICES | 1) * 32;            // odd multiples of 64 bytes: no bank conflicts
constexpr int ROW_PARTS = (BLOCK_SLICES + 7) / 8;         // 16-byte parts of a row of X that a lane stages
constexpr int TILE_COLUMNS = SWIGLU ? 8 : 16;             // columns of Y a tile yields
constexpr int UNITS = ROW_TILES * TT;                     // results of one instruction's shape: 16 rows of W, 8 of X
constexpr int STAGED = DIRECT ? 8 : TOKENS * PITCH;

static_assert(K_DIM % 8 == 0 && TOKENS % 8 == 0, "loads of 16 bytes, instructions of 8 rows of X");
static_assert(!SWIGLU || !BIAS, "gate and up have no bias");
constexpr int PARTIAL = (K_WARPS - 1) * UNITS * 32; // sums of all but the first warp of each tile, four per element
constexpr int OWN_UNITS = (UNITS + CS - 1) / CS;    // finished by one block of a cluster
constexpr int SHARED_BYTES = STAGED * 2 + (PARTIAL + (CS > 1 ? CS * OWN_UNITS * 32 : 0)) * 16;
// Sums of squares of rows of X, by warp if X is not staged.
constexpr int SQUARES = NORM ? TOKENS * (DIRECT ? K_WARPS : 1) : 1;
__device__ __forceinline__ uint4 load_once(const bf16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load(const bf16* p) { // in program order with the loads above
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// d[16, 8] += a[16, 16] b[8, 16]^T
__device__ __forceinline__ void mma(float4& d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 block_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return CS > 1 ? r : 0;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ u32 address_in(const void* p, u32 rank) { // of the same variable of another block
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
  return address;
}
__device__ __forceinline__ void send(u32 to, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void send(u32 to, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, bf16* to) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
__device__ __forceinline__ void operator+=(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// x *= g of two numbers each, rounded; returns the squares of x before.
__device__ __forceinline__ float gain_pair(u32& x, u32 g) {
  const float low = low_of(x), high = high_of(x);
  const __nv_bfloat162 scaled = __floats2bfloat162_rn(low * low_of(g), high * high_of(g));
  x = *(const u32*)&scaled;
  return low * low + high * high;
}
__device__ __forceinline__ float apply_gain(uint4& x, const uint4& g) {
  return gain_pair(x.x, g.x) + gain_pair(x.y, g.y) + gain_pair(x.z, g.z) + gain_pair(x.w, g.w);
}

// The matrices of W.
struct Matrices {
  const bf16* first;
#if PARTS > 1
  const bf16* second;
#endif
#if PARTS > 2
  const bf16* third;
#endif

  __device__ __forceinline__ const bf16* row(const Dims& dims, long long row) const {
#if PARTS > 2
    if (row >= dims.third) return third + (row - dims.third) * K_DIM;
#endif
#if PARTS > 1
    if (row >= dims.second) return second + (row - dims.second) * K_DIM;
#endif
    return first + row * K_DIM;
  }
};

// First addresses of a lane's loads of W: row `lane / 4` of its warp's tile and the row 8 below (with SWIGLU: that of
// up), at the warp's first slice. Rows that do not exist are replaced by existing ones; their products are not written.
struct Rows {
  const bf16* low;
  const bf16* high;
};
__device__ __forceinline__ Rows rows_of(const Matrices& w, int tile, int term, int lane, const Dims& dims) {
  const int rows = (int)(SWIGLU ? dims.n / 2 : dims.n);
  int row = tile * TILE_COLUMNS;
  row = row < rows ? row : 0;
  const long long from = (long long)(lane / 4) * K_DIM + term + lane % 4 * 8;
  const bf16* at = w.row(dims, row) + from;
  if (SWIGLU) return {at, w.row(dims, rows + row) + from};
  return {at, row + 8 < rows ? at + 8 * K_DIM : at};
}

extern "C" __global__ void
#if CS > 1
__cluster_dims__(CS, 1, 1)
#endif
__launch_bounds__(THREADS, BLOCKS_PER_SM)
gemm_skinny(const bf16* x, const bf16* __restrict__ w,
#if PARTS > 1
            const bf16* __restrict__ w2,
#endif
#if PARTS > 2
            const bf16* __restrict__ w3,
#endif
            Out* y,
#if NORM
            const bf16* __restrict__ gain,
#endif
#if BIAS
            const bf16* __restrict__ bias,
#endif
#if ADD
            const Out* add,
#endif
            const __grid_constant__ Dims dims) {
#if DYNAMIC
  extern __shared__ uint4 memory[];
#else
  __shared__ uint4 memory[SHARED_BYTES / 16];
#endif
  bf16* staged = (bf16*)memory;
  float4* partial = (float4*)memory + STAGED / 8;
  float4* sums = partial + PARTIAL; // of all blocks, for the units that this block finishes
  [[maybe_unused]] __shared__ float squares[SQUARES], all_squares[CS > 1 ? CS * SQUARES : 1];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tile = warp % ROW_TILES, part = warp / ROW_TILES;
  const u32 rank = block_rank();
  const int first = rank * BLOCK_SLICES * 32;               // first term of this block
  const int term = first + part * 32;                       // of this warp: its slices are part, part + K_WARPS, ...
  const int columns = (int)(SWIGLU ? dims.n / 2 : dims.n);
  const int groups = (columns + TILE_COLUMNS * ROW_TILES - 1) / (TILE_COLUMNS * ROW_TILES), stride = gridDim.x / CS;
  const int token0 = blockIdx.y * TOKENS, tokens = min((int)dims.m - token0, TOKENS);
  x += (long long)token0 * K_DIM;

  auto has = [&](int slice) { // whether this lane has terms in the warp's slice
    const bool slice_ok = (slice + 1) * K_WARPS <= BLOCK_SLICES || part + K_WARPS * slice < BLOCK_SLICES;
    return slice_ok && (CS * BLOCK_SLICES * 32 <= K_DIM || term + K_WARPS * slice * 32 + lane % 4 * 8 < K_DIM);
  };
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 low[AHEAD], high[AHEAD];
  auto fetch = [&](const Rows& rows, int a, int slice) {
    const int at = K_WARPS * slice * 32;
    low[a] = has(slice) ? load_once(rows.low + at) : zero;
    high[a] = has(slice) ? load_once(rows.high + at) : zero;
  };
  uint4 direct[AHEAD][TT], gains[AHEAD]; // terms of X, and their gain, if they go into registers
  auto fetch_x = [&](int a, int slice) {
    const int at = term + K_WARPS * slice * 32 + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < TT; ++i) {
      const int row = i * 8 + lane / 4;
      direct[a][i] = has(slice) && row < tokens ? load(x + row * K_DIM + at) : zero;
    }
#if NORM
    gains[a] = has(slice) ? load_once(gain + at) : zero;
#endif
  };
  auto load_row = [&](uint4 (&parts)[ROW_PARTS], int row) {
#pragma unroll
    for (int i = 0; i < ROW_PARTS; ++i) {
      const int k = first + (i * 32 + lane) * 8;
      parts[i] = row < tokens && i * 32 + lane < BLOCK_SLICES * 4 && k < K_DIM ? load(x + row * K_DIM + k) : zero;
    }
  };
  auto stage_row = [&](uint4 (&parts)[ROW_PARTS], int row) {
    float sum = 0.0f; // of squares
#pragma unroll
    for (int i = 0; i < ROW_PARTS; ++i) {
      const int at = (i * 32 + lane) * 8;
      if (at >= BLOCK_SLICES * 32) continue;
#if NORM
      if (first + at < K_DIM) sum += apply_gain(parts[i], load_once(gain + first + at));
#endif
      *(uint4*)(staged + row * PITCH + at) = parts[i];
    }
    if constexpr (NORM) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, lanes);
      if (lane == 0) squares[row] = sum;
    }
  };

  asm volatile("griddepcontrol.launch_dependents;");
  if (CS > 1) cluster_arrive();
  const Matrices matrices = {w
#if PARTS > 1
                             , w2
#endif
#if PARTS > 2
                             , w3
#endif
  };
  int group = blockIdx.x / CS;
  Rows rows = rows_of(matrices, group * ROW_TILES + tile, term, lane, dims);
  uint4 parts[ROW_PARTS];
  auto fetch_first = [&]() {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) fetch(rows, a, a);
  };
  if (WEIGHTS_EARLY) fetch_first();
  asm volatile("griddepcontrol.wait;" ::: "memory"); // X, `add` and the last reader of Y belong to preceding kernels
  if (DIRECT) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) fetch_x(a, a);
  } else if (warp < TOKENS) {
    load_row(parts, warp);
  }
  if (!WEIGHTS_EARLY) fetch_first();
  if (!DIRECT) {
    if (warp < TOKENS) stage_row(parts, warp);
    if constexpr (WARPS < TOKENS) {
#pragma unroll 1
      for (int row = warp + WARPS; row < TOKENS; row += WARPS) {
        load_row(parts, row);
        stage_row(parts, row);
      }
    }
    __syncthreads();
  }

  // Writes one unit's sums: v.x and v.y belong to column `lane / 4` of the tile and tokens 2 (lane % 4) and the next,
  // v.z and v.w to the column 8 further (with SWIGLU: to up).
  auto finish = [&](int unit, float4 v) {
    const int token = unit % TT * 8 + lane % 4 * 2;
    const int column = (group * ROW_TILES + unit / TT) * TILE_COLUMNS + lane / 4;
#if NORM
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int p = 0; p < CS * SQUARES; p += TOKENS) sum += (CS > 1 ? all_squares : squares)[p + token + i];
      scale[i] = rsqrtf(sum / K_DIM + (float)dims.eps);
    }
    v.x *= scale[0], v.z *= scale[0], v.y *= scale[1], v.w *= scale[1];
#endif
    const float out[2][2] = {{SWIGLU ? silu(v.x) * v.z : v.x, SWIGLU ? silu(v.y) * v.w : v.y}, {v.z, v.w}};
#pragma unroll
    for (int high = 0; high < (SWIGLU ? 1 : 2); ++high) {
      const int c = column + high * 8;
      if (c >= columns) continue;
#if BIAS
      const float shift = widen(bias[c]);
#else
      const float shift = 0.0f;
#endif
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (token + i >= tokens) continue;
        const long long at = (long long)(token0 + token + i) * columns + c;
        float value = out[high][i] + shift;
#if ADD
        value += widen(add[at]);
#endif
        narrow(value, y + at);
      }
    }
  };

#pragma unroll 1
  for (; group < groups; group += stride) {
    float4 acc[TT];
    float square[TT];
#pragma unroll
    for (int i = 0; i < TT; ++i) acc[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), square[i] = 0.0f;
    const bool more = !ONCE && group + stride < groups;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const int slice = round * AHEAD + a, s = part + K_WARPS * slice;
        if (slice < WARP_SLICES && s < BLOCK_SLICES) {
#pragma unroll
          for (int i = 0; i < TT; ++i) {
            uint4 b;
            if (DIRECT) {
              b = direct[a][i];
              if (NORM) square[i] += apply_gain(b, gains[a]);
            } else {
              b = *(const uint4*)(staged + (i * 8 + lane / 4) * PITCH + s * 32 + lane % 4 * 8);
            }
            mma(acc[i], low[a].x, high[a].x, low[a].y, high[a].y, b.x, b.y);
            mma(acc[i], low[a].z, high[a].z, low[a].w, high[a].w, b.z, b.w);
          }
        }
        if (round + 1 < ROUNDS) {
          fetch(rows, a, slice + AHEAD);
          if (DIRECT) fetch_x(a, slice + AHEAD);
        } else if (more) {
          if (a == 0) rows = rows_of(matrices, (group + stride) * ROW_TILES + tile, term, lane, dims);
          fetch(rows, a, a);
          if (DIRECT) fetch_x(a, a);
        }
      }
    }

    if (part > 0) {
#pragma unroll
      for (int i = 0; i < TT; ++i) partial[((part - 1) * UNITS + tile * TT + i) * 32 + lane] = acc[i];
    }
    if constexpr (NORM && DIRECT) {
#pragma unroll
      for (int i = 0; i < TT; ++i) {
        square[i] += __shfl_xor_sync(0xFFFFFFFF, square[i], 1);
        square[i] += __shfl_xor_sync(0xFFFFFFFF, square[i], 2);
        if (lane % 4 == 0) squares[part * TOKENS + i * 8 + lane / 4] = square[i];
      }
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < TT; ++i) {
#pragma unroll
        for (int p = 0; p < K_WARPS - 1; ++p) acc[i] += partial[(p * UNITS + tile * TT + i) * 32 + lane];
        if (CS == 1) finish(tile * TT + i, acc[i]);
      }
    }
    if (CS > 1) {
      // One block of the cluster finishes each unit; the others send it their sums.
      cluster_wait(); // all have started, or have read the previous sums
      if (part == 0) {
#pragma unroll
        for (int i = 0; i < TT; ++i) {
          const int unit = tile * TT + i;
          send(address_in(sums + (rank * OWN_UNITS + unit / CS) * 32 + lane, unit % CS), acc[i]);
        }
      }
#if NORM
      for (int i = thread; i < SQUARES; i += THREADS)
        for (int r = 0; r < CS; ++r) send(address_in(all_squares + rank * SQUARES + i, r), squares[i]);
#endif
      cluster_arrive();
      cluster_wait();
      for (int unit = rank + CS * warp; unit < UNITS; unit += CS * WARPS) {
        float4 sum = sums[unit / CS * 32 + lane];
#pragma unroll
        for (int r = 1; r < CS; ++r) sum += sums[(r * OWN_UNITS + unit / CS) * 32 + lane];
        finish(unit, sum);
      }
      if (more) cluster_arrive();
    } else if (more) {
      __syncthreads();
    }
    if (ONCE) break;
  }
}
