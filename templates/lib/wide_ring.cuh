// A ring of stages in shared memory that all warps of a block read.
#pragma once

#include "pipeline.cuh"

namespace wide {

/// What a copier takes of the numbered copies of a chunk: every `step`-th from `first` on.
struct Share {
  int first;
  int step;
};

/// Chunk c of a stream goes through stage c % kStages.
///
/// With kBulk, the lanes of one warp ask the copy engine for a chunk, and the warps take turns. A
/// stage has two barriers: one counts its bytes, one the kWarps warps that have read it. Otherwise
/// all warps copy by cp.async and meet at every chunk. Either way, in this order:
///
///   begin(c), copies, commit   for the first kAhead chunks
///   wait(c); begin(c + kAhead), copies, commit; release(c)   for every chunk
template <bool kBulk, int kStages, int kWarps>
class Ring {
  static_assert(kStages >= 2, "a chunk is read while another is on its way");

  /// The stage to be copied into was read so many chunks ago: with two, the copier hardly waits
  /// for slower warps.
  static constexpr int kLag = kBulk && kStages > 3 ? 2 : 1;

 public:
  static constexpr int kBarrierBytes = kBulk ? 16 * kStages : 0;
  static constexpr int kAhead = kStages - kLag;

  __device__ __forceinline__ Ring(char* barriers, int lane)
      : full_(pipeline::shared_address(barriers)), empty_(full_ + 8 * kStages), lane_(lane) {}

  /// One thread of the block calls, before all of them meet.
  __device__ __forceinline__ void create() const {
    if constexpr (kBulk) {
      for (int i = 0; i < kStages; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full_ + 8 * i));
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty_ + 8 * i), "n"(kWarps));
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }

  /// Whether a warp takes part in copying `chunk`.
  __device__ __forceinline__ bool copies(int warp, int chunk) const {
    return !kBulk || warp == chunk % kWarps;
  }

  /// What it copies: single lanes ask for bulk copies, whole warps move bytes.
  __device__ __forceinline__ Share share(int warp) const {
    if constexpr (kBulk) {
      return {lane_, 32};
    } else {
      return {warp, kWarps};
    }
  }

  /// The copier waits until the stage of `chunk` is free, then announces `bytes`.
  __device__ __forceinline__ void begin(int chunk, int bytes) const {
    if constexpr (kBulk) {
      const int stage = chunk % kStages;
      wait_phase(empty_ + 8 * stage, (chunk / kStages & 1) ^ 1);
      if (lane_ == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full_ + 8 * stage),
                     "r"(bytes)
                     : "memory");
      }
      __syncwarp();
    }
  }

  /// Start copying `bytes`, a multiple of 16 and not 0, of `chunk`.
  __device__ __forceinline__ void copy(int chunk, char* target, const char* source,
                                       int bytes) const {
    const unsigned to = pipeline::shared_address(target);
    if constexpr (kBulk) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
          "[%0], [%1], %2, [%3];" ::"r"(to),
          "l"(source), "r"(bytes), "r"(full_ + 8 * (chunk % kStages))
          : "memory");
    } else {
      for (int at = lane_ * 16; at < bytes; at += 32 * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(source + at)
                     : "memory");
      }
    }
  }

  /// The copies since the last call are one chunk.
  __device__ __forceinline__ void commit() const {
    if constexpr (!kBulk) {
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }

  /// Wait until `chunk` has arrived. Without kBulk, all warps have then also read the one before.
  __device__ __forceinline__ void wait(int chunk) const {
    if constexpr (kBulk) {
      wait_phase(full_ + 8 * (chunk % kStages), chunk / kStages & 1);
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
    }
  }

  /// This warp has read `chunk`.
  __device__ __forceinline__ void release(int chunk) const {
    if constexpr (kBulk) {
      __syncwarp();
      if (lane_ == 0) {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty_ + 8 * (chunk % kStages))
                     : "memory");
      }
    }
  }

 private:
  static __device__ __forceinline__ void wait_phase(unsigned barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }

  unsigned full_;
  unsigned empty_;
  int lane_;
};

}  // namespace wide
