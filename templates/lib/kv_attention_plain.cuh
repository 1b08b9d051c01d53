// Attention of the rows of one step over cached keys and values, in float32 throughout: for caches
// that the tensor cores cannot read. Splits and partial results are those of kv_split.cuh.
#pragma once

#include "kv_split.cuh"

template <typename Cache_, typename Splits_, int kHeadDim_, int kHeads_, int kKvHeads_,
          int kCacheRows_, int kMaxRows_, int kChunkRows_ = 0>
struct PlainShape {
  using Cache = Cache_;
  using Splits = Splits_;
  static constexpr int kHeadDim = kHeadDim_;
  using Row = CacheRow<Cache, kHeadDim>;
  static constexpr int kHeads = kHeads_;
  static constexpr int kGroup = kHeads / kKvHeads_;
  static constexpr int kCacheRows = kCacheRows_;
  static constexpr int kMaxRows = kMaxRows_;
  static constexpr int kChunkRows = kChunkRows_;  // of the step's own planes; 0: it is cached
  static constexpr int kUnit = Splits::kUnit;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = 16;  // (row, head) pairs of a block
  static constexpr int kLaneKeys = kUnit / kWarp;
  static constexpr int kLaneColumns = (kHeadDim + kWarp - 1) / kWarp;
  static constexpr int kThreadColumns = (kHeadDim + kThreads - 1) / kThreads;
};

template <typename Shape>
struct PlainShared {
  float query[Shape::kRows][Shape::kHeadDim];
  float score[Shape::kRows][Shape::kUnit];  // later the weights
  float shrink[Shape::kRows];
  RowPlan<Shape::kMaxRows> plan;
};

template <typename Shape>
struct PlainBlock {
  using Cache = typename Shape::Cache;
  using Row = typename Shape::Row;
  using Splits = typename Shape::Splits;
  using Scratch = Partials<Splits, Shape::kMaxRows, Shape::kHeads, Shape::kHeadDim>;
  static constexpr int kWarpRows = Shape::kRows / Shape::kWarps;

  PlainShared<Shape>& shared;
  SeenRows<Shape> keys;
  SeenRows<Shape> values;
  int first_pair;  // the block's first (row, head) pair
  int pairs;       // how many there are
  int kv_head;
  int warp;
  int lane;
  bool ready;  // queries are in shared memory

  __device__ __forceinline__ int row_of(int pair) const {
    return (first_pair + pair) / Shape::kGroup;
  }

  __device__ __forceinline__ int head_of(int pair) const {
    return kv_head * Shape::kGroup + (first_pair + pair) % Shape::kGroup;
  }

  __device__ __forceinline__ void load_queries(const float* q, float scale) {
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kHeadDim; i += Shape::kThreads) {
      const int pair = i / Shape::kHeadDim;
      const int at = i % Shape::kHeadDim;
      float value = 0.0f;
      if (pair < pairs) {
        const size_t head = static_cast<size_t>(row_of(pair)) * Shape::kHeads + head_of(pair);
        value = q[head * Shape::kHeadDim + at] * scale;
      }
      shared.query[pair][at] = value;
    }
  }

  // A warp has every eighth key; its lanes share the elements.
  __device__ __forceinline__ void score_unit(int start, KeyRange seen) {
    for (int key = warp; key < Shape::kUnit; key += Shape::kWarps) {
      const int position = start + key;
      if (position < seen.first || position >= seen.end) {
        continue;
      }
      float element[Shape::kLaneColumns];
#pragma unroll
      for (int i = 0; i < Shape::kLaneColumns; ++i) {
        const int at = lane + i * kWarp;
        element[i] = at < Shape::kHeadDim ? Row::value(keys.row(position), at) : 0.0f;
      }
      for (int pair = 0; pair < pairs; ++pair) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < Shape::kLaneColumns; ++i) {
          const int at = lane + i * kWarp;
          total = fmaf(at < Shape::kHeadDim ? shared.query[pair][at] : 0.0f, element[i], total);
        }
        total = lanes_sum(total);
        if (lane == 0) {
          shared.score[pair][key] = total;
        }
      }
    }
  }

  __device__ __forceinline__ void weigh_unit(SoftmaxRow (&softmax)[kWarpRows], int start,
                                             int fold) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int pair = warp + i * Shape::kWarps;
      const bool mine = pair < pairs && shared.plan.fold[row_of(pair)] == fold;
      const int end = mine ? shared.plan.end[row_of(pair)] : 0;
      float score[Shape::kLaneKeys];
      bool seen[Shape::kLaneKeys];
