// Threads of a block that share a reduction: adjacent threads if the reduced elements are adjacent in memory; otherwise
// adjacent threads have adjacent results.
#pragma once

#include "strided.cuh"

namespace mbc {

// The remaining axes, with two offsets for each result, and the reduced axes.
struct Reduction {
  Strided<2> left;
  Strided<1> reduced;
  int64_t results, terms;
  int lanes;
  bool adjacent;

  unsigned blocks() const { return static_cast<unsigned>(divide_up(results, THREADS / lanes)); }
};

struct Lane {
  int lane, lanes, first, stride;
  int64_t result;

  __device__ explicit Lane(const Reduction& r) : lanes(r.lanes) {
    const int per_block = THREADS / r.lanes, thread = threadIdx.x;
    lane = r.adjacent ? thread % r.lanes : thread / per_block;
    const int own = r.adjacent ? thread / r.lanes : thread % per_block;
    stride = r.adjacent ? 1 : per_block;
    first = r.adjacent ? own * r.lanes : own;
    result = static_cast<int64_t>(blockIdx.x) * per_block + own;
  }
  // Combines the values of all lanes in a fixed order, that of a binary tree; every lane gets the result. `shared`: one
  // float for each thread. All threads of the block must call it.
  template <typename F>
  __device__ float combine(float* shared, float value, F f) const {
    if (stride == 1 && lanes <= 32) {
      for (int half = lanes / 2; half > 0; half /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, half);
        value = lane & half ? f(other, value) : f(value, other);
      }
      return value;
    }
    __syncthreads();
    shared[first + lane * stride] = value;
    for (int half = lanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) shared[first + lane * stride] = f(shared[first + lane * stride], shared[first + (lane + half) * stride]);
    }
    __syncthreads();
    return shared[first];
  }
};

struct AddUp {
  __device__ float operator()(float a, float b) const { return a + b; }
};
// NaN is larger than everything.
struct LargerOf {
  __device__ float operator()(float a, float b) const { return a != a || a > b ? a : b; }
};

}  // namespace mbc
