// How a token is drawn from a row of logits: random words, the processed row, its softmax and the Gumbel-max race.
// Compiled after rowwise.cuh and philox.cuh, before race.cu, sample.cu or advance.cu.
//
// A token is the argmax of (logit − max) / T + gumbel over the kept ids, the lowest id among equals, where gumbel is
// −ln(−ln u) of word (id mod 4) of philox(counter = [id / 4, position, high₀, high₁], key): the CPU's draw. Screens in
// f32 find the few ids that can win; if the margin is less than the f32 error, f64 decides, as on the CPU.
// Order: repetition penalty and forbidden ends, temperature, top-k, top-p, min-p, renormalise.
//
// Buffers of race.cu and sample.cu:
//   logits: [rows, vocab]
//   streams: [rows, 4] u32, key₀, key₁, high₀, high₁ of the row's stream
//   lengths: [rows] i32, tokens of the response so far: the position of the draw
//   states: [rows] i32, see State; rows that are not live are not changed
//   eos: [eos_count] i32, distinct, at most 32
//   token: [rows] i32, −1 if logits are not finite
//   sampling_log_prob: [rows] f32, under the sampling distribution, 0 when greedy
//   log_prob: [rows] f32, under the full softmax of the model's own logits / T (T = 1 when greedy)
// Limits: vocab ≤ 2³⁰; logits above −10³⁰, or −∞; T above 0, and at least 10⁻³⁸ if logits are subnormal; buffers
// aligned to 16 bytes; a vocab that is a multiple of 8 is read 16 bytes at a time. Buffers that the settings do not use
// may have one element.
// element.

// Why a row ended, if it has.
enum State { LIVE = 0, EOS = 1, STOP = 2, LENGTH = 3, NOT_FINITE = 4 };

// Ids that a thread examines at once: a look.
constexpr int LOOK = 8;
// As in the scores of a vocabulary: a reference moves when a logit exceeds it by more than this many units of T.
constexpr float MARGIN = 22.0f;

struct SampleScalars {
    u64 rows;
    u64 vocab;
    u64 splits;
    u64 eos_count;
    // End tokens are forbidden at positions below this.
    u64 min_new_tokens;
    // 0 keeps all.
    u64 top_k;
    // 0 is greedy.
    double temperature;
    double top_p;
    double min_p;
    double repetition_penalty;
    // Limit of the rows' shortlists; 0 if there are none.
    u64 limit;
};

// The random words of a draw.
struct Words {
    uint4 stream;
    unsigned position;

    // The words of the LOOK ids from `base` on, a multiple of LOOK.
    __device__ __forceinline__ void look(int base, unsigned (&word)[LOOK]) const {
        uint4 four[LOOK / 4];
#pragma unroll
        for (int i = 0; i < LOOK / 4; i++) four[i] = make_uint4(unsigned(base) / 4 + i, position, stream.z, stream.w);
        philox(four, stream.x, stream.y);
#pragma unroll
        for (int i = 0; i < LOOK / 4; i++) {
            word[4 * i] = four[i].x;
            word[4 * i + 1] = four[i].y;
            word[4 * i + 2] = four[i].z;
            word[4 * i + 3] = four[i].w;
        }
    }

    __device__ __forceinline__ unsigned word(int id) const { return word_of(stream, position, id); }

    static __device__ __noinline__ unsigned word_of(uint4 stream, unsigned position, int id) {
        uint4 four[1] = {make_uint4(unsigned(id) / 4, position, stream.z, stream.w)};
        philox(four, stream.x, stream.y);
        const unsigned low = id & 1 ? four[0].y : four[0].x;
        const unsigned high = id & 1 ? four[0].w : four[0].z;
        return id & 2 ? high : low;
    }
};

__device__ __noinline__ double gumbel(unsigned word) {
    return -log(-log((double(word) + 0.5) * (1.0 / 4294967296.0)));
}

