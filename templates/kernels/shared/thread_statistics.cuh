// Batch statistics in the epilogue of a convolution whose threads hold several channels each: a partial state for each
// warp.
#pragma once

#include "batch_statistics.cuh"

namespace mbc {

// The statistics of a thread over N channels.
template <typename T, int N>
struct ThreadStatistics {
  using State = typename Statistics<T>::State;
  typename Statistics<T>::Running running[N] = {};
  int32_t count = 0;

  // Must be called before the first element. `element(e)`: that of channel e, as it is stored.
  template <typename Element>
  __device__ void begin(const Element& element) {
#pragma unroll
    for (int e = 0; e < N; ++e) running[e] = Statistics<T>{}.begin(element(e));
  }
  template <typename Element>
  __device__ void push(const Element& element) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float a[1] = {element(e)};
      Statistics<T>{}.template push<1>(running[e], 0.0f, a, a);
    }
    ++count;
  }
  // Merges the states of the threads of a warp that have the same channels, whose lanes differ in the bits from FIRST
  // to LAST. Threads in whose lanes these bits are 0 store their states, of channel e at `to(e)`.
  template <int FIRST, int LAST, typename To>
  __device__ void store(const To& to) const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      State both[2] = {Statistics<T>{}.thread_state(0.0f, running[e], count)};
#pragma unroll
      for (int mask = FIRST; mask <= LAST; mask *= 2) {
        both[1] = {__shfl_xor_sync(0xffffffffu, both[0].count, mask), __shfl_xor_sync(0xffffffffu, both[0].mean, mask),
                   __shfl_xor_sync(0xffffffffu, both[0].squares, mask)};
        both[0] = Statistics<T>{}.combine(2, [&](unsigned i) { return both[i]; });
      }
      if ((lane & (2 * LAST - FIRST)) == 0) *to(e) = both[0];
    }
  }
};

}  // namespace mbc
