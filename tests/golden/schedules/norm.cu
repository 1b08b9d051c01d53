// Divide by the root mean square, then scale by column; `size` norms each head by itself.
// Scheduled by TVM: memra_schedules/row_reduction.py.
#include <cuda_bf16.h>
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(672) kernel_90a9386b(
    int rows,
    const float* x,  // [4][8][5376]
    const __nv_bfloat16* __restrict__ weight,  // [5376]
    float* out  // [rows][5376]
) {
  launch_dependents();
  wait_for_predecessor();
  const int block_x = blockIdx.x;
  const int thread_x = threadIdx.x;
  if (block_x >= rows) {
    return;
  }
  alignas(16) float x_value_local[8];
  alignas(16) float squares_local[1];
  alignas(16) float in_thread_squares_local[1];
  #pragma unroll
  for (int ax0_0 = 0; ax0_0 < 2; ++ax0_0) {
    alignas(16) float x_load_local[16];
    #pragma unroll
    for (int ax0 = 0; ax0 < 4; ++ax0) {
      *(float4*)(x_load_local + ax0 * 4) = *(float4*)(x +
          (ax0 * 43008 + block_x * 5376 + ax0_0 * 2688 + thread_x * 4));
    }
    #pragma unroll
    for (int ax0_2 = 0; ax0_2 < 4; ++ax0_2) {
      x_value_local[ax0_0 * 4 + ax0_2] = x_load_local[ax0_2] + x_load_local[ax0_2 + 4] +
          x_load_local[ax0_2 + 8] + x_load_local[ax0_2 + 12];
    }
  }
  __shared__ alignas(16) float red_result[1];
  in_thread_squares_local[0] = 0.0f;
  #pragma unroll
  for (int ax0_0_1 = 0; ax0_0_1 < 2; ++ax0_0_1) {
    #pragma unroll
    for (int ax0_2_1 = 0; ax0_2_1 < 4; ++ax0_2_1) {
      in_thread_squares_local[0] = fmaf(x_value_local[ax0_0_1 * 4 + ax0_2_1],
          x_value_local[ax0_0_1 * 4 + ax0_2_1], in_thread_squares_local[0]);
    }
  }
  __shared__ alignas(16) float red_buf_staging[21];
  alignas(16) float t0[1];
  alignas(16) unsigned mask[1];
  alignas(16) float red_buf0[1];
  alignas(16) float t0_1[1];
  alignas(16) unsigned mask_1[1];
  alignas(16) float red_buf0_1[1];
  red_buf0[0] = in_thread_squares_local[0];
  mask[0] = 0xffffffffu;
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 16, 32);
  red_buf0[0] = red_buf0[0] + t0[0];
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 8, 32);
  red_buf0[0] = red_buf0[0] + t0[0];
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 4, 32);
  red_buf0[0] = red_buf0[0] + t0[0];
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 2, 32);
  red_buf0[0] = red_buf0[0] + t0[0];
  t0[0] = __shfl_down_sync(mask[0], red_buf0[0], 1, 32);
  red_buf0[0] = red_buf0[0] + t0[0];
  if (thread_x % 32 == 0) {
    red_buf_staging[thread_x >> 5] = red_buf0[0];
  }
  __syncthreads();
  if (thread_x < 21) {
    red_buf0_1[0] = red_buf_staging[thread_x];
  }
  mask_1[0] = 0xffffffffu;
  t0_1[0] = __shfl_down_sync(mask_1[0], red_buf0_1[0], 16, 32);
  if (thread_x < 5) {
    red_buf0_1[0] = red_buf0_1[0] + t0_1[0];
  }
  t0_1[0] = __shfl_down_sync(mask_1[0], red_buf0_1[0], 8, 32);
  red_buf0_1[0] = red_buf0_1[0] + t0_1[0];
  t0_1[0] = __shfl_down_sync(mask_1[0], red_buf0_1[0], 4, 32);
  red_buf0_1[0] = red_buf0_1[0] + t0_1[0];
  t0_1[0] = __shfl_down_sync(mask_1[0], red_buf0_1[0], 2, 32);
  red_buf0_1[0] = red_buf0_1[0] + t0_1[0];
  t0_1[0] = __shfl_down_sync(mask_1[0], red_buf0_1[0], 1, 32);
  red_buf0_1[0] = red_buf0_1[0] + t0_1[0];
  if (thread_x == 0) {
    ((volatile float*)red_result)[0] = red_buf0_1[0];
  }
  __syncthreads();
  squares_local[0] = ((volatile float*)red_result)[0];
  #pragma unroll
  for (int col_0 = 0; col_0 < 2; ++col_0) {
    alignas(16) float out_local[4];
    #pragma unroll
    for (int col_2 = 0; col_2 < 4; ++col_2) {
      out_local[col_2] = x_value_local[col_0 * 4 + col_2] *
          (1.0f / sqrtf(fmaf(squares_local[0], 0.00018601191f, 1e-06f))) *
              (float)weight[col_0 * 2688 + thread_x * 4 + col_2];
    }
    *(float4*)(out + (block_x * 5376 + col_0 * 2688 + thread_x * 4)) = *(float4*)(out_local + 0);
  }
}
