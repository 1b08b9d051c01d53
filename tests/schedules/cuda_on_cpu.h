// Enough of CUDA to run a kernel's text on the CPU: a thread a thread, block after block.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(threads)

using std::max;

struct Index {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

struct __half {
  uint16_t bits;
  operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25)
                                : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -size : size;
  }
};

// What the threads of a block share.
struct Block {
  explicit Block(int threads) : all(threads), lanes(threads) {
    for (int first = 0; first < threads; first += 32) {
      warps.push_back(std::make_unique<std::barrier<>>(std::min(32, threads - first)));
    }
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<float> lanes;
};

static thread_local Index blockIdx, threadIdx;  // not inline: libraries would share them
static thread_local Block* block;

inline void launch_dependents() {}
inline void wait_for_predecessor() {}
inline unsigned __activemask() { return 0xffffffffu; }
inline void __syncthreads() { block->all.arrive_and_wait(); }

// The value of lane `source` of this warp; of this lane itself where there is no such thread.
inline float exchange(float value, unsigned source) {
  const unsigned warp = threadIdx.x / 32, at = warp * 32 + source;
  block->lanes[threadIdx.x] = value;
  block->warps[warp]->arrive_and_wait();
  const float found = source < 32 && at < block->lanes.size() ? block->lanes[at] : value;
  block->warps[warp]->arrive_and_wait();
  return found;
}

inline float __shfl_down_sync(unsigned, float value, unsigned by, int) {
  return exchange(value, threadIdx.x % 32 + by);
}

inline float __shfl_sync(unsigned, float value, unsigned lane, int) {
  return exchange(value, lane % 32);
}

// Run `kernel` on a grid. A thread that returns early no longer takes part in any barrier.
template <class Kernel>
void launch(int grid_x, int grid_y, int threads, Kernel kernel) {
  for (int i = 0; i < grid_x * grid_y; ++i) {
    Block shared(threads);
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        block = &shared;
        blockIdx = {static_cast<unsigned>(i % grid_x), static_cast<unsigned>(i / grid_x), 0};
        threadIdx = {static_cast<unsigned>(t), 0, 0};
        kernel();
        shared.all.arrive_and_drop();
        shared.warps[t / 32]->arrive_and_drop();
      });
    }
    for (std::thread& one : running) {
      one.join();
    }
  }
}
