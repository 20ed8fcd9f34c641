// The products of gemm.cu with more than 48 KB of shared memory: one block per SM, 128 x BN tiles, a ring of STAGES
// stages of 64 terms, one warp group that only copies and two that only multiply, each 64 rows of the tile. Compiled
// after gemm_tile.cuh.
//
// # Launch
// Kernel `gemm(map_a, map_b, [map_b2], [map_b3], map_c or c, [bias], [add], dims)`, 384 threads; BM is 128 and BK 64.
// The parameters are those of gemm.cu. With STORE the parameter for C is a tensor map, box {32, 64}, swizzle 64 bytes:
// tiles of C are written through shared memory while the next tile is multiplied. Otherwise it is the address of C.
// Grid x: a multiple of CM * CN * CS, ideally the number of SMs rounded down to one; the blocks take the tiles in turn.
// Without a cluster's split (CS 1) the ceil(k / k_split) pieces of the sum are tiles too: no grid y.
// Shared memory: STAGES * STAGE_BYTES bytes, with STORE 256 * COLUMNS more. It is static, which compilers of CUDA 13
// allow up to 232,448 bytes, or with DYNAMIC dynamic and 1024 bytes more. STAGE_BYTES is 16,384 + 128 * BN (with B_MN,
// BN rounded up to 64).
#ifndef DYNAMIC
#define DYNAMIC 0
#endif
#ifndef STORE
#define STORE (!OUT_F32 && !ADD) // 1: C is bf16 and written by the copy engine
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int CLUSTER = CM * CN * CS;
static_assert(BM == 128 && BK == 64, "two warp groups of 64 rows, stages of 64 terms");
static_assert(!STORE || (!OUT_F32 && !ADD && CS == 1 && COLUMNS % 32 == 0), "boxes of 32 columns of bf16");
static_assert(CS == 1 || (BM * BN * 4 <= STAGES * STAGE_BYTES && !SWIGLU), "partial sums replace the tiles");

// Barrier of one multiplying warp group (0 or 1), or of the whole block (3), in different branches.
__device__ __forceinline__ void group_sync(int which) {
  asm volatile("bar.sync %0, %1;" ::"r"(which + 1), "r"(which == 3 ? 384 : 128) : "memory");
}

// Four 8 x 8 matrices of bf16 to shared memory; lane i provides the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void write_box(const TensorMap* map, int inner, int outer, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(inner), "r"(outer), "r"(from) : "memory");
}
__device__ __forceinline__ void written_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void written_boxes_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void shared_to_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Writes a warp group's 64 rows of C through `buffer`: COLUMNS / 32 boxes of 64 rows of 64 bytes, swizzled.
__device__ __forceinline__ void store_tile(const float (*v)[4], const TensorMap* map, int row, int column, u32 buffer,
#if BIAS
                                           const bf16* bias, int n,
#endif
                                           int group, int warp, int lane) {
  if (warp == 0 && lane == 0) written_boxes_read(); // of the previous tile
  group_sync(group);
  const int matrix = lane / 8, r = warp * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 shift = make_float2(0.0f, 0.0f);
#if BIAS
      const int at = column + (j + i) * 8 + lane % 4 * 2;
      if (at < n) shift = load2(bias + at);
#endif
      packed[i * 2] = pack(make_float2(v[j + i][0] + shift.x, v[j + i][1] + shift.y));
      packed[i * 2 + 1] = pack(make_float2(v[j + i][2] + shift.x, v[j + i][3] + shift.y));
    }
    const int eight = j + matrix / 2; // this lane's row belongs to these eight columns
    const u32 at = eight / 4 * 4096 + r * 64 + ((eight % 4) ^ (r / 2 % 4)) * 16;
    store_matrices(buffer + at, packed[0], packed[1], packed[2], packed[3]);
  }
  shared_to_engine();
  group_sync(group);
  if (warp == 0 && lane == 0) {
#pragma unroll
    for (int box = 0; box < COLUMNS / 32; ++box) write_box(map, column + box * 32, row, buffer + box * 4096);
    commit_boxes();
  }
}

struct Work {
  int cluster, clusters; // of the first tile; of one piece of the sum
  int step, total;
};

// Work of this block: tiles cluster, cluster + step, ... below total, over all pieces of the sum.
__device__ __forceinline__ Work work_of(const Dims& dims) {
  Work w;
  w.clusters = cluster_rows(dims) * cluster_columns(dims);
  w.cluster = blockIdx.x / CLUSTER;
  w.step = gridDim.x / CLUSTER;
  w.total = CS > 1 ? w.clusters : w.clusters * (int)((dims.k + dims.k_split - 1) / dims.k_split);
  return w;
}

extern "C" __global__ void
#if CM * CN * CS > 1
__cluster_dims__(CM* CN* CS, 1, 1)
#endif
__launch_bounds__(384, 1)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
#if PARTS > 1
     const __grid_constant__ TensorMap map_b2,
#endif
#if PARTS > 2
     const __grid_constant__ TensorMap map_b3,
#endif
#if STORE
     const __grid_constant__ TensorMap map_c,
#else
     Out* c,
#endif
#if BIAS
     const bf16* bias,
#endif
#if ADD
     const Out* add,
