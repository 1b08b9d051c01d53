// Activations of the int8 class ("a8"): blocks of 32 inputs share one float scale.
//
//   d = amax / 127        q = rint(x * (127 / amax)), half to even        x ~ d * q
//
// A block with a NaN or an infinity has d = NaN and q = 0, so that whatever reads it becomes NaN.
//
// A tile is eight rows of K inputs (K % 64 == 0), K/64 * 640 bytes, already in the order in which
// the lanes of mma.m16n8k32 want them. Two parts:
//
//   values  K/64 pieces of 512 bytes: byte (piece*32 + lane)*16 + r*4 + e, with lane = 4*g + t,
//           is q of row g, input piece*64 + (r/2)*32 + (r&1)*16 + 4*t + e
//   tokens  K/64 pieces of 128 bytes: at (block*4 + pair)*16, block counting 32 inputs over all K,
//           { float d[row 2*pair], float d[row 2*pair+1], int s[2*pair], int s[2*pair+1] };
//           s packs two int16: the sum of q over the first and over the last 16 of the block
//
// Sixteen rows are two tiles, one after the other. Rows that nobody asked for are zero.
#pragma once

namespace a8 {

constexpr int kTileRows = 8;
constexpr int kPieceInputs = 64;
constexpr int kBlockInputs = 32;
constexpr int kValueBytes = 512;  // of one piece
constexpr int kTokenBytes = 128;  // of one piece
constexpr int kPieceBytes = kValueBytes + kTokenBytes;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr unsigned kInfinity = 0x7f800000u;  // its bits

/// Where the parts of a tile lie.
template <int kInputs>
struct Layout {
  static_assert(kInputs % kPieceInputs == 0, "a8 needs a multiple of 64 inputs");
  static constexpr int kPieces = kInputs / kPieceInputs;
  static constexpr int kTokens = kPieces * kValueBytes;  // byte offset of the second part
  static constexpr int kBytes = kPieces * kPieceBytes;   // of one tile

  /// Bytes from the start of the buffer to the tile that holds `row`.
  static __device__ int tile(int row) { return row / kTileRows * kBytes; }

  /// Byte offset of the word that holds inputs [input, input + 4) of `row`; input % 4 == 0.
  static __device__ int value(int row, int input) {
    const int piece = input / kPieceInputs;
    const int lane = row % kTileRows * 4 + input % 16 / 4;
    const int word = input % kPieceInputs / 16;
    return tile(row) + (piece * 32 + lane) * 16 + word * 4;
  }

  /// Byte offset of the scale of `row` in the block of `input`; its sums lie 8 bytes behind.
  static __device__ int scale(int row, int input) {
    const int pair = row % kTileRows / 2;
    return tile(row) + kTokens + (input / kBlockInputs * 4 + pair) * 16 + row % 2 * 4;
  }
};

/// The scale of a block and what its values are multiplied by.
struct Scale {
  float d;
  float inverse;
};

/// The bits of |x|. They order floats as their values do, and a NaN comes last: `fmaxf` drops it.
__device__ __forceinline__ unsigned magnitude(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

/// From the largest magnitude of a block.
__device__ __forceinline__ Scale scale_of(unsigned top) {
  const float amax = __uint_as_float(top);
  Scale scale;
  scale.d = top < kInfinity ? amax / 127.0f : __uint_as_float(0x7fffffffu);
  scale.inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
  return scale;
}

/// One value on the grid; 0 for a NaN. The clamp matters only where 127 / amax overflows.
__device__ __forceinline__ int quantise(float x, float inverse) {
  return max(-127, min(127, __float2int_rn(x * inverse)));
}

__device__ __forceinline__ unsigned pack_bytes(int q0, int q1, int q2, int q3) {
  return (q0 & 0xFF) | (q1 & 0xFF) << 8 | (q2 & 0xFF) << 16 | static_cast<unsigned>(q3) << 24;
}

__device__ __forceinline__ int pack_sums(int first, int last) {
  return (first & 0xFFFF) | last << 16;
}

__device__ __forceinline__ void store_scale(char* at, float d, int sums) {
  *reinterpret_cast<float*>(at) = d;
  *reinterpret_cast<int*>(at + 8) = sums;
}

/// Quantise 32 inputs held by eight consecutive lanes, four each: lane 8*i + j of the warp holds
/// inputs [32*b + 4*j, 32*b + 4*j + 4) in `v`. All 32 lanes call together; each group of eight has
/// its own `row` and `input` (that of its own `v.x`). A lane with `active` false stores nothing.
template <int kInputs>
__device__ __forceinline__ void store4(char* x, int row, int input, float4 v, bool active = true) {
  using L = Layout<kInputs>;
  unsigned top = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
  top = max(top, __shfl_xor_sync(kFullMask, top, 1));
  top = max(top, __shfl_xor_sync(kFullMask, top, 2));
  top = max(top, __shfl_xor_sync(kFullMask, top, 4));
  const Scale scale = scale_of(top);
  const int q0 = quantise(v.x, scale.inverse);
  const int q1 = quantise(v.y, scale.inverse);
  const int q2 = quantise(v.z, scale.inverse);
  const int q3 = quantise(v.w, scale.inverse);
  int sum = q0 + q1 + q2 + q3;
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  sum += __shfl_xor_sync(kFullMask, sum, 2);
  const int other = __shfl_xor_sync(kFullMask, sum, 4);  // the last sixteen, on the first lane
  if (active) {
    *reinterpret_cast<unsigned*>(x + L::value(row, input)) = pack_bytes(q0, q1, q2, q3);
    if (input % kBlockInputs == 0) {
      store_scale(x + L::scale(row, input), scale.d, pack_sums(sum, other));
    }
  }
}

/// Four stored inputs as floats; for kernels that do not use the tensor cores.
template <int kInputs>
__device__ __forceinline__ float4 load4(const char* x, int row, int input) {
  using L = Layout<kInputs>;
  const float d = *reinterpret_cast<const float*>(x + L::scale(row, input));
  const char4 q = *reinterpret_cast<const char4*>(x + L::value(row, input));
  return make_float4(d * q.x, d * q.y, d * q.z, d * q.w);
}

}  // namespace a8
