// Tensor-core products of one 16-row weight tile with 8 columns of activations.
//
// With lane = 4*g + t, every shape below holds accumulators {row g, column 2t}, {g, 2t+1},
// {g+8, 2t}, {g+8, 2t+1}. Within a K step, lane t holds inputs 4t..4t+3 of each sixteen: the order
// of K inside a step is free as long as weights and activations agree.
#pragma once

namespace mma {

/// Integers c with |c| < 2^22 become floats by their bits: as_float(kMagicBits + c) - kMagic is c.
/// An accumulator that starts at kMagicBits so needs one full-rate subtraction, not a conversion.
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

__device__ __forceinline__ float from_magic(int c) { return __int_as_float(c) - kMagic; }

/// c += a * b over 32 inputs: a = {g first 16, g+8 first 16, g last 16, g+8 last 16}.
__device__ __forceinline__ void u8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void s8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c += a * b over 16 inputs: a = {row g, row g+8}.
__device__ __forceinline__ void u8s8_k16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// c += a * b over 16 inputs of bf16: a = {g inputs 4t,4t+1; g+8 same; g inputs 4t+2,4t+3; g+8}.
__device__ __forceinline__ void bf16_k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                         unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a * b over 8 inputs of tf32: a = {g input 0, g+8 input 0, g input 1, g+8 input 1}.
__device__ __forceinline__ void tf32_k8(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                        unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace mma
