// Parts shared by the matrix products of gemm.cu and gemm_dyn.cu; compiled before either. gemm.cu describes what they
// compute.
#ifndef BM
#define BM 128 // rows of a block's tile: 64 or 128
#endif
#ifndef BN
#define BN 128 // columns of a block's tile: a multiple of 16
#endif
#ifndef BK
#define BK 32 // terms of a stage: 32 or 64
#endif
#ifndef CM
#define CM 2 // blocks of a cluster that share a tile of B
#endif
#ifndef CN
#define CN 1 // blocks of a cluster that share a tile of A
#endif
#ifndef CS
#define CS 1 // blocks of a cluster that share the sum
#endif
#ifndef A_MN
#define A_MN 0 // 1: the summed dimension of A comes first in memory
#endif
#ifndef B_MN
#define B_MN 0 // 1: that of B
#endif
#ifndef OUT_F32
#define OUT_F32 0 // C, and `add`, in f32
#endif
#ifndef BIAS
#define BIAS 0 // 1: adds bias[n]
#endif
#ifndef ADD
#define ADD 0 // 1: adds add[m, n]
#endif
#ifndef SWIGLU
#define SWIGLU 0 // 1: B is gate and up, C is silu(gate) * up
#endif
#ifndef PARTS
#define PARTS 1 // matrices, up to 3, whose concatenated rows are B
#endif
#ifndef GROUP
#define GROUP 8 // rows of clusters walked together
#endif

#include <cuda_bf16.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;
#if OUT_F32
typedef float Out;
#else
typedef bf16 Out;
#endif

struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct Dims {
  long long m, n, k; // of the whole product; n counts both halves with SWIGLU
  long long k_split; // terms of one piece of the sum, a multiple of BK unless it is k
#if PARTS > 1
  long long second, third; // rows of B before the second and before the third matrix
#endif
};

constexpr int B_COLUMNS = B_MN ? (BN + 63) / 64 * 64 : BN; // columns of B in shared memory
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = B_COLUMNS * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int COLUMNS = SWIGLU ? BN / 2 : BN; // columns of C in a tile
constexpr int BLOCKS8 = COLUMNS / 8 / CS;     // groups of eight columns that one block writes
constexpr int SENDERS = CM + CN - 1;          // blocks that write into this block's tiles

// Boxes of one block's share of a tile.
constexpr int A_ROWS = BM / CN;
constexpr int B_PARTS = CM > 1 + SWIGLU ? CM : 1 + SWIGLU;
constexpr int B_ROWS = BN / B_PARTS;
constexpr int A_CUT = CN * 64 > BM ? CN * 64 / BM : 1;
constexpr int B_CUT = B_COLUMNS / 64 % CM ? CM : 1;
constexpr int A_BOXES = A_MN ? BM / 64 * A_CUT / CN : 1;
constexpr int B_BOXES = B_MN ? B_COLUMNS / 64 * B_CUT / CM : B_PARTS / CM;

static_assert(BM == 64 || BM == 128, "a block computes 64 or 128 rows");
static_assert(BK == 32 || BK == 64, "a row of a stage is 64 or 128 bytes");
static_assert(BN % 16 == 0 && BN <= 256, "columns of a tile");
static_assert(A_ROWS % 8 == 0 && B_ROWS % 8 == 0 && BK / A_CUT % 8 == 0 && BK / B_CUT % 8 == 0,
              "a share of a tile is whole swizzle atoms");
static_assert(PARTS == 1 || (SWIGLU ? PARTS == 2 : !B_MN), "matrices are joined by their rows");
static_assert(!SWIGLU || (!B_MN && !BIAS && BN % 32 == 0), "gate and up are rows of B");
static_assert(COLUMNS % (8 * CS) == 0, "the blocks of a split sum share the columns evenly");
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "tiles start at a swizzle atom");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Moves four numbers to and from a block's shared memory.
__device__ __forceinline__ void send(u32 to, const float* v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ float4 received(u32 from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_in(u32 bar, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(bar, rank)) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
      ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int inner, int outer, u32 bar, u32 mask) {
  if (mask == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(inner), "r"(outer), "r"(bar) : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(inner), "r"(outer), "r"(bar), "h"((unsigned short)mask) : "memory");
  }
}

