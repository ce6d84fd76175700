// Batch normalization of one element, forward and backward, and the reductions of its backward pass, as functors with
// which maps (channels.cuh) and reductions (channel_reduce.cuh) are instantiated.
#pragma once

#include "channel_reduce.cuh"

namespace mbc {

struct BnBackwardReduction {
  const float *mean, *variance;
  float *dgamma, *dbeta;
  float eps;
  int64_t accumulate;

  struct State {
    float dot, sum;  // sums of dy * (x - mean) and of dy
  };
  struct Total {
    double dot, sum;
  };
  using Running = State;
  using Channel = float;

  __device__ Channel load(int64_t c) const { return mean[c]; }
  __device__ Running begin(float) const { return {}; }
  template <int K>
  __device__ void push(State& state, float mean, const float (&x)[K], const float (&dy)[K]) const {
    float dot = 0.0f, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      dot = fmaf(dy[k], x[k] - mean, dot);
      sum += dy[k];
    }
    state.dot += dot;
    state.sum += sum;
  }
  template <typename Channel>
  __device__ State thread_state(const Channel&, const State& state, int64_t) const { return state; }
  template <typename Each>
  __device__ State combine(unsigned many, Each each) const {
    State all{};
    for (unsigned i = 0; i < many; ++i) {
      const State one = each(i);
      all.dot += one.dot;
      all.sum += one.sum;
    }
    return all;
  }
  __device__ Total total(const State& state) const { return {state.dot, state.sum}; }
  __device__ void add(Total& into, const Total& from) const {
    into.dot += from.dot;
    into.sum += from.sum;
  }
  struct Prior {
    float variance, dgamma, dbeta;
  };
  __device__ Prior prior(int64_t c) const {
    return {variance[c], accumulate ? dgamma[c] : 0.0f, accumulate ? dbeta[c] : 0.0f};
  }
  struct Gradients {
    float dgamma, dbeta;
  };
  __device__ void keep(int64_t c, const Gradients& gradients) const {
    dgamma[c] = gradients.dgamma;
    dbeta[c] = gradients.dbeta;
  }
  __device__ void finish(int64_t c, const Prior& prior, const Total& total) const {
    const double scaled_dot = total.dot / sqrt(static_cast<double>(prior.variance) + eps);
    keep(c, {static_cast<float>(static_cast<double>(prior.dgamma) + scaled_dot),
             static_cast<float>(static_cast<double>(prior.dbeta) + total.sum)});
  }
};

__device__ inline float inverse_deviation(float variance, float eps) { return 1.0f / sqrtf(variance + eps); }

// The largest value that rounds to zero in T: a stored activation is positive if it was larger than this value.
template <typename T>
constexpr float ROUNDS_TO_ZERO = 0.0f;
template <>
constexpr float ROUNDS_TO_ZERO<__half> = 1.0f / (1 << 25);

struct Normalize {
  const float *mean, *variance, *gamma, *beta;  // gamma and beta null: 1 and 0
  float eps;

  struct Channel {
    float mean, scale, shift;
  };
  __device__ Channel load(int64_t c) const {
    const float m = mean[c], v = variance[c], g = gamma ? gamma[c] : 1.0f, b = beta ? beta[c] : 0.0f;
    compiler_fence();
    return of(m, v, g, b);
  }
  __device__ Channel of(float m, float v, float g, float b) const { return {m, g * inverse_deviation(v, eps), b}; }
  __device__ float operator()(const Channel& channel, float x, float) const {
    return fmaf(x - channel.mean, channel.scale, channel.shift);
  }
};

// NaN stays NaN, as in the relu kernel.
__device__ inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

struct NormalizeRelu {
  Normalize normalize;
  using Channel = Normalize::Channel;
  __device__ Channel load(int64_t c) const { return normalize.load(c); }
  __device__ float operator()(const Channel& channel, float x, float) const {
    return relu(normalize(channel, x, 0.0f));
  }
};

struct NormalizeBackward {
  const float *mean, *variance, *dgamma, *dbeta, *gamma;  // gamma null: 1
  float eps, count;

  struct Channel {
    float mean, scale, slope, shift;
  };
  // The part that does not depend on the reductions.
  struct Prepared {
    float mean, inverse, scale;
  };
  __device__ Prepared prepare(float m, float v, float g) const {
    const float inverse = inverse_deviation(v, eps);
    return {m, inverse, g * inverse};
  }
  __device__ Prepared prepare(int64_t c) const {
    const float m = mean[c], v = variance[c], g = gamma ? gamma[c] : 1.0f;
    return prepare(m, v, g);
  }
  __device__ Channel with_sums(const Prepared& prepared, float dg, float db) const {
    return {prepared.mean, prepared.scale, dg * prepared.inverse / count, db / count};
  }
  __device__ Channel load(int64_t c) const {
    const float m = mean[c], v = variance[c], g = gamma ? gamma[c] : 1.0f, dg = dgamma[c], db = dbeta[c];
    compiler_fence();
    return with_sums(prepare(m, v, g), dg, db);
  }
  __device__ float operator()(const Channel& channel, float x, float dy) const {
    return channel.scale * (dy - channel.shift - (x - channel.mean) * channel.slope);
  }
};

inline float eps(const MbcCall& call, int index) { return static_cast<float>(call.reals[index]); }

// Functors of operands by name, which `O` has (`<Source>Operands`).
template <typename O>
Normalize normalize(const O& at, float eps) { return {at.mean, at.variance, at.gamma, at.beta, eps}; }
template <typename O>
Normalize second_normalize(const O& at, float eps) { return {at.mean2, at.variance2, at.gamma2, at.beta2, eps}; }
template <typename O>
NormalizeBackward normalize_backward(const O& at, float eps, int64_t count) {
  return {at.mean, at.variance, at.dgamma, at.dbeta, at.gamma, eps, static_cast<float>(count)};
}
template <typename O>
BnBackwardReduction sums_of(const O& at, float eps, int64_t accumulate = 0) {
  return {at.mean, at.variance, at.dgamma, at.dbeta, eps, accumulate};
}

}  // namespace mbc
