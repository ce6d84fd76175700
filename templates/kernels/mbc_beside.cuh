// What sums over a convolution's result read beside it, where they take both from shared memory.
#pragma once

#include "mbc_fused.cuh"

namespace mbc {

// The gradient through relu, by the activation that is made of the convolution's result and of `beside`, and written,
// too. Where the stored one would be read, `beside` is, and takes its place: both may lie in the same memory.
template <typename T, bool ADD>
struct BehindMade : Behind<T, ADD, false> {
  using Stored = Behind<T, ADD, false>;
  T* y;
  NormalizeAddRelu f;

  BehindMade(const T* beside, const T* dy, const T* more, T* d, T* y_, const NormalizeAddRelu& f_)
      : Stored{{beside}, dy, more, nullptr, d}, y(y_), f(f_) {}
  template <int N, typename Of>
  __device__ void make(
      typename Stored::template Fetched<N>& fetched, const Held<T, N>& x, const Of& of, int64_t at) const {
    float made[N];
#pragma unroll
    for (int j = 0; j < N; ++j) made[j] = f(of(j), to_float(x[j]), to_float(fetched.relu[j]));
    fetched.relu = rounded<T>(made);
    store_held(y + at, fetched.relu);
  }
};
template <typename S>
constexpr bool MAKES_ACTIVATION = false;
template <typename T, bool ADD>
constexpr bool MAKES_ACTIVATION<BehindMade<T, ADD>> = true;

// What is read beside results: tiles of T, and of bits.
template <typename S>
constexpr int TILES_BESIDE = 0;
template <typename T>
constexpr int TILES_BESIDE<InMemory<T, false, false>> = 1;
template <typename T, bool ADD>
constexpr int TILES_BESIDE<Behind<T, ADD, false, ByOutput<T>>> = 2 + ADD;
template <typename T, bool ADD>
constexpr int TILES_BESIDE<Behind<T, ADD, false, BySigns>> = 1 + ADD;
template <typename T, bool ADD>
constexpr int TILES_BESIDE<BehindMade<T, ADD>> = 2 + ADD;
template <typename S>
constexpr bool SIGNS_BESIDE = false;
template <typename T, bool ADD>
constexpr bool SIGNS_BESIDE<Behind<T, ADD, false, BySigns>> = true;

// Calls `run` with each pointer that a source reads from.
template <typename T, typename Run>
__device__ inline void each_operand(InMemory<T, false, false>& source, const Run& run) {
  run(source.x.a);
}
template <typename T, bool ADD, typename Relu, typename Run>
__device__ inline void each_operand(Behind<T, ADD, false, Relu>& source, const Run& run) {
  run(source.dy);
  if constexpr (ADD) run(source.more);
  if constexpr (std::is_same_v<Relu, BySigns>)
    run(source.relu.signs);
  else
    run(source.relu.y);
}
// Bits of an element that is pointed to.
template <typename Element>
constexpr int BITS = std::is_same_v<Element, uint8_t> ? 1 : 8 * sizeof(Element);

// Where nothing is read beside results.
struct NoGradient {
  static constexpr int OPERANDS = 0;
};
template <typename S>
constexpr bool BESIDE = S::OPERANDS > 0;

}  // namespace mbc
