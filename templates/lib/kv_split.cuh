// How attention is cut along the positions, so that a row's bits depend on its own end only.
//
// Positions are cut into units of kUnit, at absolute multiples. Units are folded, first to last,
// into splits of `fold` units, also at absolute multiples; the splits of a row are combined in
// order of position. `fold` follows from the row's end alone: it is the least that leaves a row no
// more than kSlots splits. So neither the rows that run together nor the size of a cache matter,
// one grid serves every length, and partial results take the same room at every length.
#pragma once

#include "kv_heads.cuh"

constexpr float kLog2E = 1.44269504088896341f;

template <int kUnit_, int kSpan_, int kSlots_>
struct KvSplits {
  static constexpr int kUnit = kUnit_;
  static constexpr int kSpan = kSpan_;  // positions a row may look back; 0: all
  static constexpr int kSlots = kSlots_;
  // A window may start inside a split and so touch one more.
  static constexpr int kPartials = kSpan == 0 ? kSlots : kSlots + 1;

  // The first position a row sees.
  static __device__ __forceinline__ int first(int end) {
    return kSpan == 0 ? 0 : max(0, end - kSpan);
  }

  // Units in a split of a row.
  static __device__ __forceinline__ int fold(int end) {
    constexpr int kMostUnits = (kSpan + 2 * kUnit - 2) / kUnit;
    const int seen = (max(end, 1) + kUnit - 1) / kUnit;
    const int units = kSpan == 0 ? seen : min(seen, kMostUnits);
    return (units + kSlots - 1) / kSlots;
  }
};

// Where the keys or the values of one K/V head are: in its cache, or, where the step's own rows
// have no room there yet, in a chunk plane. Either has position p in row p mod its rows.
template <typename Shape, bool kChunked = (Shape::kChunkRows > 0)>
struct SeenRows {
  const typename Shape::Cache* cache;  // kCacheRows rows

  __device__ __forceinline__ const typename Shape::Cache* row(int position) const {
    const size_t at = static_cast<unsigned>(position) % Shape::kCacheRows;
    return cache + at * Shape::Row::kStep;
  }
};

template <typename Shape>
struct SeenRows<Shape, true> : SeenRows<Shape, false> {
  const typename Shape::Cache* chunk;  // kChunkRows rows
  int first_new;                       // the first position that is in the chunk

  __device__ __forceinline__ const typename Shape::Cache* row(int position) const {
    const size_t at = static_cast<unsigned>(position) % Shape::kChunkRows;
    return position < first_new ? SeenRows<Shape, false>::row(position)
                                : chunk + at * Shape::Row::kStep;
  }
};

// Those of a K/V head, from planes of all heads.
template <typename Shape>
__device__ __forceinline__ SeenRows<Shape> seen_rows(const typename Shape::Cache* cache,
                                                     const typename Shape::Cache* chunk,
                                                     int first_new, int kv_head) {
  const size_t plane = static_cast<size_t>(Shape::kCacheRows) * Shape::Row::kStep * kv_head;
  if constexpr (Shape::kChunkRows > 0) {
    const size_t part = static_cast<size_t>(Shape::kChunkRows) * Shape::Row::kStep * kv_head;
    return {{cache + plane}, chunk + part, first_new};
  } else {
    return {cache + plane};
  }
}

// The rows of a step: where each ends and how its positions are folded.
template <int kMaxRows>
struct RowPlan {
  int end[kMaxRows];
  int fold[kMaxRows];
};

// Positions [first, end) that some of the rows see.
struct KeyRange {
  int first;
  int end;
};

template <typename Splits, int kMaxRows>
__device__ __forceinline__ void plan_rows(RowPlan<kMaxRows>& plan, const int* ends, int rows) {
  if (threadIdx.x < kMaxRows) {
    const int end = static_cast<int>(threadIdx.x) < rows ? ends[threadIdx.x] : 0;
    plan.end[threadIdx.x] = end;
    plan.fold[threadIdx.x] = Splits::fold(end);
  }
}

