// Attention of the rows of one step over cached keys and values, on the tensor cores.
//
// A block has one K/V head and one slot of splits. Its rows are the (row, head of the group) pairs,
// all at once, so that keys and values are read once. Per unit: the warps share the scores by keys
// and rows, then the softmax by rows, then the values by columns. The next unit's keys arrive
// during softmax and values, its values during the next scores. Rows of q8_0 are widened once they
// are here, keys and values in turn in one buffer, and the next unit's arrive from then on.
// Rows that an earlier program left arrive while the predecessor still runs (`Op.reads_early`).
#pragma once

#include "kv_split.cuh"

// What a kernel is compiled for. kRowTiles: tiles of 16 (row, head) pairs a block holds.
// kQueryParts: 2 splits each query into two terms, for caches coarser than float16. kChunkRows:
// rows of the planes that hold the step's own keys and values, 0 where the caches do.
template <typename Cache_, typename Splits_, int kHeadDim_, int kHeads_, int kKvHeads_,
          int kCacheRows_, int kMaxRows_, int kRowTiles_, int kQueryParts_,
          int kChunkRows_ = 0>
struct AttentionShape {
  using Cache = Cache_;
  using Splits = Splits_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeads = kHeads_;
  static constexpr int kKvHeads = kKvHeads_;
  static constexpr int kGroup = kHeads / kKvHeads;
  static constexpr int kCacheRows = kCacheRows_;
  static constexpr int kMaxRows = kMaxRows_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kQueryParts = kQueryParts_;
  static constexpr int kChunkRows = kChunkRows_;
  static constexpr int kUnit = Splits::kUnit;
  using Row = CacheRow<Cache, kHeadDim>;
  using Element = typename Row::Value;
  static constexpr bool kPacked = Row::kPacked;  // rows are widened before they are used

  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kTile = 16;                  // rows of one tensor-core tile
  static constexpr int kRows = kRowTiles * kTile;   // (row, head) pairs of a block
  static constexpr int kHeadStride = kHeadDim + 8;  // elements; 16 bytes more keep banks apart
  static constexpr int kCopyStride = kPacked ? Row::kStep : kHeadStride;  // elements of the cache
  static constexpr int kScoreStride = kUnit + 4;    // floats; likewise

  // Scores: a warp has kKeyTiles tiles of 8 keys and every kRowWarps-th row tile.
  static constexpr int kKeyTiles = kRowTiles >= 2 ? 2 : 1;
  static constexpr int kKeyWarps = kUnit / 8 / kKeyTiles;
  static constexpr int kRowWarps = kWarps / kKeyWarps;
  static constexpr int kWarpRowTiles = (kRowTiles + kRowWarps - 1) / kRowWarps;
  // Softmax: a warp has every kWarps-th row, a lane every 32nd key.
  static constexpr int kLaneKeys = kUnit / kWarp;
  // Values: a warp has every kWarps-th pair of column tiles (16 columns).
  static constexpr int kColumnPairs = kHeadDim / 16;
  static constexpr int kWarpPairs = (kColumnPairs + kWarps - 1) / kWarps;

  static_assert(kHeadDim % 32 == 0 && kUnit % kWarp == 0 && kWarps % kKeyWarps == 0);
  static_assert(2 * kQueryParts * kUnit <= 4 * kScoreStride, "weights lie where scores were");
};

// The keys or values of a unit, widened; nothing where they are used as they are copied.
template <typename Shape, bool kPacked = Shape::kPacked>
struct WideUnit {};

template <typename Shape>
struct WideUnit<Shape, true> {
  typename Shape::Element wide[Shape::kUnit][Shape::kHeadStride];
};

// The dynamic shared memory of a block.
template <typename Shape>
struct AttentionShared : WideUnit<Shape> {
  typename Shape::Element query[Shape::kQueryParts][Shape::kRows][Shape::kHeadStride];
  typename Shape::Cache key[Shape::kUnit][Shape::kCopyStride];
  typename Shape::Cache value[Shape::kUnit][Shape::kCopyStride];
  float score[Shape::kRows][Shape::kScoreStride];  // later the weights, as elements
  float shrink[Shape::kRows];
  float top[Shape::kRows];           // running softmax: the largest score so far
  float share[Shape::kRows][kWarp];  // and each lane's share of the sum of weights
  RowPlan<Shape::kMaxRows> plan;

