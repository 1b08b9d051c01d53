// One head of a query, key or value, held by one warp: norm, rotation, rounding into a cache row.
#pragma once

#include "block_rows.cuh"
#include "kv_rows.cuh"
#include "math.cuh"

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

  // Rounded to q8_0. Which lanes hold a block depends on kHeadDim, so all join in for each.
  __device__ __forceinline__ void write(Q8* to) const {
    using Row = CacheRow<Q8, kHeadDim>;
    unsigned top[2][kSteps];  // largest magnitude of the block that these values are in
#pragma unroll
    for (int block = 0; block < kHeadDim / Row::kBlock; ++block) {
      unsigned most = 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        most = in_block(0, i, block) ? max(most, largest(low[i])) : most;
        most = in_block(1, i, block) ? max(most, largest(high[i])) : most;
      }
      most = __reduce_max_sync(kAllLanes, most);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        top[0][i] = in_block(0, i, block) ? most : top[0][i];
        top[1][i] = in_block(1, i, block) ? most : top[1][i];
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (pair(i) < kPairs) {
        write_part(to, pair(i), low[i], top[0][i]);
        write_part(to, kPairs + pair(i), high[i], top[1][i]);
      }
    }
    const int at = Row::kUsed + 2 * static_cast<int>(threadIdx.x % kWarp);
    if (at < Row::kStep) {
      *reinterpret_cast<unsigned short*>(to + at) = 0;
    }
  }

 private:
  static __device__ __forceinline__ unsigned largest(const Floats& part) {
    unsigned most = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      most = max(most, a8::magnitude(part.v[j]));
    }
    return most;
  }

  // Are this lane's values of step i, in the low (0) or high (1) half, in the block?
  static __device__ __forceinline__ bool in_block(int half, int i, int block) {
    constexpr int kBlock = CacheRow<Q8, kHeadDim>::kBlock;
    const int first = half * kPairs + i * kStep;  // of all lanes; rules out most steps at once
    const bool near = first < (block + 1) * kBlock && first + kStep > block * kBlock;
    return near && pair(i) < kPairs && (half * kPairs + pair(i)) / kBlock == block;
  }

  static __device__ __forceinline__ void write_part(Q8* to, int at, const Floats& part,
                                                    unsigned top) {
    using Row = CacheRow<Q8, kHeadDim>;
    const Q8Scale scale(top);
    Pack<signed char, kVector> q;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      q.v[j] = static_cast<signed char>(a8::quantise(part.v[j], scale.inverse));
    }
    *reinterpret_cast<Pack<signed char, kVector>*>(to + at) = q;
    if (at % Row::kBlock == 0) {
      Row::scale(to, at) = scale.d;
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

// The cache row of a head at a position; caches are [heads][kCacheRows] rows of kHeadDim values.
template <int kHeadDim, int kCacheRows, typename Element>
__device__ __forceinline__ Element* cache_row(Element* cache, int head, int position) {
  const size_t row = static_cast<size_t>(head) * kCacheRows + position % kCacheRows;
  return cache + row * CacheRow<Element, kHeadDim>::kStep;
}

// The same to read: `CacheRow` knows no constant elements.
template <int kHeadDim, int kCacheRows, typename Element>
__device__ __forceinline__ const Element* cache_row(const Element* cache, int head, int position) {
  return cache_row<kHeadDim, kCacheRows>(const_cast<Element*>(cache), head, position);
}
