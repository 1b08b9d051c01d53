// Q6_K: blocks of 256 inputs, sub-blocks of 16; w = d * s * (q - 32), q of 6 bits, s an int8.
#pragma once

#include "dequant.cuh"

namespace dequant {

/// Unit, 16 rows x 256 inputs (four pieces of 64), 3360 bytes:
///   0     512 bytes a piece, 16 a lane: a word for each (block, half) with the low four bits;
///         low nibbles row g, high nibbles row g+8
///   2048  256 bytes a piece, 8 a lane: a word a block; the top two bits of byte e of sub-row
///         j = 2*half + (row g+8) are bits 2j, 2j+1 of byte e
///   3072  64 bytes a piece, 8 a g: int8 scales of row g (block 0 half 0, 0 1, 1 0, 1 1), then g+8
///   3328  4 bytes a g: f16 d of rows g and g+8
struct Q6_K {
  static constexpr int kUnitPieces = 4;
  static constexpr int kUnitBytes = 3360;
  static constexpr int kStoredUnitBytes = 210;  // of one row
  static constexpr int kHighBits = 2048;
  static constexpr int kScales = 3072;
  static constexpr int kDeltas = 3328;
  static constexpr int kStoredHighBits = 128;
  static constexpr int kStoredScales = 192;
  static constexpr int kStoredDelta = 208;
  static constexpr int kZero = 32;

  struct Weights {
    unsigned q[2][4];   // [block][row g half 0, row g+8 half 0, row g half 1, row g+8 half 1]
    unsigned scale[2];  // [row]: four int8
    float d[2];
  };

  static __device__ __forceinline__ uint4 token(uint4 raw) { return raw; }

  static __device__ __forceinline__ Weights load(const char* unit, int piece, int lane) {
    const uint4 low = *reinterpret_cast<const uint4*>(unit + piece * 512 + lane * 16);
    const uint2 high = *reinterpret_cast<const uint2*>(unit + kHighBits + piece * 256 + lane * 8);
    const uint2 scale = *reinterpret_cast<const uint2*>(unit + kScales + piece * 64 + lane / 4 * 8);
    const unsigned d = *reinterpret_cast<const unsigned*>(unit + kDeltas + lane / 4 * 4);
    Weights w;
    w.q[0][0] = (low.x & kNibbles) | (high.x << 4 & kTopBits);
    w.q[0][1] = (low.x >> 4 & kNibbles) | (high.x << 2 & kTopBits);
    w.q[0][2] = (low.y & kNibbles) | (high.x & kTopBits);
    w.q[0][3] = (low.y >> 4 & kNibbles) | (high.x >> 2 & kTopBits);
    w.q[1][0] = (low.z & kNibbles) | (high.y << 4 & kTopBits);
    w.q[1][1] = (low.z >> 4 & kNibbles) | (high.y << 2 & kTopBits);
    w.q[1][2] = (low.w & kNibbles) | (high.y & kTopBits);
    w.q[1][3] = (low.w >> 4 & kNibbles) | (high.y >> 2 & kTopBits);
    w.scale[0] = scale.x;
    w.scale[1] = scale.y;
    w.d[0] = low_half(d);
    w.d[1] = high_half(d);
    return w;
  }

  /// Both sixteens of a block meet as integers, exact below 2^24: |s * sum| <= 128 * 16 * 32 * 127.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, uint4 token) {
    const int sums0 = static_cast<int>(token.z);
    const int sums1 = static_cast<int>(token.w);
    const int first0 = __dp2a_lo(sums0, kMinusZeroFirst, 0);
    const int first1 = __dp2a_lo(sums1, kMinusZeroFirst, 0);
    const int last0 = __dp2a_lo(sums0, kMinusZeroLast, 0);
    const int last1 = __dp2a_lo(sums1, kMinusZeroLast, 0);
    int a[4] = {first0, first1, first0, first1};
    int b[4] = {last0, last1, last0, last1};
    mma::u8s8_k16(a, w.q[block][0], w.q[block][1], x0);
    mma::u8s8_k16(b, w.q[block][2], w.q[block][3], x1);
    float f[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned scale = w.scale[i / 2];
      const int s0 = signed_byte(scale, 2 * block);
      const int s1 = signed_byte(scale, 2 * block + 1);
      f[i] = static_cast<float>(s0 * a[i] + s1 * b[i]);
    }
    accumulate(sum, f, w.d, __uint_as_float(token.x), __uint_as_float(token.y));
  }

  /// Each sixteen has a scale of its own: [sixteen][row].
  struct Block {
    Sixteen q[2];
    float scale[2][2];
  };

