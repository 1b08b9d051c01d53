// Q4_0: blocks of 32 inputs, w = d * (q - 8), q a nibble.
#pragma once

#include "dequant.cuh"

namespace dequant {

/// Unit, 16 rows x 64 inputs, 576 bytes:
///   0    16 bytes a lane: a word for each (block, half); low nibbles row g, high nibbles row g+8
///   512  8 bytes a g: f16 scales {g block 0, g block 1, g+8 block 0, g+8 block 1}
struct Q4_0 {
  static constexpr int kUnitPieces = 1;
  static constexpr int kUnitBytes = 576;
  static constexpr int kStoredUnitBytes = 36;  // of one row
  static constexpr int kScales = 512;
  static constexpr int kStoredBlockBytes = 18;
  static constexpr int kZero = 8;

  struct Weights {
    unsigned q[2][4];
    float d[2][2];
  };

  /// The sum of (q - 8) * x starts from -8 * (sum of x): no byte is ever subtracted from.
  static __device__ __forceinline__ uint4 token(uint4 raw) {
    raw.z = __dp2a_lo(static_cast<int>(raw.z), kMinusZeros, mma::kMagicBits);
    raw.w = __dp2a_lo(static_cast<int>(raw.w), kMinusZeros, mma::kMagicBits);
    return raw;
  }

  static __device__ __forceinline__ Weights load(const char* unit, int /*piece*/, int lane) {
    const uint4 q = *reinterpret_cast<const uint4*>(unit + lane * 16);
    const uint2 d = *reinterpret_cast<const uint2*>(unit + kScales + lane / 4 * 8);
    Weights w;
    w.q[0][0] = q.x & kNibbles;
    w.q[0][1] = q.x >> 4 & kNibbles;
    w.q[0][2] = q.y & kNibbles;
    w.q[0][3] = q.y >> 4 & kNibbles;
    w.q[1][0] = q.z & kNibbles;
    w.q[1][1] = q.z >> 4 & kNibbles;
    w.q[1][2] = q.w & kNibbles;
    w.q[1][3] = q.w >> 4 & kNibbles;
    w.d[0][0] = low_half(d.x);
    w.d[0][1] = low_half(d.y);
    w.d[1][0] = high_half(d.x);
    w.d[1][1] = high_half(d.y);
    return w;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, uint4 token) {
    const int z0 = static_cast<int>(token.z);
    const int z1 = static_cast<int>(token.w);
    int c[4] = {z0, z1, z0, z1};
    mma::u8s8_k32(c, w.q[block], x0, x1);
    const float f[4] = {mma::from_magic(c[0]), mma::from_magic(c[1]), mma::from_magic(c[2]),
                        mma::from_magic(c[3])};
    accumulate(sum, f, w.d[block], __uint_as_float(token.x), __uint_as_float(token.y));
  }

  using Block = ScaledBlock;

  static __device__ __forceinline__ Block load_block(const char* unit, int /*piece*/, int block,
                                                     int lane) {
    const uint2 q = *reinterpret_cast<const uint2*>(unit + lane * 16 + block * 8);
    const uint2 d = *reinterpret_cast<const uint2*>(unit + kScales + lane / 4 * 8);
    return {sixteen_of(q.x & kNibbles, q.x >> 4 & kNibbles, kOffset),
            sixteen_of(q.y & kNibbles, q.y >> 4 & kNibbles, kOffset),
            {low_half(d.x >> 16 * block), low_half(d.y >> 16 * block)}};
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Block& w, uint4 x) {
    multiply_block(sum, w, x);
  }

  static __device__ void repack(const Byte* stored, long long row_bytes, char* unit, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int shift = i % 2 * 4;
      const Byte* low = stored + g * row_bytes + i / 2 * kStoredBlockBytes + 2 + 4 * t;
      const Byte* high = low + 8 * row_bytes;
      const unsigned first = gather_bytes(low) >> shift & kNibbles;
      const unsigned second = gather_bytes(high) >> shift & kNibbles;
      *reinterpret_cast<unsigned*>(unit + lane * 16 + i * 4) = first | second << 4;
    }
    const int row = lane / 4 + lane % 4 / 2 * 8;
    const Byte* d = stored + row * row_bytes + lane % 2 * kStoredBlockBytes;
    reinterpret_cast<unsigned short*>(unit + kScales)[lane] =
        *reinterpret_cast<const unsigned short*>(d);
  }

  static __device__ __forceinline__ float4 decode_tiled(const Byte* table, int inputs,
                                                        long long row, int column) {
    const Place p = place_of<Q4_0>(table, inputs, row, column);
    const unsigned q = load_word(p.unit + p.lane * 16 + p.block * 8 + p.half * 4);
    const float d = load_half(p.unit + kScales + p.row % 8 * 8 + p.high * 4 + p.block * 2);
    return scaled_bytes(q >> 4 * p.high & kNibbles, kZero, d);
  }

  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    const Byte* block = row + column / 32 * kStoredBlockBytes;
    const unsigned q = gather_bytes(block + 2 + column % 16) >> column % 32 / 16 * 4;
    return scaled_bytes(q & kNibbles, kZero, load_half(block));
  }

 private:
  static constexpr int kMinusZeros = 0xF8F8;       // two bytes of -8
  static constexpr unsigned kOffset = 0xC308C308;  // bf16 -(128 + 8), twice
};

}  // namespace dequant
