// Sums over a warp and a block, in an order that the shape of the block alone decides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block_ptx.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

// Sum over the aligned group of `kLanes` lanes, the same bits in each of them.
template <int kLanes = kWarp>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

template <int kLanes = kWarp>
__device__ __forceinline__ int lanes_sum(int value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

template <int kLanes = kWarp>
__device__ __forceinline__ unsigned lanes_max(unsigned value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Sum over the block, the same bits in every thread: a tree in each warp, then warps in order.
// `partial` holds one float a warp and must not be in use by an earlier call.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* partial) {
  value = lanes_sum(value);
  if (threadIdx.x % kWarp == 0) {
    partial[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  float total = partial[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarp; ++warp) {
    total += partial[warp];
  }
  return total;
}
