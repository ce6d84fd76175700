// The second kernel of split-K: adds the partial results of blocks.
#pragma once

#include "device.cuh"

namespace mbc {

// Threads of a block, and most threads that share the parts of one element.
constexpr int SUM_THREADS = 512, SUM_SHARERS = 32;

// Partial results in the order of the result. Other orders return -1 for elements that only fill up a tile.
struct SameOrder {
  __device__ int64_t operator()(int64_t element) const { return element; }
};

// Adds `partial`, which is [parts, elements], in fp64: blockDim.y threads add neighbouring parts of an element in order,
// then their sums are added in order. `order` returns where an element is in `dw`.
template <typename Order>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_parts(const float* partial, float* dw, Order order, int64_t elements, int64_t parts, bool accumulate) {
  __shared__ double sums[SUM_THREADS];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t share = (parts + blockDim.y - 1) / blockDim.y, first = threadIdx.y * share;
  const int64_t last = first + share < parts ? first + share : parts;
  double sum = 0.0;
  if (i < elements) {
#pragma unroll 8
    for (int64_t part = first; part < last; ++part) sum += static_cast<double>(partial[part * elements + i]);
  }
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  const int64_t at = threadIdx.y == 0 && i < elements ? order(i) : -1;
  if (at < 0) return;
  double all = accumulate ? static_cast<double>(dw[at]) : 0.0;
  for (unsigned s = 0; s < blockDim.y; ++s) all += sums[s * blockDim.x + threadIdx.x];
  dw[at] = static_cast<float>(all);
}

// The order of additions depends on `parts` only.
template <typename Order = SameOrder>
void add_parts(cudaStream_t stream, const float* partial, float* dw, int64_t elements, int64_t parts, bool accumulate,
               const Order& order = {}) {
  unsigned sharers = 1;
  while (sharers < SUM_SHARERS && 8 * sharers <= parts) sharers *= 2;
  const unsigned across = SUM_THREADS / sharers;
  MBC_LAUNCH(sum_parts<Order>, static_cast<unsigned>(divide_up(elements, across)), dim3(across, sharers), stream, partial,
             dw, order, elements, parts, accumulate);
}

}  // namespace mbc