// Descriptor of an operand in shared memory. Summed dimension last: rows of BK * 2 bytes, eight to a swizzle atom.
// Summed dimension first: chunks of 64 columns, each BK rows of 128 bytes.
template <bool MN>
__device__ __forceinline__ u64 descriptor(u32 address) {
  constexpr u64 lead = MN ? BK * 128 / 16 : 1;
  constexpr u64 stride = MN ? 1024 / 16 : 8 * BK * 2 / 16;
  constexpr u64 swizzle = MN || BK == 64 ? 1 : 2;
  return (u64)((address & 0x3FFFF) >> 4) | lead << 16 | stride << 32 | swizzle << 62;
}
constexpr u32 A_STEP = A_MN ? 2048 : 32; // bytes from 16 terms to the next 16
constexpr u32 B_STEP = B_MN ? 2048 : 32;
constexpr u32 A_HALF = A_MN ? BK * 128 : 64 * BK * 2; // bytes from 64 rows to the next 64

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(d, i) F4(d, i), F4(d, i + 4)
#define F16(d, i) F8(d, i), F8(d, i + 8)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F40(d, i) F32(d, i), F8(d, i + 32)
#define F24(d, i) F16(d, i), F8(d, i + 16)
#define F48(d, i) F32(d, i), F16(d, i + 32)
#define F64(d, i) F32(d, i), F32(d, i + 32)
#define F96(d, i) F64(d, i), F32(d, i + 64)
#define F112(d, i) F96(d, i), F16(d, i + 96)
#define F128(d, i) F64(d, i), F64(d, i + 64)
#define N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define N16 N8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define N24 N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define N32 N16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N40 N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define N48 N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define N64 \
  N32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define N96 \
  N64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define N112 \
  N96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define N128 \
  N112 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// d[64, N] += a[64, 16] b[N, 16]^T
#define DEFINE_MMA(N, LIST, OPS, DA, DB, TA, TB)                                                         \
  __device__ __forceinline__ void mma_n##N(float* d, u64 a, u64 b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, %" #DA ", %" #DB  \
                 ", 1, 1, 1, %" #TA ", %" #TB ";"                                                        \
                 : OPS : "l"(a), "l"(b), "n"(A_MN), "n"(B_MN));                                          \
  }
DEFINE_MMA(16, N8, F8(d, 0), 8, 9, 10, 11)
DEFINE_MMA(32, N16, F16(d, 0), 16, 17, 18, 19)
DEFINE_MMA(48, N24, F24(d, 0), 24, 25, 26, 27)
DEFINE_MMA(64, N32, F32(d, 0), 32, 33, 34, 35)
DEFINE_MMA(80, N40, F40(d, 0), 40, 41, 42, 43)
DEFINE_MMA(96, N48, F48(d, 0), 48, 49, 50, 51)
DEFINE_MMA(128, N64, F64(d, 0), 64, 65, 66, 67)
DEFINE_MMA(192, N96, F96(d, 0), 96, 97, 98, 99)
DEFINE_MMA(224, N112, F112(d, 0), 112, 113, 114, 115)
DEFINE_MMA(256, N128, F128(d, 0), 128, 129, 130, 131)

// Bytes from column 0 of a tile of B to column n.
__device__ __forceinline__ constexpr u32 b_columns(int n) { return B_MN ? n / 64 * BK * 128 : n * BK * 2; }

// d[64, N] += a[64, 16] b[N, 16]^T, in the widest instructions that add up to N columns.
template <int N>
__device__ __forceinline__ void mma_columns(float* d, u64 a, u64 b) {
  constexpr int C128 = N / 128 * 128, C64 = N / 64 * 64, C32 = N / 32 * 32;
  if constexpr (N == 256) {
    mma_n256(d, a, b);
  } else if constexpr (N == 224) {
    mma_n224(d, a, b);
  } else if constexpr (N == 192) {
    mma_n192(d, a, b);
  } else if constexpr (N == 96) {
    mma_n96(d, a, b);
  } else if constexpr (N == 80) {
    mma_n80(d, a, b);
  } else if constexpr (N == 48) {
    mma_n48(d, a, b);
  } else {
    if constexpr (N & 128) mma_n128(d, a, b);
    if constexpr (N & 64) mma_n64(d + C128 / 2, a, b + (b_columns(C128) >> 4));
    if constexpr (N & 32) mma_n32(d + C64 / 2, a, b + (b_columns(C64) >> 4));
    if constexpr (N & 16) mma_n16(d + C32 / 2, a, b + (b_columns(C32) >> 4));
  }
}
__device__ __forceinline__ void mma(float* d, u64 a, u64 b) { mma_columns<BN>(d, a, b); }

