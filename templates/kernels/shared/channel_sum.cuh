// Biases, and the sum of a channel, a reduction for channel_reduce.cuh: the gradient of a bias.
#pragma once

#include "channel_reduce.cuh"
#include "batch_norm_arguments.h"

namespace mbc {

struct ChannelSum {
  float* sum;
  int64_t accumulate;

  using State = float;
  using Running = float;
  using Total = double;
  struct Channel {};

  __device__ Channel load(int64_t) const { return {}; }
  __device__ float begin(float) const { return 0.0f; }
  template <int K>
  __device__ void push(float& running, const Channel&, const float (&a)[K], const float (&)[K]) const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) sum += a[k];
    running += sum;
  }
  __device__ float thread_state(const Channel&, float running, int64_t) const { return running; }
  template <typename Each>
  __device__ float combine(unsigned many, Each each) const {
    float sum = 0.0f;
    for (unsigned i = 0; i < many; ++i) sum += each(i);
    return sum;
  }
  __device__ double total(float state) const { return state; }
  __device__ void add(double& into, double from) const { into += from; }
  using Prior = float;
  __device__ Prior prior(int64_t c) const { return accumulate ? sum[c] : 0.0f; }
  __device__ void finish(int64_t c, Prior before, double total) const {
    sum[c] = static_cast<float>(static_cast<double>(before) + total);
  }
};

}  // namespace mbc
