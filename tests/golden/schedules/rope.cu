// Turn each head by its row's angles; halves pair up (i, i + d/2).
// Scheduled by TVM: memra_schedules/elementwise.py.
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel_89435ec9(
    int rows,
    const float* x,  // [2][8][8192]
    const float* angles,  // [rows][2][128]
    float* out  // [rows][8192]
) {
  launch_dependents();
  wait_for_predecessor();
  const int block_x = blockIdx.x;
  const int block_y = blockIdx.y;
  const int thread_x = threadIdx.x;
  if (block_y >= rows) {
    return;
  }
  alignas(16) float x_load_local[16];
  alignas(16) float angles_load_local[8];
  alignas(16) float out_local[8];
  #pragma unroll
  for (int ax0 = 0; ax0 < 2; ++ax0) {
    #pragma unroll
    for (int ax1 = 0; ax1 < 2; ++ax1) {
      *(float4*)(x_load_local + (ax0 * 8 + ax1 * 4)) =
          *(float4*)(x + (ax0 * 65536 + block_y * 8192 + block_x * 2048 + (thread_x >> 5) * 256 +
              ax1 * 128 + (thread_x & 31) * 4));
    }
  }
  #pragma unroll
  for (int ax0_1 = 0; ax0_1 < 2; ++ax0_1) {
    *(float4*)(angles_load_local + ax0_1 * 4) = *(float4*)(angles +
        (block_y * 256 + ax0_1 * 128 + (thread_x & 31) * 4));
  }
  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    #pragma unroll
    for (int pair_1 = 0; pair_1 < 4; ++pair_1) {
      float condval;
      if (half < 1) {
        condval = fmaf(x_load_local[pair_1] + x_load_local[pair_1 + 8], angles_load_local[pair_1],
            0.0f - (x_load_local[pair_1 + 4] + x_load_local[pair_1 + 12]) *
                angles_load_local[pair_1 + 4]);
      } else {
        condval = fmaf(x_load_local[pair_1 + 4] + x_load_local[pair_1 + 12],
            angles_load_local[pair_1], (x_load_local[pair_1] + x_load_local[pair_1 + 8]) *
                angles_load_local[pair_1 + 4]);
      }
      out_local[half * 4 + pair_1] = condval;
    }
  }
  #pragma unroll
  for (int ax0_2 = 0; ax0_2 < 2; ++ax0_2) {
    *(float4*)(out + (block_y * 8192 + block_x * 2048 + (thread_x >> 5) * 256 + ax0_2 * 128 +
        (thread_x & 31) * 4)) = *(float4*)(out_local + ax0_2 * 4);
  }
}
