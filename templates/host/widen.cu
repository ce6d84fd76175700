// A filter gradient from the operands' type (bf16 or fp16) to fp32: written, or added to the present values.
// Accesses: source, destination.

#include "mbc_call.h"
#include "mbc_types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mbc_widening {

struct WidenRow {
  int64_t type;
  int64_t elements;
  int64_t accumulate;
};

__device__ inline float widened(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widened(__half value) { return __half2float(value); }

template <typename Narrow>
__global__ void widen(const Narrow* source, float* destination, int64_t elements, bool accumulate) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step)
    destination[i] = widened(source[i]) + (accumulate ? destination[i] : 0.0f);
}

}  // namespace mbc_widening

extern "C" const char* mbc_widen(const MbcCall& call) {
  using namespace mbc_widening;
  constexpr int THREADS = 256;
  constexpr int64_t MOST_BLOCKS = 4096;
  const auto& row = *reinterpret_cast<const WidenRow*>(call.integers);
  const int64_t wanted = (row.elements + THREADS - 1) / THREADS;
  const int blocks = static_cast<int>(wanted < MOST_BLOCKS ? wanted : MOST_BLOCKS);
  float* const destination = static_cast<float*>(call.pointers[1]);
  if (row.type == MBC_BF16)
    widen<<<blocks, THREADS, 0, call.stream>>>(static_cast<const __nv_bfloat16*>(call.pointers[0]), destination,
                                               row.elements, row.accumulate != 0);
  else
    widen<<<blocks, THREADS, 0, call.stream>>>(static_cast<const __half*>(call.pointers[0]), destination, row.elements,
                                               row.accumulate != 0);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
