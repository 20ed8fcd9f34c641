// All layers of a decoding step in one kernel, for up to 128 rows of a model in bf16 on Hopper (sm_90a).
//
//   x = E[token];  for each layer:  x += O attention(QKV norm(x));  x += Down (silu(Gate norm(x)) * Up norm(x))
//   normed = norm(x), the input of the head
//
// One block per multiprocessor runs for the whole step, so that memory stays busy while blocks exchange results: a ring
// of weight tiles runs ahead of the arithmetic through all products of all layers, and waits only for its own slots.
//
// # Phases of a layer, with a barrier of all blocks after each
//   qkv       pieces of QKV norm(x), f32               units: tiles of columns x pieces of the sum
//   attention adds the pieces, appends to the cache    units: rows x key heads x parts of the tokens
//   out       pieces of O mixed, f32
//   settle    x += the pieces in order; normed         units: rows
//   mlp       inner = silu(gate) * up, bf16
//   down      pieces of Down inner, f32
//   settle    as above, with the gain of the next layer's norm
// The assignment of work to blocks and the order of every sum are fixed: the same inputs give the same bits. x and
// normed are rounded where a separate addition and norm would round (norm.cu); a projection is rounded once it is
// summed.
//
// # Threads
// Eight warps multiply, attend and settle: the consumers. Of the other four, three fetch weights with cp.async. One
// thread of the fourth, the leader, passes the barriers of all blocks and fetches activations with the bulk copy
// engine; each block of a pair copies half of a tile to both. With up to 64 rows both warp groups multiply the same
// rows, each half of the terms of a chunk, and attend together; with 128 rows each warp group has 64 rows and attends
// independently. While the consumers wait after the mlp they make some of the shortlists of the step's draw
// (philox.cuh), which take as many instructions as the rest of drawing and no memory traffic.
//
// # Measurements (H200, 0.5B, 16 and 128 rows; scripts/kernels/decode.py profile16 profile128)
// A phase spends 0.9 us on the barrier before its first load. Straight-line code that runs once per layer stalls on
// instruction fetches: with the loops over chunks unrolled the kernel was 157 KB, and a step 3 % slower. A fence
// between cp.async and wgmma that also covers global memory cost 0.4 us per chunk. With up to 64 rows, chunks of 64
// terms are slower because of barriers. Prefetching the next layer's cache into L2, and two tiles in flight for
// attention, did not help. Shortlists save 28 us of drawing at 128 rows and cost 8 here; they cost 17 when the fetchers
// made them, which have few registers.
//
// # Shapes (R = rows, D = WIDTH, I = INNER, H/K query/key heads of Dh, all dims multiples of 8)
//   layers: [LAYERS] Layer, pointers; embedding [V, D]; token, lengths [R] i32; x, normed [R, D]; mixed [R, H Dh];
//   inner [R, I]; pieces: f32, the largest of PIECES * R * columns; parts: f32 [R, K HEAD_TILES, ATTENTION_PARTS,
//   PART]; counts: u32 [32 + R K HEAD_TILES], zeros before the first launch; every launch leaves zeros; otherwise as in
//   attention_decode.cu. streams [R, 4] u32, drawn, states [R] i32: key and position of a row's draw, and whether the
//   row draws (0); shortlist: [R, SHORTLIST] (id, word), in any order; shortlisted: [R] u32, their number, which the
//   kernel adds to. Tensor maps of normed, mixed, inner: box {64, ROWS / 2}, swizzle 128 bytes, zero fill.
// Launch: BLOCKS blocks of 384 threads, one per multiprocessor.
// Bytes: every weight once, keys and values once; each pair of blocks reads its pieces' share of the activations from
// L2.
//
// Compiled after gemm_tile.cuh, attention_decode.cu and philox.cuh, with BK 64.
#ifndef ROWS
#define ROWS 16 // of a tile of activations: 16, 32, 64 or 128, at least the rows of the step
#endif
#ifndef LAYERS
#define LAYERS 24
#endif
#ifndef WIDTH
#define WIDTH 896
#endif
#ifndef INNER
#define INNER 4864
#endif
#ifndef BLOCKS
#define BLOCKS 132 // of the launch: an even number, all resident at once
#endif
// Columns of a unit (for the mlp, gates and ups) and pieces of the sum.
#ifndef QKV_TILE
#define QKV_TILE 48
#define OUT_TILE 32
#define OUT_PIECES 4
#define MLP_TILE 80
#define DOWN_TILE 64
#define DOWN_PIECES 8
#endif
// Most groups that share a row's tokens.
#ifndef ATTENTION_PARTS
#define ATTENTION_PARTS 8
#endif
#ifndef STAMPS
#define STAMPS 0 // 1: every block writes when each phase ended, for profiling: [BLOCKS, 1 + 7 LAYERS] u64, ns
#endif

