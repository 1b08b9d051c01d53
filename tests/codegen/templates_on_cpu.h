// Enough of CUDA to run a template's text on the CPU: a fiber a thread, block after block.
//
// Fibers take turns at barriers and shuffles, so a block of 256 threads is one thread of the host.
// Tensor-core and copy instructions (block_ptx.cuh) are written out below; copies are done at once.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // blocks run one after another
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct char4 {
  signed char x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
To bits_as(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// -- halves ---------------------------------------------------------------------------------------

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __int2half_rn(int x) { return {static_cast<_Float16>(x)}; }
inline __half __hmul(__half a, __half b) {
  return __float2half_rn(__half2float(a) * __half2float(b));  // exact in float, so rounded once
}
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return __half2half2(__float2half_rn(x)); }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half __hsub(__half a, __half b) {
  return __float2half_rn(__half2float(a) - __half2float(b));
}
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline float __bfloat162float(__nv_bfloat16 x) {
  return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline int __float2int_rn(float x) {
  return std::isnan(x) ? 0 : static_cast<int>(std::clamp(std::rint(x), -2147483648.0f, 2147483520.0f));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<unsigned>(bytes >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return out;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

// -- threads of a block ---------------------------------------------------------------------------

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 * 1024);
  bool done = false;
};

struct Barrier {
  int members = 0;
  int arrived = 0;
  unsigned turn = 0;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> lanes;    // what threads show each other
  std::vector<unsigned> operands;  // of a matrix instruction: 6 words a lane
};

static Index gridDim, blockIdx, threadIdx;  // not inline: libraries would share them
static Block* block;
static ucontext_t scheduler;

inline void yield() {
  const Index mine = threadIdx;
  swapcontext(&block->fibers[mine.x]->context, &scheduler);
  threadIdx = mine;
}

inline void wait_at(Barrier& barrier) {
  const unsigned turn = barrier.turn;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
    return;
  }
  while (barrier.turn == turn) {
    yield();
  }
}

inline void leave(Barrier& barrier) {
  if (--barrier.members > 0 && barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
}

inline Barrier& warp_barrier() { return block->warps[threadIdx.x / 32]; }
inline void __syncthreads() { wait_at(block->all); }
inline void __syncwarp() { wait_at(warp_barrier()); }
inline void launch_dependents() {}
inline void wait_for_predecessor() {}

// What all lanes of this warp hold, by lane.
template <class T>
std::vector<T> all_lanes(T value) {
  const unsigned first = threadIdx.x / 32 * 32;
  std::memcpy(&block->lanes[threadIdx.x], &value, sizeof(T));
  __syncwarp();
  std::vector<T> found(32);
  for (int i = 0; i < 32; ++i) {
    std::memcpy(&found[i], &block->lanes[first + i], sizeof(T));
  }
  __syncwarp();
  return found;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
  return all_lanes(value)[threadIdx.x % 32 ^ by];
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return all_lanes(value)[lane];
}

inline unsigned __ballot_sync(unsigned, bool value) {
  const std::vector<unsigned> found = all_lanes(static_cast<unsigned>(value));
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    bits |= found[i] << i;
  }
  return bits;
}

inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

// The handle of a conditional node is here the address of its condition.
extern "C" inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
  *reinterpret_cast<unsigned*>(handle) = value;
}

template <class T>
T __reduce_max_sync(unsigned, T value) {
  const std::vector<T> found = all_lanes(value);
  return *std::max_element(found.begin(), found.end());
}

template <class T>
T __reduce_min_sync(unsigned, T value) {
  const std::vector<T> found = all_lanes(value);
  return *std::min_element(found.begin(), found.end());
}

namespace {
template <class Kernel>
struct Running {
  static inline Kernel* kernel;
  static void fiber() {
    (*kernel)();
    block->fibers[threadIdx.x]->done = true;
    leave(block->all);
    leave(warp_barrier());
    setcontext(&scheduler);
  }
};
}  // namespace

// Run `kernel` on a grid. A thread that returns early no longer takes part in any barrier.
template <class Kernel>
void launch(int grid_x, int grid_y, int grid_z, int threads, Kernel kernel) {
  Block shared;
  gridDim = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y),
             static_cast<unsigned>(grid_z)};
  Running<Kernel>::kernel = &kernel;
  block = &shared;
  shared.lanes.resize(threads);
  shared.operands.resize(6 * threads);
  for (int t = 0; t < threads; ++t) {
    shared.fibers.push_back(std::make_unique<Fiber>());
  }
  for (int i = 0; i < grid_x * grid_y * grid_z; ++i) {
    blockIdx = {static_cast<unsigned>(i % grid_x), static_cast<unsigned>(i / grid_x % grid_y),
                static_cast<unsigned>(i / grid_x / grid_y)};
    shared.all = {threads};
    shared.warps.assign(threads / 32, Barrier{32});
    for (auto& fiber : shared.fibers) {
      fiber->done = false;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.data();
      fiber->context.uc_stack.ss_size = fiber->stack.size();
      makecontext(&fiber->context, Running<Kernel>::fiber, 0);
    }
    for (int left = threads; left > 0;) {
      left = 0;
      for (int t = 0; t < threads; ++t) {
        if (!shared.fibers[t]->done) {
          ++left;
          threadIdx = {static_cast<unsigned>(t), 0, 0};
          swapcontext(&scheduler, &shared.fibers[t]->context);
        }
      }
    }
  }
}

// -- block_ptx.cuh --------------------------------------------------------------------------------

inline void copy_async(void* to, const void* from, bool present) {
  std::memset(to, 0, 16);
  if (present) {
    std::memcpy(to, from, 16);
  }
}
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}

inline unsigned pair_of(const uint16_t* at, int apart) {
  return at[0] | static_cast<unsigned>(at[apart]) << 16;
}

inline void load_matrix_x4(unsigned (&r)[4], const void* row) {
  const auto rows = all_lanes(row);
  const unsigned lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    r[i] = pair_of(static_cast<const uint16_t*>(rows[8 * i + lane / 4]) + lane % 4 * 2, 1);
  }
}

inline void load_matrix_x4_transposed(unsigned (&r)[4], const void* row) {
  const auto rows = all_lanes(row);
  const unsigned lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const auto* first = static_cast<const uint16_t*>(rows[8 * i + lane % 4 * 2]);
    const auto* second = static_cast<const uint16_t*>(rows[8 * i + lane % 4 * 2 + 1]);
    r[i] = first[lane / 4] | static_cast<unsigned>(second[lane / 4]) << 16;
  }
}

inline float element_of(unsigned word, int half, __half) {
  return __half2float(bits_as<__half>(static_cast<uint16_t>(word >> 16 * half)));
}
inline float element_of(unsigned word, int half, __nv_bfloat16) {
  return __bfloat162float({static_cast<uint16_t>(word >> 16 * half)});
}

template <class Element>
void tile_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Element kind) {
  const unsigned first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(&block->operands[6 * threadIdx.x], mine, sizeof(mine));
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    double total = c[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned word = i / 2 + k / 8 * 2, half = k % 2, holder = k % 8 / 2;
      const unsigned* of_row = &block->operands[6 * (first + row * 4 + holder)];
      const unsigned* of_column = &block->operands[6 * (first + column * 4 + holder)];
      total += static_cast<double>(element_of(of_row[word], half, kind)) *
               element_of(of_column[4 + k / 8], half, kind);
    }
    c[i] = static_cast<float>(total);
  }
  __syncwarp();
}

inline float exp2_fast(float x) { return std::exp2(x); }
