// The instructions of mma.cuh and pipeline.cuh, on the CPU: products in float64, copies at once.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "templates_on_cpu.h"

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// c + the products of two int16 of a and the two low bytes of b.
inline int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<int16_t>(a) * static_cast<int8_t>(b) +
         static_cast<int16_t>(a >> 16) * static_cast<int8_t>(b >> 8);
}

namespace mma {

constexpr int kMagicBits = 0x4B400000;
constexpr float kMagic = 12582912.0f;

inline float from_magic(int c) { return __int_as_float(c) - kMagic; }

// Accumulators {row g, column 2t}, {g, 2t+1}, {g+8, 2t}, {g+8, 2t+1} of lane 4g + t. Lane 4g + t
// holds `kWords` words of a for row g and as many for g + 8, by turns, and as many of b for column
// g; `product(a, b)` of two words adds what they stand for, K by K.
template <int kWords, class Sum, class Product>
void multiply(Sum (&c)[4], const unsigned* a, const unsigned* b, Product product) {
  const unsigned first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  unsigned* shown = &block->operands[6 * threadIdx.x];
  std::memcpy(shown, a, 8 * kWords);
  std::memcpy(shown + 2 * kWords, b, 4 * kWords);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    double total = c[i];
    for (unsigned t = 0; t < 4; ++t) {
      const unsigned* of_row = &block->operands[6 * (first + lane / 4 * 4 + t)];
      const unsigned* of_column = &block->operands[6 * (first + (lane % 4 * 2 + i % 2) * 4 + t)];
      for (int k = 0; k < kWords; ++k) {
        total += product(of_row[2 * k + i / 2], of_column[2 * kWords + k]);
      }
    }
    c[i] = static_cast<Sum>(total);
  }
  __syncwarp();
}

template <class Byte>
double bytes_product(unsigned a, unsigned b) {
  double total = 0;
  for (int i = 0; i < 4; ++i) {
    total += static_cast<double>(static_cast<Byte>(a >> 8 * i)) * static_cast<int8_t>(b >> 8 * i);
  }
  return total;
}

inline double brains_product(unsigned a, unsigned b) {
  const auto value = [](unsigned bits) { return static_cast<double>(__uint_as_float(bits)); };
  return value(a << 16) * value(b << 16) + value(a & 0xFFFF0000) * value(b & 0xFFFF0000);
}

inline double floats_product(unsigned a, unsigned b) {
  return static_cast<double>(__uint_as_float(a)) * __uint_as_float(b);
}

inline void u8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  multiply<2>(c, a, b, bytes_product<uint8_t>);
}
inline void s8s8_k32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  multiply<2>(c, a, b, bytes_product<int8_t>);
}
inline void u8s8_k16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  const unsigned a[2] = {a0, a1};
  multiply<1>(c, a, &b0, bytes_product<uint8_t>);
}
inline void bf16_k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                     unsigned b0, unsigned b1) {
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  multiply<2>(c, a, b, brains_product);
}
inline void tf32_k8(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                    unsigned b1) {
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  multiply<2>(c, a, b, floats_product);
}

}  // namespace mma

namespace pipeline {

template <bool>
void release_next_kernel() {}
template <bool>
void wait_for_previous_kernel() {}

// A ring whose copies are done at once. A stage that is waited for and was never filled would hang
// a GPU: here it ends the test.
template <bool kBulk, int kStages, int kStageBytes>
class WarpRing {
 public:
  WarpRing(char* data, unsigned long long*, int lane) : data_(data), lane_(lane) {}

  void fill(int stage, const char* source, int bytes) {
    ++fills_;
    if (stage != (fills_ - 1) % kStages || bytes < 0 || bytes > kStageBytes || bytes % 16 != 0) {
      fail("a stage is filled out of turn or with what it cannot hold");
    }
    if (lane_ == 0 && bytes > 0) {
      std::memset(data_ + stage * kStageBytes, 0xCD, kStageBytes);
      std::memcpy(data_ + stage * kStageBytes, source, bytes);
    }
  }

  const char* wait() {
    if (++waits_ > fills_) {
      fail("a stage is waited for that nobody fills");
    }
    __syncwarp();
    return data_ + (waits_ - 1) % kStages * kStageBytes;
  }

  int release() {
    __syncwarp();
    return (waits_ - 1) % kStages;
  }

 private:
  static void fail(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
  }

  char* data_;
  int lane_;
  int fills_ = 0;
  int waits_ = 0;
};

}  // namespace pipeline