static_assert(BK == 64 && QKV_PIECES > 0, "chunks of 64 terms, projections in pieces");

struct Layer {
  const bf16 *q, *k, *v, *bias, *q_norm, *k_norm, *input_norm, *o, *mlp_norm, *gate, *up, *down;
  bf16 *keys, *values;
  const void* unused[2];
};

struct LayersScalars {
  long long rows, vocab;
  long long limit; // of the shortlists; 0 makes none
  Scalars attention;
};

constexpr int QUERIES = QUERY_HEADS * HEAD_DIM, KEYS = KEY_HEADS * HEAD_DIM;

// Terms that are fetched and multiplied at once: a chunk of this many tiles of 64. With one tile, the barriers cost as
// much as the products of few rows.
constexpr int TOGETHER = 2, CHUNK_TERMS = TOGETHER * 64;

// How a product is divided into units: two neighbouring tiles and one piece of the sum belong to a pair of blocks.
template <int TILE_, int PIECES_, int TERMS_, int COLUMNS_>
struct Division {
  static constexpr int TILE = TILE_, PIECES = PIECES_, TERMS = TERMS_, COLUMNS = COLUMNS_;
  static constexpr int TERM_CHUNKS = (TERMS + CHUNK_TERMS - 1) / CHUNK_TERMS;
  static constexpr int TILE_PAIRS = ((COLUMNS + TILE - 1) / TILE + 1) / 2;
  static constexpr int PAIRS_OF_UNITS = TILE_PAIRS * PIECES;
  static constexpr int ROUNDS = (PAIRS_OF_UNITS + BLOCKS / 2 - 1) / (BLOCKS / 2);
  static_assert(TILE % 16 == 0 && TILE <= 128 && PIECES <= TERM_CHUNKS, "tiles are whole instructions, pieces whole chunks");
  static_assert(COLUMNS % 8 == 0 && TERMS % 8 == 0, "accesses of 16 bytes");
  int first_column, piece, begin, end; // of this block's unit; chunks of the sum
  int turn; // pairs begin with different chunks, so that they do not all read the same activations at once

  __device__ __forceinline__ Division(int pair, int rank) {
    first_column = (pair % TILE_PAIRS * 2 + rank) * TILE;
    piece = pair / TILE_PAIRS;
    begin = piece * TERM_CHUNKS / PIECES;
    end = (piece + 1) * TERM_CHUNKS / PIECES;
    turn = pair % (end - begin);
  }
  // The i-th chunk in this block's order, counted from `begin`.
  __device__ __forceinline__ int chunk(int i) const { return i + turn < end ? i + turn : i + turn - end + begin; }
};
typedef Division<QKV_TILE, QKV_PIECES, WIDTH, QUERIES + 2 * KEYS> Qkv;
typedef Division<OUT_TILE, OUT_PIECES, QUERIES, WIDTH> Outputs;
typedef Division<MLP_TILE, 1, WIDTH, 2 * INNER> Mlp;
typedef Division<DOWN_TILE, DOWN_PIECES, INNER, WIDTH> Down;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MOST_COLUMNS = larger(larger(QKV_TILE, OUT_TILE), larger(MLP_TILE, DOWN_TILE));
constexpr bool HALVED = ROWS <= 64; // both warp groups have the same rows
constexpr bool SHORTLISTS = ROWS >= 64; // whether to make them: for fewer rows they take longer than they save
constexpr int STAGE = ROWS * 2 * CHUNK_TERMS; // bytes of a chunk of activations
constexpr int STAGES = !HALVED ? 3 : ROWS == 64 ? 4 : 8;
constexpr int SLOT = MOST_COLUMNS * 2 * CHUNK_TERMS; // and of weights
// Products read 64 rows of a stage, whatever the rest contains; then the sums that one warp group hands to the other.
constexpr int HANDED = STAGES * STAGE + (HALVED ? 8192 : 0);
constexpr int ACTIVATIONS = larger(HANDED + (HALVED ? MOST_COLUMNS * 256 : 0), (256 / THREADS) * (int)sizeof(Shared));
constexpr int REGION = (ACTIVATIONS + 1023) / 1024 * 1024;
constexpr int LARGEST = 232448 - 2048; // of shared memory, less the other declarations
constexpr int SLOTS = (LARGEST - REGION) / SLOT;
static_assert(SLOTS >= 2 && SLOT % 1024 == 0, "some tiles of weights fit");

constexpr int FETCHERS = 96; // threads that fetch weights
constexpr int BARRIERS = 2 * (STAGES + SLOTS);