// The same in f32, with an error of about 10⁻⁶ units.
__device__ __forceinline__ float gumbel_f32(unsigned word) {
    const float below = (float(word) + 0.5f) * (1.0f / 4294967296.0f);
    const float above = (float(~word) + 0.5f) * (1.0f / 4294967296.0f);
    return -logf(above < 0.5f ? -log1pf(-above) : -logf(below));
}

// Orders like the numbers, with −0 before +0.
__device__ __forceinline__ unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ float warp_max(float x) {
    return logit_of(__reduce_max_sync(ALL_LANES, key_of(x)));
}

// An id and its sort key; id −1 loses to all others.
struct Ranked {
    double score;
    int id;
};

__device__ __forceinline__ Ranked better(Ranked a, Ranked b) {
    const bool takes_b = a.id < 0 || (b.id >= 0 && (b.score > a.score || (b.score == a.score && b.id < a.id)));
    return takes_b ? b : a;
}

__device__ __forceinline__ Ranked warp_best(Ranked a) {
    for (int step = 16; step > 0; step /= 2) {
        a = better(a, {__shfl_xor_sync(ALL_LANES, a.score, step), __shfl_xor_sync(ALL_LANES, a.id, step)});
    }
    return a;
}

template <int THREADS> __device__ Ranked block_best(Ranked a) {
    __shared__ Ranked parts[THREADS / 32];
    a = warp_best(a);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = a;
    __syncthreads();
    a = parts[0];
    for (int i = 1; i < THREADS / 32; i++) a = better(a, parts[i]);
    return a;
}

template <int THREADS> __device__ float block_max(float x) {
    __shared__ float parts[THREADS / 32];
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    for (int i = 1; i < THREADS / 32; i++) x = fmaxf(x, parts[i]);
    return x;
}

template <int THREADS, typename N> __device__ N block_sum(N x) {
    __shared__ N parts[THREADS / 32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    for (int i = 1; i < THREADS / 32; i++) x += parts[i];
    return x;
}

// Sum over the preceding threads.
template <int THREADS, typename N> __device__ N block_before(N x) {
    __shared__ N parts[THREADS / 32];
    N sum = x;
    for (int step = 1; step < 32; step *= 2) {
        const N other = __shfl_up_sync(ALL_LANES, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) parts[threadIdx.x / 32] = sum;
    N before = __shfl_up_sync(ALL_LANES, sum, 1);
    if (threadIdx.x % 32 == 0) before = N(0);
    __syncthreads();
    N base = N(0);
    for (int i = 0; i < int(threadIdx.x) / 32; i++) base += parts[i];
    return base + before;
}

// Scalars of a draw.
struct Heat {
    bool greedy;
    double temperature;
    double inverse;
    // In f32: 1/T, for the exponent of power, and the margin of a reference in logits.
    float inverse_f32;
    float scale;
    float margin;

    __device__ __forceinline__ explicit Heat(const SampleScalars& s) {
        greedy = s.temperature == 0.0;
        temperature = greedy ? 1.0 : s.temperature;
        inverse = fmin(1.0 / temperature, 1.7976931348623157e308);
        // Not 0, which would turn −∞ into NaN.
        inverse_f32 = fmaxf(float(fmin(1.0 / temperature, 3.4028234663852886e38)), 1.4012985e-45f);
        scale = fminf(inverse_f32 * POWER_SCALE, 3.4028234663852886e38f);
        margin = float(MARGIN * temperature);
    }

    // ln(e^((logit − max)/T) / sum).
    __device__ __forceinline__ float log_share(float logit, float max, double sum) const {
        return float((double(logit) - double(max)) / temperature - log(sum));
    }
};

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// LOOK logits in memory order.
struct Look {
    // The bits of −∞.
    static constexpr unsigned NOTHING = IS_F32 ? 0xff800000u : 0xff80u;
    uint4 part[LOOK / VEC];

    static __device__ __forceinline__ uint4 nothing() {
        constexpr unsigned bits = IS_F32 ? NOTHING : NOTHING << 16 | NOTHING;
        return make_uint4(bits, bits, bits, bits);
    }

    // The bits of VEC elements in memory order.
    static __device__ __forceinline__ uint4 pack(const unsigned* bits) {
        if constexpr (IS_F32) {
            return make_uint4(bits[0], bits[1], bits[2], bits[3]);
        } else {
            return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                              bits[6] | bits[7] << 16);
        }
    }

    __device__ __forceinline__ void get(float (&x)[LOOK]) const {
#pragma unroll
        for (int i = 0; i < LOOK / VEC; i++) {
            float some[VEC];
            unpack(part[i], some);
#pragma unroll
            for (int j = 0; j < VEC; j++) x[i * VEC + j] = some[j];
        }
    }
};

// Copies 16 bytes into shared memory asynchronously. Copies are awaited in groups, oldest first.
__device__ __forceinline__ void copy_ahead(unsigned to, const elem* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 read_place(unsigned place) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place)
                 : "memory");
    return x;
}

