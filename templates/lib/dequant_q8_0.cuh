// Q8_0: blocks of 32 inputs, w = d * q, q an int8.
#pragma once

#include "dequant.cuh"

namespace dequant {

/// Unit, 16 rows x 64 inputs, 1088 bytes:
///   0, 512  one for each block, 16 bytes a lane: words {g first 16, g+8 first 16, g last 16, g+8}
///   1024    8 bytes a g: f16 scales {g block 0, g block 1, g+8 block 0, g+8 block 1}
struct Q8_0 {
  static constexpr int kUnitPieces = 1;
  static constexpr int kUnitBytes = 1088;
  static constexpr int kStoredUnitBytes = 68;  // of one row
  static constexpr int kScales = 1024;
  static constexpr int kStoredBlockBytes = 34;

  struct Weights {
    unsigned q[2][4];
    float d[2][2];
  };

  static __device__ __forceinline__ uint4 token(uint4 raw) { return raw; }

  static __device__ __forceinline__ Weights load(const char* unit, int /*piece*/, int lane) {
    const uint4 q0 = *reinterpret_cast<const uint4*>(unit + lane * 16);
    const uint4 q1 = *reinterpret_cast<const uint4*>(unit + 512 + lane * 16);
    const uint2 d = *reinterpret_cast<const uint2*>(unit + kScales + lane / 4 * 8);
    Weights w;
    w.q[0][0] = q0.x;
    w.q[0][1] = q0.y;
    w.q[0][2] = q0.z;
    w.q[0][3] = q0.w;
    w.q[1][0] = q1.x;
    w.q[1][1] = q1.y;
    w.q[1][2] = q1.z;
    w.q[1][3] = q1.w;
    w.d[0][0] = low_half(d.x);
    w.d[0][1] = low_half(d.y);
    w.d[1][0] = high_half(d.x);
    w.d[1][1] = high_half(d.y);
    return w;
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Weights& w, int block,
                                                  unsigned x0, unsigned x1, uint4 token) {
    constexpr int kStart = mma::kMagicBits;
    int c[4] = {kStart, kStart, kStart, kStart};
    mma::s8s8_k32(c, w.q[block], x0, x1);
    const float f[4] = {mma::from_magic(c[0]), mma::from_magic(c[1]), mma::from_magic(c[2]),
                        mma::from_magic(c[3])};
    accumulate(sum, f, w.d[block], __uint_as_float(token.x), __uint_as_float(token.y));
  }

  using Block = ScaledBlock;

  static __device__ __forceinline__ Block load_block(const char* unit, int /*piece*/, int block,
                                                     int lane) {
    const uint4 q = *reinterpret_cast<const uint4*>(unit + block * 512 + lane * 16);
    const uint2 d = *reinterpret_cast<const uint2*>(unit + kScales + lane / 4 * 8);
    return {signed_sixteen(q.x, q.y), signed_sixteen(q.z, q.w),
            {low_half(d.x >> 16 * block), low_half(d.y >> 16 * block)}};
  }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const Block& w, uint4 x) {
    multiply_block(sum, w, x);
  }

  static __device__ void repack(const Byte* stored, long long row_bytes, char* unit, int lane) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = g + i % 2 * 8;
      const int half = i % 4 / 2;
      const Byte* block = stored + row * row_bytes + i / 4 * kStoredBlockBytes;
      *reinterpret_cast<unsigned*>(unit + i / 4 * 512 + lane * 16 + i % 4 * 4) =
          gather_bytes(block + 2 + half * 16 + 4 * t);
    }
    const int row = lane / 4 + lane % 4 / 2 * 8;
    const Byte* d = stored + row * row_bytes + lane % 2 * kStoredBlockBytes;
    reinterpret_cast<unsigned short*>(unit + kScales)[lane] =
        *reinterpret_cast<const unsigned short*>(d);
  }

  static __device__ __forceinline__ float4 decode_tiled(const Byte* table, int inputs,
                                                        long long row, int column) {
    const Place p = place_of<Q8_0>(table, inputs, row, column);
    const int word = p.half * 2 + p.high;
    const unsigned q = load_word(p.unit + p.block * 512 + p.lane * 16 + word * 4);
    const float d = load_half(p.unit + kScales + p.row % 8 * 8 + p.high * 4 + p.block * 2);
    return scaled_signed_bytes(q, d);
  }

  static __device__ __forceinline__ float4 decode_stored(const Byte* row, int column) {
    const Byte* block = row + column / 32 * kStoredBlockBytes;
    return scaled_signed_bytes(gather_bytes(block + 2 + column % 32), load_half(block));
  }

 private:
  /// A pair of bf16 from signed bytes: 128 + the low seven bits, less 128 or, below zero, 256.
  static __device__ __forceinline__ unsigned signed_pair(unsigned q, unsigned select) {
    const unsigned offset = __byte_perm(q & 0x80808080, 0xC3C3C3C3, select);
    return add_pairs(raised_pair(q & 0x7F7F7F7F, select), offset);
  }

  static __device__ __forceinline__ Sixteen signed_sixteen(unsigned q_g, unsigned q_g8) {
    return {{signed_pair(q_g, kFirstPair), signed_pair(q_g8, kFirstPair),
             signed_pair(q_g, kLastPair), signed_pair(q_g8, kLastPair)}};
  }
};

}  // namespace dequant