  static __device__ __forceinline__ Block load_block(const char* unit, int piece, int block,
                                                     int lane) {
    constexpr unsigned kOffset = 0xC320C320;  // bf16 -(128 + 32), twice
    const char* at = unit + piece * 512 + lane * 16 + block * 8;
    const uint2 low = *reinterpret_cast<const uint2*>(at);
    const unsigned high = *reinterpret_cast<const unsigned*>(unit + kHighBits + piece * 256 +
                                                             lane * 8 + block * 4);
    const uint2 s = *reinterpret_cast<const uint2*>(unit + kScales + piece * 64 + lane / 4 * 8);
    const unsigned d = *reinterpret_cast<const unsigned*>(unit + kDeltas + lane / 4 * 4);
    Block b;
    b.q[0] = sixteen_of((low.x & kNibbles) | (high << 4 & kTopBits),
                        (low.x >> 4 & kNibbles) | (high << 2 & kTopBits), kOffset);
    b.q[1] = sixteen_of((low.y & kNibbles) | (high & kTopBits),
                        (low.y >> 4 & kNibbles) | (high >> 2 & kTopBits), kOffset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int sub = 2 * block + half;
      b.scale[half][0] = low_half(d) * static_cast<float>(signed_byte(s.x, sub));
      b.scale[half][1] = high_half(d) * static_cast<float>(signed_byte(s.y, sub));
    }
    return b;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Block& w, uint4 x) {
    float first[4] = {};
    float last[4] = {};
    multiply_sixteen(first, w.q[0], x.x, x.y);
    multiply_sixteen(last, w.q[1], x.z, x.w);
    accumulate(sum, first, w.scale[0]);
    accumulate(sum, last, w.scale[1]);
  }

  static __device__ void repack(const Byte* stored, long long row_bytes, char* unit, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int piece = 0; piece < kUnitPieces; ++piece) {
      for (int block = 0; block < 2; ++block) {
        unsigned high = 0;
        for (int half = 0; half < 2; ++half) {
          unsigned low = 0;
          for (int side = 0; side < 2; ++side) {
            const unsigned q =
                stored_bits(stored + (g + 8 * side) * row_bytes, piece, block, half * 16 + 4 * t);
            low |= (q & kNibbles) << 4 * side;
            high |= (q >> 4 & 0x03030303) << 2 * (2 * half + side);
          }
          *reinterpret_cast<unsigned*>(unit + piece * 512 + lane * 16 + block * 8 + half * 4) = low;
        }
        *reinterpret_cast<unsigned*>(unit + kHighBits + piece * 256 + lane * 8 + block * 4) = high;
      }
      for (int side = 0; side < 2; ++side) {
        const Byte* scales = stored + (g + 8 * side) * row_bytes + kStoredScales + piece * 4;
        unit[kScales + piece * 64 + g * 8 + side * 4 + t] = static_cast<char>(scales[t]);
      }
    }
    if (lane < kTileRows) {
      const Byte* d = stored + (lane / 2 + lane % 2 * 8) * row_bytes + kStoredDelta;
      reinterpret_cast<unsigned short*>(unit + kDeltas)[lane] =
          *reinterpret_cast<const unsigned short*>(d);
    }
  }

  static __device__ __forceinline__ float4 decode_tiled(const Byte* table, int inputs,
                                                        long long row, int column) {
    const Place p = place_of<Q6_K>(table, inputs, row, column);
    const int word = p.block * 8 + p.half * 4;
    const unsigned low = load_word(p.unit + p.piece * 512 + p.lane * 16 + word);
    const unsigned high = load_word(p.unit + kHighBits + p.piece * 256 + p.lane * 8 + p.block * 4);
    const unsigned top = high >> 2 * (2 * p.half + p.high) & 0x03030303;
    const int sub = p.block * 2 + p.half;
    const int at = kScales + p.piece * 64 + p.row % 8 * 8 + p.high * 4 + sub;
    const float s = static_cast<signed char>(p.unit[at]);
    const float d = load_half(p.unit + kDeltas + p.row % 8 * 4 + p.high * 2);
    return scaled_bytes((low >> 4 * p.high & kNibbles) | top << 4, kZero, d * s);
  }

  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    const Byte* super = row + column / 256 * kStoredUnitBytes;
    const int piece = column % 256 / 64;
    const unsigned q = stored_bits(super, piece, column % 64 / 32, column % 32);
    const float s = static_cast<signed char>(super[kStoredScales + column % 256 / 16]);
    return scaled_bytes(q, kZero, load_half(super + kStoredDelta) * s);
  }

 private:
  static constexpr unsigned kTopBits = 0x30303030;
  static constexpr int kMinusZeroFirst = 0x00E0;  // bytes {-32, 0}
  static constexpr int kMinusZeroLast = 0xE000;   // bytes {0, -32}

  /// Four 6-bit values at inputs piece*64 + block*32 + at of a stored block.
  static __device__ unsigned stored_bits(const Byte* super, int piece, int block, int at) {
    const int half = piece / 2;
    const int quarter = piece % 2 * 2 + block;
    const unsigned low = gather_bytes(super + half * 64 + block * 32 + at) >> piece % 2 * 4;
    const unsigned high = gather_bytes(super + kStoredHighBits + half * 32 + at) >> 2 * quarter;
    return (low & kNibbles) | (high & 0x03030303) << 4;
  }
};

}  // namespace dequant
