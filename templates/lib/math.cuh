// Functions whose bits are ours: no compiler flag and no math library can change them. The CPU
// kernels use the same formulas (memra_compiler/ops/emit.py), so both targets agree closely.
#pragma once

__device__ __forceinline__ float infinity() {
  return __int_as_float(0x7f800000);
}

// 1 / sqrt(value), both correctly rounded.
__device__ __forceinline__ float reciprocal_sqrt(float value) {
  return 1.0f / sqrtf(value);
}

// The inverse root mean square of `kSize` elements whose squares add up to `squares`.
template <int kSize>
__device__ __forceinline__ float inverse_rms(float squares, float eps) {
  constexpr float kOneth = 1.0f / kSize;
  return reciprocal_sqrt(fmaf(squares, kOneth, eps));
}

// e^x within 2 ulp; held to [e^-87.3, e^88.3].
// Source: Cephes expf (Moshier), Cody-Waite reduction by ln 2 in two parts.
__device__ __forceinline__ float exp_exact(float x) {
  constexpr float kLog2E = 1.44269504088896341f;
  x = x < -87.3f ? -87.3f : x;  // comparisons, so that a NaN stays one
  x = x > 88.3f ? 88.3f : x;
  const float n = rintf(x * kLog2E);
  float r = fmaf(n, -0.693359375f, x);
  r = fmaf(n, 2.12194440e-4f, r);
  float poly = 1.9875691500e-4f;
  poly = fmaf(poly, r, 1.3981999507e-3f);
  poly = fmaf(poly, r, 8.3334519073e-3f);
  poly = fmaf(poly, r, 4.1665795894e-2f);
  poly = fmaf(poly, r, 1.6666665459e-1f);
  poly = fmaf(poly, r, 0.5f);
  poly = fmaf(poly, r * r, r + 1.0f);
  const int exponent = static_cast<int>(n) + 127;
  return poly * __int_as_float(exponent << 23);
}

__device__ __forceinline__ float tanh_exact(float x) {
  return 1.0f - 2.0f / (exp_exact(x + x) + 1.0f);
}

__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kRootTwoOverPi = 0.7978845608028654f;
  const float cube = x * x * x;
  const float inner = fmaf(cube, 0.044715f, x) * kRootTwoOverPi;
  return 0.5f * x * (1.0f + tanh_exact(inner));
}

__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + exp_exact(0.0f - x));
}
