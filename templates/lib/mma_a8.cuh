// Accumulators of tensor-core tiles as int8 blocks ("a8", a8.cuh): two tiles of 16 outputs side by
// side are a block of 32, and no shared memory is needed to bring them together.
#pragma once

#include "a8.cuh"

namespace mma {

/// Lanes 4*g + t with equal t and g/4 hold four words: afterwards lane g%4 = k holds byte k of
/// each, in the order of g. All 32 lanes call together.
__device__ __forceinline__ unsigned transpose_bytes(unsigned word, int g) {
  unsigned other = __shfl_xor_sync(a8::kFullMask, word, 4);
  word = __byte_perm(word, other, g % 2 == 0 ? 0x6240 : 0x3715);
  other = __shfl_xor_sync(a8::kFullMask, word, 8);
  return __byte_perm(word, other, g / 2 % 2 == 0 ? 0x5410 : 0x3276);
}

/// The scale of a block of a row, and the sums of its halves as a8 packs them.
struct BlockScale {
  float d;
  int sums;
};

/// Quantise 32 outputs of the row of each lane's t: lane 4*g + t holds outputs g, g+8, g+16, g+24.
template <int kInputs>
__device__ __forceinline__ BlockScale store_block(char* x, int row, int block, int g, float v0,
                                                  float v1, float v2, float v3) {
  using L = a8::Layout<kInputs>;
  unsigned top = max(max(a8::magnitude(v0), a8::magnitude(v1)),
                     max(a8::magnitude(v2), a8::magnitude(v3)));
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    top = max(top, __shfl_xor_sync(a8::kFullMask, top, lanes));
  }
  const a8::Scale scale = a8::scale_of(top);
  const int q0 = a8::quantise(v0, scale.inverse);
  const int q1 = a8::quantise(v1, scale.inverse);
  const int q2 = a8::quantise(v2, scale.inverse);
  const int q3 = a8::quantise(v3, scale.inverse);
  int sums = q0 + q1 + (q2 + q3) * 65536;  // neither half leaves 16 bits
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    sums += __shfl_xor_sync(a8::kFullMask, sums, lanes);
  }
  const unsigned word = transpose_bytes(a8::pack_bytes(q0, q1, q2, q3), g);
  const int input = block * a8::kBlockInputs + g % 4 * 8 + g / 4 * 4;
  *reinterpret_cast<unsigned*>(x + L::value(row, input)) = word;
  const int first = static_cast<short>(sums);
  return {scale.d, a8::pack_sums(first, (sums - first) >> 16)};
}

/// Store two tiles of mma.m16n8 accumulators, 16 outputs each, as block `block` of the eight rows
/// from `first_row` on. A whole warp calls.
template <int kInputs>
__device__ __forceinline__ void store_pair(char* x, int first_row, int block, int lane,
                                           float4 first, float4 last) {
  const int g = lane / 4;
  const int row = first_row + lane % 4 * 2;
  char* token = x + a8::Layout<kInputs>::scale(row, block * a8::kBlockInputs);
#pragma unroll 1  // few registers: the caller's activations stay in theirs
  for (int i = 0; i < 2; ++i) {
    const BlockScale scale = store_block<kInputs>(
        x, row + i, block, g, i == 0 ? first.x : first.y, i == 0 ? first.z : first.w,
        i == 0 ? last.x : last.y, i == 0 ? last.z : last.w);
    if (g == 0) {
      a8::store_scale(token + 4 * i, scale.d, scale.sums);
    }
  }
}

}  // namespace mma
