// Sums of squares in fp64, which no finite element overflows, in an order that depends only on sizes.
#pragma once

#include "device.cuh"
#include "launch.cuh"

namespace mbc {

// Adds the values of a block's threads in a fixed order; thread 0 gets the sum.
__device__ inline double sum_of_block(double value) {
  __shared__ double shared[THREADS];
  shared[threadIdx.x] = value;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  return shared[0];
}

__device__ inline double square(float value) { return static_cast<double>(value) * static_cast<double>(value); }

}  // namespace mbc
