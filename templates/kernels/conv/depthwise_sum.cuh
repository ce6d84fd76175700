// Sums of the parts (split-K) of a depthwise filter gradient, in a fixed order and in fp64.
#pragma once

#include "device.cuh"

namespace mbc {

// Eight elements for each block; 32 threads share the parts of each element.
static __global__ void depthwise_sum(const float* __restrict__ partial, float* __restrict__ dw, int64_t elements,
                              int64_t parts, bool accumulate) {
  __shared__ double shared[32][8];
  const int64_t e = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x;
  double sum = 0.0;
  if (e < elements)
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += 32) sum += static_cast<double>(partial[part * elements + e]);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || e >= elements) return;
  for (int i = 1; i < 32; ++i) sum += shared[i][threadIdx.x];
  dw[e] = static_cast<float>(sum + (accumulate ? static_cast<double>(dw[e]) : 0.0));
}

}  // namespace mbc
