// Matrix products of a decoder and of its backward pass, for Hopper (sm_90a): warp-group MMA on tiles that the
// bulk tensor copy engine brings into shared memory. One warp group per block and small tiles: for decoding, and where
// a block must not use more than 48 KB of shared memory; gemm_dyn.cu is faster for many rows.
//
//   C[m, n] = sum_k A[m, k] B[n, k]  (+ bias[n])  (+ add[m, n])          bf16 in, f32 sums, bf16 or f32 out
//
// Each operand is stored with the summed dimension last (A_MN = 0: A is [M, K]) or first (A_MN = 1: A is [K, M]); the
// tensor cores read both layouts from shared memory, so there is no transposition pass:
//
//   forward          Y [M, N] = X [M, K] W[N, K]^T    A = X  (A_MN 0), B = W (B_MN 0)
//   input gradient   dX[M, K] = dY[M, N] W[N, K]      A = dY (A_MN 0), B = W (B_MN 1)
//   weight gradient  dW[N, K] = dY[M, N]^T X[M, K]    A = dY (A_MN 1), B = X (B_MN 1)
//
// With SWIGLU the rows of B are the gate's followed by the up projection's, and C[M, N/2] = silu(gate) * up.
//
// # Joined matrices
// With PARTS the rows of B are those of up to three matrices, which are not copied: each has a tensor map, and
// dims.second and dims.third count the rows before them (third is N if there are two). A box of B lies in one matrix,
// so both are multiples of its rows, unless they divide gate from up.
//
// # Launch
// Kernel `gemm(map_a, map_b, [map_b2], [map_b3], c, [bias], [add], dims)`, 128 threads.
// Grid x: CM * CN * CS blocks for each group of CM * BM rows by CN * BN columns, rounded up; grid y: pieces of the sum
// (1, or more with a workspace, below).
// Tensor maps: 2-D, bf16, dims {inner, outer} of the operand, row pitch in bytes, no interleave, zero fill.
//   summed dimension last : box {BK, BM / CN} for A, {BK, BN / max(CM, 1 + SWIGLU)} for B, swizzle BK * 2 bytes
//   summed dimension first: box {64, BK / max(1, CN * 64 / BM)} for A, {64, BK} for B, or {64, BK / CM} if CM does not
//                           divide ceil(BN / 64); swizzle 128 bytes
// Inner dims and the columns of C are multiples of 8; everything else is free (out-of-bounds elements read as zero and
// are never
// written). `c` and `add` are 16-byte aligned and may be one buffer (accumulation); `add` has the type of `c`.
//
// # Splitting the sum
// CS blocks of a cluster each sum a part of K and add the parts up through distributed shared memory, in rank order.
// Grid y > 1 writes f32 partial products C[y, M, N] of `k_split` terms each (a multiple of BK), which
// `gemm_reduce` adds up in order. Both give the same bits on every run.
//
// # Bytes
// A block reads (BM / CN + BN / CM) * K * 2 bytes from the L2 cache: the CM * CN blocks of a cluster fetch a share
// of each common tile and the copy engine writes it to all of them. Device memory sees each operand about once:
// GROUP rows of clusters are walked together, column by column.
//
// Compiled after gemm_tile.cuh, which explains the definitions.
#ifndef STAGES
#define STAGES 2 // stages of the ring of tiles
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3 // caps the registers: 3 for a 128 x 128 tile
#endif
#ifndef DYNAMIC
#define DYNAMIC 0 // 1: the tiles are in STAGES * STAGE_BYTES + 1024 bytes of dynamic shared memory, else in static
#endif
#ifndef WEIGHTS_EARLY
#define WEIGHTS_EARLY 0 // 1: fetch the first tiles of B before the preceding kernel of the stream has ended
#endif

constexpr int CLUSTER = CM * CN * CS;
static_assert(CS == 1 || BM * BN * 4 <= STAGES * STAGE_BYTES, "partial sums replace the tiles");

extern "C" __global__ void
#if CM * CN * CS > 1
__cluster_dims__(CM* CN* CS, 1, 1)
#endif
__launch_bounds__(128, BLOCKS_PER_SM)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
#if PARTS > 1
     const __grid_constant__ TensorMap map_b2,
#endif
#if PARTS > 2
     const __grid_constant__ TensorMap map_b3,
#endif
     Out* c,
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
  extern __shared__ unsigned char tiles[];
#else
  __shared__ alignas(1024) unsigned char tiles[STAGES * STAGE_BYTES];
#endif
  __shared__ u64 barriers[2 * STAGES];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 tile = (shared_address(tiles) + 1023) & ~1023u, full = shared_address(barriers), empty = full + STAGES * 8;
  const u32 rank = CM * CN * CS > 1 ? cluster_rank() : 0;
  const Place p = place_of(dims, blockIdx.x / CLUSTER, blockIdx.y, rank);
  const Source source = matrices.at(dims, p.column), ups = matrices.ups(dims, p.column);
  const int count = p.last - p.first, part = rank / (CM * CN);

  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, SENDERS * 4);
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
  if (thread == 0) {
    if (!WEIGHTS_EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int s = 0; s < STAGES && s < count; ++s) {
      barrier_expect(full + s * 8, STAGE_BYTES);
      load_b(source, ups, p, p.first + s, tile + s * STAGE_BYTES + A_BYTES, full + s * 8);
    }
    if (WEIGHTS_EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int s = 0; s < STAGES && s < count; ++s) load_a(&map_a, p, p.first + s, tile + s * STAGE_BYTES, full + s * 8);
  }

  float acc[BM / 64][BN / 2];
