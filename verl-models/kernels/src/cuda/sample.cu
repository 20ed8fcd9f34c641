// Draws one token per row from logits with top-k, top-p, min-p and a repetition penalty; see draw.cuh.
//
// Top-k and top-p keep a prefix of the ids by descending logit and ascending id. Its end is found by narrowing an
// interval of logits until its contents fit into shared memory, where they are sorted. Sums are in f64 and in a fixed
// order.
//
// seen: [rows, ceil(vocab / 32)] u32, bit id mod 32 of word id / 32 is set for ids of prompt and response.
// Launch: block 512, grid rows. Reads a row three to five times, all but the first time from L2.

constexpr int SAMPLE_THREADS = 512;
// Ids that are sorted in shared memory.
constexpr int CAPACITY = 2048;
// Looks of a thread in flight: 16 or 24 KB per block.
constexpr int SAMPLE_DEPTH = IS_F32 ? 1 : 3;
// Cuts of an interval of logits per pass.
constexpr int CUTS = 4;

// The largest logit, its lowest id, Σ e^((logit − largest)/T), and the number of ids above −∞.
struct Whole {
    float largest;
    int best;
    double sum;
    int count;
};

__device__ __noinline__ Whole whole(const Row& row, bool processes, const Heat& heat) {
    Softmax softmax;
    softmax.start(LOWEST, heat);
    int count = 0;
    each_look<SAMPLE_THREADS, SAMPLE_DEPTH>(row, 0, row.looks(), processes, [&](int base, const float (&x)[LOOK]) {
        float weight[LOOK], heaviest;
        softmax.add(x, base, heat, weight, heaviest);
#pragma unroll
        for (int i = 0; i < LOOK; i++) count += x[i] > -INFINITE;
    });
    const Ranked best = block_best<SAMPLE_THREADS>(softmax.ranked(row, processes));
    Whole result;
    result.best = best.id;
    result.largest = best.id < 0 ? -INFINITE : float(best.score);
    result.sum = block_sum<SAMPLE_THREADS>(softmax.sum_under(result.largest, heat));
    result.count = block_sum<SAMPLE_THREADS>(count);
    return result;
}

// The end of a prefix by descending logit and ascending id: the last id that is kept.
struct End {
    unsigned key;
    int id;

    __device__ __forceinline__ bool keeps(unsigned other, int its_id) const {
        return other > key || (other == key && its_id <= id);
    }
};

// How far ids are kept: up to a number of ids, or up to a share of the weight.
struct Target {
    bool by_weight;
    int count;
    double weight;

    __device__ __forceinline__ bool reached(int its_count, double its_weight) const {
        return by_weight ? its_weight >= weight : its_count >= count;
    }
};

// The ids in shared memory, most probable first, as key ‖ ~id.
struct List {
    u64 entry[CAPACITY];
    int length;
    int found;
};

__device__ __forceinline__ int id_of(u64 entry) { return int(~unsigned(entry)); }
__device__ __forceinline__ unsigned key_of_entry(u64 entry) { return unsigned(entry >> 32); }

// Weights of the ids of a row under its largest logit.
struct Scale {
    float largest;
    float scale;

    __device__ __forceinline__ float weight(float logit) const { return power((logit - largest) * scale); }
};

// Bitonic, descending; the length is padded to a power of two with 0.
__device__ void sort(List& list) {
    int size = 2;
    while (size < list.length) size *= 2;
    for (int i = list.length + threadIdx.x; i < size; i += SAMPLE_THREADS) list.entry[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += SAMPLE_THREADS) {
                const int low = 2 * i - (i & (step - 1));
                const u64 a = list.entry[low], b = list.entry[low + step];
                if ((a < b) == ((low & run) == 0)) {
                    list.entry[low] = b;
                    list.entry[low + step] = a;
                }
            }
            __syncthreads();
        }
    }
}

// How many of the first `length` entries are needed to reach the target, given what lies above the list.
__device__ int take(List& list, int length, const Target& target, int above, double weight_above, const Scale& scale) {
    if (!target.by_weight) return min(max(target.count - above, 1), length);
    const int each = (length + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    const int begin = min(int(threadIdx.x) * each, length), end = min(begin + each, length);
    double own = 0.0;
    for (int i = begin; i < end; i++) own += double(scale.weight(logit_of(key_of_entry(list.entry[i]))));
    double reached = weight_above + block_before<SAMPLE_THREADS>(own);
    if (threadIdx.x == 0) list.found = length - 1;
    __syncthreads();
    for (int i = begin; i < end; i++) {
        reached += double(scale.weight(logit_of(key_of_entry(list.entry[i]))));
        if (reached >= target.weight) {
            atomicMin(&list.found, i);
            break;
        }
    }
    __syncthreads();
    const int taken = list.found + 1;
    __syncthreads();
    return taken;
}

__device__ double weight_of(const List& list, int length, const Scale& scale) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < length; i += SAMPLE_THREADS) {
        sum += double(scale.weight(logit_of(key_of_entry(list.entry[i]))));
    }
    return block_sum<SAMPLE_THREADS>(sum);
}

