// Mean and variance of a channel, a reduction for channel_reduce.cuh.
//
// A thread uses shifted data, distances from its first element, so that a mean far from zero costs no digits. The
// threads of a block are merged eight at a time by distances from their common mean (Chan, Golub and LeVeque,
// "Algorithms for computing the sample variance", 1983), so that outliers cost no digits either. Parts are added in
// fp64.
#pragma once

#include "channel_reduce.cuh"

namespace mbc {

template <typename T>
struct Statistics {
  const T* x;
  int64_t channel_stride;
  float *mean, *variance;

  // Sums of a thread's distances from its first element, `shift`, and of their squares.
  struct Running {
    float shift, sum, squares;
  };
  // State of `count` elements: the distance of their mean from the channel's first element, and the sum of squared
  // distances from their mean.
  struct State {
    float count, mean, squares;
  };
  // Totals of distances from the channel's first element.
  struct Total {
    double count, sum, squares;
  };
  using Channel = float;  // the channel's first element

  __device__ Channel load(int64_t c) const { return to_float(x[c * channel_stride]); }
  __device__ Running begin(float a) const { return {a, 0.0f, 0.0f}; }
  template <int K>
  __device__ void push(Running& running, Channel, const float (&a)[K], const float (&)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float distance = a[k] - running.shift;
      running.sum += distance;
      running.squares = fmaf(distance, distance, running.squares);
    }
  }
  __device__ State thread_state(Channel first, const Running& running, int64_t count) const {
    if (count == 0) return {};
    const float n = static_cast<float>(count), mean = running.sum * (1.0f / n);
    return {n, running.shift - first + mean, running.squares - running.sum * mean};
  }
  template <typename Each>
  __device__ State combine(unsigned many, Each each) const {
    const float shift = each(0).mean;
    float count = 0.0f, sum = 0.0f;
    for (unsigned i = 0; i < many; ++i) {
      const State one = each(i);
      count += one.count;
      sum = fmaf(one.count, one.mean - shift, sum);
    }
    if (count == 0.0f) return {};
    const float mean = sum / count;  // distance from `shift`
    float squares = 0.0f;
    for (unsigned i = 0; i < many; ++i) {
      const State one = each(i);
      const float distance = one.mean - shift - mean;
      squares += fmaf(one.count * distance, distance, one.squares);
    }
    return {count, shift + mean, squares};
  }
  __device__ Total total(const State& state) const {
    const double count = state.count, mean = state.mean;
    return {count, count * mean, state.squares + count * mean * mean};
  }
  __device__ void add(Total& into, const Total& from) const {
    into.count += from.count;
    into.sum += from.sum;
    into.squares += from.squares;
  }
  using Prior = float;
  __device__ Prior prior(int64_t c) const { return load(c); }
  __device__ void finish(int64_t c, Prior first, const Total& total) const {
    const double distance = total.sum / total.count, square = total.squares / total.count - distance * distance;
    mean[c] = static_cast<float>(first + distance);
    variance[c] = static_cast<float>(square > 0.0 ? square : 0.0);
  }
};

// Statistics of each sample: channel c is channel c % channels of sample c / channels.
template <typename T>
struct SampleStatistics : Statistics<T> {
  int64_t channels, sample_stride;

  __device__ float load(int64_t c) const {
    const int64_t n = c / channels;
    return to_float(this->x[n * sample_stride + (c - n * channels) * this->channel_stride]);
  }
  __device__ float prior(int64_t c) const { return load(c); }
};

// Statistics of the result of the same launch: no element exists beforehand as a common shift, which is 0.
template <typename T>
struct EpilogueStatistics : Statistics<T> {
  __device__ float load(int64_t) const { return 0.0f; }
  __device__ float prior(int64_t) const { return 0.0f; }
};

// Merges what epilogues left in `states` to the statistics of `channels`: those of each sample, or of the batch.
template <typename T, typename States>
const char* merge_statistics(const MbcCall& call, const States& states, int64_t channels, float* mean, float* variance) {
  merge_all_parts(call.stream, states.parts(), channels, states.partial, EpilogueStatistics<T>{{nullptr, 0, mean, variance}});
  return launched();
}

}  // namespace mbc