__device__ __forceinline__ void write_place(unsigned place, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last LEFT groups of the thread have arrived.
template <int LEFT> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// The processed logits of a row.
struct Row {
    const elem* logits;
    // Shared memory for looks that are loaded ahead.
    uint4* ring;
    int vocab;
    bool aligned;
    const unsigned* seen;
    float penalty;
    const int* eos;
    // Forbidden end tokens.
    int forbidden;

    __device__ __forceinline__ int looks() const { return (vocab + LOOK - 1) / LOOK; }

    // The logits from id `base` on, a multiple of LOOK; −∞ past the vocabulary.
    __device__ __forceinline__ Look fetch(int base) const {
        Look look;
        if (aligned && base < vocab) {
#pragma unroll
            for (int i = 0; i < LOOK / VEC; i++) look.part[i] = *reinterpret_cast<const uint4*>(logits + base + i * VEC);
        } else {
            unsigned bits[LOOK];
#pragma unroll
            for (int i = 0; i < LOOK; i++) bits[i] = base + i < vocab ? bits_of(logits[base + i]) : Look::NOTHING;
#pragma unroll
            for (int i = 0; i < LOOK / VEC; i++) look.part[i] = Look::pack(bits + i * VEC);
        }
        return look;
    }

    __device__ __forceinline__ void read(int base, float (&x)[LOOK]) const { fetch(base).get(x); }

    __device__ __forceinline__ void process(int base, float (&x)[LOOK]) const {
        if (penalty != 1.0f && base < vocab) {
            const unsigned bits = seen[base / 32] >> (base % 32);
#pragma unroll
            for (int i = 0; i < LOOK; i++) {
                if (bits >> i & 1) x[i] = penalised(x[i]);
            }
        }
#pragma unroll 1
        for (int j = 0; j < forbidden; j++) {
            const int at = eos[j] - base;
            if (at < 0 || at >= LOOK) continue;
#pragma unroll
            for (int i = 0; i < LOOK; i++) x[i] = i == at ? -INFINITE : x[i];
        }
    }

    // Whether `process` does anything.
    __device__ __forceinline__ bool changes() const { return penalty != 1.0f || forbidden > 0; }

    __device__ __forceinline__ float penalised(float x) const { return x > 0.0f ? x / penalty : x * penalty; }

    // The processed logit of an id; −∞ if it must not be drawn.
    __device__ __forceinline__ float drawable(int id) const {
#pragma unroll 1
        for (int j = 0; j < forbidden; j++) {
            if (eos[j] == id) return -INFINITE;
        }
        return processed(id);
    }

    // The processed logit of an id that may be drawn.
    __device__ __forceinline__ float processed(int id) const {
        const float x = to_float(logits[id]);
        return penalty != 1.0f && (seen[id / 32] >> (id % 32) & 1) ? penalised(x) : x;
    }
};

__device__ __forceinline__ Row row_of(const elem* logits, u64 row, uint4* ring, const int* eos, int length,
                                      const SampleScalars& s) {
    Row r;
    r.ring = ring;
    r.logits = logits + row * s.vocab;
    r.vocab = int(s.vocab);
    r.aligned = s.vocab % LOOK == 0;
    r.seen = nullptr;
    r.penalty = 1.0f;
    r.eos = eos;
    r.forbidden = u64(length) < s.min_new_tokens ? int(s.eos_count) : 0;
    return r;
}

__device__ __forceinline__ Words words_of(const unsigned* streams, u64 row, int length) {
    return {reinterpret_cast<const uint4*>(streams)[row], unsigned(length)};
}

// 16-byte parts of a ring of `depth` looks per thread.
__device__ constexpr int ring_parts(int threads, int depth) { return threads * depth * (LOOK / VEC); }

// Calls f(base, logits) for the looks `begin`..`end`, whole warps at a time; lanes past the end see −∞. A thread has
// DEPTH looks in flight in its own slots of the ring.
template <int THREADS, int DEPTH, typename F>
__device__ __forceinline__ void each_look(const Row& row, int begin, int end, bool processes, F f) {
    constexpr int STRIDE = THREADS * LOOK;
    constexpr unsigned PART = THREADS * 16, SLOT = PART * (LOOK / VEC);
    const int last = end * LOOK < row.vocab ? end * LOOK : row.vocab;
    int first = (begin + int(threadIdx.x) / 32 * 32) * LOOK;
    int own = first + int(threadIdx.x) % 32 * LOOK;
    const unsigned ring = unsigned(__cvta_generic_to_shared(row.ring + threadIdx.x));
    const auto load_ahead = [&](int base, unsigned place) {
#pragma unroll
        for (int i = 0; i < LOOK / VEC; i++) {
            if (base < last) {
                copy_ahead(place + i * PART, row.logits + base + i * VEC);
            } else {
                write_place(place + i * PART, Look::nothing());
            }
        }
        end_group();
    };
    if (row.aligned) {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) load_ahead(own + slot * STRIDE, ring + slot * SLOT);
    }
    const bool changes = processes && row.changes();
    unsigned place = ring;
#pragma unroll 1
    for (; first < last; first += STRIDE, own += STRIDE) {
        Look look;
        if (row.aligned) {
            wait_for_groups<DEPTH - 1>();
#pragma unroll
            for (int i = 0; i < LOOK / VEC; i++) look.part[i] = read_place(place + i * PART);
        } else {
            look = row.fetch(own < last ? own : row.vocab);
        }
        float x[LOOK];
        look.get(x);
        if (changes) row.process(own, x);
        f(own, x);
        // The look's logits have been used, so its slot is free.
        if (row.aligned) {
            load_ahead(own + DEPTH * STRIDE, place);
            place = place == ring + (DEPTH - 1) * SLOT ? ring : place + SLOT;
        }
    }
}