  // The weights of a row; part 1 is what rounding took from part 0.
  __device__ __forceinline__ typename Shape::Element* weights(int row, int part) {
    return reinterpret_cast<typename Shape::Element*>(score[row]) + part * Shape::kUnit;
  }
};

// Split a float into one or two elements that add up to (nearly) it.
template <typename Element>
__device__ __forceinline__ float take_part(Element& part, float value) {
  round_to(part, value);
  return value - widen(part);
}

template <typename Shape>
struct AttentionBlock {
  using Cache = typename Shape::Cache;
  using Element = typename Shape::Element;
  using Splits = typename Shape::Splits;
  using Row = typename Shape::Row;
  using Copied = Cache (*)[Shape::kCopyStride];
  using Rows = Element (*)[Shape::kHeadStride];
  using Scratch =
      Partials<Splits, Shape::kMaxRows, Shape::kHeads, Shape::kHeadDim>;

  AttentionShared<Shape>& shared;
  SeenRows<Shape> keys;
  SeenRows<Shape> values;
  int first_pair;         // the block's first (row, head) pair
  int pairs;              // how many there are
  int kv_head;
  int warp;
  int lane;
  int first_new;  // the first position whose key this step appends
  bool ready;  // the predecessor is done and queries are in shared memory

  float sums[Shape::kRowTiles][Shape::kWarpPairs][2][4];

  __device__ __forceinline__ int row_tiles() const {
    return (pairs + Shape::kTile - 1) / Shape::kTile;
  }

  __device__ __forceinline__ int row_of(int pair) const {
    return (first_pair + pair) / Shape::kGroup;
  }

  __device__ __forceinline__ int head_of(int pair) const {
    return kv_head * Shape::kGroup + (first_pair + pair) % Shape::kGroup;
  }

  // Queries, scaled, as elements; the pairs that fill up the last tile are zero.
  __device__ __forceinline__ void load_queries(const float* q, float scale) {
    constexpr int kVectors = Shape::kHeadDim / 4;
    for (int i = threadIdx.x; i < row_tiles() * Shape::kTile * kVectors; i += Shape::kThreads) {
      const int pair = i / kVectors;
      const int at = i % kVectors * 4;
      float4 v = zero4();
      if (pair < pairs) {
        const size_t head = static_cast<size_t>(row_of(pair)) * Shape::kHeads + head_of(pair);
        v = scale4(read4(q + head * Shape::kHeadDim + at), scale);
      }
#pragma unroll
      for (int part = 0; part < Shape::kQueryParts; ++part) {
        Pack<Element, 4> rounded;
        v.x = take_part(rounded.v[0], v.x);
        v.y = take_part(rounded.v[1], v.y);
        v.z = take_part(rounded.v[2], v.z);
        v.w = take_part(rounded.v[3], v.w);
        *reinterpret_cast<Pack<Element, 4>*>(&shared.query[part][pair][at]) = rounded;
      }
    }
  }

  // Start to copy rows [first, last) of the unit that begins at `start`; rows outside `seen` become
  // zero, so that whatever a cache holds there cannot reach a sum.
  __device__ __forceinline__ void copy_rows(Copied to, const SeenRows<Shape>& from, int start,
                                            int first, int last, KeyRange seen) {
    constexpr int kChunk = 16 / sizeof(Cache);
    constexpr int kChunks = Row::kStep / kChunk;
    constexpr int kUnroll = Shape::kPacked ? 2 : 4;  // more of packed rows would cost spills
#pragma unroll kUnroll
    for (int i = first * kChunks + threadIdx.x; i < last * kChunks; i += Shape::kThreads) {
      const int key = i / kChunks;
      const int at = i % kChunks * kChunk;
      const int position = start + key;
      const bool present = position >= seen.first && position < seen.end;
      copy_async(&to[key][at], from.row(position) + at, present);
    }
  }

