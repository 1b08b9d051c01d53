// Conditional nodes of a graph, as its kernels see them.
#pragma once

// Part of the device runtime: the driver resolves it when the module is loaded.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

// Set the condition of a node; handle 0 is that of none. One thread.
__device__ __forceinline__ void set_condition(unsigned long long handle, unsigned value) {
  if (handle != 0) {
    cudaGraphSetConditional(handle, value);
  }
}
