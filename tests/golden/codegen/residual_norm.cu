// The end of one half of a layer: u = x + rmsnorm(y) * post * scale.
// And the start of the next: rmsnorm(u) * weight0 as a8 tiles.
#include "a8.cuh"
#include "block.cuh"
#include "block_rows.cuh"
#include "math.cuh"

constexpr int kSize = 5376;
constexpr int kThreads = 672;
constexpr int kVectors = 2;  // of four elements, a thread
constexpr int kSplits = 4;  // partial planes of y
constexpr int kPlaneRows = 8;
constexpr float kEps = 1e-06f;

extern "C" __global__ void __launch_bounds__(kThreads) kernel_489a9481(
    int rows,
    const float* x,  // [rows][kSize]
    const float* y,  // [kSplits][kPlaneRows][kSize]
    const float* post,  // [kSize]
    const float* weight0,  // [kSize]
    const float* scale,  // [1]
    float* u,  // [rows][kSize]
    char* normed0  // [kPlaneRows][kSize] as a8
) {
  launch_dependents();
  __shared__ float partials[2][kThreads / kWarp];
  const int row = blockIdx.x;
  float4 post_weight[kVectors];
  float4 next_weight0[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x * 4 + i * kThreads * 4;
    post_weight[i] = padded4<kSize>(post, at);
    next_weight0[i] = padded4<kSize>(weight0, at);
  }
  const float factor = weight_at(scale, 0);
  wait_for_predecessor();

  float4 residual[kVectors];
  float4 value[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x * 4 + i * kThreads * 4;
    residual[i] = zero4();
    value[i] = zero4();
    if (at < kSize && row < rows) {
      const size_t start = static_cast<size_t>(row) * kSize + at;
      const size_t stride = static_cast<size_t>(kPlaneRows) * kSize;
      residual[i] = read4(x + start);
      value[i] = read_planes4<kSplits>(y + start, stride);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    squares = add_squares(squares, value[i]);
  }
  const float inverse = inverse_rms<kSize>(block_sum<kThreads>(squares, partials[0]), kEps);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x * 4 + i * kThreads * 4;
    value[i] = fma4(scale4(value[i], inverse), post_weight[i], residual[i]);
    value[i] = scale4(value[i], factor);
    if (at < kSize && row < rows) {
      write4(u + static_cast<size_t>(row) * kSize + at, value[i]);
    }
  }

  float next_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    next_squares = add_squares(next_squares, value[i]);
  }
  const float next = inverse_rms<kSize>(block_sum<kThreads>(next_squares, partials[1]), kEps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = threadIdx.x * 4 + i * kThreads * 4;
    const float4 weight = next_weight0[i];
    const float4 result = multiply4(scale4(value[i], next), weight);
    a8::store4<kSize>(normed0, row, at < kSize ? at : 0, result, at < kSize);
  }
}
