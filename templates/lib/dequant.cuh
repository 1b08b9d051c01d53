// Stored weights: what the formats share. One header a format: dequant_q4_0.cuh, ...
//
// A format is a struct that knows its two layouts.
//   stored  rows as the file holds them (llama.cpp's blocks)
//   tiled   the same bytes in the order in which tensor-core lanes want them: 16 rows by
//           kUnitPieces * 64 inputs make a unit of kUnitBytes; units of a tile of 16 rows lie one
//           after the other, then the next tile follows
// and offers
//   token(raw)                     what a lane keeps of the scales and sums of a block (a8.cuh)
//   load(unit, piece, lane)        the lane's share of 16 rows x 64 inputs, in registers
//   multiply(sum, w, block, x0, x1, token)    sum += weights * int8 activations over 32 inputs
//   load_block(unit, piece, block, lane)      the share of 32 inputs, decoded for bf16 activations
//   multiply(sum, w, x)            sum += weights * bf16 activations over 32 inputs: integers of a
//                                  block are exact in bf16, and its scale multiplies the sum
//   repack(...)                    one warp turns one unit from stored to tiled
//   decode_tiled, decode_stored    four neighbouring columns as floats
// with lane = 4*g + t: rows g and g+8, inputs 4t..4t+3 of each sixteen.
#pragma once

#include "mma.cuh"

