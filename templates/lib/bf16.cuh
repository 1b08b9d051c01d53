// Activations of the bf16 class: fragments of mma.m16n8k16, eight rows a tile, K % 64 == 0.
//
// K/64 pieces of 1024 bytes: at (block*32 + lane)*16 of a piece, block counting its two 32 inputs
// and lane = 4*g + t, lie eight bf16 of row g: inputs block*32 + 4*t + {0,1,2,3} and, of the last
// sixteen, block*32 + 16 + 4*t + {0,1,2,3}. Sixteen rows are two tiles. Unused rows are zero.
#pragma once

namespace bf16 {

constexpr int kTileRows = 8;
constexpr int kPieceInputs = 64;
constexpr int kPieceBytes = 1024;

/// Two floats, rounded to nearest even; `low` in the low half.
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000); }

template <int kInputs>
struct Layout {
  static_assert(kInputs % kPieceInputs == 0, "bf16 fragments need a multiple of 64 inputs");
  static constexpr int kPieces = kInputs / kPieceInputs;
  static constexpr int kBytes = kPieces * kPieceBytes;  // of one tile

  /// Byte offset of inputs [input, input + 4) of `row`; input % 4 == 0.
  static __device__ int value(int row, int input) {
    const int lane = row % kTileRows * 4 + input % 16 / 4;
    const int tile = row / kTileRows * kBytes;
    return tile + (input / 32 * 32 + lane) * 16 + input % 32 / 16 * 8;
  }
};

/// Round inputs [input, input + 4) of `row`: nearest even, a NaN stays one. Called as a8::store4.
template <int kInputs>
__device__ __forceinline__ void store4(char* x, int row, int input, float4 v, bool active = true) {
  if (active) {
    *reinterpret_cast<uint2*>(x + Layout<kInputs>::value(row, input)) =
        make_uint2(pack(v.x, v.y), pack(v.z, v.w));
  }
}

template <int kInputs>
__device__ __forceinline__ float4 load4(const char* x, int row, int input) {
  const uint2 v = *reinterpret_cast<const uint2*>(x + Layout<kInputs>::value(row, input));
  return make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
}

}  // namespace bf16
