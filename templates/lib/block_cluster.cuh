// Sums over a row that several blocks share: a cluster, whose blocks see each other's memory.
#pragma once

#include "block.cuh"

// Begin: say that this block runs. Every thread; `row_begin_wait` before the first `row_sum`.
template <int kCluster>
__device__ __forceinline__ void row_begin() {
  if constexpr (kCluster > 1) {
    cluster_arrive();
  }
}

template <int kCluster>
__device__ __forceinline__ void row_begin_wait() {
  if constexpr (kCluster > 1) {
    cluster_wait();
  }
}

// What a row's sum needs in shared memory; one for each sum of a kernel.
template <int kThreads, int kCluster>
struct RowPartials {
  float warps[kThreads / kWarp];
  float blocks[kCluster];
};

// Sum over the blocks of a row, the same bits in every thread: each block as `block_sum`, then
// blocks in order.
template <int kThreads, int kCluster>
__device__ __forceinline__ float row_sum(float value, int block,
                                         RowPartials<kThreads, kCluster>& partials) {
  const float mine = block_sum<kThreads>(value, partials.warps);
  if constexpr (kCluster == 1) {
    return mine;
  }
  if (threadIdx.x < kCluster) {
    store_remote(&partials.blocks[block], threadIdx.x, mine);
  }
  __syncwarp();  // the barrier wants whole warps
  cluster_arrive();
  cluster_wait();
  float total = partials.blocks[0];
#pragma unroll
  for (int i = 1; i < kCluster; ++i) {
    total += partials.blocks[i];
  }
  return total;
}
