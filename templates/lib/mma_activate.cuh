// Gate activations that an epilogue applies to the sum of a product.
#pragma once

namespace activate {

__device__ __forceinline__ float gelu_tanh(float x) {
  const float cube = x * x * x;
  const float inner = fmaf(cube, 0.044715f, x) * 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanhf(inner));
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

}  // namespace activate
