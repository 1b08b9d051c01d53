// Divide by the root mean square, then scale by column; `size` norms each head by itself.
// Scheduled by TVM: memra_schedules/row_reduction.py.
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel_d761b2c0(
    int rows,
    const float* x,  // [rows][8192]
    const float* __restrict__ weight,  // [256]
    float* out  // [rows][8192]
) {
  launch_dependents();
  wait_for_predecessor();
  const int block_x = blockIdx.x;
  const int thread_x = threadIdx.x % 32;
  const int thread_y = threadIdx.x / 32;
  if (block_x >= rows * 8) {
    return;
  }
  alignas(16) float x_load_local[8];
  alignas(16) float squares_local[1];
  alignas(16) float in_thread_squares_local[1];
  #pragma unroll
  for (int ax0_0 = 0; ax0_0 < 2; ++ax0_0) {
    *(float4*)(x_load_local + ax0_0 * 4) = *(float4*)(x +
        (block_x * 1024 + thread_y * 256 + ax0_0 * 128 + thread_x * 4));
  }
  alignas(16) float red_buf0[1];
  in_thread_squares_local[0] = 0.0f;
  #pragma unroll
  for (int ax0_0_1 = 0; ax0_0_1 < 2; ++ax0_0_1) {
    #pragma unroll
    for (int ax0_2 = 0; ax0_2 < 4; ++ax0_2) {
      in_thread_squares_local[0] = fmaf(x_load_local[ax0_0_1 * 4 + ax0_2],
          x_load_local[ax0_0_1 * 4 + ax0_2], in_thread_squares_local[0]);
    }
  }
  alignas(16) float t0[1];
  alignas(16) unsigned mask[1];
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
  red_buf0[0] = __shfl_sync(mask[0], red_buf0[0], thread_y * 32, 32);
  squares_local[0] = red_buf0[0];
  #pragma unroll
  for (int col_0 = 0; col_0 < 2; ++col_0) {
    alignas(16) float out_local[4];
    #pragma unroll
    for (int col_2 = 0; col_2 < 4; ++col_2) {
      out_local[col_2] = x_load_local[col_0 * 4 + col_2] *
          (1.0f / sqrtf(fmaf(squares_local[0], 0.00390625f, 1e-06f))) *
              weight[col_0 * 128 + thread_x * 4 + col_2];
    }
    *(float4*)(out + (block_x * 1024 + thread_y * 256 + col_0 * 128 + thread_x * 4)) =
        *(float4*)(out_local + 0);
  }
}
