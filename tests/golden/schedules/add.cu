// x + y, element by element.
// Scheduled by TVM: memra_schedules/elementwise.py.
#include "launch.cuh"

extern "C" __global__ void __launch_bounds__(224) kernel_a2e356f6(
    int rows,
    const float* x,  // [rows][5376]
    const float* y,  // [4][8][5376]
    float* out  // [rows][5376]
) {
  launch_dependents();
  wait_for_predecessor();
  const int block_x = blockIdx.x;
  const int block_y = blockIdx.y;
  const int thread_x = threadIdx.x;
  if (block_y >= rows) {
    return;
  }
  alignas(16) float x_load_local[4];
  alignas(16) float y_load_local[16];
  alignas(16) float out_local[4];
  *(float4*)(x_load_local + 0) = *(float4*)(x + (block_y * 5376 + block_x * 896 + thread_x * 4));
  #pragma unroll
  for (int ax0 = 0; ax0 < 4; ++ax0) {
    *(float4*)(y_load_local + ax0 * 4) = *(float4*)(y +
        (ax0 * 43008 + block_y * 5376 + block_x * 896 + thread_x * 4));
  }
  #pragma unroll
  for (int col_1 = 0; col_1 < 4; ++col_1) {
    out_local[col_1] = x_load_local[col_1] + (y_load_local[col_1] + y_load_local[col_1 + 4] +
        y_load_local[col_1 + 8] + y_load_local[col_1 + 12]);
  }
  *(float4*)(out + (block_y * 5376 + block_x * 896 + thread_x * 4)) = *(float4*)(out_local + 0);
}