__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// Makes earlier writes to shared or global memory visible to the copy engine and the matrix units.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The barrier of all blocks after every phase. The consumers of a block touch shared memory only: each warp arrives at
// `finished`. The leader waits for them, adds the block to a count in the L2 cache, waits until the count covers all
// blocks, and opens the next phase.
//
// What holds after `wait`: every write that a consumer of any block made before `finish` of the last phase is visible,
// and no block reads that phase's inputs any more. Why: a write happens before the arrival at `finished` (release,
// block), before the leader's release of `count` (device; cumulative, so it covers the writes of the whole block),
// before another leader's acquire of `count`, before its arrival at `opened`, before the wait of that block's
// consumers. So a phase may read what any block wrote in an earlier one, and may overwrite what an earlier one read,
// without another barrier.
//
// One parity bit per barrier suffices: `opened` completes again only after all consumer warps have arrived at
// `finished`, and thus passed `opened`, and `finished` completes again only after `opened`. Neither is ever two rounds
// ahead of a waiter, and waiting twice for the same opening is harmless. `count` may run past the awaited number, by
// blocks that finish the next phase sooner, hence the comparison with <.
struct Phases {
  u32* count; // of blocks, over all phases
  u32 finished, opened; // barriers in shared memory
  int phase;  // the next one

  // By all threads of a consumer's warp. Their writes are visible to all who pass the next phase's opening.
  __device__ __forceinline__ void finish() const {
    fence_shared(); // the copy engine may next write where this warp read or wrote
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(finished) : "memory");
  }
  __device__ __forceinline__ void wait() const { barrier_wait(opened, phase & 1); }

  // By the leader. The fence orders what the acquire made visible before copies by the copy engine, a proxy of its own.
  __device__ __forceinline__ void meet() const {
    barrier_wait(finished, phase & 1);
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
    while (load_acquire(count) < (phase + 1) * BLOCKS) {}
    fence_global();
  }
  __device__ __forceinline__ void open() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(opened) : "memory");
    ++phase;
  }
  // After the last phase. The last block to arrive resets the count: by then every leader has left its last `meet`.
  __device__ __forceinline__ void close() const {
    barrier_wait(finished, phase & 1);
    if (atomicAdd(count, 1) + 1 == (phase + 1) * BLOCKS) *count = 0;
  }
};

// A ring of tiles in shared memory. Each slot has a barrier that says that it is full; the barriers that say that a
// slot is empty follow after all of these. A slot is identified by its first barrier.
//
// A slot is full once all its bytes have arrived: for activations the bulk copies of both blocks of the pair, counted
// in bytes; for weights the cp.async of FETCHERS threads. It is empty once every reader has released it: 16 warps of
// two blocks for activations, because each copy writes to both blocks; 8 warps for weights. The first wait for empty
// slots passes at once, because it waits for the parity of the round before.
template <int SIZE_, int BYTES_>
struct Ring {
  static constexpr int SIZE = SIZE_, BYTES = BYTES_, EMPTY = SIZE_ * 8; // from a slot's first barrier to its second
  u32 bar, data, parity; // of the next slot; the parity of its round
  u32 first_bar, first_data;

  __device__ __forceinline__ Ring(u32 bars, u32 tiles) : bar(bars), data(tiles), parity(0), first_bar(bars), first_data(tiles) {}
  __device__ __forceinline__ void wait_full() const { barrier_wait(bar, parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(bar + EMPTY, parity ^ 1); }
  __device__ __forceinline__ void next() {
    bar += 8, data += BYTES;
    if (bar == first_bar + EMPTY) bar = first_bar, data = first_data, parity ^= 1;
  }
};
typedef Ring<STAGES, STAGE> Activations;
typedef Ring<SLOTS, SLOT> Weights;

// ---- shortlists ----------------------------------------------------------------------------------------------------

// A consumer warp's share of the shortlists of all rows, 256 ids at a time.
struct Shortlists {
  static constexpr int SHARES = BLOCKS * 8, IDS = 256;
  const uint4* streams;
  const int *drawn, *states;
  uint2* lists;
  u32 *lengths, limit;
  int vocab;
  int groups, row, group, left; // of a row; what is next, and how many groups are left
  uint4 stream; // of the row
  u32 position;
  bool live;

  __device__ __forceinline__ void start(int warp, long long rows) {
    groups = (vocab + IDS - 1) / IDS;
    const long long all = limit == 0 ? 0 : rows * groups, begin = all * warp / SHARES;
    left = (int)(all * (warp + 1) / SHARES - begin);
    row = (int)(begin / groups), group = (int)(begin % groups);
    if (left > 0) load();
  }
  __device__ __forceinline__ void load() { stream = streams[row], position = drawn[row], live = states[row] == 0; }

