// Operands of reductions in shared memory: results of a launch's GEMMs, and operands that the producer stages. The
// sources are those that read global memory (see channel_reduce.cuh) with other pointers, so that reductions of a
// GEMM's result apply the same functions to the same numbers.
#pragma once

#include "batch_norm_relu.cuh"

namespace mbc {

// Results of the GEMMs of a launch: x, stored or not; the gradient of x; or both, neither of which is stored.
enum class GemmResult { X, X_NOT_STORED, GRADIENT, X_AND_GRADIENT };
template <GemmResult M>
constexpr bool COMPUTES_X = M != GemmResult::GRADIENT;
template <GemmResult M>
constexpr bool COMPUTES_GRADIENT = M == GemmResult::GRADIENT || M == GemmResult::X_AND_GRADIENT;
template <GemmResult M>
constexpr int GEMMS = COMPUTES_X<M> + COMPUTES_GRADIENT<M>;

// Stores F(channel, x, gradient of x).
template <typename T, typename F>
struct MapSource : TensorSource<T, true, false> {
  using Memory = TensorSource<T, true, false>;
  T* result;
  F f;

  MapSource(const Operands<T>& x, T* result_, const F& f_) : Memory{x}, result(result_), f(f_) {}
  template <int N, typename Of>
  __device__ void finish(const typename Memory::template Fetched<N>& fetched, const Of& of, int64_t at) const {
    float values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = f(of(j), to_float(fetched.a[j]), to_float(fetched.b[j]));
    store_floats(result + at, values);
  }
};

// Operands of a source: tiles of T, including results of GEMMs, and a tile of a bit mask.
template <typename S>
constexpr int OPERAND_TILES = 1;
template <typename T>
constexpr int OPERAND_TILES<TensorSource<T, true, false>> = 2;
template <typename T, typename F>
constexpr int OPERAND_TILES<MapSource<T, F>> = 2;
template <typename T, bool ADD>
constexpr int OPERAND_TILES<ReluBackwardSource<T, ADD, true, ReluByOutput<T>>> = 3 + ADD;
template <typename T, bool ADD>
constexpr int OPERAND_TILES<ReluBackwardSource<T, ADD, true, ReluByMask>> = 2 + ADD;
template <typename T, bool ADD, typename F>
constexpr int OPERAND_TILES<RematAddReluSource<T, ADD, F>> = 3 + ADD;
template <typename S>
constexpr bool STAGED_MASK = false;
template <typename T, bool ADD>
constexpr bool STAGED_MASK<ReluBackwardSource<T, ADD, true, ReluByMask>> = true;
template <GemmResult M, typename S>
constexpr int STAGED_TILES = OPERAND_TILES<S> - GEMMS<M>;
template <GemmResult M, typename S>
constexpr bool HAS_STAGED = STAGED_TILES<M, S> > 0 || STAGED_MASK<S>;

// Calls `run` with each pointer of a source to a staged operand.
template <GemmResult M, typename T, bool TWO, typename Run>
__host__ __device__ inline void each_staged(TensorSource<T, TWO, false>& source, const Run& run) {
  if constexpr (TWO && !COMPUTES_X<M>) run(source.x.a);
  if constexpr (TWO && !COMPUTES_GRADIENT<M>) run(source.x.b);
}
template <GemmResult M, typename T, bool ADD, typename Relu, typename Run>
__host__ __device__ inline void each_staged(ReluBackwardSource<T, ADD, true, Relu>& source, const Run& run) {
  if constexpr (!COMPUTES_X<M>) run(source.x);
  if constexpr (!COMPUTES_GRADIENT<M>) run(source.dy);
  if constexpr (ADD) run(source.addend);
  if constexpr (std::is_same_v<Relu, ReluByMask>)
    run(source.relu.relu_mask);
  else
    run(source.relu.y);
}

// The pointers to results of GEMMs.
template <typename T, bool TWO>
__device__ inline const T*& x_operand(TensorSource<T, TWO, false>& source) {
  return source.x.a;
}
template <typename T, bool ADD, typename Relu>
__device__ inline const T*& x_operand(ReluBackwardSource<T, ADD, true, Relu>& source) {
  return source.x;
}
template <typename T, bool TWO>
__device__ inline const T*& gradient_operand(TensorSource<T, TWO, false>& source) {
  return TWO ? source.x.b : source.x.a;
}
template <typename T, bool ADD, typename Relu>
__device__ inline const T*& gradient_operand(ReluBackwardSource<T, ADD, true, Relu>& source) {
  return source.dy;
}

// Stores the result of a GEMM itself. A data gradient that goes through ReLU is not stored: other launches read the
// gradient through ReLU.
template <GemmResult M, typename T, bool TWO, typename Fetched>
__device__ inline void store_gemm_result(const TensorSource<T, TWO, false>&, T* to, const Fetched& fetched) {
  if constexpr (M == GemmResult::X) store_held(to, fetched.a);
  if constexpr (M == GemmResult::GRADIENT) store_held(to, TWO ? fetched.b : fetched.a);
}
template <GemmResult M, typename T, bool ADD, typename Relu, typename Fetched>
__device__ inline void store_gemm_result(const ReluBackwardSource<T, ADD, true, Relu>&, T* to, const Fetched& fetched) {
  if constexpr (M == GemmResult::X) store_held(to, fetched.x);
}

// Bits of an element, and how many elements one address stands for.
template <typename Element>
constexpr int BITS = std::is_same_v<Element, uint8_t> ? 1 : 8 * sizeof(Element);
template <typename Element>
constexpr int PACKED = 8 * sizeof(Element) / BITS<Element>;

// Without a reduction,
struct NoReduction {
  using State = float;
  using Channel = float;

