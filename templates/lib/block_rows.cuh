// Rows of values and weights, four elements at a time.
#pragma once

#include "block.cuh"

__device__ __forceinline__ float4 zero4() {
  return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 multiply4(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

__device__ __forceinline__ float4 scale4(float4 a, float factor) {
  return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor);
}

// a * b + c, each rounded once.
__device__ __forceinline__ float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z),
                     fmaf(a.w, b.w, c.w));
}

// sum + the squares of v, in order.
__device__ __forceinline__ float add_squares(float sum, float4 v) {
  sum = fmaf(v.x, v.x, sum);
  sum = fmaf(v.y, v.y, sum);
  sum = fmaf(v.z, v.z, sum);
  return fmaf(v.w, v.w, sum);
}

__device__ __forceinline__ float4 read4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

__device__ __forceinline__ void write4(float* to, float4 v) {
  *reinterpret_cast<float4*>(to) = v;
}

// Four elements of the sum of `kSplits` planes that lie `stride` floats apart, added in order.
template <int kSplits>
__device__ __forceinline__ float4 read_planes4(const float* from, size_t stride) {
  float4 part[kSplits];
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    part[s] = read4(from + s * stride);  // all loads in flight before the first add
  }
  float4 total = part[0];
#pragma unroll
  for (int s = 1; s < kSplits; ++s) {
    total = add4(total, part[s]);
  }
  return total;
}

template <int kSplits>
__device__ __forceinline__ float read_planes(const float* from, size_t stride) {
  float total = from[0];
#pragma unroll
  for (int s = 1; s < kSplits; ++s) {
    total += from[s * stride];
  }
  return total;
}

// Weights never change while a program runs: they may be read before the predecessor is done.
__device__ __forceinline__ float weight_at(const float* w, int i) {
  return __ldg(w + i);
}

__device__ __forceinline__ float weight_at(const __half* w, int i) {
  return __half2float(__ldg(w + i));
}

__device__ __forceinline__ float weight_at(const __nv_bfloat16* w, int i) {
  return __bfloat162float(__ldg(w + i));
}

__device__ __forceinline__ float4 weights4(const float* w, int i) {
  return __ldg(reinterpret_cast<const float4*>(w + i));
}

template <typename Weight>
__device__ __forceinline__ float4 weights4(const Weight* w, int i) {
  return make_float4(weight_at(w, i), weight_at(w, i + 1), weight_at(w, i + 2),
                     weight_at(w, i + 3));
}

// Weights of columns [i, i + 4), zeros past the last column.
template <int kSize, typename Weight>
__device__ __forceinline__ float4 padded4(const Weight* w, int i) {
  return i < kSize ? weights4(w, i) : zero4();
}