  // Makes the share that is due when `layers` layers are left, including this one.
  __device__ __forceinline__ void step(int layers) {
#pragma unroll 1
    for (int due = (left + layers - 1) / layers; due > 0; --due) {
      if (live) {
        const int first = group * (IDS / 4) + threadIdx.x % 32; // the words of ids 4 first .. 4 first + 3
        uint4 four[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) four[i] = make_uint4(first + 32 * i, position, stream.z, stream.w);
        philox(four, stream.x, stream.y);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (~max(max(four[i].x, four[i].y), max(four[i].z, four[i].w)) >= limit) continue;
          const u32 word[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int id = (first + 32 * i) * 4 + j;
            if (~word[j] >= limit || id >= vocab) continue;
            const u32 place = atomicAdd(lengths + row, 1u);
            if (place < SHORTLIST) lists[(long long)row * SHORTLIST + place] = make_uint2(id, word[j]);
          }
        }
        __syncwarp();
      }
      --left;
      if (++group == groups) {
        group = 0, ++row;
        if (left > 0) load();
      }
    }
  }
};

// ---- fetching ------------------------------------------------------------------------------------------------------

// Fetches activations; called by the leader. The phase's opening is enough to read them: see Phases.
template <class D>
__device__ __forceinline__ void fetch_activations(Activations& stage, const TensorMap* map, u32 rank) {
  for (int pair = blockIdx.x / 2; pair < D::PAIRS_OF_UNITS; pair += BLOCKS / 2) {
    const D unit(pair, rank);
#pragma unroll 1
    for (int i = unit.begin; i < unit.end; ++i, stage.next()) {
      const int chunk = unit.chunk(i);
      stage.wait_empty();
      barrier_expect(stage.bar, STAGE);
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j)
        copy_box(stage.data + (j * 2 + rank) * (ROWS * 64), map, chunk * CHUNK_TERMS + j * 64, rank * (ROWS / 2), stage.bar, 3);
    }
  }
}

// Fetches weights; called by FETCHERS threads: `row` returns the start of the tile's r-th row, or nullptr.
template <class D, class Row>
__device__ __forceinline__ void fetch_weights(Weights& slot, int thread, u32 rank, const Row& row) {
  constexpr int PASS = FETCHERS / 8, PASSES = (D::TILE + PASS - 1) / PASS;
  const int part = thread % 8;
  for (int pair = blockIdx.x / 2; pair < D::PAIRS_OF_UNITS; pair += BLOCKS / 2) {
    const D unit(pair, rank);
    const bf16* from[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int r = i * PASS + thread / 8;
      from[i] = r < D::TILE ? row(unit, r) : nullptr;
    }
#pragma unroll 1
    for (int i = unit.begin; i < unit.end; ++i, slot.next()) {
      const int chunk = unit.chunk(i);
      slot.wait_empty();
#pragma unroll
      for (int j = 0; j < TOGETHER; ++j) {
        const int term = chunk * CHUNK_TERMS + j * 64 + part * 8;
#pragma unroll
        for (int k = 0; k < PASSES; ++k) {
          const int r = k * PASS + thread / 8;
          if (from[k] == nullptr) continue;
          // The layout of a tensor map of 128 bytes with its swizzle; zeros after the last term.
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                           slot.data + (j * D::TILE + r) * 128 + (part ^ (r % 8)) * 16),
                       "l"(from[k] + (term < D::TERMS ? term : 0)), "r"(term < D::TERMS ? 16 : 0)
                       : "memory");
        }
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(slot.bar) : "memory");
    }
  }
}

// ---- multiplying ---------------------------------------------------------------------------------------------------

// All units of a product: `finish(unit, row, sums)` gets the sums of columns 8 j + 2 (lane % 4) and the next, of `row`
// and of row + 8, in sums[4 j ..].
template <class D, class Finish>
__device__ __forceinline__ void multiply_units(Activations& stage, Weights& slot, u32 rank, float4* handed, const Finish& finish) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  // Three lanes release a slot: in both blocks of the pair for activations, in this one for weights. They do so one
  // chunk late, when wait_group 1 has shown that the chunk's matrix instructions, the only readers of the slot, are
  // complete.
  const u32 far = address_in(stage.first_bar, lane < 2 ? lane : rank) - stage.first_bar;
