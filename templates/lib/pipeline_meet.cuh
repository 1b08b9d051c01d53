// Blocks that leave parts of one result: whoever comes last puts them together. No block ever waits
// for another, and the result does not depend on who that is.
#pragma once

namespace pipeline {

/// A warp has stored its part: is it the last of `parts` warps to say so? It then sees all parts.
/// The counter is zero at first and zero again afterwards. A whole warp calls.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, int parts, int lane) {
  unsigned before = 0;
  __syncwarp();  // the parts of all lanes come before the first lane's release
  if (lane == 0) {
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(parts - 1)
                 : "memory");
  }
  before = __shfl_sync(0xffffffffu, before, 0);
  __syncwarp();
  return before == parts - 1u;
}

}  // namespace pipeline
