// The bookkeeping of a decoding step; see draw.cuh for the other buffers.
//
// Appends the drawn tokens to live rows and records which rows end, and why.
//
// limits: [rows] i32, most tokens of a response, at most max_new_tokens; positions: [rows] i32, the position in the
// sequence of the token that is fed next; stops: [stop_count, stop_width] i32, sequences that end a response, padded
// with −1 on the left; tokens, sampling_log_probs, log_probs: [rows, max_new_tokens]. An end token takes precedence
// over a stop sequence, and a stop sequence over the limit. `token` is then the next step's input.
// Launch: block 32, grid ceil(rows / 32): rows are independent, and a row's data is requested at once, so that the
// kernel takes as long as a load and a store for any number of rows.

struct AdvanceScalars {
    u64 rows;
    // Tokens per row in the output buffers.
    u64 max_new_tokens;
    u64 vocab;
    u64 eos_count;
    u64 stop_count;
    u64 stop_width;
    // The token that ended rows are fed.
    long long pad;
    // Whether `seen` is updated.
    u64 penalises;
};

extern "C" __global__ void __launch_bounds__(32)
    advance(int* token, const float* sampling_log_prob, const float* log_prob, const int* eos, const int* stops,
            const int* limits, int* lengths, int* positions, int* states, unsigned* seen, int* tokens,
            float* sampling_log_probs, float* log_probs, const __grid_constant__ AdvanceScalars s) {
    const u64 row = blockIdx.x * 32 + threadIdx.x;
    if (row >= s.rows) return;
    const int before = states[row], id = token[row], length = lengths[row] + 1, position = positions[row];
    const int limit = limits[row];
    const float sampling = sampling_log_prob[row], full = log_prob[row];
    int state = before;
    if (before == LIVE && id < 0) {
        state = NOT_FINITE;
    } else if (before == LIVE) {
        int* own = tokens + row * s.max_new_tokens;
        const u64 place = row * s.max_new_tokens + length - 1;
        tokens[place] = id;
        sampling_log_probs[place] = sampling;
        log_probs[place] = full;
        lengths[row] = length;
        positions[row] = position + 1;
        if (s.penalises) seen[row * ((s.vocab + 31) / 32) + id / 32] |= 1u << (id % 32);
        if (length >= limit) state = LENGTH;
        for (u64 stop = 0; stop < s.stop_count; stop++) {
            bool ends = true;
            for (int back = 1; ends && back <= int(s.stop_width); back++) {
                const int wanted = stops[(stop + 1) * s.stop_width - back];
                if (wanted < 0) break;
                ends = back <= length && own[length - back] == wanted;
            }
            if (ends) state = STOP;
        }
        for (u64 i = 0; i < s.eos_count; i++) {
            if (eos[i] == id) state = EOS;
        }
    }
    if (state != before) states[row] = state;
    if (state != LIVE) token[row] = int(s.pad);
}