// Call `work(fold, split, KeyRange)` for each split that belongs to `slot`. Rows differ in fold
// only where a step crosses a length at which it grows; each fold then has its own turn. Every warp
// looks at all rows at once, a lane at every 32nd: a loop over pairs of rows took longer than a
// unit's arithmetic.
template <typename Splits, int kMaxRows, typename Work>
__device__ __forceinline__ void for_each_split(const RowPlan<kMaxRows>& plan, int first_row,
                                               int last_row, int slot, Work work) {
  constexpr int kLaneRows = (kMaxRows + kWarp - 1) / kWarp;
  const int lane = threadIdx.x % kWarp;
  bool open[kLaneRows];  // rows that have not had their turn
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const int row = first_row + lane + i * kWarp;
    open[i] = row <= last_row && plan.end[row] > 0;
  }
  while (true) {
    int lead = kMaxRows;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      lead = open[i] ? min(lead, first_row + lane + i * kWarp) : lead;
    }
    lead = __reduce_min_sync(kAllLanes, lead);
    if (lead == kMaxRows) {
      return;
    }
    const int fold = plan.fold[lead];
    KeyRange seen = {Splits::first(plan.end[lead]), plan.end[lead]};
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = first_row + lane + i * kWarp;
      if (open[i] && plan.fold[row] == fold) {
        open[i] = false;
        seen.first = min(seen.first, Splits::first(plan.end[row]));
        seen.end = max(seen.end, plan.end[row]);
      }
    }
    seen.first = __reduce_min_sync(kAllLanes, seen.first);
    seen.end = __reduce_max_sync(kAllLanes, seen.end);
    const int positions = fold * Splits::kUnit;  // in a split
    const int low = seen.first / positions;
    const int high = (seen.end - 1) / positions;
    int split = low + (slot + Splits::kPartials - low % Splits::kPartials) % Splits::kPartials;
    for (; split <= high; split += Splits::kPartials) {
      const KeyRange part = {max(seen.first, split * positions),
                             min(seen.end, (split + 1) * positions)};
      work(fold, split, part);
    }
  }
}

// Does this row see a position of the split?
template <typename Splits>
__device__ __forceinline__ bool sees_split(int end, int fold, int split) {
  const int positions = fold * Splits::kUnit;
  const int from = max(Splits::first(end), split * positions);
  return from < min(end, (split + 1) * positions);
}

// Partial results in scratch: [kPartials][kMaxRows][kHeads][kHeadDim] sums of weighted values, then
// [kPartials][kMaxRows][kHeads] pairs of the largest score and the sum of weights.
template <typename Splits, int kMaxRows, int kHeads, int kHeadDim>
struct Partials {
  static constexpr size_t kEntries = static_cast<size_t>(Splits::kPartials) * kMaxRows * kHeads;

  static __device__ __forceinline__ size_t entry(int slot, int row, int head) {
    return (static_cast<size_t>(slot) * kMaxRows + row) * kHeads + head;
  }

  static __device__ __forceinline__ float* sums(float* scratch, size_t entry) {
    return scratch + entry * kHeadDim;
  }

  static __device__ __forceinline__ float2* weights(float* scratch, size_t entry) {
    return reinterpret_cast<float2*>(scratch + kEntries * kHeadDim) + entry;
  }
};

// The largest value of a warp; the order of integers is that of the floats they encode.
__device__ __forceinline__ float warp_max(float value) {
  const int bits = __float_as_int(value);
  const int ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  const int most = __reduce_max_sync(kAllLanes, ordered);
  return __int_as_float(most ^ ((most >> 31) & 0x7fffffff));
}

// Running softmax of one row, held by a warp. `sum` is each lane's share.
struct SoftmaxRow {
  float top = -infinity();
  float sum = 0.0f;

  // Take in the scores of one unit, lane by lane; scores become weights rounded to `Element`.
  // Returns the factor by which everything before shrinks. A unit the row sees nothing of
  // changes no bit: its weights are 0 and the factor is 1.
  template <typename Element, int kKeys>
  __device__ __forceinline__ float update(float (&score)[kKeys], const bool (&seen)[kKeys]) {
    float most = -infinity();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      most = seen[i] && score[i] > most ? score[i] : most;
    }
    most = warp_max(most);
    const float next = most > top ? most : top;
    const float shrink = next == -infinity() ? 1.0f : exp2_fast((top - next) * kLog2E);
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      float weight = seen[i] ? exp2_fast((score[i] - next) * kLog2E) : 0.0f;
      Element rounded;
      round_to(rounded, weight);
      score[i] = widen(rounded);
      sum += score[i];
    }
    top = next;
    return shrink;
  }
};
