// Scores of tokens from logits in one pass, and the gradient of the logits in place.
//
//   z = logits / T;  log π = z_y − log Σ_v e^{z_v};  H = log Σ_v e^{z_v} − Σ_v p_v z_v;  Σ π² = Σ_v p_v²
//   dlogits = (g_π (onehot(y) − p) − g_H p (log p + H)) / T
//
// The sums run over e^{(logit − reference)/T}. A thread's reference is one of its largest logits so far. It moves only
// when a logit is more than MARGIN above it (in units of T), for which f32 has room, so that almost no step pays for a
// move. The largest logit and log Σ_v e^{z_v − max z} are kept apart, because a large logit would absorb the log's
// digits.
//
// Shapes: logits: [rows, vocab], the rows `first`.. of `tokens` tokens; targets: [tokens] i32, each below vocab;
// temperature: [1] f32, positive; scores: [5, tokens] f32: log π, H, Σ π², max z, log Σ e^{z − max z};
// best: [tokens] i32, the lowest id with the largest logit; gradients: [2, tokens] f32: of log π and of H.
// Launch: block 256. score_rows: grid rows. score_rows_backward: grid (ceil(vocab / (VEC · 1024)), min(rows, 65535)).
// Bytes: one read of the logits; backward one read and one write. Any vocab and row alignment (accesses of 16 bytes
// between an unaligned head and tail); the buffer itself is aligned to an element.

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// 16-byte accesses of a thread in flight.
constexpr int AHEAD = 4;
constexpr float MARGIN = 22.0f;

struct VocabScalars {
    u64 rows;
    u64 vocab;
    u64 first;
    u64 tokens;
};

// A row as 16-byte pieces between `head` single elements and a tail.
struct Pieces {
    int head;
    int count;
};

__device__ __forceinline__ Pieces pieces_of(const elem* row, int vocab) {
    const int past = int(reinterpret_cast<u64>(row) / sizeof(elem) % VEC);
    const int head = min((VEC - past) % VEC, vocab);
    return {head, (vocab - head) / VEC};
}

// Adjacent elements as floats, −∞ as LOWEST, and the largest of them that is a number.
__device__ __forceinline__ float prepare(uint4 raw, float (&x)[VEC]) {
    if constexpr (IS_F32) {
        unpack(raw, x);
#pragma unroll
        for (int i = 0; i < VEC; i++) x[i] = max_or_nan(x[i], LOWEST);
        float largest = x[0];
#pragma unroll
        for (int i = 1; i < VEC; i++) largest = fmaxf(largest, x[i]);
        return largest;
    } else {
        // Two at a time.
        const unsigned lowest = 0xf149f149u;
        raw = make_uint4(max_or_nan_pair(raw.x, lowest), max_or_nan_pair(raw.y, lowest),
                         max_or_nan_pair(raw.z, lowest), max_or_nan_pair(raw.w, lowest));
        unpack(raw, x);
        const unsigned pair = max_pair(max_pair(raw.x, raw.y), max_pair(raw.z, raw.w));
        return fmaxf(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
}

// Running sums of a part of a row. Logits are scaled to u = logit · scale, the exponent of power, and e = power(u −
// offset): the offset is any number near u of the reference, and its own rounding does not affect u − offset.
struct Tally {
    float offset;
    // Above this logit the offset moves.
    float limit;
    // Σ e, Σ e (u − offset), Σ e².
    float sum;
    float weighted;
    float squares;
    float best;
    int at;

    __device__ __forceinline__ void start() {
        offset = limit = LOWEST;
        sum = weighted = squares = 0.0f;
        best = -INFINITE;
        at = 0;
    }

    __device__ __forceinline__ void move(float to) {
        const float step = offset - to;
        const float factor = power(step);
        weighted = fmaf(step, sum, weighted) * factor;
        sum *= factor;
        squares *= factor * factor;
        offset = to;
    }

    // Adds adjacent elements from id `start` on, with the largest of them.
    template <int K>
    __device__ __forceinline__ void add(const float (&logit)[K], float largest, int start, float scale, float margin) {
        if (largest > best) {
            best = largest;
            at = start;
        }
        if (largest > limit) {
            move(largest * scale);
            limit = largest + margin;
        }
#pragma unroll
        for (int i = 0; i < K; i++) {
            const float above = fmaf(logit[i], scale, -offset);
            const float e = power(above);
            sum += e;
            weighted = fmaf(e, above, weighted);
            squares = fmaf(e, e, squares);
        }
    }

    __device__ __forceinline__ void add_one(const elem* row, int at, float scale, float margin) {
        const float one[1] = {max_or_nan(to_float(row[at]), LOWEST)};
        add(one, one[0], at, scale, margin);
    }

    __device__ __forceinline__ void merge(Tally other) {
        const float to = fmaxf(offset, other.offset);
        move(to);
        other.move(to);
        sum += other.sum;
        weighted += other.weighted;
        squares += other.squares;
        if (other.best > best || (other.best == best && other.at < at)) {
            best = other.best;
            at = other.at;
        }
    }

    __device__ __forceinline__ Tally from_lane(int step) const {
        Tally other;
        other.offset = __shfl_down_sync(ALL_LANES, offset, step);
        other.limit = 0.0f;
        other.sum = __shfl_down_sync(ALL_LANES, sum, step);
        other.weighted = __shfl_down_sync(ALL_LANES, weighted, step);
        other.squares = __shfl_down_sync(ALL_LANES, squares, step);
        other.best = __shfl_down_sync(ALL_LANES, best, step);
        other.at = __shfl_down_sync(ALL_LANES, at, step);
        return other;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    score_rows(const elem* logits, const int* targets, const float* temperature, float* scores, int* best,
               const __grid_constant__ VocabScalars s) {
    __shared__ Tally parts[WARPS];
    const int vocab = int(s.vocab);
    const elem* row = logits + blockIdx.x * s.vocab;
    const float inverse = 1.0f / *temperature;
    const float scale = inverse * POWER_SCALE;
    const float margin = MARGIN * *temperature;
    const Pieces pieces = pieces_of(row, vocab);
    const uint4* body = reinterpret_cast<const uint4*>(row + pieces.head);

    Tally tally;
    tally.start();
    if (int(threadIdx.x) < pieces.head) tally.add_one(row, threadIdx.x, scale, margin);
    // The next accesses are in flight while these are added.
    int piece = threadIdx.x;
    const int full = pieces.count / (AHEAD * THREADS);
    uint4 next[AHEAD];
    if (full > 0) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) next[j] = body[piece + j * THREADS];
    }
    for (int round = 1; round <= full; round++) {
        uint4 raw[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) raw[j] = next[j];
        if (round < full) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) next[j] = body[piece + (AHEAD + j) * THREADS];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float x[VEC];
            const float largest = prepare(raw[j], x);
            tally.add(x, largest, pieces.head + (piece + j * THREADS) * VEC, scale, margin);
        }
        piece += AHEAD * THREADS;
    }
    for (; piece < pieces.count; piece += THREADS) {
        float x[VEC];
        const float largest = prepare(body[piece], x);
        tally.add(x, largest, pieces.head + piece * VEC, scale, margin);
    }
    const int last = pieces.head + pieces.count * VEC + threadIdx.x;
    if (last < vocab) tally.add_one(row, last, scale, margin);
    // The first id of the access that contains the best.
    const int end = min(tally.at + VEC, vocab);
    while (tally.at + 1 < end && to_float(row[tally.at]) != tally.best) tally.at++;

    for (int step = 16; step > 0; step /= 2) tally.merge(tally.from_lane(step));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = tally;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < WARPS; warp++) tally.merge(parts[warp]);
    // Moves to exactly u of the best, which the offset may miss by rounding.
    const float step = -fmaf(tally.best, scale, -tally.offset);
    const float factor = power(step);
    tally.weighted = fmaf(step, tally.sum, tally.weighted) * factor;
    tally.sum *= factor;
    tally.squares *= factor * factor;
    const u64 token = s.first + blockIdx.x;
    const float log_sum = logf(tally.sum);
    scores[token] = (to_float(row[targets[token]]) - tally.best) * inverse - log_sum;
    scores[s.tokens + token] = log_sum - tally.weighted / (tally.sum * POWER_SCALE);
    scores[2 * s.tokens + token] = tally.squares / (tally.sum * tally.sum);
    scores[3 * s.tokens + token] = tally.best * inverse;
    scores[4 * s.tokens + token] = log_sum;
    best[token] = tally.at;
}

