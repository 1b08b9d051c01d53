// Q4_K and Q5_K: blocks of 256 inputs, sub-blocks of 32; w = d * s * q - m * n, q of 4 or 5 bits,
// s and n of 6 bits.
#pragma once

#include "dequant.cuh"

namespace dequant {

/// Unit, 16 rows x 256 inputs (four pieces of 64), 2304 or 2816 bytes:
///   0       512 bytes a piece, 16 a lane: a word for each (block, half) with the low four bits;
///           low nibbles row g, high nibbles row g+8
///   2048    Q5_K only: 128 bytes a piece, 4 a lane: the fifth bit of byte e of sub-row
///           j = 4*block + 2*half + (row g+8) is bit j of byte e
///   kHeads  16 bytes a row: f16 d, f16 m, then 96 bits: {s, s', n, n'} of each piece, 6 bits each
template <bool kFifthBit>
struct KBlocks {
  static constexpr int kUnitPieces = 4;
  static constexpr int kUnitBytes = kFifthBit ? 2816 : 2304;
  static constexpr int kStoredUnitBytes = kFifthBit ? 176 : 144;  // of one row
  static constexpr int kFifthBits = 2048;
  static constexpr int kHeads = kUnitBytes - 256;
  static constexpr int kStoredScales = 4;
  static constexpr int kStoredFifthBits = 16;
  static constexpr int kStoredNibbles = kFifthBit ? 48 : 16;

  struct Weights {
    unsigned q[2][4];
    float scale[2][2];    // [block][row]: d * s
    float minimum[2][2];  // [block][row]: -m * n
  };

  /// Besides the scale, the sum of a block's activations as a float: what the minimum multiplies.
  static __device__ __forceinline__ uint4 token(uint4 raw) {
    const int sum0 = __dp2a_lo(static_cast<int>(raw.z), 0x0101, 0);
    const int sum1 = __dp2a_lo(static_cast<int>(raw.w), 0x0101, 0);
    raw.z = __float_as_uint(__uint_as_float(raw.x) * static_cast<float>(sum0));
    raw.w = __float_as_uint(__uint_as_float(raw.y) * static_cast<float>(sum1));
    return raw;
  }

  static __device__ __forceinline__ Weights load(const char* unit, int piece, int lane) {
    const uint4 q = *reinterpret_cast<const uint4*>(unit + piece * 512 + lane * 16);
    Weights w;
    w.q[0][0] = q.x & kNibbles;
    w.q[0][1] = q.x >> 4 & kNibbles;
    w.q[0][2] = q.y & kNibbles;
    w.q[0][3] = q.y >> 4 & kNibbles;
    w.q[1][0] = q.z & kNibbles;
    w.q[1][1] = q.z >> 4 & kNibbles;
    w.q[1][2] = q.w & kNibbles;
    w.q[1][3] = q.w >> 4 & kNibbles;
    if constexpr (kFifthBit) {
      const unsigned fifth =
          *reinterpret_cast<const unsigned*>(unit + kFifthBits + piece * 128 + lane * 4);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned shifted = j < 4 ? fifth << (4 - j) : fifth >> (j - 4);
        w.q[j / 4][j % 4] |= shifted & kFifth;
      }
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = lane / 4 + side * 8;
      const uint4 head = *reinterpret_cast<const uint4*>(unit + kHeads + row * 16);
      const float d = low_half(head.x);
      const float m = -high_half(head.x);
      w.scale[0][side] = d * field(head, 4 * piece);
      w.scale[1][side] = d * field(head, 4 * piece + 1);
      w.minimum[0][side] = m * field(head, 4 * piece + 2);
      w.minimum[1][side] = m * field(head, 4 * piece + 3);
    }
    return w;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, uint4 token) {
    constexpr int kStart = mma::kMagicBits;
    int c[4] = {kStart, kStart, kStart, kStart};
    mma::u8s8_k32(c, w.q[block], x0, x1);
    const float f[4] = {mma::from_magic(c[0]), mma::from_magic(c[1]), mma::from_magic(c[2]),
                        mma::from_magic(c[3])};
    accumulate(sum, f, w.scale[block], __uint_as_float(token.x), __uint_as_float(token.y));
    const float sum0 = __uint_as_float(token.z);
    const float sum1 = __uint_as_float(token.w);
    sum[0] = fmaf(w.minimum[block][0], sum0, sum[0]);
    sum[1] = fmaf(w.minimum[block][0], sum1, sum[1]);
    sum[2] = fmaf(w.minimum[block][1], sum0, sum[2]);
    sum[3] = fmaf(w.minimum[block][1], sum1, sum[3]);
  }

  struct Block {
    ScaledBlock q;
    float minimum[2];
  };

