// What sums have of a product that they take from shared memory: it is one operand of a source like those that read
// memory (see mbc_channel_reduce.cuh), the others lie beside it. So sums are of the same numbers by the same functions.
//
// Forward, the product is what the sums are over, made again; BACKWARD it is the gradient.
#pragma once

#include "mbc_fused.cuh"

namespace mbc {

// x and a gradient of it, where x is the product and written nowhere.
template <typename T>
struct Inside : InMemory<T, true, false> {
  explicit Inside(const T* gradient) : InMemory<T, true, false>{{nullptr, gradient}} {}
};

// What F makes of the two by what channels have takes the place of the product.
template <typename T, typename F>
struct Applied : Inside<T> {
  T* made;
  F f;

  Applied(const T* gradient, T* made_, const F& f_) : Inside<T>(gradient), made(made_), f(f_) {}
  template <int N, typename Of>
  __device__ void finish(const typename Inside<T>::template Fetched<N>& fetched, const Of& of, int64_t at) const {
    float values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = f(of(j), to_float(fetched.a[j]), to_float(fetched.b[j]));
    store_floats(made + at, values);
  }
};

// What is read beside results: tiles of T, and of bits.
template <typename S>
constexpr int TILES_BESIDE = 0;
template <typename T>
constexpr int TILES_BESIDE<InMemory<T, true, false>> = 1;
template <typename T>
constexpr int TILES_BESIDE<AlongX<T>> = 1;
template <typename T>
constexpr int TILES_BESIDE<Inside<T>> = 1;
template <typename T, typename F>
constexpr int TILES_BESIDE<Applied<T, F>> = 1;
template <typename T, bool ADD>
constexpr int TILES_BESIDE<Behind<T, ADD, true, ByOutput<T>>> = 2 + ADD;
template <typename T, bool ADD>
constexpr int TILES_BESIDE<Behind<T, ADD, true, BySigns>> = 1 + ADD;
template <typename T, bool ADD, typename F>
constexpr int TILES_BESIDE<AlongBehind<T, ADD, F>> = 2 + ADD;
template <typename S>
constexpr bool BESIDE = TILES_BESIDE<S> > 0;
template <typename S>
constexpr bool SIGNS_BESIDE = false;
template <typename T, bool ADD>
constexpr bool SIGNS_BESIDE<Behind<T, ADD, true, BySigns>> = true;

// Calls `run` with each pointer that a source reads from beside the product.
template <bool BACKWARD, typename T, bool TWO, typename Run>
__device__ inline void each_beside(InMemory<T, TWO, false>& source, const Run& run) {
  if constexpr (TWO) run(BACKWARD ? source.x.a : source.x.b);
}
template <bool BACKWARD, typename T, bool ADD, typename Relu, typename Run>
__device__ inline void each_beside(Behind<T, ADD, true, Relu>& source, const Run& run) {
  run(BACKWARD ? source.x : source.dy);
  if constexpr (ADD) run(source.more);
  if constexpr (std::is_same_v<Relu, BySigns>)
    run(source.relu.signs);
  else
    run(source.relu.y);
}

// The pointer to the product.
template <bool BACKWARD, typename T, bool TWO>
__device__ inline const T*& product_of(InMemory<T, TWO, false>& source) {
  return BACKWARD && TWO ? source.x.b : source.x.a;
}
template <bool BACKWARD, typename T, bool ADD, typename Relu>
__device__ inline const T*& product_of(Behind<T, ADD, true, Relu>& source) {
  return BACKWARD ? source.dy : source.x;
}

// The product itself, for whoever reads it next. Where a gradient goes through relu on its way to others, they read
// what comes through.
template <bool BACKWARD, typename T, bool TWO, typename Fetched>
__device__ inline void write_product(const InMemory<T, TWO, false>&, T* to, const Fetched& fetched) {
  store_held(to, BACKWARD && TWO ? fetched.b : fetched.a);
}
template <bool BACKWARD, typename T, bool ADD, typename Relu, typename Fetched>
__device__ inline void write_product(const Behind<T, ADD, true, Relu>&, T* to, const Fetched& fetched) {
  if constexpr (!BACKWARD) store_held(to, fetched.x);
}
template <bool BACKWARD, typename T, typename Fetched>
__device__ inline void write_product(const Inside<T>&, T*, const Fetched&) {}

// Bits of an element that is pointed to.
template <typename Element>
constexpr int BITS = std::is_same_v<Element, uint8_t> ? 1 : 8 * sizeof(Element);

// Where nothing is summed up,
struct NoSums {
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
constexpr bool SUMMING<NoSums> = false;
template <typename F>
constexpr bool SUMMING<OfChannels<F>> = false;

// What a thread sums up of its eight channels.
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
  // And what `source` writes on the way, for eight elements from `at` on.
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
struct EightSums<NoSums> {
  __device__ EightSums(const NoSums&, int32_t, bool) {}
  template <typename S, typename Fetched>
  __device__ void begin(const NoSums&, const S&, const Fetched&) {}
  template <typename S, typename Fetched>
  __device__ void add(const NoSums&, const S&, const Fetched&, int64_t) {}
  __device__ void leave(const NoSums&, const float*) const {}
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
