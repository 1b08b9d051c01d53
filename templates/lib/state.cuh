// The device block: counters that a round owns, and how they move.
//
// Slots are those of `memra_runtime.artifact.STATE`, in its order; a test compares the two.
#pragma once

#include "block.cuh"

constexpr int kMaxDepth = 15;

enum Slot : int {
  kPosition,
  kPending,
  kDepth,
  kRows,
  kStep,
  kDrafted,
  kAccepted,
  kRingCount,
  kEnded,
  kCapacity,
  kDepthCap,
  kDepthInitial,
  kAdaptive,
  kFloorShort,
  kFloorDeep,
  kFloorBoundary,
  kRounds,
  kTotalDrafted,
  kTotalAccepted,
  kBurstEnd,
  kMore,
  kAttemptedTable,
  kAcceptedTable = kAttemptedTable + kMaxDepth,
  kStateSize = kAcceptedTable + kMaxDepth,
};

// Count the drafts the target agrees with. Whole first warp.
__device__ __forceinline__ void accept_drafts(int* state, const int* batch, const int* choice) {
  const int lane = threadIdx.x % kWarp;
  const int drafted = state[kDrafted];
  const bool agrees = lane < drafted && batch[lane + 1] == choice[lane];
  const unsigned agreeing = __ballot_sync(kAllLanes, agrees);
  const int accepted = __ffs(~agreeing) - 1;  // the lanes from `drafted` on never agree
  if (lane < drafted) {
    state[kAttemptedTable + lane] += 1;
  }
  if (lane < accepted) {
    state[kAcceptedTable + lane] += 1;
  }
  __syncwarp();
  if (lane == 0) {
    state[kAccepted] = accepted;
    state[kRounds] += 1;
    state[kTotalDrafted] += drafted;
    state[kTotalAccepted] += accepted;
  }
  __syncwarp();
}

// Forget the rejected rows: the next free position is the whole rollback of a cache. One thread.
template <bool kSkip>
__device__ __forceinline__ void roll_back(int* state) {
  state[kPosition] += state[kSkip ? kDrafted : kAccepted] + 1;
}

// Publish the accepted tokens and the pending one. Whole first warp.
template <int kRingTokens, int kEndIds>
__device__ __forceinline__ void commit_tokens(int* state, const int* batch, const int* choice,
                                              int* ring, const int* eos) {
  const int lane = threadIdx.x % kWarp;
  const int accepted = state[kAccepted];
  const int count = state[kRingCount];
  const int pending = choice[accepted];
  bool ends = false;
  if (lane <= accepted + 1) {
    const int token = lane <= accepted ? batch[lane] : pending;
    if (lane <= accepted) {
      ring[(count + lane) & (kRingTokens - 1)] = token;
    }
    for (int e = 0; e < kEndIds; ++e) {
      ends = ends || (eos[e] >= 0 && eos[e] == token);
    }
  }
  const bool ended = __any_sync(kAllLanes, ends);
  if (lane == 0) {
    state[kRingCount] = count + accepted + 1;
    state[kPending] = pending;
    if (ended) {
      state[kEnded] = 1;
    }
  }
  __syncwarp();
}

// The verified row whose hidden the next round starts from. Call before any later change of state.
template <int kRowShift>
__device__ __forceinline__ int committed_row(const int* state) {
  return kRowShift == 0 ? state[kAccepted]
                        : (state[kAccepted] + kRowShift) % (state[kDrafted] + 1);
}

// Whether another round of a burst follows. One thread.
__device__ __forceinline__ bool goes_on(const int* state) {
  return state[kRingCount] < state[kBurstEnd] && state[kEnded] == 0 &&
         state[kPosition] < state[kCapacity] && state[kPending] >= 0;
}

// Choose the next round's depth. One thread.
template <bool kFresh>
__device__ __forceinline__ void choose_depth(int* state) {
  const int position = state[kPosition];
  const int floor = position < state[kFloorBoundary] ? state[kFloorShort] : state[kFloorDeep];
  int wanted = kFresh ? state[kDepthInitial] : state[kDepthCap];
  if (!kFresh && state[kAdaptive] != 0) {
    wanted = max(state[kAccepted] + 1, floor);
  }
  const int room = state[kCapacity] - position - 1;
  state[kDepth] = max(0, min(min(wanted, state[kDepthCap]), room));
}