#pragma unroll
  for (int round = 0; round < D::ROUNDS; ++round) {
    const int pair = round * (BLOCKS / 2) + blockIdx.x / 2;
    if (pair >= D::PAIRS_OF_UNITS) return;
    const D unit(pair, rank);
    float acc[D::TILE / 2];
#pragma unroll
    for (int i = 0; i < D::TILE / 2; ++i) acc[i] = 0.0f;
    u32 used = 0; // the slot to be released next
    const auto free = [&] {
      if (used != 0 && lane < 3) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(used) : "memory");
    };
#pragma unroll 1
    for (int chunk = unit.begin; chunk < unit.end; ++chunk) {
      slot.wait_full();
      stage.wait_full();
      fence_shared(); // cp.async writes weights by the generic proxy; wgmma reads by the async proxy
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      constexpr int STEPS16 = HALVED ? 2 : 4;
      const u64 a = descriptor<false>(stage.data + (HALVED ? group * 64 : group * 8192));
      const u64 b = descriptor<false>(slot.data + (HALVED ? group * 64 : 0));
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
        for (int step = 0; step < STEPS16; ++step)
          mma_columns<D::TILE>(acc, a + (i * ROWS * 8 + step * 2), b + (i * D::TILE * 8 + step * 2));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      free();
      used = far + (lane < 2 ? stage.bar + Activations::EMPTY : slot.bar + Weights::EMPTY);
      stage.next(), slot.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < D::TILE / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    free();
    if constexpr (HALVED) {
      // The second warp group hands its sums to the first. The barrier orders the writes of `handed` before the reads,
      // the one after the round the reads before the next round's writes. After the last round the phase's barrier does
      // that.
      const bool some = warp * 16 < ROWS;
      if (group == 1 && some) {
#pragma unroll
        for (int i = 0; i < D::TILE / 8; ++i)
          handed[i * 128 + thread] = make_float4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]);
      }
      meet_consumers();
      if (group == 0 && some) {
#pragma unroll
        for (int i = 0; i < D::TILE / 8; ++i) {
          const float4 other = handed[i * 128 + thread];
          acc[i * 4] += other.x, acc[i * 4 + 1] += other.y, acc[i * 4 + 2] += other.z, acc[i * 4 + 3] += other.w;
        }
        finish(unit, warp * 16 + lane / 4, acc);
      }
      if (round + 1 < D::ROUNDS) meet_consumers();
    } else {
      finish(unit, group * 64 + warp * 16 + lane / 4, acc);
    }
  }
}

// Writes a unit's sums as a piece: pieces[piece][row][column].
template <class D>
struct ToPieces {
  float* pieces;
  int rows;
  __device__ __forceinline__ void operator()(const D& unit, int row, const float* sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
      float* to = pieces + ((long long)unit.piece * rows + row) * D::COLUMNS;
#pragma unroll
      for (int j = 0; j < D::TILE / 8; ++j) {
        const int column = unit.first_column + j * 8 + threadIdx.x % 4 * 2;
        if (row < rows && column < D::COLUMNS) *(float2*)(to + column) = make_float2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
      }
    }
  }
};

// silu(gate) * up
__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// silu(gates) * ups, in bf16.
struct ToInner {
  bf16* inner;
  int rows;
  __device__ __forceinline__ void operator()(const Mlp& unit, int row, const float* sums) const {
    constexpr int OWN = MLP_TILE / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
#pragma unroll
      for (int j = 0; j < OWN / 8; ++j) {
        const int column = unit.first_column / 2 + j * 8 + threadIdx.x % 4 * 2, at = j * 4 + half * 2;
        const float low = gated(sums[at], sums[OWN / 2 + at]), high = gated(sums[at + 1], sums[OWN / 2 + at + 1]);
        if (row < rows && column < INNER) store2(inner + (long long)row * INNER + column, make_float2(low, high));
      }
    }
  }
};

// ---- settling ------------------------------------------------------------------------------------------------------

constexpr int QUADS = (WIDTH / 4 + 255) / 256; // of a thread

__device__ __forceinline__ float4 widened(uint2 v) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xFFFF0000u));
}
__device__ __forceinline__ uint2 narrowed(float4 v) { return make_uint2(pack(make_float2(v.x, v.y)), pack(make_float2(v.z, v.w))); }