  static __device__ __forceinline__ Block load_block(const char* unit, int piece, int block,
                                                     int lane) {
    constexpr unsigned kOffset = 0xC300C300;  // bf16 -128, twice
    const char* at = unit + piece * 512 + lane * 16 + block * 8;
    const uint2 low = *reinterpret_cast<const uint2*>(at);
    unsigned q[4] = {low.x & kNibbles, low.x >> 4 & kNibbles, low.y & kNibbles,
                     low.y >> 4 & kNibbles};
    if constexpr (kFifthBit) {
      const unsigned fifth =
          *reinterpret_cast<const unsigned*>(unit + kFifthBits + piece * 128 + lane * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] |= fifth >> 4 * block << (4 - i) & kFifth;
      }
    }
    Block b;
    b.q.first = sixteen_of(q[0], q[1], kOffset);
    b.q.last = sixteen_of(q[2], q[3], kOffset);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = lane / 4 + side * 8;
      const uint4 head = *reinterpret_cast<const uint4*>(unit + kHeads + row * 16);
      b.q.d[side] = low_half(head.x) * field(head, 4 * piece + block);
      b.minimum[side] = -high_half(head.x) * field(head, 4 * piece + 2 + block);
    }
    return b;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Block& w, uint4 x) {
    constexpr unsigned kOne = 0x3F803F80;  // bf16 1, twice
    constexpr Sixteen kOnes = {{kOne, kOne, kOne, kOne}};
    multiply_block(sum, w.q, x);
    float sums[4] = {};  // of the activations, for the minimum
    multiply_sixteen(sums, kOnes, x.x, x.y);
    multiply_sixteen(sums, kOnes, x.z, x.w);
    accumulate(sum, sums, w.minimum);
  }

  static __device__ void repack(const Byte* stored, long long row_bytes, char* unit, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int piece = 0; piece < kUnitPieces; ++piece) {
      unsigned fifth = 0;
      for (int i = 0; i < 4; ++i) {
        unsigned low = 0;
        for (int side = 0; side < 2; ++side) {
          const Byte* row = stored + (g + 8 * side) * row_bytes;
          const unsigned q = stored_bits(row, piece, i / 2, i % 2 * 16 + 4 * t);
          low |= (q & kNibbles) << 4 * side;
          fifth |= (q >> 4 & 0x01010101) << (2 * i + side);
        }
        *reinterpret_cast<unsigned*>(unit + piece * 512 + lane * 16 + i * 4) = low;
      }
      if constexpr (kFifthBit) {
        *reinterpret_cast<unsigned*>(unit + kFifthBits + piece * 128 + lane * 4) = fifth;
      }
    }
    if (lane < kTileRows) {
      const Byte* row = stored + lane * row_bytes;
      unsigned head[4] = {gather_bytes(row), 0, 0, 0};
      for (int i = 0; i < 16; ++i) {
        const int sub = i / 4 * 2 + i % 2;
        const unsigned value = i % 4 < 2 ? stored_scale(row, sub) : stored_minimum(row, sub);
        const int bit = 6 * i;
        head[1 + bit / 32] |= value << bit % 32;
        if (bit % 32 > 26) {
          head[2 + bit / 32] |= value >> (32 - bit % 32);
        }
      }
      *reinterpret_cast<uint4*>(unit + kHeads + lane * 16) =
          make_uint4(head[0], head[1], head[2], head[3]);
    }
  }

  static __device__ __forceinline__ float4 decode_tiled(const Byte* table, int inputs,
                                                        long long row, int column) {
    const Place p = place_of<KBlocks>(table, inputs, row, column);
    const int word = p.block * 8 + p.half * 4;
    unsigned q = load_word(p.unit + p.piece * 512 + p.lane * 16 + word) >> 4 * p.high & kNibbles;
    if constexpr (kFifthBit) {
      const unsigned fifth = load_word(p.unit + kFifthBits + p.piece * 128 + p.lane * 4);
      q |= (fifth >> (4 * p.block + 2 * p.half + p.high) & 0x01010101) << 4;
    }
    const uint4 head = *reinterpret_cast<const uint4*>(p.unit + kHeads + p.row * 16);
    const float s = field(head, 4 * p.piece + p.block);
    const float n = field(head, 4 * p.piece + 2 + p.block);
    return shifted_bytes(q, low_half(head.x) * s, high_half(head.x) * n);
  }

  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    const Byte* super = row + column / 256 * kStoredUnitBytes;
    const int sub = column % 256 / 32;
    const unsigned q = stored_bits(super, sub / 2, sub % 2, column % 32);
    const float s = static_cast<float>(stored_scale(super, sub));
    const float n = static_cast<float>(stored_minimum(super, sub));
    return shifted_bytes(q, load_half(super) * s, load_half(super + 2) * n);
  }

 private:
  static constexpr unsigned kFifth = 0x10101010;

  /// Six-bit field `index` of the 96 bits behind d and m.
  static __device__ __forceinline__ float field(const uint4& head, int index) {
    const int bit = 6 * index;
    const unsigned low = bit < 32 ? head.y : bit < 64 ? head.z : head.w;
    const unsigned high = bit < 32 ? head.z : head.w;
    return static_cast<float>(__funnelshift_r(low, high, bit % 32) & 63);
  }

  static __device__ unsigned stored_scale(const Byte* super, int sub) {
    const Byte* s = super + kStoredScales;
    return sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4;
  }

  static __device__ unsigned stored_minimum(const Byte* super, int sub) {
    const Byte* s = super + kStoredScales;
    return sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | s[sub] >> 6 << 4;
  }

  /// Four 4- or 5-bit values at inputs piece*64 + block*32 + at of a stored block.
  static __device__ unsigned stored_bits(const Byte* super, int piece, int block, int at) {
    const Byte* nibbles = super + kStoredNibbles + piece * 32 + at;
    unsigned q = gather_bytes(nibbles) >> 4 * block & kNibbles;
    if constexpr (kFifthBit) {
      const unsigned fifth = gather_bytes(super + kStoredFifthBits + at);
      q |= (fifth >> (2 * piece + block) & 0x01010101) << 4;
    }
    return q;
  }

  static __device__ float4 shifted_bytes(unsigned q, float d, float m) {
    return make_float4(
        fmaf(d, static_cast<float>(q & 0xFF), -m), fmaf(d, static_cast<float>(q >> 8 & 0xFF), -m),
        fmaf(d, static_cast<float>(q >> 16 & 0xFF), -m), fmaf(d, static_cast<float>(q >> 24), -m));
  }
};

using Q4_K = KBlocks<false>;
using Q5_K = KBlocks<true>;

}  // namespace dequant