// Running sum of e^((logit − reference)/T) and the look with the best logit; the reference is shared by the warp.
struct Softmax {
    float reference;
    float limit;
    float sum;
    float best;
    int at;

    __device__ __forceinline__ void start(float first, const Heat& heat) {
        reference = first;
        limit = first == LOWEST ? LOWEST : first + heat.margin;
        sum = 0.0f;
        best = first == LOWEST ? -INFINITE : first;
        at = -1;
    }

    // Adds logits; outputs their weights and the largest of these; returns by how much the reference fell, in logits.
    __device__ __forceinline__ float add(const float (&x)[LOOK], int base, const Heat& heat, float (&weight)[LOOK],
                                         float& heaviest) {
        float largest = x[0];
#pragma unroll
        for (int i = 1; i < LOOK; i++) largest = fmaxf(largest, x[i]);
        if (largest > best) {
            best = largest;
            at = base;
        }
        float fell = 0.0f;
        if (__any_sync(ALL_LANES, largest > limit)) {
            const float warps = warp_max(largest);
            fell = reference - warps;
            sum *= power(fell * heat.scale);
            reference = warps;
            limit = warps + heat.margin;
        }
#pragma unroll
        for (int i = 0; i < LOOK; i++) weight[i] = power((x[i] - reference) * heat.scale);
        heaviest = power((largest - reference) * heat.scale);
        sum += (weight[0] + weight[1]) + (weight[2] + weight[3]) + ((weight[4] + weight[5]) + (weight[6] + weight[7]));
        return fell;
    }

