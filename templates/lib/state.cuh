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
  kFloorPatience,
  kFloorLeast,
  kFloorProbe,
  kMisses,
  kIdle,
  kLateBelow,
  kCutBelow,
  kCutAlways,
  kCutDrops,
  kCutFirst,
  kDoubt,
  kDoubtful,
  kCuts,
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

// Weigh the draft that was just made, by the bits of its confidence: it may bound the next round,
// or end its own chain. One thread.
__device__ __forceinline__ void weigh_draft(int* state, int confidence) {
  const int draft = state[kStep] - 1;
  const int drafted = state[kDrafted];
  if (draft >= drafted) {
    return;  // made after its chain was ended, where nothing could stop it: nobody reads it
  }
  if (confidence < state[kLateBelow]) {
    state[kDoubtful] = min(state[kDoubtful], draft);
  }
  const bool drops = state[kCutDrops] != 0;
  const int kept = drops ? draft : draft + 1;
  const bool may_go = !drops || draft > 0 || state[kCutFirst] != 0;
  if (confidence < state[kDoubt] && may_go && kept < drafted) {
    state[kDrafted] = kept;
    state[kRows] = kept + 1;
    state[kCuts] += 1;
  }
}

// Choose the next round's depth. One thread.
template <bool kFresh>
__device__ __forceinline__ void choose_depth(int* state) {
  const int position = state[kPosition];
  const bool deep = position >= state[kFloorBoundary];
  int floor = deep ? state[kFloorDeep] : state[kFloorShort];
  const int missed = state[kDrafted] > 0 ? 1 : 0;
  const int misses = kFresh || state[kAccepted] > 0 ? 0 : state[kMisses] + missed;
  state[kMisses] = misses;
  const bool tired = misses >= state[kFloorPatience];
  const int idle = !kFresh && tired && missed == 0 ? state[kIdle] + 1 : 0;
  state[kIdle] = idle;
  if (tired) {
    floor = min(floor, 1);
  }
  int wanted = kFresh ? state[kDepthInitial] : state[kDepthCap];
  if (!kFresh && state[kAdaptive] != 0) {
    wanted = max(state[kAccepted] + 1, floor);
    const bool rests = tired && state[kFloorLeast] == 0 && idle < state[kFloorProbe];
    const int sure = max(state[kDoubtful] + 1, min(floor, state[kDepthCap]));
    wanted = rests ? 0 : min(wanted, sure);
  }
  const bool all = kFresh || state[kAccepted] == state[kDrafted];
  const bool doubts = state[kCutAlways] != 0 || (deep && !all);
  state[kDoubt] = doubts ? state[kCutBelow] : 0;
  const int room = state[kCapacity] - position - 1;
  state[kDepth] = max(0, min(min(wanted, state[kDepthCap]), room));
}