// Factors that turn the logits of a row into their gradient.
struct Slope {
    // For the natural logarithm of p: log p = logit · inverse − shift.
    float inverse;
    float largest;
    float log_sum;
    // dlogit = p (constant + factor · log p), plus `at_target` for the target.
    float constant;
    float factor;
    float at_target;
    int target;

    template <int K> __device__ __forceinline__ void apply(float (&logit)[K], int start) const {
#pragma unroll
        for (int i = 0; i < K; i++) {
            const float log_p = max_or_nan(fmaf(logit[i], inverse, -largest) - log_sum, LOWEST);
            logit[i] = power(log_p * POWER_SCALE) * fmaf(factor, log_p, constant);
        }
        if (unsigned(target - start) < K) {
#pragma unroll
            for (int i = 0; i < K; i++) logit[i] += start + i == target ? at_target : 0.0f;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    score_rows_backward(elem* logits, const int* targets, const float* temperature, const float* scores,
                        const float* gradients, const __grid_constant__ VocabScalars s) {
    const int vocab = int(s.vocab);
    for (u64 line = blockIdx.y; line < s.rows; line += gridDim.y) {
        const u64 token = s.first + line;
        elem* row = logits + line * s.vocab;
        Slope slope;
        slope.inverse = 1.0f / *temperature;
        slope.largest = scores[3 * s.tokens + token];
        slope.log_sum = scores[4 * s.tokens + token];
        slope.at_target = gradients[token] * slope.inverse;
        const float of_entropy = gradients[s.tokens + token] * slope.inverse;
        slope.factor = -of_entropy;
        slope.constant = -(slope.at_target + of_entropy * scores[s.tokens + token]);
        slope.target = targets[token];

        const Pieces pieces = pieces_of(row, vocab);
        uint4* body = reinterpret_cast<uint4*>(row + pieces.head);
        const int first = blockIdx.x * THREADS * AHEAD + threadIdx.x;
        uint4 raw[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int piece = first + j * THREADS;
            raw[j] = piece < pieces.count ? body[piece] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int piece = first + j * THREADS;
            if (piece >= pieces.count) continue;
            float x[VEC];
            unpack(raw[j], x);
            slope.apply(x, pieces.head + piece * VEC);
            body[piece] = packed(x);
        }
        if (blockIdx.x != 0) continue;
        // Head and tail, each shorter than VEC.
        const bool at_head = int(threadIdx.x) < pieces.head;
        const int single = int(threadIdx.x) + (at_head ? 0 : pieces.count * VEC);
        if (int(threadIdx.x) < 2 * VEC && single < vocab) {
            float one[1] = {to_float(row[single])};
            slope.apply(one, single);
            assign(row[single], one[0]);
        }
    }
}
