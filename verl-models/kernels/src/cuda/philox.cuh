// Random words, and the shortlist of a draw: the ids of a row whose words are so high that hardly any other id can win
// the race (race.cu). Words do not depend on logits, so the shortlist is made while others wait for memory
// (decode_layers.cu).
//
// An id is on the shortlist of its row when the complement of its word is below `limit`. The list has so much room that
// it overflows once in 10²¹ rows if `limit` is chosen for 48 ids; an overflown list is not used, and is known by its
// length.

// Most ids on a row's shortlist.
[[maybe_unused]] constexpr int SHORTLIST = 128;

// Philox 4×32-10 on N counters of one key.
template <int N> __device__ __forceinline__ void philox(uint4 (&counter)[N], unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint4 c = counter[i];
            const unsigned long long product0 = 0xD2511F53ull * c.x;
            const unsigned long long product1 = 0xCD9E8D57ull * c.z;
            counter[i] = make_uint4(unsigned(product1 >> 32) ^ c.y ^ key0, unsigned(product1),
                                    unsigned(product0 >> 32) ^ c.w ^ key1, unsigned(product0));
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}