// A block's tile and the terms that it sums.
struct Place {
  int row, column; // first row and column of the tile in C; columns of C are rows of B
  int first, last; // stages of BK terms
  u32 cm, cn;      // position in the cluster
  u32 base;        // rank of block (0, 0) of the same part of the sum
};

// Clusters of blocks across the rows and the columns of C.
__device__ __forceinline__ int cluster_rows(const Dims& dims) { return (int)((dims.m + CM * BM - 1) / (CM * BM)); }
__device__ __forceinline__ int cluster_columns(const Dims& dims) { return (int)((dims.n + CN * BN - 1) / (CN * BN)); }

// The `cluster`-th tile of clusters, in bands of GROUP rows of clusters that are walked column by column, and the
// `piece`-th piece of its sum. `rank` is the block's within the cluster.
__device__ __forceinline__ Place place_of(const Dims& dims, int cluster, int piece, u32 rank) {
  Place p;
  p.base = rank / (CM * CN) * (CM * CN);
  p.cm = rank % (CM * CN) / CN;
  p.cn = rank % CN;
  const int columns = cluster_columns(dims);
  const int band = cluster / (GROUP * columns), inside = cluster % (GROUP * columns);
  const int height = min(GROUP, cluster_rows(dims) - band * GROUP);
  p.row = ((band * GROUP + inside % height) * CM + p.cm) * BM;
  p.column = (inside / height * CN + p.cn) * COLUMNS;
  const long long begin = piece * dims.k_split, end = min(dims.k, begin + dims.k_split);
  const int stages = end > begin ? (int)((end - begin + BK - 1) / BK) : 0;
  const int share = (stages + CS - 1) / CS, part = rank / (CM * CN);
  p.first = (int)(begin / BK) + min(stages, part * share);
  p.last = (int)(begin / BK) + min(stages, (part + 1) * share);
  return p;
}

// The rank of the `i`-th of the SENDERS blocks that share tiles with a block, itself included.
__device__ __forceinline__ u32 sender(const Place& p, int i) {
  return i < CM ? p.base + i * CN + p.cn : p.base + p.cm * CN + (p.cn + i - CM + 1) % CN;
}

__device__ __forceinline__ void load_a(const TensorMap* map, const Place& p, int stage, u32 tile, u32 bar) {
  u32 mask = CN > 1 ? ((1u << CN) - 1) << (p.base + p.cm * CN) : 0;
#pragma unroll
  for (int i = 0; i < A_BOXES; ++i) {
    if (A_MN) {
      int box = p.cn * A_BOXES + i, chunk = box / A_CUT, part = box % A_CUT;
      copy_box(tile + chunk * BK * 128 + part * (BK / A_CUT) * 128, map, p.row + chunk * 64,
               stage * BK + part * (BK / A_CUT), bar, mask);
    } else {
      copy_box(tile + p.cn * A_ROWS * BK * 2, map, stage * BK, p.row + p.cn * A_ROWS, bar, mask);
    }
  }
}

// First rows of a tile in B.
struct Source {
  const TensorMap* map;
  int row;
};

// The matrices of B.
struct Matrices {
  const TensorMap* first;
#if PARTS > 1
  const TensorMap* second;
#endif
#if PARTS > 2
  const TensorMap* third;
#endif

  // The rows from `column` of C on, all in one matrix.
  __device__ __forceinline__ Source at(const Dims& dims, int column) const {
#if PARTS > 2
    if (column >= dims.third) return {third, column - (int)dims.third};
#endif
#if PARTS > 1 && !SWIGLU
    if (column >= dims.second) return {second, column - (int)dims.second};
#endif
    return {first, column};
  }
  // With SWIGLU, the rows of the up projection.
  __device__ __forceinline__ Source ups(const Dims& dims, int column) const {
#if PARTS > 1
    return {second, column};
#else
    return {first, (int)(dims.n / 2) + column};
#endif
  }
};

