// The end of one half of a layer: u = x + rmsnorm(y) * post * scale.
// And the start of the next: rmsnorm(u) * weight as int8 blocks.
#include "a8.cuh"
#include "block_cluster.cuh"
#include "block_rows.cuh"
#include "math.cuh"

constexpr int kSize = 5376;
constexpr int kCluster = 1;  // blocks of a row
constexpr int kPart = kSize / kCluster;  // elements of a block
constexpr int kThreads = 672;
constexpr int kVectors = 2;  // of four elements, a thread
constexpr int kSplits = 4;  // partial planes of y
constexpr int kPlaneRows = 8;
constexpr float kEps = 1e-06f;

extern "C" __global__ void __launch_bounds__(kThreads)
    kernel_3a6d95a2(
    int rows,
    const float* x,  // [rows][kSize]
    const float* y,  // [kSplits][kPlaneRows][kSize]
    const float* post,  // [kSize]
    const float* weight,  // [kSize]
    const float* scale,  // [1]
    float* u,  // [rows][kSize]
    char* normed  // [kPlaneRows][kSize] as a8
) {
  launch_dependents();
  __shared__ RowPartials<kThreads, kCluster> partials[2];
  const int row = blockIdx.x / kCluster;
  const int block = blockIdx.x % kCluster;
  const int first = block * kPart + threadIdx.x * 4;
  const int end = (block + 1) * kPart;
  row_begin<kCluster>();
  float4 post_weight[kVectors];
  float4 next_weight[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * kThreads * 4;
    post_weight[i] = at < end ? weights4(post, at) : zero4();
    next_weight[i] = at < end ? weights4(weight, at) : zero4();
  }
  const float factor = weight_at(scale, 0);
  wait_for_predecessor();
  row_begin_wait<kCluster>();

  float4 residual[kVectors];
  float4 value[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * kThreads * 4;
    residual[i] = zero4();
    value[i] = zero4();
    if (at < end && row < rows) {
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
  const float inverse = inverse_rms<kSize>(row_sum(squares, block, partials[0]), kEps);

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * kThreads * 4;
    value[i] = fma4(scale4(value[i], inverse), post_weight[i], residual[i]);
    value[i] = scale4(value[i], factor);
    if (at < end && row < rows) {
      write4(u + static_cast<size_t>(row) * kSize + at, value[i]);
    }
  }

  float next_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    next_squares = add_squares(next_squares, value[i]);
  }
  const float next = inverse_rms<kSize>(row_sum(next_squares, block, partials[1]), kEps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + i * kThreads * 4;
    const float4 result = multiply4(scale4(value[i], next), next_weight[i]);
    a8::store4<kSize>(normed, row, at < end ? at : 0, result, at < end);
  }
}
