// Common parts of fused kernels of batch normalization and ReLU: residual sums, gradients through ReLU, and sources
// that recompute ReLU's output.
#pragma once

#include "batch_norm.cuh"
#include "batch_norm_arguments.h"
#include "batch_norm_relu_arguments.h"

namespace mbc {

struct NormalizeAddRelu {
  Normalize normalize;
  using Channel = Normalize::Channel;
  __device__ Channel load(int64_t c) const { return normalize.load(c); }
  __device__ float operator()(const Channel& channel, float x, float r) const {
    return relu(normalize(channel, x, 0.0f) + r);
  }
};

struct NormalizeTwiceAddRelu {
  Normalize one, two;
  struct Channel {
    Normalize::Channel one, two;
  };
  __device__ Channel load(int64_t c) const { return {one.load(c), two.load(c)}; }
  __device__ float operator()(const Channel& channel, float x, float z) const {
    return relu(one(channel.one, x, 0.0f) + two(channel.two, z, 0.0f));
  }
};

// The gradient through an activation by its recomputed input z: ReLU by the value as it would be stored,
template <typename T>
struct ThroughRelu {
  __device__ static float gradient(float z, float dy) { return z > ROUNDS_TO_ZERO<T> ? dy : 0.0f; }
};
// and other activations by a function of z and dy.
template <typename Backward>
struct ThroughInput {
  __device__ static float gradient(float z, float dy) { return Backward{}(z, dy); }
};

// dx from x and the gradient of the activation's output, which is recomputed.
template <typename Through>
struct NormalizeActivationBackward {
  Normalize forward;
  NormalizeBackward backward;
  struct Channel {
    float mean, scale, shift;  // forward; backward has the same mean and scale
    float slope, lift;
  };
  struct Prepared : NormalizeBackward::Prepared {
    float beta;
  };
  __device__ float beta(int64_t c) const { return forward.beta ? forward.beta[c] : 0.0f; }
  __device__ Prepared prepare(int64_t c) const { return {backward.prepare(c), beta(c)}; }
  __device__ Channel with_sums(const Prepared& prepared, float dg, float db) const {
    return with(backward.with_sums(prepared, dg, db), prepared.beta);
  }
  __device__ Channel load(int64_t c) const {
    const float shift = beta(c);
    return with(backward.load(c), shift);
  }
  __device__ static Channel with(const NormalizeBackward::Channel& b, float beta) {
    return {b.mean, b.scale, beta, b.slope, b.shift};
  }
  __device__ float operator()(const Channel& c, float x, float dy) const {
    const float z = forward({c.mean, c.scale, c.shift}, x, 0.0f);
    return backward({c.mean, c.scale, c.slope, c.lift}, x, Through::gradient(z, dy));
  }
};
template <typename T>
using NormalizeReluBackward = NormalizeActivationBackward<ThroughRelu<T>>;

// The reductions over x and the gradient of the activation's output, which is recomputed.
template <typename Through>
struct BnActivationBackwardReduction : BnBackwardReduction {
  Normalize forward;
  using Channel = Normalize::Channel;

  BnActivationBackwardReduction(const BnBackwardReduction& sums, const Normalize& normalize)
      : BnBackwardReduction(sums), forward(normalize) {}
  __device__ Channel load(int64_t c) const { return forward.load(c); }
  template <int K>
  __device__ void push(State& state, const Channel& channel, const float (&x)[K], const float (&dy)[K]) const {
    float d[K];
#pragma unroll
    for (int k = 0; k < K; ++k) d[k] = Through::gradient(forward(channel, x[k], 0.0f), dy[k]);
    BnBackwardReduction::push<K>(state, channel.mean, x, d);
  }
};
template <typename T>
using BnReluBackwardReduction = BnActivationBackwardReduction<ThroughRelu<T>>;

__device__ inline float mean_of(const Normalize::Channel& channel) { return channel.mean; }
__device__ inline float mean_of(const NormalizeTwiceAddRelu::Channel& channel) { return channel.one.mean; }

// The reductions, if the source needs the channel constants of F to recompute ReLU's output from x.
template <typename F>
struct RematReduction : BnBackwardReduction {
  F f;
  using Channel = typename F::Channel;

  RematReduction(const BnBackwardReduction& sums, const F& f_) : BnBackwardReduction(sums), f(f_) {}
  __device__ Channel load(int64_t c) const { return f.load(c); }
  template <int K>
  __device__ void push(State& state, const Channel& channel, const float (&x)[K], const float (&d)[K]) const {
    BnBackwardReduction::push<K>(state, mean_of(channel), x, d);
  }
};

// ReLU's backward pass by its output,
template <typename T>
struct ReluByOutput {
  template <int N>
  using Fetched = Held<T, N>;
  const T* y;

