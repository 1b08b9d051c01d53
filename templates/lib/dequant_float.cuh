// Weights stored as floats: F32, F16 and BF16.
#pragma once

#include "dequant.cuh"

namespace dequant {

/// Stored only: no tensor-core form keeps all bits of a float32.
struct F32 {
  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    return reinterpret_cast<const float4*>(row)[column / 4];
  }
};

/// Unit, 16 rows x 64 inputs, 2048 bytes: 512 a sixteen of inputs, 16 a lane, words of two values:
/// {g inputs 4t,4t+1; g+8 inputs 4t,4t+1; g inputs 4t+2,4t+3; g+8 inputs 4t+2,4t+3}
template <bool kBrain>
struct Half {
  static constexpr int kUnitPieces = 1;
  static constexpr int kUnitBytes = 2048;
  static constexpr int kStoredUnitBytes = 128;  // of one row

  /// The two sixteens of 32 inputs.
  struct Block {
    uint4 first;
    uint4 last;
  };

  static __device__ __forceinline__ Block load_block(const char* unit, int /*piece*/, int block,
                                                     int lane) {
    const uint4* at = reinterpret_cast<const uint4*>(unit + block * 1024) + lane;
    return {at[0], at[32]};
  }

  /// Partial sums leave the tensor cores every block, which keeps their rounding small.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const Block& w, uint4 x) {
    float c[4] = {};
    multiply_half(c, w.first, x.x, x.y);
    multiply_half(c, w.last, x.z, x.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] += c[i];
    }
  }

  static __device__ void repack(const Byte* stored, long long row_bytes, char* unit, int lane) {
    for (int i = 0; i < 16; ++i) {
      const int row = lane / 4 + i % 2 * 8;
      const int column = i / 4 * 16 + lane % 4 * 4 + i % 4 / 2 * 2;
      *reinterpret_cast<unsigned*>(unit + i / 4 * 512 + lane * 16 + i % 4 * 4) =
          load_word(stored + row * row_bytes + column * 2);
    }
  }

  static __device__ __forceinline__ float4 decode_tiled(const Byte* table, int inputs,
                                                        long long row, int column) {
    const Place p = place_of<Half>(table, inputs, row, column);
    const Byte* at = p.unit + (p.block * 2 + p.half) * 512 + p.lane * 16 + p.high * 4;
    return floats(load_word(at), load_word(at + 8));
  }

  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    return floats(load_word(row + column * 2), load_word(row + column * 2 + 4));
  }

  static __device__ __forceinline__ float first(unsigned pair) {
    return kBrain ? __uint_as_float(pair << 16) : low_half(pair);
  }

  static __device__ __forceinline__ float second(unsigned pair) {
    return kBrain ? __uint_as_float(pair & 0xFFFF0000) : high_half(pair);
  }

 private:
  static __device__ __forceinline__ void multiply_half(float (&c)[4], const uint4& q, unsigned x0,
                                                       unsigned x1) {
    if constexpr (kBrain) {
      mma::bf16_k16(c, q.x, q.y, q.z, q.w, x0, x1);
    } else {  // tf32 holds every f16 and every bf16
      multiply_eight(c, q.x, q.y, x0);
      multiply_eight(c, q.z, q.w, x1);
    }
  }

  static __device__ __forceinline__ void multiply_eight(float (&c)[4], unsigned q_g, unsigned q_g8,
                                                        unsigned x) {
    mma::tf32_k8(c, __float_as_uint(first(q_g)), __float_as_uint(first(q_g8)),
                 __float_as_uint(second(q_g)), __float_as_uint(second(q_g8)), x << 16,
                 x & 0xFFFF0000);
  }

  static __device__ __forceinline__ float4 floats(unsigned a, unsigned b) {
    return make_float4(first(a), second(a), first(b), second(b));
  }
};

using F16 = Half<false>;
using BF16 = Half<true>;

}  // namespace dequant
