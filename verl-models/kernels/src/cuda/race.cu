// Draws one token per row from logits without top-k, top-p, min-p or repetition penalty; see draw.cuh.
//
// Each of `splits` blocks of a row finds the largest logit, the sum of weights and the winner of its part, in one pass;
// the last block to finish joins the parts.
// With `limit`, the ids on a row's shortlist (philox.cuh) race first: the words of all other ids can hardly beat the
// best of these, so they are computed only where the logit is large enough.
// partial: [rows, splits, 4] f64, a Part each; ended: [rows] u32, blocks of a row that have finished, 0 between
// launches; shortlist: [rows, SHORTLIST] (id, word), in any order; shortlisted: [rows] u32, their number, reset to 0
// after a draw. Launch: block 256, grid (splits, rows), splits ≤ 32, enough that splits · rows is several times the
// SMs. Bytes: one read of the logits; without shortlists the random words cost more than that, about 20 instructions
// per id, except for ids that cannot win with any word.

constexpr int RACE_THREADS = 256;
// Looks of a thread in flight: 16 KB per block.
constexpr int RACE_DEPTH = IS_F32 ? 2 : 4;

// For a row's part: largest processed logit, Σ e^((logit − largest)/T), the id of the largest, the winner.
struct Part {
    double largest;
    double sum;
    // The winner's score relative to the largest.
    double score;
    // Only of a greedy draw.
    int best;
    int winner;
};

// A warp's results for the part; the sum and the score are relative to its reference.
struct Found {
    float reference;
    float largest;
    int best;
    double sum;
    Ranked leader;
};

// Joins the parts of a row; called by one warp.
__device__ __forceinline__ void settle(u64 index, const Row& row, const Heat& heat, const Words& words, const Part* parts,
                                       int splits, int* token, float* sampling_log_prob, float* log_prob) {
    const int lane = threadIdx.x % 32;
    Part part = {-double(INFINITE), 0.0, 0.0, -1, -1};
    // From L2, where the other blocks' stores are visible.
    if (lane < splits) {
        const double2* from = reinterpret_cast<const double2*>(parts + lane);
        const double2 low = __ldcg(from), high = __ldcg(from + 1);
        const long long ids = __double_as_longlong(high.y);
        part = {low.x, low.y, high.x, int(ids), int(ids >> 32)};
    }
    const float largest = warp_max(float(part.largest));
    // A part without a finite logit has the sum 0, or NaN.
    double sum = part.sum;
    if (sum != 0.0 && part.largest != double(largest)) sum *= exp((part.largest - double(largest)) * heat.inverse);
    sum = warp_sum(sum);
    Ranked winner;
    if (heat.greedy) {
        winner = warp_best({part.largest, part.best});
    } else {
        const double fall = (part.largest - double(largest)) * heat.inverse;
        const float score = part.winner < 0 ? -INFINITE : float(part.score + fall);
        winner = Racer::first_of(part.winner, score, warp_max(score), largest, row, heat, words);
    }

    // Forbidden end tokens count in the model's own softmax.
    float raw_largest = largest;
    double raw = sum;
    if (row.forbidden > 0) {
        float end = -INFINITE;
        if (lane < row.forbidden) {
            const int id = row.eos[lane];
            if (id >= 0 && id < row.vocab) end = to_float(row.logits[id]);
        }
        raw_largest = fmaxf(largest, warp_max(end));
        raw = end == -INFINITE ? 0.0 : exp((double(end) - double(raw_largest)) * heat.inverse);
        raw = warp_sum(raw) + sum * exp((double(largest) - double(raw_largest)) * heat.inverse);
    }
    if (lane != 0) return;
    const bool finite = isfinite(largest) && isfinite(sum) && isfinite(raw_largest) && isfinite(raw);
    const int id = finite ? winner.id : -1;
    const float logit = id < 0 ? 0.0f : to_float(row.logits[id]);
    answer(index, id, heat.greedy ? 0.0f : heat.log_share(logit, largest, sum), heat.log_share(logit, raw_largest, raw),
           token, sampling_log_prob, log_prob);
}

