// The greedy choice as a maximum of 64-bit keys: the logit in the high half, then the lowest id.
#pragma once

#include "block_rows.cuh"
#include "math.cuh"

using Choice = unsigned long long;

constexpr Choice kNoChoice = 0;
// Larger than every sound choice: one NaN or infinity makes the whole row unsound.
constexpr Choice kUnsound = ~0ull;
constexpr float kLargestLogit = 3.4e38f;

// The key of a logit. `suppressed` ids count as -infinity, but an unsound logit is always seen.
__device__ __forceinline__ Choice choice_of(float logit, int id, bool suppressed) {
  const float value = (suppressed ? -infinity() : logit) + 0.0f;  // -0 and 0 are one value
  const unsigned bits = __float_as_uint(value);
  const unsigned ordered = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  const Choice key = static_cast<Choice>(ordered) << 32 | (0x7fffffffu - id);
  return logit < kLargestLogit ? key : kUnsound;  // false for a NaN
}

__device__ __forceinline__ Choice larger(Choice a, Choice b) {
  return a > b ? a : b;
}

// The token a key stands for; -1 for an unsound row.
__device__ __forceinline__ int token_of(Choice key) {
  return key == kUnsound ? -1 : static_cast<int>(0x7fffffffu - static_cast<unsigned>(key));
}

__device__ __forceinline__ Choice warp_largest(Choice key) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    key = larger(key, __shfl_xor_sync(kAllLanes, key, step));
  }
  return key;
}