#pragma unroll
      for (int j = 0; j < Shape::kLaneKeys; ++j) {
        const int position = start + lane + j * kWarp;
        seen[j] = position >= Splits::first(end) && position < end;
        score[j] = seen[j] ? shared.score[pair][lane + j * kWarp] : 0.0f;
      }
      const float shrink = softmax[i].template update<float>(score, seen);
#pragma unroll
      for (int j = 0; j < Shape::kLaneKeys; ++j) {
        shared.score[pair][lane + j * kWarp] = score[j];
      }
      if (lane == 0) {
        shared.shrink[pair] = shrink;
      }
    }
  }

  // A thread has every 256th column of all pairs.
  __device__ __forceinline__ void value_unit(float (&sums)[Shape::kRows][Shape::kThreadColumns],
                                             int start, KeyRange seen) {
#pragma unroll
    for (int j = 0; j < Shape::kThreadColumns; ++j) {
      const int at = threadIdx.x + j * Shape::kThreads;
      if (at < Shape::kHeadDim) {
#pragma unroll
        for (int pair = 0; pair < Shape::kRows; ++pair) {
          sums[pair][j] *= shared.shrink[pair];
        }
        const int from = max(start, seen.first);
        const int to = min(start + Shape::kUnit, seen.end);
        for (int position = from; position < to; ++position) {
          const float value = Row::value(values.row(position), at);
#pragma unroll
          for (int pair = 0; pair < Shape::kRows; ++pair) {
            sums[pair][j] = fmaf(shared.score[pair][position - start], value, sums[pair][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool writes(int pair, int fold, int split) const {
    const int row = row_of(pair);
    return shared.plan.fold[row] == fold && sees_split<Splits>(shared.plan.end[row], fold, split);
  }

  __device__ __forceinline__ void attend_split(const float* q, float scale, float* scratch,
                                               int fold, int split, KeyRange seen, int slot) {
    if (!ready) {
      load_queries(q, scale);
      __syncthreads();
      ready = true;
    }
    float sums[Shape::kRows][Shape::kThreadColumns] = {};
    SoftmaxRow softmax[kWarpRows];
    const int begin = seen.first / Shape::kUnit * Shape::kUnit;
    for (int start = begin; start < seen.end; start += Shape::kUnit) {
      score_unit(start, seen);
      __syncthreads();
      weigh_unit(softmax, start, fold);
      __syncthreads();
      value_unit(sums, start, seen);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int pair = warp + i * Shape::kWarps;
      const float sum = lanes_sum(softmax[i].sum);
      if (lane == 0 && pair < pairs && writes(pair, fold, split)) {
        const size_t entry = Scratch::entry(slot, row_of(pair), head_of(pair));
        *Scratch::weights(scratch, entry) = make_float2(softmax[i].top, sum);
      }
    }
#pragma unroll
    for (int pair = 0; pair < Shape::kRows; ++pair) {
      if (pair < pairs && writes(pair, fold, split)) {
        const size_t entry = Scratch::entry(slot, row_of(pair), head_of(pair));
#pragma unroll
        for (int j = 0; j < Shape::kThreadColumns; ++j) {
          const int at = threadIdx.x + j * Shape::kThreads;
          if (at < Shape::kHeadDim) {
            Scratch::sums(scratch, entry)[at] = sums[pair][j];
          }
        }
      }
    }
  }
};

// The body of a kernel with grid (slots, K/V heads, blocks of pairs).
template <typename Shape>
__device__ __forceinline__ void plain_attention_body(
    int rows, const float* q, const int* ends, const typename Shape::Cache* k_cache,
    const typename Shape::Cache* v_cache, float* scratch, float scale, PlainShared<Shape>& shared,
    const typename Shape::Cache* k_chunk = nullptr,
    const typename Shape::Cache* v_chunk = nullptr) {
  const int first_pair = blockIdx.z * Shape::kRows;
  const int pairs = min(Shape::kRows, rows * Shape::kGroup - first_pair);
  if (pairs <= 0) {
    return;
  }
  const int kv_head = blockIdx.y;
  PlainBlock<Shape> block{shared,
                          seen_rows<Shape>(k_cache, k_chunk, ends[0] - 1, kv_head),
                          seen_rows<Shape>(v_cache, v_chunk, ends[0] - 1, kv_head),
                          first_pair,
                          pairs,
                          kv_head,
                          static_cast<int>(threadIdx.x / kWarp),
                          static_cast<int>(threadIdx.x % kWarp),
                          false};
  plan_rows<typename Shape::Splits>(shared.plan, ends, rows);
  __syncthreads();
  const int slot = blockIdx.x;
  for_each_split<typename Shape::Splits>(
      shared.plan, block.row_of(0), block.row_of(pairs - 1), slot,
      [&](int fold, int split, KeyRange seen) {
        block.attend_split(q, scale, scratch, fold, split, seen, slot);
      });
}