  __device__ float load(int64_t) const { return 0.0f; }
};
// or with the constants of channels for F only.
template <typename F>
struct ChannelMap {
  using State = float;
  using Channel = typename F::Channel;
  F f;

  __device__ Channel load(int64_t c) const { return f.load(c); }
};
template <typename R>
constexpr bool REDUCES = true;
template <>
constexpr bool REDUCES<NoReduction> = false;
template <typename F>
constexpr bool REDUCES<ChannelMap<F>> = false;

// Pixels of a thread whose operands are in flight.
template <typename S>
constexpr int PIXELS_AT_ONCE = S::OPERANDS > 2 ? 2 : 4;

// Calls `write(i, fetch(i))` for every ROWS-th pixel i from a thread's pixel `mine` on, in a tile of PIXELS. `left`: pixels
// from `mine` to the image's end. `begin` gets the operands of the first pixel of AT_ONCE before they are written.
template <int PIXELS, int ROWS, int AT_ONCE, typename Fetch, typename Begin, typename Write>
__device__ inline void each_pixel(int32_t left, int32_t mine, const Fetch& fetch, const Begin& begin, const Write& write) {
  if (left > PIXELS - ROWS) {
#pragma unroll
    for (int i = 0; i < PIXELS; i += AT_ONCE * ROWS) {
      decltype(fetch(0)) fetched[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) fetched[k] = fetch(i + k * ROWS);
      begin(fetched[0]);
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) write(i + k * ROWS, fetched[k]);
    }
  } else {
    for (int32_t i = 0; i < min(left, PIXELS - mine); i += ROWS) {
      auto fetched = fetch(i);
      begin(fetched);
      write(i, fetched);
    }
  }
}

// The reductions of a thread over its eight channels.
template <typename R>
struct ThreadReduction {
  typename R::Channel channel[8];
  typename R::Running running[8] = {};
  int32_t count = 0;

  // `load(j)`: the constants of the j-th channel.
  template <typename Load>
  __device__ explicit ThreadReduction(const Load& load) {
#pragma unroll
    for (int j = 0; j < 8; ++j) channel[j] = load(j);
  }
  template <typename S, typename Fetched>
  __device__ void begin(const R& r, const S& source, const Fetched& first) {
    if (count > 0) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) running[j] = r.begin(source.template first<8>(first, j));
  }
  // Reduces eight elements from `at` on; `source` may store values.
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
  __device__ void store_state(const R& r, typename R::State* states) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) states[j] = r.thread_state(channel[j], running[j], count);
  }
};
template <>
struct ThreadReduction<NoReduction> {
  template <typename Load>
  __device__ explicit ThreadReduction(const Load&) {}
  template <typename S, typename Fetched>
  __device__ void begin(const NoReduction&, const S&, const Fetched&) {}
  template <typename S, typename Fetched>
  __device__ void add(const NoReduction&, const S&, const Fetched&, int64_t) {}
  __device__ void store_state(const NoReduction&, const float*) const {}
};
template <typename F>
struct ThreadReduction<ChannelMap<F>> {
  using R = ChannelMap<F>;
  typename F::Channel channel[8];

  // `load(j)`: the constants of the j-th channel.
  template <typename Load>
  __device__ explicit ThreadReduction(const Load& load) {
#pragma unroll
    for (int j = 0; j < 8; ++j) channel[j] = load(j);
  }
  template <typename S, typename Fetched>
  __device__ void begin(const R&, const S&, const Fetched&) {}
  template <typename S, typename Fetched>
  __device__ void add(const R&, const S& source, Fetched& fetched, int64_t at) {
    source.template finish<8>(fetched, [&](int j) -> const auto& { return channel[j]; }, at);
  }
  __device__ void store_state(const R&, const float*) const {}
};

}  // namespace mbc
