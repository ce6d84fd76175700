// The second kernel of split-K: adds the partial results of blocks.
#pragma once

#include "device.cuh"

namespace mbc {

// Adds `partial`, which is [parts, elements], in order and in fp64.
static __global__ void add_parts(const float* partial, float* dw, int64_t elements, int64_t parts, bool accumulate) {
  for (int64_t i = thread_index(); i < elements; i += thread_count()) {
    double sum = accumulate ? static_cast<double>(dw[i]) : 0.0;
    for (int64_t part = 0; part < parts; ++part) sum += static_cast<double>(partial[part * elements + i]);
    dw[i] = static_cast<float>(sum);
  }
}

}  // namespace mbc
