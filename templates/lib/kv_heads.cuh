// One head of a query, key or value, held by one warp: norm, rotation, rounding into a cache row.
#pragma once

#include "block_rows.cuh"
#include "math.cuh"

// A few neighbouring elements that are read and written together.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element v[kCount];
};

__device__ __forceinline__ void round_to(float& to, float value) {
  to = value;
}

__device__ __forceinline__ void round_to(__half& to, float value) {
  to = __float2half_rn(value);
}

__device__ __forceinline__ void round_to(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

__device__ __forceinline__ float widen(float value) {
  return value;
}

__device__ __forceinline__ float widen(__half value) {
  return __half2float(value);
}

__device__ __forceinline__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// Halves of a head by rotary pair: element i and element i + kHeadDim / 2. Lane l holds the pairs
// [l * kVector, (l + 1) * kVector) of every kStep pairs.
template <int kHeadDim>
struct HeadPairs {
  static constexpr int kPairs = kHeadDim / 2;
  static constexpr int kVector = kPairs % 128 == 0 ? 4 : kPairs % 64 == 0 ? 2 : 1;
  static constexpr int kStep = kWarp * kVector;
  static constexpr int kSteps = (kPairs + kStep - 1) / kStep;
  using Floats = Pack<float, kVector>;

  Floats low[kSteps];
  Floats high[kSteps];

  // The first pair of step i that this lane holds.
  static __device__ __forceinline__ int pair(int i) {
    return i * kStep + static_cast<int>(threadIdx.x % kWarp) * kVector;
  }

  template <int kSplits>
  static __device__ __forceinline__ Floats sum_planes(const float* from, size_t stride) {
    Floats total = *reinterpret_cast<const Floats*>(from);
#pragma unroll
    for (int s = 1; s < kSplits; ++s) {
      const Floats part = *reinterpret_cast<const Floats*>(from + s * stride);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        total.v[j] += part.v[j];
      }
    }
    return total;
  }

  // The head at `from`, summed over partial planes that lie `stride` floats apart.
  template <int kSplits>
  __device__ __forceinline__ void read(const float* from, size_t stride) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (pair(i) < kPairs) {
        low[i] = sum_planes<kSplits>(from + pair(i), stride);
        high[i] = sum_planes<kSplits>(from + kPairs + pair(i), stride);
      } else {
        low[i] = Floats{};
        high[i] = Floats{};
      }
    }
  }

  // Divide by the root mean square.
  __device__ __forceinline__ void norm(float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        squares = fmaf(low[i].v[j], low[i].v[j], squares);
        squares = fmaf(high[i].v[j], high[i].v[j], squares);
      }
    }
    const float inverse = inverse_rms<kHeadDim>(lanes_sum(squares), eps);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        low[i].v[j] *= inverse;
        high[i].v[j] *= inverse;
      }
    }
  }

  // The weights of a head's norm.
  template <typename Weight>
  __device__ __forceinline__ void read_weights(const Weight* weight) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const bool inside = pair(i) < kPairs;
        low[i].v[j] = inside ? weight_at(weight, pair(i) + j) : 0.0f;
        high[i].v[j] = inside ? weight_at(weight, kPairs + pair(i) + j) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply(const HeadPairs& by) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        low[i].v[j] *= by.low[i].v[j];
        high[i].v[j] *= by.high[i].v[j];
      }
    }
  }

  // Turn by angles: cosines in the low half, sines in the high half.
  __device__ __forceinline__ void turn(const HeadPairs& angles) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float a = low[i].v[j];
        const float b = high[i].v[j];
        const float cosine = angles.low[i].v[j];
        const float sine = angles.high[i].v[j];
        low[i].v[j] = fmaf(a, cosine, -(b * sine));
        high[i].v[j] = fmaf(b, cosine, a * sine);
      }
    }
  }

  template <typename Element>
  __device__ __forceinline__ void write(Element* to) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (pair(i) < kPairs) {
        Pack<Element, kVector> first;
        Pack<Element, kVector> second;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          round_to(first.v[j], low[i].v[j]);
          round_to(second.v[j], high[i].v[j]);
        }
        *reinterpret_cast<Pack<Element, kVector>*>(to + pair(i)) = first;
        *reinterpret_cast<Pack<Element, kVector>*>(to + kPairs + pair(i)) = second;
      }
    }
  }
};

// Norm with weight and rotation of the head at `from`, written to `to`. `angles` are those of its
// row: cosines, then sines. All loads are under way before the norm waits for the first.
template <int kHeadDim, int kSplits, typename Element>
__device__ __forceinline__ void norm_rope_head(const float* from, size_t stride,
                                               const HeadPairs<kHeadDim>& weights,
                                               const float* angles, float eps, Element* to) {
  HeadPairs<kHeadDim> head;
  HeadPairs<kHeadDim> turns;
  head.template read<kSplits>(from, stride);
  turns.template read<1>(angles, 0);
  head.norm(eps);
  head.multiply(weights);
  head.turn(turns);
  head.write(to);
}

// A value head: its norm without weight, or as it is.
template <int kHeadDim, int kSplits, bool kUnit, typename Element>
__device__ __forceinline__ void value_head(const float* from, size_t stride, float eps,
                                           Element* to) {
  HeadPairs<kHeadDim> head;
  head.template read<kSplits>(from, stride);
  if (kUnit) {
    head.norm(eps);
  }
  head.write(to);
}

// The cache row [kHeadDim] of a head at a position; caches are [heads][kCacheRows][kHeadDim].
template <int kHeadDim, int kCacheRows, typename Element>
__device__ __forceinline__ Element* cache_row(Element* cache, int head, int position) {
  const size_t row = static_cast<size_t>(head) * kCacheRows + position % kCacheRows;
  return cache + row * kHeadDim;
}