// The nth id, counted from 1 in ascending order, whose logit has the key.
__device__ int nth_id(const Row& row, const End& within, unsigned key, int nth, int& result) {
    const int each = (row.looks() + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
    const int begin = int(threadIdx.x) * each, end = min(begin + each, row.looks());
    int before = 0;
    for (int walk = 0; walk < 2; walk++) {
        int own = 0;
        for (int look = begin; look < end; look++) {
            float x[LOOK];
            row.read(look * LOOK, x);
            row.process(look * LOOK, x);
#pragma unroll
            for (int i = 0; i < LOOK; i++) {
                if (key_of(x[i]) != key || !within.keeps(key, look * LOOK + i)) continue;
                own++;
                if (walk == 1 && before + own == nth) result = look * LOOK + i;
            }
        }
        if (walk == 0) before = block_before<SAMPLE_THREADS>(own);
    }
    __syncthreads();
    const int id = result;
    __syncthreads();
    return id;
}

// No key of the look is above the interval.
__device__ __forceinline__ unsigned highest_key(const float (&x)[LOOK]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < LOOK; i++) largest = fmaxf(largest, x[i]);
    // −0 becomes +0.
    return key_of(largest + 0.0f);
}

// The kept ids.
struct Kept {
    End end;
    double weight;
    // Whether the list contains all of them, as its first `length` entries.
    bool listed;
    int length;
};