// x[row] += pieces, or with PIECES 0 x[row] = start[row]; normed[row] is its norm. A block per row.
//
// `ready` waits for the phase's opening, which `pieces` need. `start` may read x before: a thread reads only the
// columns that it wrote itself in the settle phase before. The first barrier of consumers completes `sums` before they
// are added; the second keeps the next row from overwriting them while they are read.
template <int PIECES, class Start, class Ready>
__device__ __forceinline__ void settle_rows(const float* pieces, const Start& start, bf16* x, bf16* normed, const bf16* gain,
                                            int rows, float epsilon, float* sums, const Ready& ready) {
  const int thread = threadIdx.x;
  uint2 weight[QUADS];
#pragma unroll
  for (int i = 0; i < QUADS; ++i)
    if (thread + i * 256 < WIDTH / 4) weight[i] = *(const uint2*)(gain + (thread + i * 256) * 4);
#pragma unroll 1
  for (int row = blockIdx.x; row < rows; row += BLOCKS) {
    uint2 current[QUADS];
    float4 value[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      if (thread + i * 256 < WIDTH / 4) current[i] = start(row, (thread + i * 256) * 4);
    if (row == blockIdx.x) ready();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int column = (thread + i * 256) * 4;
      if (column >= WIDTH) continue;
      float4 piece[larger(PIECES, 1)], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < PIECES; ++p) piece[p] = __ldcg((const float4*)(pieces + ((long long)p * rows + row) * WIDTH + column));
#pragma unroll
      for (int p = 0; p < PIECES; ++p) sum.x += piece[p].x, sum.y += piece[p].y, sum.z += piece[p].z, sum.w += piece[p].w;
      const float4 before = widened(current[i]);
      current[i] = narrowed(make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w));
      *(uint2*)(x + (long long)row * WIDTH + column) = current[i];
      const float4 v = value[i] = widened(current[i]);
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
    }
    squares = warp_sum(squares);
    if (thread % 32 == 0) sums[thread / 32] = squares;
    meet_consumers();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) all += sums[i];
    const float scale = 1.0f / sqrtf(all / (float)WIDTH + epsilon);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int column = (thread + i * 256) * 4;
      if (column >= WIDTH) continue;
      const float4 v = value[i];
      const float4 n = widened(narrowed(make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale))), w = widened(weight[i]);
      *(uint2*)(normed + (long long)row * WIDTH + column) = narrowed(make_float4(n.x * w.x, n.y * w.y, n.z * w.z, n.w * w.w));
    }
    if (row + BLOCKS < rows) meet_consumers();
  }
  if (blockIdx.x >= rows) ready();
}

// ---- attention -----------------------------------------------------------------------------------------------------

constexpr int TILES_OF_HEADS = KEY_HEADS * HEAD_TILES;
constexpr int PART = TILE_HEADS * (HEAD_DIM + 2); // of a group that shares a row: tops, sums, mixtures

// The last of the groups that share a row to arrive merges their parts, in the groups' order.
//
// Each thread's fence orders its part before the barrier, and the barrier before the atomic addition of one thread; so
// whoever counts `sharing` groups sees the parts of all. The fence after the addition and the barrier that publishes
// `last` order the reads after it. The count is next used in the next layer, after barriers of all blocks, hence the
// plain reset.
__device__ __forceinline__ void merge_parts(Shared& shared, const Work& work, float* parts, u32* count, u32* last, bf16* out) {
  float* mine = parts + work.rank * PART;
  MEET();
#pragma unroll 1
  for (int i = THREAD; i < work.heads * HEAD_DIM; i += THREADS) __stcg(mine + 2 * TILE_HEADS + i, shared.mixtures(0)[i]);
  if (THREAD < work.heads) {
    __stcg(mine + THREAD, shared.block_top[THREAD]);
    __stcg(mine + TILE_HEADS + THREAD, shared.block_sum[THREAD]);
  }
  __threadfence();
  MEET();
  if (THREAD == 0) {
    const u32 before = atomicAdd(count, 1);
    *last = before == work.sharing - 1;
    __threadfence();
  }
  MEET();
  if (!*last) return;
  if (THREAD == 0) *count = 0;
#pragma unroll 1
  for (int i = THREAD; i < work.heads * HEAD_DIM; i += THREADS) {
    const int head = i / HEAD_DIM;
    float top = NOTHING, sum = 0.0f, mixed = 0.0f, tops[ATTENTION_PARTS], sums[ATTENTION_PARTS], mixtures[ATTENTION_PARTS];
#pragma unroll
    for (int rank = 0; rank < ATTENTION_PARTS; rank++) {
      const bool here = rank < work.sharing;
      tops[rank] = here ? __ldcg(parts + rank * PART + head) : NOTHING;
      sums[rank] = here ? __ldcg(parts + rank * PART + TILE_HEADS + head) : 0.0f;
      mixtures[rank] = here ? __ldcg(parts + rank * PART + 2 * TILE_HEADS + i) : 0.0f;
      top = fmaxf(top, tops[rank]);
    }
#pragma unroll
    for (int rank = 0; rank < ATTENTION_PARTS; rank++) {
      const float factor = power(tops[rank] - top);
      sum = fmaf(factor, sums[rank], sum);
      mixed = fmaf(factor, mixtures[rank], mixed);
    }
    out[i] = (T)(mixed / sum);
  }
}

