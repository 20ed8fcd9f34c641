// One token a row from logits where no top-k, top-p, min-p or repetition penalty applies; see draw.cuh.
//
// race: each of `splits` blocks of a row finds the largest logit, the sum of weights and the winner of its part, in one
// pass; settle joins the parts. partial: [rows, splits, 4] f64, a Part each.
// Launch: race: block 256, grid (splits, rows), splits ≤ 32, enough that splits · rows is several times the SMs;
// settle: block 32, grid rows. Bytes: one read of the logits; the random words cost more than these, about 20
// instructions an id, except for those that cannot win whatever their word.

constexpr int RACE_THREADS = 256;
// Looks of a thread under way: 16 KB of a block.
constexpr int RACE_DEPTH = IS_F32 ? 2 : 4;

// Of a row's part: largest processed logit, Σ e^((logit − largest)/T), the largest's id, the winner.
struct Part {
    double largest;
    double sum;
    // The winner's score relative to the largest.
    double score;
    int best;
    int winner;
};

extern "C" __global__ void __launch_bounds__(RACE_THREADS, 3)
    race(const elem* logits, const unsigned* streams, const int* lengths, const int* states, const int* eos,
         double* partial, const __grid_constant__ SampleScalars s) {
    __shared__ uint4 ring[ring_parts(RACE_THREADS, RACE_DEPTH)];
    const u64 index = blockIdx.y;
    if (states[index] != LIVE) return;
    const Heat heat(s);
    const int length = lengths[index];
    const Row row = row_of(logits, index, ring, eos, length, s);
    const Words words = words_of(streams, index, length);
    const int share = (row.looks() + int(s.splits) - 1) / int(s.splits);
    const int begin = blockIdx.x * share;
    const int end = min(begin + share, row.looks());
    Softmax softmax;
    Racer racer;
    softmax.start();
    racer.start();
    each_look<RACE_THREADS, RACE_DEPTH>(row, begin, end, true, [&](int base, const float (&x)[LOOK]) {
        float weight[LOOK];
        const float fell = softmax.add(x, base, heat, weight);
        if (heat.greedy) return;
        if (fell != 0.0f) racer.shift(fell, heat);
        racer.consider(x, weight, base, softmax.reference, heat, words);
    });
    const Ranked best = block_best<RACE_THREADS>(softmax.ranked(row, true));
    const float largest = best.id < 0 ? -INFINITE : float(best.score);
    const double sum = block_sum<RACE_THREADS>(softmax.sum_under(largest, heat));
    const Ranked winner =
        block_best<RACE_THREADS>(racer.contender<RACE_THREADS>(softmax.reference, largest, heat, words));
    if (threadIdx.x != 0) return;
    reinterpret_cast<Part*>(partial)[index * s.splits + blockIdx.x] = {double(largest), sum, winner.score, best.id,
                                                                       winner.id};
}

extern "C" __global__ void __launch_bounds__(32)
    settle(const elem* logits, const unsigned* streams, const int* lengths, const int* states, const int* eos,
           const double* partial, int* token, float* sampling_log_prob, float* log_prob,
           const __grid_constant__ SampleScalars s) {
    const u64 index = blockIdx.x;
    if (states[index] != LIVE) return;
    const Heat heat(s);
    const int length = lengths[index];
    const Row row = row_of(logits, index, nullptr, eos, length, s);
    const Words words = words_of(streams, index, length);
    Part part = {-double(INFINITE), 0.0, 0.0, -1, -1};
    if (threadIdx.x < s.splits) part = reinterpret_cast<const Part*>(partial)[index * s.splits + threadIdx.x];
    const Ranked best = warp_best({part.largest, part.best});
    const float largest = best.id < 0 ? -INFINITE : float(best.score);
    // A part without a finite logit has the sum 0, or NaN.
    double sum = part.sum;
    if (sum != 0.0 && part.largest != double(largest)) sum *= exp((part.largest - double(largest)) * heat.inverse);
    sum = warp_sum(sum);
    Ranked winner = {part.score + (part.largest - double(largest)) * heat.inverse, part.winner};
    const double leading = warp_best(winner).score;
    const bool contends = winner.id >= 0 && winner.score >= leading - 2.0 * Racer::DOUBT;
    if (!contends) winner.id = -1;
    if (warp_sum(int(contends)) > 1 && contends) {
        winner.score = Racer::exact(winner.id, to_float(row.logits[winner.id]), largest, heat, words);
    }
    winner = warp_best(winner);

    // Forbidden ends count in the model's own softmax.
    float raw_largest = largest;
    double raw = sum;
    if (row.forbidden > 0) {
        float end = -INFINITE;
        if (int(threadIdx.x) < row.forbidden) {
            const int id = eos[threadIdx.x];
            if (id >= 0 && id < row.vocab) end = to_float(row.logits[id]);
        }
        raw_largest = fmaxf(largest, warp_max(end));
        raw = end == -INFINITE ? 0.0 : exp((double(end) - double(raw_largest)) * heat.inverse);
        raw = warp_sum(raw) + sum * exp((double(largest) - double(raw_largest)) * heat.inverse);
    }
    if (threadIdx.x != 0) return;
    const bool finite = isfinite(largest) && isfinite(sum) && isfinite(raw_largest) && isfinite(raw);
    const int id = !finite ? -1 : heat.greedy ? best.id : winner.id;
    const float logit = id < 0 ? 0.0f : to_float(row.logits[id]);
    answer(index, id, heat.greedy ? 0.0f : heat.log_share(logit, largest, sum), heat.log_share(logit, raw_largest, raw),
           token, sampling_log_prob, log_prob);
}
