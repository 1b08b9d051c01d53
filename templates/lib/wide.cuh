// Products of a tile of 16 outputs with many rows of int8 activations, for each weight format.
//
// With many rows the scales cost more than the products: four sums a lane for every instruction of
// the tensor cores. They are applied in two fused steps,
//
//   t = scale * (kMagic + c) + offset,  offset = -scale * kMagic        sum = d * t + sum
//
// with the weights' scale and the activations' d. The first converts c as well. It is exact but for
// its one rounding: a scale has at most 19 significant bits, so the offset is exact.
// Weights are signed bytes where the format allows: then no sum of activations is to be taken off.
#pragma once

#include "dequant_k.cuh"
#include "dequant_q4_0.cuh"
#include "dequant_q6_k.cuh"
#include "dequant_q8_0.cuh"
#include "wide_mma.cuh"

namespace wide {

constexpr unsigned kSigns = 0x80808080;

/// A scale of weights and what takes the start of a product off again, for rows g and g+8.
struct Scales {
  float scale[2];
  float offset[2];

  __device__ __forceinline__ void set(int side, float value) {
    scale[side] = value;
    offset[side] = -kMagic * value;
  }

  /// Accumulator `i` of a product, scaled.
  __device__ __forceinline__ float apply(const int (&c)[4], int i) const {
    return fmaf(scale[i / 2], __int_as_float(c[i]), offset[i / 2]);
  }
};

/// Scales of a block of activations, for the two columns of a lane.
struct Token {
  float d[2];
};

__device__ __forceinline__ Token load_token(const char* at) {
  const float2 d = *reinterpret_cast<const float2*>(at);
  return {{d.x, d.y}};
}

/// For a format:
///   load(unit, piece, lane)    the lane's share of 16 rows x 64 inputs, in registers
///   token(at)                  what a lane needs of a block of activations: scales, perhaps sums
///   multiply(sum, w, block, x0, x1, token, start)    sum += weights * activations, 32 inputs
template <class Format>
struct Operand;

/// Formats of one scale a block and signed bytes.
struct SignedOperand {
  struct Weights {
    unsigned q[2][4];
    Scales scales[2];  // of a block
  };

  static __device__ __forceinline__ Token token(const char* at) { return load_token(at); }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, const Token& token,
                                                  const Start& start) {
    int c[4];
    s8s8_k32(c, w.q[block], x0, x1, start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i] = fmaf(token.d[i % 2], w.scales[block].apply(c, i), sum[i]);
    }
  }
};

template <>
struct Operand<dequant::Q4_0> : SignedOperand {
  /// A nibble in the upper half of a byte, its top bit flipped, is 16 * (q - 8).
  static __device__ __forceinline__ Weights load(const char* unit, int /*piece*/, int lane) {
    constexpr unsigned kUpper = 0xF0F0F0F0;
    constexpr float kSixteenth = 0.0625f;
    const uint4 q = *reinterpret_cast<const uint4*>(unit + lane * 16);
    const uint2 d = *reinterpret_cast<const uint2*>(unit + dequant::Q4_0::kScales + lane / 4 * 8);
    const unsigned words[4] = {q.x, q.y, q.z, q.w};
    Weights w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w.q[i / 2][i % 2 * 2] = (words[i] << 4 & kUpper) ^ kSigns;
      w.q[i / 2][i % 2 * 2 + 1] = (words[i] & kUpper) ^ kSigns;
    }
    w.scales[0].set(0, dequant::low_half(d.x) * kSixteenth);
    w.scales[0].set(1, dequant::low_half(d.y) * kSixteenth);
    w.scales[1].set(0, dequant::high_half(d.x) * kSixteenth);
    w.scales[1].set(1, dequant::high_half(d.y) * kSixteenth);
    return w;
  }
};

template <>
struct Operand<dequant::Q8_0> : SignedOperand {
  static __device__ __forceinline__ Weights load(const char* unit, int piece, int lane) {
    const dequant::Q8_0::Weights stored = dequant::Q8_0::load(unit, piece, lane);
    Weights w;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w.q[block][i] = stored.q[block][i];
      }
      w.scales[block].set(0, stored.d[block][0]);
      w.scales[block].set(1, stored.d[block][1]);
    }
    return w;
  }
};

template <>
struct Operand<dequant::Q6_K> {
  struct Weights {
    unsigned q[2][4];
    Scales scales[2][2];  // of a block and sixteen
  };

  static __device__ __forceinline__ Token token(const char* at) { return load_token(at); }

  /// Six bits in the upper part of a byte, the top one flipped, are 4 * (q - 32).
  static __device__ __forceinline__ Weights load(const char* unit, int piece, int lane) {
    constexpr float kQuarter = 0.25f;
    const dequant::Q6_K::Weights stored = dequant::Q6_K::load(unit, piece, lane);
    Weights w;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w.q[i / 4][i % 4] = stored.q[i / 4][i % 4] << 2 ^ kSigns;
      const int side = i % 2;
      const int s = dequant::signed_byte(stored.scale[side], i / 2);
      w.scales[i / 4][i / 2 % 2].set(side, stored.d[side] * kQuarter * static_cast<float>(s));
    }
    return w;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, const Token& token,
                                                  const Start& start) {
    int first[4];
    int last[4];
    s8s8_k16(first, w.q[block][0], w.q[block][1], x0, start);
    s8s8_k16(last, w.q[block][2], w.q[block][3], x1, start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float both = w.scales[block][0].apply(first, i) + w.scales[block][1].apply(last, i);
      sum[i] = fmaf(token.d[i % 2], both, sum[i]);
    }
  }
};

/// Q4_K and Q5_K: unsigned bytes, and a minimum that multiplies the sum of the activations.
template <bool kFifthBit>
struct Operand<dequant::KBlocks<kFifthBit>> {
  using Format = dequant::KBlocks<kFifthBit>;

  struct Weights {
    unsigned q[2][4];
    Scales scales[2];
    float minimum[2][2];  // [block][row], below zero
  };

  struct SumToken {
    float d[2];
    float sum[2];  // of the integers
  };

  static __device__ __forceinline__ SumToken token(const char* at) {
    const uint4 raw = *reinterpret_cast<const uint4*>(at);
    const int sum0 = __dp2a_lo(static_cast<int>(raw.z), 0x0101, kMagicBits);
    const int sum1 = __dp2a_lo(static_cast<int>(raw.w), 0x0101, kMagicBits);
    SumToken token;
    token.d[0] = __uint_as_float(raw.x);
    token.d[1] = __uint_as_float(raw.y);
    token.sum[0] = __int_as_float(sum0) - kMagic;
    token.sum[1] = __int_as_float(sum1) - kMagic;
    return token;
  }

  static __device__ __forceinline__ Weights load(const char* unit, int piece, int lane) {
    const typename Format::Weights stored = Format::load(unit, piece, lane);
    Weights w;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w.q[block][i] = stored.q[block][i];
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        w.scales[block].set(side, stored.scale[block][side]);
        w.minimum[block][side] = stored.minimum[block][side];
      }
    }
    return w;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, const SumToken& token,
                                                  const Start& start) {
    int c[4];
    u8s8_k32(c, w.q[block], x0, x1, start);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = w.scales[block].apply(c, i);
      const float t = fmaf(w.minimum[block][i / 2], token.sum[i % 2], scaled);
      sum[i] = fmaf(token.d[i % 2], t, sum[i]);
    }
  }
};

}  // namespace wide