extern "C" __global__ void __launch_bounds__(RACE_THREADS, 3)
    race(const elem* logits, const unsigned* streams, const int* lengths, const int* states, const int* eos,
         double* partial, unsigned* ended, const uint2* shortlist, unsigned* shortlisted, int* token,
         float* sampling_log_prob, float* log_prob, const __grid_constant__ SampleScalars s) {
    constexpr int WARPS = RACE_THREADS / 32;
    __shared__ uint4 ring[ring_parts(RACE_THREADS, RACE_DEPTH)];
    __shared__ Found found[WARPS];
    const u64 index = blockIdx.y;
    // Requested at once.
    const int state = states[index], length = lengths[index];
    const Words words = words_of(streams, index, length);
    const unsigned listed = s.limit > 0 ? shortlisted[index] : SHORTLIST + 1;
    if (state != LIVE) return;
    const Heat heat(s);
    const Row row = row_of(logits, index, ring, eos, length, s);
    const int share = (row.looks() + int(s.splits) - 1) / int(s.splits);
    const int begin = blockIdx.x * share;
    const int end = min(begin + share, row.looks());
    Softmax softmax;
    Racer racer;
    racer.start();
    float first = LOWEST;
    if (!heat.greedy && listed <= SHORTLIST) {
        const bool leads = blockIdx.x == 0 && threadIdx.x < 32;
        first = racer.learn(shortlist + index * SHORTLIST, listed, unsigned(s.limit), leads, row, heat, words);
    }
    softmax.start(first, heat);
    each_look<RACE_THREADS, RACE_DEPTH>(row, begin, end, true, [&](int base, const float (&x)[LOOK]) {
        float weight[LOOK], heaviest;
        const float fell = softmax.add(x, base, heat, weight, heaviest);
        if (heat.greedy) return;
        if (fell != 0.0f) racer.shift(fell, heat);
        racer.consider(weight, heaviest, base, softmax.reference, row, heat, words);
    });

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float reference = softmax.reference, highest = warp_max(softmax.best);
    int best = -1;
    if (heat.greedy) best = warp_best(softmax.ranked(row, true)).id;
    const double summed = warp_sum(double(softmax.sum));
    const Ranked leader = racer.leader(reference, row, heat, words);
    if (lane == 0) found[warp] = {reference, highest, best, summed, leader};
    __syncthreads();
    if (warp != 0) return;
    Found own = {LOWEST, -INFINITE, -1, 0.0, {0.0, -1}};
    if (lane < WARPS) own = found[lane];
    const float largest = warp_max(own.largest);
    if (heat.greedy) best = warp_best({double(own.largest), own.best}).id;
    const double fall = (double(own.reference) - double(largest)) * heat.inverse;
    const double sum = warp_sum(own.sum == 0.0 ? 0.0 : own.sum * exp(fall));
    const float score = own.leader.id < 0 ? -INFINITE : float(own.leader.score + fall);
    const Ranked winner = Racer::first_of(own.leader.id, score, warp_max(score), largest, row, heat, words);
    Part* parts = reinterpret_cast<Part*>(partial) + index * s.splits;
    unsigned before = 0;
    if (lane == 0) {
        parts[blockIdx.x] = {double(largest), sum, winner.score, best, winner.id};
        __threadfence();
        before = atomicAdd(ended + index, 1u);
        __threadfence();
    }
    if (__shfl_sync(ALL_LANES, before, 0) + 1 < unsigned(s.splits)) return;
    if (lane == 0) {
        ended[index] = 0;
        if (s.limit > 0) shortlisted[index] = 0;
    }
    __syncwarp();
    settle(index, row, heat, words, parts, int(s.splits), token, sampling_log_prob, log_prob);
}
