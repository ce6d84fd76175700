// Common parts of all kernels: elements, launching, walks over indices.
//
// Conventions. Arithmetic is fp32 whatever the storage type; partial results of blocks are added by a second kernel in
// a fixed order (no atomics), so that equal inputs give equal bits. No launcher allocates or synchronizes: every
// launcher can be captured into a CUDA graph.
#pragma once

#include <cstdint>

#include "elements.cuh"
#include "launch.cuh"

namespace mbc {

inline int32_t narrow(int64_t number) { return static_cast<int32_t>(number); }

// Calls `run` with N or, if the operands cannot be read by vectors of N elements, with 1, as a constant.
template <int N, typename Run>
void by_vectors(bool wide, Run run) {
  if (wide)
    run(std::integral_constant<int, N>());
  else
    run(std::integral_constant<int, 1>());
}

// A flat index split into (outer, middle, inner), advanced by a fixed step without further divisions: three divisions
// for each element would cost more than the memory traffic of the kernels that use it.
struct Steps {
  int64_t inner, middle;  // extents
  int64_t step_inner, step_middle, step_outer;

  Steps(int64_t inner_extent, int64_t middle_extent, int64_t step) : inner(inner_extent), middle(middle_extent) {
    step_inner = step % inner;
    step_middle = step / inner % middle;
    step_outer = step / inner / middle;
  }
};

struct Walk {
  int64_t inner, middle, outer;

  __device__ Walk(const Steps& steps, int64_t start) : inner(start), middle(0), outer(0) {
    if (start < steps.inner) return;
    if (start <= UINT32_MAX && steps.inner * steps.middle <= UINT32_MAX) {  // 32-bit divisions are far cheaper
      const uint32_t extent = static_cast<uint32_t>(steps.inner), rest = static_cast<uint32_t>(start) / extent;
      const uint32_t most = static_cast<uint32_t>(steps.middle);
      inner = static_cast<uint32_t>(start) - rest * extent;
      outer = rest / most;
      middle = rest - static_cast<uint32_t>(outer) * most;
    } else {
      inner = start % steps.inner;
      middle = start / steps.inner % steps.middle;
      outer = start / steps.inner / steps.middle;
    }
  }

  __device__ void advance(const Steps& steps) {
    inner += steps.step_inner;
    middle += steps.step_middle;
    outer += steps.step_outer;
    if (inner >= steps.inner) {
      inner -= steps.inner;
      ++middle;
    }
    if (middle >= steps.middle) {
      middle -= steps.middle;
      ++outer;
    }
  }
};

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// The upper half of a product of 128 bits.
__device__ inline uint64_t mul_hi_u64(uint64_t a, uint64_t b) {
#ifdef MBC_EMULATED
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#else
  return __umul64hi(a, b);
#endif
}

// Division by a number that is known at launch, without a branch: exact for all i whose product with that number is
// below 2^64.
struct Reciprocal {
  uint64_t value = 0;  // reciprocal times 2^64; 0: the divisor is 1

  Reciprocal() = default;
  explicit Reciprocal(int64_t number) : value(UINT64_MAX / static_cast<uint64_t>(number) + 1) {}
  __device__ int64_t operator()(int64_t i) const {
    const auto index = static_cast<uint64_t>(i);
    return static_cast<int64_t>(value == 0 ? index : mul_hi_u64(index, value));
  }
};

// A slice of the channels of a wider tensor, read in place: adjacent elements, then `gap` elements of other channels.
struct Slice {
  Reciprocal adjacent;
  int64_t gap = 0;

  Slice() = default;
  // `channels` channels out of `all`.
  Slice(int64_t layout, int64_t channels, int64_t all, int64_t inner) {
    const bool last = layout == MBC_CHANNELS_LAST;
    adjacent = Reciprocal(last ? channels : channels * inner);
    gap = (all - channels) * (last ? 1 : inner);
  }
  // The offset of the i-th element from the slice's first element.
  __device__ int64_t operator()(int64_t i) const { return i + adjacent(i) * gap; }
};

// Threads of a block over [rows, columns] with adjacent columns in memory: as many along the columns as are useful.
struct Tiling {
  unsigned threads_x;    // threads along the columns, a power of two up to 32
  unsigned columns;  // blocks that cover the columns
  unsigned threads_y() const { return THREADS / threads_x; }

  explicit Tiling(int64_t column_count) : threads_x(32) {
    while (threads_x > 1 && threads_x / 2 >= column_count) threads_x /= 2;
    columns = static_cast<unsigned>(divide_up(column_count, threads_x));
  }
};

// A division of 32 bits where it suffices.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  return a <= UINT32_MAX && b <= UINT32_MAX ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

}  // namespace mbc