    // The thread's best logit and its lowest id.
    __device__ __forceinline__ Ranked ranked(const Row& row, bool processes) const {
        if (at < 0) return {0.0, -1};
        float x[LOOK];
        row.read(at, x);
        if (processes) row.process(at, x);
        int id = at;
#pragma unroll
        for (int i = LOOK - 1; i >= 0; i--) id = x[i] == best ? at + i : id;
        return {double(best), id};
    }

    // The thread's sum relative to another largest logit.
    __device__ __forceinline__ double sum_under(float largest, const Heat& heat) const {
        if (sum == 0.0f) return 0.0;
        return double(sum) * exp((double(reference) - double(largest)) * heat.inverse);
    }
};

// The thread's leader of the Gumbel-max race, and the warp's bar.
//
// An id of weight w = e^x can only beat the score b when −ln u < e^(x − b); since 1 − u ≤ −ln u, only when
// 1 − u < w e^(−b), that is when the complement of its word is below 2³² w e^(−b).
struct Racer {
    // Much more than the f32 error of the leaders' scores.
    static constexpr float DOUBT = 1e-3f;
    // Relative to the reference, in units of T.
    float score;
    int id;
    // 2³² e^(−b) with slack, b the best score of the warp, or of the shortlist.
    float bar;
    // The best score of the shortlist, and the complement below which all words are on it; the smallest complement
    // counts as ½.
    float known;
    float floor;

    __device__ __forceinline__ void start() {
        score = known = -INFINITE;
        id = -1;
        bar = INFINITE;
        floor = 0.5f;
    }