// `ups` is used only with SWIGLU.
__device__ __forceinline__ void load_b(const Source& source, const Source& ups, const Place& p, int stage, u32 tile, u32 bar) {
  u32 mask = 0;
  if (CM > 1) {
#pragma unroll
    for (int i = 0; i < CM; ++i) mask |= 1u << (p.base + i * CN + p.cn);
  }
#pragma unroll
  for (int i = 0; i < B_BOXES; ++i) {
    int box = p.cm * B_BOXES + i;
    if (B_MN) {
      int chunk = box / B_CUT, part = box % B_CUT;
      copy_box(tile + chunk * BK * 128 + part * (BK / B_CUT) * 128, source.map, source.row + chunk * 64,
               stage * BK + part * (BK / B_CUT), bar, mask);
    } else {
      int at = box * B_ROWS; // in the tile; with SWIGLU the second half holds rows of the up projection
      bool up = SWIGLU && at >= COLUMNS;
      copy_box(tile + at * BK * 2, up ? ups.map : source.map, stage * BK, up ? ups.row + at - COLUMNS : source.row + at, bar, mask);
    }
  }
}

__device__ __forceinline__ float2 load2(const bf16* p) { return __bfloat1622float2(*(const __nv_bfloat162*)p); }
__device__ __forceinline__ float2 load2(const float* p) { return *(const float2*)p; }
__device__ __forceinline__ void store2(float* p, float2 v) { *(float2*)p = v; }
__device__ __forceinline__ u32 pack(float2 v) {
  __nv_bfloat162 r = __float22bfloat162_rn(v);
  return *(u32*)&r;
}
__device__ __forceinline__ void store2(bf16* p, float2 v) { *(u32*)p = pack(v); }

// Transposes 4 x 4: lane i of four then has register i of each.
__device__ __forceinline__ void swap_with(u32& low, u32& high, bool upper, int lanes) {
  u32 got = __shfl_xor_sync(0xFFFFFFFF, upper ? low : high, lanes);
  if (upper) low = got; else high = got;
}
__device__ __forceinline__ uint4 transpose4(u32 v[4], int lane) {
  swap_with(v[0], v[1], lane & 1, 1);
  swap_with(v[2], v[3], lane & 1, 1);
  swap_with(v[0], v[2], lane & 2, 2);
  swap_with(v[1], v[3], lane & 2, 2);
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// Writes rows `row` and `row + 8` of BLOCKS8 groups of eight columns from `column` on; v[j][0..1] are this lane's
// two columns of group j in the first row, v[j][2..3] in the second.
__device__ __forceinline__ void store_rows(const float (*v)[4], long long row, int column, long long m, long long n, Out* c,
#if BIAS
                                           const bf16* bias,
#endif
#if ADD
                                           const Out* add,
#endif
                                           int lane) {
  const int pair = column + lane % 4 * 2, room = (int)n - column; // columns left
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    const bool live = row < m;
    Out* to = c + row * n;
#pragma unroll
    for (int j0 = 0; j0 < BLOCKS8; j0 += 4) {
      constexpr bool PAIRS = OUT_F32 || BLOCKS8 % 4; // written as pairs, else sixteen bytes per lane
      u32 packed[4];
#pragma unroll
      for (int j = j0; j < j0 + 4 && j < BLOCKS8; ++j) {
        float2 x = make_float2(v[j][half * 2], v[j][half * 2 + 1]);
        const bool inside = j * 8 < room; // all eight or none
#if BIAS
        const float2 b = inside ? load2(bias + pair + j * 8) : make_float2(0.0f, 0.0f);
        x.x += b.x;
        x.y += b.y;
#endif
#if ADD
        if (live && inside) {
          const float2 y = load2(add + row * n + pair + j * 8);
          x.x += y.x;
          x.y += y.y;
        }
#endif
        if (PAIRS && live && inside) store2(to + pair + j * 8, x);
        packed[j - j0] = pack(x);
      }
      if constexpr (!PAIRS) {
        const uint4 eight = transpose4(packed, lane);
        const int j = j0 + lane % 4;
        if (live && j * 8 < room) *(uint4*)(to + column + j * 8) = eight;
      }
    }
  }
}