  bool vectorizable() const { return aligned(y, 16); }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const { return hold<N>(y + at); }
  template <int N>
  __device__ static bool passes(const Fetched<N>& y, int j) { return to_float(y[j]) > 0.0f; }
};

// or by its bit mask, channels last.
struct ReluByMask {
  template <int N>
  using Fetched = uint32_t;
  const uint8_t* relu_mask;

  bool vectorizable() const { return true; }
  template <int N>
  __device__ uint32_t fetch(int64_t at) const {
    const auto index = static_cast<uint64_t>(at);
    return uint32_t{relu_mask[index / 8]} >> index % 8;
  }
  template <int N>
  __device__ static bool passes(uint32_t bits, int j) { return bits >> j & 1; }
};

// A source: the gradient through ReLU, which is stored as well. ADD: `addend` is added to dy first. TWO: `x` is the
// second operand of the reduction.
template <typename T, bool ADD, bool TWO, typename Relu = ReluByOutput<T>>
struct ReluBackwardSource {
  static constexpr int OPERANDS = 2 + ADD + TWO;
  Relu relu;
  const T *dy, *addend, *x;
  T* d;

  template <int N>
  struct Fetched {
    typename Relu::template Fetched<N> relu;
    Held<T, N> d, addend, x;
  };
  bool vectorizable() const {
    return relu.vectorizable() && aligned(dy, 16) && aligned(addend, 16) && aligned(x, 16) && aligned(d, 16);
  }
  template <int N>
  __device__ Fetched<N> fetch(int64_t at) const {
    Fetched<N> f;
    f.relu = relu.template fetch<N>(at);
    f.d = hold<N>(dy + at);
    if constexpr (ADD) f.addend = hold<N>(addend + at);
    if constexpr (TWO) f.x = hold<N>(x + at);
    return f;
  }
  // In fp32, because reductions are over the gradient before it is rounded.
  template <int N>
  __device__ float gradient(const Fetched<N>& f, int j) const {
    float value = to_float(f.d[j]);
    if constexpr (ADD) value += to_float(f.addend[j]);
    return Relu::template passes<N>(f.relu, j) ? value : 0.0f;
  }
  template <int N, typename Of>
  __device__ void finish(const Fetched<N>& f, const Of&, int64_t at) const {
    float written[N];
#pragma unroll
    for (int j = 0; j < N; ++j) written[j] = gradient<N>(f, j);
    store_floats(d + at, written);
  }
  template <int N>
  __device__ float first(const Fetched<N>& f, int j) const {
    if constexpr (TWO) return to_float(f.x[j]);
    return gradient<N>(f, j);
  }
  template <int N>
  __device__ float second(const Fetched<N>& f, int j) const {
    return TWO ? gradient<N>(f, j) : 0.0f;
  }
};

// A source: x and the gradient of ReLU's output, which is recomputed from x alone and stored.
template <typename T>
struct RematReluSource : TensorSource<T, true, false> {
  static constexpr int OPERANDS = 3;  // y needs registers, too
  using Memory = TensorSource<T, true, false>;
  T* y;
  NormalizeRelu f;

  RematReluSource(const Operands<T>& x, T* y_, const NormalizeRelu& f_) : Memory{x}, y(y_), f(f_) {}
  bool vectorizable() const { return Memory::vectorizable() && aligned(y, 16); }
  template <int N, typename Of>
  __device__ void finish(const typename Memory::template Fetched<N>& fetched, const Of& of, int64_t at) const {
    float result[N];
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = f(of(j), to_float(fetched.a[j]), 0.0f);
    store_floats(y + at, result);
  }
};

// A source: the gradient through ReLU, by ReLU's output, which is recomputed from x and `residual` and stored. Each
// element of the residual is read before ReLU's output is written: both may be the same memory.
template <typename T, bool ADD, typename F>
struct RematAddReluSource : ReluBackwardSource<T, ADD, true> {
  using Stored = ReluBackwardSource<T, ADD, true>;
  T* y_out;
  F f;

  RematAddReluSource(const T* residual, const T* dy, const T* addend, const T* x, T* d, T* y_out_, const F& f_)
      : Stored{{residual}, dy, addend, x, d}, y_out(y_out_), f(f_) {}
  bool vectorizable() const { return Stored::vectorizable() && aligned(y_out, 16); }
  template <int N, typename Of>
  __device__ void finish(typename Stored::template Fetched<N>& fetched, const Of& of, int64_t at) const {
    float y[N];
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = f(of(j), to_float(fetched.x[j]), to_float(fetched.relu[j]));
    fetched.relu = rounded<T>(y);
    store_held(y_out + at, fetched.relu);
    Stored::template finish<N>(fetched, of, at);
  }
};

}  // namespace mbc
