// Multiply each row by a stored matrix: y = W x.
// Scheduled by TVM: memra_schedules/gemm.py.
#include <cuda_bf16.h>
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel_a115ad32(
    int rows,
    const float* x,  // [rows][96]
    const __nv_bfloat16* __restrict__ w,  // [100][96]
    float* out  // [rows][100]
) {
  launch_dependents();
  wait_for_predecessor();
  const int block_x = blockIdx.x;
  const int block_y = blockIdx.y;
  const int thread_x = threadIdx.x % 16;
  const int thread_y = threadIdx.x / 16;
  if (block_y >= (rows + 63) / 64) {
    return;
  }
  alignas(16) float out_pad_local[16];
  for (int ax0_init = 0; ax0_init < 8; ++ax0_init) {
    for (int ax1_init = 0; ax1_init < 2; ++ax1_init) {
      out_pad_local[ax0_init * 2 + ax1_init] = 0.0f;
    }
  }
  for (int ax2_0 = 0; ax2_0 < 3; ++ax2_0) {
    __shared__ alignas(16) float x_load_pad_shared[2176];
    __shared__ alignas(16) float w_value_pad_shared[1152];
    __syncthreads();
    #pragma unroll
    for (int ax0_ax1_fused_0 = 0; ax0_ax1_fused_0 < 4; ++ax0_ax1_fused_0) {
      #pragma unroll
      for (int ax0_ax1_fused_3 = 0; ax0_ax1_fused_3 < 4; ++ax0_ax1_fused_3) {
        float condval;
        if (block_y * 64 + ax0_ax1_fused_0 * 16 + thread_y * 2 + (thread_x >> 3) < rows) {
          condval = x[block_y * 6144 + ax0_ax1_fused_0 * 1536 + thread_y * 192 + (thread_x >> 3) *
              96 + ax2_0 * 32 + (thread_x & 7) * 4 + ax0_ax1_fused_3];
        } else {
          condval = 0.0f;
        }
        x_load_pad_shared[(thread_x & 7) * 272 + ax0_ax1_fused_3 * 68 + ax0_ax1_fused_0 * 16 +
            thread_y * 2 + (thread_x >> 3)] = condval;
      }
    }
    #pragma unroll
    for (int ax0_ax1_fused_0_1 = 0; ax0_ax1_fused_0_1 < 2; ++ax0_ax1_fused_0_1) {
      #pragma unroll
      for (int ax0_ax1_fused_3_1 = 0; ax0_ax1_fused_3_1 < 4; ++ax0_ax1_fused_3_1) {
        float condval_1;
        if (block_x * 8 + ax0_ax1_fused_0_1 * 4 + (thread_y >> 1) < 25) {
          condval_1 = (float)w[block_x * 3072 + ax0_ax1_fused_0_1 * 1536 + thread_y * 192 +
              (thread_x >> 3) * 96 + ax2_0 * 32 + (thread_x & 7) * 4 + ax0_ax1_fused_3_1];
        } else {
          condval_1 = 0.0f;
        }
        w_value_pad_shared[(thread_x & 7) * 144 + ax0_ax1_fused_3_1 * 36 + ax0_ax1_fused_0_1 * 16 +
            thread_y * 2 + (thread_x >> 3)] = condval_1;
      }
    }
    __syncthreads();
    #pragma unroll
    for (int ax2_1 = 0; ax2_1 < 32; ++ax2_1) {
      #pragma unroll
      for (int ax0 = 0; ax0 < 8; ++ax0) {
        #pragma unroll
        for (int ax1 = 0; ax1 < 2; ++ax1) {
          out_pad_local[ax0 * 2 + ax1] = fmaf(x_load_pad_shared[ax2_1 * 68 + thread_y * 8 + ax0],
              w_value_pad_shared[ax2_1 * 36 + thread_x * 2 + ax1], out_pad_local[ax0 * 2 + ax1]);
        }
      }
    }
  }
  #pragma unroll
  for (int i0_2 = 0; i0_2 < 8; ++i0_2) {
    alignas(16) float out_local[2];
    #pragma unroll
    for (int i1_2 = 0; i1_2 < 2; ++i1_2) {
      if (block_y * 64 + thread_y * 8 + i0_2 < rows && block_x * 8 + (thread_x >> 1) < 25) {
        out_local[i1_2] = out_pad_local[i0_2 * 2 + i1_2];
      }
    }
    if (block_y * 64 + thread_y * 8 + i0_2 < rows && block_x * 8 + (thread_x >> 1) < 25) {
      *(float2*)(out + (block_y * 6400 + thread_y * 800 + i0_2 * 100 + block_x * 32 + thread_x * 2))
          = *(float2*)(out_local + 0);
    }
  }
}
