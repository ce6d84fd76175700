// Operands of reductions that come from shared memory: the results of a launch's GEMMs, and other operands, staged
// there by the producer. Each is one operand of a source like those that read memory (see channel_reduce.cuh), so that
// reductions are of the same numbers by the same functions.
#pragma once

#include "batch_norm_relu.cuh"

namespace mbc {

// The GEMMs of a launch: x, which is written, or stays INSIDE; the gradient of it; or both, of which neither is
// written.
enum class Makes { X, X_INSIDE, GRADIENT, BOTH };
template <Makes M>
constexpr bool MAKES_X = M != Makes::GRADIENT;
template <Makes M>
constexpr bool MAKES_GRADIENT = M == Makes::GRADIENT || M == Makes::BOTH;
template <Makes M>
constexpr int GEMMS = MAKES_X<M> + MAKES_GRADIENT<M>;

// What F makes of x and a gradient of it by what channels have.
template <typename T, typename F>
struct Applied : InMemory<T, true, false> {
  using Memory = InMemory<T, true, false>;
  T* made;
  F f;

  Applied(const Operands<T>& x, T* made_, const F& f_) : Memory{x}, made(made_), f(f_) {}
  template <int N, typename Of>
  __device__ void finish(const typename Memory::template Fetched<N>& fetched, const Of& of, int64_t at) const {
    float values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = f(of(j), to_float(fetched.a[j]), to_float(fetched.b[j]));
    store_floats(made + at, values);
  }
};

// What a source reads: tiles of T, results of GEMMs among them, and of bits.
template <typename S>
constexpr int TILES = 1;
template <typename T>
constexpr int TILES<InMemory<T, true, false>> = 2;
template <typename T>
constexpr int TILES<RematX<T>> = 2;
template <typename T, typename F>
constexpr int TILES<Applied<T, F>> = 2;
template <typename T, bool ADD>
constexpr int TILES<Behind<T, ADD, true, ByOutput<T>>> = 3 + ADD;
template <typename T, bool ADD>
constexpr int TILES<Behind<T, ADD, true, ByMask>> = 2 + ADD;
template <typename T, bool ADD, typename F>
constexpr int TILES<RematBehind<T, ADD, F>> = 3 + ADD;
template <typename S>
constexpr bool STAGED_MASK = false;
template <typename T, bool ADD>
constexpr bool STAGED_MASK<Behind<T, ADD, true, ByMask>> = true;
template <Makes M, typename S>
constexpr int STAGED_TILES = TILES<S> - GEMMS<M>;
template <Makes M, typename S>
constexpr bool HAS_STAGED = STAGED_TILES<M, S> > 0 || STAGED_MASK<S>;

// Calls `run` with each pointer of a source to a staged operand.
template <Makes M, typename T, bool TWO, typename Run>
__device__ inline void each_staged(InMemory<T, TWO, false>& source, const Run& run) {
  if constexpr (TWO && !MAKES_X<M>) run(source.x.a);
  if constexpr (TWO && !MAKES_GRADIENT<M>) run(source.x.b);
}
template <Makes M, typename T, bool ADD, typename Relu, typename Run>
__device__ inline void each_staged(Behind<T, ADD, true, Relu>& source, const Run& run) {
  if constexpr (!MAKES_X<M>) run(source.x);
  if constexpr (!MAKES_GRADIENT<M>) run(source.dy);
  if constexpr (ADD) run(source.more);
  if constexpr (std::is_same_v<Relu, ByMask>)
    run(source.relu.relu_mask);
  else
    run(source.relu.y);
}

// The pointers to results of GEMMs.
template <typename T, bool TWO>
__device__ inline const T*& x_of(InMemory<T, TWO, false>& source) {
  return source.x.a;
}
template <typename T, bool ADD, typename Relu>
__device__ inline const T*& x_of(Behind<T, ADD, true, Relu>& source) {
  return source.x;
}
template <typename T, bool TWO>
__device__ inline const T*& gradient_of(InMemory<T, TWO, false>& source) {
  return TWO ? source.x.b : source.x.a;
}
template <typename T, bool ADD, typename Relu>
__device__ inline const T*& gradient_of(Behind<T, ADD, true, Relu>& source) {
  return source.dy;
}

// The result of a GEMM itself, for whoever reads it next. Where a gradient goes through relu on its way to others, they
// read what comes through.
template <Makes M, typename T, bool TWO, typename Fetched>
__device__ inline void write_product(const InMemory<T, TWO, false>&, T* to, const Fetched& fetched) {
  if constexpr (M == Makes::X) store_held(to, fetched.a);
  if constexpr (M == Makes::GRADIENT) store_held(to, TWO ? fetched.b : fetched.a);
}
template <Makes M, typename T, bool ADD, typename Relu, typename Fetched>
__device__ inline void write_product(const Behind<T, ADD, true, Relu>&, T* to, const Fetched& fetched) {
  if constexpr (M == Makes::X) store_held(to, fetched.x);
}

// Bits of an element that is pointed to.
template <typename Element>
constexpr int BITS = std::is_same_v<Element, uint8_t> ? 1 : 8 * sizeof(Element);

// Where nothing is summed up,
struct NoReduction {
  using State = float;
};
// be it that F has to know what channels have.
template <typename F>
struct OfChannels {
  using State = float;
  using Channel = typename F::Channel;
  F f;

