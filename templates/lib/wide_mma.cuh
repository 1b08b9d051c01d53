// Integer tensor-core products that start from a value of their own; shapes and lanes: mma.cuh.
//
// The start is a fourth operand rather than the sum itself, so that one set of registers serves
// every product of a warp: a product costs one instruction, not five.
#pragma once

#include "pipeline.cuh"

namespace wide {

/// Integers c with |c| < 2^22 become floats by their bits: as_float(kMagicBits + c) is kMagic + c.
constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

/// kMagicBits four times, for all of a warp's products to start from.
struct Start {
  int c[4];
};

__device__ __forceinline__ void store_start(char* at) {
  *reinterpret_cast<int4*>(at) = make_int4(kMagicBits, kMagicBits, kMagicBits, kMagicBits);
}

/// Read back from shared memory in one piece: the compiler would otherwise see a constant and
/// build it anew for every product.
__device__ __forceinline__ Start load_start(const char* at) {
  Start start;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(start.c[0]), "=r"(start.c[1]), "=r"(start.c[2]), "=r"(start.c[3])
               : "r"(pipeline::shared_address(at))
               : "memory");
  return start;
}

/// start + a * b over 32 inputs: a = {g first 16, g+8 first 16, g last 16, g+8 last 16}.
__device__ __forceinline__ void u8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const Start& start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start.c[0]),
        "r"(start.c[1]), "r"(start.c[2]), "r"(start.c[3]));
}

__device__ __forceinline__ void s8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1, const Start& start) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start.c[0]),
        "r"(start.c[1]), "r"(start.c[2]), "r"(start.c[3]));
}

/// start + a * b over 16 inputs: a = {row g, row g+8}.
__device__ __forceinline__ void s8s8_k16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0,
                                         const Start& start) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(start.c[0]), "r"(start.c[1]), "r"(start.c[2]),
        "r"(start.c[3]));
}

}  // namespace wide
