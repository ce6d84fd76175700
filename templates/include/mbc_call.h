// Arguments of one launch. Host code (g++) and kernels (nvcc) share this file.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

struct MbcCall {
  void* const* pointers;    // one for each access of the launch, in the plan's order, at the first row of its slice
  const int64_t* integers;  // the launcher's own struct, one int64 for each field
  const double* reals;
  cudaStream_t stream;
  int64_t pointer_count;
  int64_t integer_count;
};

namespace mbc {
// Number of multiprocessors that launches are sized for, if a library runs on a part of a GPU; 0: all.
__attribute__((visibility("hidden"))) inline int64_t multiprocessors_of_part = 0;
}  // namespace mbc

// Returns nullptr, or an error text (static, or valid until the next call of this thread).
using MbcLauncher = const char* (*)(const MbcCall&);