  __device__ __forceinline__ void copy_unit(Copied to, const SeenRows<Shape>& from, int start,
                                            KeyRange seen) {
    copy_rows(to, from, start, 0, Shape::kUnit, seen);
  }

  // A unit that has arrived, in all threads, as tensor cores take it.
  __device__ __forceinline__ Rows open_unit(Copied unit) {
    if constexpr (Shape::kPacked) {
      constexpr unsigned kChunks = Shape::kHeadDim / 8;
#pragma unroll 4
      for (unsigned i = threadIdx.x; i < Shape::kUnit * kChunks; i += Shape::kThreads) {
        const unsigned key = i / kChunks;
        const unsigned at = i % kChunks * 8;
        *reinterpret_cast<uint4*>(&shared.wide[key][at]) = Row::values8(unit[key], at);
      }
      __syncthreads();
      return shared.wide;
    } else {
      return unit;
    }
  }

  // Scores of the unit. Two running sums a score, over even and odd steps of 16 elements.
  __device__ __forceinline__ void score_unit(Rows keys) {
    const int key_warp = warp % Shape::kKeyWarps;
    const int row_warp = warp / Shape::kKeyWarps;
    float total[Shape::kWarpRowTiles][Shape::kKeyTiles][2][4] = {};
#pragma unroll 2
    for (int at = 0; at < Shape::kHeadDim; at += 32) {
      unsigned key[Shape::kKeyTiles][4];
#pragma unroll
      for (int k = 0; k < Shape::kKeyTiles; ++k) {
        const int tile = key_warp * Shape::kKeyTiles + k;
        load_matrix_x4(key[k], &keys[tile * 8 + lane % 8][at + lane / 8 * 8]);
      }
#pragma unroll
      for (int part = 0; part < Shape::kQueryParts; ++part) {
#pragma unroll
        for (int i = 0; i < Shape::kWarpRowTiles; ++i) {
          const int tile = row_warp + i * Shape::kRowWarps;
          if (tile < row_tiles()) {
            const int row = tile * Shape::kTile + lane % 16;
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
              unsigned query[4];
              load_matrix_x4(query, &shared.query[part][row][at + odd * 16 + lane / 16 * 8]);
#pragma unroll
              for (int k = 0; k < Shape::kKeyTiles; ++k) {
                tile_mma(total[i][k][odd], query, key[k][2 * odd], key[k][2 * odd + 1],
                         Element{});
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kWarpRowTiles; ++i) {
      const int tile = row_warp + i * Shape::kRowWarps;
      if (tile < row_tiles()) {
#pragma unroll
        for (int k = 0; k < Shape::kKeyTiles; ++k) {
          const int row = tile * Shape::kTile + lane / 4;
          const int key = (key_warp * Shape::kKeyTiles + k) * 8 + lane % 4 * 2;
          const float* even = total[i][k][0];
          const float* odd = total[i][k][1];
          shared.score[row][key] = even[0] + odd[0];
          shared.score[row][key + 1] = even[1] + odd[1];
          shared.score[row + 8][key] = even[2] + odd[2];
          shared.score[row + 8][key + 1] = even[3] + odd[3];
        }
      }
    }
  }

  // Scores of the unit to weights.
  __device__ __forceinline__ void weigh_unit(int start, int fold) {
#pragma unroll 2
    for (int pair = warp; pair < row_tiles() * Shape::kTile; pair += Shape::kWarps) {
      int end = 0;
      if (pair < pairs && shared.plan.fold[row_of(pair)] == fold) {
        end = shared.plan.end[row_of(pair)];
      }
      float score[Shape::kLaneKeys];
      bool seen[Shape::kLaneKeys];
#pragma unroll
      for (int j = 0; j < Shape::kLaneKeys; ++j) {
        const int position = start + lane + j * kWarp;
        score[j] = shared.score[pair][lane + j * kWarp];
        seen[j] = position >= Splits::first(end) && position < end;
      }
      SoftmaxRow row = {shared.top[pair], shared.share[pair][lane]};
      __syncwarp();  // the weights overwrite the scores
      float shrink;
      if (Shape::kQueryParts == 1) {
        shrink = row.update<Element>(score, seen);
      } else {
        shrink = row.update<float>(score, seen);
      }
#pragma unroll
      for (int j = 0; j < Shape::kLaneKeys; ++j) {
        float rest = score[j];
#pragma unroll
        for (int part = 0; part < Shape::kQueryParts; ++part) {
          rest = take_part(shared.weights(pair, part)[lane + j * kWarp], rest);
        }
      }
      shared.share[pair][lane] = row.sum;
      if (lane == 0) {
        shared.top[pair] = row.top;
        shared.shrink[pair] = shrink;
      }
    }
  }

  // Add the weighted values of the unit.
  __device__ __forceinline__ void value_unit(Rows values) {
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
      if (tile < row_tiles()) {
        const float upper = shared.shrink[tile * Shape::kTile + lane / 4];
        const float lower = shared.shrink[tile * Shape::kTile + lane / 4 + 8];
#pragma unroll
        for (int i = 0; i < Shape::kWarpPairs; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float(&sum)[4] = sums[tile][i][half];
            sum[0] *= upper;
            sum[1] *= upper;
            sum[2] *= lower;
            sum[3] *= lower;
          }
        }
      }
    }
#pragma unroll
    for (int key = 0; key < Shape::kUnit; key += 16) {
      unsigned value[Shape::kWarpPairs][4];
#pragma unroll
      for (int i = 0; i < Shape::kWarpPairs; ++i) {
        const int pair = warp + i * Shape::kWarps;
        if (pair < Shape::kColumnPairs) {
          load_matrix_x4_transposed(value[i],
                                    &values[key + lane % 16][pair * 16 + lane / 16 * 8]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
        if (tile < row_tiles()) {
#pragma unroll
          for (int part = 0; part < Shape::kQueryParts; ++part) {
            unsigned weight[4];
            load_matrix_x4(weight, shared.weights(tile * Shape::kTile + lane % 16, part) + key +
                                       lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < Shape::kWarpPairs; ++i) {
              if (warp + i * Shape::kWarps < Shape::kColumnPairs) {
                tile_mma(sums[tile][i][0], weight, value[i][0], value[i][1], Element{});
                tile_mma(sums[tile][i][1], weight, value[i][2], value[i][3], Element{});
              }
            }
          }
        }
      }
    }
  }

  // Write the partial results of the rows that see the split.
  __device__ __forceinline__ void write_split(float* scratch, int fold, int split, int slot) {
    for (int pair = warp; pair < pairs; pair += Shape::kWarps) {
      const float sum = lanes_sum(shared.share[pair][lane]);
      if (lane == 0 && writes(pair, fold, split)) {
        const size_t entry = Scratch::entry(slot, row_of(pair), head_of(pair));
        *Scratch::weights(scratch, entry) = make_float2(shared.top[pair], sum);
      }
    }
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int pair = tile * Shape::kTile + lane / 4 + low * 8;
        if (pair < pairs && writes(pair, fold, split)) {
          const size_t entry = Scratch::entry(slot, row_of(pair), head_of(pair));
          float* to = Scratch::sums(scratch, entry);
#pragma unroll
          for (int i = 0; i < Shape::kWarpPairs; ++i) {
            const int columns = warp + i * Shape::kWarps;
            if (columns < Shape::kColumnPairs) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float* sum = &sums[tile][i][half][2 * low];
                *reinterpret_cast<float2*>(to + columns * 16 + half * 8 + lane % 4 * 2) =
                    make_float2(sum[0], sum[1]);
              }
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ bool writes(int pair, int fold, int split) const {
    const int row = row_of(pair);
    return shared.plan.fold[row] == fold &&
           sees_split<Splits>(shared.plan.end[row], fold, split);
  }

  // One split: its units, first to last. Needs no unit in flight and leaves none.
  __device__ __forceinline__ void attend_split(const float* q, float scale, float* scratch,
                                               int fold, int split, KeyRange seen, int slot) {
#pragma unroll
    for (int tile = 0; tile < Shape::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < Shape::kWarpPairs; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums[tile][i][half][j] = 0.0f;
          }
        }
      }
    }
    // Only the warp that has a row reads and writes its running softmax.
    for (int pair = warp; pair < Shape::kRows; pair += Shape::kWarps) {
      const SoftmaxRow nothing;
      shared.share[pair][lane] = nothing.sum;
      if (lane == 0) {
        shared.top[pair] = nothing.top;
      }
    }
    const int begin = seen.first / Shape::kUnit * Shape::kUnit;
    // Three groups of copies: keys and values that are older than the step, then the step's own.
    const int old = ready ? Shape::kUnit : max(0, min(Shape::kUnit, first_new - begin));
    copy_rows(shared.key, keys, begin, 0, old, seen);
    copy_commit();
    copy_rows(shared.value, values, begin, 0, old, seen);
    copy_commit();
    if (!ready) {  // while the first unit is on its way
      wait_for_predecessor();
      copy_rows(shared.key, keys, begin, old, Shape::kUnit, seen);
      copy_rows(shared.value, values, begin, old, Shape::kUnit, seen);
      load_queries(q, scale);
      ready = true;
    }
    copy_commit();
    if (old == Shape::kUnit) {
      copy_wait<2>();  // all but the values of this unit
    } else {
      copy_wait<0>();
    }
    for (int start = begin; start < seen.end; start += Shape::kUnit) {
      const int next = start + Shape::kUnit;
      const auto copy_next = [&](Copied to, const SeenRows<Shape>& from) {
        if (next < seen.end) {
          copy_unit(to, from, next, seen);
        }
        copy_commit();
      };
      if (start > begin) {
        copy_wait<1>();  // all but the values of this unit
      }
      __syncthreads();
      const Rows arrived_keys = open_unit(shared.key);
      if (Shape::kPacked) {
        copy_next(shared.key, keys);
      }
      if (warp < Shape::kKeyWarps * Shape::kRowWarps) {
        score_unit(arrived_keys);
      }
      __syncthreads();
      if (!Shape::kPacked) {
        copy_next(shared.key, keys);
      }
      weigh_unit(start, fold);
      copy_wait<1>();  // all but the keys of the next unit
      __syncthreads();
      const Rows arrived_values = open_unit(shared.value);
      if (Shape::kPacked) {
        copy_next(shared.value, values);
      }
      value_unit(arrived_values);
      __syncthreads();
      if (!Shape::kPacked) {
        copy_next(shared.value, values);
      }
    }
    copy_wait<0>();
    write_split(scratch, fold, split, slot);
  }
};

// The body of a kernel with grid (slots, K/V heads, blocks of pairs).
template <typename Shape>
__device__ __forceinline__ void attention_body(int rows, const float* q, const int* ends,
                                               const typename Shape::Cache* k_cache,
                                               const typename Shape::Cache* v_cache,
                                               float* scratch, float scale,
                                               AttentionShared<Shape>& shared,
                                               const typename Shape::Cache* k_chunk = nullptr,
                                               const typename Shape::Cache* v_chunk = nullptr) {
  const int first_pair = blockIdx.z * Shape::kRows;
  const int pairs = min(Shape::kRows, rows * Shape::kGroup - first_pair);
  if (pairs <= 0) {
    return;
  }
  const int kv_head = blockIdx.y;
  AttentionBlock<Shape> block{
      shared,
      seen_rows<Shape>(k_cache, k_chunk, ends[0] - 1, kv_head),
      seen_rows<Shape>(v_cache, v_chunk, ends[0] - 1, kv_head),
      first_pair, pairs,        kv_head,
      static_cast<int>(threadIdx.x / kWarp), static_cast<int>(threadIdx.x % kWarp),
      ends[0] - 1, false, {}};
  plan_rows<typename Shape::Splits>(shared.plan, ends, rows);
  __syncthreads();
  const int slot = blockIdx.x;
  for_each_split<typename Shape::Splits>(
      shared.plan, block.row_of(0), block.row_of(pairs - 1), slot,
      [&](int fold, int split, KeyRange seen) {
        block.attend_split(q, scale, scratch, fold, split, seen, slot);
      });
  if (!block.ready) {
    wait_for_predecessor();  // a kernel is done only when those before it are
  }
}
