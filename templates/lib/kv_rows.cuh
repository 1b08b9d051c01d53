// Rows of a cache: one element a value, or q8_0 as `ops/kv_rows.py` defines it.
//
// A q8_0 row holds kHeadDim int8 values, then a half for each block of 32, then zeros up to whole
// vectors of 16 bytes. A value is q * d rounded to half once. d = half(amax / 127); where that is
// zero the block is zero, and a block with a NaN or an infinity is NaN throughout.
#pragma once

#include "a8.cuh"
#include "block.cuh"

// One byte of such a row.
struct Q8 {
  signed char byte;
};

// A few neighbouring elements that are read and written together.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element v[kCount];
};

__device__ __forceinline__ void round_to(float& to, float value) {
  to = value;
}

__device__ __forceinline__ void round_to(__half& to, float value) {
  to = __float2half_rn(value);
}

__device__ __forceinline__ void round_to(__nv_bfloat16& to, float value) {
  to = __float2bfloat16_rn(value);
}

__device__ __forceinline__ float widen(float value) {
  return value;
}

__device__ __forceinline__ float widen(__half value) {
  return __half2float(value);
}

__device__ __forceinline__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// A row of kHeadDim values. Value: what tensor cores and sums take. kStep: elements of the cache
// from one row to the next.
template <typename Cache, int kHeadDim>
struct CacheRow {
  using Value = Cache;
  static constexpr bool kPacked = false;
  static constexpr int kStep = kHeadDim;

  static __device__ __forceinline__ float value(const Cache* row, int at) {
    return widen(row[at]);
  }
};

template <int kHeadDim>
struct CacheRow<Q8, kHeadDim> {
  using Value = __half;
  static constexpr bool kPacked = true;
  static constexpr int kBlock = 32;
  static constexpr int kUsed = kHeadDim + kHeadDim / kBlock * 2;
  static constexpr int kStep = (kUsed + 15) / 16 * 16;
  static_assert(kHeadDim % kBlock == 0);

  // The scale of the block that value `at` is in.
  static __device__ __forceinline__ const __half& scale(const Q8* row, int at) {
    return reinterpret_cast<const __half*>(row + kHeadDim)[at / kBlock];
  }

  static __device__ __forceinline__ __half& scale(Q8* row, int at) {
    return reinterpret_cast<__half*>(row + kHeadDim)[at / kBlock];
  }

  static __device__ __forceinline__ float value(const Q8* row, int at) {
    return __half2float(__hmul(__int2half_rn(row[at].byte), scale(row, at)));
  }

  // Values [at, at + 8); at % 8 == 0.
  static __device__ __forceinline__ uint4 values8(const Q8* row, int at) {
    const uint2 q = *reinterpret_cast<const uint2*>(row + at);
    const __half2 d = __half2half2(scale(row, at));
    return make_uint4(times2(q.x, 0x4140, d), times2(q.x, 0x4342, d), times2(q.y, 0x4140, d),
                      times2(q.y, 0x4342, d));
  }

 private:
  // Two of four int8, times d. As unsigned bytes, 128 more, they are the low bits of halves from
  // 1024 on; `select` puts their high bytes there.
  static __device__ __forceinline__ unsigned times2(unsigned q, unsigned select, __half2 d) {
    const unsigned bits = __byte_perm(q ^ 0x80808080u, 0x64646464u, select);
    const __half2 exact =
        __hsub2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(1024.0f + 128.0f));
    const __half2 product = __hmul2(exact, d);
    return reinterpret_cast<const unsigned&>(product);
  }
};

// The scale of a block from its largest magnitude (`a8::magnitude`).
struct Q8Scale {
  __half d;
  float inverse;

  explicit __device__ __forceinline__ Q8Scale(unsigned top) {
    const a8::Scale scale = a8::scale_of(top);
    d = __float2half_rn(scale.d);
    inverse = __half2float(d) > 0.0f ? scale.inverse : 0.0f;
  }
};
