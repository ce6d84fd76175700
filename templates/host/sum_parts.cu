// The sum of parts of equal length, one from each rank, in the order of ranks: the result has the same bits on every
// GPU. Accesses: the parts one after another, the sum. Integers: number of parts, elements of each.
//
// Bytes      every part in once, one out.
// Threads    256 in a grid-stride loop, four elements each: parts begin and end at multiples of 16 bytes.
// Limit      memory bandwidth.

#include "mbc_call.h"

namespace mbc_summing {

struct SumRow {
  int64_t parts;
  int64_t elements;
};

__global__ void sum_parts(const float* parts, float* sum, int64_t count, int64_t elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
    float total = parts[i];
    for (int64_t part = 1; part < count; ++part) total += parts[part * elements + i];
    sum[i] = total;
  }
}

__global__ void sum_parts_of_four(const float4* parts, float4* sum, int64_t count, int64_t quads) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < quads; i += step) {
    float4 total = parts[i];
    for (int64_t part = 1; part < count; ++part) {
      const float4 more = parts[part * quads + i];
      total.x += more.x;
      total.y += more.y;
      total.z += more.z;
      total.w += more.w;
    }
    sum[i] = total;
  }
}

}  // namespace mbc_summing

extern "C" const char* mbc_sum_parts(const MbcCall& call) {
  using namespace mbc_summing;
  constexpr int THREADS = 256;
  constexpr int64_t MOST_BLOCKS = 528;
  const auto& row = *reinterpret_cast<const SumRow*>(call.integers);
  const bool fours = row.elements % 4 == 0;
  const int64_t steps = fours ? row.elements / 4 : row.elements;
  const int64_t wanted = (steps + THREADS - 1) / THREADS;
  const int blocks = static_cast<int>(wanted < MOST_BLOCKS ? wanted : MOST_BLOCKS);
  if (fours)
    sum_parts_of_four<<<blocks, THREADS, 0, call.stream>>>(static_cast<const float4*>(call.pointers[0]),
                                                           static_cast<float4*>(call.pointers[1]), row.parts, steps);
  else
    sum_parts<<<blocks, THREADS, 0, call.stream>>>(static_cast<const float*>(call.pointers[0]),
                                                   static_cast<float*>(call.pointers[1]), row.parts, row.elements);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
