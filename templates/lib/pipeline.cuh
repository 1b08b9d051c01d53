// Streaming weights through shared memory, and starting a kernel before its predecessor ends.
#pragma once

namespace pipeline {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/// The next kernel of the stream may start: its blocks move in as soon as there is room.
template <bool kDependentLaunch>
__device__ __forceinline__ void release_next_kernel() {
  if constexpr (kDependentLaunch) {
    asm volatile("griddepcontrol.launch_dependents;");
  }
}

/// Wait until everything before this kernel has finished and its memory is visible. Weights may be
/// touched earlier; anything that a kernel wrote may not.
template <bool kDependentLaunch>
__device__ __forceinline__ void wait_for_previous_kernel() {
  if constexpr (kDependentLaunch) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
}

/// A ring of stages in shared memory that belongs to one warp: no other warp ever waits for it.
///
/// With kBulk, one lane asks the copy engine for a whole stage and a barrier counts its bytes
/// (sm_90 on); otherwise every lane copies 16 bytes at a time by cp.async. All lanes call every
/// function together. Order of calls: kStages times fill, then wait, release + fill, wait, ...;
/// a fill of no bytes keeps the count where nothing is left to read.
template <bool kBulk, int kStages, int kStageBytes>
class WarpRing {
  static_assert(kStageBytes % 16 == 0, "copies move 16 bytes at a time");

 public:
  /// `data` is this warp's kStages * kStageBytes bytes, `barriers` its kStages counters.
  __device__ __forceinline__ WarpRing(char* data, unsigned long long* barriers, int lane)
      : data_(data), barriers_(shared_address(barriers)), lane_(lane) {
    if constexpr (kBulk) {
      if (lane == 0) {
        for (int i = 0; i < kStages; ++i) {
          asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barriers_ + 8 * i));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
    }
  }

  /// Start copying `bytes` (a multiple of 16, possibly 0) into stage `stage`.
  __device__ __forceinline__ void fill(int stage, const char* source, int bytes) {
    if constexpr (kBulk) {
      if (lane_ == 0) {
        const unsigned target = shared_address(data_ + stage * kStageBytes);
        const unsigned barrier = barriers_ + 8 * stage;
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                     : "memory");
        if (bytes > 0) {
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
              "[%0], [%1], %2, [%3];" ::"r"(target),
              "l"(source), "r"(bytes), "r"(barrier)
              : "memory");
        }
      }
    } else {
      const unsigned target = shared_address(data_ + stage * kStageBytes);
      for (int at = lane_ * 16; at < bytes; at += 32 * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at),
                     "l"(source + at)
                     : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }

  /// Wait until the current stage is full; returns it.
  __device__ __forceinline__ const char* wait() {
    if constexpr (kBulk) {
      const unsigned barrier = barriers_ + 8 * stage_;
      asm volatile(
          "{\n"
          ".reg .pred full;\n"
          "again:\n"
          "mbarrier.try_wait.parity.shared.b64 full, [%0], %1;\n"
          "@!full bra again;\n"
          "}" ::"r"(barrier),
          "r"(phase_)
          : "memory");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
      __syncwarp();
    }
    return data_ + stage_ * kStageBytes;
  }

  /// The current stage has been read by every lane: step to the next; returns the freed one.
  __device__ __forceinline__ int release() {
    __syncwarp();
    const int freed = stage_;
    ++stage_;
    if (stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
    return freed;
  }

 private:
  char* data_;
  unsigned barriers_;
  int lane_;
  int stage_ = 0;
  int phase_ = 0;
};

}  // namespace pipeline
