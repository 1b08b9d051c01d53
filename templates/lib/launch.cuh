// How a kernel follows its predecessor and makes way for its successor.
#pragma once

// Let the next kernel of the stream start: it waits itself before it reads what this one writes.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait until every earlier kernel of the stream has finished and its writes are visible.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
