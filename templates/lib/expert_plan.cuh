// Who chose which expert: the pairs of (row, slot), expert by expert.
//
// Pair p is slot p % active of row p / active. A block sorts all pairs by expert, then by p, and
// cuts each expert's into groups of up to `kColumns`: a group is what one pass over the expert's
// weights multiplies. Every block of a launch makes the same plan from the same table.
#pragma once

/// An id as the number of an expert: whatever it is, no weight outside of the experts is read.
__device__ __forceinline__ int expert_of(int id, int experts) {
  return max(0, min(experts - 1, id));
}

/// Lies in shared memory. `kPairs`: the most pairs there can be, of `kExperts` experts.
template <int kPairs, int kColumns, int kExperts>
struct ExpertPlan {
  static constexpr int kVectors = (kPairs + 3) / 4;
  static constexpr unsigned kNobody = 0xffffffffu;
  static constexpr unsigned kFirst = 0x80000000u;  // marks the first pair of a group
  static_assert(kPairs < 1 << 16 && kExperts <= 1 << 15);

  uint4 keys[kVectors];    // expert << 16 | pair, in the order of pairs
  unsigned order[kPairs];  // the same, sorted
  int starts[kPairs + 1];  // of the groups, in `order`; then how many pairs there are
  int groups;

  /// All threads of a block call together; `chosen` has the expert of each of `pairs` pairs.
  template <int kThreads>
  __device__ __forceinline__ void make(const int* chosen, int pairs) {
    unsigned* key = reinterpret_cast<unsigned*>(keys);
    for (int i = threadIdx.x; i < 4 * kVectors; i += kThreads) {
      const unsigned expert = i < pairs ? expert_of(chosen[i], kExperts) : 0;
      key[i] = i < pairs ? expert << 16 | i : kNobody;
    }
    __syncthreads();
    const int vectors = (pairs + 3) / 4;
    for (int i = threadIdx.x; i < pairs; i += kThreads) {
      const unsigned mine = key[i];
      const unsigned expert = mine & 0xffff0000u;
      int before = 0;  // pairs that come earlier, and those of smaller experts
      int others = 0;
      for (int v = 0; v < vectors; ++v) {
        const uint4 k = keys[v];
        before += (k.x < mine) + (k.y < mine) + (k.z < mine) + (k.w < mine);
        others += (k.x < expert) + (k.y < expert) + (k.z < expert) + (k.w < expert);
      }
      order[before] = mine | ((before - others) % kColumns == 0 ? kFirst : 0);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int found = 0;
      for (int first = 0; first < pairs; first += 32) {
        const int at = first + threadIdx.x;
        const bool starts_group = at < pairs && (order[at] & kFirst) != 0;
        const unsigned all = __ballot_sync(0xffffffffu, starts_group);
        if (starts_group) {
          starts[found + __popc(all & ((1u << threadIdx.x) - 1))] = at;
        }
        found += __popc(all);
      }
      if (threadIdx.x == 0) {
        starts[found] = pairs;
        groups = found;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int expert(int group) const {
    return order[starts[group]] >> 16 & 0x7fff;
  }

  /// Pairs of a group.
  __device__ __forceinline__ int size(int group) const { return starts[group + 1] - starts[group]; }

  /// The pair of a column; columns beyond the last repeat it.
  __device__ __forceinline__ int pair(int group, int column) const {
    return order[min(starts[group] + column, starts[group + 1] - 1)] & 0xffff;
  }
};