namespace dequant {

using Byte = unsigned char;

constexpr int kTileRows = 16;
constexpr int kPieceInputs = 64;
constexpr unsigned kNibbles = 0x0F0F0F0F;

__device__ __forceinline__ float half_bits(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ float low_half(unsigned pair) {
  return half_bits(static_cast<unsigned short>(pair));
}

__device__ __forceinline__ float high_half(unsigned pair) {
  return half_bits(static_cast<unsigned short>(pair >> 16));
}

/// A float16 at an even address.
__device__ __forceinline__ float load_half(const Byte* at) {
  return half_bits(*reinterpret_cast<const unsigned short*>(at));
}

__device__ __forceinline__ int signed_byte(unsigned word, int index) {
  return static_cast<signed char>(word >> 8 * index);
}

/// One column of a stored row, for the loops that TVM writes.
///
/// The optimiser may not see what they count with: for sm_80 and sm_90a, NVRTC 13.5 reduces the
/// strength of `at / 16` and, for the odd of four unrolled neighbours, forgets to divide (Q6_K of
/// 256 inputs; tests/schedules/test_stored_weights.py runs what it makes).
template <class Format>
__device__ __forceinline__ float column(const Byte* row, int at) {
  int four = at & ~3;
  asm("" : "+r"(four));
  const float4 v = Format::decode_stored(row, four);
  const int i = at & 3;
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/// Where one column group of four lies in a tiled matrix.
struct Place {
  const Byte* unit;
  int piece;  // of the unit
  int lane;
  int high;  // row g+8 rather than g
  int row;   // of the tile
  int block;
  int half;
};

template <class Format>
__device__ __forceinline__ Place place_of(const Byte* table, int inputs, long long row,
                                          int column) {
  const int units = inputs / (kPieceInputs * Format::kUnitPieces);
  const int piece = column / kPieceInputs;
  Place p;
  p.row = static_cast<int>(row % kTileRows);
  p.unit = table + (row / kTileRows * units + piece / Format::kUnitPieces) * Format::kUnitBytes;
  p.piece = piece % Format::kUnitPieces;
  p.lane = p.row % 8 * 4 + column % 16 / 4;
  p.high = p.row / 8;
  p.block = column % kPieceInputs / 32;
  p.half = column % 32 / 16;
  return p;
}

__device__ __forceinline__ unsigned load_word(const Byte* at) {
  return *reinterpret_cast<const unsigned*>(at);
}

/// Unsigned bytes of `q`, less `zero`, times `d`.
__device__ __forceinline__ float4 scaled_bytes(unsigned q, int zero, float d) {
  const float x = d * static_cast<float>(static_cast<int>(q & 0xFF) - zero);
  const float y = d * static_cast<float>(static_cast<int>(q >> 8 & 0xFF) - zero);
  const float z = d * static_cast<float>(static_cast<int>(q >> 16 & 0xFF) - zero);
  const float w = d * static_cast<float>(static_cast<int>(q >> 24) - zero);
  return make_float4(x, y, z, w);
}

/// Signed bytes of `q`, times `d`.
__device__ __forceinline__ float4 scaled_signed_bytes(unsigned q, float d) {
  return make_float4(d * signed_byte(q, 0), d * signed_byte(q, 1), d * signed_byte(q, 2),
                     d * signed_byte(q, 3));
}

/// Four bytes at any address.
__device__ __forceinline__ unsigned gather_bytes(const Byte* at) {
  return at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned>(at[3]) << 24;
}

/// sum += d[row] * t[column] * c, each product of scales rounded once: the fixed order of a block.
__device__ __forceinline__ void accumulate(float (&sum)[4], const float (&c)[4],
                                           const float (&d)[2], float t0, float t1) {
  sum[0] = fmaf(d[0] * t0, c[0], sum[0]);
  sum[1] = fmaf(d[0] * t1, c[1], sum[1]);
  sum[2] = fmaf(d[1] * t0, c[2], sum[2]);
  sum[3] = fmaf(d[1] * t1, c[3], sum[3]);
}

/// Pairs of bf16 from the unsigned bytes of `q`, each below 128: 128 + byte, by their bits alone.
__device__ __forceinline__ unsigned raised_pair(unsigned q, unsigned select) {
  return __byte_perm(q, 0x43434343, select);
}

constexpr unsigned kFirstPair = 0x4140;  // selectors of bytes {0, 1} and {2, 3}
constexpr unsigned kLastPair = 0x4342;

/// Sums of pairs of bf16, exact here: every value involved is a small integer.
__device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
  constexpr unsigned kOnes = 0x3F803F80;
  unsigned sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(kOnes), "r"(b));
  return sum;
}

/// Sixteen inputs of rows g and g+8 as bf16, in the order of mma::bf16_k16.
struct Sixteen {
  unsigned a[4];
};

/// q - zero, q unsigned bytes below 128 of rows g and g+8; `offset` is a pair of -(128 + zero).
__device__ __forceinline__ Sixteen sixteen_of(unsigned q_g, unsigned q_g8, unsigned offset) {
  return {{add_pairs(raised_pair(q_g, kFirstPair), offset),
           add_pairs(raised_pair(q_g8, kFirstPair), offset),
           add_pairs(raised_pair(q_g, kLastPair), offset),
           add_pairs(raised_pair(q_g8, kLastPair), offset)}};
}

/// c += w * x over sixteen inputs.
__device__ __forceinline__ void multiply_sixteen(float (&c)[4], const Sixteen& w, unsigned x0,
                                                 unsigned x1) {
  mma::bf16_k16(c, w.a[0], w.a[1], w.a[2], w.a[3], x0, x1);
}

/// sum += d[row] * c, for activations that carry no scale of their own.
__device__ __forceinline__ void accumulate(float (&sum)[4], const float (&c)[4],
                                           const float (&d)[2]) {
  sum[0] = fmaf(d[0], c[0], sum[0]);
  sum[1] = fmaf(d[0], c[1], sum[1]);
  sum[2] = fmaf(d[1], c[2], sum[2]);
  sum[3] = fmaf(d[1], c[3], sum[3]);
}

/// 32 inputs of rows g and g+8, with the scales of the rows.
struct ScaledBlock {
  Sixteen first;
  Sixteen last;
  float d[2];
};

/// sum += w * x; x holds the sixteens of a lane one after the other.
__device__ __forceinline__ void multiply_block(float (&sum)[4], const ScaledBlock& w, uint4 x) {
  float c[4] = {};
  multiply_sixteen(c, w.first, x.x, x.y);
  multiply_sixteen(c, w.last, x.z, x.w);
  accumulate(sum, c, w.d);
}

}  // namespace dequant