#pragma unroll
  for (int h = 0; h < BM / 64; ++h)
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[h][i] = 0.0f;

  int slot = 0, round = 0; // of stage i: i % STAGES and i / STAGES
  int freed = 0, freed_round = 0;
  for (int i = 0; i < count; ++i) {
    barrier_wait(full + slot * 8, round & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u64 a = descriptor<A_MN>(tile + slot * STAGE_BYTES);
    const u64 b = descriptor<B_MN>(tile + slot * STAGE_BYTES + A_BYTES);
#pragma unroll
    for (int step = 0; step < BK / 16; ++step)
#pragma unroll
      for (int h = 0; h < BM / 64; ++h)
        mma(acc[h], a + ((h * A_HALF + step * A_STEP) >> 4), b + (step * B_STEP >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (++slot == STAGES) slot = 0, ++round;
    if (i == 0) continue;
    // The products of stage i - 1 are done: signal that to all who fill its slot, and refill this block's share of it.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (i - 1 + STAGES < count) {
      if (lane < SENDERS) barrier_arrive_in(empty + freed * 8, sender(p, lane));
      if (thread == 0) {
        barrier_wait(empty + freed * 8, freed_round & 1);
        barrier_expect(full + freed * 8, STAGE_BYTES);
        load_b(source, ups, p, p.first + i - 1 + STAGES, tile + freed * STAGE_BYTES + A_BYTES, full + freed * 8);
        load_a(&map_a, p, p.first + i - 1 + STAGES, tile + freed * STAGE_BYTES, full + freed * 8);
      }
      __syncwarp();
    }
    if (++freed == STAGES) freed = 0, ++freed_round;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int h = 0; h < BM / 64; ++h)
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(acc[h][i])::"memory");
  asm volatile("griddepcontrol.wait;" ::: "memory"); // before C is written or `add` is read

  const long long n = SWIGLU ? dims.n / 2 : dims.n;
  Out* out = c + blockIdx.y * dims.m * n;
  int column = p.column;
  [[maybe_unused]] const u32 mine = tile + thread * 16;
  constexpr int SHARE = BLOCKS8 * 4; // sums per thread that one of the blocks that share the sum finishes
  // Where a thread keeps sums i to i + 3 of half h (and, with SWIGLU, of gate or up) from block r.
  auto slot_of = [](int r, int h, int up, int i) { return (((r * (BM / 64) + h) * (1 + SWIGLU) + up) * SHARE + i) * 512; };
  if constexpr (CS > 1) {
    // A block finishes its share of the columns: it receives the others' sums of them and sends its own sums of theirs.
    // They overwrite the tiles, once no block of the cluster needs its tiles any more.
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int r = 0; r < CS; ++r) {
      if (r == part) continue;
      const u32 to = address_in(mine, r * (CM * CN) + p.cm * CN + p.cn);
#pragma unroll
      for (int h = 0; h < BM / 64; ++h)
#pragma unroll
        for (int up = 0; up <= SWIGLU; ++up)
#pragma unroll
          for (int i = 0; i < SHARE; i += 4)
            send(to + slot_of(part, h, up, i), acc[h] + up * (BN / 4) + r * SHARE + i);
    }
    cluster_arrive();
    cluster_wait();
    column += part * BLOCKS8 * 8;
  } else if (CLUSTER > 1) {
    cluster_arrive(); // the others may still signal this block's barriers, so it must not exit first
  }
#pragma unroll
  for (int h = 0; h < BM / 64; ++h) {
    auto sum_of = [&](int up, int i) -> float4 { // sums i to i + 3 of this block's share
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int r = 0; r < CS; ++r) {
        const float* own = acc[h] + up * (BN / 4) + r * SHARE + i;
        float4 x = make_float4(own[0], own[1], own[2], own[3]);
        if (CS > 1 && r != part) x = received(mine + slot_of(r, h, up, i));
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      return sum;
    };
    float v[BLOCKS8][4];
#pragma unroll
    for (int j = 0; j < BLOCKS8; ++j) {
      float4 x = sum_of(0, j * 4);
      if (SWIGLU) {
        const float4 up = sum_of(1, j * 4);
        x = make_float4(silu(x.x) * up.x, silu(x.y) * up.y, silu(x.z) * up.z, silu(x.w) * up.w);
      }
      v[j][0] = x.x, v[j][1] = x.y, v[j][2] = x.z, v[j][3] = x.w;
    }
    store_rows(v, (long long)p.row + h * 64 + warp * 16 + lane / 4, column, dims.m, n, out,
#if BIAS
               bias,
#endif
#if ADD
               add,
#endif
               lane);
  }
  if (CS == 1 && CLUSTER > 1) cluster_wait();
}

struct Pieces {
  long long size;  // elements of C, a multiple of 4
  long long count; // partial products
};

// out[i] = partial[0][i] + partial[1][i] + ... (+ add[i]), in this order. Grid: any number of blocks of 256 threads.
// `out` may be `add`. Bytes: 4 * size * count read, size * sizeof(Out) written.
extern "C" __global__ void __launch_bounds__(256)
gemm_reduce(const float* partial, Out* out,
#if ADD
            const Out* add,
#endif
            const __grid_constant__ Pieces pieces) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (long long i = (blockIdx.x * 256ll + threadIdx.x) * 4; i < pieces.size; i += gridDim.x * 1024ll) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (long long s = 0; s < pieces.count; ++s) {
      float4 x = *(const float4*)(partial + s * pieces.size + i);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
#if ADD
    float2 low = load2(add + i), high = load2(add + i + 2);
    sum.x += low.x, sum.y += low.y, sum.z += high.x, sum.w += high.y;
#endif
    store2(out + i, make_float2(sum.x, sum.y));
    store2(out + i + 2, make_float2(sum.z, sum.w));
  }
}