  __device__ Channel load(int64_t c) const { return f.load(c); }
};
template <typename R>
constexpr bool SUMMING = true;
template <>
constexpr bool SUMMING<NoReduction> = false;
template <typename F>
constexpr bool SUMMING<OfChannels<F>> = false;

// Reductions of which mean and variance are operands from `mean` on, dgamma and dbeta from `dgamma` on.
inline Sums sums_of(const MbcCall& call, int mean, int dgamma, float eps) {
  float *const first = out<float>(call, dgamma), *const second = out<float>(call, dgamma + 1);
  return {in<float>(call, mean), in<float>(call, mean + 1), first, second, eps, 0};
}

// What a thread reduces of its eight channels.
template <typename R>
struct EightSums {
  typename R::Channel channel[8];
  typename R::Running running[8] = {};
  int32_t count = 0;

  __device__ EightSums(const R& r, int32_t first, bool there) {
#pragma unroll
    for (int j = 0; j < 8; ++j) channel[j] = r.load(there ? first + j : 0);
  }
  template <typename S, typename Fetched>
  __device__ void begin(const R& r, const S& source, const Fetched& first) {
    if (count > 0) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) running[j] = r.begin(source.template first<8>(first, j));
  }
  // And what `source` writes meanwhile, for eight elements from `at` on.
  template <typename S, typename Fetched>
  __device__ void add(const R& r, const S& source, Fetched& fetched, int64_t at) {
    ++count;
    source.template finish<8>(fetched, [&](int j) -> const auto& { return channel[j]; }, at);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a[1] = {source.template first<8>(fetched, j)}, b[1] = {source.template second<8>(fetched, j)};
      r.template push<1>(running[j], channel[j], a, b);
    }
  }
  __device__ void leave(const R& r, typename R::State* found) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) found[j] = r.settle(channel[j], running[j], count);
  }
};
template <>
struct EightSums<NoReduction> {
  __device__ EightSums(const NoReduction&, int32_t, bool) {}
  template <typename S, typename Fetched>
  __device__ void begin(const NoReduction&, const S&, const Fetched&) {}
  template <typename S, typename Fetched>
  __device__ void add(const NoReduction&, const S&, const Fetched&, int64_t) {}
  __device__ void leave(const NoReduction&, const float*) const {}
};
template <typename F>
struct EightSums<OfChannels<F>> {
  using R = OfChannels<F>;
  typename F::Channel channel[8];

  __device__ EightSums(const R& r, int32_t first, bool there) {
#pragma unroll
    for (int j = 0; j < 8; ++j) channel[j] = r.load(there ? first + j : 0);
  }
  template <typename S, typename Fetched>
  __device__ void begin(const R&, const S&, const Fetched&) {}
  template <typename S, typename Fetched>
  __device__ void add(const R&, const S& source, Fetched& fetched, int64_t at) {
    source.template finish<8>(fetched, [&](int j) -> const auto& { return channel[j]; }, at);
  }
  __device__ void leave(const R&, const float*) const {}
};

}  // namespace mbc
