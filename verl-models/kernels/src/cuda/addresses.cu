// The addresses of a layer's tensors, for a kernel that reads all layers (decode_layers.cu).
//
//   table[index] = q, k, v, bias, q_norm, k_norm, input_norm, o, mlp_norm, gate, up, down, keys, values, 0, 0
//
// q, k, v, gate and up are `…_offset` elements after the beginning of their buffers, which may be the same: a matrix of
// their concatenated rows. If a model has no such tensor, any buffer takes its place.
//
// Shapes: table [layers, 16] u64. The addresses are valid until the tensors move; the launcher keeps them in place.
// Launch: one thread.

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef unsigned long long u64;

struct AddressScalars {
    // Index of the layer.
    u64 index;
    // Elements.
    u64 q_offset;
    u64 k_offset;
    u64 v_offset;
    u64 gate_offset;
    u64 up_offset;
};

extern "C" __global__ void note_layer(const bf16* q, const bf16* k, const bf16* v, const bf16* bias, const bf16* q_norm,
                                      const bf16* k_norm, const bf16* input_norm, const bf16* o, const bf16* mlp_norm,
                                      const bf16* gate, const bf16* up, const bf16* down, const bf16* keys,
                                      const bf16* values, u64* table, const __grid_constant__ AddressScalars s) {
    const bf16* addresses[16] = {q + s.q_offset, k + s.k_offset, v + s.v_offset, bias, q_norm, k_norm,
                                 input_norm, o, mlp_norm, gate + s.gate_offset, up + s.up_offset, down,
                                 keys, values, nullptr, nullptr};
    for (int i = 0; i < 16; i++) table[s.index * 16 + i] = (u64)addresses[i];
}
