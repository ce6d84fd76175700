// Elements of tensors: their types, vectors of them, and how to read, round and write them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mbc_types.h"

// The working type of the plan; fp32 is always compiled as well.
#ifndef MBC_WORKING
#define MBC_WORKING 0
#endif

#if MBC_WORKING == 1
using MbcWorking = __nv_bfloat16;
#elif MBC_WORKING == 2
using MbcWorking = __half;
#else
using MbcWorking = float;
#endif

// Runs the statement with `T` as the element type of `code`; for other codes the launcher returns an error text.
#if MBC_WORKING == 0
#define MBC_FOR_TYPE(code, T, ...)                                        \
  do {                                                                    \
    if ((code) != MBC_FP32) return "element type is not in this library"; \
    using T = float;                                                      \
    __VA_ARGS__                                                           \
  } while (0)
#else
#define MBC_FOR_TYPE(code, T, ...)                   \
  do {                                               \
    if ((code) == MBC_FP32) {                        \
      using T = float;                               \
      __VA_ARGS__                                    \
    } else if ((code) == MBC_WORKING) {              \
      using T = MbcWorking;                          \
      __VA_ARGS__                                    \
    } else {                                         \
      return "element type is not in this library";  \
    }                                                \
  } while (0)
#endif

namespace mbc {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half(x); }

// N elements that are read or written as one vector.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <int N, typename T>
__device__ inline Vec<T, N> load(const T* at) { return *reinterpret_cast<const Vec<T, N>*>(at); }

template <int N, typename T>
__device__ inline void store(T* at, const Vec<T, N>& value) { *reinterpret_cast<Vec<T, N>*>(at) = value; }

template <int BYTES>
using Bits = std::conditional_t<BYTES == 1, uint8_t, std::conditional_t<BYTES == 2, uint16_t, uint32_t>>;

// The i-th element of a word.
template <typename T, typename Word>
__device__ inline T element_of(Word word, int i) {
  const auto bits = static_cast<Bits<sizeof(T)>>(word >> i * 8 * sizeof(T));
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// A vector in registers across a branch or a barrier, as 32-bit words: small elements would take a register each.
template <typename T, int N>
struct alignas(sizeof(T) * N) Held {
  using Word = std::conditional_t<sizeof(T) * N % 4 == 0, uint32_t, Bits<sizeof(T)>>;
  static constexpr int IN_WORD = sizeof(Word) / sizeof(T), WORDS = N / IN_WORD;
  Word words[WORDS];

  __device__ T operator[](int j) const { return element_of<T>(words[j / IN_WORD], j % IN_WORD); }
};

template <int N, typename T>
__device__ inline Held<T, N> hold(const T* at) { return *reinterpret_cast<const Held<T, N>*>(at); }

// A vector whose j-th element is element(j). Word by word: the compiler would store small elements one by one.
template <typename T, int N, typename Element>
__device__ inline Held<T, N> hold_each(Element element) {
  using Result = Held<T, N>;
  Result result;
#pragma unroll
  for (int w = 0; w < Result::WORDS; ++w) {
    typename Result::Word word = 0;
#pragma unroll
    for (int i = 0; i < Result::IN_WORD; ++i) {
      const T value = element(w * Result::IN_WORD + i);
      Bits<sizeof(T)> bits;
      memcpy(&bits, &value, sizeof(T));
      word |= static_cast<typename Result::Word>(bits) << i * 8 * sizeof(T);
    }
    result.words[w] = word;
  }
  return result;
}

// The elements of one word.
template <typename T>
__device__ inline uint32_t rounded_word(const float* x) {
  uint32_t word = 0;
#ifndef MBC_EMULATED
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
#endif
  constexpr int COUNT = sizeof(word) / sizeof(T);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const T value = from_float<T>(x[i]);
    Bits<sizeof(T)> bits;
    memcpy(&bits, &value, sizeof(bits));
    word |= uint32_t{bits} << i * 8 * sizeof(T);
  }
  return word;
}

// The values as they would be after storing, rounded to T.
template <typename T, int N>
__device__ inline Held<T, N> rounded(const float (&x)[N]) {
  using Result = Held<T, N>;
  Result result;
#pragma unroll
  for (int w = 0; w < Result::WORDS; ++w) {
    if constexpr (sizeof(typename Result::Word) == sizeof(uint32_t)) {
      result.words[w] = rounded_word<T>(x + w * Result::IN_WORD);
    } else {
      const T value = from_float<T>(x[w]);
      memcpy(&result.words[w], &value, sizeof(value));
    }
  }
  return result;
}

// Sixteen bytes in one store, which the compiler would otherwise split after a branch.
template <int N, typename T>
__device__ inline void store_floats(T* at, const float (&x)[N]) {
  if constexpr (sizeof(T) * N == sizeof(uint4)) {
    constexpr int COUNT = N / 4;
    const uint4 words{rounded_word<T>(x), rounded_word<T>(x + COUNT), rounded_word<T>(x + 2 * COUNT),
                      rounded_word<T>(x + 3 * COUNT)};
#ifdef MBC_EMULATED
    *reinterpret_cast<uint4*>(at) = words;
#else
    __stwb(reinterpret_cast<uint4*>(at), words);
#endif
  } else {
    Vec<T, N> value;
#pragma unroll
    for (int j = 0; j < N; ++j) value.v[j] = from_float<T>(x[j]);
    store(at, value);
  }
}

// Stores a `Held`.
template <typename T, int N>
__device__ inline void store_held(T* at, const Held<T, N>& value) {
  if constexpr (sizeof(value) == sizeof(uint4)) {
    const uint4 words{value.words[0], value.words[1], value.words[2], value.words[3]};
#ifdef MBC_EMULATED
    *reinterpret_cast<uint4*>(at) = words;
#else
    __stwb(reinterpret_cast<uint4*>(at), words);
#endif
  } else if constexpr (sizeof(value) == sizeof(uint2)) {
    const uint2 words{value.words[0], value.words[1]};
#ifdef MBC_EMULATED
    *reinterpret_cast<uint2*>(at) = words;
#else
    __stwb(reinterpret_cast<uint2*>(at), words);
#endif
  } else {
    *reinterpret_cast<Held<T, N>*>(at) = value;
  }
}

// Elements in 16 bytes.
template <typename T>
constexpr int WIDTH = 16 / static_cast<int>(sizeof(T));

// Keeps loads before this point: the compiler would move each load behind the divisions that come before its first use.
__device__ inline void compiler_fence() {
#ifdef __CUDA_ARCH__
  asm volatile("" ::: "memory");
#endif
}

}  // namespace mbc