// Cached tokens per group that shares a row: merging groups costs as much as some tiles.
constexpr int PART_TOKENS = 512;
__device__ __forceinline__ int sharing_of(int tokens) {
  return max(1, min(ATTENTION_PARTS, (tokens + PART_TOKENS - 1) / PART_TOKENS));
}


extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
decode_layers(const __grid_constant__ TensorMap map_normed, const __grid_constant__ TensorMap map_mixed,
              const __grid_constant__ TensorMap map_inner, const Layer* layers, const bf16* embedding, const int* token,
              const bf16* last_norm, const float* cos, const float* sin, const int* table, const int* lengths, bf16* x,
              bf16* normed, bf16* mixed, bf16* inner, float* pieces, float* parts, u32* counts, const uint4* streams,
              const int* drawn, const int* states, uint2* shortlist, u32* shortlisted,
#if STAMPS
              u64* stamps,
#endif
              const __grid_constant__ LayersScalars s) {
  __shared__ alignas(1024) unsigned char memory[REGION + SLOTS * SLOT];
  __shared__ u64 barriers[BARRIERS];
  __shared__ u64 phase_barriers[2];
  __shared__ float row_sums[8];
  __shared__ u32 is_last[2];
  const u32 rank = cluster_rank();
  const Activations activations(shared_address(barriers), shared_address(memory));
  const Weights weights(shared_address(barriers) + 2 * Activations::EMPTY, shared_address(memory) + REGION);
  Phases phases = {counts, shared_address(phase_barriers), shared_address(phase_barriers + 1), 0};
  const int rows = (int)s.rows;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(activations.bar + i * 8, 1);
      barrier_init(activations.bar + Activations::EMPTY + i * 8, 16);
    }
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(weights.bar + i * 8, FETCHERS);
      barrier_init(weights.bar + Weights::EMPTY + i * 8, 8);
    }
    barrier_init(phases.finished, 8);
    barrier_init(phases.opened, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_arrive();
  // Both blocks' barriers are initialised before either block signals or copies to the other.
  cluster_wait();

  // The same value in all lanes, so that the compiler knows that warp groups do not diverge.
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (warp > 8) {
      const int thread = threadIdx.x - 288;
      Weights slot = weights;
#pragma unroll 1
      for (int l = 0; l < LAYERS; ++l) {
        const Layer& layer = layers[l];
        const bf16 *q = layer.q, *k = layer.k, *v = layer.v, *o = layer.o, *gate = layer.gate, *up = layer.up, *down = layer.down;
        fetch_weights<Qkv>(slot, thread, rank, [&](const Qkv& unit, int r) -> const bf16* {
          const int n = unit.first_column + r;
          if (n < QUERIES) return q + (long long)n * WIDTH;
          if (n < QUERIES + KEYS) return k + (long long)(n - QUERIES) * WIDTH;
          return n < QUERIES + 2 * KEYS ? v + (long long)(n - QUERIES - KEYS) * WIDTH : nullptr;
        });
        fetch_weights<Outputs>(slot, thread, rank, [&](const Outputs& unit, int r) -> const bf16* {
          const int n = unit.first_column + r;
          return n < WIDTH ? o + (long long)n * QUERIES : nullptr;
        });
        fetch_weights<Mlp>(slot, thread, rank, [&](const Mlp& unit, int r) -> const bf16* {
          const int n = unit.first_column / 2 + r % (MLP_TILE / 2);
          return n < INNER ? (r < MLP_TILE / 2 ? gate : up) + (long long)n * WIDTH : nullptr;
        });
        fetch_weights<Down>(slot, thread, rank, [&](const Down& unit, int r) -> const bf16* {
          const int n = unit.first_column + r;
          return n < WIDTH ? down + (long long)n * INNER : nullptr;
        });
      }
    } else {
      if (threadIdx.x == 256) {
        Activations stage = activations;
#pragma unroll 1
        for (int l = 0; l < LAYERS; ++l) {
#pragma unroll 1
          for (int i = 0; i < 7; ++i) {
            phases.meet();
            phases.open();
            if (i == 0) fetch_activations<Qkv>(stage, &map_normed, rank);
            if (i == 2) fetch_activations<Outputs>(stage, &map_mixed, rank);
            if (i == 4) fetch_activations<Mlp>(stage, &map_normed, rank);
            if (i == 5) fetch_activations<Down>(stage, &map_inner, rank);
          }
        }
        phases.close();
      }
      __syncwarp();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    Activations stage = activations;
    Weights slot = weights;
    float4* handed = (float4*)(memory + HANDED);
    const float epsilon = (float)s.attention.epsilon;
    const int group = threadIdx.x / THREADS;
    [[maybe_unused]] int ended = 0; // phases
    Shared& shared = ((Shared*)memory)[group];
    // Parts of rows: a group's first item is the same in all layers.
    const int items = rows * TILES_OF_HEADS * ATTENTION_PARTS, own_item = blockIdx.x + group * BLOCKS;
    const auto work_of_item = [&](int item) {
      const int unit = item % (rows * TILES_OF_HEADS), row = unit / TILES_OF_HEADS;
      const int sharing = sharing_of(lengths[row]), part = item / (rows * TILES_OF_HEADS);
      return work_of(row, unit % TILES_OF_HEADS, part, sharing, lengths, table, s.attention.max_blocks);
    };
    Work own_work = {};
    if (own_item < items) own_work = work_of_item(own_item);
    [[maybe_unused]] Shortlists lists = {streams, drawn, states, shortlist, shortlisted, (u32)s.limit, (int)s.vocab};
    if constexpr (SHORTLISTS) lists.start(blockIdx.x * 8 + warp, s.rows);
    const auto end_phase = [&] {
#if STAMPS
      u64 now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
      if (threadIdx.x == 0) stamps[blockIdx.x * (1 + 7 * LAYERS) + ended++] = now;
#endif
      phases.finish();
    };
    const auto opened = [&] { phases.wait(); };
    const auto nothing = [] {};
    const auto own = [&](int row, int column) { return *(const uint2*)(x + (long long)row * WIDTH + column); };
    settle_rows<0>(
        nullptr,
        [&](int row, int column) {
          const int id = token[row];
          const u32 nan = 0x7FC07FC0u;
          return id >= 0 && id < s.vocab ? *(const uint2*)(embedding + (long long)id * WIDTH + column) : make_uint2(nan, nan);
        },
        x, normed, layers[0].input_norm, rows, epsilon, row_sums, nothing);
    end_phase();
#pragma unroll 1
    for (int l = 0; l < LAYERS; ++l) {
      const Layer layer = layers[l]; // read completely here: a read in a phase would delay it
      phases.wait();
      multiply_units<Qkv>(stage, slot, rank, handed, ToPieces<Qkv>{pieces, rows});
      end_phase(), ++phases.phase;

      // The tiles of the cache overwrite those of activations and `handed`: all warps of this block must have read
      // them. The other block of the pair copies activations here again only after the barrier that follows attention.
      meet_consumers();
      const Step step = {pieces, (long long)rows * Qkv::COLUMNS, layer.bias, layer.q_norm, layer.k_norm, cos, sin};
#pragma unroll 1
      for (int item = own_item; item < items; item += BLOCKS * (256 / THREADS)) {
        const Work work = item == own_item ? own_work : work_of_item(item);
        if (work.rank >= work.sharing) continue;
        bf16* out = mixed + output_of(work);
        const bool live = attend(shared, work, step, layer.keys, layer.values, table, out, s.attention, opened);
        const int unit = item % (rows * TILES_OF_HEADS);
        if (ATTENTION_PARTS > 1 && live && work.sharing > 1)
          merge_parts(shared, work, parts + (long long)unit * ATTENTION_PARTS * PART, counts + 32 + unit, is_last + group, out);
        MEET();
      }
      // Groups that had no item have not waited for the opening yet.
      phases.wait();
      end_phase(), ++phases.phase;

      phases.wait();
      multiply_units<Outputs>(stage, slot, rank, handed, ToPieces<Outputs>{pieces, rows});
      end_phase(), ++phases.phase;
      settle_rows<OUT_PIECES>(pieces, own, x, normed, layer.mlp_norm, rows, epsilon, row_sums, opened);
      end_phase(), ++phases.phase;
      phases.wait();
      multiply_units<Mlp>(stage, slot, rank, handed, ToInner{inner, rows});
      end_phase(), ++phases.phase;
      if constexpr (SHORTLISTS) lists.step(LAYERS - l);
      phases.wait();
      multiply_units<Down>(stage, slot, rank, handed, ToPieces<Down>{pieces, rows});
      end_phase(), ++phases.phase;
      const bf16* gain = l + 1 < LAYERS ? layers[l + 1].input_norm : last_norm;
      settle_rows<DOWN_PIECES>(pieces, own, x, normed, gain, rows, epsilon, row_sums, opened);
      end_phase(), ++phases.phase;
    }
  }
  // The other block of the pair may still signal this block's barriers, so neither may exit first.
  __syncthreads();
  cluster_arrive();
  cluster_wait();
}
