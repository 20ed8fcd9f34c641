// Shows that kernels can be compiled and run: output = factor * input + OFFSET + (wide >> 32).
//
// Buffers: input u32[n], output u32[n]. Scalars: factor, wide (u64). Grid: 1 block of n threads.
//
// `large` shows that a block can declare LARGE bytes of shared memory, as compilers of CUDA 13 allow: output = the sum
// of what all threads wrote there. Buffers: output u32[1]. Grid: 1 block of 256 threads.

#include <cuda_bf16.h>

#ifndef OFFSET
#define OFFSET 0
#endif
#ifndef LARGE
#define LARGE 1024
#endif

struct Scalars {
    unsigned long long factor;
    unsigned long long wide;
};

extern "C" __global__ void probe(const unsigned* input, unsigned* output, const __grid_constant__ Scalars s) {
    const unsigned at = threadIdx.x;
    // Converts through bf16, which represents integers up to 256 exactly.
    const unsigned x = (unsigned)__bfloat162float(__float2bfloat16((float)input[at]));
    output[at] = (unsigned)s.factor * x + OFFSET + (unsigned)(s.wide >> 32);
}

extern "C" __global__ void large(unsigned* output) {
    __shared__ unsigned words[LARGE / 4];
    for (unsigned at = threadIdx.x; at < LARGE / 4; at += 256) words[at] = at;
    __syncthreads();
    if (threadIdx.x != 0) return;
    unsigned sum = 0;
    for (unsigned at = 0; at < LARGE / 4; at++) sum += words[LARGE / 4 - 1 - at];
    *output = sum;
}
