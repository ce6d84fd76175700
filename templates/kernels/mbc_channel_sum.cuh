// The gradient of a bias.
#pragma once

#include "mbc_channels.cuh"

namespace mbc {

struct ChannelSum {
  float* sum;
  int64_t accumulate;

  template <typename Real>
  struct State {
    Real sum;
  };
  struct Channel {};

  __device__ Channel load(int64_t) const { return {}; }
  template <int K>
  __device__ void push(State<float>& state, const Channel&, const float (&a)[K], const float (&)[K]) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) sum += a[k];
    state.sum += sum;
  }
  template <typename Real>
  __device__ void merge(State<Real>& into, const State<Real>& from) const { into.sum += from.sum; }
  __device__ State<double> widen(const State<float>& state) const { return {state.sum}; }
  __device__ void finish(int64_t c, const State<double>& state) const {
    sum[c] = static_cast<float>((accumulate ? static_cast<double>(sum[c]) : 0.0) + state.sum);
  }
};

}  // namespace mbc