#endif
     const __grid_constant__ Dims dims) {
  const Matrices matrices = {&map_b
#if PARTS > 1
                             , &map_b2
#endif
#if PARTS > 2
                             , &map_b3
#endif
  };
#if DYNAMIC
  extern __shared__ unsigned char memory[];
#else
  __shared__ alignas(1024) unsigned char memory[STAGES * STAGE_BYTES + STORE * 256 * COLUMNS];
#endif
  __shared__ u64 barriers[2 * STAGES];
  const int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const u32 tile = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Work work = work_of(dims);

  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, SENDERS * 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a));
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b));
  }
  asm volatile("griddepcontrol.launch_dependents;");
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  int slot = 0, round = 0; // of the next stage
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int t = work.cluster; t < work.total; t += work.step) {
      const Place p = place_of(dims, t % work.clusters, t / work.clusters, rank);
      const Source source = matrices.at(dims, p.column), ups = matrices.ups(dims, p.column);
      for (int stage = p.first; thread == 0 && stage < p.last; ++stage) {
        barrier_wait(empty + slot * 8, (round & 1) ^ 1);
        barrier_expect(full + slot * 8, STAGE_BYTES);
        load_a(&map_a, p, stage, tile + slot * STAGE_BYTES, full + slot * 8);
        load_b(source, ups, p, stage, tile + slot * STAGE_BYTES + A_BYTES, full + slot * 8);
        if (++slot == STAGES) slot = 0, ++round;
      }
      if (CS > 1) {
        // Partial sums overwrite the ring from the first of these on; tiles return after the last.
        __syncwarp();
        cluster_arrive();
        cluster_wait();
        cluster_arrive();
        cluster_wait();
        group_sync(3);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = group - 1;
    [[maybe_unused]] const long long n = SWIGLU ? dims.n / 2 : dims.n;
    for (int t = work.cluster; t < work.total; t += work.step) {
      const Place p = place_of(dims, t % work.clusters, t / work.clusters, rank);
      float acc[BN / 2];
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
      int freed = 0;
      for (int stage = p.first; stage < p.last; ++stage) {
        barrier_wait(full + slot * 8, round & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 a = descriptor<A_MN>(tile + slot * STAGE_BYTES + half * A_HALF);
        const u64 b = descriptor<B_MN>(tile + slot * STAGE_BYTES + A_BYTES);
#pragma unroll
        for (int step = 0; step < BK / 16; ++step) mma(acc, a + (step * A_STEP >> 4), b + (step * B_STEP >> 4));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (stage > p.first && lane < SENDERS) barrier_arrive_in(empty + freed * 8, sender(p, lane));
        freed = slot;
        if (++slot == STAGES) slot = 0, ++round;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (p.last > p.first && lane < SENDERS) barrier_arrive_in(empty + freed * 8, sender(p, lane));
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
      const int row = p.row + half * 64;
      int column = p.column;
      float v[BLOCKS8][4];
      if constexpr (CS > 1) {
        // A block finishes its share of the columns: it receives the others' sums of them and sends its own sums of
        // theirs. They overwrite the tiles, once no block of the cluster needs its tiles any more.
        constexpr int SHARE = BLOCKS8 * 4; // registers
        const int part = rank / (CM * CN);
        const u32 mine = tile + (thread - 128) * 16;
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int r = 0; r < CS; ++r) {
          if (r == part) continue;
          const u32 to = address_in(mine + part * SHARE * 1024, r * (CM * CN) + p.cm * CN + p.cn);
#pragma unroll
          for (int i = 0; i < SHARE; i += 4) send(to + i * 1024, acc + r * SHARE + i);
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < SHARE; i += 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) v[i / 4][e] = 0.0f;
#pragma unroll
          for (int r = 0; r < CS; ++r) {
            float4 x = make_float4(acc[r * SHARE + i], acc[r * SHARE + i + 1], acc[r * SHARE + i + 2], acc[r * SHARE + i + 3]);
            if (r != part) x = received(mine + (r * SHARE + i) * 1024);
            v[i / 4][0] += x.x, v[i / 4][1] += x.y, v[i / 4][2] += x.z, v[i / 4][3] += x.w;
          }
        }
        shared_to_engine(); // the copy engine writes there next
        group_sync(3);
        column += part * BLOCKS8 * 8;
      } else {
#pragma unroll
        for (int j = 0; j < BLOCKS8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) v[j][e] = SWIGLU ? silu(acc[j * 4 + e]) * acc[BN / 4 + j * 4 + e] : acc[j * 4 + e];
      }
#if STORE
      store_tile(v, &map_c, row, column, tile + STAGES * STAGE_BYTES + half * COLUMNS * 128,
#if BIAS
                 bias, (int)n,
#endif
                 half, warp, lane);
#else
      store_rows(v, (long long)row + warp * 16 + lane / 4, column, dims.m, n, c + t / work.clusters * dims.m * n,
#if BIAS
                 bias,
#endif
#if ADD
                 add,
#endif
                 lane);
#endif
    }
    if (STORE && warp == 0 && lane == 0) written_boxes_done();
  }
  if (CLUSTER > 1) {
    // The others may still signal this block's barriers, so it must not exit first.
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}
