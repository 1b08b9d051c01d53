// What PTX instructions mean, on registers of the CPU. `ptx_on_cpu.py` writes the calls.
#pragma once

#include <type_traits>

#define __device__
#include "cuda_on_cpu.h"

// Kinds of 16 bits; registers hold them as integers.
struct Half {};
struct Brain {};

// A result into a register: its bits, or, where the register is wider, its value.
template <class Register, class Value>
void put(Register& reg, Value value) {
  if constexpr (sizeof(Register) == sizeof(Value)) {
    std::memcpy(&reg, &value, sizeof(reg));
  } else {
    static_assert(sizeof(Register) > sizeof(Value), "PTX never narrows on its own");
    reg = value;
  }
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// What an instruction of type T sees of a register; floats may lie in those of 32 bits.
template <class T, class X>
T as(X x) {
  if constexpr (std::is_same_v<T, float> && std::is_same_v<X, uint32_t>) {
    return float_of(x);
  } else {
    return static_cast<T>(x);
  }
}

template <class T, class X>
auto mov(X x) {
  if constexpr (std::is_integral_v<X>) {
    return static_cast<T>(x);
  } else {
    return x;
  }
}

template <class T>
T cvta_to_global(T address) {
  return address;
}

#define OF_TWO(name, expression)                     \
  template <class T, class A, class B>               \
  auto name(A left, B right) {                       \
    const T a = as<T>(left), b = as<T>(right);       \
    return expression;                               \
  }
OF_TWO(add, static_cast<T>(a + b))
OF_TWO(add_rn, static_cast<T>(a + b))
OF_TWO(sub, static_cast<T>(a - b))
OF_TWO(sub_rn, static_cast<T>(a - b))
OF_TWO(mul_rn, static_cast<T>(a * b))
OF_TWO(div_rn, static_cast<T>(a / b))
OF_TWO(mul_lo, static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)))
OF_TWO(and_, static_cast<T>(a & b))
OF_TWO(or_, static_cast<T>(a | b))
OF_TWO(xor_, static_cast<T>(a ^ b))
OF_TWO(min, a < b ? a : b)
OF_TWO(max, a > b ? a : b)
OF_TWO(setp_lt, a < b)
OF_TWO(setp_le, a <= b)
OF_TWO(setp_gt, a > b)
OF_TWO(setp_ge, a >= b)
OF_TWO(setp_eq, a == b)
OF_TWO(setp_ne, a != b)
#undef OF_TWO

template <class T, class A, class B>
auto mul_wide(A a, B b) {
  using Word = std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>;
  using Whole = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  using Wide = std::conditional_t<sizeof(T) == 2, Word, Whole>;
  return static_cast<Wide>(static_cast<Wide>(static_cast<T>(a)) *
                           static_cast<Wide>(static_cast<T>(b)));
}

template <class T, class A, class B, class C>
T mad_lo(A a, B b, C c) {
  return add<T>(mul_lo<T>(a, b), c);
}

template <class T, class A, class B, class C>
float fma_rn(A a, B b, C c) {
  return std::fma(as<T>(a), as<T>(b), as<T>(c));
}

template <class T, class A>
T neg(A a) {
  return static_cast<T>(-as<T>(a));
}

template <class T, class A>
T not_(A a) {
  return std::is_same_v<T, bool> ? !a : static_cast<T>(~static_cast<T>(a));
}

template <class T, class A>
T shl(A a, unsigned by) {
  return by < 8 * sizeof(T) ? static_cast<T>(static_cast<T>(a) << by) : T{};
}

template <class T, class A>
T shr(A a, unsigned by) {
  return static_cast<T>(static_cast<T>(a) >> (by < 8 * sizeof(T) ? by : 8 * sizeof(T) - 1));
}

template <class T, class A, class B>
T selp(A a, B b, bool first) {
  return first ? as<T>(a) : as<T>(b);
}

// Bytes of a (0 to 3) and b (4 to 7), as the nibbles of `select` say.
template <class T>
uint32_t prmt(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  }
  return result;
}

// Two registers as one: the first is the low half.
inline uint32_t pair_of(uint16_t low, uint16_t high) {
  return static_cast<uint32_t>(high) << 16 | low;
}

// The halves of a, unsigned, times the first two bytes of b.
template <class A, class B>
uint32_t dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(std::is_unsigned_v<A> && std::is_unsigned_v<B>);
  return c + (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF);
}

template <class T>
uint32_t bfi(uint32_t field, uint32_t into, uint32_t at, uint32_t length) {
  const uint32_t mask = ((1ull << length) - 1) << at;
  return (into & ~mask) | (field << at & mask);
}

template <class To, class From, class X>
auto cvt(X x) {
  if constexpr (std::is_same_v<From, Half>) {
    return static_cast<float>(__half{x});
  } else if constexpr (std::is_same_v<From, Brain>) {
    return static_cast<float>(__nv_bfloat16{x});
  } else {
    return static_cast<To>(as<From>(x));
  }
}

template <class To, class From, class X>
To cvt_rn(X x) {
  return static_cast<To>(as<From>(x));
}

template <class To, class From, class X>
float cvt_rni(X x) {
  return std::nearbyint(as<From>(x));
}

template <class To, class From, class X>
To cvt_rzi(X x) {
  return static_cast<To>(as<From>(x));
}

template <class T>
uint32_t shfl_sync_bfly(uint32_t value, uint32_t by, uint32_t, uint32_t) {
  uint32_t found;
  const float other = exchange(float_of(value), threadIdx.x % 32 ^ by);
  std::memcpy(&found, &other, 4);
  return found;
}

inline void bar_sync(int) { __syncthreads(); }

// Neighbouring values; like a GPU, it stops at an address that is not aligned for all of them.
template <class T>
T* aligned(char* at, int count) {
  if (reinterpret_cast<uintptr_t>(at) % (count * sizeof(T)) != 0) {
    std::abort();
  }
  return reinterpret_cast<T*>(at);
}

template <class T, class... Registers>
void load(char* at, Registers&... registers) {
  const T* next = aligned<T>(at, sizeof...(registers));
  (put(registers, *next++), ...);
}

template <class T, class... Registers>
void store(char* at, Registers... registers) {
  T* next = aligned<T>(at, sizeof...(registers));
  ((*next++ = registers), ...);
}
