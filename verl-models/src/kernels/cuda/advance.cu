// The bookkeeping of a decoding step; see draw.cuh for what the other buffers hold.
//
// Appends what was drawn to live rows and tells which of them end, why, and how many go on.
//
// limits: [rows] i32, most tokens of a response, at most max_new_tokens; positions: [rows] i32, the place in the sequence
// of the token that is fed next; stops: [stop_count, stop_width] i32, sequences that end a response, filled up with −1 at
// the left; tokens, sampling_log_probs, log_probs: [rows, max_new_tokens]; live: [1] i32. An end comes before a stop, and
// a stop before the limit. `token` is then what the next step is fed.
// Launch: block 1024, grid 1.

struct AdvanceScalars {
    u64 rows;
    // Tokens that the output buffers hold of a row.
    u64 max_new_tokens;
    u64 vocab;
    u64 eos_count;
    u64 stop_count;
    u64 stop_width;
    // What ended rows are fed.
    long long pad;
    // Whether `seen` is kept.
    u64 penalises;
};

extern "C" __global__ void __launch_bounds__(1024)
    advance(int* token, const float* sampling_log_prob, const float* log_prob, const int* eos, const int* stops,
            const int* limits, int* lengths, int* positions, int* states, unsigned* seen, int* tokens,
            float* sampling_log_probs, float* log_probs, int* live, const __grid_constant__ AdvanceScalars s) {
    int left = 0;
    for (u64 base = 0; base < s.rows; base += 1024) {
        const u64 row = base + threadIdx.x;
        bool goes_on = false;
        if (row < s.rows && states[row] == LIVE) {
            const int id = token[row];
            int state = LIVE;
            if (id < 0) {
                state = NOT_FINITE;
            } else {
                int* own = tokens + row * s.max_new_tokens;
                const int length = lengths[row] + 1;
                own[length - 1] = id;
                sampling_log_probs[row * s.max_new_tokens + length - 1] = sampling_log_prob[row];
                log_probs[row * s.max_new_tokens + length - 1] = log_prob[row];
                lengths[row] = length;
                positions[row]++;
                if (s.penalises) seen[row * ((s.vocab + 31) / 32) + id / 32] |= 1u << (id % 32);
                if (length >= limits[row]) state = LENGTH;
                for (u64 stop = 0; stop < s.stop_count; stop++) {
                    bool ends = true;
                    for (int back = 1; back <= int(s.stop_width); back++) {
                        const int wanted = stops[(stop + 1) * s.stop_width - back];
                        if (wanted < 0) break;
                        ends = ends && back <= length && own[length - back] == wanted;
                    }
                    if (ends) state = STOP;
                }
                for (u64 i = 0; i < s.eos_count; i++) {
                    if (eos[i] == id) state = EOS;
                }
            }
            states[row] = state;
            goes_on = state == LIVE;
        }
        if (row < s.rows && !goes_on) token[row] = int(s.pad);
        left += __syncthreads_count(goes_on);
    }
    if (threadIdx.x == 0) *live = left;
}