// Finds where the ids that `within` keeps, `count` in number, reach the target.
__device__ __noinline__ Kept prefix(const Row& row, List& list, const End& within, int count, const Target& target,
                                    const Scale& scale, const Heat& heat) {
    // Keys low..high are examined; above are those from high on.
    u64 low = u64(key_of(-INFINITE)) + 1, high = u64(key_of(scale.largest + 0.0f)) + 1;
    int above = 0;
    double weight_above = 0.0;
    bool is_far = false;
    for (int round = 0; count > CAPACITY && high - low > 1; round++) {
        u64 cut[CUTS];
        int counts[CUTS];
        double weights[CUTS];
#pragma unroll
        for (int j = 0; j < CUTS; j++) {
            // At first where typical models have it, then evenly spaced.
            const float near[CUTS] = {-9.0f, -6.0f, -4.0f, -2.0f}, far[CUTS] = {-25.0f, -18.0f, -14.0f, -11.0f};
            const u64 guess = key_of(scale.largest + (round == 0 ? near[j] : far[j]) * float(heat.temperature));
            const u64 even = low + ((high - low) * (j + 1) + CUTS) / (CUTS + 1);
            cut[j] = round == 0 || (round == 1 && is_far) ? max(guess, low) : even;
            counts[j] = 0;
            weights[j] = 0.0;
        }
        each_look<SAMPLE_THREADS, SAMPLE_DEPTH>(row, 0, row.looks(), true, [&](int base, const float (&x)[LOOK]) {
            if (highest_key(x) < cut[0]) return;
#pragma unroll
            for (int i = 0; i < LOOK; i++) {
                const unsigned key = key_of(x[i]);
                if (key < cut[0] || key >= high || !within.keeps(key, base + i)) continue;
                const double weight = scale.weight(x[i]);
#pragma unroll
                for (int j = 0; j < CUTS; j++) {
                    if (key < cut[j]) continue;
                    counts[j]++;
                    weights[j] += weight;
                }
            }
        });
        // From the highest cut down to the first that reaches the target.
        int count_over = 0;
        double weight_over = 0.0;
        u64 top = high;
        bool reached = false;
#pragma unroll
        for (int j = CUTS - 1; j >= 0; j--) {
            const int its_count = block_sum<SAMPLE_THREADS>(counts[j]);
            const double its_weight = block_sum<SAMPLE_THREADS>(weights[j]);
            if (reached) continue;
            reached = target.reached(above + its_count, weight_above + its_weight);
            if (reached) {
                low = cut[j];
                if (its_count <= CAPACITY) {
                    // Everything from here on fits.
                    count = its_count;
                    top = high;
                    count_over = 0;
                    weight_over = 0.0;
                } else {
                    count = its_count - count_over;
                }
            } else {
                count_over = its_count;
                weight_over = its_weight;
                top = cut[j];
            }
        }
        if (!reached) count -= count_over;
        is_far = !reached;
        high = top;
        above += count_over;
        weight_above += weight_over;
    }
    Kept kept;
    if (count > CAPACITY) {
        // Equal logits.
        const unsigned key = unsigned(low);
        const double weight = scale.weight(logit_of(key));
        double more = target.by_weight ? ceil((target.weight - weight_above) / weight) : double(target.count - above);
        more = fmin(fmax(more, 1.0), double(count));
        kept.end = {key, nth_id(row, within, key, int(more), list.found)};
        kept.weight = weight_above + more * weight;
        kept.listed = false;
        kept.length = 0;
        return kept;
    }
    if (threadIdx.x == 0) list.length = 0;
    __syncthreads();
    each_look<SAMPLE_THREADS, SAMPLE_DEPTH>(row, 0, row.looks(), true, [&](int base, const float (&x)[LOOK]) {
        if (highest_key(x) < low) return;
#pragma unroll
        for (int i = 0; i < LOOK; i++) {
            const unsigned key = key_of(x[i]);
            if (key < low || key >= high || !within.keeps(key, base + i)) continue;
            // In any order: the entries are sorted, and no two are equal.
            const int place = atomicAdd(&list.length, 1);
            if (place < CAPACITY) list.entry[place] = u64(key) << 32 | unsigned(~(base + i));
        }
    });
    __syncthreads();
    sort(list);
    kept.length = take(list, list.length, target, above, weight_above, scale);
    const u64 last = list.entry[kept.length - 1];
    kept.end = {key_of_entry(last), id_of(last)};
    kept.weight = weight_above + weight_of(list, kept.length, scale);
    kept.listed = above == 0;
    return kept;
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    sample(const elem* logits, const unsigned* streams, const int* lengths, const int* states, const int* eos,
           const unsigned* seen, int* token, float* sampling_log_prob, float* log_prob,
           const __grid_constant__ SampleScalars s) {
    __shared__ List list;
    __shared__ uint4 ring[ring_parts(SAMPLE_THREADS, SAMPLE_DEPTH)];
    const u64 index = blockIdx.x;
    if (states[index] != LIVE) return;
    const Heat heat(s);
    const int length = lengths[index];
    Row row = row_of(logits, index, ring, eos, length, s);
    row.penalty = float(s.repetition_penalty);
    row.seen = seen + index * ((s.vocab + 31) / 32);
    const Words words = words_of(streams, index, length);

    const Whole raw = whole(row, false, heat);
    const Whole drawn = row.changes() ? whole(row, true, heat) : raw;
    if (!isfinite(raw.largest) || !isfinite(raw.sum) || !isfinite(drawn.largest) || !isfinite(drawn.sum)) {
        if (threadIdx.x == 0) answer(index, -1, 0.0f, 0.0f, token, sampling_log_prob, log_prob);
        return;
    }
    if (heat.greedy) {
        if (threadIdx.x != 0) return;
        const float full = heat.log_share(to_float(row.logits[drawn.best]), raw.largest, raw.sum);
        answer(index, drawn.best, 0.0f, full, token, sampling_log_prob, log_prob);
        return;
    }
    const Scale scale = {drawn.largest, heat.scale};
    Kept kept = {{0, 0}, drawn.sum, false, 0};
    int count = drawn.count;
    if (s.top_k > 0 && s.top_k < u64(count)) {
        count = int(s.top_k);
        kept = prefix(row, list, kept.end, drawn.count, {false, count, 0.0}, scale, heat);
    }
    if (s.top_p < 1.0) {
        const Target target = {true, 0, s.top_p * kept.weight};
        if (kept.listed) {
            kept.length = take(list, kept.length, target, 0, 0.0, scale);
            const u64 last = list.entry[kept.length - 1];
            kept.end = {key_of_entry(last), id_of(last)};
        } else {
            kept = prefix(row, list, kept.end, count, target, scale, heat);
        }
    }
    Racer racer;
    racer.start();
    Ranked winner = {0.0, -1};
    double mass = 0.0;
    if (kept.listed) {
        for (int i = threadIdx.x; i < kept.length; i += SAMPLE_THREADS) {
            const u64 entry = list.entry[i];
            const float logit = logit_of(key_of_entry(entry));
            const double weight = scale.weight(logit);
            if (weight < s.min_p) continue;
            mass += weight;
            const int id = id_of(entry);
            winner = better(winner, {Racer::exact(id, logit, drawn.largest, heat, words), id});
        }
    } else {
        each_look<SAMPLE_THREADS, SAMPLE_DEPTH>(row, 0, row.looks(), true, [&](int base, const float (&x)[LOOK]) {
            float weight[LOOK], heaviest = 0.0f;
#pragma unroll
            for (int i = 0; i < LOOK; i++) {
                const float its = scale.weight(x[i]);
                const bool keeps = kept.end.keeps(key_of(x[i]), base + i) && double(its) >= s.min_p;
                weight[i] = keeps ? its : 0.0f;
                heaviest = fmaxf(heaviest, weight[i]);
            }
            mass += double((weight[0] + weight[1]) + (weight[2] + weight[3]) +
                           ((weight[4] + weight[5]) + (weight[6] + weight[7])));
            racer.consider(weight, heaviest, base, drawn.largest, row, heat, words);
        });
        winner = racer.winner<SAMPLE_THREADS>(drawn.largest, row, heat, words);
    }
    mass = block_sum<SAMPLE_THREADS>(mass);
    winner = block_best<SAMPLE_THREADS>(winner);
    if (threadIdx.x != 0) return;
    const float sampling = heat.log_share(row.processed(winner.id), drawn.largest, mass);
    const float full = heat.log_share(to_float(row.logits[winner.id]), raw.largest, raw.sum);
    answer(index, winner.id, sampling, full, token, sampling_log_prob, log_prob);
}