    // Takes the best score of a shortlist, and its leader if the warp is to lead with it; returns the reference for
    // both, the largest logit on the list.
    __device__ __forceinline__ float learn(const uint2* list, unsigned length, unsigned limit, bool leads, const Row& row,
                                           const Heat& heat, const Words& words) {
        constexpr int EACH = SHORTLIST / 32;
        uint2 entry[EACH];
        float x[EACH], reference = -INFINITE;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const unsigned at = threadIdx.x % 32 + 32 * i;
            entry[i] = at < length ? list[at] : make_uint2(0u, 0u);
            x[i] = at < length ? row.drawable(int(entry[i].x)) : -INFINITE;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) reference = fmaxf(reference, x[i]);
        reference = warp_max(reference);
        floor = __uint2float_rd(limit);
        if (reference == -INFINITE) return LOWEST;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float above = (x[i] - reference) * heat.inverse_f32;
            if (above > -INFINITE) challenge(int(entry[i].x), above, entry[i].y, reference, row, heat, words);
        }
        __syncwarp();
        known = warp_max(score);
        if (!leads) {
            score = -INFINITE;
            id = -1;
        }
        raise_bar();
        return reference;
    }

    __device__ __forceinline__ void raise_bar() {
        const float best = fmaxf(warp_max(score), known);
        bar = exp2_fast(fmaf(best, -1.4426950408889634f, 32.0f)) * 1.001f;
    }

    // Adjusts after the reference fell by `fell` logits.
    __device__ __forceinline__ void shift(float fell, const Heat& heat) {
        if (id >= 0) score += fell * heat.inverse_f32;
        known += fell * heat.inverse_f32;
        raise_bar();
    }

    // `heaviest` is the largest of the weights, which are relative to `reference`.
    __device__ __forceinline__ void consider(const float (&weight)[LOOK], float heaviest, int base, float reference,
                                             const Row& row, const Heat& heat, const Words& words) {
        unsigned word[LOOK];
        // Whether an id with the largest weight and the largest word could win.
        bool near = heaviest * bar > floor;
        if (near) {
            words.look(base, word);
            unsigned highest = word[0];
#pragma unroll
            for (int i = 1; i < LOOK; i++) highest = max(highest, word[i]);
            near = heaviest * bar > float(~highest);
        }
        if (!__any_sync(ALL_LANES, near)) return;
        // The most promising id first, after which hardly another passes the bar. The promise is w / (1 − u).
        unsigned left = near ? (1u << LOOK) - 1 : 0;
        while (true) {
            float promise = 0.0f, its_weight = 0.0f;
            unsigned its_word = 0;
            int at = 0;
#pragma unroll
            for (int i = 0; i < LOOK; i++) {
                const float its = __fdividef(weight[i], float(~word[i]) + 0.5f);
                const bool better = (left >> i & 1) && its > promise;
                promise = better ? its : promise;
                its_weight = better ? weight[i] : its_weight;
                its_word = better ? word[i] : its_word;
                at = better ? i : at;
            }
            if (!(promise * bar > 1.0f)) left = 0;
            if (!__any_sync(ALL_LANES, left != 0)) return;
            if (left != 0) challenge(base + at, logf(its_weight), its_word, reference, row, heat, words);
            left &= ~(1u << at);
            __syncwarp();
            raise_bar();
        }
    }

    // Challenges the leader with an id whose logit is this many units of T above the reference.
    __device__ __forceinline__ void challenge(int other, float above, unsigned its_word, float reference, const Row& row,
                                              const Heat& heat, const Words& words) {
        const float its_score = above + gumbel_f32(its_word);
        const float doubt = 1e-4f + 1e-6f * (fabsf(above) + fabsf(score));
        bool wins = its_score > score;
        if (id >= 0 && fabsf(its_score - score) <= doubt) {
            const double its = exact(other, row.processed(other), reference, heat, words);
            const double own = exact(id, row.processed(id), reference, heat, words);
            wins = its > own || (its == own && other < id);
        }
        if (!wins) return;
        score = its_score;
        id = other;
    }

    static __device__ __forceinline__ double exact(int id, float logit, float reference, const Heat& heat,
                                                   const Words& words) {
        return (double(logit) - double(reference)) * heat.inverse + gumbel(words.word(id));
    }

    // The warp's leader with its score relative to the reference: an exact score where several lanes are nearly equal.
    __device__ __forceinline__ Ranked leader(float reference, const Row& row, const Heat& heat,
                                             const Words& words) const {
        return first_of(id, score, warp_max(score), reference, row, heat, words);
    }

    // The leader of all warps of the block, which share a reference.
    template <int THREADS>
    __device__ __forceinline__ Ranked winner(float reference, const Row& row, const Heat& heat,
                                             const Words& words) const {
        __shared__ Ranked leaders[THREADS / 32];
        const Ranked own = leader(reference, row, heat, words);
        if (threadIdx.x % 32 == 0) leaders[threadIdx.x / 32] = own;
        __syncthreads();
        const int lane = threadIdx.x % 32;
        const Ranked its = lane < THREADS / 32 ? leaders[lane] : Ranked{0.0, -1};
        const float its_score = its.id < 0 ? -INFINITE : float(its.score);
        return first_of(its.id, its_score, warp_max(its_score), reference, row, heat, words);
    }

    // The id with the highest score among a warp's ids, whose f32 scores are approximate; −1 is none.
    static __device__ __forceinline__ Ranked first_of(int id, float score, float best, float reference, const Row& row,
                                                      const Heat& heat, const Words& words) {
        const bool contends = id >= 0 && score >= best - DOUBT;
        const unsigned contenders = __ballot_sync(ALL_LANES, contends);
        if (contenders == 0) return {0.0, -1};
        if (__popc(contenders) == 1) {
            const int lane = __ffs(int(contenders)) - 1;
            return {double(best), __shfl_sync(ALL_LANES, id, lane)};
        }
        Ranked own = {0.0, -1};
        if (contends) own = {exact(id, row.processed(id), reference, heat, words), id};
        return warp_best(own);
    }
};

// Writes the drawn token; id −1 if logits are not finite.
__device__ __forceinline__ void answer(u64 row, int id, float sampling, float full, int* token, float* sampling_log_prob,
                                       float* log_prob) {
    token[row] = id;
    sampling_log_prob[row] = id < 0 ? 0.0f : sampling;
    log_prob[row] = id < 0 ? 0.0f : full;
}
